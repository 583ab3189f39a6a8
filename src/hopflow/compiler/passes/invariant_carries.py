"""Carries that no step changes become invariants, which need no place of their own."""

from hopflow.graph.core import Arg, Graph, Node, Var
from hopflow.graph.regions import (
    CarryPair,
    Signature,
    add_invariants,
    carries,
    drop_results,
    has_regions,
    signature_of,
)
from hopflow.graph.rewriting import replace_uses
from hopflow.symbolic.size import free_symbols


def make_carries_invariant(graph: Graph) -> Graph:
    """In place, in all subgraphs; returns the graph."""
    for node in graph.nodes:
        if has_regions(node):
            signature = signature_of(node)
            for region in signature.regions:
                make_carries_invariant(region.graph)
            unchanged = [p for p in carries(signature) if _is_unchanged(signature, p)]
            if unchanged:
                _pass_as_invariants(graph, node, signature, unchanged)
    return graph


def _is_unchanged(signature: Signature, pair: CarryPair) -> bool:
    """Whether each region that gives the carry a value gives it the one it had. One
    whose size might have changed stays: it is what tells the region that size."""
    for region in signature.regions:
        output, input_ = region.output_of(pair.result), region.input_of(pair.arg)
        if input_ is not None:
            shape = region.graph.inputs[input_].type.shape
            known = {v.node.symbol for v in region.graph.symbols}
            if not known.issuperset(free_symbols(*shape)):
                return False
        if output is not None and (
            input_ is None
            or region.graph.outputs[output] is not region.graph.inputs[input_]
        ):
            return False
    return True


def _pass_as_invariants(
    graph: Graph, node: Node, signature: Signature, pairs: list[CarryPair]
) -> None:
    args = [node.args[pair.arg] for pair in pairs]
    replaced: dict[Var, Arg] = {
        node.results[pair.result]: arg for pair, arg in zip(pairs, args, strict=True)
    }
    added = add_invariants(node, args)
    for region in signature.regions:
        inside: dict[Var, Arg] = {}
        for pair, new in zip(pairs, added[region.name], strict=True):
            position = region.input_of(pair.arg)
            if position is not None:
                inside[region.graph.inputs[position]] = new
        replace_uses(region.graph, inside)
    drop_results(node, {pair.result for pair in pairs})
    replace_uses(graph, replaced)
