"""Where a value is while a program is scheduled: registers, memory, or nowhere yet.

A `Slot` is what a lowering rule gets as its operand. Its `place` may change: a value
that was only pending is given registers or a buffer when someone needs it stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.nest import Buffer, Stmt

REGISTER_LIMIT = 4
"""Static tensors up to this many elements live in registers, unrolled. Above, a vector
loop over a buffer in the first-level cache costs less than scalar code."""


@dataclass(eq=False, slots=True)
class Registers:
    """Each element is an expression over variables and constants."""

    type: TensorType
    elements: tuple[Expr, ...]

    def __getitem__(self, at: Index) -> Expr:
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

    @property
    def buffers(self) -> frozenset[Buffer]:
        return frozenset()


@dataclass(eq=False, slots=True)
class Stored:
    """`buffer[prefix]`, a dense sub-array."""

    type: TensorType
    buffer: Buffer
    prefix: Index = ()

    def __getitem__(self, at: Index) -> Expr:
        return e.load(self.buffer, (*self.prefix, *at))

    @property
    def is_dense(self) -> bool:
        return self.buffer.strides is None

    @property
    def buffers(self) -> frozenset[Buffer]:
        return frozenset({self.buffer})


@dataclass(eq=False, slots=True)
class Pending:
    """Elements computed where they are read.

    reads   the buffers that an element may read
    cost    of one element, in instructions
    depth   how many pending values are nested in it
    """

    type: TensorType
    element: Callable[[Index], Expr]
    reads: frozenset[Buffer]
    cost: int
    depth: int
    is_view: bool = False

    def __getitem__(self, at: Index) -> Expr:
        return self.element(at)

    @property
    def buffers(self) -> frozenset[Buffer]:
        return self.reads


Place: TypeAlias = Registers | Stored | Pending


@dataclass(eq=False, slots=True)
class Slot:
    """One value: its place, and how many readers are still to come.

    home   the statement list it was made in: only there may it be given another place
    """

    place: Place
    uses: int = 0
    home: list[Stmt] | None = None
    memo: dict[tuple[int, ...], tuple[Index, Expr, int]] = field(default_factory=dict)

    @property
    def type(self) -> TensorType:
        return self.place.type

    def __getitem__(self, at: Index) -> Expr:
        place = self.place
        if not isinstance(place, Pending):
            return place[at]
        # Reading twice at one index gives one node, which is then computed once.
        key = tuple(map(id, at))
        known = self.memo.get(key)
        if known is not None and known[2] == Epoch.now:
            return known[1]
        element = place.element(at)
        self.memo[key] = (at, element, Epoch.now)
        return element

    @property
    def scalar(self) -> Expr:
        """The value of a rank 0 slot."""
        return self[()]


class Epoch:
    """Counts the changes of places: an element read before one may be stale."""

    now = 0


def flat_index(at: Index, type_: TensorType) -> Expr:
    """The row-major position of an index."""
    position = e.index(0)
    for i, n in zip(at, type_.shape, strict=True):
        position = e.add(e.mul(position, e.extent(n)), i)
    return position


def static_size(type_: TensorType) -> int | None:
    """The number of elements, None if symbolic."""
    return prod(map(int, type_.shape)) if type_.is_static else None


def is_small(type_: TensorType) -> bool:
    """Whether a value of this type lives in registers."""
    size = static_size(type_)
    return size is not None and size <= REGISTER_LIMIT


def indices(shape: Sequence[int]) -> list[Index]:
    """Every index of a static shape, in row-major order."""
    result: list[Index] = [] if 0 in shape else [()]
    for n in shape:
        result = [(*at, e.index(i)) for at in result for i in range(n)]
    return result


WEIGHTS = {"div": 8, "rem": 20, "sqrt": 8, "load": 2, "const": 0, "var": 0, "cast": 1}


def weight(node: Expr) -> int:
    """About how many instructions one node is."""
    if node.op in e.MATH:
        return 30
    return WEIGHTS.get(node.op, 1)
