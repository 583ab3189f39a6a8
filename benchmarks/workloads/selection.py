"""Sorting, selecting, counting, looking up."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=size(1_000_000))
    floats = numbers.astype("f")
    batch = rng.normal(size=(size(1000), 1000)).astype("f")
    queries, points = rng.normal(size=(size(1000), 3)), rng.normal(size=(5000, 3))
    return [
        row("sort", lambda lib: lib.np.sort, (numbers,), in_c=[]),
        row("argsort", lambda lib: lib.np.argsort, (floats,), in_c=[]),
        row("top-k", lambda lib: lambda x: lib.top_k(x, 10)[0], (batch,), in_c=[]),
        row("median-filter", _median_filter, (floats,), in_c=[], in_numba=True),
        row("histogram", _histogram, (numbers,), in_c=[], in_numba=True),
        row("quantiles", _quantiles, (numbers,), in_c=[]),
        row("nearest", _nearest, (queries, points), in_c=[], in_numba=True),
        row("running-max", _drawdown, (numbers,), in_c=[], in_numba=True),
    ]


def _median_filter(lib: Any) -> Callable[..., Any]:
    """The median of each five neighbours."""

    def medians(x: Any) -> Any:
        n = x.shape[0]
        wide = lib.np.concat([x[:1], x[:1], x, x[-1:], x[-1:]])
        windows = lib.np.stack([wide[k : k + n] for k in range(5)])
        return lib.np.sort(windows, axis=0)[2]

    return medians


def _histogram(lib: Any) -> Callable[..., Any]:
    """Counts in 256 bins."""

    def counts(x: Any) -> Any:
        bins = lib.np.clip((x + 4.0) * 32.0, 0.0, 255.0).astype(np.int32)
        return lib.segment_sum(lib.np.ones_like(bins), bins, 256)

    return counts


def _quantiles(lib: Any) -> Callable[..., Any]:
    """To which tenth of the numbers each belongs."""

    def tenths(x: Any) -> Any:
        ordered = lib.np.sort(x)
        n = x.shape[0]
        edges = lib.np.stack([ordered[n * k // 10] for k in range(1, 10)])
        return lib.np.searchsorted(edges, x).astype(np.int32)

    return tenths


def _nearest(lib: Any) -> Callable[..., Any]:
    """For each query the nearest point."""

    def indices(queries: Any, points: Any) -> Any:
        apart = queries[:, None, :] - points[None, :, :]
        return lib.np.argmin(lib.np.sum(apart * apart, axis=2), axis=1)

    return indices


def _drawdown(lib: Any) -> Callable[..., Any]:
    """The largest fall from a maximum so far."""

    def step(carry: Any, change: Any) -> Any:
        total, most, fall = carry
        total = total + change
        most = lib.np.maximum(most, total)
        return (total, most, lib.np.maximum(fall, most - total)), None

    return lambda x: lib.scan(step, (x[0] * 0.0,) * 3, x)[0][2]
