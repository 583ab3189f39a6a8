"""Views, joining and the standard's manipulation functions."""

from typing import Any

import numpy as np
import pytest

from hopflow import dtypes
from hopflow.bind import Value, bind
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DataDependentError,
    DTypeError,
    IndexingError,
    ReadOnlyError,
    ShapeError,
    TraceError,
)
from hopflow.graph.types import TensorType, same_shape
from hopflow.loop_ir.expr import index
from hopflow.ops import joining, manipulation, views
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.symbolic.size import free_symbols, symbol
from hopflow.tensor import asarray
from hopflow.testing.kernels import ArrayOperand, evaluate, sample_arrays

pytestmark = pytest.mark.slow


def numpy(x: Any) -> Any:
    return np.asarray(x)


def grid(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def f32(values: Any) -> Any:
    return np.asarray(values, np.float32)


def f64(values: Any) -> Any:
    return np.asarray(values, np.float64)


def i8(values: Any) -> Any:
    return np.asarray(values, np.int8)


def agree(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide = np.float64 if found.dtype.kind not in "biu" else found.dtype
    np.testing.assert_array_equal(found.astype(wide), expected.astype(wide))


VIEWS = [op for op in OPERATIONS.values() if op.unview]


@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_unview_writes_what_the_view_then_reads(op: OpDef) -> None:
    assert op.unview is not None
    for sample in op.samples:
        base, *rest = map(asarray, sample_arrays(sample, dtypes.float32))
        new = asarray(np.asarray(op(base, *rest, **sample.params)) + 100)
        try:
            written = op.unview(base, new, *rest, **sample.params)
        except ReadOnlyError:
            assert new.size != base.size  # each element of it is any number of times
            continue
        agree(op(written, *rest, **sample.params), new)
        assert np.sum(numpy(written) > 50) == new.size


def test_a_broadcast_cannot_be_written() -> None:
    x = asarray(grid(3))
    assert views.broadcast_to.unview is not None
    with pytest.raises(ReadOnlyError, match=r"from \[3\] to \[2, 3\]"):
        views.broadcast_to.unview(x, x, shape=(2, 3))


# --- reshape --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "old", "groups"),
    [
        ((6, 1, 4), (2, 3, 4), [((0,), (0, 1)), ((2,), (2,))]),
        ((1, 5, 1), (5,), [((1,), (0,))]),
        ((4, 6), (6, 4), [((0, 1), (0, 1))]),
        ((2, 3, 5), (2, 3, 5), [((0,), (0,)), ((1,), (1,)), ((2,), (2,))]),
        ((), (1, 1), []),
    ],
)
def test_only_axes_that_change_are_merged_or_split(
    new: Any, old: Any, groups: Any
) -> None:
    assert views.reshape_groups(new, old) == groups


def test_axes_of_size_one_cost_no_arithmetic() -> None:
    x = ArrayOperand(grid(3, 4))
    kernel: Any = views.reshape.lower((), x, shape=(1, 3, 1, 4))
    at = tuple(index(n) for n in (0, 2, 0, 3))
    assert [e.attr for e in kernel.element(at).args] == [2, 3]
    assert kernel.is_view


def test_symbolic_sizes_group_by_what_is_provably_equal() -> None:
    n, m = symbol("n"), symbol("m")
    groups = views.reshape_groups((n * m, 4, 1), (n, m, 2, 2))
    assert groups == [((0,), (0, 1)), ((1,), (2, 3))]


def test_axes_not_known_to_be_equal_are_one_group_with_all_that_follow() -> None:
    n, m = symbol("n"), symbol("m")  # one size under two names
    assert views.reshape_groups((n, 1, 4), (m, 4)) == [((0, 2), (0, 1))]
    assert views.reshape_groups((3, n), (3, m)) == [((0,), (0,)), ((1,), (1,))]
    assert views.reshape_groups((n,), (1, 1)) == views.reshape_groups((1,), (m,)) == []


def test_lowering_reads_symbolic_sizes_at_run_time() -> None:
    n = symbol("n")
    [bound] = free_symbols(n)
    type_ = TensorType(dtypes.float32, (n, 2, 3))
    x = ArrayOperand(grid(5, 2, 3), type_)
    [found] = evaluate(views.reshape, [x], {bound: 5}, shape=(2 * n, 3))
    agree(found, grid(10, 3))
    [found] = evaluate(joining._roll, [x, np.asarray(3)], {bound: 5}, axis=0)
    agree(found, np.roll(grid(5, 2, 3), 3, 0))
    [found] = evaluate(joining.concat_op, [x, x], {bound: 5}, axis=0)
    agree(found, np.concatenate([grid(5, 2, 3)] * 2))


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((2, 6), (-1,), (12,)),
        ((2, 6), (3, -1), (3, 4)),
        ((0, 3), (-1, 3), (0, 3)),
        ((), (-1,), (1,)),
        ((4,), 4, (4,)),
    ],
)
def test_minus_one_stands_for_what_is_left(
    shape: Any, given: Any, expected: Any
) -> None:
    x = grid(*shape)
    agree(manipulation.reshape(asarray(x), given), x.reshape(expected))


def test_minus_one_divides_symbols() -> None:
    n, m = symbol("n"), symbol("m")

    def missing(shape: Any, known: Any) -> Any:
        return manipulation._missing(shape, known)

    assert same_shape((missing((n, 4), [2]),), (2 * n,))
    assert same_shape((missing((n, m), [m]),), (n,))
    assert same_shape((missing((n + 1, 4), [n + 1]),), (4,))
    assert same_shape((missing((2 * n, m), [n]),), (2 * m,))
    assert missing((n,), [0]) is None
    with pytest.raises(DataDependentError, match="n % 4 == 0"):
        missing((n,), [4])
    with pytest.raises(DataDependentError, match=r"m % \(n \+ 1\) == 0"):
        missing((m,), [n + 1])


def test_reshape_says_what_does_not_fit() -> None:
    x = asarray(grid(2, 3))
    with pytest.raises(ShapeError, match=r"has 6 elements, and `shape` \[4\] has 4"):
        manipulation.reshape(x, (4,))
    with pytest.raises(ShapeError, match="only one size may be -1"):
        manipulation.reshape(x, (-1, -1))
    with pytest.raises(ShapeError, match="no size fits the -1"):
        manipulation.reshape(x, (4, -1))
    with pytest.raises(ShapeError, match="no size fits the -1"):
        manipulation.reshape(asarray(grid(0)), (0, -1))
    with pytest.raises(ArgumentTypeError, match="`shape` must be an int"):
        manipulation.reshape(x, ("a",))


def test_reshape_shares_memory_or_copies() -> None:
    x: Any = asarray(grid(2, 3))
    assert np.shares_memory(numpy(x), numpy(manipulation.reshape(x, (6,))))
    assert not np.shares_memory(
        numpy(x), numpy(manipulation.reshape(x, (6,), copy=True))
    )
    manipulation.reshape(x, (6,), copy=False)
    with pytest.raises(ArgumentValueError, match="`copy` is False"):
        manipulation.reshape(manipulation.permute_dims(x, (1, 0)), (6,), copy=False)


# --- the rest against NumPy -----------------------------------------------------------

X = grid(2, 3, 4)
SAME: list[tuple[Any, Any]] = [
    (lambda x: manipulation.permute_dims(x, (2, 0, 1)), X.transpose(2, 0, 1)),
    (lambda x: manipulation.permute_dims(x, (-1, 0, 1)), X.transpose(2, 0, 1)),
    (lambda x: manipulation.moveaxis(x, 0, -1), np.moveaxis(X, 0, -1)),
    (
        lambda x: manipulation.moveaxis(x, (0, 1), (2, 0)),
        np.moveaxis(X, (0, 1), (2, 0)),
    ),
    (lambda x: manipulation.swapaxes(x, 0, -1), X.swapaxes(0, -1)),
    (
        lambda x: manipulation.broadcast_to(x, (5, 2, 3, 4)),
        np.broadcast_to(X, (5, 2, 3, 4)),
    ),
    (lambda x: manipulation.expand_dims(x, axis=-1), X[..., None]),
    (lambda x: manipulation.expand_dims(x, axis=(0, 2)), np.expand_dims(X, (0, 2))),
    (lambda x: manipulation.flip(x), np.flip(X)),
    (lambda x: manipulation.flip(x, axis=(0, -1)), np.flip(X, (0, -1))),
    (lambda x: manipulation.roll(x, 5), np.roll(X, 5)),
    (lambda x: manipulation.roll(x, (1, -2), axis=(0, 2)), np.roll(X, (1, -2), (0, 2))),
    (lambda x: manipulation.roll(x, 1, axis=(0, 1)), np.roll(X, 1, (0, 1))),
    (
        lambda x: manipulation.concat([x, x[:, :1]], axis=1),
        np.concatenate([X, X[:, :1]], 1),
    ),
    (
        lambda x: manipulation.concat([x, x[0]], axis=None),
        np.concatenate([X, X[0]], None),
    ),
    (lambda x: manipulation.stack([x, x], axis=-1), np.stack([X, X], -1)),
    (lambda x: manipulation.tile(x, (2,)), np.tile(X, (2,))),
    (lambda x: manipulation.tile(x, (2, 1, 3, 2)), np.tile(X, (2, 1, 3, 2))),
    (lambda x: manipulation.repeat(x, 2), np.repeat(X, 2)),
    (lambda x: manipulation.repeat(x, 3, axis=1), np.repeat(X, 3, 1)),
    (lambda x: manipulation.repeat(x, (0, 2, 1), axis=1), np.repeat(X, (0, 2, 1), 1)),
    (lambda x: manipulation.repeat(x, asarray([2]), axis=1), np.repeat(X, 2, 1)),
    (lambda x: manipulation.pad(x, 1), np.pad(X, 1)),
    (
        lambda x: manipulation.pad(x, (1, 2), constant_values=7),
        np.pad(X, (1, 2), constant_values=7),
    ),
    (
        lambda x: manipulation.pad(x, ((1, 0), (0, 0), (2, 1))),
        np.pad(X, ((1, 0), (0, 0), (2, 1))),
    ),
    (lambda x: manipulation.ravel(x), X.ravel()),
]


@pytest.mark.parametrize(("call", "expected"), SAME)
def test_functions_give_what_numpy_gives(call: Any, expected: Any) -> None:
    agree(call(asarray(X)), expected)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_every_dtype_moves_unchanged(dtype: dtypes.DType) -> None:
    x = np.asarray([[0, 1, 2], [3, 4, 5]]).astype(dtype.dtype)
    t = asarray(x)
    agree(manipulation.concat([t, t], axis=1), np.concatenate([x, x], 1))
    agree(manipulation.roll(t, 1, axis=0), np.roll(x, 1, 0))
    agree(manipulation.pad(t, 1), np.pad(x, 1))
    agree(manipulation.flip(t), np.flip(x))
    agree(manipulation.tile(t, (2, 2)), np.tile(x, (2, 2)))


def test_empty_and_scalar_tensors() -> None:
    empty = asarray(grid(0, 3))
    agree(manipulation.flip(empty), grid(0, 3))
    agree(manipulation.roll(empty, 2, axis=0), grid(0, 3))
    agree(manipulation.repeat(empty, 2, axis=1), grid(0, 6))
    agree(manipulation.concat([empty, asarray(grid(2, 3))]), grid(2, 3))
    agree(manipulation.pad(empty, 1), np.zeros((2, 5), np.float32))
    scalar = asarray(np.float32(3))
    agree(manipulation.reshape(scalar, (1, 1)), [[np.float32(3)]])
    agree(manipulation.flip(scalar), np.float32(3))
    agree(manipulation.tile(scalar, (2,)), f32([3, 3]))
    agree(manipulation.stack([scalar, scalar]), f32([3, 3]))
    agree(manipulation.broadcast_to(2.0, (2,)), f32([2, 2]))


def test_unstack_gives_views_without_the_axis() -> None:
    x: Any = asarray(X)
    parts = manipulation.unstack(x, axis=-1)
    assert len(parts) == 4
    agree(parts[1], X[..., 1])
    assert np.shares_memory(numpy(x), numpy(parts[1]))


def test_squeeze_leaves_out_axes_of_size_one_only() -> None:
    x = asarray(grid(1, 3, 1))
    agree(manipulation.squeeze(x, 0), grid(3, 1))
    agree(manipulation.squeeze(x, (0, -1)), grid(3))
    with pytest.raises(ShapeError, match=r"axis 1 of .* has size 3"):
        manipulation.squeeze(x, 1)


def test_broadcast_arrays_share_their_shape() -> None:
    x, y = manipulation.broadcast_arrays(asarray(grid(3, 1)), grid(4))
    assert x.shape == y.shape == (3, 4)


def test_promotion_joins_dtypes() -> None:
    found = manipulation.concat([asarray(grid(1)), f64([1]), i8([2])])
    assert found.type.dtype is dtypes.float64


def test_a_shift_may_be_a_tensor() -> None:
    agree(manipulation.roll(asarray(X), asarray(-7), axis=2), np.roll(X, -7, 2))


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda x: manipulation.concat([]), ArgumentValueError, "concat: .* is empty"),
    (
        lambda x: manipulation.concat(x.ndim),
        ArgumentTypeError,
        "concat: `arrays` must be",
    ),
    (lambda x: manipulation.concat([x, x], axis=3), AxisError, "concat: `axis` is 3"),
    (lambda x: manipulation.concat([x, x[0]]), ShapeError, "concat: .* equal sizes"),
    (lambda x: manipulation.stack([x, x[0]]), ShapeError, "stack: .* one shape"),
    (lambda x: manipulation.expand_dims(x, axis=4), AxisError, "expand_dims: `axis`"),
    (lambda x: manipulation.permute_dims(x, (0, 1)), AxisError, "each of the 3 axes"),
    (lambda x: manipulation.permute_dims(x, (0, 0, 1)), AxisError, "twice"),
    (
        lambda x: manipulation.moveaxis(x, (0, 1), 0),
        ArgumentValueError,
        "2 axes have 1",
    ),
    (lambda x: manipulation.broadcast_to(x, (2, 3)), ShapeError, "does not broadcast"),
    (lambda x: manipulation.pad(x, 1, "wrap"), ArgumentValueError, "`mode` must be"),
    (lambda x: manipulation.pad(x, ((1, 1), (2, 2))), ArgumentValueError, "each of 3"),
    (lambda x: manipulation.pad(x, -1), ArgumentValueError, "negative"),
    (lambda x: manipulation.pad(x, 1, constant_values=X), ShapeError, "a scalar"),
    (
        lambda x: manipulation.roll(x, (1, 2, 3), axis=(0, 1)),
        ArgumentValueError,
        "3 shifts",
    ),
    (lambda x: manipulation.roll(x, (1, 2)), ArgumentValueError, "flattened"),
    (lambda x: manipulation.roll(x, 1.5, axis=0), DTypeError, "`shift` must be an int"),
    (lambda x: manipulation.repeat(x, -1, axis=0), ArgumentValueError, "negative"),
    (lambda x: manipulation.repeat(x, (1, -1), axis=0), ArgumentValueError, "negative"),
    (lambda x: manipulation.repeat(x, (1, 2, 3), axis=0), ShapeError, "each of 2"),
    (lambda x: manipulation.repeat(x, (1.5, 2), axis=0), ArgumentTypeError, "integers"),
    (
        lambda x: manipulation.repeat(x, 1.5),
        ArgumentTypeError,
        "`repeats` must be an int",
    ),
    (lambda x: manipulation.flip(x, axis=(0, 0)), AxisError, "twice"),
    (
        lambda x: manipulation.reshape("x", (1,)),
        ArgumentTypeError,
        "reshape: argument 0",
    ),
    (
        lambda x: manipulation.pad(asarray([1]), 1, constant_values=0.5),
        DTypeError,
        "pad",
    ),
    (
        lambda x: views.slice_(x, starts=(0, 0, 2), sizes=(2, 3, 3), steps=(1, 1, 1)),
        IndexingError,
        "slice: axis 2 has size 4",
    ),
    (lambda x: views.slice_(x, starts=(), sizes=(), steps=()), ShapeError, "needs 3"),
    (lambda x: views.transpose(x, axes=(0, 0, 1)), AxisError, "transpose: `axes`"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_arguments_are_checked(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(asarray(X))


class Traced(Value):
    """A value that has a type and no elements."""

    def __init__(self, type_: TensorType) -> None:
        self._type = type_

    @property
    def type(self) -> TensorType:
        return self._type

    def _concrete(self, what: str) -> Any:
        raise TraceError(f"{what}() of a traced tensor")


def test_counts_in_a_traced_tensor_are_refused() -> None:
    counts = Traced(TensorType(dtypes.int64, (2,)))
    with pytest.raises(TraceError, match="repeat: the size of the result depends"):
        manipulation.repeat(asarray(X), counts, axis=0)


def test_weak_scalars_stay_weak_in_views() -> None:
    weak = TensorType(dtypes.int64, (), weak=True)
    [found] = views.reshape.result_types([weak], {"shape": (1,)})
    assert found.weak


def test_repetition_gives_memory_of_its_own() -> None:
    x: Any = asarray(X)
    for found in (manipulation.tile(x, (1,)), manipulation.repeat(x, 1, axis=0)):
        assert not np.shares_memory(numpy(x), numpy(found))


def test_bind_takes_views_as_they_are() -> None:
    [found] = bind(views.transpose, [asarray(X)], {"axes": (1, 0, 2)})
    agree(found, X.transpose(1, 0, 2))
