"""The distinct elements of a tensor. How many there are only its values tell."""

from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.ops.opdef import as_operand
from hopflow.ops.rules import Array
from hopflow.ops.views import as_tensor, concrete

__all__ = ["unique_all", "unique_counts", "unique_inverse", "unique_values"]


class UniqueAll(NamedTuple):
    """values, ascending; the first index of each; where each element is among them; and
    how often each occurs."""

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
    array = concrete(name, x, _REMEDY)
    dtype = array.dtype
    if dtype == dtypes.bfloat16.dtype:  # NumPy does not know how to sort these
        array = array.astype(np.float32)
    values, indices, inverse, counts = np.unique(
        array,
        return_index=True,
        return_inverse=True,
        return_counts=True,
        equal_nan=False,
    )
    return UniqueAll(
        _tensor(values.astype(dtype)),
        _tensor(indices.astype(np.int64)),
        _tensor(inverse.reshape(array.shape).astype(np.int64)),
        _tensor(counts.astype(np.int64)),
    )


def _tensor(array: Array) -> Value:
    result = as_operand("unique", 0, array)
    assert isinstance(result, Value)
    return result


def unique_all(x: Any, /) -> UniqueAll:
    """The distinct elements of `x`, ascending; the index of the first of each in the
    flattened `x`; where each element of `x` is among them; and how often each occurs.

    No NaN equals another, so each is an element of its own.

    Raises:
        TraceError: `x` is traced, so that their number is unknown.
    """
    return _unique("unique_all", x)


def unique_counts(x: Any, /) -> UniqueCounts:
    """The distinct elements of `x`, and how often each occurs; see `unique_all`.

    Raises:
        TraceError: `x` is traced, so that their number is unknown.
    """
    found = _unique("unique_counts", x)
    return UniqueCounts(found.values, found.counts)


def unique_inverse(x: Any, /) -> UniqueInverse:
    """The distinct elements of `x`, and where each element of `x` is among them; see
    `unique_all`.

    Raises:
        TraceError: `x` is traced, so that their number is unknown.
    """
    found = _unique("unique_inverse", x)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Any, /) -> Value:
    """The distinct elements of `x`, ascending; see `unique_all`.

    Raises:
        TraceError: `x` is traced, so that their number is unknown.
    """
    return _unique("unique_values", x).values
