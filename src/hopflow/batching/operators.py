"""The batch rule of operators with subgraphs, from the roles of their args and results.

Bodies are batched as graphs, for those of their inputs that depend on the example: a
carry if its first value or what a step makes of it does, which is found as a fixed
point. Where what decides which body runs depends on the example, the node becomes a map
over the examples, so that each takes its own branch and its own number of steps.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hopflow.batching.graphs import (
    BatchedGraph,
    batched_graph,
    bind_again,
    evaluate,
    lanes_of,
)
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
from hopflow.symbolic.size import Size, SymInt
from hopflow.trace.sharing import once


class BatchedResults(NamedTuple):
    """The results of an operator, those that are batched with examples on axis 0."""

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
    """The results of a node for many examples at once.

    Args:
        all_results: Whether all results are to be batched.
    """
    node: Any = Node("call_function", op, tuple(args), params)  # type: ignore[arg-type]
    signature = op.signature(node)
    settled = _settled(
        signature, size, batched, all_results=all_results, share=op.is_call
    )
    if settled is None:
        return each_example(op, size, batched, args, params)
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
    results = bind(op, passed, map_graphs(params, lambda graph: graphs[id(graph)]))
    rows = zip(signature.results, results, settled.results, strict=True)
    values = [moved(v, 1, 0) if b and r == "stacked" else v for r, v, b in rows]
    return BatchedResults(values, tuple(settled.results))


def each_example(
    op: Any,
    size: Size,
    batched: Sequence[bool],
    args: Sequence[Operand],
    params: dict[str, Any],
) -> BatchedResults:
    """The results of a node by a map over the examples, which tells the progress of
    loops: they run side by side. What the node only passes through is no part of it."""
    params = dict(params)
    progress = params.pop("progress", None)
    params.pop("counted", None)
    types = _types_of_one(batched, args)
    short = shortened(op, types, params, first_same(map(id, args)))
    if short is None:
        run = functools.partial(bind_again, op, params=params)
        found = slots.each_example(run, size, args, batched, progress)
        return BatchedResults(found, (True,) * len(found))

    def rest(own: Sequence[Operand]) -> list[Value]:
        results = bind_again(op, [own[i] for i in short.args], short.params)
        return [results[k] for k in short.rest]

    found = slots.each_example(rest, size, args, batched, progress)
    values = short.results(args, found)
    mask = short.results(batched, [True] * len(found))
    return BatchedResults(list(map(as_value, values)), tuple(mask))


def with_shared(
    size: Size,
    found: BatchedResults,
    graph: Graph,
    batched: Sequence[bool],
    args: Sequence[Operand],
) -> BatchedResults:
    """The results of a node with custom derivatives, one copy of those that are the
    same for all examples.

    Such a result is that of the first example, and so are its tangent and cotangent: a
    rule may give a tangent that differs from example to example, and a cotangent is to
    be given to one of them alone.

    Args:
        found: All results, batched.
        graph: What the node computes from its args.
    """
    depends = batched_graph(graph, size, batched).outputs
    if all(depends):
        return found
    values = list(found.values)
    # If there are no examples, it is what the graph computes.
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
    """The types of args for one example."""
    return [
        a.type.with_shape(a.type.shape[1:]) if b else a.type
        for a, b in zip(args, batched, strict=True)
    ]


_DECIDES: Final = ("predicate", "index")


class _Settled(NamedTuple):
    """Which args and results are batched, and the bodies for that."""

    args: list[bool]
    results: list[bool]
    bodies: list[BatchedGraph]


def _settled(
    signature: Signature,
    size: Size,
    given: Sequence[bool],
    *,
    all_results: bool,
    share: bool,
) -> _Settled | None:
    """The fixed point: a body's results must be batched where its inputs are, or where
    another body's are. None: what decides which of them runs is batched.

    Args:
        share: Whether other nodes of the trace have the same bodies.
    """
    args = list(given)
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
        bodies = [_body(r, size, args, results, share) for r in signature.regions]
        for region, body in zip(signature.regions, bodies, strict=True):
            for port, found in zip(region.outputs, body.outputs, strict=True):
                if port.at is not None:
                    results[port.at] |= found
                elif found:
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
    """An arg of the new node: stacks have their slices on axis 0, the examples next."""
    if not now:
        return arg
    value = as_value(in_batch(size, was, arg))
    return moved(value, 0, 1) if role == "slice" else value
