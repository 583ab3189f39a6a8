"""Checks and remedies for tensors whose elements another library computes with."""

import sys
from collections.abc import Iterable
from typing import Any

from hopflow import synonyms
from hopflow.bind import Value, current
from hopflow.errors import TraceError


def check_constant(what: str, values: Iterable[Any]) -> None:
    """Check that no value is differentiated, since other libraries give no derivative.
    `what` names the use in messages: "numpy.median".

    Raises:
        TraceError: one of them is differentiated.
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
    """Return advice on what to write instead of "numpy.median": the name of its
    counterpart, if there is one."""
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
