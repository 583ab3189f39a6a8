"""The functions that rewritten code calls, as attributes of `hopflow_runtime`."""

import sys
from builtins import slice
from types import FunctionType

from hopflow.entries import blames_user, entry
from hopflow.rewrite.branches import and_value, if_, if_return, if_value, or_value
from hopflow.rewrite.calls import called, consumed, contains, list_of
from hopflow.rewrite.convert import provide
from hopflow.rewrite.loops import for_, plain_items, while_
from hopflow.rewrite.values import (
    UNBOUND,
    and_,
    assert_,
    augmented,
    compare,
    load,
    not_,
    or_,
    plain,
    plain_subject,
)

__all__ = [
    "UNBOUND",
    "and_",
    "and_value",
    "assert_",
    "augmented",
    "called",
    "compare",
    "consumed",
    "contains",
    "for_",
    "if_",
    "if_return",
    "if_value",
    "list_of",
    "load",
    "not_",
    "or_",
    "or_value",
    "plain",
    "plain_items",
    "plain_subject",
    "slice",
    "while_",
]

provide(sys.modules[__name__])

# Frames of rewritten code are the user's, those of these functions are not. Errors that
# Python raises in them are the user's, as for an invalid `x += y`.
for _name in {*__all__} - {"called", "load"}:
    if isinstance(_helper := globals()[_name], FunctionType):
        globals()[_name] = entry(blames_user(_helper))
