"""Which values an expression reads, at how many indices; and what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import Value
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index, index_of
from hopflow.loop_ir.walk import nodes

GATHER: Final = 64
"""What a read costs at an index that is read itself: to read again and again what was
gathered in one loop is cheaper than a long chain of such reads in one."""
WEIGHTS: Final = {
    "div": 8,
    "rem": 20,
    "sqrt": 8,
    "load": 2,
    "const": 0,
    "var": 0,
    **dict.fromkeys(e.MATH, 30),
}


def weight(node: Expr) -> int:
    """About how many instructions one node is."""
    return WEIGHTS.get(node.op, 1)


def cost(order: Sequence[Expr]) -> int:
    """About how many instructions nodes are, which come after their operands, and
    `GATHER` for each read at an index that is read itself."""
    total, reads = 0, set[Expr]()  # those with a read below them
    for node in order:
        total += WEIGHTS.get(node.op, 1)
        if not reads.isdisjoint(node.args):
            reads.add(node)
            if node.op == "element" and not reads.isdisjoint(index_of(node)):
                total += GATHER
        elif node.op == "element":
            reads.add(node)
    return total


def counted_reads(
    order: Sequence[Expr], views: Mapping[Value, Pointwise]
) -> tuple[dict[Value, int], set[Value]]:
    """The values that expressions of these nodes read, each with the number of
    different indices at which they read it; and the views through which they do. What a
    view reads is read by whoever reads the view."""
    read = [node.attr for node in order if node.op == "element"]
    found: dict[Value, int] = dict.fromkeys(read, 1)
    if len(found) == len(read) and found.keys().isdisjoint(views):
        return found, set()
    found.clear()
    through: set[Value] = set()
    numbers: dict[Any, int] = {}  # of index expressions, by their form
    seen: set[tuple[Any, ...]] = set()
    frames = [(order, dict[Expr, int]())]
    while frames:
        own, known = frames.pop()
        for node in own:
            if node in known:
                continue
            args = tuple([known[a] for a in node.args])
            attr = node.attr if node.op == "const" else id(node.attr)
            key = node.op, node.dtype, attr, args
            known[node] = numbers.setdefault(key, len(numbers))
            if node.op != "element" or key in seen:
                continue
            seen.add(key)
            view = views.get(node.attr)
            if view is None:
                found[node.attr] = found.get(node.attr, 0) + 1
                continue
            through.add(node.attr)
            at: tuple[int, ...] = args[: len(e.index_of(node))]
            inner: Index = axes(len(at))
            frames.append((nodes(*view.elements), dict(zip(inner, at, strict=True))))
    return found, through
