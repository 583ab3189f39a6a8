"""Models whose work depends on their data, run from files by a process without their
code."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree


class Thinker(hf.nn.Module):
    """A recurrent network that takes, for each example, as many steps as it finds
    necessary (Graves, arXiv:1603.08983)."""

    cell: Any
    halt: Any
    out: Any

    def forward(self, xs: Any) -> Any:
        return hf.map(self.one, xs)

    def one(self, x: Any) -> Any:
        def step(h: Any, total: Any, left: Any, n: Any) -> Any:
            h = self.cell(h, x)
            p = hf.sigmoid(self.halt(h))[0]
            p = hf.minimum(p, left)
            return h, total + p * h, left - p, n + 1

        zero = hf.zeros((8,), dtype=hf.float64)
        start = zero, zero, hf.asarray(np.float64(1.0)), 0
        _, total, _, n = hf.while_loop(
            lambda h, t, left, n: (left > 0.01) & (n < 12), step, start
        )
        return self.out(total), n


def thinker() -> Thinker:
    keys = hf.random.split(hf.random.key(3), 3)
    return Thinker(
        hf.nn.GRUCell.init(keys[0], 5, 8, dtype="float64"),
        hf.nn.Linear.init(keys[1], 8, 1, dtype="float64"),
        hf.nn.Linear.init(keys[2], 8, 2, dtype="float64"),
    )


class Orbit(NamedTuple):
    position: Any
    velocity: Any


def fly(orbit: Orbit, until: float, *, tolerance: float) -> tuple[Orbit, Any]:
    """A body around a sun, by steps of Heun's method that adapt to the error."""

    def slope(s: Orbit) -> Orbit:
        r = hf.sqrt(hf.sum(s.position**2))
        return Orbit(s.velocity, -s.position / r**3)

    def moved(s: Orbit, d: Orbit, h: Any) -> Orbit:
        return Orbit(s.position + h * d.position, s.velocity + h * d.velocity)

    def step(s: Orbit, t: Any, h: Any, taken: Any) -> Any:
        h = hf.minimum(h, until - t)
        first = slope(s)
        euler = moved(s, first, h)
        second = slope(euler)
        heun = moved(moved(s, first, h / 2), second, h / 2)
        error = hf.max(hf.abs(heun.position - euler.position))

        def accept() -> Any:
            return heun, t + h, h * 1.5, taken + 1

        return hf.cond(error < tolerance, accept, lambda: (s, t, h / 2, taken))

    start = orbit, hf.zeros((), dtype=hf.float64), hf.full((), 0.1, dtype=hf.float64), 0
    end, _, _, taken = hf.while_loop(lambda s, t, h, n: t < until, step, start)
    return end, taken


def decode(table: Any, prompt: Any, most: int) -> Any:
    """Greedy decoding of a model of bigrams with a memory of what was said, until it
    says 0; the tokens are as many as they come to be."""
    tokens = hf.zeros((20,), dtype=hf.int64)

    def step(tokens: Any, last: Any, seen: Any, n: Any) -> Any:
        scores = table[last] - seen
        token = hf.argmax(scores)
        seen = seen * 0.5 + hf.one_hot(token, seen.shape[0], dtype=hf.float64)
        return tokens.at[n].set(token), token, seen, n + 1

    seen = hf.zeros((table.shape[1],), dtype=hf.float64)
    tokens, _, _, n = hf.while_loop(
        lambda tokens, last, seen, n: (last != 0) & (n < most),
        step,
        (tokens, prompt, seen, 0),
    )
    return tokens[hf.arange(20) < n], n


RANDOM = np.random.default_rng(0)
XS = hf.asarray(RANDOM.normal(size=(6, 5)))
ORBIT = Orbit(hf.asarray([1.0, 0.0], dtype="float64"), hf.asarray(np.array([0.0, 0.8])))
TABLE = hf.asarray(RANDOM.normal(size=(7, 7)))
MODELS: dict[str, Callable[[], tuple[hf.ExportedProgram, Any]]] = {
    "thinker": lambda: (
        hf.export(thinker(), (XS[:2],), dynamic_shapes=[{0: hf.Dim("examples")}]),
        lambda f: f(XS),
    ),
    "orbit": lambda: (
        hf.export(fly, (ORBIT, 1.0), {"tolerance": 1e-2}),
        lambda f: f(ORBIT, 2.0, tolerance=1e-3),
    ),
    "decode": lambda: (
        hf.export(decode, (TABLE, hf.asarray(1), 5)),
        lambda f: f(TABLE, hf.asarray(3), 15),
    ),
}
CALLS = """
import sys, numpy as np, hopflow as hf
from hopflow import pytree
random = np.random.default_rng(0)
xs = hf.asarray(random.normal(size=(6, 5)))
table = hf.asarray(random.normal(size=(7, 7)))
thinker, orbit, decode = (hf.load(path) for path in sys.argv[1:])
kind = orbit.signature.in_spec.children()[0].type
start = kind(hf.asarray([1.0, 0.0], dtype="float64"), hf.asarray(np.array([0.0, 0.8])))
results = (
    thinker(xs),
    hf.jit(thinker)(xs),
    orbit(start, 2.0, tolerance=1e-3),
    decode(table, hf.asarray(3), 15),
)
for result in results:
    leaves = pytree.flatten(result)[0]
    print(*(np.asarray(leaf).tobytes().hex() for leaf in leaves))
"""


def bits(result: Any) -> str:
    leaves = pytree.flatten(result)[0]
    return " ".join(np.asarray(leaf).tobytes().hex() for leaf in leaves)


@pytest.mark.slow
def test_models_run_from_files_without_their_code(tmp_path: Path) -> None:
    paths, expected = [], []
    for name, make in MODELS.items():
        program, call = make()
        path = tmp_path / f"{name}.hopflow"
        program.save(path)
        paths.append(str(path))
        expected.append(bits(call(program)))
        if name == "thinker":
            expected.append(bits(call(hf.jit(program))))
    found = subprocess.run(
        [sys.executable, "-c", CALLS, *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.splitlines() == expected, found.stderr
    [*_, last] = expected
    assert last.split()[0]  # it has said something
