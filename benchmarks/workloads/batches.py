"""`vmap` of loops: each example takes as many steps as it needs."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Workload
from benchmarks.workloads.scalars import (
    hop_collatz,
    hop_escape,
    lax_collatz,
    lax_escape,
    plane,
)


def workloads(size: Callable[[int], int]) -> list[Workload]:
    numbers = np.arange(1, size(100_000) + 1)
    return [
        Workload(
            "vmap-mandelbrot",
            lambda: lambda x, y: hf.vmap(hop_escape)((x, y)),
            lambda: lambda x, y: jax.vmap(lax_escape)((x, y)),
            plane(size(512)),
            differing=1e-3,
            lax_map=lambda: lambda x, y: lax.map(lax_escape, (x, y)),
            in_c=[],
        ),
        Workload(
            "vmap-collatz",
            lambda: hf.vmap(hop_collatz),
            lambda: jax.vmap(lax_collatz),
            (numbers,),
            len(numbers),
            lax_map=lambda: lambda n: lax.map(lax_collatz, n),
            in_c=[],
        ),
        Workload(
            "vmap-heavy-tail",
            lambda: hf.vmap(_hop_decay),
            lambda: jax.vmap(_lax_decay),
            (_heavy_tail(size(4096)),),
            lax_map=lambda: lambda n: lax.map(_lax_decay, n),
            in_c=[],
        ),
    ]


def _heavy_tail(lanes: int) -> Any:
    """Trip counts: of mean 88, and the largest 20,000."""
    rng = np.random.default_rng(0)
    counts = np.minimum(20_000, 22 * (1 + rng.pareto(1.3, lanes))).astype(np.int64)
    counts[lanes // 2] = 20_000
    return counts


def _hop_decay(n: Any) -> Any:
    def step(k: Any, x: Any) -> Any:
        return k + 1, x * 0.999 + 1.0

    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(0.0)))[1]


def _lax_decay(n: Any) -> Any:
    def step(c: Any) -> Any:
        return c[0] + 1, c[1] * 0.999 + 1.0

    return lax.while_loop(lambda c: c[0] < n, step, (0, np.float64(0.0)))[1]
