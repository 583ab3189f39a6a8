"""The ways to run a program that must all agree, and what it takes to compare them.

A test that is parametrised by `MEANINGS` states a fact of each of them:

    @pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
    def test_both_branches_are_right(run):
        agree(run(lambda x: hf.cond(True, hf.sin, hf.cos, (x,)), x), np.sin(x))
"""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.graph.verifier import verify
from hopflow.hops.base import debug, interpreted
from hopflow.jit import jit
from hopflow.trace.capture import trace

__all__ = [
    "MEANINGS",
    "NAMES",
    "RUNNERS",
    "SYMBOLIC",
    "Meaning",
    "agree",
    "fails",
    "interpreted",
]

Run = Callable[..., Any]
"""(f, *args) -> what `f(*args)` returns."""


class Meaning(NamedTuple):
    name: str
    run: Run


def run_debug(f: Run, *args: Any) -> Any:
    """Operators as plain Python."""
    with debug():
        return f(*args)


def run_eager(f: Run, *args: Any) -> Any:
    """Operators traced where they are called, and interpreted."""
    with interpreted():
        return f(*args)


def run_traced(f: Run, *args: Any) -> Any:
    """The whole function traced, verified, and interpreted."""
    module = trace(f, *args, captures=True)
    verify(module.graph)
    with interpreted():
        return module(*args)


def run_native(f: Run, *args: Any) -> Any:
    """Operators traced where they are called, compiled, and run as native code."""
    return f(*args)


def run_jit(f: Run, *args: Any) -> Any:
    """The whole function compiled."""
    return jit(f)(*args)


def run_symbolic(f: Run, *args: Any) -> Any:
    """The whole function traced for all sizes and numbers, and interpreted."""
    with interpreted():
        return run_symbolic_native(f, *args)


def run_symbolic_native(f: Run, *args: Any) -> Any:
    """The same, with operators as native code."""
    module = trace(f, *args, mode="symbolic", captures=True)
    verify(module.graph)
    return module(*args)


def run_dynamic(f: Run, *args: Any) -> Any:
    """The whole function compiled for all sizes and numbers."""
    return jit(f, dynamic=True)(*args)


MEANINGS: Final = [
    Meaning("debug", run_debug),
    Meaning("eager", run_eager),
    Meaning("traced", run_traced),
    Meaning("native", run_native),
    Meaning("jit", run_jit),
]
RUNNERS: Final = [meaning.run for meaning in MEANINGS]
NAMES: Final = [meaning.name for meaning in MEANINGS]

SYMBOLIC: Final = [run_symbolic, run_symbolic_native, run_dynamic]
"""Those in which sizes and numbers are symbols."""


def fails(error: type[Exception], text: str, f: Run, *args: Any, **kwargs: Any) -> None:
    """Check that `f(*args)` raises `error` with exactly this text.

    Line numbers are written `#`: "`step` (test_model.py:#) must return ...".

    Raises:
        AssertionError: it does not, or with another text.
    """
    message = None
    try:
        f(*args, **kwargs)
    except error as found:
        message = str(found)
    assert message is not None, f"no {error.__name__} was raised"
    assert re.sub(r"\.py:\d+", ".py:#", message) == text


def agree(got: Any, expected: Any, *, rtol: float = 1e-5) -> None:
    """Check that two trees have one structure and, nearly, one value in each leaf.

    Raises:
        AssertionError: they differ; by the leaf's path.
    """
    found, spec = pytree.flatten(got)
    wanted, wanted_spec = pytree.flatten(expected)
    assert spec == wanted_spec, f"{spec} is not {wanted_spec}"
    paths = pytree.leaf_paths(spec, "result")
    for path, a, b in zip(paths, found, wanted, strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert x.shape == y.shape, f"{path}: shape {x.shape} is not {y.shape}"
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=path)
