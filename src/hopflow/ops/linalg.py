"""`hf.linalg`: the array API's linear algebra extension, and triangular solves.

Factorisations take f32 and f64; integers become the default float, and 16-bit floats
are computed in float32 and rounded. Results that do not exist are NaN or infinite, as
in JAX, and raise nothing. `linalg_factor` has the primitives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.dtypes import DTypeLike
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ShapeError,
)
from hopflow.ops import elementwise, linalg_factor, reduce
from hopflow.ops.convert import astype
from hopflow.ops.creation import eye
from hopflow.ops.deferred import aligned, resized
from hopflow.ops.joining import concat, pad
from hopflow.ops.linalg_det import determined, diagonal, sign_and_diagonal
from hopflow.ops.linalg_factor import check_matrix
from hopflow.ops.linalg_solve import factors_of, solved
from hopflow.ops.logic import greater, where
from hopflow.ops.math import log, sqrt
from hopflow.ops.matmul import (
    matmul,
    matrix_transpose,
    outer,
    promoted,
    tensordot,
    vecdot,
)
from hopflow.ops.opdef import convert_to
from hopflow.ops.rules import (
    as_flag,
    broadcast_shapes,
    floating,
    normalize_axes,
    normalize_axis,
    one_of,
)
from hopflow.ops.sizes import is_empty, is_unbacked, larger, specialised
from hopflow.ops.views import (
    as_tensor,
    broadcasted,
    reshaped,
    sliced,
)
from hopflow.symbolic.size import Size

__all__ = [
    "EighResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and a matrix with the eigenvectors as columns."""

    eigenvalues: Value
    eigenvectors: Value


class QRResult(NamedTuple):
    """A matrix Q with orthonormal columns, and an upper triangular R."""

    Q: Value
    R: Value


class SlogdetResult(NamedTuple):
    """The sign of a determinant, and the logarithm of its absolute value."""

    sign: Value
    logabsdet: Value


class SVDResult(NamedTuple):
    """x = U @ diag(S) @ Vh, with S descending."""

    U: Value
    S: Value
    Vh: Value


# --- arguments ------------------------------------------------------------------------


def _floats(name: str, *args: Any) -> tuple[list[Any], Callable[[Any], Value]]:
    """Return tensors in a dtype of LAPACK, and what converts results back."""
    tensors = [as_tensor(name, arg, i) for i, arg in enumerate(args)]
    dtype, weak = floating(name, [(t.type.dtype, t.type.weak) for t in tensors])
    wide = dtype if dtype in linalg_factor.WIDE else dtypes.float32

    def narrow(result: Any) -> Value:
        converted: Any = convert_to(result, dtype, weak=weak)
        return converted  # type: ignore[no-any-return]

    return [convert_to(t, wide, weak=weak) for t in tensors], narrow


def _matrix(
    name: str, arg: Any, *, square: bool = False
) -> tuple[Any, Callable[[Any], Value]]:
    [x], narrow = _floats(name, arg)
    if square:
        return _squared(name, x), narrow
    check_matrix(name, x.type)
    return x, narrow


def _squared(name: str, x: Any) -> Any:
    """Return square matrices, checked by the run where only it can tell."""
    check_matrix(name, x.type)
    rows, columns = x.shape[-2:]
    if is_unbacked(rows) or is_unbacked(columns):
        known_rows = not is_unbacked(rows)
        axis, size = (-1, rows) if known_rows else (-2, columns)
        x = resized(name, x, x.ndim + axis, size)
    check_matrix(name, x.type, square=True)
    return x


def _symmetric(x: Any) -> Any:
    """Return the symmetric part, which makes derivatives symmetric too."""
    return elementwise.multiply(elementwise.add(x, matrix_transpose(x)), 0.5)


# --- factorisations -------------------------------------------------------------------


def cholesky(x: Any, /, *, upper: bool = False) -> Value:
    """Return the lower triangular L with L @ L^T = x, or the upper U with U^T @ U = x.

    Args:
        x: Symmetric positive definite matrices f[*b, n, n]. Of others the symmetric
            part is taken; where that is not positive definite, the result is NaN.
        upper: Return U instead of L.

    Raises:
        ShapeError: `x` is no square matrix or batch of them.

    >>> hf.linalg.cholesky(hf.asarray([[4.0, 2.0], [2.0, 2.0]]))
    Tensor([[2., 0.],
            [1., 1.]], f32[2, 2])
    """
    x, narrow = _matrix("cholesky", x, square=True)
    factor = linalg_factor.cholesky(_symmetric(x))
    if as_flag("cholesky", "upper", upper):
        factor = matrix_transpose(factor)
    return narrow(factor)


def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    """Return Q and R with x = Q @ R.

    Args:
        x: f[*b, m, n].
        mode: "reduced": Q is f[*b, m, k] with k = min(m, n); "complete": f[*b, m, m].

    Raises:
        ArgumentValueError: `mode` is neither "reduced" nor "complete".
        ShapeError: `x` is no matrix or batch of them.
    """
    one_of("qr", "mode", mode, ("reduced", "complete"))
    x, narrow = _matrix("qr", x)
    q, r = linalg_factor.qr(x, complete=mode == "complete")
    return QRResult(narrow(q), narrow(r))


def eigh(x: Any, /) -> EighResult:
    """Return the eigenvalues, ascending, and eigenvectors of symmetric matrices.

    Args:
        x: f[*b, n, n]; of others the symmetric part is taken.

    Returns:
        (f[*b, n], f[*b, n, n]); column i is the eigenvector of eigenvalue i.

    Raises:
        ShapeError: `x` is no square matrix or batch of them.
    """
    x, narrow = _matrix("eigh", x, square=True)
    values, vectors = linalg_factor.eigh(_symmetric(x), vectors=True)
    return EighResult(narrow(values), narrow(vectors))


def eigvalsh(x: Any, /) -> Value:
    """Return the eigenvalues of symmetric matrices: f[*b, n, n] -> f[*b, n].

    They are in ascending order. Of other matrices the symmetric part is taken.

    Raises:
        ShapeError: `x` is no square matrix or batch of them.
    """
    x, narrow = _matrix("eigvalsh", x, square=True)
    values = linalg_factor.eigh(_symmetric(x), vectors=False)
    return narrow(values)


def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Return U, S and Vh with x = U @ diag(S) @ Vh, and S descending.

    Args:
        x: f[*b, m, n]; k is min(m, n).
        full_matrices: Return U f[*b, m, m] and Vh f[*b, n, n]; else f[*b, m, k] and
            f[*b, k, n].

    Raises:
        ShapeError: `x` is no matrix or batch of them.
    """
    full = as_flag("svd", "full_matrices", full_matrices)
    x, narrow = _matrix("svd", x)
    u, s, vh = linalg_factor.svd(x, mode="full" if full else "reduced")
    return SVDResult(narrow(u), narrow(s), narrow(vh))


def svdvals(x: Any, /) -> Value:
    """Return the singular values, descending: f[*b, m, n] -> f[*b, min(m, n)].

    Raises:
        ShapeError: `x` is no matrix or batch of them.
    """
    x, narrow = _matrix("svdvals", x)
    return narrow(linalg_factor.svd(x, mode="values"))


# --- systems and determinants ---------------------------------------------------------


def solve(x1: Any, x2: Any, /) -> Value:
    """Return the x with `x1 @ x = x2`; infinite or NaN where x1 is singular.

    Shapes:
        [*b, n, n], [*b, n, k] -> [*b, n, k], with batches that broadcast
        [*b, n, n], [n] -> [*b, n]

    Raises:
        ShapeError: x1 is not square, or the shapes do not fit.

    >>> hf.linalg.solve(hf.asarray([[2.0, 0.0], [0.0, 4.0]]), hf.asarray([2.0, 2.0]))
    Tensor([1. , 0.5], f32[2])
    """
    (a, b), narrow = _floats("solve", x1, x2)
    a = _squared("solve", a)
    right = _columns("solve", a, b)
    factors = factors_of(a)
    a, right = _same_batch("solve", a, right)
    return narrow(_uncolumned(b, solved(a, right, factors)))


def solve_triangular(
    a: Any,
    b: Any,
    /,
    *,
    lower: bool = False,
    transpose: bool = False,
    unit_diagonal: bool = False,
) -> Value:
    """Return the x with `a @ x = b` for a triangular a, whose other half is not read.

    Args:
        a: Matrices [*b, n, n].
        b: [*b, n, k] or [n], as for `solve`.
        lower: a is lower triangular, not upper.
        transpose: Solve `a^T @ x = b`.
        unit_diagonal: Treat the diagonal of a as ones.

    Raises:
        ShapeError: a is not square, or the shapes do not fit.
    """
    name = "solve_triangular"
    (a, b), narrow = _floats(name, a, b)
    a = _squared(name, a)
    matrix, right = _same_batch(name, a, _columns(name, a, b))
    solution = linalg_factor.triangular_solve(
        matrix,
        right,
        upper=not as_flag(name, "lower", lower),
        transposed=as_flag(name, "transpose", transpose),
        unit=as_flag(name, "unit_diagonal", unit_diagonal),
    )
    return narrow(_uncolumned(b, solution))


def _columns(name: str, a: Any, b: Any) -> Any:
    """Return the right-hand side as matrices."""
    n = a.shape[-1]
    if b.ndim:
        b = _rows_checked(name, b, n)
    rows = b.shape[-2 if b.ndim > 1 else 0] if b.ndim else None
    if rows is None or rows != n:
        raise ShapeError(
            f"{name}: the right-hand side of a system with {a.type} must be [{n}] or "
            f"[..., {n}, k], and is {b.type}."
        )
    return reshaped(b, (n, 1)) if b.ndim == 1 else b


def _rows_checked(name: str, b: Any, n: Size) -> Any:
    """Return a right-hand side with `n` rows, which the run checks if need be."""
    axis = max(b.ndim - 2, 0)
    is_unknown = is_unbacked(n) or is_unbacked(b.shape[axis])
    return resized(name, b, axis, n) if is_unknown else b


def _uncolumned(b: Any, solution: Any) -> Any:
    return reshaped(solution, solution.shape[:-1]) if b.ndim == 1 else solution


def _same_batch(name: str, x: Any, y: Any) -> tuple[Any, Any]:
    x, y = aligned(name, (x, y), core=2)
    batch = broadcast_shapes(name, x.shape[:-2], y.shape[:-2])
    return (
        broadcasted(x, (*batch, *x.shape[-2:])),
        broadcasted(y, (*batch, *y.shape[-2:])),
    )


def inv(x: Any, /) -> Value:
    """Return the inverse: f[*b, n, n] -> f[*b, n, n]; infinite or NaN if singular.

    Raises:
        ShapeError: `x` is no square matrix or batch of them.
    """
    x, narrow = _matrix("inv", x, square=True)
    return narrow(solve(x, eye(x.shape[-1], dtype=x.dtype)))


def det(x: Any, /) -> Value:
    """Return the determinant: [*b, n, n] -> [*b].

    Raises:
        ShapeError: `x` is no square matrix or batch of them.
    """
    x, narrow = _matrix("det", x, square=True)
    return narrow(determined(x))


def slogdet(x: Any, /) -> SlogdetResult:
    """Return the sign of the determinant, and the logarithm of its absolute value.

    Raises:
        ShapeError: `x` is no square matrix or batch of them.
    """
    x, narrow = _matrix("slogdet", x, square=True)
    sign, factors = sign_and_diagonal(x)
    sign = elementwise.multiply(sign, reduce.prod(elementwise.sign(factors), axis=-1))
    logs = log(elementwise.abs(factors))
    return SlogdetResult(narrow(sign), narrow(reduce.sum(logs, axis=-1)))


def trace(x: Any, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Value:
    """Return the sum of the diagonal `offset` places above the main one; see `hf.sum`.

    Raises:
        ArgumentTypeError: `offset` is not an int.
        ShapeError: `x` has fewer than two axes.
    """
    return reduce.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# --- norms ----------------------------------------------------------------------------


def vector_norm(
    x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2
) -> Value:
    """Return the norm of order `ord` along `axis` (an axis, several, or None for all).

    `ord` may be any number, 0 (the number of non-zero elements), inf or -inf (the
    largest or smallest absolute value).

    Raises:
        ArgumentTypeError: `ord` is not a number.
        AxisError: the tensor has no such axis.
    """
    if isinstance(ord, bool) or not isinstance(ord, int | float):
        raise ArgumentTypeError(
            f"vector_norm: `ord` must be a number, and is `{type(ord).__name__}`."
        )
    [x], narrow = _floats("vector_norm", x)
    axes = normalize_axes("vector_norm", axis, x.ndim)
    along: dict[str, Any] = {
        "axis": axes,
        "keepdims": as_flag("vector_norm", "keepdims", keepdims),
    }
    if ord == 2:
        squares = reduce.sum(elementwise.multiply(x, x), **along)
        return narrow(sqrt(squares))
    if ord == 0:
        nonzero = astype(astype(x, dtypes.bool_), x.dtype)
        return narrow(reduce.sum(nonzero, **along))
    magnitude = elementwise.abs(x)
    empty = any(is_empty(x.shape[a]) for a in axes)
    if ord == 1 or (ord == math.inf and empty):
        return narrow(reduce.sum(magnitude, **along))
    if ord in (math.inf, -math.inf):
        if ord > 0:
            magnitude = _with_zero(magnitude, axes)
        return narrow((_largest if ord > 0 else reduce.min)(magnitude, **along))
    total = reduce.sum(elementwise.pow(magnitude, float(ord)), **along)
    return narrow(elementwise.pow(total, 1.0 / ord))


def _largest(sizes: Any, **along: Any) -> Any:
    """Return the largest of non-negative numbers. If all are 0 they share the
    derivative with the bound 0, as in JAX."""
    return elementwise.maximum(reduce.max(sizes, **along), 0.0)


def _with_zero(x: Any, axes: tuple[int, ...]) -> Any:
    """Return non-negative numbers with a zero appended along each axis that may be
    empty in the run, so that the largest of none is 0."""
    if not any(is_unbacked(x.shape[a]) for a in axes):
        return x
    widths = [(0, int(is_unbacked(n) and a in axes)) for a, n in enumerate(x.shape)]
    return pad(x, widths)


# (axis to sum, axis to take the extremum of), by order.
_BY_COLUMNS = {1: (-2, -1), math.inf: (-1, -2)}


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Value:
    """Return the norm of each matrix: "fro", "nuc", or 1, -1, 2, -2, inf, -inf.

    Raises:
        ArgumentValueError: `ord` is none of these.
        ShapeError: `x` is no matrix or batch of them.
    """
    keep = as_flag("matrix_norm", "keepdims", keepdims)
    if isinstance(ord, bool) or not isinstance(ord, str | int | float):
        raise ArgumentTypeError(
            "matrix_norm: `ord` must be a string or a number, and is "
            f"`{type(ord).__name__}`."
        )
    x, narrow = _matrix("matrix_norm", x)
    if ord == "fro":
        return narrow(vector_norm(x, axis=(-2, -1), keepdims=keep))
    if ord == "nuc" or (not isinstance(ord, str) and ord in (2, -2)):
        values = linalg_factor.svd(x, mode="values")
        if isinstance(ord, str):
            norm: Any = reduce.sum(values, axis=-1)
        else:
            norm = (_largest if ord > 0 else reduce.min)(values, axis=-1)
    elif not isinstance(ord, str) and ord in (1, -1, math.inf, -math.inf):
        summed, other = _BY_COLUMNS[abs(ord)]
        sums = reduce.sum(elementwise.abs(x), axis=summed, keepdims=True)
        norm = (_largest if ord > 0 else reduce.min)(sums, axis=(summed, other))
    else:
        raise ArgumentValueError(
            "matrix_norm: `ord` must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, and "
            f"is {ord!r}."
        )
    shape = (*x.shape[:-2], 1, 1) if keep else x.shape[:-2]
    return narrow(reshaped(norm, shape))


# --- functions of singular values -----------------------------------------------------


def _cutoff(name: str, x: Any, values: Any, rtol: Any) -> Any:
    """Return the value, for each matrix, up to which singular values count as 0."""
    if rtol is None:
        longer: Any = larger(*x.shape[-2:])
        eps = dtypes.finfo(x.dtype).eps
        scale = (
            longer * eps
            if isinstance(longer, int)
            else elementwise.multiply(longer, eps)
        )
    else:
        scale = as_tensor(name, rtol, "rtol")
        scale = reshaped(scale, (*scale.shape, 1))
    values = _with_zero(values, (values.ndim - 1,))
    return elementwise.multiply(scale, reduce.max(values, axis=-1, keepdims=True))


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Value:
    """Return the number of singular values above `rtol` times the largest: i64[*b].

    `rtol` defaults to max(m, n) times the eps of the dtype.

    Raises:
        ShapeError: `x` is no matrix or batch of them.
    """
    x, _ = _matrix("matrix_rank", x)
    values = linalg_factor.svd(x, mode="values")
    if is_empty(values.shape[-1]):
        return reduce.sum(astype(values, dtypes.int64), axis=-1)
    large = greater(values, _cutoff("matrix_rank", x, values, rtol))
    return reduce.sum(astype(large, dtypes.int64), axis=-1)


def pinv(x: Any, /, *, rtol: Any = None) -> Value:
    """Return the Moore-Penrose inverse: f[*b, m, n] -> f[*b, n, m].

    Singular values up to `rtol` times the largest count as 0; `rtol` defaults to max(m,
    n) times the eps of the dtype.

    Raises:
        ShapeError: `x` is no matrix or batch of them.
    """
    x, narrow = _matrix("pinv", x)
    u, s, vh = linalg_factor.svd(x, mode="reduced")
    if not is_empty(s.shape[-1]):
        large = greater(s, _cutoff("pinv", x, s, rtol))
        # The inner `where` keeps the derivative of a value that counts as 0 finite.
        s = where(large, elementwise.divide(1.0, where(large, s, 1.0)), 0.0)
    scaled = elementwise.multiply(matrix_transpose(vh), reshaped(s, _row(s)))
    return narrow(matmul(scaled, matrix_transpose(u)))


def _row(s: Any) -> tuple[Size, ...]:
    return (*s.shape[:-1], 1, s.shape[-1])


def matrix_power(x: Any, n: int, /) -> Value:
    """Return the product of `n` factors of x, or of its inverse if n is negative.

    Raises:
        ArgumentTypeError: `n` is not an int.
        ShapeError: `x` is no square matrix or batch of them.
    """
    n = specialised(n)
    if isinstance(n, bool) or not isinstance(n, int):
        raise ArgumentTypeError(
            f"matrix_power: `n` must be an int, and is `{type(n).__name__}`."
        )
    x = as_tensor("matrix_power", x)
    x = _squared("matrix_power", x)
    if n < 0:
        x, n = inv(x), -n
    if n == 0:
        return broadcasted(eye(x.shape[-1], dtype=x.dtype), x.shape)  # type: ignore[no-any-return]
    power, result = x, None
    while True:
        if n & 1:
            result = power if result is None else matmul(result, power)
        n >>= 1
        if not n:
            return result  # type: ignore[return-value]
        power = matmul(power, power)


# --- three dimensions -----------------------------------------------------------------


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Value:
    """Return the cross product along `axis`, whose size is 3; the rest broadcasts.

    Raises:
        AxisError: an operand has no such axis.
        ShapeError: the size along it is not 3, or the shapes do not broadcast.
    """
    parts, at = [], 0
    for x in promoted("cross", x1, x2):
        at = normalize_axis("cross", axis, x.ndim)
        if is_unbacked(x.shape[at]):
            x = resized("cross", x, at, 3)
        if not x.shape[at] == 3:
            raise ShapeError(
                f"cross: expected vectors of 3 elements along axis {axis}, and found "
                f"{x.type}."
            )
        parts.append([_component(x, at, i) for i in range(3)])
    (a, b, c), (d, e, f) = parts
    terms = ((b, f, c, e), (c, d, a, f), (a, e, b, d))
    products = [
        elementwise.subtract(elementwise.multiply(p, q), elementwise.multiply(r, s))
        for p, q, r, s in terms
    ]
    ndim = products[0].ndim
    return concat(products, axis=normalize_axis("cross", axis, ndim))


def _component(x: Any, axis: int, i: int) -> Any:
    starts = tuple(i if a == axis else 0 for a in range(x.ndim))
    sizes = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
    return sliced(x, starts, sizes, (1,) * x.ndim)
