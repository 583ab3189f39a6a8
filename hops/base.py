"""What every operator shares: its entry, the tracing of its bodies, and their lifting."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from hopflow import pytree
from hopflow.bind import Operand, Value, bind, current, slots
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentTypeError,
    Mismatch,
    MutationError,
    PredicateError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.core import Constant, Graph, Node, Var, map_graphs
from hopflow.graph.interpreter import interpret
from hopflow.graph.regions import Signature
from hopflow.graph.types import Shape, TensorType, same_shape, same_size
from hopflow.loop_ir.kernels import Lowered
from hopflow.ops.opdef import OPERATIONS, as_operand, convert_to
from hopflow.pytree import Spec
from hopflow.symbolic.size import Symbol, free_symbols
from hopflow.tensor import Tensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import name_of, where
from hopflow.trace.tracer import Capture, Tracer, is_written, trace_into

Rule = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Function:
    """A function given to an operator, and how it is called with flat inputs.

    role    the argument it was given as ("body_fn")
    names   of its flat inputs
    call    calls `fn` with flat inputs, as its operator does
    """

    role: str
    fn: Callable[..., Any]
    names: Sequence[str]
    call: Callable[[Sequence[Any]], Any]


@dataclass(slots=True)
class Call:
    """One use of an operator, its pytrees flattened.

    lead, operands   flat values, numbers as weak constants
    functions        by the name of the param that holds the graph
    params           static parameters
    spec             the structure that results must have, where it is known before
    """

    lead: list[Operand]
    operands: list[Operand]
    functions: dict[str, Function]
    params: dict[str, Any] = field(default_factory=dict)
    spec: Spec | None = None


class HigherOrderOp:
    """An operator whose parameters include graphs.

    A node of it has args `(*lead, *symbols, *operands, *captures)` and takes its graphs
    among the params. All graphs of a node have the same symbols and captures, in the
    same order.

    name      as users call it
    lead      how many args come before the symbols (a predicate, an index)
    """

    name: ClassVar[str]
    lead: ClassVar[int] = 0
    effects: frozenset[str] = frozenset()

    RULES: Final = ("debug", "infer", "functionalize", "lower")

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    # --- the entry ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Use the operator: in debug mode as plain Python, else traced and bound."""
        call = self.prepare(*args, **kwargs)
        if debugging():
            return self.run_debug(call)
        return self.trace(call)

    def prepare(self, *args: Any, **kwargs: Any) -> Call:
        """Check the user's arguments and flatten them.

        Raises:
            HopflowError: an argument is wrong; before anything runs.
        """
        raise NotImplementedError

    def trace(self, call: Call) -> Any:
        """Trace the functions, bind a node, and give the results their structure."""
        raise NotImplementedError

    def run_debug(self, call: Call) -> Any:
        """Run the functions as they are."""
        raise NotImplementedError

    # --- rules ---

    def debug(self, *args: Any, **params: Any) -> tuple[Any, ...]:
        """The meaning in plain Python: flat values in and out, functions for graphs.

        `args` are the lead and the operands; a function takes and gives flat values.
        """
        raise NotImplementedError

    def infer(self, *types: TensorType, **params: Any) -> tuple[TensorType, ...]:
        """The types of a node's results, from the types of its args."""
        raise NotImplementedError

    def functionalize(self, bodies: "Sequence[Body]") -> "Written":
        """Turn writes in bodies to inputs into results; see `Written`."""
        raise NotImplementedError

    def lower(
        self, types: tuple[TensorType, ...], *args: Any, **params: Any
    ) -> Lowered:
        """The region that a node stands for."""
        raise NotImplementedError

    def signature(self, node: Node) -> Signature:
        """The role of each input and result; see `graph.regions`."""
        raise NotImplementedError

    # --- what interpreters call ---

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return self.infer(*types, **params)

    def run_eager(
        self, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Run a node on concrete values."""
        return slots.executor(self, args, params)

    def interpret(
        self, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Run a node by interpreting its graphs: `debug` on them."""
        [graph, *_] = graphs_of(params)
        symbols, captures = len(graph.symbols), len(graph.captures)
        lead, rest = args[: self.lead], args[self.lead :]
        before, operands = rest[:symbols], rest[symbols : len(rest) - captures]
        after = rest[len(rest) - captures :]

        def function(graph: Graph) -> Callable[..., tuple[Any, ...]]:
            return lambda *xs: interpret(graph, [*before, *xs, *after], bind)

        return self.debug(*lead, *operands, **map_graphs(params, function))


def graphs_of(params: dict[str, Any]) -> list[Graph]:
    """The graphs among a node's params, in order."""
    found: list[Graph] = []
    map_graphs(params, lambda g: found.append(g) or g)
    return found


class _Debugging(threading.local):
    on = False


_debugging = _Debugging()


@contextmanager
def debug() -> Iterator[None]:
    """Within the block operators run as plain Python: breakpoints and prints work.

    Only eager calls are affected; what is traced or compiled stays so.
    """
    before = _debugging.on
    _debugging.on = True
    try:
        yield
    finally:
        _debugging.on = before


def debugging() -> bool:
    """Whether operators are to run as plain Python here."""
    return _debugging.on and current().is_eager


def as_value(operand: Operand) -> Value:
    """A scalar constant as a 0-d tensor; a value as it is."""
    if isinstance(operand, Value):
        return operand
    [value] = bind(OPERATIONS["full"], [operand], {"shape": ()})
    return value


def own_copy(operand: Operand) -> Value:
    """A value that a body may write to without the caller's tensor changing."""
    [value] = bind(OPERATIONS["copy"], [operand], {})
    return value


@dataclass(slots=True)
class Recorder:
    """Calls a function with flat values, and keeps the structure of its result."""

    op: str
    function: Function
    spec: Spec | None = None

    def __call__(self, *flat: Any) -> tuple[Value, ...]:
        tree = self.function.call(flat)
        leaves, self.spec = pytree.flatten(tree)
        fn = self.function.fn
        return tuple(
            as_value(_as_result(self.op, fn, leaf, i, self.spec))
            for i, leaf in enumerate(leaves)
        )


# --- arguments ------------------------------------------------------------------------


def require_callable(op: str, argument: str, value: object) -> None:
    """Raises: ArgumentTypeError: `value` cannot be called."""
    if not callable(value):
        raise ArgumentTypeError(
            f"{op}: `{argument}` must be a function, and is `{type(value).__name__}`."
        )


def flatten_operands(op: str, argument: str, tree: Any) -> tuple[list[Operand], Spec]:
    """The leaves of a user's pytree as operands, numbers as weak constants.

    Raises:
        ArgumentTypeError: a leaf is neither a tensor nor a number; named by its path.
    """
    leaves, spec = pytree.flatten(tree)
    operands: list[Operand] = []
    for i, leaf in enumerate(leaves):
        try:
            operands.append(as_operand(op, i, leaf))
        except ArgumentTypeError:
            path = pytree.leaf_paths(spec, argument)[i]
            raise ArgumentTypeError(
                f"{op}: `{path}` must be a tensor or a number, and is "
                f"`{type(leaf).__name__}`. Pass what is not data through a closure."
            ) from None
    return operands, spec


def spread(tree: Any) -> bool:
    """Whether a carry or operands of this type are spread over a function's parameters."""
    return type(tree) is tuple


def check_scalar(op: str, argument: str, value: Operand, kinds: str, what: str) -> None:
    """Raises: PredicateError: `value` is not a scalar of one of the dtype `kinds`."""
    type_ = value.type
    if type_.shape != () or type_.dtype.kind not in kinds:
        hint = (
            " Reduce it with `hf.all` or `hf.any`, or map over it with `hf.map`."
            if type_.shape
            else f" Compare it first: `{argument} != 0`."
        )
        raise PredicateError(
            f"{op}: `{argument}` must be {what}, and is {type_}." + (hint if "b" in kinds else "")
        )


# --- bodies ---------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Body:
    """A function of the user's, traced: its tracer is open until `close_bodies`.

    outputs   the flat results; `spec` their structure
    """

    op: str
    role: str  # "body_fn"
    fn: Callable[..., Any]
    tracer: Tracer
    outputs: list[Operand]
    spec: Spec

    @property
    def label(self) -> str:
        """The function as an error names it: "`step`"."""
        return f"`{name_of(self.fn)}`"

    @property
    def where(self) -> str:
        return where(self.fn) or self.role

    @property
    def types(self) -> list[TensorType]:
        return [o.type for o in self.outputs]


def trace_body(op: str, function: Function, types: Sequence[TensorType]) -> Body:
    """Trace one function of an operator, on inputs of these types.

    Raises:
        ResultTypeError: the function returned what is neither a tensor nor a number.
    """
    role, fn = function.role, function.fn
    parent = current()
    above = parent.path if isinstance(parent, Tracer) else ""
    path = f"{above} → {op}/{role}" if above else f"{op}/{role}"
    tracer = Tracer(None if parent.is_eager else parent, role, path=path)
    inputs = [tracer.operand(t, n) for t, n in zip(types, function.names, strict=True)]
    tree = trace_into(tracer, lambda *xs: function.call(xs), inputs)
    leaves, spec = pytree.flatten(tree)
    outputs = [_as_result(op, fn, leaf, i, spec) for i, leaf in enumerate(leaves)]
    return Body(op, role, fn, tracer, outputs, spec)


def _as_result(op: str, fn: Any, leaf: Any, i: int, spec: Spec) -> Operand:
    try:
        return as_operand(op, i, leaf)
    except ArgumentTypeError:
        path = pytree.leaf_paths(spec, "result")[i]
        raise ResultTypeError(
            f"{op}: `{name_of(fn)}` ({where(fn)}) must return tensors or numbers, and "
            f"its {path} is `{type(leaf).__name__}`."
        ) from None


@dataclass(slots=True)
class Written:
    """Inputs that bodies write: `captures` by key, `operands` by position."""

    captures: list[Any] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)


def written_inputs(bodies: Sequence[Body]) -> Written:
    """What any of the bodies writes, each once."""
    found = Written()
    for body in bodies:
        for key, capture in body.tracer.captures.items():
            if capture.written and key not in found.captures:
                found.captures.append(key)
        for i, operand in enumerate(body.tracer.operands):
            if is_written(operand) and i not in found.operands:
                found.operands.append(i)
    return found


def refuse_writes(op: str, bodies: Sequence[Body], why: str) -> Written:
    """The functionalize rule of operators whose bodies may not write captures.

    Raises:
        MutationError: one does.
    """
    for body in bodies:
        for capture in body.tracer.captures.values():
            if capture.written:
                raise MutationError(
                    f"{op}: {body.label} ({body.where}) writes to a captured tensor "
                    f"{capture.origin.type}, but {why}. Return the new value instead."
                )
    return Written()


@dataclass(slots=True)
class Closed:
    """Graphs of bodies with the same symbols and captures."""

    graphs: list[Graph]
    symbols: list[Operand]
    captures: list[Operand]


def present_value(body: Body, key: Any) -> Operand:
    """What a captured tensor holds at the end of a body."""
    tracer = body.tracer
    return TracedTensor(tracer, tracer.read(tracer.captures[key].tensor))


def share_captures(bodies: Sequence[Body]) -> dict[Any, Capture]:
    """Give every body an input for each tensor that any of them captures."""
    union: dict[Any, Capture] = {}
    for body in bodies:
        for key, capture in body.tracer.captures.items():
            union.setdefault(key, capture)
    for body in bodies:
        for capture in union.values():
            body.tracer.localize(capture.origin)
    return union


def close_bodies(bodies: Sequence[Body], carried: Sequence[Any] = ()) -> Closed:
    """Close the bodies with common symbols and captures, unread ones left out.

    Args:
        carried: Keys of captures that have become operands (hidden carries): their
            inputs move behind the operands, in this order, in each graph.
    """
    union = share_captures(bodies)
    graphs = [body.tracer.close(body.outputs) for body in bodies]
    for body in bodies:
        for key in carried:
            body.tracer.captures[key].input.node.section = "operand"
    read = [_read_vars(g) for g in graphs]
    kept = [
        key
        for key in union
        if key not in carried
        and any(
            body.tracer.captures[key].input in vars_
            for body, vars_ in zip(bodies, read, strict=True)
        )
    ]
    symbols: dict[Symbol, None] = {}
    for body, graph in zip(bodies, graphs, strict=True):
        extra = [body.tracer.captures[k].input for k in carried]
        own = [t for t in graph.inputs if t.node.section == "operand" and t not in extra]
        graph.inputs = own + extra + [body.tracer.captures[k].input for k in kept]
        symbols.update(dict.fromkeys(_free_symbols(graph)))
    for body, graph in zip(bodies, graphs, strict=True):
        graph.inputs[:0] = [body.tracer.symbol(s) for s in symbols]
    parent = current()
    return Closed(
        graphs,
        [TracedTensor(parent, parent.symbol(s)) for s in symbols]
        if isinstance(parent, Tracer)
        else [],
        [union[k].origin for k in kept],
    )


def _read_vars(graph: Graph) -> set[Var]:
    found = {a for node in graph.nodes for a in node.args if isinstance(a, Var)}
    return found | {a for a in graph.outputs if isinstance(a, Var)}


def _free_symbols(graph: Graph) -> tuple[Symbol, ...]:
    """The symbols that a graph's types and nodes mention."""
    read = {v.node.symbol for v in _read_vars(graph)} - {None}
    found = dict.fromkeys(s for s in read if s is not None)
    for var in graph.inputs:
        found.update(dict.fromkeys(free_symbols(*var.type.shape)))
    for node in graph.nodes:
        for var in node.results:
            found.update(dict.fromkeys(free_symbols(*var.type.shape)))
        sizes = [n for p in node.params.values() for n in (p if isinstance(p, tuple) else (p,))]
        found.update(dict.fromkeys(free_symbols(*sizes)))
    return tuple(found)


# --- types of results -----------------------------------------------------------------


def difference(expected: TensorType, got: TensorType) -> str:
    """Why two types differ: "dtype", "rank 1 != 2", "axis 1: 8 != 16"; "" if they agree."""
    if expected.dtype is not got.dtype:
        return "dtype"
    if expected.ndim != got.ndim:
        return f"rank {expected.ndim} != {got.ndim}"
    for axis, (a, b) in enumerate(zip(expected.shape, got.shape, strict=True)):
        if not same_size(a, b):
            return f"axis {axis}: {a} != {b}"
    return ""


def mismatches(
    paths: Sequence[str], expected: Sequence[TensorType], got: Sequence[TensorType]
) -> list[Mismatch]:
    """The leaves whose types differ."""
    return [
        Mismatch(path, str(a), str(b), reason)
        for path, a, b in zip(paths, expected, got, strict=True)
        if (reason := difference(a, b))
    ]


def check_structure(op: str, body: Body, expected: Spec, what: str) -> None:
    """Raises: StructureError: the body's result has another structure."""
    if body.spec != expected:
        raise StructureError(
            f"{op}: {body.label} ({body.where}) must return {what}.\n"
            f"  expected {_shown(expected)}\n  got      {_shown(body.spec)}"
        )


def _shown(spec: Spec) -> str:
    return str(spec).removeprefix("PyTreeSpec(").removesuffix(")")


def cast_output(body: Body, i: int, dtype: DType, *, weak: bool = False) -> None:
    """Convert output `i` of an open body to `dtype`, in its graph."""
    output = body.outputs[i]
    if output.type.dtype is not dtype or isinstance(output, Constant):
        body.outputs[i] = in_trace(body, lambda: convert_to(output, dtype, weak=weak))


def in_trace(body: Body, f: Callable[[], Any]) -> Any:
    """`f()` with the body's tracer innermost: its operations join the body."""
    return trace_into(body.tracer, f, ())


def commit(targets: Sequence[Operand], values: Sequence[Value]) -> None:
    """Write results back to the caller's tensors."""
    for target, value in zip(targets, values, strict=True):
        if isinstance(target, Value):
            current().write(target, value)

