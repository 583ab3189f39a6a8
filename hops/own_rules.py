"""Custom derivative rules of a user's operator class, and the pullbacks that follow.

Such rules are called as `debug` is, with pytrees and functions. A function argument is
itself a pytree of the tensors that it closes over, so that it has tangents, cotangents
and a batch dimension as any other argument.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.autograd.api import like
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.graphs import bind_again
from hopflow.bind import Operand, Value, current
from hopflow.errors import DerivativeError, OperatorError, ResultTypeError
from hopflow.graph.core import Graph, size_of
from hopflow.graph.interpreter import interpret
from hopflow.graph.regions import result_types
from hopflow.graph.rewriting import read_vars
from hopflow.graph.types import SYMBOL_TYPE, TensorType, may_be
from hopflow.hops.rule_tracing import (
    PARAMS,
    Pulled,
    Pushed,
    Rules,
    as_pair,
    kind_of_value,
    packed,
    unpacked,
)
from hopflow.hops.subgraphs import (
    Function,
    as_value,
    captured_write,
    check_rule,
    close_bodies,
    commit,
    flatten_operands,
    flatten_results,
    is_known,
    own_copy,
    trace_body,
)
from hopflow.pytree import Spec
from hopflow.trace.own_writes import own_writes_only
from hopflow.trace.stand_ins import run_below
from hopflow.zeros import Tangent, Unknown, Zero, added, instantiate

RESERVED: Final = ("self", "meaning", "results", "late", "rules", *PARAMS)

Kind: TypeAlias = Literal["operand", "function", "static"]


class Leaf(NamedTuple):
    """A leaf of the user's arguments.

    path   how a user would write it
    key    the name of its param or input
    """

    path: str
    key: str
    kind: Kind
    value: Any

    @property
    def is_static(self) -> bool:
        """Return True if it is not data."""
        return self.kind != "operand"


def keys_of(paths: Iterable[str]) -> list[str]:
    """Return distinct names for params and inputs, one for each path."""
    taken = dict.fromkeys(RESERVED)
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
    """Return (args, kwargs) with these operands and functions."""
    leaves_by_kind = {"operand": iter(operands), "function": iter(functions)}
    data = [
        leaf.value if leaf.kind == "static" else next(leaves_by_kind[leaf.kind])
        for leaf in leaves
    ]
    return pytree.unflatten(spec, data)


class KindOfCall(NamedTuple):
    """One kind of call of a function.

    spec      the structure of its arguments
    results   that of its results
    written   for each further output the index of the operand or capture that it is
              written to; None if nothing else reads the tensor written to
    """

    spec: Spec
    results: Spec
    written: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of a function, one for each kind of call.

    symbols  the values of its symbols
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
    def of(cls, name: str, rules: "CustomRules") -> "_Graphs":
        """Return the graphs of one function of a call."""
        graphs, kinds = rules.params.get(name, ()), rules.kinds[name]
        graphs = (graphs,) if isinstance(graphs, Graph) else graphs
        used: set[int] = set()
        for graph, kind in zip(graphs, kinds, strict=True):
            read, first = read_vars(graph), len(graph.operands)
            captures = enumerate(graph.captures)
            used |= {i for i, v in captures if v in read or first + i in kind.written}
        return cls(rules.name, name, graphs, kinds, rules.symbols, sorted(used))

    def closing(self, graph: Graph) -> Graph:
        """Return a graph whose captures are only those the function closes over."""
        closed = copy(graph)
        captures = [graph.captures[i] for i in self.places]
        closed.inputs = [*graph.symbols, *graph.operands, *captures]
        return closed


class Closure:
    """A function argument of a rule: callable, and a pytree of its captures."""

    __slots__ = ("captures", "definition")

    def __init__(self, captures: Sequence[Any], definition: _Graphs) -> None:
        self.captures = list(captures)
        self.definition = definition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        operands, spec = flatten_operands(
            definition.op, f"{definition.name}: args", (args, kwargs)
        )
        for graph, kind in zip(definition.graphs, definition.kinds, strict=True):
            if kind.spec == spec and _takes(graph, operands):
                arguments = [*definition.symbols, *operands, *self.captures]
                outputs = interpret(definition.closing(graph), arguments, bind_again)
                results = list(map(as_value, outputs))
                inputs = dict(enumerate(operands))
                first = len(operands)
                for place, tensor in zip(definition.places, self.captures, strict=True):
                    inputs[first + place] = tensor
                count = kind.results.num_leaves
                for target, value in zip(kind.written, results[count:], strict=True):
                    if target is not None:
                        commit([inputs[target]], [value])
                return pytree.unflatten(kind.results, results[:count])
        types = ", ".join(str(o.type) for o in operands)
        raise OperatorError(
            f"{definition.op}: a rule calls `{definition.name}` with ({types}), "
            "as `debug` never does: only of its calls there are graphs. Call it in "
            "`debug` like that."
        )


pytree.register(
    Closure,
    lambda c: (c.captures, c.definition, [str(i) for i in range(len(c.captures))]),
    lambda definition, captures: Closure(list(captures), definition),
    by_name=False,
)


def _takes(graph: Graph, operands: Sequence[Operand]) -> bool:
    """Return True if these may be the operands of a graph."""
    inputs = graph.operands
    return len(inputs) == len(operands) and all(
        may_be(v.type, o.type) for v, o in zip(inputs, operands, strict=True)
    )


@dataclass(eq=False)
class CustomRules(Rules):
    """The rules of a class, for a call of its operator.

    They differentiate the result of `debug`. Derivatives of the tensors that `debug`
    writes to, and of the functions passed to it, are derived from `debug`.

    leaves   of the arguments
    spec     the structure of (args, kwargs)
    kinds    the kinds of calls of each function, by its name
    returns  the structure of the result
    params   the graphs of the call
    symbols  the values of their symbols
    types    of the inputs
    """

    op: Any
    leaves: Sequence[Leaf]
    spec: Spec
    kinds: Mapping[str, Sequence[KindOfCall]]
    returns: Spec
    params: Mapping[str, Any]
    symbols: Sequence[Operand]
    types: Sequence[TensorType]

    def __post_init__(self) -> None:
        self.name, self.owner, self.offered = self.op.name, self.op, self.op.own_rules
        unknowns = list(map(Unknown, self.types))  # no two are one object
        args, _ = self.tree(unknowns)
        by_position = {id(leaf) for leaf in pytree.flatten(args)[0]}
        self.wrt = tuple(
            k
            for k, unknown in enumerate(unknowns)
            if id(unknown) in by_position and is_differentiable(unknown.type)
        )

    @property
    def kind(self) -> Any:
        statics = [kind_of_value(x.value) for x in self.leaves if x.is_static]
        return id(self.op), self.spec, statics

    def refused(self, type_: TensorType) -> DerivativeError:
        error: DerivativeError = self.op.not_given(self.offered[0], type_, {})
        return error

    def at(self, symbols: Sequence[Operand]) -> "CustomRules":
        rules = replace(self, symbols=symbols)
        rules.below = self.below
        return rules

    def tree(self, values: Sequence[Any]) -> Any:
        """Return (args, kwargs) made of these inputs."""
        count = sum(leaf.kind == "operand" for leaf in self.leaves)
        graphs = [_Graphs.of(name, self) for name in self.kinds]
        closures = [Closure([values[count + i] for i in g.places], g) for g in graphs]
        return filled(self.leaves, self.spec, values[:count], closures)

    def inputs(self, values: Sequence[Value]) -> Sequence[Value]:
        """Return the inputs of a rule: copies if its functions may write to them."""
        writes = any(kind.written for kinds in self.kinds.values() for kind in kinds)
        outputs = self.params["meaning"].outputs
        writes = writes or len(outputs) > self.returns.num_leaves
        return list(map(own_copy, values)) if writes else values

    def run(self, rule: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of a rule of the class, or of a pullback.

        Raises:
            ArgumentTypeError: it does not accept these arguments.
            MutationError: it writes to a tensor that it has not created.
        """
        role = getattr(rule, "__name__", "pullback")
        function = Function(role, rule, (), lambda _: rule(*args, **options))
        label = function.label
        with own_writes_only(lambda t: captured_write(self.name, label, _REFUSAL, t)):
            return run_below(lambda: function(()), self.below)

    def results(
        self, rule: Callable[..., Any], tree: Any, inputs: Sequence[Value]
    ) -> tuple[list[Value], Spec]:
        """Return the results of the operator that a rule returns, and their structure.

        Raises:
            ResultTypeError, StructureError, RuleTypeError: they differ from those of
                `debug`.
        """
        function = Function(rule.__name__, rule, (), lambda _: tree)
        leaves, spec = flatten_results(self.name, function, tree)
        values = list(map(as_value, leaves))
        args: list[Any] = [*self.symbols, *inputs]
        types = result_types(self.op, args, dict(self.params))
        expected = self.returns, types[: self.returns.num_leaves]
        label = function.label
        check_rule(self.name, label, "`debug`", expected, inputs, (spec, values))
        return values, spec

    def push(self, values: Sequence[Value], tangents: Sequence[Tangent]) -> Pushed:
        """Run the rule for tangents.

        Raises:
            ResultTypeError, StructureError, ShapeError, DTypeError: the rule does not
                return a pair of results and tangents like them.
        """
        inputs, rule, name = self.inputs(values), self.op.jvp, f"{self.name}.jvp"
        primals, options = self.tree(inputs)
        trees, _ = self.tree(tangents)
        dots = pytree.tree_map(
            lambda t: instantiate(t) if isinstance(t, Value | Zero) else t, trees
        )
        pair = self.run(rule, primals, dots, **options)
        tree, tangent = as_pair(name, pair, "tangent")
        results, spec = self.results(rule, tree, inputs)
        return results, like(name, "tangent", tangent, results, spec)

    def pull(self, values: Sequence[Value]) -> Pulled:
        """Run the rule for cotangents, and trace its pullback.

        Raises:
            ResultTypeError, StructureError, ShapeError, DTypeError: the rule or its
                pullback does not return results or cotangents like those of `debug`.
        """
        inputs, rule = self.inputs(values), self.op.vjp
        args, options = self.tree(inputs)
        pair = self.run(rule, *args, **options)
        tree, pullback = as_pair(f"{self.name}.vjp", pair, "pullback")
        results, spec = self.results(rule, tree, inputs)
        floats = [v.type.strong() for v in results if is_differentiable(v.type)]
        nonzero: list[int] = []

        def call(flat: Sequence[Any]) -> list[Value]:
            float_cts = iter(flat)
            cts = [
                next(float_cts)
                if is_differentiable(v.type)
                else instantiate(Zero(v.type))
                for v in results
            ]
            trees = self.run(pullback, pytree.unflatten(spec, cts))
            return packed(self.pulled(trees), nonzero)

        names = [f"x{i}" for i in range(len(floats))]
        function = Function("pullback", pullback, names, call)
        path = f"{self.name}/pullback"
        closed = close_bodies([trace_body(self.name, path, function, floats)])
        [graph] = closed.graphs

        def pulled(
            cotangents: Sequence[Tangent],
            residuals: Sequence[Value],
            arguments: Sequence[TensorType],
            _results: Sequence[TensorType],
        ) -> list[Tangent]:
            first = len(graph.symbols)
            sizes = [
                current().value_of(size_of(symbol)) if is_known(symbol) else value
                for var, value in zip(graph.symbols, residuals, strict=False)
                if (symbol := var.node.symbol) is not None
            ]
            cts = map(instantiate, cotangents)
            outputs = interpret(graph, [*sizes, *cts, *residuals[first:]], bind_again)
            return unpacked(arguments, nonzero, map(as_value, outputs))

        residuals = map(as_value, [*closed.symbols, *closed.captures])
        return results, list(residuals), pulled

    def pulled(self, trees: Any) -> list[Tangent]:
        """Return the cotangents of inputs `wrt` that a pullback has returned."""
        unknowns = list(map(Unknown, self.types))  # no two are one object
        args, _ = self.tree(unknowns)
        if not isinstance(trees, tuple | list) or len(trees) != len(args):
            raise ResultTypeError(
                f"{self.name}.vjp: the pullback must return a tuple of {len(args)} "
                "cotangents, one for each argument given by position and None for "
                f"zero, and returns {pytree.structure(trees)}."
            )
        # A tensor that several functions close over gets the sum of their cotangents.
        totals: dict[int, Tangent] = {}
        for tree, arg in zip(trees, args, strict=True):
            if tree is None:
                continue
            leaves, spec = pytree.flatten(arg)
            data = [x if isinstance(x, Unknown) else _NO_DATA for x in leaves]
            cts = like(f"{self.name}.vjp", "cotangent", tree, data, spec)
            for x, ct in zip(data, cts, strict=True):
                totals[id(x)] = added(totals.get(id(x), Zero(x.type)), ct)
        inputs = [unknowns[k] for k in self.wrt]
        return [totals.get(id(x), Zero(x.type)) for x in inputs]


_REFUSAL: Final = "a rule computes, and writes nothing. Return the new value."
_NO_DATA: Final = Unknown(SYMBOL_TYPE)
