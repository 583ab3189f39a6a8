"""A linker for the object files of programs, for x86-64 and Linux.

LLVM has a linker, but to load LLVM takes longer than most programs run, and a program
whose object file is cached needs nothing else of it. These object files use few
features: sections of code and of constants, addresses relative to the code, calls of
functions by name, and addresses of external data, which are read from a table. The
format of the file is that of the System V ABI (chapter 4, "Object Files"), the
relocations are those of its AMD64 supplement (section 4.4.1).
"""

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from hopflow.errors import CompileError

_MAGIC: Final = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE: Final = struct.pack("<HH", 1, 62)  # an object file, for x86-64

# Types and flags of sections.
_SYMBOL_TABLE: Final = 2
_RELOCATIONS: Final = 4
_WRITABLE: Final = 1
_ALLOCATED: Final = 2

# Types of relocations. S is a symbol, A the addend, P the place that is written, and G
# the entry of a symbol in the table of addresses.
_ABSOLUTE: Final = 1  # S + A, in 64 bits
_RELATIVE: Final = (2, 4)  # S + A - P, in 32 bits; the second type is for calls
_BY_TABLE: Final = (9, 41, 42)  # G + A - P, in 32 bits

# A function that is called by name may be out of the range of 32 bits. The call goes to
# a jump to the address in the function's entry of the table.
_JUMP: Final = b"\xff\x25"  # jmp *offset(%rip)
_STRIDE: Final = 8
"""Bytes of an entry of the table, and of a jump with its padding."""


class _Section(NamedTuple):
    """The header of a section, with the fields of the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """A symbol with the number of its section, 0 if external, and its offset there."""

    name: str
    section: int
    value: int


class _Relocation(NamedTuple):
    """A place in the image that needs an address: that of a place there, or of a name
    that this file does not define."""

    place: int
    type: int
    symbol: int | str
    addend: int


class Image:
    """Linked code: the addresses of its functions. It lives as long as the object."""

    def __init__(self, memory: mmap.mmap, functions: Mapping[str, int]) -> None:
        self._memory, self._functions = memory, functions

    def __getitem__(self, name: str) -> int:
        return self._functions[name]


def is_object(code: bytes) -> bool:
    """Return whether `code` is an object file of the kind that `link` accepts."""
    return code.startswith(_MAGIC) and code[16:20] == _RELOCATABLE


def link(
    objects: Iterable[bytes], exports: Iterable[str], address_of: Callable[[str], int]
) -> Image:
    """Load object files, which may refer to each other, into new memory.

    Args:
        exports: The functions whose addresses the image has.
        address_of: Returns the address of an external name.

    Raises:
        CompileError: A file has variables, or relocations of other types, which the
            compiler never emits.
    """
    files, end = list[_File](), 0
    for code in objects:
        files.append(_File(code, end))
        end = files[-1].end
    defined = {name: place for file in files for name, place in file.defined()}
    relocations = [r for file in files for r in file.relocations()]
    names = dict.fromkeys(r.symbol for r in relocations if isinstance(r.symbol, str))
    external = [name for name in names if name not in defined]
    table = _aligned(end, _STRIDE)
    jumps = table + _STRIDE * len(external)
    entries = {name: table + _STRIDE * k for k, name in enumerate(external)}
    size = jumps + _STRIDE * len(external) or 1
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    for file in files:
        for number, place in file.places.items():
            section = file.sections[number]
            memory[place : place + section.size] = file.bytes_of(section)
    for k, (name, entry) in enumerate(entries.items()):
        struct.pack_into("<Q", memory, entry, address_of(name))
        jump = jumps + _STRIDE * k
        end = jump + len(_JUMP) + 4
        memory[jump:end] = _JUMP + struct.pack("<i", entry - end)
    for place, type_, symbol, addend in relocations:
        types: tuple[int, ...] = _RELATIVE
        if isinstance(symbol, int):
            target = symbol
        elif symbol in defined:
            target = defined[symbol]
        else:
            types = (*_RELATIVE, *_BY_TABLE)
            target = entries[symbol] + (0 if type_ in _BY_TABLE else jumps - table)
        if type_ == _ABSOLUTE and symbol not in entries:
            struct.pack_into("<Q", memory, place, base + target + addend)
        elif type_ in types:
            struct.pack_into("<i", memory, place, target + addend - place)
        else:
            raise CompileError(f"linking failed: a relocation of type {type_}.")

    _make_executable(base, size)
    return Image(memory, {name: base + defined[name] for name in exports})


class _File:
    """The sections and symbols of an object file.

    places   where in the image the sections are that the code needs, by number
    end      the end of the last one
    """

    def __init__(self, code: bytes, start: int) -> None:
        """Lay the file out in an image from `start` on.

        Raises:
            CompileError: A section has variables, which the compiler never emits.
        """
        self.code = code
        [first] = struct.unpack_from("<Q", code, 40)
        size, count, names = struct.unpack_from("<HHH", code, 58)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", code, first + k * size))
            for k in range(count)
        ]
        self._names = self.sections[names].offset
        [table] = [s for s in self.sections if s.type == _SYMBOL_TABLE]
        self._texts = self.sections[table.link].offset
        self.symbols = [
            _Symbol(self._text(self._texts + name), section, value)
            for name, _, _, section, value, _ in self._rows("<IBBHQQ", table)
        ]
        self.places, self.end = self._layout(start)

    def _text(self, start: int) -> str:
        return self.code[start : self.code.index(0, start)].decode()

    def bytes_of(self, section: _Section) -> bytes:
        return self.code[section.offset : section.offset + section.size]

    def _rows(self, form: str, section: _Section) -> Iterator[tuple[Any, ...]]:
        return struct.iter_unpack(form, self.bytes_of(section))

    def _layout(self, start: int) -> tuple[dict[int, int], int]:
        places, end = dict[int, int](), start
        for number, section in enumerate(self.sections):
            if not section.flags & _ALLOCATED:
                continue
            name = self._text(self._names + section.name)
            if section.flags & _WRITABLE and not name.startswith(".data.rel.ro"):
                raise CompileError(f"linking failed: section {name} can be written.")
            places[number] = _aligned(end, section.alignment)
            end = places[number] + section.size
        return places, end

    def defined(self) -> Iterator[tuple[str, int]]:
        """Yield the names that the file defines, and their places."""
        for name, section, value in self.symbols:
            if section in self.places:
                yield name, self.places[section] + value

    def relocations(self) -> Iterator[_Relocation]:
        """Yield the relocations of the sections that the code needs."""
        for section in self.sections:
            if section.type != _RELOCATIONS or section.info not in self.places:
                continue
            start = self.places[section.info]
            for offset, info, addend in self._rows("<QQq", section):
                name, number, value = self.symbols[info >> 32]
                symbol = self.places[number] + value if number else name
                yield _Relocation(start + offset, info & 0xFFFFFFFF, symbol, addend)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // max(alignment, 1)) * max(alignment, 1)


def _make_executable(address: int, size: int) -> None:
    """Make memory read-only and executable."""
    pages = _aligned(size, mmap.PAGESIZE)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(address, pages, mmap.PROT_READ | mmap.PROT_EXEC):
        raise CompileError(
            f"linking failed: mprotect says error {ctypes.get_errno()}. The system may "
            "forbid memory to become executable."
        )
