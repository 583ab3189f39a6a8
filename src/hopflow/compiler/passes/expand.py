"""Putting graphs in the place of nodes that mean no more than a graph.

What `associative_scan` and `invoke_subgraph` lower to is known at once; the passes
after this one then see through them. Other nodes get subgraphs of their own.
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
    """In place, in all subgraphs; returns the graph."""
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
        given = [a if isinstance(a, Var | Constant) else None for a in region.operands]
        sizes = bind_symbols(region.graph, given)
        rest = len(graph.nodes) - at
        outputs = inline(graph, at, region.graph, region.operands, sizes)
        _number(graph.nodes[at : len(graph.nodes) - rest], node)
        replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
        _rename_sizes(graph, node, outputs)


def _check(node: Node, region: Inline) -> None:
    """
    Raises:
        RuleReadError: the graph has tensors of its own.
        OperatorError: it does not take the operands that it is given, or gives other
            results than the node has.
    """
    graph, operands = region.graph, region.operands
    for value in graph.attributes.values():
        raise RuleReadError("lower", value.type)
    takes = [v.type for v in graph.inputs]
    given = [getattr(a, "type", SYMBOL_TYPE) for a in operands]
    has = [v.type for v in node.results]
    for what, expected, found in (
        ("take the operands that come with it", given, takes),
        ("return the results of the node", has, graph.out_types),
    ):
        if texts := differing(expected, found):
            wanted, got = texts
            raise OperatorError(
                f"{node.op.name}: the graph that `{type(node.op).__name__}.lower` puts "
                f"in its place must {what}: {wanted}, and not {got}. Trace what "
                "`debug` does."
            )


def _number(inserted: Sequence[Node], source: Node) -> None:
    """Let what is made for a node, and has no number of its own, have that one's. What
    stands in the place of a call has the numbers that follow on the call's: those of a
    body that several calls share are of one of them."""
    number = source.meta.get("number", 0)
    first = inserted[0].meta.get("number", number) if inserted else number
    shift = number + 1 - first if source.op.is_call and first != number else 0
    for node in _walk(inserted):
        known = node.meta.get("number")
        node.meta["number"] = number if known is None else known + shift


def _walk(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for graph in node.graphs.values():
            yield from graph.walk()


def _with_values(region: Inline, graph: Graph) -> Inline:
    """With the values of the sizes among the operands, where the graph has them."""
    defined = {v.node.symbol: v for v in graph.symbols}
    defined |= {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    operands = [
        a if isinstance(a, Var | Constant) else defined.get(plain_symbol(a), a)
        for a in region.operands
    ]
    return Inline(region.graph, tuple(operands))


def _reads_sizes(region: Inline) -> bool:
    """Whether the graph computes with an operand that is a size, and no value here."""
    pairs = zip(region.graph.inputs, region.operands, strict=True)
    sizes = {var for var, a in pairs if not isinstance(a, Var | Constant)}
    used = chain.from_iterable([node.args for node in region.graph.nodes])
    return not sizes.isdisjoint((*used, *region.graph.outputs))


def _rename_sizes(graph: Graph, node: Node, outputs: Sequence[Arg]) -> None:
    """Write what is there now for the sizes that a node had made."""
    made: dict[Symbol, Size] = {}
    for var, output in zip(node.results, outputs, strict=True):
        match_shapes(var.type.shape, output.type.shape, made)
    if not made:
        return
    defined = {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    sizes = {s: n for s, n in made.items() if s in defined and plain_symbol(n) is not s}
    if not sizes:
        return
    for symbol, size in sizes.items():
        defined[symbol].node.symbol = None
        plain = plain_symbol(size)
        if plain is not None and plain in defined:
            replace_uses(graph, {defined[symbol]: defined[plain]})
    substitute_symbols(graph, sizes)
