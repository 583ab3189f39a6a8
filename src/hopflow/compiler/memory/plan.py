"""The memory plan: the record that the passes over memory read and fill."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hopflow.compiler.kernel_program.definitions import Pointwise
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
    blocks,
)
from hopflow.compiler.memory.allocations import Allocation, Allocations
from hopflow.compiler.memory.live_ranges import LiveRanges, Scope
from hopflow.compiler.memory.parts import Part, is_at_own_index
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Symbol, free_symbols


@dataclass(frozen=True, slots=True)
class Copied:
    """A value that has to be copied, and the reason why it is not computed in place.

    in_loop   whether each step of a loop copies it
    """

    value: Value
    text: str
    reason: str
    node: Node
    in_loop: bool

    def __str__(self) -> str:
        return f"{self.text}: {self.reason} ({self.node.line})"


@dataclass(eq=False)
class MemoryPlan:
    """The allocation of each value of a program that is not in registers.

    donated   by the number of a result, the parameter whose memory it may overwrite
    copies    the copies that remain
    updated   by the number of a result, the parameter whose memory it does overwrite
    entry     the symbols that the shapes of the parameters define
    """

    program: KernelProgram
    donated: dict[int, int] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    updated: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = LiveRanges(self.program)
        self.allocations = Allocations(self.live)
        inputs = self.program.block.parameters
        self.entry: set[Symbol] = {s for v in inputs for s in free_symbols(*v.shape)}
        self._defined: dict[Symbol, tuple[Scope, int]] = {}  # of sizes known at runtime
        for block, equation in walk(self.program.block):
            if equation.symbol is not None:
                at = self.live.writes[equation]
                self._defined.setdefault(equation.symbol, (self.live.scopes[block], at))

    def is_sized(self, type_: TensorType) -> bool:
        """Return whether the entry of the program knows the size of a type."""
        return self.entry.issuperset(free_symbols(*type_.shape))

    def of(self, value: Value) -> Allocation | None:
        """Return the allocation of a value, or None if it is in registers."""
        return self.allocations.of(value) if value in self.allocations else None

    def join(self, a: Allocation, b: Allocation) -> str | None:
        """Merge two allocations; return None, or the reason why they must stay two."""
        return self.allocations.join(a, b, is_sized=self.is_sized(a.type))

    def part_at(self, equation: Equation, piece: Pointwise, number: int) -> Part | None:
        """Return the value that is a piece of a result, if it is computed there."""
        element = piece.elements[number]
        allocation = self.of(element.attr) if element.op == "element" else None
        part = None if allocation is None else allocation.part_of
        if part is None or part.equation is not equation or part.piece is not piece:
            return None
        return part if part.number == number else None

    def is_made_there(self, equation: Equation, piece: Pointwise, number: int) -> bool:
        """Return whether the memory of a result already holds the elements of a piece.

        Either a part of the result was computed there, or the memory held the same
        elements before the equation.
        """
        element, result = piece.elements[number], equation.results[number]
        if self.part_at(equation, piece, number) is not None:
            return True
        if not is_at_own_index(element, result):
            return False
        allocation = self.of(element.attr)
        return allocation is not None and allocation is self.of(result)

    def put_into(self, part: Allocation, place: Part) -> str | None:
        """Make an allocation a part of a result's; return None, or why it cannot be."""
        if not self._is_sized_at(part, place):
            return f"the size of `{place.result.name}` is known only there"
        return self.allocations.put_into(part, place)

    def _is_sized_at(self, part: Allocation, place: Part) -> bool:
        """Return whether memory for a result can be allocated before a part of it.

        That must be possible in the block of the result, before the part is written.
        """
        if self.is_sized(place.result.type):
            return True
        scope, start = part.home
        homes = [self.live.defined[v][0] for v in (place.result, *part.values)]
        first = [position for _, position in place.window]
        symbols = set(free_symbols(*place.result.shape, *first)) - self.entry
        definitions = [self._defined.get(symbol) for symbol in symbols]
        return all(home is scope for home in homes) and all(
            definition is not None
            and scope.is_within(definition[0])
            and definition[1] < start
            for definition in definitions
        )


def walk(block: Block) -> Iterator[tuple[Block, Equation]]:
    """Yield the equations of a block with their blocks, outer equations first."""
    for equation in block.equations:
        yield block, equation
        for inner in blocks(equation.definition):
            yield from walk(inner)


def format_memory(plan: MemoryPlan) -> str:
    """Return the text of a plan: a line for each allocation, and one for each copy.

    A line of a copy ends with the reason and the line of the user's program.
    """
    lines = [f"memory of {plan.program.name}:"]
    order = {value: at for at, value in enumerate(plan.live.defined)}
    names: dict[Allocation, str] = {}
    for allocation in plan.allocations:
        names[allocation] = f"m{len(names)}"
    for allocation, name in names.items():
        role = " input" * (allocation.home[1] == 0)
        if allocation.output is not None:
            role = f" result {allocation.output}"
        if allocation.row_of is not None and allocation.row_of[0] in names:
            role = f" row of {names[allocation.row_of[0]]}"
        if allocation.part_of is not None:
            part = allocation.part_of
            first = ", ".join([str(n) for _, n in part.window])
            role = f" part of {names[plan.allocations.of(part.result)]} at [{first}]"
        values = ", ".join(
            v.name for v in sorted(allocation.values, key=order.__getitem__)
        )
        lines.append(f"    {name}: {allocation.type}{role}: {values}")
    lines += [f"    copy {copied}" for copied in plan.copies]
    return "\n".join(lines)


def exchanged(plan: MemoryPlan) -> set[Allocation]:
    """Return the allocations that the steps of a loop may exchange.

    They are those of carries that are not updated in place, and of the values that
    become such carries.
    """
    allocations: set[Allocation] = set()
    for _, equation in walk(plan.program.block):
        loop = equation.definition
        if not isinstance(loop, Loop | While):
            continue
        for pair in zip(loop.body.results, loop.body.parameters, strict=False):
            value, parameter = map(plan.of, pair)
            if value is not parameter:
                allocations.update(a for a in (value, parameter) if a is not None)
    return allocations
