"""Sparse matrices and graphs as lists of edges."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    nodes, edges = size(100_000), size(1_000_000)
    heads, tails = (rng.integers(0, nodes, edges) for _ in range(2))
    order = np.argsort(heads, kind="stable")
    heads, tails = heads[order], tails[order]
    values, x = rng.normal(size=edges), rng.normal(size=nodes)
    degrees = np.maximum(np.bincount(tails, minlength=nodes), 1).astype(float)
    features = rng.normal(size=(nodes, 16)).astype("f")
    weight = (rng.normal(size=(16, 16)) / 4).astype("f")
    return [
        row(
            "spmv",
            _product,
            (heads, tails, values, x),
            rtol=1e-4,
            differing=0.001,
            in_c=[],
            in_numba=True,
        ),
        row(
            "pagerank",
            _pagerank,
            (heads, tails, degrees),
            steps=20,
            in_c=[20],
            in_numba=True,
        ),
        row(
            "message-passing",
            _messages,
            (heads, tails, features, weight),
            rtol=1e-3,
            in_c=[],
            in_numba=True,
        ),
        row(
            "components",
            _components,
            (heads, tails, np.arange(nodes)),
            in_c=[],
            in_numba=True,
        ),
    ]


def _product(lib: Any) -> Callable[..., Any]:
    """A matrix in coordinates times a vector."""
    return lambda heads, tails, values, x: lib.segment_sum(
        values * x[tails], heads, x.shape[0]
    )


def _pagerank(lib: Any) -> Callable[..., Any]:
    def ranks(heads: Any, tails: Any, degrees: Any) -> Any:
        n = degrees.shape[0]

        def step(_: Any, rank: Any) -> Any:
            flow = lib.segment_sum((rank / degrees)[tails], heads, n)
            return 0.15 / n + 0.85 * flow

        return lib.fori_loop(0, 20, step, lib.np.ones_like(degrees) / n)

    return ranks


def _messages(lib: Any) -> Callable[..., Any]:
    """A layer of a graph network: the sum of what neighbours say."""

    def layer(heads: Any, tails: Any, features: Any, weight: Any) -> Any:
        sums = lib.segment_sum(features[tails], heads, features.shape[0])
        return lib.np.tanh(sums @ weight)

    return layer


def _components(lib: Any) -> Callable[..., Any]:
    """Labels of connected components: the least label spreads until none changes."""

    def labels(heads: Any, tails: Any, own: Any) -> Any:
        def step(label: Any, _: Any, k: Any) -> Any:
            new = label.at[heads].min(label[tails]).at[tails].min(label[heads])
            return new, lib.np.any(new != label), k + 1

        def goes_on(_: Any, changes: Any, k: Any) -> Any:
            return changes & (k < 50)

        return lib.while_loop(goes_on, step, (own, own[0] == own[0], 0))[0]

    return labels
