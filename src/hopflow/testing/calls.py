"""A record of calls by programs, for tests of their number and order."""

from collections.abc import Callable
from typing import Any

from hopflow.tensor import EagerTensor
from hopflow.trace.callbacks import callback


class Calls:
    """Values noted by a running program, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *args: Any) -> Any:
        """Note the values of `args`: one, or a tuple of several."""
        return callback(self._note, None, *args)

    def through(self, x: Any) -> Any:
        """Return `x` through a Python callback that notes it."""
        return callback(lambda a: (self._note(a), a)[1], x, x)

    def _note(self, *args: Any) -> Any:
        values = [a.tolist() if isinstance(a, EagerTensor) else a for a in args]
        self.seen.append(values[0] if len(values) == 1 else tuple(values))

    def of(self, f: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the values that a call of `f` notes."""
        self.seen.clear()
        f(*args)
        return list(self.seen)
