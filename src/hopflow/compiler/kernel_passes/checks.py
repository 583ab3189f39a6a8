"""Checks become equations of their own.

    v1 = y[k[i0]]; check index: k[i0] < 8 for i0 < 5
    v2 = z[k[i0], i1]; check index: k[i0] < 9 for i0 < 5
  ->
    v1 = (y[k[i0]] if k[i0] < 8) for i0 < 5
    free check index: k[i0] < 8 for i0 < 5
    check index: k[i0] < 9 for i0 < 5
    v2 = z[k[i0], i1] for i0 < 5, i1 < 6

If each element has an index or a divisor of its own, its read or division becomes
conditional on the check. Then nothing relies on the check having run: it is free, and
may run in the loop that computes the elements (see `postpone`). Other checks come
before the elements, and so do those whose flag was computed before the loop. Equal
checks become one.
"""

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.substitution import under
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Effect,
    Pointwise,
    Scatter,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_short, shape_key
from hopflow.compiler.kernel_program.rewriting import elements
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.walk import Interned


def checks(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    _split(program.block, _Passed())


class _Passed:
    """The checks that have run before, in this block or an enclosing one."""

    def __init__(self, outer: "_Passed | None" = None) -> None:
        self._outer = outer
        self._interned: Interned = Interned() if outer is None else outer._interned
        self._checks: set[Hashable] = set()

    def has(self, check: Check) -> bool:
        """Return whether a check has passed already. A check that guards something
        needs an equal one that does: free checks may run later."""
        key = self._key(check, is_free=check.is_free)
        passed: _Passed | None = self
        while passed is not None:
            if key in passed._checks:
                return True
            passed = passed._outer
        return False

    def add(self, *checks: Check) -> None:
        for check in checks:
            self._checks.add(self._key(check, is_free=True))
            if not check.is_free:
                self._checks.add(self._key(check, is_free=False))

    def _key(self, check: Check, *, is_free: bool) -> Hashable:
        """Return a key that is equal for equal checks."""
        return shape_key(check.shape), self._interned.of(check.holds), is_free


def _split(block: Block, passed: _Passed) -> None:
    local = {value for equation in block.equations for value in equation.results}
    before, block.equations = block.equations, []
    unread: set[Value] = set()  # flags that no check uses any more
    for equation in before:
        definition = equation.definition
        for inner in blocks(definition):
            _split(inner, _Passed(passed))
        if not isinstance(definition, Pointwise | Scatter) or not definition.checks:
            block.equations.append(equation)
            continue
        free: list[Check] = []
        guards: list[Check] = list(definition.checks)
        if isinstance(definition, Pointwise):
            type_ = equation.results[0].type
            free = [c for c in guards if _is_of_element(c, definition, type_, local)]
            guards = [c for c in guards if c not in free]
            definition = _under(free, definition)
        unread.update(c.passed.attr for c in free if c.passed is not None)
        late = [replace(c, passed=None, is_free=True) for c in free]
        guards = [c for c in guards if c.passed is not None or not passed.has(c)]
        late = [c for c in late if not passed.has(c)]
        passed.add(*guards, *late)
        equation.definition = replace(definition, checks=())
        block.equations += _effect(guards, equation.node)
        block.equations.append(equation)
        block.equations += _effect(late, equation.node)
    block.equations = [q for q in block.equations if unread.isdisjoint(q.results)]


def _effect(checks: Sequence[Check], node: Node) -> list[Equation]:
    return [Equation((), Effect(tuple(checks)), node)] if checks else []


def _is_of_element(
    check: Check, definition: Pointwise, type_: TensorType, local: AbstractSet[Value]
) -> bool:
    """Return whether a check tests an index or a divisor of each element that only this
    element uses, and no flag from before the loop tells whether it passes."""
    if check.kind not in ("index", "divide") or is_short(check.shape):
        return False
    if shape_key(check.shape) != shape_key(type_.shape):
        return False
    if check.passed is not None and check.passed.attr not in local:
        return False
    required, read = _reads([check.holds]), _reads(definition.elements)
    return bool(required) and required <= read


def _reads(roots: Sequence[Expr]) -> AbstractSet[tuple[object, ...]]:
    return {(node.attr, node.args) for node in elements(roots)}


def _under(free: Sequence[Check], definition: Pointwise) -> Pointwise:
    if not free:
        return definition
    condition = e.all_of([check.holds for check in free])
    return replace(
        definition, elements=tuple([under(condition, x) for x in definition.elements])
    )
