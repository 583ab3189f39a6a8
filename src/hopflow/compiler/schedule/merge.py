"""Loop fusion: adjacent loops over one space become one.

    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        b0[i0] = x[i0] * 2.0                 b0[i0] = x[i0] * 2.0
    for i1 in 0..8 independent:    ->        out0[i0] = b0[i0] + 1.0
        out0[i1] = b0[i1] + 1.0

Two independent loops are merged if each iteration of the second one depends on at most
the same iteration of the first: all accesses to a buffer that one loop writes and the
other accesses use the loop's own index at one common axis. A merged loop reads recent
results from cache or registers, and the code generator has one loop less. A loop that
computes a number for each row joins a loop over the rows, and then is not vectorised.
A loop over divergent loops stays apart from one over vectors: it becomes one of gangs.
"""

from functools import partial
from typing import Final, TypeAlias

from hopflow.compiler.schedule.gangs import is_candidate, is_long
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
    Store,
    While,
)
from hopflow.loop_ir.walk import bodies, names, perfect_nest, replace, same, statements

LARGEST: Final = 600
"""Instructions in a merged iteration, at most. LLVM's time grows faster than the body,
and the caches gain nothing from more."""
OF_A_ROW: Final = 24
"""Instructions that may be computed for each row, and not as vectors of rows."""
LONG_ROW: Final = 256
"""Elements of a row beside which those instructions take little time."""
_CROSSED: Final = (Let, Declare, Allocate)
"""Statements that may stand between two loops, and move before both."""


_Names: TypeAlias = dict[Var, Expr]
"""Maps the variable of a loop that was merged to that of the merged loop."""


def merge(program: Program, _target: Target) -> None:
    """Merge loops of a program, in place."""
    summaries = Summaries()
    names: dict[Stmt, _Names] = {}  # for a statement and its bodies
    pending: list[tuple[list[Stmt], _Names]] = [(program.body, {})]
    while pending:
        body, outer = pending.pop()
        merged: list[Stmt] = []
        for statement in body:
            renames = names.get(statement, outer)
            if renames is not outer and outer:
                renames = outer | renames
            names[statement] = renames
            if renames:
                replace(statement, partial(_renamed, renames))
            if not isinstance(statement, For) or not _absorb(
                merged, statement, summaries, names
            ):
                merged.append(statement)
        body[:] = merged
        for statement in merged:
            renames = names.pop(statement)
            pending += [(inner, renames) for inner in bodies(statement)]


def _renamed(names: _Names, node: Expr) -> Expr | None:
    return names.get(node.attr) if node.op == "var" else None


def _absorb(
    before: list[Stmt],
    second: For,
    summaries: Summaries,
    names: dict[Stmt, _Names],
) -> bool:
    """Merge `second` into the last loop of `before`, if possible.

    Statements between them go before the merged loop, or after it if they depend on the
    first one.

    Args:
        summaries: The summaries of loops.
        names: By statement, the variables to be replaced in it.
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
    summary, other = summaries.of(first), summaries.of(second)
    if summary.size + other.size > LARGEST or not _are_independent(summary, other):
        return False
    if _keeps_from_lanes(first, second) or _keeps_from_lanes(second, first):
        return False
    if _is_transposition(first) and _accumulates(second):
        return False
    binding = _binding(first, summary, second, other)
    if binding is None:
        return False
    changed = summary.changed
    earlier: list[Stmt] = []
    later: list[Stmt] = []
    for statement in before[at + 1 :]:
        if not reads(statement, changed, summary.stored):
            earlier.append(statement)
            continue
        overtakes = reads(statement, other.changed, other.stored)
        if overtakes or not isinstance(statement, Let | Declare):
            return False
        later.append(statement)
        changed.add(statement.var)
    moved = {s.var for s in later if isinstance(s, Let | Declare)}
    if changed & other.read or moved & other.changed:
        return False
    nodes = tuple(dict.fromkeys(first.nodes + second.nodes))
    loop = For(first.var, first.extent, first.body + second.body, True, binding, nodes)
    summary.join(other)
    summaries.set(loop, summary)
    names[loop] = names.pop(first)
    renames = names.pop(second) | {second.var: e.read(first.var)}
    names.update(dict.fromkeys(second.body, renames))
    before[at:] = [*earlier, loop, *later]
    return True


def _is_again(s: Stmt) -> bool:
    return isinstance(s, Allocate) and s.again


def _are_independent(first: Summary, second: Summary) -> bool:
    """Return whether an iteration needs at most the same one of the other loop."""
    if first.is_ordered or second.is_ordered or first.changed & second.changed:
        return False
    shared = first.stored & second.uses.keys() | second.stored & first.uses.keys()
    return all(first.axes[b] & second.axes[b] for b in shared)


def _keeps_from_lanes(vectors: For, divergent: For) -> bool:
    """Return whether the iterations of one loop may run as lanes of a gang, and not
    together with the vectors of the other one."""
    return (
        any(map(is_long, statements(vectors.body)))
        and any(isinstance(s, While) for s in statements(divergent.body))
        and is_candidate(divergent)
    )


def _is_transposition(loop: For) -> bool:
    """Return whether a loop transposes an array, for which `unroll_and_jam` computes
    several rows at once."""
    nest = perfect_nest(loop)
    body, row = nest[-1].body, nest[-1].var
    [s] = body if len(body) == 1 else [None]
    if not isinstance(s, Store) or s.value.op != "load" or len(nest) < 2:
        return False
    *outer, last = [names(i, {row}) for i in e.index_of(s.value)] or [True]
    return any(outer) and not last


def _accumulates(loop: For) -> bool:
    return any(isinstance(s, Accumulate) for s in statements(loop.body))


def _binding(
    first: For, summary: Summary, second: For, other: Summary
) -> Binding | None:
    """Return the binding of the merged loop; None: no binding suits both."""
    kinds = first.binding.kind, second.binding.kind
    if kinds == ("vector", "vector"):
        return _vector(first, summary, second, other)
    if kinds[0] == kinds[1]:
        return first.binding
    if "vector" not in kinds or SERIAL.kind not in kinds:
        return None
    rows, numbers, size = first, second, other.size
    if kinds[0] == "vector":
        rows, numbers, size = second, first, summary.size
    sums = any(isinstance(s, Accumulate) for s in numbers.body)
    return None if sums or size > OF_A_ROW or not _has_long(rows) else SERIAL


def _has_long(rows: For) -> bool:
    """Return whether a loop has long inner loops: then a number for each row takes
    little time, though it is not vectorised, and the row is still in the cache."""
    inner = [s for s in rows.body if isinstance(s, For)]
    return any(not s.extent.is_const or s.extent.attr >= LONG_ROW for s in inner)


def _vector(
    first: For, earlier: Summary, second: For, later: Summary
) -> Binding | None:
    """Return the binding of a merged loop of vectors."""
    widths = first.binding.width, second.binding.width
    fixed = {
        width
        for width, summary in zip(widths, (earlier, later), strict=True)
        if any(var.dtype.kind == "f" for var in summary.changed)
    }
    return None if len(fixed) > 1 else Binding("vector", min(fixed or widths))
