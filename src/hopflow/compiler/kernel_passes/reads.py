"""Which values an expression reads, at how many indices; and what it costs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import Value
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index, condition_of, index_of
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


class Cost(NamedTuple):
    """What it costs to compute an element.

    work     about how many instructions
    gathers  reads at an index that is read itself
    """

    work: int = 0
    gathers: int = 0

    @property
    def again(self) -> int:
        """What it costs to compute an element once more."""
        return self.work + GATHER * self.gathers

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """The cost with that of another element, computed so many times."""
        return Cost(
            self.work + times * other.work, self.gathers + times * other.gathers
        )


def cost(order: Sequence[Expr]) -> Cost:
    """The cost of nodes, which come after their operands. The sum of an index and a
    constant is a part of the address, of reads without a condition."""
    work, gathers, reads = 0, 0, set[Expr]()  # those with a read below them
    indices = {
        i
        for node in order
        if node.op == "element" and condition_of(node) is None
        for i in index_of(node)
    }
    for node in order:
        if node not in indices or not _is_offset(node):
            work += WEIGHTS.get(node.op, 1)
        if not reads.isdisjoint(node.args):
            reads.add(node)
            if node.op == "element" and not reads.isdisjoint(index_of(node)):
                gathers += 1
        elif node.op == "element":
            reads.add(node)
    return Cost(work, gathers)


def _is_offset(node: Expr) -> bool:
    """Whether a node is an axis plus or minus a constant."""
    return (
        node.op in ("add", "sub") and node.args[0].op == "var" and node.args[1].is_const
    )


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
