"""Loops over steps that keep arrays of a few elements in variables."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


def steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scan of a state, which begins as the first row, over all rows."""
    return lambda x: hf.scan(lambda c, v: (step(c, v), c[0] + v), x[0], x)


def matrix(c: Any) -> Any:
    return hf.stack([hf.roll(c, k) for k in range(c.shape[0])])


def normalised(c: Any, v: Any) -> Any:
    z = matrix(v) @ c
    return z / hf.sqrt(hf.sum(z * z) + 1.0)


def descended(c: Any, v: Any) -> Any:
    return c - 0.01 * hf.grad(lambda c: hf.sum((c[1:] - c[:-1] ** 2) ** 2 * v[0]))(c)


def twice(c: Any, v: Any) -> Any:
    return hf.fori_loop(0, 2, lambda _, c: hf.roll(c, 1) * 0.5 + v, c)


STEPS: Final[dict[str, Callable[..., Any]]] = {
    "sums": lambda c, v: c * 0.5 + v,
    "products": lambda c, v: matrix(c) @ v * 0.125 + v,
    "turned": lambda c, v: hf.roll(c, 1) + v,
    "dot products": lambda c, v: c * 0.5 + hf.sum(c * v) * v * 0.125,
    "extrema": lambda c, v: hf.maximum(c, v) - hf.min(c),
    "prefix sums": lambda c, v: hf.cumulative_sum(c) * 0.25 + v,
    "one element": lambda c, v: c.at[0].set(hf.max(v)) + v,
    "chosen": lambda c, v: hf.where(v > 0, c * 0.5, v),
    "sorted": lambda c, v: hf.sort(c * 0.5 + v),
    "norms": normalised,
    "gradients": descended,
    "loops in steps": twice,
    "branches": lambda c, v: hf.cond(v[0] > 0, lambda: c * 0.5 + v, lambda: v - c),
}


def compared(f: Callable[..., Any], x: Array) -> str:
    with hf.debug():
        expected = hf.pytree.flatten(f(hf.asarray(x)))[0]
    static, symbolic = hf.jit(f), hf.jit(f, dynamic=True)
    for jitted in (static, symbolic):
        found = hf.pytree.flatten(jitted(hf.asarray(x)))[0]
        for a, b in zip(found, expected, strict=True):
            rtol = 0 if x.dtype.kind in "iu" else 1e-5
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, rtol)
    text: str = static.loop_ir
    return text


def drawn(*shape: int, dtype: str = "float64") -> Array:
    return (np.random.default_rng(0).normal(size=shape) * 2).astype(dtype)


@pytest.mark.parametrize("size", [2, 5, 6, 7, 8, 10, 13, 16, 17])
@pytest.mark.parametrize("name", STEPS)
def test_states_of_any_size(name: str, size: int) -> None:
    compared(steps(STEPS[name]), drawn(9, size))


@pytest.mark.parametrize("name", ["sums", "products", "dot products", "gradients"])
def test_states_are_variables(name: str) -> None:
    text = compared(steps(STEPS[name]), drawn(9, 6))
    assert "_kept5" in text
    assert "_kept6" not in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "int64"])
def test_dtypes(dtype: str) -> None:
    step = lambda c, v: hf.roll(c, 1) * 3 + v  # noqa: E731
    compared(steps(step), drawn(9, 7, dtype=dtype))


def test_bools() -> None:
    step = lambda c, v: (hf.roll(c, 1) ^ v, c)  # noqa: E731
    compared(lambda x: hf.scan(step, x[0], x), drawn(9, 7) > 0)


@pytest.mark.parametrize("length", [1, 2])
def test_few_steps(length: int) -> None:
    compared(steps(STEPS["products"]), drawn(length, 6))


def test_no_steps() -> None:
    f = lambda x: hf.scan(lambda c, v: (c + v, None), x[0], x[1:])[0]  # noqa: E731
    compared(f, drawn(1, 6))


def test_several_states_that_are_exchanged() -> None:
    def f(x: Any) -> Any:
        def step(i: Any, a: Any, b: Any, n: Any) -> Any:
            return b, hf.roll(a, 1) * 0.5 + x[i], n + hf.sum(b)

        zero = hf.zeros((), dtype=x.dtype)
        return hf.fori_loop(0, x.shape[0], step, (x[0], x[1], zero))

    for size in (5, 6, 11):
        compared(f, drawn(9, size))


def test_sums_of_what_the_step_then_changes() -> None:
    step = lambda c, v: (c + v, hf.sum(c * v))  # noqa: E731
    compared(lambda x: hf.scan(step, x[0], x), drawn(9, 6))


@pytest.mark.parametrize("size", [2, 4, 6, 8, 12, 16, 17])
def test_sums_with_a_table_that_has_a_row_of_the_next_state(size: int) -> None:
    """The loop that writes the row must not write the state as well, too early."""

    def f(x: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            table = x[:2].copy()
            table[0] = v
            return v, hf.sum(table * c, axis=1)

        return hf.scan(step, x[0] + 1, x)

    compared(f, drawn(5, size, dtype="int32"))


def test_results_are_used_afterwards() -> None:
    def f(x: Any) -> Any:
        last, rows = steps(STEPS["sums"])(x)
        again = steps(STEPS["turned"])(rows)[0]
        return last, again + last, hf.sum(rows, axis=0)

    compared(f, drawn(9, 6))


@pytest.mark.parametrize("n", [1, 3, 40])
def test_states_of_examples(n: int) -> None:
    compared(hf.vmap(lambda x: steps(STEPS["norms"])(x)[0]), drawn(n, 9, 6))
    compared(lambda x: hf.map(lambda x: steps(STEPS["norms"])(x)[0], x), drawn(n, 9, 6))


@pytest.mark.parametrize("name", ["sums", "norms", "turned"])
def test_gradients_of_loops(name: str) -> None:
    compared(hf.grad(lambda x: hf.sum(steps(STEPS[name])(x)[0] ** 2)), drawn(9, 6))


def filtered(c: Any, v: Any) -> Any:
    """A step of a filter of four numbers, which have a matrix of covariances."""
    a = matrix(c[0]) * 0.25
    c = a @ c @ hf.matrix_transpose(a) + hf.expand_dims(v, axis=0) * 0.5
    return c / (1.0 + hf.sum(c * c))


@pytest.mark.parametrize("length", [0, 1, 2, 30])
def test_rows_of_matrices_that_steps_multiply_are_written_out(length: int) -> None:
    x = drawn(length + 1, 4)

    def f(x: Any) -> Any:
        first = matrix(x[0])
        return hf.scan(lambda c, v: (filtered(c, v), c[1] + v), first, x[1:])

    loop_ir = compared(f, x)
    if length > 1:  # a loop over elements at most stands in a step
        step = loop_ir[loop_ir.index("for step") :]
        assert "independent:\n            for " not in step
        assert step.count(" vector ") > 8


def test_rows_that_loop_until_the_data_say_so_stay_loops() -> None:
    def grown(row: Any, most: Any) -> Any:
        return hf.while_loop(lambda r: hf.sum(r * r) < most, lambda r: 1.5 * r + 1, row)

    def step(c: Any, v: Any) -> Any:
        c = hf.vmap(grown)(c, hf.abs(v) * 5) @ matrix(v)
        return c / (1.0 + hf.max(hf.abs(c))), c[0]

    compared(lambda x: hf.scan(step, matrix(x[0]), x), drawn(20, 4))
