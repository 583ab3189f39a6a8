"""The memory layouts of inputs, for which programs are compiled.

A program for dense inputs computes their strides from their sizes. For an input of
another layout there is another program, which takes its strides as sizes: for a large
input that costs less than a dense copy in each call.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Layout: TypeAlias = Literal["dense", "rows", "strided"]
"""Row-major, contiguous rows with any strides, or any strides."""

Layouts: TypeAlias = tuple[Layout, ...]

DENSE: Final[Layout] = "dense"

SMALL: Final = 1 << 15
"""The most bytes of an array whose copy costs about as much as the call."""


def layout_of(array: NDArray) -> Layout:
    """Return the layout of an array; "dense" also if it is better to copy it."""
    flags, size = array.flags, array.dtype.itemsize
    if flags.c_contiguous or array.nbytes <= SMALL:
        return DENSE
    if any(stride % size for stride in array.strides):
        return DENSE
    return "rows" if array.strides[-1] == size else "strided"


def given_strides(layout: Layout, ndim: int) -> int:
    """Return the number of strides that a program takes for an input of this layout."""
    return {"dense": 0, "rows": ndim - 1, "strided": ndim}[layout]


def strides_of(arrays: Sequence[NDArray], layouts: Layouts) -> list[int]:
    """Return the strides that a program takes for these inputs, in elements."""
    return [
        stride // array.dtype.itemsize
        for array, layout in zip(arrays, layouts, strict=True)
        for stride in array.strides[: given_strides(layout, array.ndim)]
    ]
