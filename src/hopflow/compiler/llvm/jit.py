"""From LLVM IR to addresses: verify, optimise, emit an object, link it.

LLVM is loaded by the first compilation. All of its calls are made under one lock.
"""

import ctypes
import itertools
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from hopflow.compiler.llvm.target import Target, host
from hopflow.errors import CompileError

# LLVM may call these of its own accord.
_ALWAYS: Final = ("memcpy", "memmove", "memset")
_C: Final = frozenset(
    (*_ALWAYS, "malloc", "aligned_alloc", "realloc", "free", "fmod", "fmodf")
    + ("clock_gettime",)
)


class Library:
    """Linked code: the addresses of its functions. It goes when this object goes."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])


class Jit:
    """A compiler and a linker for one target. Use `jit()`, which keeps the only one."""

    def __init__(self, target: Target) -> None:
        import llvmlite.binding as llvm  # loads LLVM, which takes 60 ms

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.target, self._llvm = target, llvm
        self._lock = threading.RLock()  # a collected kernel is released under it too
        self._numbers = itertools.count()
        self._machine = self._target_machine()
        # A machine serves one owner: the linker needs another.
        self._linker = llvm.create_lljit_compiler(
            self._target_machine(), use_jit_link=True
        )

    def _target_machine(self) -> Any:
        return self._llvm.Target.from_triple(self.target.triple).create_target_machine(
            cpu=self.target.cpu,
            features=self.target.features,
            opt=2,
            reloc="pic",  # any other ends the process in the linker
            codemodel="small",
        )

    def optimised(self, text: str) -> Any:
        """Parse, verify and optimise a module.

        Raises:
            CompileError: The text is not valid; a defect of ours.
        """
        llvm = self._llvm
        head = (
            f'target triple = "{self.target.triple}"\n'
            f'target datalayout = "{self.target.layout}"\n'
        )
        try:
            module = llvm.parse_assembly(head + text)
            module.verify()
        except RuntimeError as error:
            raise CompileError(f"invalid LLVM IR: {error}") from error
        # Not kept: each run adds callbacks to its builder that outlive their owner.
        options = llvm.create_pipeline_tuning_options(1)
        with llvm.create_pass_builder(self._machine, options) as builder:
            self._passes().run(module, builder)
        return module

    def _passes(self) -> Any:
        """What is left to do after our own emitter: LLVM's O1 pipeline gives the same
        code for two to four times the time."""
        passes = self._llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.add_loop_rotate_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        return passes

    def compile(self, text: str) -> bytes:
        """The object code of a module."""
        with self._lock:
            module = self.optimised(text)
            code: bytes = self._machine.emit_object(module)
            module.close()
        return code

    def assembly(self, text: str) -> str:
        """The assembly of a module, for reading."""
        with self._lock:
            module = self.optimised(text)
            assembly: str = self._machine.emit_assembly(module)
            module.close()
        return assembly

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


@cache
def jit() -> Jit:
    """The process's compiler, for the CPU we run on."""
    return Jit(host())


@cache
def c_symbols() -> dict[str, int]:
    """The addresses of C's functions that generated code may call."""
    library = ctypes.CDLL(None)
    return {name: address_of(getattr(library, name)) for name in _C}


def address_of(function: Any) -> int:
    """The address of a function of a `ctypes` library."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def always_linked() -> dict[str, int]:
    """What LLVM may call unasked."""
    return {name: c_symbols()[name] for name in _ALWAYS}
