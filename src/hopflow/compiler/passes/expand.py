"""Inline nodes that lower to a graph.

Examples are `associative_scan` and `invoke_subgraph`; later passes then see the nodes
of the graph. Other nodes get subgraphs that they do not share.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from hopflow.errors import OperatorError, RuleReadError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Var,
    match_shapes,
    plain_symbol,
)
from hopflow.graph.regions import bind_symbols, has_regions, own_regions
from hopflow.graph.rewriting import inline, replace_uses, substitute_symbols
from hopflow.graph.types import SYMBOL_TYPE, differing
from hopflow.loop_ir.kernels import Inline
from hopflow.symbolic.size import Size, Symbol


def expand_inlines(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    _expand(graph, set())
    return graph


def _expand(graph: Graph, owned: set[Graph]) -> None:
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if not has_regions(node):
            at += 1
            continue
        types = tuple(v.type for v in node.results)
        region = node.op.lower(types, *node.args, **node.params)
        if isinstance(region, Inline):
            _check(node, region)
            region = _with_values(region, graph)
        if not isinstance(region, Inline) or _reads_sizes(region):
            for inner in own_regions(node, owned).regions:
                _expand(inner.graph, owned)
            at += 1
            continue
        del graph.nodes[at]
        values = [a if isinstance(a, Var | Constant) else None for a in region.operands]
        sizes = bind_symbols(region.graph, values)
        rest = len(graph.nodes) - at
        outputs = inline(graph, at, region.graph, region.operands, sizes)
        _number(graph.nodes[at : len(graph.nodes) - rest], node)
        replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
        _rename_sizes(graph, node, outputs)


def _check(node: Node, region: Inline) -> None:
    """Check the graph that a node lowers to.

    Raises:
        RuleReadError: The graph reads a tensor from outside, which is an attribute.
        OperatorError: It does not accept the operands, or its results are not those of
            the node.
    """
    graph, operands = region.graph, region.operands
    for value in graph.attributes.values():
        raise RuleReadError("lower", value.type)
    accepted = [v.type for v in graph.inputs]
    operand_types = [getattr(a, "type", SYMBOL_TYPE) for a in operands]
    result_types = [v.type for v in node.results]
    for rule, expected, actual in (
        ("take the operands that come with it", operand_types, accepted),
        ("return the results of the node", result_types, graph.out_types),
    ):
        if texts := differing(expected, actual):
            expected_text, actual_text = texts
            raise OperatorError(
                f"{node.op.name}: the graph that `{type(node.op).__name__}.lower` puts "
                f"in its place must {rule}: {expected_text}, and not {actual_text}. "
                "Trace what `debug` does."
            )


def _number(inserted: Sequence[Node], source: Node) -> None:
    """Give inserted nodes without a number the number of their source node.

    The nodes of a call's body get the numbers that follow on the call's, also where
    several calls share the body, and its numbers are those of another call.
    """
    number = source.meta.get("number", 0)
    first = inserted[0].meta.get("number", number) if inserted else number
    shift = number + 1 - first if source.op.is_call and first != number else 0
    for node in _walk(inserted):
        own_number = node.meta.get("number")
        node.meta["number"] = number if own_number is None else own_number + shift


def _walk(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for graph in node.graphs.values():
            yield from graph.walk()


def _with_values(region: Inline, graph: Graph) -> Inline:
    """Replace sizes among the operands by values of the graph, where it has them."""
    defined = {v.node.symbol: v for v in graph.symbols}
    defined |= {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    operands = [
        a if isinstance(a, Var | Constant) else defined.get(plain_symbol(a), a)
        for a in region.operands
    ]
    return Inline(region.graph, tuple(operands))


def _reads_sizes(region: Inline) -> bool:
    """Return whether the graph computes with a size that is not a value here."""
    pairs = zip(region.graph.inputs, region.operands, strict=True)
    sizes = {var for var, a in pairs if not isinstance(a, Var | Constant)}
    used = chain.from_iterable([node.args for node in region.graph.nodes])
    return not sizes.isdisjoint((*used, *region.graph.outputs))


def _rename_sizes(graph: Graph, node: Node, outputs: Sequence[Arg]) -> None:
    """Replace the sizes that a node defined by those of the inserted nodes."""
    renamed: dict[Symbol, Size] = {}
    for var, output in zip(node.results, outputs, strict=True):
        match_shapes(var.type.shape, output.type.shape, renamed)
    if not renamed:
        return
    defined = {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    sizes = {
        s: n for s, n in renamed.items() if s in defined and plain_symbol(n) is not s
    }
    if not sizes:
        return
    for symbol, size in sizes.items():
        defined[symbol].node.symbol = None
        plain = plain_symbol(size)
        if plain is not None and plain in defined:
            replace_uses(graph, {defined[symbol]: defined[plain]})
    substitute_symbols(graph, sizes)
