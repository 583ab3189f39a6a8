"""From LLVM IR to the machine code of a target: verify, optimise, emit.

The first compilation loads LLVM. A lock guards the compiler: programs are compiled one
after the other, the modules of one in several threads.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from hopflow.compiler.llvm.target import LlvmTarget
from hopflow.config import config
from hopflow.errors import CompileError

LEVEL: Final = 1
"""The effort of LLVM's code generator. At 2 it schedules instructions once more, after
it has allocated registers: 3 % of a first call, for code as fast in the mean."""
LONG: Final = 300
"""From this many lines on LLVM omits loop strength reduction. There it takes up to a
third of LLVM's time, and the emitter has done what loops gain most from: invariant code
is in preheaders. Some short loops run up to 9 % faster with it."""


class Compiler:
    """A compiler for one target, for which LLVM has been initialised."""

    def __init__(self, target: LlvmTarget, **options: str) -> None:
        """Create the compiler, and load LLVM.

        Args:
            options: Options of LLVM's target machine: how code refers to other code.
        """
        import llvmlite.binding as llvm  # loading LLVM takes a while

        # The effort of the register allocator to find the best place to split a value.
        # By default a program of a thousand sines takes 35 s, with this setting 1 s; up
        # to a hundred lines the code is the same.
        llvm.set_option("", "-grow-region-complexity-budget=300")
        self.target, self.llvm = target, llvm
        # It is reentrant, since a kernel may be collected under the lock.
        self.lock = threading.RLock()
        self._options = options
        self._machines = [self.target_machine()]  # those that no thread has
        self._passes = _passes(llvm)

    def target_machine(self) -> Any:
        """Return a new LLVM target machine; each serves one owner."""
        return self.llvm.Target.from_triple(self.target.triple).create_target_machine(
            cpu=self.target.cpu,
            features=self.target.features,
            opt=LEVEL,
            **self._options,
        )

    def compile(self, text: str) -> bytes:
        """Return the object code of a module.

        Raises:
            CompileError: The text is not valid LLVM IR, a defect of the compiler.
        """
        [code] = self.compile_all([text])
        return code

    def compile_all(
        self, texts: Sequence[str], *, is_long: bool = False
    ) -> tuple[bytes, ...]:
        """Return the object code of modules: parts of one program, and what it calls.

        LLVM runs in as many threads as programs may.

        Args:
            is_long: Whether they are compiled as `LONG` ones, however short.

        Raises:
            CompileError: As for `compile`.
        """
        with self.lock, self._options_for(*texts, is_long=is_long):
            count = min(len(texts), config.num_threads) - 1
            if count < 1:
                return tuple(map(self._object_code, texts))
            with ThreadPoolExecutor(count) as threads:
                try:
                    others = [threads.submit(self._object_code, t) for t in texts[1:]]
                except RuntimeError:  # the interpreter ends, and starts no thread
                    return tuple(map(self._object_code, texts))
                code = self._object_code(texts[0])
                return (code, *[other.result() for other in others])

    def _object_code(self, text: str) -> bytes:
        with self._machine() as machine, self._optimised(machine, text) as module:
            return _emitted(self.llvm, machine, module)

    @contextmanager
    def _machine(self) -> Iterator[Any]:
        """Take a target machine that no other thread has."""
        try:
            machine = self._machines.pop()
        except IndexError:
            machine = self.target_machine()
        try:
            yield machine
        finally:
            self._machines.append(machine)

    def assembly(self, text: str, *, is_long: bool = False) -> str:
        """Return the assembly of a module, for reading.

        Args:
            is_long: As for `compile_all`.
        """
        with (
            self.lock,
            self._options_for(text, is_long=is_long),
            self._machine() as machine,
            self._optimised(machine, text) as module,
        ):
            assembly: str = machine.emit_assembly(module)
        return assembly

    def optimised(self, text: str) -> str:
        """Return a module after LLVM's passes, for reading."""
        with (
            self.lock,
            self._machine() as machine,
            self._optimised(machine, text) as module,
        ):
            return str(module)

    @contextmanager
    def _options_for(self, *texts: str, is_long: bool = False) -> Iterator[None]:
        """Set LLVM's options for modules in this context: they are global."""
        is_long = is_long or sum(text.count("\n") for text in texts) >= LONG
        self.llvm.set_option("", f"-disable-lsr={str(is_long).lower()}")
        try:
            yield
        finally:
            self.llvm.set_option("", "-disable-lsr=false")

    @contextmanager
    def _optimised(self, machine: Any, text: str) -> Iterator[Any]:
        """Parse, verify and optimise a module, which lives in this context."""
        llvm = self.llvm
        head = (
            f'target triple = "{self.target.triple}"\n'
            f'target datalayout = "{self.target.layout}"\n'
        )
        # A separate context lets threads compile at the same time, and frees the memory
        # of types and constants. The pass builder is not kept, since each run adds
        # callbacks to it that outlive their owner.
        with llvm.create_context() as context:
            try:
                module = llvm.parse_assembly(head + text, context)
                module.verify()
            except RuntimeError as error:
                raise CompileError(f"invalid LLVM IR: {error}") from error
            options = llvm.create_pipeline_tuning_options(1)
            with module, llvm.create_pass_builder(machine, options) as builder:
                self._passes.run(module, builder)
                yield module


def _emitted(llvm: Any, machine: Any, module: Any) -> bytes:
    """Return the object code of an optimised module.

    This is `emit_object` of llvmlite without its lock, which is held during each call
    of LLVM. A module in a context of its own and a target machine of its own share no
    state with those of other threads.
    """
    library = llvm.ffi.lib
    emit = library.LLVMPY_TargetMachineEmitToMemory
    with llvm.ffi.OutputString() as error:
        buffer = getattr(emit, "_cfn", emit)(machine, module, True, error)
        if not buffer:
            raise CompileError(f"LLVM emits no code: {error}")
    try:
        start = library.LLVMPY_GetBufferStart(buffer)
        return ctypes.string_at(start, library.LLVMPY_GetBufferSize(buffer))
    finally:
        library.LLVMPY_DisposeMemoryBuffer(buffer)


def _passes(llvm: Any) -> Any:
    """Return the passes that the emitter leaves to LLVM.

    LLVM's O1 pipeline gives the same code, and takes longer.
    """
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_loop_rotate_pass()
    passes.add_simplify_cfg_pass()
    return passes
