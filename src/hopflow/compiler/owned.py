"""Arrays in memory that a native program allocated, and that is freed with them."""

import ctypes
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.compiler.llvm.jit import c_symbols, once

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WORD: Final = np.dtype(np.int64)


def result_words(ndim: int) -> tuple[int, ...]:
    """The shape of the words in which a program returns an array: address, sizes."""
    return (1 + ndim,)


def owned_array(words: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """The array of the words that a program returned; called once for each."""
    address, *shape = words.tolist()
    size = dtype.itemsize
    for n in shape:
        size *= n
    return np.asarray(_Memory(address, size)).view(dtype).reshape(shape)


class _Memory:
    """Bytes that are freed with this, which the arrays in them keep alive."""

    __slots__ = ("__array_interface__", "_address", "_free")

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._free = _free()  # here, for at exit modules may be gone before arrays
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }

    def __del__(self) -> None:
        self._free(self._address)


@once
def _free() -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c_symbols()["free"])
