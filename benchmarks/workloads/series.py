"""`vmap` of scans along the last axis of their inputs: branches, tables, windows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return rng.uniform(size=shape).astype("f")

    prices, moods = drawn(size(5000), 100), drawn(size(5000), 100)
    table = drawn(STATES, STATES)
    states = rng.integers(0, STATES, (size(500), 1000)).astype("i4")
    numbers = rng.integers(0, BINS, (size(5000), 200)).astype("i4")
    return [
        row("trade-walks", _walks, (prices, moods), rtol=1e-3, in_c=[]),
        row("trade-walks-grad", _walks_gradient, (prices, moods), rtol=1e-3),
        row("shared-gain-filters", _filters, (drawn(size(256), 1024),), rtol=1e-3),
        row("histograms-of-rows", _histograms, (numbers,), in_c=[]),
        row("window-maxima", _maxima, (drawn(size(1_000_000)),)),
        row("chain-likelihoods", _likelihoods, (table, states), rtol=1e-3, in_c=[]),
        row("filled-rows", _filled, (drawn(size(4096), 100),), rtol=1e-3, in_c=[]),
    ]


BINS = 64
STATES = 64


def _trade(lib: Any, held: Any, cash: Any, price: Any, mood: Any) -> Any:
    """Buy, sell or wait."""
    return lib.cond(
        mood > 0.7,
        lambda: (held + 1, cash - price),
        lambda: lib.cond(
            (mood < 0.3) & (held > 0),
            lambda: (held - 1, cash + price),
            lambda: (held, cash * 0.999),
        ),
    )


def _walks(lib: Any) -> Any:
    """What traders own after each step."""

    def one(prices: Any, moods: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            held, cash = _trade(lib, *carry, *at)
            return (held, cash), cash + held * at[0]

        zero = lib.np.zeros((), dtype="float32")
        return lib.scan(step, (zero, zero), (prices, moods))[1]

    return lib.vmap(one)


def _walks_gradient(lib: Any) -> Any:
    """How what traders own in the end depends on the prices."""

    def owned(prices: Any, moods: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            return _trade(lib, *carry, *at), None

        zero = lib.np.zeros((), dtype="float32")
        held, cash = lib.scan(step, (zero, zero), (prices, moods))[0]
        return cash + held * prices[-1]

    return lib.vmap(lib.grad(owned))


def _filters(lib: Any) -> Any:
    """Kalman filters of position and speed, whose covariance is the same for all."""

    def one(seen: Any) -> Any:
        def step(carry: Any, z: Any) -> Any:
            x, v, a, b, c = carry
            x, a, b, c = x + v, a + 2 * b + c + 0.01, b + c, c + 0.01
            gain, speed = a / (a + 0.5), b / (a + 0.5)
            left = z - x
            x, v = x + gain * left, v + speed * left
            return (x, v, (1 - gain) * a, (1 - gain) * b, c - speed * b), x

        zero, start = (
            lib.np.zeros((), dtype="float32"),
            lib.np.ones((), dtype="float32"),
        )
        return lib.scan(step, (zero, zero, start, zero, start), seen)[1]

    return lib.vmap(one)


def _histograms(lib: Any) -> Any:
    """How often each number is in each row, counted one after the other."""

    def one(numbers: Any) -> Any:
        def step(counts: Any, k: Any) -> Any:
            return counts.at[k].add(1), None

        return lib.scan(step, lib.np.zeros(BINS, dtype="int32"), numbers)[0]

    return lib.vmap(one)


def _maxima(lib: Any) -> Any:
    """The largest of each five neighbours."""

    def maxima(x: Any) -> Any:
        wide, n = lib.np.pad(x, [(2, 2)]), x.shape[0]
        return lib.np.max(lib.np.stack([wide[k : k + n] for k in range(5)]), axis=0)

    return maxima


def _likelihoods(lib: Any) -> Any:
    """The logarithms of the probabilities of chains of states."""

    def of_all(table: Any, states: Any) -> Any:
        def one(states: Any) -> Any:
            def step(i: Any, total: Any) -> Any:
                return total + table[states[i - 1], states[i]]

            zero = lib.np.zeros((), dtype="float32")
            return lib.fori_loop(1, states.shape[0], step, zero)

        return lib.vmap(one)(states)

    return of_all


def _filled(lib: Any) -> Any:
    """Rows whose elements are computed of those before, as tables of dynamic
    programs are."""

    def one(x: Any) -> Any:
        def step(i: Any, filled: Any) -> Any:
            return filled.at[i].set(0.9 * filled[i - 1] + x[i])

        start = lib.np.zeros(x.shape, dtype="float32")
        return lib.fori_loop(1, x.shape[0], step, start)

    return lib.vmap(one)
