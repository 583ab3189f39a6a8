"""How many iterations of a loop run as one gang, if that is faster than one by one."""

from collections import Counter
from typing import Final

from hopflow.compiler.divergence import Divergence, registers
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import For

VECTORS: Final = 4
"""Vectors of a gang: their instructions take turns, and hide how long each takes."""
LARGE: Final = 1200
"""Instructions of a gang with more vectors than one: beyond, the body alone has enough
of them to take turns, and more cost time to compile."""
CALL: Final = 100
"""Instructions that a call of a library is worth, which there is for each lane, whether
it is on or not."""


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
    computed = list(registers(divergence, loop.body))
    work = sum(map(weight, computed))
    if CALL * sum(map(_is_call, computed)) > work:
        return 1
    vectors = VECTORS
    while vectors > 1 and vectors * work > LARGE:
        vectors //= 2
    return vectors * register_lanes(loop, divergence, bits)


def _is_call(node: Expr) -> bool:
    return node.op == "fmod" or (node.op == "rem" and node.dtype.kind == "f")
