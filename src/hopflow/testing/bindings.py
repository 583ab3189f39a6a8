"""Bindings of loops in scheduled programs that no backend uses yet.

The interpreter of the Loop IR runs gangs and GPU axes, so that programs can test that
the loops which the scheduler marks as independent are independent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import count
from typing import Final

from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.divergence import Divergence
from hopflow.compiler.schedule.summary import Summary, writes_rows
from hopflow.errors import LoopIRError
from hopflow.loop_ir.program import Binding, For, Program, Stmt
from hopflow.loop_ir.verifier import verify
from hopflow.loop_ir.walk import bodies

OUTERMOST: Final = (Binding("gang", 4), Binding("grid"), Binding("block"))
"""The bindings of outermost loops, used in turn."""

INNER: Final[Mapping[str, Binding]] = {
    "grid": Binding("block"),
    "block": Binding("thread"),
}
"""Kind of the binding around -> the binding of an inner loop."""


class _OneByOne(CpuTarget):
    def gang_width(self, loop: For, divergence: Divergence) -> int:  # noqa: ARG002
        return 1


def one_by_one(target: CpuTarget) -> CpuTarget:
    """The same CPU, for which no loop becomes a gang."""
    return _OneByOne(*astuple(target))


def rebound(program: Program) -> list[Binding]:
    """Bind the independent loops of a program to gangs and GPU axes, in place.

    Returns:
        The new bindings. A loop keeps its binding if it reduces, or if its iterations
        write to the same memory.
    """
    return list(_rebound(program, program.body, "serial", count()))


def _rebound(
    program: Program, body: Sequence[Stmt], around: str, turns: Iterator[int]
) -> Iterator[Binding]:
    for s in body:
        kind = around
        if isinstance(s, For) and s.independent and writes_rows(s, Summary.of(s)):
            binding = (
                OUTERMOST[next(turns) % len(OUTERMOST)]
                if around == "serial"
                else INNER.get(around)
            )
            if binding and _try_bind(program, s, binding):
                yield binding
                kind = binding.kind
        for inner in bodies(s):
            yield from _rebound(program, inner, kind, turns)


def _try_bind(program: Program, loop: For, binding: Binding) -> bool:
    """Bind a loop if the verifier allows it; return whether it does."""
    previous, loop.binding = loop.binding, binding
    try:
        verify(program)
    except LoopIRError:
        loop.binding = previous
        return False
    return True
