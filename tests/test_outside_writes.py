"""What a jitted function writes to what is from outside: in each call, or refused."""

import copy
import io
import itertools
import json
import re
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
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


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Counter:
    """What the functions below change, anew for each test."""

    total = 0

    def __init__(self) -> None:
        self.count, self.rows = 0, [1.0, 2.0, 3.0]
        self.table: dict[str, float] = {"a": 0}
        self.queue, self.seen = deque(self.rows), set[int]()
        self.bytes, self.numbers = bytearray(3), array("d", self.rows)
        self.slotted, self.mode, self.cache = Slotted(), "", dict[int, float]()
        self.default, self.matrix = defaultdict[str, list[int]](list), np.zeros((2, 2))

    def counts(self, x: Any) -> Any:
        self.count += 1
        return x * self.count

    def counts_in_the_class(self, x: Any) -> Any:
        type(self).total = Counter.total + 1
        return x * Counter.total

    def counts_in_a_slot(self, x: Any) -> Any:
        self.slotted.count += 2
        return x * self.slotted.count

    def counts_by_setattr(self, x: Any) -> Any:
        setattr(self, "count", self.count + 3)  # noqa: B010
        return x * self.count

    def counts_in_an_item(self, x: Any) -> Any:
        self.table["a"] += 1
        return x * self.table["a"]

    def counts_in_a_new_item(self, x: Any) -> Any:
        self.table["b"] = self.table.get("b", 0) + 1
        return x * self.table["b"]

    def logs(self, x: Any) -> Any:
        self.rows.append(4.0)
        return x * len(self.rows)

    def logs_only(self, x: Any) -> Any:
        self.rows.append(4.0)
        return x

    def reverses(self, x: Any) -> Any:
        self.rows.reverse()
        return x * self.rows[0]

    def rotates(self, x: Any) -> Any:
        self.queue.rotate(1)
        return x * self.queue[0]

    def adds(self, x: Any) -> Any:
        self.seen.add(len(self.seen))
        return x * len(self.seen)

    def counts_in_bytes(self, x: Any) -> Any:
        self.bytes[1] += 1
        return x * self.bytes[1]

    def counts_in_an_array(self, x: Any) -> Any:
        self.numbers[1] += 1.0
        return x * self.numbers[1]

    def counts_in_a_numpy_array(self, x: Any) -> Any:
        self.matrix[0, 1] += 1.0
        return x * float(self.matrix.sum())

    def updates_a_numpy_array(self, x: Any) -> Any:
        matrix = self.matrix
        matrix += 0.5
        return x * float(matrix[1, 1])

    def appends_to_a_default(self, x: Any) -> Any:
        self.default["a"].append(1)
        return x * len(self.default["a"])

    @cached_property
    def large(self) -> float:
        return self.count + 2.0

    def computes_once(self, x: Any) -> Any:
        return x * self.large

    def sets(self, x: Any) -> Any:
        self.mode, self.table["y"], self.slotted.count = "train", 1.0, 5
        return x

    def remembers(self, x: Any) -> Any:
        if 3 not in self.cache:
            self.cache[3] = 0.5
        return x * self.cache[3]

    def state(self) -> Any:
        slots = self.slotted.count, Counter.total, VISITS, visits_of(counts_in_itself)
        return {**vars(self), "slotted": slots, "matrix": self.matrix.tolist()}


VISITS = 0


def visits_of(f: Any) -> Any:
    return vars(f).get("visits", 0)


def counts_in_a_global(_: Counter, x: Any) -> Any:
    global VISITS
    VISITS += 1
    return x * VISITS


def counts_in_a_module(_: Counter, x: Any) -> Any:
    module = sys.modules[__name__]
    module.VISITS += 1  # type: ignore[attr-defined]
    return x * VISITS


def counts_in_itself(_: Counter, x: Any) -> Any:
    f: Any = counts_in_itself
    f.visits = visits_of(f) + 1
    return x * f.visits


def counts_in_a_subgraph(counter: Counter, x: Any) -> Any:
    return hf.subgraph(counter.counts)(x)


def counts_in_an_inner_jit(counter: Counter, x: Any) -> Any:
    return hf.jit(counter.counts)(x)


CHANGES: Final[list[Callable[..., Any]]] = [
    Counter.counts,
    Counter.counts_in_the_class,
    Counter.counts_in_a_slot,
    Counter.counts_by_setattr,
    Counter.counts_in_an_item,
    Counter.counts_in_a_new_item,
    Counter.logs,
    Counter.logs_only,
    Counter.reverses,
    Counter.rotates,
    Counter.adds,
    Counter.counts_in_bytes,
    Counter.counts_in_an_array,
    Counter.counts_in_a_numpy_array,
    Counter.updates_a_numpy_array,
    Counter.appends_to_a_default,
    Counter.computes_once,
    Counter.sets,
    Counter.remembers,
    counts_in_a_global,
    counts_in_a_module,
    counts_in_itself,
    counts_in_a_subgraph,
    counts_in_an_inner_jit,
]


def called(f: Callable[..., Any], transform: Callable[..., Any]) -> Any:
    """The results of five calls of three kinds, and the state after each."""
    global VISITS
    VISITS = Counter.total = 0
    vars(counts_in_itself).pop("visits", None)
    counter = Counter()
    run = transform(partial(f, counter))
    found = []
    for x in (hf.ones(2), hf.ones(2), hf.ones(3), hf.ones(2), hf.ones(3)):
        result = run(x).tolist()
        found.append((result, copy.deepcopy(counter.state())))
    return found


@pytest.mark.parametrize(
    "transform",
    [
        hf.jit,
        partial(hf.jit, dynamic=True),
        lambda f: hf.jit(hf.grad(lambda x: hf.sum(f(x)))),
        lambda f: hf.jit(hf.vmap(f)),
        lambda f: hf.jit(hf.checkpoint(f)),
    ],
)
@pytest.mark.parametrize("f", CHANGES)
def test_plain_values_are_changed_at_each_call(
    f: Callable[..., Any], transform: Callable[..., Any]
) -> None:
    def eager(g: Callable[..., Any]) -> Any:
        def run(x: Any) -> Any:
            with hf.debug():
                return transform(g)(x)

        return run

    assert called(f, transform) == called(f, eager)


@pytest.mark.parametrize("f", [Counter.sets, Counter.remembers])
def test_a_trace_that_changes_nothing_serves_as_long_as_all_is_so(f: Any) -> None:
    counter = Counter()
    run = hf.jit(partial(f, counter))
    for _ in range(2):
        run(hf.ones(2))
    before = hf.stats().traces
    run(hf.ones(2))
    assert hf.stats().traces == before
    counter.mode, counter.table["y"], counter.cache = "test", 2.0, {}
    run(hf.ones(2))
    assert hf.stats().traces == before + 1
    f(want := Counter(), hf.ones(2))
    names = ("mode", "table") if f is Counter.sets else ("cache",)
    assert all(getattr(counter, n) == getattr(want, n) for n in names)


@pytest.mark.parametrize("name", ["mode", "count"])
def test_what_was_so_before_the_first_trace_is_watched(name: str) -> None:
    owner: Any = Slotted() if name == "count" else Counter()
    setattr(owner, name, "train")

    @hf.jit
    def f(x: Any) -> Any:
        if name == "mode":
            owner.mode = "train"
        else:
            owner.count = "train"
        return x

    for value in ("train", "test"):
        setattr(owner, name, value)
        f(hf.ones(2))
        assert getattr(owner, name) == "train"


def test_a_call_whose_tensors_share_memory_changes_once() -> None:
    counter = Counter()

    @hf.jit
    def f(x: Any, y: Any) -> Any:
        counter.count += 1
        x[0] = counter.count * 1.0
        return y * 2.0

    x = hf.zeros(3)
    for k in range(1, 4):
        assert f(x, x[1:]).tolist() == [0.0, 0.0]
        assert (counter.count, x[0].item()) == (k, k)


def test_the_log_names_what_each_trace_changes() -> None:
    counter = Counter()
    run = hf.jit(counter.counts)
    run(hf.ones(2))
    reason = run.explain(hf.ones(2))
    assert "`self.count`" in reason or "`self` (" in reason
    assert "is changed by each trace of the function" in reason
    for _ in range(7):
        run(hf.ones(2))
    with pytest.warns(hf.errors.RecompileWarning, match="is changed by each trace"):
        run(hf.ones(2))


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
    assert log.getvalue() == "traced\n" * 8  # `model.h` is another one in each call
    assert next(stream) == 1.0
