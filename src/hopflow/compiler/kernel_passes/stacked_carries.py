"""Copies carries that steps stack before the next ones are computed.

    for t0 < n, carry c1 = x:             for t0 < n, carry c1 = x:
        v2 = c1[i0] * 0.5           ->        v3 = c1[i0]
        yield v2, c1                          v2 = c1[i0] * 0.5
                                              yield v2, v3

The next carry can then take the memory of the one before, as nothing reads that one
any more. What the gradient of a loop keeps of each step is its carry.
"""

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import (
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
)
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.compiler.kernel_program.rewriting import all_blocks


def stacked_carries(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        for equation in block.equations:
            if isinstance(equation.definition, Loop | While):
                _edit(equation, equation.definition)


def _edit(equation: Equation, loop: Loop | While) -> None:
    body, count = loop.body, len(loop.carry)
    makers = {v: q for q in body.equations for v in q.results}
    copies: list[Equation] = []
    for number, value in enumerate(body.results[count:], count):
        if value not in body.parameters or is_small(value.type):
            continue
        following = body.results[body.parameters.index(value)]
        if following is value:
            continue  # no step changes it
        node = makers[following].node if following in makers else equation.node
        copy = Value(f"{value.name}_row{number - count}", value.type)
        element = value[axes(value.type.ndim)]
        copies.append(Equation((copy,), Pointwise((element,)), node))
        body.results[number] = copy
    body.equations[:0] = copies
