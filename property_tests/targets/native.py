"""Exported programs as native code, called as C functions."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from property_tests.targets.running import IsRight, run

import hopflow as hf
from hopflow.errors import ExportError
from hopflow.testing.native_code import run_native

_TOO_LARGE: Final = "int64 cannot hold"


def has_larger_sizes(program: Any, values: Sequence[Any]) -> bool:
    """Whether native code says that a number of its sizes is beyond int64."""
    try:
        return _TOO_LARGE in run_native(program, *map(np.array, values)).text
    except ExportError:
        return False


def check(
    program: Any, values: Sequence[Any], dynamic: bool | None, _is_right: IsRight
) -> None:
    """Compare a program with its native code: the bits of what it gives and writes are
    those of the jitted program, and so is what it says when it stops.

    Native code computes sizes in int64, and stops where one of the numbers that a size
    or a constraint depends on does not fit. Python's integers have no end.
    """
    try:
        found = run_native(program, *map(np.array, values))
    except ExportError as refused:
        if "calls LAPACK's" not in str(refused):
            raise
        return
    expected = run(program, values, hf.jit(program, dynamic=dynamic))
    if expected.error:
        first, second = map(str, found.details)
        text = found.text.replace("{0}", first).replace("{1}", second)
        assert text == expected.error
        return
    if dynamic and _TOO_LARGE in found.text:
        return
    assert found.status == 0, found.text
    arrays = [*expected.new, *expected.written]
    for x, y in zip(found.results, arrays, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes(), (x, y)
