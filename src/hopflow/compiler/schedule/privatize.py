"""Privatizes arrays that loops scatter to, so that threads can share the iterations.

A loop that combines numbers with elements of its own choice, in which any order gives
the same bits (integers and flags), is divided into a few parts. Each has an array of
its own, and a loop combines these:

    for i0 in 0..1000000:
        out0[x[i0]] = out0[x[i0]] + 1

    for i0_block in 0..8 threads independent:
        for i0_fill in 0..256 vector 16 independent:
            out0_parts[i0_block, i0_fill] = 0
        for i0_row in 0..125000:
            out0_parts[i0_block, x[...]] = out0_parts[i0_block, x[...]] + 1
    for i0_part in 0..8:
        for i0_at in 0..256 vector 16 independent:
            out0[i0_at] = out0[i0_at] + out0_parts[i0_part, i0_at]

All these arrays together have a quarter as many elements as there are iterations, at
most; where only the call knows the sizes, it chooses between the two forms.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Final, NamedTuple

from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.copies import nest_copy
from hopflow.compiler.schedule.exact import is_exact, neutral
from hopflow.compiler.schedule.summary import Summary
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.dtypes import int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var, condition_of, index_of
from hopflow.loop_ir.program import SERIAL, THREADS, For, If, Let, Program, Stmt, Store
from hopflow.loop_ir.walk import (
    expressions,
    nodes,
    perfect_nest,
    same_shape,
    statements,
)

MOST_PARTS: Final = 8
ITERATIONS: Final = 4
"""Iterations for each element of the private arrays, at least: an iteration takes as
long as to clear and to combine some tens of elements."""


class _Scatter(NamedTuple):
    """A nest of loops that combines numbers with elements of one array by `combine`."""

    nest: list[For]
    buffer: Buffer
    combine: str


def privatized(
    loop: For, program: Program, target: Target, large: int, elements: int
) -> list[Stmt] | None:
    """Return statements that do the work of a loop in parts, by several threads; None
    if the loop does not allow it, or is too short.

    Args:
        large: Instructions of a loop that is long enough.
        elements: Iterations that a loop of unknown length is taken to have.
    """
    scatter = _scatter_of(loop)
    if scatter is None:
        return None
    extents = [head.extent for head in scatter.nest]
    shape = scatter.buffer.shape
    sizes = [*extents, *shape]
    if not all(is_of_call(size, program) for size in sizes):
        return None
    is_static = all(size.is_const for size in sizes)
    least = large // Summary.of(scatter.nest[-1]).size
    iterations, size = _static(extents, elements), _static(shape, 1)
    parts = MOST_PARTS if all(n.is_const for n in shape) else 2
    while parts > 1 and ITERATIONS * parts * size > iterations:
        parts //= 2
    if parts == 1 or least > iterations:
        return None
    if is_static:
        return _in_parts(scatter, parts, program, target)
    whole = nest_copy(scatter.nest, scatter.nest[-1].body, "_whole")
    whole.independent = False
    for_parts = e.mul(e.index(ITERATIONS * parts), _count(shape))
    enough = e.binary("max", e.index(least), for_parts)
    test = e.compare("ge", _count(extents), enough)
    return [If(test, _in_parts(scatter, parts, program, target), [whole])]


def is_of_call(extent: Expr, program: Program) -> bool:
    """Return whether an extent follows from the sizes of a call."""
    leaves = [node for node in nodes(extent) if not (node.args or node.is_const)]
    return all(x.op == "var" and x.attr in program.sizes for x in leaves)


def _scatter_of(loop: For) -> _Scatter | None:
    """Return the scatter that a loop is; None if it is anything else."""
    nest = perfect_nest(loop)
    body = list(statements(nest[-1].body))
    if loop.independent or not all(isinstance(s, If | Let | Store) for s in body):
        return None
    stores = [s for s in body if isinstance(s, Store)]
    if not stores:
        return None
    buffer, combine = stores[0].buffer, stores[0].value.op
    if not (buffer.shape and is_exact(combine, buffer.dtype)):
        return None
    for statement in body:
        if isinstance(statement, Store):
            combines = statement.value.op == combine and _updates(statement, buffer)
        else:
            combines = not _loads(buffer, *expressions(statement))
        if not combines:
            return None
    return _Scatter(nest, buffer, combine)


def _updates(store: Store, buffer: Buffer) -> bool:
    """Return whether a statement combines an element of an array with a number that
    does not depend on the array."""
    if store.buffer is not buffer:
        return False
    for own, other in (store.value.args, store.value.args[::-1]):
        if own.op == "load" and own.attr is buffer and condition_of(own) is None:
            is_same = same_shape(index_of(own), store.indices)
            return is_same and not _loads(buffer, other, *store.indices)
    return False


def _loads(buffer: Buffer, *expressions: Expr) -> bool:
    return any(n.op == "load" and n.attr is buffer for n in nodes(*expressions))


def _static(extents: Sequence[Expr], unknown: int) -> int:
    """Return the product of extents, with one number for all that are unknown."""
    known: int = prod(n.attr for n in extents if n.is_const)
    return known if all(n.is_const for n in extents) else max(known, unknown)


def _count(extents: Sequence[Expr]) -> Expr:
    return reduce(e.mul, extents, e.index(1))


def _in_parts(
    scatter: _Scatter, parts: int, program: Program, target: Target
) -> list[Stmt]:
    """Return the loop over the parts, and the one that combines their arrays."""
    loop, buffer, combine = scatter.nest[0], scatter.buffer, scatter.combine
    name = loop.var.name
    size = e.div(e.add(loop.extent, e.index(parts - 1)), e.index(parts))
    number, rows = block_of(loop, size)
    private = Buffer(
        f"{buffer.name}_{name}", buffer.dtype, (e.index(parts), *buffer.shape), "arena"
    )
    program.arena.append(private)
    stores = [s for s in statements(scatter.nest[-1].body) if isinstance(s, Store)]
    for store in stores:
        of_part = partial(_element_of, private, buffer, e.read(number))
        store.value = e.rewrite(store.value, of_part)
        store.buffer, store.indices = private, (e.read(number), *store.indices)

    def cleared(at: Index) -> Store:
        zero = neutral(combine, buffer.dtype)
        return Store(private, (e.read(number), *at), zero)

    part = Var(f"{name}_part", int64)

    def combined(at: Index) -> Store:
        value = e.load(private, (e.read(part), *at))
        return Store(buffer, at, e.binary(combine, e.load(buffer, at), value))

    clear = _over(buffer, f"{name}_clear", cleared, target, loop.nodes)
    blocks = over_blocks(number, loop, size, [clear, rows], THREADS)
    combine_all = _over(buffer, f"{name}_at", combined, target, loop.nodes)
    return [blocks, For(part, blocks.extent, [combine_all], nodes=loop.nodes)]


def _element_of(private: Buffer, buffer: Buffer, part: Expr, node: Expr) -> Expr | None:
    """Return the element of a part's array instead of that of the whole one."""
    if node.op == "load" and node.attr is buffer:
        return e.load(private, (part, *index_of(node)))
    return None


def _over(
    buffer: Buffer,
    name: str,
    store: Callable[[Index], Store],
    target: Target,
    graph_nodes: tuple[int, ...],
) -> For:
    """Return a nest of independent loops over the elements of an array."""
    heads = [Var(f"{name}{axis}", int64) for axis in range(len(buffer.shape))]
    body: list[Stmt] = [store(tuple(map(e.read, heads)))]
    binding = vector_binding(buffer.shape[-1], body, target)
    for head, extent in zip(reversed(heads), reversed(buffer.shape), strict=True):
        body = [For(head, extent, body, True, binding, graph_nodes)]
        binding = SERIAL
    [nest] = body
    assert isinstance(nest, For)
    return nest
