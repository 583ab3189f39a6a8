"""Putting graphs in the place of nodes that mean no more than a graph.

What `associative_scan` and `invoke_subgraph` lower to is known at once; the passes
after this one then see through them. Other nodes get subgraphs of their own.
"""

from hopflow.graph.core import Constant, Graph, Var
from hopflow.graph.regions import bind_symbols, has_regions, own_regions
from hopflow.graph.rewriting import inline, replace_uses
from hopflow.loop_ir.kernels import Inline


def expand_inlines(graph: Graph) -> Graph:
    """In place, in all subgraphs; returns the graph."""
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if not has_regions(node):
            at += 1
            continue
        types = tuple(v.type for v in node.results)
        region = node.op.lower(types, *node.args, **node.params)
        if not isinstance(region, Inline) or any(
            not isinstance(a, Var | Constant) for a in region.operands
        ):
            for inner in own_regions(node).regions:
                expand_inlines(inner.graph)
            at += 1
            continue
        del graph.nodes[at]
        sizes = bind_symbols(region.graph, region.operands)
        outputs = inline(graph, at, region.graph, region.operands, sizes)
        replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
    return graph
