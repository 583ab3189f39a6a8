"""Inputs that are read repeatedly are copied once, before all else, to be read faster.

- An input that is not dense is copied to dense memory if a loop or several equations
  read it.
- An input that is the matrix of a product of few rows in a loop is copied to an aligned
  address, where vectors seldom cross cache lines; the caller's array may lie at any
  address. Such a product takes the time of reading the matrix from the cache.

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

MOST_BYTES_TO_ALIGN: Final = 1 << 22
"""The most bytes of a matrix that is copied to be aligned: reading a larger one from
memory takes longer than what alignment saves."""


def pack(program: KernelProgram, context: Context) -> None:
    """Edit a program in place; the functions that it calls stay as they are."""
    inputs = program.block.parameters[len(program.symbols) :]
    packed = _strided_inputs(program, inputs, context.layouts)
    for value, node in _matrices_of_steps(program.block, in_loop=False).items():
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


def _strided_inputs(
    program: KernelProgram, inputs: Sequence[Value], layouts: Layouts
) -> dict[Value, Node]:
    """The inputs with strides that are read more than once or in a region (a loop or a
    branch), each with the node of its first reader.

    An input of dense rows is worth a copy only if a region reads it.
    """
    readers: dict[Value, Node] = {}
    if all(layout == "dense" for layout in layouts):
        return readers
    reads = Counter[Value]()
    for equation in program.block.equations:
        in_region = bool(blocks(equation.definition))
        for value in values_read(equation):
            reads[value] += 2 if in_region else 1
            if value in inputs and not is_small(value.type):
                layout = layouts[inputs.index(value)]
                if layout != "dense" and (in_region or layout == "strided"):
                    readers.setdefault(value, equation.node)
    return {v: node for v, node in readers.items() if reads[v] > 1}


def _matrices_of_steps(block: Block, *, in_loop: bool) -> dict[Value, Node]:
    """The second operands of products of few rows in the steps of loops, each with the
    node of its product.

    Args:
        in_loop: Whether the block is within the step of a loop.
    """
    found: dict[Value, Node] = {}
    for equation in block.equations:
        definition = equation.definition
        if in_loop and isinstance(definition, Library) and has_few_rows(equation.node):
            matrix = definition.operands[1]
            assert isinstance(matrix, Value)
            size = static_size(matrix.type)
            if size is not None and size * matrix.dtype.itemsize <= MOST_BYTES_TO_ALIGN:
                found[matrix] = equation.node
        for inner in blocks(definition):
            is_step = in_loop or isinstance(definition, Loop | While)
            found |= _matrices_of_steps(inner, in_loop=is_step)
    return found
