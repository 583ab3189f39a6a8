"""What the steps of a row cost, in loops over rows and in the lanes of a gang.

The costs are numbers of instructions for each row, about.
"""

from collections.abc import Collection, Sequence
from typing import Final

from hopflow.compiler.schedule.groups import body_size
from hopflow.compiler.schedule.unroll import is_coalesced
from hopflow.loop_ir.expr import Buffer, Index, Var
from hopflow.loop_ir.program import For, Let, Stmt, Store
from hopflow.loop_ir.walk import accessed, names, nodes, same_shape

SHUFFLED: Final = 0.25
"""Of an element, if vectors of the elements of rows are shuffled."""
GATHERED: Final = 2.0
"""Of an element, if it is gathered."""
COLUMN: Final = 6.0
"""Of an element of a column that each step gathers: the lines of all rows, of which the
next step reads the next elements, do not stay in the first-level cache."""
FAR: Final = 3.0
"""Of an element beside that of the next row, but far from that of the next step: caches
do not expect it."""
SCATTERED: Final = 6.0
"""Of an element, if it is scattered: each lies in a cache line of its own."""


def cost_in_loops(rows: For, step: Var | None) -> float:
    """Return what a row costs in a loop over rows.

    Args:
        step: The variable of the loop over steps; None if it has no other statements,
            so that several steps may be one (see `unroll_and_jam`).
    """
    if rows.binding.kind == "vector":
        moving = _moving(rows.body, rows.var)
        elements = [
            access
            for is_store in (False, True)
            for access in _accessed(rows.body, is_store=is_store)
        ]
        apart = [x for x in elements if _is_apart(*x, rows.var, moving)]
        far = sum(step is not None and names(i, {step}) for _, at in apart for i in at)
        accesses = COLUMN * far + SHUFFLED * (len(apart) - far)
        return body_size(rows.body) / rows.binding.width + accesses
    if is_coalesced(rows) and isinstance(row := rows.body[0], For):
        steps: int = row.extent.attr
        return steps * body_size(row.body) / row.binding.width
    return _in_order(rows.body)


def _in_order(body: Sequence[Stmt]) -> float:
    """Return what statements cost, one after the other."""
    cost = 0.0
    for s in body:
        if isinstance(s, For):
            width = s.binding.width if s.binding.kind == "vector" else 1
            cost += -(-s.extent.attr // width) * _in_order(s.body)
        else:
            cost += body_size([s])
    return cost


def cost_in_lanes(
    body: Sequence[Stmt], row: Var, step: Var, width: int, near: Collection[Buffer]
) -> tuple[float, int]:
    """Return what a step of a row costs if rows are the lanes of a gang, and how many
    elements are gathered before the first step.

    Args:
        body: Straight-line code for the row of the variable `row`.
        step: The variable of the loop over steps.
        near: Buffers of which the elements of rows will be adjacent.
    """
    moving, cost, once = _moving(body, row), body_size(body) / width, 0
    for is_store in (False, True):
        for buffer, at in _accessed(body, is_store=is_store):
            order = nodes(*at)
            changes = any(n.op == "load" or n.attr is step for n in order)
            if buffer in near:
                continue
            if _is_apart(buffer, at, row, moving):
                cost += (SCATTERED if is_store else GATHERED) * changes
                once += not changes
            elif changes and any(n.attr is row for n in order):
                cost += FAR
    return cost, once


def _moving(body: Sequence[Stmt], row: Var) -> set[Var]:
    """Return the variables that may differ between rows."""
    return {row, *(s.var for s in body if isinstance(s, Let))}


def _accessed(body: Sequence[Stmt], *, is_store: bool) -> list[tuple[Buffer, Index]]:
    """Return the elements that straight-line code loads, or stores, each once."""
    found: list[tuple[Buffer, Index]] = []
    for s in body:
        for buffer, at in accessed(s):
            if (isinstance(s, Store) and at is s.indices) is is_store and not any(
                b is buffer and same_shape(at, other) for b, other in found
            ):
                found.append((buffer, at))
    return found


def _is_apart(buffer: Buffer, at: Index, row: Var, moving: Collection[Var]) -> bool:
    """Return whether rows access different elements that are not adjacent."""
    axes = [axis for axis, i in enumerate(at) if names(i, moving)]
    if not axes:
        return False
    [axis, *others], inner = axes, buffer.shape[axes[0] + 1 :]
    is_adjacent = all(n.is_const and n.attr == 1 for n in inner)
    is_step = at[axis].op == "var" and at[axis].attr is row
    return bool(others) or buffer.strides is not None or not (is_adjacent and is_step)
