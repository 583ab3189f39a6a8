"""Outline bodies that many nodes run into functions.

Calls of equal bodies in a program call one function, which is optimised, scheduled and
compiled once. If all calls of a body amount to little code, they are inlined instead
(see `expand`), so that the code can be fused with its surroundings. Calls in graphs
that the lowering of a node differentiates or batches are inlined too, since functions
have no such rules.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from hopflow.graph.core import Graph, Node
from hopflow.graph.hashing import structural_hash
from hopflow.graph.rewriting import effects, graphs_run
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Invocation
from hopflow.symbolic.size import free_symbols

SMALL: Final = 64
"""The most nodes by which inlining may replace all calls of a body."""


class Call:
    """`call(*args; function, types) -> results`: a node that runs a function.

    function   a separate graph, with the same inputs as the args
    types      the types of the results
    """

    name = "call"
    is_call = False  # it has no subgraph of its own
    transforms = False

    def infer(
        self, *_types: TensorType, types: tuple[TensorType, ...], **_params: Any
    ) -> tuple[TensorType, ...]:
        return types

    def result_types(
        self, types: Any, params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return self.infer(*types, **params)

    def node_effects(self, params: dict[str, Any]) -> frozenset[str]:
        result: frozenset[str] = params["function"].effects
        return result

    def lower(
        self, _types: Any, *operands: Any, function: "Function", **_params: Any
    ) -> Invocation:
        return Invocation(function.graph, operands)


CALL: Final = Call()


@dataclass(eq=False, frozen=True, slots=True)
class Function:
    """A graph as a param, which passes over the enclosing graph do not enter.

    digest   the structural hash of the graph: nodes are compared by the text of params
    """

    graph: Graph = field(repr=False)
    effects: frozenset[str] = field(repr=False)
    digest: str


def outline_calls(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    bodies = _Bodies()
    bodies.count(graph)
    bodies.replace(graph)
    return graph


def called_functions(graph: Graph) -> Iterator[Graph]:
    """Yield the functions that a graph and its subgraphs call directly."""
    functions = [n.params["function"].graph for n in graph.walk() if n.op is CALL]
    return iter(dict.fromkeys(functions))


def number(graph: Graph, first: int = 0, sizes: dict[int, int] | None = None) -> Graph:
    """Number the nodes, in `meta`, in the order of a walk, beginning with `first`.

    The nodes of a graph that several nodes share keep the numbers of the first walk.
    """
    sizes = {} if sizes is None else sizes
    k = first
    for node in graph.nodes:
        node.meta["number"] = k
        k += 1
        for inner in node.graphs.values():
            if id(inner) not in sizes:
                number(inner, k, sizes)
            k += sizes[id(inner)]
    sizes[id(graph)] = k - first
    return graph


def _outlined(node: Node) -> Iterable[Graph]:
    """Return the subgraphs of a node whose calls may become calls of functions."""
    graphs = graphs_run(node)
    return () if graphs and node.op.transforms else graphs


@dataclass(slots=True)
class _Bodies:
    """The bodies of calls, by what they compute.

    calls    the number of nodes that call each body
    digests  the digests of graphs, by their ids
    sizes    the sizes of graphs, by their ids
    """

    calls: Counter[str] = field(default_factory=Counter)
    digests: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def digest(self, graph: Graph) -> str:
        if id(graph) not in self.digests:
            self.digests[id(graph)] = structural_hash(graph)
        return self.digests[id(graph)]

    def size(self, graph: Graph) -> int:
        """Return the number of nodes of a graph and of its subgraphs."""
        if id(graph) not in self.sizes:
            inner = [self.size(g) for n in graph.nodes for g in graphs_run(n)]
            self.sizes[id(graph)] = len(graph.nodes) + sum(inner)
        return self.sizes[id(graph)]

    def count(self, graph: Graph) -> None:
        for node in graph.nodes:
            for inner in _outlined(node):
                if node.op.is_call:
                    digest = self.digest(inner)
                    self.calls[digest] += 1
                    if self.calls[digest] > 1:
                        continue
                self.count(inner)

    def replace(self, graph: Graph) -> None:
        for node in graph.nodes:
            for inner in _outlined(node):
                if node.op.is_call and self.is_function(inner):
                    self.call(node, inner)
                else:
                    self.replace(inner)

    def is_function(self, graph: Graph) -> bool:
        if self.digest(graph) in self.functions:
            return True
        count = self.calls[self.digest(graph)]
        if count < 2 or count * self.size(graph) <= SMALL:
            return False
        # The caller cannot allocate results whose sizes the body computes.
        symbols = {v.node.symbol for v in graph.symbols}
        return symbols.issuperset(
            free_symbols(*(n for t in graph.out_types for n in t.shape))
        )

    def call(self, node: Node, graph: Graph) -> None:
        """Turn a node into a call of the function with its body."""
        digest = self.digest(graph)
        if digest not in self.functions:
            self.functions[digest] = Function(number(graph), effects(graph), digest)
        types = tuple([v.type for v in node.results])
        region = node.op.lower(types, *node.args, **node.params)
        node.op, node.args = CALL, tuple(region.operands)
        node.params = {"function": self.functions[digest], "types": types}
