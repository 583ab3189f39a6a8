"""Groups of iterations of one loop of a nest, which run together in the innermost body.

    for i0 in 0..9 independent:                 for i0_rows in 0..2 independent:
        for i1 in 0..n vector 8 independent:        for i1 in 0..n vector 8 independent:
            out0[i0, i1] = x[i0] * y[i1]    ->          out0[i0_rows * 4, i1] = ...
                                                        ...
                                                        out0[i0_rows * 4 + 3, i1] = ...
                                                for i0_rest in 0..1 independent:
                                                    ...

Loops in the body run once for all iterations of a group. What is private to an
iteration has a copy for each of a group, and copies of their own in each nest: if the
loops are bound to threads, only one of them names such a buffer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import copied, rename_buffers, substituted
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import For, Stmt
from hopflow.loop_ir.walk import bodies, expressions, nodes, statements


class Groups(NamedTuple):
    """The nests in place of one, and the buffers in place of its private ones."""

    nests: list[For]
    buffers: list[Buffer]


def edit_nests(body: list[Stmt], edited: Callable[[For], list[For] | None]) -> None:
    """Replace outermost loops in a list of statements, in place.

    Args:
        edited: Returns the loops in place of one. None: it stays, and those in it are
            asked for.
    """
    result: list[Stmt] = []
    for statement in body:
        loops = edited(statement) if isinstance(statement, For) else None
        if loops is None:
            for inner in bodies(statement):
                edit_nests(inner, edited)
        result += loops or [statement]
    body[:] = result


def body_size(body: Sequence[Stmt]) -> int:
    """Return about how many instructions a body takes, each loop in it one step."""
    return sum(
        1 + sum(map(weight, nodes(*expressions(statement))))
        for statement in statements(body)
    )


def in_groups(
    nest: Sequence[For],
    depth: int,
    count: Callable[[Expr], int],
    private: Collection[Buffer] = (),
) -> Groups | None:
    """Return the nests in place of one: whole groups, and what remains.

    Args:
        depth: Which loop of the nest has its iterations grouped.
        count: Returns the iterations of a group, if so many are left; 0: none. Then
            those that are left run one by one.
        private: Buffers that are private to an iteration.
    """
    loop = nest[depth]
    name, start, left = loop.var.name, e.index(0), loop.extent
    groups = Groups([], [])

    def add(var: Var, extent: Expr, places: Sequence[Expr], suffix: str) -> None:
        own = [
            {b: _copy(b, f"{suffix}_{k}") for b in private} for k in range(len(places))
        ]
        groups.nests.append(_nest_of(nest, depth, var, extent, places, suffix, own))
        groups.buffers.extend(b for copies in own for b in copies.values())

    while not _is_zero(left) and (size := count(left)):
        suffix = f"_{len(groups.nests)}" if groups.nests else ""
        rows = Var(f"{name}_rows{suffix}", dtypes.int64)
        first = e.mul(e.read(rows), e.index(size))
        places = [e.add(first, e.add(start, e.index(k))) for k in range(size)]
        whole = e.div(left, e.index(size))
        add(rows, whole, places, suffix)
        start = e.add(start, e.mul(whole, e.index(size)))
        left = e.sub(loop.extent, start)
        if not left.is_const:
            break
    if not groups.nests:
        return None
    if not _is_zero(left):
        rest = Var(f"{name}_rest", dtypes.int64)
        add(rest, left, [e.add(start, e.read(rest))], "_rest")
    return groups


def _copy(buffer: Buffer, suffix: str) -> Buffer:
    return Buffer(f"{buffer.name}{suffix}", buffer.dtype, buffer.shape, buffer.space)


def _is_zero(extent: Expr) -> bool:
    return extent.is_const and extent.attr == 0


def _nest_of(
    nest: Sequence[For],
    depth: int,
    var: Var,
    extent: Expr,
    places: Sequence[Expr],
    suffix: str,
    own: Sequence[Mapping[Buffer, Buffer]],
) -> For:
    """Return a copy of a nest with another loop at a depth, whose iterations are those
    of the old one at `places`.

    Args:
        suffix: For the names of the other variables; if it is empty, they are the same.
        own: For each place, what replaces the buffers that are private to an iteration.
    """
    heads = {s: s.var for s in nest}
    if suffix:
        heads = {s: Var(f"{s.var.name}{suffix}", dtypes.int64) for s in nest}
    values = {loop.var: e.read(head) for loop, head in heads.items()}
    grouped = nest[depth].var
    rows = [values | {grouped: substituted(place, values)} for place in places]
    body = _together(nest[-1].body, rows, suffix, own)
    for at, loop in reversed([*enumerate(nest)]):
        head, size = (var, extent) if at == depth else (heads[loop], loop.extent)
        body = [
            For(head, substituted(size, values), body, True, loop.binding, loop.nodes)
        ]
    [copy] = body
    assert isinstance(copy, For)
    return copy


def _together(
    body: Sequence[Stmt],
    rows: Sequence[dict[Var, Expr]],
    suffix: str,
    own: Sequence[Mapping[Buffer, Buffer]],
) -> list[Stmt]:
    """Return the copies of a body for several values of its variables. Those of a loop
    become one loop."""
    copies: list[Stmt] = []
    straight: list[Stmt] = []

    def add_straight() -> None:
        for k, (row, buffers) in enumerate(zip(rows, own, strict=True)):
            for s in straight:
                copy = copied(s, row, f"{suffix}_{k}")
                rename_buffers(copy, buffers)
                copies.append(copy)
        straight.clear()

    for statement in body:
        if not isinstance(statement, For):
            straight.append(statement)
            continue
        add_straight()
        step = Var(f"{statement.var.name}{suffix}", statement.var.dtype)
        for row in rows:
            row[statement.var] = e.read(step)
        extent = substituted(statement.extent, rows[0])
        inner = _together(statement.body, rows, suffix, own)
        copies.append(
            For(
                step,
                extent,
                inner,
                statement.independent,
                statement.binding,
                statement.nodes,
            )
        )
    add_straight()
    return copies
