"""From LLVM IR to addresses: verify, optimise, emit an object, link it.

LLVM is loaded by the first compilation. All of its calls are made under one lock.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from hopflow.compiler.llvm.target import CpuTarget
from hopflow.errors import CompileError

P = ParamSpec("P")
T = TypeVar("T")

# LLVM may call these of its own accord.
_ALWAYS: Final = ("memcpy", "memmove", "memset")
_ASKED: Final = (
    "malloc aligned_alloc realloc free fmod fmodf clock_gettime "
    "pthread_create pthread_detach nanosleep mmap mprotect munmap"
).split()


class Library:
    """Linked code: the addresses of its functions. It goes when this object goes."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])


class Jit:
    """A compiler and a linker for one target. Use `jit`, which keeps the only one."""

    def __init__(self, target: CpuTarget) -> None:
        import llvmlite.binding as llvm  # loads LLVM, which takes a while

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # How long the register allocator looks for the best place to split a value. By
        # default a program of a thousand sines takes 35 s, with this it takes one; up
        # to a hundred lines the code is the same.
        llvm.set_option("", "-grow-region-complexity-budget=300")
        self.target, self._llvm = target, llvm
        self._lock = threading.RLock()  # a collected kernel is released under it too
        self._numbers = itertools.count()
        self._machine = self._target_machine()
        self._passes = _passes(llvm)
        # A machine serves one owner: the linker needs another.
        self._linker = llvm.create_lljit_compiler(
            self._target_machine(), use_jit_link=True, suppress_errors=True
        )

    def _target_machine(self) -> Any:
        return self._llvm.Target.from_triple(self.target.triple).create_target_machine(
            cpu=self.target.cpu,
            features=self.target.features,
            opt=2,
            reloc="pic",  # any other ends the process in the linker
            codemodel="small",
        )

    @contextmanager
    def _optimised(self, text: str) -> Iterator[Any]:
        """A module, parsed, verified and optimised; the lock is held meanwhile."""
        llvm = self._llvm
        head = (
            f'target triple = "{self.target.triple}"\n'
            f'target datalayout = "{self.target.layout}"\n'
        )
        # A context of its own gives back the memory of types and constants. Nor is the
        # pass builder kept: each run adds callbacks to it that outlive their owner.
        with self._lock, llvm.create_context() as context:
            try:
                module = llvm.parse_assembly(head + text, context)
                module.verify()
            except RuntimeError as error:
                raise CompileError(f"invalid LLVM IR: {error}") from error
            options = llvm.create_pipeline_tuning_options(1)
            with module, llvm.create_pass_builder(self._machine, options) as builder:
                self._passes.run(module, builder)
                yield module

    def compile(self, text: str) -> bytes:
        """The object code of a module.

        Raises:
            CompileError: The text is not valid LLVM IR; a defect of ours.
        """
        with self._optimised(text) as module:
            code: bytes = self._machine.emit_object(module)
        return code

    def assembly(self, text: str) -> str:
        """The assembly of a module, for reading."""
        with self._optimised(text) as module:
            assembly: str = self._machine.emit_assembly(module)
        return assembly

    def optimised(self, text: str) -> str:
        """A module after LLVM's passes, for reading."""
        with self._optimised(text) as module:
            return str(module)

    def link(
        self, code: bytes, exports: Iterable[str], symbols: Mapping[str, int]
    ) -> Library:
        """Load object code, resolving the symbols it refers to.

        Raises:
            CompileError: A symbol is missing.
        """
        with self._lock:
            builder = self._llvm.JITLibraryBuilder().add_object_img(code)
            for name, address in symbols.items():
                builder.import_symbol(name, address)
            for name in exports:
                builder.export_symbol(name)
            try:
                tracker = builder.link(self._linker, f"hf.{next(self._numbers)}")
            except RuntimeError as error:
                raise CompileError(f"linking failed: {error}") from error
        return Library(tracker)


def _passes(llvm: Any) -> Any:
    """What our own emitter leaves to do. LLVM's O1 pipeline gives the same code, and
    takes longer."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_loop_rotate_pass()
    passes.add_simplify_cfg_pass()
    return passes


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
