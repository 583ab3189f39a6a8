"""Linear systems, solved by LU factors and differentiated as solutions.

To differentiate a factorisation takes several matrix products; to differentiate a
solution takes one more solve with the same factors.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.bind import Value
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Operand, Pointwise
from hopflow.ops import batching, linalg_factor
from hopflow.ops.convert import apply, stop_gradient
from hopflow.ops.gather import gather_clip
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array, require_dtype
from hopflow.ops.scatter import scatter_drop
from hopflow.ops.views import broadcasted, zeros_of


class Factors(NamedTuple):
    """An LU factorisation: both triangles in one matrix, and the source of each row."""

    lu: Any
    order: Any


def factors_of(a: Any) -> Factors:
    """Return the LU factors of square matrices, without derivatives."""
    lu, pivots = linalg_factor.lu(stop_gradient(a))
    return Factors(lu, linalg_factor.lu_permutation(pivots, size=a.shape[-1]))


def solved(a: Any, b: Any, factors: Factors, *, transposed: bool = False) -> Value:
    """Return the x with `a @ x = b`, or `a^T @ x = b`, for equal batch shapes."""
    batch = b.ndim - 2
    lu = broadcasted(factors.lu, a.shape)
    order = broadcasted(factors.order, a.shape[:-1])
    place: dict[str, Any] = {"axes": (batch,), "batch": batch}
    x = stop_gradient(b)
    if not transposed:
        x = apply(gather_clip, x, order, **place)
    for upper in (True, False) if transposed else (False, True):
        x = linalg_factor.triangular_solve(
            lu, x, upper=upper, transposed=transposed, unit=not upper
        )
    if transposed:
        place |= {"starts": (0,), "steps": (1,), "combine": "set"}
        x = apply(scatter_drop, zeros_of(x), x, order, **place)
    return apply(solution, a, b, x, lu, order, transposed=transposed)


def _run(_a: Array, _b: Array, x: Array, *_factors: Array, **_: bool) -> Array:
    """`x`, which solves `a @ x = b` (or `a^T @ x = b`), by the factors of a."""
    return np.array(x)


def _infer(
    a: TensorType, b: TensorType, x: TensorType, *_factors: TensorType, **_: bool
) -> TensorType:
    require_dtype("solution", [a, b, x], linalg_factor.WIDE)
    return TensorType(x.dtype, x.shape)


def _lower(_types: Sequence[TensorType], *operands: Operand, **_: bool) -> Pointwise:
    x = operands[2]
    return Pointwise(lambda at: x[at], is_view=True)


def _jvp(
    tangents: Any,
    results: Any,
    a: Any,
    _b: Any,
    _x: Any,
    *factors: Any,
    transposed: bool,
) -> tuple[Value]:
    (ta, tb, *_), [x] = tangents, results
    if isinstance(ta, Value):
        change = -matmul(matrix_transpose(ta) if transposed else ta, x)
        tb = change + tb if isinstance(tb, Value) else change
    return (solved(a, tb, Factors(*factors), transposed=transposed),)


def _transpose(
    cotangents: Any, a: Any, _b: Any, _x: Any, *factors: Any, transposed: bool
) -> tuple[Any, ...]:
    # The result is linear in b. `x` is a function of b and needs no cotangent.
    [ct] = cotangents
    ct_b = solved(a, ct, Factors(*factors), transposed=not transposed)
    return None, ct_b, None, None, None


solution: Final = OpDef(
    name="solution",
    promote=None,
    infer=_infer,
    run=_run,
    lower=_lower,
    jvp=_jvp,
    transpose=_transpose,
    batch=batching.along,
    samples=tuple(
        Sample(
            ("T[2, 3, 3]", "T[2, 3, 2]", "T[2, 3, 2]", "T[2, 3, 3]", "i64[2, 3]"),
            {"transposed": transposed},
            linalg_factor.WIDE,
        )
        for transposed in (False, True)
    ),
)
