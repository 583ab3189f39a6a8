"""Tensors made from a shape: constants, ranges, grids."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value
from hopflow.dtypes import DType, DTypeLike
from hopflow.errors import (
    ArgumentValueError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir.expr import cast
from hopflow.loop_ir.kernels import Operand, Pointwise
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value, astype, copy
from hopflow.ops.elementwise import add, divide, floor, multiply, subtract, where
from hopflow.ops.logic import equal, greater_equal
from hopflow.ops.opdef import (
    OpDef,
    Sample,
    as_operand,
    check_addressable,
    check_float_fits,
    convert_to,
    promoted_as,
)
from hopflow.ops.rules import (
    NUMERIC,
    Array,
    as_flag,
    as_integer,
    as_shape,
    as_size,
    check_arity,
    check_device,
    normalize_axis,
    one_of,
    optional_dtype,
)
from hopflow.ops.sizes import larger, less, steps
from hopflow.ops.views import as_tensor, broadcasted, reshaped
from hopflow.symbolic.size import Size, SymFloat, SymInt

# --- primitives -----------------------------------------------------------------------


def _fill_infer(*types: TensorType, shape: Shape) -> TensorType:
    check_arity("full", types, 1)
    if types[0].ndim:
        raise ShapeError(f"full: the value must be a scalar, and is {types[0]}.")
    return TensorType(types[0].dtype, as_shape("full", shape), types[0].weak)


def _fill_run(value: Array, *, shape: tuple[int, ...]) -> Array:
    """A tensor of `shape` with the same value everywhere."""
    return np.full(shape, value, value.dtype)


def _fill_lower(_types: Sequence[TensorType], value: Operand, **_: Any) -> Pointwise:
    return Pointwise(lambda at: value[()])


def _fill_batch(
    _op: OpDef, size: Size, _batched: Any, value: Argument, *, shape: Shape
) -> Sequence[Value]:
    value = batching.after_examples(value, len(shape))
    repeated = batching.op_of("broadcast_to", value, shape=(size, *shape))
    return [batching.op_of("copy", repeated)]


fill: Final = OpDef(
    name="full",
    promote=None,
    infer=_fill_infer,  # T[] -> T[*shape]
    run=_fill_run,
    lower=_fill_lower,
    jvp="linear",
    transpose=(lambda ct, x, **_: ct,),  # the caller sums it over the new axes
    is_cheap=True,
    batch=_fill_batch,
    samples=(
        Sample(("T[]",), {"shape": (2, 3)}, dtypes.ALL),
        Sample(("T[]",), {"shape": ()}),
        Sample(("T[]",), {"shape": (0, 2)}),
    ),
)


def _iota_infer(
    *types: TensorType, shape: Shape, axis: int, dtype: DType
) -> TensorType:
    shape = as_shape("iota", shape)
    normalize_axis("iota", axis, len(shape))
    if types or dtype not in NUMERIC:
        raise DTypeError(f"iota: the dtype must be numeric, and is {dtype.name}.")
    return TensorType(dtype, shape)


def _iota_run(*, shape: tuple[int, ...], axis: int, dtype: DType) -> Array:
    """The position of each element along `axis`."""
    along = np.arange(shape[axis]).astype(dtype.dtype)
    column = along.reshape([n if a == axis else 1 for a, n in enumerate(shape)])
    return np.array(np.broadcast_to(column, shape))


def _iota_lower(
    _types: Sequence[TensorType], *, axis: int, dtype: DType, **_: Any
) -> Pointwise:
    return Pointwise(lambda at: cast(at[axis], dtype))


iota: Final = OpDef(
    name="iota",
    promote=None,
    infer=_iota_infer,  # -> dtype[*shape]
    run=_iota_run,
    lower=_iota_lower,
    is_cheap=True,
    samples=(
        *(Sample((), {"shape": (5,), "axis": 0, "dtype": dtype}) for dtype in NUMERIC),
        Sample((), {"shape": (2, 3), "axis": 1, "dtype": dtypes.int64}),
        Sample((), {"shape": (0,), "axis": 0, "dtype": dtypes.float32}),
    ),
)


def positions(shape: Shape, axis: int, dtype: DType = dtypes.int64) -> Value:
    """Return the position along `axis` of each element of a tensor of `shape`."""
    return apply(iota, shape=shape, axis=axis, dtype=dtype)


def sizes_of(name: str, shape: Any, dtype: DType) -> Shape:
    """Return `shape` as the shape of a result of `dtype`, for the function `name`.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no shape.
        ShapeError: the result would have too many axes, or be larger than any memory.
    """
    sizes = as_shape(name, shape)
    check_addressable(name, TensorType(dtype, sizes))
    return sizes


# --- constants ------------------------------------------------------------------------


def full(
    shape: Any, fill_value: Any, *, dtype: DTypeLike | None = None, device: Any = None
) -> Value:
    """Return a tensor with the same value everywhere.

    Args:
        shape: A size or a sequence of sizes.
        fill_value: A number, or a tensor that broadcasts to `shape`.
        dtype: The dtype; None: that of the value (Python numbers: int64, float32,
            bool).
        device: None or "cpu".

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is no shape.
        ArgumentRangeError: the value does not fit `dtype`.
        ShapeError: the value does not broadcast to `shape`.
        DeviceError: there is no such device.

    >>> hf.full((2, 2), 7)
    Tensor([[7, 7],
            [7, 7]], i64[2, 2])
    """
    check_device("full", device)
    value = as_operand("full", 1, fill_value)
    target = optional_dtype("full", dtype, promoted_as(value.type)[0])
    sizes = sizes_of("full", shape, target)
    if isinstance(value, Constant):
        return apply(fill, convert_to(value, target), shape=sizes)
    # A symbolic number must fit, as a Python number must.
    number = fill_value if isinstance(fill_value, SymInt | SymFloat) else value
    if isinstance(number, SymFloat):
        check_float_fits(number, target)
    value = astype(number, target, copy=False)
    if value.ndim:
        return apply(copy, broadcasted(value, sizes))
    return apply(fill, value, shape=sizes)


def _filled(
    name: str, shape: Any, value: int, dtype: DTypeLike | None, device: Any
) -> Value:
    check_device(name, device)
    target = optional_dtype(name, dtype, dtypes.DEFAULT_FLOAT)
    number = convert_to(Constant(value, TensorType(dtypes.int64)), target)
    return apply(fill, number, shape=sizes_of(name, shape, target))


def zeros(shape: Any, *, dtype: DTypeLike | None = None, device: Any = None) -> Value:
    """Return a tensor of zeros of this shape; float32 unless `dtype` is passed.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is no shape.
        DeviceError: there is no such device.

    >>> hf.zeros((2, 3), dtype=hf.int32)
    Tensor([[0, 0, 0],
            [0, 0, 0]], i32[2, 3])
    """
    return _filled("zeros", shape, 0, dtype, device)


def ones(shape: Any, *, dtype: DTypeLike | None = None, device: Any = None) -> Value:
    """Return a tensor of ones of this shape; float32 unless `dtype` is passed.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is no shape.
        DeviceError: there is no such device.
    """
    return _filled("ones", shape, 1, dtype, device)


def empty(shape: Any, *, dtype: DTypeLike | None = None, device: Any = None) -> Value:
    """Return a tensor of arbitrary values: zeros, so that programs are deterministic.

    Raises:
        ArgumentTypeError, ArgumentValueError: `shape` is no shape.
        DeviceError: there is no such device.
    """
    return _filled("empty", shape, 0, dtype, device)


def full_like(
    x: Any, /, fill_value: Any, *, dtype: DTypeLike | None = None, device: Any = None
) -> Value:
    """Return a tensor of the shape of `x` with the same value everywhere; of the dtype
    of `x` unless `dtype` is passed. See `full`."""
    type_ = as_tensor("full_like", x).type
    target = optional_dtype("full_like", dtype, type_.dtype)
    return full(type_.shape, fill_value, dtype=target, device=device)


def _filled_like(
    name: str, x: Any, value: int, dtype: DTypeLike | None, device: Any
) -> Value:
    type_ = as_tensor(name, x).type
    return _filled(
        name, type_.shape, value, optional_dtype(name, dtype, type_.dtype), device
    )


def zeros_like(
    x: Any, /, *, dtype: DTypeLike | None = None, device: Any = None
) -> Value:
    """Return zeros of the shape of `x`, and of its dtype unless `dtype` is passed."""
    return _filled_like("zeros_like", x, 0, dtype, device)


def ones_like(
    x: Any, /, *, dtype: DTypeLike | None = None, device: Any = None
) -> Value:
    """Return ones of the shape of `x`, and of its dtype unless `dtype` is passed."""
    return _filled_like("ones_like", x, 1, dtype, device)


def empty_like(
    x: Any, /, *, dtype: DTypeLike | None = None, device: Any = None
) -> Value:
    """Return arbitrary values (zeros) of the shape and dtype of `x`."""
    return _filled_like("empty_like", x, 0, dtype, device)


# --- ranges ---------------------------------------------------------------------------


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: DTypeLike | None = None,
    device: Any = None,
) -> Value:
    """Return the numbers from `start` up to, but excluding, `stop`, in steps of `step`.

    Args:
        start: The first number; without `stop` it is the end, and 0 is the first.
        stop: The end, which is excluded.
        step: The distance, which may be negative.
        dtype: None: int64 if all three are integers, else float32.
        device: None or "cpu".

    Raises:
        ArgumentTypeError: an argument is not a number.
        ArgumentValueError: `step` is 0, or the length is not finite.
        DTypeError: `dtype` is bool.
        DeviceError: there is no such device.

    >>> hf.arange(1, 10, 3)
    Tensor([1, 4, 7], i64[3])
    """
    check_device("arange", device)
    begin, end = (0, start) if stop is None else (start, stop)
    numbers = [_number("arange", n) for n in (begin, end, step)]
    whole = not any(isinstance(n, float) for n in numbers)
    default = dtypes.DEFAULT_INT if whole else dtypes.DEFAULT_FLOAT
    target = optional_dtype("arange", dtype, default)
    if target not in NUMERIC:
        raise DTypeError(f"arange: `dtype` must be numeric, and is {target.name}.")
    begin, end, step = numbers
    shape = sizes_of("arange", (_range_length(begin, end, step),), target)
    if not whole or target.is_float:
        return astype(_affine(shape, begin, step), target, copy=False)
    result = positions(shape, 0, target)
    if target.kind == "u" and isinstance(step, int) and step < 0:
        return astype(subtract(begin, multiply(result, -step)), target, copy=False)
    if not (isinstance(step, int) and step == 1):
        result = multiply(result, step)
    if not (isinstance(begin, int) and begin == 0):
        result = add(result, begin)
    return astype(result, target, copy=False)


def _affine(shape: Shape, begin: Any, step: Any) -> Value:
    """Return `begin + step * i` in float64, so that rounding errors do not add up."""
    along = positions(shape, 0, dtypes.float64)
    result: Value = add(multiply(along, step), begin)
    return result


def _number(name: str, value: Any) -> Any:
    """Return an int, a float or a symbolic size."""
    if isinstance(value, SymInt):
        return value
    if isinstance(value, bool | np.bool_):
        return int(value)
    if isinstance(value, float | np.floating | SymFloat):
        return float(value)
    return as_integer(name, "start, stop, step", value)


def _range_length(begin: Any, end: Any, step: Any) -> Size:
    if step == 0:
        raise ArgumentValueError("arange: `step` must not be 0.")
    if all(isinstance(n, int | SymInt) for n in (begin, end, step)):
        return steps(end - begin, step)
    many = (end - begin) / step
    if isinstance(many, float) and not math.isfinite(many):
        raise ArgumentValueError(
            f"arange: from {begin} to {end} by {step} there are {many} steps."
        )
    return larger(0, math.ceil(many))


def linspace(
    start: Any,
    stop: Any,
    /,
    num: Size,
    *,
    dtype: DTypeLike | None = None,
    device: Any = None,
    endpoint: bool = True,
) -> Value:
    """Return `num` evenly spaced numbers from `start` to `stop`.

    Args:
        start, stop: Numbers, or tensors without axes.
        num: The number of elements.
        dtype: None: the default float, or that of the tensors. For an integer dtype
            numbers are rounded down.
        device: None or "cpu".
        endpoint: Whether `stop` is the last number, or the one after it.

    Raises:
        ArgumentTypeError, ArgumentValueError: `num` is no size.
        ShapeError: `start` or `stop` has axes.
        DeviceError: there is no such device.

    >>> hf.linspace(0.0, 1.0, 5)
    Tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], f32[5])
    """
    check_device("linspace", device)
    endpoint = as_flag("linspace", "endpoint", endpoint)
    count = as_size("linspace", num, "num")
    ends = [as_operand("linspace", i, v) for i, v in enumerate((start, stop))]
    if any(e.type.ndim for e in ends):
        raise ShapeError("linspace: `start` and `stop` must be scalars.")
    common, _ = dtypes.promote(
        (dtypes.float32, True), *(promoted_as(e.type) for e in ends)
    )
    target = optional_dtype("linspace", dtype, common)
    # Computed in float64, and rounded once.
    first, last = (as_value(convert_to(e, dtypes.float64)) for e in ends)
    gaps = larger(1, count - 1 if endpoint else count)
    along = positions(sizes_of("linspace", count, dtypes.float64), 0, dtypes.float64)
    distance = divide(subtract(last, first), gaps)
    result = add(multiply(along, distance), first)
    if endpoint and not less(count, 2):  # `stop` exactly, without rounding
        result = where(equal(along, gaps), last, result)
    if target.is_integer:
        result = floor(result)
    return astype(result, target, copy=False)


# --- matrices and grids ---------------------------------------------------------------


def eye(
    n_rows: Any,
    n_cols: Any = None,
    /,
    *,
    k: int = 0,
    dtype: DTypeLike | None = None,
    device: Any = None,
) -> Value:
    """Return a matrix with ones on the `k`-th diagonal, and zeros elsewhere.

    Raises:
        ArgumentTypeError, ArgumentValueError: a size or `k` is no integer.
        DeviceError: there is no such device.

    >>> hf.eye(2)
    Tensor([[1., 0.],
            [0., 1.]], f32[2, 2])
    """
    check_device("eye", device)
    rows = as_size("eye", n_rows, "n_rows")
    columns = rows if n_cols is None else as_size("eye", n_cols, "n_cols")
    shape = sizes_of("eye", (rows, columns), dtypes.int64)
    row = add(positions(shape, 0), as_integer("eye", "k", k))
    target = optional_dtype("eye", dtype, dtypes.DEFAULT_FLOAT)
    return astype(equal(row, positions(shape, 1)), target, copy=False)


def tril(x: Any, /, *, k: Size = 0) -> Value:
    """Return the lower triangles of matrices: zeros above the `k`-th diagonal.

    Args:
        x: T[*s, m, n].
        k: 0 is the main diagonal, 1 the one above it.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    value, row, column = _triangle("tril", x, k)
    return where(greater_equal(row, column), value, False)


def triu(x: Any, /, *, k: Size = 0) -> Value:
    """Return the upper triangles of matrices: zeros below the `k`-th diagonal.

    Args:
        x: T[*s, m, n].
        k: 0 is the main diagonal, 1 the one above it.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    value, row, column = _triangle("triu", x, k)
    return where(greater_equal(column, row), value, False)


def _triangle(name: str, x: Any, k: Size) -> tuple[Value, Value, Value]:
    """Return `x`, and for each element its row plus `k`, and its column."""
    value = as_tensor(name, x)
    if value.ndim < 2:
        raise ShapeError(
            f"{name}: `x` must be a matrix or a stack of them, and is {value.type}."
        )
    shape = value.shape[-2:]
    diagonal = k if isinstance(k, SymInt) else as_integer(name, "k", k)
    return value, add(positions(shape, 0), diagonal), positions(shape, 1)


def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Value]:
    """Return the coordinates of all points of the grid with these axes.

    Args:
        arrays: T[n] each.
        indexing: "ij": result i varies along axis i; "xy": the first two axes are
            exchanged.

    Raises:
        ArgumentValueError: `indexing` is neither "xy" nor "ij".
        ShapeError: an array has more than one axis.
    """
    one_of("meshgrid", "indexing", indexing, ("xy", "ij"))
    values = [as_tensor("meshgrid", a, i) for i, a in enumerate(arrays)]
    for position, value in enumerate(values):
        if value.ndim > 1:
            raise ShapeError(
                f"meshgrid: argument {position} must have one axis, and is "
                f"{value.type}."
            )
    order = list(range(len(values)))
    if indexing == "xy" and len(values) > 1:
        order[:2] = [1, 0]
    sizes = [value.type.size for value in values]
    shape = tuple(sizes[i] for i in order)
    results = []
    for position, value in enumerate(values):
        axis = order[position]  # the exchange is its own inverse
        column = tuple(sizes[position] if a == axis else 1 for a in range(len(shape)))
        grid = broadcasted(reshaped(value, column), shape)
        results.append(apply(copy, grid))
    return results
