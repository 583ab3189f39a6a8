"""Tracing the rules that users bring for derivatives to graphs; see `rule_regions`."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.autograd.linearize import LinearTracer, counted
from hopflow.autograd.pullback import PullbackRule
from hopflow.autograd.region_jvp import input_like
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
"""The graphs of a rule, and what else a node has of it."""
Pulled: TypeAlias = tuple[Sequence[Value], Sequence[Value], PullbackRule]
"""Results, residuals, and what gives from these the cotangents of inputs `wrt`."""


class Rules:
    """What a user has written, as functions of the flat inputs of a call.

    name     the operator, as messages name it
    owner    what has the rules, whose calls may be of other kinds
    offered  which rules there are: "jvp", "vjp"
    wrt      which inputs they give derivatives in
    below    of a call on a tape: what a tensor of that is below it, where rules run
    """

    name: str
    owner: Any
    offered: tuple[str, ...]
    wrt: tuple[int, ...]
    below: Known | None = None

    @property
    def kind(self) -> Any:
        """What is equal for calls with the same rules, but for their types."""
        raise NotImplementedError

    def push(self, values: Sequence[Value], given: Sequence[Tangent]) -> Pushed:
        """By the rule for tangents, of which `given` has one for each of `values`."""
        raise NotImplementedError

    def pull(self, values: Sequence[Value]) -> Pulled:
        """By the rule for cotangents."""
        raise NotImplementedError

    def refused(self, type_: TensorType) -> DerivativeError:
        """The error for reading a tensor that depends on what is differentiated."""
        raise NotImplementedError

    def leave(self, tapes: Sequence[Tape]) -> None:
        """Have rules run below tapes, the innermost first, of which they may read what
        has no tangent."""

        def known(tensor: Value) -> Value | None:
            for tape in tapes:
                if isinstance(tensor, TracedTensor) and tensor.tracer is tape:
                    var = tape.read(tensor)
                    if not is_zero(tape.tangent(var)):
                        raise self.refused(tensor.type)
                    tensor = as_value(tape.values[var])
            return tensor

        self.below = known

    def at(self, _symbols: Sequence[Operand]) -> "Rules":
        """The rules of a node that is passed these symbols."""
        return self


def as_pair(what: str, found: Any, second: str) -> Any:
    """
    Raises:
        ResultTypeError: what a rule has returned is no pair of the result and that.
    """
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    if is_pair and (second != "pullback" or callable(found[1])):
        return found
    raise ResultTypeError(
        f"{what} must return a pair (result, {second}), and returns "
        f"`{type(found).__name__}`."
    )


def kind_of_value(value: Any) -> Any:
    """What is equal for arguments, no tensors, that surely are the same."""
    plain = (bool, int, float, complex, str, bytes)
    return (type(value), value) if isinstance(value, plain) else id(value)


@dataclass(frozen=True, eq=False)
class Failed:
    """In place of the graph of a rule that has no trace: what is raised where a
    derivative is asked for."""

    error: Exception

    def __repr__(self) -> str:
        return f"<{type(self.error).__name__}>"

    def structural_key(self) -> str:
        return f"Failed {id(self)}"


# --- tangents of which most may be zero -----------------------------------------------


def packed(tangents: Sequence[Tangent], places: list[int]) -> list[Value]:
    """The tangents that are not zero, whose places are put into `places`."""
    places[:] = [k for k, t in enumerate(tangents) if not is_zero(t)]
    return [instantiate(tangents[k]) for k in places]


def unpacked(
    types: Iterable[TensorType], places: Sequence[int], found: Iterable[Value]
) -> list[Tangent]:
    """Tangents of these types: those at `places`, and zeros."""
    given = dict(zip(places, found, strict=True))
    return [given[k] if k in given else Zero(t) for k, t in enumerate(types)]


def types_of(values: Iterable[Any]) -> list[TensorType]:
    return [x.type for x in values]


# --- tracing --------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A rule that is being traced, and the kind of call that it is a rule of."""

    tracer: Interpreter
    owner: Any
    kind: Any


class _Reads(NamedTuple):
    """What rules read of outside: tensors, and sizes."""

    tensors: Sequence[Read] = ()
    symbols: Sequence[Symbol] = ()


class _Present(threading.local):
    """The rules that this thread traces, each within the last.

    reads     what they read, as far as is known
    has_late  whether a call in them has its rules `late`
    """

    frames: tuple[_Frame, ...] = ()
    reads: _Reads = _Reads()
    has_late: bool = False


_present: Final = _Present()
_DEEPEST: Final = 4
"""So many rules are traced, each within the last: each might make another function."""
_DEEPEST_OF_ONE: Final = 2
"""So many of one function: each might call it with other arguments."""


@contextmanager
def _within(owner: Any, kind: Any) -> Iterator[None]:
    before = _present.frames
    _present.frames = (*before, _Frame(current(), owner, kind))
    try:
        yield
    finally:
        _present.frames = before


def rules_around() -> list[Any]:
    """The kinds of calls in whose rules the present trace stands, the innermost
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
    """The graphs of a call with those of its rules, and what it has of rules among its
    params. What is wrong with a rule is an error where a derivative is asked for."""
    around = _below_tapes(rules, [*operands, *closed.captures])
    if around is None:
        return closed, {"rules": rules}  # they are run at once, on values
    if around.is_eager:
        return closed, {}
    types = types_of([*operands, *closed.captures])
    kind = rules.kind, [type_key(t, terms_of) for t in types]
    kinds = rules_around()
    if kind in kinds:
        return closed, {"depth": kinds.index(kind)}
    within = [frame.owner is rules.owner for frame in _present.frames]
    if len(within) >= _DEEPEST or sum(within) >= _DEEPEST_OF_ONE:
        return _with_late_rules(rules, closed, len(operands))
    tracing = _Tracing(op, rules, kind, types, closed.captures)
    params: dict[str, Any] = {"wrt": rules.wrt}
    parts = [closed]
    for rule in rules.offered:
        try:
            with unchanged_on_error():
                bodies, own = _traced_with_reads(
                    tracing.jvp if rule == "jvp" else tracing.vjp
                )
                parts.append(close_bodies(bodies))
        except Exception as error:
            params |= dict.fromkeys(GRAPHS[rule], Failed(error))
        else:
            params |= dict(zip(GRAPHS[rule], parts[-1].graphs, strict=True)) | own
    return joined(parts), params


class _Regions(NamedTuple):
    """What a node has of rules, and what they read besides its captures."""

    params: dict[str, Any]
    held: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Late:
    """Rules of a call that become graphs where a derivative is asked for.

    reads    what they read of outside
    places   the inputs of the call that replace it
    symbols  which of the symbols of the call are those of its function
    made     by what a call computes, which tells the types
    """

    rules: Rules
    reads: Sequence[Read]
    places: Sequence[int]
    symbols: slice
    made: dict[Graph, _Regions] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{type(self.rules).__name__}>"

    def structural_key(self) -> str:
        return f"Late {id(self)}"

    def regions(self, op: RegionOperator, params: dict[str, Any]) -> _Regions:
        """The rules of a node of these params."""
        body = graphs_of(params)[0]
        if body not in self.made:  # copies of the call have others: the last is kept
            self.made.clear()
            self.made[body] = self.traced(op, body, params.get("examples", ()))
        return self.made[body]

    def traced(
        self, op: RegionOperator, body: Graph, examples: Sequence[tuple[bool, ...]]
    ) -> _Regions:
        tracer = Tracer(None, body.name, env=user_env())
        symbols = [input_like(tracer, var) for var in body.symbols]
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
        known = len(inputs) - count
        origins = {id(c.tensor): c.origin for c in tracer.captures.values()}
        held = [origins.get(id(value), value) for value in all_.captures[known:]]
        return _Regions(params, held)


def _with_late_rules(
    rules: Rules, closed: Closed, operands: int
) -> tuple[Closed, dict[str, Any]]:
    """A call whose rules run where a derivative is asked for, which is passed what the
    rules around it read: they are of the same functions."""
    _present.has_late = True
    here, reads = current(), _present.reads
    symbols = reads.symbols if isinstance(here, Tracer) else ()
    graph = with_symbols(Graph("late"), symbols)
    for read in reads.tensors:
        graph.add_input(read.tensor.type, "read", "capture")
    values = [here.value_of(size_of(symbol)) for symbol in symbols]
    captures = [read.tensor for read in reads.tensors]
    own = len(closed.symbols)
    closed = joined([closed, Closed([graph], [*values], [*captures])])
    closed.graphs.pop()
    at = {id(value): operands + k for k, value in enumerate(closed.captures)}
    places = [at[id(value)] for value in captures]
    rest = len(closed.symbols) - own  # a batch adds symbols in front
    which = slice(-own - rest, -rest or None) if own else slice(0)
    return closed, {"late": Late(rules, reads.tensors, places, which)}


def _traced_with_reads(trace: Callable[[], _Traced]) -> _Traced:
    """What `trace` gives, of the rules of a call. It is called once more if there are
    calls with late rules within, which are passed what was read the first time."""
    if _present.frames:
        return trace()
    tracer = current()
    marks = mark(tracer) if isinstance(tracer, Tracer) else []
    _present.has_late = False
    with recording(tracer) as tensors:
        found = bodies, _ = trace()
    if not _present.has_late:
        return found
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


def _below_tapes(rules: Rules, given: Sequence[Operand]) -> Interpreter | None:
    """The interpreter around the tapes that a call stands in; None: one of them has a
    tangent of an input, so that rules run, which are to leave the tapes."""
    here, tapes = current(), list[Tape]()
    while isinstance(here, Tape | LinearTracer):
        if isinstance(here, Tape):
            tapes.append(here)
            pairs = [here.current(x) for x in given]
            if not all(map(is_zero, counted([t for _, t in pairs], here.linear))):
                rules.leave(tapes)
                return None
            given, around = [value for value, _ in pairs], here.parent
        else:
            given, around = [here.below(x) for x in given], here.base
            if any(isinstance(x, TracedTensor) and x.tracer is here for x in given):
                return here
        assert around is not None
        here = around
    return here


GRAPHS: Final = {"jvp": ("jvp",), "vjp": ("forward", "backward")}
PARAMS: Final = {
    **dict.fromkeys((*GRAPHS["jvp"], *GRAPHS["vjp"]), "Graph"),
    **dict.fromkeys(("wrt", "tangents", "cotangents"), "tuple[int, ...]"),
    "depth": "int",
    "examples": "tuple[tuple[bool, ...], ...]",
}
"""What a node has of rules, and of what types that is."""


class _Tracing(NamedTuple):
    """Traces the rules of a call, whose inputs, the last of which are captures, are of
    these types."""

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
            with _within(rules.owner, self.kind):
                values, found = rules.push([*flat[:count], *self.captures], dots)
            return [*values, *packed(found, places)]

        dots = [types[k].strong() for k in rules.wrt]
        body = traced_body(self.op, "jvp", call, [*types[:count], *dots])
        return [body], {"tangents": tuple(places)}

    def vjp(self) -> _Traced:
        rules, places = self.rules, list[int]()
        found = list[tuple[int, PullbackRule]]()

        def forward(flat: Sequence[Any]) -> list[Value]:
            with _within(rules.owner, self.kind):
                values, kept, pullback = rules.pull([*flat, *self.captures])
            found.append((len(values), pullback))
            return [*values, *kept]

        count = len(self.types) - len(self.captures)
        first = traced_body(self.op, "forward", forward, self.types[:count])
        [(returned, pullback)] = found
        results, kept = first.types[:returned], first.types[returned:]

        def backward(flat: Sequence[Any]) -> list[Value]:
            tensors, cts = flat[: len(kept)], flat[len(kept) :]
            arguments = [self.types[k] for k in rules.wrt]
            with _within(rules.owner, self.kind):
                return packed(pullback(cts, tensors, arguments, results), places)

        floats = [t.strong() for t in results if is_differentiable(t)]
        second = traced_body(self.op, "backward", backward, [*kept, *floats])
        return [first, second], {"cotangents": tuple(places)}


def traced_body(
    op: RegionOperator,
    name: str,
    call: Callable[[Sequence[Any]], Any],
    types: Sequence[TensorType],
) -> Body:
    names = [f"x{i}" for i in range(len(types))]
    function, path = Function(name, call, names, call), f"{op.name}/{name}"
    return trace_body(op.name, path, function, types, sizes=unknown_sizes(types))


def of_one(type_: TensorType) -> TensorType:
    return type_.with_shape(type_.shape[1:])
