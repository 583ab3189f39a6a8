"""The memory of the reference interpreter, which tracks the writer of each byte.

A read is an error if it is out of range, of uninitialised memory, or of a value that
another buffer in the same place has overwritten.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from math import prod
from typing import Any, TypeAlias

import numpy as np

from hopflow.errors import LoopIRError
from hopflow.loop_ir.expr import Buffer

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Where: TypeAlias = tuple[Any, ...]
"""An index of leading axes; the last one may be a slice."""

POISON = 0xFF
"""The byte that memory is initialised with: NaN in floats, -1 in integers."""


def size_in_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the number of bytes of a dense array."""
    return prod(shape) * dtype.itemsize


class Storage:
    """Elements, and for each of their bytes the number of the storage that wrote it.

    `owners` is None for memory that is always defined: inputs and constants.
    """

    def __init__(self, array: NDArray, owners: NDArray | None, number: int) -> None:
        self.array, self.owners, self.number = array, owners, number

    def load(self, buffer: Buffer, at: Sequence[Any]) -> Any:
        """Return the element at `at`, after checks."""
        where = self._check_range(buffer, at)
        self._check_written(buffer, where)
        return self.array[where]

    def store(self, buffer: Buffer, at: Sequence[Any], value: Any) -> None:
        """Write the element at `at`, after checks."""
        where = self._check_range(buffer, at)
        self.array[where] = value
        if self.owners is not None:
            self.owners[where] = self.number

    def read_part(
        self, buffer: Buffer, at: Sequence[Any], rows: int | None = None
    ) -> NDArray:
        """Return the sub-array at `at`, whose elements must all be initialised."""
        where = self._check_range(buffer, at, rows)
        self._check_written(buffer, where)
        return self._part(where)

    def write_part(
        self, buffer: Buffer, at: Sequence[Any], rows: int | None = None
    ) -> NDArray:
        """Return the sub-array at `at`, whose elements the caller all writes."""
        where = self._check_range(buffer, at, rows)
        if self.owners is not None:
            self.owners[where] = self.number
        return self._part(where)

    def _part(self, where: Where) -> NDArray:
        everything: Any = (*where, ...)  # gives a view, also of rank 0
        part: NDArray = self.array[everything]
        return part

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows in new memory, as native code may."""
        old = self.array.shape[0]
        if rows > old:
            shape, dtype = (rows, *self.array.shape[1:]), self.array.dtype
            new = _Bytes(size_in_bytes(shape, dtype)).storage(shape, dtype, 0, 0)
            new.array[:old] = self.array
            assert self.owners is not None
            assert new.owners is not None
            new.owners[:old] = self.owners
            self.array, self.owners = new.array, new.owners

    def _check_range(
        self, buffer: Buffer, at: Sequence[Any], rows: int | None = None
    ) -> Where:
        """Return the index of a sub-array: `rows` rows of the last axis of `at`."""
        first = tuple(map(int, at))
        counts = [1] * len(first)
        if rows is not None:
            counts[-1] = rows
        both = zip(first, counts, self.array.shape, strict=False)
        if any(i < 0 or count < 0 or i + count > n for i, count, n in both):
            place = ", ".join(map(str, first))
            more = "" if rows is None else f":{first[-1] + rows}"
            raise LoopIRError(
                f"`{buffer.name}[{place}{more}]` is out of range: its shape is "
                f"{list(self.array.shape)}"
            )
        if rows is None:
            return first
        return (*first[:-1], slice(first[-1], first[-1] + rows))

    def _check_written(self, buffer: Buffer, where: Where) -> None:
        if self.owners is None:
            return
        owners = self.owners[where]
        if (owners == self.number).all():
            return
        inner = np.argwhere(owners != self.number)[0][:-1]
        at = [i for i in where if not isinstance(i, slice)]
        if len(at) < len(where):
            inner[0] += where[-1].start
        place = ", ".join(map(str, (*at, *inner)))
        fault = (
            "before it is written"
            if (owners[owners != self.number] == 0).any()
            else "after another buffer in its place has been written"
        )
        raise LoopIRError(f"`{buffer.name}[{place}]` is read {fault}")

    def check_all_written(self, buffer: Buffer) -> None:
        """Raise an error if an element was never written."""
        self._check_written(buffer, ())


class _Bytes:
    """Poisoned memory, whose bytes nobody owns."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.owners = np.zeros(size, np.int32)

    def storage(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, number: int
    ) -> Storage:
        end = offset + size_in_bytes(shape, dtype)
        array = self.bytes[offset:end].view(dtype).reshape(shape)
        owners = self.owners[offset:end].reshape(*shape, dtype.itemsize)
        return Storage(array, owners, number)


class Allocator:
    """Makes storages with distinct numbers."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def wrap(self, array: NDArray) -> Storage:
        """Return the storage of an array whose values exist already."""
        return Storage(array, None, next(self._numbers))

    def fresh(self, buffer: Buffer, shape: tuple[int, ...]) -> Storage:
        """Return new memory for one buffer."""
        return self.laid_out({buffer: shape}, {buffer: 0})[buffer]

    def laid_out(
        self,
        shapes: Mapping[Buffer, tuple[int, ...]],
        offsets: Mapping[Buffer, int],
    ) -> dict[Buffer, Storage]:
        """Return the storages of buffers at `offsets` in one array of bytes."""
        end = max(
            (offsets[b] + size_in_bytes(n, b.dtype.dtype) for b, n in shapes.items()),
            default=0,
        )
        memory = _Bytes(end)
        return {
            b: memory.storage(shape, b.dtype.dtype, offsets[b], next(self._numbers))
            for b, shape in shapes.items()
        }
