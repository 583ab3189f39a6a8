"""What the passes over memory know of a program, and decide about it."""

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
    """A value that is copied to where it is to be, and why it cannot be made there."""

    value: Value
    what: str
    reason: str
    node: Node

    def __str__(self) -> str:
        return f"{self.what}: {self.reason} ({self.node.line})"


@dataclass(eq=False)
class MemoryPlan:
    """The allocation of each value of a program that is not in registers.

    donated   the parameters whose memory may be written over
    copies    what is copied nevertheless
    updated   by the number of a result the parameter in whose memory it is
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
        self._found: dict[Symbol, tuple[Scope, int]] = {}  # where the run finds sizes
        for block, equation in walk(self.program.block):
            if equation.symbol is not None:
                at = self.live.writes[equation]
                self._found.setdefault(equation.symbol, (self.live.scopes[block], at))

    def is_sized(self, type_: TensorType) -> bool:
        """Whether memory of a type can be made when the program begins."""
        return self.entry.issuperset(free_symbols(*type_.shape))

    def of(self, value: Value) -> Allocation | None:
        """The allocation of a value; None: it is in registers."""
        return self.allocations.of(value) if value in self.allocations else None

    def join(self, a: Allocation, b: Allocation) -> str | None:
        """Make one of two allocations; None, or why that cannot be."""
        return self.allocations.join(a, b, is_sized=self.is_sized(a.type))

    def part_at(self, equation: Equation, piece: Pointwise, number: int) -> Part | None:
        """The value that is a piece of a result, if it is made there."""
        element = piece.elements[number]
        found = self.of(element.attr) if element.op == "element" else None
        part = None if found is None else found.part_of
        if part is None or part.equation is not equation or part.piece is not piece:
            return None
        return part if part.number == number else None

    def is_made_there(self, equation: Equation, piece: Pointwise, number: int) -> bool:
        """Whether the elements of a piece of a result are in its memory already: those
        of a part of it, or of a value that was in this memory before."""
        element, result = piece.elements[number], equation.results[number]
        if self.part_at(equation, piece, number) is not None:
            return True
        if not is_at_own_index(element, result):
            return False
        found = self.of(element.attr)
        return found is not None and found is self.of(result)

    def put_into(self, part: Allocation, place: Part) -> str | None:
        """Make an allocation a part of that of a result; None, or why that cannot
        be."""
        if not self._is_sized_at(part, place):
            return f"the size of `{place.result.name}` is known only there"
        return self.allocations.put_into(part, place)

    def _is_sized_at(self, part: Allocation, place: Part) -> bool:
        """Whether memory for a result can be made where a part of it is: before what is
        in the part, in the block of the result."""
        if self.is_sized(place.result.type):
            return True
        scope, start = part.home
        homes = [self.live.defined[v][0] for v in (place.result, *part.values)]
        first = [position for _, position in place.window]
        symbols = set(free_symbols(*place.result.shape, *first)) - self.entry
        found = [self._found.get(symbol) for symbol in symbols]
        return all(home is scope for home in homes) and all(
            where is not None and scope.is_within(where[0]) and where[1] < start
            for where in found
        )


def walk(block: Block) -> Iterator[tuple[Block, Equation]]:
    """The equations of a block and of those in it, each before those within it."""
    for equation in block.equations:
        yield block, equation
        for inner in blocks(equation.definition):
            yield from walk(inner)


def format_memory(plan: MemoryPlan) -> str:
    """Which values share memory, a line for each allocation; and what is copied, with
    the reason and the line of the user's program."""
    lines = [f"memory of {plan.program.name}:"]
    order = {value: at for at, value in enumerate(plan.live.defined)}
    names: dict[Allocation, str] = {}
    for allocation in plan.allocations:
        names[allocation] = f"m{len(names)}"
    for allocation, name in names.items():
        where = " input" * (allocation.home[1] == 0)
        if allocation.output is not None:
            where = f" result {allocation.output}"
        if allocation.row_of is not None and allocation.row_of[0] in names:
            where = f" row of {names[allocation.row_of[0]]}"
        if allocation.part_of is not None:
            part = allocation.part_of
            first = ", ".join([str(n) for _, n in part.window])
            where = f" part of {names[plan.allocations.of(part.result)]} at [{first}]"
        values = ", ".join(
            v.name for v in sorted(allocation.values, key=order.__getitem__)
        )
        lines.append(f"    {name}: {allocation.type}{where}: {values}")
    lines += [f"    copy {copied}" for copied in plan.copies]
    return "\n".join(lines)


def exchanged(plan: MemoryPlan) -> set[Allocation]:
    """The allocations that the steps of a loop may exchange: those of carries that are
    not updated in place, and of what becomes such a carry."""
    found: set[Allocation] = set()
    for _, equation in walk(plan.program.block):
        own = equation.definition
        if not isinstance(own, Loop | While):
            continue
        for pair in zip(own.body.results, own.body.parameters, strict=False):
            value, parameter = map(plan.of, pair)
            if value is not parameter:
                found.update(a for a in (value, parameter) if a is not None)
    return found
