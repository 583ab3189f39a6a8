"""Operators called on concrete tensors: traced, compiled once, native."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import CheckError, DivisionError, IndexingError, InvalidTensorError


@contextmanager
def compiling(count: int, hits: int | None = None) -> Iterator[None]:
    """The block makes so many programs, and finds so many ready."""
    before = hf.stats()
    yield
    after = hf.stats()
    assert after.compiles - before.compiles == count
    if hits is not None:
        assert after.cache_hits - before.cache_hits == hits


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def line_of(f: Callable[..., Any], text: str) -> str:
    """`file.py:12` of the line of `f` that has `text` in it."""
    lines, first = inspect.getsourcelines(f)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{os.path.basename(__file__)}:{number}"


# --- one program for each structure ---------------------------------------------------


def run_cond(x: Any) -> Any:
    return hf.cond(hf.sum(x) > 3.5, lambda: x * 2.5, lambda: -x)


def run_switch(x: Any) -> Any:
    branches = [lambda c: c + 0.5, lambda c: c * 0.5, lambda c: c - 0.5]
    return hf.switch(hf.asarray(1), branches, (x,))


def run_while(x: Any) -> Any:
    return hf.while_loop(lambda c: hf.sum(c) < 77.0, lambda c: c * 1.25 + 1, x)


def run_fori(x: Any) -> Any:
    return hf.fori_loop(0, 5, lambda i, c: c * 0.75 + i, x)


def run_scan(x: Any) -> Any:
    return hf.scan(lambda c, y: (c * 0.25 + y, c), 0.0, x)


def run_map(x: Any) -> Any:
    return hf.map(lambda y: hf.sin(y) * 3.5, x)


def run_associative(x: Any) -> Any:
    return hf.associative_scan(lambda a, b: a * 0.5 + b, x)


def run_subgraph(x: Any) -> Any:
    return hf.invoke_subgraph(lambda y: y * 4.5 + x, x)


OPERATORS = [
    *(run_cond, run_switch, run_while, run_fori),
    *(run_scan, run_map, run_associative, run_subgraph),
]


@pytest.mark.parametrize("run", OPERATORS, ids=lambda f: f.__name__)
def test_functions_made_anew_do_not_compile_again(run: Any) -> None:
    x = hf.arange(9.0)
    with compiling(1):
        first = run(x)
    with compiling(0, 4):
        for k in range(4):
            run(x + k)
    with compiling(1):
        run(hf.arange(10.0))
    with compiling(0, 1):
        again = run(hf.arange(9.0))
    for got, want in zip(
        again if isinstance(again, tuple) else (again,),
        first if isinstance(first, tuple) else (first,),
        strict=True,
    ):
        same(got, want)


@pytest.mark.parametrize("run", OPERATORS, ids=lambda f: f.__name__)
def test_debug_mode_compiles_nothing_and_agrees(run: Any) -> None:
    x = hf.arange(9.0)
    want = run(x)
    with compiling(0, 0), hf.debug():
        got = run(x)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,),
        want if isinstance(want, tuple) else (want,),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_a_constant_is_part_of_the_structure_and_a_tensor_is_not() -> None:
    def run(x: Any, k: Any) -> Any:
        return hf.cond(hf.all(x > 0), lambda: x * k, lambda: x)

    x = hf.ones(6)
    with compiling(2, 1):
        same(run(x, 3.0), x * 3)
        same(run(x, 4.0), x * 4)
        same(run(x, 3.0), x * 3)
    with compiling(1, 2):
        for k in (3.0, 4.0, 5.0):
            same(run(x, hf.asarray(k)), x * k)


def test_functions_with_effects_are_traced_at_each_call() -> None:
    calls = []

    def body(c: Any) -> Any:
        calls.append(c)
        return c * 1.0625

    for _ in range(3):
        hf.while_loop(lambda c: c < 9.0, body, hf.asarray(1.0))
    assert len(calls) == 3


# --- values of Python -----------------------------------------------------------------


def test_numbers_are_tensors_of_no_axes() -> None:
    for got, dtype in (
        (hf.cond(True, lambda: 1, lambda: 2), "int64"),
        (hf.while_loop(lambda i: i < 3, lambda i: i + 1, 0), "int64"),
        (hf.scan(lambda c, _: (c + 0.5, None), 0, length=3)[0], "float32"),
        (hf.invoke_subgraph(lambda: 2.5), "float32"),
        (hf.invoke_subgraph(lambda: True), "bool"),
    ):
        assert isinstance(got, hf.Tensor)
        assert (got.shape, got.dtype.name) == ((), dtype)


def test_results_share_memory_with_nothing() -> None:
    x = hf.arange(4.0)
    a, b, c = hf.cond(True, lambda y: (y, y, x[1:]), lambda y: (y, y, y[1:]), (x,))
    [d] = hf.while_loop(lambda c: hf.all(c < 0), lambda c: (c + 1,), (x,))
    e, _ = hf.scan(lambda c, _: (c, None), x, length=2)
    arrays = [np.asarray(t) for t in (x, a, b, c, d, e)]
    for i, one in enumerate(arrays):
        for other in arrays[:i]:
            assert not np.may_share_memory(one, other)


def test_writes_to_operands_and_captured_tensors_reach_them() -> None:
    base = hf.zeros((2, 3))
    count = hf.asarray(0)

    def add_to(row: Any) -> None:
        nonlocal count
        row += 1.5
        count += 1

    hf.cond(True, add_to, lambda row: None, (base[1],))
    hf.invoke_subgraph(add_to, base[:, 0])
    same(base, [[1.5, 0, 0], [3, 1.5, 1.5]])

    def step(i: Any) -> Any:
        base[0, i] = 9.0
        return i + 1

    hf.while_loop(lambda i: i < 2, step, 0)
    same(base, [[9, 9, 0], [3, 1.5, 1.5]])
    assert count.item() == 2


def test_carries_and_slices_are_values() -> None:
    x = hf.zeros(3)

    def body(c: Any) -> Any:
        c += 1
        return c

    def step(c: Any, row: Any) -> Any:
        row[:] = 5.0
        c += row
        return c, row

    hf.while_loop(lambda c: c[0] < 2, body, x)
    table = hf.zeros((2, 3))
    last, rows = hf.scan(step, x, table)
    same(last, [10, 10, 10])
    same(rows, np.full((2, 3), 5.0))
    same(x, [0, 0, 0])
    same(table, np.zeros((2, 3)))


def test_an_invalid_tensor_is_refused() -> None:
    gone = hf.ones(3)
    hf.jit(lambda x: x * 1, donate=(0,))(gone)
    calls: list[Callable[[], Any]] = [
        lambda: hf.cond(True, lambda: gone * 2, lambda: gone),
        lambda: hf.map(lambda x: x + 1, gone),
        lambda: hf.while_loop(lambda c: c[0] < 2, lambda c: c + 1, gone),
        lambda: hf.scan(lambda c, x: (c + x, None), 0.0, gone),
    ]
    for call in calls:
        with pytest.raises(InvalidTensorError, match="donated"):
            call()


# --- errors ---------------------------------------------------------------------------


def halve(x: Any, n: Any) -> Any:
    def body(i: Any) -> Any:
        hf.check(i < 3, "halve: too many")  # the first check
        return i + 10 // (n - 1) + hf.astype(x[n], "int64")  # the first use

    return hf.while_loop(lambda i: i < 5, body, 0)


def third(x: Any, n: Any) -> Any:
    def other_body(k: Any) -> Any:
        # Another place, another message, the same graph.
        hf.check(k < 3, "third: too many")  # the second check

        return k + 10 // (n - 1) + hf.astype(x[n], "int64")  # the second use

    return hf.while_loop(lambda k: k < 5, other_body, 0)


def test_a_program_for_two_places_reports_the_line_of_each() -> None:
    x = hf.zeros(30)
    with compiling(1, 1):
        halve(x, hf.asarray(3))
        third(x, hf.asarray(3))
    with compiling(0):
        for _ in range(2):
            for f, label in ((halve, "first"), (third, "second")):
                use = line_of(f, f"# the {label} use")
                with pytest.raises(DivisionError) as division:
                    f(x, hf.asarray(1))
                assert use in str(division.value)
                with pytest.raises(IndexingError, match="index 30") as index:
                    f(x, hf.asarray(30))
                assert use in str(index.value)
                with pytest.raises(CheckError) as check:
                    f(x, hf.asarray(4))
                assert line_of(f, f"# the {label} check") in str(check.value)
                assert f"{f.__name__}: too many" in str(check.value)


def test_jitted_functions_report_their_own_lines_too() -> None:
    first, second = hf.jit(halve), hf.jit(third)
    x = hf.zeros(31)
    with compiling(1, 1):
        first(x, hf.asarray(3))
        second(x, hf.asarray(3))
    for f, g, label in ((first, halve, "first"), (second, third, "second")):
        with pytest.raises(IndexingError) as caught:
            f(x, hf.asarray(31))
        assert line_of(g, f"# the {label} use") in str(caught.value)


def test_an_error_of_a_function_leaves_no_state() -> None:
    x = hf.zeros(3)

    def body(c: Any) -> Any:
        x[0] = 1.0
        raise KeyError("mine")

    calls: list[Callable[[], Any]] = [
        lambda: hf.cond(hf.asarray(True), lambda: body(0), lambda: 0),
        lambda: hf.while_loop(lambda c: c < 3, body, 0),
        lambda: hf.scan(lambda c, _: body(c), 0, length=2),
        lambda: hf.map(body, hf.arange(3)),
    ]
    for call in calls:
        with pytest.raises(KeyError, match="mine"):
            call()
        assert (x + 1).tolist() == [1.0, 1.0, 1.0]


def test_a_float_of_numpy_that_changes_needs_no_other_program() -> None:
    def f(x: Any, rate: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, y: y * rate + np.float32(1.25), x)

    x = hf.asarray(np.arange(5, dtype=np.float32))
    f(x, np.float32(0.3125))
    with compiling(0):
        for rate in np.linspace(0.5, 1.5, 5, dtype=np.float32):
            want = np.arange(5, dtype=np.float32)
            for _ in range(3):
                want = want * rate + np.float32(1.25)
            same(f(x, rate), want)


def test_a_whole_number_of_numpy_is_a_constant() -> None:
    def f(x: Any) -> Any:
        return hf.take(x, (hf.arange(20) ^ np.int64(3)) & np.int64(7))

    run = hf.jit(f)
    x = np.arange(8.0)
    same(run(x), x[(np.arange(20) ^ 3) & 7])
    assert "trap" not in run.loop_ir
