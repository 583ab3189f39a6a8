"""Profiles of jitted functions: the time of each loop, by the user's lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from hopflow.compiler.profiling import Measured
from hopflow.graph.core import Graph, SourceLine
from hopflow.trace.source import source_text


@dataclass(frozen=True, slots=True)
class ProfiledLoop:
    """A loop of a compiled program, or a copy, a call or a function, in one run.

    depth    the number of rows that it is within
    what     "for", "while"; "vector 8" and "gang 32": with so many lanes; "threads":
             shared among threads; "copy"; "call gemm": a routine of a library or a
             function of the program; "python": a callback; "function f": what all
             calls of it do
    lines    the user's lines that it computes, each once: first those whose results it
             stores, then those that it computes on the way; () if there are none
    seconds  its time, with what is within it; None: it runs in the lanes of a gang
    share    of the time of the whole program; None as `seconds` is
    entries  how often it ran
    trips    the steps that it took in all its runs; None if it is no loop
    bytes    that these load and store, without the rows within it. A step counts each
             element once, those of all branches
    active   the share of a gang's lanes that are active, over its steps; None: no gang
    """

    depth: int
    what: str
    lines: tuple[SourceLine, ...]
    seconds: float | None
    share: float | None
    entries: int
    trips: int | None
    bytes: int
    active: float | None

    @property
    def file(self) -> str:
        """The file of its first line; "" if it has none."""
        return self.lines[0].file if self.lines else ""

    @property
    def line(self) -> int:
        """The number of its first line; 0 if it has none."""
        return self.lines[0].line if self.lines else 0

    @property
    def text(self) -> str:
        """The source of its first line; "" if it has none."""
        return source_text(self.lines[0]) if self.lines else ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a call of a jitted function spends its time; see `jitted.profile`.

    seconds  the time of the compiled program, without the passing of arguments
    loops    its loops, copies and calls in the order of the program, each before those
             within it
    results  what the call returned
    """

    name: str
    seconds: float
    loops: tuple[ProfiledLoop, ...]
    results: Any = field(repr=False)

    def __str__(self) -> str:
        titles = ("time", "share", "entries", "trips", "bytes", "lanes", "", "", "")
        rows = [titles, *map(_cells, self.loops)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.name}: {_time(self.seconds)}"]
        for row in rows:
            cells = list(zip(row, widths, strict=True))
            numbers = [text.rjust(width) for text, width in cells[:_NUMBERS]]
            texts = [text.ljust(width) for text, width in cells[_NUMBERS:]]
            lines.append("  ".join([*numbers, *texts]).rstrip())
        return "\n".join(lines)


_NUMBERS: Final = 6
"""The columns that have numbers."""


def profile_of(
    name: str, graph: Graph, measured: Sequence[Measured], results: Any
) -> Profile:
    """Return the profile of a run of a graph, whose program is the first row."""
    nodes = list(graph.walk())
    program, *rows = measured
    total = program.seconds or 0.0
    loops: list[ProfiledLoop] = []
    for m in rows:
        found = (nodes[n].line for n in m.row.nodes)
        lines = tuple(dict.fromkeys(line for line in found if line is not None))
        share = None if m.seconds is None or not total else m.seconds / total
        counts = m.entries, m.trips, m.bytes, m.active
        loop = ProfiledLoop(m.depth, m.row.what, lines, m.seconds, share, *counts)
        loops.append(loop)
    return Profile(name, total, tuple(loops), results)


def _cells(loop: ProfiledLoop) -> tuple[str, ...]:
    return (
        "" if loop.seconds is None else _time(loop.seconds),
        "" if loop.share is None else f"{loop.share:.0%}",
        f"{loop.entries:,}",
        "" if loop.trips is None else f"{loop.trips:,}",
        _scaled(loop.bytes, ("B", "kB", "MB", "GB", "TB")),
        "" if loop.active is None else f"{loop.active:.0%}",
        f"{'  ' * loop.depth}{loop.what}",
        _place(loop),
        loop.text,
    )


def _place(loop: ProfiledLoop) -> str:
    """Return the lines of a loop: "model.py:3, 4"."""
    if not loop.lines:
        return ""
    numbers = dict.fromkeys(str(x.line) for x in loop.lines if x.file == loop.file)
    return f"{PurePath(loop.file).name}:{', '.join(numbers)}"


def _time(seconds: float) -> str:
    return _scaled(seconds * 1e9, ("ns", "µs", "ms", "s"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """Return a value with three digits in the largest unit in which it is at least 1.
    Each unit is a thousand of the one before."""
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {units[-1]}"
