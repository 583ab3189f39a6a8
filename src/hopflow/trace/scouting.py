"""What rules read of outside: they are run where their operator is called, to see."""

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
    """What rules read.

    symbols   the sizes that they know
    is_known  whether they have run to their end
    """

    reads: tuple[Read, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    is_known: bool = False


class _Present(threading.local):
    """What has rules that are run to see what they read."""

    def __init__(self) -> None:
        self.owners: list[Any] = []


_present: Final = _Present()


@contextmanager
def for_nothing() -> Iterator[None]:
    """Take back all that is added to present traces within the block."""
    tracer = current()
    marks = mark(tracer) if isinstance(tracer, Tracer) else []
    try:
        yield
    finally:
        rollback(marks)


def scouted(
    owner: Any, name: str, tracer: Tracer, run: Callable[[Tracer], Any]
) -> Scouted:
    """What `run` reads of outside, as it is traced.

    In rules of the same owner there is nothing to find: what they read when called by
    themselves they read the first time.
    """
    if any(own is owner for own in _present.owners):
        return Scouted()
    scout = Tracer(tracer, name, path=tracer.path)
    is_known = False
    _present.owners.append(owner)
    with noting(tracer) as found:
        try:
            with for_nothing():
                trace_into(scout, run, (scout,))
            is_known = True
        except Exception:
            pass  # the rule is run again where a derivative is asked for
        finally:
            _present.owners.pop()
    reads = tuple([Read(x, scout.is_adopted(x)) for x in found.values()])
    only_read(reads)
    symbols = [s for s, var in scout.symbols.items() if var.node.section == "symbol"]
    return Scouted(reads, tuple(symbols), is_known)
