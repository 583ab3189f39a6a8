"""Forwarding: results of operators that are args of theirs, whatever runs.

A carry that no step changes is the same before and after the loop, and an operand that
every branch returns is the same whichever runs. The analysis goes through operators in
bodies and through carries that steps permute. `forward` lets readers of such a result
read the arg instead, and takes the result out of the operator; a carry becomes an
invariant.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.graph.core import Arg, Graph, Node, Var, vars_of
from hopflow.graph.regions import (
    CarryPair,
    Region,
    Signature,
    add_invariants,
    carries,
    drop_results,
    has_regions,
    own_regions,
    result_types,
    signature_of,
)
from hopflow.graph.rewriting import replace_uses
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import free_symbols

Places: TypeAlias = frozenset[int | None]
"""What a result may be: positions of the node's args, and None for a new value."""

_COMPUTED: Places = frozenset([None])


def forward_results(graph: Graph) -> Graph:
    """Forward what operators of `graph` only pass through, in subgraphs too, in place.

    Returns:
        The graph.
    """
    new: dict[Var, Arg] = {}

    def renewed(args: Sequence[Arg]) -> tuple[Arg, ...]:
        return tuple([new.get(a, a) if isinstance(a, Var) else a for a in args])

    for node in graph.nodes:
        if new and not new.keys().isdisjoint(vars_of(node.args)):
            node.args = renewed(node.args)
        if has_regions(node):
            for subgraph in node.graphs.values():
                forward_results(subgraph)
            new |= _forward(node, forwarded(node, inner=False))
    graph.outputs = renewed(graph.outputs)
    return graph


class Shortened(NamedTuple):
    """What is left of a call without what it forwards.

    args       which args of the call the operator still takes, by position
    params     its params
    forwarded  for each result of the call the position of the arg that it is, or None
    rest       which results of the operator the others are, in order
    """

    args: list[int]
    params: dict[str, Any]
    forwarded: list[int | None]
    rest: list[int]

    def results(self, given: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        """What belongs to each result of the call.

        Args:
            given: What belongs to each arg of the call.
            found: What belongs to each of the `rest`.
        """
        rest = iter(found)
        return [next(rest) if at is None else given[at] for at in self.forwarded]


def shortened(
    op: Any,
    types: Sequence[TensorType],
    params: Mapping[str, Any],
    same: Sequence[int],
) -> Shortened | None:
    """A call of `op` without what it forwards; None if that is nothing.

    Args:
        types: Of the args.
        same: For each arg the position of the first that is the same value.
    """
    graph = Graph("call")
    inputs = [graph.add_input(t, "") for t in types]
    args = [inputs[k] for k in same]
    node = Node("call_function", op, tuple(args), dict(params))
    places = [] if op.is_call else forwarded(node)
    if all(place is None for place in places):
        return None
    node = graph.call(op, args, params, result_types(op, args, node.params))
    own_regions(node)
    results = node.results
    _forward(node, places)
    position = {var: i for i, var in enumerate(inputs)}
    at = {var: i for i, var in enumerate(node.results)}
    rest = [at[v] for v, place in zip(results, places, strict=True) if place is None]
    return Shortened(
        [position[a] for a in node.args if isinstance(a, Var)],
        node.params,
        places,
        rest,
    )


def first_same(keys: Iterable[Hashable]) -> list[int]:
    """For each key the position of the first that is equal."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def forwarded(node: Node, *, inner: bool = True) -> list[int | None]:
    """For each result of an operator the position of the arg that it always is.

    Args:
        inner: Whether operators in its regions may forward something; False: that has
            been taken out of them.
    """
    found: list[int | None] = []
    for places in _places(node, inner=inner):
        known = [place for place in places if place is not None]
        same = {id(node.args[place]) for place in known}
        is_one = len(known) == len(places) and len(same) == 1
        found.append(min(known) if is_one else None)
    return found


def _places(node: Node, *, inner: bool) -> list[Places]:
    """What each result of an operator may be."""
    signature = signature_of(node)
    if node.op.has_custom_derivative(node.params):  # a result is not just the operand
        return [_COMPUTED] * len(signature.results)
    arg_of = {pair.result: pair.arg for pair in carries(signature)}
    result_of = {arg: result for result, arg in arg_of.items()}
    found: list[set[int | None]] = [set() for _ in signature.results]
    changing = _changing_sizes(signature)
    for pair in carries(signature):  # a size that may change is that of the result
        found[pair.result].add(None if pair.arg in changing else pair.arg)
    for region in signature.regions:
        outputs = _output_places(region, inner=inner)
        for port, places in zip(region.outputs, outputs, strict=True):
            if port.at is not None:
                found[port.at] |= _COMPUTED if port.role == "stacked" else places
    # What a carry may be, the carry that it goes to next may be as well.
    sources = [[result_of[p] for p in places if p in result_of] for places in found]
    first = first_same(map(id, node.args))
    own = [{None if p is None else first[p] for p in places} for places in found]
    return [_bounded(places) for places in _closure(own, sources)]


MOST_PLACES: Final = 16
"""A result that may be more args than that is taken for a new value: it is hardly one
arg whatever runs, and the args of a queue of carries are quadratically many."""


def _bounded(places: Iterable[int | None]) -> Places:
    found = frozenset(places)
    return found if found and len(found) <= MOST_PLACES else _COMPUTED


def _closure(
    places: Sequence[set[int | None]], sources: Sequence[Sequence[int]]
) -> list[set[int | None]]:
    """The places of each result, with those of its sources, and of their sources."""
    found = [set(own) for own in places]
    readers: list[list[int]] = [[] for _ in places]
    for result, those in enumerate(sources):
        for source in those:
            readers[source].append(result)
    pending = deque(range(len(found)))
    while pending:
        source = pending.popleft()
        given = _bounded(found[source]) if found[source] else frozenset()
        for result in readers[source]:
            if len(found[result]) <= MOST_PLACES and not given <= found[result]:
                found[result] |= given
                pending.append(result)
    return found


def _output_places(region: Region, *, inner: bool) -> list[Places]:
    """What each output of a region may be, as args of the node."""
    origins = _origins(region.graph) if inner else {}
    pairs = zip(region.graph.inputs, region.inputs, strict=True)
    at = {var: port.at for var, port in pairs if port.role != "slice"}
    return [
        frozenset(at.get(origin) for origin in origins.get(output, (output,)))
        if isinstance(output, Var)
        else _COMPUTED
        for output in region.graph.outputs
    ]


def _origins(graph: Graph) -> dict[Var, frozenset[Var]]:
    """For each result of an operator in `graph` that it passes through the values that
    it may be. What is not among the keys is a value of its own."""
    found: dict[Var, frozenset[Var]] = {}
    for node in graph.nodes:
        if not has_regions(node):
            continue
        for var, places in zip(node.results, _places(node, inner=True), strict=True):
            args = [None if place is None else node.args[place] for place in places]
            passed = [found.get(a, (a,)) for a in args if isinstance(a, Var)]
            if len(passed) == len(args):
                found[var] = frozenset().union(*passed)
    return found


def _forward(node: Node, places: Sequence[int | None]) -> dict[Var, Arg]:
    """Take what the node forwards out of its results, where it can be.

    Args:
        places: What it forwards, as `forwarded` has it.

    Returns:
        What to read instead of results, also of those that stay.
    """
    replaced = {
        node.results[i]: node.args[place]
        for i, place in enumerate(places)
        if place is not None
    }
    if not replaced or node.op.is_call or not node.op.droppable:
        return replaced
    signature = signature_of(node)
    pairs = carries(signature)
    unchanged = [pair for pair in pairs if places[pair.result] is not None]
    if unchanged:
        _pass_as_invariants(node, signature, unchanged)
    is_carry = {pair.result for pair in pairs}
    dropped = {pair.result for pair in unchanged}
    dropped |= {i for i, at in enumerate(places) if at is not None} - is_carry
    drop_results(node, dropped)
    return replaced


def _changing_sizes(signature: Signature) -> set[int]:
    """The args of which a region is not passed the sizes, by symbols. A size that steps
    may change is known to a region by its carry alone."""
    found: set[int] = set()
    for region in signature.regions:
        known = {v.node.symbol for v in region.graph.symbols}
        for var, port in region.ports:
            is_known = var.type.is_static or known.issuperset(
                free_symbols(*var.type.shape)
            )
            if port.at is not None and not is_known:
                found.add(port.at)
    return found


def _pass_as_invariants(
    node: Node, signature: Signature, pairs: Sequence[CarryPair]
) -> None:
    """Let the regions read carries as captures, and return what they are given."""
    first = signature.regions[0]
    positions = first.input_positions
    inputs = [positions.get(pair.arg) for pair in pairs]
    added = add_invariants(
        node,
        [node.args[pair.arg] for pair in pairs],
        region=first.name,
        types=[first.graph.inputs[i].type for i in inputs if i is not None],
    )
    for region in signature.regions:
        inside: dict[Var, Arg] = {}
        outputs = list(region.graph.outputs)
        first_inputs, first_outputs = region.input_positions, region.output_positions
        for pair, new in zip(pairs, added[region.name], strict=True):
            input_ = first_inputs.get(pair.arg)
            output = first_outputs.get(pair.result)
            if input_ is not None:
                inside[region.graph.inputs[input_]] = new
            if output is not None:
                outputs[output] = new
        region.graph.outputs = tuple(outputs)
        replace_uses(region.graph, inside)
