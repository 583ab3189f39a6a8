"""From LLVM IR to the machine code of a target: verify, optimise, emit.

The first compilation loads LLVM. A lock guards all calls of LLVM.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hopflow.compiler.llvm.target import LlvmTarget
from hopflow.errors import CompileError

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
        self._machine = self.target_machine()
        self._passes = _passes(llvm)

    def target_machine(self) -> Any:
        """Return a new LLVM target machine; each serves one owner."""
        return self.llvm.Target.from_triple(self.target.triple).create_target_machine(
            cpu=self.target.cpu,
            features=self.target.features,
            opt=2,
            **self._options,
        )

    @contextmanager
    def _optimised(self, text: str) -> Iterator[Any]:
        """Parse, verify and optimise a module; the lock is held in this context."""
        llvm = self.llvm
        head = (
            f'target triple = "{self.target.triple}"\n'
            f'target datalayout = "{self.target.layout}"\n'
        )
        # A separate context frees the memory of types and constants. The pass builder
        # is not kept, since each run adds callbacks to it that outlive their owner.
        with self.lock, llvm.create_context() as context:
            try:
                module = llvm.parse_assembly(head + text, context)
                module.verify()
            except RuntimeError as error:
                raise CompileError(f"invalid LLVM IR: {error}") from error
            options = llvm.create_pipeline_tuning_options(1)
            with module, llvm.create_pass_builder(self._machine, options) as builder:
                self._passes.run(module, builder)
                llvm.set_option("", f"-disable-lsr={str(_is_long(text)).lower()}")
                try:
                    yield module
                finally:  # the option is global to the process
                    llvm.set_option("", "-disable-lsr=false")

    def compile(self, text: str) -> bytes:
        """Return the object code of a module.

        Raises:
            CompileError: The text is not valid LLVM IR, a defect of the compiler.
        """
        with self._optimised(text) as module:
            code: bytes = self._machine.emit_object(module)
        return code

    def assembly(self, text: str) -> str:
        """Return the assembly of a module, for reading."""
        with self._optimised(text) as module:
            assembly: str = self._machine.emit_assembly(module)
        return assembly

    def optimised(self, text: str) -> str:
        """Return a module after LLVM's passes, for reading."""
        with self._optimised(text) as module:
            return str(module)


def _is_long(text: str) -> bool:
    return text.count("\n") >= LONG


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
