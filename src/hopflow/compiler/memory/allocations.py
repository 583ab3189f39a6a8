"""Allocations: memory that values share, one after the other.

At first each value has an allocation of its own. Two become one where the rule of
`docs/notes/memory_and_aliases.md` allows it, which `conflict` decides.
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
    """Memory of one type.

    values      those that are in it
    is_input    it is the caller's, who is to find it unchanged
    is_fixed    its size changes, or it has a place of its own: it is not shared
    home        the scope in which it is made, and the position there
    carries     whether a loop's carry is in it
    row_of      the allocation, and the loop, if it is the row of the loop's step
    part_of     where it is, if it is a part of the allocation of a result
    parts       the allocations that are parts of it
    output      the number of the result of the program that is in it
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
        """It, and its parts, and theirs."""
        yield self
        for part in self.parts:
            yield from part.with_parts()


@dataclass(eq=False)
class Allocations:
    """The allocation of each value that has memory.

    live       when values are live
    is_sized   whether memory of a type can be made when the program begins
    """

    live: LiveRanges

    def __post_init__(self) -> None:
        self._of: dict[Value, Allocation] = {}
        self._joined: dict[Allocation, Allocation] = {}
        self._reads: dict[Equation, Mapping[Value, object]] = {}
        self._made: dict[Equation, Mapping[Value, object]] = {}

    def __contains__(self, value: Value) -> bool:
        return value in self._of

    def __iter__(self) -> Iterator[Allocation]:
        return iter(dict.fromkeys(map(self.of, self._of)))

    def of(self, value: Value) -> Allocation:
        """The allocation that a value is in."""
        found = self._of[value]
        while found in self._joined:
            found = self._joined[found]
        self._of[value] = found
        return found

    def add(self, value: Value, type_: TensorType | None = None) -> Allocation:
        """An allocation of its own for a value."""
        found = Allocation(type_ or value.type, self.live.defined[value])
        self._of[value] = found
        self.put(value, found)
        return found

    def put(self, value: Value, allocation: Allocation) -> None:
        """Have a value in an allocation, as one that is live when no other is."""
        self._of[value] = allocation
        allocation.values.append(value)
        for start, stop in self.live.ranges(value):
            insort(allocation.occupied, (start, stop, value), key=lambda o: o[0])

    def join(self, a: Allocation, b: Allocation, *, is_sized: bool) -> str | None:
        """Make one of two allocations; None, or why they have to stay two.

        Args:
            is_sized: Whether memory of their type can be made when the program begins.
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
        """Make an allocation a part of that of a result; None, or why it cannot be."""
        whole = self.of(place.result)
        reason = self._misfit(part, place)
        if reason is None:
            part.part_of = place
            whole.parts.append(part)
            whole.home = min(part.home, whole.home, key=lambda home: home[1])
        return reason

    def around(self, allocation: Allocation) -> Iterator[Allocation]:
        """The allocations that one is a part of, from itself on."""
        yield allocation
        while allocation.part_of is not None:
            allocation = self.of(allocation.part_of.result)
            yield allocation

    def is_dense(self, allocation: Allocation) -> bool:
        """Whether it is memory without gaps."""
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
        """A value in it, or in a part of it, that is made or read as a whole."""
        values = (v for one in allocation.with_parts() for v in one.values)
        return next((v for v in values if not self._takes_any_place(v)), None)

    # --- conflicts ---

    def _misfit(self, part: Allocation, place: Part) -> str | None:
        """Why an allocation cannot be a part of that of a result."""
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
        for whole in self.around(self.of(place.result)):
            if whole.is_fixed or whole.is_input:
                return f"`{whole.values[0].name}` has memory of its own"
            # Pieces of one definition are apart; those of several need not be.
            others = [whole]
            for one in whole.parts:
                if one.part_of and one.part_of.equation is not inner.equation:
                    others += one.with_parts()
            reason = self._overlap(part.with_parts(), others, place)
            if reason is not None:
                return reason
            inner = whole.part_of or inner
        return None

    def _takes_any_place(self, value: Value) -> bool:
        """Whether what makes and reads a value does so by element."""
        whole = Library | Callback | Call
        maker = self._maker(value)
        if maker is not None and isinstance(maker.definition, whole):
            return False
        readers = [q.definition for q, _ in self.live.readers.get(value, ())]
        return not any(
            isinstance(own, whole) or (isinstance(own, Pointwise) and own.is_view)
            for own in readers
        )

    def _overlap(
        self,
        some: Iterable[Allocation],
        others: Sequence[Allocation],
        place: Part | None = None,
    ) -> str | None:
        """Why allocations cannot be in the same memory where they hold values that
        nothing else but `place` has at one element."""
        for one, other in product(some, others):
            reason = _live_at_once(one.occupied, self._occupied(other, place))
            if reason is not None:
                return reason
            for value in one.values:
                for equation, read, made in self._transfers(value, other):
                    own = place is not None and place.equation is equation
                    if not own or place is None or place.result is not made:
                        return _needs(read, made)
        return None

    def _occupied(self, whole: Allocation, place: Part | None) -> list[Occupied]:
        """When values are in an allocation. One that the equation of `place` is the
        last to read, and not where that part is, is out of the way of the part."""
        if place is None:
            return whole.occupied
        equation = place.equation
        there = {node.attr for node in elements(place.piece.elements)}
        read = {
            value
            for value, is_own in self.live.inside[equation].items()
            if is_own and value not in there
        }
        kept = self._within(dict.fromkeys(read), whole)
        if not kept:
            return whole.occupied
        found = [o for o in whole.occupied if o[2] not in kept]
        for value in kept:
            ranges = self.live.ranges(value, but=equation)
            found += [(start, stop, value) for start, stop in ranges]
        return sorted(found, key=lambda o: o[0])

    def conflict(self, a: Allocation, b: Allocation, *, is_sized: bool) -> str | None:
        """Why two allocations cannot be one."""
        if not same_layout(a.type, b.type):
            return f"{a.type} and {b.type} are laid out differently"
        for one in (a, b):
            if one.is_fixed or one.row_of or one.part_of:
                return f"`{one.values[0].name}` has memory of its own"
            if one.is_input:
                return f"`{one.values[0].name}` is an input, which stays as it is"
        if not is_sized:
            first, second = sorted((a, b), key=lambda one: one.home[1])
            if not second.home[0].is_within(first.home[0]):
                return f"the size of `{first.values[0].name}` is known only there"
        small, large = sorted((a, b), key=lambda one: len(one.values))
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
        """Why an equation cannot read from one and write to the other."""
        for value in small.values:
            for equation, read, made in self._transfers(value, large):
                if not in_place(equation, read, made, self.live):
                    return _needs(read, made)
        return None

    def _transfers(
        self, value: Value, other: Allocation
    ) -> Iterator[tuple[Equation, Value, Value]]:
        """The equations that read `value` and make a value of another allocation, or
        read one of that and make `value`: with what they read, and what they make."""
        maker = self._maker(value)
        if maker is not None:
            for read in self._within(self._read_by(maker), other):
                yield maker, read, value
        for equation, block in self.live.readers.get(value, ()):
            for made in self._within(self._made_by(equation, block), other):
                yield equation, value, made

    def _within(
        self, values: Mapping[Value, object], allocation: Allocation
    ) -> list[Value]:
        """Those of `values` that are in an allocation."""
        if len(allocation.values) < len(values):
            return [v for v in allocation.values if v in values]
        return [v for v in values if v in self._of and self.of(v) is allocation]

    def _maker(self, value: Value) -> Equation | None:
        if value in self.live.loops:
            return self.live.loops[value][0]
        return self.live.makers.get(value)

    def _read_by(self, maker: Equation) -> Mapping[Value, object]:
        """What is read at the moment at which an equation writes."""
        if maker not in self._reads:
            definition = maker.definition
            found = dict[Value, object](self.live.inside.get(maker, {}))
            if isinstance(definition, Branch):
                found.update((v, None) for b in definition.blocks for v in b.results)
            else:
                found.update(dict.fromkeys(operands(definition)))
            self._reads[maker] = found
        return self._reads[maker]

    def _made_by(self, equation: Equation, block: object) -> Mapping[Value, object]:
        """What is written at the moment at which a reader reads."""
        definition = equation.definition
        if isinstance(definition, Loop | While) and block:
            return {}
        if equation not in self._made:
            made = equation.results
            if isinstance(definition, Loop | While):
                made = tuple([v for b in blocks(definition) for v in b.parameters])
            self._made[equation] = dict.fromkeys(made)
        return self._made[equation]


def _live_at_once(one: list[Occupied], other: list[Occupied]) -> str | None:
    """Why the values of two allocations cannot be in one of them."""
    for start, stop, value in one:
        found = _overlapping(other, start, stop)
        if found is not None:
            return f"`{found.name}` and `{value.name}` are live at the same time"
    return None


def _overlapping(taken: list[Occupied], start: int, stop: float) -> Value | None:
    """A value that is live between two positions."""
    at = bisect_right(taken, start, key=lambda o: o[0])
    if at and taken[at - 1][1] >= start:
        return taken[at - 1][2]
    if at < len(taken) and taken[at][0] <= stop:
        return taken[at][2]
    return None


def _needs(read: Value, made: Value) -> str:
    return (
        f"an element of `{made.name}` needs elements of `{read.name}` that would be "
        "written over"
    )


def same_layout(a: TensorType, b: TensorType) -> bool:
    """Whether dense arrays of two types take the same memory."""
    return a.dtype is b.dtype and shape_key(a.shape) == shape_key(b.shape)


def in_place(equation: Equation, read: Value, made: Value, live: LiveRanges) -> bool:
    """Whether an equation can write `made` over `read`, which it reads."""
    definition = equation.definition
    match definition:
        case Loop() | While():
            region, number = live.loops.get(made, (None, 0))
            return region is equation and definition.carry[number] is read
        case Branch():
            number = equation.results.index(made)
            others = [b.results for b in definition.blocks if read in b.results]
            return all(results[number] is read for results in others)
        case Call():
            number = equation.results.index(made)
            parameter = definition.function.updated.get(number)
            return (
                parameter is not None
                and definition.operands[parameter] is read
                and definition.operands.count(read) == 1
            )
        case Library():
            number = equation.results.index(made)
            source = (
                definition.overwrites[number]
                if number < len(definition.overwrites)
                else None
            )
            operands = list(definition.operands)
            return (
                source is not None
                and operands[source] is read
                and operands.count(read) == 1
            )
        case Scatter():
            return definition.base is read and read not in live.inside[equation]
        case Pointwise() | Cut() | Prefix():
            fits = same_layout(made.type, read.type)
            return fits and live.inside[equation].get(read, True)
    return False
