"""Updates of one element of short rows are choices of each element, and so are reads.

    for t0 < m, carry c1: f32[n, 3] = x:
        v2 = c1[i0, k[i0]] * 2.0 for i0 < n
        v3 = c1 with [i0, k[i0]] = v2[i0] for i0 < n
        yield v3
  ->
    for t0 < m, carry c1: f32[n, 3] = x:
        v2 = select(k[i0] == 2, c1[i0, 2], ...) * 2.0 for i0 < n
        v3 = select(i1 == k[i0], v2[i0], c1[i0, i1]) for i0 < n, i1 < 3
        yield v3

The rows are then lanes of vectors, and short arrays stay in registers through all steps
of a loop, where an element at an index of the run needs memory.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import count

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import (
    Pointwise,
    Scatter,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import REGISTER_LIMIT, is_small
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    map_expressions,
    space_of,
)
from hopflow.compiler.kernel_program.sizes import same_size
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Size


def short_updates(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    _edit(program.block, count(), has_rows=True)


def _edit(block: Block, numbers: Iterator[int], *, has_rows: bool) -> None:
    """Edit a block and those inside.

    Args:
        has_rows: Whether rows may be examples; those of one example, as the steps of a
            `map` have it, are too few to fill vectors.
    """
    equations: list[Equation] = []
    for equation in block.equations:
        definition = equation.definition
        for inner in blocks(definition):
            is_map = isinstance(definition, Loop) and definition.independent
            _edit(inner, numbers, has_rows=has_rows and not is_map)
            if isinstance(definition, Loop | While) and has_rows and not is_map:
                _choose(inner)
        if isinstance(definition, Scatter) and not definition.checks:
            is_fit = has_rows or all(map(is_small, (v.type for v in equation.results)))
            rows = _rows(definition) if is_fit else None
            if rows is not None:
                equations += _choice(equation, definition, rows, numbers)
                continue
        equations.append(equation)
    block.equations = equations


def _choose(body: Block) -> None:
    """Let steps choose the elements that they read of short rows which they compute."""
    made = (*body.parameters, *(v for q in body.equations for v in q.results))
    rows = {v for v in made if v.type.ndim > 1 and _is_short(v.shape[-1])}
    for equation in body.equations if rows else ():
        definition = equation.definition
        if isinstance(definition, Region):
            continue
        if any(n.attr in rows for n in elements(all_expressions(definition))):
            choice = partial(_choice_of, rows, space_of(equation))
            change = partial(e.rewrite, leaf=choice)
            equation.definition = map_expressions(definition, change)


def _choice_of(rows: Collection[Value], space: Shape, node: Expr) -> Expr | None:
    """Return an element of one of these rows as a choice of all elements of the row;
    None: its place follows from the axes, or it is one of another row."""
    if node.op != "element" or node.attr not in rows:
        return None
    value: Value = node.attr
    (*outer, last), own = e.index_of(node), axes(len(space))
    is_known = all(
        n.op != "element" and (n.op != "var" or n in own) for n in nodes(last)
    )
    if is_known or len(outer) > len(space):
        return None
    for i, axis, n, extent in zip(outer, own, value.shape, space, strict=False):
        if i is not axis or not same_size(n, extent):
            return None
    last = e.rewrite(last, partial(_choice_of, rows, space))
    found = value[(*outer, e.index(0))]
    for k in range(1, int(value.shape[-1])):
        test = e.compare("eq", last, e.index(k))
        found = e.select(test, value[(*outer, e.index(k))], found)
    return found


def _is_short(size: Size) -> bool:
    return isinstance(size, int) and 0 < size <= REGISTER_LIMIT


def _rows(update: Scatter) -> Mapping[Expr, Expr] | None:
    """Return the axes of an update as those of its base, if it is of one element of
    each of all its rows, which are short; None: it is another one."""
    base = update.base
    if not isinstance(base, Value) or not base.shape:
        return None
    *outer, size = base.shape
    if not _is_short(size):
        return None
    space = [*zip(axes(len(update.space)), update.space, strict=True)]
    renamed = {axis: e.index(0) for axis, n in space if same_size(n, 1)}
    long = [(axis, n) for axis, n in space if axis not in renamed]
    written = [
        (k, i, n)
        for k, (i, n) in enumerate(zip(update.position[:-1], outer, strict=True))
        if not same_size(n, 1)
    ]
    if len(long) != len(written):
        return None
    for (axis, extent), (k, i, n) in zip(long, written, strict=True):
        if i is not axis or not same_size(n, extent):
            return None
        renamed[axis] = axes(k + 1)[k]
    return renamed


def _choice(
    equation: Equation,
    update: Scatter,
    renamed: Mapping[Expr, Expr],
    numbers: Iterator[int],
) -> Iterator[Equation]:
    """Yield an update as a choice, after what all elements of a row share."""
    base = update.base
    assert isinstance(base, Value)
    outer = base.shape[:-1]

    def shared(part: Expr) -> tuple[list[Equation], Expr]:
        root = e.rewrite(part, renamed.get)
        if root.is_const or root.op == "element":
            return [], root
        value = Value(f"updated{next(numbers)}", TensorType(root.dtype, outer))
        made = Equation((value,), Pointwise((root,)), equation.node)
        return [made], value[axes(len(outer))]

    at: Index = axes(base.type.ndim)
    place, position = shared(update.position[-1])
    new, value = shared(update.value)
    yield from place
    yield from new
    old = base[at]
    if update.combine is not None:
        both = dict(zip(update.combine.parameters, (old, value), strict=True))
        [value] = [e.rewrite(x, both.get) for x in update.combine.results]
    chosen = e.compare("eq", at[-1], position)
    if update.keep is not None:
        kept, keep = shared(update.keep)
        yield from kept
        chosen = e.binary("and", keep, chosen)
    element = e.select(chosen, value, old)
    yield Equation(
        equation.results,
        Pointwise((element,)),
        equation.node,
        equation.symbol,
        equation.inlined,
    )
