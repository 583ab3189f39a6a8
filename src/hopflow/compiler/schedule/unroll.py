"""Unrolling of short rows: the rows become the lanes of vectors, not their elements.

    for i0 in 0..n independent:                   for i0 in 0..n vector 8 independent:
        for i1 in 0..2 vector 2 independent:  ->      out0[i0, 0] = x[i0, 0] * s[i0]
            out0[i0, i1] = x[i0, i1] * s[i0]          out0[i0, 1] = x[i0, 1] * s[i0]

A row of few elements does not fill a vector. The code generator loads and stores the
rows of 8 iterations as contiguous vectors, and shuffles them. Loops that `coalesce`
will make one are left to it: their vectors need no shuffles. Loops that sum floats stay
as they are: the order of a sum is decided when its loop is written.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.coalesce import outermost_coalesced
from hopflow.compiler.schedule.expansion import Expansion
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    For,
    Let,
    Program,
    Stmt,
)
from hopflow.loop_ir.walk import (
    accessed,
    bodies,
    depends_on,
    expressions,
    nodes,
    perfect_nest,
    replace,
    step_of,
)

SHORT: Final = 6
"""Elements of a row that is unrolled, at most, unless it consists of rows."""
DEAR: Final = 16
"""Instructions of an element, from which on longer rows are unrolled, too: to fill the
vectors saves more than the shuffles cost."""
FEWEST: Final = 16
"""Rows that are worth it, at least."""
CHOICES: Final = 4
"""Elements of a row, at most, one of which is read at a position that all rows share,
and only the run knows: all are read, and it is chosen."""
WIDEST: Final = 16
"""Elements of a row, and from one row to the next, at most: vectors are shuffled."""
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


def _unroll(rows: For, target: Target) -> None:
    """Unroll the loops in the body of a loop, if that pays."""
    inner = [s for s in rows.body if isinstance(s, For)]
    if not inner or not all(map(_is_short, inner)):
        return
    if rows.extent.is_const and rows.extent.attr < FEWEST:
        return
    if is_coalesced(rows):
        return
    body = Expansion().of(rows.body)
    if body is None:
        return
    _choose_elements(rows.var, body)
    if not _are_near(rows.var, body):
        return
    work = sum(weight(n) for s in body for n in nodes(*expressions(s)))
    binding = vector_binding(rows.extent, body, target)
    if work <= LARGEST and all(_pays(s, binding.width) for s in inner):
        rows.body, rows.binding = body, binding


def is_coalesced(rows: For) -> bool:
    """Return whether `coalesce` will make one loop of a loop and the one in it."""
    nest = perfect_nest(rows)
    return len(nest) == 2 and outermost_coalesced(nest) == 0


def _is_short(row: For) -> bool:
    """Return whether a loop, with those in it, has few steps."""
    return 1 < _steps(row) <= WIDEST


def _steps(row: For) -> int:
    """Return the number of steps of a loop, with those in it; 0 if it is unknown."""
    steps: int = row.extent.attr if row.independent and row.extent.is_const else 0
    for inner in row.body:
        if isinstance(inner, For):
            steps *= _steps(inner)
    return steps


def _pays(row: For, width: int) -> bool:
    """Return whether vectors of rows save more than the shuffles cost."""
    if any(isinstance(s, For) for s in row.body):
        return width > 1
    work = sum(weight(n) for s in row.body for n in nodes(*expressions(s)))
    return width > 1 and bool(row.extent.attr <= SHORT or work >= DEAR)


def _choose_elements(rows: Var, body: Sequence[Stmt]) -> None:
    """Replace the reads of an element of each row whose position all rows share: read
    all elements of the row, which are adjacent, and choose that one."""
    moving = {rows, *(s.var for s in body if isinstance(s, Let))}

    def chosen(node: Expr) -> Expr | None:
        if node.op != "load" or e.condition_of(node) is not None:
            return None
        *at, last = e.index_of(node) or [e.index(0)]
        extent = node.attr.shape[-1] if at else last
        if last.is_const or not (extent.is_const and 1 < extent.attr <= CHOICES):
            return None
        leaves = nodes(last)
        is_shared = not any(x.op == "load" or x.attr in moving for x in leaves)
        if not (is_shared and any(depends_on(i, rows) for i in at)):
            return None
        elements = [e.load(node.attr, (*at, e.index(k))) for k in range(extent.attr)]
        value = elements.pop()
        for k, element in enumerate(elements):
            value = e.select(e.compare("eq", last, e.index(k)), element, value)
        return value

    for statement in body:
        replace(statement, chosen)


def _are_near(rows: Var, body: Sequence[Stmt]) -> bool:
    """Return whether a body accesses elements of adjacent rows, a few elements apart,
    or the same elements for all rows."""
    return all(_is_near(rows, *access) for s in body for access in accessed(s))


def _is_near(rows: Var, buffer: Buffer, at: Index) -> bool:
    moving = [axis for axis, i in enumerate(at) if depends_on(i, rows)]
    if not moving:
        return True
    [axis, *others], inner = moving, buffer.shape[moving[0] + 1 :]
    if others or buffer.strides is not None:
        return False
    step = step_of(at[axis], rows)
    if step is None or not all(extent.is_const for extent in inner):
        return False
    distance: int = prod(extent.attr for extent in inner)
    is_one = distance == 1 and step == 1
    is_known = all(position.is_const for position in at[axis + 1 :])
    return is_one or (is_known and abs(step) * distance <= WIDEST)
