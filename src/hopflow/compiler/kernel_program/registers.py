"""Which values are small enough for registers, as their shapes tell."""

from collections.abc import Sequence
from math import prod
from typing import Final

from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Index

REGISTER_LIMIT: Final = 4
"""Static tensors up to this many elements live in registers, unrolled. For larger ones
a vector loop over a buffer in the first-level cache costs less than scalar code."""


def static_size(type_: TensorType) -> int | None:
    """Return the number of elements, or None if it is symbolic."""
    return prod(map(int, type_.shape)) if type_.is_static else None


def is_small(type_: TensorType) -> bool:
    """Return whether a value of this type lives in registers."""
    size = static_size(type_)
    return size is not None and size <= REGISTER_LIMIT


def is_short(shape: Shape) -> bool:
    """Return whether a check of this shape is unrolled, without a loop."""
    return all(isinstance(n, int) and n <= REGISTER_LIMIT for n in shape)


def indices(shape: Sequence[int]) -> list[Index]:
    """Return every index of a static shape, in row-major order."""
    result: list[Index] = [] if 0 in shape else [()]
    for n in shape:
        result = [(*at, e.index(i)) for at in result for i in range(n)]
    return result


def indices_of(type_: TensorType) -> list[Index]:
    """Return every index of a value of static shape."""
    return indices([n for n in type_.shape if isinstance(n, int)])


def shape_key(shape: Shape) -> tuple[object, ...]:
    """Return a key that is equal for shapes whose sizes are equal as expressions.

    It uses no facts about symbols, as a fact may come from a check that has not run
    yet.
    """
    return tuple([n if isinstance(n, int) else n.expression for n in shape])
