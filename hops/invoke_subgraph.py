"""`invoke_subgraph` and `@subgraph`: a function as a node, traced once; its rules."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import RLock, local
from typing import Any, Final, NamedTuple, final

import numpy as np

from hopflow import pytree
from hopflow.bind import Operand, Value, bind, current, recorded
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, DataDependentError, EndlessTraceError
from hopflow.graph.core import Graph, match_shapes, plain_symbol
from hopflow.graph.rewriting import clone
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, debugging
from hopflow.hops.branches import Calling
from hopflow.hops.loops import calling, spread_specs
from hopflow.hops.rule_regions import refers_outside
from hopflow.hops.rule_tracing import rules_around
from hopflow.hops.subgraphs import Function, commit, flatten_operands, require_callable
from hopflow.pickling import Transformed
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import (
    Size,
    Symbol,
    SymFloat,
    SymInt,
    substitute,
)
from hopflow.tensor import EagerTensor
from hopflow.trace.captures import is_private
from hopflow.trace.closures import Same, Surroundings, type_key
from hopflow.trace.functional import TracedTensor
from hopflow.trace.outside.guard import Guard
from hopflow.trace.outside.paths import Path
from hopflow.trace.outside.recorder import Recorder
from hopflow.trace.outside.watch import recorders, watching
from hopflow.trace.rollback import unchanged_on_error
from hopflow.trace.sharing import once
from hopflow.trace.source import input_names, name_of, where
from hopflow.trace.tracer import Tracer, share_memory


@final
class InvokeSubgraph(Calling):
    """`invoke_subgraph(symbols; operands; captures; body) -> results`"""

    name = "invoke_subgraph"

    def prepare(self, f: Any, operands: tuple[Any, ...]) -> Call:
        require_callable(self.name, "f", f)
        flat, spec = flatten_operands(self.name, "operands", operands)
        names = input_names(f, spread_specs(operands, spec))
        function = Function("f", f, names, calling(f, operands, spec))
        return Call(self.name, [], flat, {"body": function})


INVOKE_SUBGRAPH = InvokeSubgraph()


def invoke_subgraph(f: Callable[..., Any], *operands: Any) -> Any:
    """Run `f(*operands)` as one node of the graph; all such calls share its body.

    See `subgraph` for what is traced, differentiated and compiled once.

    Args:
        f: Returns any pytree. It may read and write tensors of enclosing functions.
        operands: Pytrees of tensors and numbers.

    Returns:
        The result of `f`.

    Raises:
        ArgumentTypeError: an operand is not a tensor or number.
        ResultTypeError: `f` returns something other than tensors and numbers.
        UnhashableCaptureError: `f` closes over a value that cannot be hashed.
        EndlessTraceError: `f` calls itself without end.

    >>> hf.invoke_subgraph(lambda x, y: x * y, hf.asarray(3.0), 2.0)
    Tensor(6., f32[])
    """
    call = INVOKE_SUBGRAPH.prepare(f, operands)
    return _run(call, f, pytree.structure(operands))


class Numbers:
    """Decides whether the Python numbers among a function's arguments are operands, so
    that one trace serves all values, or constants, once the function has needed a
    value."""

    def __init__(self) -> None:
        self.are_constants = False

    def call(self, arguments: Any, run: Callable[[bool], Any]) -> Any:
        """Return the result of `run`.

        Args:
            arguments: A pytree of the function's arguments.
            run: Calls the function, with numbers as constants or not. It has no effect
                if it raises.
        """
        if not self.are_constants:
            try:
                return run(False)
            except EndlessTraceError:
                raise
            except (TypeError, DataDependentError):  # it needs a tensor's value
                if not any(map(_is_number, pytree.flatten(arguments)[0])):
                    raise
        result = run(True)
        self.are_constants = True
        return result


def call_of(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    constants: bool = False,
) -> tuple[Call, list[Any]]:
    """Return `fn(*args, **kwargs)` as a call with the tensors and numbers among the
    arguments as operands, or only the tensors if numbers are `constants`; and the other
    leaves, which `fn` gets unchanged."""
    leaves, spec = pytree.flatten((args, kwargs))
    is_data = [_is_data(x) and not (constants and _is_number(x)) for x in leaves]
    pairs = list(zip(leaves, is_data, strict=True))
    operands, _ = flatten_operands(name, "args", [x for x, data in pairs if data])

    def call(flat: Sequence[Any]) -> Any:
        data_leaves = iter(flat)
        merged = [next(data_leaves) if data else leaf for leaf, data in pairs]
        inner_args, inner_kwargs = pytree.unflatten(spec, merged)
        return fn(*inner_args, **inner_kwargs)

    names = [f"x{i}" for i in range(len(operands))]
    body = Function("f", fn, names, call)
    static = [leaf for leaf, data in pairs if not data]
    return Call(name, [], operands, {"body": body}), static


# --- one trace for many calls ---------------------------------------------------------


class _SharedTrace(NamedTuple):
    """A trace of a function, shared by calls that differ from the first in values only.

    graph     the body, which nobody changes
    captures  its inputs after the operands: each the index of a tensor of the call,
              whose last tensors are those that `outside` finds; or a tensor that the
              function builds from numbers
    results   the number of results that the user gets; the others are written
    targets   the indices of the tensors that these are written to
    conditions  conditions on its symbols that the trace depends on, and their values
    outside   the global state that it has read: paths from the function and its static
              arguments
    """

    graph: Graph
    spec: Spec
    captures: list[int | Value]
    results: int
    targets: list[int]
    conditions: list[tuple[SymBool, bool]]
    outside: Guard | None

    def tensors(
        self, tensors: Sequence[Operand], leaves: Sequence[Any]
    ) -> list[Operand] | None:
        """Return the tensors of a call followed by those found outside, or None if the
        global state that the function reads has changed."""
        if self.outside is None:
            return list(tensors)
        others = self.outside.find(leaves)
        return None if others is None else [*tensors, *others]

    def sizes(self, tensors: Sequence[Operand]) -> list[Operand] | None:
        """Return the values of the body's symbols for these tensors, or None if the
        shapes do not fit or a condition has another value."""
        tracer, symbols = current(), self.graph.symbols
        if not symbols:
            return []
        size_of = self.sizes_of_symbols([t.type for t in self.inputs(tensors)])
        if size_of is None or not isinstance(tracer, Tracer):
            return None
        try:
            for condition, answer in self.conditions:
                value = condition.substitute(lambda s: terms_of(size_of[s]))
                if bool(value) is not answer:
                    return None
        except DataDependentError:
            return None
        sizes = [size_of[v.node.symbol] for v in symbols if v.node.symbol]
        return [_as_operand(tracer, n) for n in sizes]

    def sizes_of_symbols(
        self, types: Sequence[TensorType]
    ) -> dict[Symbol, Size] | None:
        """Return the sizes of the body's symbols for inputs of these types, or None if
        they do not fit."""
        sizes: dict[Symbol, Size] = {}
        inputs = self.graph.inputs[len(self.graph.symbols) :]
        for var, type_ in zip(inputs, types, strict=True):
            match_shapes(var.type.shape, type_.shape, sizes)
        for var, type_ in zip(inputs, types, strict=True):
            declared = [substitute(n, sizes) for n in var.type.shape]
            # Comparing terms decides also for sizes that are not known.
            if list(map(terms_of, declared)) != list(map(terms_of, type_.shape)):
                return None
        return sizes

    @property
    def is_general(self) -> bool:
        """Return True if the shapes of the inputs determine all symbols of the body and
        conditions."""
        inputs = self.graph.inputs[len(self.graph.symbols) :]
        sizes = self.sizes_of_symbols([v.type for v in inputs]) or {}
        named = [v.node.symbol for v in self.graph.symbols]
        return sizes.keys() >= {
            *named,
            *(s for c, _ in self.conditions for s in c.symbols),
        }

    def may_serve(self, tensors: Sequence[Operand]) -> bool:
        """Return True unless a write to one of these tensors would be seen through
        another."""
        return not (self.targets and share_memory(self.inputs(tensors)))

    def inputs(self, tensors: Sequence[Operand]) -> list[Operand]:
        """Return the operands and the captures of a call."""
        captures = [tensors[c] if isinstance(c, int) else c for c in self.captures]
        return [*tensors[: len(self.graph.operands)], *captures]

    def run(self, call: Call, tensors: Sequence[Operand], sizes: list[Operand]) -> Any:
        """Bind a node, which shares the body with the others of the present trace."""
        body = once(self.graph, "body", lambda: clone(self.graph))
        args = [*sizes, *self.inputs(tensors)]
        results = bind(INVOKE_SUBGRAPH, args, {"body": body})
        commit([tensors[i] for i in self.targets], results[self.results :])
        return pytree.unflatten(self.spec, results[: self.results])


# The traces of each kind of call, the last used first; the last used kind at the end.
_cache: OrderedDict[Hashable, list[_SharedTrace]] = OrderedDict()
_lock: Final = RLock()
_MOST_KINDS = 1024
_MOST_TRACES: Final = 8  # of one kind, under different conditions on sizes


class _Tracing(local):
    """The calls that this thread traces, by kind and sizes, each nested in the one
    before."""

    calls: tuple[Hashable, ...] = ()


_tracing: Final = _Tracing()


def _candidates(key: Hashable) -> list[_SharedTrace]:
    with _lock:
        traces = _cache.get(key, [])
        if traces and next(reversed(_cache.values())) is not traces:
            _cache.move_to_end(key)
        return traces


def _remember(key: Hashable, trace: _SharedTrace) -> None:
    """Keep a trace as the last used one."""
    with _lock:
        older = [k for k in _cache.pop(key, ()) if k is not trace]
        _cache[key] = [trace, *older][:_MOST_TRACES]
        while len(_cache) > _MOST_KINDS:
            _cache.popitem(last=False)


@deep_recursion()
def _run(
    call: Call,
    fn: Callable[..., Any],
    static: Hashable,
    static_leaves: Sequence[Any] = (),
    on_trace: Callable[[], None] | None = None,
) -> Any:
    """Return the result of a call of `fn`, which is traced if no trace can be shared.

    Args:
        static: A key of the arguments that are not tensors or numbers.
        static_leaves: These arguments.
        on_trace: Called before a trace.
    """
    around = Surroundings(call.name, fn, static_leaves)
    if debugging():
        return INVOKE_SUBGRAPH.run_debug(call)
    tensors = [*call.operands, *around.tensors]
    key = (
        *(around.key, static, len(call.operands)),
        *(_type_key(t) for t in tensors),
        *_first_indices(tensors),
    )
    leaves = fn, *static_leaves
    with unchanged_on_error():
        for k, trace in enumerate(_candidates(key)):
            all_tensors = trace.tensors(tensors, leaves)
            sizes = None if all_tensors is None else trace.sizes(all_tensors)
            if (
                all_tensors is not None
                and sizes is not None
                and trace.may_serve(all_tensors)
            ):
                if k:
                    _remember(key, trace)
                if trace.outside is not None:
                    for recorder in recorders():
                        recorder.add(trace.outside, leaves)
                return trace.run(call, all_tensors, sizes)
        with _tracing_call(call.name, fn, key, tensors):
            if on_trace is not None:
                on_trace()
            return _trace(call, tensors, key, leaves)


@contextmanager
def _tracing_call(
    name: str, fn: Any, key: Hashable, tensors: Sequence[Operand]
) -> Iterator[None]:
    """Mark a call of this kind and these sizes as being traced within the block.

    Raises:
        EndlessTraceError: it is already, so that the trace would not end.
    """
    types = [type_key(t.type, terms_of) for t in tensors]
    signature = key, len(rules_around()), *types  # a rule may call its function
    before = _tracing.calls
    if signature in before:
        raise EndlessTraceError(
            f"{name}: `{name_of(fn)}` ({where(fn)}) calls itself on tensors of the "
            "same types, with the same other values, so that its trace has no end. "
            "Loop with `hf.while_loop`, or pass what ends it as an argument that is no "
            "tensor."
        )
    _tracing.calls = (*before, signature)
    try:
        yield
    finally:
        _tracing.calls = before


def _trace(
    call: Call, tensors: Sequence[Operand], key: Hashable, leaves: Sequence[Any]
) -> Any:
    """Trace a call, cache the trace if other calls may share it, and bind its node."""
    env = getattr(current(), "env", None)
    recorder = Recorder(is_of_body=True)
    for k, leaf in enumerate(leaves):
        recorder.add_root(leaf, Path(None, "argument", k))
    with (
        env.noting() if env is not None else nullcontext([]) as noted,
        watching(recorder),
    ):
        traced = INVOKE_SUBGRAPH.trace_branches(call)
    closed = traced.closed
    outside, all_tensors, position = _outside_reads(traced, tensors, recorder, leaves)
    captures = [position(c) for c in closed.captures]
    targets = [position(t) for t in traced.targets]
    indices = [c for c in captures if c is not None]
    written = [t for t in targets if isinstance(t, int)]
    conditions = list({n: None for n in noted if n is not None})
    [graph] = closed.graphs
    shared = _SharedTrace(
        *(
            clone(graph),
            traced.spec,
            indices,
            traced.results,
            written,
            conditions,
            outside,
        )
    )
    if (
        len(indices) < len(captures)
        or len(written) < len(targets)
        or None in noted
        or (outside is not None and outside.changes)
        or not shared.is_general
        or not shared.may_serve(all_tensors)
        or refers_outside(graph)
    ):
        return INVOKE_SUBGRAPH.finish(call, traced)
    once(shared.graph, "body", lambda: graph)  # also shares its nested bodies
    _remember(key, shared)
    return shared.run(call, all_tensors, closed.symbols)


def _outside_reads(
    traced: Any,
    tensors: Sequence[Operand],
    recorder: Recorder,
    leaves: Sequence[Any],
) -> tuple[Guard | None, list[Operand], Callable[[Operand], int | Value | None]]:
    """Return the global state that a trace has read; the tensors of the call followed
    by those found there; and a function that returns the position of a captured
    tensor."""
    values = [*traced.closed.captures, *traced.targets]
    origins = {id(x): x for x in map(_outermost, values) if isinstance(x, EagerTensor)}
    outside = recorder.guard([*origins.values()], [], leaves)
    reads = [] if outside is None else outside.wanted
    pairs = enumerate(zip(origins, reads, strict=outside is not None))
    at = {key: len(tensors) + k for k, (key, w) in pairs if w.path is not None}

    def position(value: Operand) -> int | Value | None:
        index = at.get(id(_outermost(value)))
        return _position(value, tensors) if index is None else index

    return outside, [*tensors, *(origins.values() if reads else ())], position


def _position(value: Operand, tensors: Sequence[Operand]) -> int | Value | None:
    """Return the index of a captured tensor among those of the call, the tensor itself
    if the body builds it from numbers, or None if it comes from elsewhere."""
    origin: Any = value
    while origin is not None:
        for i, tensor in enumerate(tensors):
            if tensor is origin or _is_same_array(tensor, origin):
                return i
        last, origin = origin, getattr(origin, "origin", None)
    tracer = current()
    adopted = tracer.is_adopted if isinstance(tracer, Tracer) else lambda _: True
    return last if is_private(last, adopted) else None


def _is_same_array(a: Operand, b: Operand) -> bool:
    """Return True if both tensors view one NumPy array, which each use wraps anew."""
    if not (isinstance(a, EagerTensor) and isinstance(b, EagerTensor)):
        return False
    places = [(t.pointer, t.array.strides, t.type) for t in (a, b)]
    return places[0] == places[1]


def _as_operand(tracer: Tracer, size: Size) -> Operand:
    symbol = plain_symbol(size)
    if symbol is not None:
        return TracedTensor(tracer, tracer.symbol(symbol))
    assert isinstance(size, SymInt)
    return tracer.value_of(size)


class Subgraph(Transformed):
    """A function that is traced once for each kind of call; see `subgraph`.

    traces   the number of its calls that were traced
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        require_callable("subgraph", "f", fn)
        super().__init__(fn)
        self.fn = fn
        self.traces = 0
        self._numbers = Numbers()

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        return Subgraph, (self.fn,)

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        traces, spec = self.traces, pytree.structure((args, kwargs))

        def run(constants: bool) -> Any:
            self.traces = traces
            call, static = call_of(
                "subgraph", self.fn, args, kwargs, constants=constants
            )
            key = *map(_hashable, static), spec
            return _run(call, self.fn, key, static, self._count)

        return self._numbers.call((args, kwargs), run)

    def _count(self) -> None:
        self.traces += 1


def _is_data(leaf: Any) -> bool:
    return _is_number(leaf) or isinstance(leaf, Value | np.ndarray | np.generic)


def _is_number(leaf: Any) -> bool:
    is_scalar = isinstance(leaf, bool | np.generic)
    return isinstance(leaf, int | float | SymInt | SymFloat) and not is_scalar


def _type_key(operand: Operand) -> Hashable:
    """Return a key of the operand for sharing traces: its type, and the known size of
    an integer."""
    key, tracer = type_key(operand.type), current()
    if operand.type.shape or not isinstance(operand, TracedTensor):
        return key
    if not isinstance(tracer, Tracer):
        return key
    size = tracer.known_size(tracer.read(tracer.localize(operand)))
    return key, None if size is None else terms_of(size)


def _first_indices(operands: Sequence[Operand]) -> list[int]:
    """Return for each tensor the first index at which it occurs, under any name."""
    first: dict[int, int] = {}
    return [first.setdefault(id(_outermost(o)), i) for i, o in enumerate(operands)]


def _outermost(operand: Operand) -> Operand:
    """Return the tensor of the outermost trace that inner traces captured as this
    one."""
    while (origin := getattr(operand, "origin", None)) is not None:
        operand = origin
    return operand


def _hashable(leaf: Any) -> Hashable:
    if isinstance(leaf, SymInt):
        return leaf.expression
    if isinstance(leaf, SymFloat):
        return Same(leaf)
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            "subgraph: an argument that is no tensor or number must be hashable, and a "
            f"`{type(leaf).__name__}` is not. Make it a pytree, or close over it."
        ) from None
    return pytree.exact_key(leaf)


def subgraph(fn: Callable[..., Any]) -> Subgraph:
    """A decorator that makes `fn` a node of its own, traced once for each kind of call.

    Its derivatives are traced once too, and a compiled program has one native function
    for all calls of a kind, unless it is small enough to be inlined. Two calls are of
    one kind if they agree in:

    - the code of `fn`, and the globals that it reads;
    - the types of tensors and numbers, passed or read from enclosing functions and
      modules; all of these are operands of the node;
    - the values of other arguments, defaults and closure variables, which must be
      hashable;
    - the values of numbers that `fn` needs to know: `if n == 0`, `range(n)`.

    So two hundred layers, each of which closes over its own weights, are traced once.

    Raises:
        ArgumentTypeError: an argument cannot be hashed, or `fn` is not a function.
        ResultTypeError: `fn` returns something other than tensors and numbers.
        UnhashableCaptureError: `fn` closes over a value that cannot be hashed.
        EndlessTraceError: `fn` calls itself without end.

    >>> @hf.subgraph
    ... def layer(x, w):
    ...     return hf.tanh(x @ w)
    >>> layer(hf.zeros((2, 3)), hf.zeros((3, 3))).shape
    (2, 3)
    """
    return Subgraph(fn)
