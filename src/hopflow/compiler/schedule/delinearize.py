"""Delinearization: a loop over all elements of a table becomes loops over its rows and
over the elements of a row.

    for k in 0..12:                         for k_row in 0..3:
        x[k / 4, k % 4] = y[k % 4]    ->        for k_column in 0..4:
                                                    x[k_row, k_column] = y[k_column]

The iterations keep their order. Quotients and remainders take tens of cycles, and hide
that the elements of a row are adjacent.
"""

from collections.abc import Iterable
from typing import Final

from hopflow import dtypes
from hopflow.compiler.kernel_program.sizes import at_least, size_of_expr
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import For, Program, Stmt
from hopflow.loop_ir.walk import bodies, expressions, nodes, replace, same, statements

SHORTEST: Final = 4
"""Elements of a row, at least: a loop of its own takes a few instructions to begin."""


def delinearize(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    pending: list[list[Stmt]] = [program.body]
    while pending:
        for s in pending.pop():
            if isinstance(s, For) and s.binding.kind == "serial" and not s.independent:
                _delinearize(s)
            pending += bodies(s)


def _delinearize(loop: For) -> None:
    """Make a loop one over rows, in place, if it computes both positions in a table."""
    parts = [*_parts(loop)]
    columns = next((c for c, of_c in parts if _has_both(of_c)), None)
    if columns is None:
        return
    [positions] = [{*of_c} for c, of_c in parts if c is columns]
    row = Var(f"{loop.var.name}_row", dtypes.int64)
    column = Var(f"{loop.var.name}_column", dtypes.int64)
    first = e.mul(e.read(row), columns)

    def position(node: Expr) -> Expr | None:
        if node in positions:
            return e.read(row if _is_quotient(node) else column)
        if node.op == "var" and node.attr is loop.var:
            return e.add(first, e.read(column))
        return None

    for s in statements(loop.body):
        replace(s, position)
    rest = e.binary("rem", loop.extent, columns)
    rows, length = e.div(loop.extent, columns), columns
    if not (rest.is_const and rest.attr == 0):
        is_part = e.compare("gt", rest, e.index(0))
        rows = e.add(rows, e.cast(is_part, dtypes.int64))
        length = e.binary("min", columns, e.sub(loop.extent, first))
    inner = For(column, length, loop.body, nodes=loop.nodes)
    loop.var, loop.extent, loop.body = row, rows, [inner]


def _parts(loop: For) -> list[tuple[Expr, list[Expr]]]:
    """Return the divisors, positive and the same in all iterations, of quotients and
    remainders of the loop's variable, each with these."""
    parts: list[tuple[Expr, list[Expr]]] = []
    for s in statements(loop.body):
        for node in nodes(*expressions(s)):
            if not node.args or node.args[0].attr is not loop.var:
                continue
            divisor = _divisor(node)
            size = None if divisor is None else size_of_expr(divisor)
            if divisor is None or size is None or not at_least(size, SHORTEST):
                continue
            known = next((of for other, of in parts if same(other, divisor)), None)
            if known is None:
                parts.append((divisor, [node]))
            else:
                known.append(node)
    return parts


def _divisor(node: Expr) -> Expr | None:
    """Return the divisor of a quotient or remainder of a number that is not negative,
    also of one by shifts and masks; None: it is neither."""
    if node.op in ("div", "rem"):
        return node.args[1]
    if node.dtype is not dtypes.int64 or not (
        len(node.args) == 2 and node.args[1].is_const
    ):
        return None
    by: int = node.args[1].attr
    if node.op in ("ashr", "lshr") and 0 <= by < 63:
        return e.index(1 << by)
    if node.op == "and" and 0 < by < dtypes.iinfo("int64").max and by & (by + 1) == 0:
        return e.index(by + 1)
    return None


def _is_quotient(node: Expr) -> bool:
    return node.op in ("div", "ashr", "lshr")


def _has_both(positions: Iterable[Expr]) -> bool:
    return len({*map(_is_quotient, positions)}) == 2
