"""`HigherOrderOp`: an operator of a user's, which needs `debug` and no other rule.

A node of such an operator is `op(symbols; operands; captures; meaning, f, ..., n)`:

meaning     Graph, (*symbols, *operands, *captures) -> results: `debug`, traced
f           of each argument that is a function the graph, or one for each kind of call:
            (*symbols, *what it is called with, *captures) -> its results
n           of each argument that is no data the value

Of a class with rules of its own, their graphs are among the other params; see
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
    Kind,
    KindOfCall,
    Leaf,
    OwnRules,
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
    """One use of such an operator: its arguments are told apart when it is traced."""

    given: "Given | None" = None


class HigherOrderOp(Ruled):
    """An operator with functions among its arguments, of which a user defines `debug`.

    A subclass needs its reference in plain Python, `debug`, and no more:

        class Twice(hf.HigherOrderOp):
            def debug(self, f, x):
                return f(f(x))

        twice = Twice()

    It is called as `debug` is. Functions, and pytrees of tensors and numbers, are
    operands; keyword-only parameters are options, whose numbers are part of a call's
    kind. All other rules are derived from what `debug` does when it is traced, and the
    operator stays one node until one of them is asked for. See
    docs/add_an_operator.md, also for rules of one's own: `jvp`, `vjp`, `batch`,
    `infer`, `lower`.
    """

    name = "operator"

    # --- the entry ---

    def prepare(self, *args: Any, **kwargs: Any) -> UserCall:
        """Check the user's arguments and flatten them.

        Raises:
            HopflowError: an argument is wrong; before anything runs.
        """
        found = given(self.name, self.debug, args, kwargs)
        return UserCall(self.name, [], found.operands, {}, given=found)

    def trace(self, call: Any) -> Any:
        return trace(self, call.given)

    def run_debug(self, call: Any) -> Any:
        return run_debug(self.name, self.debug, call.given)

    @property
    def declared(self) -> Callable[..., Any]:
        is_own = type(self).prepare is not HigherOrderOp.prepare
        return self.prepare if is_own else self.debug

    # --- rules that a class may define ---

    # `Any`, so that each operator may name the args and params that it has.

    def debug(self, *args: Any, **params: Any) -> Any:
        """The reference in plain Python: a function of what the user gives."""
        raise OperatorError(
            f"{self.name}: it has no meaning. Define `debug(self, ...)` in "
            f"`{type(self).__name__}`, as plain Python that calls its functions."
        )

    def jvp(self, *args: Any, **options: Any) -> Any:
        """The result, as `debug` gives it, and its tangent.

        Args:
            args: The arguments by position, and as many tangents of their structure.
        """
        primals, tangents = args
        return api.jvp(lambda *own: self(*own, **options), primals, tangents)

    def vjp(self, *args: Any, **options: Any) -> Any:
        """The result, as `debug` gives it, and a pullback."""
        return api.vjp(lambda *own: self(*own, **options), *args)

    def batch(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """The results for `size` examples, and which have them; see `batch_rule`."""
        if self.has_rules(params):  # which are for one example
            return super().batch_rule(size, batched, args, params)
        return batch(meaning_of(params), size, batched, args)

    def infer(self, *types: Any, **params: Any) -> tuple[TensorType, ...]:
        return meaning_of(params).out_types

    def lower(self, *args: Any, **params: Any) -> Lowered:
        _types, *operands = args
        return Inline(meaning_of(params), tuple(operands))

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
        """The rules that the class has of its own and calls as `debug` is called."""
        own = type(self)
        rules = ("jvp", "vjp")
        return tuple(r for r in rules if getattr(own, r) != getattr(HigherOrderOp, r))

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
        found = self.infer(*types, **params)
        check_inferred(self, meaning_of(params), found)
        return found

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        found = evaluate(meaning_of(params), args)
        return tuple(map(as_value, found))


@dataclass(slots=True)
class Given:
    """The arguments of a call.

    leaves     of all arguments, in order
    spec       the structure of (args, kwargs)
    operands   the leaves that are data, numbers as weak constants
    """

    leaves: list[Leaf]
    spec: Spec
    operands: list[Operand]

    @property
    def functions(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == "function"]

    @property
    def names(self) -> list[str]:
        """Names for the inputs that stand for the operands."""
        return [leaf.key for leaf in self.leaves if leaf.kind == "operand"]

    def meaning(self, debug: Callable[..., Any], functions: Sequence[Any]) -> Function:
        """`debug` of flat operands, and these functions."""

        def call(flat: Sequence[Any]) -> Any:
            args, kwargs = filled(self.leaves, self.spec, flat, functions)
            return debug(*args, **kwargs)

        return Function("debug", debug, self.names, call)


def given(name: str, debug: Callable[..., Any], args: Any, kwargs: Any) -> Given:
    """The arguments of a call of an operator, told apart.

    Data are tensors and arrays, and numbers but those given to keyword-only parameters.

    Raises:
        ArgumentTypeError: `debug` does not take such arguments.
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
    return Given(leaves, pytree.structure((bound.args, bound.kwargs)), operands)


def _named_leaves(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> Iterator[tuple[str, Any, bool]]:
    """The leaves of (args, kwargs), with how a user would write each, and whether it
    was given by name."""
    roots: list[tuple[str, Any, bool]] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            given = bound.arguments[name]
            roots += [(f"{name}[{i}]", x, False) for i, x in enumerate(given)]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, _EITHER):
            roots.append((name, bound.arguments[name], False))
    # A pytree has the values of a dict in the order of their names.
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


# --- the functions among the arguments ------------------------------------------------


@dataclass(eq=False, slots=True)
class Variant:
    """A function, traced for one kind of call; `body` is open.

    spec      the structure of (args, kwargs)
    shared    of each operand the tensor of outside that it is one with, or None
    results   how many outputs the caller gets; the rest is what is written
    """

    key: Any
    spec: Spec
    shared: Sequence[Operand | None]
    body: Body
    results: int
    written: Written

    @property
    def kind(self) -> KindOfCall:
        """As rules know it; `body` is closed."""
        tracer, graph = self.body.tracer, self.body.tracer.graph
        inputs = [*graph.operands, *graph.captures]
        places = {var: i for i, var in enumerate(inputs)}
        targets = [tracer.captures[k].input for k in self.written.captures]
        targets += [tracer.operands[i].source for i in self.written.operands]
        return KindOfCall(
            self.spec, self.body.spec, tuple([places.get(var) for var in targets])
        )

    def run(self, operands: Sequence[Operand]) -> Any:
        """What the function returns, its operations made anew where it is called."""
        tracer, graph = self.body.tracer, self.body.tracer.graph
        graph.outputs = tuple(map(tracer.arg, self.body.outputs))
        origins = {c.input: c.origin for c in tracer.captures.values()}
        own = iter(operands)
        args = [
            origins[var]
            if var in origins
            else next(own)
            if var.node.symbol is None
            else current().value_of(size_of(var.node.symbol))
            for var in graph.inputs
        ]
        found = [as_value(r) for r in interpret(graph, args, bind_again)]
        targets: list[Operand] = [
            tracer.captures[k].origin for k in self.written.captures
        ]
        targets += [operands[i] for i in self.written.operands]
        commit(targets, found[self.results :])
        return pytree.unflatten(self.body.spec, found[: self.results])


@dataclass(eq=False, slots=True)
class Subfunction:
    """An argument that is a function, as `debug` gets it.

    outer      where the operator is called: None in debug mode
    variants   what it was traced to
    """

    op: str
    leaf: Leaf
    outer: Interpreter | None
    variants: list[Variant] = field(default_factory=list)
    _known: list[Variant] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tree = (args, kwargs)
        path, fn = self.leaf.path, self.leaf.value
        operands, spec = flatten_operands(self.op, f"{path}: args", tree)

        def call(flat: Sequence[Any]) -> Any:
            own_args, own_kwargs = pytree.unflatten(spec, flat)
            return fn(*own_args, **own_kwargs)

        names = input_names(
            fn, [s for part in spec.children() for s in part.children()]
        )
        function = Function(path, fn, names, call)
        if self.outer is None:
            found = function([as_value(o) for o in operands])
            outputs, out_spec = flatten_results(self.op, function, found)
            return pytree.unflatten(out_spec, map(as_value, outputs))
        return self.variant(function, operands, spec).run(operands)

    def variant(
        self, function: Function, operands: Sequence[Operand], spec: Spec
    ) -> Variant:
        found = self._traced(function, operands, spec, [None] * len(operands))
        tracer = found.body.tracer
        if tracer.has_writes:
            # What it reads as a tensor of outside too is one with that.
            outside = [_outer(o, self.outer) for o in operands]
            shared = [o if id(o) in tracer.captures else None for o in outside]
            found = self._traced(function, operands, spec, shared)
        if found not in self.variants:
            self._remember("variants", [*self.variants, found])
        return found

    def _traced(
        self,
        function: Function,
        operands: Sequence[Operand],
        spec: Spec,
        shared: Sequence[Operand | None],
    ) -> Variant:
        types = [o.type for o in operands]
        key = [type_key(t, terms_of) for t in types]
        for known in self._known:
            same = map(is_, known.shared, shared)
            if known.key == key and known.spec == spec and all(same):
                return known
        path = f"{self.op}/{self.leaf.key}"
        with using(self.outer):
            sizes = unknown_sizes(types)
            given: Any = None
            if any(o is not None for o in shared):
                pairs = zip(shared, types, strict=True)
                given = [Unknown(t) if o is None else o for o, t in pairs]
            body = trace_body(self.op, path, function, types, given, sizes=sizes)
        results = len(body.outputs)
        made = Variant(key, spec, shared, body, results, functionalize([body]))
        self._remember("_known", [*self._known, made])
        return made

    def _remember(self, name: str, variants: list[Variant]) -> None:
        """Set a list of variants until the trace where the operator is called is rolled
        back, as a loop does to trace its body again: what it captures is removed.
        """
        if isinstance(self.outer, Tracer):
            self.outer.change(self, name, variants)
        else:
            setattr(self, name, variants)


def _outer(operand: Operand, outer: Interpreter | None) -> Operand | None:
    """The tensor of outside that an operand is, if it is one as a whole."""
    found: Any = operand
    while isinstance(found, TracedTensor) and found.tracer is not outer:
        found = found.origin
    return found if isinstance(found, Value) else None


# --- tracing --------------------------------------------------------------------------


def functionalize(bodies: Sequence[Body]) -> Written:
    """What bodies write is a further result of each."""
    written = written_inputs(bodies)
    for body in bodies:
        tracer = body.tracer
        tensors = [tracer.captures[k].tensor for k in written.captures]
        tensors += [tracer.operands[i] for i in written.operands]
        body.outputs += [type(t)(tracer, tracer.read(t)) for t in tensors]
    return written


def run_debug(name: str, debug: Callable[..., Any], call: Given) -> Any:
    """The results of `debug` as it is."""
    functions = [Subfunction(name, f, None) for f in call.functions]
    function = call.meaning(debug, functions)
    tree = function([as_value(o) for o in call.operands])
    outputs, spec = flatten_results(name, function, tree)
    return pytree.unflatten(spec, map(own_copy, outputs))


def trace(op: Any, call: Given) -> Any:
    """Trace `debug`, bind a node, and give the results their structure."""
    outer = current()
    functions = [Subfunction(op.name, f, outer) for f in call.functions]
    body = trace_body(
        op.name,
        f"{op.name}/debug",
        call.meaning(op.debug, functions),
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
        given = call.leaves, call.spec, kinds, body.spec
        graphs = map_graphs(params, clone)  # a node may edit its own
        rules = OwnRules(op, *given, graphs, closed.symbols, types)
        closed, made = with_rules(op, rules, closed, call.operands)
        params |= {"results": results, **made}
    args = [*closed.symbols, *call.operands, *closed.captures]
    found = bind(op, args, params)
    commit(targets, found[results:])
    return pytree.unflatten(body.spec, found[:results])


def _capture_operands(bodies: Sequence[Body]) -> None:
    """Have captures too for operands that other bodies close over: the graphs of those
    have no other input for them."""
    for other in bodies:
        for key, capture in other.tracer.captures.items():
            for tracer in (body.tracer for body in bodies):
                if key in tracer.references and key not in tracer.captures:
                    name = capture.input.node.name
                    var = tracer.graph.add_input(capture.input.type, name, "capture")
                    made = tracer.lifted(capture.origin, var, capture.memory)
                    tracer.captures[key] = made


def _params(
    call: Given, functions: Sequence[Subfunction], graphs: Sequence[Graph]
) -> dict[str, Any]:
    params: dict[str, Any] = {MEANING: graphs[0]}
    rest = iter(graphs[1:])
    for function in functions:
        own = tuple([next(rest) for _ in function.variants])
        if own:
            params[function.leaf.key] = own[0] if len(own) == 1 else own
    for leaf in call.leaves:
        if leaf.kind == "static":
            params[leaf.key] = leaf.value
    return params


# --- rules ----------------------------------------------------------------------------


def meaning_of(params: Mapping[str, Any]) -> Graph:
    """What a node of derived rules means.

    Raises:
        OperatorError: it is one of an operator that has other graphs, and no rule.
    """
    found = params.get(MEANING)
    if not isinstance(found, Graph):
        raise OperatorError(
            "an operator that is traced in its own way must name all of its rules: "
            f"there is no graph `{MEANING}` among {', '.join(params)}."
        )
    return found


def check_inferred(op: Any, meaning: Graph, found: Sequence[TensorType]) -> None:
    """
    Raises:
        OperatorError: the class's own `infer` gives other types than `debug` has.
    """
    if texts := differing(meaning.out_types, found):
        wanted, got = texts
        raise OperatorError(
            f"{op.name}: `{type(op).__name__}.infer` must give the types of what "
            f"`debug` returns and writes, {wanted}, and gives {got}. Leave it out: it "
            "follows from `debug`."
        )


def batch(
    meaning: Graph, size: Size, batched: Sequence[bool], args: Sequence[Operand]
) -> tuple[list[Value], list[bool]]:
    """The results for many examples: those of what the node means."""
    found = evaluate(meaning, size, lanes_of(batched, args))
    values = [r.value if isinstance(r, Batched) else as_value(r) for r in found]
    return values, [isinstance(r, Batched) for r in found]


def signature(node: Any) -> Signature:
    """The roles of what a node has: its functions run within its meaning alone."""
    meaning = meaning_of(node.params)
    symbols, captures = len(meaning.symbols), len(meaning.captures)
    args = roles(("symbol", symbols), ("operand", len(node.args) - symbols))
    ports = [Port(role, i) for i, role in enumerate(args)]
    first = len(args) - captures
    regions = []
    for name, graph in node.graphs.items():
        own = ports[symbols:first]
        outputs = [Port("result", i) for i in range(len(graph.outputs))]
        if name != MEANING:
            own = [Port("operand")] * len(graph.operands)
            outputs = [Port("result")] * len(graph.outputs)
        inputs = (*ports[:symbols], *own, *ports[first:])
        runs: Runs = "once" if name == MEANING else "never"
        regions.append(Region(name, graph, inputs, tuple(outputs), runs))
    results = roles(("result", len(meaning.outputs)))
    return Signature(args, results, tuple(regions))
