"""k-means (Lloyd's algorithm), written with the operators: the program of the demo.

`n` points of `d` numbers are put into `k` clusters. A step does what scikit-learn's
KMeans does, with clusters that have lost all their points too, so that the two can be
compared.
"""

from typing import Any, NamedTuple

import hopflow as hf

TOLERANCE = 1e-6
MAX_STEPS = 300


class Progress(NamedTuple):
    """The carry of the loop: centroids, how far one moved at most, steps so far."""

    centroids: Any  # f64[k, d]
    moved: Any  # f64[]
    steps: Any  # i64[]


class Fit(NamedTuple):
    """Where one run ended."""

    centroids: Any  # f64[k, d]
    labels: Any  # i64[n]
    inertia: Any  # f64[]: the sum of squared distances to the nearest centroid
    steps: Any  # i64[]


@hf.subgraph
def squared_distances(points: Any, centroids: Any) -> Any:
    """f64[n, d], f64[k, d] -> f64[n, k]; traced and compiled once, called twice."""
    return hf.sum((points[:, None, :] - centroids[None, :, :]) ** 2, axis=2)


def assign(points: Any, centroids: Any) -> tuple[Any, Any]:
    """The nearest centroid of each point, i64[n], and its squared distance, f64[n]."""
    distances = squared_distances(points, centroids)
    return hf.argmin(distances, axis=1), hf.min(distances, axis=1)


def reseed(points: Any, labels: Any, sums: Any, counts: Any, nearest: Any) -> Any:
    """Move the points farthest from their centroids into the empty clusters."""

    def move(sums: Any, counts: Any, nearest: Any) -> Any:
        empty, farthest = hf.argmin(counts), hf.argmax(nearest)
        point, home = points[farthest], labels[farthest]
        # These writes stay in this step: a carry is a value.
        sums[home] -= point
        sums[empty] = point
        counts[home] -= 1.0
        counts[empty] = 1.0
        nearest[farthest] = 0.0
        return sums, counts, nearest

    carry = (sums, counts, nearest)
    return hf.while_loop(lambda _, counts, __: hf.any(counts == 0.0), move, carry)[:2]


def improve(points: Any, centroids: Any) -> tuple[Any, Any]:
    """One step: the means of the clusters, f64[k, d], and the inertia before, f64[]."""
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
    """Lloyd's algorithm, until no centroid moves by more than `TOLERANCE`."""

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
    """The inertia before each of the first `steps` steps from `init`, f64[steps]."""

    def step(centroids: Any, _: None) -> tuple[Any, Any]:
        return improve(points, centroids)

    return hf.scan(step, init, length=steps)[1]


def study(points: Any, inits: Any, steps: int) -> Any:
    """A fit, and its history, from each of several initial centroids.

    Args:
        points: f64[n, d]
        inits: f64[r, k, d]

    Returns:
        A `Fit` with an axis of `r` in front of each leaf, and f64[r, steps].
    """
    return hf.map(lambda init: (fit(points, init), history(points, init, steps)), inits)


def initial_centroids(points: Any, clusters: int, runs: int, seed: int) -> Any:
    """f64[runs, clusters, d]: points drawn at random, each shifted by less than 1.

    With the shift no point is equally far from two of them. The last centroid of the
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
