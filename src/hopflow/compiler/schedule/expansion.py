"""Expansion of short loops: the statements of their steps, one after the other.

for i1 in 0..2:                           out0[i0, 0] = x[i0, 0] * s[i0]
    out0[i0, i1] = x[i0, i1] * s[i0]  ->  out0[i0, 1] = x[i0, 1] * s[i0]
"""

from collections.abc import Sequence

from hopflow.compiler.schedule.copies import copied
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import Accumulate, Assign, Declare, For, Let, Stmt, Store
from hopflow.loop_ir.walk import is_order_free, loaded


class Expansion:
    """The statements of short loops, one after the other.

    What the loops accumulate or assign to a variable of the row is a `Let` after each
    step.
    """

    def __init__(self) -> None:
        self.values: dict[Var, Expr] = {}
        self.accumulators: set[Var] = set()
        self.statements: list[Stmt] = []

    def of(self, body: Sequence[Stmt]) -> list[Stmt] | None:
        """Return the statements of a body; None: it has others than straight-line code
        whose order may change."""
        return self.statements if all(map(self._add, body)) else None

    def _add(self, statement: Stmt) -> bool:
        match statement:
            case For():
                return self._add_steps(statement)
            case Declare(var, value):
                self.accumulators.add(var)
                self._define(var, value)
            case Assign(var, value) if var in self.accumulators:
                self._define(var, value)
            case Accumulate(var, combine, value) if var in self.accumulators:
                self._define(var, e.binary(combine, e.read(var), value))
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
                elif not self._add(statement):
                    return False
        self.statements += late
        return True

    def _define(self, var: Var, value: Expr) -> None:
        suffix = f"_{len(self.statements)}"
        self.statements.append(copied(Let(var, value), self.values, suffix))


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
