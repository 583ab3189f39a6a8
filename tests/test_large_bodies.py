"""Vector loops of large bodies: how often their code is emitted, what it computes."""

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import target
from tests.test_rows_in_registers import executed

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu.target import CpuTarget, host

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def drawn(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


# --- the iterations that remain -------------------------------------------------------

PRODUCTS: Final = 60


def long_body(x: Any, y: Any) -> Any:
    for _ in range(PRODUCTS):
        x = (x ^ y) * 3 + y
    return x


@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1003])
def test_the_last_vector_of_a_large_body_overlaps_the_one_before(
    n: int, cpu: CpuTarget
) -> None:
    x = drawn(n, dtype="int64")
    executable = executed(long_body, x, x + 1, cpu=cpu)
    code = executable.llvm_ir
    products = len(re.findall(r" = mul <\d+ x i64>", code))
    assert products in (0, PRODUCTS)
    assert products or n <= cpu.vector_width(dtypes.int64)


@pytest.mark.parametrize("rows", [8, 9, 15])
def test_a_row_that_remains_needs_no_shuffles(rows: int) -> None:
    a, x = drawn(40, rows, rows), drawn(40, rows)
    f = hf.vmap(lambda a, x: a @ x)
    code = executed(f, a, x, cpu=target("avx2")).llvm_ir
    assert ("fmul float" in code) is (rows == 9)


@pytest.mark.parametrize("n", [3, 16, 33, 64, 100, 130, 1003])
def test_a_large_body_that_reads_what_it_writes(n: int, cpu: CpuTarget) -> None:
    """Its iterations must not run twice."""

    def f(x: Any, y: Any) -> Any:
        step = lambda _, a: a.at[: y.shape[0]].set(long_body(a[: y.shape[0]], y))  # noqa: E731
        return hf.fori_loop(0, 2, step, x)

    executed(f, drawn(n + 2, dtype="int32"), drawn(n, dtype="int32"), cpu=cpu)


# --- sums -----------------------------------------------------------------------------


def loss(x: Any, w: Any, y: Any) -> Any:
    """A sum over rows of ten elements, which lie side by side."""
    errors = -y
    for k in range(10):
        errors = errors + x[:, k] * w[k]
    return hf.sum(errors * errors), hf.max(errors), errors


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40, 63, 64, 65, 100, 256, 1000])
def test_sums_in_large_bodies_have_the_bits_of_all_sizes(n: int) -> None:
    random = np.random.default_rng(n)
    x, w, y = (random.normal(size=s).astype("f") for s in ((n, 10), (10,), (n,)))
    static, symbolic = hf.jit(loss), hf.jit(loss, dynamic=True)
    for one, two in zip(static(x, w, y), symbolic(x, w, y), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    exact = np.sum((np.sum(x.astype("d") * w, axis=1) - y) ** 2)
    np.testing.assert_allclose(float(static(x, w, y)[0]), exact, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 40, 64, 100, 257])
def test_sums_in_large_bodies(n: int, cpu: CpuTarget) -> None:
    executed(loss, drawn(n, 10), drawn(10), drawn(n), cpu=cpu)


def test_vectors_of_a_large_body_with_a_sum_are_registers() -> None:
    jitted = hf.jit(loss)
    jitted(drawn(256, 10), drawn(10), drawn(256))
    width = host().vector_width(dtypes.float32)
    assert f"fadd <{width} x float>" in jitted.llvm_ir
    assert f"fmul <{4 * width} x float>" not in jitted.llvm_ir


# --- columns and rows -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool", "float32"])
@pytest.mark.parametrize("n", [2, 40, 258])
def test_columns_are_copied(dtype: str, n: int, cpu: CpuTarget) -> None:
    def f(x: Any) -> Any:
        y = hf.pad(x, ((1, 1), (1, 1)))
        y[:, 0] = y[:, 1]
        y[:, -1] = y[:, -2]
        return y

    executable = executed(f, drawn(n, 11, dtype=dtype), cpu=cpu)
    if dtype == "uint8":
        assert "insertelement <64 x i8>" not in executable.llvm_ir


@pytest.mark.parametrize("columns", range(1, 21))
def test_rows_that_steps_add_to(columns: int, cpu: CpuTarget) -> None:
    def f(x: Any) -> Any:
        step = lambda c, v: (c + v[:, None] * v, None)  # noqa: E731
        return hf.scan(step, hf.zeros((columns, columns), dtype=x.dtype), x)[0]

    text = executed(f, drawn(4, columns, dtype="float64"), cpu=cpu).loop_ir
    width = cpu.vector_width(dtypes.float64)
    left = columns % width
    if columns > width:
        is_narrower = left.bit_count() <= 2 and left > 1 and cpu.has_masks
        assert ("_rest" in text) is is_narrower


COPIED: Final[dict[str, Callable[..., Any]]] = {
    "shifted": lambda w: hf.concat([w[1:], (w[0] + w[2])[None]]),
    "stacked": lambda w: hf.stack([w[1] + w[2], w[0], w[1], w[2] * 0.5]),
    "rolled": lambda w: hf.roll(w, 1),
    "partly written": lambda w: w.at[1].set(w[0] + w[3]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", COPIED)
def test_rows_in_registers_are_not_copied(name: str, steps: int, dynamic: bool) -> None:
    def f(w: Any) -> Any:
        one = lambda w: hf.fori_loop(0, steps, lambda _, w: COPIED[name](w), w)  # noqa: E731
        return hf.vmap(one)(w)

    x = drawn(70, 4)
    jitted = hf.jit(f, dynamic=dynamic)
    with hf.debug():
        expected = np.asarray(f(hf.asarray(x)))
    np.testing.assert_array_equal(np.asarray(jitted(x)), expected)
    if name != "partly written" and "_kept0" in jitted.loop_ir:
        assert "copy" not in jitted.loop_ir


USES: Final[dict[str, Callable[..., Any]]] = {
    "the rows before": lambda run, x: (run(x), x + 1),
    "twice": lambda run, x: (run(x), run(x + 1)),
    "returned twice": lambda run, x: (y := run(x), y),
    "used again": lambda run, x: (y := run(x), hf.sum(y, axis=0)),
    "one after the other": lambda run, x: run(run(x) * 2),
    "in a loop": lambda run, x: hf.fori_loop(0, 3, lambda _, x: run(x) + x, x),
    "of a slice": lambda run, x: run(x[1:]),
    "written afterwards": lambda run, x: run(x).at[3].set(x[0]),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("donate", [False, True])
def test_rows_in_registers_beside_other_uses(name: str, donate: bool) -> None:
    one = lambda w: hf.fori_loop(0, 4, lambda _, w: COPIED["shifted"](w), w)  # noqa: E731
    f: Any = lambda x: USES[name](hf.vmap(one), x)  # noqa: E731
    x = drawn(70, 4)
    with hf.debug():
        expected = hf.pytree.flatten(f(hf.asarray(x)))[0]
    jitted = hf.jit(f, donate=(0,) if donate else ())
    found = hf.pytree.flatten(jitted(hf.asarray(x.copy())))[0]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
