"""Loops whose steps change sizes, as loops of carries that are padded to the largest.

Derivatives are taken of these: so what is stacked for the backward pass has one size in
each step, and the sizes of all steps are stacked with it.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.batching.graphs import bind_again
from hopflow.bind import Value, bind, current, using
from hopflow.graph.core import Graph, plain_symbol
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import clone
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.hops.base import HigherOrderOp
from hopflow.hops.loops import empty_stacks
from hopflow.ops.convert import as_value, astype, stop_gradient
from hopflow.ops.item import dim_size
from hopflow.ops.opdef import OPERATIONS
from hopflow.ops.views import sliced, update_slice
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import user_line
from hopflow.trace.tracer import Tracer

__all__ = ["changing_sizes", "padded"]

_NUMBER = TensorType(dtypes.int64)


class Place(NamedTuple):
    """A leaf of a carry, and an axis of it."""

    leaf: int
    axis: int


def changing_sizes(params: Mapping[str, Any]) -> dict[Symbol, Place]:
    """The sizes of a loop's carry that steps change, and where one finds each."""
    body: Graph = params["body"]
    known = {v.node.symbol for v in body.symbols}
    found: dict[Symbol, Place] = {}
    for leaf, var in enumerate(body.operands[: params["num_carry"]]):
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in known:
                found.setdefault(symbol, Place(leaf, axis))
    return found


def padded(op: HigherOrderOp, params: Mapping[str, Any]) -> Graph:
    """What a node of a loop means, as a graph of its args, with one loop of padded
    carries; before them it carries their sizes."""
    body, count = params["body"], params["num_carry"]
    places = list(changing_sizes(params).values())
    tracer = Tracer(None, op.name, env=ShapeEnv(user_line))
    symbols = _symbols(tracer, body)
    own = [v.type for v in body.operands]
    operands = [tracer.operand(t, "x", _changing(t, tracer)) for t in own]
    captures = [tracer.operand(v.type, v.node.name) for v in body.captures]
    with using(tracer):
        args = [*symbols, *operands, *captures]
        sizes = _sizes(operands, places)
        limits = _limits(op, params, places, sizes, args)
        largest = dict(zip(changing_sizes(params), limits, strict=True))
        passed = [
            *symbols,
            *(TracedTensor(tracer, tracer.symbol(s)) for s in free_symbols(*limits)),
            *sizes,
            *(_pad(x, t, largest) for x, t in zip(operands[:count], own, strict=False)),
            *operands[count:],
            *captures,
        ]
        graphs = {
            key: _padded(value, params, largest)
            for key, value in params.items()
            if isinstance(value, Graph)
        }
        k = len(places)
        changed = {**params, **graphs, "num_carry": k + count}
        results = bind(op, passed, changed)
        last = _symbols_of(results[:k], largest)
        carry = [
            _cut(x, t, last) for x, t in zip(results[k : k + count], own, strict=False)
        ]
        return tracer.close([*carry, *results[k + count :]])


def _padded(
    graph: Graph, params: Mapping[str, Any], largest: Mapping[Any, Any]
) -> Graph:
    """A graph of the loop for sizes, and carries that are padded."""
    count, places = params["num_carry"], list(changing_sizes(params).values())
    tracer = Tracer(None, graph.name, env=ShapeEnv(user_line))
    symbols = _symbols(tracer, graph)
    for symbol in free_symbols(*largest.values()):
        tracer.define(symbol)
    own = [v.type for v in graph.operands]
    of_graph = _own_symbols(own, places)
    limits = dict(zip(of_graph, largest.values(), strict=True))
    sizes = [tracer.operand(_NUMBER, "size") for _ in places]
    full = [t.with_shape([substitute(n, limits) for n in t.shape]) for t in own]
    operands = [
        tracer.operand(t, v.node.name)
        for t, v in zip(full, graph.operands, strict=True)
    ]
    captures = []
    for var in graph.captures:
        made = tracer.graph.add_input(var.type, var.node.name, "capture")
        captures.append(TracedTensor(tracer, made))
    with using(tracer):
        now = _symbols_of(sizes, limits)
        given = [_cut(x, t, now) for x, t in zip(operands, own, strict=True)]
        found = interpret(graph, [*symbols, *given, *captures], bind_again)
        results = list(map(as_value, found))
        if graph is params["body"]:
            carry = zip(results[:count], own, strict=False)
            results = [
                *_sizes(results, places),
                *(_pad(x, t, limits) for x, t in carry),
                *results[count:],
            ]
        return tracer.close(results)


def _symbols(tracer: Tracer, graph: Graph) -> list[Value]:
    own = [v.node.symbol for v in graph.symbols if v.node.symbol is not None]
    return [TracedTensor(tracer, tracer.define(s)) for s in own]


def _own_symbols(types: Sequence[TensorType], places: Sequence[Place]) -> list[Symbol]:
    """The symbols that a graph has for the sizes at these places."""
    return [free_symbols(types[p.leaf].shape[p.axis])[0] for p in places]


def _changing(type_: TensorType, tracer: Tracer) -> dict[int, Size]:
    """The axes of an input that bring forth symbols of their own."""
    return {
        axis: size
        for axis, size in enumerate(type_.shape)
        if not tracer.symbols.keys() >= set(free_symbols(size))
    }


def _sizes(carry: Sequence[Value], places: Sequence[Place]) -> list[Value]:
    """The sizes of a carry, as tensors."""
    sizes = [carry[p.leaf].type.shape[p.axis] for p in places]
    here = current()
    return [
        astype(here.value_of(n) if isinstance(n, SymInt) else n, dtypes.int64)
        for n in sizes
    ]


def _symbols_of(
    sizes: Sequence[Value], largest: Mapping[Symbol, Size]
) -> dict[Symbol, Size]:
    """Sizes that tensors hold, for the symbols that they are of."""
    pairs = zip(sizes, largest.items(), strict=True)
    return {
        symbol: current().symbol_of(size, symbol.range.low, most)
        for size, (symbol, most) in pairs
    }


def _limits(
    op: HigherOrderOp,
    params: Mapping[str, Any],
    places: Sequence[Place],
    sizes: Sequence[Value],
    args: Sequence[Value],
) -> list[Size]:
    """The largest that each size may be; or is, as the loop itself finds."""
    bounds = [s.range.high for s in changing_sizes(params)]
    if inf not in bounds:
        return [int(n) for n in bounds]
    graphs = {
        key: _measuring(value, places, is_body=value is params["body"])
        for key, value in params.items()
        if isinstance(value, Graph)
    }
    first = len(params["body"].symbols)
    passed = [*args[:first], *sizes, *map(stop_gradient, args[first:])]
    count = len(places) + params["num_carry"]
    found = bind(op, passed, {**params, **graphs, "num_carry": count})
    return [
        current().symbol_of(n, 0) if most == inf else int(most)
        for n, most in zip(found, bounds, strict=False)
    ]


def _measuring(graph: Graph, places: Sequence[Place], *, is_body: bool) -> Graph:
    """A graph of the loop with more carries, the first: the largest sizes so far."""
    graph = clone(graph)
    rest = graph.inputs[len(graph.symbols) :]
    largest = [graph.add_input(_NUMBER, "largest") for _ in places]
    graph.inputs = [*graph.symbols, *largest, *rest]
    if is_body:
        found = []
        for var, place in zip(largest, places, strict=True):
            [out], axis = [graph.outputs[place.leaf]], {"axis": place.axis}
            [size] = graph.call(dim_size, [out], axis, [SYMBOL_TYPE]).results
            [more] = graph.call(
                OPERATIONS["maximum"], [var, size], {}, [_NUMBER]
            ).results
            found.append(more)
        graph.outputs = (*found, *graph.outputs)
    return graph


def _pad(x: Value, type_: TensorType, largest: Mapping[Symbol, Size]) -> Value:
    """A leaf of a carry, with zeros behind it."""
    if largest.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, largest) for n in type_.shape])
    [zeros] = empty_stacks([x.type.with_shape(shape)])
    starts, steps = (0,) * len(shape), (1,) * len(shape)
    return as_value(update_slice(zeros, x, starts=starts, steps=steps))


def _cut(x: Value, type_: TensorType, sizes: Mapping[Symbol, Size]) -> Value:
    """What was padded."""
    if sizes.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, sizes) for n in type_.shape])
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))
