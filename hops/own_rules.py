"""Rules that a user's operator has of its own, and the derived ones that follow them.

Such rules are called as `debug` is, with pytrees and functions. A function is then a
pytree itself, of the tensors that it closes over, so that it has tangents, cotangents
and examples as other arguments have.
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
    key    the param or input that stands for it
    """

    path: str
    key: str
    kind: Kind
    value: Any

    @property
    def is_static(self) -> bool:
        """Whether it is no data."""
        return self.kind != "operand"


def keys_of(paths: Iterable[str]) -> list[str]:
    """Names for params and inputs, one for each of the paths."""
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
    def of(cls, name: str, rules: "OwnRules") -> "_Graphs":
        """Those of a call."""
        graphs, kinds = rules.params.get(name, ()), rules.kinds[name]
        graphs = (graphs,) if isinstance(graphs, Graph) else graphs
        used: set[int] = set()
        for graph, kind in zip(graphs, kinds, strict=True):
            read, first = read_vars(graph), len(graph.operands)
            captures = enumerate(graph.captures)
            used |= {i for i, v in captures if v in read or first + i in kind.written}
        return cls(rules.name, name, graphs, kinds, rules.symbols, sorted(used))

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


@dataclass(eq=False)
class OwnRules(Rules):
    """The rules of a class, for a call of its operator.

    They are those of what `debug` returns. What it writes, and the functions given to
    it, has the derivatives that follow from `debug`.

    leaves   of the arguments
    spec     the structure of (args, kwargs)
    kinds    by the name of a function the kinds of its calls
    returns  the structure of the result
    params   the graphs of the call
    symbols  what is passed for their symbols
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
        others = [kind_of_value(x.value) for x in self.leaves if x.is_static]
        return id(self.op), self.spec, others

    def refused(self, type_: TensorType) -> DerivativeError:
        found: DerivativeError = self.op.not_given(self.offered[0], type_, {})
        return found

    def at(self, symbols: Sequence[Operand]) -> "OwnRules":
        rules = replace(self, symbols=symbols)
        rules.below = self.below
        return rules

    def tree(self, values: Sequence[Any]) -> Any:
        """(args, kwargs) of these inputs."""
        count = sum(leaf.kind == "operand" for leaf in self.leaves)
        own = [_Graphs.of(name, self) for name in self.kinds]
        closures = [Closure([values[count + i] for i in g.places], g) for g in own]
        return filled(self.leaves, self.spec, values[:count], closures)

    def inputs(self, values: Sequence[Value]) -> Sequence[Value]:
        """The inputs for a rule, whose functions may write to them."""
        writes = any(kind.written for own in self.kinds.values() for kind in own)
        outputs = self.params["meaning"].outputs
        writes = writes or len(outputs) > self.returns.num_leaves
        return list(map(own_copy, values)) if writes else values

    def run(self, rule: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a rule of the class, or a pullback, returns.

        Raises:
            ArgumentTypeError: it does not take such arguments.
            MutationError: it writes to what it has not made.
        """
        role = getattr(rule, "__name__", "pullback")
        function = Function(role, rule, (), lambda _: rule(*args, **options))
        label = function.label
        with own_writes_only(lambda t: captured_write(self.name, label, _REFUSAL, t)):
            return run_below(lambda: function(()), self.below)

    def results(
        self, rule: Callable[..., Any], tree: Any, inputs: Sequence[Value]
    ) -> tuple[list[Value], Spec]:
        """What a rule gives as the operator's results.

        Raises:
            ResultTypeError, StructureError, RuleTypeError: they are others than those
                of `debug`.
        """
        function = Function(rule.__name__, rule, (), lambda _: tree)
        found, spec = flatten_results(self.name, function, tree)
        values = list(map(as_value, found))
        args: list[Any] = [*self.symbols, *inputs]
        types = result_types(self.op, args, dict(self.params))
        expected = self.returns, types[: self.returns.num_leaves]
        label = function.label
        check_rule(self.name, label, "`debug`", expected, inputs, (spec, values))
        return values, spec

    def push(self, values: Sequence[Value], given: Sequence[Tangent]) -> Pushed:
        """
        Raises:
            ResultTypeError, StructureError, ShapeError, DTypeError: the rule returns
                something else than a pair of results and tangents like them.
        """
        inputs, rule, name = self.inputs(values), self.op.jvp, f"{self.name}.jvp"
        primals, options = self.tree(inputs)
        own, _ = self.tree(given)
        dots = pytree.tree_map(
            lambda t: instantiate(t) if isinstance(t, Value | Zero) else t, own
        )
        pair = self.run(rule, primals, dots, **options)
        tree, tangent = as_pair(name, pair, "tangent")
        results, spec = self.results(rule, tree, inputs)
        return results, like(name, "tangent", tangent, results, spec)

    def pull(self, values: Sequence[Value]) -> Pulled:
        """
        Raises:
            ResultTypeError, StructureError, ShapeError, DTypeError: the rule or its
                pullback returns something else than results and cotangents like them.
        """
        inputs, rule = self.inputs(values), self.op.vjp
        args, options = self.tree(inputs)
        pair = self.run(rule, *args, **options)
        tree, pullback = as_pair(f"{self.name}.vjp", pair, "pullback")
        results, spec = self.results(rule, tree, inputs)
        floats = [v.type.strong() for v in results if is_differentiable(v.type)]
        nonzero: list[int] = []

        def call(flat: Sequence[Any]) -> list[Value]:
            rest = iter(flat)
            cts = [
                next(rest) if is_differentiable(v.type) else instantiate(Zero(v.type))
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
            found = interpret(graph, [*sizes, *cts, *residuals[first:]], bind_again)
            return unpacked(arguments, nonzero, map(as_value, found))

        residuals = map(as_value, [*closed.symbols, *closed.captures])
        return results, list(residuals), pulled

    def pulled(self, trees: Any) -> list[Tangent]:
        """The cotangents of inputs `wrt`, by what a pullback has returned."""
        wanted = list(map(Unknown, self.types))  # no two are one object
        args, _ = self.tree(wanted)
        if not isinstance(trees, tuple | list) or len(trees) != len(args):
            raise ResultTypeError(
                f"{self.name}.vjp: the pullback must return a tuple of {len(args)} "
                "cotangents, one for each argument given by position and None for "
                f"zero, and returns {pytree.structure(trees)}."
            )
        # A tensor that several functions close over is in each of them.
        totals: dict[int, Tangent] = {}
        for tree, arg in zip(trees, args, strict=True):
            if tree is None:
                continue
            leaves, spec = pytree.flatten(arg)
            data = [x if isinstance(x, Unknown) else _NO_DATA for x in leaves]
            found = like(f"{self.name}.vjp", "cotangent", tree, data, spec)
            for x, ct in zip(data, found, strict=True):
                totals[id(x)] = added(totals.get(id(x), Zero(x.type)), ct)
        own = [wanted[k] for k in self.wrt]
        return [totals.get(id(x), Zero(x.type)) for x in own]


_REFUSAL: Final = "a rule computes, and writes nothing. Return the new value."
_NO_DATA: Final = Unknown(SYMBOL_TYPE)
