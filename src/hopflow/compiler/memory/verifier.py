"""The rules of a memory plan, checked without trust in the passes that made it.

The program is walked forward, with a note of which value each allocation holds. A read
of a value whose memory holds another one is an error, and so is an equation that writes
over elements which it has still to read. The body of a loop is walked twice: what it
reads from around it must still be there in the second step.
"""

from collections.abc import Iterable, Iterator, Sequence

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    Loop,
    Region,
    Value,
    While,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    operands,
)
from hopflow.compiler.memory.allocations import Allocation
from hopflow.compiler.memory.parts import Part, parts, same_window
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.errors import KernelProgramError
from hopflow.loop_ir.expr import index_of
from hopflow.loop_ir.kernels import Library

__all__ = ["verify_memory"]

_Held = dict[Allocation, Value | None]


def verify_memory(plan: MemoryPlan) -> None:
    """Check a plan.

    Raises:
        KernelProgramError: A value is read after its memory was given to another. The
            message names both.
    """
    _Verifier(plan).program()


class _Verifier:
    """The value that each allocation holds; None: parts of several, or no one's."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.held: _Held = {}
        self.views: dict[Value, list[Value]] = {}

    def program(self) -> None:
        block = self.plan.program.block
        for value in block.parameters:
            self.write(value)
        inputs = {v: self.plan.of(v) for v in block.parameters}
        self.equations(block)
        self.read(block.results)
        donated = {block.parameters[k] for k in self.plan.updated.values()}
        for value, allocation in inputs.items():
            if allocation is not None and value not in donated:
                self.require(self.held[allocation] is value, value, "is written over")

    def require(self, holds: bool, value: Value, rule: str) -> None:
        if not holds:
            name = self.plan.program.name
            raise KernelProgramError(f"memory of `{name}`: `{value.name}` {rule}.")

    # --- reads and writes ---

    def read(self, values: Iterable[Value]) -> None:
        for value in values:
            for base in self.views.get(value, (value,)):
                allocation = self.plan.of(base)
                if allocation is not None:
                    other = self.held.get(allocation)
                    name = f"`{other.name}`" if other else "another value"
                    rule = f"is read where its memory holds {name}"
                    self.require(other is base, base, rule)

    def write(self, value: Value) -> None:
        allocation = self.plan.of(value)
        if allocation is None:
            return
        for one in self._written_over(allocation):
            self.held[one] = None
        self.held[allocation] = value

    def _written_over(self, allocation: Allocation) -> Iterator[Allocation]:
        """The allocations that no longer hold all of a value once this one does."""
        yield from allocation.with_parts()
        for whole in list(self.plan.allocations.around(allocation))[1:]:
            yield whole
            for one in whole.parts:
                if one is not allocation and not _are_apart(one, allocation):
                    yield from one.with_parts()
            allocation = whole

    # --- equations ---

    def equations(self, block: Block) -> None:
        for equation in block.equations:
            self.equation(equation)

    def equation(self, equation: Equation) -> None:
        definition = equation.definition
        self.read(operands(definition))
        match definition:
            case Branch():
                self.branch(equation, definition)
            case Loop() | While():
                self.loop(equation, definition)
            case d.Pointwise() if definition.is_view:
                [view] = equation.results
                self.views[view] = [n.attr for n in elements(definition.elements)]
            case _:
                self.definition(equation)

    def definition(self, equation: Equation) -> None:
        definition = equation.definition
        inside = []
        if not isinstance(definition, Region):
            inside = list(elements(all_expressions(definition)))
        self.read(node.attr for node in inside)
        kept = self._kept(definition)
        for number, made in enumerate(equation.results):
            allocation = self.plan.of(made)
            for node in inside:
                if allocation is not None:
                    self._apart(equation, made, node.attr)
                if allocation is not None and self.plan.of(node.attr) is allocation:
                    own_index = index_of(node) == d.axes(made.type.ndim)
                    ordered = isinstance(definition, d.Pointwise | d.Cut | d.Prefix)
                    rule = f"is written over by `{made.name}` before it is read"
                    self.require(own_index and ordered, node.attr, rule)
            for k, value in enumerate(operands(definition)):
                if allocation is not None:
                    self._apart(equation, made, value)
                if allocation is not None and self.plan.of(value) is allocation:
                    rule = f"is an operand in the memory of the result `{made.name}`"
                    self.require(kept.get(number) == k, value, rule)
            self.write(made)

    def _apart(self, equation: Equation, made: Value, read: Value) -> None:
        """What is read where parts of its memory are written must be of other parts, or
        the piece that the equation need not write."""
        own, other = self.plan.of(made), self.plan.of(read)
        if own is None or other is None or own is other:
            return
        inner, outer = (list(self.plan.allocations.around(x)) for x in (own, other))
        common = next((x for x in inner if x in outer), None)
        if common is None:
            return
        rule = f"is in memory that `{made.name}` is written to"
        below = outer[outer.index(common) - 1]
        if common is own:
            place = below.part_of
            holds = place is not None and place.result is made
            holds = holds and place is not None and place.equation is equation
            self.require(holds and _is_part(place), read, rule)
        else:
            mine = inner[inner.index(common) - 1]
            holds = common is not other and _are_apart(mine, below)
            self.require(holds, read, rule)

    def _kept(self, definition: object) -> dict[int, int]:
        """By the number of a result the operand that it may start as."""
        match definition:
            case d.Scatter():
                return {0: 0}
            case Call():
                return definition.function.updated
            case Library():
                pairs = enumerate(definition.overwrites)
                return {number: k for number, k in pairs if k is not None}
        return {}

    # --- regions ---

    def branch(self, equation: Equation, branch: Branch) -> None:
        before, after = self.held, list[_Held]()
        for block in branch.blocks:
            self.held = dict(before)
            self.equations(block)
            self.read(block.results)
            self.moves(block.results, equation.results)
            after.append(self.held)
        self.held = dict(before)
        for allocation in {a for held in after for a in held}:
            found = {id(h.get(allocation)): h.get(allocation) for h in after}
            self.held[allocation] = (
                next(iter(found.values())) if len(found) == 1 else None
            )
        for value in equation.results:
            self.write(value)

    def moves(self, values: Sequence[Value], targets: Sequence[Value]) -> None:
        """Values are copied one after the other to where others are."""
        for value, target in zip(values, targets, strict=True):
            if self.plan.of(value) is not self.plan.of(target):
                self.read([value])
                self.write(target)

    def loop(self, equation: Equation, loop: Loop | While) -> None:
        body, count = loop.body, len(loop.carry)
        self.moves(loop.carry, body.parameters)
        before = dict(self.held)
        for _ in range(2):
            if isinstance(loop, While):
                self.block(loop.test)
                self.read(loop.test.results)
            for value in equation.results[count:]:
                self.write(value)
            self.block(body)
            self.read(body.results)
        for allocation, held in before.items():  # it may take no step
            if self.held.get(allocation) is not held:
                self.held[allocation] = None
        for value in equation.results:
            self.write(value)

    def block(self, block: Block) -> None:
        for value in block.parameters:
            self.write(value)
        self.equations(block)


def _are_apart(a: Allocation, b: Allocation) -> bool:
    """Whether two parts of one allocation are different pieces of one definition."""
    x, y = a.part_of, b.part_of
    if x is None or y is None or x.equation is not y.equation:
        return False
    return x.number == y.number and x.piece is not y.piece and _is_part(x)


def _is_part(part: Part | None) -> bool:
    """Whether a piece of a result is all of a value, and where the part says."""
    return part is not None and any(
        found.value is part.value
        and found.piece is part.piece
        and found.number == part.number
        and same_window(found.window, part.window)
        for found in parts(part.equation)
    )
