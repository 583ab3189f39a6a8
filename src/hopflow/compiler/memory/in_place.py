"""Let a value take over the memory of another that is not read any more.

    v2 in B = copy of A               ->      v2 in A = v1 in A with [k[]] = 0.0
    v2 in B = B with [k[]] = 0.0

This replaces elements of an array in place, updates the carry of a loop in place, and
computes the results of branches where they are needed. A value that is a piece of a
result is computed in that part of the result's memory:

    v0 in A = sin(x[i0]) for i0 < 8         ->      v0 in B[0:8] = sin(x[i0]) for i0 < 8
    v1 in B = (v0[i0] where i0 < 8, ...)

Pairs in deep loops come first, then those that would need a copy, then large values.
The result of a step need not be in the memory of its carry, since the two can exchange
their memory. It may use the memory of another carry that ends there, as in
`new, old = 2 * new - old, new`: those two are exchanged at the end of a step. The plan
lists the values that have to be copied, each with the reason.
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
    """Two values of which the second should be in the memory of the first.

    text      what is copied if it is not, for the report
    is_free   whether nothing is copied if it is not
    part      the part of the second that the first should be, if any
    """

    first: Value
    second: Value
    text: str
    equation: Equation
    depth: int
    is_free: bool = False
    part: Part | None = None


def in_place(plan: MemoryPlan) -> None:
    """Merge the allocations of a program where that saves copies."""
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
            node, in_loop = pair.equation.node, pair.depth > 0
            plan.copies.append(Copied(pair.first, pair.text, reason, node, in_loop))
    for _, equation in walk(plan.program.block):
        if isinstance(equation.definition, Loop | While):
            _reuse_ended_carries(plan, equation.definition)
    _update_inputs(plan)


def _update_inputs(plan: MemoryPlan) -> None:
    """Put results into the memory of donated inputs where that needs no copy."""
    block, moved = plan.program.block, exchanged(plan)
    for number, parameter in plan.donated.items():
        donated, value = block.parameters[parameter], block.results[number]
        first, last = plan.of(donated), plan.of(value)
        if first is None or last is None:
            continue
        if plan.join(first, last) is None and plan.of(value) not in moved:
            plan.updated[number] = parameter


def _urgency(pair: _Pair) -> tuple[int, bool, int]:
    size = static_size(pair.first.type)
    return -pair.depth, pair.is_free, -(1 << 40 if size is None else size)


def _pairs(plan: MemoryPlan) -> Iterator[_Pair]:
    """Yield the pairs that would need a copy, in the order of the program."""
    for block, equation in walk(plan.program.block):
        depth = plan.live.scopes[block].depth
        definition, results = equation.definition, equation.results
        match definition:
            case Scatter(base=base) if isinstance(base, Value):
                text = f"`{base.name}` before its elements are replaced"
                yield _Pair(base, results[0], text, equation, depth)
            case Library():
                for result, k in zip(results, definition.overwrites, strict=False):
                    if k is not None:
                        base = definition.operands[k]
                        assert isinstance(base, Value)
                        text = f"`{base.name}` before `{definition.routine}`"
                        yield _Pair(base, result, text, equation, depth)
            case Call():
                for number, k in definition.function.updated.items():
                    base = definition.operands[k]
                    text = f"`{base.name}` before a call changes it"
                    yield _Pair(base, results[number], text, equation, depth)
            case Branch():
                for inner in definition.blocks:
                    for value, result in zip(inner.results, results, strict=True):
                        text = f"`{value.name}` as the result of a branch"
                        yield _Pair(value, result, text, equation, depth)
            case Loop() | While():
                yield from _carry_pairs(plan, equation, definition, depth)
            case Pointwise(elements=[element]) if not definition.is_view:
                if is_at_own_index(element, results[0]):
                    text = f"`{element.attr.name}` as `{results[0].name}`"
                    yield _Pair(
                        element.attr, results[0], text, equation, depth, is_free=True
                    )
            case Cut():
                for part in parts(equation):
                    value, result = part.value, part.result
                    text = f"`{value.name}` into a part of `{result.name}`"
                    yield _Pair(value, result, text, equation, depth, part=part)


def _carry_pairs(
    plan: MemoryPlan, equation: Equation, loop: Loop | While, depth: int
) -> Iterator[_Pair]:
    body = loop.body
    for first, parameter, value in zip(
        loop.carry, body.parameters, body.results, strict=False
    ):
        maker = plan.live.makers.get(value)
        keeps = maker is not None and _copies_piece(maker, parameter)
        text = f"`{value.name}` as the carry of the next step"
        yield _Pair(value, parameter, text, equation, depth + 1, is_free=not keeps)
        text = f"`{first.name}` as the first carry"
        yield _Pair(first, parameter, text, equation, depth)


def _copies_piece(equation: Equation, value: Value) -> bool:
    """Return whether a piece of a cut copies a value, which is free in place."""
    if not isinstance(equation.definition, Cut):
        return False
    nodes = all_expressions(equation.definition)
    first = equation.results[0]
    return any(is_at_own_index(x, first) and x.attr is value for x in nodes)


def _reuse_ended_carries(plan: MemoryPlan, loop: Loop | While) -> None:
    """Let the result of a step use the memory of another carry that the step ends."""
    body: Block = loop.body
    for value, parameter in zip(body.results, body.parameters, strict=False):
        memory, target = plan.of(value), plan.of(parameter)
        maker = plan.live.makers.get(value)
        if memory is None or memory is target or memory.carries or maker is None:
            continue
        if maker not in body.equations:
            continue
        for other in body.parameters:
            ended = plan.of(other)
            if ended is None or ended is target:
                continue
            fits = can_be_in_place(maker, other, value, plan.live)
            if fits and plan.join(memory, ended) is None:
                break
