"""Inputs that are read again and again are copied first to where that costs least.

An input with strides, which a loop or several readers read, becomes dense. The matrix
of a product of a few rows in a loop, which costs what reading the matrix costs, is
copied to where vectors are loaded in one piece: an input may lie anywhere.

    for t0 < n, carry c1 = h:                v3 = w[i0, i1]
        v2 = gemm(c1, w)              ->     for t0 < n, carry c1 = h:
        yield v2                                 v2 = gemm(c1, v3)
                                                 yield v2
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_small, static_size
from hopflow.compiler.kernel_program.rewriting import replace_values, values_read
from hopflow.compiler.layout import Layouts
from hopflow.compiler.passes.stack_products import has_few_rows
from hopflow.graph.core import Node
from hopflow.loop_ir.kernels import Library

LARGEST: Final = 1 << 22
"""Bytes of what is copied to be aligned: larger ones do not come from the caches."""


def pack(program: KernelProgram, context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    inputs = program.block.parameters[len(program.symbols) :]
    packed = _strided(program, inputs, context.layouts)
    for value, node in _matrices(program.block, within=False).items():
        if value in inputs:
            packed.setdefault(value, node)
    if not packed:
        return
    copies = {v: Value(f"{v.name}_packed", v.type) for v in packed}
    replace_values(program.block, copies)
    program.block.equations[:0] = [
        Equation((copy,), Pointwise((v[axes(v.type.ndim)],)), packed[v])
        for v, copy in copies.items()
    ]


def _strided(
    program: KernelProgram, inputs: Sequence[Value], layouts: Layouts
) -> dict[Value, Node]:
    """The inputs with strides that are read more than once, or in a loop."""
    wanted: dict[Value, Node] = {}
    if all(layout == "dense" for layout in layouts):
        return wanted
    reads = Counter[Value]()
    for equation in program.block.equations:
        in_region = bool(blocks(equation.definition))
        for value in values_read(equation):
            reads[value] += 2 if in_region else 1
            if value in inputs and not is_small(value.type):
                layout = layouts[inputs.index(value)]
                if layout != "dense" and (in_region or layout == "strided"):
                    wanted.setdefault(value, equation.node)
    return {v: node for v, node in wanted.items() if reads[v] > 1}


def _matrices(block: Block, *, within: bool) -> dict[Value, Node]:
    """The second operands of products of few rows that the steps of loops make."""
    found: dict[Value, Node] = {}
    for equation in block.equations:
        definition = equation.definition
        if within and isinstance(definition, Library) and has_few_rows(equation.node):
            matrix = definition.operands[1]
            assert isinstance(matrix, Value)
            size = static_size(matrix.type)
            if size is not None and size * matrix.dtype.itemsize <= LARGEST:
                found[matrix] = equation.node
        for inner in blocks(definition):
            is_step = within or isinstance(definition, Loop | While)
            found |= _matrices(inner, within=is_step)
    return found
