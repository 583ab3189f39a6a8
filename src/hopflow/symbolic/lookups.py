"""Whether a symbolic number is hashed, or a condition compared, by the user's code.

The package's own tables are keyed by expressions, the user's by values.
"""

import sys
from collections.abc import Callable
from typing import Any, Final


class _Slots:
    """Functions that a higher layer fills in.

    is_traced   whether the symbols of an `Env` belong to a trace that runs now (filled
                by `trace`)
    """

    is_traced: Callable[[Any], bool] = lambda _: False


slots: Final = _Slots()


def is_asked_by_user(env: Any) -> bool:
    """Return True if the frame two calls up is the user's code, and the symbols of
    `env` belong to a running trace."""
    if env is None or not slots.is_traced(env):
        return False
    # By module, as methods that dataclasses generate have no file.
    home: str = sys._getframe(2).f_globals.get("__name__", "")
    return not home.startswith("hopflow.")
