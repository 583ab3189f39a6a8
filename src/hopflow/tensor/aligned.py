"""Arrays that begin at a cache line, and take the memory of large ones that were freed.

NumPy's begin 16 bytes after a cache line if they are large, so that each load of a
vector of 64 bytes reads two lines: a loop over memory in the cache takes up to twice as
long. And the C library returns much of what is freed to the system, whose new pages
cost more than to write them.
"""

from collections.abc import Callable, Sequence
from ctypes import c_size_t
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.symbolic.size import Size

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LINE: Final = 64
"""Bytes of a cache line, and of the widest vector."""
LEAST: Final = 4096
"""Bytes of the smallest array that is aligned: for less it costs more than it saves."""
LEAST_KEPT: Final = 1 << 18
"""Bytes of the smallest array whose memory is kept, for the same reason."""
MOST_KEPT: Final = 1 << 28
"""Bytes of memory that is kept while no array uses it."""
DATA_AT: Final = object.__basicsize__
"""Where the address of an array's elements stands in the array: first in what NumPy
adds to a Python object (`PyArrayObject_fields`)."""


def is_small_array(shape: Sequence[Size], dtype: np.dtype[Any]) -> bool:
    """Return whether an array has fewer than `LEAST` bytes for all symbols."""
    size = dtype.itemsize * prod(shape)
    return isinstance(size, int) and size < LEAST


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array of undefined elements. If it has `LEAST` bytes or more, it is
    aligned, and its base is an array of bytes that nothing else refers to."""
    size = dtype.itemsize * prod(shape)
    if size < LEAST:
        return np.empty(shape, dtype)
    try:
        if LEAST_KEPT <= size <= MOST_KEPT:
            return np.ndarray(shape, dtype, np.asarray(_leased(size)))
        memory = _allocated(size + LINE)
    except MemoryError:
        return np.empty(shape, dtype)  # whose error names the shape
    return np.ndarray(shape, dtype, memory, -_address(memory) % LINE)


def _address(array: Array) -> int:
    """Return `array.__array_interface__["data"][0]`, in a sixth of the time."""
    return c_size_t.from_address(id(array) + DATA_AT).value


def aligned_copy(array: Array) -> Array:
    """Return a row-major copy of an array, in an array of `aligned_empty`."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def owns_memory(array: Array) -> bool:
    """Return whether an array, which is no view of an array, owns its memory."""
    base: Any = array.base
    return array.flags.owndata or isinstance(base, _Lease)


# --- memory that is kept --------------------------------------------------------------

_kept: Final[dict[int, list[tuple[Array, dict[str, Any]]]]] = {}
"""Memory that no array uses, by its number of bytes, with its interface for NumPy. An
array may be freed in any thread and at any time, also while this is changed: each
change is one operation of a list or a dict."""


def _keep(memory: Array, interface: dict[str, Any]) -> None:
    total = sum([size * len(parts) for size, parts in [*_kept.items()]])
    if total + memory.nbytes > MOST_KEPT:
        _kept.clear()  # what is in use comes back
    _kept.setdefault(memory.nbytes, []).append((memory, interface))


class _Lease:
    """The right of one array to some memory, which is kept when the array is freed."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: Array, interface: dict[str, Any]) -> None:
        self.memory, self.__array_interface__ = memory, interface

    def __del__(self, keep: Callable[..., None] = _keep) -> None:
        keep(self.memory, self.__array_interface__)


def _leased(size: int) -> _Lease:
    """Return aligned memory of at least this size: an eighth more at most."""
    unit = 1 << (size.bit_length() - 4)
    rounded = -(-size // unit) * unit
    try:
        return _Lease(*_kept[rounded + LINE].pop())
    except (KeyError, IndexError):
        memory = _allocated(rounded + LINE)
    start = _address(memory)
    return _Lease(
        memory,
        {
            "data": (start + -start % LINE, False),
            "shape": (rounded,),
            "typestr": "|u1",
            "version": 3,
        },
    )


def _allocated(size: int) -> Array:
    try:
        return np.empty(size, np.uint8)
    except MemoryError:
        _kept.clear()
        return np.empty(size, np.uint8)
