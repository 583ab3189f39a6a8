"""What is wrong about a spoilt memory plan is found before it is run.

The plans of drawn programs are spoilt at random: two allocations become one, a value
moves to another, a row of a stack, a part or a result is where it must not be. Where
the tagged interpreter, or the loops that are written for the plan, give another answer,
the verifier has to refuse it; and it has to accept what the passes made.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.kernel_program.interpreter import run as run_kernels
from hopflow.compiler.kernel_program.program import KernelProgram, Loop, While
from hopflow.compiler.memory.allocations import Allocation, same_layout
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.parts import parts
from hopflow.compiler.memory.plan import MemoryPlan, format_memory, walk
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule.loops import loops
from hopflow.compiler.schedule.schedule import memory_plans
from hopflow.errors import KernelProgramError
from hopflow.graph.core import Graph
from hopflow.loop_ir import interpreter
from hopflow.loop_ir.program import Program as LoopProgram
from hopflow.loop_ir.verifier import verify as verify_loops
from hopflow.testing.program import Program
from hopflow.testing.strategies import programs

pytestmark = pytest.mark.slow

SPOILT: Final = 6
"""Plans of one program."""

Plans = dict[KernelProgram, MemoryPlan]
drawn = st.one_of(
    programs("exact", aliasing=True, mutation=True, size=4),
    programs("exact", aliasing=True, size=4, depth=1),
)


def plans_of(graph: Graph, donated: Sequence[int]) -> Plans:
    program = kernels_of(graph)
    return {plan.program: plan for plan, _ in memory_plans(program, donated)}


def is_refused(plan: MemoryPlan) -> bool:
    try:
        verify_memory(plan)
    except KernelProgramError:
        return True
    return False


# --- spoiling -------------------------------------------------------------------------


def spoil(plan: MemoryPlan, choose: Callable[[Sequence[Any]], Any]) -> str:
    """Change a plan; the text says how, and is empty if there is nothing to change."""
    known = [a for a in plan.allocations if a.values]
    if not known:
        return ""
    one = choose(known)
    match choose(["join", "join", "move", "row", "part", "result"]):
        case "row":
            return _as_row(plan, known, choose)
        case "part":
            return _as_part(plan, choose)
        case "result":
            number = choose(range(len(plan.program.block.results)))
            type_ = plan.program.block.results[number].type
            alike = [a for a in known if same_layout(a.type, type_)]
            one = choose(alike or known)
            one.output = number
            return f"{_names(one)} as result {number}"
        case how:
            alike = [a for a in known if a is not one and same_layout(a.type, one.type)]
            # Now and then what is laid out differently, too.
            others = alike if choose(range(8)) else [a for a in known if a is not one]
            if not others:
                return ""
            other = choose(others)
            moved = list(other.values) if how == "join" else [choose(other.values)]
            for value in moved:
                plan.allocations.put(value, one)
            return f"{[v.name for v in moved]} to {_names(one)}"


def _as_row(
    plan: MemoryPlan,
    known: Sequence[Allocation],
    choose: Callable[[Sequence[Any]], Any],
) -> str:
    stacks = [
        (equation, stack, memory)
        for _, equation in walk(plan.program.block)
        if isinstance(own := equation.definition, Loop | While)
        for stack in equation.results[len(own.carry) :]
        if (memory := plan.of(stack)) is not None
    ]
    if not stacks:
        return ""
    equation, stack, memory = choose(stacks)
    type_ = stack.type.with_shape(stack.shape[1:])
    others = [a for a in known if a is not memory]
    one = choose([a for a in others if same_layout(a.type, type_)] or others or known)
    one.row_of = memory, equation
    return f"{_names(one)} as a row of {stack.name}"


def _as_part(plan: MemoryPlan, choose: Callable[[Sequence[Any]], Any]) -> str:
    places = [
        (one, whole, part)
        for _, equation in walk(plan.program.block)
        for part in parts(equation)
        if (one := plan.of(part.value)) is not None
        if (whole := plan.of(part.result)) is not None
        if one.part_of is None and one is not whole
    ]
    if not places:
        return ""
    one, whole, part = choose(places)
    one.part_of = part
    whole.parts.append(one)
    return f"{_names(one)} as a part of {part.result.name}"


def _names(allocation: Allocation) -> list[str]:
    return [value.name for value in allocation.values]


# --- running --------------------------------------------------------------------------


def run_loops(plans: Plans, program: KernelProgram, inputs: Sequence[Any]) -> Any:
    """What the loops compute that are written for plans."""
    made: dict[KernelProgram, LoopProgram] = {}
    for one, plan in plans.items():
        made[one] = loops(plan, host(), made)
    verify_loops(made[program])
    return interpreter.run(made[program], (), [x.copy() for x in inputs])


def check_answers(plans: Plans, inputs: Sequence[Any], want: Sequence[Any]) -> None:
    """Both interpreters give the answer."""
    program = list(plans)[-1]
    for got in (
        run_planned(program, plans, inputs),
        run_loops(plans, program, inputs),
    ):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@given(drawn, st.randoms(use_true_random=False), st.booleans())
def test_a_spoilt_plan_is_refused_or_gives_the_answer(
    program: Program, random: Random, donates: bool
) -> None:
    inputs = [np.asarray(x.value) for x in program.arguments]
    args = map(hf.asarray, inputs)
    f = program.function()
    graph = hf.trace(f, *args, mode="symbolic", dynamic=False).graph
    donated = range(len(inputs)) if donates else ()
    want = run_kernels(kernels_of(graph), inputs)
    plans = plans_of(graph, donated)
    assert not any(map(is_refused, plans.values()))
    check_answers(plans, inputs, want)
    for _ in range(SPOILT):
        plans = plans_of(graph, donated)
        plan = random.choice(list(plans.values()))
        how = spoil(plan, random.choice)
        if how and not is_refused(plan):
            note(how)
            note(format_memory(plan))
            check_answers(plans, inputs, want)
