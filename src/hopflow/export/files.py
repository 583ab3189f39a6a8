"""`.hopflow` files: a zip of `weights.safetensors` and `program.json`."""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from os import PathLike
from typing import IO, Any, Final
from uuid import uuid4

from hopflow.errors import ProgramFormatError
from hopflow.export.container import check_crc, read_members, write_members
from hopflow.export.document import Document
from hopflow.export.fields import Part, parsed, written
from hopflow.export.weights import Tensors, read_tensors
from hopflow.tensor import EagerTensor

WEIGHTS: Final = "weights.safetensors"
PROGRAM: Final = "program.json"
MAX_PROGRAM: Final = 1 << 25  # bytes of `program.json`
EAGERLY_CHECKED: Final = 1 << 26
"""Bytes of weights up to which their checksum is checked by each load."""


def write_file(path: str | PathLike[str], document: Document) -> None:
    """Write a program; a file that is there is replaced once the new one is whole.

    Raises:
        OSError: it cannot be written.
    """
    # A program may be one that is mapped from the file that it is saved to.
    partial = f"{os.fspath(path)}.{uuid4().hex}.part"
    try:
        with open(partial, "xb") as file:
            write_members(file, _members(document))
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _members(
    document: Document,
) -> Iterator[tuple[str, int, Iterable[memoryview | bytes]]]:
    tensors = Tensors(document.tensors)
    digest = sha256()

    def pieces() -> Iterator[memoryview | bytes]:
        for piece in tensors.pieces():
            digest.update(piece)
            yield piece

    yield WEIGHTS, tensors.size, pieces()
    weights = {"tensors": tensors.places, "sha256": digest.hexdigest()}
    text = written({**document.data, "weights": weights})
    yield PROGRAM, len(text), [text]


def read_file(
    path: str | PathLike[str], verify: bool | None
) -> tuple[Any, dict[str, EagerTensor]]:
    """The data and the tensors of a program. The file is mapped, not read: a tensor
    takes memory once it is used, and what is written to it does not reach the file.

    Args:
        verify: Whether to check the checksum of the weights; None: if they are few.

    Raises:
        ProgramFormatError: the file is no program.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = _mapped(file)
    members = read_members(data, (WEIGHTS, PROGRAM))
    program = members[PROGRAM]
    if program.size > MAX_PROGRAM:
        raise ProgramFormatError(
            f"program: {PROGRAM} has {program.size} bytes; at most {MAX_PROGRAM} are "
            "read."
        )
    check_crc(data, program)
    text = bytes(data[program.start : program.start + program.size])
    top = Part(parsed(text, PROGRAM))
    own = top.named()
    if "weights" not in own:
        top.fail("an object with weights")
    weights = own.pop("weights").members(["tensors", "sha256"])
    member = members[WEIGHTS]
    elements = data[member.start : member.start + member.size]
    digest = weights["sha256"].text()
    is_checked = member.size <= EAGERLY_CHECKED if verify is None else verify
    if is_checked and sha256(elements).hexdigest() != digest:
        weights["sha256"].fail("the checksum of the weights")
    stored = read_tensors(elements)
    tensors = _named(weights["tensors"], stored)
    return {key: part.value for key, part in own.items()}, tensors


def _mapped(file: IO[bytes]) -> memoryview:
    if not os.fstat(file.fileno()).st_size:
        raise ProgramFormatError("this is no hopflow program: the file is empty.")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _named(part: Part, stored: Mapping[str, EagerTensor]) -> dict[str, EagerTensor]:
    found = {
        name: row.known(stored, "a tensor of the weights")
        for name, row in part.named().items()
    }
    if len({id(tensor) for tensor in found.values()}) < len(stored):
        part.fail("a name for each tensor of the weights")
    return found
