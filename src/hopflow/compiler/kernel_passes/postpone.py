"""Checks that guard nothing are made in the loop that computes the elements.

    free check index: k[i0] < 8 for i0 < 5
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
  ->
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
    free check index: k[i0] < 8 for i0 < 5

A check of many elements is a loop that gathers a flag, and a test of it. After loops
over the same space it is merged with them, and reads what they have read. It never
comes after an effect, nor after what may write to memory of the caller, who is to find
that unchanged if the check fails; nor after what could be made in the memory of what
the check reads.
"""

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Effect, Pointwise, Reduction
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    values_read,
)
from hopflow.compiler.memory.allocations import same_layout


def postpone(program: KernelProgram, context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    parameters = program.block.parameters
    written = {parameters[k] for k in context.reused.values()}
    inputs = set(parameters) - written
    for block in all_blocks(program.block):
        _postpone(block, inputs, written)


def _postpone(block: Block, inputs: set[Value], written: set[Value]) -> None:
    given, block.equations = block.equations, []
    waiting: list[Equation] = []
    replaced: set[Value] = set()  # whose memory an equation must not take
    for equation in given:
        own = equation.definition
        if isinstance(own, Effect) and own.is_free:
            waiting.append(equation)
            replaced |= {*written, *values_read(equation)} - inputs
            continue
        if not all(_may_follow(check, equation, replaced) for check in waiting):
            block.equations += waiting
            waiting, replaced = [], set()
        block.equations.append(equation)
    block.equations += waiting


def _may_follow(check: Equation, equation: Equation, replaced: set[Value]) -> bool:
    """Whether a check may come after an equation over the same space."""
    own, others = equation.definition, check.definition
    assert isinstance(others, Effect)
    if isinstance(own, Effect) and not own.checks:
        return True
    if not isinstance(own, Pointwise | Reduction) or equation.symbol is not None:
        return False
    space = equation.results[0].shape
    if isinstance(own, Reduction):
        space = (*space, *own.space)
    if any(shape_key(one.shape) != shape_key(space) for one in others.checks):
        return False
    return not any(
        same_layout(made.type, value.type)
        for made in equation.results
        for value in replaced
    )
