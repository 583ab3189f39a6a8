"""Replace operations by others that compute the same, where they say how.

An example is a convolution, which becomes a product of matrices. What an operation is
composed of is its own rule, `OpDef.compose`. The operations that it inserts may be
composed of others in turn.
"""

from hopflow.compiler.passes.stack_products import Inserter
from hopflow.graph.core import Graph
from hopflow.graph.regions import has_regions, signature_of
from hopflow.graph.rewriting import replace_uses


def compose(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if has_regions(node):
            for region in signature_of(node).regions:
                compose(region.graph)
        rule = getattr(node.op, "compose", None)
        if rule is not None:
            insert = Inserter(graph.nodes, at + 1, node)
            result = rule(insert, node.op, *node.args, **node.params)
            if result is not None:
                replace_uses(graph, {node.results[0]: result})
                del graph.nodes[at]
                continue
        at += 1
    return graph
