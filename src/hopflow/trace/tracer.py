"""Tracers: record operations into a graph, and lift what comes from outside.

A `Tracer` records the operations of one function. What its body meets from outside is
*lifted*: it becomes an input of the graph. With a tracer below it (`parent`), a value
is lifted there first, level by level up to its owner, and each level gets one input for
it, keyed by the parent's value; with the eager interpreter below, a concrete tensor is
captured as it is. Lifting a tensor lifts the free symbols of its shape before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from hopflow.bind import Interpreter, Operand, Value, current, using
from hopflow.errors import CapturedTensorError, EscapedValueError, HopflowError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    SourceLine,
    Var,
    size_of,
    symbol_range,
)
from hopflow.graph.regions import result_types
from hopflow.graph.types import SYMBOL_TYPE, TensorType, shared
from hopflow.ops.item import item, range_params
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols
from hopflow.tensor import EagerTensor, Tensor
from hopflow.trace.functional import (
    Functional,
    TracedTensor,
    aliased_write,
    escaped,
)
from hopflow.trace.source import user_line


@dataclass(slots=True)
class Capture:
    """A tensor of the parent's, and the input that stands for it here.

    memory   the parent's storage: one object for tensors that share memory
    """

    origin: Tensor
    input: Var
    tensor: TracedTensor
    memory: object

    @property
    def written(self) -> bool:
        return is_written(self.tensor)


def is_written(tensor: TracedTensor) -> bool:
    """Whether an input of a graph has been given another value since."""
    return tensor.storage is not None and tensor.storage.version > 0


class _Mark(NamedTuple):
    """How far a tracer had got; see `Tracer.mark`."""

    nodes: int
    symbols: int
    captures: int
    renewed: int


class _Renewal(NamedTuple):
    """A view that was made anew, and what it was before."""

    tensor: TracedTensor
    var: Var
    version: int


class Tracer(Functional):
    """Records into `graph`; the three input lists are joined by `close`.

    symbols      symbol -> its input
    operands     the function's own inputs
    captures     key of the parent's value -> what was lifted
    references   key of the parent's value -> the operand that stands for it
    shared       graphs that calls in this trace share, by keys of their makers
    env          answers for the symbols of the whole trace; None: it makes none
    hints        input -> the number that it holds in the call that is traced
    allow_captures   False: a concrete tensor from outside is a CapturedTensorError
    """

    __slots__ = (
        "_adopted",
        "_renewed",
        "_sizes",
        "allow_captures",
        "captures",
        "closed",
        "env",
        "graph",
        "hints",
        "operands",
        "path",
        "references",
        "shared",
        "symbols",
    )

    def __init__(
        self,
        parent: Interpreter | None,
        name: str,
        *,
        path: str = "",
        allow_captures: bool = True,
        env: ShapeEnv | None = None,
    ) -> None:
        super().__init__(parent)
        self.env: ShapeEnv | None = parent.env if isinstance(parent, Tracer) else env
        self.hints: dict[Var, bool | int | float] = {}
        self.graph = Graph(name)
        self.path = path
        self.allow_captures = allow_captures
        self.symbols: dict[Symbol, Var] = {}
        self.operands: list[TracedTensor] = []
        self.captures: dict[Any, Capture] = {}
        self.references: dict[Any, Capture] = {}
        self.shared: dict[Any, Graph] = {}
        self.closed = False
        self._adopted: dict[int, Value] = {}
        self._renewed: list[_Renewal] = []
        self._sizes: dict[Var, SymInt] = {}

    # --- inputs ---

    def operand(self, type_: TensorType, name: str) -> TracedTensor:
        """A new input of the function, after the symbols of its shape."""
        self.bind_symbols(type_.shape)
        tensor = TracedTensor(self, self.graph.add_input(shared(type_), name))
        self.operands.append(tensor)
        return tensor

    def reference(self, operand: Operand, name: str) -> TracedTensor:
        """A new input that is the caller's tensor: a write to it is one to that.

        A tensor given twice, or captured too, is one tensor in the body.
        """
        if not isinstance(operand, Value):
            return self.operand(operand.type, name)
        self.bind_symbols(operand.type.shape)
        origin, key, memory = self._lift_parent(operand)
        var = self.graph.add_input(operand.type, name)
        known = self.references.get(key)
        if known is None:
            known = Capture(origin, var, TracedTensor(self, var), memory)
            self.references[key] = known
        self.operands.append(known.tensor)
        return known.tensor

    def bind_symbols(self, sizes: Sequence[Any]) -> None:
        """Have inputs for the symbols of all `sizes` that are symbolic."""
        for size in sizes:
            if isinstance(size, SymInt):
                for symbol in free_symbols(size):
                    self.symbol(symbol)

    def symbol(self, symbol: Symbol) -> Var:
        """The input for a shape symbol, lifted from the parent first."""
        known = self.symbols.get(symbol)
        if known is None:
            if isinstance(self.parent, Tracer):
                self.parent.symbol(symbol)
            elif symbol.env is not None:
                raise EscapedValueError(
                    f"the size `{symbol}` is used outside the body whose trace made it"
                    f"{_at(user_line())}. Only what a body returns is known outside."
                )
            known = self.define(symbol)
        return known

    def define(self, symbol: Symbol) -> Var:
        """A new input for a symbol."""
        var = self.graph.add_input(SYMBOL_TYPE, symbol.name, "symbol", symbol)
        self.symbols[symbol] = var
        return var

    def size_value(self, size: SymInt) -> Value:
        """A symbolic size as a tensor i64[]: nodes of arithmetic on symbols."""

        total: Any = None
        for monomial, factor in size.terms:
            term: Any = None if monomial and factor == 1 else factor
            for symbol in monomial:
                value = TracedTensor(self, self.symbol(symbol))
                term = value if term is None else value * term
            total = term if total is None else total + term
        assert isinstance(total, TracedTensor)
        self._sizes[total.source] = size
        return total

    def size_of(self, tensor: TracedTensor) -> SymInt:
        known = self._known_size(self.read(tensor))
        if known is None:
            tensor._concrete("operator.index")
            raise AssertionError
        return known

    def _known_size(self, var: Var) -> SymInt | None:
        """The size that a var is the value of, here or where it was lifted from."""
        if var.node.symbol is not None:
            return size_of(var.node.symbol)
        known = self._sizes.get(var)
        if known is None and isinstance(self.parent, Tracer):
            for capture in self._from_outside():
                if capture.input is var and isinstance(capture.origin, TracedTensor):
                    return self.parent._known_size(self.parent.read(capture.origin))
        return known

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        """One symbol for each value that a tensor has held: a node of its own, unless
        it is the value of a size already.

        Raises:
            TraceError: this trace makes no symbols.
        """
        tensor = self.localize(value)
        var = self.read(tensor)
        known = self._known_size(var)
        if known is not None:
            return known
        if self.env is None:
            tensor._concrete("item")
        assert self.env is not None
        bound = inf if isinstance(max, SymInt) else max
        params = range_params(ValueRange(min, bound), known=True)
        [result] = self.record(item, (TracedTensor(self, var),), params)
        size = self._sizes[var] = self.size_of(result)
        if isinstance(max, SymInt):
            self.env.assume(size <= max)
        return size

    def adopt(self, value: Value) -> None:
        """Note a tensor made from data during this trace: not a stray global."""
        self._adopted[id(value)] = value
        if self.parent is not None:
            self.parent.adopt(value)

    # --- lifting ---

    def localize(self, value: Value) -> TracedTensor:
        """The tensor of this tracer for `value`, lifted if it comes from outside.

        Raises:
            EscapedValueError: `value` belongs to a trace that is no ancestor of this.
            CapturedTensorError: it is a concrete tensor, and captures are not allowed.
        """
        if isinstance(value, TracedTensor) and value.tracer is self:
            if self.closed:
                raise escaped(value, "that trace has ended")
            return value
        origin, key, memory = self._lift_parent(value)
        if isinstance(origin, TracedTensor) and origin.source.node.symbol is not None:
            return TracedTensor(self, self.symbol(origin.source.node.symbol))
        known = self.captures.get(key) or self.references.get(key)
        if known is not None:
            return known.tensor
        if any(c.memory is memory and c.written for c in self._from_outside()):
            raise aliased_write(value.type)
        self.bind_symbols(value.type.shape)
        name = origin.source.node.name if isinstance(origin, TracedTensor) else ""
        name = name or f"c{len(self.captures)}"
        var = self.graph.add_input(value.type, name, "capture")
        tensor = TracedTensor(self, var)
        self.captures[key] = Capture(origin, var, tensor, memory)
        return tensor

    def _lift_parent(self, value: Value) -> tuple[Tensor, Any, object]:
        """`value` as the parent has it, a key for its present value, and its memory."""
        parent = self.parent
        if isinstance(parent, Tracer):
            local = parent.localize(value)
            var, storage = parent.read(local), local.storage
            if storage is None:
                return local, var, local
            # Tensors of different memory may hold one var, after `x[:] = y`.
            return local, (var, id(storage), len(local.chain)), storage
        if isinstance(value, EagerTensor):
            if not self.allow_captures and not self.is_adopted(value):
                raise CapturedTensorError(
                    f"the traced function reads a tensor {value.type} that is not an "
                    f"argument{_at(user_line())}. Pass it as an argument, or trace "
                    "with `captures=True` to keep it as an attribute of the graph."
                )
            return value, id(value), value.storage
        if isinstance(value, TracedTensor):
            raise escaped(value, "its trace has ended, or it belongs to another one")
        assert isinstance(value, Tensor)
        return value, id(value), value

    def is_adopted(self, value: Value) -> bool:
        """Whether a tensor was made from data during this trace."""
        return id(value) in self._adopted

    def _from_outside(self) -> list[Capture]:
        """The inputs that stand for tensors of the parent's."""
        return [*self.captures.values(), *self.references.values()]

    def allow_write(self, target: Value, local: TracedTensor) -> None:
        outside = self._from_outside()
        for capture in outside:
            if capture.tensor is local or (
                local.storage is not None and capture.tensor.storage is local.storage
            ):
                for other in outside:
                    if other is not capture and other.memory is capture.memory:
                        raise aliased_write(target.type)

    def renew(self, tensor: TracedTensor, var: Var, version: int) -> None:
        self._renewed.append(_Renewal(tensor, tensor.source, tensor.version))
        super().renew(tensor, var, version)

    # --- recording ---

    def arg(self, operand: Operand) -> Arg:
        """An operand as an argument of a node of this graph."""
        if isinstance(operand, Constant):
            return operand
        return self.read(self.localize(operand))

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        recorded: list[Arg] = []
        for arg in args:
            if (
                type(arg) is TracedTensor
                and arg.tracer is self
                and arg.storage is None
                and not self.closed
            ):
                recorded.append(arg.source)
            else:
                recorded.append(self.arg(arg))
        for value in params.values():
            if type(value) is tuple:
                self.bind_symbols(value)
            elif type(value) is SymInt:
                self.bind_symbols((value,))
        try:
            if type(op) is OpDef:
                types = op.result_types([a.type for a in recorded], params)
            else:
                types = result_types(op, recorded, params)
        except HopflowError as error:
            _note_line(error)
            raise
        node = self.graph.call(op, recorded, params, types, user_line(3))
        node.operator_path = self.path
        if op is item:
            self._define_by(node)
        return tuple([TracedTensor(self, var) for var in node.results])

    def _define_by(self, node: Node) -> None:
        """Make the symbol of an `item` node, backed if the call tells its value."""
        allowed = symbol_range(node)
        [arg] = node.args
        hint = self.hints.get(arg) if isinstance(arg, Var) else None
        if self.env is None:
            size = size_of(Symbol(f"u{len(self.symbols)}", None, allowed))
        elif hint is None:
            size = self.env.unbacked(None, allowed.low, allowed.high)
        else:
            source = f"{arg.node.name}.item()" if isinstance(arg, Var) else ""
            ends = allowed.low, allowed.high
            size = self.env.backed(None, int(hint), *ends, source)
        [node.symbol] = free_symbols(size)
        self.symbols[node.symbol] = node.results[0]

    # --- the end ---

    def close(self, outputs: Sequence[Operand]) -> Graph:
        """Set the outputs, join the input lists, and return the graph."""
        graph = self.graph
        graph.outputs = tuple(self.arg(o) for o in outputs)
        self.join()
        self.closed = True
        return graph

    def join(self) -> None:
        """Order the inputs: symbols, operands, captures."""
        self.graph.inputs = [
            *(v for v in self.symbols.values() if v.node.section == "symbol"),
            *(v for v in self.graph.inputs if v.node.section == "operand"),
            *(v for v in self.graph.inputs if v.node.section == "capture"),
        ]

    def mark(self) -> list[tuple["Tracer", _Mark]]:
        """How far this tracer and its ancestors have got, for `rollback`."""
        marks: list[tuple[Tracer, _Mark]] = []
        tracer: Interpreter | None = self
        while isinstance(tracer, Tracer):
            at = _Mark(
                len(tracer.graph.nodes),
                len(tracer.symbols),
                len(tracer.captures),
                len(tracer._renewed),
            )
            marks.append((tracer, at))
            tracer = tracer.parent
        return marks


def rollback(marks: Sequence[tuple[Tracer, _Mark]]) -> None:
    """Take back all that was added to the marked tracers since."""
    for tracer, at in marks:
        for renewal in reversed(tracer._renewed[at.renewed :]):
            renewal.tensor.source, renewal.tensor.version = renewal.var, renewal.version
        del tracer._renewed[at.renewed :]
        if (
            len(tracer.graph.nodes) == at.nodes
            and len(tracer.symbols) == at.symbols
            and len(tracer.captures) == at.captures
        ):
            continue
        del tracer.graph.nodes[at.nodes :]
        _truncate(tracer.symbols, at.symbols)
        _truncate(tracer.captures, at.captures)
        kept = {id(v) for v in tracer.symbols.values()}
        kept |= {id(c.input) for c in tracer.captures.values()}
        tracer.graph.inputs = [
            v
            for v in tracer.graph.inputs
            if v.node.section == "operand" or id(v) in kept
        ]


def _truncate(entries: dict[Any, Any], length: int) -> None:
    for key in list(entries)[length:]:
        del entries[key]


def _at(line: SourceLine | None) -> str:
    return f" (at {line})" if line else ""


def _note_line(error: HopflowError) -> None:
    line = user_line(4)
    if line is not None:
        error.add_note(f"while tracing {line}")


@contextmanager
def unchanged_on_error() -> Iterator[None]:
    """Within the block an error takes back all that was added to present traces."""
    tracer = current()
    if not isinstance(tracer, Tracer):
        yield
        return
    marks = tracer.mark()
    try:
        yield
    except BaseException:
        rollback(marks)
        raise


def trace_into(tracer: Tracer, fn: Any, args: Sequence[Any]) -> Any:
    """Call `fn(*args)` with `tracer` innermost; an error ends its trace.

    What an operator has lifted from ancestors its entry rolls back.
    """
    try:
        with using(tracer):
            return fn(*args)
    except BaseException:
        tracer.closed = True
        raise
