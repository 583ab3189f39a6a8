"""Dropping what nothing reads: results of operators, their carries, and args."""

from hopflow.graph.core import Graph, Node, Var, vars_of
from hopflow.graph.regions import (
    Signature,
    carries,
    drop_results,
    has_regions,
    prune_node,
    signature_of,
)
from hopflow.graph.rewriting import effects, eliminate_dead_code, reader


def drop_dead_results(graph: Graph) -> Graph:
    """Drop dead nodes, unread results and args of operators, and idle carries.

    A carry is idle if nothing reads its last value, and each step's value only helps to
    make the next one's. In place; returns the graph.
    """
    live = set(vars_of(graph.outputs))
    reads = reader(graph)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if live.isdisjoint(node.results) and not effects(node):
            continue
        if has_regions(node):
            _slim(node, live)
        live.update(reads(node))
        kept.append(node)
    graph.nodes = kept[::-1]
    return graph


def _slim(node: Node, live: set[Var]) -> None:
    signature = signature_of(node)
    if node.op.droppable:
        unread = {i for i, var in enumerate(node.results) if var not in live}
        if dead := _droppable(signature, unread):
            _drop(node, signature, dead)
    for region in signature_of(node).regions:
        drop_dead_results(region.graph)
    if node.op.droppable:
        prune_node(node)


def _drop(node: Node, signature: Signature, dead: set[int]) -> None:
    """Take out results, once the nodes that only they need are out of the way."""
    for region in signature.regions:
        graph = region.graph
        outputs = graph.outputs
        pairs = zip(outputs, region.outputs, strict=True)
        graph.outputs = tuple(a for a, port in pairs if port.at not in dead)
        eliminate_dead_code(graph)
        graph.outputs = outputs
    drop_results(node, dead)


def _droppable(signature: Signature, dead: set[int]) -> set[int]:
    """Which of the unread results no region needs for anything else."""
    arg_of = {pair.result: pair.arg for pair in carries(signature)}
    while True:
        needed: set[int] = set()
        for region in signature.regions:
            graph = region.graph
            outputs = zip(graph.outputs, region.outputs, strict=True)
            live = set(vars_of([a for a, port in outputs if port.at not in dead]))
            reads = reader(graph)
            for node in reversed(graph.nodes):
                if not live.isdisjoint(node.results) or effects(node):
                    live.update(reads(node))
            inputs = zip(graph.inputs, region.inputs, strict=True)
            needed |= {p.at for v, p in inputs if v in live and p.at is not None}
        kept = {result for result in dead if arg_of.get(result) in needed}
        if not kept:
            return dead
        dead = dead - kept
