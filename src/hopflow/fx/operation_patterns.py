"""Patterns in modules of `fx` whose nodes call operations, as those of captured
modules.

A pattern calls functions of users, `hf.sum(x)`, and such a module calls operations,
`op.reduce_sum(x, axes=(0,))`. So the pattern is traced for the types of the nodes, as
for captured graphs. Calls with bodies never match: these may have been edited.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

from hopflow.fx.graph import Graph
from hopflow.fx.match import Candidate
from hopflow.fx.node import Node
from hopflow.fx.operations import Operation, RegionOperation, SizeOf, type_of
from hopflow.fx.typed_patterns import (
    Renaming,
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
        self.renaming = Renaming(symbols)
        self.names: Sequence[str] = ()
        self.patterns: list[TypedPattern] = []
        calls = [
            (node.target.op, [self.renaming.type(t) for t in row if t is not None])
            for node, row in rows
            if None not in row
        ]
        if calls:
            self.names = parameters_of("pattern", pattern)
            present = {kind_of_call(op, types) for op, types in calls}
            types = [type_ for _, row in calls for type_ in row]
            patterns = typed_patterns(pattern, types, present)
            self.patterns = [p for p in patterns if all(map(_is_computed, p.results))]

    def candidates_from(self, anchor: Node) -> Iterator[Candidate]:
        """Yield the matches of the pattern whose first result is `anchor`."""
        for pattern in self.patterns:
            matches: list[dict[Arg, Any]] = [{}]
            for i, result in enumerate(pattern.results):
                matches = [
                    bindings
                    for partial in matches
                    for node in self._nodes_for(anchor, result, i, partial)
                    if self._matches(pattern, result, node, bindings := dict(partial))
                ]
            yield from (self._candidate(pattern, bindings) for bindings in matches)

    def _nodes_for(
        self, anchor: Node, result: Arg, i: int, bindings: dict[Arg, Any]
    ) -> Sequence[Any]:
        if i == 0:
            return [anchor]
        return [bindings[result]] if result in bindings else self.graph.nodes

    def _candidate(self, pattern: TypedPattern, bindings: dict[Arg, Any]) -> Candidate:
        inside: dict[Node, None] = {}
        for pattern_arg, value in bindings.items():
            if isinstance(pattern_arg, Var) and _is_computed(pattern_arg):
                producer = _producer(pattern_arg, value)
                inside.update(
                    dict.fromkeys([value] if producer is None else [value, producer])
                )
        return Candidate(
            nodes=bindings,
            values={self.names[i]: bindings[v] for i, v in pattern.inputs.items()},
            ends=[bindings[result] for result in pattern.results],
            inside=inside,
        )

    def _matches(
        self,
        pattern: TypedPattern,
        pattern_arg: Arg,
        value: Any,
        bindings: dict[Arg, Any],
    ) -> bool:
        """Whether a value matches an arg of the pattern; adds to `bindings`."""
        if isinstance(pattern_arg, Constant):
            constant = _constant(value)
            return constant is not None and equal_constants(pattern_arg, constant)
        if pattern_arg in bindings:
            return _is_same(bindings[pattern_arg], value)
        type_ = _type(value)
        if type_ is None or not same_type(pattern_arg.type, self.renaming.type(type_)):
            return False
        bindings[pattern_arg] = value
        if pattern_arg in pattern.captures:
            tensor = pattern.captures[pattern_arg]
            is_read = isinstance(value, Node) and value.kind == "get_attr"
            return is_read and self.graph.attributes[value.target] is tensor
        if pattern_arg.node.op is None:
            symbol = pattern_arg.node.symbol
            return symbol is None or (
                isinstance(value, Node)
                and value.meta.get("symbol") is self.renaming.original[symbol]
            )
        pattern_node, producer = pattern_arg.node, _producer(pattern_arg, value)
        operation = None if producer is None else _operation(producer)
        if operation is None or not equal_nodes(
            pattern_node, operation, self.renaming.sizes
        ):
            return False
        assert producer is not None
        pairs = zip(pattern_node.args, producer.args, strict=False)
        return len(pattern_node.args) == len(producer.args) and all(
            self._matches(pattern, a, b, bindings) for a, b in pairs
        )


def _is_computed(result: Arg) -> bool:
    return isinstance(result, Var) and result.node.op is not None


def _constant(value: Any) -> Constant | None:
    """Return a number among the arguments as a typed constant, else None."""
    if type(value) in BARE:
        return Constant(value, TensorType(BARE[type(value)]))
    return value if isinstance(value, Constant) else None


def _type(value: Any) -> TensorType | None:
    """Return the type of an argument of an operation, or None if it is unknown."""
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


def _producer(pattern_arg: Var, value: Any) -> Node | None:
    """Return the node that computes a value as the result of the same index."""
    if not isinstance(value, Node):
        return None
    if len(pattern_arg.node.results) == 1:
        return value
    if value.target is not getitem or value.args[1] != pattern_arg.index:
        return None
    producer = value.args[0]
    return producer if isinstance(producer, Node) else None


def _operation(node: Node) -> CapturedNode | None:
    """Return the operation that a node calls, without args; None if it calls none,
    or one with bodies."""
    target = node.target
    if not isinstance(target, Operation) or isinstance(target, RegionOperation):
        return None
    params = {key: _param(value) for key, value in node.kwargs.items()}
    return CapturedNode("call_function", target.op, (), params)


def _param(value: Any) -> Any:
    """Return a param, with sizes in place of the nodes that compute them."""
    if isinstance(value, tuple):
        return tuple(map(_param, value))
    if isinstance(value, Node) and isinstance(value.target, SizeOf):
        return value.target.size
    if isinstance(value, Node) and value.target is type_of:
        dtype, shape, weak = map(_param, value.args)
        return TensorType(dtype, shape, weak)
    return value
