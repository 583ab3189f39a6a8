"""Rows of few elements stay in registers through the steps of a loop."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import target

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.pipeline import Executable
from hopflow.tensor import EagerTensor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def drawn(shape: tuple[int, ...], dtype: str) -> Array:
    values: Array = np.random.default_rng(0).normal(size=shape) * 3
    return np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)


def mixed(steps: int) -> Callable[..., Any]:
    """Each step updates three of four elements of a state in place."""

    def f(state: Any, y: Any) -> Any:
        def step(i: Any, s: Any) -> Any:
            s[0] = hf.where(s[1] > s[2], s[1], s[0] * y[i])
            s[3] = s[0] * s[2]
            s[1] = hf.maximum(s[3], s[1])
            return s

        return hf.fori_loop(0, steps, step, state)

    batched: Callable[..., Any] = hf.vmap(f, in_dims=(0, None))
    return batched


def compiled(f: Callable[..., Any], *args: Array, cpu: CpuTarget | None = None) -> str:
    """Compare compiled results with those of plain Python. Return the Loop IR."""
    executable = Executable(hf.trace(f, *args).graph, target=cpu)
    found = executable([*map(EagerTensor, args)])
    with hf.debug():
        expected = hf.pytree.flatten(f(*map(hf.asarray, args)))[0]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x.array, np.asarray(y))
    return executable.loop_ir


DTYPES: Final = ("float64", "float32", "float16", "int64", "int32", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 16, 33, 150])
def test_states_of_examples(dtype: str, n: int, cpu: CpuTarget) -> None:
    state, y = drawn((n, 4), dtype), drawn((6,), dtype)
    text = compiled(mixed(6), state, y, cpu=cpu)
    assert n < 33 or "_kept0" in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(steps: int) -> None:
    compiled(mixed(steps), drawn((40, 4), "float32"), drawn((6,), "float32"))


def test_the_number_of_examples_is_a_size_of_the_run() -> None:
    f = hf.jit(mixed(6), dynamic=True)
    for n in (40, 0, 1, 77):
        state, y = drawn((n, 4), "float64"), drawn((6,), "float64")
        with hf.debug():
            expected = mixed(6)(hf.asarray(state), hf.asarray(y))
        np.testing.assert_array_equal(f(state, y), np.asarray(expected))


def test_a_state_that_a_step_indexes_by_its_number_is_stored() -> None:
    def f(state: Any) -> Any:
        def step(i: Any, s: Any) -> Any:
            s[0] = s[i] + s[1]
            return s

        return hf.fori_loop(0, 4, step, state)

    assert "_kept" not in compiled(hf.vmap(f), drawn((40, 4), "float64"))


def test_two_states_and_a_long_step(verified: None) -> None:
    """A step that is cut into several loops over rows is one again."""

    def f(a: Any, b: Any) -> Any:
        def step(_: Any, a: Any, b: Any) -> Any:
            for k in range(40):
                i, j = k % 5, (k * 3) % 7
                a[i] = a[i] ^ (b[j] << (k % 3))
                b[j] = b[j] + a[(i + 1) % 5]
            return a, b

        return hf.fori_loop(0, 3, step, (a, b))

    a, b = drawn((50, 5), "int32"), drawn((50, 7), "int32")
    assert "_kept11" in compiled(hf.vmap(f), a, b)


def test_rows_of_a_matrix_that_is_read_across_are_stored() -> None:
    """A step reads the element of another row: rows are not independent."""

    def f(x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            return x.at[:, 0].set(x[::-1, 1]).at[:, 1].add(x[:, 0])

        return hf.fori_loop(0, 3, step, x)

    compiled(f, drawn((40, 2), "float64"))


def test_arrays_without_columns_are_stored() -> None:
    """Their rows are adjacent, and loaded as vectors."""

    def f(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, x, y: (x * y, y + x), (x, y))

    x = drawn((40,), "float64")
    assert "_kept" not in compiled(f, x, x)


def test_a_derivative_of_states() -> None:
    def loss(state: Any, y: Any) -> Any:
        return hf.sum(mixed(4)(state, y) ** 2)

    state, y = drawn((20, 4), "float64"), drawn((6,), "float64")
    found = hf.jit(hf.grad(loss))(state, y)
    with hf.debug():
        expected = hf.grad(loss)(hf.asarray(state), hf.asarray(y))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected))
