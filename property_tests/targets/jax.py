"""Exported programs as functions of JAX."""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from property_tests.targets.running import IsRight, is_close, run

from hopflow import pytree
from hopflow.dtypes import as_dtype, finfo
from hopflow.errors import ExportError
from hopflow.testing.requires import load

UNKNOWN: Final = "only the run|change sizes|computed from a number that JAX traces"
"""What is said of sizes that JAX cannot know."""


def check(
    program: Any, values: Sequence[Any], _dynamic: bool | None, is_right: IsRight
) -> None:
    """Compare a program with its function of JAX: what it gives, what it writes, what
    it stops at."""
    jax = load("jax")
    values = [_without_subnormals(np.array(x)) for x in values]
    try:
        with jax.enable_x64(True):
            function = program.to_jax(asserts="checkify")
            run_jax = jax.jit(jax.experimental.checkify.checkify(function))
            error, results = run_jax(*map(np.array, values))
    except ExportError as refused:
        if not re.search(UNKNOWN, str(refused)):
            raise
        return
    expected = run(program, values)
    assert bool(error.get()) is bool(expected.error), (error.get(), expected.error)
    if expected.error:
        return
    results, written = results if program.signature.written else (results, {})
    found = [np.asarray(x) for x in pytree.flatten(results)[0]]
    after = [np.asarray(x) for x in written.values()]
    arrays = [*expected.results, *expected.written]
    if not is_close(program, [*found, *after], arrays, flushed=True):
        assert is_right(found), (found, expected)


def _without_subnormals(x: Any) -> Any:
    """An array with 0 for subnormal numbers, for which XLA takes them."""
    dtype = as_dtype(x.dtype)
    if not dtype.is_float:
        return x
    least = float(finfo(dtype).smallest_normal)
    return np.where(np.abs(x.astype(np.float64)) < least, 0, x).astype(x.dtype)
