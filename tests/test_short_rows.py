"""Nests over short rows: which become one loop, and which are unrolled."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.test_gangs import target

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.pipeline import Executable
from hopflow.compiler.schedule.coalesce import LONG, coalesce
from hopflow.compiler.schedule.unroll import CHOICES, FEWEST, SHORT, unroll
from hopflow.dtypes import bool_, float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.program import (
    Accumulate,
    Binding,
    Declare,
    For,
    Let,
    Program,
    Stmt,
    Store,
)
from hopflow.loop_ir.verifier import verify
from hopflow.loop_ir.walk import statements
from hopflow.tensor import EagerTensor

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
At = Callable[..., Expr]


def heads(jitted: Any) -> list[str]:
    """The names of a program's variables of loops, with their extents."""
    return re.findall(r"for (\w+ in \S+)", jitted.loop_ir.replace(" * ", "*"))


def jitted(f: Any, *shapes: tuple[int, ...], dynamic: bool | None = None) -> Any:
    """A function, called with arguments of these shapes."""
    compiled = hf.jit(f, dynamic=dynamic)
    args = [np.random.default_rng(0).normal(size=shape) for shape in shapes]
    want = f(*map(hf.asarray, args))
    np.testing.assert_array_equal(compiled(*args), want)
    return compiled


# --- programs by hand: the results of the interpreter stay the same -------------------

N, M = 20, 3
ROW, COLUMN = Var("i", int64), Var("j", int64)
X = Buffer("x", float64, (e.index(N), e.index(M)), "input")
S = Buffer("s", float64, (e.index(N),), "input")
OUT = Buffer("out", float64, (e.index(N), e.index(M)), "output")
FLAG, SUM = Var("flag", bool_), Var("sum", float64)
V = Var("v", float64)


def x(*at: Expr) -> Expr:
    return e.load(X, at)


def doubled(i: Expr, j: Expr) -> list[Stmt]:
    return [Store(OUT, (i, j), e.add(x(i, j), x(i, j)))]


def named(i: Expr, j: Expr) -> list[Stmt]:
    return [Let(V, x(i, j)), Store(OUT, (i, j), e.mul(e.read(V), e.read(V)))]


def scaled(i: Expr, j: Expr) -> list[Stmt]:
    return [Store(OUT, (i, j), e.mul(x(i, j), e.load(S, (i,))))]


def counted(i: Expr, j: Expr) -> list[Stmt]:
    return [Store(OUT, (i, j), e.add(x(i, j), e.cast(j, float64)))]


def flagged(i: Expr, j: Expr) -> list[Stmt]:
    test = e.compare("gt", x(i, j), e.const(1.0, float64))
    return [Accumulate(FLAG, "or", test), *doubled(i, j)]


def summed(i: Expr, j: Expr) -> list[Stmt]:
    return [Accumulate(SUM, "add", x(i, j)), *doubled(i, j)]


BODIES = {
    doubled: (1, 2),
    named: (1, 2),
    scaled: (2, 1),
    counted: (2, 1),
    flagged: (1, 2),
    summed: (2, 2),
}
"""The loops of a nest after `coalesce`, and after `unroll`."""


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("edit", [coalesce, unroll], ids=lambda f: f.__name__)
def test_a_nest_becomes_one_loop_if_no_bit_changes(edit: Any, body: Any) -> None:
    def program() -> Program:
        inner = body(e.read(ROW), e.read(COLUMN))
        row = For(COLUMN, e.index(M), inner, True, Binding("vector", 2))
        declared: list[Stmt] = [
            Declare(FLAG, e.const(False, bool_)),
            Declare(SUM, e.const(0.0, float64)),
        ]
        total = e.select(e.read(FLAG), e.const(1.0, float64), e.read(SUM))
        last = Store(OUT, (e.index(0), e.index(0)), total)
        rows = For(ROW, e.index(N), [row], True)
        return Program("f", [], [X, S], [OUT], [], [], [*declared, rows, last], [])

    rng = np.random.default_rng(0)
    args = [rng.normal(size=(N, M)), rng.normal(size=N)]
    edited = program()
    edit(edited, host())
    verify(edited)
    [found], [want] = run(edited, (), args), run(program(), (), args)
    np.testing.assert_array_equal(found, want)
    loops = [s for s in statements(edited.body) if isinstance(s, For)]
    assert len(loops) == BODIES[body][edit is unroll]


# --- programs of users ----------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_arrays_of_short_rows_are_one_loop(dynamic: bool) -> None:
    shapes = ((40, 3), (6, 7, 2), (2, 3, 4, 5), (LONG, 2))
    for shape in shapes:
        compiled = jitted(lambda x: hf.sqrt(x * x) + 1.0, shape, dynamic=dynamic)
        assert len({h for h in heads(compiled) if "_block" not in h}) == 1


def test_long_rows_keep_their_loop() -> None:
    assert len(heads(jitted(lambda x: x * 2.0, (40, LONG)))) == 2


def test_only_the_axes_that_go_together_are_coalesced() -> None:
    compiled = jitted(lambda x, s: x * s[:, None, None], (40, 5, 7), (40,))
    assert [h.split(" in ")[1] for h in heads(compiled)] == ["0..40", "0..35"]
    compiled = jitted(lambda x, s: x * s, (40, 5, 7), (5, 7))
    assert [h.split(" in ")[1] for h in heads(compiled)] == ["0..40", "0..35"]


def test_transposed_reads_stay_a_nest() -> None:
    assert len(heads(jitted(lambda x: x.T + 1.0, (40, 30)))) > 1


def test_an_axis_of_one_element_is_no_obstacle() -> None:
    compiled = jitted(lambda x: hf.reshape(x, (40, 1, 3)) * 2.0, (40, 3))
    assert len(heads(compiled)) == 1


@pytest.mark.parametrize("rows", [FEWEST - 1, FEWEST, 100])
@pytest.mark.parametrize("size", range(2, SHORT + 2))
def test_rows_with_a_value_each_are_unrolled_if_they_are_short(
    rows: int, size: int
) -> None:
    compiled = jitted(lambda x, s: x * s[:, None], (rows, size), (rows,))
    is_unrolled = len(heads(compiled)) == 1
    if size > SHORT or rows < FEWEST:
        assert not is_unrolled
    elif size in (3, 5):
        assert is_unrolled


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_an_element_that_all_rows_share_is_chosen(size: int) -> None:
    """Where only the run knows which one it is, and rows have few elements."""

    def reordered(x: Any, order: Any) -> Any:
        return hf.take(x, order, axis=2)

    compiled = hf.jit(reordered)
    x = np.random.default_rng(0).integers(0, 255, (19, 70, size)).astype("uint8")
    for order in (np.arange(size)[::-1], np.arange(size), np.full(size, -1)):
        found = compiled(x, order.copy())
        np.testing.assert_array_equal(np.asarray(found), x[..., order])
    is_unrolled = not heads(compiled)[-1].endswith(f"..{size}")
    assert is_unrolled is (size <= CHOICES)
    with pytest.raises(IndexError):
        compiled(x, np.full(size, size))


def test_an_unrolled_nest_joins_what_is_computed_for_each_row() -> None:
    def normalised(x: Any) -> Any:
        return x / hf.sqrt(hf.sum(x * x, axis=1, keepdims=True))

    compiled = hf.jit(normalised)
    compiled(np.ones((200, 3)))
    assert len(heads(compiled)) == 1
    assert "arena" not in compiled.loop_ir


def test_columns_of_wide_rows_are_not_gathered_for_it() -> None:
    compiled = jitted(lambda x, s: x[:, :3] * s[:, None], (100, 50), (100,))
    assert len(heads(compiled)) == 2


DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64")


def rows_of(dtype: str, *shape: int) -> Array:
    rng = np.random.default_rng(1)
    return (rng.normal(size=shape) * 3).astype(dtype)


PROGRAMS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "whole": lambda m, x, b, s: m.where(x == x, m.minimum(x, x[0, 0]), x),
    "row": lambda m, x, b, s: m.where(x > b, x, b),
    "each": lambda m, x, b, s: m.where(x > s[:, None], x, s[:, None]),
    "both": lambda m, x, b, s: m.minimum(m.maximum(x, s[:, None]), b),
    "extremum": lambda m, x, b, s: m.max(x) if x.size else m.sum(b),
    "any": lambda m, x, b, s: m.any(x > b),
    "shifted": lambda m, x, b, s: m.where(x[1:] > x[:-1], x[1:], s[:-1, None]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_short_rows_of_all_dtypes_are_numpys(
    name: str, dtype: str, dynamic: bool
) -> None:
    f = PROGRAMS[name]
    compiled = hf.jit(lambda x, b, s: f(hf, x, b, s), dynamic=dynamic)
    for rows, size in ((1, 3), (0, 2), (16, 2), (37, 3), (50, 5), (33, 4), (19, 8)):
        args = rows_of(dtype, rows, size), rows_of(dtype, size), rows_of(dtype, rows)
        if not rows and name in ("whole", "shifted"):
            continue
        found = np.asarray(compiled(*args))
        want = f(np, *args)
        np.testing.assert_array_equal(found, want)
        wide = np.zeros((rows, 2 * size), dtype)
        wide[:, ::2] = args[0]
        found = np.asarray(compiled(wide[:, ::2], *args[1:]))  # not dense
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_many_short_rows_on_threads_are_numpys(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "num_threads", 3)
    x = rows_of("float32", 400_000, 3)
    b, s = rows_of("float32", 3), rows_of("float32", 400_000)
    for f in PROGRAMS.values():
        compiled = hf.jit(lambda x, b, s, f=f: f(hf, x, b, s), dynamic=dynamic)
        np.testing.assert_array_equal(np.asarray(compiled(x, b, s)), f(np, x, b, s))


# --- reductions of short rows, and steps along an axis --------------------------------


@pytest.mark.parametrize("name", ["max", "argmin", "any", "prod"])
def test_reductions_of_short_rows_have_rows_as_lanes(name: str) -> None:
    x = rows_of("float32" if name != "prod" else "int32", 300, 5)
    x[7, 2] = x[8, 4] = 0
    compiled = hf.jit(lambda x: getattr(hf, name)(x, axis=1))
    np.testing.assert_array_equal(np.asarray(compiled(x)), getattr(np, name)(x, axis=1))
    assert len(heads(compiled)) == 1


@pytest.mark.parametrize("size", range(2, 17))
def test_sums_of_short_rows_are_in_order(size: int) -> None:
    x = rows_of("float32", 300, size) / np.float32(3)
    compiled = hf.jit(lambda x: hf.sum(x, axis=1))
    want = np.cumsum(x, axis=1, dtype=np.float32)[:, -1]
    np.testing.assert_array_equal(np.asarray(compiled(x)), want)
    assert len(heads(compiled)) == 1


@pytest.mark.parametrize("cpu", ["host", "avx2"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int16", "uint8"])
@pytest.mark.parametrize("size", range(2, 18))
def test_rows_are_taken_apart_and_put_together(size: int, dtype: str, cpu: str) -> None:
    """By shuffles of every second element, every third, and so on."""
    x = (np.arange(301 * size) % 120).reshape(301, size).astype(dtype)

    def f(x: Any) -> Any:
        high = hf.max(x, axis=1, keepdims=True)
        return hf.where(x == high, x // 2, high - x) * (high - x + 1)

    high = x.max(1, keepdims=True)
    want = np.where(x == high, x // 2, high - x) * (high - x + 1)
    [result] = Executable(hf.trace(f, x).graph, target=target(cpu))([EagerTensor(x)])
    np.testing.assert_array_equal(result.array, want)


def test_an_update_of_short_rows_reads_before_it_writes() -> None:
    def f(m: Any, x: Any) -> Any:
        return x - m.sum(x, axis=1, keepdims=True)

    x = rows_of("float64", 100, 3)
    compiled = hf.jit(lambda x: hf.fori_loop(0, 5, lambda _, x: f(hf, x), x))
    want = x
    for _ in range(5):
        want = f(np, want)
    np.testing.assert_array_equal(np.asarray(compiled(x)), want)
    assert "let new_0" in compiled.loop_ir


@pytest.mark.parametrize("size", [5, 9, 16, 17])
def test_an_extremum_of_a_few_gathered_elements_is_written_out(size: int) -> None:
    """A gather of what the step before has stored would wait for the store."""

    def f(back: Any) -> Any:
        def step(i: Any, table: Any) -> Any:
            return table.at[i].set(hf.min(table[hf.maximum(i - back, 0)]) + 1)

        return hf.fori_loop(1, 50, step, hf.arange(50) % 7)

    back = np.random.default_rng(0).integers(1, 30, size)
    jitted = hf.jit(f)
    with hf.debug():
        expected = f(hf.asarray(back))
    np.testing.assert_array_equal(np.asarray(jitted(back)), np.asarray(expected))
    loops = re.findall(r"for step.*\n(?: {8}.*\n)+", jitted.loop_ir)[-1]
    assert ("for i" in loops) is (size > 16)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_special_values_in_short_rows(name: str, special: float) -> None:
    x = np.zeros((40, 5))
    for k in range(5):
        x[8 * k : 8 * k + 8, k] = special
    x[3] = x[20, 1:4] = special
    found = hf.jit(lambda x: getattr(hf, name)(x, axis=1))(x)
    want = getattr(np, name)(x, axis=1)
    np.testing.assert_array_equal(np.asarray(found), want)


@pytest.mark.parametrize(
    "shape", [(30, 5, 5), (7, 2, 3, 4), (300, 3, 1, 7), (5, 13, 2)]
)
@pytest.mark.parametrize("name", ["max", "sum", "prod", "any"])
def test_short_axes_of_a_dense_array_are_reduced_as_one(
    name: str, shape: tuple[int, ...]
) -> None:
    x = rows_of("int32", *shape)
    axes = tuple(range(1, len(shape)))
    want = getattr(np, name)(x, axis=axes)
    compiled = hf.jit(lambda x: getattr(hf, name)(x, axis=axes))
    np.testing.assert_array_equal(np.asarray(compiled(x)), want)
    assert [head.split(" in ")[1] for head in heads(compiled)] == [
        f"0..{shape[0]}",
        f"0..{np.prod(shape[1:])}",
    ]


@pytest.mark.parametrize("name", ["max", "sum"])
def test_short_axes_of_other_arrays_are_reduced_alone(name: str) -> None:
    x, b = rows_of("int32", 30, 5, 7), rows_of("int32", 7)
    wide = np.zeros((30, 5, 14), "int32")
    wide[..., ::2] = x
    cases: list[tuple[Callable[[Any, Any], Any], Array]] = [
        (lambda m, x: getattr(m, name)(x * b, axis=(1, 2)), x),
        (lambda m, x: getattr(m, name)(x, axis=(0, 2)), x),
        (lambda m, x: getattr(m, name)(x, axis=(2, 1)), wide[..., ::2]),
        (lambda m, x: getattr(m, name)(m.permute_dims(x, (0, 2, 1)), axis=(1, 2)), x),
        (lambda m, x: getattr(m, name)(x[:, ::-1], axis=(1, 2)), x),
        (lambda m, x: getattr(m, name)(x), x),
    ]
    for f, arg in cases:
        found = np.asarray(hf.jit(lambda x, f=f: f(hf, x))(arg))
        np.testing.assert_array_equal(found, f(np, arg))


def softmax(m: Any, x: Any) -> Any:
    exponentials = m.exp(x - m.max(x, axis=1, keepdims=True))
    return exponentials / m.sum(exponentials, axis=1, keepdims=True)


@pytest.mark.parametrize("size", range(2, 36))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_temporaries_may_be_shorter_than_vectors(dtype: str, size: int) -> None:
    x = rows_of(dtype, 50, size) / 7
    found = np.asarray(hf.jit(lambda x: softmax(hf, x))(x))
    np.testing.assert_allclose(found, softmax(np, x), rtol=1e-5)


@pytest.mark.parametrize("size", range(2, 36, 3))
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_short_temporaries_lie_beside_each_other(dtype: str, size: int) -> None:
    """What a vector writes behind the end of one is in none of the others."""

    def f(m: Any, x: Any) -> Any:
        rows = [x, x, x]
        for step in range(9):
            left, middle, right = rows
            rows = [middle + right[::-1], left * 2 - step, m.flip(middle, axis=0)]
        return rows

    def looped(x: Any) -> Any:
        def step(i: Any, left: Any, middle: Any, right: Any) -> Any:
            kept = left * 2 - hf.astype(i, dtype)
            return middle + right[::-1], kept, hf.flip(middle, axis=0)

        return hf.fori_loop(0, 9, step, (x, x, x))

    x = rows_of(dtype, size)
    for one, want in zip(hf.jit(looped)(x), f(np, x), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(want, dtype))


@pytest.mark.parametrize("size", range(2, 20))
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_short_pieces_of_a_temporary_are_written_alone(dtype: str, size: int) -> None:
    def looped(x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            x = x.at[size:].add(-x[0])
            x = x.at[:size].mul(2)
            return hf.flip(x, axis=0)

        return hf.fori_loop(0, 5, step, x)

    x = rows_of(dtype, size + 7)
    want = x.copy()
    for _ in range(5):
        want[size:] -= want[0]
        want[:size] *= 2
        want = want[::-1].copy()
    np.testing.assert_array_equal(np.asarray(hf.jit(looped)(x)), want)


@pytest.mark.parametrize("size", [10, 16, 17, 33, 100, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_special_values_in_long_rows(name: str, dtype: str, size: int) -> None:
    """NaN in any lane is the result; -0 is less than 0."""
    numbers = [0.0, -0.0, 1.5, -1.5, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan]
    draw = np.random.default_rng(size)
    x = np.stack(
        [draw.choice(draw.choice(numbers, 1 + k % 4), size) for k in range(200)]
    )
    x = np.asarray(hf.astype(hf.asarray(x), dtype))
    compiled = hf.jit(lambda x: getattr(hf, name)(x, axis=1))
    found = np.asarray(compiled(x)).astype("float64")
    rows = x.astype("float64")
    want = getattr(np, name)(rows, axis=1)
    np.testing.assert_array_equal(found, want)
    zeros = want == 0
    signs = np.signbit(rows) & (rows == 0)
    some, every = signs.any(axis=1), (signs | (rows != 0)).all(axis=1)
    np.testing.assert_array_equal(
        np.signbit(found[zeros]), (every if name == "max" else some)[zeros]
    )


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 40])
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
def test_repeated_rows_divide_no_index(
    dtype: str, rows: int, count: int, size: int
) -> None:
    x = rows_of(dtype, rows, size)
    for f, want in (
        (lambda x: hf.repeat(x, count, axis=1), np.repeat(x, count, axis=1)),
        (lambda x: hf.tile(x, (1, count)), np.tile(x, (1, count))),
        (lambda x: hf.repeat(x, count, axis=0), np.repeat(x, count, axis=0)),
    ):
        compiled = hf.jit(f)
        np.testing.assert_array_equal(np.asarray(compiled(x)), want)
        if want.shape[1] > size:
            assert "%" not in compiled.loop_ir


@pytest.mark.parametrize("step", range(2, 11))
@pytest.mark.parametrize("size", [64, 90, 840, 841, 2520])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_elements_by_steps_are_numpys(dtype: str, size: int, step: int) -> None:
    def f(m: Any, x: Any) -> Any:
        whole = x[: size // step * step]
        parts = [whole[k::step] for k in range(step)]
        total = parts[0]
        for part in parts[1:]:
            total = m.maximum(total, part)
        return total, x[1::step] * x[1::step], x[::-step] + x[::-step]

    x = rows_of(dtype, size)
    for found, want in zip(hf.jit(lambda x: f(hf, x))(x), f(np, x), strict=True):
        np.testing.assert_array_equal(np.asarray(found), want)


@pytest.mark.parametrize(
    ("shapes", "is_called"),
    [
        (((5000, 3), (3, 3)), False),
        (((5000, 4), (4, 8)), False),
        (((5000, 8), (8,)), False),
        (((5000, 5), (5, 5)), True),
        (((5000, 9), (9,)), True),
        (((3, 3), (3, 5000)), True),
    ],
)
def test_products_with_a_small_matrix_are_written_out(
    shapes: tuple[tuple[int, ...], ...], is_called: bool
) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape) for shape in shapes)
    compiled = hf.jit(lambda x, y: x @ y)
    np.testing.assert_allclose(np.asarray(compiled(x, y)), x @ y, rtol=1e-12)
    assert ("call gemm" in compiled.loop_ir) == is_called
