"""Which loops compute several rows at once, and what comes of it."""

import re
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.interleaving import stages_of
from hopflow.compiler.schedule.unroll_and_jam import LARGEST, MOST, WHOLE

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]


def heads(jitted: Any) -> list[str]:
    """The loops of a program, without what they are bound to."""
    lines = [line.strip() for line in jitted.loop_ir.splitlines()]
    return [
        line.removesuffix(":").replace(" independent", "").replace(" threads", "")
        for line in lines
        if line.startswith("for ")
    ]


def loops_of(f: Any, *shapes: tuple[int, ...], dynamic: bool | None = None) -> Any:
    jitted = hf.jit(f, dynamic=dynamic)
    jitted(*(np.zeros(shape, np.float32) for shape in shapes))
    return heads(jitted)


def is_jammed(f: Any, *shapes: tuple[int, ...]) -> bool:
    return any("_rows in" in head for head in loops_of(f, *shapes))


def test_rows_of_a_transposed_array_are_computed_together() -> None:
    jitted = hf.jit(lambda x: x[:, :4].T * 2.0)
    jitted(np.zeros((64, 40), np.float32))
    [rows, vectors] = heads(jitted)
    assert rows == "for i1_rows in 0..1"
    assert vectors.startswith("for i2 in 0..64 vector")
    for k in range(4):
        row = "i1_rows * 4" + f" + {k}" * (k > 0)
        assert f"out0[{row}, i2] = in0[i2, {row}] * 2.0" in jitted.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(40, 37), (64, 64), (3, 20)])
def test_steps_that_go_backwards_read_columns_together(
    shape: tuple[int, int], dynamic: bool
) -> None:
    def f(x: Any) -> Any:
        step = lambda c, v: ((c * 0.5 + v) * v, None)  # noqa: E731
        end = lambda r: hf.scan(step, hf.ones((), dtype=r.dtype), r)[0]  # noqa: E731
        return hf.vmap(hf.grad(end))(x)

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    jitted = hf.jit(f, dynamic=dynamic)
    with hf.debug():
        expected = np.asarray(f(hf.asarray(x)))
    np.testing.assert_allclose(np.asarray(jitted(x)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(32, 65), (20, 18), (5, 3)])
def test_steps_that_fill_rows_read_what_they_have_stored(
    shape: tuple[int, int], dtype: str
) -> None:
    """As those of dynamic programs: the row is written as vectors."""

    def fill(r: Any) -> Any:
        def step(i: Any, o: Any) -> Any:
            return o.at[i].set(o[i - 1] + r[i] * o[i - 1] + r[i - 1])

        return hf.fori_loop(1, shape[1], step, hf.ones((shape[1],), dtype=r.dtype))

    x = (np.random.default_rng(0).integers(0, 4, shape) / 8).astype(dtype)
    jitted = hf.jit(hf.vmap(fill))
    with hf.debug():
        expected = np.asarray(hf.vmap(fill)(hf.asarray(x)))
    np.testing.assert_array_equal(np.asarray(jitted(x)), expected)
    if shape == (32, 65) and dtype == "float32":
        assert any("_rows in" in head for head in heads(jitted))
        assert "scatter" not in jitted.llvm_ir


def test_columns_are_read_from_the_last_one_on() -> None:
    def f(x: Any) -> Any:
        return x[:, ::-1].T * 2.0, x[:, 20:4:-1].T

    x = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)
    jitted = hf.jit(f)
    reversed_, part = jitted(x)
    np.testing.assert_array_equal(np.asarray(reversed_), x[:, ::-1].T * 2)
    np.testing.assert_array_equal(np.asarray(part), x[:, 20:4:-1].T)
    assert any("_rows in" in head for head in heads(jitted))
    assert "gather" not in jitted.llvm_ir


@pytest.mark.parametrize("size", range(2, WHOLE + 1))
def test_rows_that_are_read_as_a_whole_need_no_loop(size: int) -> None:
    jitted = hf.jit(lambda x: x.T * 2.0)
    jitted(np.zeros((64, size), np.float32))
    [vectors] = heads(jitted)
    assert vectors.startswith("for i2 in 0..64 vector")
    for k in range(size):
        assert f"out0[{k}, i2] = in0[i2, {k}] * 2.0" in jitted.loop_ir


@pytest.mark.parametrize(
    ("rows", "counts"),
    [(3, []), (4, [4]), (5, [4]), (16, [16]), (20, [16, 4]), (23, [16, 4]), (24, [8])],
)
def test_the_rows_that_remain_have_loops_of_their_own(
    rows: int, counts: list[int]
) -> None:
    jitted = hf.jit(lambda x: x[:, :rows].T * 2.0)
    jitted(np.zeros((640, rows + 20), np.float32))
    widest = 16 if "vector 16" in jitted.loop_ir else 8
    if widest < MOST:
        pytest.skip("the vectors of this CPU have fewer lanes")
    factors = re.findall(r"out0\[i1_rows\w* \* (\d+)(?: \+ 16)?, i", jitted.loop_ir)
    assert list(map(int, factors)) == counts


def test_sizes_that_only_a_call_knows_have_both_loops() -> None:
    found = loops_of(lambda x: x.T * 2.0, (40, 50), dynamic=True)
    assert sum("_rows in" in head for head in found) == 1
    assert sum("i1_rest in" in head for head in found) == 1


SHAPES = (32, 48), (48, 32)


@pytest.mark.parametrize(
    ("f", "shapes", "expected"),
    [
        (lambda x, y: x + y.T, SHAPES, True),
        (lambda x, y: x + y.T * y.T, SHAPES, True),
        (lambda x, y: hf.maximum(x, y.T) * hf.sqrt(y.T), SHAPES, True),
        (lambda x, y: x + hf.exp(y.T) + hf.sin(y.T), SHAPES, True),
        (lambda x, y: x + hf.exp(y.T) + hf.sin(y.T) * hf.cos(y.T), SHAPES, False),
        (lambda x, y: hf.sum(x + y.T), SHAPES, False),
        (lambda x, y: x + hf.flip(y, axis=0)[0, :32, None], SHAPES, False),
        (lambda x: hf.permute_dims(x, (0, 2, 1)) + 1, ((3, 32, 48),), True),
        (lambda x: hf.permute_dims(x, (2, 1, 0)) + 1, ((32, 5, 48),), True),
        (lambda x: hf.permute_dims(x, (1, 0, 2)) + 1, ((32, 5, 48),), False),
    ],
)
def test_only_columns_are_read_in_several_rows(
    f: Any, shapes: Any, expected: bool
) -> None:
    assert is_jammed(f, *shapes) is expected


def test_a_long_body_is_computed_row_by_row() -> None:
    def longer(x: Any) -> Any:
        y = x.T
        for k in range(LARGEST // 8):
            y = y * (k + 0.5) + hf.sqrt(y)
        return y

    assert not is_jammed(longer, (32, 48))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (0, 20), (17, 33), (40, 16), (65, 7)], ids=str
)
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"],
)
def test_transposed_arrays_have_the_bits_of_numpy(
    dtype: str, shape: tuple[int, int], dynamic: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    y = rng.integers(0, 2 if dtype == "bool" else 100, shape[::-1]).astype(dtype)

    def f(x: Any, y: Any) -> Any:
        return hf.where(y != 0, x.T, y), hf.maximum(x.T[1:], y[1:])

    found = map(np.asarray, hf.jit(f, dynamic=dynamic)(x, y))
    expected = np.where(y != 0, x.T, y), np.maximum(x.T[1:], y[1:])
    for got, want in zip(found, expected, strict=True):
        assert got.tobytes() == np.ascontiguousarray(want).tobytes()
        assert got.shape == want.shape


def test_an_array_that_a_loop_transposes_in_each_step() -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, x: x.T * 0.5 + x + i, x)

    x = np.random.default_rng(0).normal(size=(37, 37))
    want = x
    for i in range(3):
        want = want.T * 0.5 + want + i
    np.testing.assert_array_equal(np.asarray(hf.jit(f)(x)), want)


def test_columns_are_not_gathered() -> None:
    jitted = hf.jit(lambda x: x.T * 2.0)
    jitted(np.zeros((64, 64), np.float32))
    assert "gather" not in jitted.llvm_ir


@pytest.mark.parametrize("n", [5, 6, 7, 9, 11, 13])
def test_columns_of_short_rows_are_not_gathered(n: int) -> None:
    """Where rows have no power of two of elements, vectors of them overlap."""
    rng = np.random.default_rng(0)
    a, x = rng.integers(-9, 9, (40, n, n)), rng.integers(-9, 9, (40, n))
    jitted = hf.jit(hf.vmap(lambda a, x: a @ x))
    found = jitted(a.astype(np.float32), x.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(found), (a @ x[..., None])[..., 0])
    assert "gather" not in jitted.llvm_ir


def test_columns_are_loaded_once_for_all_rows() -> None:
    """A store to another array does not make them load again."""

    def f(x: Any) -> Any:
        y = hf.exp(hf.sin(x))
        z = y @ y
        return y.T * 2.0 + y, z

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    jitted = hf.jit(f)
    y = np.exp(np.sin(x))
    np.testing.assert_allclose(np.asarray(jitted(x)[0]), y.T * 2 + y, rtol=1e-5)
    assert any("_rows in" in head for head in heads(jitted))
    whole = re.findall(r"shufflevector <(\d+) x float>", jitted.llvm_ir)
    lanes = max(map(int, whole))
    # Square blocks are transposed in steps, for each of the vectors of a row.
    assert len(whole) <= (64 // lanes) * lanes * (lanes.bit_length() - 1)


@pytest.mark.parametrize("part", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("columns", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_stages_transpose_blocks(blocks: int, columns: int, part: int) -> None:
    rows = np.arange(blocks * columns * columns).reshape(-1, columns)
    part = min(part, len(rows))
    vectors = [rows[k::columns].ravel() for k in range(columns)]
    for step, order in stages_of(columns, part):
        for first in (k for k in range(columns) if not k & step):
            pair = vectors[first], vectors[first + step]
            for second in (0, 1):
                sources = [order(lane, second) for lane in range(len(rows))]
                vectors[first + second * step] = np.array(
                    [pair[vector][lane] for vector, lane in sources]
                )
    np.testing.assert_array_equal(vectors, rows.T)
