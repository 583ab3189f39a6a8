"""`replace_pattern`: what looks like one function becomes another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.fx.graph import Graph
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.fx.tracer import symbolic_trace
from hopflow.trace.source import name_of

__all__ = ["Match", "replace_pattern"]


@dataclass(frozen=True, slots=True)
class Match:
    """A place that looks like the pattern.

    anchor   the node whose value is what the pattern returns
    nodes    each node of the pattern -> what it is here; a parameter may be a constant
    values   the same for the parameters, by name
    """

    anchor: Node
    nodes: Mapping[Node, Any]
    values: Mapping[str, Any]


def replace_pattern(
    module: GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Callable[[Match], bool] = lambda _: True,
) -> list[Match]:
    """Replace each part of `module` that computes as `pattern` does.

    A parameter of the pattern matches any value, and the same one wherever it stands.
    Calls match calls of the same function with the same constants, written alike. What
    is inside a match is read by nothing outside of it. Matches do not overlap; nodes
    that were put in are not matched again.

    Args:
        module: Is changed, and compiled again.
        pattern: A function of one result, traced symbolically.
        replacement: A function of the same parameters.
        where: Which matches are replaced.

    Returns:
        What was matched.

    Raises:
        ArgumentTypeError: an argument is of another kind.
        ArgumentValueError: the pattern computes nothing, or has several results; the
            parameters of the two functions differ.
    """
    if not isinstance(module, GraphModule):
        raise ArgumentTypeError(
            f"replace_pattern: `module` must be a `hf.fx.GraphModule`, and is "
            f"`{type(module).__name__}`. Make one with `hf.symbolic_trace`."
        )
    if not callable(where):
        raise ArgumentTypeError(
            f"replace_pattern: `where` must be a function of a match, and is "
            f"`{type(where).__name__}`."
        )
    old, new = symbolic_trace(pattern).graph, symbolic_trace(replacement).graph
    parameters = [[node.target for node in g.placeholders] for g in (old, new)]
    if parameters[0] != parameters[1]:
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has the parameters "
            f"{parameters[0]}, and `{name_of(replacement)}` has {parameters[1]}. Let "
            "both have the same."
        )
    result = old.output_node().args[0]
    if not isinstance(result, Node) or result.kind == "placeholder":
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` must return one value that it "
            f"computes, and returns {result!r}."
        )
    found = _replace_all(module.graph, result, new, where)
    module.recompile()
    return found


def _replace_all(
    graph: Graph, result: Node, new: Graph, where: Callable[[Match], bool]
) -> list[Match]:
    found: list[Match] = []
    gone: set[Node] = set()
    made: set[Node] = set()
    for anchor in graph.nodes:
        if anchor in gone:
            continue
        nodes: dict[Node, Any] = {}
        if not _matches(result, anchor, nodes) or _leaks(nodes, anchor, made):
            continue
        values = {p.target: v for p, v in nodes.items() if p.kind == "placeholder"}
        match = Match(anchor, nodes, values)
        if where(match):
            found.append(match)
            before = set(graph.nodes)
            gone.update(_replace(graph, match, new))
            made.update(set(graph.nodes) - before)
    return found


def _matches(pattern: Any, value: Any, nodes: dict[Node, Any]) -> bool:
    """Whether a value looks like one of the pattern; what is learned joins `nodes`."""
    if isinstance(pattern, Node):
        if pattern in nodes:
            return _same(nodes[pattern], value)
        nodes[pattern] = value
        if pattern.kind == "placeholder":
            return True
        return isinstance(value, Node) and _calls_match(pattern, value, nodes)
    if type(pattern) is not type(value):
        return False
    if isinstance(pattern, list | tuple):
        pairs = zip(pattern, value, strict=False)
        return len(pattern) == len(value) and all(_matches(*p, nodes) for p in pairs)
    if isinstance(pattern, dict):
        return list(pattern) == list(value) and all(
            _matches(v, value[k], nodes) for k, v in pattern.items()
        )
    if isinstance(pattern, slice):
        parts = ("start", "stop", "step")
        return all(
            _matches(getattr(pattern, p), getattr(value, p), nodes) for p in parts
        )
    return bool(pattern is value or pattern == value)


def _calls_match(pattern: Node, node: Node, nodes: dict[Node, Any]) -> bool:
    if pattern.kind != node.kind:
        return False
    if pattern.kind in ("get_attr", "call_module"):
        here, there = node.graph.attributes, pattern.graph.attributes
        if there[pattern.target] is not here[node.target]:
            return False
    elif pattern.target != node.target:
        return False
    return _matches(pattern.args, node.args, nodes) and _matches(
        pattern.kwargs, node.kwargs, nodes
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Node) and a == b)


def _inside(nodes: Mapping[Node, Any]) -> dict[Node, None]:
    """The nodes that a match is made of."""
    return {
        v: None for p, v in nodes.items() if p.kind not in ("placeholder", "get_attr")
    }


def _leaks(nodes: Mapping[Node, Any], anchor: Node, made: set[Node]) -> bool:
    """Whether something else reads what is inside a match, or an earlier replacement
    put it there."""
    inside = _inside(nodes)
    return any(
        node in made or (node is not anchor and not node.users.keys() <= inside.keys())
        for node in inside
    )


def _replace(graph: Graph, match: Match, new: Graph) -> list[Node]:
    """Put the replacement in, and take out the nodes of the match: these."""
    by_name = match.values
    known = {p: by_name[p.target] for p in new.placeholders if p.target in by_name}
    before = set(graph.nodes)
    with graph.inserting_before(match.anchor):
        result = graph.graph_copy(new, known)
    for node in graph.nodes:
        if node not in before:  # it is there for the user's line that was matched
            node.line, node.module_path = match.anchor.line, match.anchor.module_path
    match.anchor.replace_all_uses_with(result)
    gone = sorted(_inside(match.nodes), key=graph.index, reverse=True)
    for node in gone:
        graph.erase_node(node)
    return gone
