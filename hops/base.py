"""`RegionOperator`: the base of every operator with regions; its entry and rules."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from hopflow.autograd import region_jvp, region_vjp
from hopflow.autograd.jvp import differentiate
from hopflow.autograd.linearize import linear_of
from hopflow.batching import operators as batching
from hopflow.bind import (
    Operand,
    Program,
    Value,
    current,
    recorded,
    run_graph,
    slots,
)
from hopflow.entries import entry
from hopflow.errors import CarryTypeError, PredicateError, UnsupportedRuleError
from hopflow.graph.core import Constant, Graph, Node, map_graphs
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.regions import Port, Role
from hopflow.graph.types import TensorType
from hopflow.hops import replay
from hopflow.hops.schema import Schema, schema_of_call
from hopflow.hops.subgraphs import Function, as_value, own_copy
from hopflow.ops.opdef import Upgrade
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.symbolic.size import Size
from hopflow.tensor import EagerTensor
from hopflow.trace.dims import Dim
from hopflow.trace.rollback import unchanged_on_error
from hopflow.zeros import LinearMap, Tangent


@dataclass(slots=True)
class Call:
    """One use of an operator, with flattened pytrees.

    name             the function that the user called, for messages
    lead, operands   flat values, with numbers as weak constants
    functions        by the name of the param that holds the graph
    params           static parameters
    spec             the structure of the carry, if there is one
    paths            how a user would write each leaf of the carry
    type_error       the error for a carry whose types change
    dynamic          by the index of a leaf of the carry, the axes whose sizes steps may
                     change, and the allowed sizes
    counts           whether the first operand is a counter that `spec` leaves out
    total            returns the number of steps, if known; it reads the bounds
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
    total: Callable[[], int] | None = None


class _Inherited:
    """A descriptor of a rule that a class inherits from its base."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        bound = owner if instance is None else instance
        return getattr(super(self.owner, bound), self.name)


class _Derived:
    """The value `derived`, which learns its name when it is assigned in a class."""

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, _Inherited(owner, name))


derived: Final[Any] = _Derived()
"""`jvp_rule = derived` says that a class inherits the rule of its base, which derives
it from the operator's graphs."""


class unsupported:
    """`jvp_rule = unsupported("why")` says that a rule does not exist, and why.

    Calling it raises `UnsupportedRuleError`.
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


class RegionOperator:
    """An operator with graphs among its params: its regions.

    A node has args `(*lead, *symbols, *operands, *captures)`. All graphs of a node have
    the same symbols and captures, in the same order. Its results share no memory with
    other tensors. `signature` gives each arg and result a role, from which the rules
    are derived that a class does not define; the class then says `jvp_rule = derived`.

    name       as users call it; by default that of the class: `MyOperator` is
               "my_operator"
    lead       the number of args before the symbols (a predicate, an index)
    droppable  whether a pass may remove results that nothing reads
    is_call    whether a node runs its one graph once, on all of its args
    transforms whether the lowering of a node takes derivatives or batches of its graphs
    counts_by_rows   whether only the rows of its stacks tell the number of steps
    options    the types of params that `infer` does not name; a name that ends with `?`
               is optional
    version, upgrades   of the params of its nodes; see `OpDef`
    rule_graphs   the params with graphs for derivatives alone, which are never run
    """

    name: ClassVar[str] = "operator"
    lead: ClassVar[int] = 0
    droppable: ClassVar[bool] = True
    is_call: ClassVar[bool] = False
    transforms: ClassVar[bool] = False
    counts_by_rows: ClassVar[bool] = False
    options: ClassVar[Mapping[str, str]] = {}
    version: ClassVar[int] = 1
    upgrades: ClassVar[Mapping[int, Upgrade]] = {}
    rule_graphs: ClassVar[tuple[str, ...]] = ()
    effects: frozenset[str] = frozenset()

    RULES: Final = (
        *("debug", "infer", "functionalize", "signature", "with_roles"),
        *("jvp_rule", "linearize_rule", "transpose_rule", "batch_rule"),
        "lower",
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    # --- the entry ---

    # `prepare(*args, **kwargs)` checks a user's arguments and flattens them before
    # anything runs; `trace(call)` traces the functions, binds a node and returns its
    # results in their structure; `run_debug(call)` runs the functions themselves.
    prepare: Any = unsupported("derivatives alone make its nodes")
    trace: Any = unsupported("derivatives alone make its nodes")
    run_debug: Any = unsupported("derivatives alone make its nodes")

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Use the operator: run it as Python in debug mode, else trace and bind it."""
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        return self.use(self.prepare, *args, **kwargs)

    def use(self, prepare: Callable[..., Call], /, *args: Any, **kwargs: Any) -> Any:
        """Run the call that `prepare` returns for these arguments."""
        if debugging():
            with deep_recursion():
                return self.run_debug(prepare(*args, **kwargs))
        traced = partial(self._run_traced, prepare)
        if _modes.interprets:
            return traced(*args, **kwargs)
        return replay.run(self, prepare, args, kwargs, traced)

    @deep_recursion()
    def _run_traced(
        self, prepare: Callable[..., Call], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Trace and bind the call that `prepare` returns; after an error the trace is
        unchanged."""
        with unchanged_on_error():
            return self.trace(prepare(*args, **kwargs))

    @property
    def declared(self) -> Callable[..., Any]:
        """Return the function whose parameters are those of a call."""
        function: Callable[..., Any] = self.prepare
        return function

    def schema(self, *args: Any, **kwargs: Any) -> Schema:
        """Return the schema of a call: names, types, written tensors, structures.

        Args:
            args, kwargs: The arguments of the call; types (`hf.spec`) may stand for
                tensors. Nothing runs: the functions are traced.
        """
        return schema_of_call(self, args, kwargs, op=self, declared=self.declared)

    # --- rules ---

    # `debug(*args, **params)` is the reference implementation in plain Python: flat
    # values in and out, functions in place of graphs; `args` are the lead and the
    # operands. `infer(*types, **params)` returns the types of a node's results from
    # those of its args, in terms of the symbols of its graphs; `graph.regions`
    # translates them. `functionalize(bodies)` turns writes to inputs of bodies into
    # results; see `Written`. `lower(types, *args, **params)` returns the region of
    # `loop_ir.kernels` that computes a node, from its results' types and its args.
    # `signature(node)` returns the role of each input and result; see `graph.regions`.
    debug: Any = unsupported("each operator defines it")
    infer: Any = unsupported("each operator defines it")
    functionalize: Any = unsupported("each operator defines it")
    lower: Any = unsupported("each operator defines it")
    signature: Any = unsupported("each operator defines it")

    def with_roles(
        self,
        params: dict[str, Any],
        args: Sequence[Role],
        results: Sequence[Role],
    ) -> dict[str, Any]:
        """Return `params` for args and results of other roles, with counts updated."""
        return params

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """Return the results for a batch of this size, and which of them are batched.

        Batched args and results have the batch dimension first. At least one arg is
        batched.
        """
        return batching.batch(self, size, batched, args, params)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        """Return the results of a node, and their tangents."""
        graph = self.of_fixed_sizes(operands, params)
        if graph is not None:
            args = _symbols_first(self, operands, params)
            return differentiate(
                graph, args, _symbols_first(self, tangents, params), None
            )
        return region_jvp.jvp(self, operands, tangents, params)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        """Return the results, and a linear function from tangents of the operands (zero
        where `tangents` are) to those of the results."""
        graph = self.of_fixed_sizes(operands, params)
        if graph is not None:
            args = _symbols_first(self, operands, params)
            values, result_dots = differentiate(
                graph, args, _symbols_first(self, tangents, params), linear_of(tangents)
            )
            return values, lambda _: result_dots
        return region_vjp.linearize(self, operands, tangents, params)

    def linear_part(
        self, params: dict[str, Any], results: Sequence[Value]
    ) -> tuple["RegionOperator", dict[str, Any]]:
        """Return the operator that computes the linear part of this one, and its
        params.

        Args:
            params: Of this operator, with the linear graphs.
            results: Of the nonlinear part, with the residuals.
        """
        return self, params

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        """Return the cotangents of the operands that are `Unknown`, in which a node
        made by `linearize_rule` is linear; None for the others."""
        return region_vjp.transpose_once(self, cotangents, operands, params)

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        """Return a graph of the args, symbols first, that computes the node with
        operators that have derivatives, because no step or branch of theirs changes a
        size. None: the node is such an operator itself."""
        return None

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        """Return True if derivatives of a node do not follow from its graphs. A result
        that is an operand returned as it is may then not be replaced by that
        operand."""
        return False

    # --- what interpreters call ---

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        inferred: tuple[TensorType, ...] = self.infer(*types, **params)
        return inferred

    def run_eager(
        self, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Run a node on concrete values."""
        make = interpreted_program if _modes.interprets else slots.program
        args = self._with_numbers(args, params)
        return make(self, args, params)(args)

    def _with_numbers(
        self, args: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Operand]:
        """Return operands with numbers for symbols. The shapes of the tensors are
        numbers here: a symbol of the same size would be another name for it, which
        lowering cannot compare."""
        if not any(isinstance(a, EagerTensor) and a.ndim == 0 for a in args):
            return args
        operands: Any = tuple(args)
        roles = self.signature(Node("call_function", self, operands, params)).args
        return [
            Constant(int(a.item()), a.type)
            if role == "symbol" and isinstance(a, EagerTensor)
            else a
            for a, role in zip(args, roles, strict=True)
        ]

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        """Run a node by calling `debug` with interpreters of its graphs.

        Args:
            evaluate: Returns the results of a graph.
        """
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
        """Return the effects of a node besides those of its graphs."""
        return self.effects


class Parts(NamedTuple):
    """The args of a node by section."""

    lead: tuple[Any, ...]
    symbols: tuple[Any, ...]
    operands: tuple[Any, ...]
    captures: tuple[Any, ...]


def split_args(
    op: RegionOperator, args: Sequence[Any], params: dict[str, Any]
) -> Parts:
    """Return the args of a node: lead, symbols, operands, captures."""
    graph = graphs_of(params)[0]
    sections = [v.node.section for v in graph.inputs]
    first = op.lead + sections.count("symbol")
    last = len(args) - sections.count("capture")
    args = tuple(args)
    return Parts(args[: op.lead], args[op.lead : first], args[first:last], args[last:])


def _symbols_first(
    op: RegionOperator, args: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    parts = split_args(op, args, params)
    return [*parts.symbols, *parts.lead, *parts.operands, *parts.captures]


def graphs_of(params: dict[str, Any]) -> list[Graph]:
    """Return the graphs among a node's params, in order."""
    graphs: list[Graph] = []
    for value in params.values():
        if isinstance(value, Graph):
            graphs.append(value)
        elif isinstance(value, tuple):
            graphs += [item for item in value if isinstance(item, Graph)]
    return graphs


def numbered(role: Role, start: int, count: int) -> tuple[Port, ...]:
    """Return ports of one role for consecutive args or results."""
    return tuple(Port(role, start + i) for i in range(count))


# --- execution ------------------------------------------------------------------------


def run_interpreted(
    op: RegionOperator,
    args: Sequence[Operand],
    params: dict[str, Any],
    evaluate: Evaluate = run_graph,
) -> tuple[Value, ...]:
    """Run a node by interpreting its graphs.

    Results that may share memory with an operand or each other are copied.
    """
    seen = {id(a) for a in args}
    results: list[Value] = []
    for value in op.interpret(args, params, evaluate):
        shared = not isinstance(value, EagerTensor) or value._storage is not None
        results.append(own_copy(value) if shared or id(value) in seen else value)
        seen.add(id(value))
    return tuple(results)


def interpreted_program(
    op: RegionOperator, _args: Sequence[Operand], params: dict[str, Any]
) -> Program:
    """Return a program that interprets the graphs of a node, in absence of a
    compiler."""
    return lambda args: run_interpreted(op, args, params)


slots.program = interpreted_program


class _Modes(threading.local):
    """How this thread runs operators that are called on concrete values."""

    debugs = False
    interprets = False


_modes: Final = _Modes()


@contextmanager
def interpreted() -> Iterator[None]:
    """Run operators in the block with the graph interpreter, without compilation."""
    before = _modes.interprets
    _modes.interprets = True
    try:
        yield
    finally:
        _modes.interprets = before


@contextmanager
def debug() -> Iterator[None]:
    """Run operators in the block as plain Python, so that breakpoints and prints work.

    Only eager calls are affected, not traced or compiled ones. Where only a trace can
    tell the types, there is one: of all branches if the one that runs returns a Python
    number, and of the body of a loop whose carry contains one or that takes no steps.
    """
    before = _modes.debugs
    _modes.debugs = True
    try:
        yield
    finally:
        _modes.debugs = before


def debugging() -> bool:
    """Return True if operators run as plain Python here."""
    return _modes.debugs and current().is_eager


# --- predicates -----------------------------------------------------------------------


def check_scalar(op: str, argument: str, type_: TensorType, kinds: str) -> None:
    """Check that a predicate (`kinds` "b") or an index ("iu") is a scalar.

    Args:
        argument: The name of the value in messages: "`pred`".

    Raises:
        PredicateError: it is not a scalar of such a dtype.
    """
    if type_.shape == () and type_.dtype.kind in kinds:
        return
    expected, remedy = "an integer scalar", "Convert it with `hf.astype`."
    if kinds == "b":
        expected = "a bool scalar (bool[])"
        remedy = "Compare it with something: `x != 0`."
    if type_.shape != ():
        remedy = "Reduce it"
        remedy += " with `hf.all` or `hf.any`" if kinds == "b" else ""
        remedy += ", or use `hf.map` to decide for each element."
    raise PredicateError(
        f"{op}: {argument} must be {expected}, and is {type_}. {remedy}"
    )


def truth(value: Any) -> bool:
    """Return a concrete predicate as a Python bool."""
    return bool(getattr(value, "value", value))
