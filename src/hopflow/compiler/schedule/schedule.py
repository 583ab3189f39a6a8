"""The schedule: lowers kernel programs to loops, by passes in the order of the lists.

Passes over kernel programs change what is computed and where. Passes over memory decide
which values share it. The loops are then written mechanically, and passes over loops
merge and rearrange them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.branches import branches
from hopflow.compiler.kernel_passes.carries import carries
from hopflow.compiler.kernel_passes.checks import checks
from hopflow.compiler.kernel_passes.counters import counters
from hopflow.compiler.kernel_passes.early_reads import early_reads
from hopflow.compiler.kernel_passes.flags import flags
from hopflow.compiler.kernel_passes.hoist import hoist
from hopflow.compiler.kernel_passes.idle_carries import idle_carries
from hopflow.compiler.kernel_passes.implied_conditions import implied_conditions
from hopflow.compiler.kernel_passes.inline import inline
from hopflow.compiler.kernel_passes.masked_updates import masked_updates
from hopflow.compiler.kernel_passes.pack import pack
from hopflow.compiler.kernel_passes.positions import positions
from hopflow.compiler.kernel_passes.postpone import postpone
from hopflow.compiler.kernel_passes.short_updates import short_updates
from hopflow.compiler.kernel_passes.simplify import simplify
from hopflow.compiler.kernel_passes.split import split
from hopflow.compiler.kernel_passes.stacked_carries import stacked_carries
from hopflow.compiler.kernel_passes.step_checks import step_checks
from hopflow.compiler.kernel_passes.transposed import transposed
from hopflow.compiler.kernel_passes.unit_axes import unit_axes
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.compiler.kernel_program.rewriting import programs, updated_parameters
from hopflow.compiler.layout import Layouts
from hopflow.compiler.memory.in_place import in_place
from hopflow.compiler.memory.place import place
from hopflow.compiler.memory.plan import MemoryPlan, format_memory
from hopflow.compiler.memory.required import check_in_place
from hopflow.compiler.memory.short_circuit import short_circuit
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.schedule.blocked_sums import blocked_sums
from hopflow.compiler.schedule.coalesce import coalesce
from hopflow.compiler.schedule.compared_passes import ComparedPasses
from hopflow.compiler.schedule.contract import contract
from hopflow.compiler.schedule.delinearize import delinearize
from hopflow.compiler.schedule.forwarding import forward
from hopflow.compiler.schedule.gangs import gangs
from hopflow.compiler.schedule.interchange import move_steps_inside
from hopflow.compiler.schedule.loops import loops
from hopflow.compiler.schedule.merge import merge
from hopflow.compiler.schedule.narrow_rests import narrow_rests
from hopflow.compiler.schedule.register_tiles import register_tiles
from hopflow.compiler.schedule.rotations import unroll_rotations
from hopflow.compiler.schedule.rows_in_registers import rows_in_registers
from hopflow.compiler.schedule.scalar_replacement import scalar_replacement
from hopflow.compiler.schedule.short_states import short_states
from hopflow.compiler.schedule.threads import bind_threads
from hopflow.compiler.schedule.unroll import unroll
from hopflow.compiler.schedule.unroll_and_jam import unroll_and_jam
from hopflow.compiler.schedule.unswitch import unswitch
from hopflow.compiler.target import Target
from hopflow.config import config
from hopflow.graph.types import same_type
from hopflow.logs import passing
from hopflow.loop_ir.printer import format_program
from hopflow.loop_ir.program import Program

KERNEL_PASSES: Final[tuple[Callable[[KernelProgram, Context], None], ...]] = (
    carries,
    flags,
    hoist,
    checks,
    counters,
    masked_updates,
    short_updates,
    early_reads,
    inline,
    positions,
    unit_axes,
    stacked_carries,
    branches,
    simplify,
    postpone,
    implied_conditions,
    step_checks,
    idle_carries,
    split,
    transposed,
    pack,
)
MEMORY_PASSES: Final[tuple[Callable[[MemoryPlan], None], ...]] = (
    place,
    in_place,
    short_circuit,
)
LOOP_PASSES: Final[tuple[Callable[[Program, Target], None], ...]] = (
    unroll,
    merge,
    rows_in_registers,
    coalesce,
    move_steps_inside,
    blocked_sums,
    bind_threads,
    contract,
    forward,
    unswitch,
    unroll_and_jam,
    register_tiles,
    gangs,
    short_states,
    delinearize,
    scalar_replacement,
    unroll_rotations,
    narrow_rests,
)


def schedule(
    program: KernelProgram,
    target: Target,
    donated: Sequence[int] = (),
    layouts: Layouts = (),
) -> Program:
    """Return the loops of a kernel program, which the passes change.

    Symbols become the sizes of the result. A trap refers to the node of its equation by
    the number in its `meta`.

    Args:
        donated: Positions of inputs (sizes not counted) whose memory may be
            overwritten. A result of the same type takes it, unless the result would
            have to be computed elsewhere first, and copied.
        layouts: Of the inputs (sizes not counted); dense if it is empty. The strides of
            the others are sizes of the result, after those of the program.

    Raises:
        InPlaceError: a step of a loop copies an array, and `config.require_in_place`.
    """
    lowered: dict[KernelProgram, Program] = {}
    plans: list[MemoryPlan] = []
    for plan, context in memory_plans(program, donated, layouts):
        lowered[plan.program] = _loops(plan, target, lowered, context.layouts)
        plans.append(plan)
    if config.require_in_place:
        check_in_place(plans)
    return lowered[program]


def memory_plans(
    program: KernelProgram, donated: Sequence[int] = (), layouts: Layouts = ()
) -> Iterator[tuple[MemoryPlan, Context]]:
    """Yield the memory plan of a program, after those of the functions that it calls:
    the passes change each one, and then plan its memory. For the arguments see
    `schedule`."""
    plans: dict[KernelProgram, MemoryPlan] = {}
    for current in programs(program):
        if current is program:
            context = Context(_reusable(current, donated), layouts)
        else:
            context = Context(updated_parameters(current))
        compared = ComparedPasses(current) if config.verify else None
        for run in KERNEL_PASSES:
            with passing(run.__name__, current.name, partial(format_kernels, current)):
                run(current, context)
            if compared is not None:
                compared.after(run.__name__)
        plan = plans[current] = planned(current, context.reused)
        current.updated = plan.updated
        if compared is not None:
            compared.planned(plans)
        yield plan, context


def planned(program: KernelProgram, reused: dict[int, int]) -> MemoryPlan:
    """Return the memory plan of a program.

    Args:
        reused: By the number of a result, the parameter whose memory it may take.
            Results that would have to be copied there do not take it.
    """
    reused = dict(reused)
    while True:
        plan = MemoryPlan(program, donated=reused)
        for run in MEMORY_PASSES:
            with passing(run.__name__, program.name, partial(format_memory, plan)):
                run(plan)
        if len(plan.updated) == len(reused):
            if config.verify:
                verify_memory(plan)
            return plan
        reused = dict(plan.updated)


def _loops(
    plan: MemoryPlan,
    target: Target,
    functions: Mapping[KernelProgram, Program],
    layouts: Layouts,
) -> Program:
    lowered: list[Program] = []

    def text() -> str:
        return "\n".join(map(format_program, lowered))

    name = plan.program.name
    with passing("loops", name, text):
        lowered.append(loops(plan, target, functions, layouts))
    for run in LOOP_PASSES:
        with passing(run.__name__, name, text):
            run(lowered[0], target)
    return lowered[0]


def _reusable(program: KernelProgram, donated: Sequence[int]) -> dict[int, int]:
    """Return by result the parameter that it may overwrite: the first of its type."""
    first = len(program.symbols)
    types = [value.type for value in program.block.parameters]
    free = [k + first for k in donated if not is_small(types[k + first])]
    reused: dict[int, int] = {}
    for j, value in enumerate(program.block.results):
        parameter = next((k for k in free if same_type(types[k], value.type)), None)
        if parameter is not None:
            reused[j] = parameter
            free.remove(parameter)
    return reused
