"""Binds loops to threads.

Outermost loops with independent iterations run on several threads if they are long or
contain sequential loops or products of matrices: then each iteration takes a while, and
some may take longer than others. Whether there are enough iterations is decided at
runtime. A long loop of vectors becomes blocks:

    for i0 in 0..1048576 vector 8 independent:
        out0[i0] = sin(x[i0])

    for i0_block in 0..256 threads independent:
        for i0_row in 0..4096 vector 8 independent:
            out0[i0_block * 4096 + i0_row] = sin(x[i0_block * 4096 + i0_row])
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Final

from hopflow.compiler.private import private_to
from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.summary import Summary
from hopflow.compiler.target import Target
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import (
    Allocate,
    Barrier,
    Binding,
    Call,
    For,
    HostCall,
    Invoke,
    Program,
    Stmt,
    While,
)
from hopflow.loop_ir.walk import bodies, statements, uses

LARGE: Final = 1 << 22
"""Instructions of a loop over elements, from which on it uses threads: some tenths of a
millisecond."""
ELEMENTS: Final = 1 << 18
"""Elements that a loop is taken to have if only the call knows their number."""
LANES: Final = 8
"""Multiply-adds of a product of matrices in an instruction."""
BLOCK: Final = 1 << 12
"""Elements of a block: a few microseconds."""
THREADS: Final = Binding("threads")
_SHARED = (Allocate, Barrier, HostCall, Invoke)
"""Statements that access memory which iterations share."""


def bind_threads(program: Program, target: Target) -> None:
    """Bind such loops of a program, in place, if the target has threads."""
    if target.has_threads:
        _bind(program.body, cache(lambda: uses(program.body)))


def _bind(body: list[Stmt], named: Callable[[], Counter[Buffer]]) -> None:
    for k, statement in enumerate(body):
        if isinstance(statement, For) and _suits(statement, named):
            body[k] = _threaded(statement)
        elif not (isinstance(statement, For) and statement.independent):
            for inner in bodies(statement):
                _bind(inner, named)


def _threaded(loop: For) -> For:
    """Return the loop over threads. Vectors are grouped into blocks, each worth a
    call."""
    if loop.binding.kind != "vector":
        loop.binding = THREADS
        return loop
    number, inner = block_of(loop, BLOCK)
    return over_blocks(number, loop, BLOCK, [inner], THREADS)


def _suits(loop: For, named: Callable[[], Counter[Buffer]]) -> bool:
    inside = list(statements(loop.body))
    if not loop.independent or not (any(map(_loops, inside)) or _work(loop) > LARGE):
        return False
    summary = Summary.of(loop)
    if any(map(_is_foreign, inside)) or summary.changed:
        return False
    return writes_rows(loop, private_to(summary, named()))


def _work(loop: For, unknown: int = ELEMENTS) -> int:
    """Return about how many instructions a loop over elements takes.

    Args:
        unknown: The steps of a loop of unknown length. Those within it then count as
            one step each.
    """
    steps: int = unknown
    if loop.extent.is_const:
        steps = loop.extent.attr
    else:
        unknown = 1
    inside = [s for s in loop.body if isinstance(s, For)]
    if inside:
        return steps * sum(_work(s, unknown) for s in inside)
    calls = sum(_work_of_call(s) for s in loop.body if isinstance(s, Call))
    return steps * (Summary.of(loop).size + calls)


def _work_of_call(call: Call) -> int:
    """Return about how many instructions a product of matrices takes. A large one uses
    several threads itself, and counts as none."""
    sizes = [arg for arg in call.args if isinstance(arg, Expr)][:3]
    is_static = all(size.is_const for size in sizes)
    work = prod(size.attr for size in sizes) // LANES if is_static else ELEMENTS
    return 0 if work > LARGE else work


def writes_rows(loop: For, private: Sequence[Buffer] = ()) -> bool:
    """Return whether iterations write only rows of their own and private buffers."""
    if any(isinstance(s, _SHARED) for s in statements(loop.body)):
        return False
    summary = Summary.of(loop)
    return all(summary.axes[b] for b in summary.stored.difference(private))


def _is_foreign(statement: Stmt) -> bool:
    """Return whether a statement calls a library that has threads of its own."""
    return isinstance(statement, Call) and not statement.routine.startswith("gemm")


def _loops(statement: Stmt) -> bool:
    """Return whether a statement is a sequential loop."""
    if isinstance(statement, For):
        return not statement.independent
    return isinstance(statement, While)
