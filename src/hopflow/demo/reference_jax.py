"""The program of `kmeans.py` in JAX, line for line."""

from collections.abc import Callable
from typing import Any, TypeAlias

from hopflow.demo.kmeans import MAX_STEPS, TOLERANCE, Fit, Progress

Pair: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


def _step() -> tuple[Pair, Pair]:
    """Return `assign` and `improve` of `kmeans.py`."""
    import jax  # optional
    import jax.numpy as jnp
    from jax import lax

    def squared_distances(points: Any, centroids: Any) -> Any:
        return jnp.sum((points[:, None, :] - centroids[None, :, :]) ** 2, axis=2)

    def assign(points: Any, centroids: Any) -> tuple[Any, Any]:
        distances = squared_distances(points, centroids)
        return jnp.argmin(distances, axis=1), jnp.min(distances, axis=1)

    def reseed(points: Any, labels: Any, sums: Any, counts: Any, nearest: Any) -> Any:
        def move(carry: Any) -> Any:
            sums, counts, nearest = carry
            empty, farthest = jnp.argmin(counts), jnp.argmax(nearest)
            point, home = points[farthest], labels[farthest]
            sums = sums.at[home].add(-point).at[empty].set(point)
            counts = counts.at[home].add(-1.0).at[empty].set(1.0)
            return sums, counts, nearest.at[farthest].set(0.0)

        carry = (sums, counts, nearest)
        return lax.while_loop(lambda carry: jnp.any(carry[1] == 0.0), move, carry)[:2]

    def improve(points: Any, centroids: Any) -> tuple[Any, Any]:
        clusters = centroids.shape[0]
        labels, nearest = assign(points, centroids)
        sums = jax.ops.segment_sum(points, labels, clusters)
        counts = jax.ops.segment_sum(jnp.ones_like(nearest), labels, clusters)
        sums, counts = lax.cond(
            jnp.any(counts == 0.0),
            lambda: reseed(points, labels, sums, counts, nearest),
            lambda: (sums, counts),
        )
        return sums / counts[:, None], jnp.sum(nearest)

    return assign, improve


def jax_study(steps: int) -> Callable[[Any, Any], Any]:
    """Return `study` under `jax.jit`: f64[n, d], f64[r, k, d] -> the same results."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    assign, improve = _step()

    def fit(points: Any, init: Any) -> Fit:
        def unsettled(at: Progress) -> Any:
            return (at.moved > TOLERANCE) & (at.steps < MAX_STEPS)

        def step(at: Progress) -> Progress:
            centroids, _ = improve(points, at.centroids)
            moved = jnp.sqrt(jnp.max(jnp.sum((centroids - at.centroids) ** 2, axis=1)))
            return Progress(centroids, moved, at.steps + 1)

        start = Progress(init, jnp.inf, 0)
        end = lax.while_loop(unsettled, step, start)
        labels, nearest = assign(points, end.centroids)
        return Fit(end.centroids, labels, jnp.sum(nearest), end.steps)

    def history(points: Any, init: Any) -> Any:
        def step(centroids: Any, _: None) -> tuple[Any, Any]:
            return improve(points, centroids)

        return lax.scan(step, init, length=steps)[1]

    def study(points: Any, inits: Any) -> Any:
        return lax.map(lambda init: (fit(points, init), history(points, init)), inits)

    compiled: Callable[[Any, Any], Any] = jax.jit(study)
    return compiled
