"""Branches that constants select: the others are neither compiled nor run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import CheckError, DivisionError

pytestmark = pytest.mark.slow


def three() -> Any:
    """Return a number that tracing does not know, and compilation does."""
    return hf.full((), 3, dtype=hf.int64)


def of_cond(x: Any) -> Any:
    return hf.cond(three() > 2, lambda: x + 1, lambda: hf.exp(x))


def of_switch(x: Any) -> Any:
    """The index is clamped to the last branch."""
    branches = [lambda: hf.exp(x), lambda: hf.exp(x) * x, lambda: x + 1]
    return hf.switch(three() * 5 - 1, branches)


def nested(x: Any) -> Any:
    def inner() -> Any:
        return hf.cond(three() == 3, lambda: x + 1, lambda: hf.exp(x))

    return hf.cond(three() < 2, lambda: hf.exp(x), inner)


def in_steps(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        smaller = hf.cond(three() > 2, lambda: carry + row, lambda: hf.exp(row))
        return smaller, row

    return hf.scan(step, hf.sum(x) * 0, x)[0]


def in_a_call(x: Any) -> Any:
    """The selector is an argument of the function."""

    def choose(n: Any, x: Any) -> Any:
        return hf.cond(n > 2, lambda: x + 1, lambda: hf.exp(x))

    return hf.invoke_subgraph(choose, three(), x)


FUNCTIONS = [of_cond, of_switch, nested, in_steps, in_a_call]
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "grad": lambda f: hf.grad(lambda x: hf.sum(f(x))),
    "vmap": lambda f: hf.vmap(f),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_only_the_selected_branch_is_compiled(
    f: Any, transform: str, dynamic: bool
) -> None:
    g = TRANSFORMS[transform](f)
    x = np.random.default_rng(0).normal(size=(4, 9) if transform == "vmap" else 9)
    compiled = hf.jit(g, dynamic=dynamic)
    found = pytree.flatten(compiled(x))[0]
    with hf.debug():
        wanted = pytree.flatten(g(hf.asarray(x)))[0]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12)
    assert "exp(" not in compiled.kernels
    assert "if " not in compiled.kernels


def shorter(x: Any) -> Any:
    return hf.cond(three() > 2, lambda: x[:2], lambda: x[1:])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        shorter,
        lambda x: hf.sum(shorter(x)),
        lambda x: (shorter(x), hf.sum(shorter(x))),
        lambda x: hf.zeros((shorter(x).shape[0], 2)) + shorter(x).shape[0],
        lambda x: hf.switch(
            three() - 2,
            [lambda: x, lambda: x[1:], lambda: hf.full((3,), 0.5, dtype=hf.float64)],
        ),
        lambda x: hf.scan(lambda c, y: (c + hf.sum(shorter(x)), y), 0.0, x),
    ],
)
def test_branches_may_return_arrays_of_other_sizes(f: Any, dynamic: bool) -> None:
    x = np.arange(6.0)
    found = pytree.flatten(hf.jit(f, dynamic=dynamic)(x))[0]
    with hf.debug():
        wanted = pytree.flatten(f(hf.asarray(x)))[0]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_errors_of_the_selected_branch_remain() -> None:
    def f(x: Any) -> Any:
        return hf.cond(three() > 2, lambda: checked(x), lambda: x)

    def checked(x: Any) -> Any:
        hf.check(x > 0, "must be positive")
        return x

    assert float(hf.jit(f)(2.0)) == 2
    with pytest.raises(CheckError):
        hf.jit(f)(-2.0)


def test_a_constant_division_by_zero_stops_the_program() -> None:
    @hf.jit
    def f(x: Any) -> Any:
        return hf.cond(three() // (three() - 3) > 2, lambda: x, lambda: -x)

    with pytest.raises(DivisionError):
        f(2.0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_constants_wrap_around(dtype: str) -> None:
    largest = np.iinfo(dtype).max

    @hf.jit
    def f(x: Any) -> Any:
        n = hf.full((), int(largest), dtype=getattr(hf, dtype)) + 1
        return hf.cond(n > 0, lambda: hf.exp(x), lambda: x), n

    value, n = f(2.0)
    assert float(value) == 2
    assert int(n) == (0 if dtype.startswith("u") else np.iinfo(dtype).min)
    assert "exp(" not in f.kernels
