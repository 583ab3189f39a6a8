"""Loop interchange: loops over rows are moved outside the enclosing loop over steps.

If each step passes over large arrays, and a row depends only on the same row of other
steps, a block of rows can go through all steps before the next block begins. It stays
in the first-level cache; otherwise every step would read and write memory.
"""

from collections.abc import Iterable

from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.summary import Summary, reads, writes_rows
from hopflow.compiler.target import Target
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    SERIAL,
    THREADS,
    Binding,
    For,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.walk import bodies, statements

CACHE = 1 << 14
"""Bytes of the rows that go through all steps together."""
LARGE = 1 << 18
"""Bytes of arrays that do not stay in the caches from one step to the next."""


def move_steps_inside(program: Program, target: Target) -> None:
    """Interchange such loops of a program, in place."""
    _exchange(program.body, THREADS if target.has_threads else SERIAL)


def _exchange(body: list[Stmt], binding: Binding) -> None:
    """Interchange such loops in a list of statements, and in those inside.

    Args:
        binding: Of loops over blocks that write elements of their own.
    """
    for k, statement in enumerate(body):
        is_independent = isinstance(statement, For) and statement.independent
        for inner in bodies(statement):
            _exchange(inner, SERIAL if is_independent else binding)
        if isinstance(statement, For) and not is_independent:
            body[k] = _exchanged(statement, binding) or statement


def _exchanged(steps: For, binding: Binding) -> For | None:
    """Return a loop over blocks of rows, with the steps and the rows of a block inside;
    None if that does not pay."""
    if len(steps.body) != 1:
        return None
    [rows] = steps.body
    if not (isinstance(rows, For) and rows.independent):
        return None
    summary = Summary.of(rows)
    count, size = rows.extent, _bytes_of_a_row(rows, summary.stored)
    block = _block(count, size, rows.binding.width)
    if not block or not _is_free(rows, summary, steps.var):
        return None
    if reads(rows, {steps.var}, summary.stored):
        return None
    if not writes_rows(rows, summary):
        binding = SERIAL
    number, inner = block_of(rows, block)
    steps.body = [inner]
    return over_blocks(number, rows, block, [steps], binding)


def _block(count: Expr, size: int, width: int) -> int:
    """Return how many rows of `size` bytes form a block, in whole vectors of `width`;
    or 0.

    If the number of rows is only known at runtime, the block has the same size: few
    rows then are one block.
    """
    most = CACHE // size // width * width if size else 0
    if not count.is_const:
        return most
    if size * count.attr < LARGE or most >= count.attr:
        return 0
    # Prefer a block size that divides the number of rows.
    even = (n for n in range(most, most // 2, -width) if count.attr % n == 0)
    return next(even, most)


def _bytes_of_a_row(rows: For, stored: Iterable[Buffer]) -> int:
    """Return the bytes that one iteration accesses of the stored buffers; 0 if
    unknown."""
    total = 0
    moved = _axes_of_a_row(rows)
    for buffer in stored:
        elements = 1
        for extent in moved.get(buffer, {}).values():
            if not extent.is_const:
                return 0
            elements *= extent.attr
        total += elements * buffer.dtype.itemsize
    return total


def _axes_of_a_row(rows: For) -> dict[Buffer, dict[Var, Expr]]:
    """Return for each buffer the loops inside an iteration along which it is stored,
    with their extents."""
    inside = {s.var: s.extent for s in statements(rows.body) if isinstance(s, For)}
    axes_of: dict[Buffer, dict[Var, Expr]] = {}
    for s in statements(rows.body):
        if isinstance(s, Store):
            axes = axes_of.setdefault(s.buffer, {})
            for at in s.indices:
                if at.op == "var" and at.attr in inside:
                    axes[at.attr] = inside[at.attr]
    return axes_of


def _is_free(rows: For, summary: Summary, step: Var) -> bool:
    """Return whether iterations do not depend on each other, in any step: an element
    has the same iteration in all of them."""
    if summary.changed or summary.is_ordered:
        return False
    if any(isinstance(s, While) for s in statements(rows.body)):
        return False
    return all(
        any(step not in shifted for *_, (_, shifted) in summary.axes[buffer])
        for buffer in summary.stored
    )
