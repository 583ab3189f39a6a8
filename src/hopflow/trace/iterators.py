"""The positions of iterators and files, read without advancing them.

By them `outside/effects.py` finds iterators from outside that traced code has advanced:
a compiled function would not do that again.
"""

import io
import warnings
from typing import Any


def remainder(iterator: Any) -> Any:
    """Return a value that changes when a builtin iterator advances; None: unknown.

    It is the number of items that are left, or else the state that pickling would save.
    """
    with warnings.catch_warnings(action="ignore"):  # itertools' `__reduce__` warns
        try:
            if (hint := getattr(iterator, "__length_hint__", None)) is not None:
                return hint()
            _, *state = iterator.__reduce__()
        except Exception:  # infinite, not picklable, or its sequence is gone
            return None
    return _identified(state)


def _identified(value: Any) -> Any:
    """Return a comparable form of a pickled state: numbers by value, other objects by
    id, and iterators also by their remainder."""
    if isinstance(value, tuple | list):
        return tuple(map(_identified, value))
    if isinstance(value, int):
        return value
    inner = remainder(value) if hasattr(type(value), "__next__") else None
    return id(value), inner


def position(file: io.IOBase) -> int | None:
    """Return the position of a file; None: unknown."""
    return file.tell() if not file.closed and file.seekable() else None
