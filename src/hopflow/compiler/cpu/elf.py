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
    section: int
    offset: int
    type: int
    symbol: _Symbol
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
    code: bytes, exports: Iterable[str], address_of: Callable[[str], int]
) -> Image:
    """Load an object file into new memory.

    Args:
        exports: The functions whose addresses the image has.
        address_of: Returns the address of an external name.

    Raises:
        CompileError: The file has variables, or relocations of other types, which the
            compiler never emits.
    """
    file = _File(code)
    relocations = list(file.relocations())
    external = dict.fromkeys(r.symbol.name for r in relocations if not r.symbol.section)
    places, end = file.layout()
    table = _aligned(end, _STRIDE)
    jumps = table + _STRIDE * len(external)
    entries = {name: table + _STRIDE * k for k, name in enumerate(external)}
    size = jumps + _STRIDE * len(external) or 1
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    for number, place in places.items():
        section = file.sections[number]
        memory[place : place + section.size] = file.bytes_of(section)
    for k, (name, entry) in enumerate(entries.items()):
        struct.pack_into("<Q", memory, entry, address_of(name))
        jump = jumps + _STRIDE * k
        end = jump + len(_JUMP) + 4
        memory[jump:end] = _JUMP + struct.pack("<i", entry - end)
    for relocation in relocations:
        _, offset, type_, symbol, addend = relocation
        place = places[relocation.section] + offset
        if symbol.section:
            target = places[symbol.section] + symbol.value
        else:
            target = entries[symbol.name] + (jumps - table)
        if type_ in _BY_TABLE and not symbol.section:
            target = entries[symbol.name]
        elif type_ == _ABSOLUTE and symbol.section:
            struct.pack_into("<Q", memory, place, base + target + addend)
            continue
        elif type_ not in _RELATIVE:
            raise CompileError(f"linking failed: a relocation of type {type_}.")
        struct.pack_into("<i", memory, place, target + addend - place)

    _make_executable(base, size)
    functions = {
        symbol.name: base + places[symbol.section] + symbol.value
        for symbol in file.symbols
        if symbol.section in places
    }
    return Image(memory, {name: functions[name] for name in exports})


class _File:
    """The sections and symbols of an object file."""

    def __init__(self, code: bytes) -> None:
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

    def _text(self, start: int) -> str:
        return self.code[start : self.code.index(0, start)].decode()

    def bytes_of(self, section: _Section) -> bytes:
        return self.code[section.offset : section.offset + section.size]

    def _rows(self, form: str, section: _Section) -> Iterator[tuple[Any, ...]]:
        return struct.iter_unpack(form, self.bytes_of(section))

    def layout(self) -> tuple[dict[int, int], int]:
        """Return the offset of each section that the code needs, and the end of the
        last.

        Raises:
            CompileError: A section has variables, which the compiler never emits.
        """
        places, end = dict[int, int](), 0
        for number, section in enumerate(self.sections):
            if not section.flags & _ALLOCATED:
                continue
            name = self._text(self._names + section.name)
            if section.flags & _WRITABLE and not name.startswith(".data.rel.ro"):
                raise CompileError(f"linking failed: section {name} can be written.")
            places[number] = _aligned(end, section.alignment)
            end = places[number] + section.size
        return places, end

    def relocations(self) -> Iterator[_Relocation]:
        """Yield the relocations of the sections that the code needs."""
        for section in self.sections:
            if section.type != _RELOCATIONS:
                continue
            if not self.sections[section.info].flags & _ALLOCATED:
                continue
            for offset, info, addend in self._rows("<QQq", section):
                symbol = self.symbols[info >> 32]
                type_ = info & 0xFFFFFFFF
                yield _Relocation(section.info, offset, type_, symbol, addend)


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
