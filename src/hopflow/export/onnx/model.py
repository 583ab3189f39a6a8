"""`to_onnx`: an exported program as an ONNX model."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.export.exported import Exported
from hopflow.export.onnx.frames import Check, Frame, Writer
from hopflow.export.onnx.library import DOMAIN, OPSET, library
from hopflow.export.onnx.rules import write
from hopflow.export.onnx.scopes import Scope, Value, tensor, value_info
from hopflow.export.onnx.sizes import Known, Number
from hopflow.export.signature import plain_path
from hopflow.graph.core import Graph, SourceLine
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.types import Shape, TensorType
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH

Asserts: TypeAlias = Literal["outputs", "drop", "error"]
ASSERTS: Final = ("outputs", "drop", "error")

FAILED: Final = "failed_check"
"""The output that says which check has failed first."""

MOST_BYTES: Final = 1 << 30
"""Of tensors within the file; larger ones are written beside it. Protocol buffers hold
two gigabytes."""


def to_model(program: Exported, asserts: Asserts) -> Any:
    """The model, a `ModelProto`, which the checker of `onnx` has accepted.

    Raises:
        ExportError: ONNX has nothing for an operation, or `onnx` is missing.
    """
    onnx = library()
    writing = _Writing(program, asserts)
    graph = writing.graph()
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    functions = [f for _, f in writing.writer.functions.values() if f is not None]
    if functions:
        opsets.append(onnx.helper.make_opsetid(DOMAIN, 1))
    model = onnx.helper.make_model(
        graph,
        producer_name="hopflow",
        producer_version=version("hopflow"),
        opset_imports=opsets,
        ir_version=onnx.helper.find_min_ir_version_for([opsets[0]]),
        functions=functions,
        doc_string=f"{program.__name__}, exported by hopflow.\n\n{program.signature}",
    )
    onnx.helper.set_model_props(model, writing.properties())
    onnx.checker.check_model(model, full_check=True)
    return model


def save_model(model: Any, path: str | PathLike[str]) -> None:
    """Write a model; its tensors beside it, if they are large."""
    onnx = library()
    size = sum(len(t.raw_data) for t in model.graph.initializer)
    onnx.save_model(
        model,
        fspath(path),
        save_as_external_data=size > MOST_BYTES,
        location=f"{Path(path).name}.data",
    )


class _Writing:
    """One model that is being written.

    inputs    of the graph, as ONNX declares them, by the name
    outputs   the same
    names     by the path of a leaf or tensor, the name in the model
    """

    def __init__(self, program: Exported, asserts: Asserts) -> None:
        self.program = program
        self.writer = Writer(asserts, write, shared=_shared(program.module.graph))
        self.scope = Scope(self.writer.names)
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.initializers: list[Any] = []
        self.names: dict[str, str] = {}
        graph = program.module.graph
        inputs = [None] * len(graph.inputs)
        self.frame = Frame(self.writer, self.scope, graph, inputs)

    # --- the graph ---

    def graph(self) -> Any:
        leaves = self.read_arguments()
        self.read_state()
        self.offer_symbols(leaves)
        self.check_constraints()
        found = self.frame.run()
        self.write_outputs(found)
        result = self.scope.graph(self.program.__name__, self.inputs, self.outputs)
        result.initializer.extend(self.initializers)
        result.value_info.extend(self.known_types())
        return result

    def read_arguments(self) -> dict[int, Value]:
        """Declare the inputs; returns them by the position of the leaf."""
        module, leaves = self.program.module, {}
        operands = iter(self.program.module.graph.operands)
        for i, found in enumerate(self.program.signature.inputs):
            if i in module.constants:
                continue
            if i in module.numbers:
                value = self.input(found.path, TensorType(dtypes.int64), found.path)
            else:
                var = next(operands)
                value = self.input(found.path, var.type, str(found))
                self.frame.store(var, value)
            leaves[i] = value
        return leaves

    def input(self, path: str, type_: TensorType, doc: str) -> Value:
        value = self.scope.input(plain_path(path), type_.dtype)
        self.names[path] = value.name
        self.inputs.append(value_info(value, type_.shape, doc))
        return value

    def read_state(self) -> None:
        """Hold the tensors of the program. Those that it writes are inputs, too, whose
        default they are."""
        written = self.program.signature.written
        for node in self.program.module.graph.nodes:
            if node.op is not None or node.name in self.writer.attributes:
                continue
            type_ = node.results[0].type
            value = self.scope.input(plain_path(node.name), type_.dtype)
            array = np.asarray(self.program.module.graph.attributes[node.name])
            self.initializers.append(tensor(array, type_.dtype, value.name))
            self.writer.attributes[node.name] = value
            self.names[node.name] = value.name
            if node.name in written:
                self.inputs.append(value_info(value, type_.shape, "state"))

    def offer_symbols(self, leaves: Mapping[int, Value]) -> None:
        """Say where the values of symbols are found."""
        for symbol, source in self.program.module.sources.items():
            self.frame.symbols.offer(symbol, partial(self.found, source, leaves))

    def found(
        self, source: Source | ComputedSource, leaves: Mapping[int, Value]
    ) -> Known:
        if isinstance(source, ComputedSource):
            for symbol, inner in source.sources.items():
                self.frame.symbols.offer(symbol, partial(self.found, inner, leaves))
            return self.frame.size(source.size).value
        value = leaves[source.leaf]
        if source.axis is None:
            return value
        size = Number(self.scope, self.frame.axis_size(value, source.axis))
        if source.factor == 1 and not source.offset:
            return size.value
        shifted = (size - source.offset).tensor()
        return self.scope("Div", shifted, self.scope.constant(source.factor))

    def check_constraints(self) -> None:
        """Let the model tell whether its inputs fulfil what the program demands."""
        if self.writer.asserts != "outputs":
            return
        guards = self.program.module.guards.guards
        for guard, text in zip(guards, self.program.constraints, strict=True):
            holds = self.frame.condition(guard.holds)
            self.writer.check(self.scope, holds, Check(text, None))

    # --- outputs ---

    def write_outputs(self, found: Sequence[Value]) -> None:
        signature, graph = self.program.signature, self.program.module.graph
        paths = [f.path for f in signature.outputs]
        paths += [f"{path} (written)" for path in signature.written]
        docs = [*map(str, signature.outputs), *signature.written]
        rows = [
            (path, value, arg.type.shape, doc)
            for path, value, arg, doc in zip(
                paths, found, graph.outputs, docs, strict=True
            )
        ]
        if self.scope.failed is not None:
            doc = "the number of the first check that has failed; 0: none"
            rows.append((FAILED, self.scope.failed, (), doc))
        for path, value, shape, doc in rows:
            self.output(path, value, shape, doc)

    def output(self, path: str, value: Value, shape: Shape, doc: str) -> None:
        name = self.writer.names.fresh(plain_path(path))
        self.scope.node("Identity", [value.name], {}, [name])
        self.names[path] = name
        declared = value_info(Value(name, value.dtype), shape, doc)
        self.outputs.append(declared)

    # --- what readers see ---

    def known_types(self) -> list[Any]:
        """The types of all values of the graph, as the program knows them."""
        declared = {v.name for v in (*self.inputs, *self.outputs)}
        declared |= {t.name for t in self.initializers}
        found = []
        for var, value in self.frame.values.items():
            if value.name not in declared:
                declared.add(value.name)
                found.append(value_info(value, var.type.shape))
        return found

    def properties(self) -> dict[str, str]:
        """The metadata of the model, each entry a text or JSON."""
        signature = self.program.signature
        constants = {
            x.path: repr(x.value) for x in signature.inputs if x.kind == "constant"
        }
        written = {p: self.names[f"{p} (written)"] for p in signature.written}
        found: dict[str, Any] = {
            "hopflow.signature": str(signature),
            "hopflow.names": self.names,
            "hopflow.constants": constants,
            "hopflow.written": written,
            "hopflow.constraints": list(self.program.constraints),
            "hopflow.asserts": self.writer.asserts,
            "hopflow.checks": [_text(c) for c in self.writer.checks],
        }
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in found.items()
            if value
        }


def _text(check: Check) -> str:
    line: SourceLine | None = check.line
    return check.message if line is None else f"{check.message}  ({line})"


def _shared(graph: Graph) -> frozenset[Graph]:
    """The graphs that are called several times."""
    calls = Counter(
        node.params["body"]
        for node in graph.distinct_nodes()
        if node.op is INVOKE_SUBGRAPH
    )
    return frozenset([body for body, count in calls.items() if count > 1])
