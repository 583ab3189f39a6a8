"""Rollback of the current traces, when an error interrupts the recording of a node."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from hopflow.bind import Interpreter, current
from hopflow.trace.tracer import Tracer


class _Mark(NamedTuple):
    """The state of a tracer, as the lengths of its lists; see `mark`."""

    nodes: int
    inputs: int
    symbols: int
    captures: int
    changes: int


Marks: TypeAlias = list[tuple[Tracer, _Mark]]


def mark(tracer: Tracer) -> Marks:
    """Return the state of a tracer and its ancestors, for `rollback`."""
    marks: Marks = []
    interpreter: Interpreter | None = tracer
    while isinstance(interpreter, Tracer):
        state = _Mark(
            len(interpreter.graph.nodes),
            len(interpreter.graph.inputs),
            len(interpreter.symbols),
            len(interpreter.captures),
            len(interpreter.changes),
        )
        marks.append((interpreter, state))
        interpreter = interpreter.parent
    return marks


def rollback(marks: Marks) -> None:
    """Remove everything that was added to the marked tracers since."""
    for tracer, state in marks:
        for take_back in reversed(tracer.changes[state.changes :]):
            take_back()
        del tracer.changes[state.changes :]
        del tracer.graph.nodes[state.nodes :]
        _truncate(tracer.symbols, state.symbols)
        _truncate(tracer.captures, state.captures)
        inputs = tracer.graph.inputs
        inputs[state.inputs :] = [
            v for v in inputs[state.inputs :] if v.node.section == "operand"
        ]


@contextmanager
def unchanged_on_error() -> Iterator[None]:
    """Roll back the current traces if the block raises an error."""
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


@contextmanager
def for_nothing() -> Iterator[None]:
    """Roll back the current traces at the end of the block."""
    tracer = current()
    marks = mark(tracer) if isinstance(tracer, Tracer) else []
    try:
        yield
    finally:
        rollback(marks)


def _truncate(entries: dict[Any, Any], length: int) -> None:
    for key in list(entries)[length:]:
        del entries[key]
