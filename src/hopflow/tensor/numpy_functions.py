"""NumPy's functions that are compositions of hopflow's, or take other options.

They have NumPy's names for options, and take tensors and NumPy arrays. `numpy_protocol`
maps NumPy's functions to these.
"""

from collections.abc import Callable, Sequence
from math import log, pi
from operator import index
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.errors import ArgumentValueError, ShapeError
from hopflow.ops import (
    creation,
    elementwise,
    indexing,
    joining,
    linalg,
    logic,
    manipulation,
    math,
    matmul,
    reduce,
    searching,
    sorting,
)
from hopflow.ops.convert import astype
from hopflow.ops.views import as_tensor

Function = Callable[..., Any]


def converted(x: Any, dtype: Any) -> Any:
    """Return `x` in a dtype (None: unchanged). Lists and tuples become arrays."""
    x = np.asarray(x) if isinstance(x, list | tuple) else x
    return x if dtype is None else astype(x, dtype, copy=False)


def _tensor(name: str, x: Any) -> Any:
    return as_tensor(name, converted(x, None))


def of_arrays(f: Function) -> Function:
    """Return `f`, made to take lists and tuples as arrays, as NumPy does."""
    return lambda *xs, **options: f(*[converted(x, None) for x in xs], **options)


# --- universal functions --------------------------------------------------------------


def divmod_(x: Any, y: Any) -> tuple[Value, Value]:
    return elementwise.floor_divide(x, y), elementwise.remainder(x, y)


def fabs(x: Any) -> Value:
    return elementwise.abs(elementwise.multiply(x, 1.0))  # type: ignore[no-any-return]


def radians(x: Any) -> Value:
    return elementwise.multiply(x, pi / 180)  # type: ignore[no-any-return]


def degrees(x: Any) -> Value:
    return elementwise.multiply(x, 180 / pi)  # type: ignore[no-any-return]


def fmax(x: Any, y: Any) -> Value:
    return elementwise.maximum(*_unless_nan(x, y))  # type: ignore[no-any-return]


def fmin(x: Any, y: Any) -> Value:
    return elementwise.minimum(*_unless_nan(x, y))  # type: ignore[no-any-return]


def _unless_nan(x: Any, y: Any) -> tuple[Value, Value]:
    """Return both operands, with NaNs of each replaced by the other's elements."""
    first = logic.where(elementwise.isnan(x), y, x)
    return first, logic.where(elementwise.isnan(y), x, y)


def float_power(x: Any, y: Any) -> Value:
    x, y = (astype(_tensor("float_power", v), dtypes.float64) for v in (x, y))
    return elementwise.pow(x, y)


def logaddexp2(x: Any, y: Any) -> Value:
    scaled = [elementwise.multiply(v, log(2)) for v in (x, y)]
    return elementwise.divide(math.logaddexp(*scaled), log(2))  # type: ignore[no-any-return]


def modf(x: Any) -> tuple[Value, Value]:
    x = elementwise.multiply(x, 1.0)
    is_negative, is_infinite = elementwise.signbit(x), elementwise.isinf(x)
    size = logic.where(is_negative, -x, x)
    rest = elementwise.remainder(logic.where(is_infinite, 0.0, size), 1.0)
    return logic.where(is_negative, -rest, rest), elementwise.trunc(x)


# --- reductions -----------------------------------------------------------------------


def _reduction(reduced: Function, combine: Function, identity: Any) -> Function:
    """Return a reduction with the options of NumPy's.

    combine   the operation of the reduction, on two tensors
    identity  its value on no elements; None if it has none
    """

    def call(
        x: Any,
        *,
        dtype: Any = None,
        initial: Any = None,
        where: Any = True,
        **along: Any,
    ) -> Any:
        """Reduce the elements that `where` selects, and `initial`.

        Raises:
            ArgumentValueError: `where` may select no element, the reduction has no
                identity, and there is no `initial`.
        """
        x = converted(x, dtype)
        if where is not True:
            fill = initial if identity is None else identity
            if fill is None:
                raise ArgumentValueError(
                    f"{reduced.__name__}: there is no value of no elements, and `where`"
                    " may choose none. Give `initial` too."
                )
            x = _chosen(where, x, fill)
        result = reduced(x, **along)
        if initial is None:
            return result
        first = astype(_tensor("initial", initial), result.dtype, copy=False)
        return combine(result, first)

    return call


def _chosen(mask: Any, x: Any, fill: Any) -> Value:
    """Return `x`, with `fill` where the mask is false."""
    x = _tensor("where", x)
    mask = manipulation.broadcast_to(converted(mask, None), x.shape)
    return logic.where(mask, x, fill)


sum_: Final = _reduction(reduce.sum, elementwise.add, 0)
prod: Final = _reduction(reduce.prod, elementwise.multiply, 1)
max_: Final = _reduction(reduce.max, elementwise.maximum, None)
min_: Final = _reduction(reduce.min, elementwise.minimum, None)
all_: Final = _reduction(reduce.all, elementwise.logical_and, True)
any_: Final = _reduction(reduce.any, elementwise.logical_or, False)


def mean(x: Any, *, dtype: Any = None, where: Any = True, **along: Any) -> Value:
    x = converted(x, dtype)
    if where is True:
        return reduce.mean(x, **along)
    total = sum_(elementwise.multiply(x, 1.0), where=where, **along)
    count = sum_(creation.ones_like(x, dtype=total.dtype), where=where, **along)
    return elementwise.divide(total, count)  # type: ignore[no-any-return]


def with_dtype(f: Function) -> Function:
    """Return `f` of one tensor, made to take `dtype`, as NumPy's does."""

    def reduced(x: Any, *, dtype: Any = None, **options: Any) -> Any:
        return f(converted(x, dtype), **options)

    return reduced


def flat_unless(f: Function, default: int | None = None) -> Function:
    """Return `f` along an axis, made to take `axis=None` for the flattened tensor.

    default   the axis if none is passed
    """

    def along(x: Any, *, axis: Any = default, **options: Any) -> Value:
        if axis is None:
            x, axis = manipulation.ravel(x), 0
        return f(x, axis=axis, **options)  # type: ignore[no-any-return]

    return along


def average(x: Any, *, axis: Any = None, keepdims: bool = False) -> Value:
    return reduce.mean(x, axis=axis, keepdims=keepdims)


def ptp(x: Any, *, axis: Any = None, keepdims: bool = False) -> Value:
    most, least = (f(x, axis=axis, keepdims=keepdims) for f in (reduce.max, reduce.min))
    return elementwise.subtract(most, least)  # type: ignore[no-any-return]


def allclose(x: Any, y: Any, **tolerances: Any) -> Value:
    return reduce.all(of_arrays(elementwise.isclose)(x, y, **tolerances))


def array_equal(x: Any, y: Any, *, equal_nan: bool = False) -> Value | bool:
    x, y = (_tensor("array_equal", v) for v in (x, y))
    if x.shape != y.shape:
        return False
    same = elementwise.equal(x, y)
    if equal_nan:
        nans = elementwise.logical_and(elementwise.isnan(x), elementwise.isnan(y))
        same = elementwise.logical_or(same, nans)
    return reduce.all(same)


# --- elements -------------------------------------------------------------------------


def round_(x: Any, *, decimals: int = 0) -> Value:
    return elementwise.round_to(x, decimals)


def where(condition: Any, *values: Any) -> Any:
    if not values:
        return searching.nonzero(_tensor("where", condition))
    x, y = (converted(v, None) for v in values)
    return logic.where(converted(condition, None), x, y)


def clip(x: Any, low: Any = None, high: Any = None, **bounds: Any) -> Value:
    return elementwise.clip(x, bounds.get("min", low), bounds.get("max", high))


def take(x: Any, indices: Any, *, axis: Any = None, mode: str = "raise") -> Value:
    if mode != "wrap":
        checked: Any = "clip" if mode == "clip" else "check"
        return indexing.take(x, indices, axis=axis, mode=checked)
    size = x.size if axis is None else x.shape[axis]
    wrapped = elementwise.remainder(_tensor("take", indices), size)
    return indexing.take(x, wrapped, axis=axis)


def argwhere(x: Any) -> Value:
    return joining.stack(searching.nonzero(atleast(1)(x)), axis=1)[:, : x.ndim]  # type: ignore[no-any-return]


def flatnonzero(x: Any) -> Value:
    return searching.nonzero(manipulation.ravel(x))[0]


sort: Final = flat_unless(sorting.sort, default=-1)
argsort: Final = flat_unless(sorting.argsort, default=-1)


# --- shapes ---------------------------------------------------------------------------


def reshape(x: Any, shape: Any, *, order: str = "C", copy: Any = None) -> Value:
    if order != "F":
        return manipulation.reshape(x, shape, copy=copy)
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    return transpose(manipulation.reshape(transpose(x), sizes[::-1], copy=copy))


def ravel(x: Any, *, order: str = "C") -> Value:
    return manipulation.ravel(transpose(x) if order == "F" else x)


def transpose(x: Any, axes: Any = None) -> Value:
    x = _tensor("transpose", x)
    order = tuple(reversed(range(x.ndim))) if axes is None else axes
    return manipulation.permute_dims(x, order)


def squeeze(x: Any, *, axis: Any = None) -> Any:
    return x.squeeze(axis)


def sizes(x: Any, *, axis: Any = None) -> Any:
    return x.size if axis is None else x.shape[axis]


def atleast(count: int) -> Function:
    """Return `np.atleast_1d` or its like: it gives tensors at least `count` axes."""

    def widened(*arrays: Any) -> Any:
        tensors = tuple([_widened(_tensor(f"atleast_{count}d", x)) for x in arrays])
        return tensors[0] if len(tensors) == 1 else tensors

    def _widened(x: Any) -> Any:
        if x.ndim >= count:
            return x
        shape = (*(1,) * (count - x.ndim), *x.shape)
        if count == 3 and x.ndim:  # NumPy's layout: (1, n, 1) and (m, n, 1)
            shape = (1, *x.shape, 1) if x.ndim == 1 else (*x.shape, 1)
        return manipulation.reshape(x, shape)

    return widened


def flipped(axis: int) -> Function:
    """Return `np.flipud` or `np.fliplr`: a flip along one axis."""
    return lambda x: manipulation.flip(x, axis=axis)


# --- joining --------------------------------------------------------------------------


def concatenate(arrays: Any, *, axis: Any = 0, dtype: Any = None) -> Value:
    return converted(joining.concat(arrays, axis=axis), dtype)  # type: ignore[no-any-return]


def stack(arrays: Any, *, axis: int = 0, dtype: Any = None) -> Value:
    return converted(joining.stack(arrays, axis=axis), dtype)  # type: ignore[no-any-return]


def hstack(arrays: Any, *, dtype: Any = None) -> Value:
    parts = list(map(atleast(1), arrays))
    return concatenate(parts, axis=min(parts[0].ndim - 1, 1), dtype=dtype)


def vstack(arrays: Any, *, dtype: Any = None) -> Value:
    return concatenate(list(map(atleast(2), arrays)), axis=0, dtype=dtype)


def dstack(arrays: Any) -> Value:
    return concatenate(list(map(atleast(3), arrays)), axis=2)


def column_stack(arrays: Any) -> Value:
    parts = [_tensor("column_stack", x) for x in arrays]
    columns = [x if x.ndim > 1 else transpose(atleast(2)(x)) for x in parts]
    return joining.concat(columns, axis=1)


def append(x: Any, values: Any, *, axis: Any = None) -> Value:
    return joining.concat([_tensor("append", v) for v in (x, values)], axis=axis)


def pad(x: Any, width: Any, mode: Any = "constant", *, constant_values: Any = 0) -> Any:
    if mode != "constant" or isinstance(width, dict) or np.ndim(constant_values):
        return NotImplemented
    width = width.tolist() if isinstance(width, np.ndarray) else width
    return joining.pad(x, width, constant_values=constant_values)


def tupled(f: Function) -> Function:
    """Return `f`, made to return a tuple instead of a list, as NumPy's does."""
    return lambda *arrays, **options: tuple(f(*arrays, **options))


# --- products and matrices ------------------------------------------------------------


def dot(x: Any, y: Any) -> Value:
    x, y = _tensor("dot", x), _tensor("dot", y)
    if not x.ndim or not y.ndim:
        return elementwise.multiply(x, y)  # type: ignore[no-any-return]
    return matmul.tensordot(x, y, axes=((-1,), (0 if y.ndim == 1 else -2,)))


def inner(x: Any, y: Any) -> Value:
    x, y = _tensor("inner", x), _tensor("inner", y)
    if not x.ndim or not y.ndim:
        return elementwise.multiply(x, y)  # type: ignore[no-any-return]
    return matmul.tensordot(x, y, axes=((-1,), (-1,)))


def vdot(x: Any, y: Any) -> Value:
    return matmul.vecdot(manipulation.ravel(x), manipulation.ravel(y))


def outer(x: Any, y: Any) -> Value:
    return matmul.outer(manipulation.ravel(x), manipulation.ravel(y))


def qr(x: Any, *, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "complete"):
        return NotImplemented
    return linalg.qr(x, mode=mode)


def cross(x: Any, y: Any, *, axis: int | None = None) -> Value:
    x, y = _tensor("cross", x), _tensor("cross", y)
    return linalg.cross(x, y, axis=-1 if axis is None else axis)


def of_matrices(f: Function) -> Function:
    """Return `f` of the last two axes, made to take NumPy's `axis1`, `axis2`."""

    def along(x: Any, *, axis1: int = 0, axis2: int = 1, **options: Any) -> Value:
        return f(manipulation.moveaxis(x, (axis1, axis2), (-2, -1)), **options)  # type: ignore[no-any-return]

    return along


def diag(x: Any, *, k: int = 0) -> Value:
    x = _tensor("diag", x)
    if x.ndim == 2:
        return linalg.diagonal(x, offset=k)
    if x.ndim != 1:
        raise ShapeError(
            f"diag: expected a vector or a matrix, and found {x.type}. Use "
            "`hf.linalg.diagonal` for stacks of matrices."
        )
    k = index(k)
    row = joining.pad(x, (max(k, 0), max(-k, 0)))  # column j has the element of row j-k
    mask = creation.eye(row.shape[0], k=k, dtype=dtypes.bool_)
    return logic.where(mask, row, creation.zeros_like(row))


def norm(x: Any, *, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    """Return the norm of a vector or a matrix, depending on the number of axes."""
    x = _tensor("norm", x)
    if axis is None and (ord is None or x.ndim == 1):
        ord = 2 if ord is None else ord
        return linalg.vector_norm(x, ord=ord, keepdims=keepdims)
    axes = tuple(range(x.ndim)) if axis is None else axis
    axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    if len(axes) == 1:
        ord = 2 if ord is None else ord
        return linalg.vector_norm(x, axis=axes, ord=ord, keepdims=keepdims)
    if len(axes) != 2:
        raise ShapeError(
            f"norm: expected one axis or two, and found {len(axes)} of {x.type}. Give "
            "`axis`, or use `hf.linalg.vector_norm`."
        )
    matrices = manipulation.moveaxis(x, axes, (-2, -1))
    norms = linalg.matrix_norm(matrices, ord="fro" if ord is None else ord)
    if not keepdims:
        return norms
    return manipulation.expand_dims(norms, tuple(index(a) % x.ndim for a in axes))


def svd(x: Any, *, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    if not compute_uv:
        return linalg.svdvals(x)
    return linalg.svd(x, full_matrices=full_matrices)
