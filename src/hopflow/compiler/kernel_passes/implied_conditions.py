"""Conditions that a check before them implies are dropped, and so are checks.

    free check index: k[i0] < 8 for i0 < 5
    v1: f64[3, 5] = (x[k[i1]] if k[i1] < 8) + y[i0] for i0 < 3, i1 < 5
  ->
    free check index: k[i0] < 8 for i0 < 5
    v1: f64[3, 5] = x[k[i1]] + y[i0] for i0 < 3, i1 < 5

A free check is tested before the next equation that is no check, so that its condition
holds in what follows, also in the blocks of operators. It holds at all indices of its
space, and implies the same expression over axes of the same lengths. What comes before
the check, and shares its loop, keeps the condition (see `postpone`).
"""

from dataclasses import replace
from typing import TypeAlias

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.substitution import Conditions
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Definition,
    Effect,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Region,
    blocks,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    drop_unread,
    map_expressions,
    space_of,
)
from hopflow.graph.types import Shape
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.walk import Interned, nodes

_Key: TypeAlias = tuple[Expr, tuple[object, ...]]


def implied_conditions(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    Known().block(program.block)
    for block in reversed([*all_blocks(program.block)]):
        drop_unread(block)  # flags of checks


class Known:
    """Drops conditions; knows those that hold at an equation."""

    def __init__(self) -> None:
        self._interned = Interned()
        self._conditions = Conditions(self._interned)
        self._hold: dict[_Key, None] = {}
        self._ops: set[str] = set()

    def block(self, block: Block) -> None:
        """Edit a block. What its checks have found holds up to its end."""
        before = len(self._hold)
        for equation in block.equations:
            definition = equation.definition
            for inner in blocks(definition):
                self.block(inner)
            if isinstance(definition, Effect):
                checks = tuple([c for c in definition.checks if not self._holds(c)])
                equation.definition = replace(definition, checks=checks)
                for check in checks:
                    self.add(check)
            elif self._hold and not isinstance(definition, Region):
                equation.definition = self._without(equation, definition)
        while len(self._hold) > before:
            self._hold.popitem()

    def add(self, check: Check) -> None:
        """Take a check that has run before."""
        for part in self._conditions.parts(check.holds):
            key = self._key(part, check.shape)
            # Over an empty space a check has found nothing, though the condition may
            # not use the empty axis.
            uses_all = len(key[1]) == len(check.shape)
            if uses_all or all(isinstance(n, int) and n > 0 for n in check.shape):
                self._hold.setdefault(key)
                self._ops.add(part.op)

    def _holds(self, check: Check) -> bool:
        """Return whether checks before have found that one passes."""
        parts = self._conditions.parts(check.holds)
        return all(self._key(part, check.shape) in self._hold for part in parts)

    def _without(self, equation: Equation, definition: Definition) -> Definition:
        """Return a definition without the conditions that hold."""
        space = space_of(equation)

        def simpler(root: Expr) -> Expr:
            values: dict[Expr, Expr] = {}
            for node in nodes(root):
                if node.op in self._ops and self._key(node, space) in self._hold:
                    values[node] = e.const(True, dtypes.bool_)
                else:
                    args = tuple([values[a] for a in node.args])
                    values[node] = e.with_args(node, args)
            return values[root]

        return map_expressions(definition, simpler)

    def _key(self, condition: Expr, space: Shape) -> _Key:
        """Return a key that is equal for a condition over other axes of equal sizes."""
        at = {axis.attr: k for k, axis in enumerate(axes(len(space)))}
        order = nodes(condition)
        used = dict.fromkeys(n.attr for n in order if n.op == "var" and n.attr in at)
        renamed = dict(zip(used, axes(len(used)), strict=True))
        values: dict[Expr, Expr] = {}
        for node in order:
            if node.op == "var" and node.attr in renamed:
                values[node] = renamed[node.attr]
                continue
            args = tuple([values[a] for a in node.args])
            values[node] = self._interned.node(e.with_args(node, args))
        return values[condition], shape_key(tuple([space[at[v]] for v in used]))
