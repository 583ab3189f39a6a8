"""How many iterations of a loop run as one gang, if that is faster than one by one."""

from collections import Counter

from hopflow.compiler.divergence import Divergence, registers
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir.program import For


def register_lanes(loop: For, divergence: Divergence, bits: int) -> int:
    """The lanes of a register of so many bits, for the dtype that a loop computes with
    most."""
    work: Counter[int] = Counter()
    for node in registers(divergence, loop.body):
        dtype = (node.args[0] if node.args else node).dtype
        if dtype.kind != "b":
            work[max(32, dtype.bits)] += weight(node)
    return bits // (max(work, key=lambda n: (work[n], n)) if work else 64)


def gang_width(loop: For, divergence: Divergence, bits: int) -> int:
    """The lanes of a gang, where registers have so many bits; 1 if scalar code is
    better."""
    return 4 * register_lanes(loop, divergence, bits)
