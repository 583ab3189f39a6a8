"""`invoke_subgraph`, `@subgraph`: a function as a node, traced once. All its rules."""

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
    """`f(*operands)` as one node of the graph, whose body all such calls share.

    See `subgraph` for what is traced, differentiated and compiled once.

    Args:
        f: Returns any pytree. It may read and write tensors of enclosing functions.
        operands: Pytrees of tensors and numbers.

    Raises:
        ArgumentTypeError: an operand is no tensor or number.
        ResultTypeError: `f` returns what is no tensor or number.
        UnhashableCaptureError: `f` closes over what cannot be hashed.
        EndlessTraceError: `f` calls itself without an end.
    """
    call = INVOKE_SUBGRAPH.prepare(f, operands)
    return _run(call, f, pytree.structure(operands))


class Numbers:
    """What becomes of the Python numbers that a function is given: operands, so that
    one trace serves all of them, until the function turns out to need their values."""

    def __init__(self) -> None:
        self.are_constants = False

    def call(self, arguments: Any, run: Callable[[bool], Any]) -> Any:
        """What `run` gives.

        Args:
            arguments: A pytree of what the function is given.
            run: Calls the function, with constants for numbers or not. It has no effect
                if it raises.
        """
        if not self.are_constants:
            try:
                return run(False)
            except EndlessTraceError:
                raise
            except (TypeError, DataDependentError):  # it asks a tensor for its value
                if not any(map(_is_number, pytree.flatten(arguments)[0])):
                    raise
        found = run(True)
        self.are_constants = True
        return found


def call_of(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    constants: bool = False,
) -> tuple[Call, list[Any]]:
    """`fn(*args, **kwargs)` as a call of the tensors and numbers among the arguments,
    or of the tensors if numbers are `constants`; and the other leaves, which `fn` gets
    as they are."""
    leaves, spec = pytree.flatten((args, kwargs))
    is_data = [_is_data(x) and not (constants and _is_number(x)) for x in leaves]
    pairs = list(zip(leaves, is_data, strict=True))
    operands, _ = flatten_operands(name, "args", [x for x, data in pairs if data])

    def call(flat: Sequence[Any]) -> Any:
        rest = iter(flat)
        merged = [next(rest) if data else leaf for leaf, data in pairs]
        own_args, own_kwargs = pytree.unflatten(spec, merged)
        return fn(*own_args, **own_kwargs)

    names = [f"x{i}" for i in range(len(operands))]
    body = Function("f", fn, names, call)
    static = [leaf for leaf, data in pairs if not data]
    return Call(name, [], operands, {"body": body}), static


# --- one trace for many calls ---------------------------------------------------------


class _Known(NamedTuple):
    """A trace of a function, for calls that differ from the first in values only.

    graph     the body, which nobody changes
    captures  what it takes beside the operands: where among the tensors of the call,
              and behind them those that `outside` finds; or a tensor that the function
              makes of numbers
    results   how many of the node's results the user gets; the rest is what is written
    targets   where the tensors are that the rest is written to
    asked     conditions on its symbols that decided what it is
    outside   what it has read from outside: paths from the function and its arguments
              that are no data
    """

    graph: Graph
    spec: Spec
    captures: list[int | Value]
    results: int
    targets: list[int]
    asked: list[tuple[SymBool, bool]]
    outside: Guard | None

    def tensors(
        self, tensors: Sequence[Operand], leaves: Sequence[Any]
    ) -> list[Operand] | None:
        """These tensors of a call, and those that are found from outside; None: what
        the function reads is not what it was."""
        if self.outside is None:
            return list(tensors)
        found = self.outside.find(leaves)
        return None if found is None else [*tensors, *found]

    def sizes(self, tensors: Sequence[Operand]) -> list[Operand] | None:
        """What the symbols of the body are for these tensors; None: they do not fit, or
        what the body has asked of sizes has another answer."""
        tracer, symbols = current(), self.graph.symbols
        if not symbols:
            return []
        found = self.told([t.type for t in self.taken(tensors)])
        if found is None or not isinstance(tracer, Tracer):
            return None
        try:
            for condition, answer in self.asked:
                there = condition.substitute(lambda s: terms_of(found[s]))
                if bool(there) is not answer:
                    return None
        except DataDependentError:
            return None
        sizes = [found[v.node.symbol] for v in symbols if v.node.symbol]
        return [_as_operand(tracer, n) for n in sizes]

    def told(self, types: Sequence[TensorType]) -> dict[Symbol, Size] | None:
        """The body's symbols, by the shapes that it is given; None: they do not fit."""
        found: dict[Symbol, Size] = {}
        own = self.graph.inputs[len(self.graph.symbols) :]
        for var, type_ in zip(own, types, strict=True):
            match_shapes(var.type.shape, type_.shape, found)
        for var, type_ in zip(own, types, strict=True):
            declared = [substitute(n, found) for n in var.type.shape]
            # Sizes may be undecided, where terms are equal or not.
            if list(map(terms_of, declared)) != list(map(terms_of, type_.shape)):
                return None
        return found

    @property
    def is_general(self) -> bool:
        """Whether shapes tell all symbols that it has, and has asked for."""
        own = self.graph.inputs[len(self.graph.symbols) :]
        told = self.told([v.type for v in own]) or {}
        named = [v.node.symbol for v in self.graph.symbols]
        return told.keys() >= {*named, *(s for c, _ in self.asked for s in c.symbols)}

    def may_serve(self, tensors: Sequence[Operand]) -> bool:
        """Whether a write to one of these tensors is not seen by another."""
        return not (self.targets and share_memory(self.taken(tensors)))

    def taken(self, tensors: Sequence[Operand]) -> list[Operand]:
        """The operands and the captures of a call."""
        captures = [tensors[c] if isinstance(c, int) else c for c in self.captures]
        return [*tensors[: len(self.graph.operands)], *captures]

    def run(self, call: Call, tensors: Sequence[Operand], sizes: list[Operand]) -> Any:
        """Bind a node that shares the body with the others of the present trace."""
        body = once(self.graph, "body", lambda: clone(self.graph))
        args = [*sizes, *self.taken(tensors)]
        results = bind(INVOKE_SUBGRAPH, args, {"body": body})
        commit([tensors[i] for i in self.targets], results[self.results :])
        return pytree.unflatten(self.spec, results[: self.results])


# By the kind of call, the kind used last at the end; of each the trace used last first.
_known: OrderedDict[Hashable, list[_Known]] = OrderedDict()
_lock: Final = RLock()
_MOST_KNOWN = 1024
_MOST_ALIKE: Final = 8  # which differ in what they ask of sizes


class _Tracing(local):
    """The calls that this thread traces, by kind and sizes, each within the last."""

    calls: tuple[Hashable, ...] = ()


_tracing: Final = _Tracing()


def _candidates(key: Hashable) -> list[_Known]:
    with _lock:
        found = _known.get(key, [])
        if found and next(reversed(_known.values())) is not found:
            _known.move_to_end(key)
        return found


def _remember(key: Hashable, known: _Known) -> None:
    """Keep a trace as the one that was used last."""
    with _lock:
        others = [k for k in _known.pop(key, ()) if k is not known]
        _known[key] = [known, *others][:_MOST_ALIKE]
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)


@deep_recursion()
def _run(
    call: Call,
    fn: Callable[..., Any],
    static: Hashable,
    given: Sequence[Any] = (),
    on_trace: Callable[[], None] | None = None,
) -> Any:
    """The results of a call of `fn`, traced if no trace serves it.

    Args:
        static: What of the arguments is no tensor or number, as a key.
        given: The same, as it is.
        on_trace: Called before a trace.
    """
    around = Surroundings(call.name, fn, given)
    if debugging():
        return INVOKE_SUBGRAPH.run_debug(call)
    tensors = [*call.operands, *around.tensors]
    key = (
        *(around.key, static, len(call.operands)),
        *(_type_key(t) for t in tensors),
        *_first_same(tensors),
    )
    leaves = fn, *given
    with unchanged_on_error():
        for k, known in enumerate(_candidates(key)):
            every = known.tensors(tensors, leaves)
            sizes = None if every is None else known.sizes(every)
            if every is not None and sizes is not None and known.may_serve(every):
                if k:
                    _remember(key, known)
                if known.outside is not None:
                    for recorder in recorders():
                        recorder.add(known.outside, leaves)
                return known.run(call, every, sizes)
        with _once_within_itself(call.name, fn, key, tensors):
            if on_trace is not None:
                on_trace()
            return _trace(call, tensors, key, leaves)


@contextmanager
def _once_within_itself(
    name: str, fn: Any, key: Hashable, tensors: Sequence[Operand]
) -> Iterator[None]:
    """Within the block a call of this kind and these sizes is being traced.

    Raises:
        EndlessTraceError: it is so already, and would be again within that.
    """
    types = [type_key(t.type, terms_of) for t in tensors]
    this = key, len(rules_around()), *types  # a rule may call what it is a rule of
    before = _tracing.calls
    if this in before:
        raise EndlessTraceError(
            f"{name}: `{name_of(fn)}` ({where(fn)}) calls itself on tensors of the "
            "same types, with the same other values, so that its trace has no end. "
            "Loop with `hf.while_loop`, or pass what ends it as an argument that is no "
            "tensor."
        )
    _tracing.calls = (*before, this)
    try:
        yield
    finally:
        _tracing.calls = before


def _trace(
    call: Call, tensors: Sequence[Operand], key: Hashable, leaves: Sequence[Any]
) -> Any:
    """Trace a call, keep the trace for others if it may serve them, and run it."""
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
    outside, every, position = _found_outside(traced, tensors, recorder, leaves)
    captures = [position(c) for c in closed.captures]
    targets = [position(t) for t in traced.targets]
    found = [c for c in captures if c is not None]
    written = [t for t in targets if isinstance(t, int)]
    asked = list({n: None for n in noted if n is not None})
    [graph] = closed.graphs
    known = _Known(
        *(clone(graph), traced.spec, found, traced.results, written, asked, outside)
    )
    if (
        len(found) < len(captures)
        or len(written) < len(targets)
        or None in noted
        or (outside is not None and outside.changes)
        or not known.is_general
        or not known.may_serve(every)
        or refers_outside(graph)
    ):
        return INVOKE_SUBGRAPH.finish(call, traced)
    once(known.graph, "body", lambda: graph)  # with the bodies that it shares itself
    _remember(key, known)
    return known.run(call, every, closed.symbols)


def _found_outside(
    traced: Any,
    tensors: Sequence[Operand],
    recorder: Recorder,
    leaves: Sequence[Any],
) -> tuple[Guard | None, list[Operand], Callable[[Operand], int | Value | None]]:
    """What a trace has read from outside; the tensors of the call and those that are
    found so; and where a tensor that the body reads or writes is among them."""
    values = [*traced.closed.captures, *traced.targets]
    origins = {id(x): x for x in map(_lender, values) if isinstance(x, EagerTensor)}
    outside = recorder.guard([*origins.values()], [], leaves)
    wanted = [] if outside is None else outside.wanted
    pairs = enumerate(zip(origins, wanted, strict=outside is not None))
    at = {one: len(tensors) + k for k, (one, w) in pairs if w.path is not None}

    def position(value: Operand) -> int | Value | None:
        found = at.get(id(_lender(value)))
        return _position(value, tensors) if found is None else found

    return outside, [*tensors, *(origins.values() if wanted else ())], position


def _position(value: Operand, tensors: Sequence[Operand]) -> int | Value | None:
    """Where a tensor that a body reads or writes is among those of the call; the tensor
    itself if the body makes it of numbers; None: it is from anywhere else."""
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
    """Whether tensors are of one NumPy array, of which each use makes another one."""
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

    traces   how many of its calls were traced
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
    """What a trace depends on: the type, and the size that an integer is known as."""
    key, tracer = type_key(operand.type), current()
    if operand.type.shape or not isinstance(operand, TracedTensor):
        return key
    if not isinstance(tracer, Tracer):
        return key
    size = tracer.known_size(tracer.read(tracer.localize(operand)))
    return key, None if size is None else terms_of(size)


def _first_same(operands: Sequence[Operand]) -> list[int]:
    """Where each tensor stands first: as an operand, or as what a caller lent."""
    first: dict[int, int] = {}
    return [first.setdefault(id(_lender(o)), i) for i, o in enumerate(operands)]


def _lender(operand: Operand) -> Operand:
    """The tensor, of the outermost trace, that calls have lent each other as this."""
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
    """A decorator: `fn` is a node of its own, traced once for all calls of one kind.

    So are its derivatives, and a compiled program has one native function for all calls
    of it, unless it is so small that it is put in their places. Calls are of one kind
    if these are the same: the code; the types of tensors and numbers that are given, or
    that `fn` reads from enclosing functions and modules (all of which are operands of
    the node); the values of other arguments, of defaults, and of variables that it
    closes over, which must be hashable; and what the globals hold that it reads. So two
    hundred layers, each of which closes over weights of its own, are traced once. The
    values of numbers count, too, where `fn` has to know them: `if n == 0`, `range(n)`.

    Raises:
        ArgumentTypeError: an argument cannot be hashed, or `fn` is no function.
        ResultTypeError: `fn` returns what is no tensor or number.
        UnhashableCaptureError: `fn` closes over what cannot be hashed.
        EndlessTraceError: `fn` calls itself without an end.
    """
    return Subgraph(fn)
