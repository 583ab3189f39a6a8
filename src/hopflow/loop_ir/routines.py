"""Library routines that a program may call: their arguments, results and native code.

A `Call` passes the arrays in the order of `Routine.arrays`, then the `scalars` as i64
expressions, then the `flags` as bool constants. A lowering rule's `Library` passes the
arrays in the order: operands, results, workspace; a result that `overwrites` an operand
is an "inout" array, which starts as a copy of that operand.

Every array is dense and row-major, of the shape that its declaration computes from the
scalars, whatever the shape of the buffer it lies in: a vector of k elements is a matrix
[k, 1] for `gemm`. "f" and "n" arrays of one call share a dtype.

For the native side, which calls Fortran's column-major routines:

- A row-major matrix x[m, n] is in memory the column-major n by m matrix x^T of leading
  dimension n. "Pass x" below means that pointer, those dimensions.
- Leading dimensions are max(1, .); if a result has no elements, return 0 at once.
- Scratch (LAPACK's workspace after a query, pivots, transposed copies) comes from
  malloc and is freed before returning; if it fails, or if a size does not fit in
  LAPACK's 32-bit integers, the status is -1.
- The result of a call is its status: 0, or LAPACK's `info`. If it is not 0, the
  contents of written arrays are undefined.
- Matrix products and sorts are native code of hopflow; large products use several
  threads. Nearly all the rest is Fortran.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes

NUMBERS: Final = (
    dtypes.float32,
    dtypes.float64,
    dtypes.int32,
    dtypes.int64,
    dtypes.uint32,
    dtypes.uint64,
)
"""The dtypes of products of matrices. Integers wrap around."""
NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Reference: TypeAlias = Callable[[Sequence[NDArray], Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Array:
    """An array that a routine takes.

    shape   the extent of each axis: a scalar's name, or "min(m, n)"
    role    "in" is only read; "out" is wholly written and never read; "inout" is read
            and wholly written; "work" is scratch, undefined before and after the call
    dtype   "f" for float32 or float64, "n" for one of `NUMBERS`, "any", "i32" or "i64"
    """

    name: str
    shape: tuple[str, ...]
    role: Literal["in", "out", "inout", "work"]
    dtype: Literal["f", "n", "any", "i32", "i64"] = "f"


@dataclass(frozen=True, slots=True)
class Routine:
    """A library routine. `reference` runs it on NumPy arrays of the declared shapes
    (which it writes in place), with scalars and flags as ints, and returns the status.
    One that is `native` is code of hopflow, which several threads may run at once; the
    others are those of a library that has threads of its own.
    """

    name: str
    arrays: tuple[Array, ...]
    scalars: tuple[str, ...]
    doc: str
    reference: Reference
    flags: tuple[str, ...] = ()
    native: bool = False

    @property
    def reads(self) -> frozenset[int]:
        """The positions of the arrays whose contents before the call matter."""
        return self._positions("in", "inout")

    @property
    def writes(self) -> frozenset[int]:
        """The positions of the arrays that the call overwrites."""
        return self._positions("out", "inout", "work")

    def _positions(self, *roles: str) -> frozenset[int]:
        return frozenset(i for i, a in enumerate(self.arrays) if a.role in roles)

    def shapes(self, scalars: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape of each array for these scalars."""
        values = dict(zip(self.scalars, scalars, strict=True))
        return [tuple(_extent(text, values) for text in a.shape) for a in self.arrays]


def _extent(text: str, scalars: Mapping[str, int]) -> int:
    if text.startswith("min("):
        return min(scalars[name] for name in text[4:-1].split(", "))
    return scalars[text]


_K: Final = "min(m, n)"


# --- matrix products ------------------------------------------------------------------


def _gemm(name: str, a_transposed: bool, b_transposed: bool) -> Routine:
    def reference(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
        a, b, out = arrays
        out[...] = (a.T if a_transposed else a) @ (b.T if b_transposed else b)
        return 0

    a, b = ("a^T" if a_transposed else "a"), ("b^T" if b_transposed else "b")
    return Routine(
        name,
        (
            Array("a", ("k", "m") if a_transposed else ("m", "k"), "in", "n"),
            Array("b", ("n", "k") if b_transposed else ("k", "n"), "in", "n"),
            Array("out", ("m", "n"), "out", "n"),
        ),
        ("m", "n", "k"),
        f"out = {a} @ {b}; zeros if k is 0.",
        reference,
        native=True,
    )


def _run_gemm_windows(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    a, x, offsets, out = arrays
    n = out.shape[1]
    if out.size:
        last = len(x) - n
        starts = np.where((offsets < 0) | (offsets > last), last, offsets)
        out[...] = a @ x[starts[:, None] + np.arange(n)]
    return 0


_GEMM_WINDOWS: Final = Routine(
    "gemm_windows",
    (
        Array("a", ("m", "k"), "in"),
        Array("b", ("length",), "in"),
        Array("offsets", ("k",), "in", "i64"),
        Array("out", ("m", "n"), "out"),
    ),
    ("m", "n", "k", "length"),
    """out = a @ rows, where rows[r] = b[offsets[r]:offsets[r] + n]; zeros if k is 0.

    `length` is at least n. An offset that would lead out of b counts as the last one
    that does not.
    """,
    _run_gemm_windows,
    native=True,
)


# --- LAPACK ---------------------------------------------------------------------------


def _lapack(name: str, like: NDArray) -> Callable[..., Any]:
    from scipy.linalg import get_lapack_funcs

    [function] = get_lapack_funcs((name,), (like,))
    return function


def _fill(*arrays: NDArray) -> None:
    """Write NaN where no result exists, which is no failure, as in JAX."""
    for array in arrays:
        array[...] = np.nan


def _run_potrf(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    [a] = arrays
    if a.size == 0:
        return 0
    factor, info = _lapack("potrf", a)(a, lower=True, clean=True)
    a[...] = factor if info == 0 else np.tril(np.full_like(a, np.nan))
    return 0


_POTRF: Final = Routine(
    "potrf",
    (Array("a", ("n", "n"), "inout"),),
    ("n",),
    """The lower triangular l with l @ l^T = a; above the diagonal, zeros.

    Reads a on and below the diagonal only. A row-major lower triangle is a column-major
    upper one: potrf('U', n, a, n), then zero the row-major strictly upper triangle.
    Of a matrix that is not positive definite, NaN on and below the diagonal.
    """,
    _run_potrf,
)


def _run_getrf(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    a, pivots = arrays
    if a.size == 0:
        return 0
    a[...], pivots[...], _info = _lapack("getrf", a)(a)
    return 0


_GETRF: Final = Routine(
    "getrf",
    (Array("a", ("m", "n"), "inout"), Array("pivots", (_K,), "out", "i32")),
    ("m", "n"),
    """P a = l @ u, packed into a: u on and above the diagonal, l (unit) below it.

    Row i was exchanged with row pivots[i] >= i, in order of i, counted from 0 (LAPACK
    counts from 1: subtract it). The row-major pointer would give an LU of a^T, which is
    another factorisation; so transpose a into scratch (in place if m = n), getrf(m, n,
    scratch, m), and transpose back. A singular matrix has an LU too: a positive `info`
    is no failure, the status is 0.
    """,
    _run_getrf,
)


def _run_gesv(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    a, x = arrays
    if x.size == 0:
        return 0
    _lu, _pivots, solution, info = _lapack("gesv", a)(a, x)
    x[...] = solution
    return int(info)


_GESV: Final = Routine(
    "gesv",
    (Array("a", ("n", "n"), "in"), Array("x", ("n", "k"), "inout")),
    ("n", "k"),
    """x such that a @ x is what x was before.

    Copy a to scratch as it is: a column-major a^T. getrf(n, n, scratch, n) factors it,
    and getrs('T', n, k, scratch, n, pivots, columns, n) solves with its transpose, a.
    `columns` is x transposed into scratch, and back after; for k = 1 it is x itself.
    Status > 0: singular.
    """,
    _run_gesv,
)


def _run_inv(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    [a] = arrays
    if a.size == 0:
        return 0
    lu, pivots, info = _lapack("getrf", a)(a)
    if info == 0:
        a[...], info = _lapack("getri", a)(lu, pivots)
    return int(info)


_INV: Final = Routine(
    "inv",
    (Array("a", ("n", "n"), "inout"),),
    ("n",),
    """The inverse of a.

    The inverse of a^T is that of a, transposed: getrf and getri on a itself, as it is.
    Status > 0: singular.
    """,
    _run_inv,
)


def _qr(name: str, complete: bool) -> Routine:
    def reference(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
        a, q, r = arrays
        q[...], r[...] = np.linalg.qr(a, mode="complete" if complete else "reduced")
        return 0

    columns = "m" if complete else _K
    return Routine(
        name,
        (
            Array("a", ("m", "n"), "in"),
            Array("q", ("m", columns), "out"),
            Array("r", (columns, "n"), "out"),
        ),
        ("m", "n"),
        f"""q with orthonormal columns and upper triangular r: a = q @ r.

        The column-major a^T = r^T q^T is an LQ factorisation, of the same reflectors,
        which needs no transposition. With k = min(m, n) and c = {columns}: copy a to
        scratch w[m, n]; gelqf(n, m, w, n, tau). r[i, j] = w[i, j] for i <= j and i < k,
        else 0. q[i, j] = w[i, j] for j < k (the rest is arbitrary);
        orglq(c, m, k, q, c, tau).
        """,
        reference,
    )


def _run_syevd(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    w, v = arrays
    if not np.isfinite(np.tril(v)).all():
        _fill(w, v)
        return 0
    try:
        w[...], v[...] = np.linalg.eigh(v)
    except np.linalg.LinAlgError:
        _fill(w, v)
    return 0


_SYEVD: Final = Routine(
    "syevd",
    (Array("w", ("n",), "out"), Array("v", ("n", "n"), "inout")),
    ("n",),
    """The eigenvalues w, ascending, and eigenvectors v[:, i] of the symmetric matrix
    that v was before, of which only what is on and below the diagonal is read.

    syevd('V', 'U', n, v, n, w) leaves the eigenvectors in the rows of the row-major v:
    transpose it in place. NaN if it does not converge, or if that half is not finite.
    """,
    _run_syevd,
)


def _run_syevd_values(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    a, w = arrays
    if not np.isfinite(np.tril(a)).all():
        _fill(w)
        return 0
    try:
        w[...] = np.linalg.eigvalsh(a)
    except np.linalg.LinAlgError:
        _fill(w)
    return 0


_SYEVD_VALUES: Final = Routine(
    "syevd_values",
    (Array("a", ("n", "n"), "in"), Array("w", ("n",), "out")),
    ("n",),
    """The eigenvalues w, ascending, of the symmetric matrix a (on and below the
    diagonal). syevd('N', 'U', n, copy of a, n, w). NaN if it does not converge,
    or if that half is not finite.
    """,
    _run_syevd_values,
)


def _svd(name: str, full: bool) -> Routine:
    def reference(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
        a, u, s, vt = arrays
        try:
            u[...], s[...], vt[...] = np.linalg.svd(a, full_matrices=full)
        except np.linalg.LinAlgError:
            _fill(u, s, vt)
        return 0

    job, rows, columns = ("A", "n", "m") if full else ("S", _K, _K)
    return Routine(
        name,
        (
            Array("a", ("m", "n"), "in"),
            Array("u", ("m", columns), "out"),
            Array("s", (_K,), "out"),
            Array("vt", (rows, "n"), "out"),
        ),
        ("m", "n"),
        f"""a = u @ diag(s) @ vt, with s descending.

        The column-major a^T = vt^T diag(s) u^T, whose factors are in memory vt and u:
        gesdd('{job}', n, m, copy of a, n, s, vt, n, u, {columns}), the outputs swapped
        and nothing transposed. NaN if it does not converge, or if a is not finite.
        """,
        reference,
    )


def _run_gesdd_values(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    a, s = arrays
    try:
        s[...] = np.linalg.svd(a, compute_uv=False)
    except np.linalg.LinAlgError:
        _fill(s)
    return 0


_GESDD_VALUES: Final = Routine(
    "gesdd_values",
    (Array("a", ("m", "n"), "in"), Array("s", (_K,), "out")),
    ("m", "n"),
    """The singular values of a, descending: gesdd('N', n, m, copy of a, n, s, ...).
    NaN if it does not converge, or if a is not finite.
    """,
    _run_gesdd_values,
)


def _run_trsm(arrays: Sequence[NDArray], scalars: Sequence[int]) -> int:
    t, x = arrays
    _, _, upper, transposed, unit = scalars
    matrix = (np.triu if upper else np.tril)(t)
    if unit:
        np.fill_diagonal(matrix, 1)
    matrix, upper = (matrix.T, not upper) if transposed else (matrix, bool(upper))
    order = range(len(t))
    with np.errstate(all="ignore"):
        for i in reversed(order) if upper else order:
            done = slice(i + 1, None) if upper else slice(i)
            x[i] = (x[i] - matrix[i, done] @ x[done]) / matrix[i, i]
    return 0


_TRSM: Final = Routine(
    "trsm",
    (Array("t", ("n", "n"), "in"), Array("x", ("n", "k"), "inout")),
    ("n", "k"),
    """x such that t @ x (or t^T @ x, if `transposed`) is what x was before.

    t is lower triangular, or upper if `upper`; the other half is not read, nor is the
    diagonal if `unit`: it counts as ones. A zero on the diagonal gives infinities; the
    status is 0. In column-major terms x^T t^T: trsm('R', 'L' if upper else 'U', 'T' if
    transposed else 'N', 'U' if unit else 'N', k, n, 1.0, t, n, x, k).
    """,
    _run_trsm,
    ("upper", "transposed", "unit"),
)


# --- sorting --------------------------------------------------------------------------


def _run_argsort(arrays: Sequence[NDArray], scalars: Sequence[int]) -> int:
    keys, out = arrays[:2]
    if keys.dtype.name == "bfloat16":
        keys = keys.astype(np.float32)
    if scalars[1]:
        out[...] = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
    else:
        out[...] = np.argsort(keys, kind="stable")
    return 0


def _run_sort(arrays: Sequence[NDArray], scalars: Sequence[int]) -> int:
    keys, out = arrays[:2]
    order = np.empty(len(keys), np.int64)
    _run_argsort((keys, order), scalars)
    out[...] = keys[order]
    return 0


# The sort codes of keys, of at most 64 bits each.
_CODES: Final = (
    Array("codes", ("n",), "work", "i64"),
    Array("sorted_codes", ("n",), "work", "i64"),
)
_ARGSORT: Final = Routine(
    "argsort",
    (
        Array("keys", ("n",), "in", "any"),
        Array("out", ("n",), "out", "i64"),
        Array("workspace", ("n",), "work", "i64"),
        *_CODES,
    ),
    ("n",),
    """The order of `keys`: keys[out[0]], keys[out[1]], ... ascends, or descends.

    Equal keys stay in the order of their positions, ascending and descending. -0 equals
    0; all NaNs equal each other and are greater than any number: last in ascending
    order, first in descending.
    """,
    _run_argsort,
    ("descending",),
    native=True,
)

_SORT: Final = Routine(
    "sort",
    (
        Array("keys", ("n",), "in", "any"),
        Array("out", ("n",), "out", "any"),
        *_CODES,
    ),
    ("n",),
    """The keys in the order of "argsort".""",
    _run_sort,
    ("descending",),
    native=True,
)


def _run_top_order(arrays: Sequence[NDArray], scalars: Sequence[int]) -> int:
    keys, out = arrays[:2]
    order = np.empty(len(keys), np.int64)
    _run_argsort((keys, order), (scalars[0], 1))
    out[...] = order[: len(out)]
    return 0


_TOP_ORDER: Final = Routine(
    "top_order",
    (
        Array("keys", ("n",), "in", "any"),
        Array("out", ("k",), "out", "i64"),
        Array("workspace", ("n",), "work", "i64"),
        Array("other", ("n",), "work", "i64"),
        *_CODES,
    ),
    ("n", "k"),
    """The first `k` positions of the descending order of `keys`; see "argsort".""",
    _run_top_order,
    native=True,
)


# --- time -----------------------------------------------------------------------------


def _run_clock(arrays: Sequence[NDArray], _: Sequence[int]) -> int:
    arrays[0][...] = time.monotonic_ns()
    return 0


CLOCK: Final = Routine(
    "clock",
    (Array("now", (), "out", "i64"),),
    (),
    """The nanoseconds of a clock that never goes back.""",
    _run_clock,
)

_ALL: Final = (
    _gemm("gemm", False, False),
    _gemm("gemm_nt", False, True),
    _gemm("gemm_tn", True, False),
    _gemm("gemm_tt", True, True),
    _GEMM_WINDOWS,
    _POTRF,
    _GETRF,
    _GESV,
    _INV,
    _qr("geqrf_orgqr", complete=False),
    _qr("geqrf_orgqr_complete", complete=True),
    _SYEVD,
    _SYEVD_VALUES,
    _svd("gesdd", full=False),
    _svd("gesdd_full", full=True),
    _GESDD_VALUES,
    _TRSM,
    _ARGSORT,
    _SORT,
    _TOP_ORDER,
    CLOCK,
)
ROUTINES: Final[Mapping[str, Routine]] = {routine.name: routine for routine in _ALL}
