"""`hf.config.verify`: what native code gives first is what the interpreter gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler import pipeline
from hopflow.compiler.compared import Rounded
from hopflow.config import config
from hopflow.errors import KernelDisagreementError
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
