"""Allocations: memory that several values use in turn.

Each value starts with its own allocation. `Allocations.join` merges two where the rule
of `docs/notes/memory_and_aliases.md` allows it; `Allocations.conflict` decides that.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from hopflow.compiler.kernel_program.definitions import (
    Cut,
    Pointwise,
    Prefix,
    Scatter,
)
from hopflow.compiler.kernel_program.program import (
    Branch,
    Call,
    Equation,
    Loop,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.compiler.kernel_program.rewriting import (
    elements,
    operands,
)
from hopflow.compiler.memory.live_ranges import LiveRanges, Scope
from hopflow.compiler.memory.parts import Part, is_dense
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Callback, Library

Occupied: TypeAlias = tuple[int, float, Value]


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory for arrays of one type.

    values      the values that it holds
    is_input    it is the caller's array, which must stay unchanged
    is_fixed    it is not shared: its size changes, or its place is set already
    home        the scope in which it is allocated, and the position there
    carries     whether it holds the carry of a loop
    row_of      the allocation of the stack and the loop, if it is the row of one step
    part_of     the part of a result that it is, if any
    parts       the allocations that are parts of it
    output      the number of the program's result that it holds
    occupied    when it holds which value: start, stop and value, by start
    """

    type: TensorType
    home: tuple[Scope, int]
    values: list[Value] = field(default_factory=list)
    is_input: bool = False
    is_fixed: bool = False
    carries: bool = False
    row_of: "tuple[Allocation, Equation] | None" = None
    part_of: Part | None = None
    parts: "list[Allocation]" = field(default_factory=list)
    output: int | None = None
    occupied: list[Occupied] = field(default_factory=list)

    def with_parts(self) -> "Iterator[Allocation]":
        """Yield the allocation, its parts, and their parts."""
        yield self
        for part in self.parts:
            yield from part.with_parts()


@dataclass(eq=False)
class Allocations:
    """The allocation of each value that has memory.

    live       the live ranges of the program's values
    """

    live: LiveRanges

    def __post_init__(self) -> None:
        self._of: dict[Value, Allocation] = {}
        self._joined: dict[Allocation, Allocation] = {}
        self._reads: dict[Equation, Mapping[Value, object]] = {}
        self._writes: dict[Equation, Mapping[Value, object]] = {}

    def __contains__(self, value: Value) -> bool:
        return value in self._of

    def __iter__(self) -> Iterator[Allocation]:
        return iter(dict.fromkeys(map(self.of, self._of)))

    def of(self, value: Value) -> Allocation:
        """Return the allocation that holds a value."""
        allocation = self._of[value]
        while allocation in self._joined:
            allocation = self._joined[allocation]
        self._of[value] = allocation
        return allocation

    def add(self, value: Value, type_: TensorType | None = None) -> Allocation:
        """Give a value a new allocation, and return it."""
        allocation = Allocation(type_ or value.type, self.live.defined[value])
        self._of[value] = allocation
        self.put(value, allocation)
        return allocation

    def put(self, value: Value, allocation: Allocation) -> None:
        """Put a value into an allocation whose other values are dead meanwhile."""
        self._of[value] = allocation
        allocation.values.append(value)
        for start, stop in self.live.ranges(value):
            insort(allocation.occupied, (start, stop, value), key=lambda o: o[0])

    def join(self, a: Allocation, b: Allocation, *, is_sized: bool) -> str | None:
        """Merge two allocations; return None, or the reason why they must stay two.

        Args:
            is_sized: Whether the entry of the program knows the size of their type.
        """
        if a is b:
            return None
        reason = self.conflict(a, b, is_sized=is_sized)
        if reason is not None:
            return reason
        large, small = (a, b) if len(a.values) >= len(b.values) else (b, a)
        large.home = min(a.home, b.home, key=lambda home: home[1])
        large.is_input = a.is_input or b.is_input
        large.carries = a.carries or b.carries
        large.values += small.values
        large.parts += small.parts
        for occupied in small.occupied:
            insort(large.occupied, occupied, key=lambda o: o[0])
        self._joined[small] = large
        return None

    def put_into(self, part: Allocation, place: Part) -> str | None:
        """Make an allocation a part of a result's; return None, or why it cannot be."""
        whole = self.of(place.result)
        reason = self._misfit(part, place)
        if reason is None:
            part.part_of = place
            whole.parts.append(part)
            whole.home = min(part.home, whole.home, key=lambda home: home[1])
        return reason

    def enclosing(self, allocation: Allocation) -> Iterator[Allocation]:
        """Yield the allocation, the one that it is a part of, and so on outwards."""
        yield allocation
        while allocation.part_of is not None:
            allocation = self.of(allocation.part_of.result)
            yield allocation

    def is_dense(self, allocation: Allocation) -> bool:
        """Return whether an allocation is contiguous memory."""
        while True:
            if allocation.row_of is not None:
                allocation = allocation.row_of[0]
            elif allocation.part_of is None:
                return True
            elif is_dense(allocation.part_of):
                allocation = self.of(allocation.part_of.result)
            else:
                return False

    def has_to_be_dense(self, allocation: Allocation) -> Value | None:
        """Return a value in an allocation that needs contiguous memory, or None."""
        values = (v for part in allocation.with_parts() for v in part.values)
        return next((v for v in values if not self._takes_any_place(v)), None)

    # --- conflicts ---

    def _misfit(self, part: Allocation, place: Part) -> str | None:
        """Return why an allocation cannot be a part of a result's, or None."""
        name, live = place.value.name, self.live
        if part.part_of is not None:
            return f"`{name}` is a part of `{part.part_of.result.name}`"
        if part.is_input:
            return f"`{name}` is an input, which stays as it is"
        if part.carries:
            return f"`{name}` is carried by a loop"
        if part.is_fixed or part.row_of is not None:
            return f"`{name}` has memory of its own"
        scope = live.defined[place.result][0]
        for value in part.values:
            if not live.defined[value][0].is_within(scope):
                return f"`{value.name}` is made outside the loop"
        if not (is_dense(place) and self.is_dense(self.of(place.result))):
            whole_value = self.has_to_be_dense(part)
            if whole_value is not None:
                return f"`{whole_value.name}` has to be dense"
        inner = place
        for whole in self.enclosing(self.of(place.result)):
            if whole.is_fixed or whole.is_input:
                return f"`{whole.values[0].name}` has memory of its own"
            # Pieces of one definition are disjoint; those of several may overlap.
            others = [whole]
            for sibling in whole.parts:
                if sibling.part_of and sibling.part_of.equation is not inner.equation:
                    others += sibling.with_parts()
            reason = self._overlap(part.with_parts(), others, place)
            if reason is not None:
                return reason
            inner = whole.part_of or inner
        return None

    def _takes_any_place(self, value: Value) -> bool:
        """Return whether a value is written and read by element, never as a whole."""
        by_whole = Library | Callback | Call
        maker = self._maker(value)
        if maker is not None and isinstance(maker.definition, by_whole):
            return False
        readers = [q.definition for q, _ in self.live.readers.get(value, ())]
        return not any(
            isinstance(definition, by_whole)
            or (isinstance(definition, Pointwise) and definition.is_view)
            for definition in readers
        )

    def _overlap(
        self,
        allocations: Iterable[Allocation],
        others: Sequence[Allocation],
        place: Part | None = None,
    ) -> str | None:
        """Return why allocations cannot share memory, or None.

        They can where no two of their values are live at once, and where each equation
        that reads one and writes the other is the one at `place`.
        """
        for allocation, other in product(allocations, others):
            reason = _live_at_once(allocation.occupied, self._occupied(other, place))
            if reason is not None:
                return reason
            for value in allocation.values:
                for equation, read, result in self._transfers(value, other):
                    is_at_place = place is not None and place.equation is equation
                    if not is_at_place or place is None or place.result is not result:
                        return _needs(read, result)
        return None

    def _occupied(self, whole: Allocation, place: Part | None) -> list[Occupied]:
        """Return when an allocation holds which value.

        The last read by the equation of `place` does not count for a value that the
        equation reads at the result's own index, outside the piece that the part
        replaces.
        """
        if place is None:
            return whole.occupied
        equation = place.equation
        in_piece = {node.attr for node in elements(place.piece.elements)}
        read = {
            value
            for value, at_own_index in self.live.inside[equation].items()
            if at_own_index and value not in in_piece
        }
        excluded = self._values_in(dict.fromkeys(read), whole)
        if not excluded:
            return whole.occupied
        occupied = [o for o in whole.occupied if o[2] not in excluded]
        for value in excluded:
            ranges = self.live.ranges(value, without=equation)
            occupied += [(start, stop, value) for start, stop in ranges]
        return sorted(occupied, key=lambda o: o[0])

    def conflict(self, a: Allocation, b: Allocation, *, is_sized: bool) -> str | None:
        """Return why two allocations cannot be merged, or None."""
        if not same_layout(a.type, b.type):
            return f"{a.type} and {b.type} are laid out differently"
        for allocation in (a, b):
            if allocation.is_fixed or allocation.row_of or allocation.part_of:
                return f"`{allocation.values[0].name}` has memory of its own"
            if allocation.is_input:
                return (
                    f"`{allocation.values[0].name}` is an input, which stays as it is"
                )
        if not is_sized:
            first, second = sorted((a, b), key=lambda allocation: allocation.home[1])
            if not second.home[0].is_within(first.home[0]):
                return f"the size of `{first.values[0].name}` is known only there"
        small, large = sorted((a, b), key=lambda allocation: len(allocation.values))
        reason = _live_at_once(
            small.occupied, large.occupied
        ) or self._shared_equations(small, large)
        others = list(large.with_parts())
        for part in small.parts:
            reason = reason or self._overlap(part.with_parts(), others, part.part_of)
        for part in large.parts:
            reason = reason or self._overlap(part.with_parts(), [small], part.part_of)
        return reason

    def _shared_equations(self, small: Allocation, large: Allocation) -> str | None:
        """Return why no equation may read from one and write to the other."""
        for value in small.values:
            for equation, read, result in self._transfers(value, large):
                if not in_place(equation, read, result, self.live):
                    return _needs(read, result)
        return None

    def _transfers(
        self, value: Value, other: Allocation
    ) -> Iterator[tuple[Equation, Value, Value]]:
        """Yield the equations between a value and an allocation.

        Each reads `value` and writes a value of the allocation, or the other way round;
        it comes with the value that it reads and the value that it writes.
        """
        maker = self._maker(value)
        if maker is not None:
            for read in self._values_in(self._read_by(maker), other):
                yield maker, read, value
        for equation, block in self.live.readers.get(value, ()):
            for result in self._values_in(self._written_by(equation, block), other):
                yield equation, value, result

    def _values_in(
        self, values: Mapping[Value, object], allocation: Allocation
    ) -> list[Value]:
        """Return the values, of those passed, that an allocation holds."""
        if len(allocation.values) < len(values):
            return [v for v in allocation.values if v in values]
        return [v for v in values if v in self._of and self.of(v) is allocation]

    def _maker(self, value: Value) -> Equation | None:
        """Return the equation that writes a value: for a carry its loop."""
        if value in self.live.loops:
            return self.live.loops[value][0]
        return self.live.makers.get(value)

    def _read_by(self, maker: Equation) -> Mapping[Value, object]:
        """Return the values that an equation reads at the moment when it writes."""
        if maker not in self._reads:
            definition = maker.definition
            values = dict[Value, object](self.live.inside.get(maker, {}))
            if isinstance(definition, Branch):
                values.update((v, None) for b in definition.blocks for v in b.results)
            else:
                values.update(dict.fromkeys(operands(definition)))
            self._reads[maker] = values
        return self._reads[maker]

    def _written_by(self, equation: Equation, block: object) -> Mapping[Value, object]:
        """Return the values that a reader writes at the moment when it reads."""
        definition = equation.definition
        if isinstance(definition, Loop | While) and block:
            return {}
        if equation not in self._writes:
            values = equation.results
            if isinstance(definition, Loop | While):
                values = tuple([v for b in blocks(definition) for v in b.parameters])
            self._writes[equation] = dict.fromkeys(values)
        return self._writes[equation]


def _live_at_once(occupied: list[Occupied], other: list[Occupied]) -> str | None:
    """Return which values keep two allocations apart by being live at once, or None."""
    for start, stop, value in occupied:
        holder = _overlapping(other, start, stop)
        if holder is not None:
            return f"`{holder.name}` and `{value.name}` are live at the same time"
    return None


def _overlapping(occupied: list[Occupied], start: int, stop: float) -> Value | None:
    """Return a value that is live between two positions, or None."""
    at = bisect_right(occupied, start, key=lambda o: o[0])
    if at and occupied[at - 1][1] >= start:
        return occupied[at - 1][2]
    if at < len(occupied) and occupied[at][0] <= stop:
        return occupied[at][2]
    return None


def _needs(read: Value, result: Value) -> str:
    return (
        f"an element of `{result.name}` needs elements of `{read.name}` that would be "
        "written over"
    )


def same_layout(a: TensorType, b: TensorType) -> bool:
    """Return whether dense arrays of two types have the same size and layout."""
    return a.dtype is b.dtype and shape_key(a.shape) == shape_key(b.shape)


def in_place(equation: Equation, read: Value, result: Value, live: LiveRanges) -> bool:
    """Return whether an equation can write `result` over `read`, which it reads."""
    definition = equation.definition
    match definition:
        case Loop() | While():
            region, number = live.loops.get(result, (None, 0))
            return region is equation and definition.carry[number] is read
        case Branch():
            number = equation.results.index(result)
            others = [b.results for b in definition.blocks if read in b.results]
            return all(results[number] is read for results in others)
        case Call():
            number = equation.results.index(result)
            parameter = definition.function.updated.get(number)
            return (
                parameter is not None
                and definition.operands[parameter] is read
                and definition.operands.count(read) == 1
            )
        case Library():
            number = equation.results.index(result)
            overwritten = (
                definition.overwrites[number]
                if number < len(definition.overwrites)
                else None
            )
            values = list(definition.operands)
            return (
                overwritten is not None
                and values[overwritten] is read
                and values.count(read) == 1
            )
        case Scatter():
            return definition.base is read and read not in live.inside[equation]
        case Pointwise() | Cut() | Prefix():
            fits = same_layout(result.type, read.type)
            return fits and live.inside[equation].get(read, True)
    return False
