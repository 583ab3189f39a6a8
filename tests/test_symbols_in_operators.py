"""Symbols in operators: lifted sizes and numbers, carries, branches, lengths."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    CheckError,
    DataDependentError,
    HopflowError,
    TraceError,
)
from hopflow.testing.executions import (
    SYMBOLIC,
    agree,
    run_debug,
)
from hopflow.testing.symbolic_traces import every_trace, every_way, symbolic, text

hf: Any = hopflow

X = np.arange(6, dtype=np.float32)
Run = Callable[..., Any]


def total(x: Any) -> Any:
    """A number that only a run knows."""
    return hf.astype(hf.sum(x), "int32").item()


# --- lifting --------------------------------------------------------------------------


def test_tensors_that_share_a_symbol_bind_it_once() -> None:
    def f(x: Any, y: Any, p: Any) -> Any:
        z = x + y
        return hf.cond(p, lambda: z * x, lambda: x)

    expected = """
def f(s0: i64, s1: i64, /, x: f32[s0], y: f32[s1], p: bool) -> f32[s0]:
    v0: f32[s0] = add(x, y)
    def then(s0: i64, /, *, c0: f32[s0], x: f32[s0]) -> f32[s0]:
        v0: f32[s0] = multiply(c0, x)
        return v0
    def else_(s0: i64, /, *, c1: f32[s0], x: f32[s0]) -> f32[s0]:
        return x
    v1: f32[s0] = cond(p, s0, v0, x, then=then, else_=else_)
    return v1
"""
    assert text(f, X, X, np.array(True)) == expected


def three_deep(x: Any, w: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        return hf.map(lambda v: hf.cond(v > i, lambda: v * x.shape[0], lambda: v), a)

    return hf.fori_loop(0, 3, step, w)


def test_a_size_is_lifted_through_three_bodies_and_no_tensor() -> None:
    expected = """
def three_deep(s0: i64, s1: i64, /, x: f32[s0], w: f32[s1]) -> f32[s1]:
    def test(s1: i64, s0: i64, /, i: i64, a: f32[s1]) -> bool:
        v0: bool = less(i, 3)
        return v0
    def body(s1: i64, s0: i64, /, i: i64, a: f32[s1]) -> tuple[i64, f32[s1]]:
        v0: i64 = add(i, 1)
        def body(s0: i64, /, x0: f32, *, i: i64) -> f32:
            v0: f32 = convert(i, dtype=f32, weak=False)
            v1: bool = greater(x0, v0)
            def then(s0: i64, /, *, x0: f32) -> f32:
                v0: f32 = convert(s0, dtype=f32, weak=False)
                v1: f32 = multiply(x0, v0)
                return v1
            def else_(s0: i64, /, *, x0: f32) -> f32:
                return x0
            v2: f32 = cond(v1, s0, x0, then=then, else_=else_)
            return v2
        v1: f32[s1] = map(s0, a, i, body=body, length=s1)
        return v0, v1
    v0: tuple[i64, f32[s1]] = while_loop(s1, s0, 0, w, test=test, body=body, """
    assert text(three_deep, X, X[:2]).startswith(expected)


def over_an_item(x: Any) -> Any:
    n = total(x)
    return hf.map(lambda v: v * n + hf.sum(hf.ones(n)), x)


def test_the_number_of_an_item_is_lifted() -> None:
    expected = """
def over_an_item(s0: i64, /, x: f32[s0]) -> f32[s0]:
    v0: f32 = reduce_sum(x, axes=(0,))
    v1: i32 = convert(v0, dtype=i32)
    u0: i64 = int(item(v1, min=-2147483648, max=2147483647, known=True))
    def body(u0: i64, /, x0: f32) -> f32:
        v0: bool = greater_equal(u0, 0)
        check(v0, u0, 0, message="ones: `shape` must not be negative", \
condition="u0 >= 0", where="`u0` is made by `hf.astype(hf.sum(x), \\"int32\\").item()`")
        v1: f32 = convert(u0, dtype=f32, weak=False)
        v2: f32 = multiply(x0, v1)
        v3: f32[u0] = full(1.0, shape=(u0,))
        v4: f32 = reduce_sum(v3, axes=(0,))
        v5: f32 = add(v2, v4)
        return v5
    v2: f32[s0] = map(u0, x, body=body, length=s0)
    return v2
"""
    assert re.sub(r" \(\w+\.py:\d+\)", "", text(over_an_item, X)) == expected


def over_a_mask(x: Any) -> Any:
    y = x[x > 2]
    return hf.map(lambda v: v + hf.sum(y) * y.shape[0], x)


def test_a_tensor_of_unbacked_size_is_lifted_after_its_size() -> None:
    expected = """
def over_a_mask(s0: i64, /, x: f32[s0]) -> f32[s0]:
    v0: bool[s0] = greater(x, 2.0)
    v1: i64[s0] = convert(v0, dtype=i64)
    v2: i64 = reduce_sum(v1, axes=(0,))
    u0: i64 = int(item(v2, min=0, known=True))
    v3: i64[u0] = flatnonzero(v0, size=u0)
    v4: f32[u0] = gather(x, v3, axes=(0,), batch=0)
    def body(u0: i64, /, x0: f32, *, c0: f32[u0]) -> f32:
        v0: f32 = reduce_sum(c0, axes=(0,))
        v1: f32 = convert(u0, dtype=f32, weak=False)
        v2: f32 = multiply(v0, v1)
        v3: f32 = add(x0, v2)
        return v3
    v5: f32[s0] = map(u0, x, v4, body=body, length=s0)
    return v5
"""
    assert text(over_a_mask, X) == expected


def bounded_by_an_item(x: Any) -> Any:
    n = hf.count_nonzero(x > 2).item()
    return hf.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a + n), (0, 0.0))


def test_a_loop_whose_bound_is_an_item() -> None:
    expected = """
def bounded_by_an_item(s0: i64, /, x: f32[s0]) -> tuple[i64, f32]:
    v0: bool[s0] = greater(x, 2.0)
    v1: i64[s0] = convert(v0, dtype=i64)
    v2: i64 = reduce_sum(v1, axes=(0,))
    u0: i64 = int(item(v2))
    def test(u0: i64, /, i: i64, a: f32) -> bool:
        v0: bool = less(i, u0)
        return v0
    def body(u0: i64, /, i: i64, a: f32) -> tuple[i64, f32]:
        v0: i64 = add(i, 1)
        v1: f32 = convert(u0, dtype=f32)
        v2: f32 = add(a, v1)
        return v0, v2
    v3: tuple[i64, f32] = while_loop(u0, 0, 0.0, test=test, body=body, """
    assert text(bounded_by_an_item, X).startswith(expected)


def of_a_float(x: Any) -> Any:
    n = hf.sum(x).item()
    return hf.map(lambda v: hf.cond(v > 2, lambda: v * n, lambda: v + n / 2), x)


def of_a_bool(x: Any) -> Any:
    p = (hf.sum(x) > 3).item()
    return hf.map(lambda v: hf.cond(p, lambda: v * 2, lambda: v), x)


@every_way
@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (over_an_item, X * 15 + 15),
        (over_a_mask, X + 36),
        (bounded_by_an_item, (3, 9.0)),
        (of_a_float, np.where(X > 2, X * 15, X + 7.5)),
        (of_a_bool, X * 2),
        (lambda x: three_deep(x, x[:2]), X[:2] * 216),
    ],
)
def test_what_bodies_close_over_is_lifted(run: Run, f: Run, expected: Any) -> None:
    agree(run(f, hf.asarray(X)), expected)


# --- carries --------------------------------------------------------------------------


def sizes_of_carries(x: Any) -> Any:
    def body(i: Any, a: Any) -> Any:
        n = i.item()
        return i + 1, a + hf.sum(x[:n]) + hf.sum(hf.ones(n)) + x[n]

    n, a = hf.while_loop(lambda i, _: i.item() < 4, body, (0, 0.0))
    return n, a, hf.zeros(n), x[n.item() :], x[-n:]


def counters(x: Any) -> Any:
    def body(i: Any, a: Any) -> Any:
        return a + hf.sum(x[i:]) + x[:i].shape[0] + hf.sum(hf.ones((i, 2)))

    return hf.fori_loop(1, 4, body, 0.0)


def scanned(x: Any) -> Any:
    def step(n: Any, v: Any) -> Any:
        return n + 1, hf.sum(x[: n.item()]) + hf.sum(hf.full(n, v)) + x[n]

    return hf.scan(step, 0, x)


@every_way
@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (sizes_of_carries, (4, 0 + 0 + 1 + 3 + 6 + 6.0, X[:4] * 0, X[4:], X[2:])),
        (counters, X[1:].sum() + X[2:].sum() + X[3:].sum() + 18),
        (scanned, (6, np.cumsum(X) + X * X)),
    ],
)
def test_a_carry_is_a_size_an_index_and_a_bound(
    run: Run, f: Run, expected: Any
) -> None:
    agree(run(f, hf.asarray(X)), expected)


def test_a_counter_is_known_to_be_a_size() -> None:
    assert "check" not in text(counters, X)


@every_trace
def test_a_carry_that_is_no_size_is_found_by_the_run(run: Run) -> None:
    def f(x: Any) -> Any:
        def body(i: Any, a: Any) -> Any:
            return i - 1, a + hf.sum(hf.ones(i.item()))

        return hf.while_loop(lambda i, _: i > -2, body, (2, 0.0)), x

    with pytest.raises(CheckError, match="`shape` must not be negative"):
        run(f, hf.asarray(X))


@every_trace
@pytest.mark.parametrize("of", [lambda i: i, lambda i: i.item()])
def test_a_carry_is_no_bound_of_a_python_loop(run: Run, of: Run) -> None:
    def body(i: Any, a: Any) -> Any:
        for _ in range(of(i)):
            a = a + 1
        return a

    with pytest.raises(HopflowError, match=r"hf\.fori_loop") as found:
        run(lambda x: hf.fori_loop(0, 4, body, x), hf.asarray(X))
    assert found.type in (TraceError, DataDependentError)


@every_trace
def test_what_a_body_checks_is_not_known_after_it(run: Run) -> None:
    def f(x: Any, p: Any) -> Any:
        n = total(x)

        def then() -> Any:
            hf.check_is_size(n, max=3)
            return x + n

        y = hf.cond(p, then, lambda: x)
        return hf.cond(n <= 3, lambda: y, lambda: -y)

    agree(run(f, hf.asarray(X), hf.asarray(False)), -X)
    with pytest.raises(CheckError, match="check_is_size"):
        run(f, hf.asarray(X), hf.asarray(True))


# --- branches -------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("p", [True, False])
def test_integers_of_branches_merge_into_their_range(run: Run, p: bool) -> None:
    def f(p: Any) -> Any:
        n = hf.cond(p, lambda: 3, lambda: 5).item()
        m = hf.switch(n - 4, [lambda: 1, lambda: n, lambda: n + 2]).item()
        assert n >= 3
        assert m >= 1
        assert not m > 7
        return hf.zeros(n), hf.ones(m)

    agree(
        run(f, hf.asarray(p)),
        (np.zeros(3), np.ones(1)) if p else (np.zeros(5), np.ones(5)),
    )
    if run in SYMBOLIC:
        assert "check" not in text(f, np.array(p))


@every_way
def test_integers_that_are_equal_in_all_branches_are_known(run: Run) -> None:
    def f(x: Any, p: Any) -> Any:
        n = hf.cond(p, lambda: 3, lambda: 3).item()
        assert n == 3
        return x[:n]

    agree(run(f, hf.asarray(X), hf.asarray(True)), X[:3])


def unused() -> Any:
    raise AssertionError("a branch that cannot run is called")


@every_way
@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.cond(True, lambda: x + 1, unused),
        lambda x: hf.cond(False, unused, lambda v: v + 1, (x,)),
        lambda x: hf.switch(7, [unused, lambda v: v + 1], (x,)),
        lambda x: hf.cond(x.shape[0] >= 0, lambda: x + 1, unused),
        lambda x: hf.switch(x.shape[0] + 2, [unused, unused, lambda: x + 1]),
        lambda x: hf.while_loop(lambda _: False, lambda c: c * 2, x + 1),
    ],
)
def test_a_predicate_that_is_known_picks_its_branch(run: Run, f: Run) -> None:
    agree(run(f, hf.asarray(X)), X + 1)
    if run in SYMBOLIC:
        assert "cond" not in text(f, X)


@every_way
def test_what_the_picked_branch_gives_is_its_own(run: Run) -> None:
    def f(x: Any) -> Any:
        x = x * 1
        y = hf.cond(True, lambda: x, unused)
        x += 1
        return y, hf.cond(True, lambda: 2, unused)

    agree(run(f, hf.asarray(X)), (X, 2))


@every_way
def test_a_predicate_over_symbols_is_no_guard(run: Run) -> None:
    def f(x: Any) -> Any:
        y = hf.cond(x.shape[0] > 3, lambda: x + 1, lambda: x)
        return hf.cond(total(x) > 14, lambda: y * 2, lambda: y)

    agree(run(f, hf.asarray(X)), (X + 1) * 2)
    agree(run(f, hf.asarray(X[:2])), X[:2])
    if run in SYMBOLIC:
        assert not symbolic(f, X).guards.guards
    jitted = hf.jit(f, dynamic=True)
    traces = hf.stats().traces
    for n in (2, 6, 3, 4):
        jitted(hf.asarray(X[:n]))
    assert hf.stats().traces - traces == 1


# --- lengths --------------------------------------------------------------------------


def kept(x: Any) -> Any:
    return x[x > 2]


LOOPS: list[Run] = [
    lambda x: hf.scan(lambda c, v: (c + v, c * v), 0.0, x),
    lambda x: hf.scan(lambda c, v: (c + v, c * v), 0.0, x, reverse=True),
    lambda x: hf.scan(lambda c, v: (c + v, c * v), 0.0, x, until=lambda c: c > 4),
    lambda x: hf.scan(
        lambda c, v: (c + v, c * v), 0.0, x, until=lambda c: c > 4, reverse=True
    ),
    lambda x: hf.map(lambda v: v * 2, x),
    lambda x: hf.associative_scan(lambda a, b: a * 2 + b, x),
    lambda x: hf.associative_scan(lambda a, b: a + b, x, reverse=True),
    lambda x: hf.scan(lambda c, _: (c + 1, c * c), 0, None, length=x.shape[0]),
    lambda x: hf.scan(lambda c, _: (c + 1, c), 0, None, length=hf.sum(x > 1).item()),
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("of", [lambda x: x, kept], ids=["backed", "unbacked"])
def test_lengths_may_be_symbols(loop: Run, of: Run) -> None:
    def f(x: Any) -> Any:
        return loop(of(x))

    module, jitted = symbolic(f, X), hf.jit(f, dynamic=True)
    for n in (6, 0, 1, 4):
        x = hf.asarray(X[:n])
        expected = run_debug(f, x)
        for run in (module, jitted, f):
            agree(run(x), expected)
    assert not module.guards.guards


# --- sizes that a body finds to be equal ----------------------------------------------


def spread(x: Any, y: Any) -> Any:
    """Two shapes that must be reshaped alike, and agree: a guard that the body asks."""
    return hf.sum((x[:, None, :] - y[None, :, :]) ** 2)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: hf.fori_loop(0, 2, lambda _, c: c + spread(x, c), y),
        lambda x, y: hf.scan(lambda c, _: (c + spread(x, c), c), y, length=2)[1],
        lambda x, y: hf.map(lambda v: v + spread(x, y), y),
        lambda x, y: hf.cond(y[0, 0] > 9, lambda: y, lambda: y + spread(x, y)),
        lambda x, y: hf.subgraph(spread)(x, y),
        lambda x, y: hf.fori_loop(
            0,
            2,
            lambda _, c: hf.cond(c[0, 0] > 9, lambda: c, lambda: c + spread(x, c)),
            y,
        ),
    ],
)
@pytest.mark.parametrize("dynamic", [True, ({1: True}, {1: True}), ({}, {1: True})])
def test_sizes_that_a_body_finds_to_be_equal_are_one(f: Run, dynamic: Any) -> None:
    x = hf.asarray(np.arange(15.0).reshape(5, 3) / 10)
    y = hf.asarray(np.arange(6.0).reshape(2, 3) / 7)
    with hf.debug():
        expected = f(x, y)
    agree(hf.jit(f, dynamic=dynamic)(x, y), expected)


def test_a_subgraph_is_called_with_sizes_exchanged() -> None:
    tail = hf.subgraph(lambda x, y: hf.concat([x[1:], y * 2]))

    def f(x: Any, y: Any) -> Any:
        return tail(x, y), tail(y, x), tail(x, x)

    x, y = hf.asarray(np.arange(5.0)), hf.asarray(np.arange(3.0))
    agree(hf.jit(f, dynamic=True)(x, y), f(x, y))
