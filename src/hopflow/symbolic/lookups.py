"""Whether Python asks a symbolic number for its hash, or compares two conditions, for
the user's code or for ours: tables of ours are of expressions."""

import sys
from collections.abc import Callable
from typing import Any, Final


class _Slots:
    """What a layer above fills in.

    is_traced   whether the symbols of an `Env` are those of a trace that runs now
                (filled by `trace`)
    """

    is_traced: Callable[[Any], bool] = lambda _: False


slots: Final = _Slots()


def is_asked_by_user(env: Any) -> bool:
    """Whether the frame that calls the method which calls this is of no file of ours,
    and the `Env` of its symbols, if they have one, that of a trace that runs."""
    if env is None or not slots.is_traced(env):
        return False
    home: str = sys._getframe(2).f_globals.get("__name__", "")
    return not home.startswith("hopflow.")  # a method of a dataclass has no file
