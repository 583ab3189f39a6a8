"""Writes of a jitted function that no later call would repeat are refused, by line."""

import io
import itertools
import json
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import ImpurityError
from hopflow.trace.outside import watch

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


@pytest.mark.parametrize("held", [bytearray((1, 2)), array("d", (1.0, 2.0))])
def test_a_buffer_loses_no_item(held: Any) -> None:
    before = held[:]
    with pytest.raises(ImpurityError, match="`closure held` loses an item"):
        hf.jit(lambda x: x * held.pop())(hf.ones(2))
    assert held == before


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


# --- iterators -----------------------------------------------------------------------

NUMBERS: Final = (1.0, 2.0, 3.0, 4.0)
STREAM: Any = None


def first(x: Any) -> Any:
    return x * float(next(STREAM))


def first_or_none(x: Any) -> Any:
    return x * next(STREAM, 0.0)


def by_method(x: Any) -> Any:
    return x * float(STREAM.__next__())


def looped(x: Any) -> Any:
    for value in STREAM:
        return x * float(value)
    return x


def listed(x: Any) -> Any:
    return x * len(list(STREAM))


def zipped(x: Any) -> Any:
    return x * float(next(zip(range(1), STREAM, strict=False))[1])


def unpacked(x: Any) -> Any:
    a, *_ = STREAM
    return x * float(a)


def starred(x: Any) -> Any:
    return x * len([*STREAM])


def summed(x: Any) -> Any:
    return x * sum(float(value) for value in STREAM)


def sought(x: Any) -> Any:
    return x * (2.0 if 2.0 in STREAM else 1.0)


def by_a_helper(x: Any) -> Any:
    def take(source: Any) -> Any:
        return float(next(source))

    return x * take(STREAM)


def by_another_name(x: Any) -> Any:
    source = iter(STREAM)
    return x * float(next(source))


def delegated(x: Any) -> Any:
    def items() -> Any:
        yield from STREAM

    return x * float(next(items()))


TAKERS: Final = (
    *(first, first_or_none, by_method, looped, listed, zipped, unpacked, starred),
    *(summed, sought, by_a_helper, by_another_name, delegated),
)
STREAMS: Final[dict[str, Callable[[], Any]]] = {
    "list_iterator": lambda: iter([*NUMBERS]),
    "generator": lambda: (value for value in NUMBERS),
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle(NUMBERS),
    "islice": lambda: itertools.islice(NUMBERS, 4),
    "dict_keyiterator": lambda: iter(dict.fromkeys(NUMBERS)),
    "map": lambda: map(float, NUMBERS),
    "callable_iterator": lambda: iter(iter(NUMBERS).__next__, None),
    "flatiter": lambda: np.arange(1.0, 5.0).flat,
    "StringIO": lambda: io.StringIO("1\n2\n3\n4\n"),
}


def check_stopped(f: Any, text: str, stream: Any, *args: Any) -> None:
    """Check that no item is taken: the next one is still the first one."""
    what = rf"test_outside_writes.py:\d+: `{text}` is an? {type(stream).__name__} of"
    for _ in range(2):
        with pytest.raises(ImpurityError, match=what) as caught:
            hf.jit(f)(hf.ones(2), *args)
    assert "Take the items before the call" in str(caught.value)
    assert "cannot be put back" not in str(caught.value)
    assert float(next(stream)) == 1.0


@pytest.mark.parametrize("f", TAKERS)
@pytest.mark.parametrize("kind", ["list_iterator", "generator"])
def test_an_iterator_from_outside_is_not_advanced(
    f: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = STREAMS[kind]()
    monkeypatch.setitem(globals(), "STREAM", stream)
    check_stopped(f, "global STREAM", stream)
    with hf.debug():
        hf.jit(f)(hf.ones(2))


@pytest.mark.parametrize("f", [first, looped])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("is_traced", [False, True])
def test_iterators_of_all_kinds_are_not_advanced(
    f: Any, kind: str, is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_traced:
        monkeypatch.setattr(watch, "_events", watch.by_tracing)
    stream = STREAMS[kind]()
    monkeypatch.setitem(globals(), "STREAM", stream)
    before = sys.gettrace()
    check_stopped(f, "global STREAM", stream)
    assert sys.gettrace() is before


@pytest.mark.parametrize("place", ["argument", "attribute", "item", "default", "cell"])
def test_an_iterator_is_found_wherever_it_is(place: str) -> None:
    stream = iter([*NUMBERS])
    model, table = Model(), {"rows": [stream]}
    model.h = cast(Any, stream)

    def default(x: Any, held: Any = stream) -> Any:
        return x * next(held)

    text, f = {
        "argument": ("s", lambda x, s: x * next(s)),
        "attribute": ("model.h", lambda x: x * next(cast(Any, model.h))),
        "item": (r"table\[.rows.\]\[0\]", lambda x: x * next(table["rows"][0])),
        "default": ("default held", default),
        "cell": ("closure stream", lambda x: x * next(stream)),
    }[place]
    check_stopped(f, text, stream, *([stream] if place == "argument" else []))


def test_a_generator_is_sent_nothing() -> None:
    def running() -> Any:
        total = 0.0
        while True:
            total += yield total

    stream = running()
    next(stream)
    with pytest.raises(ImpurityError, match="`closure stream` is a generator of"):
        hf.jit(lambda x: x * stream.send(1.0))(hf.ones(2))
    assert stream.send(1.0) == 1.0


def test_a_stop_that_code_catches_is_still_an_error() -> None:
    stream = iter(NUMBERS)

    def f(x: Any) -> Any:
        try:
            return x * next(stream)
        except Exception:
            return x

    check_stopped(f, "closure stream", stream)


def test_what_else_was_changed_is_as_before() -> None:
    stream, rows = iter(NUMBERS), [hf.ones(2)]
    with pytest.raises(ImpurityError, match="`closure stream` is a tuple_iterator of"):
        hf.jit(lambda x: rows.pop() * next(stream))(hf.ones(2))
    assert (len(rows), next(stream)) == (1, 1.0)


@pytest.mark.parametrize(
    ("name", "is_lost"), [("list_iterator", False), ("generator", True)]
)
@pytest.mark.parametrize("way", ["returned", "zip", "partial", "bound"])
def test_an_iterator_that_was_advanced_is_set_back_if_it_can_be(
    name: str, is_lost: bool, way: str
) -> None:
    stream = STREAMS[name]()
    stored, taking, step = [stream], partial(next, stream), stream.__next__

    def f(x: Any) -> Any:
        if way == "partial":
            return x * taking()
        if way == "bound":
            return x * step()
        if way == "zip":
            return x * next(zip(*stored, strict=True))[0]
        return x * next((lambda: stream)())

    for _ in range(2):
        with pytest.raises(ImpurityError, match=f"is a {name} of which") as caught:
            hf.jit(f)(hf.ones(2))
        assert ("which cannot be put back" in str(caught.value)) == is_lost
    assert next(stream) == (3.0 if is_lost else 1.0)


def test_an_iterator_that_was_read_to_its_end_cannot_be_set_back() -> None:
    stored = [iter(NUMBERS)]
    with pytest.raises(ImpurityError, match="which cannot be put back"):
        hf.jit(lambda x: x * len([*zip(*stored, strict=True)]))(hf.ones(2))


@pytest.mark.parametrize("take", ["readline", "read", "next", "call"])
def test_a_file_is_not_read(take: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("1\n")

    def f(x: Any) -> Any:
        if take == "next":
            return x * float(next(file))
        if take == "call":
            return x * json.load(file)
        return x * len(file.read() if take == "read" else file.readline())

    with path.open() as file:
        for _ in range(2):
            with pytest.raises(ImpurityError, match="`closure file` is a TextIO"):
                hf.jit(f)(hf.ones(2))
        assert file.read() == "1\n"


class Steps:
    """An iterator of a user's class."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> "Steps":
        return self

    def __next__(self) -> float:
        self.at += 1
        if self.at > 3:
            raise StopIteration
        return float(self.at)


class Restarting(Steps):
    def __iter__(self) -> "Steps":
        self.at = 0
        return self


def test_an_iterator_of_a_users_class_is_set_back() -> None:
    stream = Steps()
    for f in (lambda x: x * next(stream), lambda x: x * sum(stream)):
        with pytest.raises(ImpurityError, match="`closure stream` is an iterator of"):
            hf.jit(f)(hf.ones(2))
        assert stream.at == 0


def test_what_takes_nothing_from_an_iterator_is_allowed() -> None:
    stream, log, model = iter(NUMBERS), io.StringIO(), Model()
    steps, held = Restarting(), {"stream": stream}
    latest: Any = None

    def generated() -> Any:
        yield from NUMBERS

    def f(x: Any) -> Any:
        nonlocal latest
        latest = iter(NUMBERS)
        x = x * next(latest)
        log.write("traced\n")
        print("traced", file=log)
        other = stream if isinstance(stream, Iterator) else None
        assert other is not None
        x = x * 2 if other and held["stream"] == stream else x
        model.h = cast(Any, iter(NUMBERS))  # it is made here
        x = x * next(cast(Any, model.h)) * sum(steps)
        inner = generated()
        for a, (b, c) in enumerate(zip(inner, map(float, NUMBERS), strict=True)):
            x = x + a * b * c
        return x * sum(v for v in NUMBERS)

    run, want = hf.jit(f), f(hf.ones(2)).tolist()
    for _ in range(3):
        assert run(hf.ones(2)).tolist() == want
    assert log.getvalue() == "traced\n" * 4
    assert next(stream) == 1.0
