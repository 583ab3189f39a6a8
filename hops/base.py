"""The base of every operator: its entry, its rules, and who calls them."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from hopflow.autograd import region_jvp, region_vjp
from hopflow.autograd.api import vjp
from hopflow.autograd.jvp import differentiate
from hopflow.autograd.linearize import linear_of
from hopflow.batching import operators as batching
from hopflow.bind import Operand, Value, current, recorded, run_graph, slots
from hopflow.entries import entry
from hopflow.errors import (
    CarryTypeError,
    OperatorError,
    PredicateError,
    UnsupportedRuleError,
)
from hopflow.graph.core import Arg, Graph, Node, map_graphs
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.regions import Port, Role, Signature
from hopflow.graph.types import TensorType
from hopflow.hops import derived as forms
from hopflow.hops import own_rules
from hopflow.hops.schema import Schema, schema_of_call
from hopflow.hops.subgraphs import Body, Function, Written, as_value, own_copy
from hopflow.loop_ir.kernels import Inline, Lowered
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.symbolic.size import Size
from hopflow.tensor import EagerTensor
from hopflow.trace.dims import Dim
from hopflow.trace.rollback import unchanged_on_error
from hopflow.zeros import LinearMap, Tangent


@dataclass(slots=True)
class Call:
    """One use of an operator, its pytrees flattened.

    name             the function that the user called, for messages
    lead, operands   flat values, numbers as weak constants
    functions        by the name of the param that holds the graph
    params           static parameters
    spec             the structure of the carry, where there is one
    paths            how a user would write each leaf of the carry
    type_error       what a carry of other types is
    dynamic          by the position of a leaf of the carry the axes whose sizes steps
                     may change, and the sizes that are allowed
    counts           whether the first operand is a counter that `spec` has not
    total            how many steps it takes, if that is known
    given            the arguments of an operator whose rules are derived
    """

    name: str
    lead: list[Operand]
    operands: list[Operand]
    functions: dict[str, Function]
    params: dict[str, Any] = field(default_factory=dict)
    spec: Spec | None = None
    paths: Sequence[str] = ()
    type_error: type[CarryTypeError] = CarryTypeError
    dynamic: dict[int, dict[int, Dim]] = field(default_factory=dict)
    counts: bool = False
    total: int | None = None
    given: forms.Given | None = None


class _Inherited:
    """In a class: a rule that it leaves to the one above it."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        bound = owner if instance is None else instance
        return getattr(super(self.owner, bound), self.name)


class _Derived:
    """What `derived` is; its name is known only once it stands in a class."""

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, _Inherited(owner, name))


derived: Final[Any] = _Derived()
"""`jvp = derived` says that a rule is the one of the class above: what follows from the
operator's graphs."""


class unsupported:
    """`export = unsupported("why")` says that there is no such rule, and why.

    Using it is an `UnsupportedRuleError`.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else partial(self, instance)

    def __call__(self, op: Any, *_args: Any, **_params: Any) -> Any:
        raise UnsupportedRuleError(
            f"{op.name}: it has no rule `{self.name}`: {self.reason}."
        )


class HigherOrderOp:
    """An operator with functions among its arguments.

    A subclass needs its meaning in plain Python, `debug`, and no more:

        class Twice(hf.HigherOrderOp):
            def debug(self, f, x):
                return f(f(x))

        twice = Twice()

    It is called as `debug` is. Functions, and pytrees of tensors and numbers, are
    operands; keyword-only parameters are options, whose numbers are part of a call's
    kind. All other rules are derived from what `debug` does when it is traced, and the
    operator stays one node until one of them is asked for. See
    docs/add_an_operator.md, also for rules of one's own.

    A node has args `(*lead, *symbols, *operands, *captures)` and takes its graphs
    among the params. All graphs of a node have the same symbols and captures, in the
    same order. Its results share memory with nothing.

    name       as users call it; by default that of the class: `Twice` is "twice"
    lead       how many args come before the symbols (a predicate, an index)
    droppable  whether a pass may take out results that nothing reads
    is_call    whether a node means its one graph, run once on all of its args
    transforms whether what a node lowers to has derivatives or batches of its graphs
    counts_by_rows   whether only the rows of its stacks tell how many steps there were
    """

    name: ClassVar[str] = "operator"
    lead: ClassVar[int] = 0
    droppable: ClassVar[bool] = True
    is_call: ClassVar[bool] = False
    transforms: ClassVar[bool] = False
    counts_by_rows: ClassVar[bool] = False
    effects: frozenset[str] = frozenset()

    RULES: Final = (
        *("debug", "infer", "functionalize", "jvp", "vjp", "batch", "lower", "export"),
        *("signature", "with_roles"),
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    # --- the entry ---

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Use the operator: in debug mode as plain Python, else traced and bound."""
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        return self.use(lambda: self.prepare(*args, **kwargs))

    @deep_recursion()
    def use(self, prepare: Callable[[], Call]) -> Any:
        """Run the call that `prepare` gives; on an error nothing is left in a trace."""
        if debugging():
            return self.run_debug(prepare())
        with unchanged_on_error():
            return self.trace(prepare())

    def prepare(self, *args: Any, **kwargs: Any) -> Call:
        """Check the user's arguments and flatten them.

        Raises:
            HopflowError: an argument is wrong; before anything runs.
        """
        given = forms.given(self.name, self.debug, args, kwargs)
        return Call(self.name, [], given.operands, {}, given=given)

    def trace(self, call: Call) -> Any:
        """Trace the functions, bind a node, and give the results their structure."""
        assert call.given is not None
        return forms.trace(self, call.given)

    def run_debug(self, call: Call) -> Any:
        """Run the functions as they are."""
        assert call.given is not None
        return forms.run_debug(self.name, self.debug, call.given)

    def schema(self, *args: Any, **kwargs: Any) -> Schema:
        """What a call takes and gives: names, types, what is written, structures.

        Args:
            args, kwargs: What the operator is called with; types (`hf.spec`) may stand
                for tensors. Nothing runs: the functions are traced.
        """
        own = type(self)
        is_derived = own.prepare is HigherOrderOp.prepare
        declared = self.debug if is_derived else self.prepare
        return schema_of_call(self, args, kwargs, op=self, declared=declared)

    @property
    def own_rules(self) -> tuple[str, ...]:
        """The rules that the class has of its own and calls as `debug` is called."""
        own = type(self)
        rules = ("jvp", "vjp")
        return tuple(r for r in rules if getattr(own, r) != getattr(HigherOrderOp, r))

    # --- rules ---

    # `Any`, so that each operator may name the args and params that it has.

    def debug(self, *args: Any, **params: Any) -> Any:
        """The meaning in plain Python.

        Of an operator with derived rules: a function of what the user gives. Of others:
        flat values in and out, functions for graphs; `args` are the lead and operands.
        """
        raise OperatorError(
            f"{self.name}: it has no meaning. Define `debug(self, ...)` in "
            f"`{type(self).__name__}`, as plain Python that calls its functions."
        )

    def infer(self, *types: Any, **params: Any) -> tuple[TensorType, ...]:
        """The types of a node's results from those of its args (`TensorType`).

        They are over the symbols of its graphs; `graph.regions` translates them.
        """
        return forms.meaning_of(params).out_types

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """Turn writes in bodies to inputs into results; see `Written`."""
        return forms.functionalize(bodies)

    def lower(self, *args: Any, **params: Any) -> Lowered:
        """The region that a node stands for, from its results' types and its args."""
        _types, *operands = args
        return Inline(forms.meaning_of(params), tuple(operands))

    def signature(self, node: Node) -> Signature:
        """The role of each input and result; see `graph.regions`."""
        return forms.signature(node)

    def with_roles(
        self,
        params: dict[str, Any],
        args: Sequence[Role],
        results: Sequence[Role],
    ) -> dict[str, Any]:
        """`params` for args and results of other roles: counts set anew."""
        return params

    # How formats for other programs spell a node.
    export: Any = unsupported("programs cannot be exported yet")

    def batch(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """The results for `size` examples at once, and which of them are batched.

        Batched args and results have the examples along axis 0; one arg at least is.
        """
        if own_rules.ARGUMENTS in params:  # the class's own rules are for one example
            found = batching.each_example(self, size, batched, args, params)
            return batching.with_shared(
                size, found, params[forms.MEANING], batched, args
            )
        if forms.MEANING in params:
            return forms.batch(params[forms.MEANING], size, batched, args)
        return batching.batch(self, size, batched, args, params)

    def push(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        """The results of a node, and their tangents."""
        rule = own_rules.push if self._has_own("jvp", params) else type(self).jvp
        found: tuple[Sequence[Value], Sequence[Tangent]]
        found = rule(self, operands, tangents, params)
        return found

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        """Whether a node of these params has derivatives that do not follow from its
        graphs: then a result that they return as it came is more than that operand."""
        return own_rules.ARGUMENTS in params

    def _has_own(self, rule: str, params: dict[str, Any]) -> bool:
        return own_rules.ARGUMENTS in params and rule in self.own_rules

    def jvp(self, *args: Any, **options: Any) -> Any:
        """The results, and their tangents, from operands, tangents, params.

        Of an operator with derived rules: `jvp(primals, tangents, **options)` gives the
        result and its tangent as `debug` gives the result; see `own_rules`.
        """
        del options
        operands, tangents, params = args
        graph = self.of_fixed_sizes(operands, params)
        if graph is not None:
            own = _symbols_first(self, operands, params)
            return differentiate(
                graph, own, _symbols_first(self, tangents, params), None
            )
        return region_jvp.jvp(self, operands, tangents, params)

    def linearize(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        """The results, and a linear function from tangents of the operands (zero where
        `tangents` are) to those of the results."""
        linear = linear_of(tangents)
        if self._has_own("vjp", params) and not linear.pushed:
            return own_rules.linearize(self, operands, tangents, params, "vjp")
        if self._has_own("jvp", params):
            return own_rules.linearize(self, operands, tangents, params, "jvp")
        graph = self.of_fixed_sizes(operands, params)
        if graph is not None:
            own = _symbols_first(self, operands, params)
            values, found = differentiate(
                graph, own, _symbols_first(self, tangents, params), linear
            )
            return values, lambda _: found
        return region_vjp.linearize(self, operands, tangents, params)

    def linear_part(
        self, params: dict[str, Any], results: Sequence[Value]
    ) -> tuple["HigherOrderOp", dict[str, Any]]:
        """The operator that the linear part of this one is, and its params.

        Args:
            params: Of this operator, with the linear graphs.
            results: Of the other part, with the residuals.
        """
        return self, params

    def vjp(self, *args: Any, **options: Any) -> Any:
        """The result, as `debug` gives it, and a pullback.

        Derived: by `linearize` and `transpose`.
        """
        return vjp(lambda *own: self(*own, **options), *args)

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        """What a node means, as a graph of its args, symbols first, whose operators
        have derivatives: no step or branch of them changes a size. None: the node is
        of that kind itself."""
        return params.get(forms.MEANING)

    def transpose(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        """The cotangents of the operands that are `Unknown`, in which a node made by
        `linearize` is linear; None for the others."""
        return region_vjp.transpose_once(self, cotangents, operands, params)

    # --- what interpreters call ---

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        found = self.infer(*types, **params)
        meaning = params.get(forms.MEANING)
        if meaning is not None:
            forms.check_inferred(self, meaning, found)
        return found

    def run_eager(
        self, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Run a node on concrete values."""
        run = run_interpreted if _modes.interprets else slots.executor
        return run(self, args, params)

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        """Run a node by interpreting its graphs: `debug` on them.

        Args:
            evaluate: Gives the results of a graph.
        """
        if forms.MEANING in params:
            found = evaluate(params[forms.MEANING], args)
            return tuple(map(as_value, found))
        parts = split_args(self, args, params)

        def function(graph: Graph) -> Callable[..., tuple[Value, ...]]:
            return lambda *xs: tuple(
                as_value(r)
                for r in evaluate(graph, [*parts.symbols, *xs, *parts.captures])
            )

        functions = map_graphs(params, function)
        results = self.debug(*parts.lead, *parts.operands, **functions)
        return tuple(as_value(r) for r in results)

    def node_effects(self, params: dict[str, Any]) -> frozenset[str]:
        """What a node of these params may do besides what its graphs do."""
        return self.effects

    def format_sections(self, node: Node) -> list[tuple[Arg, ...]]:
        """A node's args as the graph's text groups them."""
        return list(split_args(self, node.args, node.params))


class Parts(NamedTuple):
    """The args of a node by section."""

    lead: tuple[Any, ...]
    symbols: tuple[Any, ...]
    operands: tuple[Any, ...]
    captures: tuple[Any, ...]


def split_args(op: HigherOrderOp, args: Sequence[Any], params: dict[str, Any]) -> Parts:
    """Args of a node: lead, symbols, operands, captures."""
    graph = graphs_of(params)[0]
    sections = [v.node.section for v in graph.inputs]
    first = op.lead + sections.count("symbol")
    last = len(args) - sections.count("capture")
    args = tuple(args)
    return Parts(args[: op.lead], args[op.lead : first], args[first:last], args[last:])


def _symbols_first(
    op: HigherOrderOp, args: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    parts = split_args(op, args, params)
    return [*parts.symbols, *parts.lead, *parts.operands, *parts.captures]


def graphs_of(params: dict[str, Any]) -> list[Graph]:
    """The graphs among a node's params, in order."""
    found: list[Graph] = []
    for value in params.values():
        if isinstance(value, Graph):
            found.append(value)
        elif isinstance(value, tuple):
            found += [item for item in value if isinstance(item, Graph)]
    return found


def numbered(role: Role, start: int, count: int) -> tuple[Port, ...]:
    """Ports of one role for args or results in a row."""
    return tuple(Port(role, start + i) for i in range(count))


# --- execution ------------------------------------------------------------------------


def run_interpreted(
    op: HigherOrderOp,
    args: Sequence[Operand],
    params: dict[str, Any],
    evaluate: Evaluate = run_graph,
) -> tuple[Value, ...]:
    """The executor while there is no compiler: interpret the graphs.

    Results that may share memory with an operand or each other are copied.
    """
    taken = {id(a) for a in args}
    results: list[Value] = []
    for value in op.interpret(args, params, evaluate):
        shared = not isinstance(value, EagerTensor) or value._storage is not None
        results.append(own_copy(value) if shared or id(value) in taken else value)
        taken.add(id(value))
    return tuple(results)


slots.executor = run_interpreted


class _Modes(threading.local):
    """How this thread runs operators that are called on concrete values."""

    debugs = False
    interprets = False


_modes: Final = _Modes()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within the block operators are run by the graph interpreter, not compiled."""
    before = _modes.interprets
    _modes.interprets = True
    try:
        yield
    finally:
        _modes.interprets = before


@contextmanager
def debug() -> Iterator[None]:
    """Within the block operators run as plain Python: breakpoints and prints work.

    Only eager calls are affected; what is traced or compiled stays so. Where only a
    trace can tell the types, there is one: of all branches if the one that runs returns
    a Python number, of the body of a loop that begins with one or takes no steps.
    """
    before = _modes.debugs
    _modes.debugs = True
    try:
        yield
    finally:
        _modes.debugs = before


def debugging() -> bool:
    """Whether operators are to run as plain Python here."""
    return _modes.debugs and current().is_eager


# --- predicates -----------------------------------------------------------------------


def check_scalar(op: str, argument: str, type_: TensorType, kinds: str) -> None:
    """Check that a predicate (`kinds` "b") or an index ("iu") is a scalar.

    Args:
        argument: What is checked, as the message names it: "`pred`".

    Raises:
        PredicateError: it is not a scalar of such a dtype.
    """
    if type_.shape == () and type_.dtype.kind in kinds:
        return
    what, remedy = "an integer scalar", "Convert it with `hf.astype`."
    if kinds == "b":
        what = "a bool scalar (bool[])"
        remedy = "Compare it with something: `x != 0`."
    if type_.shape != ():
        remedy = "Reduce it"
        remedy += " with `hf.all` or `hf.any`" if kinds == "b" else ""
        remedy += ", or use `hf.map` to decide for each element."
    raise PredicateError(f"{op}: {argument} must be {what}, and is {type_}. {remedy}")


def truth(value: Any) -> bool:
    """A concrete predicate as a Python bool."""
    return bool(getattr(value, "value", value))
