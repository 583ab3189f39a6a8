"""What the steps of a row cost, in loops over rows and in the lanes of a gang.

The costs are numbers of instructions for each row, about.
"""

from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from hopflow.compiler.schedule.groups import body_size
from hopflow.compiler.schedule.unroll import is_coalesced
from hopflow.loop_ir.expr import Buffer, Index, Var
from hopflow.loop_ir.program import For, Let, Stmt, Store
from hopflow.loop_ir.walk import accessed, names, nodes, same_shape

SHUFFLED: Final = 0.25
"""Of an element, if vectors of the elements of rows are shuffled."""
GATHERED: Final = 2.0
"""Of an element, if it is gathered."""
SCATTERED: Final = 6.0
"""Of an element, if it is scattered: each lies in a cache line of its own."""


def cost_in_loops(rows: For) -> float:
    """Return what a row costs in a loop over rows."""
    if rows.binding.kind == "vector":
        apart = sum(map(len, _apart(rows.body, rows.var)))
        return body_size(rows.body) / rows.binding.width + SHUFFLED * apart
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
    stored = {s.buffer for s in body if isinstance(s, Store)}
    loads, stores = _apart(body, row, near)
    fixed = [
        at
        for buffer, at in loads
        if buffer not in stored
        and not any(n.op == "load" or n.attr is step for n in nodes(*at))
    ]
    gathered = GATHERED * (len(loads) - len(fixed)) + SCATTERED * len(stores)
    return body_size(body) / width + gathered, len(fixed)


_Access: TypeAlias = tuple[Buffer, Index]


def _apart(
    body: Sequence[Stmt], row: Var, near: Collection[Buffer] = ()
) -> tuple[list[_Access], list[_Access]]:
    """Return the elements that are loaded, and those that are stored, which do not lie
    beside that of the next row."""
    moving = {row, *(s.var for s in body if isinstance(s, Let))}
    found: tuple[list[_Access], list[_Access]] = [], []
    for s in body:
        for buffer, at in accessed(s):
            if buffer in near or not _is_apart(buffer, at, row, moving):
                continue
            same_kind = found[isinstance(s, Store) and at is s.indices]
            if not any(b is buffer and same_shape(at, i) for b, i in same_kind):
                same_kind.append((buffer, at))
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
