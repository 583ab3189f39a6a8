"""Memory of kernel programs: what shares it, what is copied, and what checks that."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.kernel_program.program import KernelProgram, Value
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.parts import Part, parts
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule.schedule import memory_plans
from hopflow.errors import KernelProgramError
from hopflow.testing.meanings import run_memory

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
    assert not [x for x in found if x.startswith(("copy ", "swap ", "for "))]


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


# --- parts ----------------------------------------------------------------------------


def _halves(x: Any) -> Any:
    return hf.concat([hf.sin(x[:5]), hf.cumulative_sum(x[5:])])


def _replaced(x: Any, y: Any) -> Any:
    a = hf.sin(x)
    a[2] = 7.0
    return hf.concat([a, hf.cumulative_sum(y)])


def _chosen(x: Any, y: Any) -> Any:
    def one() -> Any:
        return hf.sin(x)

    return hf.concat([hf.cond(x[0] > 3, one, lambda: hf.cumulative_sum(x)), y * 2])


def _nested(x: Any, y: Any) -> Any:
    inner = hf.concat([hf.sin(x), hf.cumulative_sum(y)])
    return hf.concat([inner, hf.concat([hf.cumulative_sum(inner), y * 2.0])])


def _in_turns(x: Any, y: Any) -> Any:
    first = hf.concat([hf.cumulative_sum(x), hf.sin(y)])
    second = hf.concat([hf.cumulative_sum(first[3:]), hf.sin(first[:3])])
    return hf.concat([hf.cumulative_sum(second[7:]), hf.sin(second[:7])])


def _trajectory(x: Any) -> Any:
    def step(c: Any, t: Any) -> Any:
        return hf.sin(c) + t, hf.sin(c) + t

    _, rows = hf.scan(step, x, hf.arange(5.0))
    return hf.concat([x[None], rows])


def _rows(x: Any) -> Any:
    def step(c: Any, t: Any) -> Any:
        return c + t, hf.concat([hf.sin(c * t), hf.cumulative_sum(c)])

    return hf.scan(step, x, hf.arange(5.0))[1]


def _leapfrog(x: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return hf.concat([hf.sin(a[:5]), hf.cumulative_sum(b[5:])]), a

    return hf.fori_loop(0, 4, step, (x, x * 2.0))[0]


PARTS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "concat": (_halves, (X,), 2),
    "concat along another axis": (
        lambda x: hf.concat([hf.sin(x), hf.cumulative_sum(x, axis=1)], axis=1),
        (X.reshape((2, 4)),),
        2,
    ),
    "stack": (lambda x, y: hf.stack([hf.sin(x), hf.cumulative_sum(y)]), (X, Y), 2),
    "stack along the last axis": (
        lambda x, y: hf.stack([hf.sin(x), hf.cumulative_sum(y)], axis=1),
        (X, Y),
        2,
    ),
    "pad": (lambda x: hf.pad(hf.cumulative_sum(x), (2, 3)), (X,), 1),
    "pad of two axes": (
        lambda x: hf.pad(hf.cumulative_sum(x, axis=1), ((1, 0), (2, 3))),
        (np.arange(40.0).reshape((2, 20)),),
        1,
    ),
    "a carry": (lambda x: hf.fori_loop(0, 3, lambda _, c: _halves(c), x), (X,), 2),
    "rows": (_rows, (X,), 2),
    "the rows of a loop": (_trajectory, (X,), 1),
    "their transpose": (lambda x: hf.vmap(_trajectory)(x), (X.reshape((2, 4)),), 1),
    "examples of a batch": (
        lambda x: hf.vmap(_halves)(hf.stack([x, x])),
        (np.arange(40.0),),
        2,
    ),
    "two carries": (_leapfrog, (X,), 2),
    "elements that are replaced": (_replaced, (X, Y), 2),
    "results of a branch": (_chosen, (X, Y), 1),
    "parts of parts": (_nested, (X, Y), 4),
    "one after the other": (_in_turns, (X, Y), 3),
    "nothing at one end": (
        lambda x: hf.concat([x[:0], hf.cumulative_sum(x), hf.sin(x[:0])]),
        (X,),
        0,
    ),
    "one value twice": (
        lambda x: hf.concat([a := hf.cumulative_sum(x), x * 2.0, a]),
        (X,),
        1,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_a_piece_of_a_result_is_made_there(name: str, dynamic: bool) -> None:
    f, args, count = PARTS[name]
    with hf.debug():
        want = np.asarray(f(*map(hf.asarray, args)))
    jitted = hf.jit(f, dynamic=dynamic)
    np.testing.assert_allclose(jitted(*args), want, rtol=1e-13)
    [found] = run_memory(f, *map(hf.asarray, args))
    np.testing.assert_allclose(found, want, rtol=1e-13)
    if not dynamic:  # sizes that a call knows say what is computed where it is read
        assert jitted.memory.count(" part of m") == count


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, y: hf.concat([x, y * 2.0]), "`x` is an input, which stays as it is"),
        (
            lambda x, y: (a := hf.sin(x), hf.concat([a, y * 2.0])),
            "`v2` and `v0` are live at the same time",
        ),
        (
            lambda x, y: hf.concat([a := hf.cumulative_sum(x), y, a]),
            "`v0` is a part of `v1`",
        ),
        (
            lambda x, y: hf.concat(
                [hf.linalg.cholesky(hf.eye(8) * 2.0 + x * 0.0), x[None]]
            ),
            "has to be dense",
        ),
        (
            lambda x, y: hf.fori_loop(
                0, 3, lambda _, c: hf.concat([c[4:], hf.cumulative_sum(y[:4])]), x
            ),
            "is made outside the loop",
        ),
    ],
)
def test_a_piece_that_is_copied_says_why(f: Any, reason: str) -> None:
    jitted = hf.jit(f)
    jitted(X, Y)
    lines = [x for x in jitted.memory.splitlines() if "into a part of" in x]
    assert any(reason in x and "test_memory.py:" in x for x in lines)


def test_a_result_of_one_piece_is_that_piece() -> None:
    jitted = hf.jit(lambda x: hf.concat([hf.cumulative_sum(x)]))
    jitted(X)
    assert sum("result 0: v0, v1" in x for x in jitted.memory.splitlines()) == 1


def test_a_step_does_not_write_the_piece_of_its_carry_that_stays() -> None:
    def step(_: Any, x: Any) -> Any:
        return hf.concat([x[:3] * 0.5, x[3:]])

    found = loops(lambda x: (hf.fori_loop(0, 5, step, x),), X)
    assert not [x for x in found if x.startswith(("copy ", "swap ", "for "))]


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


def test_a_part_that_is_read_after_its_whole_is_written_is_found() -> None:
    plan = planned(lambda x: (a := hf.sin(x), hf.concat([a, x * 2.0])), X)
    found = _misplaced(plan)
    with pytest.raises(KernelProgramError, match="is read where its memory holds"):
        verify_memory(plan)
    assert found.value.name == "v0"


@pytest.mark.parametrize(
    ("first", "match"), [(1, "is the same element"), (12, "`v0` does not fit `v2`")]
)
def test_a_part_in_another_place_than_its_piece_is_found(
    first: int, match: str
) -> None:
    plan = planned(lambda x: hf.concat([hf.sin(x), x * 2.0]), X)
    [part] = [a for a in plan.allocations if a.part_of is not None]
    assert part.part_of is not None
    part.part_of = part.part_of._replace(window=((0, first),))
    with pytest.raises(KernelProgramError, match="is in memory that `v2` is written"):
        verify_memory(plan)
    with pytest.raises(KernelProgramError, match=match):
        run_planned(plan.program, {plan.program: plan}, [np.asarray(X)])


def test_a_part_that_is_written_over_is_found_when_it_is_read() -> None:
    def f(x: Any) -> Any:
        a = hf.sin(x)
        b = hf.cumulative_sum(x[:4])
        return hf.concat([b, a]), hf.sum(b[::-1] * a[:4])

    plan = planned(f, X)
    _misplaced(plan)
    with pytest.raises(KernelProgramError, match="where its memory holds"):
        run_planned(plan.program, {plan.program: plan}, [np.asarray(X)])


def _misplaced(plan: MemoryPlan) -> Part:
    """Plant a fault: make a value a part of a result, whoever reads it later."""
    equations = [q for b in all_blocks(plan.program.block) for q in b.equations]
    part = next(p for q in equations for p in parts(q) if p.value in plan.allocations)
    value, result = plan.of(part.value), plan.of(part.result)
    assert value is not None
    assert result is not None
    value.part_of = part
    result.parts.append(value)
    return part


def _of_type(program: KernelProgram, shape: tuple[int, ...]) -> list[Value]:
    equations = [q for b in all_blocks(program.block) for q in b.equations]
    return [v for q in equations for v in q.results if v.shape == shape]


def _share(plan: MemoryPlan, first: Value, second: Value) -> None:
    """Plant a fault: give one value the memory of another, whoever reads that."""
    allocation = plan.of(first)
    assert allocation is not None
    plan.allocations.put(second, allocation)
