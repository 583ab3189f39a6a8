"""Factorisations of matrices, and the solution of triangular systems.

The primitives are cholesky, lu, triangular_solve, qr, eigh and svd, for f32 and f64;
`linalg` composes the rest. Leading axes are a batch. They never trap: where a
factorisation does not exist the result is NaN, for that matrix of the batch alone, and
the solution of a singular system has infinities and NaNs, as in JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np

from hopflow import dtypes
from hopflow.errors import DerivativeError, ShapeError
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, extent, index
from hopflow.loop_ir.kernels import Library, Operand, Reduction
from hopflow.ops import batching
from hopflow.ops.creation import eye, tril, triu
from hopflow.ops.gather import gather_clip
from hopflow.ops.joining import pad
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.reducers import reduce_sum
from hopflow.ops.rules import Array, is_zero, require_dtype
from hopflow.ops.sizes import smaller
from hopflow.ops.views import part, reshaped
from hopflow.symbolic.size import Size

Types = Sequence[TensorType]
WIDE: Final = (dtypes.float32, dtypes.float64)


# --- types ----------------------------------------------------------------------------


def check_matrix(name: str, x: TensorType, *, square: bool = False) -> None:
    """Check that `x` is a matrix or a batch of matrices.

    Raises:
        ShapeError: it has fewer than two axes, or must be square and is not.
    """
    if x.ndim < 2:
        raise ShapeError(
            f"{name}: expected matrices (2 axes or more), and found {x}. "
            "Add axes with `hf.expand_dims`."
        )
    if square and x.shape[-2] != x.shape[-1]:
        raise ShapeError(
            f"{name}: expected square matrices, and found {x}: "
            f"{x.shape[-2]} != {x.shape[-1]}."
        )


def _each(batch: int) -> Callable[[Array], tuple[int, ...]]:
    return lambda x: x.shape[:batch]


def _lapack(routine: str, like: Array) -> Any:
    from scipy.linalg import get_lapack_funcs

    [function] = get_lapack_funcs((routine,), (like,))
    return function


def _sizes(x: Operand) -> tuple[Expr, ...]:
    return tuple(extent(n) for n in x.type.shape[-2:])


def _samples(*operands: str, **params: Any) -> tuple[Sample, ...]:
    return (Sample(operands, params, WIDE),)


# --- Cholesky -------------------------------------------------------------------------


def _cholesky_infer(x: TensorType) -> TensorType:
    require_dtype("cholesky", [x], WIDE)
    check_matrix("cholesky", x, square=True)
    return x


def _cholesky_run(x: Array) -> Array:
    """The lower triangular l with l @ l^T = x; only the lower half of x is read."""
    try:
        return np.linalg.cholesky(x)
    except np.linalg.LinAlgError:
        if x.ndim > 2:
            return np.stack([_cholesky_run(matrix) for matrix in x])
        return np.tril(np.full_like(x, np.nan))


def _cholesky_jvp(t: Any, out: Any, _x: Any) -> Any:
    # For a symmetric x and t: I. Murray, "Differentiation of the Cholesky
    # decomposition" (2016).
    left = _solve(out, t)
    both = _solve(out, matrix_transpose(left))
    return matmul(out, tril(both) - _diagonal(both) / 2)


def _solve(a: Any, b: Any, *, upper: bool = False, unit: bool = False) -> Any:
    """Return a^-1 @ b, for a triangular a."""
    return triangular_solve(a, b, upper=upper, transposed=False, unit=unit)


def _solve_right(a: Any, b: Any) -> Any:
    """Return b @ a^-1, for an upper triangular a."""
    b = matrix_transpose(b)
    return matrix_transpose(
        triangular_solve(a, b, upper=True, transposed=True, unit=False)
    )


def _diagonal(x: Any) -> Any:
    """Return matrices with zeros off their diagonals."""
    return x * eye(*x.shape[-2:], dtype=x.dtype)


def _diagonal_of(x: Any) -> Any:
    """Return the diagonals of matrices, as vectors."""
    return reduce_sum(_diagonal(x), axes=(x.ndim - 2,))


cholesky: Final = OpDef(
    name="cholesky",
    promote=None,
    infer=_cholesky_infer,
    run=_cholesky_run,
    lower=lambda _, x: Library(
        "potrf",
        (x,),
        _sizes(x)[:1],
        batch=x.type.ndim - 2,
        overwrites=(0,),
        can_fail=True,
    ),
    jvp=(_cholesky_jvp,),
    batch=batching.along,
    samples=_samples("T[3, 3]") + _samples("T[2, 4, 4]") + _samples("T[0, 0]"),
)


# --- LU -------------------------------------------------------------------------------


def _lu_infer(x: TensorType) -> tuple[TensorType, ...]:
    require_dtype("lu", [x], WIDE)
    check_matrix("lu", x)
    *batch, m, n = x.shape
    return x, TensorType(dtypes.int32, (*batch, smaller(m, n)))


def _lu_run(x: Array) -> tuple[Array, Array]:
    """P x = l @ u packed into one matrix, and the row exchanges, counted from 0."""
    *batch, m, n = x.shape
    lu, pivots = np.array(x), np.zeros((*batch, min(m, n)), np.int32)
    if x.size:
        getrf = _lapack("getrf", x)
        for at in np.ndindex(*batch):
            lu[at], pivots[at], _ = getrf(x[at])
    return lu, pivots


def _lu_jvp(tangents: Any, results: Any, _x: Any) -> tuple[Any, Any]:
    [t], (packed, pivots) = tangents, results
    *batch, m, n = packed.shape
    k, at = pivots.shape[-1], len(batch)
    order = lu_permutation(pivots, size=m)
    t = gather_clip(t, order, axes=(at,), batch=at)
    left = _square(tril(part(packed, at + 1, 0, k), k=-1), m) + eye(m, dtype=t.dtype)
    right = _square(triu(part(packed, at, 0, k)), n)
    if not is_zero(n - k):
        right = right + pad(eye(n - k, dtype=t.dtype), [(k, 0)] * 2)
    both = _solve_right(right, _solve(left, t, unit=True))
    change = matmul(left, tril(both, k=-1)) + matmul(triu(both), right)
    return change, None  # pivots are integers


def _square(x: Any, n: Size) -> Any:
    """Return matrices padded with zero rows or columns to [n, n]."""
    widths = [(0, n - m) for m in x.shape[-2:]]
    if all(is_zero(after) for _, after in widths):
        return x
    return pad(x, [*[(0, 0)] * (x.ndim - 2), *widths])


lu: Final = OpDef(
    name="lu",
    promote=None,
    infer=_lu_infer,
    run=_lu_run,
    lower=lambda _, x: Library(
        "getrf",
        (x,),
        _sizes(x),
        batch=x.type.ndim - 2,
        overwrites=(0, None),
        can_fail=True,
    ),
    jvp=_lu_jvp,
    batch=batching.along,
    samples=_samples("T[3, 3]") + _samples("T[2, 4, 3]") + _samples("T[0, 0]"),
)


def _permutation_infer(pivots: TensorType, *, size: Size) -> TensorType:
    require_dtype("lu_permutation", [pivots], (dtypes.int32,))
    return TensorType(dtypes.int64, (*pivots.shape[:-1], size))


def _permutation_run(pivots: Array, *, size: int) -> Array:
    """The source row of each row, after the exchanges that `pivots` lists."""
    *batch, steps = pivots.shape
    order = np.broadcast_to(np.arange(size), (*batch, size)).copy()
    for step in range(steps):
        other = pivots[..., step : step + 1].astype(np.int64)
        here, swapped = order[..., step : step + 1].copy(), _take(order, other)
        np.put_along_axis(order, other, here, -1)
        order[..., step : step + 1] = swapped
    return order


def _take(order: Array, at: Array) -> Array:
    return np.take_along_axis(order, at, -1)


def _permutation_lower(_: Types, pivots: Operand, **_params: Size) -> Reduction:
    # A row is traced back through the exchanges, the last one first. The accumulators
    # are its position (-1 before the first step), the step, and the step's pivot.
    last = expr.sub(extent(pivots.type.shape[-1]), index(1))

    def element(at: Index, r: Index) -> tuple[Expr, ...]:
        step = expr.sub(last, r[0])
        pivot = expr.cast(pivots[(*at[:-1], step)], dtypes.int64)
        return at[-1], step, pivot

    def combine(old: tuple[Expr, ...], new: tuple[Expr, ...]) -> tuple[Expr, ...]:
        start, step, pivot = new
        row = expr.select(expr.compare("lt", old[0], index(0)), start, old[0])
        at_pivot = expr.select(expr.compare("eq", row, pivot), step, row)
        row = expr.select(expr.compare("eq", row, step), pivot, at_pivot)
        return row, step, pivot

    def finish(at: Index, accumulators: tuple[Expr, ...]) -> Expr:
        row = accumulators[0]
        return expr.select(expr.compare("lt", row, index(0)), at[-1], row)

    return Reduction(
        space=pivots.type.shape[-1:],
        init=(index(-1), index(0), index(0)),
        combine=combine,
        element=element,
        finish=(finish,),
    )


lu_permutation: Final = OpDef(
    name="lu_permutation",
    promote=None,
    infer=_permutation_infer,
    run=_permutation_run,
    lower=_permutation_lower,
    batch=batching.along,
    samples=(
        Sample(("i32[3]",), {"size": 3}, (dtypes.int32,), 2.0, 2.0),
        Sample(("i32[2, 2]",), {"size": 4}, (dtypes.int32,), 2.0, 3.0),
    ),
)


# --- triangular systems ---------------------------------------------------------------


def _triangular_infer(a: TensorType, b: TensorType, **_: bool) -> TensorType:
    name = "triangular_solve"
    require_dtype(name, [a, b], WIDE)
    check_matrix(name, a, square=True)
    check_matrix(name, b)
    if a.dtype is not b.dtype or a.shape[:-1] != b.shape[:-1]:
        raise ShapeError(f"{name}: {a} and {b} must agree in all but the last axis.")
    return TensorType(b.dtype, b.shape)


def _triangular_run(
    a: Array, b: Array, *, upper: bool, transposed: bool, unit: bool
) -> Array:
    """x with a @ x = b (or a^T @ x = b), for the upper or lower triangle of a."""
    x = np.array(b)
    if not b.size:
        return x
    [trsm] = _blas("trsm", a)
    for at in np.ndindex(*a.shape[:-2]):
        x[at] = trsm(1.0, a[at], b[at], lower=not upper, trans_a=transposed, diag=unit)
    return x


def _blas(routine: str, like: Array) -> Any:
    from scipy.linalg import get_blas_funcs

    return get_blas_funcs((routine,), (like,))


def _triangular_lower(
    _: Types, a: Operand, b: Operand, *, upper: bool, transposed: bool, unit: bool
) -> Library:
    flags = (upper, transposed, unit)
    return Library(
        "trsm",
        (a, b),
        (*_sizes(b), *(expr.const(flag, dtypes.bool_) for flag in flags)),
        batch=a.type.ndim - 2,
        overwrites=(1,),
        can_fail=True,
    )


def _read_part(a: Any, *, upper: bool, transposed: bool, unit: bool) -> Any:
    """Return the triangle that a solve reads, without the diagonal if it is unit."""
    a = triu(a, k=int(unit)) if upper else tril(a, k=-int(unit))
    return matrix_transpose(a) if transposed else a


triangular_solve: Final[OpDef] = OpDef(
    name="triangular_solve",
    promote=None,
    infer=_triangular_infer,
    run=_triangular_run,
    lower=_triangular_lower,
    jvp=(
        lambda t, x, a, b, **kind: (
            -triangular_solve(a, matmul(_read_part(t, **kind), x), **kind)
        ),
        lambda t, x, a, b, **kind: triangular_solve(a, t, **kind),
    ),
    transpose=(
        None,
        lambda ct, a, b, transposed, **kind: triangular_solve(
            a, ct, transposed=not transposed, **kind
        ),
    ),
    batch=batching.along,
    samples=(
        *(
            Sample(
                ("T[2, 3, 3]", "T[2, 3, 2]"),
                {"upper": upper, "transposed": transposed, "unit": unit},
                WIDE,
                low=0.5,
            )
            for upper in (False, True)
            for transposed in (False, True)
            for unit in (False, True)
        ),
        Sample(
            ("T[5, 5]", "T[5, 1]"),
            {"upper": True, "transposed": True, "unit": False},
            WIDE,
            low=0.5,
        ),
    ),
)


# --- QR -------------------------------------------------------------------------------


def _qr_infer(x: TensorType, *, complete: bool) -> tuple[TensorType, ...]:
    require_dtype("qr", [x], WIDE)
    check_matrix("qr", x)
    *batch, m, n = x.shape
    columns = m if complete else smaller(m, n)
    return x.with_shape((*batch, m, columns)), x.with_shape((*batch, columns, n))


def _qr_run(x: Array, *, complete: bool) -> tuple[Array, Array]:
    """q with orthonormal columns and upper triangular r: x = q @ r."""
    q, r = np.linalg.qr(x, mode="complete" if complete else "reduced")
    return q, r


def _qr_lower(_: Types, x: Operand, *, complete: bool) -> Library:
    return Library(
        "geqrf_orgqr_complete" if complete else "geqrf_orgqr",
        (x,),
        _sizes(x),
        batch=x.type.ndim - 2,
        overwrites=(None, None),
        can_fail=True,
    )


def _qr_jvp(tangents: Any, results: Any, x: Any, *, complete: bool) -> tuple[Any, Any]:
    [t], (q, r) = tangents, results
    *batch, m, n = x.shape
    if complete and not m <= n:
        raise DerivativeError(
            f"qr: of {x.type} the complete q has columns that x does not decide, and "
            'no derivative. Use `mode="reduced"`.'
        )
    # q and the first columns of r are those of the first columns of x.
    k, last = q.shape[-1], len(batch) + 1
    scaled = _solve_right(part(r, last, 0, k), part(t, last, 0, k))
    turned = matmul(matrix_transpose(q), scaled)
    below = tril(turned, k=-1)
    skew = below - matrix_transpose(below)
    dq = matmul(q, skew - turned) + scaled
    return dq, matmul(matrix_transpose(q), t) - matmul(skew, r)


qr: Final = OpDef(
    name="qr",
    promote=None,
    infer=_qr_infer,
    run=_qr_run,
    lower=_qr_lower,
    jvp=_qr_jvp,
    batch=batching.along,
    samples=(
        *_samples("T[4, 3]", complete=False),
        *_samples("T[2, 3, 4]", complete=False),
        *_samples("T[4, 2]", complete=True),
    ),
)


# --- symmetric eigenvalues ------------------------------------------------------------


def _eigh_infer(x: TensorType, *, vectors: bool) -> Any:
    require_dtype("eigh", [x], WIDE)
    check_matrix("eigh", x, square=True)
    values = x.with_shape(x.shape[:-1])
    return (values, x) if vectors else values


def _eigh_run(x: Array, *, vectors: bool) -> Any:
    """Ascending eigenvalues (and eigenvectors) of x, whose lower half is read."""
    try:
        _require_finite(np.tril(x))
        results = tuple(np.linalg.eigh(x)) if vectors else (np.linalg.eigvalsh(x),)
        return results if vectors else results[0]
    except np.linalg.LinAlgError:
        if x.ndim > 2:
            return _one_by_one(lambda m: _eigh_run(m, vectors=vectors), x)
        values = np.full_like(x[0], np.nan)
        return (values, np.full_like(x, np.nan)) if vectors else values


def _require_finite(x: Array) -> None:
    """Raise NumPy's error unless `x` is finite: else some LAPACKs never return."""
    if not np.isfinite(x).all():
        raise np.linalg.LinAlgError


def _one_by_one(run: Callable[[Array], Any], x: Array) -> Any:
    """Run each matrix of a batch alone, where NumPy would fail for the whole batch."""
    results = [run(matrix) for matrix in x]
    if isinstance(results[0], tuple):
        return tuple(np.stack(parts) for parts in zip(*results, strict=True))
    return np.stack(results)


def _eigh_lower(_: Types, x: Operand, *, vectors: bool) -> Library:
    return Library(
        "syevd" if vectors else "syevd_values",
        (x,),
        _sizes(x)[:1],
        batch=x.type.ndim - 2,
        overwrites=(None, 0) if vectors else (None,),
        can_fail=True,
    )


def _eigh_jvp(tangents: Any, results: Any, x: Any, *, vectors: bool) -> tuple[Any, ...]:
    # For symmetric x and t. Vectors of equal eigenvalues have no derivative.
    [t] = tangents
    w, v = results if vectors else eigh(x, vectors=True)
    turned = matmul(matmul(matrix_transpose(v), t), v)
    change = _diagonal_of(turned)
    if not vectors:
        return (change,)
    gaps = _along_columns(w) - _along_rows(w)
    return change, matmul(v, _off_diagonal_quotient(turned, gaps))


def _along_columns(values: Any) -> Any:
    return reshaped(values, (*values.shape[:-1], 1, values.shape[-1]))


def _along_rows(values: Any) -> Any:
    return reshaped(values, (*values.shape, 1))


def _off_diagonal_quotient(x: Any, y: Any) -> Any:
    """Return x / y, with 0 on the diagonals, where y is 0."""
    ones = eye(y.shape[-1], dtype=y.dtype)
    return x * (1 / (y + ones) - ones)


eigh: Final = OpDef(
    name="eigh",
    promote=None,
    infer=_eigh_infer,
    run=_eigh_run,
    lower=_eigh_lower,
    jvp=_eigh_jvp,
    batch=batching.along,
    samples=(
        *_samples("T[3, 3]", vectors=True),
        *_samples("T[2, 4, 4]", vectors=True),
        *_samples("T[2, 4, 4]", vectors=False),
    ),
)


# --- singular values ------------------------------------------------------------------

Mode = Literal["full", "reduced", "values"]


def _svd_infer(x: TensorType, *, mode: Mode) -> Any:
    require_dtype("svd", [x], WIDE)
    check_matrix("svd", x)
    *batch, m, n = x.shape
    k = smaller(m, n)
    values = x.with_shape((*batch, k))
    if mode == "values":
        return values
    left, right = (m, n) if mode == "full" else (k, k)
    return x.with_shape((*batch, m, left)), values, x.with_shape((*batch, right, n))


def _svd_run(x: Array, *, mode: Mode) -> Any:
    """u, s, vt with x = u @ diag(s) @ vt and s descending; or s alone."""
    *batch, m, n = x.shape
    try:
        _require_finite(x)
        if mode == "values":
            return np.linalg.svd(x, compute_uv=False)
        return tuple(np.linalg.svd(x, full_matrices=mode == "full"))
    except np.linalg.LinAlgError:
        if batch:
            return _one_by_one(lambda matrix: _svd_run(matrix, mode=mode), x)
    k = min(m, n)
    nan = np.full((max(m, n), max(m, n)), np.nan, x.dtype)
    if mode == "values":
        return nan[0, :k]
    left, right = (m, n) if mode == "full" else (k, k)
    return nan[:m, :left], nan[0, :k], nan[:right, :n]


_SVD_ROUTINES: Final = {
    "full": "gesdd_full",
    "reduced": "gesdd",
    "values": "gesdd_values",
}


def _svd_lower(_: Types, x: Operand, *, mode: Mode) -> Library:
    return Library(
        _SVD_ROUTINES[mode],
        (x,),
        _sizes(x),
        batch=x.type.ndim - 2,
        overwrites=(None,) if mode == "values" else (None, None, None),
        can_fail=True,
    )


def _svd_jvp(tangents: Any, results: Any, x: Any, *, mode: Mode) -> tuple[Any, ...]:
    # J. Townsend, "Differentiating the singular value decomposition" (2016). Vectors of
    # equal singular values have no derivative.
    [t] = tangents
    m, n = x.shape[-2:]
    if mode == "full" and m != n:
        raise DerivativeError(
            f"svd: of {x.type} the full u and vt have vectors that x does not decide, "
            "and no derivative. Use `full_matrices=False`."
        )
    u, s, vt = svd(x, mode="reduced") if mode == "values" else results
    ut, v = matrix_transpose(u), matrix_transpose(vt)
    turned = matmul(matmul(ut, t), v)
    change = _diagonal_of(turned)
    if mode == "values":
        return (change,)
    columns, rows = _along_columns(s), _along_rows(s)
    gaps = (columns + rows) * (columns - rows)

    def rotated(vectors: Any, mixed: Any) -> Any:
        mixed = mixed + matrix_transpose(mixed)
        return matmul(vectors, _off_diagonal_quotient(mixed, gaps))

    def outside(image: Any, basis: Any) -> Any:
        """Return the part of `image` that is orthogonal to the space of the vectors."""
        projection = matmul(basis, matmul(matrix_transpose(basis), image))
        return (image - projection) / columns

    du = rotated(u, columns * turned)
    dv = rotated(v, rows * turned)
    if m > n:
        du = du + outside(matmul(t, v), u)
    if n > m:
        dv = dv + outside(matmul(matrix_transpose(t), u), v)
    return du, change, matrix_transpose(dv)


svd: Final = OpDef(
    name="svd",
    promote=None,
    infer=_svd_infer,
    run=_svd_run,
    lower=_svd_lower,
    jvp=_svd_jvp,
    batch=batching.along,
    samples=(
        *_samples("T[4, 3]", mode="full"),
        *_samples("T[2, 3, 4]", mode="reduced"),
        *_samples("T[3, 4]", mode="values"),
    ),
)
