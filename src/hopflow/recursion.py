"""Room for programs that nest deeply.

One operator in the body of another takes some fifteen frames of Python when it is
traced, so that Python's default limit of 1,000 frames would end programs at a depth
that their authors have not come near.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

LIMIT: Final = 10_000
"""The recursion limit while functions are traced or graphs are compiled. The frames
are mostly Python's, which take no C stack: a function that calls itself without end
reaches this limit with less than 4 MiB of the stack, of which threads have 8."""


class _Thread(threading.local):
    """How many blocks this thread is in."""

    depth = 0


class _Process:
    """How many threads are in a block, and what the recursion limit was before."""

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
            # Unless somebody has set another one meanwhile.
            if not self.threads and sys.getrecursionlimit() == LIMIT:
                sys.setrecursionlimit(self.limit)


_thread: Final = _Thread()
_process: Final = _Process()


class deep_recursion:
    """Within the block, Python's recursion limit is at least `LIMIT`.

    The limit is one of all threads: it is set back when no thread is in such a block.
    An instance is also a decorator, of functions that run within such a block.
    """

    # A class, which is entered and left in a third of a generator's time.
    __slots__ = ()

    def __call__(self, f: _F) -> _F:
        # That of `contextlib` would be the last frame outside hopflow, and so be taken
        # for the user's.
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
