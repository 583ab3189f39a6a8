"""Writes of a jitted function that no later call would repeat are refused, by line."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import pytest

import hopflow as hf
from hopflow.errors import ImpurityError

OUT: list[Any] = []
QUEUE: Final = deque([1.0, 2.0, 3.0])
CACHE: dict[str, Any] = {"old": 1}
FIRST: Any
LAST: Any = None
NAMES: Final = {"a", "b"}


class Model:
    def __init__(self) -> None:
        self.w, self.h, self.count = hf.ones(2), None, 0
        self.items: list[Any] = [hf.ones(2), hf.zeros(2)]
        self.inner: dict[str, list[Any]] = {"rows": []}

    @hf.jit
    def keeps(self, x: Any) -> Any:
        self.h = x * 2
        return x

    @hf.jit
    def updates(self, x: Any) -> Any:
        self.w = self.w - 0.1 * x
        return x

    @hf.jit
    def pops(self, x: Any) -> Any:
        return self.items.pop() + x

    @hf.jit
    def deep(self, x: Any) -> Any:
        self.inner["rows"].append(x.shape[0] * x)
        return x

    @hf.jit
    def deletes(self, x: Any) -> Any:
        del self.count
        return x

    @hf.jit
    def counts(self, x: Any) -> Any:
        self.count += 1
        self.inner["names"] = ["x"]
        return x


def appended(x: Any) -> Any:
    OUT.append(x + 1)
    return x


def stored(x: Any) -> Any:
    CACHE["new"] = x
    return x


def popped(x: Any) -> Any:
    return x * QUEUE.popleft()


def cleared(x: Any) -> Any:
    CACHE.clear()
    return x


def discarded(x: Any) -> Any:
    NAMES.discard("a")
    return x


def rebound(x: Any) -> Any:
    global LAST
    LAST = x * 2
    return x


def rebound_to_a_list(x: Any) -> Any:
    global LAST
    LAST = [x * 2]
    return x


def bound_first(x: Any) -> Any:
    global FIRST
    FIRST = x * 2
    return x


def in_a_helper(x: Any) -> Any:
    return appended(x) * 2


def in_a_body(x: Any) -> Any:
    def body(_: Any, c: Any) -> Any:
        OUT.append(c)
        return c * 2

    return hf.fori_loop(0, 2, body, x)


def state() -> Any:
    return [*OUT], [*QUEUE], dict(CACHE), set(NAMES), LAST, "FIRST" in globals()


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (appended, r"`global OUT` gets a value of the trace \(f32\[2\]\)"),
        (stored, r"`global CACHE` gets a value of the trace"),
        (popped, "`global QUEUE` loses an item"),
        (cleared, "`global CACHE` loses 'old'"),
        (discarded, "`global NAMES` loses an item"),
        (rebound, r"`global LAST` gets a value of the trace \(f32\[2\]\)"),
        (rebound_to_a_list, r"`global LAST` gets a value of the trace \(f32\[2\]\)"),
        (bound_first, "`global FIRST` gets a value of the trace"),
        (in_a_helper, "`global OUT` gets a value"),
        (in_a_body, "`global OUT` gets a value"),
    ],
)
def test_a_lost_write_to_a_global_is_refused(
    f: Callable[[Any], Any], what: str
) -> None:
    before = state()
    for _ in range(2):  # it is not there the second time, either
        with pytest.raises(ImpurityError, match=rf"test_outside_writes.py:\d+: {what}"):
            hf.jit(f)(hf.ones(2))
        assert state() == before


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("keeps", r"`self` gets a value of the trace \(f32\[2\]\)"),
        ("updates", "`self` gets a value of the trace"),
        ("pops", "`self.items` loses an item"),
        ("deep", r"`self.inner\[.rows.\]` gets a value of the trace"),
        ("deletes", "`self` loses 'count'"),
    ],
)
def test_a_lost_write_to_an_object_is_refused(name: str, what: str) -> None:
    model = Model()
    before = dict(vars(model))
    with pytest.raises(ImpurityError, match=rf"test_outside_writes.py:\d+: {what}"):
        getattr(model, name)(hf.ones(2))
    assert vars(model) == before
    assert len(model.items) == 2
    assert model.inner == {"rows": []}


def test_the_line_is_that_of_the_write() -> None:
    with pytest.raises(ImpurityError) as caught:
        hf.jit(stored)(hf.ones(2))
    [line] = re.findall(r"test_outside_writes.py:(\d+)", str(caught.value))
    assert int(line) == stored.__code__.co_firstlineno + 1


def test_a_closure_is_refused_as_a_global_is() -> None:
    seen: list[Any] = []

    def f(x: Any) -> Any:
        seen.append((x, 1)[0])
        return x

    with pytest.raises(ImpurityError, match="`closure seen` gets a value"):
        hf.jit(f)(hf.ones(2))
    assert seen == []


@pytest.mark.parametrize("is_within", [False, True])
def test_a_variable_of_an_enclosing_function_is_refused(is_within: bool) -> None:
    last: Any = None
    total = 0

    def f(x: Any) -> Any:
        nonlocal last, total
        own = x
        total = total + 1

        def inner() -> None:
            nonlocal own, last
            own = x * 3
            if is_within:
                last = own

        inner()
        if not is_within:
            last = own
        return own

    what = r"test_outside_writes.py:\d+: `closure last` gets a value of the trace"
    with pytest.raises(ImpurityError, match=what):
        hf.jit(f)(hf.ones(2))
    assert (last, total) == (None, 0)


def test_a_variable_that_is_as_before_when_the_call_ends_may_hold_a_trace() -> None:
    last: Any = None

    def f(x: Any) -> Any:
        nonlocal last
        last = x * 2
        found, last = last, None
        return found

    assert hf.jit(f)(hf.ones(2)).tolist() == [2.0, 2.0]


def test_counters_and_caches_of_plain_values_are_left_alone() -> None:
    model, log = Model(), []
    calls = 0

    def f(x: Any) -> Any:
        nonlocal calls
        calls += 1
        log.append(x.shape)
        scratch = [x]
        scratch.pop()
        CACHE.setdefault("plain", 3)
        return x * 2

    run = hf.jit(f)
    for _ in range(3):
        assert run(hf.ones(2)).tolist() == [2.0, 2.0]
        model.counts(hf.ones(2))
    assert (calls, log, CACHE.pop("plain"), model.count) == (1, [(2,)], 3, 1)


def test_what_is_put_back_is_no_loss() -> None:
    items = [hf.ones(2), hf.zeros(2)]

    def f(x: Any) -> Any:
        last = items.pop()
        items.append(last)
        return x + last

    assert hf.jit(f)(hf.ones(2)).tolist() == [1.0, 1.0]
    assert len(items) == 2
