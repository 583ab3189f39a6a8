"""Checks become equations of their own.

    v1 = y[k[i0]]; check index: k[i0] < 8 for i0 < 5
    v2 = z[k[i0], i1]; check index: k[i0] < 9 for i0 < 5
  ->
    v1 = (y[k[i0]] if k[i0] < 8) for i0 < 5
    free check index: k[i0] < 8 for i0 < 5
    check index: k[i0] < 9 for i0 < 5
    v2 = z[k[i0], i1] for i0 < 5, i1 < 6

Where each element reads at an index of its own, or divides by a number of its own, it
does so under the condition that the check of that holds, and nothing relies on that the
check has been made: it is free, and may be made in the loop that computes the elements
(see `postpone`). Other checks come before the elements, and so do those that a loop has
made before its steps. A check is made once, for all that ask the same.
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
    _split(program.block, _Made())


class _Made:
    """The checks that were made before, here or in a block around."""

    def __init__(self, around: "_Made | None" = None) -> None:
        self._around = around
        self._interned: Interned = Interned() if around is None else around._interned
        self._checks: set[Hashable] = set()

    def has(self, check: Check) -> bool:
        """Whether a check has passed already. One that guards something needs another
        that does: those that are free may be made later on."""
        equal = self._key(check, is_free=check.is_free)
        made: _Made | None = self
        while made is not None:
            if equal in made._checks:
                return True
            made = made._around
        return False

    def add(self, *checks: Check) -> None:
        for check in checks:
            self._checks.add(self._key(check, is_free=True))
            if not check.is_free:
                self._checks.add(self._key(check, is_free=False))

    def _key(self, check: Check, *, is_free: bool) -> Hashable:
        """What equal checks have in common."""
        return shape_key(check.shape), self._interned.of(check.holds), is_free


def _split(block: Block, made: _Made) -> None:
    local = {value for equation in block.equations for value in equation.results}
    given, block.equations = block.equations, []
    unread: set[Value] = set()  # flags of checks that ask no more for them
    for equation in given:
        own = equation.definition
        for inner in blocks(own):
            _split(inner, _Made(made))
        if not isinstance(own, Pointwise | Scatter) or not own.checks:
            block.equations.append(equation)
            continue
        free: list[Check] = []
        guards: list[Check] = list(own.checks)
        if isinstance(own, Pointwise):
            type_ = equation.results[0].type
            free = [c for c in guards if _is_of_element(c, own, type_, local)]
            guards = [c for c in guards if c not in free]
            own = _under(free, own)
        unread.update(c.passed.attr for c in free if c.passed is not None)
        late = [replace(c, passed=None, is_free=True) for c in free]
        guards = [c for c in guards if c.passed is not None or not made.has(c)]
        late = [c for c in late if not made.has(c)]
        made.add(*guards, *late)
        equation.definition = replace(own, checks=())
        block.equations += _effect(guards, equation.node)
        block.equations.append(equation)
        block.equations += _effect(late, equation.node)
    block.equations = [q for q in block.equations if unread.isdisjoint(q.results)]


def _effect(checks: Sequence[Check], node: Node) -> list[Equation]:
    return [Equation((), Effect(tuple(checks)), node)] if checks else []


def _is_of_element(
    check: Check, own: Pointwise, type_: TensorType, local: AbstractSet[Value]
) -> bool:
    """Whether a check asks of each element for an index or a divisor that only that
    element needs, and no flag from before the loop tells whether it passes."""
    if check.kind not in ("index", "divide") or is_short(check.shape):
        return False
    if shape_key(check.shape) != shape_key(type_.shape):
        return False
    if check.passed is not None and check.passed.attr not in local:
        return False
    asked, read = _reads([check.holds]), _reads(own.elements)
    return bool(asked) and asked <= read


def _reads(roots: Sequence[Expr]) -> AbstractSet[tuple[object, ...]]:
    return {(node.attr, node.args) for node in elements(roots)}


def _under(free: Sequence[Check], own: Pointwise) -> Pointwise:
    if not free:
        return own
    condition = e.all_of([check.holds for check in free])
    return replace(own, elements=tuple([under(condition, x) for x in own.elements]))
