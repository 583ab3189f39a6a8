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
made before its steps.
"""

from collections.abc import Sequence
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
)
from hopflow.compiler.kernel_program.registers import is_short, shape_key
from hopflow.compiler.kernel_program.rewriting import all_blocks, elements
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr


def checks(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        _split(block)


def _split(block: Block) -> None:
    local = {value for equation in block.equations for value in equation.results}
    given, block.equations = block.equations, []
    for equation in given:
        own = equation.definition
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
        if guards:
            block.equations.append(Equation((), Effect(tuple(guards)), equation.node))
        equation.definition = replace(own, checks=())
        block.equations.append(equation)
        if free:
            late = tuple([replace(c, passed=None, is_free=True) for c in free])
            block.equations.append(Equation((), Effect(late), equation.node))
            flags = {c.passed.attr for c in free if c.passed is not None}
            block.equations = [
                q for q in block.equations if flags.isdisjoint(q.results)
            ]


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
