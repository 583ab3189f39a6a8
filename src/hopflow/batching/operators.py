"""The batch rule of operators with subgraphs, derived from the roles of their args.

Bodies are batched as graphs, for those inputs that depend on the batch element. A carry
does if its initial value or its next value does, which a fixed point determines. Where
the predicate, index or loop condition depends on the batch element, the node becomes a
map over the batch, so that each element takes its own branch and number of steps.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hopflow.batching.graphs import (
    BatchedGraph,
    batched_graph,
    bind_again,
    evaluate,
    lanes_of,
)
from hopflow.batching.tables import copies_tables, updates_tables
from hopflow.bind import Operand, Value, bind, current, slots
from hopflow.graph.core import Graph, Node, map_graphs
from hopflow.graph.forwarding import first_same, shortened
from hopflow.graph.regions import Region, Signature, carries
from hopflow.graph.types import TensorType
from hopflow.ops.batching import in_batch
from hopflow.ops.convert import as_value
from hopflow.ops.joining import concat
from hopflow.ops.sizes import may_be_zero
from hopflow.ops.views import moved, part, reshaped
from hopflow.symbolic.size import Size, SymInt, free_symbols
from hopflow.trace.sharing import once


class BatchedResults(NamedTuple):
    """The results of an operator; batched ones have the batch elements on axis 0."""

    values: Sequence[Value]
    batched: tuple[bool, ...]


def batch(
    op: Any,
    size: Size,
    batched: Sequence[bool],
    args: Sequence[Operand],
    params: dict[str, Any],
    *,
    all_results: bool = False,
) -> BatchedResults:
    """Return the results of a node for all elements of a batch at once.

    Args:
        all_results: Whether all results are to be batched.
    """
    node: Any = Node("call_function", op, tuple(args), params)  # type: ignore[arg-type]
    signature = op.signature(node).running
    settled = _settled(
        signature, size, batched, all_results=all_results, share=op.is_call
    )
    if settled is None:
        return each_example(op, size, batched, args, params)
    has_first = isinstance(size, int) and size > 0
    if (
        (has_first or all(settled.results))
        and (
            updates_tables(signature, settled.args)
            or copies_tables(signature, [body.graph for body in settled.bodies])
        )
        and not (
            "stacked" in signature.results and _is_ragged(op, batched, args, params)
        )
    ):
        mapped = each_example(op, size, batched, args, params)
        return _unbatched(mapped, settled.results)
    passed = [
        _passed(size, role, arg, was=was, now=now)
        for role, arg, was, now in zip(
            signature.args, args, batched, settled.args, strict=True
        )
    ]
    if isinstance(size, SymInt):
        passed.insert(op.lead, current().value_of(size))
    graphs = {
        id(region.graph): body.graph
        for region, body in zip(signature.regions, settled.bodies, strict=True)
    }
    # Graphs that no run takes, those of rules, stay as they are.
    batched_params = map_graphs(params, lambda graph: graphs.get(id(graph), graph))
    results = bind(op, passed, batched_params)
    rows = zip(signature.results, results, settled.results, strict=True)
    values = [moved(v, 1, 0) if b and r == "stacked" else v for r, v, b in rows]
    return BatchedResults(values, tuple(settled.results))


def _is_ragged(
    op: Any, batched: Sequence[bool], args: Sequence[Operand], params: dict[str, Any]
) -> bool:
    """Return whether only a run knows a size of a result for one batch element, which
    may differ from that for another one: a `map` cannot stack such results."""
    given = _types_of_one(batched, args)
    known = {*free_symbols(*(size for type_ in given for size in type_.shape))}
    types = op.result_types(given, params)
    made = free_symbols(*(size for type_ in types for size in type_.shape))
    return not known.issuperset(made)


def each_example(
    op: Any,
    size: Size,
    batched: Sequence[bool],
    args: Sequence[Operand],
    params: dict[str, Any],
) -> BatchedResults:
    """Return the results of a node by a `map` over the batch elements.

    The map reports the progress of loops, which run side by side. It takes a value once
    that is several operands. Operands that the node passes through unchanged (see
    `shortened`) are left out of the map.
    """
    params = dict(params)
    progress = params.pop("progress", None)
    params.pop("counted", None)
    types = _types_of_one(batched, args)
    first = first_same(zip(map(id, args), batched, strict=True))
    distinct = sorted(set(first))
    short = shortened(op, types, params, first)

    def run(rows: Sequence[Operand]) -> Sequence[Value]:
        row_of = dict(zip(distinct, rows, strict=True))
        operands = [row_of[k] for k in first]
        if short is None:
            return bind_again(op, operands, params)
        results = bind_again(op, [operands[i] for i in short.args], short.params)
        return [results[k] for k in short.rest]

    mapped = slots.each_example(
        run, size, [args[k] for k in distinct], [batched[k] for k in distinct], progress
    )
    if short is None:
        return BatchedResults(mapped, (True,) * len(mapped))
    values = short.results(args, mapped)
    mask = short.results(batched, [True] * len(mapped))
    return BatchedResults(list(map(as_value, values)), tuple(mask))


def _unbatched(mapped: BatchedResults, wanted: Sequence[bool]) -> BatchedResults:
    """Return results, those of the first batch element where all have the same."""
    pairs = zip(mapped.values, mapped.batched, wanted, strict=True)
    values = [_first_row(v) if was and not now else v for v, was, now in pairs]
    kept = zip(mapped.batched, wanted, strict=True)
    return BatchedResults(values, tuple([was and now for was, now in kept]))


def with_shared(
    size: Size,
    results: BatchedResults,
    graph: Graph,
    batched: Sequence[bool],
    args: Sequence[Operand],
) -> BatchedResults:
    """Return the results of a node with custom derivatives, unbatched where the graph
    makes the same value for all batch elements.

    Such a result is that of the first element, and so are its tangent and cotangent: a
    rule may return tangents that differ between elements, and a cotangent must reach
    only one of them.

    Args:
        results: All results, batched.
        graph: What the node computes from its args.
    """
    depends = batched_graph(graph, size, batched).outputs
    if all(depends):
        return results
    values = list(results.values)
    # Without batch elements there is no first one: the graph computes the value.
    may_be_none = may_be_zero(size) or size == 0
    lanes = evaluate(graph, size, lanes_of(batched, args)) if may_be_none else ()
    for i, differs in enumerate(depends):
        if not differs:
            plain = [reshaped(lanes[i], (1, *lanes[i].type.shape))] if lanes else []
            values[i] = _first_row(concat([values[i], *plain]))
    return BatchedResults(values, depends)


def _first_row(stack: Value) -> Value:
    row: Value = reshaped(part(stack, 0, 0, 1), stack.shape[1:])
    return row


def _types_of_one(batched: Sequence[bool], args: Sequence[Operand]) -> list[TensorType]:
    """Return the types of args for one batch element."""
    return [
        a.type.with_shape(a.type.shape[1:]) if b else a.type
        for a, b in zip(args, batched, strict=True)
    ]


_DECIDES: Final = ("predicate", "index")


class _Settled(NamedTuple):
    """The fixed point of `_settled`: what is batched, and the bodies for that."""

    args: list[bool]
    results: list[bool]
    bodies: list[BatchedGraph]


def _settled(
    signature: Signature,
    size: Size,
    initial: Sequence[bool],
    *,
    all_results: bool,
    share: bool,
) -> _Settled | None:
    """Return the fixed point: a body's results are batched where its inputs are, or
    where another body's are. Return None if what decides which body runs is batched.

    Args:
        share: Whether other nodes of the trace have the same bodies, so that batched
            ones are kept for reuse.
    """
    args = list(initial)
    if any(b for b, role in zip(args, signature.args, strict=True) if role in _DECIDES):
        return None
    results = [all_results] * len(signature.results)
    pairs = carries(signature)
    while True:
        for pair in pairs:
            args[pair.arg] = results[pair.result] = (
                args[pair.arg] or results[pair.result]
            )
        before = list(results)
        bodies: list[BatchedGraph] = []
        for region in signature.regions:
            bodies.append(_body(region, size, args, results, share))
            for port, is_batched in zip(
                region.outputs, bodies[-1].outputs, strict=True
            ):
                if port.at is not None:
                    results[port.at] |= is_batched
                elif is_batched:
                    return None
        if results == before:
            return _Settled(args, results, bodies)


def _body(
    region: Region,
    size: Size,
    args: Sequence[bool],
    results: Sequence[bool],
    share: bool,
) -> BatchedGraph:
    inputs = tuple([p.at is not None and args[p.at] for p in region.inputs])
    outputs = tuple([p.at is not None and results[p.at] for p in region.outputs])

    def batched() -> BatchedGraph:
        return batched_graph(region.graph, size, inputs, outputs)

    if not share:
        return batched()
    number = None if isinstance(size, SymInt) else size
    return once(region.graph, ("batched", number, inputs, outputs), batched)


def _passed(size: Size, role: str, arg: Operand, *, was: bool, now: bool) -> Operand:
    """Return an arg for the batched node: axis 0 of a stack stays in front."""
    if not now:
        return arg
    value = as_value(in_batch(size, was, arg))
    return moved(value, 0, 1) if role == "slice" else value
