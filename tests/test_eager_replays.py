"""Eager calls of operators that are met again: replayed, and never stale."""

import functools
import gc
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import CheckError, IndexingError, StructureError

Read = Callable[[], Any]
Run = Callable[[Any], Any]


@contextmanager
def tracing(*, some: bool) -> Iterator[None]:
    """The block traces functions of operators, or none."""
    before = hf.stats().body_traces
    yield
    assert (hf.stats().body_traces > before) is some


def replayed(f: Callable[[], Any]) -> Any:
    """Call `f` until its operators are replayed, and return the last result."""
    f(), f()
    with tracing(some=False):
        return f()


def same(got: Any, want: Any) -> None:
    for a, b in zip(*map(hf_leaves, (got, want)), strict=True):
        assert a.type == b.type
        assert a.type.weak is b.type.weak
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)


def hf_leaves(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, tuple | list) else [tree]


# --- operators whose functions call `read()` ------------------------------------------


def scan(read: Read) -> Run:
    def step(c: Any, x: Any) -> Any:
        y = c * 0.5 + x * read()
        return y, y

    return lambda x: hf.scan(step, x[0], x)


def while_loop(read: Read) -> Run:
    def test(i: Any, c: Any) -> Any:
        return i < 3

    def step(i: Any, c: Any) -> Any:
        return i + 1, c * 0.5 + read()

    return lambda x: hf.while_loop(test, step, (0, x))


def while_test(read: Read) -> Run:
    def test(c: Any) -> Any:
        return hf.sum(c) < 100.0 + read()

    def step(c: Any) -> Any:
        return c * 2 + 1

    return lambda x: hf.while_loop(test, step, x)


def fori_loop(read: Read) -> Run:
    def step(i: Any, c: Any) -> Any:
        return c * read() + i

    return lambda x: hf.fori_loop(0, 4, step, x)


def cond(read: Read) -> Run:
    def then(x: Any) -> Any:
        return x * read()

    def otherwise(x: Any) -> Any:
        return x - read()

    return lambda x: (
        hf.cond(hf.sum(x) > 0, then, otherwise, (x,)),
        hf.cond(hf.sum(x) < 0, then, otherwise, (x,)),
    )


def switch(read: Read) -> Run:
    branches = [lambda x: x + 1, lambda x: x * read(), lambda x: x - read()]
    return lambda x: hf.switch(hf.astype(x[0] + 1, "int64"), branches, (x,))


def map_(read: Read) -> Run:
    def f(x: Any) -> Any:
        return hf.sin(x) * read()

    return lambda x: hf.map(f, x)


def associative_scan(read: Read) -> Run:
    def combine(a: Any, b: Any) -> Any:
        return a + b * read()

    return lambda x: hf.associative_scan(combine, x)


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))


twice: Any = Twice()


def users(read: Read) -> Run:
    def f(x: Any) -> Any:
        return x * read() + 1

    return lambda x: twice(f, x)


OPERATORS = [
    *(scan, while_loop, while_test, fori_loop, cond, switch, map_),
    *(associative_scan, users),
]


# --- what they read -------------------------------------------------------------------

VALUE: Any = 0.0
HELPER: Any = None
MODULE: Any = types.ModuleType("users_module")


class Plain:
    shared: ClassVar[Any] = 0.0

    def __init__(self) -> None:
        self.value: Any = 0.0
        self.parts: Any = {"a": [0.0, {"b": 0.0}]}

    @property
    def computed(self) -> Any:
        return self.value * 2

    def method(self) -> Any:
        return self.value + 1


class Derived(Plain):
    pass


def global_variable() -> Any:
    def change(k: int) -> None:
        global VALUE
        VALUE = k + 0.5

    return lambda: VALUE, change


def cell() -> Any:
    value = 0.0

    def change(k: int) -> None:
        nonlocal value
        value = k + 0.5

    return lambda: value, change


def attribute() -> Any:
    o = Plain()
    return lambda: o.value, lambda k: setattr(o, "value", k + 0.5)


def class_attribute() -> Any:
    return lambda: Plain.shared, lambda k: setattr(Plain, "shared", k + 0.5)


def inherited() -> Any:
    o = Derived()
    return lambda: o.shared, lambda k: setattr(Plain, "shared", k + 0.5)


def computed() -> Any:
    o = Plain()
    return lambda: o.computed, lambda k: setattr(o, "value", k + 0.5)


def method() -> Any:
    o = Plain()
    return o.method, lambda k: setattr(o, "value", k + 0.5)


def other_object() -> Any:
    o = Plain()

    def change(k: int) -> None:
        nonlocal o
        o = Plain()
        o.value = k + 0.5

    return lambda: o.value, change


def item() -> Any:
    d = {"lr": 0.0}
    return lambda: d["lr"], lambda k: d.update(lr=k + 0.5)


def deep_item() -> Any:
    o = Plain()

    def change(k: int) -> None:
        o.parts["a"][1]["b"] = k + 0.5

    return lambda: o.parts["a"][1]["b"], change


def items() -> Any:
    values = [1.0]

    def change(k: int) -> None:
        values[:] = [1.5] * (k + 1)

    return lambda: sum(v * 0.5 for v in values), change


def default() -> Any:
    def read(value: Any = 0.0) -> Any:
        return value

    return read, lambda k: setattr(read, "__defaults__", (k + 0.5,))


def keyword_default() -> Any:
    def read(*, value: Any = 0.0) -> Any:
        return value

    return read, lambda k: setattr(read, "__kwdefaults__", {"value": k + 0.5})


def function_attribute() -> Any:
    def holder() -> None: ...

    owner: Any = holder
    return lambda: owner.value, lambda k: setattr(owner, "value", k + 0.5)


def module_attribute() -> Any:
    return lambda: MODULE.value, lambda k: setattr(MODULE, "value", k + 0.5)


def helper() -> Any:
    def change(k: int) -> None:
        global HELPER
        HELPER = [lambda: 1.5, lambda: 2.5, lambda: -0.5][k % 3]

    return lambda: HELPER(), change


def code() -> Any:
    def read() -> Any:
        return 0.5

    codes = [f.__code__ for f in (lambda: 0.5, lambda: 1.5, lambda: -2.5)]
    return read, lambda k: setattr(read, "__code__", codes[k % 3])


def bound_partial() -> Any:
    read: Any = None

    def change(k: int) -> None:
        nonlocal read
        read = functools.partial(lambda v: v * 1.5, k + 0.5)

    return lambda: read(), change


def tensor() -> Any:
    value = hf.asarray(0.5)

    def change(k: int) -> None:
        nonlocal value
        value = hf.asarray(k + 0.5)

    return lambda: value, change


def written_tensor() -> Any:
    value = hf.asarray(0.5)

    def change(k: int) -> None:
        value[...] = k + 0.5

    return lambda: value, change


def tensor_of_other_type() -> Any:
    value = hf.asarray(0.5)

    def change(k: int) -> None:
        nonlocal value
        value = hf.asarray(k + 1, dtype=["float32", "int8", "int32"][k % 3])

    return lambda: value, change


def element() -> Any:
    value = hf.asarray(0.5)

    def change(k: int) -> None:
        value[...] = k + 0.5

    return lambda: float(value), change


def array() -> Any:
    values = np.asarray([0.5], "f")

    def change(k: int) -> None:
        values[0] = k + 0.5

    return lambda: hf.sum(values), change


def other_array() -> Any:
    values = np.asarray(0.5, "f")

    def change(k: int) -> None:
        nonlocal values
        values = np.asarray(k + 0.5, "f")

    return lambda: values * hf.asarray(1.0), change


def array_as_numbers() -> Any:
    values = np.asarray([0.5, 1.0])

    def change(k: int) -> None:
        values[1] = k + 0.5

    return lambda: float(values.sum()), change


def flag() -> Any:
    o = Plain()
    return lambda: 2.0 if o.value else 0.5, lambda k: setattr(o, "value", bool(k % 2))


def missing() -> Any:
    o = Plain()

    def change(k: int) -> None:
        vars(o).pop("extra", None)
        if k % 2:
            o.extra = k + 0.5  # type: ignore[attr-defined]

    return lambda: getattr(o, "extra", 3.0), change


def is_in() -> Any:
    names: set[str] = set()

    def change(k: int) -> None:
        names.clear()
        names.update({"on"} if k % 2 else ())

    return lambda: 2.0 if "on" in names else 0.5, change


WAYS = [
    *(global_variable, cell, attribute, class_attribute, inherited, computed, method),
    *(other_object, item, deep_item, items, default, keyword_default),
    *(function_attribute, module_attribute, helper, code, bound_partial, tensor),
    *(written_tensor, tensor_of_other_type, element, array, other_array),
    *(array_as_numbers, flag, missing, is_in),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_what_is_read_from_outside_is_never_stale(operator: Any, way: Any) -> None:
    read, change = way()
    run = operator(read)
    x = hf.asarray([0.5, -1.0, 2.0])
    for k in (0, 0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 3, 4, 5, 0):
        change(k)
        got = run(x)
        with hf.debug():
            want = run(x)
        same(got, want)
    operator, x = operator(read), x + 1
    change(1)
    replayed(lambda: operator(x))


# --- what is replayed -----------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_the_third_call_is_replayed(operator: Any) -> None:
    run, other = operator(lambda: 1.5), operator(lambda: 1.5)
    for n in (3, 4):
        x = hf.arange(n, dtype="float32")
        want = replayed(functools.partial(run, x))
        same(run(x), want)
        same(run(x + 1), other(x + 1))
    with tracing(some=False):
        run(hf.ones(3))
    with tracing(some=True):
        run(hf.ones(3, dtype="float64"))


def test_numbers_and_options_belong_to_a_kind() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, c

    x = hf.arange(4.0)
    for init in (0, 0.0, -0.0, 1, 1.0, hf.asarray(2.0)):
        for reverse in (False, True):
            want = hf.scan(lambda c, x: step(c, x), init, x, reverse=reverse)
            for _ in range(4):
                same(hf.scan(step, init, x, reverse=reverse), want)
    replayed(lambda: hf.scan(step, 0, x))
    with tracing(some=True):
        hf.scan(step, 7, x)


def test_containers_of_arguments_belong_to_a_kind() -> None:
    def step(c: Any, x: Any) -> Any:
        return {"b": c["b"] + x[0], "a": c["a"] * x[1]}, (c, None)

    xs = hf.arange(3.0), hf.ones(3)

    def run(b: Any) -> Any:
        return hf.scan(step, {"b": b, "a": 1.0}, xs)

    (c, (ys, _)) = replayed(lambda: run(hf.asarray(2.0)))
    assert (c["b"].item(), c["a"].item(), ys["b"].tolist()) == (5.0, 1.0, [2, 2, 3])
    (c, _) = run(hf.asarray(3.0))
    assert c["b"].item() == 6.0


def test_a_tensor_may_be_an_argument_and_read_from_outside() -> None:
    w = hf.asarray([1.0, 2.0])

    def step(c: Any, x: Any) -> Any:
        return c * w + x, None

    def run(c: Any, x: Any) -> Any:
        return hf.scan(step, c, x)[0].tolist()

    xs = hf.ones((1, 2))
    assert replayed(lambda: run(w, xs)) == [2.0, 5.0]
    v = hf.asarray([3.0, 3.0])
    for _ in range(4):
        assert run(v, xs) == [4.0, 7.0]
        assert run(w, xs) == [2.0, 5.0]
    w = v
    for _ in range(4):
        assert run(v, xs) == [10.0, 10.0]


def test_one_tensor_may_be_several_arguments() -> None:
    def f(x: Any, y: Any) -> Any:
        return x - y

    def run(x: Any, y: Any) -> Any:
        return hf.cond(x[0] < 9, f, f, (x, y)).tolist()

    x, y = hf.ones(2), hf.zeros(2)
    assert replayed(lambda: run(x, x)) == [0, 0]
    for _ in range(4):
        assert run(x, y) == [1, 1]
        assert run(y, x) == [-1, -1]
        assert run(y, y) == [0, 0]


def test_many_kinds_of_calls_are_kept_in_turn() -> None:
    def step(i: Any, c: Any) -> Any:
        return c + i

    for _ in range(3):
        for n in range(70):
            got = hf.fori_loop(0, n, step, hf.asarray(0))
            assert got.item() == n * (n - 1) // 2
    replayed(lambda: hf.fori_loop(0, 5, step, hf.asarray(0)))


def test_bounds_may_be_tensors() -> None:
    def step(i: Any, c: Any) -> Any:
        return c + i

    def run(n: Any) -> Any:
        return hf.fori_loop(0, n, step, hf.asarray(0)).item()

    assert replayed(lambda: run(hf.asarray(4))) == 6
    assert run(hf.asarray(5)) == 10


def test_what_cannot_be_recorded_is_traced() -> None:
    class Odd(list[Any]):
        def __len__(self) -> int:
            raise RuntimeError("odd")

    odd = Odd([0.5])

    def step(c: Any, x: Any) -> Any:
        return c + x * max(odd), None

    is_always_traced(lambda: hf.scan(step, hf.zeros(()), hf.ones(3)))


def test_arrays_are_tensors() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, None

    x = np.ones(3, "f")

    def run() -> Any:
        return hf.scan(step, 0.0, x)[0].item()

    assert replayed(run) == 3.0
    x[1] = 5.0
    assert run() == 7.0
    x = np.full(3, 2.0, "f")
    assert run() == 6.0


def test_methods_are_found_by_their_objects() -> None:
    class Cell:
        def __init__(self, w: float) -> None:
            self.w = hf.asarray(w)
            self.scale = 1.0

        def step(self, c: Any, x: Any) -> Any:
            return c + x * self.w * self.scale, None

    a, b = Cell(1.0), Cell(2.0)
    x = hf.ones(3)

    def run(cell: Any) -> Any:
        return hf.scan(cell.step, 0.0, x)[0].item()

    assert replayed(lambda: run(a)) == 3.0
    assert replayed(lambda: run(b)) == 6.0
    assert run(a) == 3.0
    a.w, b.scale = hf.asarray(5.0), 2.0
    assert (run(a), run(b)) == (15.0, 12.0)


def test_results_share_memory_with_nothing() -> None:
    x = hf.arange(3.0)

    def test(c: Any) -> Any:
        return c[0] > 1

    def step(c: Any) -> Any:
        return c

    def run() -> Any:
        return hf.while_loop(test, step, x)

    results = [replayed(run) for _ in range(2)]
    results[0][0] = 9.0
    assert results[1].tolist() == x.tolist() == [0.0, 1.0, 2.0]


def test_a_body_may_make_tensors() -> None:
    def step(c: Any, x: Any) -> Any:
        t = hf.asarray([1.0, 2.0])
        t[0] = c
        t += hf.zeros(2)
        return hf.sum(t) + x, t

    def run(c: Any) -> Any:
        return hf.scan(step, c, hf.ones(2))

    replayed(lambda: run(hf.asarray(0.0)))
    assert run(hf.asarray(1.0))[1].tolist() == [[1, 2], [4, 2]]


def test_sizes_may_depend_on_data() -> None:
    def then(x: Any) -> Any:
        return x[x > 0]

    def otherwise(x: Any) -> Any:
        return x

    for values in ([1.0, -1.0, 2.0], [1.0, 2.0, 3.0], [1.0, -1.0, -2.0], [-1.0] * 3):
        for _ in range(3):
            x = hf.asarray(values)
            got = hf.map(lambda r: r, hf.cond(x[0] > 0, then, otherwise, (x,)))
            want = [v for v in values if v > 0] if values[0] > 0 else values
            assert got.tolist() == want


def test_the_state_of_an_operator_is_read_from_outside() -> None:
    class Times(hf.HigherOrderOp):
        factor = 2.0

        def debug(self, f: Any, x: Any) -> Any:
            return f(x) * self.factor

    a: Any = Times()
    b: Any = Times()

    def f(x: Any) -> Any:
        return x + 1

    x = hf.ones(2)
    assert replayed(lambda: a(f, x)).tolist() == [4, 4]
    b.factor = 3.0
    assert replayed(lambda: b(f, x)).tolist() == [6, 6]
    Times.factor = 5.0
    assert a(f, x).tolist() == [10, 10]
    Times.debug = lambda self, f, x: f(x)  # type: ignore[method-assign]
    assert a(f, x).tolist() == [2, 2]


def test_values_that_alternate_are_replayed() -> None:
    o = Plain()

    def step(c: Any, x: Any) -> Any:
        return c + x * o.value, None

    def run(k: int) -> Any:
        o.value = k
        return hf.scan(step, hf.zeros(()), hf.ones(3))[0].item()

    for k in (0, 0, 0, 1, 1, 2, 2):
        assert run(k) == 3 * k
    with tracing(some=False):
        for k in (0, 1, 2, 0, 2, 1):
            assert run(k) == 3 * k


def test_recordings_that_pay_are_followed_by_others() -> None:
    o = Plain()

    def step(c: Any, x: Any) -> Any:
        return c + x * o.value, None

    def run(k: int) -> None:
        o.value = k
        assert hf.scan(step, hf.zeros(()), hf.ones(3))[0].item() == 3 * k

    for k in range(9):
        run(k)
        with tracing(some=k == 0):
            for _ in range(4):
                run(k)


def test_prints_appear_at_a_trace(capsys: Any) -> None:
    def step(c: Any, x: Any) -> Any:
        print("step")
        return c + x, None

    for _ in range(5):
        hf.scan(step, hf.zeros(()), hf.ones(3))
    assert capsys.readouterr().out == "step\n" * 2


def test_options_of_users_may_have_any_name() -> None:
    class Named(hf.HigherOrderOp):
        def debug(self, f: Any, x: Any, *, prepare: Any = 1) -> Any:
            return f(x) * prepare

    named: Any = Named()

    def f(x: Any) -> Any:
        return x + 1

    for k in (2, 2, 2, 3, 3):
        assert named(f, hf.ones(2), prepare=k).tolist() == [2 * k, 2 * k]


# --- what is traced in each call ------------------------------------------------------


def test_values_that_always_change_are_no_longer_recorded() -> None:
    o = Plain()

    def step(c: Any, x: Any) -> Any:
        return c + x * o.value, None

    def run() -> None:
        o.value += 1
        assert hf.scan(step, hf.zeros(()), hf.ones(3))[0].item() == 3 * o.value

    is_always_traced(run)


@pytest.mark.parametrize(
    "values", [[0.5] * 5000, dict.fromkeys(range(5000), 0.5), np.ones(1 << 20, "f")]
)
def test_many_values_are_not_compared_in_each_call(values: Any) -> None:
    def step(c: Any, x: Any) -> Any:
        if isinstance(values, np.ndarray):
            return c + x * float(values.max()), None
        parts = values.values() if isinstance(values, dict) else values
        return c + x * sum(parts), None

    is_always_traced(lambda: hf.scan(step, hf.zeros(()), hf.ones(3)))


def is_always_traced(f: Callable[[], Any]) -> None:
    for _ in range(6):
        with tracing(some=True):
            f()


def test_functions_that_change_something_run_in_each_call() -> None:
    log: list[str] = []
    count = 0
    o = Plain()

    def step(c: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        log.append("step")
        o.value += 1
        return c + x, None

    is_always_traced(lambda: hf.scan(step, hf.zeros(()), hf.ones(3)))
    assert (count, len(log), o.value) == (6, 6, 6.0)


def test_what_is_set_again_is_replayed() -> None:
    o = Plain()

    def step(c: Any, x: Any) -> Any:
        o.value = "scan"
        return c + x, None

    def run() -> Any:
        return hf.scan(step, hf.zeros(()), hf.ones(3))

    replayed(run)
    o.value = "other"
    run()
    assert o.value == "scan"


def test_a_traced_value_may_be_kept_outside() -> None:
    log: list[Any] = []

    def step(c: Any, x: Any) -> Any:
        log.append(c)
        return c + x, None

    is_always_traced(lambda: hf.scan(step, hf.zeros(()), hf.ones(3)))
    assert len(log) == 6


def test_items_of_iterators_are_taken_in_each_call() -> None:
    numbers, generator = iter([*range(100)]), (k for k in range(100))
    pairs = zip(iter([*range(100)]), (k for k in range(100)), strict=True)

    def step(c: Any, x: Any) -> Any:
        return c + x * next(numbers) + next(generator) + sum(next(pairs)), None

    for k in range(6):
        assert hf.scan(step, hf.zeros(()), hf.ones(1))[0].item() == 4 * k


def test_writes_reach_tensors_from_outside() -> None:
    total = hf.zeros(())

    def step(c: Any, x: Any) -> Any:
        nonlocal total
        total += x
        return c, None

    is_always_traced(lambda: hf.scan(step, hf.zeros(()), hf.ones(3)))
    assert total.item() == 18.0


def test_writes_reach_operands() -> None:
    def add(row: Any) -> None:
        row += 1.0

    x, y = hf.zeros(2), np.zeros(2)
    for _ in range(5):
        hf.cond(x[0] > -1, add, add, (x,))
        hf.cond(x[0] > -1, add, add, (y,))
    assert x.tolist() == y.tolist() == [5.0, 5.0]


def test_prints_and_callbacks_are_called(capfd: Any) -> None:
    seen: list[float] = []

    def step(c: Any, x: Any) -> Any:
        hf.print("{}", x)
        hf.callback(lambda v: seen.append(float(v)), None, x)
        return c + x, None

    for _ in range(5):
        hf.scan(step, 0.0, hf.arange(2.0))
    assert seen == [0.0, 1.0] * 5
    assert capfd.readouterr().out.split() == ["0.0", "1.0"] * 5


def test_progress_is_reported_in_each_call() -> None:
    seen: list[int] = []

    def step(c: Any, x: Any) -> Any:
        return c + x, None

    def report(done: int, total: Any) -> None:
        seen.append(done)

    for _ in range(5):
        hf.scan(step, 0.0, hf.arange(2.0), progress=report)
    assert seen.count(0) == 5


def test_a_branch_of_a_known_predicate_is_plain_python() -> None:
    seen: list[float] = []

    def then(x: Any) -> Any:
        seen.append(x.item())
        return x * 2 if float(x) > 1 else x

    def otherwise(x: Any) -> Any:
        raise AssertionError

    for k in range(6):
        assert hf.cond(True, then, otherwise, (hf.asarray(float(k)),)).item() in (
            k,
            2 * k,
        )
        print_only = hf.switch(1, [otherwise, then], (hf.asarray(float(k)),))
        assert print_only.item() in (k, 2 * k)
    assert len(seen) == 12


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_debug_mode_runs_the_functions(operator: Any) -> None:
    def read() -> Any:
        ran.add(1)
        return 1.5

    ran = {1}
    run, x = operator(read), hf.arange(3, dtype="float32")
    replayed(lambda: run(x))
    ran.clear()
    with hf.debug():
        run(x)
    assert ran


def test_transforms_and_traces_see_the_functions() -> None:
    def step(c: Any, x: Any) -> Any:
        return c * x, c

    def run(x: Any) -> Any:
        return hf.scan(step, 1.0, x)[0]

    x = hf.asarray([2.0, 3.0])
    replayed(lambda: run(x))
    for _ in range(3):
        assert hf.grad(run)(x).tolist() == [3.0, 2.0]
        assert hf.jit(run)(x).item() == 6.0
        assert hf.vmap(run)(hf.asarray([[2.0, 3.0]])).tolist() == [6.0]
        assert "scan" in str(hf.trace(run, x))
        assert run(x).item() == 6.0


def test_a_jitted_function_sees_what_an_eager_call_in_it_reads() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x * VALUE, None

    global VALUE
    VALUE = 1.0
    x = hf.ones(3)
    replayed(lambda: hf.scan(step, 0.0, x))
    f = hf.jit(lambda y: y + hf.scan(step, 0.0, x)[0])
    assert f(0.0) == 3.0
    VALUE = 2.0
    assert f(0.0) == 6.0


def test_handlers_see_each_call() -> None:
    names: list[str] = []

    class Count(hf.Interpreter):
        def process(self, op: Any, args: Any, params: Any) -> Any:
            names.append(op.name)
            return NotImplemented

    def step(c: Any, x: Any) -> Any:
        return c + x, None

    def run() -> Any:
        return hf.scan(step, hf.zeros(()), hf.ones(3))

    replayed(run)
    with Count():
        run(), run()
    assert names.count("scan") == 2


# --- errors ---------------------------------------------------------------------------


def lines_of(error: BaseException) -> list[tuple[str, Any]]:
    return [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)]


def test_errors_are_those_of_a_traced_call() -> None:
    def step(c: Any, i: Any) -> Any:
        hf.check(c < 3, "too large")
        return c + 1, table[i]

    table = hf.arange(3.0)

    def run(c: Any, i: Any) -> Any:
        return hf.scan(step, c, i)

    zero, good = hf.asarray(0), hf.asarray([0, 1])

    def errors(run: Any) -> list[Any]:
        found = []
        for c, i, kind in ((3, [0, 1], CheckError), (0, [0, 9], IndexingError)):
            with pytest.raises(kind) as caught:
                run(hf.asarray(c), hf.asarray(i))
            found.append((str(caught.value), lines_of(caught.value)[1:]))
        return found

    want = errors(run)
    replayed(lambda: run(zero, good))
    for _ in range(4):
        assert errors(run) == want
        run(zero, good)


def test_errors_of_functions_are_raised_in_each_call() -> None:
    calls = 0

    def step(c: Any, x: Any) -> Any:
        nonlocal calls
        calls += 1
        raise KeyError("mine")

    def wrong(c: Any, x: Any) -> Any:
        return c

    for k in range(6):
        with pytest.raises(KeyError, match="mine"):
            hf.scan(step, hf.zeros(()), hf.ones(3))
        assert calls == k + 1
        with pytest.raises(StructureError, match="must return a pair"):
            hf.scan(wrong, 0.0, hf.ones(3))


def test_an_invalid_tensor_is_refused() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, None

    x = hf.ones(3)
    replayed(lambda: hf.scan(step, 0.0, x))
    hf.jit(lambda x: x * 1, donate=(0,))(x)
    for _ in range(3):
        with pytest.raises(hf.errors.InvalidTensorError, match="donated"):
            hf.scan(step, 0.0, x)


def test_settings_belong_to_a_kind(monkeypatch: Any) -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, None

    def run() -> Any:
        return hf.scan(step, hf.zeros(()), hf.ones(3))

    replayed(run)
    monkeypatch.setattr(hf.config, "check_bounds", not hf.config.check_bounds)
    with tracing(some=True):
        run()
    replayed(run)


# --- what is kept ---------------------------------------------------------------------


def test_neither_functions_nor_tensors_are_kept_alive() -> None:
    class Model:
        step: Any = None

    def make() -> list[Any]:
        namespace: dict[str, Any] = {"hf": hf, "w": hf.ones(3)}
        exec("def step(c, x): return c + x * w, None", namespace)
        step, v, model = namespace["step"], hf.ones(3), Model()
        model.step = staticmethod(step)

        def other(c: Any, x: Any) -> Any:
            return step(c, x)[0] * v + isinstance(model, Model), None

        for f in (step, other):
            replayed(functools.partial(hf.scan, f, hf.zeros(3), hf.ones((2, 3))))
        return [weakref.ref(x) for x in (step, other, v, namespace["w"], model)]

    refs = make()
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_a_tensor_that_was_replaced_is_not_kept_alive() -> None:
    w = hf.ones(3)

    def step(c: Any, x: Any) -> Any:
        return c + x * w, None

    x = hf.ones((2, 3))
    replayed(lambda: hf.scan(step, hf.zeros(3), x))
    old = [weakref.ref(w), weakref.ref(x)]
    w = x = hf.zeros(3)
    gc.collect()
    assert [r() for r in old] == [None, None]


def test_new_functions_leave_nothing() -> None:
    x = hf.ones(3)

    def test(c: Any) -> Any:
        return c < 3

    def many() -> None:
        for _ in range(100):
            hf.scan(lambda c, x: (c + x, None), 0.0, x)
            hf.while_loop(test, lambda c: c + 1, 0.0)

    many()
    gc.collect()
    before = len(gc.get_objects())
    many()
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def test_a_wrapper_has_calls_of_its_own() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, None

    x = hf.ones(3)
    replayed(lambda: hf.scan(step, 0.0, x))

    @functools.wraps(step)
    def doubled(c: Any, x: Any) -> Any:
        return step(c, 2 * x)

    for _ in range(4):
        assert hf.scan(doubled, 0.0, x)[0].item() == 6.0
        assert hf.scan(step, 0.0, x)[0].item() == 3.0


def test_functions_with_calls_can_be_sent_by_value() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    w = 2.0
    x = hf.ones(3)

    def step(c: Any, x: Any) -> Any:
        return (c + x * w, None)

    replayed(lambda: hf.scan(step, 0.0, x))
    sent = cloudpickle.loads(cloudpickle.dumps(step))
    for _ in range(4):
        assert hf.scan(sent, 0.0, x)[0].item() == 6.0


def test_threads_may_call_at_once() -> None:
    w = hf.ones(())

    def step(c: Any, x: Any) -> Any:
        return c + x * w, None

    wrong: list[Any] = []

    def work(k: int) -> None:
        for n in range(1, 40):
            x = hf.full((n % 5 + 1,), float(k))
            got = hf.scan(step, 0.0, x)[0].item()
            if got != k * (n % 5 + 1):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_function_may_call_itself_by_an_operator() -> None:
    def step(n: int) -> Any:
        return lambda c: (
            c + 1 if n == 0 else hf.fori_loop(0, 2, lambda i, y: step(n - 1)(y), c)
        )

    f = step(3)

    def run(x: Any) -> Any:
        return hf.cond(x > 0, f, f, (x,))

    assert replayed(lambda: run(hf.asarray(1.0))).item() == 9.0


def test_a_debugger_sees_the_traces(monkeypatch: Any) -> None:
    if sys.version_info < (3, 12):
        pytest.skip("the recorder uses the trace function itself")

    def step(c: Any, x: Any) -> Any:
        return c + x, None

    seen: list[str] = []

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is step.__code__ and event == "call":
            seen.append(event)
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        for _ in range(4):
            hf.scan(step, hf.zeros(()), hf.ones(3))
    finally:
        sys.settrace(before)
    assert seen
