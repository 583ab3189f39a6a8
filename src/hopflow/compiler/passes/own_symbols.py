"""One symbol has one meaning in a program: where it would have another, it is renamed.

A graph may have the symbols of the graph around it, for the same sizes, and keeps them
then; or for others, if several nodes were made with one graph.
"""

from collections.abc import Iterable

from hopflow.graph.core import Graph, Node, Var, plain_symbol
from hopflow.graph.regions import has_regions, passed_to, signature_of
from hopflow.graph.rewriting import fresh_symbol, substitute_symbols
from hopflow.symbolic.size import Symbol


def own_symbols(graph: Graph) -> Graph:
    """In place, in all subgraphs, which no other node has; returns the graph."""
    _rename(graph, _defined(graph), {v.node.symbol for v in graph.symbols})
    return graph


def _defined(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.symbol is not None]


def _rename(graph: Graph, own: Iterable[Node], known: set[Symbol | None]) -> None:
    """Rename what the nodes and inputs `own` define, if it is in `known`, all symbols
    met so far; and go on to the subgraphs."""
    new = {
        n.symbol: fresh_symbol(n.symbol)
        for n in own
        if n.symbol is not None and n.symbol in known
    }
    if new:
        substitute_symbols(graph, new)
    for node in own:
        if node.symbol in new:
            node.symbol = plain_symbol(new[node.symbol])
        known.add(node.symbol)
    for node in graph.nodes:
        if not has_regions(node):
            continue
        for region in signature_of(node).regions:
            inputs = zip(region.graph.inputs, region.inputs, strict=True)
            bound = [
                var.node
                for var, port in inputs
                if var.node.symbol is not None
                and not _is_passed(var.node.symbol, passed_to(port, node.args))
            ]
            _rename(region.graph, [*bound, *_defined(region.graph)], known)


def _is_passed(symbol: Symbol, arg: object) -> bool:
    """Whether a region gets for a symbol the very same one."""
    return isinstance(arg, Var) and arg.node.symbol is symbol
