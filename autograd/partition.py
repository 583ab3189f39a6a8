"""What a derivative keeps of a forward pass, and what it computes again.

The cheapest set of values from which all others that are needed follow is a minimum cut
of the graph between what is there for nothing and what is needed: to keep a value costs
its bytes, to compute one again costs much less where that is cheap, and is ruled out
elsewhere (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for the
idea; the cut is the one of Ford and Fulkerson, computed by SciPy).

A size that a body makes in each run, such as the number of steps of a loop in it, has
no meaning outside: what has such a size is computed again, whatever that costs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

import numpy as np

from hopflow.errors import DerivativeError
from hopflow.graph.core import Graph, Node, Var
from hopflow.graph.rewriting import clone, effects, eliminate_dead_code, reader
from hopflow.loop_ir.expr import MATH
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Symbol, SymInt, free_symbols

Policy = Callable[[Node], bool]
"""Whether the results of a node are kept."""
Keep = Policy | Literal["cheapest", "fewest"]
"""What says what is kept: a policy; what costs least; the fewest bytes from which all
else follows, whatever it costs to compute that again."""

_ALL: Final = 2**30  # more than any set of values: what cannot be cut
_KEEP: Final = 32  # to keep a byte, where to compute one again by arithmetic costs 1
_MATH: Final = 16  # to compute one again by a function such as tanh
_UNKNOWN: Final = 64  # the guess for a size that has no hint


def kept(
    graph: Graph,
    needed: Sequence[Var],
    free: Collection[Var],
    policy: Keep = "cheapest",
) -> list[Var]:
    """The values of `graph` to keep so that all that are `needed` can be had from them.

    Args:
        free: What the backward pass has anyway.
    """
    rules = _rules(graph, needed)
    if policy == "fewest":
        rules.again.update(
            n for n in graph.nodes if n.op is not None and "callback" not in effects(n)
        )
    elif callable(policy):

        def is_kept(var: Var) -> bool:
            node = var.node
            if node.op is None:  # an input, of which a policy is not asked
                return True
            is_wanted = policy(node) or "callback" in effects(node)
            return is_wanted and not rules.stays(var)

        last = _ancestors(needed, rules, is_kept)
        return [var for var, is_end in last.items() if is_end]
    vars_ = _ancestors(
        needed, rules, lambda v: v in free or not rules.may_repeat(v.node)
    )
    if all(v in free for v in needed):
        return list(dict.fromkeys(needed))
    number = {v: 2 * i + 2 for i, v in enumerate(vars_)}
    sizes = _sizes(vars_)
    edges: dict[tuple[int, int], int] = {}
    for var, n in number.items():
        if rules.stays(var):
            edges[n, n + 1] = _ALL
        else:
            edges[n, n + 1] = 0 if var in free else _KEEP * sizes[var] + _each(var)
        if var in free or not rules.may_repeat(var.node):
            edges[_SOURCE, n] = _ALL
        else:
            if policy == "cheapest":
                edges[_SOURCE, n] = _again(var.node) * sizes[var]
            for arg in rules.reads(var.node):
                edges[number[arg] + 1, n] = _ALL
    for var in needed:
        edges[number[var] + 1, _SINK] = _ALL
    reaching = _sink_side(edges, 2 * len(vars_) + 2)
    cut = {v for v, n in number.items() if n not in reaching and n + 1 in reaching}
    return [v for v in vars_ if v in cut]


_SOURCE: Final = 0
_SINK: Final = 1


def dear_invariants(graph: Graph, same: Collection[Var]) -> set[Var]:
    """What a loop's steps all compute alike, and what costs more than to read it.

    Args:
        same: The inputs of a step that are the same in each.
    """
    found, rules = set(same), _rules(graph, ())
    for node in graph.nodes:
        # Where no step is made, a loop of it might not end, and nothing may trap.
        if found.issuperset(rules.reads(node)) and not (node.graphs or effects(node)):
            found.update(node.results)
    dear = {v for v in found if v.node.op is not None and not _is_cheap(v.node)}
    return {v for v in dear if not rules.stays(v)}


def silent(graph: Graph) -> Graph:
    """A copy of `graph` for a pass that is made once more: Python is not called again,
    and what nothing reads is left out.

    Raises:
        DerivativeError: what Python returns is read.
    """
    copy = clone(graph)
    if "callback" not in effects(copy):
        return copy
    eliminate_dead_code(copy, with_effects=True)
    for node in copy.walk():
        if "callback" in effects(node) and not node.graphs:
            raise DerivativeError(
                f"callback: `{node.params['fn']}` ({node.line}) would be called again, "
                "for this derivative takes steps of its loop again. Use `hf.scan`, or "
                "a `while_loop` without checkpoints and in no other operator: both "
                "keep what each step needs."
            )
    return copy


@dataclass(frozen=True, slots=True)
class _Rules:
    """What may be kept of a graph, and what may be computed again.

    reads  what a node is computed from
    own    the symbols that the graph makes
    again  the nodes that are computed again in any case
    """

    reads: Callable[[Node], list[Var]]
    own: frozenset[Symbol]
    again: set[Node]

    def stays(self, var: Var) -> bool:
        """Whether it cannot leave the graph, being or having a size made there."""
        sizes = free_symbols(*var.type.shape)
        return var.node.symbol in self.own or not self.own.isdisjoint(sizes)

    def may_repeat(self, node: Node) -> bool:
        return node in self.again or _is_cheap(node)


def _rules(graph: Graph, needed: Sequence[Var]) -> _Rules:
    own = frozenset(n.symbol for n in graph.nodes if n.symbol is not None)
    rules = _Rules(reader(graph), own, set())
    waiting = list(needed)
    while waiting:
        var = waiting.pop()
        if var.node not in rules.again and rules.stays(var):
            rules.again.add(var.node)
            waiting += rules.reads(var.node)
    return rules


def _ancestors(
    needed: Sequence[Var], rules: _Rules, is_end: Callable[[Var], bool]
) -> dict[Var, bool]:
    """What the needed values may be computed from, and they themselves, not beyond the
    ends; and which are ends."""
    found: dict[Var, bool] = {}
    waiting = list(needed)
    while waiting:
        var = waiting.pop()
        if var in found:
            continue
        found[var] = is_end(var)
        if not found[var]:
            waiting += rules.reads(var.node)
    return found


def _is_cheap(node: Node) -> bool:
    """Whether to compute it again costs no more than to read it."""
    return type(node.op) is OpDef and node.op.is_cheap and not effects(node)


def _is_view(node: Node) -> bool:
    return type(node.op) is OpDef and node.op.unview is not None


def _each(var: Var) -> int:
    """What one value more costs; what a view is of is better kept than the view."""
    return 9 if _is_view(var.node) else 8


def _again(node: Node) -> int:
    """What it costs to compute a byte of a cheap node's result again."""
    if _is_view(node):
        return 0
    return _MATH if node.op.name in MATH else 1


def _sizes(vars_: Collection[Var]) -> dict[Var, int]:
    """How large values are beside each other, so that all costs together are less than
    `_ALL`."""
    sizes: dict[Var, int] = {}
    for var in vars_:
        shape = [
            (n.hint or _UNKNOWN) if isinstance(n, SymInt) else n for n in var.type.shape
        ]
        sizes[var] = prod(shape) * var.type.dtype.itemsize
    scale = max(1.0, max(sizes.values()) * len(sizes) * 2 * _KEEP / _ALL)
    return {var: max(1, int(size / scale)) for var, size in sizes.items()}


def _sink_side(edges: dict[tuple[int, int], int], count: int) -> set[int]:
    """The nodes on the sink's side of a minimum cut: of all such cuts the one after
    which the least is left to compute."""
    # SciPy takes long to import, and most programs have no derivatives.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    pairs = np.array(list(edges), np.int32)
    capacities = np.array(list(edges.values()), np.int32)
    shape = (count, count)
    network = csr_array((capacities, (pairs[:, 0], pairs[:, 1])), shape=shape)
    flow = maximum_flow(network, _SOURCE, _SINK).flow
    left = network - flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    order = breadth_first_order(left.T, _SINK, return_predecessors=False)
    return {int(n) for n in order}
