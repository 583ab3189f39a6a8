"""The positions of true elements, whose number only the run knows.

`where_true` counts them, makes the count a size (`item`), and takes as many positions.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind, current
from hopflow.errors import DTypeError, TraceError
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType, same_size
from hopflow.loop_ir.expr import (
    Expr,
    Index,
    binary,
    extent,
    floor_div,
    floor_mod,
    index,
)
from hopflow.loop_ir.kernels import Compact, Operand, Pointwise
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value
from hopflow.ops.logic import as_bool
from hopflow.ops.opdef import OpDef, Sample, as_operand
from hopflow.ops.reduce import count_nonzero
from hopflow.ops.rules import Array
from hopflow.ops.sizes import larger
from hopflow.ops.views import Types, known_elements, part, reshaped, unsized
from hopflow.symbolic.size import Size

# --- primitives -----------------------------------------------------------------------


def _positions_infer(mask: TensorType, *, size: Size) -> TensorType:
    if mask.dtype is not dtypes.bool_ or mask.ndim != 1:
        raise DTypeError(f"flatnonzero: a mask is bool[n], and not {mask}.")
    return TensorType(dtypes.int64, (size,))


def _positions_run(mask: Array, *, size: int) -> Array:
    """The positions of the first `size` true elements; 0 where there are fewer."""
    result = np.zeros(size, np.int64)
    positions = np.flatnonzero(mask)[:size]
    result[: len(positions)] = positions
    return result


def _positions_lower(_types: Types, mask: Operand, *, size: Size) -> Compact:  # noqa: ARG001
    return Compact(mask.type.shape[0], lambda i: mask[i])


def _positions_batch(
    _op: OpDef, _batch: Size, _batched: Any, mask: Any, *, size: Size
) -> Sequence[Value]:
    n = mask.shape[1]
    length = larger(n, size)
    if not same_size(n, length):
        widths = {"before": (0, 0), "after": (0, length - n)}
        false = Constant(False, TensorType(dtypes.bool_))
        mask = batching.op_of("pad", mask, false, **widths)
    # A stable sort puts the true elements first.
    order = batching.op_of("argsort", mask, descending=True)
    first = part(order, 1, 0, size)
    picked = part(
        batching.op_of("gather_clip", mask, order, axes=(1,), batch=1), 1, 0, size
    )
    none = Constant(0, TensorType(dtypes.int64))
    return [batching.op_of("where", picked, first, none)]


flatnonzero: Final = OpDef(
    name="flatnonzero",
    promote=None,
    infer=_positions_infer,  # bool[n] -> i64[size]
    run=_positions_run,
    lower=_positions_lower,
    batch=_positions_batch,
    samples=(
        Sample(("T[70]",), {"size": 7}, (dtypes.bool_,)),
        Sample(("T[5]",), {"size": 9}, (dtypes.bool_,)),
        Sample(("T[0]",), {"size": 2}, (dtypes.bool_,)),
    ),
)


def _unravel_infer(positions: TensorType, *, shape: Shape) -> tuple[TensorType, ...]:
    return tuple(positions.strong() for _ in shape)


def _strides(shape: tuple[Any, ...], product: Any, one: Any) -> list[Any]:
    return list(accumulate(reversed(shape[1:]), product, initial=one))[::-1]


def _unravel_run(positions: Array, *, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """The index along each axis of a tensor of `shape`, of flat positions."""
    strides = _strides(shape, mul, 1)
    pairs = zip(strides, shape, strict=True)
    return tuple([positions // max(s, 1) % max(n, 1) for s, n in pairs])


def _unravel_lower(
    _types: Types, positions: Operand, *, shape: Shape
) -> tuple[Pointwise, ...]:
    extents = tuple(map(extent, shape))
    strides = _strides(extents, lambda x, y: binary("mul", x, y), index(1))

    def along(stride: Expr, n: Expr) -> Pointwise:
        def element(at: Index) -> Expr:
            row = floor_div(positions[at], binary("max", stride, index(1)))
            return floor_mod(row, binary("max", n, index(1)))

        return Pointwise(element)

    return tuple([along(s, n) for s, n in zip(strides, extents, strict=True)])


unravel: Final = OpDef(
    name="unravel_index",
    promote=None,
    infer=_unravel_infer,  # i64[n] -> i64[n] for each axis
    run=_unravel_run,
    lower=_unravel_lower,
    batch=batching.along,
    samples=(Sample(("T[9]",), {"shape": (3, 4, 5)}, (dtypes.int64,), 0, 59),),
)


# --- compositions ---------------------------------------------------------------------


def data_size(name: str, count: Any, most: Size | float, of: Any, remedy: str) -> Size:
    """Return the integer tensor `count`, from 0 to `most`, as a size.

    Args:
        name: The public function.
        of: The tensor whose values decide it.
        remedy: The advice in the error.

    Raises:
        TraceError: the trace cannot have such sizes.
    """
    try:
        return current().symbol_of(count, min=0, max=most)
    except TraceError as error:
        raise unsized(name, of, remedy) from error


def where_true(name: str, x: Any, remedy: str) -> tuple[Value, ...]:
    """Return the indices of true elements for each axis of `x` (one for a scalar).

    Raises:
        TraceError: see `data_size`.
    """
    elements = known_elements(name, x, remedy)
    if elements is not None:
        indices = np.nonzero(np.atleast_1d(elements))
        return tuple(
            [as_value(as_operand(name, 0, i.astype(np.int64))) for i in indices]
        )
    mask: Any = as_value(as_bool(name, 0, x))
    flat = reshaped(mask, (mask.type.size,))
    size = data_size(name, count_nonzero(flat), mask.type.size, x, remedy)
    positions = apply(flatnonzero, flat, size=size)
    if mask.ndim <= 1:
        return (positions,)
    return bind(unravel, [positions], {"shape": mask.shape})
