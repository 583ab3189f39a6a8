"""What moves across a loop over steps: a loop over rows, and products of slices."""

import re
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.cpu.target import host
from hopflow.compiler.schedule.interchange import move_steps_inside
from hopflow.dtypes import float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import For, Program, Stmt, Store

pytestmark = pytest.mark.slow

NDArray = np.ndarray[Any, np.dtype[Any]]


def some(*shape: int) -> NDArray:
    return np.random.default_rng(len(shape)).standard_normal(shape)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


# --- steps inside, rows outside -------------------------------------------------------


@pytest.mark.parametrize("shape", [(100_003,), (65_536,), (300, 777), (40_000, 5)])
def test_rows_of_a_large_array_go_through_all_steps_in_blocks(
    shape: tuple[int, ...],
) -> None:
    x = some(*shape)
    step = hf.jit(lambda x, ts: hf.scan(lambda c, t: (c * 0.5 + x, c - t), x, ts))
    last, all_ = step(x, np.arange(4.0))
    expected, rows = x, []
    for t in range(4):
        rows.append(expected - t)
        expected = expected * 0.5 + x
    np.testing.assert_array_equal(np.asarray(last), expected)
    np.testing.assert_array_equal(np.asarray(all_), np.stack(rows))
    heads = [line for line in lines(step.loop_ir) if line.startswith("for ")]
    assert "_block in " in heads[0]
    assert heads[1].startswith("for step")


@pytest.mark.parametrize("steps", [0, 3])
def test_rows_go_in_blocks_where_only_a_run_knows_how_many(steps: int) -> None:
    def run(x: Any, ts: Any) -> Any:
        return hf.scan(lambda c, t: (c * 0.5 + x, c - t), x, ts)

    jitted = hf.jit(run, dynamic=True)
    for shape in ((70_001,), (1000,), (1,), (0,)):
        x, ts = some(*shape), np.arange(float(steps))
        for got, expected in zip(jitted(x, ts), hf.jit(run)(x, ts), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    heads = [line for line in lines(jitted.loop_ir) if line.startswith("for ")]
    assert "_block in " in heads[0]


@pytest.mark.parametrize("count", ["fixed", "of the step", "of what is written"])
def test_rows_that_are_more_in_each_step_stay_inside_the_steps(count: str) -> None:
    n, step, row = (Var(name, int64) for name in ("n", "step", "i"))
    carry = Buffer("carry", int64, (e.read(n),), "arena")
    at = (e.read(row),)
    doubled = Store(carry, at, e.mul(e.load(carry, at), e.index(2)))
    extent = {
        "fixed": e.read(n),
        "of the step": e.read(step),
        "of what is written": e.load(carry, (e.index(0),)),
    }[count]
    rows = For(row, extent, [doubled], independent=True)
    body: list[Stmt] = [For(step, e.index(9), [rows])]
    move_steps_inside(Program("f", [], [], [], [], [], body, []), host())
    [outer] = body
    assert isinstance(outer, For)
    assert (outer.var is step) == (count != "fixed")


@pytest.mark.parametrize(
    "body",
    [
        lambda c, _: (hf.roll(c, 1) + 1.0, None),  # needs other rows
        lambda c, _: (c + hf.sum(c), None),
        lambda c, _: (hf.cumulative_sum(c), None),
    ],
)
def test_rows_that_need_each_other_stay_inside_the_steps(body: Any) -> None:
    x = some(100_000)
    step = hf.jit(lambda x: hf.scan(body, x, length=3)[0])
    with hf.debug():
        expected = hf.scan(body, hf.asarray(x), length=3)[0]
    np.testing.assert_allclose(np.asarray(step(x)), np.asarray(expected), rtol=1e-9)
    assert re.search("^    for step", step.loop_ir, re.MULTILINE)  # in no other loop


def test_small_arrays_are_left_alone() -> None:
    step = hf.jit(lambda x: hf.scan(lambda c, _: (c * 0.5, None), x, length=3)[0])
    step(some(1000))
    # There are no blocks but those of gangs, each of one vector.
    assert step.loop_ir.count("_block in") == step.loop_ir.count(" gang ")


# --- products before the loop ---------------------------------------------------------


def recurrent(xs: Any, w: Any, u: Any, *, reverse: bool = False) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = hf.tanh(x @ w + h @ u)
        return h, (h, x)

    start = hf.zeros((*xs.shape[1:-1], u.shape[0]), dtype=hf.float64)
    return hf.scan(step, start, xs, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (4,)])
def test_products_of_few_rows_of_each_slice_are_one_product(
    rows: tuple[int, ...], reverse: bool
) -> None:
    xs, w, u = some(20, *rows, 64), some(64, 80), some(80, 80) * 0.1
    run = hf.jit(lambda xs, w, u: recurrent(xs, w, u, reverse=reverse))
    _, (hs, same) = run(xs, w, u)
    h, expected = np.zeros((*rows, 80)), {}
    for k in reversed(range(20)) if reverse else range(20):
        expected[k] = h = np.tanh(xs[k] @ w + h @ u)
    rows_ = np.stack([expected[k] for k in range(20)])
    np.testing.assert_allclose(np.asarray(hs), rows_, rtol=1e-10)
    np.testing.assert_array_equal(np.asarray(same), xs)
    text = lines(run.loop_ir)
    first = next(k for k, line in enumerate(text) if line.startswith("call gemm"))
    loop = next(k for k, line in enumerate(text) if line.startswith("for step"))
    assert first < loop
    assert sum(line.startswith("call gemm") for line in text) == 2


def test_several_products_of_slices_take_each_its_own_matrix() -> None:
    def total(xs: Any, w: Any, u: Any) -> Any:
        return hf.scan(lambda c, x: (c + x @ w + (x @ u) * 2, None), w[:2] * 0, xs)[0]

    run = hf.jit(total)
    xs, w, u = some(20, 2, 64), some(64, 80), some(64, 80)
    expected = np.sum(xs @ w + (xs @ u) * 2, axis=0)
    np.testing.assert_allclose(np.asarray(run(xs, w, u)), expected, rtol=1e-10)


@pytest.mark.parametrize("dynamic", [({0: True},), True])
def test_sizes_of_products_before_the_loop_may_be_symbols(dynamic: Any) -> None:
    w, u = some(64, 80), some(80, 80) * 0.1
    run = hf.jit(recurrent, dynamic=dynamic)
    for length in (20, 0, 1, 33):
        xs = some(length, 64)
        expected = hf.jit(recurrent)(xs, w, u)[1][0]
        np.testing.assert_allclose(
            np.asarray(run(xs, w, u)[1][0]), np.asarray(expected)
        )
    text = lines(run.loop_ir)
    loop = next(k for k, line in enumerate(text) if line.startswith("for step"))
    assert any(line.startswith("call gemm") for line in text[:loop])


def test_a_matrix_that_each_step_reads_for_a_row_is_copied_once() -> None:
    run = hf.jit(recurrent)
    run(some(20, 64), some(64, 80), some(80, 80) * 0.1)
    text = lines(run.loop_ir)
    copies = [k for k, line in enumerate(text) if line.startswith("copy b")]
    loop = next(k for k, line in enumerate(text) if line.startswith("for step"))
    assert len(copies) == 1
    assert copies[0] < loop


def test_products_of_many_rows_stay_in_their_step() -> None:
    run = hf.jit(recurrent)
    run(some(3, 32, 64), some(64, 80), some(80, 80) * 0.1)
    text = lines(run.loop_ir)
    loop = next(k for k, line in enumerate(text) if line.startswith("for step"))
    calls = [k for k, line in enumerate(text) if line.startswith("call gemm")]
    assert len(calls) == 2
    assert min(calls) > loop


def test_a_product_within_a_loop_in_a_map_moves_out_of_the_inner_loop() -> None:
    def total(x: Any) -> Any:
        return hf.scan(lambda c, v: (c + hf.sum(v @ w), None), 0.0, x)[0]

    xs, w = some(5, 20, 64), hf.asarray(some(64, 80))
    sums = hf.jit(lambda xs: hf.map(total, xs))(xs)
    expected = (xs @ np.asarray(w)).sum((1, 2))
    np.testing.assert_allclose(np.asarray(sums), expected, rtol=1e-10)


# --- products after the loop ----------------------------------------------------------


def outer_sums(xs: Any, ys: Any, start: Any) -> Any:
    """The sum of `x^T @ y`, of what each step makes of its slices."""

    def step(c: Any, row: Any) -> Any:
        total, h = c
        x, y = row
        h = hf.tanh(h + y)
        return (total + x.T @ h, h), None

    return hf.scan(step, (start, ys[0] * 0), (xs, ys))[0]


def products(text: str) -> tuple[int, int]:
    """How many stand in the loop, and how many after it."""
    all_ = [line for line in text.splitlines() if "call gemm" in line]
    inside = sum(line.startswith("        ") for line in all_)
    return inside, len(all_) - inside


@pytest.mark.parametrize("length", [20, 2])
@pytest.mark.parametrize("rows", [1, 8])
def test_products_that_each_step_adds_are_one_product(length: int, rows: int) -> None:
    xs, ys, start = some(length, rows, 64), some(length, rows, 80) * 0.1, some(64, 80)
    run = hf.jit(outer_sums)
    total, last = run(xs, ys, start)
    h, expected = np.zeros((rows, 80)), start.copy()
    for x, y in zip(xs, ys, strict=True):
        h = np.tanh(h + y)
        expected += x.T @ h
    np.testing.assert_allclose(np.asarray(total), expected, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(last), h, rtol=1e-10)
    assert products(run.loop_ir) == (0, 1)


def test_products_that_each_step_adds_where_only_a_run_knows_how_many() -> None:
    run = hf.jit(outer_sums, dynamic=({0: True}, {0: True}, None))
    for length in (20, 33, 1):
        args = some(length, 8, 64), some(length, 8, 80) * 0.1, some(64, 80)
        for got, expected in zip(run(*args), hf.jit(outer_sums)(*args), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(expected))
    assert products(run.loop_ir) == (0, 1)


@pytest.mark.parametrize(
    "step",
    [
        lambda c, x: (c + x.T @ x, c[0]),  # the step needs the sum
        lambda c, x: (c * 0.5 + x.T @ x, None),
        lambda c, x: (c + (x.T @ x) * 2, None),
    ],
)
def test_other_sums_stay_in_the_loop(step: Any) -> None:
    xs, start = some(20, 2, 64), some(64, 64)
    run = hf.jit(lambda xs, c: hf.scan(step, c, xs)[0])
    total = start
    for x in xs:
        total = np.asarray(step(hf.asarray(total), hf.asarray(x))[0])
    np.testing.assert_allclose(np.asarray(run(xs, start)), total, rtol=1e-10)
    assert products(run.loop_ir) == (1, 0)


def test_the_gradient_of_a_recurrent_network_multiplies_all_steps_at_once() -> None:
    def loss(xs: Any, w: Any, u: Any) -> Any:
        return hf.sum(recurrent(xs, w, u)[1][0] ** 2)

    args = some(20, 64), some(64, 80), some(80, 80) * 0.1
    run = hf.jit(hf.grad(loss, (1, 2)))
    for got, expected in zip(run(*args), hf.grad(loss, (1, 2))(*args), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-9)
    assert products(run.loop_ir) == (2, 3)  # forward and back; and before, after


# --- the products themselves ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((70, 49, 300), (300, 130, 520), (263, 47, 40), (8, 200, 257)),
        *((1, 700, 30), (700, 1, 30), (1, 300, 1000), (5, 1, 5000)),
    ],
)
def test_products_of_every_kind_of_tile(m: int, n: int, k: int, dtype: Any) -> None:
    x, y = some(m, k).astype(dtype), some(k, n).astype(dtype)
    got = np.asarray(hf.jit(hf.matmul)(x, y))
    expected = x.astype(np.float64) @ y.astype(np.float64)
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=tolerance * k)


def test_an_element_has_the_same_bits_in_a_product_of_any_size() -> None:
    x, y = some(90, 600), some(600, 100)
    whole = np.asarray(hf.jit(hf.matmul)(x, y))
    for rows, columns in ((90, 7), (3, 100), (2, 30), (9, 64)):
        part = np.asarray(hf.jit(hf.matmul)(x[:rows], y[:, :columns].copy()))
        np.testing.assert_array_equal(part, whole[:rows, :columns])


# --- matrices that lie transposed in memory -------------------------------------------


@pytest.mark.parametrize("turn_x", [False, True])
@pytest.mark.parametrize("turn_y", [False, True])
@pytest.mark.parametrize("sizes", [(20, 17, 19), (1, 70, 80), (70, 1, 80), (70, 80, 1)])
def test_a_transposed_matrix_is_multiplied_where_it_lies(
    sizes: tuple[int, int, int], turn_x: bool, turn_y: bool
) -> None:
    m, k, n = sizes
    x, y = some(m, k), some(k, n)
    given = (x.T.copy() if turn_x else x), (y.T.copy() if turn_y else y)

    def f(x: Any, y: Any) -> Any:
        return (x.T if turn_x else x) @ (y.T if turn_y else y)

    jitted = hf.jit(f)
    np.testing.assert_allclose(np.asarray(jitted(*given)), x @ y, rtol=1e-12)
    assert "arena" not in jitted.loop_ir


def test_a_batch_of_transposed_slices_of_a_stack_is_not_copied() -> None:
    x, y = some(3, 2, 20, 17), some(2, 20, 19)
    jitted = hf.jit(lambda x, y: hf.matrix_transpose(x[1]) @ y)
    got = np.asarray(jitted(x, y))
    np.testing.assert_allclose(got, np.swapaxes(x[1], 1, 2) @ y, rtol=1e-12)
    assert "call gemm_tn(in0[1, " in jitted.loop_ir
    assert "arena" not in jitted.loop_ir


def test_a_matrix_that_no_step_changes_is_transposed_once() -> None:
    x, w = some(5, 6, 30), some(30, 30)
    jitted = hf.jit(lambda x, w: hf.scan(lambda c, v: (c @ w.T + v, None), x[0], x)[0])
    expected = x[0]
    for v in x:
        expected = expected @ w.T + v
    np.testing.assert_allclose(np.asarray(jitted(x, w)), expected, rtol=1e-9)
    text = lines(jitted.loop_ir)
    copied = [k for k, line in enumerate(text) if "= in1[" in line]
    step = next(k for k, line in enumerate(text) if line.startswith("for step"))
    assert 0 < max(copied) < step


def test_a_transposed_matrix_of_unknown_sizes_is_multiplied_where_it_lies() -> None:
    jitted = hf.jit(lambda x, y: x.T @ y, dynamic=True)
    x, y = some(20, 17), some(20, 19)
    np.testing.assert_allclose(np.asarray(jitted(x, y)), x.T @ y, rtol=1e-12)
    assert "call gemm_tn(in" in jitted.loop_ir
    assert "arena" not in jitted.loop_ir


# --- small products -------------------------------------------------------------------


def test_a_product_with_a_transposed_matrix_goes_along_its_rows() -> None:
    w, v = some(24, 24), some(24)
    jitted = hf.jit(lambda w, v: w.T @ hf.cos(v + 1))
    expected = w.T @ np.cos(v + 1)
    np.testing.assert_allclose(np.asarray(jitted(w, v)), expected, rtol=1e-12)
    text = lines(jitted.loop_ir)
    [product] = [k for k, line in enumerate(text) if "in0[" in line and "*" in line]
    # Lanes are rows of `w.T`, elements of a row of `w`; sums go along columns.
    [row] = set(re.findall(r"in0\[[^,]*, (i\d+(?:_row)?)\]", text[product]))
    [lanes] = [line for line in text[product - 3 : product] if f"for {row} in" in line]
    assert "gang" in lanes or "vector" in lanes
    # What the product reads of the vector, again for each row, was computed before.
    assert "cos" not in text[product]


def test_columns_times_rows_are_added_where_the_sum_lies() -> None:
    a, b = some(5, 40), some(5, 30)

    def add(total: Any, rows: Any) -> Any:
        return total + rows[0][:, None] @ rows[1][None], None

    jitted = hf.jit(
        lambda a, b: hf.scan(add, hf.zeros((40, 30), dtype=float64), (a, b))[0]
    )
    np.testing.assert_allclose(np.asarray(jitted(a, b)), a.T @ b, rtol=1e-12)
    assert jitted.loop_ir.count("in arena") == 1  # the sum


# --- sums of what is zero but for a part ----------------------------------------------


def test_the_gradient_of_reading_parts_adds_only_them() -> None:
    def f(x: Any) -> Any:
        return hf.sum(x[3:40] ** 2) + hf.sum(x[30:60] ** 3) + hf.sum(x[::2])

    x = some(100)
    run = hf.jit(hf.grad(f))
    expected = np.zeros(100)
    expected[3:40] += 2 * x[3:40]
    expected[30:60] += 3 * x[30:60] ** 2
    expected[::2] += 1
    np.testing.assert_allclose(np.asarray(run(x)), expected)
    assert sum("0..100" in line for line in lines(run.loop_ir)) <= 1


@pytest.mark.parametrize("f", ["index", "slice", "take"])
def test_a_step_that_reads_a_part_of_a_table_costs_a_part_in_its_gradient(
    f: str,
) -> None:
    def read(table: Any, i: Any) -> Any:
        if f == "index":
            return table[i]
        if f == "slice":
            return hf.sum(hf.dynamic_slice(table, (i, 0), (3, 8)), axis=0)
        return hf.sum(hf.take(table, hf.stack([i, i + 1, i]), axis=0), axis=0)

    def loss(table: Any, at: Any) -> Any:
        step = lambda c, i: (hf.tanh(c + read(table, i)), None)  # noqa: E731
        return hf.sum(hf.scan(step, hf.zeros(8, dtype=hf.float64), at)[0])

    table, at = some(1000, 8), np.array([3, 3, 990, 0])
    run = hf.jit(hf.grad(loss))
    expected = hf.grad(loss)(hf.asarray(table), hf.asarray(at))
    np.testing.assert_allclose(np.asarray(run(table, at)), np.asarray(expected))
    inside = run.loop_ir[run.loop_ir.rindex("for step") :].splitlines()[1:]
    body = [line for line in inside if line.startswith("        ")]
    assert not any("0..1000" in line for line in body)


def test_an_index_out_of_range_is_reported_where_updates_are_added() -> None:
    def f(x: Any, y: Any, i: Any) -> Any:
        z = hf.zeros(10, dtype=hf.float64)
        z[i] = 1.0
        return x + z + y

    run = hf.jit(f)
    x = some(10)
    expected = x + x
    expected[3] += 1
    np.testing.assert_allclose(np.asarray(run(x, x, np.array(3))), expected)
    with pytest.raises(hf.errors.IndexingError, match="index 12 is out of range"):
        run(x, x, np.array(12))


def sums_of_points(x: Any) -> Any:
    return hf.sum(x * x, axis=1)


def sums_of_coordinates(x: Any) -> Any:
    return hf.sum(x * x, axis=0) + hf.max(x, axis=0)


def sums_in_rows(x: Any) -> Any:
    y = hf.reshape(x, (2, -1, 3))
    return hf.sum(y * y[::-1], axis=1)


def positions_in_points(x: Any) -> Any:
    return hf.argmax(x, axis=1), hf.argmin(x[:, ::-1], axis=1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize(
    ("f", "rows"),
    [
        *((sums_of_points, n) for n in (0, 1, 6, 70)),
        *((sums_of_coordinates, n) for n in (1, 6, 70)),
        *((sums_in_rows, n) for n in (0, 2, 70)),
        *((positions_in_points, n) for n in (0, 1, 6, 70)),
    ],
)
def test_points_are_reduced_as_vectors(
    f: Any, rows: int, dtype: str, dynamic: bool
) -> None:
    x = (np.random.default_rng(0).integers(-9, 9, (rows, 3)) * 1.5).astype(dtype)
    run = hf.jit(f, dynamic=dynamic)
    found, wanted = run(x), hf.jit(f, backend="interpreter")(x)
    for a, b in zip(pytree.flatten(found)[0], pytree.flatten(wanted)[0], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if rows == 70 and not dynamic:
        loops = [x for x in lines(run.loop_ir) if x.startswith("for ")]
        assert all("vector" in x or " in 0..2 " in x for x in loops), run.loop_ir


@pytest.mark.parametrize("shape", [(3, 16, 17), (2, 3, 4, 17), (1, 1, 17)])
def test_rows_of_unknown_sizes_are_multiplied_where_they_lie(
    shape: tuple[int, ...],
) -> None:
    jitted = hf.jit(lambda x, w: x @ w, dynamic=True)
    for factor in (1, 2):
        x, w = some(shape[0] * factor, *shape[1:]), some(17, 19)
        np.testing.assert_allclose(np.asarray(jitted(x, w)), x @ w, rtol=1e-12)
        assert "call gemm(in0, in1, " in jitted.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_steps_that_write_windows_of_one_another_stay_outside(
    reads: bool, dynamic: bool
) -> None:
    """Iterations write elements of their own in a step, and those of others in the
    next one: the windows move."""

    def f(state: Any, a: Any) -> Any:
        def step(i: Any, state: Any) -> Any:
            old = hf.dynamic_slice(state, (i,), a.shape) if reads else 1
            return hf.dynamic_update_slice(state, old * 3 + a, (i,))

        return hf.fori_loop(0, 9, step, state)

    state, a = (np.arange(n, dtype=np.int64) for n in (300_000, 200_000))
    expected = state.copy()
    for i in range(9):
        window = expected[i : i + len(a)]
        window[:] = (window if reads else 1) * 3 + a
    for _ in range(3):
        found = hf.jit(f, dynamic=dynamic)(state, a)
        np.testing.assert_array_equal(np.asarray(found), expected)
