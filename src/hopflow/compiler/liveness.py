"""The live nodes of a graph, each common subexpression once."""

from collections.abc import Sequence
from typing import Any

from hopflow.graph.core import Arg, Constant, Graph, Node, Var
from hopflow.graph.rewriting import effects, reader, static_symbols


class Liveness:
    """The nodes of a graph that are scheduled, and the number of readers of each var.

    nodes   the live ones, in order, without those that repeat an earlier one
    uses    for each var that is kept: its readers in `nodes`, one more for each output
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._same: dict[Var, Var] = {}
        reads = reader(graph)
        distinct = self._distinct(graph.nodes)
        self.uses: dict[Var, int] = {}
        self.nodes: list[Node] = []
        self._count(graph.outputs)
        for node in reversed(distinct):
            if any(v in self.uses for v in node.results) or effects(node):
                self.nodes.append(node)
                self._count(reads(node))
        self.nodes.reverse()

    def canonical(self, var: Var) -> Var:
        """Return the var that is computed in place of `var`."""
        return self._same.get(var, var)

    def count(self, var: Var) -> int:
        return self.uses.get(var, 0)

    def _count(self, args: Sequence[Arg]) -> None:
        for arg in args:
            if isinstance(arg, Var):
                var = self.canonical(arg)
                self.uses[var] = self.uses.get(var, 0) + 1

    def _distinct(self, nodes: Sequence[Node]) -> list[Node]:
        by_args: dict[Any, Node] = {}  # by operation and args, without params
        seen: dict[Any, Node] = {}
        kept = []
        for node in nodes:
            if node.op is None:
                continue
            if node.graphs or node.symbol is not None or effects(node):
                kept.append(node)
                continue
            key = (node.op, tuple(map(self._key, node.args)))
            other = by_args.setdefault(key, node)
            first = node
            if other is not node:
                seen.setdefault((key, _params_key(other)), other)
                first = seen.setdefault((key, _params_key(node)), node)
            if first is node:
                kept.append(node)
            else:
                self._same.update(zip(node.results, first.results, strict=True))
        return kept

    def _key(self, arg: Arg) -> Any:
        if isinstance(arg, Constant):
            return repr(arg.value), arg.type.dtype
        return self.canonical(arg)


def _params_key(node: Node) -> Any:
    return repr(node.params), *static_symbols(node.params.values())
