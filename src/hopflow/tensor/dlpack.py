"""DLPack: memory shared with other libraries, bfloat16 included.

NumPy reads and writes DLPack capsules, but does not support bfloat16. An import
relabels the capsule's dtype as uint16, and an export relabels uint16 as bfloat16.
"""

import ctypes
from typing import Any, Final

import ml_dtypes
import numpy as np

from hopflow.devices import CPU
from hopflow.entries import blames_user
from hopflow.errors import ArgumentTypeError, DeviceError, DTypeError
from hopflow.ops.rules import Array

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)

# The layout of the structures (dlpack.h, DLPack 1.1), by offset: a capsule named
# "dltensor" points to a DLTensor, one named "dltensor_versioned" to a header of 32
# bytes and then a DLTensor.
_VERSIONED: Final = b"dltensor_versioned"
_UNVERSIONED: Final = b"dltensor"
_HEADER: Final = {_VERSIONED: 32, _UNVERSIONED: 0}
_TYPE_AT: Final = 20
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_HOST_DEVICES: Final = (CPU.dlpack[0], 3)  # and kDLCUDAHost


class _DLType(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


def _dl_type(capsule: Any) -> _DLType:
    """Return the dtype field of the capsule's tensor; writes change the capsule."""
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.argtypes, valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer.restype = ctypes.c_void_p
    for label, header in _HEADER.items():
        if valid(capsule, label):
            return _DLType.from_address(pointer(capsule, label) + header + _TYPE_AT)
    raise BufferError("not an unused DLPack capsule")


class _Holder:
    """An object that `numpy.from_dlpack` takes, for an existing capsule."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def import_dlpack(name: str, obj: Any, *, copy: bool | None = None) -> Array:
    """Return the memory of a DLPack producer as a NumPy array (bfloat16 included).

    Raises:
        ArgumentTypeError: `obj` does not speak DLPack.
        DeviceError: the memory is not the host's.
        DTypeError: NumPy has no such dtype.
        BufferError: the producer refuses to export.
    """
    try:
        device = tuple(map(int, obj.__dlpack_device__()))
        export = obj.__dlpack__
    except AttributeError:
        raise ArgumentTypeError(
            f"{name}: expected an object with `__dlpack__` and `__dlpack_device__`, "
            f"and found `{type(obj).__name__}`. Use `hf.asarray`."
        ) from None
    if device[0] not in _HOST_DEVICES:
        raise DeviceError(
            f"{name}: the memory is on DLPack device {device}, and only that of the "
            "CPU can be shared. Copy it to the CPU first."
        )
    try:
        # `copy=True` is done below, which also makes the layout contiguous.
        options = {"copy": False} if copy is False else {}
        capsule = export(max_version=(1, 1), **options)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = export()
    kind = _dl_type(capsule)
    is_bfloat16 = (kind.code, kind.bits, kind.lanes) == (_BFLOAT, 16, 1)
    if is_bfloat16:
        # NumPy takes the memory as uint16. Nobody else sees the changed dtype, as NumPy
        # consumes the capsule.
        kind.code = _UINT
    try:
        array = np.from_dlpack(_Holder(capsule, (device[0], device[1])))
    except (RuntimeError, ValueError) as error:
        raise DTypeError(f"{name}: {error}.") from None
    if copy:
        array = array.copy()
    return array.view(BFLOAT16) if is_bfloat16 else array


@blames_user
def export_dlpack(array: Array, options: dict[str, Any]) -> Any:
    """Return a DLPack capsule of `array`'s memory, with `__dlpack__`'s options."""
    if array.dtype != BFLOAT16:
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__(**options)
    _dl_type(capsule).code = _BFLOAT
    return capsule
