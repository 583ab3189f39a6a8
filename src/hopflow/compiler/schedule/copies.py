"""Copies of statements for other values of variables."""

from collections.abc import Mapping, Sequence

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Copy,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import nodes, replace


def copied(statement: Stmt, values: dict[Var, Expr], suffix: str) -> Stmt:
    """Return a copy of a statement without a body, or of branches of such.

    Args:
        values: The values of variables. That of a `Let` or a `Declare`, whose copy has
            a variable of its own, is added.
        suffix: For the name of that variable.
    """
    match statement:
        case Let(var, value) | Declare(var, value):
            value = substituted(value, values)
            copy = Var(f"{var.name}{suffix}", var.dtype)
            values[var] = e.read(copy)
            return type(statement)(copy, value)
        case Accumulate(var, combine, value):
            return Accumulate(
                _renamed(var, values), combine, substituted(value, values)
            )
        case Assign(var, value):
            return Assign(_renamed(var, values), substituted(value, values))
        case Store(buffer, indices, value):
            indices = tuple([substituted(i, values) for i in indices])
            return Store(buffer, indices, substituted(value, values))
        case If(test, then, else_):
            return If(
                substituted(test, values),
                [copied(s, values, suffix) for s in then],
                [copied(s, values, suffix) for s in else_],
            )
    raise TypeError(f"a `{type(statement).__name__}` has no copy")


def _renamed(var: Var, values: Mapping[Var, Expr]) -> Var:
    """Return the variable of a copy in which `var` may have one of its own."""
    copy: Var = values[var].attr if var in values else var
    return copy


def rename_buffers(statement: Stmt, names: Mapping[Buffer, Buffer]) -> None:
    """Replace buffers in a statement itself, in place, which names them by elements or
    copies them."""

    def renamed(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in names:
            return None
        at = [e.rewrite(i, renamed) for i in e.index_of(node)]
        condition = e.condition_of(node)
        return e.load(names[node.attr], at, condition and e.rewrite(condition, renamed))

    if names:
        replace(statement, renamed)
        if isinstance(statement, Store):
            statement.buffer = names.get(statement.buffer, statement.buffer)
        elif isinstance(statement, Copy):
            statement.target = names.get(statement.target, statement.target)
            statement.source = names.get(statement.source, statement.source)


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
