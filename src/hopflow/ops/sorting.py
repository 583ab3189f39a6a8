"""Sorting: argsort, sort, top_k."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.errors import ShapeError
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import (
    Expr,
    Index,
    binary,
    compare,
    const,
    extent,
    index,
    select,
    unary,
)
from hopflow.loop_ir.kernels import Library, Operand, Pointwise
from hopflow.loop_ir.networks import merge_exchanges, transpositions
from hopflow.ops import batching
from hopflow.ops.convert import apply
from hopflow.ops.deferred import with_elements
from hopflow.ops.gather import gather_clip
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array, as_flag, as_size, normalize_axis
from hopflow.ops.sizes import less
from hopflow.ops.views import Types, as_tensor, moved
from hopflow.symbolic.size import Size, free_symbols

SHORT: Final = 10
"""Up to this number of elements are sorted by comparisons that no branch depends on,
many rows at a time."""


def _argsort_infer(x: TensorType, **_: bool) -> TensorType:
    if not x.ndim:
        raise ShapeError("argsort: needs an axis to sort along, and x is a scalar.")
    return TensorType(dtypes.int64, x.shape)


def _argsort_run(x: Array, *, descending: bool) -> Array:
    """The indices that sort `x` along its last axis; equal elements keep their order.

    All NaNs are equal, and greater than any number.
    """
    if x.dtype == dtypes.bfloat16.dtype:
        x = x.astype(np.float32)
    if not descending:
        return np.argsort(x, axis=-1, kind="stable").astype(np.int64)
    order = np.argsort(x[..., ::-1], axis=-1, kind="stable")
    flipped: Array = x.shape[-1] - 1 - order[..., ::-1].astype(np.int64)
    return flipped


def _argsort_lower(
    _types: Types, x: Operand, *, descending: bool
) -> Library | Pointwise:
    n = x.type.shape[-1]
    if is_short(n):
        return Pointwise(lambda at: _choose(_order(x, at, descending), at[-1]))
    return Library(
        "argsort",
        (x,),
        scalars=(extent(n), const(descending, dtypes.bool_)),
        batch=x.type.ndim - 1,
        workspace=(TensorType(dtypes.int64, (n,)),) * 3,
    )


def is_short(n: Size) -> bool:
    """Return whether an axis is sorted by comparisons."""
    return isinstance(n, int) and 0 < n <= SHORT


def _in_order(x: Operand, at: Index, descending: bool) -> list[Expr]:
    """Return the elements along a short last axis in order."""
    keys = [x[(*at[:-1], index(k))] for k in range(x.type.shape[-1])]
    if x.type.dtype.kind == "f":  # equal floats may have other bits: zeros and NaNs
        return _exchanged(keys, keys, descending)
    low, high = ("max", "min") if descending else ("min", "max")
    for a, b in merge_exchanges(len(keys)):
        pair = keys[a], keys[b]
        keys[a], keys[b] = binary(low, *pair), binary(high, *pair)
    return keys


def _order(x: Operand, at: Index, descending: bool) -> list[Expr]:
    """Return the positions of the elements along a short last axis in order."""
    positions = [index(k) for k in range(x.type.shape[-1])]
    keys = [x[(*at[:-1], position)] for position in positions]
    return _exchanged(keys, positions, descending)


def _exchanged(
    keys: Sequence[Expr], values: Sequence[Expr], descending: bool
) -> list[Expr]:
    """Return values in the order of their keys."""
    keys, values = [*keys], [*values]
    for a, b in transpositions(len(keys)):
        swaps = _comes_first(keys[b], keys[a], descending)
        for row in (keys, values):
            row[a], row[b] = (
                select(swaps, row[b], row[a]),
                select(swaps, row[a], row[b]),
            )
    return values


def _comes_first(x: Expr, y: Expr, descending: bool) -> Expr:
    """Return whether `x` belongs before `y`, which it follows now."""
    stays = compare("ge" if descending else "le", y, x)
    swaps = unary("not", stays)
    if x.dtype.kind != "f":
        return swaps
    # A comparison with NaN is false: those of two NaNs stay.
    is_number = unary("not", unary("isnan", y if descending else x))
    return binary("and", swaps, is_number)


def _choose(row: Sequence[Expr], at: Expr, start: int = 0) -> Expr:
    """Return the expression at a position of a row, which starts at `start`."""
    if len(row) == 1:
        return row[0]
    middle = len(row) // 2
    low = _choose(row[:middle], at, start)
    high = _choose(row[middle:], at, start + middle)
    return select(compare("lt", at, index(start + middle)), low, high)


argsort_op: Final = OpDef(
    name="argsort",
    promote=None,
    infer=_argsort_infer,  # T[*s, n] -> i64[*s, n]
    run=_argsort_run,
    lower=_argsort_lower,
    batch=batching.along,
    samples=(
        Sample(("T[3, 5]",), {"descending": False}, dtypes.ALL),
        Sample(("T[2, 12]",), {"descending": True}, dtypes.ALL),
        Sample(("T[2, 0]",), {"descending": False}),
    ),
)


def _top_order_infer(x: TensorType, *, count: Size) -> TensorType:
    n = x.shape[-1]
    is_short = less(n, count)
    # `top_k` lets the run check unbacked sizes.
    if is_short is None and all(s.hint is not None for s in free_symbols(n, count)):
        is_short = not count <= n
    if is_short:
        raise ShapeError(
            f"top_order: {x} has not {count} elements along its last axis."
        )
    return TensorType(dtypes.int64, (*x.shape[:-1], count))


def _top_order_run(x: Array, *, count: int) -> Array:
    """The positions of the `count` largest elements along the last axis, descending."""
    return np.ascontiguousarray(_argsort_run(x, descending=True)[..., :count])


def _top_order_lower(_types: Types, x: Operand, *, count: Size) -> Library | Pointwise:
    n = x.type.shape[-1]
    if is_short(n):
        return Pointwise(lambda at: _choose(_order(x, at, descending=True), at[-1]))
    return Library(
        "top_order",
        (x,),
        scalars=(extent(n), extent(count)),
        batch=x.type.ndim - 1,
        workspace=(TensorType(dtypes.int64, (n,)),) * 4,
    )


_top_order: Final = OpDef(
    name="top_order",
    promote=None,
    infer=_top_order_infer,  # T[*s, n] -> i64[*s, count]
    run=_top_order_run,
    lower=_top_order_lower,
    batch=batching.along,
    samples=(
        Sample(("T[3, 5]",), {"count": 2}, dtypes.ALL),
        Sample(("T[300]",), {"count": 100}, dtypes.ALL),
        Sample(("T[2, 4]",), {"count": 0}),
    ),
)


def _sort_infer(x: TensorType, **_: bool) -> TensorType:
    return x


def _sort_run(x: Array, *, descending: bool) -> Array:
    """The elements of `x` in order along its last axis.

    All NaNs are equal, and greater than any number.
    """
    order = _argsort_run(x, descending=descending)
    return np.take_along_axis(x, order, axis=-1)


def _sort_lower(_types: Types, x: Operand, *, descending: bool) -> Library | Pointwise:
    n = x.type.shape[-1]
    if is_short(n):
        return Pointwise(lambda at: _choose(_in_order(x, at, descending), at[-1]))
    return Library(
        "sort",
        (x,),
        scalars=(extent(n), const(descending, dtypes.bool_)),
        batch=x.type.ndim - 1,
        workspace=(TensorType(dtypes.int64, (n,)),) * 2,
    )


def _sort_jvp(t: Any, _out: Value, x: Value, *, descending: bool) -> Value:
    return _picked(t, apply(argsort_op, x, descending=descending))


def _sort_op(name: str, *samples: Sample) -> OpDef:
    return OpDef(
        name=name,
        promote=None,
        infer=_sort_infer,  # T[*s, n] -> T[*s, n]
        run=_sort_run,
        lower=_sort_lower,
        jvp=(_sort_jvp,),
        batch=batching.along,
        samples=samples,
    )


_short_sort: Final = _sort_op(
    "short_sort",
    Sample(("T[3, 5]",), {"descending": False}, dtypes.ALL),
    Sample(("T[8]",), {"descending": True}, dtypes.ALL),
    Sample(("T[2, 1]",), {"descending": False}),
)
# What `hopflow.compiler.passes.sort_values` makes of `argsort` and a gather, whose
# derivatives read the order. Files of exported programs have the operation above.
sort_op: Final = _sort_op(
    "sort",
    Sample(("T[3, 12]",), {"descending": False}, dtypes.ALL),
    Sample(("T[2, 70]",), {"descending": True}, dtypes.ALL),
    Sample(("T[2, 0]",), {"descending": False}),
)


def _prepared(name: str, x: Any, axis: Any) -> tuple[Any, int]:
    """Return `x` with the axis to sort along moved last, and its original position."""
    x = as_tensor(name, x)
    axis = normalize_axis(name, axis, x.ndim)
    return moved(x, axis, x.ndim - 1), axis


def argsort(
    x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Value:
    """Return the indices that sort `x` along an axis: T[*s] -> i64[*s].

    NaNs are greater than any number: last, or first if `descending`.

    Args:
        x: A tensor of any dtype.
        axis: The axis.
        descending: Whether the largest comes first.
        stable: Whether equal elements must keep their order; they always do.

    Raises:
        AxisError: `x` has no such axis.

    >>> hf.argsort(hf.asarray([3, 1, 2]))
    Tensor([1, 2, 0], i64[3])
    """
    as_flag("argsort", "stable", stable)
    last, axis = _prepared("argsort", x, axis)
    order = apply(
        argsort_op, last, descending=as_flag("argsort", "descending", descending)
    )
    return moved(order, last.ndim - 1, axis)  # type: ignore[no-any-return]


def sort(
    x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Value:
    """Return `x` sorted along an axis; see `argsort`.

    Raises:
        AxisError: `x` has no such axis.

    >>> hf.sort(hf.asarray([3, 1, 2]))
    Tensor([1, 2, 3], i64[3])
    """
    as_flag("sort", "stable", stable)
    last, axis = _prepared("sort", x, axis)
    descending = as_flag("sort", "descending", descending)
    if is_short(last.shape[-1]):
        result = apply(_short_sort, last, descending=descending)
    else:
        result = _picked(last, apply(argsort_op, last, descending=descending))
    return moved(result, last.ndim - 1, axis)  # type: ignore[no-any-return]


def _picked(x: Any, order: Value) -> Value:
    """Return the elements of `x` at indices along its last axis, which are in range."""
    last = x.ndim - 1
    return apply(gather_clip, x, order, axes=(last,), batch=last)


class TopK(NamedTuple):
    """The largest elements along an axis, and their indices."""

    values: Value
    indices: Value


def top_k(x: Any, k: Size, /, *, axis: int = -1) -> TopK:
    """Return the `k` largest elements along an axis, descending, and their indices.

    Equal elements keep their order, -0.0 and 0.0 among them (JAX takes -0.0 for less).
    NaNs are greater than any number.

    Raises:
        AxisError: `x` has no such axis.
        ShapeError: the axis has fewer than `k` elements (in the run, if only it can
            tell).

    >>> hf.top_k(hf.asarray([3, 1, 2]), 2).values
    Tensor([3, 2], i64[2])
    """
    last, axis = _prepared("top_k", x, axis)
    count = as_size("top_k", k, "k")
    n = last.shape[-1]
    last = with_elements(last, n, count, f"top_k: axis {axis} must have `k` elements")
    if not count <= n:
        raise ShapeError(f"top_k: `k` is {count}, and axis {axis} has {n} elements.")
    chosen = apply(_top_order, last, count=count)
    back = last.ndim - 1, axis
    return TopK(moved(_picked(last, chosen), *back), moved(chosen, *back))
