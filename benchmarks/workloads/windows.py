"""Loops that update windows and tables, and `map` of functions of numbers."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload

LETTERS: Final = 4
WORD: Final = 8
CITIES: Final = 50


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, LETTERS, (4, size(500), WORD))
    a, b = rng.integers(0, 1 << 20, (2, size(1024)))
    route, swaps = rng.permutation(CITIES), rng.integers(0, CITIES, (size(3000), 2))
    spots, strikes = rng.uniform(80, 120, (2, size(3000)))
    return [
        row("tries", _tries, (words,)),
        row("long-products", _product, (a, b)),
        row("route-moves", _moves, (route, np.sort(swaps, axis=1))),
        row("mapped-prices", _prices, (spots, strikes), rtol=1e-9),
    ]


def _tries(lib: Any) -> Any:
    """Trees of sets of words: the child of each node for each letter."""

    def one(words: Any) -> Any:
        nodes = words.shape[0] * WORD + 1

        def insert(w: Any, children: Any, count: Any) -> Any:
            def descend(k: Any, node: Any, children: Any, count: Any) -> Any:
                child = children[node, words[w, k]]
                is_new = child == 0
                child, count = lib.np.where(is_new, count, child), count + is_new
                return child, children.at[node, words[w, k]].set(child), count

            start = (words[0, 0] * 0, children, count)
            return lib.fori_loop(0, WORD, descend, start)[1:]

        children = lib.np.zeros((nodes, LETTERS), dtype="int64")
        one = lib.np.ones((), dtype="int64")
        return lib.fori_loop(0, words.shape[0], insert, (children, one))

    return lib.vmap(one)


def _product(lib: Any) -> Any:
    """The digits of a product before any is carried over."""

    def product(a: Any, b: Any) -> Any:
        n = a.shape[0]

        def step(i: Any, digits: Any) -> Any:
            window = lib.dynamic_slice(digits, (i,), (n,))
            return lib.dynamic_update_slice(digits, window + a[i] * b, (i,))

        return lib.fori_loop(0, n, step, lib.np.zeros((2 * n,), dtype="int64"))

    return product


def _moves(lib: Any) -> Any:
    """A route, parts of which are reversed one after the other."""

    def moves(route: Any, swaps: Any) -> Any:
        k = lib.np.arange(CITIES)

        def step(route: Any, swap: Any) -> Any:
            i, j = swap[0], swap[1]
            reverse = route[lib.np.clip(i + j - k, 0, CITIES - 1)]
            return lib.np.where((k >= i) & (k <= j), reverse, route), None

        return lib.scan(step, route, swaps)[0]

    return moves


def _prices(lib: Any) -> Any:
    """Prices of options, by `map`."""

    def price(option: Any) -> Any:
        spot, strike = option
        d = (lib.np.log(spot / strike) + 0.02) / 0.2
        up, down = (0.5 * (1 + lib.erf(x / 2**0.5)) for x in (d, d - 0.2))
        return spot * up - strike * down

    return lambda spots, strikes: lib.map(price, (spots, strikes))
