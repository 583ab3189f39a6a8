"""Why a program stops, as the status of the C function and the text of the error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hopflow.compiler.cpu.stubs import OUT_OF_MEMORY
from hopflow.compiler.traps import bounds_error, trap_error
from hopflow.errors import HopflowError
from hopflow.graph.core import Graph
from hopflow.loop_ir.program import Program, Site

MEMORY: Final = (
    "MemoryError: the workspace is too small. Give the function at least as much as "
    "its `workspace` function tells; more, if the program has arrays whose sizes only "
    "a run knows."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A place where a program may stop.

    kind   "index", "check", ...: see `loop_ir.program.Kind`; "constraint": a size
    text   the class and the text of the error that Python raises. `{0}` and `{1}` stand
           for the numbers that the function gives as details
    """

    kind: str
    text: str


class Failures:
    """The places where a program may stop, by the number of the site."""

    def __init__(self, program: Program, graph: Graph) -> None:
        """List the sites of a program, which was lowered from a graph."""
        self._nodes = list(graph.walk())
        self.all: list[Failure] = []
        for site in program.sites:
            self.add(site)

    def add(self, site: Site) -> int:
        """Add a site of the graph; return its number."""
        if site.kind in ("callback", "progress"):  # no failures
            return self.say(site.kind, "")
        if site.kind == "bounds":
            error: HopflowError = bounds_error(site.detail, _PLACES)
        else:
            error = trap_error(site, self._nodes[site.node], _PLACES)
        return self.say(site.kind, f"{type(error).__name__}: {error}")

    def say(self, kind: str, text: str) -> int:
        """Add another one; return its number."""
        self.all.append(Failure(kind, text))
        return len(self.all) - 1

    def place(self, number: int) -> str:
        """The operation and the line of the node of this number."""
        node = self._nodes[number]
        name = node.op.name if node.op is not None else node.kind
        return f"{name} ({node.line})" if node.line else name

    def statuses(self) -> dict[int, Failure]:
        """By status of the C function, why it has stopped."""
        found = {k + 1: failure for k, failure in enumerate(self.all) if failure.text}
        return {OUT_OF_MEMORY: Failure("memory", MEMORY), **found}


class _Place(int):
    """A number that is known when a program has stopped; in a text `{0}` or `{1}`."""

    def __repr__(self) -> str:
        return f"{{{int(self)}}}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __mod__(self, other: int) -> "_Place":  # of 64 bits: the same
        return self


_PLACES: Final[Sequence[int]] = (_Place(0), _Place(1))
