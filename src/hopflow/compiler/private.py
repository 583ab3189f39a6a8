"""Buffers that each thread of a loop has for itself.

What is made and used up within one iteration can be in memory that no other iteration
knows. Such buffers are not in the arena: a thread allocates them when it begins.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from hopflow.compiler.schedule.summary import Summary
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer
from hopflow.loop_ir.nest import Call, Copy, For, Ref, Stmt, Swap
from hopflow.loop_ir.routines import ROUTINES

__all__ = ["changed_whole", "private_buffers", "private_to", "used_whole"]


def private_buffers(body: Sequence[Stmt]) -> dict[For, list[Buffer]]:
    """Those of each loop over threads in the body of a program."""
    loops = [s for s in walk.statements(body) if isinstance(s, For)]
    threaded = [s for s in loops if s.binding.kind == "threads"]
    uses = walk.uses(body if threaded else ())
    return {s: private_to(s, uses) for s in threaded}


def private_to(loop: For, uses: Counter[Buffer]) -> list[Buffer]:
    """The buffers of the arena that only this loop names, not by rows of its own.

    Args:
        uses: How often the program names each buffer.
    """
    own = walk.uses(loop.body)
    whole, axes = set(used_whole(loop)), Summary.of(loop).axes
    return [
        b
        for b, count in own.items()
        if b.space == "arena"
        and uses[b] == count
        and (b in whole or not axes.get(b, True))
    ]


def used_whole(loop: For) -> Iterator[Buffer]:
    """The buffers that statements of a loop read or write otherwise than by element."""
    for statement in walk.statements(loop.body):
        if isinstance(statement, Call | Copy | Swap):
            yield from walk.buffers(statement)


def changed_whole(statement: Stmt) -> list[Buffer]:
    """The buffers that a statement writes otherwise than by element."""
    match statement:
        case Copy():
            return [statement.target]
        case Swap():
            return [statement.a, statement.b]
        case Call():
            writes = ROUTINES[statement.routine].writes
            refs = [statement.args[i] for i in writes]
            return [ref.buffer for ref in refs if isinstance(ref, Ref)]
    return []
