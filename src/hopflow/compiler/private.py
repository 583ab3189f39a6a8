"""Buffers of which each thread of a loop has its own copy.

A buffer that is written and read within one iteration can be in memory that no other
iteration accesses. It is not in the arena: each thread allocates it when it starts.
"""

from collections import Counter
from collections.abc import Sequence

from hopflow.compiler.schedule.summary import Summary
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer
from hopflow.loop_ir.program import For, Stmt


def private_buffers(body: Sequence[Stmt]) -> dict[For, list[Buffer]]:
    """Return the private buffers of each loop over threads in the body of a program."""
    loops = [s for s in walk.statements(body) if isinstance(s, For)]
    threaded = [s for s in loops if s.binding.kind == "threads"]
    uses = walk.uses(body if threaded else ())
    if not any(b.space == "arena" for b in uses):
        return {s: [] for s in threaded}
    return {s: private_to(Summary.of(s), uses) for s in threaded}


def private_to(loop: Summary, uses: Counter[Buffer]) -> list[Buffer]:
    """Return the buffers of the arena that only this loop names, and not by rows.

    Args:
        loop: The summary of the loop.
        uses: How often the program names each buffer.
    """
    return [
        b
        for b, count in loop.uses.items()
        if b.space == "arena" and uses[b] == count and not loop.axes.get(b, True)
    ]
