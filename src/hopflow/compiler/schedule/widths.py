"""The vector widths of loops."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.target import Target
from hopflow.dtypes import bool_
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import SERIAL, Accumulate, Binding, Let, Stmt, Store
from hopflow.loop_ir.walk import nodes

_STRAIGHT = (Let, Store, Accumulate)
PAYS: Final = 0.75
"""Twice as many lanes take more registers: they must save a quarter of the work."""


def vector_binding(extent: Expr, body: Sequence[Stmt], target: Target) -> Binding:
    """Return the binding of an independent loop: vectors if its body is straight-line
    code.

    The stored dtypes decide the width: a `Let` of a wider dtype takes several
    registers, as a part of an expression does. If most of the work is on narrower
    values (random bits of 64, made of operations on 32), the stored ones do so, too.
    """
    straight = [s for s in body if isinstance(s, _STRAIGHT)]
    if not straight or len(straight) < len(body):
        return SERIAL
    reductions = [s for s in straight if isinstance(s, Accumulate)]
    # Their dtypes decide for sums of floats: the width is the tree of the sum.
    sums = [s for s in reductions if s.value.dtype.kind == "f"]
    results = [s for s in straight if not isinstance(s, Let)]
    narrow = not reductions and all(map(_is_narrow, straight))
    width = min(
        target.vector_width(s.value.dtype, reduces=bool(reductions), narrow=narrow)
        for s in sums or results or straight
    )
    work = Counter[int]() if reductions else _work(straight, target)
    if _instructions(work, 2 * width) < PAYS * _instructions(work, width):
        width *= 2
    if extent.is_const:
        # A vector that is not full takes one iteration where there are masks.
        fewest = 2 * extent.attr - 1 if target.has_masks else extent.attr
        while width > max(fewest, 1):
            width //= 2
    return Binding("vector", width) if width > 1 else SERIAL


def _work(straight: Sequence[Let | Store | Accumulate], target: Target) -> Counter[int]:
    """Return how much work is done on values, by the lanes of a register of them."""
    work = Counter[int]()
    seen = set[Expr]()
    pending = [s.value for s in straight]
    while pending:
        node = pending.pop()
        if node in seen or node.op in ("const", "var"):
            continue
        seen.add(node)
        if node.op != "load":
            pending += node.args
        value = node.args[0] if node.dtype is bool_ and node.args else node
        work[target.vector_width(value.dtype)] += weight(node)
    return work


def _instructions(work: Counter[int], width: int) -> float:
    """Return about how many instructions an iteration takes if vectors have so many
    lanes, which may be several registers."""
    return sum(n * max(1, width // lanes) for lanes, n in work.items()) / width


def _is_narrow(statement: Let | Store | Accumulate) -> bool:
    """Return whether a statement computes only with integers of at most 16 bits, apart
    from the indices of rows that it reads."""
    pending = [statement.value]
    seen: set[Expr] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.dtype.kind == "f" or node.dtype.bits > 16:
            return False
        if node.op != "load":
            pending += node.args
        elif e.condition_of(node) is not None or any(
            x.op == "load" for x in nodes(*node.args)
        ):
            return False
    return True
