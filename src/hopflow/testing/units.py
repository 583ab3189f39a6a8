"""Differences of arrays in units in the last place, for targets of exports."""

from typing import Any, Final

import numpy as np

from hopflow.dtypes import as_dtype, finfo

Array = np.ndarray[Any, Any]


def difference(
    found: Array, expected: Array, *, of_largest: bool = False, flushed: bool = False
) -> float:
    """The largest difference of floats in units in the last place, of subnormal numbers
    those of the smallest normal one; infinite where shapes, integers, NaNs or
    infinities differ.

    Args:
        of_largest: Whether all are in units of the largest element.
        flushed: Whether subnormal numbers have been taken for 0, as XLA takes them,
            those that were added to something, too.
    """
    dtype = as_dtype(expected.dtype)
    if found.shape != expected.shape:
        return np.inf
    if not dtype.is_float:
        same = found.dtype == expected.dtype and np.array_equal(found, expected)
        return 0.0 if same else np.inf
    x, y = (np.asarray(a).astype(np.float64) for a in (found, expected))
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return np.inf
    x, y = x[finite], y[finite]
    if not np.isfinite(x).all():
        return np.inf
    info = _INFO[dtype.short]
    if flushed:
        x = np.where(np.abs(x - y) <= 2 * info[0], y, x)
    sizes = np.maximum(np.abs(y), info[0])
    units = (np.max(sizes, initial=info[0]) if of_largest else sizes) * info[1]
    with np.errstate(over="ignore"):  # of numbers beside those that are all 0
        return float(np.max(np.abs(x - y) / units, initial=0.0))


_INFO: Final = {
    "f16": (2.0**-14, 2.0**-10),
    "bf16": (2.0**-126, 2.0**-7),
    "f32": (2.0**-126, 2.0**-23),
    "f64": (2.0**-1022, 2.0**-52),
}


def epsilon(dtype: Any) -> float:
    """The distance of 1 to the next float; 0 of other dtypes."""
    found = as_dtype(dtype)
    return float(finfo(found).eps) if found.is_float else 0.0


def coarsest_epsilon(program: Any) -> float:
    """The largest of all dtypes that an exported program computes in."""
    values = (v for n in program.graph.walk() for v in n.results)
    found = [*values, *program.graph.inputs, *program.graph.outputs]
    return max([epsilon(v.type.dtype) for v in found], default=0.0)
