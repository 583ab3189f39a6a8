"""`hf.config.verify`: what native code, or a backend, gives first is what the
interpreter gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler import pipeline
from hopflow.compiler.compared import Rounded
from hopflow.config import config
from hopflow.errors import BackendError, KernelDisagreementError
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.mutants import MUTANTS

X = np.linspace(0.1, 0.9, 5)


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.clear_cache()
    monkeypatch.setattr(config, "verify", True)


def grow(x: Any) -> Any:
    return hf.while_loop(
        lambda a, _: hf.sum(a) < 9, lambda a, b: (b, a + 2 * b), (x, x + 1)
    )


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["exact", "dynamic"])
def test_a_fault_of_the_compiler_is_found(options: Any) -> None:
    with (
        MUTANTS["swapped carry"].planted(),
        pytest.raises(KernelDisagreementError, match=r"result \d is .* away, and may"),
    ):
        hf.jit(grow, **options)(hf.asarray(X))
    hf.jit(grow, **options)(hf.asarray(X))


@pytest.mark.parametrize(
    "f",
    [
        grow,
        hf.grad(lambda x: hf.sum(hf.scan(lambda c, y: (c * y, c), 1.0, x)[0])),
        hf.vmap(lambda x: hf.cond(x > 0.5, hf.sin, hf.exp, (x,))),
        lambda x: hf.sort(hf.cumulative_sum(x[::-1])),
        lambda x: hf.sum(hf.astype(x, hf.bfloat16)),
        lambda x: hf.scan(lambda c, y: (c + y, c), 0.0, x[:0]),
    ],
)
@pytest.mark.parametrize("x", [X, X[::2], X.astype(np.float32)])
def test_what_is_right_passes(f: Callable[..., Any], x: Any) -> None:
    hf.jit(f)(hf.asarray(x))


def test_only_the_first_call_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hf.jit(grow)
    run(hf.asarray(X))
    monkeypatch.setattr(Rounded, "process", None)
    run(hf.asarray(X))


def test_what_calls_python_is_called_once() -> None:
    seen: list[Any] = []
    hf.jit(lambda x: hf.callback(seen.append, None, x))(hf.asarray(X))
    assert len(seen) == 1


def test_progress_is_told_once() -> None:
    told: list[Any] = []

    def f(x: Any) -> Any:
        step = lambda c, y: (hf.fori_loop(0, 2, lambda _, c: c + y, c), c)  # noqa: E731
        return hf.scan(step, 0.0, x, progress=lambda *steps: told.append(steps))

    hf.jit(f)(hf.asarray(X))
    assert told == [(0, 5), (5, 5)]


def test_what_is_written_over_is_compared_with_what_it_was() -> None:
    run = hf.jit(lambda x: x * 2 + 1, donate=(0,))
    np.testing.assert_allclose(run(hf.asarray(X.copy())), X * 2 + 1)


def test_a_sum_in_another_order_is_none() -> None:
    big = np.array([1e16, 1.0, -1e16, 1.0] * 50)
    hf.jit(lambda x: hf.sum(x))(hf.asarray(big))


# --- backends -------------------------------------------------------------------------


def faulty(module: Any, _: Any) -> Callable[..., Any]:
    """A backend that multiplies where it is to add."""
    for node in module.graph.nodes_of("add"):
        node.op = OPERATIONS["multiply"]
    return lambda *args: module(*args)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["exact", "dynamic"])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + 3,
        lambda x: (x, x + 3),
        hf.grad(lambda x: hf.sum(hf.sin(x) + x * x)),
        hf.vmap(lambda x: x + 3),
    ],
    ids=["add", "two results", "grad", "vmap"],
)
def test_a_fault_of_a_backend_is_found(f: Any, options: Any) -> None:
    run = hf.jit(f, backend=faulty, **options)
    for _ in range(2):
        with pytest.raises(
            BackendError, match=r"`faulty`.* not those of the graph int"
        ):
            run(hf.asarray(X))


def test_what_a_backend_makes_is_compared_once_for_each_graph() -> None:
    calls: list[int] = []

    def later_wrong(module: Any, _: Any) -> Any:
        def run(x: Any) -> Any:
            calls.append(1)
            return module(x) if len(calls) < 2 else [hf.zeros_like(x)]

        return run

    run = hf.jit(lambda x: x + 1, backend=later_wrong)
    run(hf.asarray(X))
    np.testing.assert_array_equal(run(hf.asarray(X)), np.zeros(5))
    with pytest.raises(BackendError, match=r"result 0 is .* away, and may be"):
        run(hf.asarray(X.astype(np.float32)))


def test_a_backend_that_writes_to_its_inputs_is_found() -> None:
    def writing(module: Any, _: Any) -> Any:
        def run(x: Any) -> Any:
            found = module(x)
            x[:] = 0.0
            return found

        return run

    with pytest.raises(
        BackendError, match="writes to its tensor 0, but must only comp"
    ):
        hf.jit(lambda x: x + 1, backend=writing)(hf.asarray(X.copy()))


@pytest.mark.parametrize("backend", ["interpreter", lambda module, _: module])
@pytest.mark.parametrize("x", [X, X[::2], X.astype(np.float32), X[:0]])
def test_a_backend_that_is_right_passes(backend: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, y: (hf.tanh(c) + y, c), 0.0, x)

    hf.jit(f, backend=backend)(hf.asarray(x))


def test_a_backend_calls_python_once() -> None:
    seen: list[Any] = []
    run = hf.jit(
        lambda x: hf.callback(seen.append, None, x), backend=lambda module, _: module
    )
    run(hf.asarray(X))
    assert len(seen) == 1


def test_a_write_to_an_argument_is_compared_with_what_it_was() -> None:
    def f(x: Any) -> None:
        x[0] = x[1] + 1

    x = hf.asarray(X.copy())
    hf.jit(f, backend="interpreter")(x)
    assert x[0] == X[1] + 1


def test_without_verify_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", False)
    run = hf.jit(lambda x: x + 3, backend=faulty)
    np.testing.assert_allclose(run(hf.asarray(X)), X * 3)
