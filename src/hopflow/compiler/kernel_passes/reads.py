"""The values that an expression reads, at how many indices, and its cost."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import Value
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index, condition_of, index_of
from hopflow.loop_ir.walk import nodes

GATHER: Final = 64
"""The cost of a read at an index that is itself read (a gather): reading a gathered
array repeatedly is cheaper than a long chain of gathers in one loop."""
WEIGHTS: Final = {
    "div": 8,
    "rem": 20,
    "sqrt": 8,
    "load": 2,
    "const": 0,
    "var": 0,
    **dict.fromkeys(e.MATH, 30),
}

NEAR: Final = 16
"""Elements so few places apart run along memory."""
SHORT_ROW: Final = 4
"""Fewer sums are no row: each has a loop along its terms."""


def weight(node: Expr) -> int:
    """Return about how many instructions one node takes."""
    return WEIGHTS.get(node.op, 1)


class Cost(NamedTuple):
    """The cost of computing an element.

    work     about how many instructions
    gathers  reads at an index that is itself read
    """

    work: int = 0
    gathers: int = 0

    @property
    def again(self) -> int:
        """The cost of computing an element once more."""
        return self.work + GATHER * self.gathers

    def plus(self, other: "Cost", times: int = 1) -> "Cost":
        """Return the cost with that of another element, computed so many times."""
        return Cost(
            self.work + times * other.work, self.gathers + times * other.gathers
        )


def cost(order: Sequence[Expr]) -> Cost:
    """Return the cost of nodes, which come after their operands. The sum of an index
    and a constant is free, as a part of the address, if its read has no condition."""
    work, gathers, reads = 0, 0, set[Expr]()  # the nodes that depend on a read
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
    """Return whether a node is an axis plus or minus a constant."""
    return (
        node.op in ("add", "sub") and node.args[0].op == "var" and node.args[1].is_const
    )


def counted_reads(
    order: Sequence[Expr], views: Mapping[Value, Pointwise]
) -> tuple[dict[Value, int], set[Value]]:
    """Return the values that expressions of these nodes read, each with the number of
    different indices, and the views through which they read. The reads of a view count
    as reads of its readers."""
    values = [node.attr for node in order if node.op == "element"]
    counts: dict[Value, int] = dict.fromkeys(values, 1)
    if len(counts) == len(values) and counts.keys().isdisjoint(views):
        return counts, set()
    counts.clear()
    through: set[Value] = set()
    numbers: dict[Any, int] = {}  # of index expressions, by their structure
    seen: set[tuple[Any, ...]] = set()
    frames = [(order, dict[Expr, int]())]
    while frames:
        frame_order, memo = frames.pop()
        for node in frame_order:
            if node in memo:
                continue
            args = tuple([memo[a] for a in node.args])
            attr = node.attr if node.op == "const" else id(node.attr)
            key = node.op, node.dtype, attr, args
            memo[node] = numbers.setdefault(key, len(numbers))
            if node.op != "element" or key in seen:
                continue
            seen.add(key)
            view = views.get(node.attr)
            if view is None:
                counts[node.attr] = counts.get(node.attr, 0) + 1
                continue
            through.add(node.attr)
            at: tuple[int, ...] = args[: len(e.index_of(node))]
            inner: Index = axes(len(at))
            frames.append((nodes(*view.elements), dict(zip(inner, at, strict=True))))
    return counts, through


def run_along(reads: Iterable[tuple[Index, Expr]], i: Expr, r: Expr) -> bool:
    """Return whether memory runs along the axis `i`, and not along the axis `r`.

    Args:
        reads: The indices of elements, each with that along the last axis of memory.
    """
    # An index without `i` is that of one element for a whole row.
    last = [x for at, x in reads if any(n is i for n in nodes(*at))]
    return any(_runs_along(x, i) for x in last) and not any(
        _runs_along(x, r) for x in last
    )


def _runs_along(position: Expr, var: Expr) -> bool:
    """Return whether a position moves with a variable by less than a row: `i * 1000 +
    var` runs along `var`, and not along `i`."""
    if position is var:
        return True
    if position.op == "mul":
        x, y = position.args
        size = y.attr if y.is_const else None
        return size is not None and abs(size) < NEAR and _runs_along(x, var)
    return any(_runs_along(x, var) for x in position.args)
