"""Selects between an array and its update: which become masked updates."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import IndexingError

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=40)
ROWS = np.random.default_rng(1).normal(size=(20, 6))
COUNTS = np.arange(40) % 7
Step = Callable[[Any, Any], Any]

MASKED: dict[str, tuple[Step, Any]] = {
    "set": (lambda i, d: hf.where(d[i] > 0.5, d.at[i].set(0.0), d), X),
    "add": (lambda i, d: hf.where(d[i - 1] > 0, d.at[i].add(1), d), X),
    "add -0": (lambda i, d: hf.where(d[i] > 9, d.at[i].add(1), d), -0.0 * X),
    "max": (lambda i, d: hf.where(i % 3 == 0, d.at[i].max(5), d), COUNTS),
    "mul": (lambda i, d: hf.where(d[i] > 0, d.at[i].mul(-0.5), d), X),
    "otherwise": (lambda i, d: hf.where(d[i] > 0.5, d, d.at[i].set(9.0)), X),
    "row": (lambda i, d: hf.where(d[i, 0] > 0, d.at[i].set(d[i - 1] / 2), d), ROWS),
    "element": (lambda i, d: hf.where(d[i, 2] > 0, d.at[i, 3].set(7), d), ROWS),
    "twice": (
        lambda i, d: hf.where(
            d[i] > d[i - 1], d.at[i].set(d[i - 1]).at[i - 1].set(d[i]), d
        ),
        X,
    ),
    "slice": (
        lambda i, d: hf.where(
            d[i] > 0, hf.dynamic_update_slice(d, d[:2] + d[i], (i,)), d
        ),
        X,
    ),
    "several": (
        lambda i, d: hf.where(
            d[i] > 0, d.at[hf.stack([i, i, i - 1])].add(hf.arange(3)), d
        ),
        X,
    ),
    "each row": (
        lambda i, d: hf.where(d[:, :1] > 0, d.at[:, i % 6].set(d[:, 0]), d),
        ROWS,
    ),
    "written": (lambda i, d: written(i, d), X),
}
KEPT: dict[str, tuple[Step, Any]] = {
    "read again": (
        lambda i, d: hf.where(d[i] > 0, u := d.at[i].set(0.0), d) + hf.sum(u) * 0,
        X,
    ),
    "tested": (lambda i, d: hf.where((u := d.at[i].set(1.0)) > 0, u, d), X),
    "of another": (lambda i, d: hf.where(d[i] > 0, (d * 2).at[i].set(0.0), d), X),
    "by column": (
        lambda i, d: hf.where(d[:1] > 0, d.at[:, i % 6].set(d[:, 0]), d),
        ROWS,
    ),
}


def written(i: Any, d: Any) -> Any:
    new = hf.copy(d)
    new[i] = d[i - 1]
    return hf.where(d[i] > 0, new, d)


def looped(step: Step) -> Any:
    return lambda d: hf.fori_loop(1, d.shape[0] - 1, step, d)


def agree(f: Any, x: Any, dynamic: bool | None = None) -> Any:
    """Compare a jitted function with `debug`; return the function."""
    run = hf.jit(f, dynamic=dynamic)
    found = np.asarray(run(x))
    with hf.debug():
        want = np.asarray(f(hf.asarray(x)))
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(want))
    return run


def is_masked(run: Any) -> bool:
    """Whether no step of the loop passes over all of the array."""
    step = run.loop_ir.partition("for step")[2]
    return "copy" not in step and ("0..40" not in step and "0..6" not in step)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_an_update_under_a_test_writes_what_it_changes(
    name: str, dynamic: bool
) -> None:
    step, x = MASKED[name]
    run = agree(looped(step), x, dynamic)
    if name not in ("row", "slice", "several", "each row"):
        assert is_masked(run)
    assert "copy" not in run.loop_ir.partition("for step")[2]


@pytest.mark.parametrize("name", KEPT)
def test_other_selects_stay(name: str) -> None:
    step, x = KEPT[name]
    run = agree(looped(step), x)
    assert " if " not in run.kernels.partition("do,")[2].replace("where", "")


@pytest.mark.parametrize("name", [*MASKED, *KEPT])
def test_so_are_those_of_a_batch(name: str) -> None:
    step, x = (MASKED | KEPT)[name]
    agree(hf.vmap(looped(step)), np.stack([x, -x, 2 * x]))


@pytest.mark.parametrize("name", [n for n in MASKED if MASKED[n][1].dtype == float])
def test_their_gradients_are_those_of_the_interpreter(name: str) -> None:
    step, x = MASKED[name]
    f = hf.grad(lambda d: hf.sum(hf.sin(looped(step)(d))))
    found = np.asarray(hf.jit(f)(x))
    with hf.debug():
        want = np.asarray(f(hf.asarray(x)))
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


def test_an_index_out_of_range_stops_even_if_the_test_fails() -> None:
    run = hf.jit(lambda d, k: hf.where(d[0] > 9, d.at[k].set(0.0), d))
    with pytest.raises(IndexingError):
        run(X, hf.asarray(100))
