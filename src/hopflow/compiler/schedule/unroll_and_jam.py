"""Unroll and jam: several rows at once, where the lanes of a vector are a column.

    for i0 in 0..8 independent:                 for i0_rows in 0..2 independent:
        for i1 in 0..9 vector 4 independent:        for i1 in 0..9 vector 4 independent:
            out0[i0, i1] = x[i1, i0]      ->            out0[i0_rows * 4, i1] =
                                                            x[i1, i0_rows * 4]
                                                        out0[i0_rows * 4 + 1, i1] =
                                                            x[i1, i0_rows * 4 + 1]
                                                        ...

The elements that one vector reads lie in as many rows of memory, and would be gathered.
Those that several iterations of the outer loop read are adjacent: the code generator
loads them as vectors, and transposes these in registers. Rows that remain have a loop
like the one before. What a row has stored, the next one does not load (see
`forwarding`). If the elements are all those of short rows, the loop over them is gone:
contiguous vectors have whole rows, which are shuffled.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import copied
from hopflow.compiler.schedule.forwarding import forwarded
from hopflow.compiler.schedule.groups import body_size, edit_nests, in_groups
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import For, Let, Program, Stmt, Store
from hopflow.loop_ir.walk import (
    depends_on,
    expressions,
    loaded,
    nodes,
    perfect_nest,
    same,
    step_of,
)

MOST: Final = 16
"""Rows at once, at most: vectors that stay in the registers."""
FEWEST: Final = 4
"""Rows at once, at least: fewer are gathered in as little time."""
WHOLE: Final = 9
"""Elements of rows that are read as a whole, at most, as the colours of an image."""
REST: Final = 8
"""Rows that remain of a dear body are computed one by one, if there are so many times
as many rows."""
DEAR: Final = 8
"""Instructions of a dear body, at least."""
LARGEST: Final = 320
"""Instructions of all rows, at most: LLVM's time grows faster than the body."""
LONG: Final = 160
"""Instructions of all rows, at most, where these are more than the fewest: to load
another row as a vector is worth less."""


def unroll_and_jam(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    edit_nests(program.body, _jammed)


def _jammed(outermost: For) -> list[For] | None:
    """Return the loops in place of a nest; None: there is nothing to gain."""
    nest = perfect_nest(outermost)
    innermost = nest[-1]
    if len(nest) == 1 or innermost.binding.kind != "vector":
        return None
    if not all(isinstance(s, Let | Store) for s in innermost.body):
        return None
    depth = _rows(nest)
    if depth is None or any(depends_on(s.extent, nest[depth].var) for s in nest):
        return None
    if _has_whole_rows(nest, depth):
        return [_without_loop(nest, depth)]
    groups = in_groups(nest, depth, partial(_count, nest, depth))
    if groups is None:
        return None
    for jammed in groups.nests:
        vectors = perfect_nest(jammed)[-1]
        vectors.body = [*forwarded(vectors.body, vectors.var.name)]
    return groups.nests


def _rows(nest: Sequence[For]) -> int | None:
    """Return which loop has the most reads whose last index counts its iterations, and
    whose other indices vary by lane."""
    *outer, vectors = nest
    depths = {loop.var: depth for depth, loop in enumerate(outer)}
    found: Counter[int] = Counter()
    for statement in vectors.body:
        for node in loaded(statement):
            *axes, last = e.index_of(node) or [e.index(0)]
            if e.condition_of(node) is not None or node.attr.strides is not None:
                continue
            if depends_on(last, vectors.var) or not any(
                depends_on(axis, vectors.var) for axis in axes
            ):
                continue
            for variable, depth in depths.items():
                if step_of(last, variable) in (1, -1):
                    found[depth] += 1
    return found.most_common(1)[0][0] if found else None


def _has_whole_rows(nest: Sequence[For], depth: int) -> bool:
    """Return whether the iterations of a loop read all elements of short rows, so that
    the vectors of these are contiguous."""
    vectors, rows = nest[-1], nest[depth]
    if not (rows.extent.is_const and rows.extent.attr <= WHOLE):
        return False
    columns = [
        same(node.attr.shape[-1], rows.extent) and depends_on(at[-2], vectors.var)
        for statement in vectors.body
        for node in loaded(statement)
        if len(at := e.index_of(node)) > 1 and depends_on(at[-1], rows.var)
    ]
    return all(columns) and body_size(vectors.body) * rows.extent.attr <= LARGEST


def _without_loop(nest: Sequence[For], depth: int) -> For:
    """Return a nest without a loop, each iteration of which is part of the body."""
    vectors, rows = nest[-1], nest[depth]
    body: list[Stmt] = []
    for k in range(rows.extent.attr):
        values = {rows.var: e.index(k)}
        body += [copied(s, values, f"_{k}") for s in vectors.body]
    for loop in reversed([s for s in nest if s is not rows]):
        body = [For(loop.var, loop.extent, body, True, loop.binding, loop.nodes)]
    [remaining] = body
    assert isinstance(remaining, For)
    return remaining


def _count(nest: Sequence[For], depth: int, extent: Expr) -> int:
    """Return how many rows are computed at once, or 0: half as many where none
    remain.

    Args:
        depth: Which loop of the nest is over rows.
        extent: The rows that are left.
    """
    vectors, rows = nest[-1], nest[depth].extent
    size = sum(map(_instructions, vectors.body))
    are_few = extent.is_const and rows.is_const and REST * extent.attr < rows.attr
    if are_few and size >= DEAR:
        return 0
    count = min(MOST, vectors.binding.width)
    while count >= FEWEST and (
        size * count > (LONG if count > FEWEST else LARGEST)
        or (extent.is_const and extent.attr < count)
    ):
        count //= 2
    is_even = extent.is_const and extent.attr % (count // 2 or 1) == 0
    if count == MOST and is_even and extent.attr % count:
        count //= 2
    return count if count >= FEWEST else 0


def _instructions(statement: Stmt) -> int:
    """Return about how many instructions a statement takes. The indices of what is
    loaded as rows take none: they are the same for all lanes."""
    seen: set[Expr] = set()
    pending = [*expressions(statement)[-1:]]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending += [a for a in node.args if node.op != "load" or _reads(a)]
    return 1 + sum(map(weight, seen))


def _reads(index: Expr) -> bool:
    return any(node.op == "load" for node in nodes(index))
