"""The standard's manipulation functions: shapes, axes, repetition and joining."""

from collections.abc import Sequence
from math import inf, prod
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, current
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    ShapeError,
)
from hopflow.graph.types import Shape, TensorType, same_size
from hopflow.ops.check import check
from hopflow.ops.convert import apply, astype
from hopflow.ops.convert import copy as copy_op
from hopflow.ops.creation import full
from hopflow.ops.deferred import aligned, resized
from hopflow.ops.elementwise import subtract
from hopflow.ops.gather import gather
from hopflow.ops.joining import concat, pad, roll, stack, unstack
from hopflow.ops.logic import greater_equal
from hopflow.ops.masks import data_size
from hopflow.ops.opdef import as_operand
from hopflow.ops.reduce import cumulative_sum
from hopflow.ops.reduce import sum as sum_of
from hopflow.ops.rules import (
    Array,
    as_flag,
    as_shape,
    as_size,
    broadcast_shapes,
    is_zero,
    normalize_axes,
    normalize_axis,
)
from hopflow.ops.scatter import segment_sum
from hopflow.ops.sizes import divided, is_unbacked
from hopflow.ops.views import (
    as_tensor,
    broadcasted,
    known_elements,
    moved,
    part,
    reshaped,
    several,
    show,
    transposed,
)
from hopflow.symbolic.size import Size

__all__ = [
    "broadcast_arrays",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flip",
    "moveaxis",
    "pad",
    "permute_dims",
    "ravel",
    "repeat",
    "reshape",
    "roll",
    "squeeze",
    "stack",
    "swapaxes",
    "tile",
    "unstack",
]


# --- shapes ---------------------------------------------------------------------------


def reshape(x: Any, /, shape: Any, *, copy: bool | None = None) -> Value:
    """Return the elements of `x`, in row-major order, in another shape.

    Args:
        x: T[*s].
        shape: The sizes; one may be -1, and is computed from the others.
        copy: True always copies; False is an error if memory cannot be shared; None
            copies only then.

    Raises:
        ShapeError: the number of elements differs, or no size fits the -1.
        ArgumentValueError: `copy` is False, and a copy cannot be avoided.

    >>> hf.reshape(hf.arange(6), (2, -1))
    Tensor([[0, 1, 2],
            [3, 4, 5]], i64[2, 3])
    """
    copy = None if copy is None else as_flag("reshape", "copy", copy)
    x = as_tensor("reshape", x)
    sizes = _resolved(x.type, shape)
    result = reshaped(_with_elements(x, sizes), sizes)
    if copy:
        return _owned(result)
    if copy is False and current().is_eager:
        arrays = [t._concrete("reshape") for t in (x, result)]
        shared = np.may_share_memory(*arrays)
        if not shared and x.type.size != 0:
            raise ArgumentValueError(
                "reshape: `copy` is False, and the elements do not lie so in memory "
                "that they can be shared."
            )
    return result  # type: ignore[no-any-return]


def _with_elements(x: Any, shape: Shape) -> Any:
    """Return `x`, flattened and checked by the run if sizes are unbacked."""
    total: Size = prod(shape, start=1)
    count = x.type.size
    if same_size(total, count) or not (is_unbacked(total) or is_unbacked(count)):
        return x
    flat = reshaped(x, (count,))
    return resized("reshape", flat, 0, total)


def _resolved(x: TensorType, shape: Any) -> Shape:
    """Return `shape` with -1 replaced by the size that it stands for."""
    entries = list(shape) if isinstance(shape, tuple | list) else [shape]
    holes = [
        i for i, n in enumerate(entries) if isinstance(n, int | np.integer) and n == -1
    ]
    sizes = as_shape("reshape", [1 if i in holes else n for i, n in enumerate(entries)])
    if not holes:
        return sizes
    if len(holes) > 1:
        raise ShapeError(f"reshape: only one size may be -1, and `shape` is {shape}.")
    [hole] = holes
    missing = _missing(x.shape, [n for i, n in enumerate(sizes) if i != hole])
    if missing is None:
        raise ShapeError(
            f"reshape: no size fits the -1 of `shape` {tuple(entries)}, for a tensor "
            f"of shape {show(x.shape)} with {x.size} elements."
        )
    return (*sizes[:hole], missing, *sizes[hole + 1 :])


def _missing(shape: Shape, sizes: Sequence[Size]) -> Size | None:
    """Return the n for which `sizes` and n have the elements of `shape`, or None."""
    if any(map(is_zero, sizes)):
        return None
    rest, uncancelled = list(shape), []
    for n in sizes:  # cancel equal sizes, so that symbols seldom need a division
        match = next((i for i, m in enumerate(rest) if same_size(n, m)), None)
        if match is None:
            uncancelled.append(n)
        else:
            del rest[match]
    return divided(prod(rest, start=1), prod(uncancelled, start=1))


def ravel(x: Any, /) -> Value:
    """Return the elements of `x` in row-major order: T[*s] -> T[n]."""
    x = as_tensor("ravel", x)
    return reshaped(x, (x.type.size,))  # type: ignore[no-any-return]


def expand_dims(x: Any, /, axis: Any = 0) -> Value:
    """Return `x` with new axes of size 1 at `axis` (an int or several) of the result.

    Raises:
        AxisError: the result has no such axis, or one is named twice.
    """
    x = as_tensor("expand_dims", x)
    count = len(axis) if isinstance(axis, tuple | list) else 1
    axes = normalize_axes("expand_dims", axis, x.ndim + count)
    sizes = iter(x.shape)
    shape = [1 if a in axes else next(sizes) for a in range(x.ndim + count)]
    return reshaped(x, tuple(shape))  # type: ignore[no-any-return]


def squeeze(x: Any, /, axis: Any) -> Value:
    """Return `x` without the axes `axis` (an int or several), which must have size 1.

    Raises:
        AxisError: `x` has no such axis.
        ShapeError: an axis has another size.
    """
    x = as_tensor("squeeze", x)
    axes = normalize_axes("squeeze", axis, x.ndim)
    for a in axes:
        if is_unbacked(x.shape[a]):
            x = resized("squeeze", x, a, 1)
        if not x.shape[a] == 1:
            raise ShapeError(
                f"squeeze: axis {a} of {x.type} has size {x.shape[a]}; only axes of "
                "size 1 can be left out."
            )
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    return reshaped(x, shape)  # type: ignore[no-any-return]


def permute_dims(x: Any, /, axes: Any) -> Value:
    """Return `x` with its axes in the order `axes`.

    Raises:
        AxisError: `axes` does not name each axis once.

    >>> hf.permute_dims(hf.zeros((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    x = as_tensor("permute_dims", x)
    order = normalize_axes("permute_dims", tuple(several(axes)), x.ndim, "axes")
    if len(order) != x.ndim:
        raise AxisError(
            f"permute_dims: `axes` must name each of the {x.ndim} axes once, and is "
            f"{axes}."
        )
    return transposed(x, order)  # type: ignore[no-any-return]


def moveaxis(x: Any, source: Any, destination: Any, /) -> Value:
    """Return `x` with the axes `source` at the positions `destination`.

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
        ArgumentValueError: there are not as many destinations as sources.
    """
    x = as_tensor("moveaxis", x)
    sources = normalize_axes("moveaxis", source, x.ndim, "source")
    targets = normalize_axes("moveaxis", destination, x.ndim, "destination")
    if len(sources) != len(targets):
        raise ArgumentValueError(
            f"moveaxis: {len(sources)} axes have {len(targets)} destinations."
        )
    order = [a for a in range(x.ndim) if a not in sources]
    for target, source_ in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source_)
    return transposed(x, order)  # type: ignore[no-any-return]


def swapaxes(x: Any, /, axis1: int, axis2: int) -> Value:
    """Return `x` with two axes exchanged.

    Raises:
        AxisError: `x` has no such axis.
    """
    x = as_tensor("swapaxes", x)
    a = normalize_axis("swapaxes", axis1, x.ndim, "axis1")
    b = normalize_axis("swapaxes", axis2, x.ndim, "axis2")
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return transposed(x, order)  # type: ignore[no-any-return]


def broadcast_to(x: Any, /, shape: Any) -> Value:
    """Return `x` repeated along new axes and axes of size 1, as a read-only view.

    Raises:
        ShapeError: `x` does not broadcast to `shape`.
    """
    x = as_tensor("broadcast_to", x)
    return broadcasted(x, as_shape("broadcast_to", shape))  # type: ignore[no-any-return]


def broadcast_arrays(*arrays: Any) -> list[Value]:
    """Return the tensors, each broadcast to their common shape.

    Raises:
        ShapeError: the shapes do not broadcast.
    """
    tensors = [as_tensor("broadcast_arrays", a, i) for i, a in enumerate(arrays)]
    tensors = aligned("broadcast_arrays", tensors)
    shape = broadcast_shapes("broadcast_arrays", *(t.shape for t in tensors))
    return [broadcasted(t, shape) for t in tensors]


def flip(x: Any, /, *, axis: Any = None) -> Value:
    """Return `x` reversed along `axis` (an int, several, or None for all).

    Raises:
        AxisError: `x` has no such axis, or one is named twice.
    """
    x = as_tensor("flip", x)
    for a in normalize_axes("flip", axis, x.ndim):
        n = x.shape[a]
        x = part(x, a, n - 1 if not is_zero(n) else 0, n, -1)
    return x  # type: ignore[no-any-return]


# --- repetition -----------------------------------------------------------------------


def tile(x: Any, repetitions: Any, /) -> Value:
    """Return `x` repeated `repetitions[a]` times along each axis a.

    If one of the two has fewer axes, ones are prepended.

    Raises:
        ArgumentValueError: a repetition is negative.
    """
    x = as_tensor("tile", x)
    counts = as_shape("tile", repetitions, "repetitions")
    ndim = max(len(counts), x.ndim)
    counts = (1,) * (ndim - len(counts)) + counts
    sizes = (1,) * (ndim - x.ndim) + x.shape
    apart: list[Size] = []
    repeated: list[Size] = []
    for count, n in zip(counts, sizes, strict=True):
        apart += [1, n]
        repeated += [count, n]
    x = broadcasted(reshaped(x, tuple(apart)), tuple(repeated))
    shape = tuple(c * n for c, n in zip(counts, sizes, strict=True))
    return _owned(reshaped(x, shape))


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Value:
    """Return `x` with each element along `axis` repeated.

    Args:
        x: T[*s, n, *t], where n is the size of `axis`.
        repeats: The number of repetitions: one for all elements, or one for each.
        axis: The axis; None: along the flattened tensor.

    Raises:
        AxisError: `x` has no such axis.
        ArgumentValueError: a number is negative.
        CheckError: a number of a traced tensor is negative.
        ShapeError: there is not a number for each element.
        TraceError: `repeats` is traced where sizes cannot become symbols.

    >>> hf.repeat(hf.asarray([1, 2]), [2, 1])
    Tensor([1, 1, 2], i64[3])
    """
    x = as_tensor("repeat", x)
    if axis is None:
        return repeat(ravel(x), repeats, axis=0)
    axis = normalize_axis("repeat", axis, x.ndim)
    n = x.shape[axis]
    if isinstance(repeats, Value):
        elements = known_elements("repeat", repeats, _REPEAT_REMEDY)
        if elements is None:
            return _repeat_traced(x, repeats, axis)
        repeats = elements
    if isinstance(repeats, np.ndarray | tuple | list):
        return _repeat_each(x, _counts(repeats), axis)
    count = as_size("repeat", repeats, "repeats")
    head, tail = x.shape[:axis], x.shape[axis + 1 :]
    apart = reshaped(x, (*head, n, 1, *tail))
    repeated = broadcasted(apart, (*head, n, count, *tail))
    return _owned(reshaped(repeated, (*head, n * count, *tail)))


def _owned(x: Any) -> Value:
    """Return a copy of `x`, which users may write without a change elsewhere."""
    return apply(copy_op, x)


_REPEAT_REMEDY: Final = "Give `repeats` as Python numbers."


def _counts(repeats: Any) -> Array:
    try:
        counts = np.asarray(repeats)
    except ValueError:  # nested sequences of differing lengths
        raise ShapeError("repeat: `repeats` must have one axis.") from None
    if counts.size == 0:
        counts = counts.astype(np.int64)
    if counts.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"repeat: `repeats` must be integers, and is {repeats}."
        )
    if counts.size and counts.min() < 0:
        raise ArgumentValueError(f"repeat: `repeats` must not be negative: {repeats}.")
    return counts


def _repeat_traced(x: Any, counts: Value, axis: int) -> Value:
    """Repeat by traced counts: the source of position i is the number of elements that
    begin at or before i, minus 1."""
    n = x.shape[axis]
    if not counts.type.dtype.is_integer:
        raise ArgumentTypeError(
            f"repeat: `repeats` must be integers, and is {counts.type}."
        )
    count = counts.type.size
    is_unknown = is_unbacked(count) or is_unbacked(n)
    if counts.ndim == 1 and is_unknown:
        counts = broadcasted(counts, (n,), "repeat")
    elif counts.ndim == 0 or (not same_size(count, n) and count == 1):
        counts = broadcasted(reshaped(counts, (1,)), (n,))
    if counts.ndim != 1 or not counts.shape[0] == n:
        raise ShapeError(
            f"repeat: `repeats` must have a number for each of {n} elements, and has "
            f"shape {show(counts.shape)}."
        )
    counts = astype(counts, dtypes.int64)
    check(greater_equal(counts, 0), "repeat: `repeats` must not be negative")
    total = data_size("repeat", sum_of(counts), inf, counts, _REPEAT_REMEDY)
    begin = subtract(cumulative_sum(counts), counts)
    begun = segment_sum(full((n,), 1, dtype=dtypes.int64), begin, total)
    chosen = subtract(cumulative_sum(begun), 1)
    return moved(apply(gather, x, chosen, axes=(axis,), batch=0), 0, axis)  # type: ignore[no-any-return]


def _repeat_each(x: Any, counts: Array, axis: int) -> Value:
    n = x.shape[axis]
    if counts.size == 1:
        return repeat(x, int(counts.reshape(())), axis=axis)
    if counts.ndim == 1 and is_unbacked(n):
        n = len(counts)
        x = resized("repeat", x, axis, n)
    if counts.shape != (n,):
        raise ShapeError(
            f"repeat: `repeats` must have a number for each of {n} elements, and has "
            f"shape {show(counts.shape)}."
        )
    chosen = as_operand("repeat", 1, np.repeat(np.arange(len(counts)), counts))
    repeated = apply(gather, x, chosen, axes=(axis,), batch=0)
    return moved(repeated, 0, axis)  # type: ignore[no-any-return]
