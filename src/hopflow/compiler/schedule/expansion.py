"""Expansion of short loops: the statements of their steps, one after the other.

for i1 in 0..2:                           out0[i0, 0] = x[i0, 0] * s[i0]
    out0[i0, i1] = x[i0, i1] * s[i0]  ->  out0[i0, 1] = x[i0, 1] * s[i0]

Branches may become selects of what their sides assign ("if conversion", J. Allen et
al., Conversion of control dependence to data dependence, POPL 1983):

var r1: f32 = 0.0
if k < 2:                                 let r1_3: f32 = x[i0] * 0.5
    r1 = x[i0] * 0.5                  ->  let r1_4: f32 = x[i0]
else:                                     let r1_5: f32 = select(k < 2, r1_3, r1_4)
    r1 = x[i0]
"""

from collections.abc import Sequence

from hopflow.compiler.schedule.copies import copied
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import expressions, is_order_free, loaded, nodes, same


class Expansion:
    """The statements of short loops, one after the other.

    What the loops accumulate or assign to a variable of the row is a `Let` after each
    step.

    Args:
        extents: Those of the loops around, by their variables, to which those of the
            short loops are added: branches become selects. None: they are no
            straight-line code.
    """

    def __init__(self, extents: dict[Var, Expr] | None = None) -> None:
        self.extents = extents
        self.values: dict[Var, Expr] = {}
        self.accumulators: dict[Var, None] = {}  # in order
        self.statements: list[Stmt] = []

    def of(self, body: Sequence[Stmt]) -> list[Stmt] | None:
        """Return the statements of a body; None: it has others than straight-line code
        whose order may change."""
        return self.statements if all(map(self.add, body)) else None

    def add(self, statement: Stmt) -> bool:
        """Add a statement, if it is straight-line code whose order may change."""
        match statement:
            case For():
                return self._add_steps(statement)
            case Declare(var, value):
                self.accumulators[var] = None
                self._define(var, value)
            case Assign(var, value) if var in self.accumulators:
                self._define(var, value)
            case Accumulate(var, combine, value) if var in self.accumulators:
                self._define(var, e.binary(combine, e.read(var), value))
            case If(test, then, else_):
                return self._add_sides(test, then, else_)
            case Let() | Store() | Accumulate():
                if not is_order_free(statement):
                    return False
                suffix = f"_{len(self.statements)}"
                self.statements.append(copied(statement, self.values, suffix))
            case _:
                return False
        return True

    def _add_steps(self, loop: For) -> bool:
        """Add the steps of a loop. If they update memory, all read before one writes,
        so that the code generator may load and store whole rows."""
        if loop.binding.kind == "vector" and not all(map(_is_any_order, loop.body)):
            return False
        is_update = loop.independent and _updates(loop.body)
        late = list[Store]()
        if self.extents is not None:
            self.extents[loop.var] = loop.extent
        for k in range(loop.extent.attr):
            self.values[loop.var] = e.index(k)
            for statement in loop.body:
                if isinstance(statement, Store) and is_update:
                    copy = copied(statement, self.values, "")
                    assert isinstance(copy, Store)
                    name = f"new_{len(self.statements)}_{loop.var.name}"
                    value = Var(name, copy.value.dtype)
                    self.statements.append(Let(value, copy.value))
                    late.append(Store(copy.buffer, copy.indices, e.read(value)))
                elif not self.add(statement):
                    return False
        self.statements += late
        return True

    def _add_sides(
        self, test: Expr, then: Sequence[Stmt], else_: Sequence[Stmt]
    ) -> bool:
        """Add both sides of a branch, and select what they assign."""
        if not all(map(self._is_harmless, (*then, *else_))):
            return False
        chosen = Var(f"test_{len(self.statements)}", test.dtype)
        self._define(chosen, test)
        before = {var: self.values[var] for var in self.accumulators}
        sides = list[dict[Var, Expr]]()
        for side in (then, else_):
            self.values |= before
            if not all(map(self.add, side)):
                return False
            sides.append({var: self.values[var] for var in before})
        first, second = sides
        for var in before:
            if first[var] is not second[var]:
                value = e.select(self.values[chosen], first[var], second[var])
                self._define(var, value)
        return True

    def _is_harmless(self, s: Stmt) -> bool:
        """Return whether a statement of one side of a branch may run for the other one,
        too: it writes no memory, reads none that may be outside of an array, and
        divides by no integer that may be 0."""
        if isinstance(s, If):
            if not all(map(self._is_harmless, (*s.then, *s.else_))):
                return False
        elif not isinstance(s, Let | Declare | Assign):
            return False
        order = nodes(*expressions(s))
        return not any(map(_may_trap, order)) and all(
            self._is_safe(node) for node in loaded(s)
        )

    def _is_safe(self, node: Expr) -> bool:
        """Return whether an element may be loaded in all iterations. The condition of
        one whose index depends on data may rely on a check, which the branch guards."""
        at = e.index_of(node)
        if e.condition_of(node) is not None:
            variables = {n.attr for n in nodes(*at) if n.op == "var"}
            of_loops = variables <= {*(self.extents or ())}
            return of_loops and not any(n.op == "load" for n in nodes(*at))
        return all(map(self._is_inside, at, node.attr.shape))

    def _is_inside(self, i: Expr, extent: Expr) -> bool:
        """Return whether an index is one of an axis in all iterations."""
        if i.is_const:
            return extent.is_const and 0 <= i.attr < extent.attr
        if i.op == "sub" and same(i.args[0], e.sub(extent, e.index(1))):
            i = i.args[1]  # counts down
        count = (self.extents or {}).get(i.attr) if i.op == "var" else None
        return count is not None and same(count, extent)

    def _define(self, var: Var, value: Expr) -> None:
        suffix = f"_{len(self.statements)}"
        self.statements.append(copied(Let(var, value), self.values, suffix))


def _may_trap(node: Expr) -> bool:
    """Return whether a node divides integers by what may be 0, or may be -1: the least
    integer has no quotient."""
    if node.op not in ("div", "rem") or node.dtype.kind == "f":
        return False
    divisor = node.args[1]
    return not divisor.is_const or divisor.attr in (0, -1)


def _is_any_order(s: Stmt) -> bool:
    """Return whether a statement of a vector loop may be one of a serial loop."""
    return not isinstance(s, Accumulate) or is_order_free(s)


def _updates(body: Sequence[Stmt]) -> bool:
    """Return whether a straight-line body writes memory that it has read, but reads
    none that it has written. No iteration reads what another one has written."""
    written: set[Buffer] = set()
    read: set[Buffer] = set()
    for statement in body:
        if isinstance(statement, For):
            return False
        read.update(node.attr for node in loaded(statement))
        if not read.isdisjoint(written):
            return False
        if isinstance(statement, Store):
            written.add(statement.buffer)
    return not written.isdisjoint(read)
