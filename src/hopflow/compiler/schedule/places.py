"""Where a value is while a program is scheduled: registers, memory, or nowhere yet.

A `Slot` is what a lowering rule gets as its operand. Its `place` may change: a value
that was only pending is given registers or a buffer when someone needs it stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from hopflow.compiler.kernel_program.definitions import axes
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.nest import Buffer, Stmt
from hopflow.loop_ir.walk import nodes

REGISTER_LIMIT = 4
"""Static tensors up to this many elements live in registers, unrolled. Above, a vector
loop over a buffer in the first-level cache costs less than scalar code."""


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

    @property
    def buffers(self) -> frozenset[Buffer]:
        return frozenset()


@dataclass(eq=False, slots=True)
class Stored:
    """`buffer[prefix]`, a dense sub-array."""

    type: TensorType
    buffer: Buffer
    prefix: Index = ()

    def read(self, at: Index, condition: Expr | None = None) -> Expr:
        """The element at an index; 0 where the condition is false."""
        return e.load(self.buffer, (*self.prefix, *at), condition)

    @property
    def is_dense(self) -> bool:
        return self.buffer.strides is None

    @property
    def buffers(self) -> frozenset[Buffer]:
        return frozenset({self.buffer})


@dataclass(eq=False, slots=True)
class Pending:
    """Elements computed where they are read.

    element   over the axes of the value
    reads     the buffers that an element may read
    cost      of one element, in instructions
    depth     how many pending values are nested in it
    """

    type: TensorType
    element: Expr
    reads: frozenset[Buffer]
    cost: int
    depth: int
    is_view: bool = False
    _order: list[Expr] | None = None

    @property
    def order(self) -> list[Expr]:
        """The nodes of `element`, each after its operands."""
        if self._order is None:
            self._order = nodes(self.element)
        return self._order

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
        """The element at an index, as lowering rules see it: a node that `evaluated`
        makes code of. A constant is one already."""
        constant = self._constant()
        return constant or e.element(self, self.type.dtype, at)

    def where(self, condition: Expr, at: Index, otherwise: Expr) -> Expr:
        """The element at an index where the condition holds, as lowering rules see it;
        elsewhere `otherwise`."""
        constant = self._constant()
        element = constant or e.element(self, self.type.dtype, at, condition)
        return e.select(condition, element, otherwise)

    def _constant(self) -> Expr | None:
        place = self.place
        if isinstance(place, Registers) and len(place.elements) == 1:
            [element] = place.elements
            return element if element.is_const else None
        return None

    def at(self, at: Index) -> Expr:
        """The element at an index, in code."""
        place = self.place
        if not isinstance(place, Pending):
            return place.read(at)
        return self.known_at(at, None) or _computed(_Frame.of_slot(self, place, at))

    def known_at(self, at: Index, condition: Expr | None) -> Expr | None:
        """The element of a pending value at an index, if it was asked for before, under
        the same condition or none. Reading twice at one index gives one node, which is
        then computed once."""
        for args in (at,) if condition is None else (at, (*at, condition)):
            known = self.memo.get(tuple(map(id, args)))
            if known is not None and known[2] == Epoch.now:
                return known[1]
        return None

    def remember(self, at: Index, condition: Expr | None, value: Expr) -> None:
        """Note the element of a pending value for `known_at`."""
        args = at if condition is None else (*at, condition)
        self.memo[tuple(map(id, args))] = args, value, Epoch.now

    @property
    def cost(self) -> int:
        """What computing an element once more takes."""
        return self.place.cost if isinstance(self.place, Pending) else 0

    @property
    def scalar(self) -> Expr:
        """The value of a rank 0 slot."""
        return self.at(())


class _Frame:
    """An expression that is being evaluated: `done` of the nodes in `order` are.

    values      by node; at first those of the variables
    condition   that of the read which asks for the value: every read in it has that too
    slot        whose element it is, at `at`
    """

    __slots__ = ("_both", "at", "condition", "done", "order", "slot", "values")

    def __init__(
        self,
        order: Sequence[Expr],
        values: dict[Expr, Expr],
        condition: Expr | None = None,
    ) -> None:
        self.order, self.values, self.condition = order, values, condition
        self.done = 0
        self.slot: Slot | None = None
        self.at: Index = ()
        self._both: dict[Expr, Expr] = {}

    @staticmethod
    def of_slot(
        slot: Slot, place: Pending, at: Index, condition: Expr | None = None
    ) -> "_Frame":
        variables = axes(len(at))
        values = dict(zip(variables, at, strict=True))
        frame = _Frame(place.order, values, condition)
        frame.slot, frame.at = slot, at
        return frame

    def conditions(self, own: Expr | None) -> Expr | None:
        """The condition of a read in this value that has one of its `own`."""
        if own is None or self.condition is None or own is self.condition:
            return own or self.condition
        if own not in self._both:  # one node for one condition, as `known_at` asks
            self._both[own] = e.binary("and", self.condition, own)
        return self._both[own]

    def computed(self, node: Expr, args: Index) -> Expr:
        """A node of these operands. Where the condition is false, those that were read
        are no numbers of the user's, and none of them may divide."""
        divides = node.op in ("div", "rem") and node.dtype.is_integer
        if divides and self.condition is not None and not args[1].is_const:
            x, y = args
            args = x, e.select(self.condition, y, e.const(1, y.dtype))
        return e.with_args(node, args)


def evaluated(root: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """`root` with values for variables, and with the elements that it reads: loaded,
    taken from registers, or computed here."""
    return _computed(_Frame(nodes(root), dict(values)))


def _computed(first: _Frame) -> Expr:
    # Not by recursion: values may be pending on each other thousands deep.
    frames = [first]
    while True:
        frame = frames[-1]
        inner = _advance(frame)
        if inner is not None:
            frames.append(inner)
            continue
        value = frame.values[frame.order[-1]]
        if frame.slot is not None:
            frame.slot.remember(frame.at, frame.condition, value)
        frames.pop()
        if not frames:
            return value


def _advance(frame: _Frame) -> _Frame | None:
    """Evaluate up to an element that is yet to be computed: the frame of that one."""
    order, values = frame.order, frame.values
    for k in range(frame.done, len(order)):
        node = order[k]
        if node in values:
            continue
        args = tuple([values[a] for a in node.args])
        if node.op != "element":
            values[node] = frame.computed(node, args)
            continue
        conditional = e.condition_of(node) is not None
        at = args[:-1] if conditional else args
        condition = frame.conditions(args[-1] if conditional else None)
        slot: Slot = node.attr
        place = slot.place
        if condition is not None and condition.is_const:
            if not condition.attr:
                values[node] = e.const(0, node.dtype)
                continue
            condition = None
        if isinstance(place, Pending):
            found = slot.known_at(at, condition)
            if found is None:
                frame.done = k
                return _Frame.of_slot(slot, place, at, condition)
            values[node] = found
        else:
            values[node] = place.read(at, condition)
    frame.done = len(order)
    return None


def reads(root: Expr) -> dict[Slot, int]:
    """The values that an expression reads, and at how many different indices; what a
    view moves is read by whoever reads the view."""
    found: dict[Slot, int] = {}
    numbers: dict[Any, int] = {}  # of index expressions, by their form
    seen: set[tuple[Any, ...]] = set()
    frames = [(nodes(root), dict[Expr, int]())]
    while frames:
        order, known = frames.pop()
        for node in order:
            if node in known:
                continue
            args = tuple([known[a] for a in node.args])
            attr = node.attr if node.op == "const" else id(node.attr)
            key = node.op, node.dtype, attr, args
            known[node] = numbers.setdefault(key, len(numbers))
            if node.op != "element" or key in seen:
                continue
            seen.add(key)
            slot: Slot = node.attr
            place = slot.place
            if isinstance(place, Pending) and place.is_view:
                at = args[: len(e.index_of(node))]
                frames.append((place.order, dict(zip(axes(len(at)), at, strict=True))))
            else:
                found[slot] = found.get(slot, 0) + 1
    return found


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


def indices_of(type_: TensorType) -> list[Index]:
    """Every index of a value of static shape."""
    return indices([n for n in type_.shape if isinstance(n, int)])


WEIGHTS = {"div": 8, "rem": 20, "sqrt": 8, "load": 2, "const": 0, "var": 0, "cast": 1}


def weight(node: Expr) -> int:
    """About how many instructions one node is."""
    if node.op in e.MATH:
        return 30
    return WEIGHTS.get(node.op, 1)
