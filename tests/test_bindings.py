"""One captured program with its outer loop bound in every way, interpreted."""

from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.pipeline import lower
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.program import Binding, For, Program
from hopflow.loop_ir.verifier import verify
from hopflow.loop_ir.walk import statements
from hopflow.testing.bindings import one_by_one, rebound
from hopflow.testing.executions import run_rebound

BINDINGS = [
    Binding("serial"),
    Binding("gang", 4),
    Binding("gang", 16),
    Binding("threads"),
    Binding("grid"),
    Binding("block"),
]
STARTS = np.array([1, 7, 27, 2, 97, 6, 3, 1, 9, 871, 12])


def collatz(n: Any) -> Any:
    def step(n: Any, trips: Any) -> Any:
        n = hf.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1)
        return n, trips + 1

    return hf.while_loop(lambda n, _: n != 1, step, (n, 0))[1]


def captured() -> Program:
    graph = hf.trace(lambda n: hf.map(collatz, n), hf.asarray(STARTS)).graph
    return lower(graph, target=one_by_one(host()))[1]


def reference(n: int) -> int:
    trips = 0
    while n != 1:
        n, trips = (n // 2 if n % 2 == 0 else 3 * n + 1), trips + 1
    return trips


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_a_map_of_a_while_of_a_cond_gives_one_answer_under_every_binding(
    binding: Binding,
) -> None:
    program = captured()
    [loop] = [s for s in statements(program.body) if isinstance(s, For)]
    assert loop.independent
    loop.binding = binding
    verify(program)
    [trips] = run(program, [], [STARTS])
    assert trips.tolist() == [reference(int(n)) for n in STARTS]


def test_the_outermost_loops_are_bound_in_turn() -> None:
    f = hf.jit(lambda n: (hf.map(collatz, n), 2 * hf.sort(n), n[:, None] * n))
    f(hf.asarray(STARTS))
    kinds = [
        binding.kind
        for binding in rebound(lower(f.graph, target=one_by_one(host()))[1])
    ]
    assert kinds == ["gang", "grid", "block", "thread"]


def test_a_loop_whose_iterations_share_memory_is_not_bound() -> None:
    x = hf.asarray(np.array([[0, 1], [1, 1], [1, 0]]))

    def moved(row: Any) -> Any:
        return hf.sum(x.at[row[0], 0].set(row[1] + 7) * x)

    [found] = run_rebound(lambda: (hf.map(moved, x),))
    np.testing.assert_array_equal(found, np.asarray(hf.map(moved, x)))
