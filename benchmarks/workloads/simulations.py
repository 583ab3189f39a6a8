"""Differential equations and random processes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    steps, points = size(100_000), size(1_000_000)
    places, speeds = rng.normal(size=(2, size(200), 3))
    masses = rng.uniform(0.5, 1.5, size(200))
    chains = rng.normal(size=size(10_000)).astype("f")
    return [
        row(
            "ode-adaptive",
            _adaptive,
            (np.array([2.0, 0.0]),),
            rtol=1e-4,
            in_c=[],
            in_numba=True,
        ),
        row(
            "pendulum",
            _pendulum(steps),
            (np.array([0.0, 1.0]),),
            steps=steps,
            in_c=[steps],
            in_numba=True,
        ),
        row(
            "n-body",
            _bodies,
            (places, speeds, masses),
            steps=20,
            rtol=1e-4,
            in_c=[20],
            in_numba=True,
        ),
        row("pi", _pi(points), (np.array(7),), rtol=1e-3, in_c=[points]),
        row(
            "metropolis",
            _metropolis,
            (chains,),
            steps=100,
            differing=0.02,
            rtol=1e-3,
            in_c=[100],
        ),
        row("option-paths", _paths, (chains,), steps=100, rtol=1e-3, in_c=[100]),
        row(
            "ising",
            _ising,
            (np.sign(rng.normal(size=(64, 64))).astype("f"),),
            in_c=[50],
        ),
    ]


def _adaptive(lib: Any) -> Callable[..., Any]:
    """Van der Pol's oscillator with a state that is an array, by Heun and Euler, in
    steps as long as the error allows."""

    def slope(y: Any) -> Any:
        return lib.np.stack([y[1], 5.0 * (1.0 - y[0] ** 2) * y[1] - y[0]])

    def step(t: Any, y: Any, h: Any, k: Any) -> Any:
        first = slope(y)
        second = slope(y + h * first)
        error = lib.np.max(lib.np.abs(h * (second - first) * 0.5)) * 1e4 + 1e-8
        holds = error < 1.0
        new_y = lib.np.where(holds, y + h * (first + second) * 0.5, y)
        new_t = lib.np.where(holds, t + h, t)
        factor = lib.np.clip(0.9 / lib.np.sqrt(error), 0.2, 5.0)
        return new_t, new_y, lib.np.minimum(h * factor, 20.0 - new_t + 1e-9), k + 1

    def goes_on(t: Any, _y: Any, _h: Any, k: Any) -> Any:
        return (t < 20.0) & (k < 100_000)

    return lambda y: lib.while_loop(goes_on, step, (y[1], y, y[1] + 1e-3, 0))[1]


def _pendulum(steps: int) -> Callable[[Any], Callable[..., Any]]:
    """The whole path, by the leapfrog method."""

    def of(lib: Any) -> Callable[..., Any]:
        def step(y: Any, _: Any) -> Any:
            speed = y[1] - 0.005 * lib.np.sin(y[0])
            place = y[0] + 0.01 * speed
            y = lib.np.stack([place, speed - 0.005 * lib.np.sin(place)])
            return y, y

        return lambda y: lib.scan(step, y, length=steps)[1]

    return of


def _bodies(lib: Any) -> Callable[..., Any]:
    """Every body attracts every other one."""

    def run(places: Any, speeds: Any, masses: Any) -> Any:
        def step(_: Any, x: Any, v: Any) -> Any:
            apart = x[None, :, :] - x[:, None, :]
            squares = lib.np.sum(apart * apart, axis=2) + 0.01
            pull = masses[None, :] / (squares * lib.np.sqrt(squares))
            v = v + 0.001 * lib.np.sum(apart * pull[:, :, None], axis=1)
            return x + 0.001 * v, v

        return lib.fori_loop(0, 20, step, (places, speeds))[0]

    return run


def _pi(count: int) -> Callable[[Any], Callable[..., Any]]:
    """How many random points of a square are in a circle."""

    def of(lib: Any) -> Callable[..., Any]:
        def estimate(seed: Any) -> Any:
            x, y = lib.random.uniform(
                lib.random.key(seed), (2, count), dtype=np.float32
            )
            return 4.0 * lib.np.mean((x * x + y * y < 1.0).astype(np.float32))

        return estimate

    return of


def _metropolis(lib: Any) -> Callable[..., Any]:
    """Chains of a mixture of two Gaussians, with random numbers made in the loop."""

    def density(x: Any) -> Any:
        return lib.np.logaddexp(-0.5 * (x - 2.0) ** 2, -0.5 * (x + 2.0) ** 2)

    def run(x: Any) -> Any:
        keys = lib.random.split(lib.random.key(1), 100)

        def step(x: Any, key: Any) -> Any:
            a, b = lib.random.split(key)
            new = x + lib.random.normal(a, x.shape, dtype=np.float32)
            chance = lib.np.exp(density(new) - density(x))
            is_taken = lib.random.uniform(b, x.shape, dtype=np.float32) < chance
            return lib.np.where(is_taken, new, x), None

        return lib.scan(step, x, keys)[0]

    return run


def _paths(lib: Any) -> Callable[..., Any]:
    """The mean of an Asian option over random paths."""

    def price(start: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            log, total = carry
            log = log + 0.01 * lib.random.normal(key, log.shape, dtype=np.float32)
            return (log, total + lib.np.exp(log)), None

        keys = lib.random.split(lib.random.key(3), 100)
        _, total = lib.scan(step, (start * 0.1, start * 0.0), keys)[0]
        return lib.np.mean(lib.np.maximum(total / 100.0 - 1.0, 0.0))

    return price


def _ising(lib: Any) -> Callable[..., Any]:
    """Sweeps over a magnet whose black and white squares take turns."""

    def run(spins: Any) -> Any:
        n, m = spins.shape
        colour = (lib.np.arange(n)[:, None] + lib.np.arange(m)[None, :]) % 2

        def half(spins: Any, key: Any, which: int) -> Any:
            roll = lib.np.roll
            around = roll(spins, 1, axis=0) + roll(spins, -1, axis=0)
            around = around + roll(spins, 1, axis=1) + roll(spins, -1, axis=1)
            draw = lib.random.uniform(key, spins.shape, dtype=np.float32)
            flips = (draw < lib.sigmoid(-1.2 * spins * around)) & (colour == which)
            return lib.np.where(flips, -spins, spins)

        def sweep(spins: Any, key: Any) -> Any:
            a, b = lib.random.split(key)
            spins = half(half(spins, a, 0), b, 1)
            return spins, lib.np.mean(spins)

        keys = lib.random.split(lib.random.key(5), 50)
        return lib.scan(sweep, spins, keys)[1]

    return run
