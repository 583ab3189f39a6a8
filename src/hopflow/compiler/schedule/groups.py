"""Groups of iterations of one loop of a nest, which run together in the innermost body.

    for i0 in 0..9 independent:                 for i0_rows in 0..2 independent:
        for i1 in 0..n vector 8 independent:        for i1 in 0..n vector 8 independent:
            out0[i0, i1] = x[i0] * y[i1]    ->          out0[i0_rows * 4, i1] = ...
                                                        ...
                                                        out0[i0_rows * 4 + 3, i1] = ...
                                                for i0_rest in 0..1 independent:
                                                    ...

Loops in the body run once for all iterations of a group, of which each has its own copy
of what is private to an iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from hopflow import dtypes
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import copied, rename_buffers, substituted
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import For, Stmt
from hopflow.loop_ir.walk import bodies, expressions, nodes, statements

Private: TypeAlias = Mapping[Buffer, Sequence[Buffer]]


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
    private: Private = MappingProxyType({}),
) -> list[For] | None:
    """Return the nests in place of one: whole groups, and what remains.

    Args:
        depth: Which loop of the nest has its iterations grouped.
        count: Returns the iterations of a group, if so many are left; 0: none. Then
            those that are left run one by one.
        private: Buffers that are private to an iteration, with one for each of a group.
    """
    extent, name = nest[depth].extent, nest[depth].var.name
    start, left, loops = e.index(0), extent, list[For]()
    while not _is_zero(left) and (size := count(left)):
        suffix = f"_{len(loops)}" if loops else ""
        rows = Var(f"{name}_rows{suffix}", dtypes.int64)
        first = e.mul(e.read(rows), e.index(size))
        places = [e.add(first, e.add(start, e.index(k))) for k in range(size)]
        whole = e.div(left, e.index(size))
        loops.append(_nest_of(nest, depth, rows, whole, places, suffix, private))
        start = e.add(start, e.mul(whole, e.index(size)))
        left = e.sub(extent, start)
        if not left.is_const:
            break
    if not loops:
        return None
    if not _is_zero(left):
        rest = Var(f"{name}_rest", dtypes.int64)
        place = e.add(start, e.read(rest))
        loops.append(_nest_of(nest, depth, rest, left, [place], "_rest", private))
    return loops


def _is_zero(extent: Expr) -> bool:
    return extent.is_const and extent.attr == 0


def _nest_of(
    nest: Sequence[For],
    depth: int,
    var: Var,
    extent: Expr,
    places: Sequence[Expr],
    suffix: str,
    private: Private,
) -> For:
    """Return a copy of a nest with another loop at a depth, whose iterations are those
    of the old one at `places`.

    Args:
        suffix: For the names of the other variables; if it is empty, they are the same.
    """
    heads = {s: s.var for s in nest}
    if suffix:
        heads = {s: Var(f"{s.var.name}{suffix}", dtypes.int64) for s in nest}
    values = {loop.var: e.read(head) for loop, head in heads.items()}
    own = nest[depth].var
    rows = [values | {own: substituted(place, values)} for place in places]
    body = _together(nest[-1].body, rows, suffix, private)
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
    private: Private,
) -> list[Stmt]:
    """Return the copies of a body for several values of its variables. Those of a loop
    become one loop."""
    copies: list[Stmt] = []
    straight: list[Stmt] = []

    def add_straight() -> None:
        for k, row in enumerate(rows):
            for s in straight:
                copy = copied(s, row, f"{suffix}_{k}")
                rename_buffers(copy, {b: own[k] for b, own in private.items()})
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
        inner = _together(statement.body, rows, suffix, private)
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
