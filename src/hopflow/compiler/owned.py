"""Arrays in memory that a native program allocated, which is freed with them."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WORD: Final = np.dtype(np.int64)


def result_words(ndim: int) -> tuple[int, ...]:
    """Return the shape of the words for a returned array: address, sizes."""
    return (1 + ndim,)


def owned_array(
    words: NDArray, dtype: np.dtype[Any], free: Callable[[int], None]
) -> NDArray:
    """Return the array of the words that a program returned; call it once for each.

    `free` is called with the address when nothing uses the memory any more.
    """
    address, *shape = words.tolist()
    size = dtype.itemsize
    for n in shape:
        size *= n
    return np.asarray(_Memory(address, size, free)).view(dtype).reshape(shape)


class _Memory:
    """Bytes that are freed with this object, which arrays over them keep alive."""

    __slots__ = ("__array_interface__", "_address", "_free")

    def __init__(self, address: int, size: int, free: Callable[[int], None]) -> None:
        self._address = address
        self._free = free  # kept here: at exit modules may be gone before arrays
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }

    def __del__(self) -> None:
        self._free(self._address)
