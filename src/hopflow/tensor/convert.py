"""Make tensors from numbers, arrays and memory of other libraries."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np

from hopflow.bind import Value, current, slots
from hopflow.dtypes import ALL, DType, DTypeLike
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.ops.convert import astype
from hopflow.ops.joining import stack
from hopflow.ops.opdef import check_float_fits, promoted_as
from hopflow.ops.rules import Array, as_flag, check_device, required_dtype
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.tensor.base import Tensor
from hopflow.tensor.dlpack import import_dlpack
from hopflow.tensor.eager import EagerTensor
from hopflow.tensor.memory import Storage, import_array


def asarray(
    obj: Any,
    /,
    *,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    copy: bool | None = None,
) -> Tensor:
    """Return `obj` as a tensor, which shares its memory if possible.

    Args:
        obj: A tensor, a NumPy array or scalar, a Python number, nested sequences of any
            of these, or an object with `__dlpack__`, the buffer protocol, or
            `__array__`.
        dtype: The dtype to convert to. None keeps that of `obj`; Python numbers give
            bool, int64 and float32.
        device: None or "cpu".
        copy: True always copies; None copies only if the memory cannot be shared.

    Returns:
        A tensor of the shape of `obj`: `[]` for a number.

    Raises:
        ArgumentTypeError: `obj` is none of these.
        ArgumentValueError: `copy` is False, and the memory cannot be shared.
        ArgumentRangeError: a Python integer does not fit the dtype.
        DTypeError: the dtype is complex, or not supported.
        DeviceError: `device`, or the memory of `obj`, is not the CPU's.
        ShapeError: nested sequences have differing lengths.

    >>> hf.asarray([1, 2.5])
    Tensor([1. , 2.5], f32[2])
    """
    check_device("asarray", device)
    copy = None if copy is None else as_flag("asarray", "copy", copy)
    target = None if dtype is None else required_dtype("asarray", dtype)
    if isinstance(obj, Value):
        return _converted("asarray", obj, target, copy)
    if isinstance(obj, list | tuple) and _holds_values(obj):
        return _stacked(obj, target)
    if isinstance(obj, SymInt | SymFloat | SymBool):
        number_dtype = promoted_as(current().value_of(obj).type)[0]
        target = number_dtype if target is None else target
        if isinstance(obj, SymFloat):
            check_float_fits(obj, target)
        return cast(Tensor, astype(obj, target))
    array, readonly = import_array("asarray", obj, target, copy=copy)
    if isinstance(obj, np.ndarray):
        private = not np.may_share_memory(array, obj)
    else:
        private = bool(copy) or isinstance(obj, _NUMBERS)
    return _adopted(array, readonly, private)


_NUMBERS: Final = (bool, int, float, list, tuple, range, np.generic)


def _adopted(array: Array, readonly: bool, private: bool = False) -> EagerTensor:
    tensor = EagerTensor(array, storage=Storage(readonly=readonly, private=private))
    current().adopt(tensor)
    return tensor


def _converted(name: str, x: Value, dtype: DType | None, copy: bool | None) -> Tensor:
    same = dtype is None or x.type.dtype is dtype
    if copy is False and not same:
        raise ArgumentValueError(
            f"{name}: `copy` is False, and converting {x.type} to {dtype} needs one. "
            "Leave `copy` out."
        )
    if same and not copy and isinstance(x, Tensor):
        return x
    target = x.type.dtype if dtype is None else dtype
    return cast(Tensor, astype(x, target, copy=True))


def _holds_values(obj: Any) -> bool:
    if isinstance(obj, list | tuple):
        return any(_holds_values(item) for item in obj)
    return isinstance(obj, Value | SymInt | SymFloat | SymBool)


def _stacked(obj: Sequence[Any], dtype: DType | None) -> Tensor:
    """Stack nested sequences with tensors among their leaves, promoted to one dtype."""
    rows = [
        _stacked(item, dtype) if isinstance(item, list | tuple) else item
        for item in obj
    ]
    make = _weak_tensor if dtype is None else partial(asarray, dtype=dtype)
    return cast(Tensor, stack([make(row) for row in rows]))


def _weak_tensor(value: Any) -> Tensor:
    if isinstance(value, bool | int | float):
        return scalar(value)
    if isinstance(value, SymInt | SymFloat | SymBool):
        return cast(Tensor, current().value_of(value))
    return asarray(value)


def scalar(value: bool | int | float) -> EagerTensor:
    """Return a Python number as a tensor without axes, weakly typed unless bool."""
    array, _ = import_array("asarray", value, None, copy=None)
    return EagerTensor(array, weak=not isinstance(value, bool))


def from_numpy(array: Any, /) -> EagerTensor:
    """Return a tensor that shares the memory, shape and dtype of a NumPy array.

    Raises:
        ArgumentTypeError: it is not a NumPy array.
        ArgumentValueError: kernels cannot read its byte order or strides without a
            copy.
        DTypeError: its dtype is not supported.

    >>> array = np.zeros(2)
    >>> hf.from_numpy(array)[0] = 1.0
    >>> array
    array([1., 0.])
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(
            f"from_numpy: expected a NumPy array, and found `{type(array).__name__}`. "
            "Use `hf.asarray`."
        )
    return _adopted(*import_array("from_numpy", array, None, copy=False))


def from_dlpack(
    x: Any, /, *, device: str | None = None, copy: bool | None = None
) -> EagerTensor:
    """Return another library's array as a tensor that shares its memory, unless `copy`.

    Raises:
        ArgumentTypeError: `x` has no `__dlpack__`.
        DeviceError: its memory, or `device`, is not the CPU's.
        DTypeError: its dtype is not supported.
        BufferError: its library refuses to export.
    """
    check_device("from_dlpack", device)
    copy = None if copy is None else as_flag("from_dlpack", "copy", copy)
    if isinstance(x, np.ndarray):  # NumPy refuses to export bfloat16
        array = x.copy() if copy else x
    else:
        array = import_dlpack("from_dlpack", x, copy=copy)
    return _adopted(*import_array("from_dlpack", array, None, copy=False))


def _from_array(array: Any) -> EagerTensor:
    """Return an operand that is a NumPy array or scalar as a tensor."""
    is_array = type(array) is np.ndarray
    if is_array and array.flags.carray and array.dtype in _KERNEL_DTYPES:
        tensor = EagerTensor(array)  # what is done below, in a third of the time
        current().adopt(tensor)
        return tensor
    return _adopted(*import_array("asarray", array, None, copy=None))


_KERNEL_DTYPES: Final = frozenset(dtype.dtype for dtype in ALL)


slots.from_array = _from_array
