"""Graphs of which nothing stays behind in Python: what `export` makes of a trace.

An operator of a user's becomes what it means, and rules of a user's become graphs.
Callbacks, `print` among them, and other functions that a node holds cannot leave.
"""

from typing import Final

from hopflow.errors import ExportError
from hopflow.export.graphs import located
from hopflow.export.operators import operators
from hopflow.export.rules import keep_rules
from hopflow.graph.core import Graph, Node, plain_symbol, size_of
from hopflow.graph.rewriting import clone, graphs_run, substitute_symbols
from hopflow.hops.checkpoint import CHECKPOINT
from hopflow.hops.higher_order_op import MEANING, HigherOrderOp
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.rule_regions import Ruled
from hopflow.ops.callback import callback_op
from hopflow.symbolic.size import Size, Symbol, free_symbols


def portable(graph: Graph, derivatives: int) -> Graph:
    """A copy that can leave Python, with rules for so many derivatives.

    Raises:
        ExportError: there is none; it names the operation and the user's line.
    """
    return _Maker().graph(graph, derivatives)


class _Maker:
    def __init__(self) -> None:
        self.operators = operators()

    def graph(self, graph: Graph, orders: int) -> Graph:
        found = clone(graph)
        self.visit(found, orders, set())
        return found

    def rule(self, graph: Graph, orders: int) -> Graph:
        """The same of a rule, a graph of its own."""
        found = self.graph(graph, orders)
        _settle(found)
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
                _settle(inner)
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
            keep_rules(node, orders, lambda rule: self.rule(rule, orders - 1))
        elif isinstance(op, HigherOrderOp) and MEANING in node.params:
            node.op, node.params = INVOKE_SUBGRAPH, {"body": node.params[MEANING]}
        elif self.operators.get(op.name) is not op:
            raise ExportError(
                "it is an operator of yours that has graphs of its own making. Derive "
                "it from `hf.HigherOrderOp`, whose meaning is exported."
            )


def _settle(body: Graph) -> None:
    """Write equal sizes of a body in one way, in place: what its trace knew of them is
    not in the file."""
    own = {v.node.symbol: None for v in body.symbols if v.node.symbol is not None}
    sizes: dict[Symbol, Size] = {}
    for symbol in own:
        if symbol.env is not None:
            known = symbol.env.simplify(size_of(symbol))
            if plain_symbol(known) is not symbol and own.keys() >= {
                *free_symbols(known)
            }:
                sizes[symbol] = known
    substitute_symbols(body, sizes)


_CALLBACK: Final = (
    "`{}` is a function of Python, which other programs do not have. Leave it out "
    "where you export, or return what it is given."
)
