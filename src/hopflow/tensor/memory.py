"""Memory of tensors: what views share, and imports from other libraries.

Everything here works on NumPy arrays. Imports are zero-copy where compiled kernels can
read the memory: native byte order, aligned, strides that are multiples of the item
size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np

from hopflow.devices import CPU, Device
from hopflow.dtypes import DEFAULT_FLOAT, DEFAULT_INT, DType, as_dtype
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DTypeError,
    InvalidTensorError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.ops.rules import Array
from hopflow.tensor.aligned import aligned_copy
from hopflow.tensor.dlpack import import_dlpack


class _Copy(NamedTuple):
    """A copy of elements that is kept equal to them for as long as it is alive.

    Where no strides could describe a view of a tensor (`x.T.reshape(-1)`), the view is
    such a copy. A write to either updates the other, as if they shared memory.

    source  the elements: in the memory of the storage, or in an earlier copy
    copy    the same elements, contiguous
    """

    source: Array
    copy: ReferenceType[Array]


class Storage:
    """The memory that views share.

    device    the device of the memory
    version   the number of writes through hopflow
    readonly  the memory was imported, and must not be written
    private   the memory was allocated for Python numbers, and is not imported
    invalid   None, or why the memory must not be used any more ("donated to ..."); set
              by `invalidate`
    barred    whether the host must not use the memory; `check_host` says why
    rows      weak references to `rows.row_of` tensors of the memory and its copies
    """

    __slots__ = (
        *("_copies", "barred", "device", "invalid", "private", "readonly", "rows"),
        "version",
    )

    def __init__(
        self,
        *,
        readonly: bool = False,
        private: bool = False,
        device: Device = CPU,
    ) -> None:
        self.device = device
        self.version = 0
        self.readonly = readonly
        self.private = private
        self.invalid: str | None = None
        self.barred = device is not CPU
        self.rows: list[ReferenceType[Any]] = []
        self._copies: list[_Copy] = []

    def invalidate(self, why: str) -> None:
        """Forbid any further use of the memory."""
        self.invalid, self.barred = why, True

    def check_host(self, type_: TensorType) -> None:
        """Check that the host may use the memory of a tensor of this type. Every use of
        the memory calls this, or checks `barred`, first.

        Raises:
            InvalidTensorError: it was donated, or left half-written.
            DeviceError: it is on another device.
        """
        if self.invalid is not None:
            raise InvalidTensorError(
                f"this tensor ({type_}) must not be used any more: it was "
                f"{self.invalid}. Make a copy before, with `x.copy()`."
            )
        if self.barred:
            raise DeviceError(
                f"this tensor ({type_}) is on `{self.device.name}`, and only memory of "
                "the CPU can be used here. Copy it to the CPU first."
            )

    def wrote(self, array: Array) -> None:
        """Record a write to `array`, and update the copies."""
        self.version += 1
        if not self._copies:
            return
        copies = self._living()
        for source, copy in reversed(copies):  # from the copies to their sources
            if np.may_share_memory(copy, array):
                source[...] = copy.reshape(source.shape)
                array = source
        for source, copy in copies:
            copy[...] = source.reshape(-1)

    def kept_equal(self, source: Array, view: Array) -> Array:
        """Return `view`, the elements of `source` reshaped, as a copy kept equal."""
        copy = np.ascontiguousarray(view).reshape(-1)
        copy = copy if copy.base is None else copy.copy()
        result = copy.reshape(view.shape)
        result.flags.writeable = source.flags.writeable
        self._living()
        self._copies.append(_Copy(source, ref(copy)))
        return result

    def copied(self, array: Array) -> tuple[Array, Array] | None:
        """Return (source, copy) if `array` is in a copy, None if not."""
        if not self._copies:
            return None
        pairs = self._living()
        return next((p for p in pairs if np.may_share_memory(p[1], array)), None)

    def _living(self) -> list[tuple[Array, Array]]:
        """Return (source, copy) of the copies that are alive, and forget the others."""
        pairs: list[tuple[Array, Array]] = []
        for k in reversed(range(len(self._copies))):
            source, copy = self._copies[k].source, self._copies[k].copy()
            if copy is None:
                del self._copies[k], source  # the source may keep an earlier copy alive
            else:
                pairs.append((source, copy))
        return pairs[::-1]


# --- import ---------------------------------------------------------------------------


def import_array(
    name: str, obj: Any, dtype: DType | None, *, copy: bool | None
) -> tuple[Array, bool]:
    """Return `obj` as a NumPy array of a supported dtype, and whether it is read-only.

    Args:
        name: The public function, for messages.
        obj: A NumPy array or scalar, a Python number, nested sequences of them, or
            anything with `__dlpack__`, the buffer protocol or `__array__`.
        dtype: The dtype to convert to. None keeps that of `obj`; Python floats give
            float32.
        copy: True always copies; None copies only if the memory cannot be shared.

    Raises:
        ArgumentTypeError: `obj` is none of these.
        ArgumentValueError: `copy` is False, and the memory cannot be shared.
        ArgumentRangeError: a Python integer does not fit the dtype.
        DTypeError: its dtype is complex, or not supported.
        ShapeError: nested sequences have differing lengths.
    """
    if isinstance(obj, np.ndarray | np.generic):  # np.float64 is a Python float too
        array, shared = np.asarray(obj), isinstance(obj, np.ndarray)
    elif isinstance(obj, bool | int | float | complex | list | tuple | range):
        obj = list(obj) if isinstance(obj, range) else obj
        array, shared = _from_python(name, obj, dtype), False
    else:
        array, shared = _from_protocols(name, obj), True
    if dtype is None or array.dtype.kind not in "biuf":  # the kind of bfloat16 is "V"
        source_dtype = as_dtype(array.dtype.newbyteorder("="))
    target = source_dtype if dtype is None else dtype
    ready = _compute_form(array, target)
    shared = shared and ready is array
    if copy is False and not shared:
        raise ArgumentValueError(
            f"{name}: `copy` is False, and a copy is needed to make a {target.name} "
            f"tensor of this `{type(obj).__name__}`. Leave `copy` out."
        )
    if copy and shared:
        ready, shared = aligned_copy(ready), False
    return ready, shared and not ready.flags.writeable


def _compute_form(array: Array, dtype: DType) -> Array:
    """Return `array` in a dtype and layout that kernels read; itself if it has them."""
    if array.dtype != dtype.dtype or not array.dtype.isnative:
        with np.errstate(all="ignore"):
            return array.astype(dtype.dtype)
    itemsize = dtype.itemsize
    if not array.flags.aligned or any(s % itemsize for s in array.strides):
        return array.copy()
    return array


def _from_python(name: str, obj: Any, dtype: DType | None) -> Array:
    """Return a number, or nested sequences of numbers, as an array."""
    leaves = list(_leaves(obj))
    for leaf in leaves:
        if isinstance(leaf, complex | np.complexfloating):
            raise DTypeError(
                f"{name}: complex numbers are not supported: keep real and imaginary "
                "parts apart."
            )
        if not isinstance(leaf, bool | int | float | np.ndarray | np.generic):
            raise _not_numbers(name, leaf)
    plain = not any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    try:
        # As objects, Python integers keep their values until their range is checked.
        array = np.array(obj, object) if plain else np.array(obj)
    except ValueError as error:
        raise ShapeError(
            f"{name}: sequences at one level must have equal lengths ({error})."
        ) from None
    if not plain:
        return array
    if any(isinstance(item, list | tuple) for item in array.flat):
        raise ShapeError(f"{name}: sequences at one level must have equal lengths.")
    if dtype is None:
        dtype = _default_dtype(leaves)
    if dtype.is_integer:
        _check_range(name, leaves, dtype)
    try:
        with np.errstate(all="ignore"):
            if dtype.is_float:  # ml_dtypes converts no integers of more than 64 bits
                array = array.astype(np.float64)
            return array.astype(dtype.dtype)
    except (OverflowError, ValueError) as error:  # integers beyond float64, or a NaN
        raise ArgumentRangeError(f"{name}: {error} ({dtype.name}).") from None


def _default_dtype(leaves: list[Any]) -> DType:
    if all(isinstance(leaf, bool) for leaf in leaves) and leaves:
        return as_dtype(bool)
    if all(isinstance(leaf, int) for leaf in leaves) and leaves:
        return DEFAULT_INT
    return DEFAULT_FLOAT


def _check_range(name: str, leaves: list[Any], dtype: DType) -> None:
    info = np.iinfo(dtype.dtype)
    for leaf in leaves:
        if isinstance(leaf, int) and not info.min <= leaf <= info.max:
            raise ArgumentRangeError(
                f"{name}: the Python integer {leaf} does not fit {dtype.name}. "
                "Give a wider `dtype`."
            )


def _not_numbers(name: str, obj: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{name}: expected a number, an array or nested sequences of numbers, and "
        f"found `{type(obj).__name__}`."
    )


def _leaves(obj: Any) -> Iterator[Any]:
    if isinstance(obj, list | tuple):
        for item in obj:
            yield from _leaves(item)
    else:
        yield obj


def _from_protocols(name: str, obj: Any) -> Array:
    if hasattr(obj, "__dlpack__"):
        try:
            return import_dlpack(name, obj)
        except (BufferError, DTypeError):
            if not hasattr(obj, "__array__"):
                raise
    if hasattr(obj, "__array__") or hasattr(obj, "__array_interface__"):
        return np.asarray(obj)
    try:
        return np.asarray(memoryview(obj))
    except TypeError:
        raise _not_numbers(name, obj) from None
