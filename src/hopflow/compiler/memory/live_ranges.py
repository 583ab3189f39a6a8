"""Liveness: the ranges of positions in a kernel program in which each value is live.

An equation has a position where it reads and a later one where it defines its results;
the blocks of a region lie between. A value is live from its definition to its last
read. A value from outside a loop that the loop reads is live until the loop ends. A
value that a branch reads is live, in each of its blocks, until the last read there.
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
    """A block and its positions: from `start` to `end`, where its results are read.

    parent   the scope that contains it
    region   the equation that it is a block of
    after    the position at which a branch copies its results
    """

    block: Block
    parent: "Scope | None"
    region: Equation | None
    depth: int
    start: int
    end: int = 0
    after: int = 0

    @property
    def repeats(self) -> bool:
        """Whether the block runs once for each step of a loop."""
        definition = None if self.region is None else self.region.definition
        return isinstance(definition, Loop | While)

    def is_within(self, other: "Scope") -> bool:
        scope: Scope | None = self
        while scope is not None:
            if scope is other:
                return True
            scope = scope.parent
        return False


class Range(NamedTuple):
    """The positions from `start` to `stop`, both included."""

    start: int
    stop: int


class _Use(NamedTuple):
    position: int
    scope: Scope


Reader: TypeAlias = tuple[Equation, Block | None]
"""A reader of a value: an equation and None, or the region of a block and the block
that has the value as a result."""


@dataclass(eq=False)
class LiveRanges:
    """The positions and the liveness of a program's values.

    reads, writes   the positions at which an equation reads and writes
    ends            the position at which the blocks of an equation end
    scopes          the scope of each block
    defined         the scope of each value, and the position of its definition there
    makers          the equation that a value is a result of
    loops           for a parameter of a block the loop, and the parameter's number
    readers         the readers of each value
    inside          the values that an equation's expressions read, and whether at the
                    result's own index only
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
        self._bases: dict[Value, list[Value]] = {}  # the values that a view reads
        self._block(self.program.block, None, None)

    # --- numbering ---

    def _block(
        self, block: Block, parent: Scope | None, region: Equation | None
    ) -> None:
        repeats = region is not None and not isinstance(region.definition, Branch)
        depth = 0 if parent is None else parent.depth + repeats
        scope = Scope(block, parent, region, depth, next(self._count))
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
            if isinstance(definition, While):
                # The body takes the carry over from the test.
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

    def ranges(self, value: Value, without: Equation | None = None) -> list[Range]:
        """Return in order when memory holds a value, or parts of it.

        Args:
            without: An equation whose reads do not count.
        """
        home, start = self.defined[value]
        excluded = None if without is None else self.reads[without]
        uses = [
            self._outside_loops(use, home)
            for use in self._uses.get(value, ())
            if use.position != excluded
        ]
        return [*self._written(value), *self._ranges(start, uses, home)]

    def _written(self, value: Value) -> list[Range]:
        """Return when blocks write a result before their region defines it."""
        maker = self.makers.get(value)
        definition = None if maker is None else maker.definition
        match definition:
            case Branch():
                ends = [self.scopes[block].after for block in definition.blocks]
                return [Range(end, end) for end in ends]
            case Loop() | While() if maker is not None:
                if maker.results.index(value) >= len(definition.carry):
                    # Each step writes a row.
                    return [Range(self.reads[maker], self.ends[maker])]
        return []

    def _outside_loops(self, use: _Use, home: Scope) -> _Use:
        """Return a read as the scope `home` sees it.

        A read in a loop counts at the end of the outermost loop inside `home`.
        """
        outer, scope = use, use.scope
        while scope is not home:
            assert scope.parent is not None
            assert scope.region is not None
            if scope.repeats:
                outer = _Use(self.ends[scope.region], scope.parent)
            scope = scope.parent
        return outer

    def _ranges(self, start: int, uses: Sequence[_Use], home: Scope) -> list[Range]:
        if not uses:
            return [Range(start, start)]
        last = max(uses, key=lambda use: use.position)
        if last.scope is home:
            return [Range(start, last.position)]
        inner = last.scope
        while inner.parent is not home:
            assert inner.parent is not None
            inner = inner.parent
        assert inner.region is not None
        branch = inner.region
        ranges = [Range(start, self.reads[branch])]
        for block in blocks(branch.definition):
            scope = self.scopes[block]
            inner_uses = [u for u in uses if scope.start <= u.position <= scope.end]
            if inner_uses:
                ranges += self._ranges(scope.start, inner_uses, scope)
        return ranges


def _read_inside(equation: Equation) -> dict[Value, bool]:
    definition = equation.definition
    assert not isinstance(definition, Region)
    at = axes(equation.results[0].type.ndim) if equation.results else ()
    at_own_index: dict[Value, bool] = {}
    for node in elements(all_expressions(definition)):
        at_own_index[node.attr] = (
            at_own_index.get(node.attr, True) and index_of(node) == at
        )
    return at_own_index
