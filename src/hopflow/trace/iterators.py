"""How far iterators and files have come, told without advancing them."""

import io
import warnings
from typing import Any


def remainder(iterator: Any) -> Any:
    """What tells how far an iterator of Python's own has come; None: nothing does."""
    with warnings.catch_warnings(action="ignore"):  # of those of itertools
        try:
            if (hint := getattr(iterator, "__length_hint__", None)) is not None:
                return hint()
            _, *state = iterator.__reduce__()
        except Exception:  # it has no end, cannot be pickled, or lost what it iterates
            return None
    return _identified(state)


def _identified(value: Any) -> Any:
    """Numbers in tuples and lists, which the other objects are, and how far those of
    them have come that are iterators."""
    if isinstance(value, tuple | list):
        return tuple(map(_identified, value))
    if isinstance(value, int):
        return value
    inner = remainder(value) if hasattr(type(value), "__next__") else None
    return id(value), inner


def position(file: io.IOBase) -> int | None:
    """Where a file is read next; None: it does not tell."""
    return file.tell() if not file.closed and file.seekable() else None
