"""A graph's symbols become its own, so that one symbol has one meaning in a program.

The graphs of a node may have the symbols of the graph around them, or of each other,
and mean other sizes.
"""

from hopflow.graph.core import Graph, plain_symbol
from hopflow.graph.regions import has_regions, signature_of
from hopflow.graph.rewriting import fresh_symbol, substitute_symbols


def own_symbols(graph: Graph) -> Graph:
    """In place, in all subgraphs, which no other node has; returns the graph."""
    for node in graph.nodes:
        if has_regions(node):
            for region in signature_of(node).regions:
                _rename(region.graph)
                own_symbols(region.graph)
    return graph


def _rename(graph: Graph) -> None:
    nodes = [v.node for v in graph.inputs] + graph.nodes
    new = {n.symbol: fresh_symbol(n.symbol) for n in nodes if n.symbol is not None}
    if new:
        substitute_symbols(graph, new)
        for node in nodes:
            if node.symbol is not None:
                node.symbol = plain_symbol(new[node.symbol])
