"""Loops over examples that are worth more than one thread.

Those are outermost loops whose iterations are independent and loop themselves: each
takes a while, and may take longer than another. Whether there are enough of them shows
when they run.
"""

from hopflow.compiler.schedule.fuse import changed_by, is_row_by_row, written_by
from hopflow.loop_ir.nest import (
    Allocate,
    Barrier,
    Binding,
    Call,
    Copy,
    For,
    Grow,
    HostCall,
    Stmt,
    Swap,
    Tick,
    While,
)
from hopflow.loop_ir.walk import bodies, statements

_SHARED = (Allocate, Barrier, Call, Copy, Grow, HostCall, Swap, Tick)
"""What iterations would do to memory that they share."""


def bind_threads(body: list[Stmt]) -> None:
    """Bind such loops in a list of statements, and in all lists within it, in place."""
    for statement in body:
        if isinstance(statement, For) and _suits(statement):
            statement.binding = Binding("threads")
        elif not (isinstance(statement, For) and statement.independent):
            for inner in bodies(statement):
                bind_threads(inner)


def _suits(loop: For) -> bool:
    inside = list(statements(loop.body))
    return (
        loop.independent
        and any(_loops(s) for s in inside)
        and not any(isinstance(s, _SHARED) for s in inside)
        and not changed_by(loop)
        and all(is_row_by_row(buffer, loop, loop) for buffer in written_by(loop))
    )


def _loops(statement: Stmt) -> bool:
    """Whether its steps follow each other, many of them perhaps."""
    if isinstance(statement, For):
        return not statement.independent
    return isinstance(statement, While)
