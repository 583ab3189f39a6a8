"""Reductions and running totals over axes, composed of the primitives in `reducers`."""

from collections.abc import Callable
from math import prod as product
from typing import Any

from hopflow import dtypes
from hopflow.bind import Operand, Value
from hopflow.dtypes import DType, DTypeLike
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ShapeError
from hopflow.graph.types import Shape
from hopflow.ops import reducers
from hopflow.ops.convert import apply, as_value, astype, copy
from hopflow.ops.deferred import with_elements
from hopflow.ops.elementwise import add, divide, square, subtract, where
from hopflow.ops.joining import concat
from hopflow.ops.logic import as_bool, greater, isfinite, not_equal
from hopflow.ops.math import exp, log, sqrt
from hopflow.ops.opdef import OpDef
from hopflow.ops.rules import (
    as_flag,
    as_integer,
    floating,
    is_zero,
    normalize_axes,
    normalize_axis,
    required_dtype,
)
from hopflow.ops.sizes import larger
from hopflow.ops.views import as_tensor, broadcasted, reshaped, sliced
from hopflow.symbolic.size import SymFloat, SymInt


def _as(x: Value, dtype: DType) -> Value:
    return x if x.type.dtype is dtype else astype(x, dtype)


def _reduce(
    op: OpDef, name: str, x: Operand, axis: Any, keepdims: bool
) -> tuple[Value, Shape]:
    """Return `x` reduced over `axis`, and the shape that it has with `keepdims`."""
    keepdims = as_flag(name, "keepdims", keepdims)
    value = as_value(x)
    axes = tuple(sorted(normalize_axes(name, axis, value.ndim)))
    kept = tuple(1 if a in axes else n for a, n in enumerate(value.shape))
    result: Value = op(value, axes=axes) if axes else astype(value, value.type.dtype)
    return (reshaped(result, kept) if keepdims else result), kept


# --- sums and products ----------------------------------------------------------------


def _total_dtype(name: str, dtype: DTypeLike | None, x: Value) -> DType:
    """Return the dtype of a sum or product: small integers become 64 bits wide."""
    if dtype is not None:
        return required_dtype(name, dtype)
    if x.type.dtype.is_float:
        return x.type.dtype
    return dtypes.uint64 if x.type.dtype.kind == "u" else dtypes.int64


def sum(
    x: Any,
    /,
    axis: Any = None,
    *,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
) -> Value:
    """Return the sum of the elements over `axis`; 0 for an empty axis.

    Args:
        x: T[*s].
        axis: An axis, a tuple of axes, or None for all.
        dtype: The dtype to convert to first; None: T, but 64-bit for smaller integers.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.

    >>> hf.sum(hf.asarray([[1, 2], [3, 4]]), axis=0)
    Tensor([4, 6], i64[2])
    """
    value = as_tensor("sum", x)
    value = _as(value, _total_dtype("sum", dtype, value))
    return _reduce(reducers.reduce_sum, "sum", value, axis, keepdims)[0]


def prod(
    x: Any,
    /,
    axis: Any = None,
    *,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
) -> Value:
    """Return the product of the elements over `axis`; 1 for an empty axis.

    Args:
        x: T[*s].
        axis: An axis, a tuple of axes, or None for all.
        dtype: The dtype to convert to first; None: T, but 64-bit for smaller integers.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.

    >>> hf.prod(hf.asarray([1.0, 2.0, 4.0]))
    Tensor(8., f32[])
    """
    value = as_tensor("prod", x)
    value = _as(value, _total_dtype("prod", dtype, value))
    return _reduce(reducers.reduce_prod, "prod", value, axis, keepdims)[0]


def count_nonzero(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return the number of elements over `axis` that are not 0, as int64.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    ones = _as(as_value(as_bool("count_nonzero", 0, x)), dtypes.int64)
    return _reduce(reducers.reduce_sum, "count_nonzero", ones, axis, keepdims)[0]


# --- statistics -----------------------------------------------------------------------


def _floats(name: str, x: Any) -> tuple[Value, DType]:
    """Return `x` as floats to compute with, and the dtype of the result: means of
    16-bit floats are computed in float32."""
    value = as_tensor(name, x)
    dtype, _ = floating(name, [(value.type.dtype, value.type.weak)])
    wide = dtypes.float32 if dtype.bits == 16 else dtype
    return _as(value, wide), dtype


def mean(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return the mean of the elements over `axis`; integers become the default float.

    Args:
        x: T[*s]. The mean over an empty axis is NaN.
        axis: An axis, a tuple of axes, or None for all.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.

    >>> hf.mean(hf.asarray([1, 2, 4, 5]))
    Tensor(3., f32[])
    """
    value, dtype = _floats("mean", x)
    return _as(_mean("mean", value, axis, keepdims), dtype)


def _mean(name: str, x: Value, axis: Any, keepdims: bool) -> Value:
    axes = normalize_axes(name, axis, x.ndim)
    total, _ = _reduce(reducers.reduce_sum, name, x, axes, keepdims)
    result: Value = divide(total, product((x.shape[a] for a in axes), start=1))
    return result


def var(
    x: Any, /, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False
) -> Value:
    """Return the variance over `axis`; integers become the default float.

    Args:
        x: T[*s].
        axis: An axis, a tuple of axes, or None for all.
        correction: The divisor is the number of elements minus this: 1 gives an
            unbiased estimate. The result is NaN where the divisor is not positive.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    value, dtype = _floats("var", x)
    return _as(_var("var", value, axis, correction, keepdims), dtype)


def std(
    x: Any, /, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False
) -> Value:
    """Return the standard deviation over `axis`: the square root of `var`.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    value, dtype = _floats("std", x)
    return _as(sqrt(_var("std", value, axis, correction, keepdims)), dtype)


def _var(name: str, x: Value, axis: Any, correction: float, keepdims: bool) -> Value:
    is_number = isinstance(correction, int | float | SymInt | SymFloat)
    if not is_number or isinstance(correction, bool):
        raise ArgumentTypeError(
            f"{name}: `correction` must be a number, and is "
            f"`{type(correction).__name__}`."
        )
    axes = normalize_axes(name, axis, x.ndim)
    distance = square(subtract(x, _mean(name, x, axes, True)))
    total, _ = _reduce(reducers.reduce_sum, name, distance, axes, keepdims)
    count = product((x.shape[a] for a in axes), start=1)
    result: Value
    if isinstance(count, int):
        divisor = count - correction
        result = divide(total, divisor if divisor > 0 else float("nan"))
    else:
        size = subtract(count, correction)
        result = divide(total, where(greater(size, 0), size, float("nan")))
    return result


def logsumexp(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return `log(sum(exp(x)))` over `axis`, without overflow.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    keepdims = as_flag("logsumexp", "keepdims", keepdims)
    value, dtype = _floats("logsumexp", x)
    axes = normalize_axes("logsumexp", axis, value.ndim)
    value = _nonempty("logsumexp", value, axes)
    largest, kept = _reduce(reducers.reduce_max, "logsumexp", value, axes, True)
    # Subtracting an infinite maximum would give NaN.
    offset = where(isfinite(largest), largest, 0.0)
    scaled = exp(subtract(value, offset))
    total, _ = _reduce(reducers.reduce_sum, "logsumexp", scaled, axes, True)
    result = _as(add(log(total), offset), dtype)
    if keepdims:
        return result
    return reshaped(result, _dropped(kept, axes))  # type: ignore[no-any-return]


def _dropped(shape: Shape, axes: tuple[int, ...]) -> Shape:
    return tuple(n for a, n in enumerate(shape) if a not in axes)


# --- extrema and tests ----------------------------------------------------------------


def _nonempty(name: str, x: Any, axis: Any) -> Any:
    """Return `x`; the run checks that its axes of unbacked size have elements."""
    for a in normalize_axes(name, axis, x.ndim):
        text = f"{name}: axis {a} must have elements"
        x = with_elements(x, x.shape[a], 1, text)
    return x


def max(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return the largest element over `axis`; NaN if there is one.

    Args:
        x: T[*s].
        axis: An axis, a tuple of axes, or None for all.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
        ShapeError: an axis to reduce is empty.
    """
    value = _nonempty("max", as_tensor("max", x), axis)
    return _reduce(reducers.reduce_max, "max", value, axis, keepdims)[0]


def min(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return the smallest element over `axis`; NaN if there is one.

    Args:
        x: T[*s].
        axis: An axis, a tuple of axes, or None for all.
        keepdims: Whether reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
        ShapeError: an axis to reduce is empty.
    """
    value = _nonempty("min", as_tensor("min", x), axis)
    return _reduce(reducers.reduce_min, "min", value, axis, keepdims)[0]


def all(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return whether all elements over `axis` are true (not 0), as bool; True if empty.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    test = as_bool("all", 0, x)
    return _reduce(reducers.reduce_and, "all", test, axis, keepdims)[0]


def any(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Value:
    """Return whether any element over `axis` is true (not 0), as bool; False if empty.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    test = as_bool("any", 0, x)
    return _reduce(reducers.reduce_or, "any", test, axis, keepdims)[0]


def argmax(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Value:
    """Return the position of the largest element along `axis`, as int64.

    Among equal elements it is the first; a NaN counts as the largest.

    Args:
        x: T[*s].
        axis: An axis; None: the position in the flattened tensor.
        keepdims: Whether the reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis.
        ShapeError: the axis is empty.
    """
    return _position(reducers.reduce_max, "argmax", x, axis, keepdims)


def argmin(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Value:
    """Return the position of the smallest element along `axis`, as int64.

    Among equal elements it is the first; a NaN counts as the smallest.

    Args:
        x: T[*s].
        axis: An axis; None: the position in the flattened tensor.
        keepdims: Whether the reduced axes stay, with size 1.

    Raises:
        AxisError: `x` has no such axis.
        ShapeError: the axis is empty.
    """
    return _position(reducers.reduce_min, "argmin", x, axis, keepdims)


def _position(
    extremum: OpDef, name: str, x: Any, axis: int | None, keepdims: bool
) -> Value:
    # Two passes: along a row, each of them combines elements in any order, in vectors.
    # Those over columns become one, of vectors along the rows (see `positions`).
    keepdims = as_flag(name, "keepdims", keepdims)
    value = as_tensor(name, x)
    if axis is None:
        kept: Shape = (1,) * value.ndim
        value, number = reshaped(value, (value.type.size,)), 0
    else:
        number = normalize_axis(name, axis, value.ndim)
        kept = tuple(1 if a == number else n for a, n in enumerate(value.shape))
    if is_zero(value.shape[number]):
        raise ShapeError(
            f"{name}: axis {number} of {value.type} has no elements, so no position in "
            "it is one of the largest or smallest. Test the size first."
        )
    value = _nonempty(name, value, number)
    best = extremum(value, axes=(number,))
    result: Value = reducers.reduce_find(value, best, axis=number)
    return reshaped(result, kept) if keepdims else result


# --- running totals -------------------------------------------------------------------


def cumulative_sum(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> Value:
    """Return the sums of the elements up to and including each, along `axis`.

    Args:
        x: T[*s].
        axis: The axis; may be omitted if there is only one.
        dtype: The dtype to convert to first; None: T, but 64-bit for smaller integers.
        include_initial: Whether to prepend the empty sum, 0.

    Raises:
        ArgumentValueError: `axis` is omitted, and `x` does not have one axis.
        AxisError: `x` has no such axis.
    """
    value = as_tensor("cumulative_sum", x)
    value = _as(value, _total_dtype("cumulative_sum", dtype, value))
    return _running(reducers.cumsum, "cumulative_sum", value, axis, 0, include_initial)


def cumulative_prod(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> Value:
    """Return the products of the elements up to and including each, along `axis`.

    Args:
        x: T[*s].
        axis: The axis; may be omitted if there is only one.
        dtype: The dtype to convert to first; None: T, but 64-bit for smaller integers.
        include_initial: Whether to prepend the empty product, 1.

    Raises:
        ArgumentValueError: `axis` is omitted, and `x` does not have one axis.
        AxisError: `x` has no such axis.
    """
    value = as_tensor("cumulative_prod", x)
    value = _as(value, _total_dtype("cumulative_prod", dtype, value))
    return _running(
        reducers.cumprod, "cumulative_prod", value, axis, 1, include_initial
    )


def cummax(x: Any, /, *, axis: int | None = None) -> Value:
    """Return the largest element up to each, along `axis`; a NaN stays.

    Raises:
        ArgumentValueError: `axis` is omitted, and `x` does not have one axis.
        AxisError: `x` has no such axis.
    """
    return _running(reducers.cummax, "cummax", as_tensor("cummax", x), axis)


def cummin(x: Any, /, *, axis: int | None = None) -> Value:
    """Return the smallest element up to each, along `axis`; a NaN stays.

    Raises:
        ArgumentValueError: `axis` is omitted, and `x` does not have one axis.
        AxisError: `x` has no such axis.
    """
    return _running(reducers.cummin, "cummin", as_tensor("cummin", x), axis)


def _running(
    op: OpDef,
    name: str,
    x: Value,
    axis: int | None,
    neutral: int = 0,
    include_initial: bool = False,
) -> Value:
    if axis is None:
        if x.ndim != 1:
            raise ArgumentValueError(
                f"{name}: `axis` may only be left out for a tensor with one axis, and "
                f"this one is {x.type}."
            )
        axis = 0
    axis = normalize_axis(name, axis, x.ndim)
    include_initial = as_flag(name, "include_initial", include_initial)
    dtype = x.type.dtype
    # Running totals of 16-bit floats are accumulated in float32 and rounded at the end.
    wide = dtypes.float32 if dtype.is_float and dtype.bits == 16 else dtype
    result = _as(op(_as(x, wide), axis=axis, reverse=False), dtype)
    if not include_initial:
        return result
    shape = tuple(1 if a == axis else n for a, n in enumerate(x.shape))
    first = broadcasted(astype(neutral, dtype), shape)
    return concat([first, result], axis=axis)


def diff(
    x: Any,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Any = None,
    append: Any = None,
) -> Value:
    """Return the differences of neighbours along `axis`, taken `n` times.

    Args:
        x: T[*s]. For bools the result is whether neighbours differ.
        axis: The axis.
        n: How many times to take differences.
        prepend, append: Numbers or tensors to put before and after `x` along `axis`
            first.

    Raises:
        ArgumentValueError: `n` is negative.
        AxisError: `x` has no such axis.

    >>> hf.diff(hf.asarray([1, 4, 9]))
    Tensor([3, 5], i64[2])
    """
    value = as_tensor("diff", x)
    axis = normalize_axis("diff", axis, value.ndim)
    n = as_integer("diff", "n", n)
    if n < 0:
        raise ArgumentValueError(f"diff: `n` must be 0 or more, and is {n}.")
    if n == 0:
        return apply(copy, value)
    parts = [value]
    if prepend is not None:
        parts.insert(0, _fitted("prepend", prepend, value, axis))
    if append is not None:
        parts.append(_fitted("append", append, value, axis))
    result = concat(parts, axis=axis) if len(parts) > 1 else value
    for _ in range(n):
        if is_zero(result.shape[axis]):
            break
        result = _differences(result, axis)
    return result


def _fitted(argument: str, extra: Any, x: Value, axis: int) -> Value:
    """Return a number as a slice of `x` of size 1; a tensor unchanged."""
    value: Value = as_tensor("diff", extra, argument)
    if value.ndim:
        return value
    shape = tuple(1 if a == axis else size for a, size in enumerate(x.shape))
    return broadcasted(_as(value, x.type.dtype), shape)  # type: ignore[no-any-return]


def _differences(x: Value, axis: int) -> Value:
    size = x.shape[axis]
    less = larger(0, size - 1)
    sizes = tuple(less if a == axis else n for a, n in enumerate(x.shape))
    none = (0,) * x.ndim
    steps = (1,) * x.ndim
    begin = size - less
    second = tuple(begin if a == axis else 0 for a in range(x.ndim))
    minus: Callable[[Any, Any], Value] = (
        not_equal if x.type.dtype.kind == "b" else subtract
    )
    return minus(sliced(x, second, sizes, steps), sliced(x, none, sizes, steps))
