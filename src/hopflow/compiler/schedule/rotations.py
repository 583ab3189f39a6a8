"""Unrolling of loops whose steps move values from variable to variable.

    for step in 0..64:                       for step_turn in 0..21:
        let n = a ^ c                            let n_0 = a ^ c
        a = b                           ->       let n_1 = b ^ n_0
        b = c                                    let n_2 = c ^ n_1
        c = n                                    a = n_0
                                                 b = n_1
                                                 c = n_2
                                             for step_rest in 0..1: ...

After as many steps as a value passes variables, each is where it was: so many steps
together need no moves. Shift registers, delay lines, windows over a series and methods
of several steps are such loops. Compilers unroll so what they keep of earlier
iterations ("predictive commoning").
"""

from collections.abc import Mapping, Sequence
from typing import Final

from hopflow import dtypes
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import copied, substituted
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Assign, For, Let, Program, Stmt, Store
from hopflow.loop_ir.walk import bodies, expressions, nodes

SHARE: Final = 10
"""Instructions of a step for each value that it moves, at most."""
LARGEST: Final = 256
"""Instructions of an unrolled body, at most."""


def unroll_rotations(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    _edit(program.body)


def _edit(body: list[Stmt]) -> None:
    edited: list[Stmt] = []
    for s in body:
        count = _count(s) if isinstance(s, For) else 1
        if isinstance(s, For) and count > 1:
            edited += _unrolled(s, count)
            continue
        for inner in bodies(s):
            _edit(inner)
        edited.append(s)
    body[:] = edited


def _count(loop: For) -> int:
    """Return how many steps run together; 1: the loop stays."""
    if loop.independent or not all(
        isinstance(s, Let | Assign | Store) for s in loop.body
    ):
        return 1
    steps: list[Stmt] = []
    sources = _step(loop.body, {}, "", steps)
    moved = {
        var: value.attr
        for var, value in sources.items()
        if value.op == "var" and value.attr in sources and value.attr is not var
    }
    size = sum(1 + sum(map(weight, nodes(*expressions(s)))) for s in steps)
    if size > SHARE * len(moved):
        return 1
    count = min(_longest(moved), LARGEST // max(size, 1))
    if loop.extent.is_const:
        count = min(count, loop.extent.attr)
    return count


def _longest(moved: Mapping[Var, Var]) -> int:
    """Return after how many steps each value has left the variables that it passes, or
    is where it was."""
    longest = 0
    for start in moved:
        passed: set[Var] = set()
        var: Var | None = start
        while var is not None and var not in passed:
            passed.add(var)
            var = moved.get(var)
        longest = max(longest, len(passed))
    return longest


def _step(
    body: Sequence[Stmt], values: dict[Var, Expr], suffix: str, steps: list[Stmt]
) -> dict[Var, Expr]:
    """Add the statements of a step that compute or store something to `steps`.

    Args:
        values: Those of variables before the step, and after it.

    Returns:
        The values of the variables that the step assigns.
    """
    assigned: dict[Var, None] = {}
    for s in body:
        if not isinstance(s, Let | Assign):
            steps.append(copied(s, values, suffix))
            continue
        value = substituted(s.value, values)
        if value.op != "var" and not value.is_const:
            new = Var(f"{s.var.name}{suffix}", s.var.dtype)
            steps.append(Let(new, value))
            value = e.read(new)
        values[s.var] = value
        if isinstance(s, Assign):
            assigned[s.var] = None
    return {var: values[var] for var in assigned}


def _unrolled(loop: For, count: int) -> list[Stmt]:
    """Return what stands in place of a loop: `count` steps at a time, and the rest."""
    before: list[Stmt] = []
    extent, name = loop.extent, loop.var.name
    if not extent.is_const:  # the steps may assign what it reads
        steps = Var(f"{name}_steps", dtypes.int64)
        before.append(Let(steps, extent))
        extent = e.read(steps)
    turn, turns = Var(f"{name}_turn", dtypes.int64), e.div(extent, e.index(count))
    first = e.mul(e.read(turn), e.index(count))
    body: list[Stmt] = []
    values: dict[Var, Expr] = {}
    last: dict[Var, Expr] = {}
    for k in range(count):
        values[loop.var] = e.add(first, e.index(k))
        last = _step(loop.body, values, f"_{k}", body)
    body += _assigned(last)
    whole = For(turn, turns, body, nodes=loop.nodes)
    rest, start = Var(f"{name}_rest", dtypes.int64), e.mul(turns, e.index(count))
    left = e.sub(extent, start)
    if left.is_const and left.attr == 0:
        return [*before, whole]
    values = {loop.var: e.add(start, e.read(rest))}
    remaining = [copied(s, values, "_rest") for s in loop.body]
    return [*before, whole, For(rest, left, remaining, nodes=loop.nodes)]


def _assigned(last: Mapping[Var, Expr]) -> list[Stmt]:
    """Return the assignments of values to variables, all at once: those that another
    one reads are copied before they change."""
    copies: list[Stmt] = []
    assigns: list[Stmt] = []
    for var, value in last.items():
        if value.op == "var" and value.attr is var:
            continue
        if value.op == "var" and value.attr in last:
            old = Var(f"{var.name}_old", var.dtype)
            copies.append(Let(old, value))
            value = e.read(old)
        assigns.append(Assign(var, value))
    return copies + assigns
