"""Loops whose states are short arrays, written as arrays: of examples, or of one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return rng.normal(size=shape).astype("f")

    count = size(8192)
    states, taps, signals = drawn(count, 3), drawn(count, 8), drawn(count, 40, 8)
    words = rng.integers(0, 2**32, (count, 16)).astype("u4")
    rates = drawn(size(1024), 3)
    rates_of_change = rng.normal(size=(6, 6)) - 3.0 * np.eye(6)
    start, samples = rng.normal(size=6), rng.normal(size=(size(1000), 10))
    weights, hidden, inputs = drawn(4, 4) / 4, drawn(count, 4), drawn(count, 50, 4)
    return [
        row("lorenz-paths", _lorenz, (states,), rtol=1e-2, in_c=[100]),
        row("lorenz-paths-grad", _lorenz_gradient, (states,), rtol=1e-2),
        row("adaptive-filters", _filters, (taps, signals), rtol=1e-2, in_c=[40]),
        row("shift-registers", _registers, (words,), in_c=[64]),
        row("turned-frames", _turned, (drawn(size(1024), 4), rates), rtol=1e-2),
        row("bandits", _bandits, (drawn(size(5000), 60),), rtol=1e-2),
        row("linear-ode", _linear_ode, (rates_of_change, start), in_c=[500]),
        row("running-covariances", _covariances, (samples,), in_c=[]),
        row("small-rnn-grad", _rnn_gradient, (weights, hidden, inputs), rtol=1e-2),
    ]


def _velocity(lib: Any, s: Any) -> Any:
    x, y, z = s[0], s[1], s[2]
    return lib.np.stack([10 * (y - x), x * (28 - z) - y, x * y - 2.5 * z])


def _lorenz(lib: Any) -> Any:
    """The paths of points in the Lorenz system."""

    def path(s: Any) -> Any:
        def step(s: Any, _: Any) -> Any:
            return s + 0.01 * _velocity(lib, s), s

        return lib.scan(step, s, None, length=100)[1]

    return lib.vmap(path)


def _lorenz_gradient(lib: Any) -> Any:
    """How far each point has come, by where it has started."""

    def distance(s: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            return x + 0.001 * _velocity(lib, x)

        return lib.np.sum((lib.fori_loop(0, 100, step, s) - s) ** 2)

    return lib.vmap(lib.grad(distance))


def _filters(lib: Any) -> Any:
    """Least-mean-squares filters of eight taps, and what each leaves of its signal."""

    def one(w: Any, xs: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            rest = x[0] - lib.np.sum(w * x)
            return w + 0.01 * rest * x, rest

        return lib.scan(step, w, xs)

    return lib.vmap(one)


def _registers(lib: Any) -> Any:
    """Shift registers with feedback: the window moves by one word in each step."""
    concat = getattr(lib.np, "concat", None) or lib.np.concatenate

    def one(w: Any) -> Any:
        def step(_: Any, w: Any) -> Any:
            return concat([w[1:], (w[0] ^ (w[9] + w[14]))[None]])

        return lib.fori_loop(0, 64, step, w)

    return lib.vmap(one)


def _linear_ode(lib: Any) -> Callable[..., Any]:
    """Runge-Kutta steps of order 4 of `y' = a @ y`, six numbers."""

    def end(a: Any, y: Any) -> Any:
        def step(_: Any, y: Any) -> Any:
            first = a @ y
            second = a @ (y + 0.005 * first)
            third = a @ (y + 0.005 * second)
            fourth = a @ (y + 0.01 * third)
            return y + 0.01 / 6.0 * (first + 2.0 * second + 2.0 * third + fourth)

        return lib.fori_loop(0, 500, step, y)

    return end


def _covariances(lib: Any) -> Callable[..., Any]:
    """Mean and covariances of ten numbers, one sample after the other (Welford)."""

    def run(samples: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            count, mean, spread = carry
            count = count + 1.0
            apart = x - mean
            mean = mean + apart / count
            return (count, mean, spread + apart[:, None] * (x - mean)), None

        zeros: Any = lambda *shape: lib.np.zeros(shape, dtype="float64")  # noqa: E731
        start = zeros(), zeros(10), zeros(10, 10)
        (count, mean, spread), _ = lib.scan(step, start, samples)
        return mean, spread / (count - 1.0)

    return run


def _rnn_gradient(lib: Any) -> Callable[..., Any]:
    """The gradient of a recurrent net of four cells with respect to its first state."""

    def run(weights: Any, h: Any, xs: Any) -> Any:
        def loss(h: Any, xs: Any) -> Any:
            def step(h: Any, x: Any) -> Any:
                h = lib.np.tanh(weights @ h + x)
                return h, lib.np.sum(h)

            return lib.np.sum(lib.scan(step, h, xs)[1])

        return lib.vmap(lib.grad(loss))(h, xs)

    return run


def _turned(lib: Any) -> Any:
    """Quaternions of frames, each of which turns at rates of its own."""

    def one(q: Any, rates: Any) -> Any:
        def step(q: Any, _: Any) -> Any:
            a, b, c, d = q[0], q[1], q[2], q[3]
            x, y, z = rates[0], rates[1], rates[2]
            turned = [
                a - 0.01 * (x * b + y * c + z * d),
                b + 0.01 * (x * a + z * c - y * d),
                c + 0.01 * (y * a - z * b + x * d),
                d + 0.01 * (z * a + y * b - x * c),
            ]
            q = lib.np.stack(turned)
            return q / lib.np.sqrt(lib.np.sum(q * q)), None

        return lib.scan(step, q, None, length=100)[0]

    return lib.vmap(one)


def _bandits(lib: Any) -> Any:
    """Means of the rewards of four arms, the best bound of which is pulled."""

    def one(rewards: Any) -> Any:
        def step(carry: Any, reward: Any) -> Any:
            means, counts = carry
            i = lib.np.argmax(means + 1 / lib.np.sqrt(counts))
            means = means.at[i].add((reward - means[i]) / counts[i])
            return (means, counts.at[i].add(1.0)), None

        start = lib.np.zeros(4, dtype="float32"), lib.np.ones(4, dtype="float32")
        return lib.scan(step, start, rewards)[0]

    return lib.vmap(one)
