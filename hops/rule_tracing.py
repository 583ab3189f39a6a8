"""Tracing custom derivative rules to graphs; see `rule_regions`."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.autograd.linearize import LinearTracer, counted
from hopflow.autograd.pullback import PullbackRule
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.tape import Tape
from hopflow.bind import Interpreter, Operand, Value, current, using
from hopflow.errors import DerivativeError, ResultTypeError
from hopflow.graph.core import Graph, size_of
from hopflow.graph.rewriting import clone
from hopflow.graph.types import TensorType
from hopflow.hops.base import RegionOperator, graphs_of
from hopflow.hops.subgraphs import (
    Body,
    Closed,
    Function,
    close_bodies,
    joined,
    trace_body,
    unknown_sizes,
    with_symbols,
)
from hopflow.ops.convert import as_value
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Symbol
from hopflow.trace.closures import type_key
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import mark, rollback, unchanged_on_error
from hopflow.trace.source import user_env
from hopflow.trace.stand_ins import Known, Read, only_read, recording, substituted
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero, instantiate, is_zero

Pushed: TypeAlias = tuple[Sequence[Value], Sequence[Tangent]]
"""Results, and their tangents."""
_Traced: TypeAlias = tuple[list[Body], dict[str, Any]]
"""The graphs of a rule, and the other params that a node has of it."""
Pulled: TypeAlias = tuple[Sequence[Value], Sequence[Value], PullbackRule]
"""Results, residuals, and the pullback from these to cotangents of inputs `wrt`."""


class Rules:
    """The rules that a user has written, as functions of the flat inputs of a call.

    name     the operator's name in messages
    owner    the function or class that has the rules; its calls may be of several kinds
    offered  the rules that exist: "jvp", "vjp"
    wrt      the inputs for which they give derivatives
    below    for a call on a tape: maps a tensor of the tape to the one below, on which
             rules run
    """

    name: str
    owner: Any
    offered: tuple[str, ...]
    wrt: tuple[int, ...]
    below: Known | None = None

    @property
    def kind(self) -> Any:
        """Return a key that is equal for calls whose rules differ only in their
        types."""
        raise NotImplementedError

    def push(self, values: Sequence[Value], tangents: Sequence[Tangent]) -> Pushed:
        """Run the rule for tangents, with one for each of `values`."""
        raise NotImplementedError

    def pull(self, values: Sequence[Value]) -> Pulled:
        """Run the rule for cotangents."""
        raise NotImplementedError

    def refused(self, type_: TensorType) -> DerivativeError:
        """Return the error for reading a tensor that has a tangent."""
        raise NotImplementedError

    def leave(self, tapes: Sequence[Tape]) -> None:
        """Let rules run below `tapes` (the innermost first), where they may read the
        tensors of a tape that have no tangent."""

        def lowered(tensor: Value) -> Value | None:
            for tape in tapes:
                if isinstance(tensor, TracedTensor) and tensor.tracer is tape:
                    var = tape.read(tensor)
                    if not is_zero(tape.tangent(var)):
                        raise self.refused(tensor.type)
                    tensor = as_value(tape.values[var])
            return tensor

        self.below = lowered

    def at(self, _symbols: Sequence[Operand]) -> "Rules":
        """Return the rules of a node with these symbols."""
        return self


def as_pair(rule: str, pair: Any, second: str) -> Any:
    """Return the pair that a rule has returned.

    Raises:
        ResultTypeError: it is not a pair of a result and `second`.
    """
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if is_pair and (second != "pullback" or callable(pair[1])):
        return pair
    raise ResultTypeError(
        f"{rule} must return a pair (result, {second}), and returns "
        f"`{type(pair).__name__}`."
    )


def kind_of_value(value: Any) -> Any:
    """Return a key that is equal only for static arguments that surely are the same."""
    plain = (bool, int, float, complex, str, bytes)
    return (type(value), value) if isinstance(value, plain) else id(value)


@dataclass(frozen=True, eq=False)
class Failed:
    """Stands for the graph of a rule that could not be traced. The error is raised when
    a derivative is taken."""

    error: Exception

    def __repr__(self) -> str:
        return f"<{type(self.error).__name__}>"

    def structural_key(self) -> str:
        return f"Failed {id(self)}"


# --- sparse lists of tangents ---------------------------------------------------------


def packed(tangents: Sequence[Tangent], places: list[int]) -> list[Value]:
    """Return the tangents that are not zero, and put their indices into `places`."""
    places[:] = [k for k, t in enumerate(tangents) if not is_zero(t)]
    return [instantiate(tangents[k]) for k in places]


def unpacked(
    types: Iterable[TensorType], places: Sequence[int], nonzero: Iterable[Value]
) -> list[Tangent]:
    """Return tangents of these types: `nonzero` at `places`, and zeros elsewhere."""
    by_place = dict(zip(places, nonzero, strict=True))
    return [by_place[k] if k in by_place else Zero(t) for k, t in enumerate(types)]


def types_of(values: Iterable[Any]) -> list[TensorType]:
    return [x.type for x in values]


# --- tracing --------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A rule that is being traced, and the kind of call that it belongs to."""

    tracer: Interpreter
    owner: Any
    kind: Any


class _Reads(NamedTuple):
    """Tensors and sizes of outer scopes that rules read."""

    tensors: Sequence[Read] = ()
    symbols: Sequence[Symbol] = ()


class _Present(threading.local):
    """The rules that this thread traces, each nested in the one before.

    reads     tensors and sizes that they read, as far as is known
    has_late  whether a call in them has `late` rules
    """

    frames: tuple[_Frame, ...] = ()
    reads: _Reads = _Reads()
    has_late: bool = False


_present: Final = _Present()
_DEEPEST: Final = 4
"""The largest nesting of rules that are traced: each might create a new function."""
_DEEPEST_OF_ONE: Final = 2
"""The same for one function: each rule might call it with other arguments."""


@contextmanager
def _tracing_rule(owner: Any, kind: Any) -> Iterator[None]:
    """Note in the block that a rule of this kind of call is being traced."""
    before = _present.frames
    _present.frames = (*before, _Frame(current(), owner, kind))
    try:
        yield
    finally:
        _present.frames = before


def rules_around() -> list[Any]:
    """Return the kinds of calls whose rules enclose the present trace, the innermost
    first."""
    around: list[Interpreter] = []
    interpreter: Interpreter | None = current()
    while interpreter is not None:
        around.append(interpreter)
        interpreter = interpreter.parent
    return [f.kind for f in reversed(_present.frames) if f.tracer in around]


def with_rules(
    op: RegionOperator, rules: Rules, closed: Closed, operands: Sequence[Operand]
) -> tuple[Closed, dict[str, Any]]:
    """Return the graphs of a call together with those of its rules, and the params that
    describe the rules. An error in a rule is raised when a derivative is taken."""
    around = _below_tapes(rules, [*operands, *closed.captures])
    if around is None:
        return closed, {"rules": rules}  # they run at once, on values
    if around.is_eager:
        return closed, {}
    types = types_of([*operands, *closed.captures])
    kind = rules.kind, [type_key(t, terms_of) for t in types]
    kinds = rules_around()
    if kind in kinds:
        return closed, {"depth": kinds.index(kind)}
    same_owner = [frame.owner is rules.owner for frame in _present.frames]
    if len(same_owner) >= _DEEPEST or sum(same_owner) >= _DEEPEST_OF_ONE:
        return _with_late_rules(rules, closed, len(operands))
    tracing = _Tracing(op, rules, kind, types, closed.captures)
    params: dict[str, Any] = {"wrt": rules.wrt}
    parts = [closed]
    for rule in rules.offered:
        try:
            with unchanged_on_error():
                bodies, extra = _traced_with_reads(
                    tracing.jvp if rule == "jvp" else tracing.vjp
                )
                parts.append(close_bodies(bodies))
        except Exception as error:
            params |= dict.fromkeys(GRAPHS[rule], Failed(error))
        else:
            params |= dict(zip(GRAPHS[rule], parts[-1].graphs, strict=True)) | extra
    return joined(parts), params


class _Regions(NamedTuple):
    """The params of a node that describe its rules, and captures that only these
    read."""

    params: dict[str, Any]
    captures: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Late:
    """Rules of a call that become graphs when a derivative is taken.

    reads    tensors of outer scopes that they read
    places   the inputs of the call that replace these tensors
    symbols  which of the symbols of the call are those of its function
    memo the traced rules by the graph of the call, which determines the types
    """

    rules: Rules
    reads: Sequence[Read]
    places: Sequence[int]
    symbols: slice
    memo: dict[Graph, _Regions] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{type(self.rules).__name__}>"

    def structural_key(self) -> str:
        return f"Late {id(self)}"

    def regions(self, op: RegionOperator, params: dict[str, Any]) -> _Regions:
        """Return the rules of a node with these params."""
        body = graphs_of(params)[0]
        if body not in self.memo:  # copies of a call have other graphs: keep one
            self.memo.clear()
            self.memo[body] = self.traced(op, body, params.get("examples", ()))
        return self.memo[body]

    def traced(
        self, op: RegionOperator, body: Graph, examples: Sequence[tuple[bool, ...]]
    ) -> _Regions:
        """Trace the rules for the types of `body`, without its batch dimensions."""
        tracer = Tracer(None, body.name, env=user_env())
        symbols = list(map(tracer.input_like, body.symbols))
        inputs: list[Value] = []
        for k, var in enumerate(body.inputs[len(symbols) :]):
            type_ = var.type.strong()
            for mask in examples:
                type_ = of_one(type_) if mask[k : k + 1] == (True,) else type_
            inputs.append(tracer.operand(type_, var.node.name))
        count = len(body.operands)
        closed = Closed([clone(body)], [*symbols], [*inputs[count:]])
        rules = self.rules.at(symbols[self.symbols])
        with using(tracer), substituted(self.reads, [inputs[k] for k in self.places]):
            all_, params = with_rules(op, rules, closed, inputs[:count])
        num_captures = len(inputs) - count
        origins = {id(c.tensor): c.origin for c in tracer.captures.values()}
        reads = [
            origins.get(id(value), value) for value in all_.captures[num_captures:]
        ]
        return _Regions(params, reads)


def _with_late_rules(
    rules: Rules, closed: Closed, operands: int
) -> tuple[Closed, dict[str, Any]]:
    """Return a call whose rules run when a derivative is taken. It captures the tensors
    that the enclosing rules read, since its rules are those of the same functions."""
    _present.has_late = True
    tracer, reads = current(), _present.reads
    symbols = reads.symbols if isinstance(tracer, Tracer) else ()
    graph = with_symbols(Graph("late"), symbols)
    for read in reads.tensors:
        graph.add_input(read.tensor.type, "read", "capture")
    values = [tracer.value_of(size_of(symbol)) for symbol in symbols]
    captures = [read.tensor for read in reads.tensors]
    count = len(closed.symbols)
    closed = joined([closed, Closed([graph], [*values], [*captures])])
    closed.graphs.pop()
    at = {id(value): operands + k for k, value in enumerate(closed.captures)}
    places = [at[id(value)] for value in captures]
    extra = len(closed.symbols) - count  # a batch adds symbols in front
    selected = slice(-count - extra, -extra or None) if count else slice(0)
    return closed, {"late": Late(rules, reads.tensors, places, selected)}


def _traced_with_reads(trace: Callable[[], _Traced]) -> _Traced:
    """Return the result of `trace`, which traces the rules of a call. If calls in them
    have late rules, call it again: these capture the tensors that were read the first
    time."""
    if _present.frames:
        return trace()
    tracer = current()
    marks = mark(tracer) if isinstance(tracer, Tracer) else []
    _present.has_late = False
    with recording(tracer) as tensors:
        traced = bodies, _ = trace()
    if not _present.has_late:
        return traced
    tracers = [body.tracer for body in bodies]
    rollback(marks)
    only_read(tensors.values())
    _present.reads = _Reads(
        [Read(x, any(t.is_adopted(x) for t in tracers)) for x in tensors.values()],
        [
            s
            for t in tracers
            for s, v in t.symbols.items()
            if v.node.section == "symbol"
        ],
    )
    try:
        return trace()
    finally:
        _present.reads = _Reads()


def _below_tapes(rules: Rules, operands: Sequence[Operand]) -> Interpreter | None:
    """Return the interpreter around the tapes that enclose a call. Return None if a
    tape has a tangent of an input: the rules then run at once, below the tapes."""
    inner, tapes = current(), list[Tape]()
    while isinstance(inner, Tape | LinearTracer):
        if isinstance(inner, Tape):
            tapes.append(inner)
            pairs = [inner.current(x) for x in operands]
            if not all(map(is_zero, counted([t for _, t in pairs], inner.linear))):
                rules.leave(tapes)
                return None
            operands, around = [value for value, _ in pairs], inner.parent
        else:
            operands, around = (
                [inner.below(x) for x in operands],
                inner.base,
            )
            if any(isinstance(x, TracedTensor) and x.tracer is inner for x in operands):
                return inner
        assert around is not None
        inner = around
    return inner


GRAPHS: Final = {"jvp": ("jvp",), "vjp": ("forward", "backward")}
PARAMS: Final = {
    **dict.fromkeys((*GRAPHS["jvp"], *GRAPHS["vjp"]), "Graph"),
    **dict.fromkeys(("wrt", "tangents", "cotangents"), "tuple[int, ...]"),
    "depth": "int",
    "examples": "tuple[tuple[bool, ...], ...]",
}
"""The params that describe rules, and their types."""


class _Tracing(NamedTuple):
    """Traces the rules of a call with inputs of these types, the last of which are
    captures."""

    op: RegionOperator
    rules: Rules
    kind: Any
    types: list[TensorType]
    captures: Sequence[Any]

    def jvp(self) -> _Traced:
        rules, types, places = self.rules, self.types, list[int]()
        count = len(types) - len(self.captures)

        def call(flat: Sequence[Any]) -> list[Value]:
            dots = unpacked(types, rules.wrt, flat[count:])
            with _tracing_rule(rules.owner, self.kind):
                values, result_dots = rules.push([*flat[:count], *self.captures], dots)
            return [*values, *packed(result_dots, places)]

        dots = [types[k].strong() for k in rules.wrt]
        body = traced_body(self.op, "jvp", call, [*types[:count], *dots])
        return [body], {"tangents": tuple(places)}

    def vjp(self) -> _Traced:
        rules, places = self.rules, list[int]()
        pulls = list[tuple[int, PullbackRule]]()

        def forward(flat: Sequence[Any]) -> list[Value]:
            with _tracing_rule(rules.owner, self.kind):
                values, residuals, pullback = rules.pull([*flat, *self.captures])
            pulls.append((len(values), pullback))
            return [*values, *residuals]

        count = len(self.types) - len(self.captures)
        first = traced_body(self.op, "forward", forward, self.types[:count])
        [(returned, pullback)] = pulls
        results, residuals = first.types[:returned], first.types[returned:]

        def backward(flat: Sequence[Any]) -> list[Value]:
            tensors, cts = flat[: len(residuals)], flat[len(residuals) :]
            arguments = [self.types[k] for k in rules.wrt]
            with _tracing_rule(rules.owner, self.kind):
                return packed(pullback(cts, tensors, arguments, results), places)

        floats = [t.strong() for t in results if is_differentiable(t)]
        second = traced_body(self.op, "backward", backward, [*residuals, *floats])
        return [first, second], {"cotangents": tuple(places)}


def traced_body(
    op: RegionOperator,
    name: str,
    call: Callable[[Sequence[Any]], Any],
    types: Sequence[TensorType],
) -> Body:
    """Trace a function of tensors of these types."""
    names = [f"x{i}" for i in range(len(types))]
    function, path = Function(name, call, names, call), f"{op.name}/{name}"
    return trace_body(op.name, path, function, types, sizes=unknown_sizes(types))


def of_one(type_: TensorType) -> TensorType:
    """Return the type of one element of a batch."""
    return type_.with_shape(type_.shape[1:])
