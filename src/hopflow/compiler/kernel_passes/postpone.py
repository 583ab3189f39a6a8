"""Moves checks that guard nothing behind the equations over the same space.

    free check index: k[i0] < 8 for i0 < 5
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
  ->
    v2 = sin((y[k[i0]] if k[i0] < 8)) for i0 < 5
    v3 = v2[i0] + 1.0 for i0 < 5
    free check index: k[i0] < 8 for i0 < 5

A check guards nothing if it is free (`Check.is_free`): no read relies on it. One of
many elements is a loop that reduces a flag, and a test of the flag. Behind loops over
the same space it is merged with them, later, by `merge`, and uses the elements that
they read. It moves past elements and reductions, and past effects that only ask whether
an array would fit into memory, but past no other equation. Nor does it move past one
that may write to the caller's memory, which must be unchanged if the check fails, or
past one whose result could take the memory of values that the check reads.
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
    """Edit a program in place; functions that it calls are programs of their own."""
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
        return True  # it asks for the memory of types, and no loop is made of it
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
