"""Values are made where they would be copied: in results, and in rows of stacks.

    v3: f64[4] in A = ...                     v3: f64[4] in S[t0] = ...
    copy S[t0] from A                 ->
    v1: f64[n, 4] in S

A result of the program is made in the caller's memory, unless it is in memory that the
steps of a loop exchange. A row that each step of a loop adds to a stack is made in the
stack.
"""

from hopflow.compiler.kernel_program.program import Equation, Loop, While
from hopflow.compiler.memory.allocations import Allocation, same_layout
from hopflow.compiler.memory.plan import MemoryPlan, exchanged, walk


def short_circuit(plan: MemoryPlan) -> None:
    """Give allocations of a program their places in others."""
    moved = exchanged(plan)
    for number, value in enumerate(plan.program.block.results):
        found = plan.of(value)
        if found is None or found in moved or number in plan.updated:
            continue
        if not _is_free(found):
            continue
        if plan.is_sized(found.type) and not found.is_fixed:
            found.output = number
    for _, equation in walk(plan.program.block):
        if isinstance(equation.definition, Loop | While):
            _rows(plan, equation, equation.definition)


def _is_free(allocation: Allocation) -> bool:
    return not (
        allocation.is_input
        or allocation.row_of
        or allocation.part_of
        or allocation.output is not None
    )


def _rows(plan: MemoryPlan, equation: Equation, loop: Loop | While) -> None:
    body, count = loop.body, len(loop.carry)
    scope = plan.live.scopes[body]
    for row, stack in zip(body.results[count:], equation.results[count:], strict=True):
        found, memory = plan.of(row), plan.of(stack)
        if found is None or memory is None or not _is_free(found) or found.is_fixed:
            continue
        if found.carries:
            continue
        inner = memory.type.with_shape(memory.type.shape[1:])
        values = [v for one in found.with_parts() for v in one.values]
        within = all(plan.live.defined[v][0].is_within(scope) for v in values)
        dense = plan.allocations.is_dense(memory)
        fits = dense or plan.allocations.has_to_be_dense(found) is None
        if within and fits and same_layout(found.type, inner):
            found.row_of = memory, equation
