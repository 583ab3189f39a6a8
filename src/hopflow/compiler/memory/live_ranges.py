"""When each value of a kernel program is live, as ranges of positions in its text.

An equation has a position where it reads and a later one where it defines its results;
the blocks of a region lie between. A value is live from its definition to its last
read. What a loop reads from around it is live until the loop ends. What a branch reads
is live, in each of its blocks, until the last read there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias

from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    operands,
)
from hopflow.loop_ir.expr import index_of


@dataclass(eq=False, slots=True)
class Scope:
    """A block, and where it is: from position `start` to `end`, where its results are
    read. At `after` they are written to the results of a branch.

    around   the scope that holds it
    region   the equation of which it is a block
    """

    block: Block
    around: "Scope | None"
    region: Equation | None
    depth: int
    start: int
    end: int = 0
    after: int = 0

    @property
    def repeats(self) -> bool:
        """Whether it is run once for each step of a loop."""
        definition = None if self.region is None else self.region.definition
        return isinstance(definition, Loop | While)

    def is_within(self, other: "Scope") -> bool:
        scope: Scope | None = self
        while scope is not None:
            if scope is other:
                return True
            scope = scope.around
        return False


class Range(NamedTuple):
    """From one position to another, both included."""

    start: int
    stop: int


class _Use(NamedTuple):
    position: int
    scope: Scope


Reader: TypeAlias = tuple[Equation, Block | None]
"""What reads a value: an equation, or a block that gives it as a result of its
region."""


@dataclass(eq=False)
class LiveRanges:
    """The positions of a program.

    reads, writes   of each equation
    scopes          the scope of each block
    defined         of each value its scope, and its position there
    makers          the equation that a value is a result of
    loops           of a parameter of a block: the loop, and its number there
    readers         of each value
    inside          of an equation the values that its expressions read, and whether
                    they do so at the result's own index alone
    """

    program: KernelProgram
    reads: dict[Equation, int] = field(default_factory=dict)
    ends: dict[Equation, int] = field(default_factory=dict)
    writes: dict[Equation, int] = field(default_factory=dict)
    scopes: dict[Block, Scope] = field(default_factory=dict)
    defined: dict[Value, tuple[Scope, int]] = field(default_factory=dict)
    makers: dict[Value, Equation] = field(default_factory=dict)
    loops: dict[Value, tuple[Equation, int]] = field(default_factory=dict)
    readers: dict[Value, list[Reader]] = field(default_factory=dict)
    inside: dict[Equation, dict[Value, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._count = count()
        self._uses: dict[Value, list[_Use]] = {}
        self._bases: dict[Value, list[Value]] = {}  # what is read of views
        self._block(self.program.block, None, None)

    # --- numbering ---

    def _block(
        self, block: Block, around: Scope | None, region: Equation | None
    ) -> None:
        repeats = region is not None and not isinstance(region.definition, Branch)
        depth = 0 if around is None else around.depth + repeats
        scope = Scope(block, around, region, depth, next(self._count))
        self.scopes[block] = scope
        for number, value in enumerate(block.parameters):
            self.defined[value] = scope, scope.start
            if region is not None:
                self.loops[value] = region, number
        for equation in block.equations:
            self._equation(equation, scope)
        scope.end, scope.after = next(self._count), next(self._count)
        for value in block.results:
            self._use(value, scope.end, scope)
            if region is not None:
                self.readers.setdefault(value, []).append((region, block))

    def _equation(self, equation: Equation, scope: Scope) -> None:
        at = self.reads[equation] = next(self._count)
        definition = equation.definition
        used = list(operands(definition))
        if isinstance(definition, Region):
            for block in blocks(definition):
                self._block(block, scope, equation)
            if isinstance(definition, While):  # the body takes them over
                for value in definition.test.parameters:
                    inner = self.scopes[definition.test]
                    self._use(value, inner.end, inner)
        else:
            self.inside[equation] = _read_inside(equation)
            used += self.inside[equation]
        for value in used:
            if value in self._bases:
                used = [*used, *self._bases[value]]
        for value in dict.fromkeys(used):
            self._use(value, at, scope)
            self.readers.setdefault(value, []).append((equation, None))
        self.ends[equation] = next(self._count)
        self.writes[equation] = next(self._count)
        for value in equation.results:
            self.defined[value] = scope, self.writes[equation]
            self.makers[value] = equation
            if isinstance(definition, Pointwise) and definition.is_view:
                self._bases[value] = [*self.inside[equation]]

    def _use(self, value: Value, position: int, scope: Scope) -> None:
        if value.scalar is None:
            self._uses.setdefault(value, []).append(_Use(position, scope))

    # --- ranges ---

    def ranges(self, value: Value, but: Equation | None = None) -> list[Range]:
        """When the memory of a value holds it, or parts of it, in order; for all who
        read it `but` an equation."""
        home, start = self.defined[value]
        left_out = None if but is None else self.reads[but]
        uses = [
            self._outside_loops(use, home)
            for use in self._uses.get(value, ())
            if use.position != left_out
        ]
        return [*self._written(value), *self._ranges(start, uses, home)]

    def _written(self, value: Value) -> list[Range]:
        """When blocks write a result of their region, before that defines it."""
        maker = self.makers.get(value)
        definition = None if maker is None else maker.definition
        match definition:
            case Branch():
                ends = [self.scopes[block].after for block in definition.blocks]
                return [Range(end, end) for end in ends]
            case Loop() | While() if maker is not None:
                if maker.results.index(value) >= len(
                    definition.carry
                ):  # a row each step
                    return [Range(self.reads[maker], self.ends[maker])]
        return []

    def _outside_loops(self, use: _Use, home: Scope) -> _Use:
        """Where a read counts: at the end of the outermost loop that is in `home`."""
        found, scope = use, use.scope
        while scope is not home:
            assert scope.around is not None
            assert scope.region is not None
            if scope.repeats:
                found = _Use(self.ends[scope.region], scope.around)
            scope = scope.around
        return found

    def _ranges(self, start: int, uses: Sequence[_Use], home: Scope) -> list[Range]:
        if not uses:
            return [Range(start, start)]
        last = max(uses, key=lambda use: use.position)
        if last.scope is home:
            return [Range(start, last.position)]
        inner = last.scope
        while inner.around is not home:
            assert inner.around is not None
            inner = inner.around
        assert inner.region is not None
        branch = inner.region
        found = [Range(start, self.reads[branch])]
        for block in blocks(branch.definition):
            scope = self.scopes[block]
            here = [u for u in uses if scope.start <= u.position <= scope.end]
            if here:
                found += self._ranges(scope.start, here, scope)
        return found


def _read_inside(equation: Equation) -> dict[Value, bool]:
    definition = equation.definition
    assert not isinstance(definition, Region)
    at = axes(equation.results[0].type.ndim) if equation.results else ()
    found: dict[Value, bool] = {}
    for node in elements(all_expressions(definition)):
        found[node.attr] = found.get(node.attr, True) and index_of(node) == at
    return found
