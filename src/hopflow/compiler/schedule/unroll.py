"""Unrolling of short rows: the rows become the lanes of vectors, not their elements.

    for i0 in 0..n independent:                   for i0 in 0..n vector 8 independent:
        for i1 in 0..2 vector 2 independent:  ->      out0[i0, 0] = x[i0, 0] * s[i0]
            out0[i0, i1] = x[i0, i1] * s[i0]          out0[i0, 1] = x[i0, 1] * s[i0]

A row of few elements does not fill a vector. The code generator loads and stores the
rows of 8 iterations as contiguous vectors, and shuffles them. Loops that `coalesce`
will make one are left to it: their vectors need no shuffles.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.coalesce import outermost_coalesced
from hopflow.compiler.schedule.copies import copied
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Index, Var
from hopflow.loop_ir.program import For, Program, Stmt, Store
from hopflow.loop_ir.walk import (
    bodies,
    depends_on,
    expressions,
    is_order_free,
    loaded,
    nodes,
    perfect_nest,
)

SHORT: Final = 5
"""Elements of a row that is unrolled, at most."""
PART: Final = 4
"""A row that fills at most this part of a vector is unrolled; a longer one if one of
its elements is left over."""
FEWEST: Final = 16
"""Rows that are worth it, at least."""
WIDEST: Final = 9
"""Elements from one row to the next, at most, for vectors of rows to be shuffled."""
LARGEST: Final = 192
"""Instructions of an unrolled row, at most."""


def unroll(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    pending = [program.body]
    while pending:
        body = pending.pop()
        for statement in body:
            if isinstance(statement, For) and statement.independent:
                _unroll(statement, target)
            pending += bodies(statement)


def _unroll(outermost: For, target: Target) -> None:
    """Unroll the innermost loop of a nest, if that pays."""
    nest = perfect_nest(outermost)
    if len(nest) == 1:
        return
    rows, row = nest[-2:]
    if not (row.extent.is_const and row.extent.attr <= SHORT):
        return
    if rows.extent.is_const and rows.extent.attr < FEWEST:
        return
    if not all(map(is_order_free, row.body)) or outermost_coalesced(nest[-2:]) == 0:
        return
    work = sum(weight(n) for s in row.body for n in nodes(*expressions(s)))
    if work * row.extent.attr > LARGEST or not _are_near(rows.var, row.body):
        return
    body: list[Stmt] = []
    for k in range(row.extent.attr):
        values = {row.var: e.index(k)}
        body += [copied(s, values, f"_{k}") for s in row.body]
    binding = vector_binding(rows.extent, body, target)
    is_odd = row.extent.attr % row.binding.width == 1
    if is_odd or row.extent.attr * PART <= binding.width:
        rows.body, rows.binding = body, binding


def _are_near(rows: Var, body: Sequence[Stmt]) -> bool:
    """Return whether a body accesses elements of adjacent rows, a few elements apart,
    or the same elements for all rows."""
    return all(_is_near(rows, *access) for s in body for access in _accesses(s))


def _accesses(statement: Stmt) -> Iterator[tuple[Buffer, Index]]:
    for node in loaded(statement):
        yield node.attr, e.index_of(node)
    if isinstance(statement, Store):
        yield statement.buffer, statement.indices


def _is_near(rows: Var, buffer: Buffer, at: Index) -> bool:
    moving = [axis for axis, i in enumerate(at) if depends_on(i, rows)]
    if not moving:
        return True
    [axis, *others], inner = moving, buffer.shape[moving[0] + 1 :]
    i = at[axis]
    base = i.args[0] if i.op == "add" and i.args[1].is_const else i
    is_dense = not others and base.op == "var" and buffer.strides is None
    if not (is_dense and all(extent.is_const for extent in inner)):
        return False
    distance: int = prod(extent.attr for extent in inner)
    return distance <= WIDEST
