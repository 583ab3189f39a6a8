"""Reads of an array that is updated in place, before and after the update."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf

pytestmark = [pytest.mark.usefixtures("guarded", "verified")]

STEPS: Final[dict[str, Callable[..., Any]]] = {
    "element": lambda h, v: (h.at[v].add(1), h[v]),
    "used by another element": lambda h, v: (h.at[v].set(v), h[(v + 1) % h.shape[0]]),
    "sum": lambda h, v: (h.at[v].add(2), hf.sum(h * 3)),
    "two updates": lambda h, v: (h.at[v].add(1).at[0].set(v), h[v] + h[1]),
    "window": lambda h, v: (h.at[v].set(v), h[2:5] * v),
}


@pytest.mark.parametrize("name", STEPS)
def test_reads_after_an_update_are_of_the_old_array(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "require_in_place", True)

    def f(x: Any) -> Any:
        return hf.scan(STEPS[name], hf.zeros(16, dtype="int64"), x)

    x = np.random.default_rng(0).integers(0, 16, 40)
    agree(f, x)
    agree(hf.vmap(f), x.reshape(8, 5))


def test_an_array_that_is_read_as_a_whole_is_copied() -> None:
    def step(h: Any, v: Any) -> Any:
        new = h.at[v].add(1)
        return new, hf.sum(hf.abs(new - h))

    def two(h: Any, v: Any) -> Any:
        return h.at[v].add(1), (h[v], h.at[v].add(1)[v])

    for f in (step, two):
        agree(lambda x, f=f: hf.scan(f, hf.zeros(16, dtype="int64"), x), np.arange(9))


def test_a_check_stays_before_what_it_guards() -> None:
    def f(x: Any, i: Any, j: Any) -> Any:
        y = x.at[i].set(5)
        return y[j] + x[j]

    jitted, x = hf.jit(f), np.arange(4)
    assert int(jitted(x, 1, 1)) == 6
    for i, j in ((1, 7), (9, 1), (9, 7)):
        with pytest.raises(hf.errors.IndexingError):
            jitted(x, i, j)


def agree(f: Callable[..., Any], x: Any) -> None:
    found = hf.jit(f)(x)
    with hf.debug():
        expected = f(hf.asarray(x))
    pairs = zip(
        hf.pytree.flatten(found)[0], hf.pytree.flatten(expected)[0], strict=True
    )
    for a, b in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
