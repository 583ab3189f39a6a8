"""Copies of statements for other values of variables."""

from collections.abc import Mapping, Sequence

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Accumulate, For, Let, Stmt, Store
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


def nest_copy(nest: Sequence[For], body: Sequence[Stmt], suffix: str) -> For:
    """Return a nest of loops with another body of straight-line statements.

    Args:
        suffix: For the names of its variables.
    """
    heads = {loop: Var(f"{loop.var.name}{suffix}", loop.var.dtype) for loop in nest}
    values = {loop.var: e.read(head) for loop, head in heads.items()}
    inner: list[Stmt] = [copied(s, values, suffix) for s in body]
    for loop in reversed(nest):
        extent = substituted(loop.extent, values)
        copy = For(
            heads[loop], extent, inner, loop.independent, loop.binding, loop.nodes
        )
        inner = [copy]
    return copy


def substituted(value: Expr, values: Mapping[Var, Expr]) -> Expr:
    """Return an expression with the values of variables, folded."""
    memo: dict[Expr, Expr] = {}
    for node in nodes(value):
        if node.op == "var":
            memo[node] = values.get(node.attr, node)
        else:
            memo[node] = e.with_args(node, tuple([memo[a] for a in node.args]))
    return memo[value]
