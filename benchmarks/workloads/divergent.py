"""Loops over examples that take different ways, in both float types, and gradients.

They are written once: `lib` has the functions of either library.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.libraries import HOPFLOW, JAX
from benchmarks.workload import Workload
from benchmarks.workloads.scalars import plane


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    grid = plane(size(512))
    numbers = rng.uniform(1.0, 1e6, size(100_000))
    starts = rng.uniform(0.5, 2.0, (2, size(10_000)))
    table = np.sort(rng.uniform(0.0, 1.0, size(1_000_000)))
    wanted = rng.uniform(0.0, 1.0, size(100_000))
    rows = [
        _row("gang-collatz", _collatz, (np.arange(1, size(262_144) + 1),)),
    ]
    for dtype in (np.float64, np.float32):
        name = f"f{np.finfo(dtype).bits}"
        points = tuple(x.astype(dtype) for x in grid)
        roots = (numbers.astype(dtype),)
        orbits = tuple(x.astype(dtype) for x in starts)
        seeds = rng.integers(1, 2**63, size(10_000), dtype=np.uint64)
        rows += [
            _row(f"gang-escape-{name}", _escape, points, differing=0.01),
            _row(f"gang-root-{name}", _cube_root, roots),
            _row(f"gang-orbit-{name}", _orbit, orbits, rtol=1e-3, differing=0.01),
            _search_row(
                f"gang-search-{name}", wanted.astype(dtype), table.astype(dtype)
            ),
            _row(
                f"gang-walk-{name}", _walk(dtype), (seeds, np.zeros(len(seeds), dtype))
            ),
            _gradient(f"gang-grad-root-{name}", _cube_root, roots),
        ]
    return rows


def _row(name: str, one: Callable[..., Any], args: Any, **options: Any) -> Workload:
    """`one` of a library gives the function of an example."""
    _, kind, *_ = name.split("-")
    return Workload(
        name,
        lambda: hf.vmap(one(HOPFLOW)),
        lambda: jax.vmap(one(JAX)),
        args,
        lax_map=lambda: _lax_map(one(JAX)),
        dr_jit=kind,
        in_c=[],
        in_numba=True,
        **options,
    )


def _gradient(name: str, one: Callable[..., Any], args: Any) -> Workload:
    """JAX has no gradient of such loops in reverse: it gets the tangents, forward."""

    def ours() -> Callable[..., Any]:
        return hf.grad(lambda x: hf.sum(hf.vmap(one(HOPFLOW))(x)))

    def tangent(x: Any) -> Any:
        return jax.jvp(one(JAX), (x,), (jnp.ones_like(x),))[1]

    return Workload(
        name,
        ours,
        lambda: jax.vmap(tangent),
        args,
        rtol=1e-3,
        lax_map=lambda: _lax_map(tangent),
        dr_jit="grad_root",
        in_c=[],
    )


def _search_row(name: str, wanted: Any, table: Any) -> Workload:
    def ours() -> Callable[..., Any]:
        return lambda ws, xs: hf.vmap(lambda w: _search(HOPFLOW, w, xs))(ws)

    def theirs(mapped: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ws, xs: mapped(lambda w: _search(JAX, w, xs))(ws)

    return Workload(
        name,
        ours,
        lambda: theirs(jax.vmap),
        (wanted, table),
        lax_map=lambda: theirs(_lax_map),
        dr_jit="search",
        in_c=[],
        in_numba=True,
    )


def _lax_map(one: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap(one)` by a loop over the batch elements."""
    return lambda *args: lax.map(lambda each: one(*each), args)


# --- functions of an example ----------------------------------------------------------


def _escape(lib: Any) -> Callable[..., Any]:
    """After how many steps a point has left the circle of radius 2."""

    def one(cx: Any, cy: Any) -> Any:
        def goes_on(x: Any, y: Any, k: Any) -> Any:
            return (x * x + y * y < 4.0) & (k < 256)

        def step(x: Any, y: Any, k: Any) -> Any:
            return x * x - y * y + cx, 2.0 * x * y + cy, k + 1

        return lib.while_loop(goes_on, step, (cx * 0.0, cy * 0.0, 0))[2]

    return one


def _collatz(lib: Any) -> Callable[..., Any]:
    """In how many steps a number comes to 1."""

    def step(n: Any, k: Any) -> Any:
        n = lib.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
        return n, k + 1

    return lambda n: lib.while_loop(lambda n, _: n != 1, step, (n, 0))[1]


def _cube_root(lib: Any) -> Callable[..., Any]:
    """Newton's method."""

    def one(a: Any) -> Any:
        eps = 4.0 * float(np.finfo(np.dtype(a.dtype.name)).eps)

        def goes_on(x: Any, old: Any, k: Any) -> Any:
            return (lib.np.abs(x - old) > eps * x) & (k < 100)

        def step(x: Any, _: Any, k: Any) -> Any:
            return (2.0 * x + a / (x * x)) / 3.0, x, k + 1

        return lib.while_loop(goes_on, step, (a, a * 0.0, 0))[0]

    return one


def _orbit(lib: Any) -> Callable[..., Any]:
    """Van der Pol's oscillator by Bogacki and Shampine's pair, in steps as long as the
    error allows."""

    def slope(x: Any, v: Any) -> Any:
        return v, 2.0 * (1.0 - x * x) * v - x

    def goes_on(t: Any, _x: Any, _v: Any, _h: Any, k: Any) -> Any:
        return (t < 5.0) & (k < 1000)

    def step(t: Any, x: Any, v: Any, h: Any, k: Any) -> Any:
        a, b = slope(x, v)
        c, d = slope(x + h * a * 0.5, v + h * b * 0.5)
        p, q = slope(x + h * c * 0.75, v + h * d * 0.75)
        new_x = x + h * (2.0 * a + 3.0 * c + 4.0 * p) / 9.0
        new_v = v + h * (2.0 * b + 3.0 * d + 4.0 * q) / 9.0
        r, s = slope(new_x, new_v)
        error_x = h * (a * (-5 / 72) + c / 12.0 + p / 9.0 - r / 8.0)
        error_v = h * (b * (-5 / 72) + d / 12.0 + q / 9.0 - s / 8.0)
        error = lib.np.sqrt(error_x * error_x + error_v * error_v) * 1e4 + 1e-8
        holds = error < 1.0
        longer = h * lib.np.clip(0.9 * lib.np.exp(lib.np.log(error) / -3.0), 0.2, 5.0)
        t, x, v = (
            lib.np.where(holds, new, old)
            for new, old in ((t + h, t), (new_x, x), (new_v, v))
        )
        return t, x, v, lib.np.minimum(longer, lib.np.maximum(5.0 - t, 1e-6)), k + 1

    return lambda x, v: lib.while_loop(
        goes_on, step, (x * 0.0, x, v, x * 0.0 + 0.01, 0)
    )[1]


def _search(lib: Any, wanted: Any, table: Any) -> Any:
    """Where a number stands in a sorted table."""

    def step(low: Any, high: Any) -> Any:
        middle = (low + high) // 2
        is_left = table[middle] < wanted
        return lib.np.where(is_left, middle + 1, low), lib.np.where(
            is_left, high, middle
        )

    return lib.while_loop(lambda low, high: low < high, step, (0, table.shape[0]))[0]


def _walk(dtype: Any) -> Callable[[Any], Callable[..., Any]]:
    """How long a walk takes to leave an interval; its random numbers are Marsaglia's
    xorshift64."""

    def of(lib: Any) -> Callable[..., Any]:
        def goes_on(_state: Any, x: Any, k: Any) -> Any:
            return (lib.np.abs(x) < 4.0) & (k < 2000)

        def step(state: Any, x: Any, k: Any) -> Any:
            state = state ^ (state << 13)
            state = state ^ (state >> 7)
            state = state ^ (state << 17)
            uniform = (state >> 40).astype(dtype) * 2.0**-24
            return state, x + (uniform * 2.0 - 1.0), k + 1

        return lambda seed, x: lib.while_loop(goes_on, step, (seed, x, 0))[2]

    return of
