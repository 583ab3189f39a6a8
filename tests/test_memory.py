"""Memory of kernel programs: what shares it, what is copied, and what checks that."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.kernel_program.program import KernelProgram, Value
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule.schedule import memory_plans
from hopflow.errors import KernelProgramError

pytestmark = pytest.mark.slow

X, Y, Z = (np.arange(8.0) + k for k in range(3))


def planned(f: Callable[..., Any], *args: Any) -> MemoryPlan:
    program = kernels_of(hf.trace(f, *args).graph)
    *_, (plan, _) = memory_plans(program)
    verify_memory(plan)
    return plan


def loops(f: Callable[..., Any], *args: Any) -> list[str]:
    """The lines of the Loop IR of a function, whose result is that of `hf.debug`."""
    jitted = hf.jit(f)
    with hf.debug():
        want = f(*map(hf.asarray, args))
    for got, expected in zip(jitted(*args), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    lines = [line.strip() for line in jitted.loop_ir.splitlines()]
    start = next(
        n for n, line in enumerate(lines) if line in ("do:",) or "step" in line
    )
    end = max(n for n, line in enumerate(lines) if not line.startswith("copy out"))
    return lines[start : end + 1]


def moves(f: Callable[..., Any], *args: Any) -> list[str]:
    """The copies and exchanges of memory in the loop of a function."""
    return [x for x in loops(f, *args) if x.startswith(("copy ", "swap "))]


# --- in place -------------------------------------------------------------------------


def write_to_copy(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(i: Any, x: Any) -> Any:
        y = change(x)
        y[i % 8] = 5.0
        return y

    return lambda x: (hf.fori_loop(0, 5, step, x),)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy(),
        lambda x: hf.reshape(hf.reshape(x, (2, 4)), (8,)).copy(),
        lambda x: hf.positive(x).copy(),
        lambda x: hf.astype(x, hf.float64, copy=True),
    ],
)
def test_a_write_to_a_copy_in_a_loop_is_in_place(change: Any) -> None:
    found = loops(write_to_copy(change), X)
    assert not [x for x in found[1:] if x.startswith(("copy ", "swap ", "for "))]


def test_a_copy_that_is_read_afterwards_is_made() -> None:
    def step(i: Any, x: Any) -> Any:
        y = x.copy()
        y[i % 8] = 5.0
        return y + x[::-1]

    found = moves(lambda x: (hf.fori_loop(0, 5, step, x),), X)
    assert sum(x.startswith("copy ") for x in found) == 1


LOOPS: dict[str, tuple[Callable[..., Any], int]] = {
    "crossed": (lambda _, a, b: (b + 1.0, a * 2.0), 0),
    "fibonacci": (lambda _, a, b: (b, a + b), 1),
    "exchanged": (lambda _, a, b: (b, a), 1),
    "leapfrog": (lambda _, a, b: (2.0 * a - b + hf.roll(a, 1), a), 1),
    "both elementwise": (lambda _, a, b: (a + b, a - b), 0),
    "updates": (lambda i, a, b: (b.at[i].set(1.0), a.at[i].add(2.0)), 1),
    "a branch": (
        lambda i, a, b: (a, hf.cond(i > 2, lambda: b.at[i].set(a[i]), lambda: b)),
        0,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_carries_exchange_their_memory_and_are_not_copied(name: str) -> None:
    body, swaps = LOOPS[name]
    found = moves(lambda a, b: hf.fori_loop(0, 5, body, (a, b)), X, Y)
    assert [x.split()[0] for x in found] == ["swap"] * swaps


def test_three_carries_rotate() -> None:
    body = lambda _, a, b, c: (b, c, a + b[::-1])  # noqa: E731
    found = moves(lambda *xs: hf.fori_loop(0, 5, body, xs), X, Y, Z)
    assert {x.split()[0] for x in found} == {"swap"}


def test_one_value_for_two_carries_is_copied_once() -> None:
    def body(_: Any, a: Any, b: Any) -> Any:
        both = hf.cumulative_sum(a + b)
        return both, both

    found = moves(lambda a, b: hf.fori_loop(0, 5, body, (a, b)), X, Y)
    assert sum(x.startswith("copy ") for x in found) == 1


def test_rows_are_made_in_their_stack() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, hf.cumulative_sum(x) * 1.5

    found = loops(lambda xs: hf.scan(step, xs[0], xs), np.ones((5, 8)))
    assert not [x for x in found if x.startswith("copy ")]
    stored = [x for x in found if x.startswith("out1[")]
    assert len(stored) == 1


def test_a_copy_says_why_it_is_made() -> None:
    jitted = hf.jit(lambda x: hf.fori_loop(0, 3, lambda _, c: c + 1.0, x))
    jitted(X)
    assert "copy `x` as the first carry: `x` is an input, which stays as it is" in (
        jitted.memory
    )
    assert "test_memory.py:" in jitted.memory


# --- what checks a plan ---------------------------------------------------------------


def shifted(x: Any) -> Any:
    y = hf.sin(x)
    return hf.sum(hf.cumulative_sum(y) * y[::-1])


def test_a_value_that_is_read_after_its_memory_was_given_away_is_found() -> None:
    plan = planned(shifted, X)
    first, second = _of_type(plan.program, X.shape)[:2]
    _share(plan, first, second)
    with pytest.raises(KernelProgramError, match="is read where its memory holds"):
        verify_memory(plan)


def test_an_element_that_is_written_over_is_found_when_it_is_read() -> None:
    plan = planned(shifted, X)
    arrays = [np.asarray(X)]
    run_planned(plan.program, {plan.program: plan}, arrays)
    first, second = _of_type(plan.program, X.shape)[:2]
    _share(plan, first, second)
    with pytest.raises(KernelProgramError, match="where its memory holds"):
        run_planned(plan.program, {plan.program: plan}, arrays)


def test_an_input_that_is_written_over_is_found() -> None:
    plan = planned(lambda x: hf.sum(hf.cumulative_sum(x)), X)
    [x] = plan.program.block.parameters
    [made] = _of_type(plan.program, X.shape)
    _share(plan, x, made)
    with pytest.raises(KernelProgramError, match="is written over"):
        verify_memory(plan)


def _of_type(program: KernelProgram, shape: tuple[int, ...]) -> list[Value]:
    equations = [q for b in all_blocks(program.block) for q in b.equations]
    return [v for q in equations for v in q.results if v.shape == shape]


def _share(plan: MemoryPlan, first: Value, second: Value) -> None:
    """Plant a fault: give one value the memory of another, whoever reads that."""
    allocation = plan.of(first)
    assert allocation is not None
    plan.allocations.put(second, allocation)
