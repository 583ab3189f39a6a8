"""Drop results of operators that nothing reads, and their carries and args."""

from hopflow.graph.core import Arg, Graph, Node, Var, vars_of
from hopflow.graph.regions import (
    Region,
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

    A carry is idle if nothing reads its last value, and the value of a step is used
    only to compute the next one. In place; returns the graph.
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
    """Drop results, after the nodes that only they need."""
    for region in signature.regions:
        graph = region.graph
        outputs = graph.outputs
        pairs = zip(outputs, region.outputs, strict=True)
        graph.outputs = tuple(a for a, port in pairs if port.at not in dead)
        eliminate_dead_code(graph)
        graph.outputs = outputs
    drop_results(node, dead)


def _droppable(signature: Signature, dead: set[int]) -> set[int]:
    """Return the unread results that no region needs for another result."""
    result_of = {pair.arg: pair.result for pair in carries(signature)}
    dead, regions = set(dead), [_Needed(region) for region in signature.regions]
    needed = {at for region in regions for at in region.without(dead)}
    while needed:
        kept = dead.intersection([result_of[at] for at in needed if at in result_of])
        dead -= kept
        needed = {at for region in regions for at in region.of(kept)}
    return dead


class _Needed:
    """The dependences of a region's results on its inputs, followed on demand.

    Each node is visited once.
    """

    def __init__(self, region: Region) -> None:
        graph = region.graph
        self._nodes = graph.nodes
        self._reads = reader(graph)
        self._maker = {var: node for node in graph.nodes for var in node.results}
        self._args = {
            var: port.at for var, port in zip(graph.inputs, region.inputs, strict=True)
        }
        self._outputs: dict[int | None, list[Arg]] = {}
        for arg, port in zip(graph.outputs, region.outputs, strict=True):
            self._outputs.setdefault(port.at, []).append(arg)
        self._live: set[Var] = set()
        self._done: set[Node] = set()

    def without(self, dead: set[int]) -> list[int]:
        """Return the args that effects and all results but the dead ones need."""
        acting = [node for node in self._nodes if effects(node)]
        self._done.update(acting)
        args = [
            a for at, values in self._outputs.items() if at not in dead for a in values
        ]
        return self._mark(
            [*vars_of(args), *(v for n in acting for v in self._reads(n))]
        )

    def of(self, results: set[int]) -> list[int]:
        """Return the args that these results need, without those returned before."""
        args = [a for result in results for a in self._outputs.get(result, ())]
        return self._mark(vars_of(args))

    def _mark(self, pending: list[Var]) -> list[int]:
        args: list[int] = []
        while pending:
            var = pending.pop()
            if var in self._live:
                continue
            self._live.add(var)
            node, at = self._maker.get(var), self._args.get(var)
            if at is not None:
                args.append(at)
            if node is not None and node not in self._done:
                self._done.add(node)
                pending += self._reads(node)
        return args
