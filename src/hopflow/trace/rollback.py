"""Taking back what was added to traces, when an error ends what was to be recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from hopflow.bind import Interpreter, current
from hopflow.graph.core import Node, Var
from hopflow.trace.tracer import Tracer

__all__ = ["Marks", "mark", "rollback", "unchanged_on_error"]


class _Mark(NamedTuple):
    """How far a tracer had got; see `mark`."""

    nodes: list[Node]  # all: a check is not put at the end
    inputs: frozenset[Var]
    symbols: int
    captures: int
    changes: int


Marks: TypeAlias = list[tuple[Tracer, _Mark]]


def mark(tracer: Tracer) -> Marks:
    """How far a tracer and its ancestors have got, for `rollback`."""
    marks: Marks = []
    around: Interpreter | None = tracer
    while isinstance(around, Tracer):
        at = _Mark(
            around.graph.nodes.copy(),
            frozenset(around.graph.inputs),
            len(around.symbols),
            len(around.captures),
            len(around.changes),
        )
        marks.append((around, at))
        around = around.parent
    return marks


def rollback(marks: Marks) -> None:
    """Take back all that was added to the marked tracers since."""
    for tracer, at in marks:
        for take_back in reversed(tracer.changes[at.changes :]):
            take_back()
        del tracer.changes[at.changes :]
        if (
            len(tracer.graph.nodes) == len(at.nodes)
            and len(tracer.symbols) == at.symbols
            and len(tracer.captures) == at.captures
        ):
            continue
        tracer.graph.nodes[:] = at.nodes
        _truncate(tracer.symbols, at.symbols)
        _truncate(tracer.captures, at.captures)
        tracer.graph.inputs = [
            v
            for v in tracer.graph.inputs
            if v.node.section == "operand" or v in at.inputs
        ]


@contextmanager
def unchanged_on_error() -> Iterator[None]:
    """Within the block an error takes back all that was added to present traces."""
    tracer = current()
    if not isinstance(tracer, Tracer):
        yield
        return
    marks = mark(tracer)
    try:
        yield
    except BaseException:
        rollback(marks)
        raise


def _truncate(entries: dict[Any, Any], length: int) -> None:
    for key in list(entries)[length:]:
        del entries[key]
