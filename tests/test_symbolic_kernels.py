"""One kernel for every size: graphs over hand-made symbols, compiled once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes, pytree
from hopflow.compiler.pipeline import Executable
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import symbol
from hopflow.tensor import EagerTensor

pytestmark = pytest.mark.slow

N, M = symbol("n"), symbol("m")
MATRIX = TensorType(dtypes.float32, (N, M))
SIZES = [(3, 4), (1, 1), (17, 70), (2, 0), (0, 5)]

PROGRAMS: dict[str, Callable[..., Any]] = {
    "fused": lambda x, y: (hf.sin(x) * y, hf.sum(x * y), hf.sum(x, axis=0)),
    "product": lambda x, y: x.T @ y,
    "flattened": lambda x, y: (hf.reshape(x, (-1,)) * 2, hf.concat([x, y], axis=0)),
    "sorted": lambda x, y: (hf.sort(x, axis=1), hf.cumulative_sum(y, axis=1)),
    "while": lambda x, y: hf.while_loop(
        lambda i, _: i < x.shape[0],
        lambda i, a: (i + 1, hf.roll(a, 1, axis=1) + y),
        (0, x),
    ),
    "scan": lambda x, y: hf.scan(
        lambda c, r: (c + r * 2, c.sum()), hf.sum(x, axis=0), y
    ),
    "map": lambda x, y: hf.map(lambda r: hf.sum(r) + y, x),
    "cond": lambda x, y: hf.cond(hf.sum(x) > 0, lambda: x + y, lambda: x * y),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_over_symbols_serves_every_size(name: str) -> None:
    f = PROGRAMS[name]
    compiled = Executable(hf.trace(f, MATRIX, MATRIX, mode="fake").graph)
    rng = np.random.default_rng(0)
    for shape in SIZES:
        x, y = (EagerTensor(rng.normal(size=shape).astype("f")) for _ in range(2))
        found = compiled([x, y])
        with hf.debug():
            expected = pytree.flatten(f(x, y))[0]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-4, atol=1e-4)
