"""Where the elements of a value are: in registers, or in memory."""

from dataclasses import dataclass
from typing import TypeAlias

from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.nest import Buffer

__all__ = ["Place", "Registers", "Stored", "flat_index"]


@dataclass(eq=False, slots=True)
class Registers:
    """Each element is an expression over variables and constants."""

    type: TensorType
    elements: tuple[Expr, ...]

    def read(self, at: Index, _condition: Expr | None = None) -> Expr:
        """The element at an index; one of them where a condition is false."""
        if not self.elements:  # asked for, never computed
            return e.const(0, self.type.dtype)
        if len(self.elements) == 1:
            return self.elements[0]
        position = flat_index(at, self.type)
        if position.is_const:
            # One out of range has stopped the program before it comes here.
            last = len(self.elements) - 1
            return self.elements[min(max(int(position.attr), 0), last)]
        chosen = self.elements[0]
        for k, element in enumerate(self.elements[1:], 1):
            chosen = e.select(e.compare("eq", position, e.index(k)), element, chosen)
        return chosen


@dataclass(eq=False, slots=True)
class Stored:
    """`buffer[prefix]`, a dense sub-array unless the buffer has strides."""

    type: TensorType
    buffer: Buffer
    prefix: Index = ()

    def read(self, at: Index, condition: Expr | None = None) -> Expr:
        """The element at an index; 0 where the condition is false."""
        return e.load(self.buffer, (*self.prefix, *at), condition)

    @property
    def is_dense(self) -> bool:
        return self.buffer.strides is None

    def is_at(self, other: "Place") -> bool:
        """Whether another value is in the very same memory."""
        return (
            isinstance(other, Stored)
            and other.buffer is self.buffer
            and len(other.prefix) == len(self.prefix)
            and all(a is b for a, b in zip(self.prefix, other.prefix, strict=True))
        )


Place: TypeAlias = Registers | Stored


def flat_index(at: Index, type_: TensorType) -> Expr:
    """The row-major position of an index."""
    position = e.index(0)
    for i, n in zip(at, type_.shape, strict=True):
        position = e.add(e.mul(position, e.extent(n)), i)
    return position
