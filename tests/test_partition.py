"""What derivatives of operators keep: seen in the stacks of a loop."""

from functools import reduce
from typing import Any

import numpy as np

import hopflow as hf
from hopflow.graph.core import Graph
from hopflow.testing.executions import agree


def stacks(f: Any, *args: Any) -> list[str]:
    """The types of what the first loop of the gradient stacks for the second."""
    graph = hf.trace(lambda *a: hf.grad(f)(*a), *args, mode="fake").graph
    forward, _ = graph.nodes_of("scan")
    body: Graph = forward.params["body"]
    return [str(o.type) for o in body.outputs[forward.params["num_carry"] :]]


def test_what_is_cheap_is_computed_again_from_the_carry() -> None:
    def lorenz(s: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            x, y, z = c[0], c[1], c[2]
            new = [10.0 * (y - x), x * (28.0 - z) - y, x * y - 8 / 3 * z]
            return c + 0.001 * hf.stack(new), None

        return hf.sum(hf.scan(step, s, None, length=10)[0] ** 2)

    assert stacks(lorenz, np.ones(3, np.float32)) == ["f32[3]"]


def test_what_is_dear_is_kept_and_invariants_are_not_stacked() -> None:
    def f(w: Any, x: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            return hf.tanh((w * 2) @ c + v), None

        return hf.sum(hf.scan(step, x[0], x)[0])

    w, x = np.ones((4, 4), np.float32), np.ones((5, 4), np.float32)
    # What follows from the product, as large, and the carry that it was made of.
    assert stacks(f, w, x) == ["f32[4]", "f32[4]"]


def test_dear_invariants_are_saved_once() -> None:
    def step(c: Any, v: Any, w: Any) -> Any:
        return hf.tanh(c * v * hf.sum(hf.exp(w @ w)))

    def f(w: Any, x: Any) -> Any:
        return hf.sum(hf.scan(lambda c, v: (step(c, v, w), None), x[0], x)[0])

    def unrolled(w: Any, x: Any) -> Any:
        return hf.sum(reduce(lambda c, v: step(c, v, w), x, x[0]))

    w, x = np.full((4, 4), 0.1, np.float32), np.ones((5, 4), np.float32)
    assert stacks(f, w, x) == ["f32[4]"]
    graph = hf.trace(hf.grad(f), w, x, mode="fake").graph
    assert [n.op.name for n in graph.nodes].count("matmul") == 1  # before the loops
    for run in (hf.grad(f), hf.jit(hf.grad(f)), hf.jit(hf.grad(f), dynamic=True)):
        agree(run(w, x), hf.grad(unrolled)(w, hf.asarray(x)))


def test_random_bits_are_kept() -> None:
    def f(x: Any, key: Any) -> Any:
        def step(c: Any, k: Any) -> Any:
            return hf.sin(c) * hf.random.uniform(k, (4,)), None

        return hf.sum(hf.scan(step, x, hf.random.split(key, 5))[0])

    args = np.ones(4, np.float32), hf.random.key(0)
    assert stacks(f, *args) == ["f32[4]", "f32[4]"]
    graph = hf.trace(hf.grad(f), *args, mode="fake").graph
    bodies = [loop.params["body"] for loop in graph.nodes_of("scan")]
    drawn = [[n.op.name for n in b.nodes].count("threefry2x32") for b in bodies]
    assert drawn == [1, 0]


def test_slices_and_captures_are_there_anyway() -> None:
    def f(w: Any, x: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            return c + hf.sin(v * w) * hf.exp(w), None

        return hf.sum(hf.scan(step, w * 0, x)[0])

    assert stacks(f, np.ones(4, np.float32), np.ones((5, 4), np.float32)) == []


def test_of_values_as_large_the_one_that_leaves_least_to_compute_is_kept() -> None:
    def f(x: Any) -> Any:
        return hf.sum(hf.scan(lambda c, _: (hf.tanh(2 * c), None), x, length=5)[0])

    graph = hf.trace(hf.grad(f), np.ones(4, np.float32), mode="fake").graph
    _, backward = graph.nodes_of("scan")
    assert "tanh" not in {n.op.name for n in backward.params["body"].nodes}
