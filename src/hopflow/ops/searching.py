"""Searching: nonzero and searchsorted; argmax and argmin are from `reduce`."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind
from hopflow.errors import DTypeError, ShapeError
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import (
    Expr,
    Index,
    binary,
    compare,
    const,
    extent,
    index,
    select,
)
from hopflow.loop_ir.kernels import Operand, Pointwise
from hopflow.ops import batching, scalar
from hopflow.ops.convert import apply, as_value
from hopflow.ops.creation import full, zeros
from hopflow.ops.elementwise import add, logical_and, logical_not, logical_or, subtract
from hopflow.ops.gather import gather_clip
from hopflow.ops.indexing import take
from hopflow.ops.logic import greater, isnan, less, where
from hopflow.ops.masks import where_true
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.reduce import argmax, argmin
from hopflow.ops.rules import NUMERIC, Array, is_zero, numeric, one_of, require_dtype
from hopflow.ops.views import Types, as_tensor
from hopflow.symbolic.size import Size

__all__ = ["argmax", "argmin", "nonzero", "searchsorted"]


def nonzero(x: Any, /) -> tuple[Value, ...]:
    """Return the indices of the elements that are not 0, in row-major order.

    Returns:
        For each axis of `x`, i64[n], where n is the number of such elements.

    Raises:
        ShapeError: `x` is a scalar.
        TraceError: `x` is traced where n cannot become a symbol.

    >>> hf.nonzero(hf.asarray([0, 3, 0, 5]))
    (Tensor([1, 3], i64[2]),)
    """
    x = as_tensor("nonzero", x)
    if not x.ndim:
        raise ShapeError("nonzero: needs a tensor with axes, and `x` is a scalar.")
    remedy = (
        "Keep the shape instead, with `hf.where(mask, x, fill)`; to count, use "
        "`hf.count_nonzero`."
    )
    return where_true("nonzero", x, remedy)


# --- searchsorted ---------------------------------------------------------------------

# An axis of symbolic size has at most 2 to this power elements.
_MOST_BITS: Final = 40


def _halvings(n: Size) -> int:
    """Return how often `n` can be halved, rounding down, until it is 0."""
    return n.bit_length() if isinstance(n, int) else _MOST_BITS


def _searchsorted_infer(x1: TensorType, x2: TensorType, **_: str) -> TensorType:
    require_dtype("searchsorted", [x1, x2], NUMERIC)
    if x1.dtype is not x2.dtype:
        raise DTypeError(f"searchsorted: dtypes {x1.dtype} and {x2.dtype} differ.")
    if x1.ndim != 1:
        raise ShapeError(f"searchsorted: `x1` must have one axis, and is {x1}.")
    return TensorType(dtypes.int64, x2.shape)


def _searchsorted_run(x1: Array, x2: Array, *, side: Any) -> Array:
    """The positions at which to insert `x2` into the ascending `x1`."""
    if x1.dtype == dtypes.bfloat16.dtype:
        x1, x2 = x1.astype(np.float32), x2.astype(np.float32)
    return np.asarray(np.searchsorted(x1, x2, side=side)).astype(np.int64)


def _is_before(x: Expr, y: Expr) -> Expr:
    """Return `x < y`, where NaN is greater than any number."""
    before = compare("lt", x, y)
    if not x.dtype.is_float:
        return before
    return scalar.either(
        before, scalar.both(scalar.is_nan(y), scalar.negate(scalar.is_nan(x)))
    )


def _searchsorted_lower(
    _types: Types, x1: Operand, x2: Operand, *, side: str
) -> Pointwise:
    n = x1.type.shape[0]

    def element(at: Index) -> Expr:
        value = x2[at]
        # At least `count` elements come before `value`, and at most `count + left`.
        count, left = index(0), extent(n)
        for _ in range(_halvings(n)):
            remaining = binary("lshr", left, index(1))
            candidate = expr.add(count, expr.sub(left, remaining))
            is_any = compare("gt", left, index(0))
            last = (expr.sub(candidate, index(1)),)
            pivot = x1.where(is_any, last, const(0, x1.type.dtype))
            before = (
                _is_before(pivot, value)
                if side == "left"
                else scalar.negate(_is_before(value, pivot))
            )
            count = select(scalar.both(is_any, before), candidate, count)
            left = remaining
        return count

    if is_zero(n):
        return Pointwise(lambda _: index(0))
    return Pointwise(element)


def _searchsorted_batch(
    op: OpDef, size: Size, batched: tuple[bool, ...], x1: Any, x2: Any, *, side: str
) -> Sequence[Value]:
    if not batched[0]:
        return bind(op, [x1, x2], {"side": side})
    # The same search as in `_searchsorted_lower`, on tensors.
    values = as_value(batching.in_batch(size, batched[1], x2))
    n = x1.shape[1]
    count = zeros(values.shape, dtype=dtypes.int64)
    left: Any = n if isinstance(n, int) else full((), n, dtype=dtypes.int64)
    for _ in range(_halvings(n)):
        remaining = left // 2
        candidate = add(count, left - remaining)
        pivot = apply(gather_clip, x1, subtract(candidate, 1), axes=(1,), batch=1)
        before = (
            _comes_before(pivot, values)
            if side == "left"
            else logical_not(_comes_before(values, pivot))
        )
        if not isinstance(n, int):  # `left` may be 0 before the last step
            before = logical_and(greater(left, 0), before)
        count = where(before, candidate, count)
        left = remaining
    return [count]


def _comes_before(x: Value, y: Value) -> Value:
    """Return `_is_before` of tensors."""
    if not x.dtype.is_float:
        return as_value(less(x, y))
    is_last = logical_and(isnan(y), logical_not(isnan(x)))
    return as_value(logical_or(less(x, y), is_last))


_searchsorted: Final = OpDef(
    name="searchsorted",
    promote=numeric,
    infer=_searchsorted_infer,  # T[n], T[*s] -> i64[*s]
    run=_searchsorted_run,
    lower=_searchsorted_lower,
    batch=_searchsorted_batch,
    samples=(
        # A single element is always sorted.
        Sample(("T[1]", "T[4]"), {"side": "left"}, NUMERIC),
        Sample(("T[1]", "T[]"), {"side": "right"}, NUMERIC),
        Sample(("T[0]", "T[2, 3]"), {"side": "left"}),
    ),
)


def searchsorted(
    x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None
) -> Value:
    """Return the indices at which to insert `x2` into `x1` so that it stays sorted.

    NaNs are greater than any number.

    Args:
        x1: A tensor T[n], ascending (after `sorter`).
        x2: The values to look up, T[*s].
        side: Insert before ("left") or after ("right") equal elements of `x1`.
        sorter: Indices that sort `x1`, such as `argsort(x1)`; None: it is sorted.

    Returns:
        i64[*s].

    Raises:
        ArgumentValueError: `side` is neither.
        DTypeError: the operands are not numeric.
        ShapeError: `x1` does not have exactly one axis.

    >>> hf.searchsorted(hf.asarray([1, 3, 5]), hf.asarray([0, 3, 9]))
    Tensor([0, 1, 3], i64[3])
    """
    one_of("searchsorted", "side", side, ("left", "right"))
    if sorter is not None:
        x1 = take(x1, sorter, axis=0)
    result: Value = _searchsorted(as_tensor("searchsorted", x1), x2, side=side)
    return result
