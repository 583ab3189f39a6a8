"""Divergence analysis: which values differ between the lanes of a gang.

    for lane1 in 0..n gang 8 independent:
        var c2: f64 = x[lane1]                  varying: the value is
        var k3: i64 = 0                         uniform: only active lanes read it
        do:
        while c2 < 1.0:                         divergent: the test is varying
            c2 = c2 * 2.0                       inactive lanes keep their values
            k3 = k3 + 1
            ...
        y[lane1] = c2

A lane that has left a loop may go on to compute values that nothing reads: only a
variable that is read outside of the loop must keep its value in that lane.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Trap,
    While,
)

_Part: TypeAlias = tuple[Stmt, bool]
"""A statement with control flow, and whether the part is the `else` of a branch."""


@dataclass(frozen=True, slots=True)
class _Change:
    """An `Assign` or `Accumulate`, and the parts that enclose it, outermost first."""

    statement: Assign | Accumulate
    enclosing: tuple[_Part, ...]


class Divergence:
    """The analysis of a loop whose iterations become lanes.

    varying     the variables that may differ between lanes
    lets        by variable, values of `Let` that are the same wherever they are read
    """

    def __init__(self, loop: For, private: Collection[Buffer] = ()) -> None:
        """Analyse a loop.

        Args:
            private: The buffers of which each iteration has a copy.
        """
        self.varying = {loop.var}
        self._private = set(private)
        self.lets: dict[Var, Expr] = {}
        self._values: dict[Var, Expr] = {}  # initial values
        self._homes: dict[Var, tuple[_Part, ...]] = {}  # parts around the definition
        self._all_reads: dict[Var, set[_Part]] = {}  # parts around all reads
        self._some_reads: dict[Var, set[_Part]] = {}  # parts around some read
        self._changes: list[_Change] = []
        self._tests: dict[Stmt, Expr] = {}
        self._divergent: set[Stmt] = set()
        self._memo: dict[Expr, bool] = {}
        self._ends = {let.var for let in _ends(loop.body)}
        self._extents = {*_extents(loop.body)}
        self._collect(loop.body, ())
        while self._grows():
            self._memo.clear()
        self._keeping = {c.statement for c in self._changes if self._must_keep(c)}
        self._local = {c.statement for c in self._changes if self._is_by_branch(c)}
        self._find_lets(loop)

    def is_uniform(self, expr: Expr) -> bool:
        """Return whether `expr` is the same in all lanes that compute it."""
        if expr not in self._memo:
            for node in walk.nodes(expr):
                if node not in self._memo:
                    fixed = node.op not in ("var", "load") or not (
                        node.attr in self.varying or node.attr in self._private
                    )
                    self._memo[node] = fixed and all(self._memo[a] for a in node.args)
        return self._memo[expr]

    def is_divergent(self, s: For | While | If) -> bool:
        """Return whether lanes may take different paths at `s`."""
        return s in self._divergent

    def ends_together(self, s: For) -> bool:
        """Return whether the lanes of a divergent loop end together.

        A lane then begins when the number of remaining steps is its own. The variable
        that the first statement defines is uniform.
        """
        first = s.body[0] if s.body else None
        return isinstance(first, Let) and first.var in self._ends

    @property
    def diverges(self) -> bool:
        """Whether some statement is divergent."""
        return bool(self._divergent)

    def keeps(self, s: Assign | Accumulate) -> bool:
        """Return whether a lane that skips `s` must keep the variable's value."""
        return s in self._keeping

    def is_local(self, s: Assign | Accumulate) -> bool:
        """Return whether the innermost branch alone decides if a lane runs `s`.

        Divergent statements around the definition of the variable do not count.
        """
        return s in self._local

    # --- collection

    def _collect(self, body: Sequence[Stmt], enclosing: tuple[_Part, ...]) -> None:
        pending: list[tuple[Stmt, tuple[_Part, ...]]] = [
            (s, enclosing) for s in reversed(body)
        ]
        while pending:
            s, enclosing = pending.pop()
            inside = (*enclosing, (s, False))
            # Each step of a `While` computes its test.
            self._read(s, inside if isinstance(s, While) else enclosing)
            match s:
                case Let() | Declare():
                    self._values[s.var] = s.value
                    self._homes[s.var] = enclosing
                case Assign() | Accumulate():
                    self._changes.append(_Change(s, enclosing))
                case For(extent=test) | While(test=test) | If(test=test):
                    self._tests[s] = test
                case _:
                    pass
            for k, inner in enumerate(walk.bodies(s)):
                side = (s, k > 0 and isinstance(s, If))
                pending += [(t, (*enclosing, side)) for t in reversed(inner)]

    def _read(self, s: Stmt, enclosing: tuple[_Part, ...]) -> None:
        if isinstance(s, Allocate):  # all lanes share the allocation
            return
        reads = [n.attr for n in walk.nodes(*walk.expressions(s)) if n.op == "var"]
        if isinstance(s, Trap):  # an access is checked against what all lanes share
            reads = [var for var in reads if var not in self._extents]
        if isinstance(s, Accumulate):
            reads.append(s.var)
        for var in reads:
            common = self._all_reads.get(var)
            parts = set(enclosing)
            self._all_reads[var] = parts if common is None else common & parts
            self._some_reads.setdefault(var, set()).update(parts)

    # --- varying variables

    def _grows(self) -> bool:
        """Add varying variables and divergent statements; return if there are more."""
        before = len(self.varying), len(self._divergent)
        for var, value in self._values.items():
            if var not in self._ends and not self.is_uniform(value):
                self._add(var)
        for s, test in self._tests.items():
            if not self.is_uniform(test):
                self._divergent.add(s)
        for change in self._changes:
            s = change.statement
            if not self.is_uniform(s.value) or self._differs(change):
                self._add(s.var)
        return before != (len(self.varying), len(self._divergent))

    def _add(self, var: Var) -> None:
        if var not in self.varying:
            self.varying.add(var)
            self._memo.clear()

    def _parts_of(self, change: _Change) -> tuple[_Part, ...]:
        """Return the parts that enclose a change, but not the variable's definition."""
        home = self._homes.get(change.statement.var, ())
        return change.enclosing[len(home) :]

    def _differs(self, change: _Change) -> bool:
        """Return whether lanes that read a variable may differ in their changes."""
        parts = self._parts_of(change)
        divergent = [part for part in parts if part[0] in self._divergent]
        if not divergent:
            return False
        # In a single loop all lanes that are still active have made as many steps.
        outer = parts[0]
        is_read_inside = outer in self._all_reads.get(change.statement.var, {outer})
        is_loop = isinstance(outer[0], _LOOPS) and not self._begins_apart(outer[0])
        return not (divergent == [outer] and is_loop and is_read_inside)

    def _must_keep(self, change: _Change) -> bool:
        parts = self._parts_of(change)
        for k, part in enumerate(parts):
            if part[0] not in self._divergent or self._is_replaced(change, part):
                continue
            again = any(isinstance(s, _LOOPS) for s, _ in parts[:k])
            again = again or self._begins_apart(part[0])
            if again or part not in self._all_reads.get(change.statement.var, {part}):
                return True
        return False

    def _begins_apart(self, s: Stmt) -> bool:
        """Return whether lanes wait for their first step while others run theirs."""
        return isinstance(s, For) and self.ends_together(s)

    def _is_by_branch(self, change: _Change) -> bool:
        parts = self._parts_of(change)
        divergent = [part for part in parts if part[0] in self._divergent]
        return divergent == [*change.enclosing[-1:]] != []

    def _is_replaced(self, change: _Change, part: _Part) -> bool:
        """Return whether the other side of a branch also assigns the variable.

        Nothing may read it before, so that lanes that do not run `change` need not keep
        it.
        """
        s, is_else = part
        if not isinstance(s, If) or is_else or change.enclosing[-1] != part:
            return False
        var = change.statement.var
        changes = [x for x in s.else_ if isinstance(x, Assign) and x.var is var]
        read = self._some_reads.get(var, set())
        return bool(changes) and read.isdisjoint({(s, False), (s, True)})

    def _find_lets(self, loop: For) -> None:
        changed = {c.statement.var for c in self._changes}
        for s in walk.statements(loop.body):
            if isinstance(s, Let) and not self.is_uniform(s.value):
                read = [n.attr for n in walk.nodes(s.value) if n.op == "var"]
                fixed = loop.var, *self.lets
                if all(
                    var in fixed or not (var in self.varying or var in changed)
                    for var in read
                ):
                    self.lets[s.var] = s.value


def _extents(body: Sequence[Stmt]) -> Iterator[Var]:
    """Yield the variables in the extents of allocations."""
    for s in walk.statements(body):
        if isinstance(s, Allocate):
            yield from (n.attr for n in walk.nodes(*s.buffer.shape) if n.op == "var")


def _ends(body: Sequence[Stmt]) -> Iterator[Let]:
    """Yield each `let left = n - 1 - i` of a loop to `n` if nothing else reads `i`."""
    for s in walk.statements(body):
        if not (isinstance(s, For) and s.body and isinstance(s.body[0], Let)):
            continue
        first = s.body[0]
        remaining = e.sub(e.sub(s.extent, e.index(1)), e.read(s.var))
        if walk.same(first.value, remaining):
            expressions = [walk.expressions(x) for x in walk.statements(s.body[1:])]
            others = [n for x in expressions for n in walk.nodes(*x) if n.op == "var"]
            if all(n.attr is not s.var for n in others):
                yield first


_LOOPS: Final = (For, While)


def registers(divergence: Divergence, body: Sequence[Stmt]) -> Iterator[Expr]:
    """Yield the expressions of `body` that each lane computes, each node once."""
    seen: set[Expr] = set()
    for s in walk.statements(body):
        for node in walk.nodes(*walk.expressions(s)):
            if node not in seen and not divergence.is_uniform(node):
                seen.add(node)
                yield node
