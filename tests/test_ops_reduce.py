"""Reductions and running totals against JAX's, and their lowering against NumPy's."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.ops import reduce as hf
from hopflow.ops import reducers
from hopflow.ops.opdef import OpDef, Sample
from hopflow.symbolic.size import free_symbols, symbol
from hopflow.tensor import asarray
from hopflow.testing.executions import in_turn
from hopflow.testing.kernels import ArrayOperand, evaluate, sample_arrays

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def _wide() -> Any:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def near(got: Any, want: Any, ulps: float = 8) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    dtype = dtypes.as_dtype(got.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want)
        return
    tolerance = ulps * dtypes.finfo(dtype).eps
    a, b = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# --- primitives -----------------------------------------------------------------------

RECORDS = {r.name: r for r in vars(reducers).values() if isinstance(r, OpDef)}
CASES = [
    pytest.param(record, sample, dtype, id=f"{name}-{i}-{dtype}")
    for name, record in sorted(RECORDS.items())
    for i, sample in enumerate(record.samples)
    for dtype in sample.dtypes
]


@pytest.mark.parametrize(("record", "sample", "dtype"), CASES)
def test_lowering_means_what_numpy_does_at_the_ends(
    record: OpDef, sample: Sample, dtype: DType
) -> None:
    arrays = sample_arrays(sample, dtype)
    if dtype.is_float:
        for value, at in ((np.nan, 1), (np.inf, 2), (-np.inf, 3), (np.nan, 5)):
            arrays[0].reshape(-1)[at : at + 1] = value
    types = [TensorType(dtypes.as_dtype(a.dtype), a.shape) for a in arrays]
    [inferred] = record.result_types(types, sample.params)
    result = record.run(*arrays, **sample.params)
    assert (result.dtype, result.shape) == (inferred.dtype.dtype, inferred.shape)
    [lowered] = evaluate(record, arrays, **sample.params)
    near(lowered, result, 4)


def test_reductions_of_symbolic_sizes() -> None:
    n = symbol("n")
    [symbol_] = free_symbols(n)
    x = np.arange(12.0).reshape(3, 4)
    operand = ArrayOperand(x, TensorType(dtypes.float64, (n, 4)))
    assert str(reducers.reduce_sum.infer(operand.type, axes=(1,))) == "f64[n]"
    [total] = evaluate(reducers.reduce_sum, [operand], {symbol_: 3}, axes=(0,))
    near(total, x.sum(0))


def test_primitives_refuse_what_is_no_axis() -> None:
    x = TensorType(dtypes.float32, (2, 3))
    for axes in ((-1,), (2,), (0, 0)):
        with pytest.raises(AxisError):
            reducers.reduce_sum.infer(x, axes=axes)
    with pytest.raises(DTypeError, match="operands must be bools"):
        reducers.reduce_and.infer(x, axes=(0,))
    with pytest.raises(ArgumentTypeError, match="`reverse` must be a bool"):
        reducers.cumsum.infer(x, axis=0, reverse=1)


# --- against JAX ----------------------------------------------------------------------

Reduce = Callable[..., Any]
SOME = (dtypes.bool_, dtypes.int8, dtypes.uint16, dtypes.int64, *dtypes.FLOATS)
PLAIN: dict[str, tuple[Reduce, Reduce, tuple[DType, ...]]] = {
    "sum": (hf.sum, jnp.sum, SOME),
    "prod": (hf.prod, jnp.prod, SOME),
    "max": (hf.max, jnp.max, SOME),
    "min": (hf.min, jnp.min, SOME),
    "all": (hf.all, jnp.all, SOME),
    "any": (hf.any, jnp.any, SOME),
    "count_nonzero": (hf.count_nonzero, jnp.count_nonzero, SOME),
    "mean": (hf.mean, jnp.mean, dtypes.FLOATS),
    "var": (hf.var, jnp.var, dtypes.FLOATS),
    "std": (hf.std, jnp.std, dtypes.FLOATS),
    "logsumexp": (hf.logsumexp, jax.scipy.special.logsumexp, dtypes.FLOATS),
}


def values(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return np.asarray(rng.uniform(-2, 2, shape)).astype(dtype.dtype)
    high = 2 if dtype.kind == "b" else 5
    low = -4 if dtype.kind == "i" else 0
    return np.asarray(rng.integers(low, high, shape)).astype(dtype.dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_reductions_are_those_of_jax(name: str) -> None:
    ours, theirs, kinds = PLAIN[name]
    axes = (None, -1, (0, 2), ())
    for dtype, axis, keepdims in in_turn(kinds, axes, of=[False, True]):
        x = values((2, 3, 4), dtype)
        want = theirs(x, axis=axis, keepdims=keepdims)
        near(ours(asarray(x), axis, keepdims=keepdims), want, 16)


@pytest.mark.parametrize("name", PLAIN)
def test_reductions_at_the_ends_are_those_of_jax(name: str) -> None:
    ours, theirs, _ = PLAIN[name]
    x = np.asarray(
        [[1, 2, np.nan], [np.inf, 0, 1], [np.inf, -np.inf, 1], [-np.inf] * 3],
        np.float32,
    )
    near(ours(asarray(x), axis=1), theirs(x, axis=1))


@pytest.mark.parametrize(
    "name", [n for n in PLAIN if n not in ("max", "min", "logsumexp")]
)
def test_reductions_of_nothing_are_those_of_jax(name: str) -> None:
    ours, theirs, _ = PLAIN[name]
    for x in (np.zeros((0,), np.float32), np.zeros((3, 0), np.float32)):
        near(ours(asarray(x), axis=-1), theirs(x, axis=-1))
        near(ours(asarray(x)), theirs(x))


@pytest.mark.parametrize("name", PLAIN)
def test_reductions_without_axes_and_of_numbers(name: str) -> None:
    ours, theirs, _ = PLAIN[name]
    x = np.asarray(1.5, np.float32)
    near(ours(asarray(x)), theirs(x))
    near(ours(1.5), theirs(x))


def test_integers_get_the_standard_dtypes() -> None:
    for dtype in dtypes.ALL:
        wide = dtypes.uint64 if dtype.kind == "u" else dtypes.int64
        want = dtype if dtype.is_float else wide
        x = asarray(values((3,), dtype))
        for function in (hf.sum, hf.prod, hf.cumulative_sum, hf.cumulative_prod):
            assert function(x).type.dtype is want
        assert hf.max(x).type.dtype is dtype
        mean = dtype if dtype.is_float else dtypes.float32
        assert hf.mean(x).type.dtype is mean


def test_a_dtype_is_taken_before_summing() -> None:
    x = np.full(300, 1, np.int8)
    near(hf.sum(asarray(x), dtype="i8"), np.asarray(44, np.int8))
    near(hf.sum(asarray(x), dtype="f32"), np.asarray(300, np.float32))
    near(hf.prod(asarray([1.5, 2.5]), dtype="i32"), np.asarray(2, np.int32))


def test_sums_of_half_floats_do_not_lose_small_addends() -> None:
    for dtype in (dtypes.float16, dtypes.bfloat16):
        x = np.full(4096, 0.5).astype(dtype.dtype)
        near(hf.sum(asarray(x)), np.asarray(2048).astype(dtype.dtype), 0)
        near(hf.mean(asarray(x)), np.asarray(0.5).astype(dtype.dtype), 0)
        last = np.asarray(hf.cumulative_sum(asarray(x)))[-1]
        assert float(last) == 2048
        [lowered] = evaluate(reducers.reduce_sum, [x], axes=(0,))
        assert float(lowered) == 2048


@pytest.mark.parametrize("correction", [0, 1, 0.5, 3, 4])
def test_corrections_are_those_of_jax(correction: float) -> None:
    x = values((2, 3), dtypes.float64)
    for ours, theirs in ((hf.var, jnp.var), (hf.std, jnp.std)):
        got = ours(asarray(x), axis=1, correction=correction)
        near(got, theirs(x, axis=1, correction=correction))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_are_those_of_jax(name: str) -> None:
    ours, theirs = getattr(hf, name), getattr(jnp, name)
    axes = (None, 0, 1, -1)
    for dtype, axis, keepdims in in_turn(dtypes.ALL, axes, of=[False, True]):
        x = values((3, 5), dtype)
        if dtype.is_float:
            x[1, 2] = x[1, 4] = np.nan
            x[2] = -np.inf
        want = theirs(x, axis=axis, keepdims=keepdims)
        near(ours(asarray(x), axis, keepdims=keepdims), want)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_totals_are_those_of_jax(dtype: DType, axis: int) -> None:
    x = values((3, 5), dtype)
    pairs: list[tuple[Reduce, Reduce]] = [
        (hf.cumulative_sum, jnp.cumulative_sum),
        (hf.cumulative_prod, jnp.cumulative_prod),
    ]
    for ours, theirs in pairs:
        for initial in (False, True):
            options: Any = {"axis": axis, "include_initial": initial}
            # The standard's dtypes: `jnp.cumulative_prod` keeps small integers.
            got = ours(asarray(x), **options)
            near(got, theirs(x, dtype=got.type.dtype.dtype, **options), 16)
    if dtype.kind != "b":
        near(hf.cummax(asarray(x), axis=axis), np.maximum.accumulate(x, axis))
        near(hf.cummin(asarray(x), axis=axis), np.minimum.accumulate(x, axis))


def test_running_totals_of_one_axis_need_no_axis() -> None:
    x = np.asarray([1, 2, 3])
    near(hf.cumulative_sum(asarray(x)), np.cumsum(x))
    near(hf.cumulative_sum(asarray(x[:0]), include_initial=True), np.asarray([0]))


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_differences_are_those_of_jax(n: int) -> None:
    for dtype in (dtypes.float32, dtypes.uint8, dtypes.bool_):
        x = values((3, 4), dtype)
        for axis in (0, -1):
            near(hf.diff(asarray(x), axis=axis, n=n), jnp.diff(x, n=n, axis=axis))
    x = values((3, 4), dtypes.float32)
    got = hf.diff(asarray(x), prepend=1.0, append=asarray(x[:, :2]), n=n)
    near(got, jnp.diff(x, n=n, prepend=np.float32(1), append=x[:, :2]))


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_and_any_axes(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4).map(tuple))
    axes = (
        st.lists(st.integers(0, len(shape) - 1), unique=True) if shape else st.just([])
    )
    axis = data.draw(st.none() | axes.map(tuple))
    keepdims = data.draw(st.booleans())
    x = values(shape, dtypes.float64)
    near(
        hf.sum(asarray(x), axis, keepdims=keepdims),
        np.asarray(np.sum(x, axis=axis, keepdims=keepdims)),
    )
    test = x > 0
    near(
        hf.all(asarray(test), axis, keepdims=keepdims),
        np.asarray(np.all(test, axis=axis, keepdims=keepdims)),
    )


def test_a_reduction_over_no_axis_is_a_copy() -> None:
    x = asarray(np.ones(2))
    for function in (hf.sum, hf.max, hf.prod):
        assert function(x, axis=()) is not x


# --- errors ---------------------------------------------------------------------------

X = np.zeros((2, 3), np.float32)
NO: Any = "1"
EMPTY = np.zeros((2, 0), np.float32)
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: hf.sum(X, axis=2), AxisError, "sum: `axis` is 2, and a tensor of rank 2"),
    (lambda: hf.sum(X, axis=(0, -2)), AxisError, "sum: `axis` .* names an axis twice"),
    (lambda: hf.sum(1.0, axis=0), AxisError, "of rank 0 has no axes"),
    (lambda: hf.mean(X, axis=1.0), ArgumentTypeError, "mean: `axis` must be an int"),
    (lambda: hf.any(X, axis=True), ArgumentTypeError, "any: `axis` must be an int"),
    (lambda: hf.sum("no"), ArgumentTypeError, "sum: argument 0 must be a tensor"),
    (lambda: hf.max(EMPTY), ShapeError, "reduce_max: axis 1 of f32\\[2, 0\\] has no"),
    (lambda: hf.min(EMPTY, axis=1), ShapeError, "reduce_min: axis 1"),
    (lambda: hf.argmax(EMPTY, axis=1), ShapeError, "argmax: axis 1"),
    (lambda: hf.argmin(EMPTY), ShapeError, "argmin: axis 0"),
    (lambda: reducers.reduce_find(X, X, axis=0), ShapeError, "must have all axes of"),
    (
        lambda: hf.var(X, correction=NO),
        ArgumentTypeError,
        "`correction` must be",
    ),
    (lambda: hf.cumulative_sum(X), ArgumentValueError, "`axis` may only be left out"),
    (
        lambda: hf.cumulative_prod(1.0, axis=0),
        AxisError,
        "`axis` is 0, and",
    ),
    (lambda: hf.sum(X, dtype="complex64"), DTypeError, "complex"),
    (lambda: hf.diff(X, n=-1), ArgumentValueError, "diff: `n` must be 0 or more"),
    (lambda: hf.diff(1.0), AxisError, "diff: `axis` is -1"),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), ERRORS, ids=[t for _, _, t in ERRORS]
)
def test_wrong_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_maximum_of_an_empty_tensor_over_another_axis_is_empty() -> None:
    assert hf.max(EMPTY, axis=0).shape == (0,)


@pytest.mark.parametrize("correction", [True, "1", None])
def test_a_correction_is_a_number(correction: Any) -> None:
    for f in (hf.std, hf.var):
        with pytest.raises(ArgumentTypeError, match="`correction` must be a number"):
            f(asarray([1.0, 2.0]), correction=correction)
