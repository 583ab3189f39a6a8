"""`hf.config.require_in_place`: loops must update arrays in place."""

from collections.abc import Sequence

from hopflow.compiler.kernel_program.program import Call, KernelProgram
from hopflow.compiler.memory.plan import Copied, MemoryPlan, walk
from hopflow.errors import InPlaceError


def check_in_place(plans: Sequence[MemoryPlan]) -> None:
    """Check that no step of a loop copies an array that it could update.

    Args:
        plans: The memory plans of a program and the functions that it calls, each after
            those that it calls itself.

    Raises:
        InPlaceError: it does; the message lists the copies.
    """
    repeated: set[KernelProgram] = set()  # functions that loops call
    for plan in reversed(plans):
        for block, equation in walk(plan.program.block):
            if isinstance(equation.definition, Call) and (
                plan.program in repeated or plan.live.scopes[block].depth
            ):
                repeated.add(equation.definition.function)
    copies = [
        copied
        for plan in plans
        for copied in plan.copies
        if copied.in_loop or plan.program in repeated
    ]
    if copies:
        raise InPlaceError(plans[-1].program.name, [_described(c) for c in copies])


def _described(copied: Copied) -> str:
    return f"{copied}: {copied.value.type} in each step"
