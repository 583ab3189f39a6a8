"""Exported programs as ONNX models, in onnxruntime."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from property_tests.targets.native import has_larger_sizes
from property_tests.targets.running import IsRight, Run, is_close, run

from hopflow.testing.onnx_models import Outcome, Session


def _are_alike(found: Outcome, expected: Run) -> bool:
    """Whether the results have the same shapes."""
    wanted = [*expected.results, *expected.written]
    return [x.shape for x in found.results] == [np.shape(x) for x in wanted]


def check(
    program: Any, values: Sequence[Any], dynamic: bool | None, is_right: IsRight
) -> None:
    """Compare a program with its model: what it gives, what it writes, what it stops
    at.

    A model computes sizes in int64, where numbers wrap around that Python's do not.
    """
    found = Session(program.to_onnx())(*map(np.array, values))
    expected = run(program, values)
    if dynamic and not expected.error and not _are_alike(found, expected):
        assert has_larger_sizes(program, values), (found, expected)
        return
    assert bool(found.failed) is bool(expected.error), (found.failed, expected.error)
    if expected.error:
        return
    results = [*expected.results, *expected.written]
    if not is_close(program, found.results, results):
        assert is_right(found.results[: len(expected.results)]), (found, expected)
