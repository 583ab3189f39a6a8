"""The number of iterations of a loop that run as one gang, or 1 if that is slower."""

from collections import Counter
from typing import Final

from hopflow.compiler.divergence import Divergence, registers
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import For

VECTORS: Final = 4
"""The vectors of a gang: their interleaved instructions hide each other's latency."""
LARGE: Final = 1000
"""The most instructions of a gang with several vectors. A larger body has enough
independent instructions, and more vectors only take longer to compile."""
CALL: Final = 100
"""The instructions that a library call counts as. Each lane makes one, whether it is
active or not."""


def register_lanes(loop: For, divergence: Divergence, bits: int) -> int:
    """Return the lanes of a register for the dtype that most work of a loop uses.

    Args:
        bits: The bits of a register.
    """
    work: Counter[int] = Counter()
    for node in registers(divergence, loop.body):
        is_read = node.op in ("var", "load")  # whose arguments are indices
        dtype = (node.args[0] if node.args and not is_read else node).dtype
        if dtype.kind != "b" and node.op != "var":
            work[max(32, dtype.bits)] += weight(node)
    return bits // (max(work, key=lambda n: (work[n], n)) if work else 64)


def gang_width(loop: For, divergence: Divergence, bits: int) -> int:
    """Return the lanes of a gang, or 1 if scalar code is faster.

    Args:
        bits: The bits of a register.
    """
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
