"""Tensors whose elements other libraries compute with: what would be lost, and what to
do instead."""

import sys
from collections.abc import Iterable
from typing import Any

from hopflow import synonyms
from hopflow.bind import Value, current
from hopflow.errors import TraceError


def check_constant(what: str, values: Iterable[Any]) -> None:
    """Check that none of the values is a tensor that is differentiated: what another
    library computes has no derivative. `what` names the use: "numpy.median".

    Raises:
        TraceError: one is.
    """
    interpreter = current()
    for x in values:
        if isinstance(x, Value) and interpreter.has_tangent(x):
            raise TraceError(
                f"{what}() of a tensor {x.type} that is differentiated: NumPy's result "
                f"has no derivative. {remedy(what)} If it is to be a constant, say so "
                "with `hf.stop_gradient(x)`."
            )


def remedy(what: str) -> str:
    """What to write instead of a use of a tensor's elements, "numpy.median": the name
    of the counterpart, if there is one."""
    module, _, name = what.rpartition(".")
    public = sys.modules["hopflow"]
    if module not in ("numpy", "numpy.linalg") or name == "asarray":
        return (
            "Compute with `hf` functions, which take tensors where NumPy takes arrays."
        )
    if name in public.linalg.__all__:
        return f"Use `hf.linalg.{name}`, with the options that it has."
    if module == "numpy" and name in public.__all__:
        return f"Use `hf.{name}`, with the options that it has."
    return str(synonyms.unknown(name, [n for n in public.__all__ if n != name]))
