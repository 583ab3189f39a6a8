"""Neighbouring loops over one space become one.

    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        b0[i0] = x[i0] * 2.0                 b0[i0] = x[i0] * 2.0
    for i1 in 0..8 independent:    ->        out0[i0] = b0[i0] + 1.0
        out0[i1] = b0[i1] + 1.0

Two independent loops are merged when each iteration of the second needs of the first at
most what the same iteration made: all accesses to a buffer that either writes and the
other touches have the loop's own index at one common axis. A merged loop reads what was
just written from cache or registers, and costs the code generator one loop less. A loop
that computes a number for each row joins a loop over the rows, and is no vector then.
"""

from functools import partial
from typing import Final, TypeAlias

from hopflow.compiler.schedule.summary import Summaries, Summary, reads
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import (
    SERIAL,
    Accumulate,
    Allocate,
    Binding,
    Declare,
    For,
    Let,
    Program,
    Stmt,
)
from hopflow.loop_ir.walk import bodies, replace, same

LARGEST: Final = 600
"""Instructions in a merged iteration. LLVM's time grows faster than the body, and the
caches gain nothing from more."""
OF_A_ROW: Final = 64
"""Instructions that may be computed for each row, and not as vectors of rows."""
LONG_ROW: Final = 64
"""The elements of a row beside which those are few."""
_CROSSED: Final = (Let, Declare, Allocate)
"""What may stand between two loops, and then goes before both."""


_Names: TypeAlias = dict[Var, Expr]
"""By the variable of a loop that was merged, that of the loop that it is in."""


def merge(program: Program, _target: Target) -> None:
    """Merge loops of a program, in place."""
    known = Summaries()
    names: dict[Stmt, _Names] = {}  # for a statement, and what is in it
    pending: list[tuple[list[Stmt], _Names]] = [(program.body, {})]
    while pending:
        one, around = pending.pop()
        merged: list[Stmt] = []
        for statement in one:
            own = names.get(statement, around)
            if own is not around and around:
                own = around | own
            names[statement] = own
            if own:
                replace(statement, partial(_renamed, own))
            if not isinstance(statement, For) or not _absorb(
                merged, statement, known, names
            ):
                merged.append(statement)
        one[:] = merged
        for statement in merged:
            own = names.pop(statement)
            pending += [(inner, own) for inner in bodies(statement)]


def _renamed(names: _Names, node: Expr) -> Expr | None:
    return names.get(node.attr) if node.op == "var" else None


def _absorb(
    before: list[Stmt],
    second: For,
    known: Summaries,
    names: dict[Stmt, _Names],
) -> bool:
    """Merge `second` into the last loop of `before`, if it can be.

    What stands between goes before the merged loop, or after it if it needs the first.

    Args:
        known: What loops do.
        names: By statement, the variables that are to be replaced in it.
    """
    at = len(before) - 1
    while at >= 0 and isinstance(before[at], _CROSSED) and not _is_again(before[at]):
        at -= 1
    first = before[at] if at >= 0 else None
    if not (
        isinstance(first, For)
        and first.independent
        and second.independent
        and same(first.extent, second.extent)
    ):
        return False
    ours, theirs = known.of(first), known.of(second)
    if ours.size + theirs.size > LARGEST or not _are_independent(ours, theirs):
        return False
    binding = _binding(first, ours, second, theirs)
    if binding is None:
        return False
    changed = ours.changed
    earlier: list[Stmt] = []
    later: list[Stmt] = []
    for statement in before[at + 1 :]:
        if not reads(statement, changed, ours.stored):
            earlier.append(statement)
            continue
        if not isinstance(statement, Let | Declare):
            return False
        later.append(statement)
        changed.add(statement.var)
    moved = {s.var for s in later if isinstance(s, Let | Declare)}
    if changed & theirs.read or moved & theirs.changed:
        return False
    loop = For(first.var, first.extent, first.body + second.body, True, binding)
    ours.join(theirs)
    known.set(loop, ours)
    names[loop] = names.pop(first)
    own = names.pop(second) | {second.var: e.read(first.var)}
    names.update(dict.fromkeys(second.body, own))
    before[at:] = [*earlier, loop, *later]
    return True


def _is_again(s: Stmt) -> bool:
    return isinstance(s, Allocate) and s.again


def _are_independent(first: Summary, second: Summary) -> bool:
    """Whether each iteration of a loop needs of the other one at most the same one."""
    if first.is_ordered or second.is_ordered or first.changed & second.changed:
        return False
    shared = (first.stored & second.touched) | (second.stored & first.touched)
    return all(first.axes[b] & second.axes[b] for b in shared)


def _binding(first: For, ours: Summary, second: For, theirs: Summary) -> Binding | None:
    """The binding of both loops in one; None: there is none for both."""
    kinds = first.binding.kind, second.binding.kind
    if kinds == ("vector", "vector"):
        return _vector(first, ours, second, theirs)
    if kinds[0] == kinds[1]:
        return first.binding
    if "vector" not in kinds or SERIAL.kind not in kinds:
        return None
    rows, numbers, size = first, second, theirs.size
    if kinds[0] == "vector":
        rows, numbers, size = second, first, ours.size
    sums = any(isinstance(s, Accumulate) for s in numbers.body)
    return None if sums or size > OF_A_ROW or not _has_long(rows) else SERIAL


def _has_long(rows: For) -> bool:
    """Whether there are long loops in a loop: a number for each row costs little then,
    though it is no vector, and the row is still in the cache."""
    inner = [s for s in rows.body if isinstance(s, For)]
    return any(not s.extent.is_const or s.extent.attr >= LONG_ROW for s in inner)


def _vector(first: For, ours: Summary, second: For, theirs: Summary) -> Binding | None:
    """The lanes of both loops in one."""
    widths = first.binding.width, second.binding.width
    fixed = {
        width
        for width, summary in zip(widths, (ours, theirs), strict=True)
        if any(var.dtype.kind == "f" for var in summary.changed)
    }
    return None if len(fixed) > 1 else Binding("vector", min(fixed or widths))
