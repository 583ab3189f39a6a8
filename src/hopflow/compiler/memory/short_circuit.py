"""Compute values where they would be copied to: in results, and in rows of stacks.

    v3: f64[4] in A = ...                     v3: f64[4] in S[t0] = ...
    copy S[t0] from A                 ->
    v1: f64[n, 4] in S

A result of the program is computed in the caller's memory, unless it is in memory that
the steps of a loop exchange. A row that each step of a loop adds to a stack is computed
in the stack.
"""

from hopflow.compiler.kernel_program.program import Equation, Loop, While
from hopflow.compiler.memory.allocations import Allocation, same_layout
from hopflow.compiler.memory.plan import MemoryPlan, exchanged, walk


def short_circuit(plan: MemoryPlan) -> None:
    """Place allocations of a program in results and in rows of stacks."""
    moved = exchanged(plan)
    for number, value in enumerate(plan.program.block.results):
        allocation = plan.of(value)
        if allocation is None or allocation in moved or number in plan.updated:
            continue
        if not _is_free(allocation):
            continue
        if plan.is_sized(allocation.type) and not allocation.is_fixed:
            allocation.output = number
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
        allocation, memory = plan.of(row), plan.of(stack)
        if (
            allocation is None
            or memory is None
            or not _is_free(allocation)
            or allocation.is_fixed
        ):
            continue
        if allocation.carries:
            continue
        inner = memory.type.with_shape(memory.type.shape[1:])
        values = [v for part in allocation.with_parts() for v in part.values]
        is_inside = all(plan.live.defined[v][0].is_within(scope) for v in values)
        is_dense = plan.allocations.is_dense(memory)
        fits = is_dense or plan.allocations.has_to_be_dense(allocation) is None
        if is_inside and fits and same_layout(allocation.type, inner):
            allocation.row_of = memory, equation
