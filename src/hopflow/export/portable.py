"""Graphs of which nothing stays behind in Python: what `export` makes of a trace.

An operator of a user's becomes what it means, and rules of a user's become graphs.
Callbacks, `print` among them, and other functions that a node holds cannot leave.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from graphlib import TopologicalSorter
from typing import Final, NamedTuple

from hopflow.errors import ExportError
from hopflow.export.graphs import located
from hopflow.export.operators import operators
from hopflow.export.rules import keep_rules
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, plain_symbol, size_of
from hopflow.graph.regions import Region, sizes_passed
from hopflow.graph.rewriting import (
    clone,
    graphs_run,
    replace_uses,
    substitute_symbols,
)
from hopflow.graph.types import SYMBOL_TYPE, same_size
from hopflow.hops.checkpoint import CHECKPOINT
from hopflow.hops.higher_order_op import MEANING, HigherOrderOp
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.rule_regions import Ruled
from hopflow.ops.callback import callback_op
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute


def portable(graph: Graph, derivatives: int) -> Graph:
    """A copy that can leave Python, with rules for so many derivatives.

    Raises:
        ExportError: there is none; it names the operation and the user's line.
    """
    found = _Maker().graph(graph, derivatives)
    _settle(found)
    return found


class _Maker:
    def __init__(self) -> None:
        self.operators = operators()

    def graph(self, graph: Graph, orders: int) -> Graph:
        found = clone(graph)
        self.visit(found, orders, set())
        return found

    def visit(self, graph: Graph, orders: int, done: set[Graph]) -> None:
        """Replace nodes, in place; graphs that nodes share once."""
        if graph in done:
            return
        done.add(graph)
        for node in graph.nodes:
            if node.op is not None:
                try:
                    self.replace(node, orders)
                except ExportError as error:
                    raise located(node, error) from error
            for inner in graphs_run(node):
                self.visit(inner, orders, done)

    def replace(self, node: Node, orders: int) -> None:
        """
        Raises:
            ExportError: the node cannot leave.
        """
        op = node.op
        if op is callback_op:
            raise ExportError(_CALLBACK.format(node.params["fn"]))
        if op is CHECKPOINT and not isinstance(node.params["policy"], str):
            raise ExportError(
                "its `policy` is a function, which is Python. Name one: 'nothing', "
                "'dots' or 'everything'."
            )
        if isinstance(op, Ruled) and op.has_custom_derivative(node.params):
            keep_rules(node, orders, lambda rule: self.graph(rule, orders - 1))
        elif isinstance(op, HigherOrderOp) and MEANING in node.params:
            node.op, node.params = INVOKE_SUBGRAPH, {"body": node.params[MEANING]}
        elif self.operators.get(op.name) is not op:
            raise ExportError(
                "it is an operator of yours that has graphs of its own making. Derive "
                "it from `hf.HigherOrderOp`, whose meaning is exported."
            )


# --- sizes ----------------------------------------------------------------------------


class _BodyCall(NamedTuple):
    """A call of a body: the graph around, the node, and the body's region, if any."""

    around: Graph
    node: Node
    region: Region | None

    def sizes(self) -> dict[Symbol, Size]:
        """Return what the symbols of the body are, in terms of the graph around."""
        return {} if self.region is None else sizes_passed(self.region, self.node.args)


def _settle(graph: Graph) -> None:
    """Write equal sizes of each body in one way, in place: what its trace knew of them
    is not in the file. Of calls that share a body, each may have other sizes: what does
    not hold for all of them stays unknown."""
    calls: dict[Graph, list[_BodyCall]] = {graph: []}
    pending = [graph]
    while pending:
        around = pending.pop()
        for node in around.nodes:
            regions = node.op.signature(node).regions if node.graphs else ()
            by_graph = {region.graph: region for region in regions}
            for body in node.graphs.values():
                if body not in calls:
                    calls[body] = []
                    pending.append(body)
                calls[body].append(_BodyCall(around, node, by_graph.get(body)))
    callers = {body: [call.around for call in of] for body, of in calls.items()}
    unknown: dict[Graph, set[Symbol]] = {graph: set()}
    for body in TopologicalSorter(callers).static_order():
        if body is not graph:
            unknown[body] = _settle_body(body, calls[body], unknown)


def _settle_body(
    body: Graph, calls: Sequence[_BodyCall], unknown: Mapping[Graph, set[Symbol]]
) -> set[Symbol]:
    """Write equal sizes of a body in one way, in place.

    Args:
        unknown: For each graph around, the symbols of which nothing is known there.

    Returns:
        Those of the body.
    """
    all_sizes = [(call.sizes(), unknown[call.around]) for call in calls]

    def holds(symbol: Symbol, known: Size) -> bool:
        return all(
            same_size(
                _simplified(sizes[symbol], others),
                _simplified(substitute(known, sizes), others),
            )
            for sizes, others in all_sizes
            if symbol in sizes
        )

    own = {v.node.symbol: v for v in body.symbols if v.node.symbol is not None}
    found: dict[Symbol, Size] = {}
    values: dict[Var, Arg] = {}
    left: set[Symbol] = set()
    for symbol, var in own.items():
        known = _simplified(size_of(symbol), frozenset())
        other = plain_symbol(known)
        if other is symbol or not own.keys() >= {*free_symbols(known)}:
            continue
        if not holds(symbol, known):
            left.add(symbol)
            continue
        found[symbol] = known
        if isinstance(known, int):
            values[var] = Constant(known, SYMBOL_TYPE)
        elif other is not None:
            values[var] = own[other]
    substitute_symbols(body, found)
    replace_uses(body, values)
    return left


def _simplified(size: Size, unknown: AbstractSet[Symbol]) -> Size:
    """Return what is known of a size, but for symbols of which nothing is."""
    symbols = free_symbols(size)
    env = symbols[0].env if symbols else None
    if env is None or not unknown.isdisjoint(symbols):
        return size
    simplified: Size = env.simplify(size)
    return simplified


_CALLBACK: Final = (
    "`{}` is a function of Python, which other programs do not have. Leave it out "
    "where you export, or return what it is given."
)
