"""Graphs of ONNX that are being written: values, nodes, constants, captures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ExportError
from hopflow.export.onnx.kernels import KERNELS, Carrier, carrier
from hopflow.export.onnx.library import element_type, library
from hopflow.graph.core import SourceLine
from hopflow.graph.types import Shape, TensorType
from hopflow.symbolic.size import SymInt


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model, by the name that its nodes know it by."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Origin:
    """What nodes are written for, as Netron shows it.

    name  of the operation
    line  where in the user's code it stands
    path  the module and the operators around it
    """

    name: str
    line: SourceLine | None
    path: str


class Names:
    """Names of a model's values, each given once: a graph within another one must not
    use a name of the outer one for something else."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """`name`, or if it is taken, `name_1`, `name_2`, ..."""
        found, number = name, self._next.get(name, 0)
        while found in self.taken:
            number += 1
            found = f"{name}_{number}"
        self._next[name] = number
        self.taken.add(found)
        return found


MOST_NESTED: Final = 30
"""Of graphs in each other: protocol buffers hold 100 messages, and each takes three."""

_SIGN_BIT: Final = np.asarray(np.iinfo(np.int64).min)


@dataclass(eq=False)
class Scope:
    """One graph that is being written: the model's, a branch, a body, a function.

    names     of all values of the model
    parent    the graph around it, whose values it may read; None of the model and of
              functions
    is_closed whether it must read nothing of the graph around it
    origin    what its nodes are written for
    failed    i64[]: the number of the first check that has failed so far, or 0; None:
              there was no check
    depth     how many graphs are around it
    """

    names: Names
    parent: "Scope | None" = None
    is_closed: bool = False
    origin: Origin | None = None
    failed: Value | None = None
    depth: int = 0
    nodes: list[Any] = field(default_factory=list)
    _constants: dict[Any, Value] = field(default_factory=dict)

    def inner(self, *, is_closed: bool = False) -> "Scope":
        """A graph within this one.

        Raises:
            ExportError: it would be deeper than what files hold.
        """
        if self.depth == MOST_NESTED:
            raise ExportError(
                f"it stands in {MOST_NESTED} other loops and branches. No ONNX file "
                "holds more of them in each other."
            )
        found = Scope(self.names, self, is_closed, self.origin)
        found.depth = self.depth + 1
        return found

    # --- values ---

    def input(self, name: str, dtype: DType) -> Value:
        """A new input of this graph."""
        return Value(self.names.fresh(name), dtype)

    def constant(self, value: Any, dtype: DType = dtypes.int64) -> Value:
        """A constant, one node for all equal ones."""
        array = np.asarray(value).astype(dtype.dtype)
        key = dtype, array.shape, array.tobytes()
        known = self._known_constant(key)
        if known is None:
            [name] = self.node("Constant", (), {"value": tensor(array, dtype)})
            known = self._constants[key] = Value(name, dtype)
        return known

    def _known_constant(self, key: Any) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope._constants:
                return scope._constants[key]
            scope = None if scope.is_closed else scope.parent
        return None

    # --- nodes ---

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Any],
        outputs: int | Sequence[str] = 1,
        domain: str = "",
    ) -> list[str]:
        """Append a node as it is given, and return the names of its results."""
        if isinstance(outputs, int):
            base = operator.lower()
            outputs = [self.names.fresh(base) for _ in range(outputs)]
        origin, onnx = self.origin, library()
        title = operator if origin is None else origin.name
        where = "" if origin is None or origin.line is None else f" {origin.line}"
        node = onnx.helper.make_node(
            operator,
            list(inputs),
            list(outputs),
            name=self.names.fresh(f"{title}{where}"),
            domain=domain,
            **attributes,
        )
        if origin is not None:
            node.doc_string = "" if origin.line is None else origin.line.trail
            if origin.path:
                entry = onnx.StringStringEntryProto(key="path", value=origin.path)
                node.metadata_props.append(entry)
        self.nodes.append(node)
        return list(outputs)

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> Value:
        """Append a node with one result, in a dtype that has a kernel.

        Raises:
            ExportError: there is none.
        """
        [value] = self.several(operator, *inputs, **attributes)
        return value

    def several(self, operator: str, *inputs: Value, **attributes: Any) -> list[Value]:
        """The same of a node with any number of results."""
        row = KERNELS[operator]
        data = range(len(inputs)) if row.data is None else row.data
        dtype = inputs[data[0]].dtype
        found = carrier(operator, dtype)
        if found is None:
            raise ExportError(
                f"ONNX's `{operator}` has no kernel for {dtype}, nor for a dtype that "
                "holds its values."
            )
        given = [
            self._carried(x, found) if i in data else x for i, x in enumerate(inputs)
        ]
        names = self.node(
            operator, [x.name for x in given], attributes, len(row.results)
        )
        return [
            self._restored(Value(name, found.dtype), dtype, found)
            if result is None
            else Value(name, result)
            for name, result in zip(names, row.results, strict=True)
        ]

    def _carried(self, value: Value, found: Carrier) -> Value:
        if not found.biased:
            return self.cast(value, found.dtype)
        bits = self.bitcast(value, dtypes.int64)
        return self("BitwiseXor", bits, self.constant(_SIGN_BIT))

    def _restored(self, value: Value, dtype: DType, found: Carrier) -> Value:
        if not found.biased:
            return self.cast(value, dtype)
        bits = self("BitwiseXor", value, self.constant(_SIGN_BIT))
        return self.bitcast(bits, dtype)

    def cast(self, value: Value, dtype: DType) -> Value:
        """ONNX's conversion, for values that `dtype` has; of integers the low bits."""
        if value.dtype is dtype:
            return value
        [name] = self.node("Cast", [value.name], {"to": element_type(dtype)})
        return Value(name, dtype)

    def bitcast(self, value: Value, dtype: DType) -> Value:
        """The bits of a value as another dtype of the same width."""
        if value.dtype is dtype:
            return value
        [name] = self.node("BitCast", [value.name], {"to": element_type(dtype)})
        return Value(name, dtype)

    # --- shapes ---

    def integers(self, values: Sequence[int]) -> Value:
        """The constant i64[n] of these."""
        return self.constant(np.asarray(values, np.int64).reshape(-1))

    def unsqueezed(self, value: Value, *axes: int) -> Value:
        return self("Unsqueeze", value, self.integers(axes)) if axes else value

    def scalar(self, value: Value) -> Value:
        """The only element of a tensor, without axes."""
        return self("Reshape", value, self.integers(()))

    def flat(self, value: Value) -> Value:
        return self("Reshape", value, self.integers((-1,)))

    # --- the end ---

    def outputs(self, values: Sequence[Value]) -> list[Value]:
        """Values as outputs: of this graph's own nodes, each another one."""
        found: list[Value] = []
        seen: set[str] = set()
        produced = {name for node in self.nodes for name in node.output}
        for value in values:
            if value.name not in produced or value.name in seen:
                [name] = self.node("Identity", [value.name], {})
                value = Value(name, value.dtype)
            seen.add(value.name)
            found.append(value)
        return found

    def graph(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """The graph, with `value_info`s of its inputs and outputs."""
        return library().helper.make_graph(
            self.nodes, name, list(inputs), list(outputs)
        )


def tensor(array: Any, dtype: DType, name: str = "") -> Any:
    """An array as ONNX holds it."""
    found = library().TensorProto()
    found.data_type = element_type(dtype)
    found.dims.extend(array.shape)
    found.raw_data = np.ascontiguousarray(array).tobytes()
    found.name = name
    return found


def value_info(value: Value, shape: Shape | None, doc: str = "") -> Any:
    """The declaration of a value: its dtype, its fixed sizes, the names of the symbols
    among its sizes. Without `shape` its rank may be any."""
    sizes = None
    if shape is not None:
        sizes = [str(n) if isinstance(n, SymInt) else int(n) for n in shape]
    return library().helper.make_tensor_value_info(
        value.name, element_type(value.dtype), sizes, doc_string=doc
    )


def inner_info(value: Value, type_: TensorType) -> Any:
    """The same within a region, whose symbols may be others at each step: sizes that
    are not fixed have no names."""
    sizes = [None if isinstance(n, SymInt) else int(n) for n in type_.shape]
    return library().helper.make_tensor_value_info(
        value.name, element_type(value.dtype), sizes
    )
