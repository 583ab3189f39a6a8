"""Moves checks that guard nothing into the loop that computes the elements.

    free check index: k[i0] < 8 for i0 < 5
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
  ->
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
    free check index: k[i0] < 8 for i0 < 5

A check of many elements is a loop that reduces a flag, and a test of the flag. After
loops over the same space it is merged with them, and uses the elements that they read.
It never moves past an effect, nor past an equation that may write to the caller's
memory, which must be unchanged if the check fails; nor past one whose result could take
the memory of values that the check reads.
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
    space_of,
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
    before, block.equations = block.equations, []
    waiting: list[Equation] = []
    # The values whose memory an equation must not take.
    replaced: set[Value] = set()
    for equation in before:
        definition = equation.definition
        if isinstance(definition, Effect) and definition.is_free:
            waiting.append(equation)
            replaced |= {*written, *values_read(equation)} - inputs
            continue
        if not all(_may_follow(check, equation, replaced) for check in waiting):
            block.equations += waiting
            waiting, replaced = [], set()
        block.equations.append(equation)
    block.equations += waiting


def _may_follow(check: Equation, equation: Equation, replaced: set[Value]) -> bool:
    """Return whether a check may come after an equation over the same space."""
    definition, effect = equation.definition, check.definition
    assert isinstance(effect, Effect)
    if isinstance(definition, Effect) and not definition.checks:
        return True
    if not isinstance(definition, Pointwise | Reduction) or equation.symbol is not None:
        return False
    space = shape_key(space_of(equation))
    if any(shape_key(part.shape) != space for part in effect.checks):
        return False
    return not any(
        same_layout(result.type, value.type)
        for result in equation.results
        for value in replaced
    )
