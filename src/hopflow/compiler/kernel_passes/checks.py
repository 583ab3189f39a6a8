"""Checks become equations of their own, before the definitions that they guard.

    v0 = x[k[]]; check index: k[] < 8       ->      check index: k[] < 8
                                                    v0 = x[k[]]

An element may then be computed anywhere after its check: it cannot stop the program.
"""

from dataclasses import replace

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Effect, Pointwise, Scatter
from hopflow.compiler.kernel_program.program import Equation, KernelProgram
from hopflow.compiler.kernel_program.rewriting import all_blocks

__all__ = ["split_checks"]


def split_checks(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        equations: list[Equation] = []
        for equation in block.equations:
            definition = equation.definition
            if isinstance(definition, Pointwise | Scatter) and definition.checks:
                equations.append(Equation((), Effect(definition.checks), equation.node))
                equation.definition = replace(definition, checks=())
            equations.append(equation)
        block.equations = equations
