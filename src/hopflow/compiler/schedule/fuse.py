"""Merging neighbouring loops over the same space.

Two independent loops become one when each iteration of the second needs of the first at
most what the same iteration made: all accesses to a buffer that either writes and the
other touches have the loop's own index at one common axis. A merged loop reads what was
just written from cache or registers, and costs the code generator one loop less.
"""

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.nest import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Binding,
    Buffer,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    Invoke,
    Let,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    Var,
)
from hopflow.loop_ir.walk import (
    bodies,
    buffers,
    expressions,
    loaded,
    nodes,
    replace,
    same,
    statements,
)

LARGEST = 600
"""Instructions in a merged iteration. LLVM's time grows faster than the body, and the
caches gain nothing from more."""
_CROSSED = (Let, Declare, Allocate)
"""What may stand between two loops, and then goes before both."""

_ORDERED = (Allocate, Barrier, Call, Copy, HostCall, Invoke, Swap, Tick, Trap)


def fuse_loops(body: list[Stmt]) -> None:
    """Merge loops in a list of statements, and in all lists within it, in place."""
    merged: list[Stmt] = []
    for statement in body:
        if not (isinstance(statement, For) and _absorb(merged, statement)):
            merged.append(statement)
    body[:] = merged
    for statement in body:
        for inner in bodies(statement):
            fuse_loops(inner)


def _absorb(before: list[Stmt], second: For) -> bool:
    """Merge `second` into the last loop of `before`, if it can be.

    What stands between goes before the merged loop, or after it if it needs the first.
    """
    at = len(before) - 1
    while at >= 0 and isinstance(before[at], _CROSSED) and not _is_again(before[at]):
        at -= 1
    first = before[at] if at >= 0 else None
    if not (
        isinstance(first, For)
        and first.independent
        and second.independent
        and first.binding.kind == second.binding.kind
        and same(first.extent, second.extent)
        and _size(first) + _size(second) <= LARGEST
    ):
        return False
    changed, written = changed_by(first), written_by(first)
    earlier: list[Stmt] = []
    later: list[Stmt] = []
    for statement in before[at + 1 :]:
        if not reads(statement, changed, written):
            earlier.append(statement)
            continue
        if not isinstance(statement, Let | Declare):
            return False
        later.append(statement)
        changed.add(statement.var)
    if any(reads(s, changed, set()) for s in statements(second.body)):
        return False
    touched = {s.var for s in later if isinstance(s, Let | Declare)}
    if not touched.isdisjoint(changed_by(second)) or not _can_merge(first, second):
        return False
    before[at:] = [*earlier, _merge(first, second), *later]
    return True


def _size(loop: For) -> int:
    """About how many instructions an iteration is."""
    return sum(
        1 + sum(map(weight, nodes(*expressions(s)))) for s in statements(loop.body)
    )


def reads(statement: Stmt, variables: set[Var], memory: set[Buffer]) -> bool:
    """Whether a statement itself, without those in it, reads one of these."""
    return any(
        (node.op == "var" and node.attr in variables)
        or (node.op == "load" and node.attr in memory)
        for node in nodes(*expressions(statement))
    )


def _is_again(s: Stmt) -> bool:
    return isinstance(s, Allocate) and s.again


def _can_merge(first: For, second: For) -> bool:
    inside = [*statements(first.body), *statements(second.body)]
    if any(isinstance(s, _ORDERED) for s in inside):
        return False
    if not changed_by(first).isdisjoint(changed_by(second)):
        return False
    ours, theirs = written_by(first), written_by(second)
    touched_first = {b for s in statements(first.body) for b in buffers(s)}
    touched_second = {b for s in statements(second.body) for b in buffers(s)}
    shared = (ours & touched_second) | (theirs & touched_first)
    axes, other_axes = row_axes(first), row_axes(second)
    return all(axes[buffer] & other_axes[buffer] for buffer in shared)


def row_axes(loop: For) -> dict[Buffer, set[int]]:
    """Of each buffer that a loop accesses by element, the axes at which the loop's own
    index always stands: iteration i touches only `[..., i, ...]`."""
    axes: dict[Buffer, set[int]] = {}
    for statement in statements(loop.body):
        accesses = [(node.attr, e.index_of(node)) for node in loaded(statement)]
        if isinstance(statement, Store):
            accesses.append((statement.buffer, statement.indices))
        for buffer, indices in accesses:
            own = {
                k
                for k, at in enumerate(indices)
                if at.op == "var" and at.attr is loop.var
            }
            axes[buffer] = axes.get(buffer, own) & own
    return axes


def changed_by(loop: For) -> set[Var]:
    """The variables from outside that a loop changes (or may: its own count too)."""
    return {
        s.var for s in statements(loop.body) if isinstance(s, Accumulate | Assign)
    } - {s.var for s in statements(loop.body) if isinstance(s, Declare)}


def written_by(loop: For) -> set[Buffer]:
    return {s.buffer for s in statements(loop.body) if isinstance(s, Store)}


def _merge(first: For, second: For) -> For:
    """One loop that does an iteration of each."""
    index = e.read(first.var)

    def rename(node: Expr) -> Expr | None:
        return index if node.op == "var" and node.attr is second.var else None

    for statement in statements(second.body):
        replace(statement, rename)
    width = min(first.binding.width, second.binding.width)
    binding = Binding(first.binding.kind, width)
    return For(first.var, first.extent, first.body + second.body, True, binding)
