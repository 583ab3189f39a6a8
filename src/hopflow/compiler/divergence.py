"""Which values differ between the lanes of a gang, and who has to keep what it had.

    for lane1 in 0..n gang 8 independent:
        var c2: f64 = x[lane1]                  varying: the value is
        var k3: i64 = 0                         uniform: only lanes that go on read it
        do:
        while c2 < 1.0:                         divergent: the test is varying
            c2 = c2 * 2.0                       lanes that are done keep theirs
            k3 = k3 + 1
            ...
        y[lane1] = c2

A lane that is done with a loop may go on computing what nobody reads any more: only a
variable that is read outside of the loop has to keep its value in that lane.
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
    While,
)

_Part: TypeAlias = tuple[Stmt, bool]
"""A statement with control flow, and whether it is the `else` of a branch."""


@dataclass(frozen=True, slots=True)
class _Change:
    """An `Assign` or `Accumulate`, and the parts around it, outermost first."""

    statement: Assign | Accumulate
    around: tuple[_Part, ...]


class Divergence:
    """The analysis of a loop whose iterations become lanes.

    varying     the variables that may differ between lanes
    lets        by variable, values of `Let` that are the same wherever they are read
    """

    def __init__(self, loop: For, private: Collection[Buffer] = ()) -> None:
        """
        Args:
            private: Memory that each iteration has for itself.
        """
        self.varying = {loop.var}
        self._private = set(private)
        self.lets: dict[Var, Expr] = {}
        self._values: dict[Var, Expr] = {}  # of what is defined: its first value
        self._homes: dict[Var, tuple[_Part, ...]] = {}  # what is around a definition
        self._shared: dict[Var, set[_Part]] = {}  # what is around all reads
        self._some: dict[Var, set[_Part]] = {}  # what is around some read
        self._changes: list[_Change] = []
        self._tests: dict[Stmt, Expr] = {}
        self._divergent: set[Stmt] = set()
        self._known: dict[Expr, bool] = {}
        self._ends = {let.var for let in _ends(loop.body)}
        self._collect(loop.body, ())
        while self._grows():
            self._known.clear()
        self._keeping = {c.statement for c in self._changes if self._must_keep(c)}
        self._local = {c.statement for c in self._changes if self._is_by_branch(c)}
        self._find_lets(loop)

    def is_uniform(self, expr: Expr) -> bool:
        """Whether `expr` is the same in all lanes that compute it."""
        if expr not in self._known:
            for node in walk.nodes(expr):
                if node not in self._known:
                    own = node.op not in ("var", "load") or not (
                        node.attr in self.varying or node.attr in self._private
                    )
                    self._known[node] = own and all(self._known[a] for a in node.args)
        return self._known[expr]

    def is_divergent(self, s: For | While | If) -> bool:
        """Whether lanes may go different ways at `s`."""
        return s in self._divergent

    def ends_together(self, s: For) -> bool:
        """Whether lanes of a divergent loop begin when there are as many steps to come
        as they make. What their first statement defines is then the same in all."""
        first = s.body[0] if s.body else None
        return isinstance(first, Let) and first.var in self._ends

    @property
    def diverges(self) -> bool:
        """Whether there is a statement where they may."""
        return bool(self._divergent)

    def keeps(self, s: Assign | Accumulate) -> bool:
        """Whether a lane in which `s` is not run must keep what the variable was."""
        return s in self._keeping

    def is_local(self, s: Assign | Accumulate) -> bool:
        """Whether it is by the branch around `s` alone that lanes do not run it, as far
        as the variable is concerned."""
        return s in self._local

    # --- collection

    def _collect(self, body: Sequence[Stmt], around: tuple[_Part, ...]) -> None:
        pending: list[tuple[Stmt, tuple[_Part, ...]]] = [
            (s, around) for s in reversed(body)
        ]
        while pending:
            s, around = pending.pop()
            own = (*around, (s, False))
            # The test of a `While` is what each of its steps computes.
            self._read(s, own if isinstance(s, While) else around)
            match s:
                case Let() | Declare():
                    self._values[s.var] = s.value
                    self._homes[s.var] = around
                case Assign() | Accumulate():
                    self._changes.append(_Change(s, around))
                case For(extent=test) | While(test=test) | If(test=test):
                    self._tests[s] = test
                case _:
                    pass
            for k, inner in enumerate(walk.bodies(s)):
                side = (s, k > 0 and isinstance(s, If))
                pending += [(t, (*around, side)) for t in reversed(inner)]

    def _read(self, s: Stmt, around: tuple[_Part, ...]) -> None:
        if isinstance(s, Allocate):  # there is one for all lanes
            return
        reads = [n.attr for n in walk.nodes(*walk.expressions(s)) if n.op == "var"]
        if isinstance(s, Accumulate):
            reads.append(s.var)
        for var in reads:
            known = self._shared.get(var)
            parts = set(around)
            self._shared[var] = parts if known is None else known & parts
            self._some.setdefault(var, set()).update(parts)

    # --- what is varying

    def _grows(self) -> bool:
        """Find more of what is varying; whether there was any."""
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
            self._known.clear()

    def _within(self, change: _Change) -> tuple[_Part, ...]:
        """What is around a change, and not around the definition of the variable."""
        home = self._homes.get(change.statement.var, ())
        return change.around[len(home) :]

    def _differs(self, change: _Change) -> bool:
        """Whether the lanes that read a variable after a change may have made different
        numbers of such changes."""
        parts = self._within(change)
        divergent = [part for part in parts if part[0] in self._divergent]
        if not divergent:
            return False
        # Of one loop that is run once, lanes that go on have all made as many steps.
        only = parts[0]
        is_read_there = only in self._shared.get(change.statement.var, {only})
        is_loop = isinstance(only[0], _LOOPS) and not self._begins_apart(only[0])
        return not (divergent == [only] and is_loop and is_read_there)

    def _must_keep(self, change: _Change) -> bool:
        parts = self._within(change)
        for k, part in enumerate(parts):
            if part[0] not in self._divergent or self._is_replaced(change, part):
                continue
            again = any(isinstance(s, _LOOPS) for s, _ in parts[:k])
            again = again or self._begins_apart(part[0])
            if again or part not in self._shared.get(change.statement.var, {part}):
                return True
        return False

    def _begins_apart(self, s: Stmt) -> bool:
        """Whether lanes wait for their first step, while others make theirs."""
        return isinstance(s, For) and self.ends_together(s)

    def _is_by_branch(self, change: _Change) -> bool:
        parts = self._within(change)
        divergent = [part for part in parts if part[0] in self._divergent]
        return divergent == [*change.around[-1:]] != []

    def _is_replaced(self, change: _Change, part: _Part) -> bool:
        """Whether the other side of a branch changes the variable, too, in the lanes in
        which `change` is not made, before anyone reads it."""
        s, is_else = part
        if not isinstance(s, If) or is_else or change.around[-1] != part:
            return False
        var = change.statement.var
        changes = [x for x in s.else_ if isinstance(x, Assign) and x.var is var]
        read = self._some.get(var, set())
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


def _ends(body: Sequence[Stmt]) -> Iterator[Let]:
    """In loops to some `n`, `let left = n - 1 - i` if nothing else reads `i`."""
    for s in walk.statements(body):
        if not (isinstance(s, For) and s.body and isinstance(s.body[0], Let)):
            continue
        first = s.body[0]
        left = e.sub(e.sub(s.extent, e.index(1)), e.read(s.var))
        if walk.same(first.value, left):
            rest = [walk.expressions(x) for x in walk.statements(s.body[1:])]
            others = [n for x in rest for n in walk.nodes(*x) if n.op == "var"]
            if all(n.attr is not s.var for n in others):
                yield first


_LOOPS: Final = (For, While)


def registers(divergence: Divergence, body: Sequence[Stmt]) -> Iterator[Expr]:
    """The expressions of `body` that are computed for each lane, each node once."""
    seen: set[Expr] = set()
    for s in walk.statements(body):
        for node in walk.nodes(*walk.expressions(s)):
            if node not in seen and not divergence.is_uniform(node):
                seen.add(node)
                yield node
