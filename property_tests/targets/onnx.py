"""Exported programs as ONNX models, in onnxruntime."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from property_tests.targets.native import has_larger_sizes
from property_tests.targets.running import IsRight, is_close, run

from hopflow.testing.onnx_models import Session


def check(
    program: Any, values: Sequence[Any], dynamic: bool | None, is_right: IsRight
) -> None:
    """Compare a program with its model: what it gives, what it writes, what it stops
    at.

    A model fails where int64 cannot hold a number that its sizes depend on.
    """
    found = Session(program.to_onnx())(*map(np.array, values))
    expected = run(program, values)
    if dynamic and found.failed and not expected.error:
        assert has_larger_sizes(program, values), found.failed
        return
    assert bool(found.failed) is bool(expected.error), (found.failed, expected.error)
    if expected.error:
        return
    results = [*expected.results, *expected.written]
    if not is_close(program, found.results, results):
        assert is_right(found.results[: len(expected.results)]), (found, expected)
