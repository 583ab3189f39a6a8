"""The machine that code is made for."""

import platform
from dataclasses import dataclass
from functools import cache
from typing import Final

from hopflow.dtypes import DType
from hopflow.errors import CompileError

X86_BASELINE: Final = ("avx2", "fma", "f16c")
REGISTERS_IN_A_VECTOR: Final = 4
"""One wide vector is this many native registers, which hides their latency."""


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU, as LLVM names it and its features ("+avx2,-avx512f")."""

    triple: str
    layout: str
    cpu: str
    features: str

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    @property
    def register_bits(self) -> int:
        """Bits of the widest vector register."""
        if self.has("avx512f"):
            return 512
        return 256 if self.has("avx2") else 128

    @property
    def has_masks(self) -> bool:
        """Whether a load, store or gather under a mask is one instruction."""
        return self.has("avx512f") and self.has("avx512bw") and self.has("avx512vl")

    def vector_width(self, dtype: DType) -> int:
        """The lanes that a vector loop whose largest element is `dtype` should have."""
        bits = max(8, dtype.bits)
        return min(64, REGISTERS_IN_A_VECTOR * self.register_bits // max(bits, 32))

    def check(self) -> None:
        """Raise unless the CPU has what the generated code takes for granted.

        Raises:
            CompileError: It is an x86 from before 2013.
        """
        missing = [f for f in X86_BASELINE if not self.has(f)]
        if self.triple.startswith("x86_64") and missing:
            raise CompileError(
                f"native code needs a CPU with {', '.join(X86_BASELINE)}; this one "
                f"({self.cpu}, {platform.machine()}) lacks {', '.join(missing)}."
            )


@cache
def host() -> Target:
    """The CPU we run on.

    Raises:
        CompileError: It lacks an instruction set that is taken for granted.
    """
    import llvmlite.binding as llvm  # loads LLVM, which takes 60 ms

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu = llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten()
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, reloc="pic", codemodel="small"
    )
    target = Target(triple, str(machine.target_data), cpu, features)
    target.check()
    return target
