"""Values that follow each other share memory, where nothing reads the first any more.

    v2 in B = copy of A               ->      v2 in A = v1 in A with [k[]] = 0.0
    v2 in B = B with [k[]] = 0.0

So are elements of an array replaced in place, the carry of a loop updated in place, and
the results of branches built where they are to be. A value that is a piece of a result
is made in that part of its memory:

    v0 in A = sin(x[i0]) for i0 < 8         ->      v0 in B[0:8] = sin(x[i0]) for i0 < 8
    v1 in B = (v0[i0] where i0 < 8, ...)

Deep loops come first, then what would be copied, then large values. What a step gives
need not be in the memory of the carry: the two can exchange their memory. It may be in
that of another carry which ends there, as in `new, old = 2 * new - old, new`: those two
then change places at the end of a step. What has to be copied is noted, with the
reason.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hopflow.compiler.kernel_program.definitions import Cut, Pointwise, Scatter
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    Loop,
    Value,
    While,
)
from hopflow.compiler.kernel_program.registers import static_size
from hopflow.compiler.kernel_program.rewriting import all_expressions
from hopflow.compiler.memory.allocations import in_place as can_be_in_place
from hopflow.compiler.memory.parts import Part, is_at_own_index, parts
from hopflow.compiler.memory.plan import Copied, MemoryPlan, exchanged, walk
from hopflow.loop_ir.kernels import Library


class _Pair(NamedTuple):
    """Two values of which the second had best be in the memory of the first.

    is_free   whether nothing is copied if it is not
    part      the first is to be this part of the second
    """

    first: Value
    second: Value
    what: str
    equation: Equation
    depth: int
    is_free: bool = False
    part: Part | None = None


def in_place(plan: MemoryPlan) -> None:
    """Join allocations of a program."""
    pairs = list(_pairs(plan))
    order = sorted(range(len(pairs)), key=lambda k: (*_urgency(pairs[k]), k))
    for number in order:
        pair = pairs[number]
        first, second = plan.of(pair.first), plan.of(pair.second)
        if first is None or second is None:
            continue
        if pair.part is None:
            reason = plan.join(first, second)
        else:
            reason = plan.put_into(first, pair.part)
        if reason is not None and not pair.is_free:
            plan.copies.append(
                Copied(pair.first, pair.what, reason, pair.equation.node)
            )
    for _, equation in walk(plan.program.block):
        if isinstance(equation.definition, Loop | While):
            _take_turns(plan, equation.definition)
    _update_inputs(plan)


def _update_inputs(plan: MemoryPlan) -> None:
    """Have results in the memory of donated inputs, where nothing is copied for it."""
    block, moved = plan.program.block, exchanged(plan)
    for number, parameter in plan.donated.items():
        given, value = block.parameters[parameter], block.results[number]
        first, last = plan.of(given), plan.of(value)
        if first is None or last is None:
            continue
        if plan.join(first, last) is None and plan.of(value) not in moved:
            plan.updated[number] = parameter


def _urgency(pair: _Pair) -> tuple[int, bool, int]:
    size = static_size(pair.first.type)
    return -pair.depth, pair.is_free, -(1 << 40 if size is None else size)


def _pairs(plan: MemoryPlan) -> Iterator[_Pair]:
    """What would be copied if it was not in place, in the order of the text."""
    for block, equation in walk(plan.program.block):
        depth = plan.live.scopes[block].depth
        own, results = equation.definition, equation.results
        match own:
            case Scatter(base=base) if isinstance(base, Value):
                what = f"`{base.name}` before its elements are replaced"
                yield _Pair(base, results[0], what, equation, depth)
            case Library():
                for result, k in zip(results, own.overwrites, strict=False):
                    if k is not None:
                        base = own.operands[k]
                        assert isinstance(base, Value)
                        what = f"`{base.name}` before `{own.routine}`"
                        yield _Pair(base, result, what, equation, depth)
            case Call():
                for number, k in own.function.updated.items():
                    base = own.operands[k]
                    what = f"`{base.name}` before a call changes it"
                    yield _Pair(base, results[number], what, equation, depth)
            case Branch():
                for inner in own.blocks:
                    for value, result in zip(inner.results, results, strict=True):
                        what = f"`{value.name}` as the result of a branch"
                        yield _Pair(value, result, what, equation, depth)
            case Loop() | While():
                yield from _carry_pairs(plan, equation, own, depth)
            case Pointwise(elements=[element]) if not own.is_view:
                if is_at_own_index(element, results[0]):
                    what = f"`{element.attr.name}` as `{results[0].name}`"
                    yield _Pair(
                        element.attr, results[0], what, equation, depth, is_free=True
                    )
            case Cut():
                for part in parts(equation):
                    value, result = part.value, part.result
                    what = f"`{value.name}` into a part of `{result.name}`"
                    yield _Pair(value, result, what, equation, depth, part=part)


def _carry_pairs(
    plan: MemoryPlan, equation: Equation, loop: Loop | While, depth: int
) -> Iterator[_Pair]:
    body = loop.body
    for first, parameter, value in zip(
        loop.carry, body.parameters, body.results, strict=False
    ):
        maker = plan.live.makers.get(value)
        keeps = maker is not None and _keeps(maker, parameter)
        what = f"`{value.name}` as the carry of the next step"
        yield _Pair(value, parameter, what, equation, depth + 1, is_free=not keeps)
        what = f"`{first.name}` as the first carry"
        yield _Pair(first, parameter, what, equation, depth)


def _keeps(equation: Equation, value: Value) -> bool:
    """Whether pieces of a result are those of a value, which need not be written."""
    if not isinstance(equation.definition, Cut):
        return False
    nodes = all_expressions(equation.definition)
    first = equation.results[0]
    return any(is_at_own_index(x, first) and x.attr is value for x in nodes)


def _take_turns(plan: MemoryPlan, loop: Loop | While) -> None:
    """Let what a step gives be in memory of another carry that it ends."""
    body: Block = loop.body
    for value, parameter in zip(body.results, body.parameters, strict=False):
        own, wanted = plan.of(value), plan.of(parameter)
        maker = plan.live.makers.get(value)
        if own is None or own is wanted or own.carries or maker is None:
            continue
        if maker not in body.equations:
            continue
        for other in body.parameters:
            memory = plan.of(other)
            if memory is None or memory is wanted:
                continue
            fits = can_be_in_place(maker, other, value, plan.live)
            if fits and plan.join(own, memory) is None:
                break
