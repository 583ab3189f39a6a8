"""Rules that a user's operator has of its own, and the derived ones that follow them.

Such rules are called as `debug` is, with pytrees and functions. A function is then a
pytree itself, of the tensors that it closes over, so that it has tangents, cotangents
and examples as other arguments have.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.autograd.api import like
from hopflow.autograd.jvp import Dual, differentiate, run_graph
from hopflow.autograd.linearize import LinearTracer, linear_of
from hopflow.autograd.pullback import pulled_by
from hopflow.autograd.region_jvp import input_like
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.graphs import bind_again
from hopflow.bind import Interpreter, Operand, Value, current, using
from hopflow.errors import DerivativeError, OperatorError, ResultTypeError
from hopflow.graph.core import Graph, map_graphs
from hopflow.graph.interpreter import interpret
from hopflow.graph.regions import result_types
from hopflow.graph.rewriting import clone, eliminate_dead_code, read_vars
from hopflow.graph.types import SYMBOL_TYPE, TensorType, may_be
from hopflow.hops.subgraphs import (
    Closed,
    Function,
    add_inputs,
    as_value,
    captured_write,
    check_rule,
    close_bodies,
    commit,
    flatten_operands,
    flatten_results,
    own_copy,
    trace_body,
)
from hopflow.ops.opdef import OpDef
from hopflow.pytree import Spec
from hopflow.trace.own_writes import own_writes_only
from hopflow.trace.scouting import scouted
from hopflow.trace.stand_ins import Read, run_elsewhere
from hopflow.trace.tracer import Tracer
from hopflow.zeros import LinearMap, Tangent, Unknown, Zero, added, instantiate, is_zero

ARGUMENTS: Final = "arguments"

Kind: TypeAlias = Literal["operand", "function", "static"]


class Leaf(NamedTuple):
    """A leaf of the user's arguments.

    path   how a user would write it
    key    the param or input that stands for it
    """

    path: str
    key: str
    kind: Kind
    value: Any


def keys_of(paths: Iterable[str]) -> list[str]:
    """Names for params and inputs, one for each of the paths."""
    taken = {"self": None, "meaning": None, ARGUMENTS: None}
    reserved = len(taken)
    for path in paths:
        key = re.sub(r"\W+", "_", path).strip("_")
        while key in taken:
            key += "_"
        taken[key] = None
    return list(taken)[reserved:]


def filled(
    leaves: Sequence[Leaf],
    spec: Spec,
    operands: Sequence[Any],
    functions: Sequence[Any],
) -> Any:
    """(args, kwargs) with these operands and functions."""
    rest = {"operand": iter(operands), "function": iter(functions)}
    found = [
        leaf.value if leaf.kind == "static" else next(rest[leaf.kind])
        for leaf in leaves
    ]
    return pytree.unflatten(spec, found)


class KindOfCall(NamedTuple):
    """One kind of call of a function.

    spec      the structure of its arguments
    results   that of its results
    written   which of the operands and captures the further outputs are written to;
              None: to what nothing else reads
    """

    spec: Spec
    results: Spec
    written: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of a function, one for each kind of call.

    symbols  what is passed for its symbols
    places   which of the node's captures the function closes over
    """

    op: str
    name: str
    graphs: Sequence[Graph]
    kinds: Sequence[KindOfCall] = field(compare=False)
    symbols: Sequence[Any] = field(compare=False)
    places: Sequence[int] = field(compare=False)

    def __repr__(self) -> str:
        return self.name

    @classmethod
    def of(cls, name: str, node: "_Node") -> "_Graphs":
        """Those of a node."""
        graphs, kinds = node.params.get(name, ()), node.arguments.kinds[name]
        graphs = (graphs,) if isinstance(graphs, Graph) else graphs
        used: set[int] = set()
        for graph, kind in zip(graphs, kinds, strict=True):
            read, first = read_vars(graph), len(graph.operands)
            captures = enumerate(graph.captures)
            used |= {i for i, v in captures if v in read or first + i in kind.written}
        return cls(node.op.name, name, graphs, kinds, node.symbols, sorted(used))

    def closing(self, graph: Graph) -> Graph:
        """One of them with inputs only for what the function closes over."""
        own = copy(graph)
        captures = [graph.captures[i] for i in self.places]
        own.inputs = [*graph.symbols, *graph.operands, *captures]
        return own


class Closure:
    """A function as rules get it: called as it is, and a pytree of its captures."""

    __slots__ = ("captures", "own")

    def __init__(self, captures: Sequence[Any], own: _Graphs) -> None:
        self.captures = list(captures)
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own
        operands, spec = flatten_operands(own.op, f"{own.name}: args", (args, kwargs))
        for graph, kind in zip(own.graphs, own.kinds, strict=True):
            if kind.spec == spec and _takes(graph, operands):
                given = [*own.symbols, *operands, *self.captures]
                outputs = interpret(own.closing(graph), given, bind_again)
                found = list(map(as_value, outputs))
                inputs = dict(enumerate(operands))
                first = len(operands)
                for place, tensor in zip(own.places, self.captures, strict=True):
                    inputs[first + place] = tensor
                count = kind.results.num_leaves
                for target, value in zip(kind.written, found[count:], strict=True):
                    if target is not None:
                        commit([inputs[target]], [value])
                return pytree.unflatten(kind.results, found[:count])
        types = ", ".join(str(o.type) for o in operands)
        raise OperatorError(
            f"{own.op}: a rule calls `{own.name}` with ({types}), as `debug` never "
            "does: only of its calls there are graphs. Call it in `debug` like that."
        )


pytree.register(
    Closure,
    lambda c: (c.captures, c.own, [str(i) for i in range(len(c.captures))]),
    lambda own, captures: Closure(list(captures), own),
    by_name=False,
)


def _takes(graph: Graph, operands: Sequence[Operand]) -> bool:
    """Whether these may be the operands of a graph."""
    own = graph.operands
    return len(own) == len(operands) and all(
        may_be(v.type, o.type) for v, o in zip(own, operands, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """How the user gave what a node has.

    spec     the structure of (args, kwargs)
    kinds    by the name of a function the kinds of its calls
    returns  the structure of the result
    reads    what the class's own rules read of outside: the last captures
    """

    op: Any
    leaves: Sequence[Leaf] = field(repr=False)
    spec: Spec
    kinds: Mapping[str, Sequence[KindOfCall]] = field(repr=False)
    returns: Spec = field(repr=False)
    reads: tuple[Read, ...] = field(default=(), repr=False)

    @property
    def results(self) -> int:
        """How many of a node's results the user gets; the rest is what is written."""
        return self.returns.num_leaves

    def structural_key(self) -> str:
        static = [leaf.value for leaf in self.leaves if leaf.kind == "static"]
        reads = [id(read.tensor) for read in self.reads]
        own = f"{id(self.op)} {self.spec} {static!r} {dict(self.kinds)} {self.returns}"
        return f"{own} {reads}"

    def tree(self, values: Sequence[Any], node: "_Node") -> Any:
        """(args, kwargs) of these operands and captures."""
        count = sum(leaf.kind == "operand" for leaf in self.leaves)
        own = [_Graphs.of(name, node) for name in self.kinds]
        closures = [Closure([values[count + i] for i in g.places], g) for g in own]
        return filled(self.leaves, self.spec, values[:count], closures)


class _Node(NamedTuple):
    """A node as a rule gets it: what is passed for symbols, and the other inputs."""

    op: Any
    symbols: Sequence[Operand]
    inputs: Sequence[Operand]
    params: Mapping[str, Any]

    @classmethod
    def of(
        cls, op: Any, operands: Sequence[Operand], params: Mapping[str, Any]
    ) -> "_Node":
        count = len(params["meaning"].symbols)
        return cls(op, operands[:count], operands[count:], params)

    @property
    def arguments(self) -> Arguments:
        found: Arguments = self.params[ARGUMENTS]
        return found

    @property
    def values(self) -> list[Value]:
        """The inputs, for a rule, whose functions may write to them."""
        kinds = self.arguments.kinds.values()
        writes = any(kind.written for own in kinds for kind in own)
        writes = writes or self.arguments.results < len(self.params["meaning"].outputs)
        return [own_copy(o) if writes else as_value(o) for o in self.inputs]

    @property
    def unknowns(self) -> list[Unknown]:
        """What stands for the inputs in trees of them: no two are one object."""
        return [Unknown(o.type) for o in self.inputs]

    def rest(self, tangents: Sequence[Tangent]) -> Sequence[Tangent]:
        """The tangents of the inputs."""
        return tangents[len(self.symbols) :]

    @property
    def by_position(self) -> list[bool]:
        """Which inputs are in arguments by position: those that rules differentiate."""
        unknowns = self.unknowns
        args, _ = self.arguments.tree(unknowns, self)
        known = {id(leaf) for leaf in pytree.flatten(args)[0]}
        return [id(unknown) in known for unknown in unknowns]

    def check_tangents(self, tangents: Sequence[Tangent], rule: str) -> None:
        """
        Raises:
            DerivativeError: what the rule gives no derivative in has a tangent.
        """
        given = zip(self.inputs, self.rest(tangents), self.by_position, strict=True)
        for own, tangent, by_position in given:
            if not (is_zero(tangent) or by_position):
                raise DerivativeError(
                    f"{self.op.name}: a tensor {own.type} that is given by name, "
                    "or that `debug` or a rule itself reads, depends on what is "
                    f"differentiated, and its own `{rule}` gives derivatives in "
                    "arguments by position. Make it one."
                )

    def only_computes(self, rule: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Within the block the class's own rule writes to nothing of outside."""
        label = Function("rule", rule, (), rule).label
        name = self.op.name
        return own_writes_only(lambda t: captured_write(name, label, _REFUSAL, t))

    def call(
        self, rule: str, values: Sequence[Value], *args: Any, **options: Any
    ) -> Any:
        """What the class's own rule returns, with `values` for the inputs.

        Raises:
            ArgumentTypeError: the rule does not take such arguments.
        """
        fn = getattr(self.op, rule)
        function = Function(rule, fn, (), lambda _: fn(*args, **options))
        return run_elsewhere(lambda: function(()), self.arguments.reads, values)


def differentiated(
    op: Any, operands: Sequence[Operand], params: Mapping[str, Any]
) -> list[bool]:
    """Which operands of a node, its symbols apart, its own rules differentiate in."""
    return _Node.of(op, operands, params).by_position


# --- the rules of a node --------------------------------------------------------------

# The class's own are those of what `debug` returns. What it writes, and the functions
# given to it, has the derivatives that follow from `debug`.


def push(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], list[Tangent]]:
    """The results and their tangents, by the class's own `jvp`."""
    values, found = _push(op, operands, tangents, params)
    written, dots = _written(operands, tangents, params, None)
    return [*values, *written], [*found, *dots]


def linearize(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    rule: Literal["jvp", "vjp"],
) -> tuple[list[Value], LinearMap]:
    """The results, and a linear function to their tangents, by the class's own rule."""
    values, derivative = (
        _linearize_jvp(op, operands, tangents, params)
        if rule == "jvp"
        else _linearize_vjp(op, operands, tangents, params)
    )
    written, dots = _written(operands, tangents, params, linear_of(tangents))
    return [*values, *written], lambda given: [*derivative(given), *dots]


def _written(
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[list[Value], list[Tangent]]:
    """What a node writes, and its tangents."""
    meaning, count = params["meaning"], params[ARGUMENTS].results
    if len(meaning.outputs) == count:
        return [], []
    graph = clone(meaning)
    graph.outputs = graph.outputs[count:]
    eliminate_dead_code(graph)
    return differentiate(graph, operands, tangents, linear)


# --- what rules read ------------------------------------------------------------------


def also_reading(op: Any, closed: Closed, params: dict[str, Any]) -> None:
    """Pass what the class's own rules read of outside too: they run where its trace
    may have ended by then."""
    tracer = current()
    if not (isinstance(tracer, Tracer) and op.own_rules):
        return
    found = scouted(op, op.name, tracer, lambda own: _try_rules(op, own, params))
    params[ARGUMENTS] = replace(params[ARGUMENTS], reads=found.reads)
    tensors = [read.tensor for read in found.reads]
    add_inputs(closed, found.symbols, tensors)


def _try_rules(op: Any, tracer: Tracer, params: dict[str, Any]) -> None:
    """Run the class's own rules on inputs of a node's types."""
    params = map_graphs(params, clone)
    graph: Graph = params["meaning"]
    first = len(graph.symbols)
    operands: list[Value] = [input_like(tracer, var) for var in graph.inputs]
    node = _Node.of(op, operands, params)
    given: list[Tangent] = [Zero(o.type) for o in operands]
    if "vjp" in op.own_rules:
        _linearize_vjp(op, operands, given, params)
    if "jvp" in op.own_rules:
        for i, by_position in enumerate(node.by_position, first):
            if by_position and is_differentiable(operands[i].type):
                given[i] = input_like(tracer, graph.inputs[i], twin=True)
        _push(op, operands, given, params)


# --- forward --------------------------------------------------------------------------


def _push(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], list[Tangent]]:
    """The results and their tangents, by the class's own `jvp`.

    Raises:
        DerivativeError: what the rule gives no derivative in has a tangent.
        ResultTypeError, StructureError, ShapeError, DTypeError: the rule returns
            something else than a pair of results and tangents like them.
    """
    node = _Node.of(op, operands, params)
    node.check_tangents(tangents, "jvp")
    with node.only_computes(op.jvp):
        inputs = node.values
        primals, options = node.arguments.tree(inputs, node)
        own, _ = node.arguments.tree(node.rest(tangents), node)
        dots = pytree.tree_map(lambda t: instantiate(t) if _is_tangent(t) else t, own)
        pair = node.call("jvp", inputs, primals, dots, **options)
    name = f"{op.name}.jvp"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ResultTypeError(
            f"{name} must return a pair (result, tangent), and returns "
            f"`{type(pair).__name__}`."
        )
    values, spec = _results(op, "jvp", pair[0], operands, params)
    return values, like(name, "tangent", pair[1], values, spec)


def _linearize_jvp(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], LinearMap]:
    """The results, and the class's own `jvp` as a linear function."""
    node = _Node.of(op, operands, params)
    given, count = node.rest(tangents), len(node.inputs)
    places = [i for i, t in enumerate(given) if not is_zero(t)]
    nonzero: list[bool] = []

    def call(flat: Sequence[Any]) -> Any:
        own: list[Tangent] = [Zero(o.type) for o in node.inputs]
        for i, tangent in zip(places, flat[count:], strict=True):
            own[i] = tangent
        zeros = [Zero(o.type) for o in node.symbols]
        again = map_graphs(params, clone)
        values, found = _push(op, [*node.symbols, *flat[:count]], [*zeros, *own], again)
        nonzero[:] = [not is_zero(t) for t in found]
        return [*values, *map(instantiate, found)]

    types = [o.type.strong() for o in node.inputs]
    dots = [types[i] for i in places]
    closed = _traced(op, "jvp", op.jvp, call, [*types, *dots])
    own = [given[i] for i in places]
    found = _linear(closed, node.inputs, own, linear_of(tangents))
    half = len(nonzero)
    values = [as_value(d.value) for d in found[:half]]
    pushed: list[Tangent] = [
        d.tangent if is_given else Zero(v.type)
        for d, v, is_given in zip(found[half:], values, nonzero, strict=True)
    ]
    return values, lambda _: pushed


def _linear(
    closed: Closed,
    inputs: Sequence[Operand],
    tangents: Sequence[Tangent],
    linear: LinearTracer,
) -> list[Dual]:
    """The outputs of a rule that is linear in the last operands of its graph."""
    [graph] = closed.graphs
    depends = set(graph.operands[len(inputs) :])
    is_chain = True
    for node in graph.nodes:
        if not depends.isdisjoint(node.args):
            depends.update(node.results)
            is_chain = is_chain and type(node.op) is OpDef
    if is_chain:
        with using(linear):
            given = [*closed.symbols, *inputs, *tangents, *closed.captures]
            found = [as_value(o) for o in interpret(graph, given, bind_again)]
        return [Dual(linear.below(v), v) for v in found]
    # Operators compute other things beside. What is linear is its own derivative where
    # the tangents are zero.
    duals = [Dual(o, Zero(o.type)) for o in inputs]
    duals += [Dual(instantiate(Zero(t.type)), t) for t in tangents]
    duals += [Dual(c, Zero(c.type)) for c in closed.captures]
    return run_graph(graph, closed.symbols, duals, linear)


# --- reverse --------------------------------------------------------------------------


def _linearize_vjp(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], LinearMap]:
    """The results, and a linear function that is there to be transposed, by the
    pullback of the class's own `vjp`.

    Raises:
        ResultTypeError, StructureError, ShapeError, DTypeError: the rule or its
            pullback returns something else than results and cotangents like them.
        DerivativeError: what the rule gives no derivative in has a tangent.
    """
    node = _Node.of(op, operands, params)
    node.check_tangents(tangents, "vjp")
    with node.only_computes(op.vjp):
        inputs = node.values
        args, options = node.arguments.tree(inputs, node)
        pair = node.call("vjp", inputs, *args, **options)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1])):
        raise ResultTypeError(
            f"{op.name}.vjp must return a pair (result, pullback), and returns "
            f"`{type(pair).__name__}`."
        )
    values, spec = _results(op, "vjp", pair[0], operands, params)
    pull = _Pull(node, inputs, pair[1], values, spec)
    floats = [v.type.strong() for v in values if is_differentiable(v.type)]
    closed = _traced(op, "pullback", pair[1], pull, floats)
    [graph] = closed.graphs
    first = len(closed.symbols)

    def pulled(
        cotangents: Sequence[Tangent],
        residuals: Sequence[Value],
        arguments: Sequence[TensorType],
        _results: Sequence[TensorType],
    ) -> list[Tangent]:
        cts = map(instantiate, cotangents)
        given = [*residuals[:first], *cts, *residuals[first:]]
        found = map(as_value, interpret(graph, given, bind_again))
        return [next(found) if is_differentiable(t) else Zero(t) for t in arguments]

    derivative = pulled_by(
        pulled,
        [o.type for o in node.inputs],
        [v.type for v in values],
        [*closed.symbols, *closed.captures],
    )
    return values, lambda tangents: derivative(node.rest(tangents))


@dataclass(slots=True)
class _Pull:
    """The pullback that a rule returned, on flat cotangents of floating results."""

    node: _Node
    inputs: Sequence[Value]
    pullback: Callable[..., Any]
    values: Sequence[Value]
    spec: Spec

    def __call__(self, flat: Sequence[Any]) -> list[Value]:
        rest, node = iter(flat), self.node
        cts = [
            next(rest) if is_differentiable(v.type) else instantiate(Zero(v.type))
            for v in self.values
        ]
        given = pytree.unflatten(self.spec, cts)
        reads = node.arguments.reads
        with node.only_computes(self.pullback):
            trees = run_elsewhere(lambda: self.pullback(given), reads, self.inputs)
        wanted = node.unknowns
        args, _ = node.arguments.tree(wanted, node)
        name = f"{node.op.name}.vjp"
        if not isinstance(trees, tuple | list) or len(trees) != len(args):
            raise ResultTypeError(
                f"{name}: the pullback must return a tuple of {len(args)} cotangents, "
                "one for each argument given by position and None for zero, and "
                f"returns {pytree.structure(trees)}."
            )
        # A tensor that several functions close over is in each of them.
        totals: dict[int, Tangent] = {}
        for tree, arg in zip(trees, args, strict=True):
            if tree is None:
                continue
            leaves, spec = pytree.flatten(arg)
            own = [x if isinstance(x, Unknown) else _NO_DATA for x in leaves]
            found = like(name, "cotangent", tree, own, spec)
            for x, ct in zip(own, found, strict=True):
                totals[id(x)] = added(totals.get(id(x), Zero(x.type)), ct)
        return [
            instantiate(totals.get(id(x), Zero(x.type)))
            for x in wanted
            if is_differentiable(x.type)
        ]


_REFUSAL: Final = "a rule computes, and writes nothing. Return the new value."
_NO_DATA: Final = Unknown(SYMBOL_TYPE)


# --- both -----------------------------------------------------------------------------


def _is_tangent(leaf: Any) -> bool:
    return isinstance(leaf, Value | Zero)


def _results(
    op: Any,
    rule: str,
    tree: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> tuple[list[Value], Spec]:
    """What a rule gives as the operator's results.

    Raises:
        ResultTypeError, StructureError, RuleTypeError: they are others than those of
            `debug`.
    """
    function = Function(rule, getattr(op, rule), (), lambda _: tree)
    found, spec = flatten_results(op.name, function, tree)
    values = list(map(as_value, found))
    arguments: Arguments = params[ARGUMENTS]
    types = result_types(op, operands, params)[: arguments.results]
    expected = arguments.returns, types
    check_rule(op.name, function.label, "`debug`", expected, operands, (spec, values))
    return values, spec


def _traced(
    op: Any,
    rule: str,
    fn: Callable[..., Any],
    call: Callable[..., Any],
    types: Sequence[TensorType],
) -> Closed:
    """What a rule does with flat tensors of these types, as a graph."""
    names = [f"x{i}" for i in range(len(types))]
    function = Function(rule, fn, names, call)
    body = trace_body(op.name, f"{op.name}/{rule}", function, types)
    return close_bodies([body])
