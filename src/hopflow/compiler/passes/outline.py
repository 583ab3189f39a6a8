"""Bodies that many nodes run, as functions of their own.

Calls of equal bodies, wherever they stand, call one function, which is passed over,
scheduled and made native code once. What little code all calls of a body come to is put
in their places instead (see `expand`), where it can be fused with what is around. So is
what calls come to in graphs that the lowering of a node differentiates or batches: a
function has no rules.
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
"""As many nodes may stand in the place of all calls of a body."""


class Call:
    """`call(*args; function, types) -> results`: a node that runs a function.

    function   a graph that is no part of this one, of the same inputs as the args
    types      of the results
    """

    name = "call"
    is_call = False  # of a graph of its own
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
        own: frozenset[str] = params["function"].effects
        return own

    def lower(
        self, _types: Any, *operands: Any, function: "Function", **_params: Any
    ) -> Invocation:
        return Invocation(function.graph, operands)


CALL: Final = Call()


@dataclass(eq=False, frozen=True, slots=True)
class Function:
    """A graph as a param that passes over the graph around it do not look into.

    digest   of what it computes: all that its text tells, as nodes are compared by it
    """

    graph: Graph = field(repr=False)
    effects: frozenset[str] = field(repr=False)
    digest: str


def outline_calls(graph: Graph) -> Graph:
    """In place, in all subgraphs; returns the graph."""
    bodies = _Bodies()
    bodies.count(graph)
    bodies.replace(graph)
    return graph


def called_functions(graph: Graph) -> Iterator[Graph]:
    """The functions that a graph calls itself, in its subgraphs too."""
    found = [n.params["function"].graph for n in graph.walk() if n.op is CALL]
    return iter(dict.fromkeys(found))


def number(graph: Graph, first: int = 0, sizes: dict[int, int] | None = None) -> Graph:
    """Number the nodes, in `meta`, in the order of a walk from `first` on. Those of a
    graph that several nodes share get the numbers that they have in the first."""
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
    """The subgraphs of a node whose calls may be those of functions."""
    graphs = graphs_run(node)
    return () if graphs and node.op.transforms else graphs


@dataclass(slots=True)
class _Bodies:
    """The bodies of calls, by what they compute.

    calls    how many nodes call each
    digests  of graphs, by their ids
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
        """How many nodes a graph is with those of its subgraphs."""
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
        # Whose results have sizes that it makes, the caller cannot have memory for.
        known = {v.node.symbol for v in graph.symbols}
        return known.issuperset(
            free_symbols(*(n for t in graph.out_types for n in t.shape))
        )

    def call(self, node: Node, graph: Graph) -> None:
        """Make a node a call of the function that its body is."""
        digest = self.digest(graph)
        if digest not in self.functions:
            self.functions[digest] = Function(number(graph), effects(graph), digest)
        types = tuple([v.type for v in node.results])
        region = node.op.lower(types, *node.args, **node.params)
        node.op, node.args = CALL, tuple(region.operands)
        node.params = {"function": self.functions[digest], "types": types}
