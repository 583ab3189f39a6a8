"""Replays of eager calls: a call that is met again is not traced again.

An operator that is called on concrete tensors traces its functions and evaluates a
node. The second call with the same functions, and arguments of the same structure and
types, is recorded while it does so: which operations were evaluated on which tensors,
and what the functions have read from outside, as `jit` records it. Later calls check
these reads, find the tensors again and evaluate the same operations.

A call that cannot be replayed exactly is traced each time: one that writes to a tensor,
changes what is from outside, has callbacks, or runs a function as plain Python. If a
replay fails, the call is traced too, so that errors are those of the traced call.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np

from hopflow import pytree
from hopflow.bind import Operand, Program, Value, current, has_handlers, slots, using
from hopflow.config import config
from hopflow.graph.core import Constant, Node
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import OpDef
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size
from hopflow.tensor import Eager, EagerTensor
from hopflow.trace.outside.bytecode import Load
from hopflow.trace.outside.guard import Guard
from hopflow.trace.outside.objects import is_plain
from hopflow.trace.outside.paths import Path
from hopflow.trace.outside.recorder import Recorder
from hopflow.trace.outside.watch import recorders, watching

_NAME: Final = "__hopflow_calls__"
"""The attribute of a function that holds its `_Calls`. What is kept of a call may refer
to the function again, through its module or a class, so that a table of weak references
to functions would keep both alive forever."""
_MOST_KINDS: Final = 64
_MOST_RECORDINGS: Final = 3
_GAIN: Final = 0.25  # of the budget of recordings, by a replay
_MOST_READS: Final = 1000
_MOST_BYTES: Final = 1 << 24  # of an array, which is copied for the time of a trace


class _Call(NamedTuple):
    """The arguments of a call of an operator, sorted.

    leaves   the leaves of (args, kwargs), with tensors for arrays
    spec     their structure
    tensors  the tensors among the leaves
    roots    the operator if a user has defined it, and the functions
    parts    the objects with an identity: the operator and the parts of the functions
    key      what all calls of a kind have in common
    """

    leaves: list[Any]
    spec: Spec
    tensors: list[EagerTensor]
    roots: list[Any]
    parts: list[Any]
    key: tuple[Any, ...]

    @staticmethod
    def of(op: Any, prepare: Any, args: Any, kwargs: Any) -> "_Call | None":
        """Sort the arguments of `prepare`, a method of the operator; None: such a call
        is never replayed."""
        if type(prepare) is not MethodType or prepare.__self__ is not op:
            return None
        leaves, spec = pytree.flatten((args, kwargs))
        tensors: list[EagerTensor] = []
        functions: list[Any] = []
        parts: list[Any] = [op]
        key: list[Any] = [prepare.__func__, spec]
        for k, leaf in enumerate(leaves):
            kind = type(leaf)
            if kind is np.ndarray:
                leaf = leaves[k] = slots.from_array(leaf)
                kind = type(leaf)
            if kind is EagerTensor:
                tensors.append(leaf)
                key += leaf.type, leaf.type.weak
            elif kind is FunctionType:
                functions.append(leaf)
                parts.append(leaf)
            elif kind is MethodType and type(leaf.__func__) is FunctionType:
                functions.append(leaf)
                parts += leaf.__func__, leaf.__self__
            elif kind in _NUMBERS:
                key.append(pytree.exact_key(leaf))
            else:
                return None
        key += map(id, parts)
        key += _first_places(tensors), _settings()
        roots = [op, *functions] if is_plain(op) else functions
        return _Call(leaves, spec, tensors, roots, parts, tuple(key))


_NUMBERS: Final = frozenset((bool, int, float, str))


def _first_places(tensors: Sequence[EagerTensor]) -> tuple[int, ...]:
    """Return for each tensor the first place at which it occurs, if some are equal."""
    ids = [*map(id, tensors)]
    return () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))


def _settings() -> tuple[bool, ...]:
    """Return the settings that a traced call depends on."""
    c = config
    return c.verify, c.check_bounds, c.guard_pages, c.require_in_place


class _Step(NamedTuple):
    """An operation that a replay evaluates.

    args   the positions of values, and constants
    types  the types that its results must have; None: no other step reads them
    """

    run: Program
    args: list[int | Constant]
    types: list[TensorType] | None


class _Replay(NamedTuple):
    """A recorded call.

    guard    checks the reads from outside, and finds tensors there
    same     positions of tensors among those from outside -> of tensors among the
             arguments that must be these
    steps    the operations; their values are the tensors among the arguments, those
             from outside, and the results of the steps
    results  the positions of the results
    spec     their structure
    """

    guard: Guard
    same: list[tuple[int, int]]
    steps: list[_Step]
    results: list[int]
    spec: Spec

    def run(self, call: _Call) -> Any:
        """Return the result of a call; `_NONE`: it cannot be replayed."""
        found = self.guard.find(call.roots)
        if found is None:
            return _NONE
        values: list[Any] = [*call.tensors, *found]
        first = len(call.tensors)
        if any(values[first + i] is not values[k] for i, k in self.same):
            return _NONE
        for run, args, types in self.steps:
            results = run([values[a] if isinstance(a, int) else a for a in args])
            if types is not None and [r.type for r in results] != types:
                return _NONE
            values += results
        return pytree.unflatten(self.spec, [values[k] for k in self.results])


_NONE: Final = object()


class _Kind:
    """The calls of one kind.

    parts       weak references to the parts of such a call
    replays     the latest recorded calls, which differ in what is read from outside
    budget      how many more calls may be recorded: recording takes as long as
                three traces, so that it must pay by replays
    """

    __slots__ = ("budget", "parts", "replays")

    def __init__(self, call: _Call) -> None:
        self.parts = [*map(ref, call.parts)]
        self.replays: tuple[_Replay, ...] = ()
        self.budget: float = _MOST_RECORDINGS

    def has(self, call: _Call) -> bool:
        """Whether a call with the same key is of this kind: ids may be reused."""
        return all(p() is x for p, x in zip(self.parts, call.parts, strict=True))

    def replay(self, call: _Call) -> Any:
        """Return the result of a call; `_NONE`: no recorded call does the same."""
        for replay in self.replays:
            if (result := replay.run(call)) is not _NONE:
                self.budget = min(self.budget + _GAIN, _MOST_RECORDINGS)
                return result
        return _NONE

    def record(self, call: _Call, trace: Callable[..., Any]) -> Any:
        """Return the result of a call, which is traced, and record it."""
        self.budget -= 1
        recording = _Recording(call)
        args, kwargs = pytree.unflatten(call.spec, call.leaves)
        with using(recording), watching(recording.reads):
            result = trace(*args, **kwargs)
        with suppress(Exception):  # the call itself has not failed
            if (replay := recording.replay(result)) is not None:
                self.replays = (replay, *self.replays)[:_MOST_RECORDINGS]
        return result


class _Calls:
    """The calls that are kept with one of their functions, `owner`, by their keys."""

    def __init__(self, owner: Any = None) -> None:
        self.owner = None if owner is None else ref(owner)
        self.kinds: dict[Any, _Kind] = {}

    def __reduce__(self) -> Any:
        return _Calls, ()  # functions that are sent by value take it with them

    @staticmethod
    def of(args: Sequence[Any]) -> "_Calls | None":
        """Return the calls of the first function among the arguments of a call; None:
        there is none, or it is its first call."""
        owner = _first_function(args)
        if owner is None:
            return None
        attributes = vars(owner)
        calls: _Calls | None = attributes.get(_NAME)
        # `functools.wraps` copies attributes.
        if calls is not None and calls.owner is not None and calls.owner() is owner:
            return calls
        attributes[_NAME] = _Calls(owner)
        return None

    def kind(self, call: _Call) -> _Kind | None:
        """Return the kind of a call; None: it is the first one of a further kind."""
        kind = self.kinds.get(call.key)
        if kind is not None and kind.has(call):
            return kind
        is_only = not self.kinds
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds.clear()
        kind = self.kinds[call.key] = _Kind(call)
        return kind if is_only else None


def _first_function(args: Sequence[Any]) -> FunctionType | None:
    """Return the first function among arguments and items of lists of them."""
    for arg in args:
        kind = type(arg)
        if kind is MethodType:
            arg = arg.__func__
        if type(arg) is FunctionType:
            return arg
        if kind is list or kind is tuple:
            inner = _first_function([x for x in arg if callable(x)])
            if inner is not None:
                return inner
    return None


def run(
    op: Any, prepare: Any, args: tuple[Any, ...], kwargs: dict[str, Any], trace: Any
) -> Any:
    """Return the result of a call of an operator: replayed if possible, else traced.

    Args:
        prepare: Makes the call of the arguments.
        trace: Traces the call of these arguments, and returns its result.
    """
    record = None
    with suppress(Exception):  # what is wrong with the call, its trace tells
        known = _known(op, prepare, args, kwargs)
        if known is not None:
            call, kind = known
            if (result := kind.replay(call)) is not _NONE:
                return result
            if kind.budget >= 1:
                record = partial(kind.record, call)
    return trace(*args, **kwargs) if record is None else record(trace)


def _known(
    op: Any, prepare: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Call, _Kind] | None:
    """Return a call and its kind; None: it is the first one, or is never replayed."""
    is_at_bottom = current() is slots.eager and not recorders()
    if not is_at_bottom or has_handlers() or slots.record is not None:
        return None
    if (calls := _Calls.of(args)) is None:
        return None
    call = _Call.of(op, prepare, args, kwargs)
    kind = None if call is None else calls.kind(call)
    return None if call is None or kind is None else (call, kind)


class _Reads(Recorder):
    """The reads of a call that runs as it would without them.

    given         the tensors whose elements were read
    are_complete  whether all reads were recorded: not if there are more than can be
                  checked in less time than a trace takes, if a function has run as
                  plain Python, or if the recorder has failed
    """

    def __init__(self, call: _Call) -> None:
        super().__init__(stops=False)
        self.given: list[Value] = []
        self.are_complete = True
        self._codes = {id(p.__code__) for p in call.parts if type(p) is FunctionType}
        for k, root in enumerate(call.roots):
            self._record(self.read, self.path(None, "argument", k), root)

    def enter(self, frame: FrameType) -> None:
        if current().is_eager and id(frame.f_code) in self._codes:
            self.are_complete = False
        self._record(super().enter, frame)

    def resume(self, frame: FrameType) -> None:
        self._record(super().resume, frame)

    def load(self, frame: FrameType, load: Load) -> None:
        self._record(super().load, frame, load)

    def add(self, guard: Guard, leaves: Sequence[Any]) -> None:
        self._record(super().add, guard, leaves)

    def give(self, tensor: Value) -> None:
        self.given.append(tensor)
        self._record(super().give, tensor)

    def _record(self, record: Callable[..., Any], *args: Any) -> None:
        """Record a read. An error of the recorder is none of the user's call."""
        try:
            record(*args)
        except Exception:
            self.are_complete = False

    def _track(self, value: Any, path: Path) -> None:
        if isinstance(value, np.ndarray) and value.nbytes > _MOST_BYTES:
            self.are_complete = False
        else:
            super()._track(value, path)

    def _collect(self, path: Path, value: Any, use: Any) -> None:
        is_sized = isinstance(value, list | tuple | dict | set | frozenset)
        if is_sized and len(value) + len(use.parts) > _MOST_READS:
            self.are_complete = False
        else:
            super()._collect(path, value, use)


class _Recording(Eager):
    """Evaluates operations, and notes them."""

    __slots__ = ("adopted", "call", "is_repeatable", "reads", "steps")

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        self.reads = _Reads(call)
        self.steps: list[tuple[Program, Sequence[Operand], Sequence[Value]]] = []
        self.adopted: dict[int, Value] = {}
        self.is_repeatable = True

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        operands: Any = tuple(args)
        node = Node("call_function", op, operands, params)
        nodes = [node, *(n for g in node.graphs.values() for n in g.distinct_nodes())]
        if "callback" in effects(node) or any("progress" in n.params for n in nodes):
            self.is_repeatable = False
        if type(op) is OpDef:
            program: Program = partial(_evaluated, op, params)
        else:
            args = [slots.stand_in(a) if isinstance(a, Value) else a for a in args]
            program = slots.program(op, args, params)
        results = program(args)
        self.steps.append((program, args, results))
        return results

    def adopt(self, value: Value) -> None:
        self.adopted[id(value)] = value

    def write(self, target: Value, new: Value) -> None:
        self.is_repeatable = False
        super().write(target, new)

    def symbol_of(self, value: Value, *bounds: Any) -> Size:
        self.is_repeatable = False
        return super().symbol_of(value, *bounds)

    def replay(self, result: Any) -> _Replay | None:
        """Return the replay of the call, which has returned `result`; None: it would
        not do the same."""
        call, reads = self.call, self.reads
        if (
            not (self.is_repeatable and reads.are_complete)
            or reads.effects.has_advanced
        ):
            return None
        inner = [x for _, _, results in self.steps for x in results]
        operands = [x for _, args, _ in self.steps for x in args]
        known = {*map(id, (*call.tensors, *inner))}
        if any(id(x) in known for x in reads.given):
            return None
        outside = {
            id(x): x
            for x in operands
            if isinstance(x, EagerTensor) and id(x) not in known
        }
        read = [x for x in call.tensors if reads.tracked_path(x) is not None]
        captured = [*outside.values(), *read]
        guard = reads.guard(captured, [], call.roots)
        if guard is None or guard.changes or _cost(guard) > _MOST_READS:
            return None
        for source, tensor in zip(guard.wanted, captured, strict=True):
            if source.path is None and not self._is_constant(tensor):
                return None
        values = [*call.tensors, *captured, *inner]
        at = {id(x): k for k, x in reversed([*enumerate(values)])}
        leaves, spec = pytree.flatten(result)
        if not {*map(id, leaves)} <= {*map(id, inner)}:
            return None
        used = {*map(id, operands)}
        steps = [
            _Step(
                program,
                [x if isinstance(x, Constant) else at[id(x)] for x in args],
                [r.type for r in rs] if any(id(r) in used for r in rs) else None,
            )
            for program, args, rs in self.steps
        ]
        same = [(len(outside) + i, at[id(x)]) for i, x in enumerate(read)]
        return _Replay(guard, same, steps, [at[id(x)] for x in leaves], spec)

    def _is_constant(self, tensor: EagerTensor) -> bool:
        """Whether a function has made a tensor from numbers."""
        return id(tensor) in self.adopted and tensor.storage.private


def _cost(guard: Guard) -> int:
    """Return about how many simple reads a guard costs in each call."""
    contents = [
        read.check.value
        for read in guard.reads
        if read.check.kind in ("content", "elements", "bytes")
    ]
    return len(guard.reads) + sum(len(x) // 1000 for x in contents)


def _evaluated(
    op: OpDef, params: dict[str, Any], args: Sequence[Operand]
) -> tuple[Value, ...]:
    return slots.eager.process(op, args, params)
