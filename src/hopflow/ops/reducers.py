"""Primitives that reduce axes, or accumulate along one: sums, extrema, positions.

Reduced axes are dropped. `reduce` has the public functions, with `keepdims`, default
dtypes, means and variances.
"""

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError, AxisError, ShapeError
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, cast, compare, const, select
from hopflow.loop_ir.kernels import Operand, Pointwise, Prefix, Reduction
from hopflow.ops import batching, scalar
from hopflow.ops.convert import apply, convert
from hopflow.ops.elementwise import maximum, minimum, multiply
from hopflow.ops.logic import equal
from hopflow.ops.opdef import OPERATIONS, OpDef, Rules, Sample
from hopflow.ops.rules import NUMERIC, Array, normalize_axes, require_dtype
from hopflow.ops.running import RunningTangents
from hopflow.ops.sizes import is_empty, smaller
from hopflow.ops.views import (
    broadcast_to,
    part,
    reshape,
    reshaped,
    transposed,
)
from hopflow.symbolic.size import Size

# --- primitives: all elements along some axes become one ------------------------------


def _without(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def _check_axes(name: str, x: TensorType, axes: Sequence[int]) -> None:
    if normalize_axes(name, tuple(axes), x.ndim, "axes") != tuple(axes):
        raise AxisError(
            f"{name}: `axes` must be counted from the front, and is {axes}."
        )


def _interleaved(axes: Sequence[int], ndim: int) -> Callable[[Index, Index], Index]:
    """Return (index of the result, index of the reduced space) -> operand's index."""

    def source(at: Index, along: Index) -> Index:
        kept, reduced = iter(at), iter(along)
        return tuple(
            next(reduced) if axis in axes else next(kept) for axis in range(ndim)
        )

    return source


def _accumulator(dtype: DType) -> DType:
    """Return the accumulator of sums: 16-bit floats would lose small addends."""
    return dtypes.float32 if dtype.is_float and dtype.bits == 16 else dtype


def lowest(dtype: DType) -> bool | int | float:
    """Return the identity of `max`."""
    if dtype.is_float:
        return -math.inf
    return False if dtype.kind == "b" else dtypes.iinfo(dtype).min


def highest(dtype: DType) -> bool | int | float:
    """Return the identity of `min`."""
    if dtype.is_float:
        return math.inf
    return True if dtype.kind == "b" else dtypes.iinfo(dtype).max


def _reduction(
    name: str,
    doc: str,
    run: Callable[..., Any],
    combine: str,
    neutral: Callable[[DType], bool | int | float],
    allowed: tuple[DType, ...],
    *,
    has_identity: bool = True,
    jvp: Rules | None = None,
    transpose: Rules | None = None,
) -> OpDef:
    """Return a reduction by a kernel combiner: T[*s] -> T[s without `axes`]."""

    def infer(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
        _check_axes(name, x, axes)
        require_dtype(name, [x], allowed)
        for axis in () if has_identity else axes:
            if is_empty(x.shape[axis]):
                raise ShapeError(
                    f"{name}: axis {axis} of {x} has no elements, and there is no "
                    "largest or smallest of none. Test the size first."
                )
        return TensorType(x.dtype, _without(x.shape, axes))  # never weak, as in JAX

    def run_as(x: Array, *, axes: tuple[int, ...]) -> Array:
        wide = _accumulator(dtypes.as_dtype(x.dtype)).dtype
        with np.errstate(all="ignore"):
            return np.asarray(run(x.astype(wide, copy=False), axes), x.dtype)

    def lower(
        _types: Sequence[TensorType], x: Operand, *, axes: tuple[int, ...]
    ) -> Reduction | Pointwise:
        if not axes:
            return Pointwise(lambda at: x[at])
        dtype = x.type.dtype
        wide = _accumulator(dtype)
        source = _interleaved(axes, x.type.ndim)
        return Reduction(
            space=tuple(x.type.shape[axis] for axis in sorted(axes)),
            init=(const(neutral(dtype), wide),),
            combine=combine,
            element=lambda at, along: (cast(x[source(at, along)], wide),),
            finish=(lambda at, totals: cast(totals[0], dtype),),
        )

    run_as.__doc__ = doc
    return OpDef(
        name=name,
        promote=None,
        infer=infer,
        run=run_as,
        lower=lower,
        jvp=jvp,
        transpose=transpose,
        batch=batching.per_example(axes=batching.of_axes),
        samples=_samples(allowed, has_identity),
    )


def spread(reduced: Value, like: Any, axes: tuple[int, ...]) -> Value:
    """Return a result reduced over `axes`, broadcast to the shape of `like`."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(like.shape))
    return apply(broadcast_to, apply(reshape, reduced, shape=kept), shape=like.shape)


def _samples(allowed: tuple[DType, ...], has_identity: bool) -> tuple[Sample, ...]:
    samples = (
        Sample(("T[3, 4]",), {"axes": (1,)}, allowed),
        Sample(("T[3, 4]",), {"axes": (0,)}, allowed[-4:]),
        Sample(("T[2, 3, 2]",), {"axes": (0, 2)}, allowed),
        Sample(("T[3]",), {"axes": (0,)}, allowed[-4:]),
        Sample(("T[]",), {"axes": ()}, allowed[-1:]),
        Sample(("T[0, 3]",), {"axes": (1,)}, allowed[-1:]),
    )
    empty = Sample(("T[3, 0]",), {"axes": (1,)}, allowed)
    return (*samples, empty) if has_identity else samples


_BOOL: Final = (dtypes.bool_,)


def _product_jvp(t: Any, _out: Any, x: Any, *, axes: tuple[int, ...]) -> Value:
    """Return the sum of `t` times the product of the other elements, without division
    by elements that may be 0."""
    kept = [a for a in range(x.ndim) if a not in axes]
    rows = tuple(x.shape[a] for a in kept)
    shape = (*rows, prod((x.shape[a] for a in axes), start=1))
    last = len(kept)
    x, t = (reshaped(transposed(v, (*kept, *axes)), shape) for v in (x, t))
    for reverse in (False, True):
        others = apply(cumprod, x, axis=last, reverse=reverse)
        t = t * _shifted(others, 1, 1.0, axis=last, reverse=reverse)
    return apply(reduce_sum, t, axes=(last,))


def _extremum_jvp(t: Any, out: Any, x: Any, *, axes: tuple[int, ...]) -> Any:
    """Return the mean of `t` over the elements that equal the extremum."""
    hits = apply(convert, equal(x, spread(out, x, axes)), dtype=x.dtype)
    total = apply(reduce_sum, t * hits, axes=axes)
    return total / apply(reduce_sum, hits, axes=axes)


reduce_sum: Final[OpDef] = _reduction(
    "reduce_sum",
    "The sum over `axes`; sums of 16-bit floats are rounded once.",
    lambda x, axes: np.add.reduce(x, axes, x.dtype),
    "add",
    lambda dtype: 0,
    NUMERIC,
    jvp="linear",
    transpose=(lambda ct, x, axes: spread(ct, x, axes),),
)
reduce_prod: Final = _reduction(
    "reduce_prod",
    "The product over `axes`; products of 16-bit floats are rounded once.",
    lambda x, axes: np.multiply.reduce(x, axes, x.dtype),
    "mul",
    lambda dtype: 1,
    NUMERIC,
    jvp=(_product_jvp,),
)
reduce_max: Final = _reduction(
    "reduce_max",
    "The largest element over `axes`; NaN if there is one.",
    lambda x, axes: np.maximum.reduce(x, axes),
    "max",
    lowest,
    dtypes.ALL,
    has_identity=False,
    jvp=(_extremum_jvp,),
)
reduce_min: Final = _reduction(
    "reduce_min",
    "The smallest element over `axes`; NaN if there is one.",
    lambda x, axes: np.minimum.reduce(x, axes),
    "min",
    highest,
    dtypes.ALL,
    has_identity=False,
    jvp=(_extremum_jvp,),
)
reduce_and: Final = _reduction(
    "reduce_and",
    "Whether all elements over `axes` are true.",
    lambda x, axes: np.logical_and.reduce(x, axes),
    "and",
    lambda dtype: True,
    _BOOL,
)
reduce_or: Final = _reduction(
    "reduce_or",
    "Whether any element over `axes` is true.",
    lambda x, axes: np.logical_or.reduce(x, axes),
    "or",
    lambda dtype: False,
    _BOOL,
)


# --- primitives: the position of a value ----------------------------------------------


def _find_infer(x: TensorType, value: TensorType, *, axis: int) -> TensorType:
    _check_axes("reduce_find", x, (axis,))
    require_dtype("reduce_find", [value], (x.dtype,))
    shape = _without(x.shape, (axis,))
    if value.ndim != len(shape) or not all(
        m == n for m, n in zip(value.shape, shape, strict=True)
    ):
        raise ShapeError(
            f"reduce_find: `value` must have all axes of {x} but {axis}, and is "
            f"{value}."
        )
    return TensorType(dtypes.int64, shape)


def _find_run(x: Array, value: Array, *, axis: int) -> Array:
    """The first position along `axis` of `value` or a NaN; without one, the size."""
    n = x.shape[axis]
    if not n:
        return np.zeros(np.shape(value), np.int64)
    hits = x == np.expand_dims(value, axis)
    if dtypes.as_dtype(x.dtype).is_float:
        hits |= x != x
    first = hits.argmax(axis, keepdims=True)
    has_hit = np.take_along_axis(hits, first, axis)
    return np.asarray(np.where(has_hit, first, n).squeeze(axis))


def place_of(value: Expr, element: Expr, place: Expr, size: Expr) -> Expr:
    """Return the place of an element that is the value or a NaN, or the size of the
    axis for another."""
    hit = compare("eq", element, value)
    if element.dtype.is_float:
        hit = scalar.either(hit, scalar.is_nan(element))
    return select(hit, cast(place, size.dtype), size)


def _find_lower(
    _types: Sequence[TensorType], x: Operand, value: Operand, *, axis: int
) -> Reduction:
    # A minimum of positions may be taken in any order, so it is vectorised. Narrow ones
    # take no more registers than the elements.
    source = _interleaved((axis,), x.type.ndim)
    n = x.type.shape[axis]
    is_narrow = isinstance(n, int) and n <= dtypes.iinfo(dtypes.int32).max
    dtype = dtypes.int32 if is_narrow else dtypes.int64
    size = cast(expr.extent(n), dtype)

    def position(at: Index, along: Index) -> tuple[Expr, ...]:
        return (place_of(value[at], x[source(at, along)], along[0], size),)

    def finish(_: Index, first: tuple[Expr, ...]) -> Expr:
        return cast(first[0], dtypes.int64)

    return Reduction((n,), (size,), "min", position, (finish,))


reduce_find: Final = OpDef(
    name="reduce_find",
    promote=None,
    infer=_find_infer,  # T[*s], T[s without `axis`] -> i64[s without `axis`]
    run=_find_run,
    lower=_find_lower,
    batch=batching.per_example(axis=batching.of_axis),
    samples=(
        Sample(("T[3, 4]", "T[3]"), {"axis": 1}, dtypes.ALL),
        Sample(("T[4, 3]", "T[3]"), {"axis": 0}),
        Sample(("T[5]", "T[]"), {"axis": 0}),
        Sample(("T[0]", "T[]"), {"axis": 0}),
    ),
)


# --- primitives: running totals -------------------------------------------------------


def _running(
    name: str,
    doc: str,
    run: Callable[..., Any],
    combine: Callable[[Expr, Expr], Expr],
    neutral: Callable[[DType], bool | int | float],
    allowed: tuple[DType, ...],
    jvp: Rules,
    transpose: Rules | None = None,
) -> OpDef:
    """Return a running total: T[*s] -> T[*s]; `reverse` runs from the end of `axis`."""

    def infer(x: TensorType, *, axis: int, reverse: bool) -> TensorType:
        _check_axes(name, x, (axis,))
        if not isinstance(reverse, bool):
            raise ArgumentTypeError(f"{name}: `reverse` must be a bool.")
        require_dtype(name, [x], allowed)
        return TensorType(x.dtype, x.shape)

    def run_as(x: Array, *, axis: int, reverse: bool) -> Array:
        with np.errstate(all="ignore"):
            if not reverse:
                return np.asarray(run(x, axis, x.dtype), x.dtype)
            turned = run(np.flip(x, axis), axis, x.dtype)
            return np.asarray(np.flip(turned, axis), x.dtype)

    def lower(
        _types: Sequence[TensorType], x: Operand, *, axis: int, reverse: bool
    ) -> Prefix:
        dtype = x.type.dtype
        return Prefix(
            axis=axis,
            init=const(neutral(dtype), dtype),
            combine=combine,
            element=lambda at: x[at],
            reverse=reverse,
        )

    run_as.__doc__ = doc
    return OpDef(
        name=name,
        promote=None,
        infer=infer,
        run=run_as,
        lower=lower,
        jvp=jvp,
        transpose=transpose,
        batch=batching.per_example(axis=batching.of_axis),
        samples=(
            Sample(("T[3, 4]",), {"axis": 1, "reverse": False}, allowed),
            Sample(("T[3, 4]",), {"axis": 0, "reverse": True}, allowed[-4:]),
            Sample(("T[0]",), {"axis": 0, "reverse": False}, allowed[-1:]),
        ),
    )


def _shifted(x: Any, by: Size, fill: float, *, axis: int, reverse: bool) -> Any:
    """Return `x` shifted along `axis` in the direction in which totals run."""
    n = x.shape[axis]
    by = smaller(by, n)
    ends = [tuple(by if a == axis else 0 for a in range(x.ndim)), (0,) * x.ndim]
    before, after = reversed(ends) if reverse else ends
    value = Constant(fill, TensorType(x.dtype))
    wide = apply(OPERATIONS["pad"], x, value, before=before, after=after)
    return part(wide, axis, by if reverse else 0, n)


def _cumsum_run(x: Array, axis: int, dtype: Any) -> Array:
    # The sum starts from 0, as in JAX, so that the sum of -0 is 0.
    return np.add.accumulate(x, axis, dtype) + np.zeros((), dtype)


cumsum: Final[OpDef] = _running(
    "cumsum",
    "The sums of the elements up to and including each, along `axis`.",
    _cumsum_run,
    expr.add,
    lambda dtype: 0,
    NUMERIC,
    jvp="linear",
    transpose=(
        lambda ct, x, axis, reverse: apply(cumsum, ct, axis=axis, reverse=not reverse),
    ),
)
cumprod: Final = _running(
    "cumprod",
    "The products of the elements up to and including each, along `axis`.",
    np.multiply.accumulate,
    expr.mul,
    lambda dtype: 1,
    NUMERIC,
    jvp=(RunningTangents(multiply),),
)
cummax: Final = _running(
    "cummax",
    "The largest element up to each, along `axis`.",
    np.maximum.accumulate,
    scalar.maximum,
    lowest,
    dtypes.ALL,
    jvp=(RunningTangents(maximum),),
)
cummin: Final = _running(
    "cummin",
    "The smallest element up to each, along `axis`.",
    np.minimum.accumulate,
    scalar.minimum,
    highest,
    dtypes.ALL,
    jvp=(RunningTangents(minimum),),
)
