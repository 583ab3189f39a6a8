"""`control_flow`: what runs over tensors, and what grows, is one operator; helpers that
are called are rewritten too."""

import functools
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import control_flow
from hopflow.errors import ControlFlowError
from hopflow.testing.executions import NAMES, RUNNERS, agree

hf: Any = hopflow


def appends(xs: Any) -> Any:
    out = []
    total = 0.0
    for x in xs:
        total = total + x
        out.append(total * 2)
    return hf.stack(out)


def numbered(xs: Any) -> Any:
    total = 0.0
    for k, x in enumerate(xs, 1):
        total = total + k * x
    return total


def side_by_side(xs: Any) -> Any:
    total = 0.0
    for x, (y, k) in zip(xs, zip(xs[1:], range(5), strict=False), strict=False):
        total = total + x * y - k
    return total


def from_behind(xs: Any) -> Any:
    total = 0.0
    for x in reversed(xs):
        total = total * 0.5 + x
    return total


def listed(xs: Any) -> Any:
    return hf.stack([x * 2 if x > 1 else x for x in xs])


def of_pairs(xs: Any) -> Any:
    out = [(xs[0], 7.0)]
    for x in xs:
        out.append((x, x + 1))
        out.append((x * 2, x))
    total = 0.0
    for a, b in out:
        total = total * 0.5 + a * b
    return total + len(out)


def summed(xs: Any) -> Any:
    return sum(x * x for x in xs) + max([x - 1 for x in xs]) + min(xs)


def asked(xs: Any) -> Any:
    return any(x > 2 for x in xs), all(x > 0 for x in xs)


def looped_twice(xs: Any) -> Any:
    rows = []
    for x in xs:
        for y in xs:
            rows.append(x * y)
    return hf.stack(rows), rows[-1], hf.stack(rows[1:3])


OPERATORS = [
    *(appends, numbered, side_by_side, from_behind, listed, of_pairs, summed, asked),
    looped_twice,
]


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
@pytest.mark.parametrize("f", OPERATORS)
def test_what_runs_over_tensors_gives_what_python_gives(run: Any, f: Any) -> None:
    for xs in ([0.5, 2.5, 1.5], [3.0, 1.0]):
        with hf.debug():
            want = f(hf.asarray(xs))
        agree(run(control_flow(f), hf.asarray(xs)), want)


@pytest.mark.parametrize("f", OPERATORS)
def test_what_runs_over_tensors_is_not_unrolled(f: Any) -> None:
    counts = [len(hf.trace(control_flow(f), hf.ones(n)).graph.nodes) for n in (20, 200)]
    assert counts[0] == counts[1]


def kept(xs: Any) -> Any:
    out = []
    for x in xs:
        if x > 1:
            out.append(x)
            out.append(x * 10)
    return hf.stack(out), len(out)


def until(xs: Any) -> Any:
    out = [xs[0] * 0]
    for x in xs:
        if x > 2:
            break
        out.append(x)
    return hf.stack(out)


def filtered(xs: Any) -> Any:
    return hf.stack([x + y for x in xs if x > 1 for y in xs if y < x])


def steps(xs: Any) -> Any:
    n = hf.astype(xs[0], hf.int64) + 2
    squares = [k * k for k in range(n)]
    return hf.stack(squares), sum(squares)


def chosen(xs: Any) -> Any:
    out = [xs[0]]
    if xs[1] > 1:
        out.append(xs[1])
    if xs[0] > 100:
        out.append(xs[0])
    else:
        out.append(xs[2])
    return hf.stack(out)


def dynamic(f: Any) -> Any:
    return hf.jit(f, dynamic=True)


@pytest.mark.parametrize("run", [hf.jit, dynamic, lambda f: f])
@pytest.mark.parametrize("f", [kept, until, filtered, steps, chosen])
def test_lists_may_have_a_length_that_only_the_run_knows(run: Any, f: Any) -> None:
    rewritten = run(control_flow(f))
    for xs in ([0.5, 2.0, 1.5], [1.5, 0.5, 4.0]):
        with hf.debug():
            want = f(hf.asarray(xs))
        for a, b in zip(
            hopflow.pytree.flatten(rewritten(hf.asarray(xs)))[0],
            hopflow.pytree.flatten(want)[0],
            strict=True,
        ):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b))


def test_a_list_that_is_returned_is_a_list() -> None:
    @control_flow
    def f(xs: Any) -> Any:
        out = []
        for x in xs:
            out.append((x, {"twice": x * 2}))
        return out

    found = hf.jit(f)(hf.asarray([1.0, 2.0]))
    assert type(found) is list
    agree(found, [(hf.asarray(k), {"twice": hf.asarray(2 * k)}) for k in (1.0, 2.0)])


def test_a_list_of_the_caller_gets_the_items() -> None:
    @control_flow
    def f(xs: Any, out: Any) -> None:
        for x in xs:
            out.append(x)

    out: list[Any] = []
    f(hf.asarray([1.0, 2.0]), out)
    assert [x.item() for x in out] == [1.0, 2.0]


def test_gradients_go_through_lists() -> None:
    @control_flow
    def f(xs: Any) -> Any:
        return hf.sum(hf.stack([x * x * k for k, x in enumerate(xs)]))

    slope = hf.jit(hf.grad(f))(hf.asarray([1.0, 2.0, 3.0]))
    agree(slope, hf.asarray([0.0, 4.0, 12.0]))


def test_lists_of_steps_keep_one_structure() -> None:
    @control_flow
    def f(xs: Any) -> Any:
        out: list[Any] = []
        for x in xs:
            out.append(x)
            out.append((x, x))
        return out

    line = f.__code__.co_firstlineno + 2
    with pytest.raises(ControlFlowError, match=f"differing structures.*py:{line}"):
        hf.jit(f)(hf.ones(3))


# --- helpers --------------------------------------------------------------------------


def halved(x: Any) -> Any:
    while x > 1:
        x = x / 2
    return x


def twice(f: Any) -> Any:
    @functools.wraps(f)
    def run(x: Any) -> Any:
        if x > 100:
            return x
        return f(f(x))

    return run


@twice
def wrapped(x: Any) -> Any:
    return x * 3 if x > 2 else x + 1


larger: Any = lambda x, y: x if x > y else y  # noqa: E731


class Layer:
    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, x: Any) -> Any:
        return self.clipped(x)

    def clipped(self, x: Any) -> Any:
        if x < self.least:
            return x * 0 + self.least
        return x


def calls_helpers(x: Any) -> Any:
    x = halved(x * 10) + wrapped(x) + larger(x, 2.0) + Layer(1.5)(x)
    x = functools.partial(larger, 3.0)(x)
    return hf.fori_loop(0, 3, lambda i, x: halved(x) + i, x)


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_helpers_are_rewritten_too(run: Any) -> None:
    for x in (0.5, 1.0, 3.0):
        with hf.debug():
            want = calls_helpers(hf.asarray(x))
        agree(run(control_flow(calls_helpers), hf.asarray(x)), want)


def test_a_helper_that_is_skipped_is_left_alone() -> None:
    @control_flow.skip
    def helper(x: Any) -> Any:
        return 1 if x > 0 else 2

    @control_flow
    def f(x: Any) -> Any:
        return helper(x)

    assert f(3) == 1
    with pytest.raises(hf.errors.TraceError, match=r"`@hf\.control_flow`"):
        hf.jit(f)(hf.asarray(3))


def test_decorators_stand_above_and_below() -> None:
    below = control_flow(twice(lambda x: x + 1 if x > 0 else x - 1))
    above = twice(control_flow(lambda x: x + 1 if x > 0 else x - 1))
    assert hf.jit(below)(hf.asarray(1.0)).item() == 3.0
    assert hf.jit(control_flow(above))(hf.asarray(-1.0)).item() == -3.0
    assert control_flow(below) is below
