"""Sorting, searching and distinct elements."""

import re
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow import dtypes
from hopflow.bind import Value
from hopflow.compiler.cpu import routines
from hopflow.compiler.cpu.sort import LANES, RUN
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DTypeError,
    IndexingError,
    ShapeError,
    TraceError,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.networks import merge_exchanges
from hopflow.ops import searching, sets, sorting
from hopflow.ops.opdef import OPERATIONS
from hopflow.pytree import flatten
from hopflow.symbolic.size import free_symbols, symbol
from hopflow.tensor import asarray
from hopflow.testing.kernels import ArrayOperand, evaluate

pytestmark = pytest.mark.slow


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32)


def i32(values: Any) -> Any:
    return np.asarray(values, np.int32)


def agree(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide = np.float64 if found.dtype.kind not in "biu" else found.dtype
    np.testing.assert_array_equal(found.astype(wide), expected.astype(wide))


# --- sort and argsort -----------------------------------------------------------------


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_sorting_is_that_of_jax(dtype: dtypes.DType, descending: bool) -> None:
    x = np.random.default_rng(0).integers(0, 4, (3, 7, 2)).astype(dtype.dtype)
    if dtype.is_float:
        x[0, 2:4], x[1, 3], x[2, 5] = np.nan, -np.inf, -0.0
    with np.errstate(invalid="ignore"):
        for axis in (0, 1, -1):
            options: Any = {"axis": axis, "descending": descending}
            order = np.asarray(jnp.argsort(jnp.asarray(x), **options)).astype(np.int64)
            agree(sorting.argsort(asarray(x), **options), order)
            expected = np.take_along_axis(x, order, axis)
            agree(sorting.sort(asarray(x), **options), expected)


def keys(dtype: dtypes.DType, n: int) -> Any:
    """Keys of all magnitudes, some of them equal, and what is special of floats."""
    rng = np.random.default_rng(n)
    if dtype.kind != "f":
        drawn = rng.integers(0, 256, (n, 8), np.uint8).view(np.uint64)[:, 0]
        drawn >>= rng.integers(0, 64, n).astype(np.uint64)
        return drawn.astype(dtype.dtype)
    with np.errstate(over="ignore"):
        x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 40, n)
        x[::5] = rng.choice(
            [0.0, -0.0, np.inf, -np.inf, 1.5, 5e-324, -1e-40], x[::5].size
        )
        x = x.astype(dtype.dtype)
    x[1::7] = np.nan
    x[2::7] = -x[1::7][: x[2::7].size]
    return x


def numbers_of_keys(dtype: dtypes.DType) -> list[int]:
    """Numbers at which the code for keys of a dtype changes."""
    most = routines.FEW * routines.code_type(dtype).bits
    sizes = {
        0,
        1,
        RUN,
        RUN + 1,
        RUN * LANES,
        RUN * LANES + 1,
        150,
        most,
        most + 1,
        3000,
    }
    return sorted(sizes)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "of the run"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_equal_keys_keep_their_order(
    dtype: dtypes.DType, descending: bool, is_known: bool
) -> None:
    def both(x: Value) -> tuple[Value, Value]:
        order = sorting.argsort(x, descending=descending)
        return order, sorting.sort(x, descending=descending)

    compiled = hf.jit(both, dynamic=not is_known)
    for n in numbers_of_keys(dtype)[:: 1 if is_known else 3]:
        x = keys(dtype, n)
        as_numpy = x.astype(np.float32) if dtype is dtypes.bfloat16 else x
        if descending:
            want = n - 1 - np.argsort(as_numpy[::-1], kind="stable")[::-1]
        else:
            want = np.argsort(as_numpy, kind="stable")
        order, found = compiled(x)
        assert np.asarray(order).tolist() == want.tolist()
        assert np.asarray(found).tobytes() == x[want].tobytes()


@pytest.mark.parametrize("k", [0, 1, 5, routines.KEPT, routines.KEPT + 1])
@pytest.mark.parametrize("n", [70, 300, 3000])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_top_k_are_the_first_of_the_descending_order(
    dtype: dtypes.DType, n: int, k: int
) -> None:
    drawn = keys(dtype, n)
    for x in (drawn, drawn[np.asarray(sorting.argsort(asarray(drawn)))]):
        order = sorting.argsort(asarray(x), descending=True)[:k]
        values, indices = hf.jit(lambda x: tuple(sorting.top_k(x, k)))(x)
        assert np.asarray(indices).tolist() == order.tolist()
        assert np.asarray(values).tobytes() == x[np.asarray(order)].tobytes()


def rows_of_keys(dtype: dtypes.DType, rows: int, n: int) -> Any:
    """Rows with every other key equal to one before it."""
    x = keys(dtype, rows * n).reshape(rows, n)
    x[:, 2::2] = x[:, : x[:, 2::2].shape[1]]
    return x


@pytest.mark.parametrize(
    ("dtype", "n"),
    [
        *product(dtypes.ALL, (2, 5, sorting.SHORT)),
        *product((dtypes.float32, dtypes.int16), (1, 3, 4, 6, 7, 8, 9, 11)),
    ],
    ids=str,
)
def test_short_rows_are_sorted_as_long_ones(dtype: dtypes.DType, n: int) -> None:
    x = rows_of_keys(dtype, 37, n)

    @hf.jit
    def sorted_(x: Any) -> Any:
        return [
            (
                sorting.argsort(x, descending=descending),
                sorting.sort(x, descending=descending),
                sorting.sort(x.mT, axis=0, descending=descending),
                sorting.top_k(x, n // 2).indices,
            )
            for descending in (False, True)
        ]

    for descending, found in zip((False, True), sorted_(x), strict=True):
        want = sorting._argsort_run(x, descending=descending)
        order, values, columns, first = map(np.asarray, found)
        assert order.tolist() == want.tolist()
        assert values.tobytes() == np.take_along_axis(x, want, -1).tobytes()
        assert columns.T.tobytes() == values.tobytes()
        if descending:
            assert first.tolist() == want[:, : n // 2].tolist()


@pytest.mark.parametrize("n", [*range(1, sorting.SHORT + 1), RUN])
def test_merge_exchanges_sort(n: int) -> None:
    """A network that sorts all arrays of zeros and ones sorts everything (D. Knuth, The
    Art of Computer Programming, volume 3, section 5.3.4, theorem Z)."""
    exchanges = [*merge_exchanges(n)]
    assert len(exchanges) <= n * (n - 1) // 2
    keys = np.arange(1 << n) >> np.arange(n)[:, None] & 1
    for a, b in exchanges:
        keys[[a, b]] = np.minimum(keys[a], keys[b]), np.maximum(keys[a], keys[b])
    assert (np.diff(keys, axis=0) >= 0).all()


def sort_of(x: Value) -> Value:
    return sorting.sort(x)


def both_of(x: Value) -> tuple[Value, Value]:
    return sorting.sort(x), sorting.argsort(x)


def others_in_order(x: Value) -> Value:
    return hf.take_along_axis(2 * x, sorting.argsort(x), axis=-1)


def cotangent_of(x: Value) -> Any:
    return hf.grad(lambda x: hf.vecdot(sorting.sort(x), 2 * x))(x)


@pytest.mark.parametrize(
    ("f", "routine"),
    [
        (sort_of, "sort"),
        (hf.vmap(sort_of, in_dims=1), "sort"),
        (lambda x: hf.scan(lambda c, row: (c, sort_of(row)), 0, x), "sort"),
        (lambda x: hf.take_along_axis(x, sorting.argsort(x), axis=-1), "sort"),
        (both_of, "argsort"),
        (lambda x: hf.take_along_axis(x[:, :5], sorting.argsort(x[:, :5])), ""),
        (others_in_order, "argsort"),
        (hf.vmap(cotangent_of), "argsort"),
    ],
)
def test_keys_are_sorted_alone_if_their_order_has_no_other_use(
    f: Any, routine: str
) -> None:
    x = rows_of_keys(dtypes.float64, 20, 20)
    compiled = hf.jit(f)
    results, expected_results = (flatten(g(x))[0] for g in (compiled, f))
    for found, expected in zip(results, expected_results, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    routines = re.findall(r"= (\w*sort)\(", compiled.kernels)
    assert routines == ([routine] if routine else [])


@pytest.mark.parametrize("transform", ["value", "grad", "vmap", "jvp of grad"])
def test_medians_of_neighbours(transform: str) -> None:
    """What reads one element of a sorted window computes that one alone."""

    def medians(x: Any) -> Any:
        wide = hf.concat([x[:1], x, x[-1:]])
        windows = hf.stack([wide[k : k + x.shape[0]] for k in range(3)])
        return sorting.sort(windows, axis=0)[1]

    def total(x: Any) -> Any:
        return hf.sum(hf.sin(medians(x)) * x)

    x = hf.asarray(np.random.default_rng(0).normal(size=20).round(1))
    f: Any = {
        "value": medians,
        "grad": hf.grad(total),
        "vmap": lambda x: hf.vmap(medians)(hf.stack([x, -x, x * x])),
        "jvp of grad": lambda x: hf.jvp(hf.grad(total), (x,), (hf.cos(x),)),
    }[transform]
    with hf.debug():
        expected = f(x)
    agree_all(hf.jit(f)(x), expected)
    agree_all(hf.jit(f, dynamic=True)(x), expected)


def agree_all(found: Any, expected: Any) -> None:
    pairs = zip(
        hf.pytree.flatten(found)[0], hf.pytree.flatten(expected)[0], strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-13, atol=1e-13)


def test_sorting_empty_axes() -> None:
    agree(sorting.sort(asarray(np.zeros((2, 0)))), np.zeros((2, 0)))
    agree(sorting.argsort(asarray(np.zeros((0, 2)))), np.zeros((0, 2), np.int64))
    agree(sorting.sort(asarray(np.zeros((0, 2))), axis=0), np.zeros((0, 2)))


def test_sorting_checks_its_arguments() -> None:
    x = asarray([3.0, 1.0])
    with pytest.raises(AxisError, match="sort: `axis` is 1"):
        sorting.sort(x, axis=1)
    with pytest.raises(AxisError, match=r"argsort: `axis` is -1, .* rank 0"):
        sorting.argsort(1.0)
    with pytest.raises(ArgumentTypeError, match="`descending` must be a bool"):
        sorting.sort(x, descending=1)  # type: ignore[arg-type]


def test_top_k_gives_the_largest_first() -> None:
    x = f32([[1, 3, 3, 0], [5, np.nan, 2, 7]])
    found = sorting.top_k(asarray(x), 2)
    agree(found.values, f32([[3, 3], [np.nan, 7]]))
    agree(found.indices, np.asarray([[1, 2], [1, 3]]))
    agree(sorting.top_k(asarray(x), 1, axis=0).indices, np.asarray([[1, 1, 0, 1]]))
    with pytest.raises(ShapeError, match="`k` is 5, and axis 1 has 4"):
        sorting.top_k(asarray(x), 5)
    with pytest.raises(ArgumentValueError, match="`k` must not be negative"):
        sorting.top_k(asarray(x), -1)


# --- searchsorted ---------------------------------------------------------------------

NUMBERS = st.integers(-3, 3) | st.sampled_from([0.5, np.inf, -np.inf, np.nan])


@given(
    st.lists(NUMBERS, max_size=9),
    st.lists(NUMBERS, min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.booleans(),
)
def test_searchsorted_is_that_of_numpy(
    x: list[float], wanted: list[float], side: Any, symbolic: bool
) -> None:
    line, values = np.sort(np.asarray(x, np.float32)), np.asarray(wanted, np.float32)
    expected = np.searchsorted(line, values, side=side).astype(np.int64)
    agree(searching.searchsorted(asarray(line), asarray(values), side=side), expected)
    op = OPERATIONS["searchsorted"]
    if symbolic and x:
        n = symbol("n")
        operand = ArrayOperand(line, TensorType(dtypes.float32, (n,)))
        bound = {free_symbols(n)[0]: len(x)}
        [found] = evaluate(op, [operand, values], bound, side=side)
    else:
        [found] = evaluate(op, [line, values], side=side)
    agree(found, expected)


def test_searchsorted_takes_a_sorter_and_promotes() -> None:
    x = asarray(i32([3, 1, 2]))
    order = sorting.argsort(x)
    agree(searching.searchsorted(x, 2.5, sorter=order), np.int64(2))
    with pytest.raises(IndexingError, match="index 7 is out of range"):
        searching.searchsorted(x, 2, sorter=asarray([0, 7]))
    with pytest.raises(ArgumentValueError, match="`side` must be"):
        searching.searchsorted(x, 2, side="middle")
    with pytest.raises(ShapeError, match="`x1` must have one axis"):
        searching.searchsorted(asarray([[1]]), 2)
    with pytest.raises(DTypeError, match="numeric"):
        searching.searchsorted(asarray([True]), False)


# --- sizes that values decide ---------------------------------------------------------


class Traced(Value):
    """A value that has a type and no elements."""

    @property
    def type(self) -> TensorType:
        return TensorType(dtypes.float32, (3,))

    def _concrete(self, what: str) -> Any:
        raise TraceError(f"{what}() of a traced tensor")


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_nonzero_is_that_of_numpy(dtype: dtypes.DType) -> None:
    x = np.asarray([[0, 1, 2], [3, 0, 0]]).astype(dtype.dtype)
    for found, expected in zip(
        searching.nonzero(asarray(x)), np.nonzero(x), strict=True
    ):
        agree(found, expected)


def test_nonzero_needs_axes() -> None:
    with pytest.raises(ShapeError, match="`x` is a scalar"):
        searching.nonzero(1.0)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_unique_is_that_of_numpy(dtype: dtypes.DType) -> None:
    x = np.asarray([[3, 1, 3], [0, 1, 1]]).astype(dtype.dtype)
    if dtype.is_float:
        x[0, 0] = x[1, 0] = np.nan
    wide = x.astype(np.float64) if dtype.is_float else x
    expected = np.unique_all(wide)
    found = sets.unique_all(asarray(x))
    agree(found.values, expected.values.astype(dtype.dtype))
    for a, b in zip(found[1:], expected[1:], strict=True):
        agree(a, b)
    agree(sets.unique_values(asarray(x)), found.values)
    agree(sets.unique_counts(asarray(x)).counts, found.counts)
    inverse = sets.unique_inverse(asarray(x)).inverse_indices
    agree(inverse, found.inverse_indices)
    assert inverse.shape == (2, 3)


def test_unique_of_nothing() -> None:
    found = sets.unique_all(asarray(np.zeros((0, 2), np.int8)))
    assert [f.shape for f in found] == [(0,), (0,), (0, 2), (0,)]


@pytest.mark.parametrize(
    "call", [searching.nonzero, sets.unique_all, sets.unique_values, sets.unique_counts]
)
def test_a_traced_tensor_cannot_decide_a_size(call: Any) -> None:
    with pytest.raises(
        TraceError, match="the size of the result depends on the values"
    ):
        call(Traced())
