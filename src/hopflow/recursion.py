"""A higher recursion limit for deeply nested programs.

Tracing an operator in the body of another takes about fifteen Python frames, so that
Python's default limit of 1,000 frames would fail for moderately nested programs.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

LIMIT: Final = 10_000
"""The recursion limit while functions are traced or graphs are compiled. Python frames
take no C stack: infinite recursion reaches this limit with less than 4 MiB of it, of
which threads have 8."""


class _Thread(threading.local):
    """How many `deep_recursion` blocks this thread is in."""

    depth = 0


class _Process:
    """The number of threads in a block, and the recursion limit from before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = 0
        self.limit = 0

    def enter(self) -> None:
        with self.lock:
            if not self.threads:
                self.limit = sys.getrecursionlimit()
                sys.setrecursionlimit(max(self.limit, LIMIT))
            self.threads += 1

    def leave(self) -> None:
        with self.lock:
            self.threads -= 1
            # Another limit was set by the user meanwhile, and stays.
            if not self.threads and sys.getrecursionlimit() == LIMIT:
                sys.setrecursionlimit(self.limit)


_thread: Final = _Thread()
_process: Final = _Process()


class deep_recursion:
    """Within the block, Python's recursion limit is at least `LIMIT`.

    All threads share the limit: it is reset when no thread is in such a block. An
    instance also decorates functions that run within such a block.
    """

    # A class is entered and left in a third of the time of `contextmanager`.
    __slots__ = ()

    def __call__(self, f: _F) -> _F:
        # `contextlib.ContextDecorator` has a frame outside hopflow, which would be
        # taken for the user's.
        @wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return f(*args, **kwargs)

        return call  # type: ignore[return-value]

    def __enter__(self) -> None:
        if not _thread.depth:
            _process.enter()
        _thread.depth += 1

    def __exit__(self, *_error: object) -> None:
        _thread.depth -= 1
        if not _thread.depth:
            _process.leave()
