"""`progress=`: what loops tell of their steps, to whom, how often, in which modes."""

import functools
import io
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import progress
from hopflow.bind import bind
from hopflow.compiler.callbacks import Callbacks
from hopflow.compiler.interface import Interface
from hopflow.compiler.pipeline import lower
from hopflow.errors import ArgumentTypeError
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph, named_objects
from hopflow.hops.scan import SCAN
from hopflow.jit import jit
from hopflow.loop_ir.interpreter import run as run_loop_ir
from hopflow.testing.executions import NAMES, RUNNERS, SYMBOLIC, agree, run_debug
from hopflow.testing.graphs import OPERATORS
from hopflow.testing.requires import requires

hf: Any = hopflow

every_execution = pytest.mark.parametrize(
    "run", [*RUNNERS, *SYMBOLIC], ids=[*NAMES, *(f.__name__ for f in SYMBOLIC)]
)


class Told(list[tuple[int, int | None]]):
    __hash__ = object.__hash__  # type: ignore[assignment]  # subgraphs close over it

    def __call__(self, done: int, total: int | None) -> None:
        self.append((done, total))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, where `rich` is not installed."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setitem(sys.modules, "rich", None)
    return stream


def lines(stream: io.StringIO) -> list[str]:
    """What was shown, one text after the other."""
    shown = stream.getvalue().replace("\n", "").split("\r")[1:]
    return [line.removesuffix("\x1b[K") for line in shown]


def halve(c: Any, x: Any) -> tuple[Any, Any]:
    return c * 0.5 + x, c


X = np.arange(4.0, dtype=np.float32)


# --- who is told what -----------------------------------------------------------------


@every_execution
@pytest.mark.parametrize(
    ("options", "all_told"),
    [
        ({}, [(0, 4), (4, 4)]),
        ({"reverse": True, "unroll": 3}, [(0, 4), (4, 4)]),
        ({"until": lambda c: c > 1}, [(0, 4), (3, 3)]),
    ],
)
def test_a_scan_tells_when_it_begins_and_ends(
    run: Any, options: Any, all_told: Any, told: Told
) -> None:
    run(lambda x: hf.scan(halve, 0.0, x, progress=told, **options), X)
    if "until" in options and run in SYMBOLIC:
        all_told = [(0, 4), all_told[1]]
    assert told == all_told


@every_execution
def test_a_while_loop_knows_the_number_of_its_steps_when_it_has_ended(
    run: Any, told: Told
) -> None:
    def double(x: Any) -> Any:
        return hf.while_loop(lambda x: x < 40, lambda x: x * 2, x, progress=told)

    agree(run(double, np.float32(3)), np.float32(48))
    assert told == [(0, None), (4, 4)]


@every_execution
def test_a_fori_loop_knows_how_many_steps_it_takes(run: Any, told: Told) -> None:
    def add(a: Any, b: Any, x: Any) -> Any:
        return hf.fori_loop(a, b, lambda i, x: x + i, x, progress=told)

    run(add, np.int32(2), np.int32(7), np.float32(0))
    run(add, 7, 2, np.float32(0))
    assert told == [(0, 5), (5, 5), (0, 0)]


@every_execution
@pytest.mark.parametrize("length", [0, 1])
def test_few_steps(run: Any, length: int, told: Told) -> None:
    run(lambda x: hf.scan(lambda c, _: (c, c), x, length=length, progress=told), X)
    assert told == ([(0, 1), (1, 1)] if length else [(0, 0)])


def test_it_is_told_ten_times_a_second(told: Told) -> None:
    def count(n: Any) -> Any:
        return hf.while_loop(lambda i: i < n, lambda i: i + 1, 0, progress=told)

    begun = time.monotonic()
    jit(count)(200_000_000)
    took = time.monotonic() - begun
    assert told[0] == (0, None)
    assert told[-1] == (200_000_000, 200_000_000)
    assert len(told) <= 3 + took / 0.1
    steps = [done for done, _ in told]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("run", [run_debug, lambda f, *args: jit(f)(*args)])
def test_a_loop_in_a_loop_is_told_of_as_seldom(run: Any, told: Told) -> None:
    inner, outer = told, Told()

    def f(x: Any) -> Any:
        def within(_: Any, c: Any) -> Any:
            return hf.scan(
                lambda c, _: (c * 0.5 + 1, None), c, length=3, progress=inner
            )

        return hf.fori_loop(0, 500, lambda i, c: within(i, c)[0], x, progress=outer)

    begun = time.monotonic()
    run(f, np.float32(0))
    most = 3 + (time.monotonic() - begun) / 0.1
    assert outer[0] == (0, 500)
    assert outer[-1] == (500, 500)
    assert inner[0] == (0, 3)
    assert max(len(inner), len(outer)) <= most


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("calls", [1, 2], ids=["inlined", "function"])
def test_a_loop_in_a_map_is_told_of_as_seldom(
    threads: int, calls: int, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    @hf.subgraph  # type: ignore[untyped-decorator]
    def decayed(x: Any) -> Any:
        x = hf.tanh(x @ x @ x)
        step = lambda c, _: (hf.tanh(c @ x) * 0.3 + x, None)  # noqa: E731
        return hf.scan(step, x, length=30, progress=told)[0]

    def f(x: Any) -> Any:
        def several(x: Any) -> Any:
            return functools.reduce(lambda x, _: decayed(x), range(calls), x)

        return hf.map(several, x)

    monkeypatch.setattr(hf.config, "num_threads", threads)
    x, compiled = np.ones((500, 3, 3)), jit(f)
    compiled(x)
    told.clear()
    begun = time.monotonic()
    compiled(x)
    assert told[0] == (0, 30)
    assert len(told) <= calls * (3 + (time.monotonic() - begun) / 0.1)
    agree(compiled(x)[:2], run_debug(f, x[:2]))


def test_slow_steps_are_told_of_one_by_one(told: Told) -> None:
    def step(i: Any) -> Any:
        hf.callback(lambda: time.sleep(0.11), None)
        return i + 1

    jit(lambda: hf.while_loop(lambda i: i < 3, step, 0, progress=told))()
    assert told == [(0, None), (1, None), (2, None), (3, None), (3, 3)]


# --- transforms -----------------------------------------------------------------------


def decay(x: Any, progress: Any) -> Any:
    return hf.scan(lambda c, x: (c * x, c), 1.0, x, progress=progress)[0]


@every_execution
def test_the_backward_pass_has_a_bar_of_its_own(run: Any, terminal: Terminal) -> None:
    run(hf.grad(lambda x: decay(x, "decay")), X)
    shown = [line for line in lines(terminal) if "0/4" not in line]
    assert shown == ["decay 4/4", "decay (backward) 4/4"]


@pytest.mark.parametrize("max_steps", [None, 8])
@pytest.mark.parametrize("mode", ["save", "recompute", "checkpoint", hf.Checkpoint(2)])
def test_both_passes_of_a_while_loop_are_shown(
    mode: Any, max_steps: int | None, terminal: Terminal
) -> None:
    def f(x: Any) -> Any:
        options = {"reverse_mode": mode, "max_steps": max_steps, "progress": "L"}
        return hf.while_loop(lambda x: x < 40, lambda x: x * x, x, **options)

    agree(jit(hf.grad(f))(hf.asarray(3.0)), np.float32(4 * 3**3))
    ended = [line.rsplit(" ", 1) for line in lines(terminal)]
    found = [label for label, at in ended if len(set(at.split("/"))) == 1]
    assert list(dict.fromkeys(found)) == ["L", "L (backward)"]


@every_execution
def test_a_function_is_told_of_the_forward_pass_alone(run: Any, told: Told) -> None:
    run(hf.grad(lambda x: decay(x, told)), X)
    assert told == [(0, 4), (4, 4)]


@pytest.mark.parametrize("mode", ["save", "recompute", "checkpoint"])
def test_derivatives_of_a_while_loop_are_those_without_progress(
    mode: str, told: Told
) -> None:
    def f(x: Any, **options: Any) -> Any:
        options["reverse_mode"] = mode
        return hf.while_loop(lambda x: x < 40, lambda x: x * x, x, **options)

    x = hf.asarray(3.0)
    for times in (hf.grad, lambda f: hf.grad(hf.grad(f)), lambda f: hf.jacfwd(f)):
        agree(times(lambda x: f(x, progress=told))(x), times(f)(x))
    assert told[-1] == (2, 2)


def test_the_cost_of_a_step_depends_on_a_loop_in_it(told: Told) -> None:
    """The blocks of the elements of a step have a number that only the call knows."""

    def f(x: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return hf.sin(c) * x + hf.exp(c[::-1]), None

        return hf.scan(step, hf.ones_like(x[0]), x, progress=told)[0]

    x = np.full((3, 5000), 0.1)
    agree(hf.jit(f, dynamic=True)(x), f(hf.asarray(x)))
    assert told[:2] == [(0, 3), (3, 3)]


@every_execution
def test_a_batch_that_steps_together_is_one_loop(run: Any, told: Told) -> None:
    run(hf.vmap(lambda x: decay(x, told)), np.ones((3, 4), np.float32))
    assert told == [(0, 4), (4, 4)]


@every_execution
@pytest.mark.parametrize(
    ("length", "options", "all_told"),
    [
        (0, {}, [(0, 0), (0, 0)]),
        (5, {}, [(0, 5), (5, 5)]),
        (5, {"batch_size": 2}, [(0, 5), (5, 5)]),
        (3, {"batch_size": 4}, [(3, 3), (3, 3)]),
        (1030, {}, [(0, 1030), (1030, 1030)]),
    ],
)
def test_a_map_tells_of_its_slices(
    run: Any, length: int, options: Any, all_told: Any, told: Told
) -> None:
    x = np.arange(length, dtype=np.float32)

    def double(x: Any, **progress: Any) -> Any:
        return hf.map(lambda x: x * 2, x, **options, **progress)

    agree(run(lambda x: double(x, progress=told), x), x * 2)
    if run not in SYMBOLIC:  # of an unknown number, whole parts are counted
        assert [told[0], told[-1]] == all_told
    slope = hf.grad(lambda x: hf.sum(double(x, progress=told)))
    agree(run(slope, x), np.full(length, 2, np.float32))


@every_execution
def test_loops_that_run_side_by_side_tell_how_many_are_done(
    run: Any, told: Told
) -> None:
    def collatz(n: Any, **options: Any) -> Any:
        def step(n: Any) -> Any:
            return hf.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1)

        return hf.while_loop(lambda n: n > 1, step, n, **options)

    n = np.arange(1, 33)
    found = run(hf.vmap(lambda n: collatz(n, progress=told)), n)
    agree(found, np.ones_like(n))
    assert told[0] == (0, 32)
    assert told[-1] == (32, 32)


# --- errors ---------------------------------------------------------------------------


@every_execution
def test_what_the_function_raises_reaches_the_caller(run: Any) -> None:
    def fail(done: int, total: int | None) -> None:
        if done:
            raise KeyError(f"{done} of {total}")

    with pytest.raises(KeyError, match="4 of 4") as caught:
        run(lambda x: decay(x, fail), X)
    assert caught.value.__notes__ == [
        "raised in the function `fail` given as `progress`"
    ]


@every_execution
def test_a_loop_that_fails_ends_its_line(run: Any, terminal: Terminal) -> None:
    def step(c: Any, x: Any) -> Any:
        hf.check(x < 2, "too large")
        return c, x

    def f(x: Any) -> Any:
        return hf.scan(step, 0.0, x, progress="check")[1]

    with pytest.raises(hf.errors.CheckError, match="too large"):
        run(f, X)
    assert terminal.getvalue().endswith("\n")
    terminal.truncate(terminal.seek(0))
    run(f, X[:2])
    assert lines(terminal) == ["check 0/2", "check 2/2"]


@pytest.mark.parametrize("given", [3, ["label"], True])
def test_it_is_a_label_or_a_function(given: Any) -> None:
    def is_negative(x: Any) -> Any:
        return x < 0

    wrong = pytest.raises(ArgumentTypeError, match="`progress` must be a label")
    with wrong:
        decay(X, given)
    with wrong:
        hf.while_loop(is_negative, abs, 0.0, progress=given)
    with wrong:
        hf.fori_loop(0, 3, max, 0.0, progress=given)
    with wrong:
        hf.map(abs, X, progress=given)


# --- the terminal ---------------------------------------------------------------------


def test_loops_in_loops_share_a_line(terminal: Terminal) -> None:
    def f(x: Any) -> Any:
        def within(_: Any, c: Any) -> Any:
            return hf.scan(lambda c, _: (c + 1, None), c, length=2, progress="inner")[0]

        return hf.fori_loop(0, 3, within, x, progress="outer")

    jit(f)(np.float32(0))
    first, second, *_, last = lines(terminal)
    assert (first, second, last) == ("outer 0/3", "outer 0/3 | inner 0/2", "outer 3/3")
    assert terminal.getvalue().endswith("\n")


def test_the_line_ends_with_the_program(terminal: Terminal) -> None:
    def within(_: Any, c: Any) -> Any:
        return hf.scan(lambda c, _: (c + 1, None), c, length=2, progress="inner")[0]

    f = jit(lambda x: hf.fori_loop(0, 3, within, x))
    for _ in range(2):
        f(np.float32(0))
    first, second, _ = terminal.getvalue().split("\n")
    assert first.startswith("\rinner 0/2")
    assert second == first


@requires("rich")
def test_a_terminal_shows_bars_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))

    def f(x: Any) -> Any:
        def within(_: Any, c: Any) -> Any:
            return hf.scan(lambda c, _: (c + 1, None), c, length=2, progress="[in]")[0]

        return hf.fori_loop(0, 3, within, x, progress="out")

    for _ in range(2):
        jit(f)(np.float32(0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for part in ("out", "[in]", "0/3", "3/3", "0/2", "━"):
        assert part in text
    assert text.count("3/3") >= 2
    assert "[in]" not in text[text.rindex("3/3") :]


@requires("rich")
def test_the_time_of_a_bar_is_that_of_its_present_loop() -> None:
    bars = progress._Bars()
    bars.show({"loop": (5, 9)})
    [task] = bars.bars.tasks
    began = task.start_time
    bars.show({"loop": (6, 9)})
    assert task.start_time == began
    bars.show({"loop": (1, 9)})
    assert task.completed == 1
    assert task.start_time != began
    bars.stop()


def test_without_a_terminal_nothing_is_shown_of_what_is_soon_done(capfd: Any) -> None:
    jit(lambda x: decay(x, "decay"))(X)
    assert capfd.readouterr() == ("", "")


# --- programs -------------------------------------------------------------------------


def test_programs_that_differ_in_the_label_are_one() -> None:
    for label in ("a", "b"):
        before = hf.stats().compiles
        jit(lambda x, label=label: decay(x * 1.25, label))(X)
    assert hf.stats().compiles == before


def test_a_text_has_the_label(terminal: Terminal) -> None:
    graph = hf.trace(lambda x: decay(x, "decay"), X).graph
    text = format_graph(graph)
    assert "progress=objects.decay" in text
    operators = {**OPERATORS, "scan": SCAN}
    again = parse(text, operators, objects=named_objects(graph))
    assert format_graph(again) == text
    interpret(again, [hf.asarray(X)], bind)
    assert lines(terminal)[-1] == "decay 4/4"


def test_the_interpreter_of_loops_tells_each_step(told: Told) -> None:
    graph = hf.trace(lambda x: decay(x, told), X).graph
    _, program = lower(graph)
    run_loop_ir(program, [], [X], host=Callbacks(graph, Interface.of(program)).run)
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
