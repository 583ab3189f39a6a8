"""`hf.config.require_in_place`: what a step of a loop copies is an error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import InPlaceError


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.config, "require_in_place", True)


def loop(step: Callable[..., Any], *carry: Any) -> Any:
    return hf.fori_loop(0, 3, step, carry if len(carry) > 1 else carry[0])


def keeps_what_it_replaces(x: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        new = a.at[i].set(1.0)
        return hf.sort(new) + hf.flip(a) * new[0]

    return loop(step, x)


def gives_both(x: Any) -> Any:
    return loop(lambda i, a, b: (a.at[i].set(b[i]), a), x, x + 1)


def copies_in_a_function(x: Any) -> Any:
    @hf.subgraph
    def changed(a: Any, i: Any) -> Any:
        new = a.at[i].set(1.0)
        return hf.sort(new) + hf.flip(a) * new[0]

    return loop(lambda i, a: changed(changed(a, i), i), x)


def copies_for_each_outer_step(x: Any) -> Any:
    def outer(i: Any, a: Any, total: Any) -> Any:
        inner = loop(lambda j, b: b.at[j].add(b[0]), a)
        return a, total + hf.sum(inner)

    return loop(outer, x, 0.0)


COPYING = [
    keeps_what_it_replaces,
    gives_both,
    copies_in_a_function,
    copies_for_each_outer_step,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", COPYING)
def test_a_copy_in_a_step_is_an_error(f: Any, dynamic: bool) -> None:
    with pytest.raises(InPlaceError) as info:
        hf.jit(f, dynamic=dynamic)(hf.ones((50,)))
    said = str(info.value)
    assert f"`{f.__name__}`: a loop copies arrays in its steps" in said
    assert "test_require_in_place.py:" in said
    assert "in each step" in said


def replaces_elements(x: Any) -> Any:
    return loop(lambda i, a: a.at[i].add(a[0]), x)


def reads_before_it_writes(x: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        total = hf.sum(a)
        return a.at[i].set(total)

    return loop(step, x)


def exchanges(x: Any) -> Any:
    return loop(lambda i, a, b: (2 * a - b, a), x, x)


def copies_once(x: Any) -> Any:
    return loop(lambda i, a: a.at[i].set(0.0), x), x


IN_PLACE = [replaces_elements, reads_before_it_writes, exchanges, copies_once]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", IN_PLACE)
def test_a_loop_in_place_runs(f: Any, dynamic: bool) -> None:
    x = hf.arange(50.0)
    result, expected = hf.jit(f, dynamic=dynamic)(x), f(x)
    leaves = pytree.flatten(result)[0], pytree.flatten(expected)[0]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b))


def test_code_that_was_compiled_before_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = hf.ones((50,))
    with monkeypatch.context() as without:
        without.setattr(hf.config, "require_in_place", False)
        hf.jit(keeps_what_it_replaces)(x)
    with pytest.raises(InPlaceError):
        hf.jit(lambda x: keeps_what_it_replaces(x))(x)
