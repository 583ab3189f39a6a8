"""`hf.jit(f, backend=...)`: what a backend gets, must return, and may do wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BackendError,
    CheckError,
)
from hopflow.graph.verifier import verify
from hopflow.testing.executions import agree, fails

hf: Any = hopflow

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Spy:
    """A backend that runs the module, and remembers what it was asked."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.examples: list[list[Any]] = []
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, module: Any, examples: list[Any]) -> Callable[..., Any]:
        verify(module.graph)
        self.modules.append(module)
        self.examples.append(examples)

        def run(*args: Any) -> Any:
            self.calls.append(args)
            return module(*args)

        return run


@pytest.fixture
def spy() -> Spy:
    return Spy()


def loop(x: Any) -> Any:
    return hf.scan(lambda c, x: (c * 0.5 + x, c), hf.zeros(x.shape[1:]), x)


@pytest.mark.parametrize("backend", ["interpreter", "native", None, Spy()])
def test_the_results_are_those_of_every_backend(backend: Any) -> None:
    agree(hf.jit(loop, backend=backend)(X), loop(hf.asarray(X)))


def test_a_backend_gets_a_graph_and_inputs_once(spy: Spy) -> None:
    f = hf.jit(lambda x, y: (x + y, {"sum": hf.sum(x)}), backend=spy)
    for factor in (1, 2):
        agree(f(X * factor, X), (X * factor + X, {"sum": np.sum(X * factor)}))
    [[x, y]] = spy.examples
    agree((x, y), (X, X))
    assert len(spy.modules) == 1
    assert len(spy.calls) == 2
    assert f.graph.out_types == spy.modules[0].graph.out_types


def test_other_dtypes_guards_and_values_are_other_graphs(spy: Spy) -> None:
    def f(x: Any, n: Any, flag: Any) -> Any:
        return x * n if n > 2 and flag else x + n

    jitted = hf.jit(f, backend=spy)
    for n, flag in ((1, True), (2, True), (5, True), (6, True), (6, False)):
        agree(jitted(X, n, flag), f(X, n, flag))
    assert len(spy.modules) == 3


def test_sizes_that_change_are_ints_before_the_tensors(spy: Spy) -> None:
    f = hf.jit(lambda x, n: hf.sum(x) * n, backend=spy)
    for size in (2, 3, 4):
        x = np.ones((size, 2), np.float32)
        agree(f(x, 7), np.float32(size * 14))
    *_, symbolic = spy.examples
    assert symbolic[:-1] == [3, 7] or symbolic[:-1] == [7, 3]
    assert len(spy.modules) == 2
    assert len(spy.calls[-1]) == 3


def test_dynamic_sizes_in_loops(spy: Spy) -> None:
    f = hf.jit(loop, backend=spy, dynamic=True)
    for size in (1, 2, 5):
        x = np.ones((size, 3), np.float32)
        agree(f(x), loop(hf.asarray(x)))
    assert len(spy.modules) <= 2


def test_sizes_that_only_the_run_knows(spy: Spy) -> None:
    f = hf.jit(lambda x: hf.nonzero(x)[0], backend=spy)
    agree(f(np.array([0, 1, 2, 0])), np.array([1, 2]))


def test_writes_reach_arguments_and_captured_tensors(spy: Spy) -> None:
    state, x = hf.zeros(3), hf.ones(3)

    def f(x: Any) -> Any:
        state[:] = state + x
        x[0] = 5.0
        return x * 2

    jitted = hf.jit(f, backend=spy)
    agree(jitted(x), np.array([10, 2, 2], np.float32))
    agree((state, x), (np.ones(3, np.float32), np.array([5, 1, 1], np.float32)))
    jitted(x)
    agree(state, np.array([6, 2, 2], np.float32))
    assert len(spy.modules) == 1


def test_captured_tensors_are_inputs_whose_writes_are_seen(spy: Spy) -> None:
    w = hf.ones(3)
    f = hf.jit(lambda x: hf.scan(lambda c, x: (c + w * x, None), w, x)[0], backend=spy)
    agree(f(X), 1 + X.sum(0))
    w[:] = 2.0
    agree(f(X), 2 + 2 * X.sum(0))
    assert len(spy.examples[0]) == 2


def test_derivatives(spy: Spy) -> None:
    def f(x: Any) -> Any:
        return hf.sum(loop(x)[1] ** 2)

    x = hf.asarray(X)
    agree(hf.jit(hf.grad(f), backend=spy)(x), hf.grad(f)(x))
    agree(hf.grad(hf.jit(f, backend=spy))(x), hf.grad(f)(x))
    agree(hf.jit(hf.vmap(hf.grad(lambda x: hf.sum(x**3))), backend=spy)(x), 3 * X**2)


def test_results_share_memory_with_nothing() -> None:
    x = hf.ones(3)
    f = hf.jit(lambda x: (x, x * 2), backend=lambda module, _: module)
    for run in (f, hf.jit(lambda x: (x, x), backend="interpreter")):
        first, second = run(x)
        first[:] = 7.0
        second[:] = 8.0
        agree((x, first), (np.ones(3, np.float32), np.full(3, 7, np.float32)))


def test_one_result_need_not_be_in_a_list() -> None:
    f = hf.jit(lambda x: x + 1, backend=lambda _, __: lambda x: np.asarray(x) + 1)
    agree(f(X), X + 1)


def test_errors_of_a_run_are_their_own() -> None:
    def f(x: Any) -> Any:
        hf.check(hf.all(x > 0), "must be positive")
        return x

    with pytest.raises(CheckError, match="must be positive"):
        hf.jit(f, backend="interpreter")(X)


def broken(module: Any, examples: Any) -> Any:
    raise KeyError("no such chip")


def test_a_backend_that_fails_is_named_and_its_error_chained() -> None:
    f = hf.jit(lambda x: x + 1, backend=broken)
    with pytest.raises(BackendError, match=r"`broken`.*KeyError: 'no such chip'") as e:
        f(X)
    assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(BackendError):  # each time: nothing half-made is kept
        f(X)


def returning(value: Any) -> Any:
    def backend(_: Any, __: Any) -> Any:
        return value

    return backend


AFTER = " Leave `backend` out to have it compiled."


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (3, "must return a function of the graph's inputs, and returned `int`."),
        (
            lambda *_: None,
            "made a function that must return a list of 2 tensors, and returned a "
            "`NoneType`.",
        ),
        (
            lambda x: [x],
            "made a function that must return a list of 2 tensors, and returned a "
            "`list` of 1.",
        ),
        (
            lambda x: [x, "x"],
            "made a function whose result 1 must be f32[2, 3], and is `str`.",
        ),
        (
            lambda x: [x, np.asarray(x, np.float64)],
            "made a function whose result 1 must be f32[2, 3], and is f64[2, 3].",
        ),
        (
            lambda x: [x[0], x],
            "made a function whose result 0 must be f32[2, 3], and is f32[3].",
        ),
        (
            lambda x: [x[:1], x],
            "made a function whose result 0 must be f32[2, 3], and is f32[1, 3].",
        ),
    ],
)
def test_what_a_backend_gives_is_checked(made: Any, text: str) -> None:
    def f(x: Any) -> Any:
        return x + 1, x * 2

    start = "jit: the backend `backend`, given the graph `f`, "
    fails(BackendError, start + text + AFTER, hf.jit(f, backend=returning(made)), X)


def test_only_functions_and_names_are_backends() -> None:
    with pytest.raises(ArgumentTypeError, match="`backend` must be a function"):
        hf.jit(loop, backend=3)
    with pytest.raises(ArgumentValueError, match="'native' or 'interpreter', or a"):
        hf.jit(loop, backend="inductor")


def test_there_is_no_native_code_to_look_at() -> None:
    f = hf.jit(lambda x: x + 1, backend="interpreter")
    f(X)
    assert "add" in f.graph_text
    with pytest.raises(ArgumentValueError, match="has no native code"):
        _ = f.asm


def test_it_is_an_option_of_the_decorator(spy: Spy) -> None:
    decorate = hf.jit(backend=spy, donate=(0,))
    f = decorate(lambda x: x + 1)
    agree(f(hf.asarray(X)), X + 1)
    assert len(spy.calls) == 1
