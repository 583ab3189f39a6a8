"""The distinct elements of a tensor, whose number depends on its values."""

from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.ops.convert import as_value, astype
from hopflow.ops.creation import positions, zeros
from hopflow.ops.elementwise import subtract
from hopflow.ops.indexing import Updater, take
from hopflow.ops.joining import roll
from hopflow.ops.logic import equal, logical_or, not_equal
from hopflow.ops.masks import where_true
from hopflow.ops.opdef import as_operand
from hopflow.ops.reduce import cumulative_sum
from hopflow.ops.rules import Array
from hopflow.ops.sorting import argsort, sort
from hopflow.ops.views import as_tensor, known_elements, reshaped


class UniqueAll(NamedTuple):
    """The distinct values, ascending; the first index of each; the position among them
    of each element; and the count of each."""

    values: Value
    indices: Value
    inverse_indices: Value
    counts: Value


class UniqueCounts(NamedTuple):
    values: Value
    counts: Value


class UniqueInverse(NamedTuple):
    values: Value
    inverse_indices: Value


_REMEDY: Final = (
    "Sort instead, which keeps the shape: `hf.sort(x)`, and compare neighbours."
)


def _unique(name: str, x: Any) -> UniqueAll:
    x = as_tensor(name, x)
    elements = known_elements(name, x, _REMEDY)
    return _distinct(name, x) if elements is None else _numpy_unique(x, elements)


def _distinct(name: str, x: Any) -> UniqueAll:
    """Return the distinct elements of a traced tensor: the first of each run of equal
    elements in ascending order.

    A compiled program runs only those of the two sorts whose results are read.
    """
    flat = reshaped(x, (x.type.size,))
    order, values = argsort(flat, stable=True), sort(flat)
    places = positions(flat.shape, 0)
    is_first = logical_or(equal(places, 0), not_equal(values, roll(values, 1)))
    [firsts] = where_true(name, is_first, _REMEDY)
    groups = subtract(cumulative_sum(astype(is_first, dtypes.int64)), 1)
    inverse = Updater(order)[order].set(groups)
    counts = Updater(zeros(firsts.shape, dtype=dtypes.int64))[groups].add(1)
    return UniqueAll(
        take(values, firsts),
        take(order, firsts),
        reshaped(inverse, x.shape),
        counts,
    )


def _numpy_unique(x: Value, array: Array) -> UniqueAll:
    """Return the distinct elements of a concrete tensor. They are taken from it, so
    that they are differentiable."""
    if array.dtype == dtypes.bfloat16.dtype:  # NumPy cannot sort bfloat16
        array = array.astype(np.float32)
    _, first, inverse, counts = np.unique(
        array,
        return_index=True,
        return_inverse=True,
        return_counts=True,
        equal_nan=False,
    )
    indices = _tensor(first.astype(np.int64))
    return UniqueAll(
        take(reshaped(x, (array.size,)), indices),
        indices,
        _tensor(inverse.reshape(array.shape).astype(np.int64)),
        _tensor(counts.astype(np.int64)),
    )


def _tensor(array: Array) -> Value:
    return as_value(as_operand("unique", 0, array))


def unique_all(x: Any, /) -> UniqueAll:
    """Return the distinct elements of `x`, ascending, with indices and counts.

    The results are the values T[n], the index i64[n] of the first of each in the
    flattened `x`, the position i64[*s] among them of each element of `x`, and the count
    i64[n] of each. NaNs are distinct from each other.

    Raises:
        TraceError: `x` is traced where n cannot become a symbol.

    >>> hf.unique_all(hf.asarray([3, 1, 3])).counts
    Tensor([1, 2], i64[2])
    """
    return _unique("unique_all", x)


def unique_counts(x: Any, /) -> UniqueCounts:
    """Return the distinct elements of `x`, and the count of each; see `unique_all`.

    Raises:
        TraceError: `x` is traced where their number cannot become a symbol.
    """
    unique = _unique("unique_counts", x)
    return UniqueCounts(unique.values, unique.counts)


def unique_inverse(x: Any, /) -> UniqueInverse:
    """Return the distinct elements of `x`, and the position of each element of `x`
    among them; see `unique_all`.

    Raises:
        TraceError: `x` is traced where their number cannot become a symbol.
    """
    unique = _unique("unique_inverse", x)
    return UniqueInverse(unique.values, unique.inverse_indices)


def unique_values(x: Any, /) -> Value:
    """Return the distinct elements of `x`, ascending; see `unique_all`.

    Raises:
        TraceError: `x` is traced where their number cannot become a symbol.
    """
    return _unique("unique_values", x).values
