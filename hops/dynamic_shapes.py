"""Operators with dynamic shapes, padded to an upper bound.

Derivatives are taken of the padded operators. The residuals that a loop stacks then
have the same shape in each step, and the sizes of all steps are stacked with them. The
residuals of a branch, and the cotangents it gets, have sizes that are known outside.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.autograd.partition import silent
from hopflow.batching.graphs import bind_again
from hopflow.bind import Operand, Value, bind, current, using
from hopflow.graph.core import Graph, map_graphs, plain_symbol
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import clone, eliminate_dead_code
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.hops.base import RegionOperator, graphs_of
from hopflow.hops.loops import empty_stacks
from hopflow.ops.convert import as_value, astype, stop_gradient
from hopflow.ops.item import dim_size
from hopflow.ops.opdef import OPERATIONS
from hopflow.ops.sizes import smaller
from hopflow.ops.views import sliced, update_slice
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer

_NUMBER = TensorType(dtypes.int64)


class Place(NamedTuple):
    """A leaf of a carry, or a result, and an axis of it."""

    leaf: int
    axis: int


def changing_sizes(params: Mapping[str, Any]) -> dict[Symbol, Place]:
    """Return the sizes of a loop's carry that steps change, and where each can be
    read."""
    body: Graph = params["body"]
    return _computed_sizes(body, [v.type for v in body.operands[: params["num_carry"]]])


def _computed_sizes(graph: Graph, types: Iterable[TensorType]) -> dict[Symbol, Place]:
    """Return the sizes of tensors that are no input of the graph, and where each can be
    read."""
    defined = {v.node.symbol for v in graph.symbols}
    places: dict[Symbol, Place] = {}
    for leaf, type_ in enumerate(types):
        for axis, size in enumerate(type_.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in defined:
                places.setdefault(symbol, Place(leaf, axis))
    return places


# --- loops ----------------------------------------------------------------------------


def padded(op: RegionOperator, params: Mapping[str, Any]) -> Graph:
    """Return a graph of a node's args that computes a loop with one loop of padded
    carries. The sizes are additional carries, before these."""
    body, count = params["body"], params["num_carry"]
    places = list(changing_sizes(params).values())
    tracer = Tracer(None, op.name, env=user_env())
    symbols = list(map(tracer.input_like, body.symbols))
    types = [v.type for v in body.operands]
    operands = [tracer.operand(t, "x", _changing(t, tracer)) for t in types]
    captures = list(map(tracer.input_like, body.captures))
    with using(tracer):
        args = [*symbols, *operands, *captures]
        sizes = _sizes(operands, places)
        limits = _limits(op, params, places, sizes, args)
        largest = dict(zip(changing_sizes(params), limits, strict=True))
        inputs = [
            *symbols,
            *(TracedTensor(tracer, tracer.symbol(s)) for s in free_symbols(*limits)),
            *sizes,
            *(
                _pad(x, t, largest)
                for x, t in zip(operands[:count], types, strict=False)
            ),
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
        results = bind(op, inputs, changed)
        last = _symbols_of(results[:k], largest)
        carry = [
            _cut(x, t, last)
            for x, t in zip(results[k : k + count], types, strict=False)
        ]
        return tracer.close([*carry, *results[k + count :]])


def _padded(
    graph: Graph, params: Mapping[str, Any], largest: Mapping[Any, Any]
) -> Graph:
    """Return a graph of the loop that takes sizes, and carries that are padded."""
    count, places = params["num_carry"], list(changing_sizes(params).values())
    tracer = Tracer(None, graph.name, env=user_env())
    symbols = list(map(tracer.input_like, graph.symbols))
    for symbol in free_symbols(*largest.values()):
        tracer.define(symbol)
    types = [v.type for v in graph.operands]
    of_graph = _symbols_at(types, places)
    limits = dict(zip(of_graph, largest.values(), strict=True))
    sizes = [tracer.operand(_NUMBER, "size") for _ in places]
    full = [t.with_shape([substitute(n, limits) for n in t.shape]) for t in types]
    operands = [
        tracer.operand(t, v.node.name)
        for t, v in zip(full, graph.operands, strict=True)
    ]
    captures = list(map(tracer.input_like, graph.captures))
    with using(tracer):
        actual = _symbols_of(sizes, limits)
        inputs = [_cut(x, t, actual) for x, t in zip(operands, types, strict=True)]
        outputs = interpret(graph, [*symbols, *inputs, *captures], bind_again)
        results = list(map(as_value, outputs))
        if graph is params["body"]:
            carry = zip(results[:count], types, strict=False)
            results = [
                *_sizes(results, places),
                *(_pad(x, t, limits) for x, t in carry),
                *results[count:],
            ]
        return tracer.close(results)


def _symbols_at(types: Sequence[TensorType], places: Sequence[Place]) -> list[Symbol]:
    """Return the symbols of a graph for the sizes at these places."""
    return [free_symbols(types[p.leaf].shape[p.axis])[0] for p in places]


def _changing(type_: TensorType, tracer: Tracer) -> dict[int, Size]:
    """Return the axes of an input whose sizes define new symbols."""
    return {
        axis: size
        for axis, size in enumerate(type_.shape)
        if not tracer.symbols.keys() >= set(free_symbols(size))
    }


def _sizes(carry: Sequence[Value], places: Sequence[Place]) -> list[Value]:
    """Return the sizes of a carry as tensors."""
    sizes = [carry[p.leaf].type.shape[p.axis] for p in places]
    interpreter = current()
    return [
        astype(interpreter.value_of(n) if isinstance(n, SymInt) else n, dtypes.int64)
        for n in sizes
    ]


def _symbols_of(
    sizes: Sequence[Value], largest: Mapping[Symbol, Size]
) -> dict[Symbol, Size]:
    """Return the symbols for sizes that tensors contain, by the symbols they
    replace."""
    pairs = zip(sizes, largest.items(), strict=True)
    return {
        symbol: current().symbol_of(size, symbol.range.low, most)
        for size, (symbol, most) in pairs
    }


def _limits(
    op: RegionOperator,
    params: Mapping[str, Any],
    places: Sequence[Place],
    sizes: Sequence[Value],
    args: Sequence[Value],
) -> list[Size]:
    """Return an upper bound for each size, or the largest size, which the loop itself
    computes."""

    def measured() -> Sequence[Value]:
        graphs = {
            key: _measuring(value, places, is_body=value is params["body"])
            for key, value in params.items()
            if isinstance(value, Graph)
        }
        first = len(params["body"].symbols)
        inputs = [*args[:first], *sizes, *map(stop_gradient, args[first:])]
        count = len(places) + params["num_carry"]
        return bind(op, inputs, {**params, **graphs, "num_carry": count})

    return _largest(changing_sizes(params), measured)


def _measuring(graph: Graph, places: Sequence[Place], *, is_body: bool) -> Graph:
    """Return a graph of the loop that carries the largest sizes so far, before the
    carry."""
    graph = clone(graph)
    others = graph.inputs[len(graph.symbols) :]
    largest = [graph.add_input(_NUMBER, "largest") for _ in places]
    graph.inputs = [*graph.symbols, *largest, *others]
    if is_body:
        maxima = []
        for var, place in zip(largest, places, strict=True):
            [out], axis = [graph.outputs[place.leaf]], {"axis": place.axis}
            [size] = graph.call(dim_size, [out], axis, [SYMBOL_TYPE]).results
            [larger] = graph.call(
                OPERATIONS["maximum"], [var, size], {}, [_NUMBER]
            ).results
            maxima.append(larger)
        graph.outputs = (*maxima, *graph.outputs)
    return graph


# --- branches -------------------------------------------------------------------------


def padded_branches(
    op: RegionOperator, operands: Sequence[Operand], params: dict[str, Any]
) -> Graph | None:
    """Return a graph of a node's args for branches that compute sizes of results: one
    node whose results are padded, preceded by their sizes. None: they compute no
    sizes."""
    like = graphs_of(params)[0]
    types = op.result_types([o.type for o in operands], params)
    computed = _computed_sizes(like, types)
    if not computed:
        return None
    places, count = list(computed.values()), len(computed)
    tracer = Tracer(None, op.name, env=user_env())
    symbols = list(map(tracer.input_like, like.symbols))
    lead = [tracer.operand(o.type, "lead") for o in operands[: op.lead]]
    inputs: list[Value] = [tracer.operand(v.type, v.node.name) for v in like.operands]
    inputs += map(tracer.input_like, like.captures)

    def sizes(results: Sequence[Value]) -> list[Value]:
        return _sizes(results, places)

    def measured() -> Sequence[Value]:
        graphs = map_graphs(params, lambda g: _silent(_branch(g, like, (), sizes)))
        return bind(op, [*lead, *symbols, *map(stop_gradient, inputs)], graphs)

    with using(tracer):
        limits = _largest(computed, measured)
        largest = dict(zip(computed, limits, strict=True))
        bound_symbols = free_symbols(*limits)

        def full(results: Sequence[Value]) -> list[Value]:
            pairs = zip(results, types, strict=True)
            return [
                *sizes(results),
                *(_pad(_fitted(x, t, largest), t, largest) for x, t in pairs),
            ]

        extra = [TracedTensor(tracer, tracer.symbol(s)) for s in bound_symbols]
        graphs = map_graphs(params, lambda g: _branch(g, like, bound_symbols, full))
        outputs = bind(op, [*lead, *symbols, *extra, *inputs], graphs)
        actual = _symbols_of(outputs[:count], largest)
        pairs = zip(outputs[count:], types, strict=True)
        return tracer.close([_cut(x, t, actual) for x, t in pairs])


def _branch(
    graph: Graph,
    like: Graph,
    symbols: Collection[Symbol],
    results: Callable[[Sequence[Value]], Sequence[Value]],
) -> Graph:
    """Return a branch with other results, computed from its own. It has the inputs of
    `like`, the first of the branches, and more symbols."""
    tracer = Tracer(None, graph.name, env=user_env())
    inputs: list[Value] = list(map(tracer.input_like, like.symbols))
    for symbol in symbols:
        tracer.define(symbol)
    inputs += [tracer.operand(v.type, v.node.name) for v in like.operands]
    inputs += map(tracer.input_like, like.captures)
    with using(tracer):
        outputs = interpret(graph, inputs, bind_again)
        return tracer.close(results(list(map(as_value, outputs))))


def _silent(graph: Graph) -> Graph:
    """Return the graph reduced to its results, for a second evaluation without
    effects."""
    eliminate_dead_code(graph, with_effects=True)
    return silent(graph)


# --- sizes ----------------------------------------------------------------------------


def _largest(
    sizes: Iterable[Symbol], measured: Callable[[], Sequence[Value]]
) -> list[Size]:
    """Return an upper bound of each size; without one, its measured maximum."""
    bounds = [s.range.high for s in sizes]
    if inf not in bounds:
        return [int(n) for n in bounds]
    return [
        current().symbol_of(n, 0) if most == inf else int(most)
        for n, most in zip(measured(), bounds, strict=False)
    ]


def _pad(x: Value, type_: TensorType, largest: Mapping[Symbol, Size]) -> Value:
    """Return a leaf of a carry, padded with zeros."""
    if largest.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, largest) for n in type_.shape])
    [zeros] = empty_stacks([x.type.with_shape(shape)])
    starts, steps = (0,) * len(shape), (1,) * len(shape)
    return as_value(update_slice(zeros, x, starts=starts, steps=steps))


def _fitted(x: Value, type_: TensorType, largest: Mapping[Symbol, Size]) -> Value:
    """Return a branch's result, sliced to the measured sizes: those of a branch that
    does not run may be larger."""
    limits = [substitute(n, largest) for n in type_.shape]
    shape = tuple(map(smaller, x.type.shape, limits))
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))


def _cut(x: Value, type_: TensorType, sizes: Mapping[Symbol, Size]) -> Value:
    """Return a tensor without its padding."""
    if sizes.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, sizes) for n in type_.shape])
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))
