"""Rules that users bring for derivatives, as regions of a call.

Where a call is traced, its rules are traced too, into graphs of the node beside the one
that runs, with the same symbols and captures. So what they read of outside is passed to
the node, and a derivative runs them wherever it is asked for:

jvp        (operands, tangents of inputs `wrt`) -> (results, tangents at `tangents`)
forward    operands -> (results, residuals)
backward   (residuals, cotangents of results that are floats) -> cotangents of the
           inputs `wrt` at `cotangents`

Inputs are the operands and the captures. A rule is for one example: a batch leaves it,
and a derivative batches what it runs of it.

Rules call what they are rules of. A graph cannot hold itself, so such a call has no
rules in a rule's graph, but a `depth`: its rules are those of the call whose rule it
stands in, so many rules further out, and it gets them when that rule is run. Where
there is no end of other kinds of calls, one has its rules `late`: they become graphs
where a derivative is asked for, with what the rules around have read as captures.
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
    """An operator whose nodes may have rules; the first of their graphs is what they
    compute.

    Their params, besides those that the rules are described with: `results`, how many
    the rules give, and `examples`, of each batch, the innermost first, which inputs
    have examples: all results have.
    """

    rule_graphs: ClassVar[tuple[str, ...]] = (*GRAPHS["jvp"], *GRAPHS["vjp"])

    def check_derived(self, params: Mapping[str, Any]) -> None:
        """
        Raises:
            DerivativeError: derivatives that no rule gives do not follow from what a
                node computes.
        """

    def not_given(
        self, rule: str, type_: TensorType, params: Mapping[str, Any]
    ) -> DerivativeError:
        """The error for a tangent of an input that the rule gives no derivative in."""
        raise NotImplementedError

    def has_rules(self, params: Mapping[str, Any], *rules: str) -> bool:
        """Whether a node has one of these rules, as far as is known; without any,
        whether it has rules."""
        late = params["late"].rules if "late" in params else params.get("rules")
        offered = late.offered if late is not None else ()
        own = [r for r in GRAPHS if r in offered or GRAPHS[r][0] in params]
        return "depth" in params or any(r in own for r in rules or GRAPHS)

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
        call, given = RuledCall.of(self, operands, tangents, params, "jvp")
        values, found = call.push(given)
        written, dots = _written(operands, tangents, params, None)
        return [*values, *written], [*found, *dots]

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
        call, given = RuledCall.of(self, operands, tangents, params, rule)
        values, derivative = call.linearize(rule, given)
        first, linear = len(operands) - len(given), linear_of(tangents)
        written, dots = _written(operands, tangents, params, linear)
        return [*values, *written], lambda found: [*derivative(found[first:]), *dots]

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """The results of a node with rules for many examples."""
        mask = tuple(batched[len(graphs_of(params)[0].symbols) :])
        if not any(mask):  # rules do not depend on the example
            return batching.each_example(self, size, batched, args, params)
        meaning, *_ = graphs_of(params)
        own = {  # without the functions that it is given: they are in its meaning
            key: value
            for key, value in params.items()
            if value is meaning
            or key in self.rule_graphs
            or not graphs_of({key: value})
        }
        own["examples"] = (*params.get("examples", ()), mask)
        found = batching.batch(self, size, batched, args, own, all_results=True)
        return batching.with_shared(size, found, meaning, batched, args)

    def with_rule_regions(
        self, node: Node, signature: Callable[[Node], Signature]
    ) -> Signature:
        """The signature of a node: that of one without rules, and their regions, whose
        operands are none of the node's."""
        rules = {k: g for k, g in node.graphs.items() if k in self.rule_graphs}
        if rules:
            _check_regions(node.params, rules)
        own = {k: v for k, v in node.params.items() if k not in rules}
        found = signature(Node(node.kind, node.op, node.args, own))
        inputs, graph = found.regions[0].inputs, found.regions[0].graph
        symbols, captures = inputs[: len(graph.symbols)], _last(inputs, graph.captures)
        if "examples" in node.params:  # a rule gets those of one example
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
        return replace(found, regions=(*found.regions, *regions))


def _check_regions(params: dict[str, Any], rules: Mapping[str, Graph]) -> None:
    """
    Raises:
        GraphError: rules are none of the call, by how much they take and give.
    """
    body, results, wrt = graphs_of(params)[0], params["results"], params["wrt"]
    inputs, operands = len(body.inputs) - len(body.symbols), len(body.operands)
    places, counts = {"wrt": inputs}, dict[str, tuple[int, int]]()
    if "jvp" in rules:
        places["tangents"] = results
        counts["jvp"] = operands + len(wrt), results + len(params["tangents"])
    if "forward" in rules or "backward" in rules:
        kept = len(rules["forward"].outputs) - results
        floats = sum(map(is_differentiable, body.out_types[:results]))
        places["cotangents"] = len(wrt)
        counts["forward"] = operands, results + max(kept, 0)
        counts["backward"] = kept + floats, len(params["cotangents"])
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
    """Whether it is a tuple of places before `end`, in order."""
    return bool(value == tuple(sorted({*value} & {*range(end)})))


def _written(
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """The results that rules do not give, what a node writes, and their tangents."""
    graph, count = graphs_of(params)[0], params["results"]
    if len(graph.outputs) == count:
        return [], []
    graph = clone(graph)
    graph.outputs = graph.outputs[count:]
    eliminate_dead_code(graph)
    return differentiate(graph, operands, tangents, linear)


# --- running rules --------------------------------------------------------------------


class RuledCall(NamedTuple):
    """A node at values, where its rules are run; see `Ruled`."""

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
        """A call, and the tangents of its inputs.

        Raises:
            DerivativeError: there is no such rule, or not for all of the tangents.
        """
        held: Sequence[Value] = ()
        if "late" in params:
            regions, held = params["late"].regions(op, params)
            params = {**params, **regions}
        if isinstance(failed := params.get(GRAPHS[rule][0]), Failed):
            raise failed.error
        if "depth" in params:
            raise DerivativeError(
                f"{op.name}: a rule takes a derivative of what it is a rule of, which "
                "has no end."
            )
        first = len(graphs_of(params)[0].symbols)
        inputs, given = [*map(as_value, args[first:]), *held], tangents[first:]
        call = cls(op, params, args[:first], inputs, params.get("examples", ()))
        for k, tangent in enumerate(given):
            if not is_zero(tangent) and k not in call.wrt:
                raise op.not_given(rule, inputs[k].type, params)
        return call, given

    @property
    def rules(self) -> Rules | None:
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
        """What a rule's graph gives for these operands of it."""
        graph: Graph = self.params[name]
        args = [*_last(self.symbols, graph.symbols), *flat, *self.captures]
        rebind = _unfolding(self, 0) if refers_outside(graph) else bind_again
        return list(map(as_value, interpret(graph, args, rebind)))

    # --- one example ---

    def push(self, given: Sequence[Tangent]) -> Pushed:
        if self.examples:
            return self.push_of_many(given)
        if self.rules is not None:
            return self.rules.push(self.inputs, given)
        dots = [instantiate(given[k]) for k in self.wrt]
        return _split(self.run("jvp", [*self.operands, *dots]), self.params["tangents"])

    def pull(self) -> Pulled:
        if self.examples:
            return self.pull_of_many()
        if self.rules is not None:
            return self.rules.pull(self.inputs)
        found, count = self.run("forward", self.operands), self.params["results"]
        sizes = list(map(_size_held, self.symbols))
        residuals = [*map(as_value, self.symbols), *found[count:], *self.captures]
        return found[:count], residuals, partial(self.pulled, sizes)

    def pulled(
        self,
        sizes: Sequence[Size | None],
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        _results: Sequence[TensorType],
    ) -> list[Tangent]:
        """The cotangents of inputs `wrt`, by the graph `backward`: a `PullbackRule`.

        Args:
            sizes: What the symbols have been, where that is known.
        """
        first, last = len(self.symbols), len(tensors) - len(self.captures)
        inputs = [*self.operands, *tensors[last:]]
        symbols = [
            given if n is None or not is_known_size(n) else _value_of(n)
            for n, given in zip(sizes, tensors[:first], strict=True)
        ]
        call = self._replace(symbols=symbols, inputs=inputs)
        found = call.run("backward", [*tensors[first:last], *map(instantiate, given)])
        return unpacked(arguments, self.params["cotangents"], found)

    # --- many examples ---

    def lanes(self) -> tuple[Size, list[Lane], list[bool]]:
        """Of the outermost batch how many examples there are, the inputs for them, and
        which of these are batched; what passes have added is not."""
        mask = [*self.examples[-1], *[False] * len(self.inputs)][: len(self.inputs)]
        lanes = _lanes(self.inputs, mask)
        size = next(x.value.shape[0] for x in lanes if isinstance(x, Batched))
        return size, lanes, mask

    def of_one(self, flat: Sequence[Any]) -> "RuledCall":
        """With these inputs, of one example of the outermost batch."""
        inputs = list(map(as_value, flat))
        return self._replace(inputs=inputs, examples=self.examples[:-1])

    def push_of_many(self, given: Sequence[Tangent]) -> Pushed:
        (size, lanes, mask), places, nonzero = self.lanes(), list[int](), list[int]()
        dots = packed(given, places)

        def one(flat: Sequence[Any]) -> list[Value]:
            own = self.of_one(flat[: len(lanes)])
            tangents = unpacked(types_of(own.inputs), places, flat[len(lanes) :])
            values, results = own.push(tangents)
            return [*values, *packed(results, nonzero)]

        pushed = _lanes(dots, [mask[k] for k in places])
        batch = over_examples(one, size, [*lanes, *pushed])
        return _split([as_batched(size, lane).value for lane in batch], nonzero)

    def pull_of_many(self) -> Pulled:
        size, lanes, mask = self.lanes()
        found = list[tuple[int, PullbackRule]]()

        def one(flat: Sequence[Any]) -> list[Value]:
            values, residuals, pullback = self.of_one(flat).pull()
            found.append((len(values), pullback))
            return [*values, *residuals]

        batch = over_examples(one, size, lanes)
        [(count, pullback)] = found
        values = [as_batched(size, lane).value for lane in batch[:count]]
        rest = batch[count:]
        residuals = [x.value if isinstance(x, Batched) else as_value(x) for x in rest]
        depends = [isinstance(x, Batched) for x in rest]

        def of_many(
            given: Sequence[Tangent],
            tensors: Sequence[Value],
            arguments: Sequence[TensorType],
            results: Sequence[TensorType],
        ) -> list[Tangent]:
            """What is the same for all examples gets the sum of their cotangents."""
            size, single = results[0].shape[0], list(map(of_one, results))
            pairs = list(zip(arguments, [mask[k] for k in self.wrt], strict=True))
            own = [of_one(t) if b else t for t, b in pairs]
            floats = list(filter(is_differentiable, single))
            places, nonzero = list[int](), list[int]()
            cts = packed(given, places)

            def run(flat: Sequence[Any]) -> list[Value]:
                found = unpacked(floats, places, flat[: len(cts)])
                return packed(pullback(found, flat[len(cts) :], own, single), nonzero)

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
        self, rule: str, given: Sequence[Tangent]
    ) -> tuple[Sequence[Value], LinearMap]:
        """The results, and a linear function from tangents of the inputs to theirs.

        Args:
            given: Tangents of a linear trace; not all are zero.
        """
        wrt = self.wrt
        if rule == "vjp":
            values, residuals, pullback = self.pull()
            arguments = [given[k].type for k in wrt]
            derivative = pulled_by(pullback, arguments, types_of(values), residuals)
            return values, lambda tangents: derivative([tangents[k] for k in wrt])
        # Among tensors of a linear trace the rule records what it does with tangents,
        # and computes the rest below.
        linear = linear_of(given)
        marks, before = mark(linear), linear.refuses_operators
        linear.refuses_operators = True
        try:
            with using(linear):
                found, tangents = self.push(given)
        except UsesOperator:
            rollback(marks)
            return self.linearize_at_zero(given)
        finally:
            linear.refuses_operators = before
        return [as_value(linear.below(v)) for v in found], lambda _: tangents

    def linearize_at_zero(
        self, given: Sequence[Tangent]
    ) -> tuple[Sequence[Value], LinearMap]:
        """The same for a rule that gives tangents to operators, which compute other
        things beside: it is linear in them, and so its own derivative where they are
        zero."""
        places, found, types = list[int](), list[int](), types_of(given)
        zeros = [instantiate(Zero(x.type)) for x in packed(given, places)]

        def rule(*own: Value) -> tuple[list[Value], Sequence[Value]]:
            values, results = self.push(unpacked(types, places, own))
            return packed(results, found), values

        texts = [f"tangents[{k}]" for k in places]
        primals = Primals(zeros, structure(tuple(zeros)), texts)
        pushed = linear_of(given).pushed
        linear = Linear(self.op.name, rule, primals, has_aux=True, pushed=pushed)
        values: list[Value] = linear.run.aux

        def derivative(tangents: Sequence[Tangent]) -> Sequence[Tangent]:
            made = map(instantiate, linear.push([tangents[k] for k in places]))
            return unpacked(types_of(values), found, made)

        return values, derivative


def _size_held(value: Operand) -> Size | None:
    """The size that the value of a symbol is, where that is known."""
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


def _split(found: Sequence[Value], places: Sequence[int]) -> Pushed:
    """Results, and those of their tangents that are at `places`."""
    count = len(found) - len(places)
    values = found[:count]
    return values, unpacked(types_of(values), places, found[count:])


def _lanes(values: Sequence[Any], batched: Sequence[bool]) -> list[Lane]:
    return [Batched(v) if b else v for v, b in zip(values, batched, strict=True)]


def _last(row: Sequence[_T], like: Sequence[Any]) -> Sequence[_T]:
    """The last of a row, as many as of another: a batch adds symbols in front."""
    return row[len(row) - len(like) :]


# --- calls in their own rules ---------------------------------------------------------


def interpreter_of(operands: Sequence[Operand]) -> Interpreter | None:
    """Where a call runs: what no tangent takes part in is not linear."""
    here: Interpreter | None = current()
    while isinstance(here, LinearTracer) and not any(
        type(o) is TracedTensor and o.tracer is here for o in operands
    ):
        here = here.parent
    return here


def refers_outside(graph: Graph) -> bool:
    """Whether a call in a graph has the rules of one outside of it."""
    return _reach(graph, {}) >= 0


def _reach(graph: Graph, known: dict[Graph, int]) -> int:
    """How many rules are between a graph and the outermost call whose rules one in it
    has; -1: there is none outside.

    Args:
        known: That of each graph that was asked: those that nodes share once.
    """
    if graph not in known:
        nodes = [n for n in graph.nodes if isinstance(n.op, RegionOperator)]
        reaches = [
            max(n.params.get("depth", -1), _reach_within(n, known)) for n in nodes
        ]
        known[graph] = max(reaches, default=-1)
    return known[graph]


def _reach_within(node: Node, known: dict[Graph, int]) -> int:
    """The same of the graphs of a node."""
    reaches = [
        _reach(graph, known) - (name in node.op.rule_graphs)
        for name, graph in node.graphs.items()
    ]
    return max(reaches, default=-1)


def _unfolding(call: RuledCall, level: int) -> Bind:
    """Binds the nodes of a rule, at this level within it, where its call stands: calls
    that have its rules get them."""

    def rebind(
        op: Any, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        if type(op) is OpDef or not isinstance(op, RegionOperator):
            return bind_again(op, operands, params)
        depth = params.get("depth", -1)
        if depth > level:  # the rule is not around it any more
            params = {**params, "depth": depth - 1}
        refers = _reach_within(Node("call_function", op, (), params), {}) >= level
        with using(interpreter_of(operands)):
            if current().is_eager or not (depth == level or refers):
                return bind_again(op, operands, params)
            return _retraced(call, op, operands, params, level, own=depth == level)

    return rebind


def _retraced(
    call: RuledCall,
    op: RegionOperator,
    operands: Sequence[Operand],
    params: dict[str, Any],
    level: int,
    *,
    own: bool,
) -> Sequence[Value]:
    """The results of a node that has (`own`), or holds calls that have, the rules of
    `call`: its graphs are traced again, and close over what the rules take."""
    parts = split_args(op, operands, params)
    graphs: dict[str, tuple[Graph, Sequence[Any], Sequence[Value] | None]] = {
        name: (graph, parts.symbols, None)
        for name, graph in Node("call_function", op, (), params).graphs.items()
    }
    given: dict[str, Any] = {}
    if own:
        params = {k: v for k, v in params.items() if k != "depth"}
        names = (*call.op.rule_graphs, "wrt", "tangents", "cotangents")
        given = {key: call.params[key] for key in names if key in call.params}
        for name, graph in given.items():
            if isinstance(graph, Graph):
                graphs[name] = graph, call.symbols, call.captures
    kept = types_of(map(as_value, parts.captures))

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
            rest = flat[len(operands) :] if captures is None else captures
            args = [*symbols, *flat[: len(operands)], *rest]
            return list(map(as_value, interpret(graph, args, rebind)))

        # The captures that it has are operands for now, so that they keep their places.
        return traced_body(op, name, run, [*operands, *kept])

    bodies = list(map(body, graphs))
    closed = close_bodies(bodies)
    for graph in closed.graphs:
        first = len(graph.operands) - len(parts.captures)
        for var in graph.operands[first:]:
            var.node.section = "capture"
    made = dict(zip(graphs, closed.graphs, strict=True))
    new = iter(closed.graphs)
    params = map_graphs(params, lambda _: next(new))
    args = (*parts.lead, *closed.symbols, *parts.operands, *parts.captures)
    rules = {key: made.get(key, value) for key, value in given.items()}
    return bind(op, [*args, *closed.captures], {**params, **rules})
