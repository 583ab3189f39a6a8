"""Filters, smoothers and optimisers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(size(10_000), 2))
    sound = rng.normal(size=size(1_000_000)).astype("f")
    track = np.cumsum(rng.normal(size=size(100))).astype("f")
    n = size(500) + 4
    factor = rng.normal(size=(n, n)) / np.sqrt(n)
    inputs = rng.normal(size=(size(1000) + 4, 20)).astype("f")
    labels = (inputs @ rng.normal(size=20) > 0).astype("f")
    start = np.zeros(20, "f")
    doubles = inputs.astype(float), labels.astype(float), start.astype(float)
    return [
        row("kalman", _kalman, (seen,), steps=len(seen), in_c=[], in_numba=True),
        row(
            "biquad",
            _biquad,
            (sound,),
            steps=sound.size,
            rtol=1e-3,
            in_c=[],
            in_numba=True,
        ),
        row("particles", _particles, (track,), steps=track.size, rtol=0.2, in_c=[]),
        row(
            "conjugate-gradients",
            _gradients,
            (factor @ factor.T + np.eye(n), seen[:, 0][:1] + np.ones(n)),
            rtol=1e-4,
            in_c=[],
            in_numba=True,
        ),
        row("adam", _adam, (inputs, labels, start), steps=200, rtol=1e-2, in_c=[200]),
        row("newton-logistic", _newton, doubles, steps=8, rtol=1e-3, in_c=[8]),
        row("bfgs", _bfgs, (np.full(size(50) + 2, -1.0),), rtol=1e-3, differing=0.1),
    ]


def _kalman(lib: Any) -> Callable[..., Any]:
    """A place and a speed in the plane, from places with noise."""
    move = np.eye(4) + np.eye(4, k=2) * 0.1
    look = np.eye(2, 4)

    def run(seen: Any) -> Any:
        a, c = lib.np.asarray(move), lib.np.asarray(look)
        q, r = lib.np.asarray(0.01 * np.eye(4)), lib.np.asarray(0.5 * np.eye(2))

        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = a @ x, a @ p @ a.T + q
            gain = lib.linalg.solve(c @ p @ c.T + r, c @ p).T
            x = x + gain @ (z - c @ x)
            return (x, p - gain @ c @ p), x

        return lib.scan(
            step, (lib.np.zeros(4, dtype=np.float64), lib.np.asarray(np.eye(4))), seen
        )[1]

    return run


def _biquad(lib: Any) -> Callable[..., Any]:
    """A filter of second order."""

    def step(carry: Any, x: Any) -> Any:
        a, b = carry
        y = np.float32(0.2) * x + a
        a = np.float32(0.4) * x + np.float32(0.3) * y + b
        return (a, np.float32(0.2) * x - np.float32(0.1) * y), y

    return lambda x: lib.scan(step, (x[0] * 0, x[0] * 0), x)[1]


def _particles(lib: Any) -> Callable[..., Any]:
    """A particle filter: in each step particles are drawn again by their weights."""
    count = 1000

    def run(track: Any) -> Any:
        def step(x: Any, each: Any) -> Any:
            seen, key = each
            x = x + lib.random.normal(key, (count,), dtype=np.float32)
            weights = lib.np.exp(-0.5 * (x - seen) ** 2) + 1e-6
            edges = lib.np.cumulative_sum(weights)
            ticks = (lib.np.arange(count) + 0.5) * (edges[-1] / count)
            chosen = lib.np.searchsorted(edges, ticks.astype(np.float32))
            x = x[lib.np.clip(chosen, 0, count - 1)]
            return x, lib.np.mean(x)

        keys = lib.random.split(lib.random.key(2), track.shape[0])
        return lib.scan(step, lib.np.zeros(count, dtype=np.float32), (track, keys))[1]

    return run


def _gradients(lib: Any) -> Callable[..., Any]:
    """Conjugate gradients until the residual is small."""

    def solve(a: Any, b: Any) -> Any:
        def step(x: Any, r: Any, p: Any, square: Any, k: Any) -> Any:
            image = a @ p
            length = square / lib.np.vecdot(p, image)
            r = r - length * image
            new = lib.np.vecdot(r, r)
            return x + length * p, r, r + (new / square) * p, new, k + 1

        def goes_on(_x: Any, _r: Any, _p: Any, square: Any, k: Any) -> Any:
            return (square > 1e-12) & (k < 200)

        start = (b * 0.0, b, b, lib.np.vecdot(b, b), 0)
        return lib.while_loop(goes_on, step, start)[0]

    return solve


def _loss(lib: Any, w: Any, inputs: Any, labels: Any) -> Any:
    """Logistic regression."""
    z = inputs @ w
    losses = lib.np.log1p(lib.np.exp(-lib.np.abs(z))) + lib.np.maximum(z, 0.0)
    return lib.np.mean(losses - z * labels) + 1e-3 * lib.np.sum(w * w)


def _adam(lib: Any) -> Callable[..., Any]:
    def fit(inputs: Any, labels: Any, w: Any) -> Any:
        def step(i: Any, w: Any, m: Any, v: Any) -> Any:
            g = lib.grad(lambda w: _loss(lib, w, inputs, labels))(w)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            t = (i + 1).astype(np.float32)
            rate = 0.01 * lib.np.sqrt(1.0 - 0.999**t) / (1.0 - 0.9**t)
            return w - rate * m / (lib.np.sqrt(v) + 1e-8), m, v

        return lib.fori_loop(0, 200, step, (w, w * 0.0, w * 0.0))[0]

    return fit


def _newton(lib: Any) -> Callable[..., Any]:
    def fit(inputs: Any, labels: Any, w: Any) -> Any:
        def step(_: Any, w: Any) -> Any:
            p = lib.sigmoid(inputs @ w)
            gradient = inputs.T @ (p - labels) + 0.1 * w
            curvature = (inputs.T * (p * (1.0 - p))) @ inputs
            curvature = curvature + 0.1 * lib.np.eye(w.shape[0], dtype=w.dtype)
            return w - lib.linalg.solve(curvature, gradient)

        return lib.fori_loop(0, 8, step, w)

    return fit


def _bfgs(lib: Any) -> Callable[..., Any]:
    """Rosenbrock's function by BFGS, in steps that are halved until it falls."""

    def value(x: Any) -> Any:
        return lib.np.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)

    def minimum(x: Any) -> Any:
        identity = lib.np.eye(x.shape[0], dtype=x.dtype)

        def step(x: Any, h: Any, g: Any, k: Any) -> Any:
            p = -(h @ g)
            before, slope = value(x), lib.np.vecdot(p, g)

            def falls_short(t: Any) -> Any:
                return (value(x + t * p) > before + 1e-4 * t * slope) & (t > 1e-10)

            t = lib.while_loop(falls_short, lambda t: (t * 0.5,), (x[0] * 0.0 + 1.0,))
            s = t[0] * p
            new = lib.grad(value)(x + s)
            y = new - g
            rho = 1.0 / (lib.np.vecdot(y, s) + 1e-12)
            left = identity - rho * s[:, None] * y[None, :]
            h = left @ h @ left.T + rho * s[:, None] * s[None, :]
            return x + s, h, new, k + 1

        def goes_on(_x: Any, _h: Any, g: Any, k: Any) -> Any:
            return (lib.np.vecdot(g, g) > 1e-10) & (k < 100)

        return lib.while_loop(goes_on, step, (x, identity, lib.grad(value)(x), 0))[0]

    return minimum
