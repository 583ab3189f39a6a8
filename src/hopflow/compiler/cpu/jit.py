"""Compilation for the CPU of this process, and linking of code into the process."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from hopflow.compiler import files
from hopflow.compiler.cpu import elf
from hopflow.compiler.cpu.target import CpuTarget, native_llvm
from hopflow.compiler.llvm.compiler import Compiler
from hopflow.errors import CompileError

P = ParamSpec("P")
T = TypeVar("T")

# LLVM may insert calls of these.
_ALWAYS: Final = ("memcpy", "memmove", "memset")
THREAD_FUNCTIONS: Final = (
    "pthread_create pthread_detach pthread_sigmask nanosleep "
    "pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock "
    "pthread_cond_init pthread_cond_wait pthread_cond_broadcast "
    "sched_getcpu sched_getaffinity pthread_setaffinity_np"
).split()
"""The functions of the system that loops over threads call."""
_ASKED: Final = (
    *"malloc aligned_alloc realloc free fmod fmodf clock_gettime".split(),
    *"mmap mprotect munmap".split(),
    *THREAD_FUNCTIONS,
)


_LIBRARIES: Final = 256
"""The number of libraries of one linker. It keeps about 11 KB for each, also after the
library is freed; all of it is freed with the last of its libraries."""


class Library:
    """Code that LLVM linked: see `elf.Image`."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])


class Jit(Compiler):
    """A compiler and a linker for one CPU; `jit` returns that of the process."""

    def __init__(self, target: CpuTarget) -> None:
        native_llvm()
        # The linker ends the process on any other relocation.
        super().__init__(target, reloc="pic", codemodel="small")
        self._numbers = itertools.count()
        self._linker = self._new_linker()

    def _new_linker(self) -> Any:
        return self.llvm.create_lljit_compiler(
            self.target_machine(), use_jit_link=True, suppress_errors=True
        )

    def link(
        self,
        objects: Iterable[bytes],
        exports: Iterable[str],
        symbols: Mapping[str, int],
    ) -> Library:
        """Load object files, and resolve the symbols that they refer to.

        Raises:
            CompileError: A symbol is missing.
        """
        with self.lock:
            number = next(self._numbers)
            if number % _LIBRARIES == _LIBRARIES - 1:
                self._linker = self._new_linker()
            builder = self.llvm.JITLibraryBuilder()
            for code in objects:
                builder.add_object_img(code)
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
    """Return a memoized function: `make` runs once for the same arguments, in any
    thread.

    Native code must not be made twice, since one of the two would be freed.
    """
    lock = threading.RLock()
    memo: dict[tuple[Any, ...], T] = {}

    @wraps(make)
    def memoized(*args: P.args, **keywords: P.kwargs) -> T:
        key = (args, tuple(keywords.items()))
        if key not in memo:
            with lock:
                if key not in memo:
                    memo[key] = make(*args, **keywords)
        return memo[key]

    return memoized


@once
def jit(target: CpuTarget) -> Jit:
    """Return the process's compiler for a target, a CPU that this machine supports."""
    return Jit(target)


Linked: TypeAlias = elf.Image | Library
"""Linked code: the addresses of its functions, by name."""


def link(
    objects: Sequence[bytes],
    exports: Iterable[str],
    symbols: Mapping[str, int],
    target: CpuTarget,
) -> Linked:
    """Load object files into the process, by LLVM if their format is not that of `elf`.

    Args:
        exports: The names of functions in them that callers need.
        symbols: The addresses of the other names that they refer to.

    Raises:
        CompileError: A symbol is missing.
    """
    if all(map(elf.is_object, objects)):
        return elf.link(objects, exports, lambda n: symbols.get(n) or _in_process(n))
    return jit(target).link(objects, exports, symbols)


def shared_code(text: str, target: CpuTarget) -> bytes:
    """Return the object code of a module that programs share; a file caches it.

    Raises:
        CompileError: The text is not valid LLVM IR, a defect of the compiler.
    """
    _, [code] = object_code_of((), (text,), target)
    return code


def object_code_of(
    parts: Sequence[str],
    shared: Sequence[str],
    target: CpuTarget,
    *,
    is_long: bool = False,
) -> tuple[tuple[bytes, ...], list[bytes]]:
    """Return the object code of the parts of a program, and of modules that programs
    share, each of which a file caches. LLVM compiles them at the same time.

    Args:
        is_long: As in `Compiler.compile_all`; always so where a module is shared.

    Raises:
        CompileError: A text is not valid LLVM IR, a defect of the compiler.
    """
    keys = {text: f"module {target}\n{text}" for text in shared}
    cached = ((text, files.find(key)) for text, key in keys.items())
    codes = {text: code for text, code in cached if code is not None}
    new = [text for text in keys if text not in codes]
    texts = [*parts, *new]
    is_long = is_long or bool(shared)
    made = jit(target).compile_all(texts, is_long=is_long) if texts else ()
    for text, code in zip(new, made[len(parts) :], strict=True):
        files.store(keys[text], code)
        codes[text] = code
    return made[: len(parts)], [codes[text] for text in shared]


def _in_process(name: str) -> int:
    """Return the address of a function that LLVM calls for an instruction, as fmodf."""
    try:
        return address_of(getattr(ctypes.CDLL(None), name))
    except AttributeError as error:
        raise CompileError(f"linking failed: there is no `{name}`.") from error


@once
def c_symbols() -> dict[str, int]:
    """Return the addresses of C's functions that generated code may call."""
    library = ctypes.CDLL(None)
    return {name: address_of(getattr(library, name)) for name in (*_ALWAYS, *_ASKED)}


def address_of(function: Any) -> int:
    """Return the address of a function of a `ctypes` library."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def always_linked() -> dict[str, int]:
    """Return the addresses of the functions that LLVM may call on its own."""
    return {name: c_symbols()[name] for name in _ALWAYS}
