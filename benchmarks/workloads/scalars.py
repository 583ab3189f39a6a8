"""Loops over scalars: what a step costs when there is hardly anything in it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    steps, lorenz_steps = size(1_000_000), size(100_000)
    numbers = np.arange(1, size(100_000) + 1)
    return [
        Workload(
            "while",
            lambda: lambda n: _decay(hf.while_loop, n, (0, 0.0)),
            lambda: (
                lambda n: lax.while_loop(
                    lambda c: c[0] < n,
                    lambda c: (c[0] + 1, c[1] * 0.999 + 1.0),
                    (jnp.int64(0), jnp.float32(0.0)),
                )
            ),
            (np.asarray(steps),),
            steps,
            1e-3,
            in_c=[],
            in_numba=True,
        ),
        Workload(
            "fori-cond",
            lambda: lambda n: hf.fori_loop(0, n, _hop_step, np.float32(1.0)),
            lambda: lambda n: lax.fori_loop(0, n, _lax_step, jnp.float32(1.0)),
            (np.asarray(steps),),
            steps,
            1e-3,
            in_c=[],
            in_numba=True,
        ),
        Workload(
            "lorenz",
            lambda: lambda s: hf.scan(lorenz_step(hf.stack), s, length=lorenz_steps)[1],
            lambda: (
                lambda s: lax.scan(lorenz_step(jnp.stack), s, length=lorenz_steps)[1]
            ),
            (np.array([1.0, 1.0, 1.0]),),
            lorenz_steps,
            # Chaotic: after some 2,000 steps a last bit has become everything.
            differing=max(0.0, 1 - 1000 / lorenz_steps),
            in_c=[lorenz_steps],
            in_numba=True,
        ),
        Workload(
            "collatz",
            lambda: lambda n: hf.map(hop_collatz, n),
            lambda: lambda n: lax.map(lax_collatz, n),
            (numbers,),
            len(numbers),
            in_c=[],
            in_numba=True,
        ),
        Workload(
            "mandelbrot",
            lambda: lambda x, y: hf.map(hop_escape, (x, y)),
            lambda: lambda x, y: lax.map(lax_escape, (x, y)),
            plane(size(512)),
            differing=1e-3,
            in_c=[],
            in_numba=True,
        ),
    ]


def _decay(loop: Any, n: Any, start: Any) -> Any:
    return loop(lambda i, _: i < n, lambda i, a: (i + 1, a * 0.999 + 1.0), start)


def _hop_step(i: Any, x: Any) -> Any:
    return hf.cond(i % 3 == 0, lambda: x * 1.0001, lambda: x + 0.5)


def _lax_step(i: Any, x: Any) -> Any:
    return lax.cond(i % 3 == 0, lambda v: v * 1.0001, lambda v: v + 0.5, x)


def lorenz_step(stack: Callable[..., Any], h: float = 0.01) -> Callable[..., Any]:
    """A step of the classical Runge-Kutta method; every state is kept."""

    def slope(s: Any) -> Any:
        x, y, z = s[0], s[1], s[2]
        return stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])

    def step(s: Any, _: Any) -> Any:
        k1 = slope(s)
        k2 = slope(s + h / 2 * k1)
        k3 = slope(s + h / 2 * k2)
        k4 = slope(s + h * k3)
        s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return s, s

    return step


def hop_collatz(n: Any) -> Any:
    def step(n: Any, trips: Any) -> Any:
        return hf.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), trips + 1

    return hf.while_loop(lambda n, _: n != 1, step, (n, 0))[1]


def lax_collatz(n: Any) -> Any:
    def step(c: Any) -> Any:
        n, trips = c
        n = lax.cond(n % 2 == 0, lambda m: m // 2, lambda m: 3 * m + 1, n)
        return n, trips + 1

    return lax.while_loop(lambda c: c[0] != 1, step, (n, 0))[1]


def plane(n: int) -> tuple[Any, Any]:
    x, y = np.meshgrid(np.linspace(-2.0, 0.6, n), np.linspace(-1.3, 1.3, n))
    return x.ravel(), y.ravel()


_ESCAPE = 256


def _orbit(cx: Any, cy: Any, zx: Any, zy: Any) -> Any:
    return zx * zx - zy * zy + cx, 2.0 * zx * zy + cy


def hop_escape(c: Any) -> Any:
    cx, cy = c

    def goes_on(zx: Any, zy: Any, k: Any) -> Any:
        return (zx * zx + zy * zy < 4.0) & (k < _ESCAPE)

    def step(zx: Any, zy: Any, k: Any) -> Any:
        return (*_orbit(cx, cy, zx, zy), k + 1)

    return hf.while_loop(goes_on, step, (cx * 0.0, cy * 0.0, 0))[2]


def lax_escape(c: Any) -> Any:
    cx, cy = c

    def goes_on(s: Any) -> Any:
        return (s[0] * s[0] + s[1] * s[1] < 4.0) & (s[2] < _ESCAPE)

    def step(s: Any) -> Any:
        return (*_orbit(cx, cy, s[0], s[1]), s[2] + 1)

    return lax.while_loop(goes_on, step, (cx * 0.0, cy * 0.0, 0))[2]
