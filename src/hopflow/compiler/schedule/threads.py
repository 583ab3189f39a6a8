"""Loops over examples that are worth more than one thread.

Those are outermost loops whose iterations are independent and loop themselves: each
takes a while, and may take longer than another. Whether there are enough of them shows
when they run.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from hopflow.compiler.private import private_to
from hopflow.compiler.schedule.summary import Summary
from hopflow.loop_ir.expr import Buffer
from hopflow.loop_ir.program import (
    Allocate,
    Barrier,
    Binding,
    Call,
    For,
    HostCall,
    Invoke,
    Stmt,
    While,
)
from hopflow.loop_ir.walk import bodies, statements, uses

_SHARED = (Allocate, Barrier, HostCall, Invoke)
"""What iterations would do to memory that they share."""


def bind_threads(body: list[Stmt]) -> None:
    """Bind such loops in the body of a program, in place."""
    _bind(body, cache(lambda: uses(body)))


def _bind(body: list[Stmt], named: Callable[[], Counter[Buffer]]) -> None:
    for statement in body:
        if isinstance(statement, For) and _suits(statement, named):
            statement.binding = Binding("threads")
        elif not (isinstance(statement, For) and statement.independent):
            for inner in bodies(statement):
                _bind(inner, named)


def _suits(loop: For, named: Callable[[], Counter[Buffer]]) -> bool:
    inside = list(statements(loop.body))
    if not loop.independent or not any(map(_loops, inside)):
        return False
    if any(map(_is_foreign, inside)) or Summary.of(loop).changed:
        return False
    return writes_rows(loop, private_to(loop, named()))


def writes_rows(loop: For, private: Sequence[Buffer] = ()) -> bool:
    """Whether all that iterations write is a row for each, beside what is private."""
    if any(isinstance(s, _SHARED) for s in statements(loop.body)):
        return False
    summary = Summary.of(loop)
    return all(summary.axes[b] for b in summary.stored.difference(private))


def _is_foreign(statement: Stmt) -> bool:
    """Whether it calls a library that has threads of its own."""
    return isinstance(statement, Call) and not statement.routine.startswith("gemm")


def _loops(statement: Stmt) -> bool:
    """Whether its steps follow each other, many of them perhaps."""
    if isinstance(statement, For):
        return not statement.independent
    return isinstance(statement, While)
