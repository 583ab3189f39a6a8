"""Rows of few elements: stacks of small matrices, logits, and columns of a table."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    tracks = rng.normal(size=(size(50), size(500), 3))
    chains = rng.normal(size=(size(2000), 12, 12)).astype("f") / 4
    logits = rng.normal(size=(size(50_000), 12)).astype("f")
    labels = rng.integers(0, 12, len(logits)).astype("i4")
    table = rng.normal(size=(size(100_000), 10)).astype("f")
    return [
        row("kalman-batch", _filters, (tracks,), steps=len(tracks), rtol=1e-6),
        row("matrix-exponentials", _exponentials, (chains,), rtol=1e-3),
        row("cross-entropy", _cross_entropy, (logits, labels), rtol=1e-3),
        row("cross-entropy-grad", _gradient, (logits, labels), rtol=1e-3),
        row("standardise", _standardise, (table,), rtol=1e-2, differing=1e-3),
    ]


def _filters(lib: Any) -> Callable[..., Any]:
    """Many Kalman filters at once, each of six states and three observations."""
    move = np.eye(6) + np.eye(6, k=3) * 0.1
    look = np.eye(3, 6)

    def run(seen: Any) -> Any:
        a, c = lib.np.asarray(move), lib.np.asarray(look)
        noise = lib.np.asarray(0.01 * np.eye(6))

        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = x @ a.T, a @ p @ a.T + noise
            # The observations are independent of each other: one after the other.
            for k in range(3):
                row = p[:, k]
                gain = row / (row[:, k] + 0.5)[:, None]
                x = x + gain * (z[:, k] - x @ c[k])[:, None]
                p = p - gain[:, :, None] * row[:, None, :]
            return (x, p), lib.np.sum(x[:, :3], axis=1)

        count = seen.shape[1]
        x = lib.np.zeros((count, 6), dtype=np.float64)
        start = x, x[:, :, None] + np.eye(6)
        return lib.scan(step, start, seen)[1]

    return run


def _exponentials(lib: Any) -> Callable[..., Any]:
    """The exponentials of many small matrices, by a Taylor series and squaring."""

    def run(a: Any) -> Any:
        a = a / 16.0
        term = total = a * 0.0 + np.eye(a.shape[-1], dtype=np.float32)
        for k in range(1, 7):
            term = term @ a / k
            total = total + term
        for _ in range(4):
            total = total @ total
        return total

    return run


def _loss(lib: Any, logits: Any, labels: Any) -> Any:
    high = lib.np.max(logits, axis=1, keepdims=True)
    z = logits - high
    total = lib.np.log(lib.np.sum(lib.np.exp(z), axis=1))
    chosen = lib.np.take_along_axis(z, labels[:, None], axis=1)[:, 0]
    return lib.np.mean(total - chosen)


def _cross_entropy(lib: Any) -> Callable[..., Any]:
    """The loss of a classifier, and how often it is right."""

    def run(logits: Any, labels: Any) -> Any:
        right = lib.np.argmax(logits, axis=1) == labels
        return _loss(lib, logits, labels), lib.np.sum(right)

    return run


def _gradient(lib: Any) -> Callable[..., Any]:
    gradient: Callable[..., Any] = lib.grad(lambda x, labels: _loss(lib, x, labels))
    return gradient


def _standardise(lib: Any) -> Callable[..., Any]:
    """The columns of a table, of mean 0 and variance 1, within three deviations."""

    def run(table: Any) -> Any:
        centred = table - lib.np.mean(table, axis=0)
        scaled = centred / lib.np.sqrt(lib.np.mean(centred * centred, axis=0))
        return lib.np.clip(scaled, -3.0, 3.0), lib.np.max(lib.np.abs(scaled), axis=0)

    return run
