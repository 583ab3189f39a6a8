"""Evaluations of graphs: each node by its rule, each result a value of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ExportError, GraphError
from hopflow.export.onnx.bounds import Bounds
from hopflow.export.onnx.scopes import Names, Origin, Scope, Value
from hopflow.export.onnx.sizes import (
    Known,
    Number,
    compared,
    condition,
    fits,
    number,
    vector,
)
from hopflow.export.symbols import Symbols
from hopflow.graph.core import Arg, Constant, Graph, Node, SourceLine, Var, plain_symbol
from hopflow.graph.types import Shape, TensorType
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, Symbol, SymFloat, SymInt
from hopflow.symbolic.terms import Operand, Terms, format_operand

Given: TypeAlias = Known | Constant | None
"""What an input of a graph gets; None: the symbol follows from the other inputs."""


class Check(NamedTuple):
    """A condition that a run checks: what is said where it does not hold."""

    message: str
    line: SourceLine | None


@dataclass(eq=False)
class Writer:
    """A model that is being written.

    asserts    what becomes of checks: "outputs", "drop" or "error"
    rules      how a node is written: one function for all
    names      of its values
    attributes the tensors that the program holds
    checks     those of which an output tells whether they hold
    functions  by what they compute, the name and the function
    shared     the graphs that several calls share
    bounds     of the sizes in all graphs
    """

    asserts: str
    rules: "Callable[[Site], Sequence[Value]]"
    names: Names = field(default_factory=Names)
    attributes: dict[str, Value] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    functions: dict[Any, Any] = field(default_factory=dict)
    shared: frozenset[Graph] = frozenset()
    bounds: Bounds = field(default_factory=Bounds)

    def check(self, scope: Scope, holds: Value, found: Check) -> None:
        """Let the model tell whether `holds`, bool[], is true.

        Raises:
            ExportError: with `asserts="error"`.
        """
        if self.asserts == "error":
            raise ExportError(_CHECKED.format(found.message))
        if self.asserts == "drop":
            return
        if found not in self.checks:
            self.checks.append(found)
        number = scope.constant(self.checks.index(found) + 1)
        none = scope.constant(0)
        if scope.failed is None:
            scope.failed = scope("Where", holds, none, number)
        else:
            is_first = scope("Equal", scope.failed, none)
            fails = scope("And", is_first, scope("Not", holds))
            scope.failed = scope("Where", fails, number, scope.failed)

    def merge(self, scope: Scope, failed: Value) -> None:
        """Note what a graph within `scope` says of its checks."""
        if scope.failed is not None:
            none = scope("Equal", scope.failed, scope.constant(0))
            failed = scope("Where", none, failed, scope.failed)
        scope.failed = failed


_CHECKED: Final = (
    "a run checks it (`{}`), and a model cannot stop. Choose `asserts='outputs'`, by "
    "which the model tells whether all checks hold, or 'drop'."
)


class Frame:
    """One evaluation of a graph.

    scope   where its nodes are written
    values  of its vars so far
    """

    def __init__(
        self, writer: Writer, scope: Scope, graph: Graph, args: Sequence[Given]
    ) -> None:
        self.writer = writer
        self.scope = scope
        self.graph = graph
        self.values: dict[Var, Value] = {}
        self.symbols: Symbols[Known] = Symbols()
        self._shapes: dict[tuple[str, int], Value] = {}
        self._sizes: dict[Any, Number] = {}
        self._checked: set[Terms] = set()
        writer.bounds.learn(graph)
        for var, arg in zip(graph.inputs, args, strict=True):
            if arg is not None:
                self.bind(var, arg)

    # --- vars ---

    def bind(self, var: Var, arg: Value | int | float | Constant) -> None:
        """Note what an input is."""
        symbol = var.node.symbol
        if symbol is not None:
            number = arg.value if isinstance(arg, Constant) else arg
            self.symbols[symbol] = number
            return
        if isinstance(arg, Constant):
            arg = self.scope.constant(arg.value, arg.type.dtype)
        elif not isinstance(arg, Value):
            arg = self.scope.constant(arg, var.type.dtype)
        self.store(var, arg)

    def store(self, var: Var, value: Value) -> None:
        """Note a value, and what its shape says of the symbols of its type."""
        self.values[var] = value
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None:
                self.symbols.offer(symbol, partial(self.axis_size, value, axis))

    def value(self, arg: Arg | Size | SymFloat) -> Value:
        """What an operand is."""
        if isinstance(arg, Constant):
            return self.scope.constant(arg.value, arg.type.dtype)
        if not isinstance(arg, Var):
            return self.size(arg).tensor()
        known = self.values.get(arg)
        if known is None:
            if arg.node.symbol is None:
                raise GraphError(f"{self.graph.name}: {arg!r} is read before it is.")
            known = self.values[arg] = self.number_of(arg.node.symbol).tensor()
        return known

    # --- sizes ---

    def axis_size(self, value: Value, axis: int) -> Value:
        """The size of a value along an axis, i64[]."""
        key = value.name, axis
        if key not in self._shapes:
            scope = self.scope
            [name] = scope.node("Shape", [value.name], {"start": axis, "end": axis + 1})
            self._shapes[key] = scope.scalar(Value(name, dtypes.int64))
        return self._shapes[key]

    def number_of(self, symbol: Symbol) -> Number:
        return Number(self.scope, self.symbols[symbol])

    def size(self, size: Size | SymFloat) -> Number:
        """A size, or another symbolic number, as the model computes it."""
        if isinstance(size, int):
            return Number(self.scope, int(size))
        key = size.expression if isinstance(size, SymInt) else size.node
        if key not in self._sizes:
            self._check_room(key)
            self._sizes[key] = number(self.scope, size, self.symbols.__getitem__)
        return self._sizes[key]

    def condition(self, holds: SymBool) -> Value:
        """A condition on sizes, bool[]."""
        for operand in compared(holds):
            self._check_room(operand)
        return condition(self.scope, holds, self.symbols.__getitem__)

    def _check_room(self, operand: Operand) -> None:
        """Let the model tell whether int64 holds all integers of an expression."""
        if self.writer.asserts == "drop":
            return
        origin = self.scope.origin
        for terms in self.writer.bounds.beyond(operand):
            if terms not in self._checked:
                self._checked.add(terms)
                holds = fits(self.scope, terms, self.symbols.__getitem__)
                text = f"int64 cannot hold `{format_operand(terms)}`"
                line = None if origin is None else origin.line
                self.writer.check(self.scope, holds, Check(text, line))

    # --- nodes ---

    def run(self) -> list[Value]:
        """Write all nodes, and return the outputs.

        Raises:
            ExportError: one cannot be; the message names it and the user's line.
        """
        outer = self.scope.origin
        for node in self.graph.nodes:
            if node.op is None:
                self.store(node.results[0], self.writer.attributes[node.name])
            else:
                self.scope.origin = origin_of(node)
                self.write(node)
        self.scope.origin = outer
        return [self.value(arg) for arg in self.graph.outputs]

    def write(self, node: Node) -> None:
        try:
            results = self.writer.rules(Site(self, node))
        except ExportError as error:
            if error.operation:
                raise
            name = node.op.name
            where = "" if node.line is None else f" ({node.line})"
            text = f"to_onnx: `{name}`{where} cannot be in a model: {error}"
            raise ExportError(text, name) from error
        if node.symbol is not None:
            self.symbols[node.symbol] = results[0]
        for var, value in zip(node.results, results, strict=True):
            self.store(var, value)


def origin_of(node: Node) -> Origin:
    path = " / ".join(filter(None, (node.module_path, node.operator_path)))
    return Origin(node.op.name, node.line, path)


class Site:
    """A node that is being written: what its rule may ask and do.

    types    of its operands
    results  the types of its results
    """

    def __init__(self, frame: Frame, node: Node) -> None:
        self.frame = frame
        self.node = node
        self.scope = frame.scope
        self.writer = frame.writer
        self.types = [a.type for a in node.args]
        self.results = [v.type for v in node.results]

    @property
    def operands(self) -> list[Value]:
        return [self.frame.value(a) for a in self.node.args]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.node.params

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> Value:
        """Write a node; see `Scope`."""
        return self.scope(operator, *inputs, **attributes)

    def constant(self, value: Any, dtype: DType = dtypes.int64) -> Value:
        return self.scope.constant(value, dtype)

    def size(self, size: Size) -> Number:
        return self.frame.size(size)

    def shape(self, shape: Shape) -> Value:
        """A shape as i64[n]."""
        return vector(self.scope, [self.frame.size(n) for n in shape])

    def reshaped(self, value: Value, shape: Shape) -> Value:
        return self("Reshape", value, self.shape(shape), allowzero=1)

    def expanded(self, value: Value, shape: Shape) -> Value:
        if all(isinstance(n, int) for n in shape) and 0 in shape:
            # onnxruntime's optimizer takes such a node for one without effect.
            return self.constant(np.zeros(cast("tuple[int, ...]", shape)), value.dtype)
        return self("Expand", value, self.shape(shape))

    def check(
        self, holds: Value, message: str, type_: TensorType | None = None
    ) -> None:
        """Let the model tell whether `holds` is true everywhere.

        Args:
            type_: Of `holds`; None: it has no axes.
        """
        if self.writer.asserts == "outputs" and type_ is not None and type_.shape:
            numbers = self.scope.cast(holds, dtypes.int32)
            axes = self.scope.integers(range(type_.ndim))
            least = self("ReduceMin", numbers, axes, keepdims=0)  # of none: above 0
            holds = self("Greater", least, self.constant(0, dtypes.int32))
        self.writer.check(self.scope, holds, Check(message, self.node.line))
