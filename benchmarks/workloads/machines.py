"""Programs that jump: virtual machines, trees, automata, decoders."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    steps, depth = size(100_000), 12
    features = rng.normal(size=(size(100_000), 8)).astype("f")
    columns = rng.integers(0, 8, 2**depth - 1)
    limits = rng.normal(size=2**depth - 1).astype("f")
    text = rng.integers(0, 256, size(1_000_000)).astype(np.uint8)
    table = rng.integers(0, 16, (16, 256)).astype(np.int32)
    code = np.array([0, 1, 2, 0, 3, 1, 0, 4])
    hidden = 64
    weights = (rng.normal(size=(hidden, 3 * hidden)) / 8).astype("f")
    words = rng.normal(size=(256, hidden)).astype("f")
    machine = _machine(steps)
    return [
        row(
            "virtual-machine",
            machine,
            (code, np.ones(4)),
            steps=steps,
            rtol=1e-4,
            in_c=[steps],
            in_numba=True,
        ),
        row(
            "decision-tree",
            _tree(depth),
            (features, columns, limits),
            in_c=[depth],
            in_numba=True,
        ),
        row(
            "automaton",
            _automaton,
            (text, table),
            steps=text.size,
            in_c=[],
            in_numba=True,
        ),
        row(
            "greedy-decode",
            _greedy,
            (weights, words),
            steps=100,
            in_c=[100],
            in_numba=True,
        ),
        row("beam-search", _beams, (weights, words), steps=50),
    ]


def _machine(steps: int) -> Callable[[Any], Callable[..., Any]]:
    """A machine of five instructions with four registers."""

    def of(lib: Any) -> Callable[..., Any]:
        def run(code: Any, registers: Any) -> Any:
            def step(_: Any, at: Any, r: Any) -> Any:
                r = lib.switch(
                    code[at],
                    (
                        lambda r: r.at[0].add(1.0),
                        lambda r: r.at[1].set(r[0] * 0.5),
                        lambda r: r.at[2].set(lib.np.sin(r[1])),
                        lambda r: r.at[3].set(r[2] + 0.9 * r[3]),
                        lambda r: r.at[0].set(r[0] % 7.0),
                    ),
                    r,
                )
                return (at + 1) % code.shape[0], r

            return lib.fori_loop(0, steps, step, (code[0] * 0, registers))[1]

        return run

    return of


def _tree(depth: int) -> Callable[[Any], Callable[..., Any]]:
    """For each row of features the leaf to which a tree of decisions leads it."""

    def of(lib: Any) -> Callable[..., Any]:
        def leaves(features: Any, columns: Any, limits: Any) -> Any:
            def leaf(x: Any) -> Any:
                def step(node: Any, _: Any) -> Any:
                    is_right = x[columns[node]] > limits[node]
                    return 2 * node + 1 + is_right, None

                return lib.scan(step, columns[0] * 0, length=depth)[0]

            return lib.vmap(leaf)(features)

        return leaves

    return of


def _automaton(lib: Any) -> Callable[..., Any]:
    """The states that a text leads through."""

    def states(text: Any, table: Any) -> Any:
        def step(state: Any, letter: Any) -> Any:
            state = table[state, letter]
            return state, state

        return lib.scan(step, table[0, 0] * 0, text)[1]

    return states


def _cell(lib: Any, weights: Any, x: Any, h: Any) -> Any:
    """A gated recurrent cell with one matrix."""
    n = h.shape[-1]
    z, r, c = (((x + h) @ weights)[..., k * n : (k + 1) * n] for k in range(3))
    gate = lib.sigmoid(z)
    return gate * h + (1.0 - gate) * lib.np.tanh(c * lib.sigmoid(r))


def _greedy(lib: Any) -> Callable[..., Any]:
    """The likeliest word again and again."""

    def decode(weights: Any, words: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            h, word = carry
            h = _cell(lib, weights, words[word], h)
            word = lib.np.argmax(words @ h)
            return (h, word), word

        word = lib.np.argmax(words[:, 0])
        return lib.scan(step, (words[0] * 0.0, word), length=100)[1]

    return decode


def _beams(lib: Any) -> Callable[..., Any]:
    """The four likeliest sequences; each step sorts them and their states anew."""
    beams = 4

    def decode(weights: Any, words: Any) -> Any:
        count = words.shape[0]

        def step(carry: Any, _: Any) -> Any:
            h, word, score = carry
            h = _cell(lib, weights, words[word], h)
            logits = h @ words.T
            most = lib.np.max(logits, axis=1, keepdims=True)
            logits = logits - most
            total = lib.np.sum(lib.np.exp(logits), axis=1, keepdims=True)
            totals = lib.np.reshape(score[:, None] + logits - lib.np.log(total), (-1,))
            score, best = lib.top_k(totals, beams)
            beam, word = best // count, best % count
            return (h[beam], word, score), (beam, word)

        h = lib.np.tile(words[:1] * 0.0, (beams, 1))
        score = lib.np.asarray(np.array([0.0, -50.0, -60.0, -70.0], "f"))
        start = (h, lib.top_k(words[:, 0], beams)[1], score)
        return lib.scan(step, start, length=50)[0][2]

    return decode
