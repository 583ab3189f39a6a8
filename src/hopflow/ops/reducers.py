"""Primitives that reduce axes, or run along one: sums, extrema and their positions.

Each drops the axes it reduces. `reduce` has the public functions, with `keepdims`,
default dtypes, means and variances.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError, AxisError, ShapeError
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, cast, compare, const, select
from hopflow.loop_ir.kernels import Operand, Pointwise, Prefix, Reduction
from hopflow.ops import scalar
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import NUMERIC, Array, is_zero, normalize_axes, require_dtype

__all__ = [
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "reduce_and",
    "reduce_argmax",
    "reduce_argmin",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
]


# --- primitives: all elements along some axes become one ------------------------------


def _without(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def _check_axes(name: str, x: TensorType, axes: Sequence[int]) -> None:
    if normalize_axes(name, tuple(axes), x.ndim, "axes") != tuple(axes):
        raise AxisError(
            f"{name}: `axes` must be counted from the front, and is {axes}."
        )


def _interleaved(axes: Sequence[int], ndim: int) -> Callable[[Index, Index], Index]:
    """(index of the result, index of the reduced space) -> index of the operand."""

    def source(at: Index, along: Index) -> Index:
        kept, reduced = iter(at), iter(along)
        return tuple(
            next(reduced) if axis in axes else next(kept) for axis in range(ndim)
        )

    return source


def _accumulator(dtype: DType) -> DType:
    """What a sum of `dtype` is kept in: 16-bit floats would lose all small addends."""
    return dtypes.float32 if dtype.is_float and dtype.bits == 16 else dtype


def lowest(dtype: DType) -> bool | int | float:
    """The neutral element of `max`."""
    if dtype.is_float:
        return -math.inf
    return False if dtype.kind == "b" else dtypes.iinfo(dtype).min


def highest(dtype: DType) -> bool | int | float:
    """The neutral element of `min`."""
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
) -> OpDef:
    """A reduction by one of the kernel vocabulary's combiners.

    T[*s] -> T[s without `axes`]
    """

    def infer(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
        _check_axes(name, x, axes)
        require_dtype(name, [x], allowed)
        for axis in () if has_identity else axes:
            if is_zero(x.shape[axis]):
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
        samples=_samples(allowed, has_identity),
    )


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

reduce_sum: Final = _reduction(
    "reduce_sum",
    "The sum over `axes`; of 16-bit floats, rounded once.",
    lambda x, axes: np.add.reduce(x, axes, x.dtype),
    "add",
    lambda dtype: 0,
    NUMERIC,
)
reduce_prod: Final = _reduction(
    "reduce_prod",
    "The product over `axes`; of 16-bit floats, rounded once.",
    lambda x, axes: np.multiply.reduce(x, axes, x.dtype),
    "mul",
    lambda dtype: 1,
    NUMERIC,
)
reduce_max: Final = _reduction(
    "reduce_max",
    "The largest over `axes`; a NaN if there is one.",
    lambda x, axes: np.maximum.reduce(x, axes),
    "max",
    lowest,
    dtypes.ALL,
    has_identity=False,
)
reduce_min: Final = _reduction(
    "reduce_min",
    "The smallest over `axes`; a NaN if there is one.",
    lambda x, axes: np.minimum.reduce(x, axes),
    "min",
    highest,
    dtypes.ALL,
    has_identity=False,
)
reduce_and: Final = _reduction(
    "reduce_and",
    "Whether all over `axes` hold.",
    lambda x, axes: np.logical_and.reduce(x, axes),
    "and",
    lambda dtype: True,
    _BOOL,
)
reduce_or: Final = _reduction(
    "reduce_or",
    "Whether any over `axes` holds.",
    lambda x, axes: np.logical_or.reduce(x, axes),
    "or",
    lambda dtype: False,
    _BOOL,
)


# --- primitives: the position of an extremum ------------------------------------------


def _position(
    name: str,
    doc: str,
    run: Callable[..., Any],
    beats: str,
    neutral: Callable[[DType], bool | int | float],
) -> OpDef:
    """T[*s] -> i64[s without `axis`], the first position of an extremum or a NaN."""

    def infer(x: TensorType, *, axis: int) -> TensorType:
        _check_axes(name, x, (axis,))
        if is_zero(x.shape[axis]):
            raise ShapeError(
                f"{name}: axis {axis} of {x} has no elements, so no position in it is "
                "one of the largest or smallest. Test the size first."
            )
        return TensorType(dtypes.int64, _without(x.shape, (axis,)))

    def run_as(x: Array, *, axis: int) -> Array:
        if dtypes.as_dtype(x.dtype) is dtypes.bfloat16:
            x = x.astype(np.float32)
        return np.asarray(run(x, axis), np.int64)

    def better(best: tuple[Expr, ...], new: tuple[Expr, ...]) -> tuple[Expr, ...]:
        wins = compare(beats, new[0], best[0])
        if new[0].dtype.is_float:  # the first NaN wins over all numbers
            first_nan = scalar.both(
                scalar.is_nan(new[0]), scalar.negate(scalar.is_nan(best[0]))
            )
            wins = scalar.either(wins, first_nan)
        return select(wins, new[0], best[0]), select(wins, new[1], best[1])

    def lower(_types: Sequence[TensorType], x: Operand, *, axis: int) -> Reduction:
        source = _interleaved((axis,), x.type.ndim)
        dtype = x.type.dtype
        return Reduction(
            space=(x.type.shape[axis],),
            init=(const(neutral(dtype), dtype), expr.index(0)),
            combine=better,
            element=lambda at, along: (x[source(at, along)], along[0]),
            finish=(lambda at, best: best[1],),
        )

    run_as.__doc__ = doc
    return OpDef(
        name=name,
        promote=None,
        infer=infer,
        run=run_as,
        lower=lower,
        samples=(
            Sample(("T[3, 4]",), {"axis": 1}, dtypes.ALL),
            Sample(("T[4, 3]",), {"axis": 0}),
            Sample(("T[5]",), {"axis": 0}),
        ),
    )


reduce_argmax: Final = _position(
    "reduce_argmax",
    "The first position along `axis` of the largest, or of a NaN.",
    np.argmax,
    "gt",
    lowest,
)
reduce_argmin: Final = _position(
    "reduce_argmin",
    "The first position along `axis` of the smallest, or of a NaN.",
    np.argmin,
    "lt",
    highest,
)


# --- primitives: running totals -------------------------------------------------------


def _running(
    name: str,
    doc: str,
    run: Callable[..., Any],
    combine: Callable[[Expr, Expr], Expr],
    neutral: Callable[[DType], bool | int | float],
    allowed: tuple[DType, ...],
) -> OpDef:
    """T[*s] -> T[*s]; `reverse` runs from the end of `axis`."""

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
        samples=(
            Sample(("T[3, 4]",), {"axis": 1, "reverse": False}, allowed),
            Sample(("T[3, 4]",), {"axis": 0, "reverse": True}, allowed[-4:]),
            Sample(("T[0]",), {"axis": 0, "reverse": False}, allowed[-1:]),
        ),
    )


def _cumsum_run(x: Array, axis: int, dtype: Any) -> Array:
    # From 0, as in JAX: so the sum of -0 is 0.
    return np.add.accumulate(x, axis, dtype) + np.zeros((), dtype)


cumsum: Final = _running(
    "cumsum",
    "The sums of the elements up to each, along `axis`.",
    _cumsum_run,
    expr.add,
    lambda dtype: 0,
    NUMERIC,
)
cumprod: Final = _running(
    "cumprod",
    "The products of the elements up to each, along `axis`.",
    np.multiply.accumulate,
    expr.mul,
    lambda dtype: 1,
    NUMERIC,
)
cummax: Final = _running(
    "cummax",
    "The largest of the elements up to each, along `axis`.",
    np.maximum.accumulate,
    scalar.maximum,
    lowest,
    dtypes.ALL,
)
cummin: Final = _running(
    "cummin",
    "The smallest of the elements up to each, along `axis`.",
    np.minimum.accumulate,
    scalar.minimum,
    highest,
    dtypes.ALL,
)
