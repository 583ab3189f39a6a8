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

A loop that accumulates what any order gives the same bits of (flags, integers), like
`failed |= not test`, keeps one result for each block, and combines them afterwards, as
does a loop over blocks of a sum of floats (see `blocked_sums`):

    for i0_block in 0..256 threads independent:
        var failed_part: bool = False
        for i0_row in 0..4096 vector 8 independent:
            failed_part |= not test
        parts[i0_block] = failed_part
    for i0_block_of_failed in 0..256:
        failed |= parts[i0_block_of_failed]
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Final

from hopflow.compiler.private import private_to
from hopflow.compiler.schedule.blocked_sums import BLOCK as OF_A_SUM
from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.exact import combined, is_exact, neutral
from hopflow.compiler.schedule.privatize import is_of_call, privatized
from hopflow.compiler.schedule.summary import Summary, writes_rows
from hopflow.compiler.target import Target
from hopflow.dtypes import int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    THREADS,
    Accumulate,
    Call,
    Declare,
    For,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.walk import bodies, statements, uses

LARGE: Final = 1 << 22
"""Instructions of a loop over elements, from which on it uses threads: some tenths of a
millisecond."""
LARGE_IN_STEP: Final = 1 << 20
"""The same in the step of a loop, where threads wait for it since the last step."""
ELEMENTS: Final = 1 << 18
"""Elements that a loop is taken to have if only the call knows their number."""
LANES: Final = 8
"""Multiply-adds of a product of matrices in an instruction."""
BLOCK: Final = 1 << 12
"""Elements of a block, at most: a few microseconds."""
LEAST_BLOCK: Final = 1 << 9
"""Elements of a block, at least."""
LONG_BLOCK: Final = 1 << 18
"""Instructions of the elements of a larger block, at most."""
LONG_ROW: Final = 1 << 11
"""Elements of a row of floats with a result of its own, at least."""
ROWS: Final = 1 << 4
"""Rows of a block, if it has a result of its own."""


def bind_threads(program: Program, target: Target) -> None:
    """Bind such loops of a program, in place, if the target has threads."""
    if target.has_threads:
        named = cache(lambda: uses(program.body))
        program.body = _bound(program.body, program, target, named, LARGE)


def _bound(
    body: list[Stmt],
    program: Program,
    target: Target,
    named: Callable[[], Counter[Buffer]],
    large: int,
) -> list[Stmt]:
    """Return statements with their loops bound.

    Args:
        large: Instructions of a loop over elements that uses threads.
    """
    bound: list[Stmt] = []
    for statement in body:
        if isinstance(statement, For) and _suits(statement, program, named, large):
            bound += _threaded(statement, program)
            continue
        if isinstance(statement, For):
            parts = privatized(statement, program, target, large, ELEMENTS)
            if parts is not None:
                bound += parts
                continue
        if not (isinstance(statement, For) and statement.independent):
            is_loop = isinstance(statement, For | While)
            for inner in bodies(statement):
                within = LARGE_IN_STEP if is_loop else large
                inner[:] = _bound(inner, program, target, named, within)
        bound.append(statement)
    return bound


def _threaded(loop: For, program: Program) -> list[Stmt]:
    """Return the loop over threads, and what combines the results of its blocks.

    Vectors are grouped into blocks, each worth a call, and so are rows if each block
    has a result.
    """
    changed = sorted(Summary.of(loop).changed, key=lambda var: var.name)
    is_vector, threaded = loop.binding.kind == "vector", loop
    if is_vector or (changed and not _is_of_blocks(loop)):
        size = _elements(loop) if is_vector else ROWS
        number, inner = block_of(loop, size)
        threaded = over_blocks(number, loop, size, [inner], THREADS)
    threaded.binding = THREADS
    parts = [_in_parts(var, threaded, program) for var in changed]
    return [threaded, *parts]


def _elements(loop: For) -> int:
    """Return how many elements a block of a loop of vectors has."""
    size = BLOCK
    while size > LEAST_BLOCK and size * Summary.of(loop).size > LONG_BLOCK:
        size //= 2
    return size


def _in_parts(var: Var, loop: For, program: Program) -> For:
    """Let the iterations of a loop accumulate to a variable of their own. Return the
    loop that combines these."""
    number = Var(f"{loop.var.name}_of_{var.name}", int64)
    part = Var(f"{var.name}_part", var.dtype)
    parts = Buffer(f"{var.name}_parts", var.dtype, (loop.extent,), "arena")
    program.arena.append(parts)
    combine = ""
    for statement in statements(loop.body):
        if isinstance(statement, Accumulate) and statement.var is var:
            statement.var, combine = part, statement.combine
    first = neutral(combine, var.dtype)
    at = (e.read(loop.var),)
    loop.body = [Declare(part, first), *loop.body, Store(parts, at, e.read(part))]
    value = e.load(parts, (e.read(number),))
    return For(number, loop.extent, [Accumulate(var, combine, value)], nodes=loop.nodes)


def _suits(
    loop: For, program: Program, named: Callable[[], Counter[Buffer]], large: int
) -> bool:
    inside = list(statements(loop.body))
    if not loop.independent or loop.binding.kind == "gang":
        return False
    if not (any(map(_loops, inside)) or _work(loop) > large):
        return False
    summary = Summary.of(loop)
    if any(map(_is_foreign, inside)):
        return False
    if summary.changed and not (
        is_of_call(loop.extent, program) and _combines_in_blocks(loop, summary, inside)
    ):
        return False
    return writes_rows(loop, summary, private_to(summary, named()))


def _combines_in_blocks(loop: For, summary: Summary, inside: Sequence[Stmt]) -> bool:
    """Return whether blocks of iterations may combine numbers on their own: any order
    gives the same bits, or each iteration is a block of its own already."""
    combines = combined(summary, inside)
    return combines is not None and all(
        is_exact(name, var.dtype)
        or (_is_of_blocks(loop) and _adds_once(loop, var, inside))
        for var, name in combines.items()
    )


def _adds_once(loop: For, var: Var, inside: Sequence[Stmt]) -> bool:
    """Return whether an iteration adds one number to a variable, or the sum of one loop
    of vectors: then it makes no difference that it is added to zero before."""
    direct = [
        s
        for x in loop.body
        for s in (x.body if isinstance(x, For) and x.binding.kind == "vector" else [x])
    ]
    counts = [
        sum(isinstance(s, Accumulate) and s.var is var for s in each)
        for each in (direct, inside)
    ]
    return counts == [1, 1]


def _is_of_blocks(loop: For) -> bool:
    """Return whether each iteration combines a block of floats, or a long row: then a
    result of its own costs little, and changes no bit."""
    inside = [_most(s.extent) for s in loop.body if isinstance(s, For)]
    return loop.binding.kind != "vector" and any(n and n >= LONG_ROW for n in inside)


def _most(extent: Expr) -> int | None:
    """Return the number of iterations, or of those of a full block; None: neither is
    known."""
    bounds = extent.args if extent.op == "min" else (extent,)
    return next((n.attr for n in bounds if n.is_const), None)


def _work(loop: For, unknown: int = ELEMENTS) -> int:
    """Return about how many instructions a loop over elements takes.

    Args:
        unknown: The steps of a loop of unknown length. Those within it then count as
            one step each.
    """
    most, inside = _most(loop.extent), [s for s in loop.body if isinstance(s, For)]
    if most is None and any(_most(s.extent) == OF_A_SUM for s in inside):
        # So many elements have all blocks of a sum together.
        return unknown * sum(Summary.of(s).size for s in inside)
    steps = unknown if most is None else most
    unknown = 1 if most is None else unknown
    if inside:
        return steps * sum(_work(s, unknown) for s in inside)
    calls = sum(_work_of_call(s) for s in loop.body if isinstance(s, Call))
    return steps * (Summary.of(loop).size + calls)


def _work_of_call(call: Call) -> int:
    """Return about how many instructions a product of matrices takes. A large one uses
    several threads itself, and counts as none; so does any other routine."""
    if not _is_product(call):
        return 0
    sizes = [arg for arg in call.args if isinstance(arg, Expr)][:3]
    is_static = all(size.is_const for size in sizes)
    work = prod(size.attr for size in sizes) // LANES if is_static else ELEMENTS
    return 0 if work > LARGE else work


def _is_foreign(statement: Stmt) -> bool:
    """Return whether a statement calls a library that has threads of its own."""
    return isinstance(statement, Call) and not ROUTINES[statement.routine].native


def _loops(statement: Stmt) -> bool:
    """Return whether a statement is a sequential loop, or a routine that has some."""
    if isinstance(statement, For):
        return not statement.independent
    return isinstance(statement, While) or (
        isinstance(statement, Call) and not _is_product(statement)
    )


def _is_product(call: Call) -> bool:
    return call.routine.startswith("gemm")
