"""Loop coalescing: a nest that passes over whole arrays becomes one loop.

    for i0 in 0..n independent:                  for k in 0..n * 3 vector 8 independent:
        for i1 in 0..3 vector 2 independent: ->      out0[k div 3, k rem 3] =
            out0[i0, i1] = x[i0, i1] * 2.0               x[k div 3, k rem 3] * 2.0

Short rows would not fill a vector, and each has a remainder. The code generator divides
nothing: two adjacent axes of a dense array at `q div m` and `q rem m` are one at `q`.

The loops of a nest are coalesced from the innermost outwards, as long as all accesses
index adjacent axes by both variables, in order, and the variables are not used
otherwise. Sums of floats stay as they are, since their order decides their bits.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from hopflow import dtypes
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import For, Program, Stmt, Store
from hopflow.loop_ir.walk import (
    bodies,
    expressions,
    is_order_free,
    perfect_nest,
    replace,
    same,
)

LONG: Final = 256
"""Elements of a row that costs little more than a part of a longer one."""


def coalesce(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    pending = [program.body]
    while pending:
        body = pending.pop()
        for k, statement in enumerate(body):
            if isinstance(statement, For) and statement.independent:
                body[k] = _coalesced(statement, target)
            pending += bodies(body[k])


def _coalesced(outermost: For, target: Target) -> For:
    """Return a loop with the innermost loops of its nest coalesced, if that pays."""
    nest = perfect_nest(outermost)
    innermost = nest[-1]
    extent = innermost.extent
    if len(nest) == 1 or (extent.is_const and extent.attr >= LONG):
        return outermost
    if not all(map(is_order_free, innermost.body)):
        return outermost
    first = outermost_coalesced(nest)
    if first == len(nest) - 1:
        return outermost
    coalesced = _one_loop(nest[first:], target)
    if first == 0:
        return coalesced
    nest[first - 1].body = [coalesced]
    return outermost


def outermost_coalesced(nest: Sequence[For]) -> int:
    """Return the number of the outermost loop that can be coalesced with all those in
    it: that of the innermost one if there is none."""
    variables = {loop.var: depth for depth, loop in enumerate(nest)}
    first = 0
    for row in _uses(nest[-1].body, set(variables)):
        at = {p.attr: axis for axis, (p, _) in enumerate(row) if p.op == "var"}
        for depth in range(len(nest) - 1, first, -1):
            outer, inner = nest[depth - 1], nest[depth]
            axis = at.get(inner.var)
            if axis is None and outer.var not in at:
                continue
            if (
                axis is None
                or at.get(outer.var, -2) != axis - 1
                or not same(row[axis][1], inner.extent)
            ):
                first = depth
                break
    return first


_Row = list[tuple[Expr, Expr]]
"""The position in each axis of a dense array, with the extent of the axis; axes of one
element are left out."""


def _uses(body: Sequence[Stmt], variables: set[Var]) -> Iterator[_Row]:
    """Yield how a body uses variables: the accesses that they index, and a row of one
    axis for each other use."""
    pending: list[Expr] = []

    def access(buffer: Buffer, at: Index) -> Iterator[_Row]:
        row = [
            (p, extent)
            for p, extent in zip(at, buffer.shape, strict=True)
            if not (extent.is_const and extent.attr == 1)
        ]
        if buffer.strides is not None:
            row = []
        yield row
        placed = {p for p, _ in row if p.op == "var"}
        pending.extend(p for p in at if p not in placed)

    seen = set[Expr]()
    for statement in body:
        if isinstance(statement, Store):
            yield from access(statement.buffer, statement.indices)
            pending.append(statement.value)
        else:
            pending += expressions(statement)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "load":
                yield from access(node.attr, e.index_of(node))
                condition = e.condition_of(node)
                pending += () if condition is None else (condition,)
            elif node.op == "var" and node.attr in variables:
                yield [(node, node)]
            else:
                pending += node.args


def _one_loop(nest: Sequence[For], target: Target) -> For:
    """Return the loop in place of a nest."""
    var = Var("_".join(loop.var.name for loop in nest), dtypes.int64)
    position, extent = e.read(var), nest[0].extent
    positions: dict[Var, Expr] = {}
    for loop in reversed(nest[1:]):
        positions[loop.var] = e.binary("rem", position, loop.extent)
        position = e.div(position, loop.extent)
    positions[nest[0].var] = position
    for loop in nest[1:]:
        extent = e.mul(extent, loop.extent)
    innermost = nest[-1]

    def moved(node: Expr) -> Expr | None:
        return positions.get(node.attr) if node.op == "var" else None

    for statement in innermost.body:
        replace(statement, moved)
    body = innermost.body
    binding = vector_binding(extent, body, target)
    return For(var, extent, body, True, binding, nest[0].nodes)
