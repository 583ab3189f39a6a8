"""The machines that native code is exported for, and its compilation.

docs/compiler.md, "To add a target", lists what else a new machine needs.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.llvm.compiler import Compiler
from hopflow.compiler.llvm.target import LlvmTarget

HOST: Final = "host"
WASM: Final = "wasm32"


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of machine, as LLVM names it.

    features  the instruction sets that code may use, also those that `cpu` implies:
              the properties of `CpuTarget` know only those that are listed
    abi       the calling convention, if the CPU leaves a choice
    reloc     how code refers to other code
    """

    triple: str
    cpu: str
    features: tuple[str, ...] = ()
    abi: str = ""
    reloc: str = "pic"


_LINUX: Final = "x86_64-unknown-linux-gnu"
_V2: Final = ("cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3: Final = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4: Final = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_RISCV: Final = "riscv64-unknown-linux-gnu"
_RV64GC: Final = ("m", "a", "f", "d", "c", "zicsr", "zifencei")

MACHINES: Final[dict[str, Machine]] = {
    "x86-64-v2": Machine(_LINUX, "x86-64-v2", _V2),
    "x86-64-v3": Machine(_LINUX, "x86-64-v3", _V3),
    "x86-64-v4": Machine(_LINUX, "x86-64-v4", _V4),
    "aarch64": Machine("aarch64-unknown-linux-gnu", "generic", ("neon", "fp-armv8")),
    "riscv64": Machine(_RISCV, "generic-rv64", _RV64GC, abi="lp64d"),
    "riscv64-v": Machine(_RISCV, "generic-rv64", (*_RV64GC, "v"), abi="lp64d"),
    "cortex-m7": Machine(
        "thumbv7em-unknown-none-eabihf",
        "cortex-m7",
        ("thumb2", "fp-armv8d16"),
        reloc="static",
    ),
    WASM: Machine(
        "wasm32-unknown-unknown",
        "generic",
        tuple(
            "simd128 bulk-memory bulk-memory-opt sign-ext nontrapping-fptoint "
            "mutable-globals".split()
        ),
        reloc="static",
    ),
}
"""By name, the machines besides that of this process."""
TARGETS: Final = (HOST, *(name for name in MACHINES if name != WASM))
"""The values of `target` of `to_native`; `to_wasm` is for the other machine."""


@cache
def target(name: str) -> CpuTarget:
    """The target of this name, one of `TARGETS`.

    Raises:
        CompileError: the CPU of this machine lacks what generated code uses.
    """
    if name == HOST:
        return replace(host(), freestanding=True)
    machine = MACHINES[name]
    features = ",".join(f"+{feature}" for feature in machine.features)
    llvm = _llvm()
    found = llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu, features=features, abiname=machine.abi
    )
    layout = str(found.target_data)
    return CpuTarget(machine.triple, layout, machine.cpu, features, freestanding=True)


@cache
def compiler(name: str) -> Compiler:
    """The compiler for the target of this name."""
    _llvm()
    machine = MACHINES.get(name)
    options = {"reloc": "pic", "codemodel": "small"}
    if machine is not None:
        options |= {"reloc": machine.reloc, "abiname": machine.abi}
    return Compiler(target(name), **options)


def object_target(found: LlvmTarget) -> str:
    """What a target is for, for readers: its triple and CPU."""
    return f"{found.triple} ({found.cpu})"


@cache
def _llvm() -> Any:
    """LLVM's module, initialised for all machines."""
    import llvmlite.binding as llvm  # loading LLVM takes a while

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm
