"""Tensors as safetensors: https://github.com/huggingface/safetensors, version 0.4.

Eight bytes say how long the header is, a JSON object by the tensors' names; then come
their elements, without gaps. The header is written by hand, and not by the library of
that name, so that tensors go to and from the member of a zip without a copy.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ProgramFormatError
from hopflow.export.fields import Part, parsed, written
from hopflow.ops.rules import Array
from hopflow.tensor import EagerTensor

MAX_HEADER: Final = 1 << 25  # bytes
MAX_RANK: Final = 64
_NAMES: Final[dict[DType, str]] = {
    dtypes.bool_: "BOOL",
    dtypes.int8: "I8",
    dtypes.int16: "I16",
    dtypes.int32: "I32",
    dtypes.int64: "I64",
    dtypes.uint8: "U8",
    dtypes.uint16: "U16",
    dtypes.uint32: "U32",
    dtypes.uint64: "U64",
    dtypes.float16: "F16",
    dtypes.bfloat16: "BF16",
    dtypes.float32: "F32",
    dtypes.float64: "F64",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_METADATA: Final = "__metadata__"


# --- writing --------------------------------------------------------------------------


class Tensors:
    """Tensors in the order of the file, each memory once.

    places   by the name of an attribute that of the tensor in the file
    size     how many bytes all of it has
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.places: dict[str, str] = {}
        arrays: dict[str, Array] = {}
        known: dict[Any, str] = {}
        for name, tensor in tensors.items():
            array = np.asarray(tensor)
            key = (array.ctypes.data, array.strides, array.shape, array.dtype)
            stored = known.setdefault(key, f"{name}_" if name == _METADATA else name)
            self.places[name] = stored
            arrays[stored] = array
        # The largest elements first, so that each tensor is aligned to its own.
        order = sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n))
        self.arrays = {name: arrays[name] for name in order}
        self.header = self._header()
        self.size = len(self.header) + sum(a.nbytes for a in self.arrays.values())

    def _header(self) -> bytes:
        rows: dict[str, Any] = {}
        at = 0
        for name, array in self.arrays.items():
            rows[name] = {
                "dtype": _NAMES[dtypes.as_dtype(array.dtype)],
                "shape": list(array.shape),
                "data_offsets": [at, at + array.nbytes],
            }
            at += array.nbytes
        text = written(rows)
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def pieces(self) -> Iterator[memoryview | bytes]:
        """All bytes of the file."""
        yield self.header
        for array in self.arrays.values():
            if array.size:
                yield memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


_HEADER_ALIGNMENT: Final = 64


# --- reading --------------------------------------------------------------------------


def read_tensors(data: memoryview) -> dict[str, EagerTensor]:
    """The tensors of a file, whose elements stay where they are.

    Raises:
        ProgramFormatError: it is no such file.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise ProgramFormatError(
            f"weights: a header of {length} bytes in a file of {len(data)}."
        )
    rows = Part(parsed(bytes(data[8 : 8 + length]), "weights"), "weights").named()
    rows.pop(_METADATA, None)
    elements = data[8 + length :]
    found: dict[str, EagerTensor] = {}
    ends: list[tuple[int, int]] = []
    for name, row in rows.items():
        members = row.members(["dtype", "shape", "data_offsets"])
        start, end = (x.integer() for x in members["data_offsets"].items(2))
        ends.append((start, end))
        if not start <= end <= len(elements):
            row.fail("offsets within the file")
        found[name] = EagerTensor(_array(members, row, elements[start:end]))
    last = 0
    for start, end in sorted(ends):
        if start != last:
            raise ProgramFormatError("weights: tensors with gaps between, or overlaps.")
        last = end
    if last != len(elements):
        raise ProgramFormatError("weights: there are bytes that belong to no tensor.")
    return found


def _array(members: Mapping[str, Part], row: Part, elements: memoryview) -> Array:
    dtype = members["dtype"].known(_DTYPES, "a dtype").dtype
    shape = members["shape"].each(Part.integer)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if len(shape) > MAX_RANK or size != len(elements):
        row.fail(f"as many bytes as its shape has, and at most {MAX_RANK} axes")
    flat = np.frombuffer(elements, np.uint8) if size else np.empty(0, np.uint8)
    if flat.ctypes.data % dtype.itemsize:
        row.fail("elements that are aligned")
    array = flat.view(dtype).reshape(shape)
    if dtype == np.bool_ and size and int(flat.max()) > 1:
        row.fail("truth values of 0 and 1")
    return array
