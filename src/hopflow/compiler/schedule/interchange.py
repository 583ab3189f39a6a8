"""Loops over rows, moved outside the loop over steps around them.

Where each step passes over large arrays, and a row needs of other steps only what they
made of the same row, some rows can go through all steps before the next begin. They
stay in the first-level cache meanwhile; else every step would read and write memory.
"""

from collections.abc import Iterable

from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.summary import Summary, reads
from hopflow.compiler.schedule.threads import THREADS, writes_rows
from hopflow.compiler.target import Target
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import SERIAL, Binding, For, Program, Stmt, Store, While
from hopflow.loop_ir.walk import bodies, statements

CACHE = 1 << 14
"""Bytes of the rows that go through all steps together."""
LARGE = 1 << 18
"""Bytes of arrays that do not fit where one step could find what the last one left."""


def move_steps_inside(program: Program, _target: Target) -> None:
    """Exchange such loops in a program, in place."""
    _exchange(program.body, THREADS)


def _exchange(body: list[Stmt], binding: Binding) -> None:
    """
    Args:
        binding: Of loops over blocks that write elements of their own.
    """
    for k, statement in enumerate(body):
        alone = isinstance(statement, For) and statement.independent
        for inner in bodies(statement):
            _exchange(inner, SERIAL if alone else binding)
        if isinstance(statement, For) and not alone:
            body[k] = _exchanged(statement, binding) or statement


def _exchanged(steps: For, binding: Binding) -> For | None:
    """Blocks of rows outside, steps, and the rows of a block inside; if that pays."""
    if len(steps.body) != 1:
        return None
    [rows] = steps.body
    if not (isinstance(rows, For) and rows.independent):
        return None
    summary = Summary.of(rows)
    count, size = rows.extent, _bytes_of_a_row(rows, summary.stored)
    block = _block(count, size, rows.binding.width)
    if not block or not _is_free(rows, summary):
        return None
    if reads(rows, {steps.var}, summary.stored):
        return None
    if not writes_rows(rows):
        binding = SERIAL
    number, inner = block_of(rows, block)
    steps.body = [inner]
    return over_blocks(number, rows, block, [steps], binding)


def _block(count: Expr, size: int, width: int) -> int:
    """How many rows of `size` bytes go together, in whole vectors of `width`; or 0.

    So many of a number that only a run knows: few rows are but one block then.
    """
    most = CACHE // size // width * width if size else 0
    if not count.is_const:
        return most
    if size * count.attr < LARGE or most >= count.attr:
        return 0
    # Best is a block that leaves no rest.
    even = (n for n in range(most, most // 2, -width) if count.attr % n == 0)
    return next(even, most)


def _bytes_of_a_row(rows: For, stored: Iterable[Buffer]) -> int:
    """Of the buffers that change: what one iteration touches; 0 if that is unknown."""
    total = 0
    moved = _own_axes(rows)
    for buffer in stored:
        elements = 1
        for extent in moved.get(buffer, {}).values():
            if not extent.is_const:
                return 0
            elements *= extent.attr
        total += elements * buffer.dtype.itemsize
    return total


def _own_axes(rows: For) -> dict[Buffer, dict[Var, Expr]]:
    """For each buffer the loops within an iteration along which it is stored, and their
    extents."""
    inside = {s.var: s.extent for s in statements(rows.body) if isinstance(s, For)}
    found: dict[Buffer, dict[Var, Expr]] = {}
    for s in statements(rows.body):
        if isinstance(s, Store):
            own = found.setdefault(s.buffer, {})
            for at in s.indices:
                if at.op == "var" and at.attr in inside:
                    own[at.attr] = inside[at.attr]
    return found


def _is_free(rows: For, summary: Summary) -> bool:
    """Whether its iterations need of each other nothing, in whichever step."""
    if summary.changed or summary.is_ordered:
        return False
    if any(isinstance(s, While) for s in statements(rows.body)):
        return False
    return all(summary.axes[buffer] for buffer in summary.stored)
