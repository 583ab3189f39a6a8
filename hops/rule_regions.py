"""Custom derivative rules as regions of a call.

When a call is traced, its rules are traced too. Their graphs become regions of the node
beside the one that computes its results, with the same symbols and captures. Tensors
that the rules close over are therefore inputs of the node, and a derivative can run the
rules wherever it is taken:

jvp        (operands, tangents of inputs `wrt`) -> (results, tangents at `tangents`)
forward    operands -> (results, residuals)
backward   (residuals, cotangents of results that are floats) -> cotangents of the
           inputs `wrt` at `cotangents`

Inputs are the operands and the captures. A rule is written for one batch element:
batching a node leaves its rules unchanged, and a derivative batches the rules it runs.

A rule may call the function that it belongs to. A graph cannot contain itself, so such
a call has no rules in a rule's graph, but a `depth`: it has the rules of the call whose
rule contains it, `depth` rules further out, and gets them when that rule is run. Where
such calls would never end, because each is of a new kind, a call has `late` rules: they
become graphs when a derivative is taken. Tensors that the enclosing rules read are then
captures of the call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from hopflow.autograd.api import Linear, Primals
from hopflow.autograd.jvp import differentiate
from hopflow.autograd.linearize import LinearTracer, UsesOperator, linear_of
from hopflow.autograd.pullback import PullbackRule, pulled_by
from hopflow.autograd.rules import is_differentiable
from hopflow.batching import operators as batching
from hopflow.batching.api import over_examples
from hopflow.batching.graphs import Batched, Lane, as_batched, bind_again
from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.errors import DerivativeError, GraphError
from hopflow.graph.core import Constant, Graph, Node, map_graphs, size_of
from hopflow.graph.interpreter import Bind, Sizes, interpret
from hopflow.graph.regions import Port, Region, Signature
from hopflow.graph.rewriting import clone, eliminate_dead_code
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.hops.base import RegionOperator, graphs_of, split_args
from hopflow.hops.rule_tracing import (
    GRAPHS,
    Failed,
    Pulled,
    Pushed,
    Rules,
    of_one,
    packed,
    traced_body,
    types_of,
    unpacked,
)
from hopflow.hops.subgraphs import Body, close_bodies, is_known_size
from hopflow.ops.convert import as_value
from hopflow.ops.elementwise import multiply
from hopflow.ops.opdef import OpDef
from hopflow.ops.reduce import sum as reduce_sum
from hopflow.pytree import structure
from hopflow.symbolic.size import Size, SymInt, substitute
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import mark, rollback
from hopflow.zeros import LinearMap, Tangent, Zero, instantiate, is_zero

_T = TypeVar("_T")


# --- the operators --------------------------------------------------------------------


class Ruled(RegionOperator):
    """An operator whose nodes may have rules. The first graph of a node computes its
    results.

    Params, besides those that describe the rules: `results`, the number of results that
    the rules return, and `examples`, a mask for each batch dimension, the innermost
    first, that tells which inputs are batched. All results are batched.
    """

    rule_graphs: ClassVar[tuple[str, ...]] = (*GRAPHS["jvp"], *GRAPHS["vjp"])

    def check_derived(self, params: Mapping[str, Any]) -> None:
        """Check that the derivatives of a node without a rule can be derived.

        Raises:
            DerivativeError: they do not follow from the graph of the node.
        """

    def not_given(
        self, rule: str, type_: TensorType, params: Mapping[str, Any]
    ) -> DerivativeError:
        """Return the error for a tangent of an input for which the rule gives no
        derivative."""
        raise NotImplementedError

    def has_rules(self, params: Mapping[str, Any], *rules: str) -> bool:
        """Return True if a node may have one of these rules or, with none named, any
        rule."""
        late = params["late"].rules if "late" in params else params.get("rules")
        offered = late.offered if late is not None else ()
        names = [r for r in GRAPHS if r in offered or GRAPHS[r][0] in params]
        return "depth" in params or any(r in names for r in rules or GRAPHS)

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        return self.has_rules(params)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        if not self.has_rules(params, "jvp"):
            self.check_derived(params)
            return super().jvp_rule(operands, tangents, params)
        call, dots = RuledCall.of(self, operands, tangents, params, "jvp")
        values, result_dots = call.push(dots)
        written, written_dots = _written(operands, tangents, params, None)
        return [*values, *written], [*result_dots, *written_dots]

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        is_pushed = linear_of(tangents).pushed
        rule = "jvp" if is_pushed or not self.has_rules(params, "vjp") else "vjp"
        if not self.has_rules(params, rule):
            self.check_derived(params)
            return super().linearize_rule(operands, tangents, params)
        call, dots = RuledCall.of(self, operands, tangents, params, rule)
        values, derivative = call.linearize(rule, dots)
        first, linear = len(operands) - len(dots), linear_of(tangents)
        written, written_dots = _written(operands, tangents, params, linear)
        return [*values, *written], lambda pushed: [
            *derivative(pushed[first:]),
            *written_dots,
        ]

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """Return the batched results of a node with rules, and which of them are
        batched."""
        mask = tuple(batched[len(graphs_of(params)[0].symbols) :])
        if not any(mask):  # the rules do not depend on the batch element
            return batching.each_example(self, size, batched, args, params)
        graph, *_ = graphs_of(params)
        kept_params = {  # without graphs of function arguments: `graph` inlines them
            key: value
            for key, value in params.items()
            if value is graph or key in self.rule_graphs or not graphs_of({key: value})
        }
        kept_params["examples"] = (*params.get("examples", ()), mask)
        results = batching.batch(
            self, size, batched, args, kept_params, all_results=True
        )
        return batching.with_shared(size, results, graph, batched, args)

    def with_rule_regions(
        self, node: Node, signature: Callable[[Node], Signature]
    ) -> Signature:
        """Return the signature of a node: the one without rules, and the regions of its
        rules. No operand of these regions is an operand of the node."""
        rules = {k: g for k, g in node.graphs.items() if k in self.rule_graphs}
        if rules:
            _check_regions(node.params, rules)
        params = {k: v for k, v in node.params.items() if k not in rules}
        plain = signature(Node(node.kind, node.op, node.args, params))
        inputs, graph = plain.regions[0].inputs, plain.regions[0].graph
        symbols, captures = inputs[: len(graph.symbols)], _last(inputs, graph.captures)
        if "examples" in node.params:  # a rule reads the captures of one batch element
            captures = tuple([Port(port.role) for port in captures])
        regions = [
            Region(
                name,
                graph,
                (
                    *_last(symbols, graph.symbols),
                    *[Port("operand")] * len(graph.operands),
                    *captures,
                ),
                (Port("result"),) * len(graph.outputs),
                "never",
            )
            for name, graph in rules.items()
        ]
        return replace(plain, regions=(*plain.regions, *regions))


def _check_regions(params: dict[str, Any], rules: Mapping[str, Graph]) -> None:
    """Check the number of operands and results of rules against the call.

    Raises:
        GraphError: a rule takes or returns another number than the call requires.
    """
    body, results, wrt = graphs_of(params)[0], params["results"], params["wrt"]
    inputs, operands = len(body.inputs) - len(body.symbols), len(body.operands)
    places, counts = {"wrt": inputs}, dict[str, tuple[int, int]]()
    if "jvp" in rules:
        places["tangents"] = results
        counts["jvp"] = operands + len(wrt), results + len(params["tangents"])
    if "forward" in rules or "backward" in rules:
        residuals = len(rules["forward"].outputs) - results
        floats = sum(map(is_differentiable, body.out_types[:results]))
        places["cotangents"] = len(wrt)
        counts["forward"] = operands, results + max(residuals, 0)
        counts["backward"] = residuals + floats, len(params["cotangents"])
    if not (
        0 <= results <= len(body.outputs)
        and all(_are_places(params[key], end) for key, end in places.items())
        and all(True in mask for mask in params.get("examples", ()))
        and all(
            count == (len(rules[name].operands), len(rules[name].outputs))
            and len(rules[name].captures) == len(body.captures)
            and len(rules[name].symbols) <= len(body.symbols)
            for name, count in counts.items()
        )
    ):
        raise GraphError(
            f"`{', '.join(rules)}` take and give as much as the call that they are "
            "rules of says"
        )


def _are_places(value: Any, end: int) -> bool:
    """Return True if `value` is a sorted tuple of distinct indices below `end`."""
    return bool(value == tuple(sorted({*value} & {*range(end)})))


def _written(
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """Return the results that the rules do not return, which the node writes to its
    inputs, and their tangents."""
    graph, count = graphs_of(params)[0], params["results"]
    if len(graph.outputs) == count:
        return [], []
    graph = clone(graph)
    graph.outputs = graph.outputs[count:]
    eliminate_dead_code(graph)
    return differentiate(graph, operands, tangents, linear)


# --- running rules --------------------------------------------------------------------


class RuledCall(NamedTuple):
    """A node with the values of its inputs, ready to run its rules; see `Ruled`."""

    op: Ruled
    params: dict[str, Any]
    symbols: Sequence[Operand]
    inputs: Sequence[Value]
    examples: Sequence[Sequence[bool]]

    @classmethod
    def of(
        cls,
        op: Ruled,
        args: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
        rule: str,
    ) -> tuple["RuledCall", Sequence[Tangent]]:
        """Return a call, and the tangents of its inputs.

        Raises:
            DerivativeError: the call has no such rule, or an input with a tangent is
                not among `wrt`.
        """
        late_captures: Sequence[Value] = ()
        if "late" in params:
            regions, late_captures = params["late"].regions(op, params)
            params = {**params, **regions}
        if isinstance(failed := params.get(GRAPHS[rule][0]), Failed):
            raise failed.error
        if "depth" in params:
            raise DerivativeError(
                f"{op.name}: a rule takes a derivative of what it is a rule of, which "
                "has no end."
            )
        first = len(graphs_of(params)[0].symbols)
        inputs, dots = [*map(as_value, args[first:]), *late_captures], tangents[first:]
        call = cls(op, params, args[:first], inputs, params.get("examples", ()))
        for k, tangent in enumerate(dots):
            if not is_zero(tangent) and k not in call.wrt:
                raise op.not_given(rule, inputs[k].type, params)
        return call, dots

    @property
    def rules(self) -> Rules | None:
        """Return the rules of a call on values, which have no graphs; None if they
        have."""
        rules: Rules | None = self.params.get("rules")
        return rules.at(self.symbols) if rules is not None else None

    @property
    def wrt(self) -> tuple[int, ...]:
        return self.rules.wrt if self.rules is not None else self.params["wrt"]

    @property
    def operands(self) -> Sequence[Value]:
        return self.inputs[: len(graphs_of(self.params)[0].operands)]

    @property
    def captures(self) -> Sequence[Value]:
        return self.inputs[len(self.operands) :]

    def run(self, name: str, flat: Sequence[Operand]) -> list[Value]:
        """Return the outputs of the graph of a rule for these operands."""
        graph: Graph = self.params[name]
        args = [*_last(self.symbols, graph.symbols), *flat, *self.captures]
        rebind = _unfolding(self, 0) if refers_outside(graph) else bind_again
        return list(map(as_value, interpret(graph, args, rebind)))

    # --- one batch element ---

    def push(self, tangents: Sequence[Tangent]) -> Pushed:
        if self.examples:
            return self.push_of_many(tangents)
        if self.rules is not None:
            return self.rules.push(self.inputs, tangents)
        dots = [instantiate(tangents[k]) for k in self.wrt]
        return _split(self.run("jvp", [*self.operands, *dots]), self.params["tangents"])

    def pull(self) -> Pulled:
        if self.examples:
            return self.pull_of_many()
        if self.rules is not None:
            return self.rules.pull(self.inputs)
        outputs, count = self.run("forward", self.operands), self.params["results"]
        sizes = list(map(_size_held, self.symbols))
        residuals = [*map(as_value, self.symbols), *outputs[count:], *self.captures]
        return outputs[:count], residuals, partial(self.pulled, sizes)

    def pulled(
        self,
        sizes: Sequence[Size | None],
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        _results: Sequence[TensorType],
    ) -> list[Tangent]:
        """Return the cotangents of inputs `wrt`, computed by the graph `backward`. With
        `sizes` bound this is a `PullbackRule`.

        Args:
            sizes: The values of the symbols; None where one is not known while tracing.
        """
        first, last = len(self.symbols), len(tensors) - len(self.captures)
        inputs = [*self.operands, *tensors[last:]]
        symbols = [
            given if n is None or not is_known_size(n) else _value_of(n)
            for n, given in zip(sizes, tensors[:first], strict=True)
        ]
        call = self._replace(symbols=symbols, inputs=inputs)
        results = call.run("backward", [*tensors[first:last], *map(instantiate, given)])
        return unpacked(arguments, self.params["cotangents"], results)

    # --- many batch elements ---

    def lanes(self) -> tuple[Size, list[Lane], list[bool]]:
        """Return the size of the outermost batch, the inputs with it, and a mask of the
        batched ones. Inputs that a pass has added are not batched."""
        mask = [*self.examples[-1], *[False] * len(self.inputs)][: len(self.inputs)]
        lanes = _lanes(self.inputs, mask)
        size = next(x.value.shape[0] for x in lanes if isinstance(x, Batched))
        return size, lanes, mask

    def of_one(self, flat: Sequence[Any]) -> "RuledCall":
        """Return the call for one element of the outermost batch, with these inputs."""
        inputs = list(map(as_value, flat))
        return self._replace(inputs=inputs, examples=self.examples[:-1])

    def push_of_many(self, tangents: Sequence[Tangent]) -> Pushed:
        (size, lanes, mask), places, nonzero = self.lanes(), list[int](), list[int]()
        dots = packed(tangents, places)

        def push_element(flat: Sequence[Any]) -> list[Value]:
            element = self.of_one(flat[: len(lanes)])
            element_dots = unpacked(
                types_of(element.inputs), places, flat[len(lanes) :]
            )
            values, results = element.push(element_dots)
            return [*values, *packed(results, nonzero)]

        pushed = _lanes(dots, [mask[k] for k in places])
        batch = over_examples(push_element, size, [*lanes, *pushed])
        return _split([as_batched(size, lane).value for lane in batch], nonzero)

    def pull_of_many(self) -> Pulled:
        size, lanes, mask = self.lanes()
        found = list[tuple[int, PullbackRule]]()

        def pull_element(flat: Sequence[Any]) -> list[Value]:
            values, residuals, pullback = self.of_one(flat).pull()
            found.append((len(values), pullback))
            return [*values, *residuals]

        batch = over_examples(pull_element, size, lanes)
        [(count, pullback)] = found
        values = [as_batched(size, lane).value for lane in batch[:count]]
        outputs = batch[count:]
        residuals = [
            x.value if isinstance(x, Batched) else as_value(x) for x in outputs
        ]
        depends = [isinstance(x, Batched) for x in outputs]

        def of_many(
            cotangents: Sequence[Tangent],
            tensors: Sequence[Value],
            arguments: Sequence[TensorType],
            results: Sequence[TensorType],
        ) -> list[Tangent]:
            """Return cotangents of the batch. An input that is not batched gets the sum
            of the cotangents over the batch."""
            size, single = results[0].shape[0], list(map(of_one, results))
            pairs = list(zip(arguments, [mask[k] for k in self.wrt], strict=True))
            element_types = [of_one(t) if b else t for t, b in pairs]
            floats = list(filter(is_differentiable, single))
            places, nonzero = list[int](), list[int]()
            cts = packed(cotangents, places)

            def run(flat: Sequence[Any]) -> list[Value]:
                found = unpacked(floats, places, flat[: len(cts)])
                return packed(
                    pullback(found, flat[len(cts) :], element_types, single), nonzero
                )

            def total(k: int, lane: Lane) -> Value:
                if pairs[k][1]:
                    return as_batched(size, lane).value
                if isinstance(lane, Batched):
                    return as_value(reduce_sum(lane.value, axis=0))
                return as_value(multiply(lane, size))

            lanes = [*map(Batched, cts), *_lanes(tensors, depends)]
            found = over_examples(run, size, lanes)
            return unpacked(arguments, nonzero, map(total, nonzero, found))

        return values, residuals, of_many

    # --- linear functions ---

    def linearize(
        self, rule: str, input_dots: Sequence[Tangent]
    ) -> tuple[Sequence[Value], LinearMap]:
        """Return the results, and the linear function from tangents of the inputs to
        tangents of the results.

        Args:
            input_dots: Tangents of a linear trace, at least one of them nonzero.
        """
        wrt = self.wrt
        if rule == "vjp":
            values, residuals, pullback = self.pull()
            arguments = [input_dots[k].type for k in wrt]
            derivative = pulled_by(pullback, arguments, types_of(values), residuals)
            return values, lambda tangents: derivative([tangents[k] for k in wrt])
        # On tensors of a linear trace the rule records operations on tangents, and runs
        # all other operations in the interpreter below.
        linear = linear_of(input_dots)
        marks, before = mark(linear), linear.refuses_operators
        linear.refuses_operators = True
        try:
            with using(linear):
                results, tangents = self.push(input_dots)
        except UsesOperator:
            rollback(marks)
            return self.linearize_at_zero(input_dots)
        finally:
            linear.refuses_operators = before
        return [as_value(linear.below(v)) for v in results], lambda _: tangents

    def linearize_at_zero(
        self, input_dots: Sequence[Tangent]
    ) -> tuple[Sequence[Value], LinearMap]:
        """Do the same for a rule that passes tangents to operators which compute other
        values too. The rule is linear in the tangents, so it equals its own derivative
        at zero."""
        places, nonzero, types = list[int](), list[int](), types_of(input_dots)
        zeros = [instantiate(Zero(x.type)) for x in packed(input_dots, places)]

        def rule(*dots: Value) -> tuple[list[Value], Sequence[Value]]:
            values, results = self.push(unpacked(types, places, dots))
            return packed(results, nonzero), values

        texts = [f"tangents[{k}]" for k in places]
        primals = Primals(zeros, structure(tuple(zeros)), texts)
        pushed = linear_of(input_dots).pushed
        linear = Linear(self.op.name, rule, primals, has_aux=True, pushed=pushed)
        values: list[Value] = linear.run.aux

        def derivative(tangents: Sequence[Tangent]) -> Sequence[Tangent]:
            result_dots = map(instantiate, linear.push([tangents[k] for k in places]))
            return unpacked(types_of(values), nonzero, result_dots)

        return values, derivative


def _size_held(value: Operand) -> Size | None:
    """Return the size that a symbol's value is, or None if it is not known while
    tracing."""
    if isinstance(value, Constant):
        return int(value.value)
    return (
        int(value) if isinstance(value, EagerTensor) else current().number_held(value)
    )


def _value_of(size: Size) -> Operand:
    return (
        current().value_of(size)
        if isinstance(size, SymInt)
        else Constant(size, SYMBOL_TYPE)
    )


def _split(outputs: Sequence[Value], places: Sequence[int]) -> Pushed:
    """Split outputs into results and their tangents, which are nonzero at `places`."""
    count = len(outputs) - len(places)
    values = outputs[:count]
    return values, unpacked(types_of(values), places, outputs[count:])


def _lanes(values: Sequence[Any], batched: Sequence[bool]) -> list[Lane]:
    return [Batched(v) if b else v for v, b in zip(values, batched, strict=True)]


def _last(row: Sequence[_T], like: Sequence[Any]) -> Sequence[_T]:
    """Return the last items of `row`, as many as `like` has: batching adds symbols in
    front."""
    return row[len(row) - len(like) :]


# --- recursive calls ------------------------------------------------------------------


def interpreter_of(operands: Sequence[Operand]) -> Interpreter | None:
    """Return the interpreter that runs a call. A call without operands of a linear
    trace runs below it."""
    interpreter: Interpreter | None = current()
    while isinstance(interpreter, LinearTracer) and not any(
        type(o) is TracedTensor and o.tracer is interpreter for o in operands
    ):
        interpreter = interpreter.parent
    return interpreter


def refers_outside(graph: Graph) -> bool:
    """Return True if a call in a graph has the rules of a call outside of it."""
    return _reach(graph, {}) >= 0


def _reach(graph: Graph, memo: dict[Graph, int]) -> int:
    """Return the number of rules between a graph and the outermost call whose rules a
    call in the graph has; -1 if there is none outside.

    Args:
        memo: The result for each graph visited, since nodes may share graphs.
    """
    if graph not in memo:
        nodes = [n for n in graph.nodes if isinstance(n.op, RegionOperator)]
        reaches = [
            max(n.params.get("depth", -1), _reach_within(n, memo)) for n in nodes
        ]
        memo[graph] = max(reaches, default=-1)
    return memo[graph]


def _reach_within(node: Node, memo: dict[Graph, int]) -> int:
    """Return the largest reach of the graphs of a node."""
    reaches = [
        _reach(graph, memo) - (name in node.op.rule_graphs)
        for name, graph in node.graphs.items()
    ]
    return max(reaches, default=-1)


def _unfolding(call: RuledCall, level: int) -> Bind:
    """Return a function that binds the nodes of a rule where its call stands, and gives
    its rules to the recursive calls at this level of nesting."""

    def rebind(
        op: Any, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        if type(op) is OpDef or not isinstance(op, RegionOperator):
            return bind_again(op, operands, params)
        depth = params.get("depth", -1)
        if depth > level:  # the rule no longer encloses the call
            params = {**params, "depth": depth - 1}
        refers = _reach_within(Node("call_function", op, (), params), {}) >= level
        with using(interpreter_of(operands)):
            if current().is_eager or not (depth == level or refers):
                return bind_again(op, operands, params)
            return _retraced(
                call, op, operands, params, level, is_recursive=depth == level
            )

    return rebind


def _retraced(
    call: RuledCall,
    op: RegionOperator,
    operands: Sequence[Operand],
    params: dict[str, Any],
    level: int,
    *,
    is_recursive: bool,
) -> Sequence[Value]:
    """Return the results of a node that has the rules of `call`, or contains calls that
    do. Its graphs are traced again, and close over the inputs of the rules."""
    parts = split_args(op, operands, params)
    graphs: dict[str, tuple[Graph, Sequence[Any], Sequence[Value] | None]] = {
        name: (graph, parts.symbols, None)
        for name, graph in Node("call_function", op, (), params).graphs.items()
    }
    rule_params: dict[str, Any] = {}
    if is_recursive:
        params = {k: v for k, v in params.items() if k != "depth"}
        names = (*call.op.rule_graphs, "wrt", "tangents", "cotangents")
        rule_params = {key: call.params[key] for key in names if key in call.params}
        for name, graph in rule_params.items():
            if isinstance(graph, Graph):
                graphs[name] = graph, call.symbols, call.captures
    capture_types = types_of(map(as_value, parts.captures))

    def body(name: str) -> Body:
        graph, symbols, captures = graphs[name]
        symbols, sizes = _last(symbols, graph.symbols), Sizes()
        for var, value in zip(graph.symbols, symbols, strict=True):
            assert var.node.symbol is not None
            sizes.offer(var.node.symbol, value)
            sizes.size(size_of(var.node.symbol))
        operands = [
            var.type.with_shape([substitute(n, sizes.known) for n in var.type.shape])
            for var in graph.operands
        ]
        inner = _unfolding(call, level + (name in op.rule_graphs))
        rebind = inner if captures is None else bind_again

        def run(flat: Sequence[Any]) -> list[Value]:
            inputs = flat[len(operands) :] if captures is None else captures
            args = [*symbols, *flat[: len(operands)], *inputs]
            return list(map(as_value, interpret(graph, args, rebind)))

        # Its captures are traced as operands, so that their order stays.
        return traced_body(op, name, run, [*operands, *capture_types])

    bodies = list(map(body, graphs))
    closed = close_bodies(bodies)
    for graph in closed.graphs:
        first = len(graph.operands) - len(parts.captures)
        for var in graph.operands[first:]:
            var.node.section = "capture"
    traced = dict(zip(graphs, closed.graphs, strict=True))
    new = iter(closed.graphs)
    params = map_graphs(params, lambda _: next(new))
    args = (*parts.lead, *closed.symbols, *parts.operands, *parts.captures)
    rules = {key: traced.get(key, value) for key, value in rule_params.items()}
    return bind(op, [*args, *closed.captures], {**params, **rules})
