"""k-means (Lloyd's algorithm), written with the operators: the program of the demo.

It assigns `n` points of `d` numbers to `k` clusters. A step is that of scikit-learn's
KMeans, also for empty clusters, so that the two can be compared.
"""

from typing import Any, NamedTuple

import hopflow as hf

TOLERANCE = 1e-6
MAX_STEPS = 300


class Progress(NamedTuple):
    """The carry: centroids, the largest move of one, the number of steps."""

    centroids: Any  # f64[k, d]
    moved: Any  # f64[]
    steps: Any  # i64[]


class Fit(NamedTuple):
    """The result of a run."""

    centroids: Any  # f64[k, d]
    labels: Any  # i64[n]
    inertia: Any  # f64[]: the sum of squared distances to the nearest centroid
    steps: Any  # i64[]


@hf.subgraph
def squared_distances(points: Any, centroids: Any) -> Any:
    """f64[n, d], f64[k, d] -> f64[n, k]; traced and compiled once, called twice."""
    return hf.sum((points[:, None, :] - centroids[None, :, :]) ** 2, axis=2)


def assign(points: Any, centroids: Any) -> tuple[Any, Any]:
    """Return the index of each point's nearest centroid, i64[n], and the squared
    distance, f64[n]."""
    distances = squared_distances(points, centroids)
    return hf.argmin(distances, axis=1), hf.min(distances, axis=1)


def reseed(points: Any, labels: Any, sums: Any, counts: Any, nearest: Any) -> Any:
    """Move the points farthest from their centroids into the empty clusters."""

    def move(sums: Any, counts: Any, nearest: Any) -> Any:
        empty, farthest = hf.argmin(counts), hf.argmax(nearest)
        point, home = points[farthest], labels[farthest]
        # These writes are local to the step, as a carry is a value.
        sums[home] -= point
        sums[empty] = point
        counts[home] -= 1.0
        counts[empty] = 1.0
        nearest[farthest] = 0.0
        return sums, counts, nearest

    carry = (sums, counts, nearest)
    return hf.while_loop(lambda _, counts, __: hf.any(counts == 0.0), move, carry)[:2]


def improve(points: Any, centroids: Any) -> tuple[Any, Any]:
    """Return the next centroids, f64[k, d], and the inertia of the old ones, f64[]."""
    clusters = centroids.shape[0]
    labels, nearest = assign(points, centroids)
    sums: Any = hf.segment_sum(points, labels, clusters)
    counts: Any = hf.segment_sum(hf.ones_like(nearest), labels, clusters)
    sums, counts = hf.cond(
        hf.any(counts == 0.0),
        lambda: reseed(points, labels, sums, counts, nearest),
        lambda: (sums, counts),
    )
    return sums / counts[:, None], hf.sum(nearest)


def fit(points: Any, init: Any) -> Fit:
    """Run Lloyd's algorithm until no centroid moves by more than `TOLERANCE`."""

    def unsettled(at: Progress) -> Any:
        return at.moved > TOLERANCE

    def step(at: Progress) -> Progress:
        centroids, _ = improve(points, at.centroids)
        moved = hf.sqrt(hf.max(hf.sum((centroids - at.centroids) ** 2, axis=1)))
        return Progress(centroids, moved, at.steps + 1)

    start = Progress(init, hf.inf, 0)
    end = hf.while_loop(unsettled, step, start, max_steps=MAX_STEPS)
    labels, nearest = assign(points, end.centroids)
    return Fit(end.centroids, labels, hf.sum(nearest), end.steps)


def history(points: Any, init: Any, steps: int) -> Any:
    """Return the inertia before each of the first `steps` steps, f64[steps]."""

    def step(centroids: Any, _: None) -> tuple[Any, Any]:
        return improve(points, centroids)

    return hf.scan(step, init, length=steps)[1]


def study(points: Any, inits: Any, steps: int) -> Any:
    """Return a fit, and its history, from each of several initial centroids.

    Args:
        points: f64[n, d]
        inits: f64[r, k, d]

    Returns:
        A `Fit` with an axis of `r` in front of each leaf, and f64[r, steps].
    """
    return hf.map(lambda init: (fit(points, init), history(points, init, steps)), inits)


def initial_centroids(points: Any, clusters: int, runs: int, seed: int) -> Any:
    """Return random points, each shifted by less than 1: f64[runs, clusters, d].

    The shift makes no point equally far from two centroids. The last centroid of the
    last run is so far away that no point is nearest to it.
    """
    inits: list[Any] = []
    keys: Any = hf.random.split(hf.random.key(seed), 2 * runs)
    for draw, shift in zip(keys[:runs], keys[runs:], strict=True):
        chosen: Any = hf.random.permutation(draw, points.shape[0])
        drawn: Any = hf.take(points, chosen[:clusters], axis=0)
        inits.append(drawn + hf.random.uniform(shift, drawn.shape, hf.float64))
    inits[-1][-1] = 1000.0
    return hf.stack(inits)
