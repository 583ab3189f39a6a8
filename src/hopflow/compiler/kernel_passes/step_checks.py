"""Checks of what the steps of a loop read are made before the loop, for all steps.

    v1 = for t0 < n, carry c2 = x:
        v2 = c2[i0] + (y[k[i0, t0]] if k[i0, t0] < 8) for i0 < 5
        free check index: k[i0, t0] < 8 for i0 < 5
        yield v2
  ->
    all_passed0 = reduce and from True of k[i0, i1] < 8 over i0 < 5, i1 < n
    check index: k[i1, i0] < 8 unless all_passed0[] for i0 < n, i1 < 5
    v1 = for t0 < n, carry c2 = x:
        v2 = c2[i0] + y[k[i0, t0]] for i0 < 5
        yield v2

Steps without a check need no flag and no condition, and a row may go through all of
them. A check moves if it is the only effect of the loop, so that the error is the same,
and depends on nothing that a step computes but the number of the step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Final

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.hoist import is_invariant
from hopflow.compiler.kernel_passes.implied_conditions import Known
from hopflow.compiler.kernel_passes.reads import cost
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Effect,
    Function,
    Pointwise,
    Reduction,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import drop_unread, is_pure
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.walk import names, nodes
from hopflow.symbolic.size import Size, Symbol, free_symbols

MOST: Final = 24
"""The cost of a condition, at most: it is computed again for the index itself."""


def step_checks(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Inner loops come first, so that a check may leave several loops.
    """
    inputs = program.block.parameters
    entry = {s for value in inputs for s in free_symbols(*value.shape)}
    _edit(program.block, entry, count())


def _edit(block: Block, entry: Collection[Symbol], numbers: Iterator[int]) -> None:
    equations: list[Equation] = []
    for equation in block.equations:
        for inner in blocks(equation.definition):
            _edit(inner, entry, numbers)
        if isinstance(equation.definition, Loop):
            equations += _taken(equation.definition, entry, numbers)
        equations.append(equation)
    block.equations = equations


def _taken(
    loop: Loop, entry: Collection[Symbol], numbers: Iterator[int]
) -> list[Equation]:
    """Remove the check from the steps of a loop, and return it for all of them."""
    body = loop.body
    found = [q for q in body.equations if _has_effect(q)]
    if len(found) != 1:
        return []
    [equation] = found
    effect = equation.definition
    if not isinstance(effect, Effect) or len(effect.checks) != 1:
        return []
    [check] = effect.checks
    moved = _for_all_steps(check, loop, entry) if check.shape else None
    if moved is None:
        return []
    body.equations = [q for q in body.equations if q is not equation]
    known = Known()
    known.add(check)
    known.block(body)
    drop_unread(body)
    return _equations(moved, equation.node, next(numbers))


def _has_effect(equation: Equation) -> bool:
    """Return whether an equation may stop the program, or calls what may."""
    definition = equation.definition
    if isinstance(definition, Effect):
        return bool(definition.checks)
    if isinstance(definition, Loop):
        return any(map(_has_effect, definition.body.equations))
    return isinstance(definition, Region) or not is_pure(equation)


def _for_all_steps(check: Check, loop: Loop, entry: Collection[Symbol]) -> Check | None:
    """Return a check over an axis of the steps and its own axes, or over these alone if
    all steps have the same one; None: it depends on what a step computes, or on sizes
    that the program itself computes, or there may be no step."""
    shape: tuple[Size, ...] = (loop.length, *check.shape)
    at = axes(len(shape))
    step = at[0]
    if loop.reverse:
        step = e.sub(e.sub(e.extent(loop.length), e.index(1)), step)
    renamed: dict[Var, Expr] = {loop.counter: step}
    for before, after in pairwise(at):
        renamed[before.attr] = after
    makers = {v: q for q in loop.body.equations for v in q.results}
    moved = _Moved(renamed, makers, {*loop.body.parameters})
    holds, values = moved.of(check.holds), list(map(moved.of, check.values))
    known = [x for x in (holds, *values) if x is not None]
    sizes = [n.attr for n in nodes(*known) if n.op == "size"]
    if holds is None or len(known) <= len(values):
        return None
    if cost(nodes(holds)).again > MOST:
        return None
    if not all(is_invariant(n, (), entry) for n in (*sizes, *shape)):
        return None
    if any(names(x, {at[0].attr}) for x in known):
        return Check(check.kind, shape, holds, tuple(known[1:]))
    if not isinstance(loop.length, int) or loop.length < 1:
        return None
    back = {after: before for before, after in pairwise(at)}
    holds, *others = [e.rewrite(x, back.get) for x in known]
    passed = check.passed and moved.of(check.passed)
    return Check(check.kind, check.shape, holds, tuple(others), passed)


class _Moved:
    """Expressions of a step, as they are before the loop."""

    def __init__(
        self,
        renamed: Mapping[Var, Expr],
        makers: Mapping[Value, Equation],
        carry: Collection[Value],
    ) -> None:
        self._renamed, self._makers, self._carry = renamed, makers, carry

    def of(self, root: Expr) -> Expr | None:
        """Return an expression over the axis of the steps; None: it is none."""
        values: dict[Expr, Expr] = {}
        for node in nodes(root):
            if node.op == "var" and node.attr in self._renamed:
                values[node] = self._renamed[node.attr]
                continue
            moved = self._element(node) if node.op == "element" else node
            if moved is None:
                return None
            if moved is node:
                args = tuple([values[a] for a in node.args])
                moved = e.with_args(node, args)
            values[node] = moved
        return values[root]

    def _element(self, node: Expr) -> Expr | None:
        """Return an element of a value from before the loop itself; the expression of a
        number that a step computes of its own number; None: it is another one."""
        value: Value = node.attr
        if value in self._carry:
            return None
        maker = self._makers.get(value)
        if maker is None:
            return node
        definition = maker.definition
        if value.shape or not isinstance(definition, Pointwise) or definition.checks:
            return None
        if len(definition.elements) > 1:
            return None
        return self.of(definition.elements[0])


def _equations(check: Check, node: Node, number: int) -> list[Equation]:
    """Return the equations of a check: a flag, found in the order of the memory, and
    the search for the first failure."""
    if check.passed is not None:
        return [Equation((), Effect((check,)), node)]
    flag = Value(f"all_passed{number}", TensorType(dtypes.bool_))
    order = _in_memory_order(check)
    at = axes(len(check.shape))
    renamed = {at[axis]: at[k] for k, axis in enumerate(order)}
    holds = e.rewrite(check.holds, renamed.get)
    total = e.read(Var("passed", dtypes.bool_))
    every = Reduction(
        tuple([check.shape[axis] for axis in order]),
        (e.const(True, dtypes.bool_),),
        "and",
        (holds,),
        (Function((total,), (total,)),),
    )
    search = Effect((replace(check, passed=flag[()]),))
    return [Equation((flag,), every, node), Equation((), search, node)]


def _in_memory_order(check: Check) -> Sequence[int]:
    """Return the axes of a check, the last of which is one along which its reads are
    contiguous."""
    at = axes(len(check.shape))
    last = [
        e.index_of(n)[-1]
        for n in nodes(check.holds)
        if n.op == "element" and e.index_of(n)
    ]
    along = [k for k, axis in enumerate(at) if any(axis in nodes(i) for i in last)]
    chosen = along[0] if len(along) == 1 else len(at) - 1
    return [*(k for k in range(len(at)) if k != chosen), chosen]
