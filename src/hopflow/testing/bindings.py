"""A scheduled program whose loops are bound as no backend of ours binds them yet.

Gangs and the axes of a GPU have a meaning, which the Loop IR's interpreter runs: so
programs can say whether loops that the scheduler calls independent are so.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from hopflow.compiler.schedule.threads import writes_rows
from hopflow.errors import LoopIRError
from hopflow.loop_ir.program import Binding, For, Program, Stmt
from hopflow.loop_ir.verifier import verify
from hopflow.loop_ir.walk import bodies

OUTERMOST: Final = (Binding("gang", 4), Binding("grid"), Binding("block"))
"""They take turns."""

WITHIN: Final[Mapping[str, Binding]] = {
    "grid": Binding("block"),
    "block": Binding("thread"),
}
"""By what is around."""


def rebound(program: Program) -> list[Binding]:
    """Bind the independent loops of a program to gangs and GPU axes, in place.

    Returns:
        The bindings that loops have now. A loop keeps its own if it sums, or if its
        iterations write to the same memory one after the other.
    """
    return list(_rebound(program, program.body, "serial", count()))


def _rebound(
    program: Program, body: Sequence[Stmt], around: str, turns: Iterator[int]
) -> Iterator[Binding]:
    for s in body:
        kind = around
        if isinstance(s, For) and s.independent and writes_rows(s):
            wanted = (
                OUTERMOST[next(turns) % len(OUTERMOST)]
                if around == "serial"
                else WITHIN.get(around)
            )
            if wanted and _may_be(program, s, wanted):
                yield wanted
                kind = wanted.kind
        for inner in bodies(s):
            yield from _rebound(program, inner, kind, turns)


def _may_be(program: Program, loop: For, wanted: Binding) -> bool:
    """Bind a loop, if the rules of the Loop IR allow it."""
    before, loop.binding = loop.binding, wanted
    try:
        verify(program)
    except LoopIRError:
        loop.binding = before
        return False
    return True
