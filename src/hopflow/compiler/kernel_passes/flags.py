"""Whether the checks of a loop's step pass becomes a value.

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

The value cannot stop the program, so that `hoist` may compute it once for all steps.
The check itself stays where it is, for there may be no step; it looks at the elements
again only if one fails.
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
    """Adds flags to blocks; `sizes` are those that a call has known."""

    def __init__(self, sizes: AbstractSet[Symbol]) -> None:
        self._sizes, self._names = sizes, count()

    def block(self, block: Block, *, repeats: bool) -> None:
        """Add the flags of a block, which a loop repeats or not."""
        equations: list[Equation] = []
        for equation in block.equations:
            own = equation.definition
            for inner in blocks(own):
                self.block(inner, repeats=repeats or isinstance(own, Loop | While))
            if repeats and isinstance(own, Pointwise | Scatter | Effect) and own.checks:
                found = [self._passing(check, equation.node) for check in own.checks]
                equations += [flag for flag in found if flag is not None]
                checks = tuple(map(_with_flag, own.checks, found))
                equation.definition = replace(own, checks=checks)
            equations.append(equation)
        block.equations = equations

    def _passing(self, check: Check, node: Node) -> Equation | None:
        """The value that tells whether a check passes. None: that costs what it does,
        or a check before it may stop a run of such sizes."""
        if is_short(check.shape) or not self._sizes >= set(free_symbols(*check.shape)):
            return None
        start = (e.const(True, dtypes.bool_),)
        total = parameters(start, "total")
        all_hold = Reduction(
            check.shape, start, "and", (check.holds,), (Function(total, total),)
        )
        flag = Value(f"passed{next(self._names)}", TensorType(dtypes.bool_))
        # Of no operation, for it has none of the effects that this one has.
        pure = Node("call_function", None, (), {}, line=node.line, meta=node.meta)
        return Equation((flag,), all_hold, pure)


def _with_flag(check: Check, flag: Equation | None) -> Check:
    return check if flag is None else replace(check, passed=flag.results[0][()])
