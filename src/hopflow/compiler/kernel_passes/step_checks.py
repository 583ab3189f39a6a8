"""Checks of what the steps of a loop read are made before the loop, for all steps.

    v1 = for t0 < n, carry c2 = x:
        v2 = c2[i0] + (y[k[i0, t0]] if k[i0, t0] < 8) for i0 < 5
        free check index: k[i0, t0] < 8 for i0 < 5
        yield v2
  ->
    all_passed0 = reduce and from True of k[i0, i1] < 8 over i0 < 5, i1 < n
    branch all_passed0:
        for t0_search < n:
            check index: k[i0, t0_search] < 8 for i0 < 5
    or:
    v1 = for t0 < n, carry c2 = x:
        v2 = c2[i0] + y[k[i0, t0]] for i0 < 5
        yield v2

Steps without a check need no flag and no condition, and a row may go through all of
them. Where one fails, the checks alone run step by step, and stop the program as the
steps would have done. Checks move if they are the only effects of the loop, and depend
on nothing that a step computes but the number of the step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import count
from typing import Final

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.hoist import is_invariant
from hopflow.compiler.kernel_passes.implied_conditions import Known
from hopflow.compiler.kernel_passes.reads import cost
from hopflow.compiler.kernel_passes.substitution import under
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
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    blocks,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.compiler.kernel_program.rewriting import drop_unread, is_pure
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.walk import names, nodes
from hopflow.symbolic.size import Size, Symbol, free_symbols

MOST: Final = 24
"""The cost of a condition, at most: it is computed again for the index itself."""
FEW: Final = 4
"""The checks of a step that move, at most."""


def step_checks(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Inner loops come first. What searches for a check that fails is a region, so that
    checks leave one loop, and not those around it.
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
            equations += _taken(equation, equation.definition, entry, numbers)
        equations.append(equation)
    block.equations = equations


def _taken(
    equation: Equation, loop: Loop, entry: Collection[Symbol], numbers: Iterator[int]
) -> list[Equation]:
    """Remove the checks from the steps of a loop, and return them for all steps."""
    body = loop.body
    found = [q for q in body.equations if _has_effect(q)]
    effects = [(q, q.definition) for q in found if isinstance(q.definition, Effect)]
    checks = [(q.node, check) for q, effect in effects for check in effect.checks]
    if len(effects) < len(found) or not 0 < len(checks) <= FEW:
        return []
    if any(effect.types for _, effect in effects):
        return []  # what must fit into memory in each step
    if not any(check.shape for _, check in checks):
        return []  # numbers are checked where they are
    makers = {v: q for q in body.equations for v in q.results}
    outer = _Outer(makers, {*body.parameters})
    counter = Var(f"{loop.counter.name}_search", loop.counter.dtype)
    moved = [_without_steps(check, loop, counter, outer, entry) for _, check in checks]
    search = [check for check in moved if check is not None]
    guarded = _guarded(search) if len(search) == len(moved) else None
    if guarded is None:
        return []
    flags: list[Equation] = []
    passed: list[Expr] = []
    for check, (node, _) in zip(guarded, checks, strict=True):
        made, flag = _flag(check, node, loop.length, counter, numbers)
        flags += made
        passed.append(flag)
    every = Value(f"all_passed{next(numbers)}", TensorType(dtypes.bool_))
    both = reduce(lambda x, y: e.binary("and", x, y), passed)
    steps = [
        Equation((), Effect((_sought(check),)), node)
        for check, (node, _) in zip(search, checks, strict=True)
    ]
    again = Loop(counter, loop.length, (), Block([], steps), loop.reverse)
    fails = Block([], [Equation((), again, equation.node)])
    known = Known()
    for _, check in checks:
        known.add(check)
    known.block(body)
    body.equations = [q for q in body.equations if q not in found]
    drop_unread(body)
    return [
        *flags,
        Equation((every,), Pointwise((both,)), equation.node),
        Equation((), Branch(every, (fails, Block([]))), equation.node),
    ]


def _sought(check: Check) -> Check:
    """Return a check of which it is known that it fails in some step."""
    if check.passed is not None:
        return check
    return replace(check, passed=e.const(False, dtypes.bool_))


def _guarded(checks: Sequence[Check]) -> list[Check] | None:
    """Return the checks of a step with conditions that read an element only where those
    before say that it is there: all are tested, also where one has failed. None: they
    are of other elements.

    No index of an element is read (see `_without_steps`): only what is tested of
    indices alone says whether it is there.
    """
    found: list[Check] = []
    guards: list[Check] = []
    for check in checks:
        holds = check.holds
        if any(n.op == "element" for n in nodes(holds)):
            shapes = [shape_key(g.shape) for g in guards if g.shape]
            if any(shape != shape_key(check.shape) for shape in shapes):
                return None
            if guards:
                holds = under(e.all_of([g.holds for g in guards]), holds)
        else:
            guards.append(check)
        found.append(replace(check, holds=holds))
    return found


def _has_effect(equation: Equation) -> bool:
    """Return whether an equation may stop the program, or calls what may."""
    definition = equation.definition
    if isinstance(definition, Effect):
        return bool(definition.checks)
    if isinstance(definition, Loop):
        return any(map(_has_effect, definition.body.equations))
    return isinstance(definition, Region) or not is_pure(equation)


def _without_steps(
    check: Check, loop: Loop, counter: Var, outer: "_Outer", entry: Collection[Symbol]
) -> Check | None:
    """Return a check in terms of the number of a step and of what is known before the
    loop; None: it depends on what a step computes, or on sizes that the program itself
    computes, or reads at an index that is read, which another check may have to find in
    range first."""
    number = {loop.counter: e.read(counter)}
    parts = [check.holds, *check.values]
    known = [x for part in parts if (x := outer.of(part, number)) is not None]
    if len(known) < len(parts):
        return None
    work, gathers = cost(nodes(known[0]))
    if work > MOST or gathers:
        return None
    sizes = [n.attr for n in nodes(*known) if n.op == "size"]
    if not all(is_invariant(n, (), entry) for n in (*sizes, *check.shape, loop.length)):
        return None
    passed = check.passed and outer.of(check.passed, number)
    return Check(check.kind, check.shape, known[0], tuple(known[1:]), passed)


class _Outer:
    """Expressions of a step, as they are before the loop."""

    def __init__(
        self, makers: Mapping[Value, Equation], carry: Collection[Value]
    ) -> None:
        self._makers, self._carry = makers, carry

    def of(self, root: Expr, variables: Mapping[Var, Expr]) -> Expr | None:
        """Return an expression with other variables; None: it needs what a step
        computes."""
        values: dict[Expr, Expr] = {}
        for node in nodes(root):
            if node.op == "var" and node.attr in variables:
                values[node] = variables[node.attr]
                continue
            moved = self._element(node, variables) if node.op == "element" else node
            if moved is None:
                return None
            if moved is node:
                args = tuple([values[a] for a in node.args])
                moved = e.with_args(node, args)
            values[node] = moved
        return values[root]

    def _element(self, node: Expr, variables: Mapping[Var, Expr]) -> Expr | None:
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
        return self.of(definition.elements[0], variables)


def _flag(
    check: Check, node: Node, length: Size, counter: Var, numbers: Iterator[int]
) -> tuple[list[Equation], Expr]:
    """Return whether a check passes in all steps, and the equations that find it."""
    if check.passed is not None:
        return [], check.passed  # in all of them, if in one
    rank = len(check.shape)
    holds, shape = check.holds, check.shape
    if names(holds, {counter}):
        steps = {counter: axes(rank + 1)[rank]}
        holds = e.rewrite(holds, _renamed(steps))
        shape = (*shape, length)
    if not shape:
        return [], holds
    order = _in_memory_order(holds, len(shape))
    at = axes(len(shape))
    places = {at[axis].attr: at[k] for k, axis in enumerate(order)}
    total = e.read(Var("passed", dtypes.bool_))
    every = Reduction(
        tuple([shape[axis] for axis in order]),
        (e.const(True, dtypes.bool_),),
        "and",
        (e.rewrite(holds, _renamed(places)),),
        (Function((total,), (total,)),),
    )
    value = Value(f"all_passed{next(numbers)}", TensorType(dtypes.bool_))
    return [Equation((value,), every, node)], value[()]


def _renamed(variables: Mapping[Var, Expr]) -> Callable[[Expr], Expr | None]:
    return lambda node: variables.get(node.attr) if node.op == "var" else None


def _in_memory_order(holds: Expr, rank: int) -> Sequence[int]:
    """Return the axes of a condition, the last of which is one along which its reads
    are contiguous."""
    at = axes(rank)
    last = [
        e.index_of(n)[-1] for n in nodes(holds) if n.op == "element" and e.index_of(n)
    ]
    along = [k for k, axis in enumerate(at) if any(axis in nodes(i) for i in last)]
    chosen = along[0] if len(along) == 1 else rank - 1
    return [*(k for k in range(rank) if k != chosen), chosen]
