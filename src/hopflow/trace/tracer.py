"""Tracers: record operations into a graph, and lift values from outside into it.

A `Tracer` records the operations of one function. A value from outside that its body
reads is *lifted*: it becomes an input of the graph. With a tracer below (`parent`), the
value is lifted there first, level by level up to its owner, and each level gets one
input for it, keyed by the parent's value; with the eager interpreter below, a concrete
tensor is captured as it is. Symbols are lifted before the tensors whose shapes use
them: `docs/notes/symbols_and_owners.md`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from hopflow.bind import Interpreter, Operand, Value, current, has_process, using
from hopflow.errors import (
    CapturedTensorError,
    HopflowError,
)
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Var,
    map_graphs,
    map_sizes,
    plain_symbol,
    size_of,
    symbol_range,
)
from hopflow.graph.origin import called_from, origin, replaying
from hopflow.graph.regions import result_types
from hopflow.graph.rewriting import clone, copy_fields, static_symbols
from hopflow.graph.types import SYMBOL_TYPE, TensorType, shared
from hopflow.ops.convert import convert
from hopflow.ops.item import dim_size, item
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.ops.symbolic_int import symbolic_int
from hopflow.symbolic import lookups
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import EVERY, ValueRange
from hopflow.symbolic.size import (
    Size,
    Symbol,
    SymInt,
    free_symbols,
    substitute,
)
from hopflow.symbolic.terms import Env, Terms
from hopflow.tensor import EagerTensor, Tensor
from hopflow.tensor.rows import places_in, row_of
from hopflow.trace.captures import Capture, Part, is_private, parts_overlap
from hopflow.trace.functional import (
    Chain,
    Place,
    Strided,
    TracedTensor,
    aliased_write,
    at_line,
    escaped,
    escaped_number,
)
from hopflow.trace.numbers import Numbers
from hopflow.trace.own_writes import check_own, note_own
from hopflow.trace.source import user_line
from hopflow.trace.stand_ins import stand_in
from hopflow.trace.tensor_types import held_by_type, tracer_of

_NOTHING: Final[Mapping[int, Size]] = {}


class Tracer(Numbers):
    """Records into `graph`; the three input lists are joined by `close`.

    symbols      symbol -> its input
    operands     the function's own inputs
    captures     id of the parent's value -> its capture
    parts        the same for captures that became views of another capture, and are no
                 inputs any more
    references   id of the parent's value -> the operand that stands for it
    shared       memo table of the calls in this trace; see `sharing`
    env          the symbols of the whole trace; None: the trace makes no symbols
    hints        input -> its number in the traced call, and the user's expression for
                 that number
    floats       symbol of a float -> the tensor f64[] that holds it
    computed     integer expression over such symbols -> the input symbol for it
    changes      functions that undo changes to earlier state, in order
    asked        symbol -> the var that holds its number
    ranges       var of an integer -> its range
    has_writes   whether a tensor may have been written
    allow_captures   False: a concrete tensor from outside is a CapturedTensorError
    dispatches_types whether `process` of users' tensor types is called in this trace
    """

    __slots__ = (
        "_adopted",
        "_expressions",
        "_sizes",
        "allow_captures",
        "asked",
        "captures",
        "changes",
        "closed",
        "computed",
        "dispatches_types",
        "env",
        "floats",
        "graph",
        "has_writes",
        "hints",
        "operands",
        "parts",
        "path",
        "ranges",
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
        self.shape_lines = parent.shape_lines if isinstance(parent, Tracer) else None
        self.env: ShapeEnv | None = parent.env if isinstance(parent, Tracer) else env
        self.hints: dict[Var, tuple[bool | int | float, str]] = {}
        self.floats: dict[Symbol, TracedTensor] = {}
        self.computed: dict[Terms, SymInt] = {}
        self.asked: dict[Symbol, Var] = {}
        self.ranges: dict[Var, ValueRange] = {}
        self.graph = Graph(name)
        self.path = path
        self.allow_captures = allow_captures
        self.dispatches_types = False
        self.symbols: dict[Symbol, Var] = {}
        self.operands: list[TracedTensor] = []
        self.captures: dict[Any, Capture] = {}
        self.parts: dict[Any, Capture] = {}
        self.references: dict[Any, Capture] = {}
        self.shared: dict[Any, Any] = {}
        self.closed = False
        self.has_writes = False
        self._adopted: dict[int, Value] = {}
        self.changes: list[Callable[[], None]] = []
        self._sizes: dict[Var, Size] = {}
        self._expressions: dict[Any, tuple[Var, int]] = {}

    # --- inputs ---

    def operand(
        self, type_: TensorType, name: str, sizes: Mapping[int, Size] = _NOTHING
    ) -> TracedTensor:
        """A new input of the function, after the symbols of its shape.

        Args:
            sizes: Axis -> size, for sizes that differ between runs of the function:
                symbols that this or an earlier operand defines.
        """
        if sizes or not type_.is_static:
            shape = list(type_.shape)
            self.bind_symbols([n for axis, n in enumerate(shape) if axis not in sizes])
            for axis, size in sizes.items():
                shape[axis] = size
            type_ = type_.with_shape(shape)
        var = self.graph.add_input(shared(type_), name)
        tensor = TracedTensor(self, var)
        self.operands.append(tensor)
        self._define_sizes(var)
        return tensor

    def input_like(
        self, var: Var, type_: TensorType | None = None, name: str = ""
    ) -> TracedTensor:
        """Add an input like one of another graph, in the same section.

        Args:
            type_: Its type; None: that of `var`. Symbols in it are not defined here.
            name: Its name; empty: that of `var`.
        """
        node = var.node
        if node.symbol is not None:
            return TracedTensor(self, self.define(node.symbol))
        section = node.section or "operand"
        new = self.graph.add_input(type_ or var.type, name or node.name, section)
        return TracedTensor(self, new)

    def reference(self, operand: Operand, name: str) -> TracedTensor:
        """Return a new input that is the caller's tensor: the body writes to that one.

        A tensor passed twice, or also captured, is one tensor in the body.
        """
        if not isinstance(operand, Value):
            return self.operand(operand.type, name)
        operand = stand_in(operand)
        self.bind_symbols(operand.type.shape)
        origin, memory = self._lift_parent(operand)
        var = self.graph.add_input(operand.type, name)
        capture = self.references.get(id(origin))
        if capture is None:
            capture = self.references[id(origin)] = self.lifted(origin, var, memory)
        self.operands.append(capture.tensor)
        return capture.tensor

    def lifted(self, origin: Tensor, var: Var, memory: Tensor) -> Capture:
        """Return the capture for a tensor of the parent and its input `var`."""
        tensor = TracedTensor(self, var)
        tensor.origin = origin
        return Capture(origin, var, tensor, memory)

    def bind_symbols(self, sizes: Sequence[Any]) -> None:
        """Make inputs for the symbols in `sizes`."""
        for size in sizes:
            if isinstance(size, SymInt):
                for symbol in free_symbols(size):
                    self.symbol(symbol)

    def symbol(self, symbol: Symbol) -> Var:
        """Return the var of a symbol, which is lifted from the parent if necessary."""
        var = self.symbols.get(symbol)
        if var is None:
            if isinstance(self.parent, Tracer):
                self.parent.symbol(symbol)
            elif symbol.env is not None:
                raise escaped_number(symbol)
            var = self.define(symbol)
        return var

    def define(self, symbol: Symbol) -> Var:
        """Make a new input for a symbol."""
        var = self.graph.add_input(SYMBOL_TYPE, symbol.name, "symbol", symbol)
        self.symbols[symbol] = var
        return var

    def known_size(self, var: Var) -> Size | None:
        """Return the size that a var holds, by this trace or one below, or None."""
        if var.node.symbol is not None:
            return size_of(var.node.symbol)
        node = var.node
        if node.op is convert and node.args[0].type.dtype is var.type.dtype:
            # `hf.asarray(x.shape[0])` is a strong tensor, but still holds a size.
            [arg] = node.args
            return int(arg.value) if isinstance(arg, Constant) else self.known_size(arg)
        size = self._sizes.get(var)
        if size is None and isinstance(self.parent, Tracer):
            for capture in self._from_outside():
                if capture.input is var and isinstance(capture.origin, TracedTensor):
                    return self.parent.known_size(self.parent.read(capture.origin))
        return size

    def adopt(self, value: Value) -> None:
        """Note a tensor made from data during this trace: it is no captured global."""
        self._adopted[id(value)] = value
        note_own(value)
        if self.parent is not None:
            self.parent.adopt(value)

    # --- lifting ---

    def dispatches(self, value: Value) -> bool:
        owner = tracer_of(value)
        return owner is self or (owner is None and self.dispatches_types)

    def localize(self, value: Value) -> TracedTensor:
        """Return the tensor of this tracer for `value`, lifted if it is from outside.

        Raises:
            EscapedValueError: `value` belongs to a trace that is no ancestor of this.
            CapturedTensorError: it is a concrete tensor, and captures are not allowed.
        """
        if isinstance(value, TracedTensor) and value.tracer is self and not self.closed:
            return value
        value = stand_in(value)
        if isinstance(value, TracedTensor) and value.tracer is self:
            if self.closed:
                raise escaped(value, "that trace has ended")
            return value
        origin, memory = self._lift_parent(value)
        if isinstance(origin, TracedTensor) and origin.source.node.symbol is not None:
            return TracedTensor(self, self.symbol(origin.source.node.symbol))
        existing = self._capture_of(origin)
        if existing is not None:
            return existing.tensor
        self.bind_symbols(value.type.shape)
        name = origin.source.node.name if isinstance(origin, TracedTensor) else ""
        name = name or f"c{len(self.captures)}"
        var = self.graph.add_input(value.type, name, "capture")
        capture = self.captures[id(origin)] = self.lifted(origin, var, memory)
        if self.has_writes and any(
            c.written and c.overlaps(capture) for c in self._from_outside()
        ):
            self.unite(capture.tensor)
        return capture.tensor

    def _capture_of(self, origin: Tensor) -> Capture | None:
        """Return the present capture of a tensor of the parent, or None."""
        key = id(origin)
        return self.captures.get(key) or self.parts.get(key) or self.references.get(key)

    def _lift_parent(self, value: Value) -> tuple[Tensor, Tensor]:
        """Return `value` as a tensor of the parent, and the tensor that has its
        memory."""
        parent = self.parent
        if has_process(value):
            if self.dispatches(value):
                raise held_by_type(value)
            if parent is None or parent.dispatches(value):
                return value, value
        if isinstance(parent, Tracer):
            local = parent.localize(value)
            return local, parent.memory(local)
        if isinstance(value, EagerTensor):
            if not self.allow_captures and not self.is_adopted(value):
                raise CapturedTensorError(
                    f"the traced function reads a tensor {value.type} that is not an "
                    f"argument{at_line()}. Pass it as an argument, or trace "
                    "with `captures=True` to keep it as an attribute of the graph."
                )
            return value, value
        if isinstance(value, TracedTensor):
            raise escaped(value, "its trace has ended, or it belongs to another one")
        assert isinstance(value, Tensor)
        return value, value

    def memory(self, tensor: TracedTensor) -> Tensor:
        """Return the tensor, eager or of the outermost trace, that a tensor views."""
        owner = self.place(tensor).storage.owner if tensor.storage else tensor
        capture = self._capture_of(owner.origin) if owner.origin is not None else None
        return owner if capture is None else capture.memory

    def part(self, tensor: TracedTensor) -> Part:
        """Return a tensor as a part of one that is eager or of the outermost trace."""
        storage, chain = self.place(tensor)
        owner = storage.owner
        capture = self._capture_of(owner.origin) if owner.origin is not None else None
        if capture is None:
            return Part(owner, chain)
        if isinstance(self.parent, Tracer) and isinstance(capture.origin, TracedTensor):
            outer = self.parent.part(capture.origin)
            return Part(outer.base, (*outer.chain, *chain))
        return Part(capture.memory, chain)

    @property
    def adopted(self) -> Iterable[Value]:
        """The tensors that were made from data during this trace."""
        return self._adopted.values()

    def is_adopted(self, value: Value) -> bool:
        """Whether a tensor was made from data during this trace."""
        return id(value) in self._adopted

    def _from_outside(self) -> list[Capture]:
        """Return the captures and references: inputs that are the parent's tensors."""
        return [*self.captures.values(), *self.references.values()]

    def written_captures(self) -> dict[Any, Capture]:
        """Return the captures that the function writes, by key.

        Tensors that it makes from numbers are captures too, but new in each run, and
        so excluded.
        """
        return {
            key: capture
            for key, capture in self.captures.items()
            if capture.written and not is_private(capture.origin, self.is_adopted)
        }

    # --- memory that several inputs share ---

    def prepare_write(self, tensor: TracedTensor) -> None:
        check_own(tensor)
        self.has_writes = True
        origin = self.storage_of(tensor).owner.origin
        if isinstance(self.parent, Tracer) and isinstance(origin, TracedTensor):
            self.parent.prepare_write(origin)
        elif isinstance(origin, EagerTensor):
            with using(self.parent):  # the parent may forbid the write
                origin.check_writable()
        self.unite(tensor)

    def unite(self, tensor: TracedTensor) -> None:
        """Make the inputs that alias a tensor views of one base, here and in tracers
        below, so that a write to one of them is visible in the others.

        Raises:
            MutationError: they cannot be views of one base.
        """
        origin = self.place(tensor).storage.owner.origin
        capture = self._capture_of(origin) if origin is not None else None
        if capture is None:
            return
        if isinstance(self.parent, Tracer) and isinstance(origin, TracedTensor):
            self.parent.unite(origin)
        group = [c for c in self._from_outside() if c.overlaps(capture)]
        if len(group) == 1:
            return
        for part, (base, chain) in zip(group, self._bases(group), strict=True):
            if base is not part.origin and self.place(part.tensor).chain == ():
                self._put_part(part, self.localize(base), chain)

    def _bases(self, group: Sequence[Capture]) -> list[tuple[Tensor, Chain]]:
        """Return the base of each of a group of aliases, and the chain from it."""
        bases: list[tuple[Tensor, Chain]] = []
        if isinstance(self.parent, Tracer):
            for capture in group:
                storage, chain = self.parent.place(self.parent.localize(capture.origin))
                bases.append((storage.owner, chain))
            return bases
        tensors = [c.origin for c in group if isinstance(c.origin, EagerTensor)]
        row = row_of(tensors)
        for tensor in tensors:
            places = None if row is None else places_in(row, tensor)
            if row is None or places is None:
                raise aliased_write(tensor.type)
            bases.append((row, tuple(map(Strided, places))))
        return bases

    def _put_part(self, part: Capture, base: TracedTensor, chain: Chain) -> None:
        """Replace an input by a view of another one, made by the first nodes of the
        graph: in a loop, the base is another one in each step."""
        steps = [step.localized(self) for step in chain]
        self.embed(part.tensor, Place(self.storage_of(base), tuple(steps)))
        key = id(part.origin)
        if key not in self.captures:
            return  # an operand, not a carry
        graph, inputs, captures = self.graph, self.graph.inputs, dict(self.captures)
        count, old_node = len(graph.nodes), part.input.node
        assert base.origin is not None
        base_capture = self._capture_of(base.origin)
        assert base_capture is not None
        value = TracedTensor(self, base_capture.input)
        for step in steps:
            value = step.view(self, value)
        if len(graph.nodes) == count:  # the part is the whole base
            self.record(OPERATIONS["copy"], (value,), {})
        first = graph.nodes[count:]
        graph.nodes = first + graph.nodes[:count]
        first[-1].results, part.input.node = (part.input,), first[-1]
        graph.inputs = [v for v in inputs if v is not part.input]
        self.parts[key] = self.captures.pop(key)

        def take_back() -> None:
            del graph.nodes[: len(first)], self.parts[key]
            graph.inputs, part.input.node = inputs, old_node
            self.captures.clear()
            self.captures.update(captures)

        self.changes.append(take_back)

    def change(self, owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        self.changes.append(lambda: setattr(owner, name, old))
        super().change(owner, name, value)

    # --- recording ---

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        results = super().process(op, args, params)
        if type(op) is not OpDef:
            for result in results:
                if not result.type.is_static:
                    self._define_sizes(self.read(self.localize(result)))
        return results

    def arg(self, operand: Operand) -> Arg:
        """Return an operand as an argument of a node of this graph."""
        if type(operand) is TracedTensor:
            is_local = operand.tracer is self and operand.storage is None
            if is_local and not self.closed:
                return operand.source
        elif isinstance(operand, Constant):
            return operand
        return self.read(self.localize(operand))

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        recorded = [self.arg(a) for a in args]
        if any(s.real for s in static_symbols(params.values())):
            params = {k: map_sizes(v, self.whole) for k, v in params.items()}
        for symbol in static_symbols(params.values()):
            self.symbol(symbol)
        try:
            if type(op) is OpDef:
                types = op.result_types([a.type for a in recorded], params)
            else:
                types = self._localize_sizes(result_types(op, recorded, params))
        except HopflowError as error:
            _note_line(error)
            raise
        node = self.graph.call(op, recorded, params, types, user_line(3))
        node.module_path = origin.module_path
        node.operator_path = _joined(self.path, origin.node.operator_path)
        if op is item:
            self._define_by(node)
        elif op is dim_size:
            self._sizes[node.results[0]] = node.args[0].type.shape[params["axis"]]
        elif op is symbolic_int:
            self._sizes[node.results[0]] = params["value"]
        return tuple([TracedTensor(self, var) for var in node.results])

    def repeat(
        self,
        node: Node,
        args: Sequence[Operand],
        copied: Callable[[Graph], Graph] = clone,
    ) -> list[TracedTensor]:
        """Record a copy of a node of another graph, on args of the same types; it
        defines the same symbol. Its graphs are copied by `copied`, and the shared body
        of calls only once: see `docs/notes/roles_and_regions.md`."""
        recorded = tuple(map(self.arg, args))

        params = map_graphs(
            node.params,
            lambda graph: (
                self._shared(graph, copied) if node.op.is_call else copied(graph)
            ),
        )
        copy = copy_fields(node, Node(node.kind, node.op, recorded, params))
        copy.results = tuple([Var(copy, v.index, v.type) for v in node.results])
        self.graph.nodes.append(copy)
        if copy.symbol is not None:
            self.symbols[copy.symbol] = copy.results[0]
        return [TracedTensor(self, var) for var in copy.results]

    def _shared(self, graph: Graph, copied: Callable[[Graph], Graph]) -> Graph:
        """Return the copy of `graph` that all its calls in this trace share."""
        key = id(graph), copied
        if key not in self.shared:
            self.shared[key] = graph, copied(graph)
        copy: Graph = self.shared[key][1]
        return copy

    def _define_by(self, node: Node) -> None:
        """Make the symbol of an `item` node; it is backed if the traced call provides
        the value."""
        allowed = symbol_range(node)
        [arg] = node.args
        hint = self.hints.get(arg) if isinstance(arg, Var) else None
        if self.env is None:
            size = size_of(Symbol(f"u{len(self.symbols)}", None, allowed))
        elif hint is None:
            size = self.env.unbacked(None, allowed.low, allowed.high)
        else:
            number, text = hint
            size = self.env.backed(None, int(number), allowed.low, allowed.high, text)
        [node.symbol] = free_symbols(size)
        if isinstance(arg, Var):
            self.asked[node.symbol] = arg
        self.symbols[node.symbol] = node.results[0]

    def _localize_sizes(self, types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        """Return the types of an operator's results, over symbols of this trace."""
        if all([t.is_static for t in types]):
            return types
        new_symbols: dict[Symbol, Size] = {}
        for symbol in free_symbols(*(n for t in types for n in t.shape)):
            if symbol not in self.symbols and self.env is not None:
                allowed = symbol.range
                new_symbols[symbol] = self.env.unbacked(None, allowed.low, allowed.high)
        if not new_symbols:
            return types
        return tuple(
            [t.with_shape([substitute(n, new_symbols) for n in t.shape]) for t in types]
        )

    def _define_sizes(self, var: Var) -> None:
        """Define the symbols that first occur in the type of a var."""
        if var.type.is_static:
            return
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in self.symbols:
                tensor = TracedTensor(self, var)
                [result] = self.record(dim_size, (tensor,), {"axis": axis})
                result.source.node.symbol = symbol
                self.symbols[symbol] = result.source

    # --- the end ---

    def close(self, outputs: Sequence[Operand]) -> Graph:
        """Set the outputs, join the input lists, and return the graph."""
        graph = self.graph
        graph.outputs = tuple(self.arg(o) for o in outputs)
        self.join()
        self.closed = True
        return graph

    def join(self) -> None:
        """Order the inputs: symbols, operands, captures. Make their names unique."""
        self.graph.inputs = [
            *(v for v in self.symbols.values() if v.node.section == "symbol"),
            *(v for v in self.graph.inputs if v.node.section == "operand"),
            *(v for v in self.graph.inputs if v.node.section == "capture"),
        ]
        self.graph.name_inputs()


def _note_line(error: HopflowError) -> None:
    if (line := user_line(4)) is not None:
        error.add_note(f"while tracing {line}")


def part_of(value: Value) -> Part:
    """Return `value` as a part of a tensor that is eager or of the outermost trace."""
    here = current()
    if isinstance(here, Tracer) and not (has_process(value) and here.dispatches(value)):
        return here.part(here.localize(value))
    assert isinstance(value, Tensor)
    return Part(value, ())


def share_memory(values: Iterable[Operand]) -> bool:
    """Whether two of the tensors may alias."""
    tensors = {id(x): x for x in values if isinstance(x, Value)}
    parts = map(part_of, tensors.values())
    return any(parts_overlap(a, b) for a, b in combinations(parts, 2))


def range_of(operand: Operand, tracer: Interpreter | None = None) -> ValueRange:
    """Return the range of an integer scalar in a trace, by default the innermost."""
    if operand.type.shape or not operand.type.dtype.is_integer:
        return EVERY
    if isinstance(operand, Constant):
        return ValueRange.point(int(operand.value))
    tracer = tracer or current()
    if has_process(operand) and tracer.dispatches(operand):
        return EVERY
    return tracer.range_of(operand) if isinstance(tracer, Tracer) else EVERY


def _joined(path: str, inner: str) -> str:
    """Return the operator path of a node whose graph is replayed at another path."""
    if path.startswith(inner):  # the replayed operator encloses the graph
        return path
    if inner.startswith(path):
        return inner
    return f"{path} → {inner}"


def trace_into(tracer: Tracer, fn: Any, args: Sequence[Any]) -> Any:
    """Call `fn(*args)` with `tracer` innermost; an error closes the trace.

    The operator that traces undoes what was lifted from ancestors.
    """
    is_root = not isinstance(tracer.parent, Tracer)
    try:
        with (
            # The frame is in no local variable: a frame that refers to itself keeps its
            # callers and their variables alive until the next garbage collection.
            called_from(sys._getframe() if is_root else origin.caller),
            using(tracer),
            replaying(),
        ):
            if tracer.env is None or not isinstance(tracer.parent, Tracer):
                return fn(*args)
            with tracer.env.body():
                return fn(*args)
    except BaseException as error:
        tracer.closed = True
        if is_root and tracer.env is not None and isinstance(error, HopflowError):
            note = tracer.env.legend(str(error))
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _is_traced(env: Env) -> bool:
    interpreter: Interpreter | None = current()
    while isinstance(interpreter, Tracer):
        if interpreter.env is env:
            return True
        interpreter = interpreter.parent
    return False


lookups.slots.is_traced = _is_traced
