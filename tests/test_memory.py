"""Memory of kernel programs: what shares it, what is copied, and what checks that."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from optree import tree_leaves

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
)
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.memory.allocations import Allocations
from hopflow.compiler.memory.in_place import in_place
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.parts import Part, parts
from hopflow.compiler.memory.place import place
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule.schedule import memory_plans
from hopflow.errors import KernelProgramError
from hopflow.graph.core import Node, size_of
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.kernels import Library
from hopflow.symbolic.size import Symbol
from hopflow.testing.executions import run_loop_ir, run_memory

pytestmark = pytest.mark.slow

X, Y, Z = (np.arange(8.0) + k for k in range(3))
CARRIES = [np.arange(40.0) + k for k in range(3)]  # too long for variables


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
    text = jitted.loop_ir.splitlines()
    lines = [line.strip() for line in text]
    start = next(
        n for n, line in enumerate(lines) if line in ("do:",) or "step" in line
    )
    end = max(n for n, line in enumerate(text) if not line.startswith("    copy out"))
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


@pytest.mark.parametrize("kind", ["scan", "while_loop", "gradient"])
def test_what_a_loop_stacks_of_its_carry_is_copied_before_the_next_one(
    kind: str,
) -> None:
    """The next carry is then written over the one before."""

    def half(c: Any) -> Any:
        return c * 0.5 + c * c

    def last(c: Any) -> Any:
        return hf.sum(hf.scan(lambda c, _: (half(c), None), c, length=5)[0])

    kinds: dict[str, Callable[..., Any]] = {
        "scan": lambda x: hf.scan(lambda c, _: (half(c), c), x, length=5),
        "while_loop": lambda x: hf.while_loop(
            lambda c, ys, k: k < 5,
            lambda c, ys, k: (half(c), ys.at[k].set(c), k + 1),
            (x, hf.zeros((5, 8)), 0),
        )[:2],
        "gradient": lambda x: (hf.grad(last)(x),),
    }
    f = kinds[kind]
    assert not [x for x in moves(f, X) if x.startswith("swap ")]
    with hf.debug():
        expected = f(hf.asarray(X))
    for x, y in zip(hf.jit(f)(X), expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-15)


@pytest.mark.parametrize("name", LOOPS)
def test_carries_exchange_their_memory_and_are_not_copied(name: str) -> None:
    body, swaps = LOOPS[name]
    found = moves(lambda a, b: hf.fori_loop(0, 5, body, (a, b)), *CARRIES[:2])
    assert [x.split()[0] for x in found] == ["swap"] * swaps


def test_three_carries_rotate() -> None:
    body = lambda _, a, b, c: (b, c, a + b[::-1])  # noqa: E731
    found = moves(lambda *xs: hf.fori_loop(0, 5, body, xs), *CARRIES)
    assert {x.split()[0] for x in found} == {"swap"}


def test_one_value_for_two_carries_is_copied_once() -> None:
    def body(_: Any, a: Any, b: Any) -> Any:
        both = hf.cumulative_sum(a + b)
        return both, both

    found = moves(lambda a, b: hf.fori_loop(0, 5, body, (a, b)), *CARRIES[:2])
    assert sum(x.startswith("copy ") for x in found) == 1


def test_rows_are_made_in_their_stack() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, hf.cumulative_sum(x) * 1.5

    found = loops(lambda xs: hf.scan(step, xs[0], xs), np.ones((5, 8)))
    assert not [x for x in found if x.startswith("copy ")]
    stored = [x for x in found if x.startswith("out1[")]
    assert len(stored) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_carry_that_is_updated_in_place_is_made_in_the_result(dynamic: bool) -> None:
    def inner(i: Any, x: Any) -> Any:
        return hf.fori_loop(0, i, lambda k, y: y.at[k % 8].add(1.0), x)

    jitted = hf.jit(
        lambda x: hf.fori_loop(0, 5, inner, hf.cumulative_sum(x)), dynamic=dynamic
    )
    want = np.cumsum(X) + np.array([4, 3, 2, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.asarray(jitted(X)), want)
    assert "copy out" not in jitted.loop_ir


def test_a_carry_that_is_exchanged_is_copied_to_the_result() -> None:
    jitted = hf.jit(lambda a, b: hf.fori_loop(0, 3, lambda _, a, b: (b, a), (a, b)))
    first, second = jitted(X, Y)
    np.testing.assert_array_equal(np.asarray(first), Y)
    np.testing.assert_array_equal(np.asarray(second), X)
    assert jitted.loop_ir.count("copy out") == 2


def test_a_carry_that_is_a_result_twice_is_copied_once() -> None:
    def f(x: Any) -> Any:
        y = hf.fori_loop(0, 3, lambda i, y: y.at[i].set(2.0), x)
        return y, y

    jitted = hf.jit(f)
    for y in jitted(X):
        np.testing.assert_array_equal(np.asarray(y), np.concat([[2.0] * 3, X[3:]]))
    assert jitted.loop_ir.count("copy ") == 2  # of the input, and of one result


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


def _found(x: Any, y: Any) -> Any:
    """Sizes that the run finds, both before the first piece is made."""
    a, b = x[x > 3.0], y[y < 9.0]
    return hf.concat([hf.cumulative_sum(a), hf.sin(y), hf.cumulative_sum(b)])


def _found_in_steps(x: Any, y: Any) -> Any:
    def step(k: Any, c: Any) -> Any:
        found = c[c > 3.0 + k]
        both = hf.concat([hf.sin(y * c), hf.cumulative_sum(found)])
        return c + hf.cumulative_sum(both)[-1]

    return hf.fori_loop(0, 4, step, x)


def _found_in_branches(x: Any, y: Any) -> Any:
    a = x[x > 3.0]

    def one() -> Any:
        first = hf.concat([hf.cumulative_sum(a), hf.sin(y)])
        second = hf.concat([hf.cumulative_sum(first), hf.sin(a)])
        return hf.cumulative_sum(second)[-3:]

    return hf.cond(y[0] > 0.0, one, lambda: x[:3])


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
    "sizes that the run finds": (_found, (X, Y), 2),
    "sizes that the run finds in steps": (_found_in_steps, (X, Y), 1),
    "sizes that the run finds in branches": (_found_in_branches, (X, Y), 2),
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
                [hf.linalg.cholesky(hf.eye(8) * 2.0 + x * 0.0), x[:, None]], axis=1
            ),
            "has to be dense",
        ),
        (
            lambda x, y: hf.fori_loop(
                0, 3, lambda _, c: hf.concat([c[4:], hf.cumulative_sum(y[:4])]), x
            ),
            "is made outside the loop",
        ),
        (
            lambda x, y: hf.concat(
                [hf.cumulative_sum(x[x > 3.0]), hf.cumulative_sum(y[y > 9.0])]
            ),
            "the size of `v14` is known only there",
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
    assert not [x for x in found if x.startswith(("copy ", "swap ", "for i"))]


# --- what checks a plan ---------------------------------------------------------------


def _sums(x: Any) -> Any:
    return hf.cumulative_sum(hf.sin(x))


def _both_ends(c: Any) -> Any:
    first, last = hf.sin(c[:5]), hf.sin(c[59:])
    first, last = hf.sort(first), hf.sort(last)
    return hf.concat([hf.cumulative_sum(first), c[5:59], hf.cumulative_sum(last)])


JOINED: dict[str, tuple[Any, int]] = {
    "first": (lambda c: hf.concat([_sums(c[:5]), c[5:]]), 1),
    "last": (lambda c: hf.concat([c[:59], _sums(c[59:])]), 1),
    "in between": (lambda c: hf.concat([c[:9] * 2.0, _sums(c[:5]), c[14:]]), 1),
    "several": (_both_ends, 2),
    "what the second needs": (
        lambda c: hf.concat([_sums(c[:5]), c[5:59], _sums(c[:5] * 2.0)]),
        1,
    ),
    "from where it is to be": (
        lambda c: hf.concat([hf.cumulative_sum(c[:5]), c[5:]]),
        0,
    ),
    "read afterwards": (
        lambda c: (a := _sums(c[:5]), hf.concat([a, c[5:]]) * hf.sum(c))[1],
        0,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_a_new_piece_is_joined_with_the_rest_where_that_lies(
    name: str, dynamic: bool
) -> None:
    step, count = JOINED[name]

    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: step(c), x)

    x = np.linspace(0.0, 1.0, 64)
    with hf.debug():
        want = f(hf.asarray(x))
    jitted = hf.jit(f, dynamic=dynamic)
    np.testing.assert_allclose(jitted(x), want, rtol=1e-9, atol=1e-9)
    for run in (run_memory, run_loop_ir):
        np.testing.assert_allclose(run(f, hf.asarray(x))[0], want, rtol=1e-9, atol=1e-9)
    if not dynamic:
        assert jitted.memory.count(" part of m") == count


def test_a_step_touches_the_new_piece_alone() -> None:
    def step(_: Any, x: Any) -> Any:
        return (hf.concat([_sums(x[:5]), x[5:]]),)

    text = loops(lambda x: hf.fori_loop(0, 3, step, (x,)), np.linspace(0.0, 1.0, 64))
    assert not any("59" in line or "copy" in line or "swap" in line for line in text)


@pytest.mark.parametrize(
    "step",
    [
        lambda c: (a := _sums(c[:5]), hf.concat([a, c[5:] + hf.max(c * a[4])]))[1],
        lambda c: hf.concat([_sums(c[:5]), c[6:] + 1.0, c[5:6]]),
        lambda c: hf.concat([_sums(c[:5]), hf.cumulative_sum(c[5:])]),
    ],
)
def test_a_part_over_what_is_still_read_is_found(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: step(c), x)

    monkeypatch.setattr(hf.config, "verify", False)
    monkeypatch.setattr(Allocations, "conflict", lambda *_, is_sized: None)
    monkeypatch.setattr(Allocations, "_overlap", lambda *_: None)
    program = kernels_of(hf.trace(f, np.linspace(0.0, 1.0, 64)).graph)
    *_, (plan, _) = memory_plans(program)
    with pytest.raises(KernelProgramError):
        verify_memory(plan)
    with pytest.raises(KernelProgramError, match="where its memory holds"):
        run_planned(program, {program: plan}, [np.linspace(0.0, 1.0, 64)])


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
    def f(x: Any) -> Any:
        a = hf.cumulative_sum(x)
        b = hf.concat([a, x * 2.0])
        return b, hf.cumulative_sum(a + b[3:11])

    plan = planned(f, X)
    found = _misplaced(plan)
    with pytest.raises(KernelProgramError, match="is read where its memory holds"):
        verify_memory(plan)
    assert found.value.name == "v0"


def test_a_part_that_is_a_result_of_its_own_is_found() -> None:
    plan = planned(lambda x: (a := hf.sin(x), hf.concat([a, x * 2.0])), X)
    _misplaced(plan)
    with pytest.raises(KernelProgramError, match="`v0` is no part of `v2`"):
        verify_memory(plan)


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
    with pytest.raises(KernelProgramError, match="`v0` is no part of `v2`"):
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


# --- parts that libraries, Python and functions make and read -------------------------


A = np.random.default_rng(0).normal(size=(8, 8))


def _factors(a: Any) -> Any:
    return hf.concat([hf.linalg.cholesky(a @ a.T + hf.eye(8)), hf.linalg.inv(a)])


def _solutions(a: Any) -> Any:
    q, r = hf.linalg.qr(a)
    return hf.stack([hf.linalg.solve(a, a.T), q, r])


def _read_by_libraries(a: Any) -> Any:
    first = hf.sin(a)
    q, _ = hf.linalg.qr(first)
    return hf.concat([first, q, hf.linalg.inv(q)])


def _orders_of_parts(a: Any) -> Any:
    inner = hf.concat([hf.argsort(a), hf.argsort(-a)])
    return hf.concat([hf.argsort(inner * 2), inner])


def _python(a: Any) -> Any:
    def host(x: Any) -> Any:
        return np.asarray(x) * 2.0

    first = hf.callback(host, hf.spec("f64[8, 8]"), a)
    return hf.concat([first, hf.callback(host, hf.spec("f64[8, 8]"), first + 1.0)])


def _inverses(a: Any) -> Any:
    """Rows of a stack, and the stack is a part of the result."""

    def step(c: Any, _: Any) -> Any:
        return c * 0.5, hf.linalg.inv(c)

    return hf.concat([hf.sin(a)[None], hf.scan(step, a, length=3)[1]])


def _parts_of_rows(a: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        return c * 0.5, hf.concat([hf.linalg.inv(c), hf.sin(c)])

    return hf.scan(step, a, length=3)[1]


def _beside_rows(a: Any) -> Any:
    """The rows have gaps: what the library makes is copied there."""

    def step(c: Any, _: Any) -> Any:
        return c * 0.5, hf.linalg.inv(c)

    return hf.concat([hf.sin(a)[None], hf.scan(step, a, length=1)[1]], axis=2)


def _columns(a: Any) -> Any:
    return hf.concat([hf.linalg.inv(a), hf.sin(a)], axis=1)


def _columns_of_columns(a: Any) -> Any:
    rows = hf.concat([hf.linalg.inv(a), hf.sin(a)])
    return hf.concat([rows, hf.cumulative_sum(rows, axis=1)], axis=1)


def _none_of_them(a: Any) -> Any:
    q, r = hf.linalg.qr(a[:0] * 2.0)
    return hf.concat([r, hf.linalg.inv(a)]), q


DENSE: dict[str, tuple[Any, int, int]] = {
    "factors": (_factors, 2, 0),
    "solutions": (_solutions, 3, 0),
    "libraries read": (_read_by_libraries, 3, 0),
    "parts of parts": (_orders_of_parts, 3, 0),
    "python": (_python, 2, 0),
    "rows of a part": (_inverses, 2, 0),
    "parts of rows": (_parts_of_rows, 2, 0),
    "rows with gaps": (_beside_rows, 2, 0),
    "columns": (_columns, 1, 1),
    "columns of columns": (_columns_of_columns, 1, 1),
    "nothing": (_none_of_them, 0, 0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_a_part_that_is_dense_is_made_as_a_whole(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, count, copies = DENSE[name]
    with hf.debug():
        want = tree_leaves(f(hf.asarray(A)))
    jitted = hf.jit(f, dynamic=dynamic)
    runs = [jitted(A)]
    if name != "python":
        runs += [run(f, hf.asarray(A)) for run in (run_memory, run_loop_ir)]
    monkeypatch.setattr(hf.config, "check_bounds", True)
    runs.append(hf.jit(f, dynamic=dynamic)(A))
    for found in runs:
        for got, expected in zip(tree_leaves(found), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    if not dynamic:
        assert jitted.memory.count(" part of m") == count
        assert jitted.memory.count("has to be dense") == copies


@pytest.mark.parametrize("f", [_columns, _beside_rows])
def test_what_a_library_makes_in_memory_with_gaps_is_found(
    f: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "verify", False)
    monkeypatch.setattr(Allocations, "has_to_be_dense", lambda *_: None)
    program = kernels_of(hf.trace(f, A).graph)
    *_, (plan, _) = memory_plans(program)
    with pytest.raises(KernelProgramError, match="has memory with gaps"):
        verify_memory(plan)
    with pytest.raises(KernelProgramError, match="has gaps: it is in `v"):
        run_planned(program, {program: plan}, [A])


@pytest.mark.parametrize(
    ("f", "call"),
    [
        (lambda x, y: x[3:35] @ y, "gemm(in0[3:35], in1, out0,"),
        (lambda x, y: x @ y[3:35].T, "gemm_nt(in0, in1[3:35], out0,"),
        (lambda x, y: (x @ y)[3:35] @ y, "gemm(b1[3:35], in1, out0,"),
        (lambda x, y: hf.concat([x @ y, y @ y]), "gemm(in0, in1, out0[0:40],"),
        (lambda x, y: hf.stack([x @ y, y @ y]), "gemm(in0, in1, out0[0],"),
        (
            lambda x, y: hf.scan(lambda c, _: (c * 0.5, c @ y), x, length=3)[1],
            "gemm(carry1, in1, out0[step2],",
        ),
    ],
)
def test_rows_of_a_matrix_are_multiplied_where_they_lie(f: Any, call: str) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 40, 40))
    jitted = hf.jit(f)
    with hf.debug():
        want = f(hf.asarray(x), hf.asarray(y))
    np.testing.assert_allclose(jitted(x, y), want, rtol=1e-12, atol=1e-12)
    [got] = run_loop_ir(f, hf.asarray(x), hf.asarray(y))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert f"call {call}" in jitted.loop_ir


# --- wrong plans, made by hand --------------------------------------------------------

[AXIS] = d.axes(1)
BACK = e.sub(e.index(7), AXIS)
LONG = TensorType(dtypes.float64, (8,))
ROWS = TensorType(dtypes.float64, (3, 8))
FLOATS = TensorType(dtypes.float32, (8,))
SCALAR = TensorType(dtypes.float64)
SQUARE = TensorType(dtypes.float64, (3, 3))
TRUTH = TensorType(dtypes.bool_)
NODE = Node("call_function", None, (), {})


class Draft:
    """A program whose values have memory of their own, to be spoilt.

    plant   gives values the memory of the first of them
    """

    def __init__(self, *parameters: Value, **options: Any) -> None:
        self.program = KernelProgram("f", Block(list(parameters)))
        self.options = options
        self.names = count()

    def add(
        self, definition: Any, *types: TensorType, block: Block | None = None
    ) -> Any:
        """The results of one more equation: LONG if there are no types."""
        made = [Value(f"v{next(self.names)}", t) for t in types or (LONG,)]
        equation = Equation(tuple(made), definition, NODE)
        (block or self.program.block).equations.append(equation)
        return made if len(made) > 1 else made[0]

    def pointwise(
        self, element: Expr, type_: TensorType = LONG, block: Block | None = None
    ) -> Value:
        found: Value = self.add(d.Pointwise((element,)), type_, block=block)
        return found

    def view(self, element: Expr, type_: TensorType = LONG) -> Value:
        found: Value = self.add(d.Pointwise((element,), is_view=True), type_)
        return found

    def set_first(self, base: Value, value: Expr, block: Block | None = None) -> Value:
        """`base` with another first element."""
        own = d.Scatter(base, (1,), (e.index(0),), value)
        found: Value = self.add(own, base.type, block=block)
        return found

    def plan(
        self, *results: Value, functions: Sequence[KernelProgram] = ()
    ) -> MemoryPlan:
        """The plan, which is a right one."""
        self.program.block.results = list(results)
        self.program.functions += functions
        verify_kernels(self.program)
        plan = MemoryPlan(self.program, **self.options)
        place(plan)
        verify_memory(plan)
        return plan


def vector(name: str = "x", type_: TensorType = LONG) -> Value:
    return Value(name, type_)


def one_more(x: Value) -> Expr:
    return e.add(x[AXIS,], e.const(1.0, dtypes.float64))


def both(x: Value, y: Value) -> Expr:
    return e.add(x[AXIS,], y[AXIS,])


def one_more_of(x: Expr) -> Expr:
    return e.add(x, e.const(1.0, dtypes.float64))


def both_of(x: Value, r: Expr) -> Expr:
    return e.add(x[AXIS,], x[r,])


def row_of(plan: MemoryPlan, row: Value, stack: Value) -> None:
    own, memory = plan.of(row), plan.of(stack)
    assert own is not None
    assert memory is not None
    own.row_of = memory, plan.live.makers[stack]


def output(plan: MemoryPlan, value: Value, number: int) -> None:
    own = plan.of(value)
    assert own is not None
    own.output = number


def live_at_once() -> MemoryPlan:
    draft = Draft(x := vector())
    first, second = draft.pointwise(one_more(x)), draft.pointwise(x[BACK,])
    plan = draft.plan(draft.pointwise(both(first, second)))
    _share(plan, first, second)
    return plan


def update_before_a_reader() -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    changed = draft.set_first(base, x[e.index(3),])
    plan = draft.plan(changed, draft.pointwise(base[BACK,]))
    _share(plan, base, changed)
    return plan


def branches(ends_with_reader: bool) -> MemoryPlan:
    draft = Draft(x := vector(), b := vector("b", TRUTH))
    base = draft.pointwise(one_more(x))
    updating, reading = Block([]), Block([])
    changed = draft.set_first(base, x[e.index(3),], updating)
    updating.results = [changed]
    reading.results = [draft.pointwise(base[BACK,], block=reading)]
    found = draft.add(Branch(b, (updating, reading)))
    last = draft.pointwise(both(found, base)) if ends_with_reader else found
    plan = draft.plan(last)
    _share(plan, base, changed)
    return plan


def loop(
    draft: Draft,
    step: Callable[[Block], Sequence[Value]],
    *first: Value,
    rows: int = 0,
    test: Callable[[Block], Value] | None = None,
) -> Any:
    """The results of a loop of three steps, or of a `while`."""
    body = Block([Value(f"c{k}", v.type) for k, v in enumerate(first)])
    body.results = list(step(body))
    types = [v.type for v in first] + [ROWS] * rows
    if test is None:
        counter = Var("t0", dtypes.int64)
        return draft.add(Loop(counter, 3, first, body), *types)
    head = Block([Value(f"h{k}", v.type) for k, v in enumerate(first)])
    head.results = [test(head)]
    return draft.add(While(first, head, body), *types)


def update_before_the_next_step() -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    changed: list[Value] = []

    def step(body: Block) -> Sequence[Value]:
        changed.append(draft.set_first(base, x[e.index(3),], body))
        return [draft.pointwise(both(body.parameters[0], changed[0]), block=body)]

    plan = draft.plan(loop(draft, step, x))
    _share(plan, base, changed[0])
    return plan


def whiles(spoilt: str) -> MemoryPlan:
    """A `while` whose test reads what is around it, and has a value of its own."""
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    made: dict[str, Value] = {}

    def test(head: Block) -> Value:
        made["within"] = draft.pointwise(base[BACK,], block=head)
        less = e.compare("lt", made["within"][e.index(0),], base[e.index(1),])
        return draft.pointwise(less, TRUTH, head)

    def step(body: Block) -> Sequence[Value]:
        made["step"] = draft.pointwise(x[BACK,], block=body)
        other = draft.pointwise(one_more(made["step"]), block=body)
        return [draft.pointwise(other[BACK,], block=body)]

    plan = draft.plan(made.setdefault("carry", loop(draft, step, x, test=test)))
    if spoilt == "what the test reads":
        _share(plan, base, made["step"])
    else:  # the carry, which no step reads
        _share(plan, made["carry"], made["within"])
    return plan


def updating_function() -> KernelProgram:
    """A function that changes its parameter in place."""
    draft = Draft(x := vector(), donated={0: 0})
    plan = draft.plan(draft.set_first(x, e.const(5.0, dtypes.float64)))
    in_place(plan)
    verify_memory(plan)
    draft.program.updated = plan.updated
    return draft.program


def update_by_a_function() -> MemoryPlan:
    function = updating_function()
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    changed = draft.add(Call(function, (base,)))
    last = draft.pointwise(both(base, changed))
    plan = draft.plan(last, functions=[function])
    _share(plan, base, changed)
    return plan


def a_function_over_its_operand() -> MemoryPlan:
    function = Draft(y := vector())
    function.plan(function.pointwise(y[BACK,]))
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    found = draft.add(Call(function.program, (base,)))
    plan = draft.plan(found, functions=[function.program])
    _share(plan, base, found)
    return plan


def stacks(spoilt: str) -> MemoryPlan:
    draft = Draft(x := vector(), xs := vector("xs", ROWS))
    [j, k] = d.axes(2)
    table = draft.pointwise(one_more_of(xs[j, k]), ROWS)
    made: list[Value] = []

    def step(body: Block) -> Sequence[Value]:
        [c] = body.parameters
        wide = draft.pointwise(one_more_of(xs[e.index(2), AXIS]), block=body)
        row = draft.pointwise(both(c, wide), block=body)
        later = e.add(both(row, wide), table[e.index(1), AXIS])
        other = draft.pointwise(later, block=body)
        temporary = draft.pointwise(xs[j, k], ROWS, body)
        made.extend([wide, row, other, temporary])
        return [draft.pointwise(temporary[e.index(0), AXIS], block=body), row, other]

    results = loop(draft, step, x, rows=2)
    plan = draft.plan(*results)
    carry, first, _ = results
    wide, row, other, temporary = made
    match spoilt:
        case "its stack is read":
            _share(plan, table, first)
        case "its stack is written over":
            _share(plan, first, temporary)
        case "another is in its place":
            row_of(plan, row, first)
            row_of(plan, other, first)
        case "the carry is in it":
            row_of(plan, carry, first)
        case "it is read after the row":
            row_of(plan, wide, first)
            row_of(plan, row, first)
        case "what is around is in it":
            row_of(plan, x, first)
    return plan


def results(spoilt: str) -> MemoryPlan:
    draft = Draft(x := vector())
    first = draft.pointwise(one_more(x))
    second = draft.pointwise(first[BACK,])
    narrow = draft.pointwise(e.cast(x[AXIS,], dtypes.float32), FLOATS)
    plan = draft.plan(second, draft.pointwise(both(first, second)), first, narrow)
    match spoilt:
        case "it is read for a later result":
            output(plan, first, 0)
        case "two are there":
            output(plan, first, 1)
            output(plan, second, 1)
        case "of another type":
            output(plan, narrow, 0)
        case "there is none":
            output(plan, first, 9)
    return plan


def donations(spoilt: str) -> MemoryPlan:
    given = {} if spoilt == "it is not given" else {0: 0}
    draft = Draft(x := vector(), donated=given)
    first = draft.pointwise(one_more(x))
    plan = draft.plan(first, draft.pointwise(x[BACK,]))
    if spoilt != "it is elsewhere":
        _share(plan, x, first)
    if spoilt != "it is not updated":
        plan.updated[0] = 0
    return plan


def views(spoilt: str) -> MemoryPlan:
    """A product reads a view of a view of a matrix."""
    draft = Draft(x := vector("x", SQUARE))
    j, k = d.axes(2)
    base = draft.pointwise(one_more_of(x[j, k]), SQUARE)
    turned = draft.view(base[k, j], SQUARE)
    again = draft.view(turned[k, j], SQUARE)
    other = draft.pointwise(x[k, j], SQUARE)
    three = e.index(3)
    product = Library("gemm", (again, other), (three, three, three))
    found = draft.add(product, SQUARE)
    plan = draft.plan(found, other)
    _share(plan, base, other if spoilt == "written over" else found)
    return plan


def libraries(spoilt: str) -> MemoryPlan:
    draft = Draft(x := vector("x", SQUARE))
    j, k = d.axes(2)
    base = draft.pointwise(one_more_of(x[j, k]), SQUARE)
    three = e.index(3)
    factor = draft.add(Library("potrf", (base,), (three,), overwrites=(0,)), SQUARE)
    solved = draft.add(
        Library("gesv", (factor, factor), (three, three), overwrites=(1,)), SQUARE
    )
    q, r = draft.add(
        Library("geqrf_orgqr", (solved,), (three, three), overwrites=(None, None)),
        *(SQUARE, SQUARE),
    )
    plan = draft.plan(base, r)
    match spoilt:
        case "read afterwards":
            _share(plan, base, factor)
        case "an operand twice":
            _share(plan, factor, solved)
        case "results in one place":
            _share(plan, q, r)
    return plan


def carries(spoilt: str) -> MemoryPlan:
    draft = Draft(x := vector(), y := vector("y"))
    inner: list[Value] = []

    def step(body: Block) -> Sequence[Value]:
        a, _ = inner[:] = body.parameters
        other = draft.pointwise(x[BACK,], block=body)
        return [draft.pointwise(one_more(a), block=body), other]

    first, second = loop(draft, step, x, y)
    plan = draft.plan(second)
    a, b = inner
    if spoilt == "swapped":
        _share(plan, first, b)
        _share(plan, second, a)
    else:  # a is not read after the loop, nor b in it
        for value in (b, second):
            _share(plan, first, value)
    return plan


def over_itself(element: Callable[[Value], Expr]) -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    found = draft.pointwise(element(base))
    plan = draft.plan(found)
    _share(plan, base, found)
    return plan


def if_not_first(x: Value, at: Expr) -> Expr:
    test = e.compare("gt", AXIS, e.index(0))
    return x.where(test, (at,), e.const(0.0, dtypes.float64))


def scatter_that_reads_its_base() -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    found = draft.add(d.Scatter(base, (4,), (AXIS,), base[BACK,]))
    plan = draft.plan(found)
    _share(plan, base, found)
    return plan


def reduction_over_what_it_reads() -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    [_, r] = d.axes(2)
    zero, total = e.const(0.0, dtypes.float64), e.read(Var("total", dtypes.float64))
    finish = (d.Function((total,), (total,)),)
    found = draft.add(d.Reduction((8,), (zero,), "add", (both_of(base, r),), finish))
    plan = draft.plan(found)
    _share(plan, base, found)
    return plan


def layouts(type_: TensorType) -> MemoryPlan:
    draft = Draft(x := vector())
    base = draft.pointwise(one_more(x))
    last = draft.pointwise(base[BACK,])
    other = draft.pointwise(e.cast(x[AXIS,], type_.dtype), type_)
    plan = draft.plan(last, other)
    _share(plan, base, other)
    return plan


def made_in_a_branch() -> MemoryPlan:
    draft = Draft(x := vector(), n := vector("n", TensorType(dtypes.int64)))
    size = Symbol("u0")
    draft.add(d.Pointwise((n[()],)), n.type)
    draft.program.block.equations[-1].symbol = size
    type_ = LONG.with_shape((size_of(size),))
    condition = draft.pointwise(e.compare("gt", n[()], e.index(3)), TRUTH)
    some, none = Block([]), Block([])
    within = draft.pointwise(x[e.index(0),], type_, some)
    some.results = [draft.pointwise(within[e.index(0),], SCALAR, some)]
    none.results = [draft.pointwise(x[e.index(0),], SCALAR, none)]
    draft.add(Branch(condition, (none, some)), SCALAR)
    after = draft.pointwise(x[e.index(1),], type_)
    plan = draft.plan(after)
    _share(plan, within, after)
    return plan


OTHER = "is read where its memory holds"
BEFORE = "is written over by .* before it is read"
OPERAND = "is an operand in the memory of"

WRONG: dict[str, tuple[Callable[[], MemoryPlan], str]] = {
    "two that are live at once": (live_at_once, OTHER),
    "an update before a reader": (update_before_a_reader, OTHER),
    "an update in a branch, before a reader": (lambda: branches(True), OTHER),
    "an update before the next step": (update_before_the_next_step, OTHER),
    "an update of what a test reads": (lambda: whiles("what the test reads"), OTHER),
    "a test over the carry": (lambda: whiles("the carry"), OTHER),
    "an update by a function": (update_by_a_function, OTHER),
    "a function over its operand": (a_function_over_its_operand, OPERAND),
    **{
        f"a row, and {name}": (partial(stacks, name), match)
        for name, match in {
            "its stack is read": OTHER,
            "its stack is written over": "which is written over|holds",
            "another is in its place": OTHER,
            "the carry is in it": "and not made in a step",
            "it is read after the row": OTHER,
            "what is around is in it": "in the row of what is no stack",
        }.items()
    },
    **{
        f"the memory of a result, and {name}": (partial(results, name), match)
        for name, match in {
            "it is read for a later result": OTHER,
            "two are there": BEFORE,
            "of another type": "is not laid out as result 0 is",
            "there is none": "is not laid out as result 9 is",
        }.items()
    },
    **{
        f"a donated input, and {name}": (partial(donations, name), match)
        for name, match in {
            "it is read afterwards": OTHER,
            "it is not given": "does not update `x`",
            "it is elsewhere": "does not update `x`",
            "it is not updated": OTHER,
        }.items()
    },
    "the base of a view of a view": (lambda: views("written over"), OTHER),
    "a product over the base of its operand": (lambda: views("by it"), OPERAND),
    "a routine over what is read afterwards": (
        lambda: libraries("read afterwards"),
        OTHER,
    ),
    "a routine over an operand that it has twice": (
        lambda: libraries("an operand twice"),
        OPERAND,
    ),
    "two results of a routine": (
        lambda: libraries("results in one place"),
        "is written at once with",
    ),
    "swapped carries": (lambda: carries("swapped"), "memory of its loop's carry"),
    "two carries": (lambda: carries("joined"), "is written at once with"),
    "another index": (lambda: over_itself(lambda x: x[BACK,]), BEFORE),
    "another index under a condition": (
        lambda: over_itself(lambda x: if_not_first(x, e.sub(AXIS, e.index(1)))),
        BEFORE,
    ),
    "a scatter that reads its base": (scatter_that_reads_its_base, BEFORE),
    "a reduction over what it reads": (reduction_over_what_it_reads, BEFORE),
    "another dtype": (lambda: layouts(FLOATS), "has not the layout of"),
    "another size": (
        lambda: layouts(LONG.with_shape((6,))),
        "has not the layout of",
    ),
    "memory that was made in a branch": (made_in_a_branch, "made in another block"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused(name: str) -> None:
    make, match = WRONG[name]
    with pytest.raises(KernelProgramError, match=match):
        verify_memory(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: branches(False),
        lambda: over_itself(one_more),
        lambda: over_itself(lambda x: if_not_first(x, AXIS)),
    ],
)
def test_an_update_in_place_of_what_nobody_reads_again_is_right(make: Any) -> None:
    verify_memory(make())


def test_a_carry_may_have_another_name_for_its_size() -> None:
    n, m = (LONG.with_shape((size_of(Symbol(name)),)) for name in "nm")
    draft = Draft(x := vector("x", n), vector("y", m))
    base = draft.pointwise(one_more(x), n)
    body = Block([carry := vector("c", m)])
    body.results = [draft.pointwise(one_more(carry), m, body)]
    found = draft.add(Loop(Var("t0", dtypes.int64), 3, (base,), body), n)
    plan = draft.plan(found)
    in_place(plan)
    assert plan.of(base) is plan.of(carry)
    verify_memory(plan)
