"""The errors of failed checks, whose texts are no part of a program."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hopflow.errors import CheckError, HopflowError, ShapeCheckError


class Message(str):
    """A text for users. Graphs that differ only in it share a program."""

    __slots__ = ()
    has_portable_key = True

    @staticmethod
    def structural_key(_: "Message") -> str:
        return ""


def check_error(
    params: Mapping[str, Any], at: str = "", values: Sequence[int] = ()
) -> HopflowError:
    """Return the error for a failed check.

    Args:
        params: The params of the node. `message` is the text; `condition` is the
            comparison of integers as the user would write it, and `where` says what its
            symbols are; `kind` "shape" makes it a ShapeCheckError. All may be absent.
        at: The line of the user's code, in parentheses.
        values: The values of both sides of `condition`.
    """
    text = f"{params.get('message', 'check failed')}{at}"
    comparison = _COMPARISON.search(params.get("condition", ""))
    if comparison is not None and len(values) >= 2:
        left, right = values
        condition = f"`{params['condition']}`"
        if condition not in text:
            text += f": {condition} does not hold"
        text += f", it is `{left} {comparison[1]} {right}`"
        text += f" ({params['where']})." if params.get("where") else "."
    return (ShapeCheckError if params.get("kind") == "shape" else CheckError)(text)


_COMPARISON: Final = re.compile(r" ([<>]=?|[!=]=) ")
