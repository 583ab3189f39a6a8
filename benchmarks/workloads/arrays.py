"""Loops over arrays: in place, rolled, stacked, multiplied."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    steps, length, wide = size(100_000), size(1_000_000), size(1_000_000)
    decay = rng.uniform(0.5, 1.0, length).astype("f")
    drive = rng.normal(size=length).astype("f")
    matrix = rng.normal(size=(64, 64)) / 16 + np.eye(64)
    iterations = size(200)
    return [
        Workload(
            "in-place",
            lambda: lambda x: hf.fori_loop(0, steps, _hop_write, x),
            lambda: lambda x: lax.fori_loop(0, steps, _lax_write, x),
            (rng.normal(size=1000).astype("f"),),
            steps,
            in_c=[steps],
            in_numba=True,
        ),
        Workload(
            "sin-roll",
            lambda: (
                lambda x: hf.fori_loop(
                    0, steps, lambda _, a: hf.roll(hf.sin(a), 1) + 0.5, x
                )
            ),
            lambda: (
                lambda x: lax.fori_loop(
                    0, steps, lambda _, a: jnp.roll(jnp.sin(a), 1) + 0.5, x
                )
            ),
            (rng.normal(size=16),),
            steps,
        ),
        Workload(
            "tanh-scan",
            lambda: lambda x: hf.scan(_each(hf.tanh), x, length=100)[0],
            lambda: lambda x: lax.scan(_each(jnp.tanh), x, length=100)[0],
            (rng.normal(size=wide).astype("f"),),
            rtol=1e-3,
            in_c=[],
            in_numba=True,
        ),
        Workload(
            "recurrence-scan",
            lambda: lambda a, b: hf.scan(_recur, np.float32(0), (a, b))[1],
            lambda: lambda a, b: lax.scan(_recur, jnp.float32(0), (a, b))[1],
            (decay, drive),
            rtol=1e-3,
            in_c=[],
            in_numba=True,
        ),
        Workload(
            "recurrence-associative",
            lambda: lambda a, b: hf.associative_scan(_compose, (a, b))[1],
            lambda: lambda a, b: lax.associative_scan(_compose, (a, b))[1],
            (decay, drive),
            rtol=1e-2,
        ),
        Workload(
            "newton-schulz",
            lambda: (
                lambda a: hf.fori_loop(0, iterations, _schulz(a, hf.eye), a.T * 0.1)
            ),
            lambda: (
                lambda a: lax.fori_loop(0, iterations, _schulz(a, jnp.eye), a.T * 0.1)
            ),
            (matrix,),
            iterations,
            1e-6,
            in_c=[iterations],
        ),
    ]


def _hop_write(i: Any, a: Any) -> Any:
    a[i % 1000] = a[(i + 1) % 1000] * 0.5 + 1.0
    return a


def _lax_write(i: Any, a: Any) -> Any:
    return a.at[i % 1000].set(a[(i + 1) % 1000] * 0.5 + 1.0)


def _each(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, _: (f(x), None)


def _recur(h: Any, x: Any) -> Any:
    h = x[0] * h + x[1]
    return h, h


def _compose(x: Any, y: Any) -> Any:
    return x[0] * y[0], y[0] * x[1] + y[1]


def _schulz(a: Any, eye: Callable[..., Any]) -> Callable[..., Any]:
    def step(_: Any, x: Any) -> Any:
        return x @ (2.0 * eye(64, dtype=x.dtype) - a @ x)

    return step
