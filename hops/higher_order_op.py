"""`HigherOrderOp`: base of operators that users define by a method `debug` alone.

A node of such an operator is `op(symbols; operands; captures; meaning, f, ..., n)`:

meaning     Graph, (*symbols, *operands, *captures) -> results: `debug`, traced
f           for each function argument the graph, or one graph for each kind of call:
            (*symbols, *its operands, *captures) -> its results
n           for each static argument the value

Custom derivative rules of the class add their graphs to the params; see
`rule_regions`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.autograd import api
from hopflow.batching.graphs import Batched, bind_again, evaluate, lanes_of
from hopflow.bind import (
    Interpreter,
    Operand,
    Value,
    bind,
    current,
    run_graph,
    using,
)
from hopflow.errors import ArgumentTypeError, DerivativeError, OperatorError
from hopflow.graph.core import Graph, Node, map_graphs, size_of
from hopflow.graph.interpreter import Evaluate, interpret
from hopflow.graph.regions import Port, Region, Runs, Signature, roles
from hopflow.graph.rewriting import clone
from hopflow.graph.types import TensorType, differing
from hopflow.hops.base import Call
from hopflow.hops.own_rules import (
    CustomRules,
    Kind,
    KindOfCall,
    Leaf,
    filled,
    keys_of,
)
from hopflow.hops.rule_regions import Ruled
from hopflow.hops.rule_tracing import with_rules
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Written,
    as_value,
    close_bodies,
    commit,
    flatten_operands,
    flatten_results,
    own_copy,
    trace_body,
    unknown_sizes,
    written_inputs,
)
from hopflow.loop_ir.kernels import Inline, Lowered
from hopflow.pytree import Spec
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.trace.closures import type_key
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import input_names
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Unknown

MEANING: Final = "meaning"


@dataclass(slots=True)
class UserCall(Call):
    """A call of such an operator: its arguments are classified when it is traced."""

    arguments: "Arguments | None" = None


class HigherOrderOp(Ruled):
    """An operator with function arguments, for which a user defines `debug`.

    A subclass needs only its reference implementation in plain Python, `debug`:

        class Twice(hf.HigherOrderOp):
            def debug(self, f, x):
                return f(f(x))

        twice = Twice()

    It is called as `debug` is. Functions, and pytrees of tensors and numbers, are
    operands; keyword-only parameters are options, whose numbers are static. All other
    rules are derived from the trace of `debug`, and the operator stays one node until
    one of them is needed. See docs/add_an_operator.md, which also explains custom
    rules: `jvp`, `vjp`, `batch`, `infer`, `lower`.
    """

    name = "operator"

    # --- the entry ---

    def prepare(self, *args: Any, **kwargs: Any) -> UserCall:
        """Check the user's arguments and flatten them.

        Raises:
            HopflowError: an argument is wrong; nothing has run yet.
        """
        arguments = classify(self.name, self.debug, args, kwargs)
        return UserCall(self.name, [], arguments.operands, {}, arguments=arguments)

    def trace(self, call: Any) -> Any:
        return trace(self, call.arguments)

    def run_debug(self, call: Any) -> Any:
        return run_debug(self.name, self.debug, call.arguments)

    @property
    def declared(self) -> Callable[..., Any]:
        is_overridden = type(self).prepare is not HigherOrderOp.prepare
        return self.prepare if is_overridden else self.debug

    # --- rules that a class may define ---

    # `Any` lets each operator name its own args and params.

    def debug(self, *args: Any, **params: Any) -> Any:
        """Compute the results: the reference implementation in plain Python."""
        raise OperatorError(
            f"{self.name}: it has no meaning. Define `debug(self, ...)` in "
            f"`{type(self).__name__}`, as plain Python that calls its functions."
        )

    def jvp(self, *args: Any, **options: Any) -> Any:
        """Return the result, as `debug` does, and its tangent.

        Args:
            args: The positional arguments as a tuple, and a tuple of their tangents.
        """
        primals, tangents = args
        return api.jvp(lambda *inputs: self(*inputs, **options), primals, tangents)

    def vjp(self, *args: Any, **options: Any) -> Any:
        """Return the result, as `debug` does, and a pullback."""
        return api.vjp(lambda *inputs: self(*inputs, **options), *args)

    def batch(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """Return the results for a batch of this size, and which of them are
        batched."""
        if self.has_rules(params):  # these are for one batch element
            return super().batch_rule(size, batched, args, params)
        return batch(definition_of(params), size, batched, args)

    def infer(self, *types: Any, **params: Any) -> tuple[TensorType, ...]:
        return definition_of(params).out_types

    def lower(self, *args: Any, **params: Any) -> Lowered:
        _types, *operands = args
        return Inline(definition_of(params), tuple(operands))

    # --- rules that follow from these ---

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        return functionalize(bodies)

    def signature(self, node: Node) -> Signature:
        return self.with_rule_regions(node, signature)

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        return self.batch(size, batched, args, params)

    @property
    def own_rules(self) -> tuple[str, ...]:
        """Return the derivative rules that the class defines."""
        cls = type(self)
        rules = ("jvp", "vjp")
        return tuple(r for r in rules if getattr(cls, r) != getattr(HigherOrderOp, r))

    def not_given(
        self, rule: str, type_: TensorType, _params: Mapping[str, Any]
    ) -> DerivativeError:
        return DerivativeError(
            f"{self.name}: a tensor {type_} that is given by name, or that `debug` or "
            "a rule itself reads, depends on what is differentiated, and its own "
            f"`{rule}` gives derivatives in arguments by position. Make it one."
        )

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        return params.get(MEANING)

    # --- what interpreters call ---

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        inferred = self.infer(*types, **params)
        check_inferred(self, definition_of(params), inferred)
        return inferred

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        results = evaluate(definition_of(params), args)
        return tuple(map(as_value, results))


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, classified.

    leaves     of all arguments, in order
    spec       the structure of (args, kwargs)
    operands   the leaves that are data, with numbers as weak constants
    """

    leaves: list[Leaf]
    spec: Spec
    operands: list[Operand]

    @property
    def functions(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == "function"]

    @property
    def names(self) -> list[str]:
        """Return the names of the operands."""
        return [leaf.key for leaf in self.leaves if leaf.kind == "operand"]

    def function(self, debug: Callable[..., Any], functions: Sequence[Any]) -> Function:
        """Return `debug` as a function of flat operands, with these functions."""

        def call(flat: Sequence[Any]) -> Any:
            args, kwargs = filled(self.leaves, self.spec, flat, functions)
            return debug(*args, **kwargs)

        return Function("debug", debug, self.names, call)


def classify(name: str, debug: Callable[..., Any], args: Any, kwargs: Any) -> Arguments:
    """Classify the arguments of a call of an operator.

    Data are tensors, arrays, and numbers, except numbers for keyword-only parameters.

    Raises:
        ArgumentTypeError: `debug` does not take these arguments.
        ArgumentRangeError: a Python integer does not fit the default dtype.
    """
    signature = inspect.signature(debug)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name}: {error}. It is called as `{name}{signature}`."
        ) from None
    bound.apply_defaults()
    named = list(_named_leaves(signature, bound))
    leaves = [
        Leaf(path, key, _kind(value, is_option=by_name), value)
        for (path, value, by_name), key in zip(
            named, keys_of(path for path, *_ in named), strict=True
        )
    ]
    data = [leaf.value for leaf in leaves if leaf.kind == "operand"]
    operands, _ = flatten_operands(name, "args", data)
    return Arguments(leaves, pytree.structure((bound.args, bound.kwargs)), operands)


def _named_leaves(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> Iterator[tuple[str, Any, bool]]:
    """Yield each leaf of (args, kwargs) with the expression a user would write for it,
    and whether it was passed by keyword."""
    roots: list[tuple[str, Any, bool]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            extras = bound.arguments[name]
            roots += [(f"{name}[{i}]", x, False) for i, x in enumerate(extras)]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, _EITHER):
            roots.append((name, bound.arguments[name], False))
    # A pytree orders the values of a dict by their keys.
    roots += [(name, value, True) for name, value in sorted(bound.kwargs.items())]
    for root, tree, by_name in roots:
        values, spec = pytree.flatten(tree)
        for path, leaf in zip(pytree.leaf_paths(spec, root), values, strict=True):
            yield path, leaf, by_name


_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _kind(leaf: Any, *, is_option: bool) -> Kind:
    if isinstance(leaf, Value | np.ndarray | np.generic):
        return "operand"
    if isinstance(leaf, bool | int | float | SymInt | SymFloat | SymBool):
        return "static" if is_option else "operand"
    is_function = callable(leaf) and not isinstance(leaf, type)
    return "function" if is_function else "static"


# --- function arguments ---------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Variant:
    """A function, traced for one kind of call; `body` is open.

    spec      the structure of (args, kwargs)
    shared    for each operand the tensor of an outer scope that it is, or None
    results   the number of outputs that the caller gets; the others are written
    """

    key: Any
    spec: Spec
    shared: Sequence[Operand | None]
    body: Body
    results: int
    written: Written

    @property
    def kind(self) -> KindOfCall:
        """Return the kind of call for rules, once `body` is closed."""
        tracer, graph = self.body.tracer, self.body.tracer.graph
        inputs = [*graph.operands, *graph.captures]
        places = {var: i for i, var in enumerate(inputs)}
        targets = [tracer.captures[k].input for k in self.written.captures]
        targets += [tracer.operands[i].source for i in self.written.operands]
        return KindOfCall(
            self.spec, self.body.spec, tuple([places.get(var) for var in targets])
        )

    def run(self, operands: Sequence[Operand]) -> Any:
        """Bind the operations of the function where it is called, and return its
        result."""
        tracer, graph = self.body.tracer, self.body.tracer.graph
        graph.outputs = tuple(map(tracer.arg, self.body.outputs))
        origins = {c.input: c.origin for c in tracer.captures.values()}
        inputs = iter(operands)
        args = [
            origins[var]
            if var in origins
            else next(inputs)
            if var.node.symbol is None
            else current().value_of(size_of(var.node.symbol))
            for var in graph.inputs
        ]
        results = [as_value(r) for r in interpret(graph, args, bind_again)]
        targets: list[Operand] = [
            tracer.captures[k].origin for k in self.written.captures
        ]
        targets += [operands[i] for i in self.written.operands]
        commit(targets, results[self.results :])
        return pytree.unflatten(self.body.spec, results[: self.results])


@dataclass(eq=False, slots=True)
class Subfunction:
    """A function argument, as `debug` gets it.

    outer      the interpreter around the call of the operator; None in debug mode
    variants   its traces, one for each kind of call
    """

    op: str
    leaf: Leaf
    outer: Interpreter | None
    variants: list[Variant] = field(default_factory=list)
    _memo: list[Variant] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tree = (args, kwargs)
        path, fn = self.leaf.path, self.leaf.value
        operands, spec = flatten_operands(self.op, f"{path}: args", tree)

        def call(flat: Sequence[Any]) -> Any:
            inner_args, inner_kwargs = pytree.unflatten(spec, flat)
            return fn(*inner_args, **inner_kwargs)

        names = input_names(
            fn, [s for part in spec.children() for s in part.children()]
        )
        function = Function(path, fn, names, call)
        if self.outer is None:
            result = function([as_value(o) for o in operands])
            outputs, out_spec = flatten_results(self.op, function, result)
            return pytree.unflatten(out_spec, map(as_value, outputs))
        return self.variant(function, operands, spec).run(operands)

    def variant(
        self, function: Function, operands: Sequence[Operand], spec: Spec
    ) -> Variant:
        traced = self._traced(function, operands, spec, [None] * len(operands))
        tracer = traced.body.tracer
        if tracer.has_writes:
            # An operand that it also reads as a captured tensor is that tensor.
            outside = [_outer(o, self.outer) for o in operands]
            shared = [o if id(o) in tracer.captures else None for o in outside]
            traced = self._traced(function, operands, spec, shared)
        if traced not in self.variants:
            self._remember("variants", [*self.variants, traced])
        return traced

    def _traced(
        self,
        function: Function,
        operands: Sequence[Operand],
        spec: Spec,
        shared: Sequence[Operand | None],
    ) -> Variant:
        types = [o.type for o in operands]
        key = [type_key(t, terms_of) for t in types]
        for traced in self._memo:
            equal = map(is_, traced.shared, shared)
            if traced.key == key and traced.spec == spec and all(equal):
                return traced
        path = f"{self.op}/{self.leaf.key}"
        with using(self.outer):
            sizes = unknown_sizes(types)
            references: Any = None
            if any(o is not None for o in shared):
                pairs = zip(shared, types, strict=True)
                references = [Unknown(t) if o is None else o for o, t in pairs]
            body = trace_body(self.op, path, function, types, references, sizes=sizes)
        results = len(body.outputs)
        variant = Variant(key, spec, shared, body, results, functionalize([body]))
        self._remember("_memo", [*self._memo, variant])
        return variant

    def _remember(self, name: str, variants: list[Variant]) -> None:
        """Set a list of variants, until the trace around the operator is rolled back. A
        loop rolls back to trace its body again, which removes the captures."""
        if isinstance(self.outer, Tracer):
            self.outer.change(self, name, variants)
        else:
            setattr(self, name, variants)


def _outer(operand: Operand, outer: Interpreter | None) -> Operand | None:
    """Return the tensor of the outer scope that an operand is, or None if it is not all
    of one."""
    tensor: Any = operand
    while isinstance(tensor, TracedTensor) and tensor.tracer is not outer:
        tensor = tensor.origin
    return tensor if isinstance(tensor, Value) else None


# --- tracing --------------------------------------------------------------------------


def functionalize(bodies: Sequence[Body]) -> Written:
    """Return the inputs that bodies write to, whose new values become results of each
    body."""
    written = written_inputs(bodies)
    for body in bodies:
        tracer = body.tracer
        tensors = [tracer.captures[k].tensor for k in written.captures]
        tensors += [tracer.operands[i] for i in written.operands]
        body.outputs += [type(t)(tracer, tracer.read(t)) for t in tensors]
    return written


def run_debug(name: str, debug: Callable[..., Any], call: Arguments) -> Any:
    """Return the results of `debug`, run as it is."""
    functions = [Subfunction(name, f, None) for f in call.functions]
    function = call.function(debug, functions)
    tree = function([as_value(o) for o in call.operands])
    outputs, spec = flatten_results(name, function, tree)
    return pytree.unflatten(spec, map(own_copy, outputs))


def trace(op: Any, call: Arguments) -> Any:
    """Trace `debug`, bind a node, and return the results in their structure."""
    outer = current()
    functions = [Subfunction(op.name, f, outer) for f in call.functions]
    body = trace_body(
        op.name,
        f"{op.name}/debug",
        call.function(op.debug, functions),
        [o.type for o in call.operands],
        call.operands,
    )
    results = len(body.outputs)
    written: Written = op.functionalize([body])
    variants = [v for f in functions for v in f.variants]
    captures = body.tracer.captures
    targets: list[Operand] = [captures[k].origin for k in written.captures]
    targets += [call.operands[i] for i in written.operands]
    bodies = [body, *(v.body for v in variants)]
    _capture_operands(bodies)
    closed = close_bodies(bodies)
    params = _params(call, functions, closed.graphs)
    if op.own_rules:
        kinds = {f.leaf.key: [v.kind for v in f.variants] for f in functions}
        types = [x.type for x in (*call.operands, *closed.captures)]
        arguments = call.leaves, call.spec, kinds, body.spec
        graphs = map_graphs(params, clone)  # a node may edit its graphs
        rules = CustomRules(op, *arguments, graphs, closed.symbols, types)
        closed, rule_params = with_rules(op, rules, closed, call.operands)
        params |= {"results": results, **rule_params}
    args = [*closed.symbols, *call.operands, *closed.captures]
    outputs = bind(op, args, params)
    commit(targets, outputs[results:])
    return pytree.unflatten(body.spec, outputs[:results])


def _capture_operands(bodies: Sequence[Body]) -> None:
    """Add captures for operands that other bodies close over, since the graphs of those
    bodies have no operand for them."""
    for other in bodies:
        for key, capture in other.tracer.captures.items():
            for tracer in (body.tracer for body in bodies):
                if key in tracer.references and key not in tracer.captures:
                    name = capture.input.node.name
                    var = tracer.graph.add_input(capture.input.type, name, "capture")
                    lifted = tracer.lifted(capture.origin, var, capture.memory)
                    tracer.captures[key] = lifted


def _params(
    call: Arguments, functions: Sequence[Subfunction], graphs: Sequence[Graph]
) -> dict[str, Any]:
    params: dict[str, Any] = {MEANING: graphs[0]}
    unused = iter(graphs[1:])
    for function in functions:
        variants = tuple([next(unused) for _ in function.variants])
        if variants:
            params[function.leaf.key] = variants[0] if len(variants) == 1 else variants
    for leaf in call.leaves:
        if leaf.kind == "static":
            params[leaf.key] = leaf.value
    return params


# --- rules ----------------------------------------------------------------------------


def definition_of(params: Mapping[str, Any]) -> Graph:
    """Return the graph that defines a node whose rules are derived.

    Raises:
        OperatorError: the operator has other graphs, and lacks a rule.
    """
    graph = params.get(MEANING)
    if not isinstance(graph, Graph):
        raise OperatorError(
            "an operator that is traced in its own way must name all of its rules: "
            f"there is no graph `{MEANING}` among {', '.join(params)}."
        )
    return graph


def check_inferred(op: Any, graph: Graph, inferred: Sequence[TensorType]) -> None:
    """Check the types that a custom `infer` returns.

    Raises:
        OperatorError: they differ from those of the trace of `debug`.
    """
    if texts := differing(graph.out_types, inferred):
        expected, actual = texts
        raise OperatorError(
            f"{op.name}: `{type(op).__name__}.infer` must give the types of what "
            f"`debug` returns and writes, {expected}, and gives {actual}. Leave it "
            "out: it follows from `debug`."
        )


def batch(
    graph: Graph, size: Size, batched: Sequence[bool], args: Sequence[Operand]
) -> tuple[list[Value], list[bool]]:
    """Return the batched results of the graph that defines a node, and a mask of
    them."""
    outputs = evaluate(graph, size, lanes_of(batched, args))
    values = [r.value if isinstance(r, Batched) else as_value(r) for r in outputs]
    return values, [isinstance(r, Batched) for r in outputs]


def signature(node: Any) -> Signature:
    """Return the roles of a node. Only the graph that defines it runs; it inlines the
    others."""
    definition = definition_of(node.params)
    symbols, captures = len(definition.symbols), len(definition.captures)
    args = roles(("symbol", symbols), ("operand", len(node.args) - symbols))
    ports = [Port(role, i) for i, role in enumerate(args)]
    first = len(args) - captures
    regions = []
    for name, graph in node.graphs.items():
        operands = ports[symbols:first]
        outputs = [Port("result", i) for i in range(len(graph.outputs))]
        if name != MEANING:
            operands = [Port("operand")] * len(graph.operands)
            outputs = [Port("result")] * len(graph.outputs)
        inputs = (*ports[:symbols], *operands, *ports[first:])
        runs: Runs = "once" if name == MEANING else "never"
        regions.append(Region(name, graph, inputs, tuple(outputs), runs))
    results = roles(("result", len(definition.outputs)))
    return Signature(args, results, tuple(regions))
