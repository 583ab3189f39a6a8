"""A zip of stored, aligned members, as PKWARE's APPNOTE 6.3 has it; nothing else.

Members are not compressed, so that a file needs no more memory than it has bytes, and
each begins at a multiple of 64, so that tensors are used where they are in the file.
Times and permissions are fixed: the bytes depend on the members alone. Any zip tool
opens such a file. Reading takes the directory from the end of the file, and only the
members that were asked for: no name of the file is ever a path.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Final, NamedTuple

from hopflow.errors import ProgramFormatError

ALIGNMENT: Final = 64
_DATE: Final = 0x21  # 1 January 1980, the first that there is
_VERSION: Final = 45  # of zip, that has 64-bit sizes
_PADDING: Final = 0xD935  # the extra field that others, too, align members by
_LARGE: Final = 0x0001  # the extra field of 64-bit sizes
_ALL: Final = 0xFFFFFFFF  # in a field of 32 bits: the number is in one of 64
_MADE_BY: Final = 3 << 8 | _VERSION  # Unix, whose permissions come with it
_MODE: Final = 0o100644 << 16

_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_ENTRY: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR: Final = struct.Struct("<4sIQI")
_MAX_DIRECTORY: Final = 1 << 12  # bytes


class Member(NamedTuple):
    """Where a member is: its bytes, and those of its header before them."""

    name: str
    header: int
    start: int
    size: int
    crc: int


# --- writing --------------------------------------------------------------------------


def write_members(
    file: IO[bytes], members: Iterable[tuple[str, int, Iterable[memoryview | bytes]]]
) -> None:
    """
    Args:
        members: Of each the name, how many bytes it has, and those, in pieces. A later
            one is asked for once the others are written.
    """
    entries: list[bytes] = []
    for name, size, pieces in members:
        header = file.tell()
        start = _aligned(header + _LOCAL.size + len(name) + 20 + 4)
        padding = start - header - _LOCAL.size - len(name) - 20 - 4
        extra = struct.pack("<HHQQ", _LARGE, 16, size, size)
        extra += struct.pack("<HH", _PADDING, padding) + bytes(padding)
        file.seek(start)
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        end = file.tell()
        file.seek(header)
        common = (_VERSION, 0, 0, 0, _DATE, crc, _ALL, _ALL, len(name))
        file.write(_LOCAL.pack(b"PK\3\4", *common, len(extra)))
        file.write(name.encode("ascii") + extra)
        file.seek(end)
        large = struct.pack("<HHQQQ", _LARGE, 24, size, size, header)
        rest = (len(large), 0, 0, 0, _MODE, _ALL)
        entry = _ENTRY.pack(b"PK\1\2", _MADE_BY, *common, *rest)
        entries.append(entry + name.encode("ascii") + large)
    _write_directory(file, entries)


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _write_directory(file: IO[bytes], entries: Sequence[bytes]) -> None:
    start, count = file.tell(), len(entries)
    directory = b"".join(entries)
    size = len(directory)
    end = _END64.pack(
        *(b"PK\6\6", _END64.size - 12, _MADE_BY, _VERSION, 0, 0),
        *(count, count, size, start),
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    short = _END.pack(b"PK\5\6", 0, 0, count, count, size, _ALL, 0)
    file.write(directory + end + locator + short)


# --- reading --------------------------------------------------------------------------


def read_members(data: memoryview, names: Sequence[str]) -> dict[str, Member]:
    """Where the members of a file are, which must be those of these names.

    Raises:
        ProgramFormatError: the file is no such zip.
    """
    directory, entries = _directory(data)
    found: dict[str, Member] = {}
    for member in _entries(data[directory:], entries):
        if member.name not in names or member.name in found:
            raise _wrong(f"a member {member.name[:40]!r} that does not belong there")
        found[member.name] = member
    if missing := [name for name in names if name not in found]:
        raise _wrong(f"no member {missing[0]!r}")
    end = 0
    for member in sorted(found.values(), key=lambda m: m.header):
        if member.header < end or member.start + member.size > directory:
            raise _wrong("members that overlap, or lie outside of the file")
        _check_header(data, member)
        end = member.start + member.size
    return found


def check_crc(data: memoryview, member: Member) -> None:
    """
    Raises:
        ProgramFormatError: the bytes are not those that were written.
    """
    if zlib.crc32(data[member.start : member.start + member.size]) != member.crc:
        raise _wrong(f"other bytes in {member.name!r} than were written")


def _wrong(found: str) -> ProgramFormatError:
    return ProgramFormatError(
        f"this is no hopflow program: expected a zip of stored members as "
        f"`ExportedProgram.save` writes it, and found {found}."
    )


def _unpacked(
    form: struct.Struct, data: memoryview, at: int, magic: bytes
) -> list[int]:
    """The fields behind a signature.

    Raises:
        ProgramFormatError: it is not there.
    """
    if not 0 <= at <= len(data) - form.size or bytes(data[at : at + 4]) != magic:
        raise _wrong("other bytes where its directory or a header should be")
    return list(form.unpack_from(data, at)[1:])


def _directory(data: memoryview) -> tuple[int, int]:
    """Where the directory is, and how many entries it has."""
    end = len(data) - _END.size
    _unpacked(_END, data, end, b"PK\5\6")
    at = end - _LOCATOR.size
    _, end64, _ = _unpacked(_LOCATOR, data, at, b"PK\6\7")
    if end64 != at - _END64.size:
        raise _wrong("a directory that ends elsewhere")
    *_, count, size, start = _unpacked(_END64, data, end64, b"PK\6\6")
    if size > _MAX_DIRECTORY or start + size != end64:
        raise _wrong("a directory of another size")
    return start, count


def _entries(data: memoryview, count: int) -> Iterator[Member]:
    at = 0
    for _ in range(min(count, _MAX_DIRECTORY // _ENTRY.size)):
        fields = _unpacked(_ENTRY, data, at, b"PK\1\2")
        _, _, flags, method, _, _, crc, _, _, length, extra, comment = fields[:12]
        at += _ENTRY.size
        name = bytes(data[at : at + length]).decode("latin-1")
        large = bytes(data[at + length : at + length + extra])
        at += length + extra + comment
        if flags or method or len(large) != 28 or large[:4] != b"\1\0\x18\0":
            raise _wrong(f"a member {name[:40]!r} that is compressed or encrypted")
        size, stored, header = struct.unpack("<QQQ", large[4:])
        if size != stored:
            raise _wrong(f"a member {name[:40]!r} of two sizes")
        yield Member(name, header, _start(name, header), size, crc)


def _start(name: str, header: int) -> int:
    return _aligned(header + _LOCAL.size + len(name) + 20 + 4)


def _check_header(data: memoryview, member: Member) -> None:
    """Check that what stands before a member says what the directory does."""
    fields = _unpacked(_LOCAL, data, member.header, b"PK\3\4")
    _, flags, method, _, _, crc, _, _, length, extra = fields
    at = member.header + _LOCAL.size
    name = bytes(data[at : at + length]).decode("latin-1")
    if (
        flags or method or crc != member.crc or name != member.name
    ) or at + length + extra != member.start:
        raise _wrong(f"two accounts of {member.name!r}")
