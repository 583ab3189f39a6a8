"""Calls of subgraphs: within themselves, by several threads, interrupted; and what is
kept of their traces."""

import os
import signal
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import EndlessTraceError, TraceError

pytestmark = pytest.mark.slow

MANY = 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8))
W = RNG.normal(size=(8, 8)) * 0.3


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, list[Any]]:
    """The traces that are kept: those of the test."""
    traces: OrderedDict[Any, list[Any]] = OrderedDict()
    monkeypatch.setattr("hopflow.hops.invoke_subgraph._cache", traces)
    return traces


def same(got: Any, want: Any) -> None:
    pairs = zip(*(pytree.flatten(tree)[0] for tree in (got, want)), strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one, two, rtol=1e-7, atol=1e-7)


def calls_itself() -> Any:
    @hf.subgraph
    def f(x: Any) -> Any:
        return hf.sin(f(x))

    return f


def calls_itself_by_another() -> Any:
    outer = hf.subgraph(lambda x: hf.sin(between(x)))

    def between(x: Any) -> Any:
        return hf.cond(hf.sum(x) > 0, lambda: hf.invoke_subgraph(outer, x), lambda: x)

    return outer


@pytest.mark.parametrize("make", [calls_itself, calls_itself_by_another])
def test_a_call_of_itself_without_an_end_is_refused(make: Any) -> None:
    f = make()
    for run in (f, hf.jit(f), hf.grad(lambda x: hf.sum(f(x)))):
        with pytest.raises(TraceError, match=r"`\w+|<lambda>` \(.*\) calls itself on"):
            run(X)


def test_a_call_of_itself_may_end_by_a_size_or_by_an_argument() -> None:
    @hf.subgraph
    def total(x: Any, scale: str) -> Any:
        if x.shape[0] == 0:
            return 0.0 if not scale else total(x, scale[1:]) + 1
        return x[0] + total(x[1:], scale)

    for jitted in (hf.jit(total), hf.jit(total, dynamic=True)):
        for n in (3, 2):
            same(jitted(X[:n, 0], "ab"), np.sum(X[:n, 0]) + 2)


def unrolled(x: Any, n: Any) -> Any:
    for _ in range(n):
        x = x + 1.0
    return x


def along(x: Any, n: Any) -> Any:
    return hf.sum(x, axis=n - 3) + 3.0


def decided(x: Any, n: Any) -> Any:
    if hf.zeros((n,)).shape[0] > 1:
        return x + n
    return x


def counted_down() -> Any:
    @hf.subgraph
    def f(x: Any, n: Any) -> Any:
        return x if n == 0 else f(x + 1.0, n - 1)

    return f


def moved(x: Any, n: Any, by: Any = 1.0) -> Any:
    return x + n * by if by > 0.5 else x


NUMBERS: dict[str, Callable[[], Any]] = {
    "recursion": counted_down,
    "a range": lambda: hf.subgraph(unrolled),
    "an axis": lambda: hf.subgraph(along),
    "a size": lambda: hf.subgraph(decided),
    "a float": lambda: partial(hf.subgraph(moved), by=1.0),
    "a checkpoint": lambda: hf.checkpoint(unrolled),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_a_constant_where_its_value_is_asked(name: str) -> None:
    x, f = hf.ones(1), NUMBERS[name]()
    jitted: Any = hf.jit(f)
    runs: dict[str, Any] = {
        "eager": lambda n: f(x, n),
        "a literal": lambda n: hf.jit(lambda x: f(x, n))(x),
        "a number of the call": lambda n: jitted(x, n),
        "a derivative": lambda n: hf.grad(lambda x: hf.sum(f(x, n)))(x) + n,
        "a batch": lambda n: hf.vmap(lambda x: f(x, n))(hf.ones((2, 1)))[0],
        "debug": lambda n: debugged(f, x, n),
    }
    for run in runs.values():
        assert [run(n).item() for n in (3, 3, 3)] == [4.0] * 3
    if name != "an axis":
        assert [f(x, n).item() for n in (5, 3, 4)] == [6.0, 4.0, 5.0]
        assert [jitted(x, n).item() for n in (5, 3, 4)] == [6.0, 4.0, 5.0]


def debugged(f: Any, x: Any, n: int) -> Any:
    with hf.debug():
        return f(x, n)


def test_numbers_whose_values_nobody_asks_share_a_trace() -> None:
    f = hf.subgraph(lambda x, n, s: x * n + s)
    assert [f(hf.ones(()), n, s).item() for n, s in ((1, 2.0), (3, 4.5))] == [3, 7.5]
    assert f.traces == 1
    g = counted_down()
    assert [g(hf.ones(1), n).item() for n in (3, 2, 3)] == [4.0, 3.0, 4.0]
    assert g.traces == 4


def test_a_failed_trace_leaves_nothing_behind() -> None:
    @hf.subgraph
    def f(y: Any, n: Any) -> Any:
        y[0] += 1.0
        y[1] += 1.0 if n > 2 else 2.0
        return hf.sum(y)

    def both(y: Any) -> Any:
        return f(y, 3), f(y, 1), y

    for run in (both, hf.jit(both), hf.checkpoint(both)):
        assert run(hf.zeros(2))[2].tolist() == [2.0, 3.0]


def test_what_a_tensor_is_asked_stays_an_error() -> None:
    f = hf.subgraph(lambda x, n: x * n if hf.sum(x) > 0 else x)
    with pytest.raises(TraceError, match=r"bool\(\) of a traced tensor bool\[\]"):
        f(X, 3)
    g: Any = hf.subgraph(lambda x, n: g(x, n - 1))
    with pytest.raises(EndlessTraceError, match="calls itself on"):
        g(X, 3)


def test_as_many_traces_are_kept_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, known: OrderedDict[Any, list[Any]]
) -> None:
    monkeypatch.setattr("hopflow.hops.invoke_subgraph._MOST_KINDS", 3)

    @hf.subgraph
    def counted(x: Any) -> Any:
        return hf.sum(x) * next(k for k in range(99) if x.shape[0] == k)

    jitted = hf.jit(counted, dynamic=True)
    for n in range(20):
        same(jitted(np.ones(n)), n * n)
    assert [len(traces) for traces in known.values()] == [8]
    used = hf.subgraph(lambda x, k: x * len(k))
    for k in ("", "a", "", "b", "", "c", ""):
        used(X, k)
    assert used.traces == 4  # what was used last is kept
    assert len(known) == 3


# --- several threads, and an end from outside -----------------------------------------


def with_scratch() -> Any:
    """Calls of a function, each with more scratch memory than stacks hold."""

    @hf.subgraph
    def layer(x: Any, w: Any) -> Any:
        for _ in range(2):
            x = hf.tanh(x @ w)[::-1] + hf.sort(x, axis=0)
        return x

    def f(x: Any, w: Any) -> Any:
        for k in range(MANY):
            x = layer(x, w + k)
        return hf.sum(x)

    return hf.jit(hf.value_and_grad(f, (0, 1)))


def test_threads_run_one_program_with_functions() -> None:
    f, w = with_scratch(), hf.asarray(W)
    functions = hf.stats().functions
    xs = [hf.asarray(RNG.normal(size=(200, 8))) for _ in range(4)]
    want = [f(x, w) for x in xs]
    assert hf.stats().functions == functions + 2
    found: dict[int, list[Any]] = {k: [] for k in range(4)}

    def work(k: int) -> None:
        found[k] += [f(xs[k], w) for _ in range(10)]

    threads = [Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert len(found[k]) == 10
        same(found[k], [want[k]] * 10)


def test_threads_that_trace_one_function_get_what_one_gets() -> None:
    def layer(x: Any, w: Any) -> Any:
        return x + hf.tanh(x @ w)

    def model(x: Any, w: Any, layer: Any) -> Any:
        for k in range(MANY):
            x = layer(x, w * k)
        return hf.sum(x * x)

    want = hf.grad(partial(model, layer=layer), (0, 1))(X, W)
    found: list[Any] = []
    shared = hf.subgraph(layer)

    def work() -> None:
        found.append(hf.jit(hf.grad(partial(model, layer=shared), (0, 1)))(X, W))

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(found, [want] * 4)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_a_function_that_loops() -> None:
    @hf.subgraph
    def count(x: Any, stop: Any) -> Any:
        step = lambda x: hf.where(x > stop, 0.0, x + hf.sin(x) + 2)  # noqa: E731
        return hf.while_loop(lambda x: x < stop, step, x)

    def f(x: Any, stop: Any) -> Any:
        for _ in range(MANY):
            x = count(x, stop)
        return x

    jitted = hf.jit(f)
    want = jitted(1.0, 5.0)
    timer = Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        jitted(1.0, np.inf)
    timer.join()
    same(jitted(1.0, 5.0), want)


# --- objects that are no containers ---------------------------------------------------

SCALE = 2.0


class Dense:
    def __init__(self, w: Any) -> None:
        self.w = hf.asarray(w)
        self.gain = 2.0


class Layer:
    """What reads by attributes, methods, properties and lists of objects."""

    mode = "tanh"

    def __init__(self, w: Any) -> None:
        self.dense, self.more = Dense(w), [Dense(w / 2)]

    def activation(self, x: Any) -> Any:
        return getattr(hf, self.mode)(x) * self.dense.gain

    @property
    def skip(self) -> Any:
        return sum(d.w for d in self.more)

    @hf.subgraph
    def __call__(self, x: Any) -> Any:
        return self.activation(x @ self.dense.w) + x @ self.skip


def set_mode(layer: Layer) -> None:
    layer.mode = "sin"


def set_gain(layer: Layer) -> None:
    layer.dense.gain = 0.5


def set_weights(layer: Layer) -> None:
    layer.dense.w = hf.asarray(W * 2)


def write_weights(layer: Layer) -> None:
    layer.dense.w[0] = 1.0


def add_one(layer: Layer) -> None:
    layer.more.append(Dense(W))


@pytest.mark.parametrize(
    ("change", "traces"),
    [(set_mode, 1), (set_gain, 1), (add_one, 1), (set_weights, 0), (write_weights, 0)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_plain_object_holds_is_read_at_each_call(
    change: Any, traces: int
) -> None:
    layers = [Layer(W), Layer(W / 3)]

    def f(x: Any) -> Any:
        for layer in (*layers, *layers):
            x = layer(x)
        return x

    def run() -> int:
        before = hf.stats().body_traces
        with hf.debug():
            want = f(hf.asarray(X))
        same([f(hf.asarray(X)), hf.jit(f)(X)], [want, want])
        return hf.stats().body_traces - before

    assert run() == 2
    assert run() == 0
    change(layers[1])
    assert run() == traces


def test_what_global_functions_read_is_read_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for inner in (hf.subgraph(scaled), hf.jit(scaled), Scaled().scaled):
        monkeypatch.setitem(globals(), "INNER", inner)
        outer = hf.subgraph(calls_inner)
        for value in (2.0, 3.0):
            monkeypatch.setitem(globals(), "SCALE", value)
            same(outer(X), X * value + 1)


INNER: Any = None


def calls_inner(x: Any) -> Any:
    return INNER(x) + 1


def scaled(x: Any) -> Any:
    return x * SCALE


class Scaled:
    def scaled(self, x: Any) -> Any:
        return scaled(x)


# --- operands that a body writes ------------------------------------------------------


def long(x: Any) -> Any:
    for _ in range(8):
        x = hf.tanh(x) + hf.sin(x)
    return x


@hf.subgraph
def put(cache: Any, other: Any, i: Any) -> Any:
    cache[i] = long(other[i]) + cache[i]
    return hf.sum(cache[i]) + hf.sum(other)


def alone(c: Any, v: Any) -> Any:
    c = c * 1.0
    return sum([put(c, v, k) for k in range(9)]), c


def of_the_caller(c: Any, v: Any) -> Any:
    return sum([put(c, v, k) for k in range(9)])


def read_before(c: Any, v: Any) -> Any:
    c, total = c * 1.0, hf.asarray(0.0)
    for k in range(9):
        old = c.copy()
        total = total + put(c, v, k) + hf.sum(old * c)
    return total, c


def given_twice(c: Any, v: Any) -> Any:
    c = c + v
    return sum([put(c, c, k) + put(c, c[1:], k) for k in range(9)]), c


def of_two_names(c: Any, v: Any) -> Any:
    c, total = c * 1.0, hf.asarray(0.0)
    for k in range(9):
        both = lambda c=c: (c, c)  # noqa: E731
        a, b = hf.switch(hf.astype(v[k, 0] > 0, hf.int64), [both, both, both])
        total, c = total + put(a, b, k), a
    return total, c


@pytest.mark.parametrize(
    "f",
    [alone, of_the_caller, read_before, given_twice, of_two_names],
    ids=lambda f: f.__name__,
)
def test_a_large_operand_is_written_where_it_is(f: Any) -> None:
    def run(f: Any) -> Any:
        c, v = hf.asarray(np.tile(X, (25, 1))), hf.asarray(np.tile(W, (20, 1))[:100])
        return f(c, v), c

    with hf.debug():
        want = run(f)
    jitted = hf.jit(f)
    same(run(jitted), want)
    same(run(hf.jit(f, dynamic=True)), want)
    if f is alone:
        assert "f64[100, 8] in arena" not in jitted.loop_ir  # it is in the result


def test_a_pending_value_is_computed_before_what_it_reads_is_written() -> None:
    def f(c: Any, v: Any) -> Any:
        c = c * 1.0
        old = c.copy()
        low = hf.sum(hf.sort(c, axis=0)[0])  # which puts `c` in memory
        c[0] = v
        return low + hf.sum(old * c)

    c = np.tile(X, (25, 1))
    with hf.debug():
        want = f(hf.asarray(c), hf.asarray(X[1]))
    same(hf.jit(f)(c, X[1]), want)


# --- sizes ----------------------------------------------------------------------------


def swapped(x: Any, y: Any) -> Any:
    """Two calls share a body, of which each gets the sizes of the other."""

    def f(a: Any, b: Any) -> Any:
        return hf.cos(b) * hf.sum(b), hf.sin(a) + hf.sum(a)

    known = x + hf.ones((2, 3))  # the sizes of `x` are numbers from here on
    first = hf.invoke_subgraph(f, y, x)
    return known, hf.invoke_subgraph(f, *first)


def nested(x: Any, y: Any) -> Any:
    return hf.invoke_subgraph(lambda a, b: swapped(a, hf.flip(b, axis=0)), x, y)


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("f", [swapped, nested])
def test_calls_with_other_sizes_do_not_know_those_of_the_first(
    f: Any, tmp_path: Path
) -> None:
    x, y, z = X[:2, :3], X[1:3, 2:5], X
    for first, second in ((y, z), (z, y)):
        compiled = hf.jit(f, dynamic=True)
        program = hf.export(f, (x, first), dynamic_shapes=True)
        program.save(tmp_path / "program.hopflow")
        loaded = hf.load(tmp_path / "program.hopflow")
        for other in (first, second, y[:, ::-1]):
            for run in (compiled, program, loaded):
                same(run(x, other), f(*map(hf.asarray, (x, other))))
