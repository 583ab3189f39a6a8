"""Adds many floats in blocks, each of which has a sum of its own.

    for i0 in 0..1000000 vector 64 independent:
        acc1 += x[i0]

    for i0_block in 0..31 independent:
        var acc1_block: f32 = 0.0
        for i0_row in 0..min(32768, 1000000 - i0_block * 32768) vector 64 independent:
            acc1_block += x[i0_block * 32768 + i0_row]
        acc1 += acc1_block

The error of a chain of sums grows with its length: without blocks ten million float32
lose the fourth digit. (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 4.2.) Blocks are also what threads share (see `threads`). Their size is the same
for all loops, so that the bits of a sum do not depend on what else a loop does, or on
whether its length is known.
"""

from collections.abc import Sequence
from typing import Final

from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.exact import combined, neutral
from hopflow.compiler.schedule.summary import Summary
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Var
from hopflow.loop_ir.program import (
    SERIAL,
    Accumulate,
    Declare,
    For,
    Program,
    Stmt,
)
from hopflow.loop_ir.walk import bodies, statements

BLOCK: Final = 1 << 15
"""Elements of a block: some hundreds in each lane of a vector."""


def blocked_sums(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    pending = [program.body]
    while pending:
        body = pending.pop()
        for k, statement in enumerate(body):
            combines = _combines(statement) if isinstance(statement, For) else None
            if combines is None:
                pending += bodies(statement)
            else:
                assert isinstance(statement, For)
                body[k] = _in_blocks(statement, combines)


def _combines(loop: For) -> dict[Var, str] | None:
    """Return how a loop of vectors that combines many floats combines each variable;
    None if it is another loop."""
    if not loop.independent or loop.binding.kind != "vector":
        return None
    if loop.extent.is_const and loop.extent.attr <= BLOCK:
        return None
    combines = combined(Summary.of(loop), list(statements(loop.body)))
    if combines is None or not any(var.dtype.is_float for var in combines):
        return None
    return combines


def _in_blocks(loop: For, combines: dict[Var, str]) -> For:
    number, rows = block_of(loop, BLOCK)
    own = {var: Var(f"{var.name}_block", var.dtype) for var in combines}
    _rename(rows.body, own)
    first = [Declare(own[v], neutral(name, v.dtype)) for v, name in combines.items()]
    last = [Accumulate(v, name, e.read(own[v])) for v, name in combines.items()]
    return over_blocks(number, loop, BLOCK, [*first, rows, *last], SERIAL)


def _rename(body: Sequence[Stmt], own: dict[Var, Var]) -> None:
    """Let statements accumulate to other variables."""
    for statement in statements(body):
        if isinstance(statement, Accumulate) and statement.var in own:
            statement.var = own[statement.var]
