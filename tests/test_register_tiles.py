"""Sums along rows: in registers, of several rows at once, and in order."""

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import compare, target

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.pipeline import Executable
from hopflow.compiler.schedule.register_tiles import MOST
from hopflow.config import config
from hopflow.dtypes import int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Var
from hopflow.loop_ir.walk import step_of
from hopflow.tensor import EagerTensor

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]

DTYPES: Final = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def drawn(shape: tuple[int, ...], dtype: str) -> Array:
    values = np.random.default_rng(0).normal(size=shape) * 3
    return np.asarray(values > 0 if dtype == "bool" else values.astype(dtype))


def one_after_the_other(x: Array, y: Array) -> Array:
    """The product of stacks of matrices, each sum in the order of its terms."""
    total = np.zeros((*x.shape[:-1], y.shape[-1]), x.dtype)
    for k in range(x.shape[-1]):
        total += x[..., k, None] * y[..., k, None, :]
    return total


def loops_of(f: Callable[..., Any], *args: Array, dynamic: bool | None = None) -> str:
    jitted = hf.jit(f, dynamic=dynamic)
    jitted(*args)
    text: str = jitted.loop_ir
    return text


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32"])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15])
@pytest.mark.parametrize(("k", "n"), [(5, 4), (9, 8), (12, 11), (17, 16), (23, 5)])
def test_products_of_small_matrices(
    dtype: str, m: int, k: int, n: int, cpu: CpuTarget
) -> None:
    x, y = drawn((3, m, k), dtype), drawn((3, k, n), dtype)
    graph = hf.trace(hf.matmul, x, y).graph
    [result] = Executable(graph, target=cpu)([EagerTensor(x), EagerTensor(y)])
    np.testing.assert_array_equal(result.array, one_after_the_other(x, y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 5, 16, 33])
@pytest.mark.parametrize("rows", [3, 17, 23, 100])
def test_reductions_along_rows_are_in_order(
    dtype: str, n: int, rows: int, cpu: CpuTarget
) -> None:
    x = drawn((2, rows, n), dtype)
    if x.dtype.kind == "f":
        x[0, 1, 0], x[1, 2, 1], x[0, :, 2] = np.nan, -np.inf, -0.0

    def f(x: Any) -> Any:
        sums = hf.sum(x, axis=1, dtype="int32" if dtype == "bool" else None)
        return sums, hf.max(x, axis=1), hf.min(x, axis=1), hf.any(x != 0, axis=1)

    graph = hf.trace(f, x).graph
    sums, high, low, some = Executable(graph, target=cpu)([EagerTensor(x)])
    np.testing.assert_array_equal(high.array, x.max(1))
    np.testing.assert_array_equal(low.array, x.min(1))
    np.testing.assert_array_equal(some.array, (x != 0).any(1))
    wide = np.float32 if x.dtype.itemsize == 2 else sums.array.dtype
    total = np.zeros((2, n), wide)
    for k in range(rows):
        total += x[:, k].astype(wide)
    np.testing.assert_array_equal(sums.array, total.astype(sums.array.dtype))


@pytest.mark.parametrize("rows", [0, 1, 5, 41])
@pytest.mark.parametrize("n", [4, 11, 16])
def test_the_number_of_rows_is_a_size_of_the_run(rows: int, n: int) -> None:
    f = hf.jit(lambda x: (hf.sum(x, axis=-2), x @ (x.T @ x)), dynamic=True)
    for size in (3, rows):
        x = drawn((size, n), "float32")
        sums, product = f(x)
        np.testing.assert_allclose(sums, x.sum(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(product, x @ (x.T @ x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(2, [2]), (8, [8]), (12, [6]), (17, [6, 5]), (9, [5, 4])]
)
def test_rows_that_read_the_same_elements_are_groups_of_about_one_size(
    rows: int, sizes: list[int]
) -> None:
    assert max(sizes) <= MOST
    x, y = drawn((2, rows, 12), "float32"), drawn((2, 12, 8), "float32")
    groups = re.split("for i2_", loops_of(hf.matmul, x, y))[1:]
    assert [group.count("var acc") for group in groups] == sizes


def test_rows_that_go_through_several_products_have_memory_of_their_own() -> None:
    """The rows of all products are one loop, whose temporaries are private to a row."""

    def powers(x: Any, y: Any) -> Any:
        first = x @ y / 2.0
        return first @ y + first * hf.sum(first, axis=-1, keepdims=True)

    x, y = drawn((3, 10, 12), "float64"), drawn((3, 12, 12), "float64")
    first = one_after_the_other(x, y) / 2.0
    want = one_after_the_other(first, y) + first * first.sum(-1, keepdims=True)
    np.testing.assert_allclose(hf.jit(powers)(x, y), want, rtol=1e-12)
    text = loops_of(powers, x, y)
    assert len(re.findall(r"for i\w+_rows in", text)) == 1, text
    assert len(set(re.findall(r"buffer (b\d+)_\d: f64\[12\] in arena", text))) > 0


@pytest.mark.parametrize("count", ["element of the product", "sum of the row"])
def test_rows_of_different_numbers_of_steps_are_computed_one_by_one(count: str) -> None:
    """The number passes through memory, or through what the row accumulates."""
    x, y = drawn((8, 6), "float64"), drawn((6, 6), "float64")

    def row(r: Any, y: Any) -> Any:
        z = r @ y
        if count == "sum of the row":
            steps = hf.sum((r > 0).astype("int64"))
        else:
            steps = hf.abs(z[0]).astype("int64") % 5
        return hf.fori_loop(0, steps, lambda i, a: a * 2 + i + 1, 1), z @ y

    product = one_after_the_other(x, y)
    if count == "sum of the row":
        steps = (x > 0).sum(1)
    else:
        steps = np.abs(product[:, 0]).astype(int) % 5
    want = np.ones(8, int)
    for i in range(6):
        want = np.where(i < steps, want * 2 + i + 1, want)
    counted, last = hf.jit(lambda x, y: hf.map(lambda r: row(r, y), x))(x, y)
    np.testing.assert_array_equal(counted, want)
    np.testing.assert_allclose(last, one_after_the_other(product, y), rtol=1e-12)


def test_rows_that_add_to_one_sum_are_computed_one_by_one() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.sum(hf.sqrt(hf.abs(x @ y)))

    x, y = drawn((10, 12), "float64"), drawn((12, 12), "float64")
    want = np.sqrt(np.abs(one_after_the_other(x, y))).sum()
    np.testing.assert_allclose(hf.jit(f)(x, y), want, rtol=1e-12)


def test_a_row_of_whole_vectors_needs_no_masks() -> None:
    f = hf.jit(lambda x: hf.sum(x, axis=0))
    f(drawn((100, 16), "float32"))
    assert " gang " in f.loop_ir
    assert "{%k" not in f.asm
    assert "maskmov" not in f.asm


def test_long_rows_of_sums_stay_in_memory() -> None:
    text = loops_of(lambda x: hf.sum(x, axis=0), drawn((100, 1000), "float32"))
    assert " gang " not in text
    assert "out0[i3] = out0[i3] + " in text


def test_results_that_share_nothing_are_computed_row_by_row() -> None:
    x = drawn((40, 6, 30), "float64")
    assert "_rows" not in loops_of(lambda x: hf.sum(x, axis=1), x)
    assert "_rows" not in loops_of(lambda x, y: x + y, x, x[0])


def test_loops_over_examples_in_step_are_lanes(cpu: CpuTarget) -> None:
    """The steps of all examples are equally many, and what they read is adjacent."""

    def one(table: Any) -> Any:
        return lambda k: hf.fori_loop(
            0, 20, lambda i, total: total * 0.5 + table[i, k], 0.0
        )

    f = lambda table: hf.map(one(table), hf.arange(table.shape[1]))  # noqa: E731
    for n in (5, 16, 40, 100):
        compare(f, drawn((20, n), "float64"), cpu=cpu)


def test_the_step_of_an_index_of_shared_or_many_terms() -> None:
    """Each node is visited once, without recursion."""
    i, j = Var("i", int64), Var("j", int64)
    shared = many = e.read(i)
    for _ in range(60):
        shared = e.add(shared, shared)
    for _ in range(5000):
        many = e.add(many, e.read(j))
    assert step_of(shared, i) == 2**60
    assert step_of(many, i) == 1
    assert step_of(many, j) == 5000
    assert step_of(e.sub(e.mul(e.read(i), e.index(3)), many), i) == 2
    assert step_of(e.mul(e.read(i), e.read(j)), i) is None
    assert step_of(e.mul(e.read(j), e.read(j)), i) == 0


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 41])
def test_tiles_of_a_number_of_rows_that_the_run_knows(rows: int) -> None:
    y = drawn((5, 8), "float64")
    f = hf.jit(lambda x: x @ hf.asarray(y), dynamic=True)
    for size in (3, rows):
        x = drawn((size, 5), "float64")
        np.testing.assert_array_equal(f(x), one_after_the_other(x, y))
    assert "_rows in" in f.loop_ir


@pytest.mark.parametrize("transform", ["grad", "vmap", "dynamic"])
def test_products_under_transforms(transform: str) -> None:
    x, y = drawn((4, 6, 10), "float64"), drawn((4, 10, 7), "float64")
    product = one_after_the_other(x, y)
    if transform == "grad":
        loss = lambda x, y: hf.sum((x @ y) ** 2) / 2  # noqa: E731
        gx, gy = hf.jit(hf.grad(loss, argnums=(0, 1)))(x, y)
        np.testing.assert_allclose(gx, product @ y.swapaxes(1, 2), rtol=1e-12)
        np.testing.assert_allclose(gy, x.swapaxes(1, 2) @ product, rtol=1e-12)
    elif transform == "vmap":
        np.testing.assert_array_equal(hf.jit(hf.vmap(hf.matmul))(x, y), product)
    else:
        f = hf.jit(hf.matmul, dynamic=True)
        np.testing.assert_allclose(f(x, y), product, rtol=1e-12)
        np.testing.assert_allclose(f(x[:3, :5], y[:3]), product[:3, :5], rtol=1e-12)


def test_two_loops_over_threads_share_no_memory_of_their_tiles(
    verified: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a row keeps between two products, for whole tiles and for the rows left."""
    move = np.linspace(0.0, 1.0, 36).reshape(6, 6)

    def f(x: Any, steps: Any) -> Any:
        def step(p: Any, t: Any) -> tuple[Any, Any]:
            return (move @ p @ move.T) * t, hf.sum(p[:, 0], axis=1)

        return hf.scan(step, x, steps)

    x, steps = drawn((60, 6, 6), "float64"), np.full(5, 0.1)
    jitted, results = hf.jit(f, dynamic=True), set()
    for threads in (1, 5, 5, 5):
        monkeypatch.setattr(config, "num_threads", threads)
        results.add(b"".join(np.asarray(y).tobytes() for y in jitted(x, steps)))
    assert jitted.loop_ir.count("threads") > 2
    assert len(results) == 1
