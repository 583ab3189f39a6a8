"""Compute sums without axes of one element, or with them, as they are read.

    v1: f32[n, 1] = reduce add from 0 of x[i0, i2] * y[i2, i1] over i2 < m
    v2: f32[n] = v1[i0, 0]
  ->
    v2: f32[n] = reduce add from 0 of x[i0, i1] * y[i1, 0] over i1 < m

A product of a matrix and a vector has one column, which no one asked for. A copy of it
would take as long as the sums of short rows.
"""

from collections import Counter

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, Reduction, axes
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    map_expressions,
    values_read,
)
from hopflow.compiler.kernel_program.sizes import same_size
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr


def unit_axes(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        _edit(block)


def _edit(block: Block) -> None:
    if not any(isinstance(q.definition, Reduction) for q in block.equations):
        return
    reads = Counter(block.results)
    for equation in block.equations:
        reads.update(values_read(equation).keys())
    sums: dict[Value, Equation] = {}
    kept: list[Equation] = []
    for equation in block.equations:
        source = _source(equation)
        if source is not None and reads[source] == 1 and source in sums:
            _reshape(sums[source], equation)
            continue
        kept.append(equation)
        if isinstance(equation.definition, Reduction) and len(equation.results) == 1:
            sums[equation.results[0]] = equation
    block.equations = kept


def _source(equation: Equation) -> Value | None:
    """Return the value that an equation copies, as it is but for axes of one element;
    None: it does something else."""
    definition = equation.definition
    if not isinstance(definition, Pointwise) or definition.checks:
        return None
    [element, *others] = definition.elements
    if others or element.op != "element" or e.condition_of(element) is not None:
        return None
    value: Value = element.attr
    if is_small(value.type) or equation.symbol is not None:
        return None
    at, shape = e.index_of(element), equation.results[0].shape
    read = [(i, n) for i, n in zip(at, value.shape, strict=True) if not same_size(n, 1)]
    whole = [(i, n) for i, n in enumerate(shape) if not same_size(n, 1)]
    is_whole = len(read) == len(whole) and all(
        i is axes(len(shape))[k] and same_size(n, m)
        for (i, n), (k, m) in zip(read, whole, strict=True)
    )
    return value if is_whole else None


def _reshape(equation: Equation, copy: Equation) -> None:
    """Let a reduction have the result of a copy of its own result."""
    reduction, [old], [new] = equation.definition, equation.results, copy.results
    assert isinstance(reduction, Reduction)
    assert isinstance(copy.definition, Pointwise)
    [element] = copy.definition.elements
    places = e.index_of(element)
    before = axes(old.type.ndim + len(reduction.space))
    after = axes(new.type.ndim + len(reduction.space))
    moved = dict(zip(before[old.type.ndim :], after[new.type.ndim :], strict=True))
    values: dict[Expr, Expr] = dict(zip(before, places, strict=False)) | moved
    equation.definition = map_expressions(reduction, lambda x: e.rewrite(x, values.get))
    equation.results = copy.results
    equation.inlined = (*equation.inlined, *copy.inlined, copy.node)
