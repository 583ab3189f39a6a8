"""Loops that read what they stored in the iterations before: values stay in registers,
and quotients and remainders of a counter are loops of their own."""

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


def compiled(f: Callable[..., Any], *args: Any, dynamic: bool = False) -> str:
    """Compare compiled results with those of plain Python. Return the Loop IR."""
    jitted = hf.jit(f, dynamic=dynamic)
    found = jitted(*args)
    with hf.debug():
        expected = f(*map(hf.asarray, args))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    text: str = jitted.loop_ir
    return text


def drawn(n: int, dtype: str) -> Array:
    values = np.random.default_rng(n).normal(size=n) * 3
    return np.asarray(values > 0 if dtype == "bool" else values.astype(dtype))


def recurrence(distances: tuple[int, ...]) -> Callable[..., Any]:
    """Each element is combined with those so many positions before."""
    first = max(distances)

    def f(x: Any, y: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            new = y[i]
            for distance in distances:
                new = hf.where(y[i - distance] > y[i], new, x[i - distance])
            return x.at[i].set(new)

        return hf.fori_loop(first, x.shape[0], step, x)

    return f


DTYPES: Final = ("float64", "float32", "float16", "int64", "int8", "uint32", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_earlier_results_stay_in_registers(dtype: str) -> None:
    x, y = drawn(20, dtype), drawn(21, dtype)[1:]
    assert "_last3" in compiled(recurrence((1, 3)), x, y)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("distances", [(1,), (2,), (3,), (1, 2), (1, 3), (1, 2, 3)])
def test_distances(distances: tuple[int, ...], dynamic: bool) -> None:
    x, y = drawn(20, "float64"), drawn(20, "float64")
    text = compiled(recurrence(distances), x, y, dynamic=dynamic)
    assert f"_last{max(distances)}" in text


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("distances", [(1,), (2,), (1, 3), (3,)])
def test_short_loops(n: int, distances: tuple[int, ...]) -> None:
    """Loops of no or few iterations load no element that there is not."""
    f = hf.jit(recurrence(distances), dynamic=True)
    for size in (9, n):
        x, y = drawn(size, "float64"), drawn(size, "float64")
        with hf.debug():
            expected = recurrence(distances)(hf.asarray(x), hf.asarray(y))
        np.testing.assert_array_equal(np.asarray(f(x, y)), np.asarray(expected))


def test_far_and_varying_distances_are_loaded() -> None:
    x = drawn(30, "float64")

    def far(i: Any, x: Any) -> Any:
        return x.at[i].set(x[i - 7] + 1)

    def square(i: Any, x: Any) -> Any:
        return x.at[i * i].set(x[(i - 1) * (i - 1)] + 1)

    def strided(i: Any, x: Any) -> Any:
        return x.at[2 * i].set(x[2 * i - 1] + 1)

    def ahead(i: Any, x: Any) -> Any:
        return x.at[i].set(x[i + 1] + 1)

    for step in (far, square, strided, ahead):
        text = compiled(lambda x, f=step: hf.fori_loop(7 * (f is far), 5, f, x), x)
        assert "_last" not in text


def test_strides_are_distances_of_iterations() -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(1, 10, lambda i, x: x.at[2 * i].add(x[2 * i - 2]), x)

    assert "_last1" in compiled(f, drawn(20, "float64"))


def test_an_element_that_two_stores_write_is_loaded() -> None:
    def f(x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            x = x.at[i].set(x[i - 1] * 0.5)
            return x.at[i - 1].set(x[i] + 1.0)

        return hf.fori_loop(1, x.shape[0], step, x)

    assert "_last" not in compiled(f, drawn(12, "float64"))


def test_one_element_is_a_variable() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 9, lambda i, x: x.at[2].set(x[2] * 0.5 + y[i]), x)

    compiled(f, drawn(5, "float64"), drawn(9, "float64"))


def test_two_arrays_of_a_loop_are_each_kept() -> None:
    def f(x: Any, y: Any) -> Any:
        def step(i: Any, x: Any, y: Any) -> Any:
            new = x[i - 1] + y[i - 2]
            return x.at[i].set(new), y.at[i].set(new - y[i - 1])

        return hf.concat(hf.fori_loop(2, x.shape[0], step, (x, y)))

    text = compiled(f, drawn(12, "float64"), drawn(12, "float64"))
    kept = {*re.findall(r"var \w+_(carry\d)_last\d: f64", text)}
    assert len(kept) == 2
    step = text[text.index("for step") : text.index("for i")]
    assert not re.search(r"= .*carry\d\[", step)  # none is loaded


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_a_table(dynamic: bool) -> None:
    def f(a: Any, b: Any) -> Any:
        def row(i: Any, table: Any) -> Any:
            def column(j: Any, table: Any) -> Any:
                other = hf.maximum(table[i, j + 1], table[i + 1, j])
                best = hf.where(a[i] == b[j], table[i, j] + 1, other)
                return table.at[i + 1, j + 1].set(best)

            return hf.fori_loop(0, b.shape[0], column, table)

        shape = a.shape[0] + 1, b.shape[0] + 1
        return hf.fori_loop(0, a.shape[0], row, hf.zeros(shape, dtype="int32"))

    a, b = np.array([1, 2, 3, 2, 4, 1, 2]), np.array([2, 4, 3, 1, 2, 1])
    assert "_last1" in compiled(f, a, b, dynamic=dynamic)


@pytest.mark.parametrize("size", [3, 11])
def test_an_index_out_of_range_is_an_error(size: int) -> None:
    f = hf.jit(recurrence((1, 2)), dynamic=True)
    x = drawn(9, "float64")
    np.testing.assert_array_equal(f(x, x).shape, (9,))
    with pytest.raises(hf.errors.IndexingError):
        f(drawn(12, "float64"), drawn(size, "float64"))


def test_a_vmapped_loop_and_its_derivative() -> None:
    def f(x: Any, y: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return x.at[i].set(x[i - 1] * y[i] + x[i])

        return hf.sum(hf.fori_loop(1, x.shape[0], step, x) ** 2)

    x, y = drawn(24, "float64").reshape(4, 6), drawn(6, "float64")
    compiled(hf.vmap(f, (0, None)), x, y)
    found = hf.jit(hf.vmap(hf.grad(f), (0, None)))(x, y)
    with hf.debug():
        expected = hf.vmap(hf.grad(f), (0, None))(hf.asarray(x), hf.asarray(y))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected))


def test_positions_that_move_backwards() -> None:
    def reverse(i: Any, x: Any) -> Any:
        return x.at[9 - i].set(x[10 - i] * 0.5)

    def one(i: Any, x: Any) -> Any:
        return x.at[9].set(x[10 - i] * 2.0)

    def outer(j: Any, x: Any) -> Any:
        step = lambda i, x: x.at[i + 10].set(x[i + 9 - j] * 2.0)  # noqa: E731
        return hf.fori_loop(0, 6, step, x)

    x = drawn(20, "float64")
    assert "_last1" in compiled(lambda x: hf.fori_loop(1, 9, reverse, x), x)
    assert "_last" not in compiled(lambda x: hf.fori_loop(1, 6, one, x), x)
    compiled(lambda x: hf.fori_loop(0, 6, outer, x), x)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("row", [0, 4, 10**9])
def test_nothing_is_read_before_its_check(row: int, steps: int) -> None:
    """The row is an element at an index that only the run knows."""

    def f(table: Any, rows: Any, m: Any, n: Any) -> Any:
        def step(i: Any, table: Any) -> Any:
            return table.at[rows[m], i + 1].set(table[rows[m], i] * 2)

        return hf.fori_loop(0, n, step, table)

    table, rows = drawn(32, "float64").reshape(4, 8), np.array([1, 3, 0])
    jitted = hf.jit(f, dynamic=True)
    if row < 3 or not steps:
        expected = table.copy()
        for i in range(steps):
            expected[rows[row], i + 1] = expected[rows[row], i] * 2
        np.testing.assert_array_equal(jitted(table, rows, row, steps), expected)
    else:
        with pytest.raises(hf.errors.IndexingError):
            jitted(table, rows, row, steps)


@pytest.mark.parametrize("limit", [np.inf, np.nan, 0.5])
def test_positions_that_floats_decide(limit: float) -> None:
    def step(i: Any, x: Any) -> Any:
        return x.at[i + 1].set(x[i] + x[hf.where(x[i] < limit, i, i + 1)])

    compiled(lambda x: hf.fori_loop(0, 6, step, x), drawn(20, "float64"))


def test_a_long_body() -> None:
    """Each position depends on the element at the one before."""

    def step(i: Any, x: Any) -> Any:
        p = i
        for _ in range(100):
            p = hf.where(x[p] > 0, p, i)
        return x.at[i + 1].set(x[i] * x[p])

    compiled(lambda x: hf.fori_loop(0, 6, step, x), drawn(20, "float64"))


# --- a counter of the elements of a table ---------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 7, 12, 21, 22])
@pytest.mark.parametrize("columns", [7, 8])
def test_a_counter_of_elements_is_two_loops(count: int, columns: int) -> None:
    def f(x: Any) -> Any:
        def element(k: Any, x: Any) -> Any:
            i, j = k // columns, k % columns
            return x.at[i, j].set(x[i, hf.maximum(j - 1, 0)] + k)

        return hf.fori_loop(0, count, element, x)

    text = compiled(f, drawn(4 * columns, "float64").reshape(4, columns))
    if count > columns:
        assert "_row in" in text
        assert "_column in" in text


def test_a_symbolic_number_of_elements() -> None:
    def f(x: Any) -> Any:
        def element(k: Any, x: Any) -> Any:
            return x.at[k % 8].set(x[k // 8] + x[k % 8])

        return hf.fori_loop(0, 2 * x.shape[0], element, x)

    for n in (8, 9, 13):
        compiled(f, drawn(n, "float64"), dynamic=True)


def test_a_quotient_alone_is_computed() -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 20, lambda k, x: x.at[k // 5].add(x[k]), x)

    assert "_row" not in compiled(f, drawn(20, "float64"))


@pytest.mark.parametrize("by", [3, 62, 63])
def test_shifts_and_masks_are_quotients_and_remainders(by: int) -> None:
    def f(x: Any) -> Any:
        def step(k: Any, x: Any) -> Any:
            return x.at[(k >> by) + (k & (2**by - 1))].add(1.0)

        return hf.fori_loop(0, 12, step, x)

    compiled(f, drawn(12, "float64"))
