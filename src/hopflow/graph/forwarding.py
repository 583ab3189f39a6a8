"""Forwarding: replace results of operators that always equal one of the args.

A carry that no step changes is the same before and after the loop, an operand that all
branches return is the result whichever runs, and the slices that each step returns as
they are stack up to what was sliced. The analysis covers operators in bodies, and
carries that the steps permute. Readers of such a result then read the arg instead, and
the operator no longer returns it; a carry becomes an invariant.
"""

from collections import Counter, deque
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

Origins: TypeAlias = frozenset[int | None]
"""The args that a result may be, by position; None stands for a new value."""

_COMPUTED: Origins = frozenset([None])


def forward_results(graph: Graph) -> Graph:
    """Forward the results that operators only pass through, in `graph` and its
    subgraphs, in place.

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
    """A call without the results that it forwards.

    args       the positions of the args that the operator still takes
    params     its params
    forwarded  for each result of the original call: the position of the arg that it
               equals, or None
    rest       for each other result, in order: its position among the new results
    """

    args: list[int]
    params: dict[str, Any]
    forwarded: list[int | None]
    rest: list[int]

    def results(self, of_args: Sequence[Any], of_rest: Sequence[Any]) -> list[Any]:
        """Return an item for each result of the original call.

        Args:
            of_args: An item for each arg of the original call.
            of_rest: An item for each of the `rest`.
        """
        rest = iter(of_rest)
        return [next(rest) if at is None else of_args[at] for at in self.forwarded]


def shortened(
    op: Any,
    types: Sequence[TensorType],
    params: Mapping[str, Any],
    first: Sequence[int],
) -> Shortened | None:
    """Return a call of `op` without the results that it forwards; None if it forwards
    none.

    Args:
        types: Of the args.
        first: For each arg the position of the first arg that is the same value.
    """
    graph = Graph("call")
    inputs = [graph.add_input(t, "") for t in types]
    args = [inputs[k] for k in first]
    node = Node("call_function", op, tuple(args), dict(params))
    sources = [] if op.is_call else forwarded(node)
    if all(source is None for source in sources):
        return None
    node = graph.call(op, args, params, result_types(op, args, node.params))
    own_regions(node)
    results = node.results
    _forward(node, sources)
    position = {var: i for i, var in enumerate(inputs)}
    new_position = {var: i for i, var in enumerate(node.results)}
    rest = [
        new_position[v]
        for v, source in zip(results, sources, strict=True)
        if source is None
    ]
    return Shortened(
        [position[a] for a in node.args if isinstance(a, Var)],
        node.params,
        sources,
        rest,
    )


def first_same(keys: Iterable[Hashable]) -> list[int]:
    """Return for each key the position of the first equal key."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def forwarded(node: Node, *, inner: bool = True) -> list[int | None]:
    """Return for each result of an operator the position of the arg that it always
    equals, or None.

    Args:
        inner: Whether to look for operators in its regions that forward results. False
            if these have been forwarded.
    """
    sources: list[int | None] = []
    for origins in _result_origins(node, inner=inner):
        args = [position for position in origins if position is not None]
        distinct = {id(node.args[position]) for position in args}
        is_forwarded = len(args) == len(origins) and len(distinct) == 1
        sources.append(min(args) if is_forwarded else None)
    return sources


def _result_origins(node: Node, *, inner: bool) -> list[Origins]:
    """Return the origins of each result of an operator."""
    signature = signature_of(node)
    # A custom derivative of a result may differ from that of the arg it equals.
    if node.op.has_custom_derivative(node.params):
        return [_COMPUTED] * len(signature.results)
    arg_of = {pair.result: pair.arg for pair in carries(signature)}
    result_of = {arg: result for result, arg in arg_of.items()}
    origins: list[set[int | None]] = [set() for _ in signature.results]
    changing = _changing_sizes(signature)
    for pair in carries(signature):  # steps may change the size
        origins[pair.result].add(None if pair.arg in changing else pair.arg)
    for region in signature.regions:
        outputs = _output_origins(region, inner=inner)
        for port, positions in zip(region.outputs, outputs, strict=True):
            if port.at is not None:
                origins[port.at] |= positions
    # The origins of a carry are also origins of the carry that it becomes in a step.
    sources = [
        [result_of[p] for p in positions if p in result_of] for positions in origins
    ]
    first = first_same(map(id, node.args))
    direct = [
        {None if p is None else first[p] for p in positions} for positions in origins
    ]
    return [_bounded(positions) for positions in _closure(direct, sources)]


MAX_ORIGINS: Final = 16
"""A result with more origins counts as a new value: it is hardly ever one arg whatever
runs, and a queue of carries would have quadratically many origins."""


def _bounded(places: Iterable[int | None]) -> Origins:
    origins = frozenset(places)
    return origins if origins and len(origins) <= MAX_ORIGINS else _COMPUTED


def _closure(
    direct: Sequence[set[int | None]], sources: Sequence[Sequence[int]]
) -> list[set[int | None]]:
    """Return the origins of each result: its direct ones, and those of its sources."""
    origins = [set(positions) for positions in direct]
    readers: list[list[int]] = [[] for _ in direct]
    for result, result_sources in enumerate(sources):
        for source in result_sources:
            readers[source].append(result)
    pending = deque(range(len(origins)))
    while pending:
        source = pending.popleft()
        reached = _bounded(origins[source]) if origins[source] else frozenset()
        for result in readers[source]:
            if len(origins[result]) <= MAX_ORIGINS and not reached <= origins[result]:
                origins[result] |= reached
                pending.append(result)
    return origins


def _output_origins(region: Region, *, inner: bool) -> list[Origins]:
    """Return the origins of each output of a region, as args of the node."""
    var_origins = _var_origins(region.graph) if inner else {}
    inputs = [*zip(region.graph.inputs, region.inputs, strict=True)]
    times_sliced = Counter(port.at for _, port in inputs if port.role == "slice")
    whole = {var: port.at for var, port in inputs if port.role != "slice"}
    # The steps of an associative scan take two slices of one arg, and combine all.
    slices = {var: port.at for var, port in inputs if times_sliced[port.at] == 1}
    return [
        frozenset(
            (slices if port.role == "stacked" else whole).get(value)
            for value in var_origins.get(output, (output,))
        )
        if isinstance(output, Var)
        else _COMPUTED
        for output, port in zip(region.graph.outputs, region.outputs, strict=True)
    ]


def _var_origins(graph: Graph) -> dict[Var, frozenset[Var]]:
    """Return the values that each result of an operator in `graph` may be, for
    results that are always passed through. All other vars are values of their own."""
    origins: dict[Var, frozenset[Var]] = {}
    for node in graph.nodes:
        if not has_regions(node):
            continue
        for var, positions in zip(
            node.results, _result_origins(node, inner=True), strict=True
        ):
            args = [
                None if position is None else node.args[position]
                for position in positions
            ]
            passed = [origins.get(a, (a,)) for a in args if isinstance(a, Var)]
            if len(passed) == len(args):
                origins[var] = frozenset().union(*passed)
    return origins


def _forward(node: Node, sources: Sequence[int | None]) -> dict[Var, Arg]:
    """Remove the forwarded results from a node, if its operator allows that.

    Args:
        sources: What `forwarded` returns for the node.

    Returns:
        Replacements for all forwarded results, removed or not.
    """
    replaced = {
        node.results[i]: node.args[position]
        for i, position in enumerate(sources)
        if position is not None
    }
    if not replaced or node.op.is_call or not node.op.droppable:
        return replaced
    signature = signature_of(node)
    pairs = carries(signature)
    unchanged = [pair for pair in pairs if sources[pair.result] is not None]
    if unchanged:
        _pass_as_invariants(node, signature, unchanged)
    is_carry = {pair.result for pair in pairs}
    dropped = {pair.result for pair in unchanged}
    dropped |= {i for i, source in enumerate(sources) if source is not None} - is_carry
    drop_results(node, dropped)
    return replaced


def _changing_sizes(signature: Signature) -> set[int]:
    """Return the args with sizes that are not passed to a region as symbols. Steps
    may change such a size, so that only the carry has it."""
    args: set[int] = set()
    for region in signature.regions:
        symbols = {v.node.symbol for v in region.graph.symbols}
        for var, port in region.ports:
            is_passed = var.type.is_static or symbols.issuperset(
                free_symbols(*var.type.shape)
            )
            if port.at is not None and not is_passed:
                args.add(port.at)
    return args


def _pass_as_invariants(
    node: Node, signature: Signature, pairs: Sequence[CarryPair]
) -> None:
    """Let the regions read carries as captures, and return these unchanged."""
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
