"""Rows: the memory that several tensors share, as a tensor with a single axis."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np

from hopflow.ops.rules import Array
from hopflow.ops.strided import StridedPlace
from hopflow.tensor.eager import EagerTensor


def row_of(tensors: Sequence[EagerTensor]) -> EagerTensor | None:
    """Return the memory that tensors are parts of, as a tensor of shape `[n]`.

    The same tensor is returned while it is alive. None: they share no memory.
    """
    for tensor in tensors:
        for reference in tensor.storage.rows:
            cached: EagerTensor | None = reference()
            if cached is not None and _holds(cached, tensors):
                return cached
    # A writable tensor is preferred, as its storage becomes that of the row.
    first = root_of(min(tensors, key=lambda t: t.storage.readonly))
    row = EagerTensor(_whole(first.array), weak=first.type.weak, storage=first.storage)
    if not _holds(row, tensors):
        return None
    first.storage.rows = [r for r in first.storage.rows if r() is not None]
    first.storage.rows.append(ref(row))
    return row


def root_of(tensor: EagerTensor) -> EagerTensor:
    """Return the source of a tensor in a copy that is kept equal, else the tensor."""
    pair = tensor.storage.copied(tensor.array)
    if pair is None:
        return tensor
    weak = tensor.type.weak
    return root_of(EagerTensor(pair[0], weak=weak, storage=tensor.storage))


def places_in(row: EagerTensor, tensor: EagerTensor) -> tuple[StridedPlace, ...] | None:
    """Return the layout of a tensor in a row, None if it is not part of it.

    A tensor in a copy that is kept equal has the layout of the copy's source, followed
    by its own in the copy. Layouts are in whole elements.
    """
    pair = tensor.storage.copied(tensor.array)
    if pair is None:
        place = _place_in(row, tensor)
        return None if place is None else (place,)
    source, copy = (
        EagerTensor(array, weak=tensor.type.weak, storage=tensor.storage)
        for array in pair
    )
    place, outer = _place_in(copy, tensor), places_in(row, source)
    return None if place is None or outer is None else (*outer, place)


def _place_in(row: EagerTensor, tensor: EagerTensor) -> StridedPlace | None:
    size = row.array.itemsize
    start, end = _bounds(row.array)
    low, high = _bounds(tensor.array)
    offset = tensor.pointer - start
    strides = tensor.array.strides
    if (
        tensor.dtype is not row.dtype
        or tensor.type.weak is not row.type.weak
        or not start <= low <= high <= end
        or any(n % size for n in (offset, *strides))
    ):
        return None
    return StridedPlace(
        offset // size, tensor.array.shape, tuple(s // size for s in strides)
    )


def _holds(row: EagerTensor, tensors: Sequence[EagerTensor]) -> bool:
    return all(places_in(row, t) is not None for t in tensors)


def _bounds(array: Array) -> tuple[int, int]:
    """Return the address of the first byte, and that after the last one."""
    low = high = array.ctypes.data
    if not array.size:
        return low, low
    for n, stride in zip(array.shape, array.strides, strict=True):
        reach = (n - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high + array.itemsize


def _whole(array: Array) -> Array:
    """Return all elements of the memory that an array is in."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    low, high = _bounds(owner)
    low += (array.ctypes.data - low) % array.itemsize
    count = (high - low) // array.itemsize
    # As bytes, because the array interface has no typestr for bfloat16.
    memory = np.asarray(_Memory(low, count * array.itemsize, owner))
    return memory.view(array.dtype)


class _Memory:
    """Bytes at an address, for NumPy; keeps their owner alive."""

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }
