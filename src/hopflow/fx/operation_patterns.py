"""Patterns where a module of `fx` calls operations, as one of a captured module does.

A pattern calls what users call, `hf.sum(x)`, and such a module `op.reduce_sum(x,
axes=(0,))`. So a pattern is traced for the types that the nodes have, as it is for
captured graphs. The bodies of operators are not compared: their graphs may have been
edited since.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

from hopflow.fx.graph import Graph
from hopflow.fx.match import Found
from hopflow.fx.node import Node
from hopflow.fx.operations import Operation, RegionOperation, SizeOf, type_of
from hopflow.fx.typed_patterns import (
    Shadows,
    TypedPattern,
    kind_of_call,
    parameters_of,
    typed_patterns,
)
from hopflow.graph.core import Arg, Constant, Var
from hopflow.graph.core import Node as CapturedNode
from hopflow.graph.hashing import equal_constants, equal_nodes
from hopflow.graph.printer import BARE
from hopflow.graph.types import TensorType, same_type
from hopflow.symbolic.size import Symbol, free_symbols


class OperationPatterns:
    """A pattern as graphs of operations, for the types of the nodes of one graph."""

    def __init__(self, graph: Graph, pattern: Callable[..., Any]) -> None:
        nodes = [n for n in graph.nodes if isinstance(n.target, Operation)]
        rows = [(node, [_type(arg) for arg in node.args]) for node in nodes]
        symbols: dict[Symbol, None] = {}
        for node in graph.nodes:
            if (type_ := _type(node)) is not None:
                symbols.update(dict.fromkeys(free_symbols(*type_.shape)))
            if (symbol := node.meta.get("symbol")) is not None:
                symbols[symbol] = None
        self.graph = graph
        self.shadows = Shadows(symbols)
        self.names: Sequence[str] = ()
        self.patterns: list[TypedPattern] = []
        known = [
            (node.target.op, [self.shadows.type(t) for t in row if t is not None])
            for node, row in rows
            if None not in row
        ]
        if known:
            self.names = parameters_of("pattern", pattern)
            present = {kind_of_call(op, types) for op, types in known}
            types = [type_ for _, row in known for type_ in row]
            found = typed_patterns(pattern, types, present)
            self.patterns = [p for p in found if all(map(_is_computed, p.results))]

    def found_from(self, anchor: Node) -> Iterator[Found]:
        """The places that look like the pattern, whose first result is at `anchor`."""
        for pattern in self.patterns:
            values: list[dict[Arg, Any]] = [{}]
            for i, result in enumerate(pattern.results):
                values = [
                    known
                    for before in values
                    for node in self._candidates(anchor, result, i, before)
                    if self._matches(pattern, result, node, known := dict(before))
                ]
            yield from (self._found(pattern, known) for known in values)

    def _candidates(
        self, anchor: Node, result: Arg, i: int, known: dict[Arg, Any]
    ) -> Sequence[Any]:
        if i == 0:
            return [anchor]
        return [known[result]] if result in known else self.graph.nodes

    def _found(self, pattern: TypedPattern, known: dict[Arg, Any]) -> Found:
        inside: dict[Node, None] = {}
        for theirs, ours in known.items():
            if isinstance(theirs, Var) and _is_computed(theirs):
                made = _made(theirs, ours)
                inside.update(dict.fromkeys([ours] if made is None else [ours, made]))
        return Found(
            nodes=known,
            values={self.names[i]: known[v] for i, v in pattern.inputs.items()},
            ends=[known[result] for result in pattern.results],
            inside=inside,
        )

    def _matches(
        self, pattern: TypedPattern, theirs: Arg, ours: Any, known: dict[Arg, Any]
    ) -> bool:
        """Whether a value looks like one of the pattern; what is learned joins
        `known`."""
        if isinstance(theirs, Constant):
            constant = _constant(ours)
            return constant is not None and equal_constants(theirs, constant)
        if theirs in known:
            return _is_same(known[theirs], ours)
        type_ = _type(ours)
        if type_ is None or not same_type(theirs.type, self.shadows.type(type_)):
            return False
        known[theirs] = ours
        if theirs in pattern.captures:
            tensor = pattern.captures[theirs]
            is_read = isinstance(ours, Node) and ours.kind == "get_attr"
            return is_read and self.graph.attributes[ours.target] is tensor
        if theirs.node.op is None:
            symbol = theirs.node.symbol
            return symbol is None or (
                isinstance(ours, Node)
                and ours.meta.get("symbol") is self.shadows.unshadowed[symbol]
            )
        node, made = theirs.node, _made(theirs, ours)
        other = None if made is None else _operation(made)
        if other is None or not equal_nodes(node, other, self.shadows.sizes):
            return False
        assert made is not None
        pairs = zip(node.args, made.args, strict=False)
        return len(node.args) == len(made.args) and all(
            self._matches(pattern, a, b, known) for a, b in pairs
        )


def _is_computed(result: Arg) -> bool:
    return isinstance(result, Var) and result.node.op is not None


def _constant(value: Any) -> Constant | None:
    """A number among the arguments of an operation, with its type."""
    if type(value) in BARE:
        return Constant(value, TensorType(BARE[type(value)]))
    return value if isinstance(value, Constant) else None


def _type(value: Any) -> TensorType | None:
    """The type of an argument of an operation, as far as it is known."""
    if isinstance(value, Node):
        noted = value.meta.get("type")
        return noted if isinstance(noted, TensorType) else None
    constant = _constant(value)
    return None if constant is None else constant.type


def _is_same(before: Any, value: Any) -> bool:
    a, b = _constant(before), _constant(value)
    return before is value or (
        a is not None and b is not None and equal_constants(a, b)
    )


def _made(theirs: Var, ours: Any) -> Node | None:
    """The node that has made a value, if it is the same one of its results."""
    if not isinstance(ours, Node):
        return None
    if len(theirs.node.results) == 1:
        return ours
    if ours.target is not getitem or ours.args[1] != theirs.index:
        return None
    made = ours.args[0]
    return made if isinstance(made, Node) else None


def _operation(node: Node) -> CapturedNode | None:
    """The operation that a node calls, without what it reads; None: it calls none, or
    one with bodies."""
    target = node.target
    if not isinstance(target, Operation) or isinstance(target, RegionOperation):
        return None
    params = {key: _param(value) for key, value in node.kwargs.items()}
    return CapturedNode("call_function", target.op, (), params)


def _param(value: Any) -> Any:
    """A param of an operation, with the sizes that are values of nodes."""
    if isinstance(value, tuple):
        return tuple(map(_param, value))
    if isinstance(value, Node) and isinstance(value.target, SizeOf):
        return value.target.size
    if isinstance(value, Node) and value.target is type_of:
        dtype, shape, weak = map(_param, value.args)
        return TensorType(dtype, shape, weak)
    return value
