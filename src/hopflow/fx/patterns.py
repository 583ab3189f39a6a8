"""`replace_pattern`: replace parts of a graph that match a function."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

from hopflow.bind import public
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.fx.captured_patterns import replace_in_captured
from hopflow.fx.graph import Graph
from hopflow.fx.match import Candidate, Match
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
    """Replace each part of `module` that matches `pattern` by `replacement`.

    A parameter of the pattern matches any value, and equal values if it is used twice.
    A call matches a call of the same function with the same constants, written in the
    same way; operations of captured modules match by the types of the nodes. Nothing
    outside may read the inner values of a match, or a result before the last one, and
    no node with effects may stand within. Matches do not overlap, and replacements are
    not matched again.

    Args:
        module: Is changed in place, and recompiled.
        pattern: A function that returns one value or a tuple, traced symbolically.
        replacement: A function of the same parameters, with as many results.
        where: Whether to replace a match.

    Returns:
        The matches that were replaced.

    Raises:
        ArgumentTypeError: an argument is of another kind.
        ArgumentValueError: the pattern returns a value that it does not compute, or the
            functions differ in their parameters or in the number of results.

    >>> module = hf.symbolic_trace(lambda x: hf.sin(x) + 1)
    >>> len(hf.fx.replace_pattern(module, lambda x: hf.sin(x), lambda x: hf.cos(x)))
    1
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
    owner = owning(module)
    module.graph, module.attributes = owner.graph, owner.attributes
    opened = open_bodies(module)
    matches: list[Match] = []
    for body in bodies_of(opened):
        matches += _replace_all(body.graph, pattern, results, new, where)
        body.recompile()
    if matches:  # without a match bodies stay functions
        module.graph, module.attributes = opened.graph, opened.attributes
    matches += _replace_all(module.graph, pattern, results, new, where)
    module.recompile()
    return matches


def _traced(
    pattern: Callable[..., Any], replacement: Callable[..., Any]
) -> tuple[list[Node], Graph]:
    """Return the nodes that the pattern returns, and the graph of the replacement.

    Raises:
        ArgumentValueError: the pattern returns a value that it does not compute, or the
            two functions differ in their parameters or in the number of results.
    """
    old, new = symbolic_trace(pattern).graph, symbolic_trace(replacement).graph
    parameters = [[node.target for node in g.placeholders] for g in (old, new)]
    if parameters[0] != parameters[1]:
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has the parameters "
            f"{parameters[0]}, and `{name_of(replacement)}` has {parameters[1]}. Let "
            "both have the same."
        )
    results, new_results = _results(old), _results(new)
    for result in results:
        if not isinstance(result, Node) or result.kind == "placeholder":
            raise ArgumentValueError(
                f"replace_pattern: `{name_of(pattern)}` must return values that it "
                f"computes, and returns {result!r}."
            )
    if not results or len(results) != len(new_results):
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has {len(results)} results, and "
            f"`{name_of(replacement)}` has {len(new_results)}. Let both have as many."
        )
    return results, new


def _results(graph: Graph) -> list[Any]:
    """Return the results of a function: one value, or those of a tuple or list."""
    result = graph.output_node().args[0]
    return list(result) if isinstance(result, tuple | list) else [result]


def _replace_all(
    graph: Graph,
    pattern: Callable[..., Any],
    results: list[Node],
    new: Graph,
    where: Callable[[Match], bool],
) -> list[Match]:
    matches: list[Match] = []
    removed: set[Node] = set()
    inserted: set[Node] = set()
    of_operations = OperationPatterns(graph, pattern)
    for anchor in graph.nodes:
        if anchor in removed:
            continue
        candidates = (
            _candidates_from(graph, anchor, results),
            of_operations.candidates_from(anchor),
        )
        for candidate in chain(*candidates):
            last = max(candidate.ends, key=graph.index)
            if _leaks(graph, candidate, last, inserted):
                continue
            match = Match(last, candidate.nodes, candidate.values)
            if where(match):
                matches.append(match)
                old_nodes = set(graph.nodes)
                removed.update(_replace(graph, match, candidate, new))
                inserted.update(set(graph.nodes) - old_nodes)
                break
    return matches


def _candidates_from(
    graph: Graph, anchor: Node, results: list[Node]
) -> Iterator[Candidate]:
    """Yield the matches of the pattern whose first result is `anchor`."""
    first: dict[Node, Any] = {}
    if not _matches(results[0], anchor, first):
        return
    matches = [first]
    for result in results[1:]:
        attempts = [
            (candidate, dict(bindings))
            for bindings in matches
            for candidate in ([bindings[result]] if result in bindings else graph.nodes)
        ]
        matches = [
            bindings for node, bindings in attempts if _matches(result, node, bindings)
        ]
    for bindings in matches:
        values = {p.target: v for p, v in bindings.items() if p.kind == "placeholder"}
        reads = ("placeholder", "get_attr")
        inside = {v: None for p, v in bindings.items() if p.kind not in reads}
        yield Candidate(bindings, values, [bindings[r] for r in results], inside)


def _matches(pattern: Any, value: Any, bindings: dict[Node, Any]) -> bool:
    """Whether a value matches one of the pattern; adds to `bindings`."""
    if isinstance(pattern, Node):
        if pattern in bindings:
            return _same(bindings[pattern], value)
        bindings[pattern] = value
        if pattern.kind == "placeholder":
            return True
        return isinstance(value, Node) and _calls_match(pattern, value, bindings)
    if type(pattern) is not type(value):
        return False
    if isinstance(pattern, list | tuple):
        pairs = zip(pattern, value, strict=False)
        return len(pattern) == len(value) and all(_matches(*p, bindings) for p in pairs)
    if isinstance(pattern, dict):
        return list(pattern) == list(value) and all(
            _matches(v, value[k], bindings) for k, v in pattern.items()
        )
    if isinstance(pattern, slice):
        parts = ("start", "stop", "step")
        return all(
            _matches(getattr(pattern, p), getattr(value, p), bindings) for p in parts
        )
    return bool(pattern is value or pattern == value)


def _calls_match(pattern: Node, node: Node, bindings: dict[Node, Any]) -> bool:
    if pattern.kind != node.kind:
        return False
    if pattern.kind in ("get_attr", "call_module"):
        attributes, pattern_attributes = node.graph.attributes, pattern.graph.attributes
        if pattern_attributes[pattern.target] is not attributes[node.target]:
            return False
    elif pattern.target != node.target:
        return False
    return _matches(pattern.args, node.args, bindings) and _matches(
        pattern.kwargs, node.kwargs, bindings
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Node) and a == b)


def _leaks(graph: Graph, candidate: Candidate, last: Node, inserted: set[Node]) -> bool:
    """Whether a match cannot be replaced: another node reads a value inside of it, or a
    result before the last; or an earlier replacement inserted a node of it; or a node
    with effects stands between its nodes.

    A replacement is computed at the last node of the match. A write before it may
    change what the nodes of the match have read.
    """
    first = min(map(graph.index, candidate.inside))
    between = graph.nodes[first : graph.index(last)]
    if any(node not in candidate.inside and node.is_impure() for node in between):
        return True
    for node in candidate.inside:
        outside = [user for user in node.users if user not in candidate.inside]
        if node in inserted or (outside and node not in candidate.ends):
            return True
        if any(graph.index(user) < graph.index(last) for user in outside):
            return True
    return False


def _replace(
    graph: Graph, match: Match, candidate: Candidate, replacement: Graph
) -> list[Node]:
    """Insert the replacement, remove the nodes of the match, and return these."""
    by_name = match.values
    used = [p for p in replacement.placeholders if p.target in by_name]
    old_nodes = set(graph.nodes)
    with graph.inserting_before(match.anchor):
        arguments = {p: _as_argument(graph, by_name[p.target]) for p in used}
        result = graph.graph_copy(replacement, arguments)
    for node in graph.nodes:
        if node not in old_nodes:  # it takes the place of the match in messages
            node.line, node.module_path = match.anchor.line, match.anchor.module_path
    results = result if isinstance(result, tuple | list) else [result]
    for end, new in zip(candidate.ends, results, strict=True):
        end.replace_all_uses_with(new)
    removed = sorted(candidate.inside, key=graph.index, reverse=True)
    for node in removed:
        graph.erase_node(node)
    return removed


def _as_argument(graph: Graph, value: Any) -> Any:
    """Return the value of a parameter as an argument for the functions of a
    replacement: a constant of captured graphs as a tensor."""
    if isinstance(value, Constant):
        return graph.call_function(asarray, value.value, dtype=value.type.dtype)
    return value


asarray: Final = public(convert.asarray)  # under its public name
