"""Taking back what was added to traces, when an error ends what was to be recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from hopflow.bind import Interpreter, current
from hopflow.trace.tracer import Tracer


class _Mark(NamedTuple):
    """How far a tracer had got; see `mark`."""

    nodes: int
    inputs: int
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
            len(around.graph.nodes),
            len(around.graph.inputs),
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
        del tracer.graph.nodes[at.nodes :]
        _truncate(tracer.symbols, at.symbols)
        _truncate(tracer.captures, at.captures)
        inputs = tracer.graph.inputs
        inputs[at.inputs :] = [
            v for v in inputs[at.inputs :] if v.node.section == "operand"
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
