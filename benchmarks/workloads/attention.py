"""Causal attention of eight heads, forward and backward: no matrix of all scores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hopflow as hf
from benchmarks.workload import Arrays, Workload

HEADS, FEATURES = 8, 64


def workloads(size: Callable[[int], int]) -> list[Workload]:
    args = _args(size(1024))

    def squares(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (f(*args) ** 2).mean()

    return [
        Workload("attention", lambda: attend, lambda: attend_jax, args, rtol=1e-4),
        Workload(
            "grad-attention",
            lambda: hf.grad(squares(attend), (0, 1, 2)),
            lambda: jax.grad(squares(attend_jax), (0, 1, 2)),
            args,
            rtol=1e-3,
        ),
    ]


def _args(length: int) -> Arrays:
    """Queries, keys and values."""
    rng = np.random.default_rng(0)
    shape = 3, 1, HEADS, length, FEATURES
    return tuple(rng.normal(size=shape).astype("f"))


def attend(q: Any, k: Any, v: Any) -> Any:
    return hf.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j)


def attend_jax(q: Any, k: Any, v: Any) -> Any:
    scores = q @ jnp.swapaxes(k, 2, 3) / FEATURES**0.5
    kept = jnp.tri(q.shape[2], dtype=bool)
    return jax.nn.softmax(jnp.where(kept, scores, -jnp.inf), axis=3) @ v
