"""Arrays that begin at a cache line.

NumPy's begin 16 bytes after one if they are large, so that each load of a vector of 64
bytes reads two lines: a loop over memory in the cache takes up to twice as long.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.symbolic.size import Size

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LINE: Final = 64
"""Bytes of a cache line, and of the widest vector."""
LEAST: Final = 4096
"""Bytes of the smallest array that is aligned: for less it costs more than it saves."""


def is_small_array(shape: Sequence[Size], dtype: np.dtype[Any]) -> bool:
    """Return whether an array has fewer than `LEAST` bytes for all symbols."""
    size = dtype.itemsize * prod(shape)
    return isinstance(size, int) and size < LEAST


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array of undefined elements. If it has `LEAST` bytes or more, it is
    aligned, and its base is an array of bytes that nothing else refers to."""
    array = np.empty(shape, dtype)  # NumPy computes the size faster than Python
    size = array.nbytes
    if size < LEAST:
        return array
    del array
    memory = np.empty(size + LINE, np.uint8)
    offset = -memory.__array_interface__["data"][0] % LINE
    return np.ndarray(shape, dtype, memory, offset)


def aligned_copy(array: Array) -> Array:
    """Return a row-major copy of an array, in an array of `aligned_empty`."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
