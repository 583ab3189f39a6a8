"""Turns the outcome of the checks of a loop's step into a value, a flag.

    v1 = for t0 < n, carry c2 = x:
        v3 = y[k[i0]]; check index: k[i0] < 8 for i0 < 5
        v4 = c2[i0] + v3[i0]
        yield v4
  ->
    v1 = for t0 < n, carry c2 = x:
        v5 = reduce and from True of k[i0] < 8 over i0 < 5
        v3 = y[k[i0]]; check index: k[i0] < 8 unless v5[] for i0 < 5
        v4 = c2[i0] + v3[i0]
        yield v4

Computing the flag cannot stop the program, so `hoist` may compute it once for all
steps. The check itself stays where it is, for there may be no step; it tests the
elements again only if one of them fails.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import count

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Effect,
    Function,
    Pointwise,
    Reduction,
    Scatter,
    parameters,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_short
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.symbolic.size import Symbol, free_symbols


def flags(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    sizes = {s for v in program.block.parameters for s in free_symbols(*v.shape)}
    _Flags(sizes).block(program.block, repeats=False)


class _Flags:
    """Adds flags to blocks; `sizes` are the symbols known on entry."""

    def __init__(self, sizes: AbstractSet[Symbol]) -> None:
        self._sizes, self._names = sizes, count()

    def block(self, block: Block, *, repeats: bool) -> None:
        """Add the flags of a block; `repeats` tells whether a loop repeats it."""
        equations: list[Equation] = []
        for equation in block.equations:
            definition = equation.definition
            for inner in blocks(definition):
                self.block(
                    inner, repeats=repeats or isinstance(definition, Loop | While)
                )
            if (
                repeats
                and isinstance(definition, Pointwise | Scatter | Effect)
                and definition.checks
            ):
                passing = [
                    self._passing(check, equation.node) for check in definition.checks
                ]
                equations += [flag for flag in passing if flag is not None]
                checks = tuple(map(_with_flag, definition.checks, passing))
                equation.definition = replace(definition, checks=checks)
            equations.append(equation)
        block.equations = equations

    def _passing(self, check: Check, node: Node) -> Equation | None:
        """Return the equation of a flag that tells whether a check passes. None if the
        flag costs as much as the check, or if its size is unknown on entry: an earlier
        check may then stop the program."""
        if is_short(check.shape) or not self._sizes >= set(free_symbols(*check.shape)):
            return None
        start = (e.const(True, dtypes.bool_),)
        total = parameters(start, "total")
        all_hold = Reduction(
            check.shape, start, "and", (check.holds,), (Function(total, total),)
        )
        flag = Value(f"passed{next(self._names)}", TensorType(dtypes.bool_))
        # A node without an operation, as the flag has none of the effects of this one.
        pure = Node("call_function", None, (), {}, line=node.line, meta=node.meta)
        return Equation((flag,), all_hold, pure)


def _with_flag(check: Check, flag: Equation | None) -> Check:
    return check if flag is None else replace(check, passed=flag.results[0][()])
