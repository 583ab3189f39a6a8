"""The places of values: registers or memory."""

from dataclasses import dataclass
from typing import TypeAlias

from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index
from hopflow.loop_ir.program import Ref
from hopflow.loop_ir.walk import same

Window: TypeAlias = tuple[tuple[int | None, Expr], ...]
"""For each axis of the memory, the axis of the value that runs along it, or None, and
the first position."""


@dataclass(eq=False, slots=True)
class Registers:
    """A value whose elements are expressions over variables and constants."""

    type: TensorType
    elements: tuple[Expr, ...]

    def read(self, at: Index, _condition: Expr | None = None) -> Expr:
        """Return the element at an index, or any element if the condition is false."""
        if not self.elements:  # read, but never executed
            return e.const(0, self.type.dtype)
        if len(self.elements) == 1:
            return self.elements[0]
        position = flat_index(at, self.type)
        if position.is_const:
            # A position out of range has stopped the program before.
            last = len(self.elements) - 1
            return self.elements[min(max(int(position.attr), 0), last)]
        chosen = self.elements[0]
        for k, element in enumerate(self.elements[1:], 1):
            chosen = e.select(e.compare("eq", position, e.index(k)), element, chosen)
        return chosen


@dataclass(eq=False, slots=True)
class Stored:
    """A value in memory, `buffer[prefix]`: a dense sub-array, unless the buffer has
    strides or the value is a window of it."""

    type: TensorType
    buffer: Buffer
    prefix: Index = ()
    window: Window | None = None

    def index(self, at: Index) -> Index:
        """Return the index of an element in the buffer."""
        if self.window is not None:
            at = tuple(
                [
                    first if axis is None else e.add(at[axis], first)
                    for axis, first in self.window
                ]
            )
        return (*self.prefix, *at)

    def read(self, at: Index, condition: Expr | None = None) -> Expr:
        """Return the element at an index, or 0 if the condition is false."""
        return e.load(self.buffer, self.index(at), condition)

    def part(self, type_: TensorType, window: Window) -> "Stored":
        """Return a window of this value."""
        if self.window is None:
            return Stored(type_, self.buffer, self.prefix, window)
        composed = [
            (None, first)
            if axis is None
            else (window[axis][0], e.add(window[axis][1], first))
            for axis, first in self.window
        ]
        return Stored(type_, self.buffer, self.prefix, tuple(composed))

    def row(self, at: Expr) -> "Stored":
        """Return the row at an index of the first axis."""
        type_ = self.type.with_shape(self.type.shape[1:])
        if self.window is None:
            return Stored(type_, self.buffer, (*self.prefix, at))
        zero, rest = e.index(0), range(type_.ndim)
        return self.part(type_, ((None, at), *((axis, zero) for axis in rest)))

    def sub_array(self, rows: Expr, at: Index = ()) -> Ref:
        """Return the sub-array at an index of leading axes of a dense value, whose
        first axis has so many `rows`."""
        if self.window is None:
            return Ref(self.buffer, (*self.prefix, *at))
        inner = [e.index(0)] * (self.type.ndim - len(at))
        index = self.index((*at, *inner))
        outer = len(index) - self.type.ndim
        if at or same(rows, self.buffer.shape[outer]):
            return Ref(self.buffer, index[: outer + len(at)])
        return Ref(self.buffer, index[: outer + 1], rows)

    @property
    def is_whole(self) -> bool:
        """Whether the value is all of the buffer."""
        return not self.prefix and self.window is None

    def is_at(self, other: "Place") -> bool:
        """Return whether another value is in the same memory."""
        return (
            isinstance(other, Stored)
            and other.buffer is self.buffer
            and _same_window(other.window, self.window)
            and len(other.prefix) == len(self.prefix)
            and all(a is b for a, b in zip(self.prefix, other.prefix, strict=True))
        )


Place: TypeAlias = Registers | Stored


def _same_window(a: Window | None, b: Window | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(
        axis == other and same(first, position)
        for (axis, first), (other, position) in zip(a, b, strict=True)
    )


def flat_index(at: Index, type_: TensorType) -> Expr:
    """Return the row-major position of an index."""
    position = e.index(0)
    for i, n in zip(at, type_.shape, strict=True):
        position = e.add(e.mul(position, e.extent(n)), i)
    return position
