"""`replace_pattern`: what looks like one function becomes another."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

from hopflow.bind import public
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.fx.captured_patterns import replace_in_captured
from hopflow.fx.graph import Graph
from hopflow.fx.match import Found, Match
from hopflow.fx.module import GraphModule, owning
from hopflow.fx.node import Node
from hopflow.fx.opening import bodies_of, open_bodies
from hopflow.fx.operation_patterns import OperationPatterns
from hopflow.fx.tracer import symbolic_trace
from hopflow.graph.core import Constant
from hopflow.graph.module import GraphModule as Captured
from hopflow.tensor import convert
from hopflow.trace.source import name_of


@entry
def replace_pattern(
    module: GraphModule | Captured,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    where: Callable[[Match], bool] = lambda _: True,
) -> list[Match]:
    """Replace each part of `module` that computes as `pattern` does.

    A parameter of the pattern matches any value, and the same one wherever it stands.
    Calls match calls of the same function with the same constants, written alike. What
    is inside a match is read by nothing outside of it, and none of its results before
    the last of them is computed; and nothing with effects, as a write, stands between
    its nodes. Matches do not overlap; nodes that were put in are not matched again.
    Where nodes call operations, as those that `symbolic_trace` makes of a captured
    module, the pattern is traced for their types, as for a captured module itself.

    Args:
        module: Is changed, and compiled again.
        pattern: A function of one result or a tuple of them, traced symbolically.
        replacement: A function of the same parameters, with as many results.
        where: Which matches are replaced.

    Returns:
        What was matched.

    Raises:
        ArgumentTypeError: an argument is of another kind.
        ArgumentValueError: the pattern returns what it does not compute; the parameters
            or the numbers of results of the two functions differ.
    """
    if not isinstance(module, GraphModule | Captured):
        raise ArgumentTypeError(
            f"replace_pattern: `module` must be a graph module, and is "
            f"`{type(module).__name__}`. Make one with `hf.symbolic_trace` or "
            "`hf.trace`."
        )
    if not callable(where):
        raise ArgumentTypeError(
            f"replace_pattern: `where` must be a function of a match, and is "
            f"`{type(where).__name__}`."
        )
    if isinstance(module, Captured):
        return replace_in_captured(module, pattern, replacement, where)
    results, new = _traced(pattern, replacement)
    own = owning(module)
    module.graph, module.attributes = own.graph, own.attributes
    opened = open_bodies(module)
    found: list[Match] = []
    for body in bodies_of(opened):
        found += _replace_all(body.graph, pattern, results, new, where)
        body.recompile()
    if found:  # else bodies stay the functions that they are
        module.graph, module.attributes = opened.graph, opened.attributes
    found += _replace_all(module.graph, pattern, results, new, where)
    module.recompile()
    return found


def _traced(
    pattern: Callable[..., Any], replacement: Callable[..., Any]
) -> tuple[list[Node], Graph]:
    """The nodes that a pattern returns, and the graph of its replacement.

    Raises:
        ArgumentValueError: the pattern returns what it does not compute; the parameters
            or the numbers of results of the two functions differ.
    """
    old, new = symbolic_trace(pattern).graph, symbolic_trace(replacement).graph
    parameters = [[node.target for node in g.placeholders] for g in (old, new)]
    if parameters[0] != parameters[1]:
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has the parameters "
            f"{parameters[0]}, and `{name_of(replacement)}` has {parameters[1]}. Let "
            "both have the same."
        )
    results, others = _results(old), _results(new)
    for result in results:
        if not isinstance(result, Node) or result.kind == "placeholder":
            raise ArgumentValueError(
                f"replace_pattern: `{name_of(pattern)}` must return values that it "
                f"computes, and returns {result!r}."
            )
    if not results or len(results) != len(others):
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has {len(results)} results, and "
            f"`{name_of(replacement)}` has {len(others)}. Let both have as many."
        )
    return results, new


def _results(graph: Graph) -> list[Any]:
    """What a function returns: one value, or those of a tuple or list."""
    result = graph.output_node().args[0]
    return list(result) if isinstance(result, tuple | list) else [result]


def _replace_all(
    graph: Graph,
    pattern: Callable[..., Any],
    results: list[Node],
    new: Graph,
    where: Callable[[Match], bool],
) -> list[Match]:
    found: list[Match] = []
    gone: set[Node] = set()
    made: set[Node] = set()
    of_operations = OperationPatterns(graph, pattern)
    for anchor in graph.nodes:
        if anchor in gone:
            continue
        places = (_found_from(graph, anchor, results), of_operations.found_from(anchor))
        for place in chain(*places):
            last = max(place.ends, key=graph.index)
            if _leaks(graph, place, last, made):
                continue
            match = Match(last, place.nodes, place.values)
            if where(match):
                found.append(match)
                before = set(graph.nodes)
                gone.update(_replace(graph, match, place, new))
                made.update(set(graph.nodes) - before)
                break
    return found


def _found_from(graph: Graph, anchor: Node, results: list[Node]) -> Iterator[Found]:
    """The ways in which the pattern's results are values of the graph, the first of
    them that of `anchor`."""
    nodes: dict[Node, Any] = {}
    if not _matches(results[0], anchor, nodes):
        return
    found = [nodes]
    for result in results[1:]:
        tried = [
            (candidate, dict(known))
            for known in found
            for candidate in ([known[result]] if result in known else graph.nodes)
        ]
        found = [known for node, known in tried if _matches(result, node, known)]
    for known in found:
        values = {p.target: v for p, v in known.items() if p.kind == "placeholder"}
        read = ("placeholder", "get_attr")
        inside = {v: None for p, v in known.items() if p.kind not in read}
        yield Found(known, values, [known[r] for r in results], inside)


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


def _leaks(graph: Graph, place: Found, last: Node, made: set[Node]) -> bool:
    """Whether something else reads what is inside a match, or a result of it before the
    last; or an earlier replacement put it there; or a node between has effects.

    A replacement computes everything where the last node of the match stands. A write
    between may change what the nodes before it have read.
    """
    first = min(map(graph.index, place.inside))
    between = graph.nodes[first : graph.index(last)]
    if any(node not in place.inside and node.is_impure() for node in between):
        return True
    for node in place.inside:
        outside = [user for user in node.users if user not in place.inside]
        if node in made or (outside and node not in place.ends):
            return True
        if any(graph.index(user) < graph.index(last) for user in outside):
            return True
    return False


def _replace(graph: Graph, match: Match, place: Found, new: Graph) -> list[Node]:
    """Put the replacement in, and take out the nodes of the match: these."""
    by_name = match.values
    read = [p for p in new.placeholders if p.target in by_name]
    before = set(graph.nodes)
    with graph.inserting_before(match.anchor):
        known = {p: _as_argument(graph, by_name[p.target]) for p in read}
        result = graph.graph_copy(new, known)
    for node in graph.nodes:
        if node not in before:  # it is there for the user's line that was matched
            node.line, node.module_path = match.anchor.line, match.anchor.module_path
    others = result if isinstance(result, tuple | list) else [result]
    for end, other in zip(place.ends, others, strict=True):
        end.replace_all_uses_with(other)
    gone = sorted(place.inside, key=graph.index, reverse=True)
    for node in gone:
        graph.erase_node(node)
    return gone


def _as_argument(graph: Graph, value: Any) -> Any:
    """What a parameter has matched, for the functions of a replacement to be called
    with: a constant of captured graphs as the tensor that it is."""
    if isinstance(value, Constant):
        return graph.call_function(asarray, value.value, dtype=value.type.dtype)
    return value


asarray: Final = public(convert.asarray)  # under its public name
