"""Give each size one symbol in a whole program, and each symbol one size.

A graph may have separate symbols for sizes that it is passed, or two for the same size:
they become the symbol, or the number, that is passed. It may also use a symbol of the
enclosing graph for another size, if several nodes were made with one graph: that symbol
is renamed.
"""

from collections.abc import Sequence

from hopflow.graph.core import Arg, Constant, Graph, Node, Var, plain_symbol, size_of
from hopflow.graph.regions import has_regions, passed_to, signature_of
from hopflow.graph.rewriting import fresh_symbol, replace_uses, substitute_symbols
from hopflow.symbolic.size import Size, Symbol


def own_symbols(graph: Graph) -> Graph:
    """Transform a graph and its subgraphs, none shared, in place; return the graph."""
    _settle(graph, [None] * len(graph.inputs), set())
    return graph


def _settle(graph: Graph, passed: Sequence[object], used: set[Symbol]) -> None:
    """Replace the symbols of a graph by the sizes that it is passed; then recurse.

    A symbol in `used`, the symbols of graphs met before, gets a new name.
    """
    sizes: dict[Symbol, Size] = {}
    names: dict[Node, Symbol] = {}
    inputs: dict[Symbol, Var] = {}
    same: dict[Var, Arg] = {}  # replacements of inputs that are no sizes any more

    def name(node: Node, symbol: Symbol) -> None:
        assert node.symbol is not None
        sizes[node.symbol], names[node] = size_of(symbol), symbol

    def other(symbol: Symbol) -> Symbol:
        return plain_symbol(fresh_symbol(symbol)) or symbol

    for var, arg in zip(graph.inputs, passed, strict=True):
        symbol = var.node.symbol
        if symbol is None:
            continue
        if isinstance(arg, Constant):
            sizes[symbol], same[var] = int(arg.value), arg
            names[var.node] = other(symbol)
        elif isinstance(arg, Var) and arg.node.symbol is not None:
            first = inputs.setdefault(arg.node.symbol, var)
            name(var.node, arg.node.symbol)
            if first is not var:
                same[var], names[var.node] = first, other(symbol)
    new = [v.node for v in graph.inputs] + graph.nodes
    for node in new:
        if node.symbol is not None and node not in names:
            name(node, other(node.symbol) if node.symbol in used else node.symbol)
    substitute_symbols(graph, sizes)
    replace_uses(graph, same)
    for node, symbol in names.items():
        node.symbol = symbol
    used.update(names.values())
    for node in graph.nodes:
        if has_regions(node):
            for region in signature_of(node).regions:
                args = [
                    None if port.role == "carry" else passed_to(port, node.args)
                    for port in region.inputs
                ]
                _settle(region.graph, args, used)
