"""Guards: what calls are checked against of what a trace has read from outside."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

import hopflow
from hopflow.testing.executions import agree
from hopflow.trace.outside import modules, watch

hf: Any = hopflow

X = hf.asarray(np.linspace(0.5, 1.5, 3, dtype=np.float32))


LEVELS = [1]


class Holder:
    value: Any


class Color(Enum):
    RED = 1
    BLUE = 2


def double(x: Any) -> Any:
    return x + x


@contextmanager
def traces(count: int) -> Iterator[None]:
    """The block traces so many functions."""
    before = hf.stats().traces
    yield
    assert hf.stats().traces - before == count


def test_what_code_does_not_reach_is_not_read() -> None:
    holder: Any = Holder()
    holder.value, holder.steps, table = 1.5, 0, {"read": 2.0, "steps": 0}

    def passed(config: Any) -> Any:
        return config["read"]

    def f(x: Any) -> Any:
        if holder.value is None:
            return x * holder.steps
        return x * passed(table) * (holder.value if x.shape else table["steps"])

    jitted = hf.jit(f)
    with traces(1):
        for _ in range(3):
            agree(jitted(X), f(X))
            holder.steps += 1
            table["steps"] += 1


def test_objects_that_are_one_and_come_to_be_two() -> None:
    first, holder = hf.full((3,), 2.0), Holder()
    second, holder.value = first, first
    f = hf.jit(lambda x: x * first + second * holder.value)
    agree(f(X), X * first + second * holder.value)
    second = hf.full((3,), 5.0)
    agree(f(X), X * first + second * holder.value)
    holder.value = hf.full((3,), 7.0)
    with traces(1):
        agree(f(X), X * first + second * holder.value)
    first = second = holder.value
    with traces(0):
        agree(f(X), X * first + second * holder.value)


def test_an_argument_that_is_no_data_is_read_anew() -> None:
    holder = Holder()
    f = hf.jit(lambda x, owner: x * owner.value)
    for value in (2.0, hf.asarray(4.0), 3.0):
        holder.value = value
        agree(f(X, holder), X * value)
    assert f.explain(X, holder) == "runs what has been compiled"
    holder.value = None
    assert "`owner.value` was 2.0, and is None" in f.explain(X, holder)


def test_what_is_not_read_any_more_is_freed() -> None:
    holder, inner = Holder(), Holder()
    holder.value, inner.value = inner, hf.ones(3)
    f = hf.jit(lambda x: x * holder.value.value)
    f(X)
    tensor, owner = ref(inner.value), ref(inner)
    inner = holder.value = Holder()
    inner.value = hf.zeros(3)
    gc.collect()
    assert tensor() is None
    assert owner() is None
    agree(f(X), X * 0)


def test_a_function_that_is_told_by_identity_is_freed_too() -> None:
    held: list[Any] = [None]
    f = hf.jit(lambda x: held[0](x))
    for factor in range(3):
        held[0] = hf.grad(lambda x, k=float(factor): hf.sum(k * x))
        with traces(1):
            agree(f(X), np.full(3, factor))
        function = ref(held[0])
        held[0] = None
        gc.collect()
        assert function() is None


# --- what a trace changes itself ------------------------------------------------------


def test_a_flag_that_is_set_at_first_is_seen() -> None:
    is_first, scale = True, None

    def f(x: Any) -> Any:
        nonlocal is_first, scale
        if is_first:
            is_first, scale = False, 3.0
            return x
        return x * scale

    jitted = hf.jit(f)
    agree([jitted(X) for _ in range(3)], [X, X * 3, X * 3])


def test_a_name_that_is_bound_for_the_trace_settles() -> None:
    present: Any = None

    def f(x: Any) -> Any:
        nonlocal present
        before, present = present, Holder()
        present.value = 2.0
        x = x * present.value
        present = before
        return x

    jitted = hf.jit(f)
    for _ in range(3):
        jitted(X)
    with traces(0):
        agree(jitted(X), X * 2)


# --- what explanations say ------------------------------------------------------------


def test_explanations_of_what_containers_have() -> None:
    table: dict[str, Any] = {"a": [1.0, 2.0]}
    members, array, holder = {1}, np.zeros(2), Holder()
    first = second = hf.ones(3)
    holder.value = double

    def f(x: Any) -> Any:
        x = x * sum(table["a"]) * len(table) * len(members) + float(array.sum())
        if hasattr(holder, "extra") or "extra" in vars(holder):
            return x
        return holder.value(x) * first + second

    jitted = hf.jit(f)
    jitted(X)

    def said(text: str) -> None:
        assert text in jitted.explain(X)

    table["a"].append(3.0)
    said('`table["a"]` had 2 items, and has 3')
    table["a"] = (1.0, 2.0)
    said('`table["a"]` was of type list, and is of type tuple')
    del table["a"]
    said('`table["a"]` is not there any more')
    table["a"], table["b"] = [1.0, 2.0], 1
    said("what `closure table` contains has changed")
    del table["b"]
    members.add(2)
    said("what `closure members` contains has changed")
    members.remove(2)
    array[0] = 1
    said("what `closure array` contains has changed")
    array = np.zeros(3)
    said(
        "was a NumPy array of float64, shape (2,), and is a NumPy array of float64, sh"
    )
    array = np.zeros(2)
    second = hf.ones(3)
    said("`closure second` was the same object as `closure first`, and is another")
    first = second
    holder.value = lambda x: x
    said("`holder.value` was the function `double` (test_outside_guards.py:")
    holder.value = double
    assert jitted.explain(X) == "runs what has been compiled"
    holder.extra = 1  # type: ignore[attr-defined]
    said("`closure holder` has an attribute `extra` now")


def test_explanations_of_objects_and_keys() -> None:
    table, kind = {"a": 1.0}, Color.RED
    f = hf.jit(lambda x: x * table.get("a") if kind is Color.RED else x)
    f(X)
    kind = Color.BLUE
    assert "`closure kind` is another Color now" in f.explain(X)
    row: dict[str, float] = {}

    def first(x: Any) -> Any:
        try:
            return x * row["scale"]
        except KeyError:
            return x

    g = hf.jit(first)
    agree(g(X), X)
    row["scale"] = 2.0
    assert "`closure row` has a key 'scale' now" in g.explain(X)
    agree(g(X), X * 2)


def test_what_the_garbage_collector_calls_is_not_read() -> None:
    seen = set()

    def note(*_: Any) -> None:
        seen.add(LEVELS[0])

    def f(x: Any) -> Any:
        gc.collect()
        return x * 2

    jitted = hf.jit(f)
    gc.callbacks.append(note)
    try:
        jitted(X)
        assert seen == {1}
        LEVELS[0] = 2
        assert jitted.explain(X) == "runs what has been compiled"
    finally:
        gc.callbacks.remove(note)


# --- threads, and errors --------------------------------------------------------------


def test_threads_that_trace_at_once() -> None:
    holder = Holder()
    functions = [hf.jit(lambda x, k=k: x * holder.value + k) for k in range(4)]
    holder.value = 2.0
    with ThreadPoolExecutor(8) as pool:
        for f, found in [(f, pool.submit(f, X)) for f in functions * 4]:
            agree(found.result(), X * 2 + functions.index(f))
    holder.value = 3.0
    for k, f in enumerate(functions):
        agree(f(X), X * 3 + k)


class _Ignoring:
    """A recorder that records nothing."""

    def enter(self, frame: Any) -> None: ...
    def resume(self, frame: Any) -> None: ...
    def load(self, frame: Any, load: Any) -> None: ...


def test_an_event_of_another_thread_may_outlast_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, ended = threading.Event(), threading.Event()
    right, failures = modules.is_watched, list[BaseException]()

    def is_watched(frame: Any) -> bool:
        if frame.f_code.co_name == "beside":
            reached.set()
            ended.wait(10)
        return right(frame)

    def beside() -> None:
        reached.set()

    def work() -> None:
        try:
            beside()
        except ValueError as error:
            failures.append(error)

    monkeypatch.setattr(watch, "is_watched", is_watched)
    other = threading.Thread(target=work)
    with watch.watching(cast(Any, _Ignoring())):
        other.start()
        assert reached.wait(10)
    ended.set()
    other.join()
    assert not failures


def test_an_error_leaves_nothing_watched() -> None:
    is_bad = True

    def f(x: Any) -> Any:
        if is_bad:
            raise KeyError("bad")
        return x

    jitted = hf.jit(f)
    with pytest.raises(KeyError, match="bad"):
        jitted(X)
    assert not watch.recorders()
    is_bad = False
    agree(jitted(X), X)
