"""Tables that are filled row by row, or element by element."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 4, size(1000) + 2) for _ in range(2))
    weights, values = rng.integers(1, 50, size(200)), rng.uniform(size=size(200))
    capacity = np.zeros(size(20_000) + 50)
    distances = rng.uniform(1.0, 10.0, (size(300), size(300)))
    scores = rng.normal(size=(size(10_000), 32)).astype("f")
    moves = rng.normal(size=(32, 32)).astype("f")
    return [
        row(
            "edit-distance-scan",
            _edit_distance,
            (a, b),
            steps=a.size,
            in_c=[],
            in_numba=True,
        ),
        row(
            "lcs-at", _common_subsequence, (a, b), steps=a.size, in_c=[], in_numba=True
        ),
        row(
            "knapsack",
            _knapsack,
            (weights, values, capacity),
            steps=weights.size,
            in_c=[],
            in_numba=True,
        ),
        row(
            "floyd-warshall",
            _shortest,
            (distances,),
            steps=len(distances),
            in_c=[],
            in_numba=True,
        ),
        row(
            "viterbi",
            _viterbi,
            (scores, moves),
            steps=len(scores),
            in_c=[],
            in_numba=True,
        ),
    ]


def _edit_distance(lib: Any) -> Callable[..., Any]:
    """Levenshtein's distance: a scan of rows, within which a scan of columns."""

    def distance(a: Any, b: Any) -> Any:
        def next_row(above: Any, letter: Any) -> Any:
            def column(left: Any, x: Any) -> Any:
                corner, up, other = x
                best = lib.np.minimum(left, up) + 1
                best = lib.np.minimum(best, corner + (letter != other))
                return best, best

            first = above[0] + 1
            rest = lib.scan(column, first, (above[:-1], above[1:], b))[1]
            return lib.np.concat([first[None], rest]), None

        return lib.scan(next_row, lib.np.arange(b.shape[0] + 1), a)[0][-1]

    return distance


def _common_subsequence(lib: Any) -> Callable[..., Any]:
    """The longest common subsequence, written to a table element by element."""

    def longest(a: Any, b: Any) -> Any:
        n, m = a.shape[0], b.shape[0]

        def element(k: Any, table: Any) -> Any:
            i, j = k // m, k % m
            longer = table[i, j] + 1
            other = lib.np.maximum(table[i, j + 1], table[i + 1, j])
            best = lib.np.where(a[i] == b[j], longer, other)
            return table.at[i + 1, j + 1].set(best)

        table = lib.np.zeros((n + 1, m + 1), dtype=np.int32)
        return lib.fori_loop(0, n * m, element, table)[n, m]

    return longest


def _knapsack(lib: Any) -> Callable[..., Any]:
    """The most that fits: each item shifts the row by its weight."""

    def most(weights: Any, values: Any, row: Any) -> Any:
        at = lib.np.arange(row.shape[0])

        def item(best: Any, x: Any) -> Any:
            weight, value = x
            before = best[lib.np.maximum(at - weight, 0)] + value
            return lib.np.where(at >= weight, lib.np.maximum(best, before), best), None

        return lib.scan(item, row, (weights, values))[0]

    return most


def _shortest(lib: Any) -> Callable[..., Any]:
    """All shortest paths, by Floyd and Warshall."""

    def through(k: Any, d: Any) -> Any:
        return lib.np.minimum(d, d[:, k][:, None] + d[k][None, :])

    return lambda d: lib.fori_loop(0, d.shape[0], through, d)


def _viterbi(lib: Any) -> Callable[..., Any]:
    """The likeliest path of a hidden Markov model, found backward through pointers."""

    def path(scores: Any, moves: Any) -> Any:
        def forward(best: Any, score: Any) -> Any:
            total = best[:, None] + moves
            return lib.np.max(total, axis=0) + score, lib.np.argmax(total, axis=0)

        best, pointers = lib.scan(forward, scores[0], scores[1:])

        def backward(state: Any, pointer: Any) -> Any:
            return pointer[state], state

        last = lib.np.argmax(best)
        return lib.scan(backward, last, pointers, reverse=True)[1]

    return path
