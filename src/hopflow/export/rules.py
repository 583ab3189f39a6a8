"""Derivatives of a user's that a program keeps: as graphs, in place of functions.

A rule is traced for the types of its node. What it makes is differentiated again by
rules that are kept in it in turn, as often as `derivatives` says; beyond that it is an
error, for what follows from the function itself may be another derivative.

jvp        Graph, (*symbols, *operands, *tangents) -> (*results, *their tangents)
forward    Graph, (*symbols, *operands) -> (*results, *residuals)
backward   Graph, (*symbols, *residuals, *cotangents) -> cotangents of the operands

Tangents and cotangents are of those operands and results that have derivatives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hopflow import pytree
from hopflow.autograd import api
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.graphs import bind_again
from hopflow.bind import Operand, Value, current
from hopflow.errors import DerivativeError, ExportError, HopflowError
from hopflow.graph.core import (
    Constant,
    Graph,
    Node,
    Var,
    match_shapes,
    size_of,
    vars_of,
)
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import clone, eliminate_dead_code, prune_inputs
from hopflow.graph.types import TensorType
from hopflow.hops.custom import CUSTOM, custom_jvp, custom_vjp
from hopflow.hops.custom_use import Ruled, Use
from hopflow.hops.higher_order_op import MEANING
from hopflow.hops.own_rules import differentiated
from hopflow.ops.convert import as_value
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size, Symbol, SymInt
from hopflow.tensor import EagerTensor
from hopflow.trace.capture import trace
from hopflow.trace.functional import TracedTensor
from hopflow.trace.tracer import Tracer
from hopflow.zeros import LinearMap, Tangent, Unknown, Zero, instantiate, is_zero

# --- running --------------------------------------------------------------------------


def run(
    graph: Graph, operands: Sequence[Operand], told: Mapping[Symbol, Any]
) -> list[Value]:
    """The results of a rule for these operands.

    Args:
        told: The values of symbols that no operand has for a size.
    """
    sizes: dict[Symbol, Size] = {}
    own = graph.inputs[len(graph.symbols) :]
    for var, value in zip(own, operands, strict=True):
        match_shapes(var.type.shape, value.type.shape, sizes)
    known = {**told, **sizes}
    numbers = [known[symbol] for symbol in _symbols(graph)]
    given = [current().value_of(n) if isinstance(n, SymInt) else n for n in numbers]
    found = interpret(graph, [*given, *operands], bind_again)
    return list(map(as_value, found))


def _number(told: Operand) -> Any:
    """The number that an operand is, if that is known; else the operand."""
    if isinstance(told, Constant):
        return int(told.value)
    if isinstance(told, TracedTensor) and isinstance(told.tracer, Tracer):
        known = told.tracer.known_size(told.tracer.read(told))
        return told if known is None else known
    return int(told) if isinstance(told, EagerTensor) else told


def _symbols(graph: Graph) -> list[Symbol]:
    return [v.node.symbol for v in graph.symbols if v.node.symbol is not None]


class _Function:
    """Stands for the function whose rules these are: its name is in messages."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> NoReturn:
        raise DerivativeError(f"`{self.__name__}` is a graph of a program.")


@dataclass(eq=False)
class KeptRules(Ruled):
    """What stands in a program for a function with rules of its own.

    name     of the decorator or the operator
    label    of the function
    active   which operands the rules differentiate in
    orders   how often a derivative may be taken
    sizes    the symbols that the node passes
    """

    name: str
    label: str
    active: tuple[bool, ...]
    orders: int = 0
    sizes: tuple[Symbol, ...] = ()
    jvp: Graph | None = None
    forward: Graph | None = None
    backward: Graph | None = None

    def __post_init__(self) -> None:
        self.fun = _Function(self.label)

    @property
    def graphs(self) -> dict[str, Graph]:
        """The rules that there are, by name."""
        own = {"jvp": self.jvp, "forward": self.forward, "backward": self.backward}
        return {key: graph for key, graph in own.items() if graph is not None}

    def told(self, use: Use) -> dict[Symbol, Any]:
        """What the symbols are for a node, as numbers where those are known."""
        return dict(zip(self.sizes, map(_number, use.sizes), strict=True))

    def use(self, results: int) -> Use:
        """A call of the function, which gives so many results."""
        spec, returns = (
            pytree.structure((*(object() for _ in range(count)),))
            for count in (len(self.active), results)
        )
        return Use(self, spec, {}, returns)

    def push(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        self._check(given, has_rule=self.jvp is not None, kind="forward")
        return _Pushed(self, use).push(use, operands, given)

    def linearize(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        if self.forward is None:
            self._check(given, has_rule=self.jvp is not None, kind="reverse")
            return _Pushed(self, use).linearize(use, operands, given)
        self._check(given, has_rule=True, kind="reverse")
        return _Pulled(self, use).linearize(use, operands, given)

    def _check(self, given: Sequence[Tangent], *, has_rule: bool, kind: str) -> None:
        """
        Raises:
            DerivativeError: the program has no such rule, or none for an operand.
        """
        if not self.orders:
            raise DerivativeError(
                f"{self.name}: `{self.label}` has derivatives of its own, and the "
                "program keeps no more of them. Export it with a larger `derivatives`."
            )
        if not has_rule:
            raise DerivativeError(
                f"{self.name}: `{self.label}` has no rule for {kind} derivatives."
            )
        pairs = zip(given, self.active, strict=True)
        if any(not is_zero(tangent) and not active for tangent, active in pairs):
            raise DerivativeError(
                f"{self.name}: what `{self.label}` closes over depends on what is "
                "differentiated. Make it an argument."
            )


class _Pushed(custom_jvp):
    """The rule for tangents, for a node."""

    def __init__(self, kept: KeptRules, use: Use) -> None:
        self.kept = kept
        self.fun = kept.fun
        self.told = kept.told(use)

    def push(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        if use.examples:
            return self.push_examples(use, operands, given)
        graph = self.kept.jvp
        assert graph is not None
        tangents = _of_active(map(instantiate, given), operands, self.kept.active)
        found = run(graph, [*operands, *tangents], self.told)
        assert use.returns is not None
        values = found[: use.returns.num_leaves]
        rest = iter(found[len(values) :])
        pushed = [
            next(rest) if is_differentiable(v.type) else Zero(v.type) for v in values
        ]
        return values, use.returns, pushed


class _Pulled(custom_vjp):
    """The rules for cotangents, for a node."""

    def __init__(self, kept: KeptRules, use: Use) -> None:
        self.kept = kept
        self.fun = kept.fun
        self.told = kept.told(use)

    def run_forward(self, use: Use, operands: Sequence[Value]) -> Any:
        if use.examples:
            return self.run_forward_of_many(use, operands)
        assert use.returns is not None
        assert self.kept.forward is not None
        found = run(self.kept.forward, operands, self.told)
        count = use.returns.num_leaves
        return found[:count], use.returns, self.pull, found[count:]

    def pull(
        self,
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        _results: Sequence[TensorType],
    ) -> list[Tangent]:
        assert self.kept.backward is not None
        cts = map(instantiate, given)
        found = iter(run(self.kept.backward, [*tensors, *cts], self.told))
        pairs = zip(arguments, self.kept.active, strict=True)
        return [
            next(found) if active and is_differentiable(t) else Zero(t)
            for t, active in pairs
        ]


def _of_active(
    values: Any, operands: Sequence[Any], active: Sequence[bool]
) -> list[Any]:
    """Those of values that belong to operands with derivatives."""
    rows = zip(values, operands, active, strict=True)
    return [x for x, o, is_active in rows if is_active and is_differentiable(o.type)]


# --- keeping --------------------------------------------------------------------------


def keep_rules(
    node: Node, orders: int, portable: Callable[[Graph, int], Graph]
) -> None:
    """Make a node, in place, a call whose rules are graphs.

    Args:
        portable: What makes a rule's graph one that can leave Python.

    Raises:
        ExportError: a rule cannot be traced for the node's types.
    """
    body, name, label, active = _function(node)
    graphs: dict[str, Graph] = {}
    if orders:
        own = _graphs(_Rules(node, body, active), label)
        graphs = {key: portable(graph, orders - 1) for key, graph in own.items()}
    kept = KeptRules(name, label, active, orders, tuple(_symbols(body)), **graphs)
    node.op = CUSTOM
    node.params = {"body": body, "use": kept.use(len(body.outputs))}


def _graphs(rules: "_Rules", label: str) -> dict[str, Graph]:
    """The rules that there are."""
    graphs: dict[str, Graph] = {}
    refused: list[HopflowError] = []
    for make in (rules.pushed, rules.pulled):
        try:
            graphs |= make()
        except DerivativeError as error:  # it has no rule of this kind
            refused.append(error)
        except HopflowError as error:
            raise _no_graph(label, error) from error
    if not graphs:
        raise _no_graph(label, refused[0]) from refused[0]
    return graphs


def _no_graph(label: str, error: HopflowError) -> ExportError:
    return ExportError(
        f"a derivative of `{label}` cannot be kept: {error} Export with "
        "`derivatives=0`, or have the rule compute with tensors alone."
    )


def _function(node: Node) -> tuple[Graph, str, str, tuple[bool, ...]]:
    """The graph of what a node computes; what it is called; which of its inputs, the
    symbols apart, its rules differentiate in."""
    use = node.params.get("use")
    if isinstance(use, Use):
        body: Graph = clone(node.params["body"])
        count, total = use.spec.num_leaves, len(body.inputs) - len(body.symbols)
        active = tuple(i < count for i in range(total))
        name = use.function.name
        label = getattr(use.function.fun, "__name__", name)
    else:
        body = clone(node.params[MEANING])
        unknown = [Unknown(v.type) for v in body.inputs]
        active = tuple(differentiated(node.op, unknown, node.params))  # type: ignore[arg-type]
        name = label = node.op.name
    for var in body.captures:  # those of a custom call are operands
        var.node.section = "operand"
    return body, name, label, active


class _Rules:
    """Traces the rules of a node by differentiating it."""

    def __init__(self, node: Node, body: Graph, active: Sequence[bool]) -> None:
        self.node = node
        self.symbols = _symbols(body)
        own = body.inputs[len(body.symbols) :]
        self.types = [v.type.strong() for v in own]
        self.results = [t.strong() for t in body.out_types]
        pairs = zip(self.types, active, strict=True)
        self.differentiable = [on and is_differentiable(t) for t, on in pairs]
        self.tangents = [
            t for t, on in zip(self.types, self.differentiable, strict=True) if on
        ]

    def call(self, operands: Sequence[Any]) -> list[Value]:
        """The node again, on these operands."""
        here = current()
        sizes = [here.value_of(size_of(symbol)) for symbol in self.symbols]
        return list(bind_again(self.node.op, [*sizes, *operands], self.node.params))

    def of_active(self, operands: Sequence[Any]) -> Callable[..., list[Value]]:
        """The node as a function of the operands that have derivatives."""

        def function(*own: Any) -> list[Value]:
            rest = iter(own)
            pairs = zip(operands, self.differentiable, strict=True)
            return self.call([next(rest) if on else x for x, on in pairs])

        return function

    def own(self, operands: Sequence[Any]) -> list[Any]:
        pairs = zip(operands, self.differentiable, strict=True)
        return [x for x, on in pairs if on]

    def floats(self, results: Sequence[Any]) -> list[Any]:
        return [x for x in results if is_differentiable(x.type)]

    def pushed(self) -> dict[str, Graph]:
        count = len(self.types)

        def rule(*flat: Any) -> list[Any]:
            operands, tangents = flat[:count], flat[count:]
            f = self.of_active(operands)
            results, dots = api.jvp(f, tuple(self.own(operands)), tangents)
            of_floats = zip(results, dots, strict=True)
            return [*results, *(d for r, d in of_floats if is_differentiable(r.type))]

        return {"jvp": self.traced(rule, [*self.types, *self.tangents])}

    def pulled(self) -> dict[str, Graph]:
        count = len(self.types)
        cotangents = [t for t in self.results if is_differentiable(t)]

        def rule(*flat: Any) -> list[Any]:
            operands, rest = flat[:count], iter(flat[count:])
            f = self.of_active(operands)
            results, pullback = api.vjp(f, *self.own(operands))
            cts = [
                next(rest) if is_differentiable(r.type) else instantiate(Zero(r.type))
                for r in results
            ]
            return [*results, *pullback(cts)]

        joint = self.traced(rule, [*self.types, *cotangents])
        forward, backward = split(joint, count, len(self.results))
        return {"forward": forward, "backward": backward}

    def traced(self, rule: Callable[..., Any], types: Sequence[TensorType]) -> Graph:
        graph = trace(rule, *types, mode="fake", captures=True).graph
        graph.name = "rule"
        return graph


def split(joint: Graph, primals: int, results: int) -> tuple[Graph, Graph]:
    """A graph (primals, cotangents) -> (results, cotangents) as two: what can be known
    without cotangents, with what the other needs of it as residuals, and the rest."""
    later: set[Var] = set(joint.operands[primals:])
    rest: list[Node] = []
    for node in joint.nodes:
        if not later.isdisjoint(node.args):
            later.update(node.results)
            rest.append(node)
    moved = set(map(id, rest))
    makes_sizes = any(n.symbol is not None for n in joint.nodes)
    if makes_sizes:  # which types of the rest may have: it computes all again
        rest, moved = joint.nodes, set()
    read = {v for node in rest for v in vars_of(node.args)}
    read.update(vars_of(joint.outputs[results:]))
    known = [*joint.operands[:primals]]
    if not makes_sizes:
        known += [v for n in joint.nodes if id(n) not in moved for v in n.results]
    residuals = [v for v in known if v in read]

    forward, vars_ = _copy(joint)
    forward.outputs = (
        *forward.outputs[:results],
        *(vars_[v] for v in residuals),
    )
    forward.inputs = [*forward.symbols, *forward.operands[:primals]]
    eliminate_dead_code(forward)
    return forward, _rest_of(joint, residuals, primals, results)


def _copy(graph: Graph) -> tuple[Graph, dict[Var, Var]]:
    vars_: dict[Var, Var] = {}
    return clone(graph, vars_), vars_


def _rest_of(
    joint: Graph, residuals: Sequence[Var], primals: int, results: int
) -> Graph:
    """What of a graph there is to do once the residuals are known."""
    backward, vars_ = _copy(joint)
    inputs: list[Var] = []
    for i, var in enumerate(residuals):
        own = vars_[var]
        made = Graph().add_input(own.type, f"residual{i}")
        inputs.append(made)
        for node in backward.nodes:
            node.args = tuple([made if a is own else a for a in node.args])
        backward.outputs = tuple([made if a is own else a for a in backward.outputs])
    backward.outputs = backward.outputs[results:]
    backward.inputs = [*backward.symbols, *inputs, *backward.operands[primals:]]
    eliminate_dead_code(backward)
    prune_inputs([backward], ("symbol",))
    return backward
