"""Arrays that are made of many pieces: of a `stack`, or of a sum of updates."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import target
from tests.test_rows_in_registers import compiled

import hopflow as hf

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


def drawn(shape: tuple[int, ...], dtype: str = "float64") -> Array:
    values: Array = np.random.default_rng(0).normal(size=shape) * 20
    return np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)


def windows(count: int) -> Callable[..., Any]:
    return lambda x: hf.stack([x[k : k + 40] for k in range(count)], axis=-1)


# --- stacks along the last axis -------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5, 9, 16, 17, 20, 25, 33, 64])
@pytest.mark.parametrize("cpu", ["host", "avx2"])
def test_a_stack_chooses_no_piece_for_each_element(count: int, cpu: str) -> None:
    text = compiled(windows(count), drawn((40 + count, 21)), cpu=target(cpu))
    assert "select" not in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("rows", [1, 3, 16, 37])
def test_rows_of_results_are_stored_as_vectors(dtype: str, rows: int) -> None:
    compiled(windows(20), drawn((60, rows), dtype))
    compiled(lambda x: hf.roll(windows(11)(x), 3, axis=0), drawn((60, rows), dtype))


def test_many_scalars_for_each_example() -> None:
    def f(x: Any) -> Any:
        return hf.stack([x[k] * (k + 1) - x[(3 * k) % 24] for k in range(24)])

    assert "select" not in compiled(hf.vmap(f), drawn((50, 24)))


def test_the_number_of_rows_is_a_size_of_the_run() -> None:
    f = hf.jit(windows(20), dynamic=[{1: hf.Dim("n")}])
    for rows in (30, 1, 0, 7):
        x = drawn((60, rows))
        with hf.debug():
            expected = windows(20)(hf.asarray(x))
        np.testing.assert_array_equal(f(x), np.asarray(expected))


WINDOWS: Final[dict[str, Callable[..., Any]]] = {
    "max": lambda windows: hf.max(hf.stack(windows), axis=0),
    "median": lambda windows: hf.sort(hf.stack(windows, axis=-1), axis=-1)[..., 2],
    "all": lambda windows: hf.stack(windows),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("shape", [(1,), (4,), (50,), (9, 7)], ids=str)
def test_what_windows_are_cut_from_is_stored_once(
    name: str, shape: tuple[int, ...]
) -> None:
    def f(x: Any) -> Any:
        wide = hf.pad(x, [(2, 2)] + [(0, 0)] * (x.ndim - 1))
        return WINDOWS[name]([wide[k : k + x.shape[0]] for k in range(5)])

    text = compiled(f, drawn(shape))
    if shape[0] >= 50:
        assert text.count("in arena") == 1


LARGE: Final = 1 << 18
"""Elements of an array that does not fit into the caches of a core."""


def edges(x: Any, width: int) -> Any:
    return hf.concat([*[x[:1]] * width, x, *[x[-1:]] * width])


def of_three(x: Any) -> Any:
    wide = edges(x, 1)
    return wide[:-2] - 2 * wide[1:-1] + wide[2:]


def of_five(x: Any) -> Any:
    wide, n = edges(x, 2), x.shape[0]
    return sum((k + 1) * wide[k : k + n] for k in range(5))


def periodic(x: Any) -> Any:
    wide = hf.concat([x[-2:], x, x[:2]])
    return wide[:-4] * wide[2:-2] - wide[1:-3] + wide[4:]


def of_two_halves(x: Any) -> Any:
    wide = hf.concat([x[1000:] * 2, x[:1000] + 1])
    return wide[1:] * wide[:-1]


@pytest.mark.parametrize("f", [of_three, of_five, periodic, of_two_halves])
def test_windows_of_a_large_array_with_edges_are_read_from_the_array(f: Any) -> None:
    text = compiled(f, drawn((LARGE,)))
    assert " in arena" not in text
    assert "select" not in text


def test_rows_of_a_large_array_with_edges_are_read_from_the_array() -> None:
    text = compiled(lambda x: x + of_three(x), drawn((400, LARGE // 256)))
    assert " in arena" not in text


def test_edges_along_two_axes_are_stored() -> None:
    def f(x: Any) -> Any:
        wide = hf.permute_dims(edges(hf.permute_dims(edges(x, 1), (1, 0)), 1), (1, 0))
        return wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]

    assert " in arena" in compiled(f, drawn((512, LARGE // 512)))


@pytest.mark.parametrize("name", ["max", "sum", "any", "argmin"])
@pytest.mark.parametrize("count", [20, 40])
def test_reductions_of_stacks(name: str, count: int) -> None:
    text = compiled(
        lambda x: getattr(hf, name)(windows(count)(x), axis=-1),
        drawn((40 + count, 30), "int32"),
    )
    assert "select" not in text or name == "argmin"


# --- transposed operands of reductions ------------------------------------------------

CROSSED: Final[dict[str, Callable[..., Any]]] = {
    "all": lambda x, y: hf.sum(x * y.T),
    "rows": lambda x, y: hf.sum(x * y.T, axis=1),
    "columns": lambda x, y: hf.sum(x * y.T, axis=0),
    "symmetric": lambda x, y: hf.max(hf.abs(x - x.T)) + y[0, 0],
    "equal": lambda x, y: hf.all(x == x.T) | hf.any(x == y.T),
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("size", [3, 40, 270])
def test_reductions_of_transposed_operands(name: str, size: int) -> None:
    x, y = drawn((size, size), "float32"), drawn((size, size), "float32")
    f = CROSSED[name]
    found = hf.jit(f)(x, y)
    with hf.debug():
        expected = f(hf.asarray(x), hf.asarray(y))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-3)


def test_a_large_operand_is_transposed_and_a_small_one_is_not() -> None:
    def arena(size: int) -> bool:
        jitted, x = hf.jit(CROSSED["all"]), drawn((size, size), "float32")
        jitted(x, x)
        return f"f32[{size}, {size}] in arena" in jitted.loop_ir

    assert arena(300)
    assert not arena(100)


def test_transposed_operands_of_three_axes_and_in_steps() -> None:
    x, y = drawn((70, 30, 40), "float32"), drawn((40, 70, 30), "float32")

    def f(x: Any, y: Any) -> Any:
        def step(total: Any, k: Any) -> Any:
            return total + hf.sum(x * hf.permute_dims(y + k, (1, 2, 0)), axis=(1, 2))

        return hf.fori_loop(0, 3, lambda k, total: step(total, k), hf.zeros(70))

    found = hf.jit(f)(x, y)
    expected = sum(np.einsum("ijk,kij->i", x, y + np.float32(k)) for k in range(3))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-2, atol=1)


# --- gradients of functions that read single elements ---------------------------------


def chain(x: Any) -> Any:
    count = x.shape[0]
    return sum((x[k] * x[(k + 1) % count] - x[k] / 2) ** 2 for k in range(count))


def slices(x: Any) -> Any:
    return sum(hf.sum(x[k : k + 2] * x[k + 1]) for k in range(x.shape[0] - 2))


def strided(x: Any) -> Any:
    return hf.sum(x[::2] ** 2) + hf.sum(x[1::2] ** 3) + hf.sum(x[::-1] * x[2])


@pytest.mark.parametrize("f", [chain, slices, strided], ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", ["grad", "hessian", "vmap", "twice"])
def test_derivatives_by_elements(f: Callable[..., Any], transform: str) -> None:
    gradients: dict[str, Callable[..., Any]] = {
        "grad": hf.grad(f),
        "hessian": hf.hessian(f),
        "vmap": hf.vmap(hf.grad(f)),
        "twice": hf.grad(lambda x: hf.sum(hf.grad(f)(x) ** 2)),
    }
    gradient = gradients[transform]
    x = drawn((30, 6) if transform == "vmap" else (6,)) / 20
    found = np.asarray(hf.jit(gradient)(x))
    with hf.debug():
        expected = np.asarray(gradient(hf.asarray(x)))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_each_element_of_a_gradient_is_written_once() -> None:
    jitted = hf.jit(hf.vmap(hf.grad(chain)))
    jitted(drawn((50, 8)))
    stores = [s for s in jitted.loop_ir.splitlines() if s.strip().startswith("out0[")]
    assert len(stores) == 1 + 8  # zeros, and each element


def test_a_gradient_that_is_read_twice_keeps_both_values() -> None:
    """An update that something else reads is not left out."""

    def f(x: Any) -> Any:
        a = hf.zeros(4).at[1].set(x[0])
        b = a + hf.zeros(4).at[1].set(x[1])
        c = b + hf.zeros(4).at[1].set(x[2])
        return a, b, c, b * c

    compiled(f, drawn((3,), "float32"))
