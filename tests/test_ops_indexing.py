"""`x[key]` for reading and writing, gather and scatter, dynamic slices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hopflow as hf
from hopflow import dtypes
from hopflow.bind import Value
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DTypeError,
    IndexingError,
    ShapeError,
    TraceError,
)
from hopflow.graph.core import Graph
from hopflow.graph.types import TensorType, same_shape, same_size
from hopflow.ops import dynamic, gather, indexing, scatter
from hopflow.ops.index_plan import Dynamic, Span, parse_index
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.symbolic.size import free_symbols, sym_min, symbol
from hopflow.tensor import asarray
from hopflow.testing.kernels import ArrayOperand, KernelTrap, evaluate
from hopflow.trace.tracer import Tracer, trace_into

pytestmark = pytest.mark.slow


def grid(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32)


def i8(values: Any) -> Any:
    return np.asarray(values, np.int8)


def agree(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide = np.float64 if found.dtype.kind not in "biu" else found.dtype
    np.testing.assert_array_equal(found.astype(wide), expected.astype(wide))


# --- keys, against NumPy --------------------------------------------------------------


@st.composite
def keys(draw: Any, shape: tuple[int, ...], *, masks: bool = True) -> tuple[Any, ...]:
    """A key for an array of this shape, as NumPy takes it."""
    lengths = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 1), (2, 3)]))
    items: list[Any] = []
    axis, dots = 0, False
    while axis < len(shape):
        n = shape[axis]
        kinds = ["slice", "slice", "none"]
        kinds += ["int", "array", "scalar"] if n else []
        kinds += ["mask"] if masks else []
        kinds += ["dots"] if not dots else []
        kind = draw(st.sampled_from(kinds))
        if kind == "none":
            items.append(None)
            continue
        if kind == "dots":
            dots = True
            items.append(...)
            axis += draw(st.integers(0, len(shape) - axis))
            continue
        if kind == "mask":
            wide = draw(st.integers(1, len(shape) - axis))
            part = shape[axis : axis + wide]
            bits = draw(st.lists(st.booleans(), min_size=0, max_size=6))
            mask = np.zeros(int(np.prod(part)), bool)
            mask[: len(bits)] = bits[: mask.size]
            items.append(mask.reshape(part))
            axis += wide
            continue
        position = st.integers(-n, n - 1)
        if kind == "slice":
            bound = st.none() | st.integers(-n - 2, n + 2)
            step = st.none() | st.sampled_from([1, 2, 3, -1, -2, -4])
            items.append(slice(draw(bound), draw(bound), draw(step)))
        elif kind == "int":
            items.append(draw(position))
        elif kind == "scalar":
            items.append(np.asarray(draw(position)))
        else:
            size = int(np.prod(lengths))
            values = draw(st.lists(position, min_size=size, max_size=size))
            items.append(
                np.asarray(values, draw(st.sampled_from([np.int64, np.int8]))).reshape(
                    lengths
                )
            )
        axis += 1
        if axis < len(shape) and draw(st.integers(0, 4)) == 0:
            break
    return tuple(items)


def ours(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(asarray(k) if isinstance(k, np.ndarray) else k for k in key)


@st.composite
def shapes_and_keys(
    draw: Any, masks: bool = True
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple))
    return shape, draw(keys(shape, masks=masks))


@settings(max_examples=250)
@given(shapes_and_keys())
def test_reading_gives_what_numpy_gives(case: Any) -> None:
    shape, key = case
    x = grid(*shape)
    try:
        expected = x[key]
    except IndexError:  # index arrays that do not broadcast
        with pytest.raises((IndexingError, ShapeError)):
            indexing.getitem(asarray(x), ours(key))
        return
    found = indexing.getitem(asarray(x), ours(key))
    agree(found, expected)
    assert found.shape == expected.shape


@settings(max_examples=250)
@given(shapes_and_keys(), st.data())
def test_writing_gives_what_numpy_gives(case: Any, data: Any) -> None:
    shape, key = case
    expected = grid(*shape)
    try:
        place = expected[key].shape
    except IndexError:
        return
    # A value of the shape of the place, or of one that broadcasts to it.
    kept = data.draw(st.integers(0, len(place)))
    sizes = [data.draw(st.sampled_from([1, n])) for n in place[len(place) - kept :]]
    value = 100 + grid(*sizes)
    expected[key] = value
    before = grid(*shape)
    x = asarray(before)
    found = indexing.set_at(x, ours(key), asarray(value))
    agree(found, expected)
    agree(x, grid(*shape))  # nothing was written into `x` itself


@given(shapes_and_keys(masks=False), st.sampled_from(["add", "mul", "min", "max"]))
def test_updates_count_every_repeated_index(case: Any, combine: Any) -> None:
    shape, key = case
    expected = grid(*shape)
    try:
        place = expected[key].shape
    except IndexError:
        return
    value = 3 - grid(*place)
    scatter.COMBINES[combine].at(expected, key, value)
    at = indexing.Updater(asarray(grid(*shape)))[ours(key)]
    agree(getattr(at, combine)(asarray(value)), expected)
    agree(at.get(), grid(*shape)[key])


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_every_dtype_is_read_and_written(dtype: dtypes.DType) -> None:
    x = np.asarray([[0, 1, 2], [3, 4, 5]]).astype(dtype.dtype)
    t = asarray(x)
    agree(indexing.getitem(t, (slice(None), [2, 0])), x[:, [2, 0]])
    expected = x.copy()
    expected[0, 1:] = x[1, :2]
    agree(indexing.set_at(t, (0, slice(1, None)), asarray(x[1, :2])), expected)
    expected = x.copy()
    expected[x != 0] = 1
    agree(indexing.set_at(t, asarray(x != 0), 1), expected)
    added = jnp.asarray(x).at[jnp.asarray([0, 0]), 1].max(jnp.asarray(x[:, 2]))
    found = indexing.Updater(t)[asarray([0, 0]), 1].max(asarray(x[:, 2]))
    agree(found, np.asarray(added).astype(dtype.dtype))


WAYS = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.bool_])
@pytest.mark.parametrize("combine", WAYS)
@pytest.mark.parametrize(
    "key", [np.s_[1:-1, ::2], np.s_[::-1, 1], np.s_[2:2], np.s_[..., -3:], np.s_[1, 2]]
)
def test_slices_are_updated_as_numpy_does(key: Any, combine: str, dtype: Any) -> None:
    x = grid(4, 5, dtype=dtype)
    value = (np.arange(x[key].size) % 3).reshape(x[key].shape).astype(dtype)
    expected = x.copy()
    expected[key] = WAYS[combine](x[key], value)

    def f(x: Any, value: Any) -> Any:
        return getattr(x.at[key], combine)(value)

    agree(f(asarray(x), asarray(value)), expected)
    for symbolic in (False, True):
        agree(hf.jit(f, dynamic=symbolic)(x, value), expected)


@pytest.mark.parametrize("combine", WAYS)
def test_updates_of_slices_have_the_derivatives_of_jax(combine: str) -> None:
    rng = np.random.default_rng(0)
    x, value = rng.normal(size=(4, 5)), rng.normal(size=(2, 5))
    value[0, 0] = x[1, 0]  # a tie
    x[2, 3] = value[1, 2] = 0.0

    def loss(x: Any, value: Any) -> Any:
        y = getattr(x.at[1:3], combine)(value)
        return (y * y * (1 + x)).sum()

    found = hf.jit(hf.grad(loss, argnums=(0, 1)))(x, value)
    with jax.enable_x64(True):
        want = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(value))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12)


def test_an_update_of_a_slice_is_no_scatter() -> None:
    jitted = hf.jit(lambda x: x.at[1:-1, 2:].add(1.0))
    jitted(grid(9, 40))
    assert "vector" in jitted.loop_ir
    assert all(" independent" in s for s in jitted.loop_ir.splitlines() if " for " in s)


@pytest.mark.parametrize("combine", ["set", *WAYS])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_are_scattered_in_order_and_as_vectors(
    combine: str, dynamic: bool
) -> None:
    rng = np.random.default_rng(0)
    x, value = rng.normal(size=(6, 33)), rng.normal(size=(9, 33))
    at = np.array([0, 3, 3, -1, 5, 0, 3, 2, -6])

    def f(x: Any, at: Any, value: Any) -> Any:
        return getattr(x.at[at], combine)(value)

    expected = x.copy()
    for k, row in zip(at, value, strict=True):
        expected[k] = row if combine == "set" else WAYS[combine](expected[k], row)
    jitted = hf.jit(f, dynamic=dynamic)
    agree(jitted(x, at, value), expected)
    if not dynamic:
        assert "for i" in jitted.loop_ir
        assert "0..33 vector" in jitted.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_segments_that_are_none_are_dropped(dynamic: bool) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 20)).astype(np.float32)
    ids = np.array([0, -1, 2, 4, 2, 99, 0])
    expected = np.zeros((4, 20), np.float32)
    for k, row in zip(ids, rows, strict=True):
        if 0 <= k < 4:
            expected[k] += row
    jitted = hf.jit(lambda r, i: hf.segment_sum(r, i, 4), dynamic=dynamic)
    agree(jitted(rows, ids), expected)


def test_views_share_memory_and_arrays_do_not() -> None:
    x = asarray(grid(3, 4))
    for key in (0, slice(1), (..., None), (asarray(1), slice(None, None, -1))):
        found: Any = indexing.getitem(x, key)
        assert np.shares_memory(np.asarray(x), np.asarray(found))
    assert not np.shares_memory(np.asarray(x), np.asarray(indexing.getitem(x, [0])))


def test_bool_scalars_are_masks() -> None:
    x = asarray(grid(2, 3))
    for key in (True, False, (slice(None), True), (True, [0, 1]), (True, 0)):
        agree(indexing.getitem(x, key), grid(2, 3)[key])
    zero = np.asarray(5.0)
    agree(indexing.set_at(asarray(zero), asarray(True), 1.0), np.asarray(1.0))


def test_lists_are_arrays() -> None:
    x = asarray(grid(3, 2))
    agree(indexing.getitem(x, []), grid(3, 2)[[]])
    agree(indexing.getitem(x, [True, False, True]), grid(3, 2)[[True, False, True]])
    agree(indexing.getitem(x, [[0, 1], [2, 0]]), grid(3, 2)[[[0, 1], [2, 0]]])


def test_the_last_of_repeated_writes_stays() -> None:
    x = asarray(np.zeros(3, np.float32))
    found = indexing.set_at(x, [1, 1, 1], asarray(f32([1, 2, 3])))
    agree(found, f32([0, 3, 0]))


def test_values_are_cast_within_their_kind_or_to_a_larger() -> None:
    ints, floats = asarray(np.zeros(2, np.int8)), asarray(np.zeros(2, np.float32))
    agree(indexing.set_at(ints, 0, asarray(300)), i8([44, 0]))
    agree(indexing.set_at(floats, 0, np.float64(0.5)), f32([0.5, 0]))
    agree(indexing.set_at(floats, 0, True), f32([1, 0]))
    with pytest.raises(DTypeError, match=r"float32 cannot be written into .* int8"):
        indexing.set_at(ints, 0, 1.5)
    with pytest.raises(DTypeError, match=r"int64 cannot be written into .* uint8"):
        indexing.set_at(asarray(np.zeros(2, np.uint8)), 0, asarray(np.int64(1)))
    with pytest.raises(ArgumentRangeError, match="300 does not fit int8"):
        indexing.set_at(ints, 0, 300)
    with pytest.raises(ArgumentTypeError, match="setitem: argument 1"):
        indexing.set_at(ints, 0, "x")


BAD: list[tuple[Any, type[Exception], str]] = [
    (3, IndexingError, "3 is out of range for axis 0 of size 3"),
    ((0, -5), IndexingError, "-5 is out of range for axis 1 of size 4"),
    ((0, 0, 0), IndexingError, "has 2 axes, and the index names 3"),
    ((..., ...), IndexingError, "one `...`"),
    (1.5, IndexingError, "and is `float`"),
    ("a", IndexingError, "and is `str`"),
    (np.zeros(2), IndexingError, r"integers or bools, and is f64\[2\]"),
    ([[0], [1, 2]], IndexingError, "ragged"),
    ([asarray(1)], IndexingError, "list of tensors"),
    (slice(None, None, 0), IndexingError, "must not be 0"),
    (slice(1.5), IndexingError, "bounds of a slice .* `float`"),
    (np.zeros(2, bool), IndexingError, "mask of shape .2. does not fit axis 0"),
    (asarray(np.zeros((3, 4, 1), bool)), IndexingError, "names 3"),
    (asarray([5]), IndexingError, "index 5 is out of range for axis 0 of size 3"),
    (asarray([-4]), IndexingError, "index -4 is out of range"),
    (asarray(3), IndexingError, "index 3 is out of range"),
    (([0, 1], [0, 1, 2]), ShapeError, "do not broadcast"),
]


@pytest.mark.parametrize(("key", "error", "text"), BAD)
def test_wrong_keys_are_explained(key: Any, error: type[Exception], text: str) -> None:
    x = asarray(grid(3, 4))
    with pytest.raises(error, match=text):
        indexing.getitem(x, key)
    with pytest.raises(error, match=text):
        indexing.set_at(x, key, 0)


def test_a_value_must_fit_its_place() -> None:
    x = asarray(grid(3, 4))
    with pytest.raises(ShapeError, match=r"shape \[3\] does not fit .* shape \[4\]"):
        indexing.set_at(x, 0, grid(3))
    with pytest.raises(ShapeError, match="does not fit"):
        indexing.set_at(x, np.ones(3, bool), grid(2, 4))
    agree(
        indexing.set_at(x, 0, grid(1, 1, 4)),
        np.concatenate([grid(1, 4), grid(3, 4)[1:]]),
    )


# --- without values: traced masks, symbolic sizes -------------------------------------


class Traced(Value):
    """A value that has a type and no elements."""

    def __init__(self, dtype: dtypes.DType, *shape: Any) -> None:
        self._type = TensorType(dtype, shape)

    @property
    def type(self) -> TensorType:
        return self._type

    def _concrete(self, what: str) -> Any:
        raise TraceError(f"{what}() of a traced tensor")

    def item(self) -> int:
        raise TraceError("item() of a traced tensor")


def test_a_traced_mask_cannot_decide_a_size() -> None:
    mask = Traced(dtypes.bool_, 3)
    with pytest.raises(TraceError, match=r"boolean index: .* `hf.where\(mask"):
        indexing.getitem(asarray(grid(3)), mask)
    with pytest.raises(TraceError, match=r"boolean index: .* a scalar"):
        indexing.set_at(asarray(grid(3)), mask, grid(2))


def test_a_traced_bound_names_dynamic_slice() -> None:
    with pytest.raises(TraceError, match=r"use `hf.dynamic_slice`"):
        parse_index((4,), slice(Traced(dtypes.int64)))


def test_slices_of_symbolic_axes() -> None:
    n = symbol("n")
    for key, expected in [
        (slice(None), Span(0, 0, n, 1)),
        (slice(None, None, -1), Span(0, n - 1, n, -1)),
        (slice(0, n), Span(0, 0, n, 1)),
    ]:
        [found] = parse_index((n,), key).entries
        assert isinstance(found, Span)
        assert same_shape((found.start, found.size), (expected.start, expected.size))
        assert found.step == expected.step
    for key, size in [
        (slice(3), sym_min(3, n)),
        (slice(1, None), n - sym_min(1, n)),
        (slice(None, None, 2), (n + 1) // 2),
    ]:
        [found] = parse_index((n,), key).entries
        assert isinstance(found, Span)
        assert same_size(found.size, size), found
    [known] = parse_index((n + 4,), slice(3)).entries
    assert known == Span(0, 0, 3, 1)


def test_an_index_into_a_symbolic_axis_is_checked_at_run_time() -> None:
    n = symbol("n")
    for key in (0, -1, 5):
        [entry] = parse_index((n,), key).entries
        assert isinstance(entry, Dynamic)
    with pytest.raises(IndexingError, match="5 is out of range"):
        parse_index((5, n), 5)


# --- lowering: what traps, what clamps ------------------------------------------------


def test_an_index_out_of_range_traps() -> None:
    x, none = grid(4, 2), np.zeros(0, np.int64)
    cases: list[tuple[OpDef, dict[str, Any]]] = [
        (gather.gather, {"axes": (0,), "batch": 0}),
        (dynamic.dynamic_index, {"axes": (0,)}),
    ]
    for op, params in cases:
        assert op.effects == {"trap"}
        for bad in (4, -5):
            with pytest.raises(KernelTrap) as trap:
                evaluate(op, [x, np.asarray(bad)], **params)
            assert (trap.value.kind, trap.value.values) == ("index", (bad, 4))
            with pytest.raises(IndexingError, match=f"index {bad} is out of range"):
                op.run(x, np.asarray(bad), **params)
        [found] = evaluate(op, [x, np.asarray(-1, np.int8)], **params)
        agree(found, x[-1])
    [found] = evaluate(gather.gather, [grid(0, 2), none], axes=(0,), batch=0)
    agree(found, grid(0, 2))


def test_a_huge_unsigned_index_is_out_of_range() -> None:
    huge = np.asarray(2**64 - 1, np.uint64)
    with pytest.raises(KernelTrap):
        evaluate(gather.gather, [grid(4), huge], axes=(0,), batch=0)
    with pytest.raises(IndexingError):
        gather.gather.run(grid(4), huge, axes=(0,), batch=0)
    [found] = evaluate(gather.gather_clip, [grid(4), huge], axes=(0,), batch=0)
    agree(found, np.float32(3))


@pytest.mark.parametrize("i", [-9, -1, 0, 3, 4, 99])
def test_clip_takes_the_nearest_and_drop_leaves_out(i: int) -> None:
    at = np.asarray([i])
    for op in (gather.gather_clip,):
        expected = grid(4)[[np.clip(i, 0, 3)]]
        agree(op.run(grid(4), at, axes=(0,), batch=0), expected)
        agree(evaluate(op, [grid(4), at], axes=(0,), batch=0)[0], expected)
    params: dict[str, Any] = {"axes": (0,), "batch": 0, "starts": (), "steps": ()}
    one = np.ones(1, np.float32)
    expected = grid(4)
    if 0 <= i < 4:
        expected[i] += 1
    for found in (
        scatter.scatter_drop.run(grid(4), one, at, combine="add", **params),
        *evaluate(scatter.scatter_drop, [grid(4), one, at], combine="add", **params),
    ):
        agree(found, expected)


@pytest.mark.parametrize("start", [-9, -3, -1, 0, 2, 4, 99])
@pytest.mark.parametrize("dtype", [np.int64, np.int8])
def test_dynamic_slices_are_those_of_jax(start: int, dtype: Any) -> None:
    x, new = grid(5, 3), 100 + grid(2, 3)
    expected = jax.lax.dynamic_slice(x, (dtype(start), dtype(0)), (2, 3))
    starts = (asarray(np.asarray(start, dtype)), 0)
    agree(dynamic.dynamic_slice(asarray(x), starts, (2, 3)), expected)
    [found] = evaluate(
        OPERATIONS["dynamic_slice"],
        [x, np.asarray(start, dtype), np.asarray(0)],
        sizes=(2, 3),
    )
    agree(found, expected)
    updated = jax.lax.dynamic_update_slice(x, new, (dtype(start), dtype(0)))
    agree(dynamic.dynamic_update_slice(asarray(x), new, starts), updated)


def test_dynamic_slices_check_their_arguments() -> None:
    x = asarray(grid(5, 3))
    with pytest.raises(ShapeError, match="6 elements do not fit axis 0"):
        dynamic.dynamic_slice(x, (0, 0), (6, 1))
    with pytest.raises(ShapeError, match="needs 2 starts"):
        dynamic.dynamic_slice(x, (0,), (1, 1))
    with pytest.raises(DTypeError, match="index must be of an integer dtype"):
        dynamic.dynamic_slice(x, (0.5, 0), (1, 1))
    with pytest.raises(ShapeError, match="must be a scalar"):
        dynamic.dynamic_slice(x, (asarray([0]), 0), (1, 1))
    with pytest.raises(ArgumentTypeError, match=r"hf\.unstack"):
        dynamic.dynamic_slice(x, asarray([0, 0]), (1, 1))
    with pytest.raises(ShapeError, match="`update` must have rank 2"):
        dynamic.dynamic_update_slice(x, grid(3), (0, 0))


def test_views_at_scalars_are_written_back() -> None:
    x, i = asarray(grid(4, 3)), asarray(-2)
    cases: list[tuple[OpDef, Any, dict[str, Any]]] = [
        (dynamic.dynamic_index, (i,), {"axes": (0,)}),
        (OPERATIONS["dynamic_slice"], (i, asarray(1)), {"sizes": (2, 2)}),
    ]
    for op, others, params in cases:
        assert op.unview is not None
        new = asarray(np.asarray(op(x, *others, **params)) + 100)
        agree(op(op.unview(x, new, *others, **params), *others, **params), new)


def test_symbolic_axes_are_indexed() -> None:
    n = symbol("n")
    [bound] = free_symbols(n)
    x = ArrayOperand(grid(4), TensorType(dtypes.float32, (n,)))
    at = np.asarray([-1, 0])
    [found] = evaluate(gather.gather, [x, at], {bound: 4}, axes=(0,), batch=0)
    agree(found, f32([3, 0]))
    with pytest.raises(KernelTrap):
        evaluate(gather.gather, [x, np.asarray([4])], {bound: 4}, axes=(0,), batch=0)


# --- take, segments -------------------------------------------------------------------


def test_take_is_that_of_numpy() -> None:
    x, at = grid(3, 4), np.asarray([[0, -1], [2, 1]], np.int64)
    for axis in (0, 1, -1, None):
        agree(indexing.take(asarray(x), asarray(at), axis=axis), np.take(x, at, axis))
    agree(indexing.take(x, [5, -5], axis=0, mode="clip"), x[[2, 0]])
    with pytest.raises(ArgumentValueError, match="`mode` must be"):
        indexing.take(x, [0], axis=0, mode="wrap")  # type: ignore[arg-type]
    with pytest.raises(IndexingError, match="`indices` must be integers"):
        indexing.take(x, [0.5], axis=0)
    with pytest.raises(AxisError, match="take: `axis` is 2"):
        indexing.take(x, [0], axis=2)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along_axis_is_that_of_numpy(axis: int) -> None:
    x = np.random.default_rng(0).random((3, 4, 2))
    order: Any = np.argsort(x, axis=axis)
    found = indexing.take_along_axis(asarray(x), asarray(order), axis=axis)
    agree(found, np.take_along_axis(x, order, axis))
    with pytest.raises(ShapeError, match="must have the 3 axes"):
        indexing.take_along_axis(asarray(x), [0], axis=axis)


def test_segment_sum_is_that_of_jax() -> None:
    data, ids = grid(5, 2), np.asarray([2, 0, -1, 2, 7])
    expected = jax.ops.segment_sum(data, ids, 3)
    agree(scatter.segment_sum(data, ids, 3), expected)
    whole = np.asarray([1, 0, 0, 1, 1])
    agree(scatter.segment_sum(data, whole), jax.ops.segment_sum(data, whole, 2))
    with pytest.raises(ShapeError, match="a number for each row"):
        scatter.segment_sum(data, np.zeros(1, int), 1)
    with pytest.raises(DTypeError, match="integer dtype"):
        scatter.segment_sum(data, np.zeros(5), 1)


def test_one_hot_is_that_of_jax() -> None:
    at = np.asarray([[0, 2], [-1, 3]])
    for axis in (-1, 0, 1):
        expected = jax.nn.one_hot(at, 3, axis=axis)
        agree(scatter.one_hot(asarray(at), 3, axis=axis), expected)
    found = scatter.one_hot(i8([1]), 300, dtype=dtypes.int8)
    assert found.shape == (1, 300)
    assert int(np.asarray(found).sum()) == 1


# --- traced ---------------------------------------------------------------------------


MATRIX = TensorType(dtypes.float32, (4, 3))


def graph_of(fn: Any, *types: TensorType) -> Graph:
    tracer = Tracer(None, "f")
    args = [tracer.operand(t, f"x{i}") for i, t in enumerate(types)]
    result = trace_into(tracer, fn, args)
    tracer.graph.outputs = (tracer.read(tracer.localize(result)),)
    return tracer.graph


def calls(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes]


def test_a_write_at_a_traced_index_is_one_scatter() -> None:
    def body(x: Any, i: Any) -> Any:
        x[i, 1:] = 5.0
        return x

    graph = graph_of(body, MATRIX, TensorType(dtypes.int64))
    assert calls(graph) == ["full", "scatter"]
    assert graph.nodes[1].params["starts"] == (1,)


def test_a_write_under_a_mask_is_one_where() -> None:
    def body(x: Any) -> Any:
        x[x > 0] = 0
        return x

    assert calls(graph_of(body, MATRIX)) == ["greater", "where"]


def test_ends_of_a_symbolic_axis_are_indexed_at_run_time() -> None:
    graph = graph_of(lambda x: x[0] + x[-1], MATRIX.with_shape((symbol("n"), 3)))
    assert calls(graph) == ["dynamic_index", "dynamic_index", "add"]


@pytest.mark.parametrize("position", [2**63, 2**64 - 1])
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("mode", ["eager", "jit", "debug"])
def test_a_u64_beyond_i64_is_no_position(
    mode: str, shape: tuple[int, ...], position: int
) -> None:
    def write(x: Any, i: Any) -> Any:
        x[i] = 9.0
        return x

    def run(f: Any, *args: Any) -> Any:
        if mode == "debug":
            with hf.debug():
                return f(*args)
        return (hf.jit(f) if mode == "jit" else f)(*args)

    i = hf.full(shape, position, dtype="uint64")
    x = hf.ones(3)
    for f in (write, lambda x, i: x[i]):
        with pytest.raises(IndexingError, match=f"index {position} is out of range"):
            run(f, x, i)
    assert x.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, i, j: x[i, j],
        lambda x, i, j: x[i[0], j[0]],
        lambda x, i, j: x.at[i, j].set(1.0),
        lambda x, i, j: hf.vmap(lambda r, c: x[r, c])(i, j),
    ],
)
def test_of_several_indices_the_one_out_of_range_is_named(f: Any, where: int) -> None:
    x, i = hf.ones((3, 4)), hf.asarray([1, 0])
    args = [i, i]
    args[where] = hf.asarray([7, 0])
    for run in (f, hf.jit(f), hf.jit(f, dynamic=True)):
        with pytest.raises(IndexingError, match=f"index 7 .* of size {(3, 4)[where]}"):
            run(x, *args)
