"""Operators within operators, deeper than Python's default recursion limit allows."""

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import hopflow as hf
from hopflow import recursion
from hopflow.bind import bind
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.running import compile_graph
from hopflow.hops.cond import COND
from hopflow.hops.map import MAP
from hopflow.hops.scan import SCAN
from hopflow.ops.opdef import OPERATIONS
from hopflow.recursion import LIMIT, deep_recursion

pytestmark = pytest.mark.slow

DEPTH = 150

Body = Callable[[Any], Any]
NESTS: dict[str, Callable[[Body], Body]] = {
    "cond": lambda f: lambda x: hf.cond(x > 1e9, lambda x: x - 1, f, (x,)),
    "switch": lambda f: lambda x: hf.switch(1, (lambda x: x - 1, f), (x,)),
    "fori_loop": lambda f: lambda x: hf.fori_loop(0, 1, lambda i, c: f(c), x),
    "while_loop": lambda f: lambda x: hf.while_loop(lambda c: c < 1.25, f, x),
    "scan": lambda f: lambda x: hf.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "map": lambda f: lambda x: hf.map(f, x[None])[0],
    "invoke_subgraph": lambda f: lambda x: hf.invoke_subgraph(f, x),
    "checkpoint": lambda f: lambda x: hf.checkpoint(f)(x),
    "jit": lambda f: lambda x: hf.jit(f)(x),
}
CALLS: dict[str, Callable[[Body], Body]] = {
    "debug": lambda f: f,
    "eager": lambda f: f,
    "jit": hf.jit,
    "trace": lambda f: lambda x: hf.trace(f, x)(x),
}


def nest(name: str, depth: int) -> Body:
    f: Body = lambda x: x + 0.5  # noqa: E731
    for _ in range(depth):
        f = NESTS[name](f)
    return f


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NESTS)
def test_deep_nests_are_computed_in_every_mode(name: str, call: str) -> None:
    limit = sys.getrecursionlimit()
    f = CALLS[call](nest(name, DEPTH))
    if call == "debug":
        with hf.debug():
            assert float(f(hf.asarray(1.0))) == 1.5
    else:
        assert float(f(hf.asarray(1.0))) == 1.5
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("name", ["cond", "scan", "map"])
def test_deep_nests_are_copied_printed_and_read(name: str) -> None:
    x = hf.asarray(1.0)
    module = hf.trace(nest(name, DEPTH), x)
    text = format_graph(module.graph)
    assert format_graph(copy.deepcopy(module.graph)) == text
    operators = {**OPERATIONS, "cond": COND, "scan": SCAN, "map": MAP}
    read = parse(text, operators)
    assert format_graph(read) == text
    assert float(compile_graph(read, bind)(x)) == 1.5
    copied = copy.deepcopy(module)
    assert float(copied(x)) == 1.5
    assert copied.code == module.code


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize("name", ["cond", "while_loop", "scan"])
def test_deep_nests_have_derivatives_and_batches(name: str, transform: str) -> None:
    f = nest(name, DEPTH // 4)
    x = hf.asarray(1.0)
    if transform == "grad":
        assert float(hf.jit(hf.grad(f))(x)) == 1.0
    elif transform == "jvp":
        assert float(hf.jit(lambda x: hf.jvp(f, (x,), (x,)))(x)[1]) == 1.0
    else:
        xs = hf.asarray([1.0, 0.75])
        assert hf.jit(hf.vmap(f))(xs).tolist() == [1.5, 1.25]


@pytest.mark.parametrize("debug", [False, True])
def test_a_function_that_calls_itself_without_end_is_a_recursion_error(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recursion, "LIMIT", 2_500)

    def endless(x: Any) -> Any:
        return hf.cond(x > 0, endless, endless, (x,))

    limit = sys.getrecursionlimit()
    mode = hf.debug() if debug else nullcontext()
    with mode, pytest.raises(RecursionError):
        endless(hf.asarray(1.0))
    assert sys.getrecursionlimit() == limit


def test_the_recursion_limit_is_set_back_by_the_last_thread() -> None:
    limit = sys.getrecursionlimit()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deep_recursion():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with deep_recursion(), deep_recursion():
        assert sys.getrecursionlimit() == LIMIT
        thread.start()
        entered.wait()
    assert sys.getrecursionlimit() == LIMIT
    leave.set()
    thread.join()
    assert sys.getrecursionlimit() == limit


def test_a_recursion_limit_that_is_set_meanwhile_stays() -> None:
    limit = sys.getrecursionlimit()
    try:
        with deep_recursion():
            sys.setrecursionlimit(LIMIT + 1)
        assert sys.getrecursionlimit() == LIMIT + 1
    finally:
        sys.setrecursionlimit(limit)
