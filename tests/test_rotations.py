"""Steps that move values from variable to variable run several at a time."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow
from hopflow.testing.executions import agree

hf: Any = hopflow

pytestmark = pytest.mark.slow

WORDS: Final = np.arange(1, 9, dtype=np.uint32)


def shifted(w: Any, n: Any) -> Any:
    def step(_: Any, w: Any) -> Any:
        return hf.concat([w[1:], (w[0] ^ (w[3] + w[6]))[None]])

    return hf.fori_loop(0, n, step, w)


def fibonacci(w: Any, n: Any) -> Any:
    step = lambda i, a, b, c: (b, c, a + b * hf.astype(i, hf.uint32))  # noqa: E731
    return hf.fori_loop(0, n, step, (w[0], w[1], w[2]))


def exchanged(w: Any, n: Any) -> Any:
    """Cycles of two and of three values, and no new one."""
    step = lambda _, a, b, c, d, e: (b, a, d, e, c)  # noqa: E731
    return hf.fori_loop(0, n, step, tuple(w[k] for k in range(5)))


def two_lengths(w: Any, n: Any) -> Any:
    """A delay of four steps, and one of two, which feed each other."""

    def step(_: Any, a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
        return b, c, d, a + x, y, x ^ d

    return hf.fori_loop(0, n, step, tuple(w[k] for k in range(6)))


def adams_bashforth(w: Any, n: Any) -> Any:
    """Steps of three terms; the path is stacked."""
    y = hf.astype(w[0], hf.float64)

    def step(carry: Any, _: Any) -> Any:
        y, f1, f2 = carry
        f0 = -0.1 * y
        y = y + (23.0 * f0 - 16.0 * f1 + 5.0 * f2) / 12.0
        return (y, f0, f1), y

    return hf.scan(step, (y, -0.1 * y, -0.1 * y), None, length=n)


def last_words(w: Any, n: Any) -> Any:
    """The series that is read is that which the steps have read before, too."""

    def step(carry: Any, x: Any) -> Any:
        a, b, c = carry
        return (b, c, x), a + 2 * b + 3 * c

    return hf.scan(step, (w[0], w[1], w[2]), hf.arange(n, dtype=hf.uint32))


def count_from_a_carry(w: Any, n: Any) -> Any:
    """The steps of a loop assign what its number of steps was."""

    def outer(_: Any, a: Any, b: Any, n: Any) -> Any:
        inner = lambda _, a, b, n: (b, a + b, n - 1)  # noqa: E731
        return hf.fori_loop(0, n, inner, (a, b, n))

    count = hf.asarray(n, dtype=hf.int64)
    return hf.fori_loop(0, 2, outer, (w[0], w[1], count))


PROGRAMS: Final[tuple[Callable[..., Any], ...]] = (
    *(shifted, fibonacci, exchanged, two_lengths),
    *(adams_bashforth, last_words, count_from_a_carry),
)
each_program = pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 16, 25])
@each_program
def test_any_number_of_steps_gives_the_same(f: Any, n: int) -> None:
    jitted = hf.jit(lambda w: f(w, n))
    got = jitted(WORDS)
    with hf.debug():
        agree(got, f(hf.asarray(WORDS), n))


@pytest.mark.parametrize(
    "f", [f for f in PROGRAMS if f is not adams_bashforth], ids=lambda f: f.__name__
)
def test_they_run_several_at_a_time(f: Any) -> None:
    jitted = hf.jit(lambda w: f(w, 25))
    jitted(WORDS)
    assert "_turn in" in jitted.loop_ir


@pytest.mark.parametrize("f", [shifted, fibonacci, exchanged, two_lengths])
def test_a_number_of_steps_that_only_the_run_knows(f: Any) -> None:
    jitted = hf.jit(f)
    for n in (0, 1, 7, 8, 9, 30, -4):
        got = jitted(WORDS, hf.asarray(n, dtype=hf.int64))
        with hf.debug():
            agree(got, f(hf.asarray(WORDS), n))
    assert "_turn in" in jitted.loop_ir


@pytest.mark.parametrize("size", [3, 8, 32, 33])
@pytest.mark.parametrize("f", [shifted, fibonacci, exchanged, two_lengths])
def test_so_do_those_of_examples_side_by_side(f: Any, size: int) -> None:
    rows = np.arange(size * 8, dtype=np.uint32).reshape(size, 8)
    jitted = hf.jit(hf.vmap(lambda w: f(w, 21)))
    got = jitted(rows)
    with hf.debug():
        agree(got, hf.vmap(lambda w: f(w, 21))(hf.asarray(rows)))


def test_a_step_that_mostly_computes_stays() -> None:
    def f(w: Any) -> Any:
        x = hf.astype(w, hf.float32)
        step = lambda _, a, b: (b, hf.tanh(a) * hf.exp(-b) + a)  # noqa: E731
        return hf.fori_loop(0, 20, step, (x[0], x[1]))

    jitted = hf.jit(f)
    jitted(WORDS)
    assert "_turn in" not in jitted.loop_ir


def test_gradients_of_a_delay_line() -> None:
    def last(x: Any) -> Any:
        def step(_: Any, a: Any, b: Any, c: Any) -> Any:
            return b, c, 0.5 * a - 0.25 * c

        return hf.fori_loop(0, 11, step, (x[0], x[1], x[2]))[2]

    x = np.array([1.0, -2.0, 3.0])
    got = hf.jit(hf.grad(last))(x)
    step = np.array([[0, 1, 0], [0, 0, 1], [0.5, 0, -0.25]])
    expected = np.linalg.matrix_power(step, 11)[2]
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12)
