"""Operators whose graphs make sizes, as operators of what is padded to the largest.

Derivatives are taken of these: so what is stacked for the backward pass of a loop has
one size in each step, and the sizes of all steps are stacked with it; and what a branch
leaves for its backward pass, and gets there, has a size that is known outside.
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
    """A leaf of a carry, or a result; and an axis of it."""

    leaf: int
    axis: int


def changing_sizes(params: Mapping[str, Any]) -> dict[Symbol, Place]:
    """The sizes of a loop's carry that steps change, and where one finds each."""
    body: Graph = params["body"]
    return _made(body, [v.type for v in body.operands[: params["num_carry"]]])


def _made(graph: Graph, types: Iterable[TensorType]) -> dict[Symbol, Place]:
    """The sizes of tensors that no symbol of the graph is, and where one finds each."""
    known = {v.node.symbol for v in graph.symbols}
    found: dict[Symbol, Place] = {}
    for leaf, type_ in enumerate(types):
        for axis, size in enumerate(type_.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in known:
                found.setdefault(symbol, Place(leaf, axis))
    return found


# --- loops ----------------------------------------------------------------------------


def padded(op: RegionOperator, params: Mapping[str, Any]) -> Graph:
    """What a node of a loop means, as a graph of its args, with one loop of padded
    carries; before them it carries their sizes."""
    body, count = params["body"], params["num_carry"]
    places = list(changing_sizes(params).values())
    tracer = Tracer(None, op.name, env=user_env())
    symbols = _symbols(tracer, body)
    own = [v.type for v in body.operands]
    operands = [tracer.operand(t, "x", _changing(t, tracer)) for t in own]
    captures = _captures(tracer, body)
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
    tracer = Tracer(None, graph.name, env=user_env())
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
    captures = _captures(tracer, graph)
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


def _captures(tracer: Tracer, graph: Graph) -> list[Value]:
    return [
        TracedTensor(tracer, tracer.graph.add_input(v.type, v.node.name, "capture"))
        for v in graph.captures
    ]


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
    op: RegionOperator,
    params: Mapping[str, Any],
    places: Sequence[Place],
    sizes: Sequence[Value],
    args: Sequence[Value],
) -> list[Size]:
    """The largest that each size may be; or is, as the loop itself finds."""

    def measured() -> Sequence[Value]:
        graphs = {
            key: _measuring(value, places, is_body=value is params["body"])
            for key, value in params.items()
            if isinstance(value, Graph)
        }
        first = len(params["body"].symbols)
        passed = [*args[:first], *sizes, *map(stop_gradient, args[first:])]
        count = len(places) + params["num_carry"]
        return bind(op, passed, {**params, **graphs, "num_carry": count})

    return _largest(changing_sizes(params), measured)


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


# --- branches -------------------------------------------------------------------------


def padded_branches(
    op: RegionOperator, operands: Sequence[Operand], params: dict[str, Any]
) -> Graph | None:
    """What a node means whose branches make sizes of results, as a graph of its args
    with one node whose results are padded; before them it gives the sizes. None: they
    make none."""
    like = graphs_of(params)[0]
    types = op.result_types([o.type for o in operands], params)
    made = _made(like, types)
    if not made:
        return None
    places, count = list(made.values()), len(made)
    tracer = Tracer(None, op.name, env=user_env())
    symbols = _symbols(tracer, like)
    lead = [tracer.operand(o.type, "lead") for o in operands[: op.lead]]
    rest: list[Value] = [tracer.operand(v.type, v.node.name) for v in like.operands]
    rest += _captures(tracer, like)

    def sizes(results: Sequence[Value]) -> list[Value]:
        return _sizes(results, places)

    def measured() -> Sequence[Value]:
        graphs = map_graphs(params, lambda g: _silent(_branch(g, like, (), sizes)))
        return bind(op, [*lead, *symbols, *map(stop_gradient, rest)], graphs)

    with using(tracer):
        limits = _largest(made, measured)
        largest = dict(zip(made, limits, strict=True))
        given = free_symbols(*limits)

        def full(results: Sequence[Value]) -> list[Value]:
            pairs = zip(results, types, strict=True)
            return [
                *sizes(results),
                *(_pad(_fitted(x, t, largest), t, largest) for x, t in pairs),
            ]

        more = [TracedTensor(tracer, tracer.symbol(s)) for s in given]
        graphs = map_graphs(params, lambda g: _branch(g, like, given, full))
        found = bind(op, [*lead, *symbols, *more, *rest], graphs)
        now = _symbols_of(found[:count], largest)
        pairs = zip(found[count:], types, strict=True)
        return tracer.close([_cut(x, t, now) for x, t in pairs])


def _branch(
    graph: Graph,
    like: Graph,
    symbols: Collection[Symbol],
    results: Callable[[Sequence[Value]], Sequence[Value]],
) -> Graph:
    """A branch with other results, that are made of its own; it takes what `like` does,
    the first of them all, and more symbols."""
    tracer = Tracer(None, graph.name, env=user_env())
    inputs = _symbols(tracer, like)
    for symbol in symbols:
        tracer.define(symbol)
    inputs += [tracer.operand(v.type, v.node.name) for v in like.operands]
    inputs += _captures(tracer, like)
    with using(tracer):
        found = interpret(graph, inputs, bind_again)
        return tracer.close(results(list(map(as_value, found))))


def _silent(graph: Graph) -> Graph:
    """What the results of a graph need, which is computed once more."""
    eliminate_dead_code(graph, with_effects=True)
    return silent(graph)


# --- sizes ----------------------------------------------------------------------------


def _largest(
    sizes: Iterable[Symbol], measured: Callable[[], Sequence[Value]]
) -> list[Size]:
    """The largest that each size may be; where nobody knows that, what is measured."""
    bounds = [s.range.high for s in sizes]
    if inf not in bounds:
        return [int(n) for n in bounds]
    return [
        current().symbol_of(n, 0) if most == inf else int(most)
        for n, most in zip(measured(), bounds, strict=False)
    ]


def _pad(x: Value, type_: TensorType, largest: Mapping[Symbol, Size]) -> Value:
    """A leaf of a carry, with zeros behind it."""
    if largest.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, largest) for n in type_.shape])
    [zeros] = empty_stacks([x.type.with_shape(shape)])
    starts, steps = (0,) * len(shape), (1,) * len(shape)
    return as_value(update_slice(zeros, x, starts=starts, steps=steps))


def _fitted(x: Value, type_: TensorType, largest: Mapping[Symbol, Size]) -> Value:
    """A branch's result; no more of it than is measured, as that of a branch which does
    not run may be larger."""
    room = [substitute(n, largest) for n in type_.shape]
    shape = tuple(map(smaller, x.type.shape, room))
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))


def _cut(x: Value, type_: TensorType, sizes: Mapping[Symbol, Size]) -> Value:
    """What was padded."""
    if sizes.keys().isdisjoint(free_symbols(*type_.shape)):
        return x
    shape = tuple([substitute(n, sizes) for n in type_.shape])
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))
