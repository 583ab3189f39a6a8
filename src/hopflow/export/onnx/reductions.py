"""Reductions, running totals, products of matrices, and order."""

from collections.abc import Callable
from typing import Any, Final

from hopflow import dtypes
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.pointwise import positions, sum_of_rows
from hopflow.export.onnx.scopes import Scope, Value, inner_info
from hopflow.export.onnx.sizes import Number
from hopflow.graph.types import is_zero
from hopflow.ops.reducers import highest, lowest
from hopflow.ops.sizes import may_be_zero
from hopflow.symbolic.size import Size

# --- reductions -----------------------------------------------------------------------


def _float_reduction(operator: str) -> Callable[..., Value]:
    """A sum or product: of integers by a product of matrices or a running total, for
    onnxruntime's reductions compute in floats."""

    def rule(site: Site, x: Value, *, axes: tuple[int, ...]) -> Value:
        if not axes:
            return x
        if x.dtype.is_float:
            return site(operator, x, site.scope.integers(axes), keepdims=0)
        rows = _reduced_last(site, x, axes)
        fold = sum_of_rows if operator == "ReduceSum" else _product_of_rows
        return fold(site, rows)

    return rule


def _reduced_last(site: Site, x: Value, axes: tuple[int, ...]) -> Value:
    """A tensor whose last axis has all elements along `axes`."""
    shape = site.types[0].shape
    kept = [a for a in range(len(shape)) if a not in axes]
    moved = site("Transpose", x, perm=[*kept, *sorted(axes)])
    total: Size = 1
    for axis in axes:
        total = total * shape[axis]
    return site.reshaped(moved, (*(shape[a] for a in kept), total))


def _product_of_rows(site: Site, rows: Value) -> Value:
    ndim = site.results[0].ndim
    widths = site.scope.integers((*[0] * ndim, 1, *[0] * (ndim + 1)))
    padded = site("Pad", rows, widths, site.constant(1, rows.dtype), mode="constant")
    totals = site("CumProd", padded, site.constant(ndim))
    return site("Gather", totals, site.constant(-1), axis=ndim)


def _extremum(operator: str) -> Callable[..., Value]:
    """The largest or smallest element; NaN if there is one, which onnxruntime leaves to
    the order of elements."""

    def rule(site: Site, x: Value, *, axes: tuple[int, ...]) -> Value:
        if not axes:
            return x
        along = site.scope.integers(axes)
        found = site(operator, x, along, keepdims=0)
        if not x.dtype.is_float:
            return found
        is_nan = site.scope.cast(site("IsNaN", x), dtypes.uint8)
        nans = site("ReduceMax", is_nan, along, keepdims=0)
        test = site.scope.cast(nans, dtypes.bool_)
        return site("Where", test, site.constant(float("nan"), x.dtype), found)

    return rule


def _all_or_any(operator: str) -> Callable[..., Value]:
    """Of bools, as the least or the largest of 0 and 1: also of none."""

    def rule(site: Site, x: Value, *, axes: tuple[int, ...]) -> Value:
        if not axes:
            return x
        numbers = site.scope.cast(x, dtypes.int32)
        found = site(operator, numbers, site.scope.integers(axes), keepdims=0)
        return site("Greater", found, site.constant(0, dtypes.int32))

    return rule


def _find(site: Site, x: Value, value: Value, *, axis: int) -> Value:
    type_ = site.types[0]
    hits = site("Equal", x, site.scope.unsqueezed(value, axis))
    if x.dtype.is_float:
        hits = site("Or", hits, site("IsNaN", x))
    size = site.size(type_.shape[axis])
    along = positions(site, size)
    column = site.scope.unsqueezed(along, *range(1, type_.ndim - axis))
    places = site("Where", hits, column, size.tensor())
    first = site("ReduceMin", places, site.scope.integers((axis,)), keepdims=0)
    return site("Min", first, size.tensor())  # of none it is the largest integer


# --- running totals -------------------------------------------------------------------


def _running(operator: str) -> Callable[..., Value]:
    def rule(site: Site, x: Value, *, axis: int, reverse: bool) -> Value:
        return site(operator, x, site.constant(axis), reverse=int(reverse))

    return rule


def _running_extremum(operator: str) -> Callable[..., Value]:
    """The largest or smallest element up to each: a `Scan` along the axis."""

    def rule(site: Site, x: Value, *, axis: int, reverse: bool) -> Value:
        type_ = site.types[0]
        size = type_.shape[axis]
        if is_zero(size):
            return x
        first = lowest(x.dtype) if operator == "Max" else highest(x.dtype)
        start: Any = site.constant(first, x.dtype)
        if may_be_zero(size):  # then one more element, which is cut off again
            x = _with_first(site, x, start, axis, at_end=reverse)
        shape = type_.shape[:axis] + type_.shape[axis + 1 :]
        found = _scanned(site, operator, x, site.expanded(start, shape), axis, reverse)
        if may_be_zero(size):
            ends = site.size(size) + Number(site.scope, 0 if reverse else 1)
            one = site.scope.integers((1,))
            rows = [site.scope.integers((0 if reverse else 1,))]
            rows += [site("Reshape", ends.tensor(), one), site.scope.integers((axis,))]
            found = site("Slice", found, *rows)
        return found

    return rule


def _with_first(
    site: Site, x: Value, value: Value, axis: int, *, at_end: bool
) -> Value:
    ndim = site.types[0].ndim
    widths = [0] * (2 * ndim)
    widths[axis + (ndim if at_end else 0)] = 1
    return site("Pad", x, site.scope.integers(widths), value, mode="constant")


def _scanned(
    site: Site, operator: str, x: Value, start: Value, axis: int, reverse: bool
) -> Value:
    dtype, type_ = x.dtype, site.types[0]
    row = type_.with_shape(type_.shape[:axis] + type_.shape[axis + 1 :])
    body: Scope = site.scope.inner(is_closed=True)
    carry, element = body.input("carry", dtype), body.input("element", dtype)
    if dtype is dtypes.bool_:
        total = body("And" if operator == "Min" else "Or", carry, element)
    else:
        total = body(operator, carry, element)
    outputs = [inner_info(v, row) for v in body.outputs([total, total])]
    graph = body.graph(
        operator.lower(), [inner_info(v, row) for v in (carry, element)], outputs
    )
    attributes = {
        "body": graph,
        "num_scan_inputs": 1,
        "scan_input_axes": [axis],
        "scan_output_axes": [axis],
        "scan_input_directions": [int(reverse)],
        "scan_output_directions": [int(reverse)],
    }
    names = site.scope.node("Scan", [start.name, x.name], attributes, 2)
    return Value(names[1], dtype)


# --- products and order ---------------------------------------------------------------


def _matmul(site: Site, x: Value, y: Value) -> Value:
    return site("MatMul", x, y)


def order_key(site: Site, x: Value) -> Value:
    """Integers in the order of floats: all NaNs are equal, and above all numbers."""
    if x.dtype is dtypes.bool_:
        return site.scope.cast(x, dtypes.uint8)
    if not x.dtype.is_float:
        return x
    if x.dtype.bits == 16:
        x = site.scope.cast(x, dtypes.float32)
    signed = dtypes.int32 if x.dtype.bits == 32 else dtypes.int64
    most = site.constant(2 ** (signed.bits - 1) - 1, signed)
    bits = site.scope.bitcast(site("Add", x, site.constant(0.0, x.dtype)), signed)
    is_negative = site("Less", bits, site.constant(0, signed))
    key = site("Where", is_negative, site("BitwiseXor", bits, most), bits)
    return site("Where", site("IsNaN", x), most, key)


def _sorted(site: Site, x: Value, count: Size, *, descending: bool) -> Value:
    if is_zero(count):
        return site.expanded(site.constant(0), site.results[0].shape)
    size = site.shape((count,))
    largest = int(descending)
    key = order_key(site, x)
    return site.scope.several("TopK", key, size, axis=-1, largest=largest, sorted=1)[1]


def _argsort(site: Site, x: Value, *, descending: bool) -> Value:
    return _sorted(site, x, site.types[0].shape[-1], descending=descending)


def _top_order(site: Site, x: Value, *, count: Size) -> Value:
    return _sorted(site, x, count, descending=True)


def _sort(site: Site, x: Value, *, descending: bool) -> Value:
    order = _argsort(site, x, descending=descending)
    return site("GatherElements", x, order, axis=-1)


def _flatnonzero(site: Site, mask: Value, *, size: Size) -> Value:
    found = site.scope.flat(site("NonZero", mask))
    count = site.shape((size,))
    zeros = site("Expand", site.constant(0), count)
    both = site("Concat", found, zeros, axis=0)
    return site("Slice", both, site.scope.integers((0,)), count)


RULES: Final[dict[str, Callable[..., Any]]] = {
    "argsort": _argsort,
    "cummax": _running_extremum("Max"),
    "cummin": _running_extremum("Min"),
    "cumprod": _running("CumProd"),
    "cumsum": _running("CumSum"),
    "flatnonzero": _flatnonzero,
    "matmul": _matmul,
    "reduce_and": _all_or_any("ReduceMin"),
    "reduce_find": _find,
    "reduce_max": _extremum("ReduceMax"),
    "reduce_min": _extremum("ReduceMin"),
    "reduce_or": _all_or_any("ReduceMax"),
    "reduce_prod": _float_reduction("ReduceProd"),
    "reduce_sum": _float_reduction("ReduceSum"),
    "short_sort": _sort,
    "sort": _sort,
    "top_order": _top_order,
}
