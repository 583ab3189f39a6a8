"""Arrays in `.npy` files, of all dtypes."""

from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from hopflow.dtypes import DType
from hopflow.errors import ArgumentValueError

Array: TypeAlias = np.ndarray[Any, Any]


def read_array(path: str | PathLike[str], dtype: DType | None = None) -> Array:
    """Return the array of a `.npy` file.

    Args:
        dtype: What the array is to be. NumPy's format has no bfloat16: such a file
            says only how long an element is.

    Raises:
        ArgumentValueError: the file cannot be read, or is no `.npy` file.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArgumentValueError(f"`{path}` is no .npy file: {error}.") from None
    if not isinstance(array, np.ndarray):
        raise ArgumentValueError(f"`{path}` holds several arrays; name a .npy file.")
    if array.dtype.kind == "V" and dtype and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype.dtype)
    return array
