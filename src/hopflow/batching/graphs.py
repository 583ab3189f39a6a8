"""Run the graph of one batch element on a batch: batch rules and batched bodies."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from hopflow.batching.numbers import per_element_numbers, split
from hopflow.bind import Operand, Value, bind, slots
from hopflow.errors import RuleReadError
from hopflow.graph.core import Constant, Graph, Node, vars_of
from hopflow.graph.forwarding import forward_results
from hopflow.graph.hashing import structural_hash
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import clone, effects, own_graphs
from hopflow.graph.types import TensorType
from hopflow.ops.batching import Same, in_batch
from hopflow.ops.convert import as_value
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Size, SymInt, symbol
from hopflow.trace.tracer import Tracer, trace_into


@dataclass(frozen=True, slots=True)
class Batched:
    """A value with batch elements along axis 0; `type` is that of one element."""

    value: Value

    @property
    def type(self) -> TensorType:
        type_ = self.value.type
        return type_.with_shape(type_.shape[1:])


Lane: TypeAlias = Operand | Batched


def lanes_of(batched: Sequence[bool], args: Sequence[Operand]) -> list[Lane]:
    pairs = zip(batched, args, strict=True)
    return [Batched(a) if b and isinstance(a, Value) else a for b, a in pairs]


def bind_batched(
    size: Size, op: Any, operands: Sequence[Lane], params: dict[str, Any]
) -> list[Lane]:
    """Return the results of an operation on operands some of which may be batched."""
    batched = tuple([isinstance(o, Batched) for o in operands])
    if not any(batched) and not _calls_python(op, params):
        return list(bind_again(op, operands, params))  # type: ignore[arg-type]
    plain = [o.value if isinstance(o, Batched) else o for o in operands]
    if type(op) is OpDef:
        assert op.batch is not None
        results = op.batch(op, size, batched, *plain, **params)
        return [r.value if isinstance(r, Same) else Batched(r) for r in results]
    values, mask = op.batch_rule(size, batched, plain, params)
    return [Batched(r) if b else r for r, b in zip(values, mask, strict=True)]


def _calls_python(op: Any, params: dict[str, Any]) -> bool:
    """Return True if each batch element must run it, even if all are the same."""
    return "callback" in effects(Node("call_function", op, (), params))


def evaluate(graph: Graph, size: Size, args: Sequence[Lane]) -> tuple[Lane, ...]:
    """Return the results of a graph on values some of which may be batched."""
    batched = [isinstance(a, Batched) for a in args]
    if not per_element_numbers(graph, batched):
        return interpret(graph, args, functools.partial(bind_batched, size))
    graph = forward_results(clone(graph))
    asking = per_element_numbers(graph, batched)
    first, rest = split(graph, asking)
    values = dict(zip(first.outputs, evaluate(first, size, args), strict=True))
    operands = [values[v] for v in rest.inputs]
    if any(isinstance(values.get(a), Batched) for a in vars_of(asking[0].args)):
        results: Sequence[Lane] = _each_example(rest, size, operands)
    else:
        results = evaluate(rest, size, operands)
    values.update(zip(rest.outputs, results, strict=True))
    return tuple([o if isinstance(o, Constant) else values[o] for o in graph.outputs])


def _each_example(graph: Graph, size: Size, args: Sequence[Lane]) -> list[Lane]:
    """Return the results of a graph by a `map` over the batch elements."""

    def run(operands: Sequence[Operand]) -> list[Value]:
        return [as_value(r) for r in interpret(graph, operands, bind_again)]

    batched = [isinstance(a, Batched) for a in args]
    plain = [a.value if isinstance(a, Batched) else a for a in args]
    return [Batched(r) for r in slots.each_example(run, size, plain, batched, None)]


def bind_again(
    op: Any, operands: Sequence[Operand], params: dict[str, Any]
) -> tuple[Value, ...]:
    """Bind a node of an existing graph, with copies of its subgraphs."""
    return bind(op, operands, params if type(op) is OpDef else own_graphs(op, params))


class BatchedGraph(NamedTuple):
    """A graph that computes all elements of a batch at once.

    graph    takes the batch size first if that is symbolic; batched inputs and outputs
             have the batch elements along axis 0
    outputs  which of its outputs are batched
    """

    graph: Graph
    outputs: tuple[bool, ...]


# Batched graphs by graph, then by which inputs and outputs are batched. Without this
# memo, nested loops would batch their bodies again for each iteration of each outer
# fixed point.
_memo: WeakKeyDictionary[Graph, dict[Any, BatchedGraph]] = WeakKeyDictionary()


def batched_graph(
    graph: Graph,
    size: Size,
    inputs: Sequence[bool],
    outputs: Sequence[bool] | None = None,
) -> BatchedGraph:
    """Return a new graph that computes `graph` for `size` batch elements.

    Args:
        inputs: Which inputs are batched; a symbol never is.
        outputs: Which outputs to batch even if they are the same for all elements.
    """
    memo = _memo.setdefault(graph, {})
    forced = tuple(outputs or (False,) * len(graph.outputs))
    number = None if isinstance(size, SymInt) else size
    # By its hash, because a graph may be edited.
    key = (structural_hash(graph), number, tuple(inputs), forced)
    if key not in memo:
        memo[key] = _batched_graph(graph, size, inputs, forced)
    result = memo[key]
    return BatchedGraph(clone(result.graph), result.outputs)  # a graph has one owner


def _batched_graph(
    graph: Graph, size: Size, inputs: Sequence[bool], forced: Sequence[bool]
) -> BatchedGraph:
    tracer = Tracer(None, graph.name)
    if isinstance(size, SymInt):  # a graph owns its symbols, so not the caller's
        size = symbol("n")
        tracer.bind_symbols((size,))
    args: list[Lane] = []
    for var, is_batched in zip(graph.inputs, inputs, strict=True):
        if var.node.symbol is not None:
            args.append(tracer.input_like(var))
            continue
        type_ = var.type
        if is_batched:
            type_ = type_.with_shape((size, *type_.shape))
        tensor = tracer.operand(type_, var.node.name)
        tensor.source.node.section = var.node.section
        args.append(Batched(tensor) if is_batched else tensor)

    def run() -> list[Lane]:
        results = evaluate(graph, size, args)
        pairs = zip(results, forced, strict=True)
        return [as_batched(size, r) if force else r for r, force in pairs]

    lanes = trace_into(tracer, run, ())
    for capture in tracer.captures.values():
        raise RuleReadError("batch", capture.tensor.type)
    values = [r.value if isinstance(r, Batched) else r for r in lanes]
    closed = tracer.close(values)
    return BatchedGraph(closed, tuple([isinstance(r, Batched) for r in lanes]))


def as_batched(size: Size, lane: Lane) -> Batched:
    if isinstance(lane, Batched):
        return lane
    return Batched(as_value(in_batch(size, False, lane)))
