"""Transposes large operands of reductions, if memory runs along another one.

    v1 = reduce add from 0 of x[i0, i1] * y[i1, i0]
  ->
    v2 = y[i1, i0]
    v1 = reduce add from 0 of x[i0, i1] * v2[i0, i1]

A loop along the rows of one matrix reads an element of each row of the other one: a
cache line for each, and of few sets of the cache if rows have a power of two of bytes.
A matrix is transposed by tiles that are loaded as vectors, in a fraction of the time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, Reduction, axes
from hopflow.compiler.kernel_program.program import Equation, KernelProgram, Value
from hopflow.compiler.kernel_program.registers import static_size
from hopflow.compiler.kernel_program.rewriting import all_blocks, elements, space_of
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index

LARGE: Final = 1 << 18
"""Bytes of an operand, at least: less stays in the first caches while it is read."""


def transposed(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        block.equations = [
            edited for equation in block.equations for edited in _edited(equation)
        ]


def _edited(equation: Equation) -> Iterator[Equation]:
    """Yield an equation, after those of the operands that it reads transposed."""
    kernel = equation.definition
    if isinstance(kernel, Reduction) and kernel.space:
        shape = space_of(equation)
        at = axes(len(shape))
        values: dict[Expr, Expr] = {}
        for k, node in enumerate(_across(kernel, shape)):
            operand: Value = node.attr
            type_ = TensorType(operand.dtype, shape)
            copy = Value(f"{equation.results[0].name}_operand{k}", type_)
            yield Equation((copy,), Pointwise((node,)), equation.node)
            values[node] = copy[at]
        if values:
            equation.definition = _reading(kernel, values)
    yield equation


def _across(kernel: Reduction, shape: Shape) -> list[Expr]:
    """Return the elements of large operands across whose rows a loop would run, if it
    runs along the rows of another one."""
    at = axes(len(shape))
    along, across = False, list[Expr]()
    for node in elements(kernel.element):
        index = e.index_of(node)
        if index and index[-1] is at[-1]:
            along = along or _is_permuted(index, at)  # no vector, whose rows stay near
        elif _is_permuted(index, at) and e.condition_of(node) is None:
            size = static_size(node.attr.type)
            if size is None or size * node.attr.dtype.itemsize >= LARGE:
                across.append(node)
    return across if along else []


def _is_permuted(index: Index, at: Index) -> bool:
    return len(index) == len(at) and {*index} == {*at}


def _reading(kernel: Reduction, values: Mapping[Expr, Expr]) -> Reduction:
    """Return a reduction with other elements."""
    element = tuple([e.rewrite(x, values.get) for x in kernel.element])
    return replace(kernel, element=element)
