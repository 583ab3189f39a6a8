"""Dry runs of rules where their operator is called, to record what they capture."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from hopflow.bind import current
from hopflow.symbolic.size import Symbol
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.stand_ins import Read, noting, only_read
from hopflow.trace.tracer import Tracer, trace_into


class Scouted(NamedTuple):
    """What rules capture, by a dry run.

    reads     the tensors from outside that they read
    symbols   the symbols that they use
    is_known  whether the dry run completed
    """

    reads: tuple[Read, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    is_known: bool = False


class _Present(threading.local):
    """The owners of rules whose dry runs are in progress in this thread."""

    def __init__(self) -> None:
        self.owners: list[Any] = []


_present: Final = _Present()


@contextmanager
def for_nothing() -> Iterator[None]:
    """Roll back the current traces at the end of the block."""
    tracer = current()
    marks = mark(tracer) if isinstance(tracer, Tracer) else []
    try:
        yield
    finally:
        rollback(marks)


def scouted(
    owner: Any, name: str, tracer: Tracer, run: Callable[[Tracer], Any]
) -> Scouted:
    """Return what `run` captures when it is traced.

    A dry run within another one for the same owner is skipped: it would capture the
    same.
    """
    if any(other is owner for other in _present.owners):
        return Scouted()
    scout = Tracer(tracer, name, path=tracer.path)
    is_known = False
    _present.owners.append(owner)
    with noting(tracer) as tensors:
        try:
            with for_nothing():
                trace_into(scout, run, (scout,))
            is_known = True
        except Exception:
            pass  # the error recurs when the rule runs for a derivative
        finally:
            _present.owners.pop()
    reads = tuple([Read(x, scout.is_adopted(x)) for x in tensors.values()])
    only_read(reads)
    symbols = [s for s, var in scout.symbols.items() if var.node.section == "symbol"]
    return Scouted(reads, tuple(symbols), is_known)
