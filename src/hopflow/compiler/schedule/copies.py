"""Copies of straight-line statements for other values of variables."""

from collections.abc import Mapping

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Accumulate, Let, Stmt, Store
from hopflow.loop_ir.walk import nodes


def copied(statement: Stmt, values: dict[Var, Expr], suffix: str) -> Stmt:
    """Return a copy of a `Let`, a `Store` or an `Accumulate`.

    Args:
        values: The values of variables. That of a `Let`, whose copy has a variable of
            its own, is added.
        suffix: For the name of that variable.
    """
    if isinstance(statement, Let):
        value = substituted(statement.value, values)
        copy = Var(f"{statement.var.name}{suffix}", statement.var.dtype)
        values[statement.var] = e.read(copy)
        return Let(copy, value)
    if isinstance(statement, Accumulate):
        value = substituted(statement.value, values)
        return Accumulate(statement.var, statement.combine, value)
    assert isinstance(statement, Store)
    indices = tuple([substituted(i, values) for i in statement.indices])
    value = substituted(statement.value, values)
    return Store(statement.buffer, indices, value)


def substituted(value: Expr, values: Mapping[Var, Expr]) -> Expr:
    """Return an expression with the values of variables, folded."""
    memo: dict[Expr, Expr] = {}
    for node in nodes(value):
        if node.op == "var":
            memo[node] = values.get(node.attr, node)
        else:
            memo[node] = e.with_args(node, tuple([memo[a] for a in node.args]))
    return memo[value]
