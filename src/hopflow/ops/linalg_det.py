"""Diagonals and determinants.

A determinant is computed by LU factors and differentiated as a polynomial: its
derivative is the cofactor matrix, which is finite where the inverse is not.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ArgumentTypeError
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Operand, Pointwise
from hopflow.ops import batching, linalg_factor, reduce
from hopflow.ops.convert import apply, astype, stop_gradient
from hopflow.ops.creation import eye, positions
from hopflow.ops.elementwise import add, multiply, sign, subtract
from hopflow.ops.gather import gather_clip
from hopflow.ops.joining import concat
from hopflow.ops.linalg_factor import check_matrix
from hopflow.ops.linalg_solve import factors_of, solved
from hopflow.ops.logic import equal, where
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array, require_dtype
from hopflow.ops.sizes import larger, smaller, specialised
from hopflow.ops.views import as_tensor, broadcasted, moved, part, reshaped
from hopflow.symbolic.size import Size


def diagonal(x: Any, /, *, offset: int = 0) -> Value:
    """Return a copy of the diagonal of each matrix, `offset` places above the main one.

    Args:
        x: T[*s, m, n].
        offset: An int; negative for diagonals below the main one.

    Returns:
        T[*s, k], where k is the length of the diagonal.

    Raises:
        ArgumentTypeError: `offset` is not an int.
        ShapeError: `x` has fewer than two axes.

    >>> hf.linalg.diagonal(hf.asarray([[1, 2], [3, 4]]))
    Tensor([1, 4], i64[2])
    """
    x = as_tensor("diagonal", x)
    check_matrix("diagonal", x.type)
    offset = specialised(offset)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ArgumentTypeError(
            f"diagonal: `offset` must be an int, and is `{type(offset).__name__}`."
        )
    down, right = max(-offset, 0), max(offset, 0)
    length = _length(x.shape[-2] - down, x.shape[-1] - right)
    at = positions((length,), 0)
    elements = gather_clip(
        x,
        add(at, down),
        add(at, right),
        axes=(x.ndim - 2, x.ndim - 1),
        batch=0,
    )
    return moved(elements, 0, x.ndim - 2)  # type: ignore[no-any-return]


def _length(m: Size, n: Size) -> Size:
    return larger(0, smaller(m, n))


# --- determinants ---------------------------------------------------------------------


def sign_and_diagonal(x: Any) -> tuple[Any, Any]:
    """Return the sign of an LU factorisation's row exchanges, and the diagonal of u."""
    lu, pivots = linalg_factor.lu(x)
    steps = astype(positions((x.shape[-1],), 0), pivots.dtype)
    signs = astype(where(equal(pivots, steps), 1.0, -1.0), x.dtype)
    return reduce.prod(signs, axis=-1), diagonal(lu)


def determined(x: Any) -> Value:
    """Return the determinants of matrices: [*b, n, n] -> [*b]."""
    exchanges, factors = sign_and_diagonal(stop_gradient(x))
    return apply(determinant, x, multiply(exchanges, reduce.prod(factors, axis=-1)))


def _run(_x: Array, value: Array) -> Array:
    """`value`, which must be the determinant of `x`."""
    return np.array(value)


def _infer(x: TensorType, value: TensorType) -> TensorType:
    require_dtype("determinant", [x, value], linalg_factor.WIDE)
    return TensorType(value.dtype, value.shape)


def _lower(_types: Sequence[TensorType], _x: Operand, value: Operand) -> Pointwise:
    return Pointwise(lambda at: value[at], is_view=True)


def _jvp(tangents: Any, _results: Any, x: Any, _value: Any) -> tuple[Value]:
    [t, _] = tangents
    return (reduce.sum(multiply(_cofactors(x), t), axis=(-2, -1)),)


determinant: Final = OpDef(
    name="determinant",
    promote=None,
    infer=_infer,  # T[*b, n, n], T[*b] -> T[*b]
    run=_run,
    lower=_lower,
    jvp=_jvp,
    batch=batching.along,
    samples=(Sample(("T[2, 3, 3]", "T[2]"), {}, linalg_factor.WIDE),),
)


# --- cofactors ------------------------------------------------------------------------


def _cofactors(x: Any) -> Any:
    """Return the derivative of the determinant with respect to each element.

    Derivatives of the result are those of the cofactors if the rank is n - 2 or more;
    below it, only the first one is, which is 0.
    """
    n: Size = x.shape[-1]
    if n < 2:
        return where(equal(x, x), 1.0, x)
    if n == 2:
        return _cofactors_of_two(x)
    if n == 3:
        return _cofactors_of_three(x)
    # Multiplied by its singular vectors, which are held constant, the matrix is
    # diagonal, with its zeros last.
    u, s, vt = linalg_factor.svd(stop_gradient(x), mode="reduced")
    turned = matmul(matmul(matrix_transpose(u), x), matrix_transpose(vt))
    cofactors = _cofactors_by_blocks(turned, equal(part(s, s.ndim - 1, 0, n - 2), 0))
    turns = sign(multiply(determined(u), determined(vt)))
    return _scaled(turns, matmul(matmul(u, cofactors), vt))


def _scaled(scale: Any, x: Any) -> Any:
    """Return each matrix multiplied by its element of `scale`."""
    return multiply(reshaped(scale, (*scale.shape, 1, 1)), x)


def _cofactors_of_two(x: Any) -> Any:
    """Return [[d, -c], [-b, a]] for [[a, b], [c, d]]."""
    for axis in (x.ndim - 2, x.ndim - 1):
        x = part(x, axis, 1, 2, -1)
    return multiply(x, subtract(multiply(eye(2, dtype=x.dtype), 2), 1))


def _cofactors_of_three(x: Any) -> Any:
    """Return the cross products of the rows: that of the next two, for each row."""
    second, third = (_rolled(x, x.ndim - 2, k) for k in (1, 2))
    plus, minus = (
        multiply(_rolled(second, x.ndim - 1, k), _rolled(third, x.ndim - 1, 3 - k))
        for k in (1, 2)
    )
    return subtract(plus, minus)


def _rolled(x: Any, axis: int, k: int) -> Any:
    """Return three elements along an axis from number `k` on, the first after the
    last."""
    return concat([part(x, axis, k, 3 - k), part(x, axis, 0, k)], axis=axis)


def _cofactors_by_blocks(x: Any, is_zero: Any) -> Any:
    """Return the cofactors of [[a, b], [c, d]], where a is diagonal and d is 2 by 2:
    the derivative of det a * det (d - c a^-1 b).

    Args:
        is_zero: Whether each element on the diagonal of a is 0.
    """
    n: Size = x.shape[-1]
    rows = _parted(x, x.ndim - 2, n - 2)
    (a, b), (c, d) = (_parted(r, x.ndim - 1, n - 2) for r in rows)
    # Such a zero is at least the third one: all cofactors and their derivatives are 0.
    one = eye(n - 2, dtype=x.dtype)
    zeros = astype(is_zero, x.dtype)
    a = add(a, multiply(one, reshaped(zeros, (*zeros.shape[:-1], 1, n - 2))))
    scale = multiply(determined(a), reduce.prod(subtract(1.0, zeros), axis=-1))
    inverse = solved(a, broadcasted(one, a.shape), factors_of(a))
    left = matrix_transpose(matmul(c, inverse))
    right = matrix_transpose(matmul(inverse, b))
    rest = subtract(d, matmul(matrix_transpose(left), b))
    lower = _cofactors_of_two(rest)
    beside, below = -matmul(left, lower), -matmul(lower, right)
    diagonal_part = _scaled(determined(rest), matrix_transpose(inverse))
    upper = subtract(diagonal_part, matmul(beside, right))
    both = concat([upper, beside], axis=-1), concat([below, lower], axis=-1)
    return _scaled(scale, concat(both, axis=-2))


def _parted(x: Any, axis: int, at: Size) -> tuple[Any, Any]:
    """Split at `at` along an axis; the second part has 2 elements."""
    return part(x, axis, 0, at), part(x, axis, at, 2)
