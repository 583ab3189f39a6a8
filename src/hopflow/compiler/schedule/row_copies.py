"""Copies around loops that keep rows in registers: their elements are read from what
the rows are copied from, and written to what they are copied to.

    copy s <- in0
    for i in 0..n gang 8:                   for i in 0..n gang 8:
        var kept0: u32 = s[i, 0]                var kept0: u32 = in0[i, 0]
        for step in 0..20:                      for step in 0..20:
            kept0 = kept0 + kept0    ->             kept0 = kept0 + kept0
        s[i, 0] = kept0                         out0[i, 0] = kept0
    copy out0 <- s

The steps needed the copies where they exchanged the memory of two arrays.
"""

from collections.abc import Collection, Iterable, Sequence

from hopflow.compiler.schedule.copies import rename_buffers
from hopflow.compiler.schedule.row_steps import RowSteps, written
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import Copy, Program, Stmt, Store
from hopflow.loop_ir.walk import buffers, loaded, named, same, statements, uses


def read_from_source(
    steps: RowSteps,
    before: Sequence[Stmt],
    stored: Collection[Buffer],
    named: Collection[Buffer],
) -> list[Copy]:
    """Let the elements of rows be read from what the rows are copied from, and return
    the copies that nothing needs any more.

    Args:
        before: The statements before the steps.
        stored: The buffers that are written until all rows have been read.
        named: The buffers that are named between those statements and the steps.
    """
    needless: list[Copy] = []
    for rows in _whole_rows(steps):
        copy = None if rows in named else _copy_to(rows, before)
        if copy is None or copy.source in stored:
            continue
        for s in steps.before:
            rename_buffers(s, {rows: copy.source})
        needless.append(copy)
    return needless


def _whole_rows(steps: RowSteps) -> list[Buffer]:
    """Return the buffers of which the steps read no element but those that are kept,
    and of which all elements of each row are stored after them."""
    kept = [n.attr for s in steps.before for n in loaded(s)]
    inside = {n.attr for s in (*steps.body, *steps.after) for n in loaded(s)}
    inside |= {b for s in steps.body for b in written(s)}
    return [
        buffer
        for buffer in dict.fromkeys(kept)
        if buffer not in inside
        and _row_size(buffer, steps)
        == kept.count(buffer)
        == sum(s.buffer is buffer for s in steps.after)
    ]


def _row_size(buffer: Buffer, steps: RowSteps) -> int:
    """Return the number of elements of a row; 0: it is not known, or the steps are not
    over all rows."""
    [at, *_] = [s.indices for s in steps.after if s.buffer is buffer] or [()]
    size, rows = 1, list[Expr]()
    for i, extent in zip(at, buffer.shape, strict=False):
        if not i.is_const:
            rows.append(extent)
        elif extent.is_const:
            size *= extent.attr
        else:
            return 0
    return size if len(rows) == 1 and same(rows[0], steps.rows.extent) else 0


def _copy_to(buffer: Buffer, before: Sequence[Stmt]) -> Copy | None:
    """Return the last statement that names a buffer, if it is a copy to it of what is
    not written since then."""
    changed: set[Buffer] = set()
    for s in reversed(before):
        inside = [*statements([s])]
        if any(b is buffer for t in inside for b in buffers(t)):
            if isinstance(s, Copy) and s.target is buffer and s.source not in changed:
                return s
            return None
        changed.update(b for t in inside for b in _changed(t))
    return None


def _changed(s: Stmt) -> Iterable[Buffer]:
    """Return the buffers that a statement itself may write."""
    return [s.target] if isinstance(s, Copy) else named(s)


def write_to_target(program: Program) -> None:
    """Let what is copied to a result in the end be written there, in place."""
    if not any(isinstance(s, Copy) for s in program.body):
        return
    times = uses(program.body)
    later = {b for s in statements(program.body) for b in _placed(s)}
    names: dict[Buffer, Buffer] = {}
    body: list[Stmt] = []
    for s in reversed(program.body):
        if (
            isinstance(s, Copy)
            and s.source in program.arena
            and s.source not in later
            and s.target in program.outputs
            and times[s.target] == 1
        ):
            names[s.source] = s.target
        else:
            body.append(s)
        later.update(b for t in statements([s]) for b in buffers(t))
    if not names:
        return
    program.body[:] = reversed(body)
    for s in statements(program.body):
        rename_buffers(s, names)
    program.arena = [b for b in program.arena if b not in names]


def _placed(s: Stmt) -> Iterable[Buffer]:
    """Return the buffers that a statement names by more than elements and copies."""
    return () if isinstance(s, Store | Copy) else named(s)
