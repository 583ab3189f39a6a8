"""The choice of residuals: what a derivative saves of the forward pass, and what it
recomputes.

The cheapest set of values from which all needed values can be computed is a minimum cut
of the graph between what is free and what is needed. Saving a value costs its bytes;
recomputing one costs much less if its operation is cheap, and is not allowed otherwise
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for the idea).

A size that a body computes in each run, such as the number of steps of an inner loop,
is undefined outside of the body. A value with such a size is always recomputed.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from hopflow.autograd.minimum_cut import sink_side
from hopflow.errors import DerivativeError
from hopflow.graph.core import Graph, Node, Var
from hopflow.graph.rewriting import clone, effects, eliminate_dead_code, reader
from hopflow.loop_ir.expr import MATH
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Symbol, SymInt, free_symbols

Policy = Callable[[Node], bool]
"""Whether to save the results of a node."""
Keep = Policy | Literal["cheapest", "fewest"]
"""How to choose residuals: by a policy; at the least cost of memory and recomputation;
or in the fewest bytes, however much is recomputed."""

# Capacities of edges. Recomputing one byte by arithmetic costs 1.
_INFINITE: Final = 2**30  # more than any cut costs
_SAVE: Final = 32  # saving a byte
_MATH: Final = 16  # recomputing a byte by a function such as tanh
_DEFAULT_SIZE: Final = 64  # assumed for a symbolic size without a hint


def choose_residuals(
    graph: Graph,
    needed: Sequence[Var],
    free: Collection[Var],
    policy: Keep = "cheapest",
) -> list[Var]:
    """Return the values of `graph` to save so that all `needed` values can be computed.

    Args:
        free: Values that the backward pass can read at no cost.
    """
    rules = _rules(graph, needed)
    if policy == "fewest":
        rules.repeated.update(
            n for n in graph.nodes if n.op is not None and "callback" not in effects(n)
        )
    elif callable(policy):

        def is_kept(var: Var) -> bool:
            node = var.node
            if node.op is None:  # policies are not asked about inputs
                return True
            is_saved = policy(node) or "callback" in effects(node)
            return is_saved and not rules.stays(var)

        ends = _ancestors(needed, rules, is_kept)
        return [var for var, is_end in ends.items() if is_end]
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
            edges[n, n + 1] = _INFINITE
        else:
            edges[n, n + 1] = 0 if var in free else _SAVE * sizes[var] + _save_cost(var)
        if var in free or not rules.may_repeat(var.node):
            edges[_SOURCE, n] = _INFINITE
        else:
            if policy == "cheapest":
                edges[_SOURCE, n] = _recompute_cost(var.node) * sizes[var]
            for arg in rules.reads(var.node):
                edges[number[arg] + 1, n] = _INFINITE
    for var in needed:
        edges[number[var] + 1, _SINK] = _INFINITE
    reaching = sink_side(edges, _SOURCE, _SINK)
    cut = {v for v, n in number.items() if n not in reaching and n + 1 in reaching}
    return [v for v in vars_ if v in cut]


_SOURCE: Final = 0
_SINK: Final = 1


def costly_invariants(graph: Graph, same: Collection[Var]) -> set[Var]:
    """Return the values that are equal in all steps of a loop, and costly to recompute.

    Args:
        same: The inputs of a step that are equal in all steps.
    """
    invariants, rules = set(same), _rules(graph, ())
    for node in graph.nodes:
        # A hoisted node runs even if the loop makes no step: it must end and not trap.
        if invariants.issuperset(rules.reads(node)) and not (
            node.graphs or effects(node)
        ):
            invariants.update(node.results)
    costly = {v for v in invariants if v.node.op is not None and not _is_cheap(v.node)}
    return {v for v in costly if not rules.stays(v)}


def silent(graph: Graph) -> Graph:
    """Return a copy of `graph` to run a second time: it calls no callback again, and
    has no dead code.

    Raises:
        DerivativeError: the result of a callback is read.
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
    """Which values of a graph may be saved, and which may be recomputed.

    reads          the vars that a node is computed from
    local_symbols  the symbols that the graph defines
    repeated       the nodes that are recomputed in any case
    """

    reads: Callable[[Node], list[Var]]
    local_symbols: frozenset[Symbol]
    repeated: set[Node]

    def stays(self, var: Var) -> bool:
        """Whether a var cannot leave the graph: it depends on a size defined there."""
        sizes = free_symbols(*var.type.shape)
        return (
            var.node.symbol in self.local_symbols
            or not self.local_symbols.isdisjoint(sizes)
        )

    def may_repeat(self, node: Node) -> bool:
        return node in self.repeated or _is_cheap(node)


def _rules(graph: Graph, needed: Sequence[Var]) -> _Rules:
    local_symbols = frozenset(n.symbol for n in graph.nodes if n.symbol is not None)
    rules = _Rules(reader(graph), local_symbols, set())
    waiting = list(needed)
    while waiting:
        var = waiting.pop()
        if var.node not in rules.repeated and rules.stays(var):
            rules.repeated.add(var.node)
            waiting += rules.reads(var.node)
    return rules


def _ancestors(
    needed: Sequence[Var], rules: _Rules, is_end: Callable[[Var], bool]
) -> dict[Var, bool]:
    """Return the needed values and their ancestors, up to the ends, each with
    whether it is an end. Ancestors of ends are left out."""
    ancestors: dict[Var, bool] = {}
    waiting = list(needed)
    while waiting:
        var = waiting.pop()
        if var in ancestors:
            continue
        ancestors[var] = is_end(var)
        if not ancestors[var]:
            waiting += rules.reads(var.node)
    return ancestors


def _is_cheap(node: Node) -> bool:
    """Whether recomputing the results costs no more than reading them."""
    return type(node.op) is OpDef and node.op.is_cheap and not effects(node)


def _is_view(node: Node) -> bool:
    return type(node.op) is OpDef and node.op.unview is not None


def _save_cost(var: Var) -> int:
    """The cost of saving one more value: a base is preferred to its view."""
    return 9 if _is_view(var.node) else 8


def _recompute_cost(node: Node) -> int:
    """The cost of recomputing a byte of the result of a cheap node."""
    if _is_view(node):
        return 0
    return _MATH if node.op.name in MATH else 1


def _sizes(vars_: Collection[Var]) -> dict[Var, int]:
    """Return the sizes of values in bytes, scaled down so that the sum of all costs
    is less than `_INFINITE`."""
    sizes: dict[Var, int] = {}
    for var in vars_:
        shape = [
            (n.hint or _DEFAULT_SIZE) if isinstance(n, SymInt) else n
            for n in var.type.shape
        ]
        sizes[var] = prod(shape) * var.type.dtype.itemsize
    scale = max(1.0, max(sizes.values()) * len(sizes) * 2 * _SAVE / _INFINITE)
    return {var: max(1, int(size / scale)) for var, size in sizes.items()}
