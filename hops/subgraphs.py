"""Function arguments of operators: tracing bodies, checking and closing them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

from hopflow import dtypes, pytree
from hopflow.bind import Interpreter, Operand, Value, bind, current
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentTypeError,
    HopflowError,
    Mismatch,
    MutationError,
    ResultTypeError,
    RuleTypeError,
    StructureError,
    TraceError,
)
from hopflow.graph.core import Constant, Graph, Var
from hopflow.graph.rewriting import read_vars, symbols_read
from hopflow.graph.types import FLOAT_TYPE, SYMBOL_TYPE, TensorType
from hopflow.ops.opdef import (
    OPERATIONS,
    as_operand,
    convert_to,
    in_range,
)
from hopflow.ops.sizes import equals
from hopflow.pytree import Spec
from hopflow.stats import counts
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols
from hopflow.trace.captures import Capture, is_written
from hopflow.trace.dims import Dim
from hopflow.trace.functional import TracedTensor
from hopflow.trace.own_writes import own_writes_only
from hopflow.trace.source import name_of, user_env, where
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into
from hopflow.tracebacks import calls_operator_function
from hopflow.zeros import Unknown


def as_value(operand: Operand) -> Value:
    """Return a scalar constant as a 0-d tensor, and a value as it is."""
    if isinstance(operand, Value):
        return operand
    [value] = bind(OPERATIONS["full"], [operand], {"shape": ()})
    return value


def own_copy(operand: Operand) -> Value:
    """Return a tensor of the same value that shares memory with no other."""
    if isinstance(operand, Constant):
        return as_value(operand)
    [value] = bind(OPERATIONS["copy"], [operand], {})
    return value


# --- arguments of users ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Function:
    """A function argument of an operator, and how it is called with flat inputs.

    role    the name of the argument ("body_fn")
    names   of its flat inputs
    call    calls `fn` with flat inputs, as its operator does, and returns a pytree
    """

    role: str
    fn: Callable[..., Any]
    names: Sequence[str]
    call: Callable[[Sequence[Any]], Any]

    def __call__(self, flat: Sequence[Any]) -> Any:
        """Return the result of the function for flat inputs.

        Raises:
            ArgumentTypeError: it does not take this number of arguments.
        """
        try:
            return self.call(flat)
        except TypeError as error:
            if _is_refused_call(error):
                raise ArgumentTypeError(
                    f"`{self.role}`: {self.label} does not take the arguments that it "
                    f"is called with ({error}). Give it a parameter for each operand."
                ) from None
            raise

    @property
    def label(self) -> str:
        """Return the function as errors name it: "`step` (model.py:41)"."""
        return f"`{name_of(self.fn)}` ({self.where})"

    @property
    def where(self) -> str:
        return where(self.fn) or self.role


def _is_refused_call(error: TypeError) -> bool:
    """Return True if a call failed because of its arguments: no line of the function
    itself has run, so the innermost frame is one of an operator, which called it."""
    if isinstance(error, HopflowError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    return module.startswith("hopflow.hops.") and "argument" in str(error)


def require_callable(op: str, argument: str, value: object) -> None:
    """Check that an argument can be called.

    Raises:
        ArgumentTypeError: it cannot.
    """
    if not callable(value):
        raise ArgumentTypeError(
            f"{op}: `{argument}` must be a function, and is `{type(value).__name__}`."
        )


def flatten_operands(op: str, argument: str, tree: Any) -> tuple[list[Operand], Spec]:
    """Return the leaves of a user's pytree as operands, with numbers as weak constants.

    Raises:
        ArgumentTypeError: a leaf is neither a tensor nor a number; its path is named.
        ArgumentRangeError: a Python integer does not fit the default dtype.
    """
    leaves, spec = pytree.flatten(tree)
    operands: list[Operand] = []
    for i, leaf in enumerate(leaves):
        try:
            operands.append(in_range(as_operand(op, i, leaf)))
        except ArgumentTypeError:
            path = pytree.leaf_paths(spec, argument)[i]
            raise ArgumentTypeError(
                f"{op}: `{path}` must be a tensor or a number, and is "
                f"`{type(leaf).__name__}`. Pass what is not data through a closure."
            ) from None
    return operands, spec


def flatten_results(
    op: str, function: Function, tree: Any, *, exact: bool = False
) -> tuple[list[Operand], Spec]:
    """Return the leaves of a function's result as operands, and its structure.

    Args:
        exact: Whether Python floats stay as they are, so that a number can be returned
            as one.

    Raises:
        ResultTypeError: a leaf is neither a tensor nor a number; its path is named.
    """
    interpreter = current()
    leaves, spec = pytree.flatten(
        tree if interpreter.is_eager else opened(tree, interpreter)
    )
    operands: list[Operand] = []
    for i, leaf in enumerate(leaves):
        try:
            operand = as_operand(op, i, leaf)
            number = isinstance(operand, Value) and exact
            operands.append(operand if number else in_range(operand))
        except ArgumentTypeError:
            path = pytree.leaf_paths(spec, "result")[i]
            raise ResultTypeError(
                f"{op}: {function.label} must return tensors or numbers, and its "
                f"`{path}` is `{type(leaf).__name__}`. Return the data alone, or None."
            ) from None
    return operands, spec


# --- calls in debug mode --------------------------------------------------------------


@dataclass(slots=True)
class Recorder:
    """Calls a function with flat values, and records the structure of its result.

    private   whether inputs and results are copied, so that later writes to a captured
              tensor do not change them
    refusal   None, or why the function may not write to captured tensors; see
              `refuse_writes`
    """

    op: str
    function: Function
    private: bool = False
    refusal: str | None = None
    spec: Spec | None = None

    @property
    def path(self) -> str:
        """Return the operator path of a traced body: "while_loop/body"."""
        return f"{self.op}/{self.function.role.removesuffix('_fn')}"

    def __call__(self, *flat: Any) -> tuple[Value, ...]:
        refusal = self.refusal
        if refusal is None:
            return self.run(flat)
        label = self.function.label
        with own_writes_only(lambda t: captured_write(self.op, label, refusal, t)):
            return self.run(flat)

    @calls_operator_function(lambda names: names["self"].path)
    def run(self, flat: Sequence[Any]) -> tuple[Value, ...]:
        inputs = [own_copy(x) for x in flat] if self.private else flat
        tree = self.function(inputs)
        outputs, self.spec = flatten_results(self.op, self.function, tree)
        return tuple(own_copy(o) if self.private else as_value(o) for o in outputs)


# --- traced bodies --------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Body:
    """A user's function, traced; its tracer is open until `close_bodies`.

    op        the name of the operator, or of the function built on it, in messages
    outputs   the flat results; `spec` is their structure
    """

    op: str
    function: Function
    tracer: Tracer
    outputs: list[Operand]
    spec: Spec

    @property
    def types(self) -> list[TensorType]:
        return [o.type for o in self.outputs]


@calls_operator_function(lambda names: names["path"])
def trace_body(
    op: str,
    path: str,
    function: Function,
    types: Sequence[TensorType],
    references: Sequence[Operand] | None = None,
    *,
    dynamic: Mapping[int, Mapping[int, Dim]] | None = None,
    sizes: Mapping[int, Mapping[int, Size]] | None = None,
) -> Body:
    """Trace a function of an operator, on inputs of these types.

    Args:
        op: The name of the operator in messages.
        path: Appended to the operator path of the nodes: "while_loop/body".
        references: The caller's operands, if writes to inputs are writes to these.
        dynamic: By the index of an input, the axes whose sizes steps change.
        sizes: The same with the sizes: symbols, which inputs define.

    Raises:
        ResultTypeError: the function returned neither tensors nor numbers.
    """
    counts.body_traces += 1
    parent = current()
    if isinstance(parent, Tracer) and parent.path:
        path = f"{parent.path} → {path}"
    tracer = (
        Tracer(None, function.role, path=path, env=user_env())
        if parent.is_eager
        else Tracer(parent, function.role, path=path)
    )
    if references is None:
        sizes = sizes or _changing_sizes(tracer, function.names, dynamic or {})
        inputs = [
            tracer.operand(t, n, sizes.get(i, {}))
            for i, (t, n) in enumerate(zip(types, function.names, strict=True))
        ]
    else:
        inputs = [
            tracer.reference(o, n)
            for o, n in zip(references, function.names, strict=True)
        ]

    def run() -> tuple[list[Operand], Spec]:
        return flatten_results(op, function, function(inputs))

    results, spec = trace_into(tracer, run, ())
    if parent.is_eager:
        for value in tracer.adopted:
            parent.adopt(value)
    # A returned tensor of an outer scope is captured, as if it were read.
    outputs: list[Operand] = [
        tracer.localize(o) if isinstance(o, Value) else o for o in results
    ]
    return Body(op, function, tracer, outputs, spec)


def is_known(symbol: Symbol) -> bool:
    """Return True if an enclosing trace has an input or a node for a symbol."""
    tracer: Interpreter | None = current()
    while isinstance(tracer, Tracer):
        if symbol in tracer.symbols:
            return True
        tracer = tracer.parent
    return False


def is_known_size(size: Size) -> bool:
    """Return True if the enclosing traces know all symbols of a size."""
    return all(map(is_known, free_symbols(size)))


def unknown_sizes(types: Sequence[TensorType]) -> dict[int, dict[int, Size]]:
    """Return, by the index of a type, the axes whose sizes only another trace knows."""
    sizes: dict[int, dict[int, Size]] = {}
    for i, type_ in enumerate(types):
        for axis, size in enumerate(type_.shape):
            if not is_known_size(size):
                sizes.setdefault(i, {})[axis] = size
    return sizes


def _changing_sizes(
    tracer: Tracer, names: Sequence[str], dynamic: Mapping[int, Mapping[int, Dim]]
) -> dict[int, dict[int, Size]]:
    """Return the sizes of inputs that steps change, as symbols of a body: one for each
    name. A size derived from a name (`2 * n`) gets a symbol that is only checked.

    Raises:
        TraceError: the trace has no symbols.
    """
    size_of_name: dict[str, SymInt] = {}
    sizes: dict[int, dict[int, Size]] = {}
    for i, dims in dynamic.items():
        for axis, dim in dims.items():
            if tracer.env is None:
                raise TraceError(
                    f"`{names[i]}` changes its size `{dim}`, and this trace has no "
                    'symbols for sizes. Trace with `mode="symbolic"`.'
                )
            size = size_of_name.get(dim.name) if dim.is_plain else None
            if size is None:
                size = tracer.env.unbacked(None, dim.of(dim.min), dim.of(dim.max))
            if dim.is_plain:
                size_of_name[dim.name] = size
            sizes.setdefault(i, {})[axis] = size
    return sizes


def in_trace(body: Body, f: Callable[[], Any]) -> Any:
    """Call `f` with the body's tracer innermost: its operations join the body."""
    return trace_into(body.tracer, f, ())


def _exact(operand: Operand) -> Operand:
    """Return the Python float of the trace that an operator converted to the default
    dtype, which has fewer digits; any other operand as it is."""
    if isinstance(operand, TracedTensor) and operand.storage is None:
        node = operand.source.node
        original = node.args[0] if node.op is OPERATIONS["convert"] else None
        if isinstance(original, Var) and original.type is FLOAT_TYPE:
            return TracedTensor(operand.tracer, original)
    return operand


def retyped(operand: Operand, dtype: DType, *, weak: bool) -> Operand:
    """Return `operand` converted to a dtype, or made weak or strong if it has that
    dtype."""
    operand = _exact(operand)
    type_ = operand.type
    if isinstance(operand, Constant) or type_.dtype is not dtype or type_.weak is weak:
        return convert_to(operand, dtype, weak=weak)
    [result] = bind(OPERATIONS["convert"], [operand], {"dtype": dtype, "weak": weak})
    return result


def cast_output(body: Body, i: int, dtype: DType, *, weak: bool = False) -> None:
    """Convert output `i` of an open body to `dtype` in its graph."""
    output = body.outputs[i]
    body.outputs[i] = in_trace(body, lambda: retyped(output, dtype, weak=weak))


# --- writes ---------------------------------------------------------------------------


@dataclass(slots=True)
class Written:
    """The inputs that bodies write to: `captures` by key, `operands` by index."""

    captures: list[Any] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)


def written_inputs(bodies: Sequence[Body]) -> Written:
    """Return each input that a body writes to once, and give all bodies an input for
    it."""
    if any(body.tracer.written_captures() for body in bodies):
        share_captures(bodies)
    captures: dict[Any, None] = {}
    operands: dict[int, int] = {}
    for body in bodies:
        captures |= dict.fromkeys(body.tracer.written_captures())
        for i, operand in enumerate(body.tracer.operands):
            if is_written(operand):
                # An operand passed twice is one tensor, which is written back once.
                indices = (
                    k for k, t in enumerate(body.tracer.operands) if t is operand
                )
                operands.setdefault(next(indices), i)
    return Written(list(captures), sorted(operands))


def captured_write(
    op: str, label: str, refusal: str, type_: TensorType
) -> MutationError:
    """Return the error for a write to a captured tensor where that is refused."""
    return MutationError(
        f"{op}: {label} writes to a captured tensor {type_}, but {refusal}"
    )


def refuse_writes(bodies: Sequence[Body], refusal: str) -> Written:
    """Refuse writes to captures: the functionalize rule of many operators.

    Args:
        refusal: The end of the message: why they are refused, and what to do.

    Raises:
        MutationError: a body writes to a capture.
    """
    for body in bodies:
        for capture in body.tracer.written_captures().values():
            label = body.function.label
            raise captured_write(body.op, label, refusal, capture.origin.type)
    return Written()


def present_value(body: Body, key: Any) -> Operand:
    """Return the value of a captured tensor at the end of a body."""
    tracer = body.tracer
    return TracedTensor(tracer, tracer.read(tracer.captures[key].tensor))


def commit(targets: Sequence[Operand], values: Sequence[Value]) -> None:
    """Write results back to the caller's tensors."""
    for target, value in zip(targets, values, strict=True):
        if isinstance(target, Value):
            current().write(target, value)


# --- closing --------------------------------------------------------------------------


@dataclass(slots=True)
class Closed:
    """Graphs of bodies with common symbols and captures, and the values of these."""

    graphs: list[Graph]
    symbols: list[Operand]
    captures: list[Operand]


def share_captures(bodies: Sequence[Body]) -> dict[Any, Capture]:
    """Give every body an input for each tensor that any of them captures, and the same
    base for captures that share memory in one of them."""
    while True:
        union: dict[Any, Capture] = {}
        parts: dict[Any, Capture] = {}
        for body in bodies:
            union |= body.tracer.captures
            parts |= body.tracer.parts
        for body in bodies:
            for key, capture in (union | parts).items():
                tensor = body.tracer.localize(capture.origin)
                if key in parts:
                    body.tracer.unite(tensor)
        # Sharing may have merged captures that were separate into one base.
        if all(body.tracer.captures.keys() == union.keys() for body in bodies):
            return union


def close_bodies(
    bodies: Sequence[Body], carried: Sequence[Any] = (), place: int | None = None
) -> Closed:
    """Close the bodies with common symbols and captures, without unread ones.

    Args:
        carried: Keys of captures that have become operands (hidden carries): their
            inputs move among the operands, in this order, in each graph.
        place: The number of operands that precede them; None: all.
    """
    union = share_captures(bodies)
    graphs = [body.tracer.close(body.outputs) for body in bodies]
    read = [read_vars(g) for g in graphs]
    read_keys = [
        key
        for key in union
        if key not in carried
        and any(
            body.tracer.captures[key].input in vars_
            for body, vars_ in zip(bodies, read, strict=True)
        )
    ]
    for body, graph in zip(bodies, graphs, strict=True):
        captures = body.tracer.captures
        operands = [v for v in graph.inputs if v.node.section == "operand"]
        extra = [captures[k].input for k in carried]
        for var in extra:
            var.node.section = "operand"
        others = [captures[k].input for k in read_keys]
        graph.inputs = [
            *operands[:place],
            *extra,
            *operands[len(operands[:place]) :],
            *others,
        ]
    symbols = _put_symbols_first(bodies, graphs)
    for graph in graphs:
        graph.name_inputs()
    parent = current()
    closed = Closed(graphs, [], [union[k].origin for k in read_keys])
    if isinstance(parent, Tracer):
        closed.symbols += [TracedTensor(parent, parent.symbol(s)) for s in symbols]
    return closed


def joined(parts: Sequence[Closed]) -> Closed:
    """Return all graphs, each with inputs for the symbols and captures of all parts."""
    symbols = {
        symbol: value
        for part in parts
        for var, value in zip(part.graphs[0].symbols, part.symbols, strict=True)
        if (symbol := var.node.symbol) is not None
    }
    captures = {id(value): value for part in parts for value in part.captures}
    graphs = [(part, graph) for part in parts for graph in part.graphs]
    for part, graph in graphs:
        inputs = dict(zip(map(id, part.captures), graph.captures, strict=True))
        graph.inputs = [
            *graph.symbols,
            *graph.operands,
            *(
                inputs.get(key) or graph.add_input(value.type, "read", "capture")
                for key, value in captures.items()
            ),
        ]
        with_symbols(graph, symbols)
        graph.name_inputs()
    all_graphs = [graph for _, graph in graphs]
    return Closed(all_graphs, list(symbols.values()), list(captures.values()))


def with_symbols(graph: Graph, symbols: Iterable[Symbol]) -> Graph:
    """Return the graph with inputs for these symbols, which include its own."""
    existing = {var.node.symbol: var for var in graph.symbols}
    others = graph.inputs[len(existing) :]
    first = [
        existing.get(s) or graph.add_input(SYMBOL_TYPE, s.name, "symbol", s)
        for s in symbols
    ]
    graph.inputs = [*first, *others]
    return graph


def _put_symbols_first(
    bodies: Sequence[Body], graphs: Sequence[Graph]
) -> dict[Symbol, None]:
    """Give each graph inputs for the symbols that any of them mentions."""
    symbols: dict[Symbol, None] = {}
    if not any(body.tracer.symbols for body in bodies):
        return symbols
    for body, graph in zip(bodies, graphs, strict=True):
        # `symbols_read` looks for symbols among the inputs only.
        others = graph.inputs
        symbol_inputs = [
            v for v in body.tracer.symbols.values() if v.node.section == "symbol"
        ]
        graph.inputs = [*symbol_inputs, *others]
        symbols |= symbols_read(graph)
        graph.inputs = others
    for body, graph in zip(bodies, graphs, strict=True):
        others = graph.inputs
        graph.inputs = []  # `symbol` appends the input of a new symbol
        symbol_inputs = [body.tracer.symbol(s) for s in symbols]
        graph.inputs = symbol_inputs + others
    return symbols


# --- types of results -----------------------------------------------------------------


def difference(expected: TensorType, actual: TensorType, *, sizes: bool = True) -> str:
    """Return why two types differ: "dtype", "rank 1 != 2", "axis 1: 8 != 16"; "" if
    not.

    Args:
        sizes: Whether types of different sizes differ.
    """
    if expected.dtype is not actual.dtype:
        return "dtype"
    if expected.ndim != actual.ndim:
        return f"rank {expected.ndim} != {actual.ndim}"
    for axis, (a, b) in enumerate(zip(expected.shape, actual.shape, strict=True)):
        if not equals(a, b) and sizes:
            return f"axis {axis}: {a} != {b}"
    return ""


def mismatches(
    paths: Sequence[str],
    expected: Sequence[TensorType],
    actual: Sequence[TensorType],
    *,
    sizes: bool = True,
) -> list[Mismatch]:
    """Return the leaves whose types differ; see `difference`."""
    return [
        Mismatch(path, str(a), str(b), reason)
        for path, a, b in zip(paths, expected, actual, strict=True)
        if (reason := difference(a, b, sizes=sizes))
    ]


def check_structure(
    op: str,
    label: str,
    spec: Spec,
    expected: Spec,
    must: str = "return its carry in the structure it came in",
) -> None:
    """Check that a function, named `label`, returned its carry's structure.

    If the carry has no leaves, the function may return None, so that a body that only
    writes need not return.

    Raises:
        StructureError: the structure differs.
    """
    if spec != expected and (spec.num_leaves or expected.num_leaves):
        raise StructureError(
            f"{op}: {label} must {must}."
            f"\n  expected {shown(expected)}\n  got      {shown(spec)}\n"
            "Return the same containers with as many leaves (`*` is a leaf); only "
            "leaves may change."
        )


def check_rule(
    op: str,
    label: str,
    of: str,
    expected: tuple[Spec, Sequence[TensorType]],
    operands: Sequence[Operand],
    results: tuple[Spec, Sequence[Value | Unknown]],
) -> None:
    """Check that a rule returns the results of the function it belongs to.

    Sizes that depend on data may differ: those with symbols that the operands lack.

    Args:
        label, of: The rule, and the function, as messages name them.
        expected: The structure of the results, and their types.

    Raises:
        StructureError, RuleTypeError: it does not.
    """
    structure, types = expected
    spec, values = results
    must = f"return results in the structure that {of} returns"
    check_structure(op, label, spec, structure, must)
    symbols = set(free_symbols(*(n for o in operands for n in o.type.shape)))

    def with_actual_sizes(a: TensorType, b: TensorType) -> TensorType:
        if a.ndim != b.ndim:
            return a
        pairs = zip(a.shape, b.shape, strict=True)
        return a.with_shape(
            [m if symbols.issuperset(free_symbols(m, n)) else n for m, n in pairs]
        )

    actual = [v.type for v in values]
    compared = list(map(with_actual_sizes, types, actual))
    if leaves := mismatches(pytree.leaf_paths(spec, "result"), compared, actual):
        raise RuleTypeError(op, label, of, leaves)


def shown(spec: Spec) -> str:
    """Return a structure as messages print it: `(*, {'w': *})`."""
    return str(spec).removeprefix("PyTreeSpec(").removesuffix(")").split(", NoneIs")[0]


def common_dtype(types: Sequence[TensorType]) -> tuple[DType | None, bool]:
    """Return the dtype that weak results take beside others, or None if strong ones
    differ, and whether it is weak."""
    first = types[0]
    if all(t.dtype is first.dtype and t.weak == first.weak for t in types):
        return first.dtype, first.weak
    strong = {t.dtype for t in types if not t.weak}
    dtype, weak = dtypes.promote(*((t.dtype, t.weak) for t in types))
    return (dtype if strong <= {dtype} else None), weak
