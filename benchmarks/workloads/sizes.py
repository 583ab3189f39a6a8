"""Many sizes through one function, and numbers that change from call to call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Arrays, Calls
from benchmarks.workloads.recurrent import HIDDEN, lstm_forward

WIDTH = 32


def all_calls(size: Callable[[int], int]) -> list[Calls]:
    """The rows; `size` says how much of a number of steps or calls is done."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype("f")

    count = size(50)
    # One is among them, and neither the first size nor the second.
    sizes = [*range(2, count // 2 + 2), 1, *range(count // 2 + 2, count + 1)]
    gates = normal(HIDDEN, 4 * HIDDEN), normal(HIDDEN, 4 * HIDDEN), normal(4 * HIDDEN)
    weights = [normal(WIDTH, WIDTH) for _ in range(3)]
    centroids = normal(4, 8)

    def calls(args: Callable[[int], Arrays]) -> list[tuple[Any, ...]]:
        return [args(n) for n in sizes]

    return [
        Calls(
            "sizes-lstm",
            lambda: lstm_forward(hf.scan, hf.sigmoid, hf.tanh, hf.zeros),
            lambda: lstm_forward(lax.scan, jax.nn.sigmoid, jnp.tanh, jnp.zeros),
            calls(lambda n: (normal(10, n, HIDDEN), *gates)),
        ),
        Calls(
            "sizes-kmeans",
            lambda: _kmeans(hf, hf.fori_loop, hf.segment_sum),
            lambda: _kmeans(jnp, lax.fori_loop, jax.ops.segment_sum),
            calls(lambda n: (normal(n, 8), centroids)),
        ),
        Calls(
            "sizes-attention",
            lambda: _attention(hf),
            lambda: _attention(jnp),
            calls(lambda n: (normal(n, 16, WIDTH), *weights)),
        ),
        Calls(
            "call-sizes",
            lambda: lambda x: x + 1,
            lambda: lambda x: x + 1,
            calls(lambda n: (np.zeros(n, "f"),)),
            warm=True,
        ),
        Calls(
            "call-numbers",
            lambda: lambda x, n, rate: x * rate + n,
            lambda: lambda x, n, rate: x * rate + n,
            [(np.zeros(8, "f"), n, n * 0.5) for n in sizes],
            warm=True,
        ),
    ]


def _kmeans(np_: Any, fori_loop: Any, segment_sum: Any) -> Callable[..., Any]:
    """Ten steps of Lloyd's algorithm; a centroid without points becomes 0."""

    def fit(points: Any, centroids: Any) -> Any:
        def step(_: Any, centroids: Any) -> Any:
            apart = points[:, None, :] - centroids[None, :, :]
            labels = np_.argmin(np_.sum(apart**2, axis=2), axis=1)
            sums = segment_sum(points, labels, centroids.shape[0])
            ones = np_.ones_like(points[:, 0])
            counts = segment_sum(ones, labels, centroids.shape[0])
            return sums / np_.maximum(counts, 1.0)[:, None]

        return fori_loop(0, 10, step, centroids)

    return fit


def _attention(np_: Any) -> Callable[..., Any]:
    """One head over a batch of sequences."""

    def attend(x: Any, w: Any, u: Any, v: Any) -> Any:
        scores = (x @ w) @ (x @ u).mT * WIDTH**-0.5
        weights = np_.exp(scores - np_.max(scores, axis=-1, keepdims=True))
        return weights / np_.sum(weights, axis=-1, keepdims=True) @ (x @ v)

    return attend
