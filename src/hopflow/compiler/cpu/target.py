"""The CPUs that the backend compiles for."""

import json
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from hopflow.compiler import files
from hopflow.compiler.cpu.gang_width import gang_width
from hopflow.compiler.divergence import Divergence
from hopflow.compiler.llvm.target import LlvmTarget
from hopflow.dtypes import DType
from hopflow.errors import CompileError
from hopflow.loop_ir.program import For

X86_BASELINE: Final = ("avx2", "fma", "f16c")
HOT: Final = '"prefer-vector-width"="512" nounwind'
"""Attributes of a function: without the first, LLVM halves vectors of 512 bits."""
REDUCTION_REGISTERS: Final = 4
"""The registers of an accumulator, whose additions depend on each other. In other loops
the CPU overlaps iterations by itself, and wider code only takes longer to compile."""


@dataclass(frozen=True, slots=True)
class CpuTarget(LlvmTarget):
    """A CPU, with the properties that the schedule and the emitter need.

    All that they know of an architecture is here: each property is a question that a
    new one must answer. Where a property asks for x86, ARM and so on by name, what it
    says of all others may be wrong for the new one.

    freestanding   whether programs run without Python and without an operating system:
                   on the thread of the caller, without polls, and in memory that the
                   caller gives
    """

    freestanding: bool = False

    @property
    def has_threads(self) -> bool:
        """Whether loops may run on several threads."""
        return not self.freestanding

    @property
    def is_microcontroller(self) -> bool:
        """Whether the CPU is a Cortex-M, whose stack is small."""
        return self.triple.startswith("thumb")

    @property
    def is_wasm(self) -> bool:
        """Whether the code is that of WebAssembly."""
        return self.triple.startswith("wasm")

    @property
    def has_fma(self) -> bool:
        """Whether a fused multiply-add is an instruction."""
        is_x86 = self.triple.startswith("x86_64")
        return self.has("fma") if is_x86 else not self.is_wasm

    @property
    def has_extrema(self) -> bool:
        """Whether it has the minimum and the maximum that `Module` describes."""
        return self.is_wasm or self.triple.startswith(("aarch64", "arm64"))

    @property
    def has_rvv(self) -> bool:
        """Whether it has the vector extension of RISC-V."""
        return self.triple.startswith("riscv") and self.has("v")

    @property
    def register_bits(self) -> int:
        """The bits of the widest register: of a vector, or of a scalar float64.

        Registers of RISC-V's vectors have a width that code finds when it runs. Emitted
        vectors have a fixed width, so it is the least that the extension allows.
        """
        if self.has("avx512f"):
            return 512
        if self.has("avx2"):
            return 256
        is_scalar_riscv = self.triple.startswith("riscv") and not self.has_rvv
        return 64 if self.is_microcontroller or is_scalar_riscv else 128

    def lanes(self, dtype: DType) -> int:
        """Return how many elements, as they are in memory, the widest register has."""
        return self.register_bits // (8 * dtype.itemsize)

    @property
    def has_masks(self) -> bool:
        """Whether a masked load, store or gather is one instruction."""
        is_avx512 = all(map(self.has, ("avx512f", "avx512bw", "avx512vl")))
        return is_avx512 or self.has_rvv

    def vector_width(
        self, dtype: DType, *, reduces: bool = False, narrow: bool = False
    ) -> int:
        """Return the lanes of a vector loop whose largest values are of `dtype`.

        Args:
            reduces: Whether the loop has an `Accumulate`.
            narrow: Whether no value in the loop has more bits.
        """
        lanes = self.register_bits // max(8 if narrow else 32, dtype.bits)
        return lanes * REDUCTION_REGISTERS if reduces else lanes

    @property
    def has_gangs(self) -> bool:
        return self.register_bits > 64

    def gang_width(self, loop: For, divergence: Divergence) -> int:
        """Return the lanes of a gang of iterations, or 1 if scalar code is faster."""
        if not self.has_gangs:
            return 1
        return gang_width(loop, divergence, self.register_bits)

    def check(self) -> None:
        """Check that the CPU has the instruction sets that generated code uses.

        Raises:
            CompileError: It is an x86 CPU from before 2013.
        """
        missing = [f for f in X86_BASELINE if not self.has(f)]
        if self.triple.startswith("x86_64") and missing:
            raise CompileError(
                f"native code needs a CPU with {', '.join(X86_BASELINE)}; this one "
                f"({self.cpu}, {platform.machine()}) lacks {', '.join(missing)}."
            )


def native_llvm() -> Any:
    """Return LLVM's module, initialised for the kind of CPU of this machine."""
    import llvmlite.binding as llvm  # loading LLVM takes a while

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def host() -> CpuTarget:
    """Return the CPU of this machine; a file caches it, since LLVM takes long to load.

    Raises:
        CompileError: The CPU lacks an instruction set that generated code uses.
    """
    description = _described()
    stored = files.find(f"host {description}") if description else None
    if stored is not None:
        target = CpuTarget(*json.loads(stored))
    else:
        target = _host()
        fields = target.triple, target.layout, target.cpu, target.features
        if description:
            files.store(f"host {description}", json.dumps(fields).encode())
    target.check()
    return target


def _host() -> CpuTarget:
    llvm = native_llvm()
    cpu = llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten()
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, reloc="pic", codemodel="small"
    )
    return CpuTarget(triple, str(machine.target_data), cpu, features)


_DESCRIBED: Final = frozenset(
    [
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    ]
)


def _described() -> str:
    """Return Linux's constant facts about the first CPU; "" on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = text.partition("\n\n")[0].splitlines()
    facts = [line for line in lines if line.partition(":")[0].strip() in _DESCRIBED]
    return "\n".join([platform.machine(), *facts])
