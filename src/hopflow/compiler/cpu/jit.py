"""Code for the CPU that we run on: compile it, and link it into the process."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from hopflow.compiler import files
from hopflow.compiler.cpu import elf
from hopflow.compiler.cpu.target import CpuTarget, native_llvm
from hopflow.compiler.llvm.compiler import Compiler
from hopflow.errors import CompileError

P = ParamSpec("P")
T = TypeVar("T")

# LLVM may call these of its own accord.
_ALWAYS: Final = ("memcpy", "memmove", "memset")
_ASKED: Final = (
    "malloc aligned_alloc realloc free fmod fmodf clock_gettime "
    "pthread_create pthread_detach nanosleep mmap mprotect munmap"
).split()


_LIBRARIES: Final = 256
"""How many one linker links. It keeps about 11 KB of each, also of those that are gone;
all of it goes with the last of its libraries."""


class Library:
    """Code that LLVM linked: see `elf.Image`."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])


class Jit(Compiler):
    """A compiler and a linker for one CPU. Use `jit`, which keeps the only one."""

    def __init__(self, target: CpuTarget) -> None:
        native_llvm()
        # Any other relocation ends the process in the linker.
        super().__init__(target, reloc="pic", codemodel="small")
        self._numbers = itertools.count()
        self._linker = self._new_linker()

    def _new_linker(self) -> Any:
        return self.llvm.create_lljit_compiler(
            self.target_machine(), use_jit_link=True, suppress_errors=True
        )

    def link(
        self, code: bytes, exports: Iterable[str], symbols: Mapping[str, int]
    ) -> Library:
        """Load object code, resolving the symbols it refers to.

        Raises:
            CompileError: A symbol is missing.
        """
        with self.lock:
            number = next(self._numbers)
            if number % _LIBRARIES == _LIBRARIES - 1:
                self._linker = self._new_linker()
            builder = self.llvm.JITLibraryBuilder().add_object_img(code)
            for name, address in symbols.items():
                builder.import_symbol(name, address)
            for name in exports:
                builder.export_symbol(name)
            try:
                tracker = builder.link(self._linker, f"hf.{number}")
            except RuntimeError as error:
                raise CompileError(f"linking failed: {error}") from error
        return Library(tracker)


def once(make: Callable[P, T]) -> Callable[P, T]:
    """A function that returns what `make` returned for the same arguments the first
    time, in whichever thread: what holds native code must not be made twice, for one of
    the two would be freed."""
    lock = threading.RLock()
    made: dict[tuple[Any, ...], T] = {}

    @wraps(make)
    def get(*args: P.args, **named: P.kwargs) -> T:
        key = (args, tuple(named.items()))
        if key not in made:
            with lock:
                if key not in made:
                    made[key] = make(*args, **named)
        return made[key]

    return get


@once
def jit(target: CpuTarget) -> Jit:
    """The process's compiler for a target, which must be a CPU that can run here."""
    return Jit(target)


Linked: TypeAlias = elf.Image | Library
"""Linked code: the addresses of its functions, by name."""


def link(
    code: bytes,
    exports: Iterable[str],
    symbols: Mapping[str, int],
    target: CpuTarget,
) -> Linked:
    """Load object code into the process: LLVM does it where we do not know the format.

    Args:
        exports: Names of functions in it that will be asked for.
        symbols: The addresses of what it refers to by name.

    Raises:
        CompileError: A symbol is missing.
    """
    if elf.is_object(code):
        return elf.link(code, exports, lambda n: symbols.get(n) or _in_process(n))
    return jit(target).link(code, exports, symbols)


def shared_code(text: str, target: CpuTarget) -> bytes:
    """The object code of a module that programs share; it is kept in a file.

    Raises:
        CompileError: The text is not valid LLVM IR; a defect of ours.
    """
    key = f"module {target}\n{text}"
    code = files.find(key)
    if code is None:
        code = jit(target).compile(text)
        files.store(key, code)
    return code


def _in_process(name: str) -> int:
    """The address of a function that LLVM calls for an instruction, such as fmodf."""
    try:
        return address_of(getattr(ctypes.CDLL(None), name))
    except AttributeError as error:
        raise CompileError(f"linking failed: there is no `{name}`.") from error


@once
def c_symbols() -> dict[str, int]:
    """The addresses of C's functions that generated code may call."""
    library = ctypes.CDLL(None)
    return {name: address_of(getattr(library, name)) for name in (*_ALWAYS, *_ASKED)}


def address_of(function: Any) -> int:
    """The address of a function of a `ctypes` library."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def always_linked() -> dict[str, int]:
    """What LLVM may call unasked."""
    return {name: c_symbols()[name] for name in _ALWAYS}
