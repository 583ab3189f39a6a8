"""The conversion of captured graphs to symbolic ones, for `symbolic_trace`.

A node calls an operation (`operation(op)`); sizes among its params are values of nodes.
The bodies of an operator are modules among the attributes, whose parameters are all
inputs of the bodies' graphs. The first call checks the arguments, and the last makes
the results.
"""

import re
from collections.abc import Mapping
from operator import getitem
from typing import Any

from hopflow.fx.graph import Graph
from hopflow.fx.module import GraphModule, require_module
from hopflow.fx.node import Node
from hopflow.fx.operations import (
    Arguments,
    RegionOperation,
    Results,
    SizeOf,
    operation,
    type_of,
)
from hopflow.graph.core import Arg, Constant, Var
from hopflow.graph.core import Graph as CapturedGraph
from hopflow.graph.core import Node as CapturedNode
from hopflow.graph.module import GraphModule as Captured
from hopflow.graph.printer import BARE
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Symbol, SymInt, free_symbols


def as_symbolic(tool: str, module: Any) -> GraphModule:
    """Return the argument of `tool` as a module of `fx`.

    Raises:
        ArgumentTypeError: it is neither a module of `fx` nor a captured one.
    """
    if isinstance(module, Captured):
        return imported(module)
    require_module(tool, module)
    symbolic: GraphModule = module
    return symbolic


def imported(module: Captured) -> GraphModule:
    """Return a module of `fx` that computes and checks what a captured module does."""
    name = re.sub(r"\W", "_", module.graph.name)
    graph = Graph(name if name.isidentifier() else "forward")
    args = [graph.placeholder(name) for name in module.argument_names]
    inputs = graph.call_function(Arguments(module), *args)
    importer = _Importer(module.graph, graph, {})
    for i, var in enumerate(module.graph.inputs):
        input_node = graph.create_node(
            "call_function", getitem, (inputs, i), name=var.node.name
        )
        importer.define(var, input_node)
    outputs = importer.nodes()
    graph.output(graph.call_function(Results(module), inputs, outputs))
    return GraphModule(graph)


class _Importer:
    """Copy the nodes of one captured graph to a symbolic one.

    bodies   id of a graph -> the path and module that it became; calls may share one
    env      var -> its node
    """

    def __init__(
        self,
        captured: CapturedGraph,
        graph: Graph,
        bodies: dict[int, tuple[str, GraphModule]],
    ) -> None:
        self.captured, self.graph, self.bodies = captured, graph, bodies
        self.env: dict[Var, Node] = {}
        self.symbols: dict[Symbol, Node] = {}
        self.sizes: dict[Any, Node] = {}

    def define(self, var: Var, node: Node) -> None:
        self.env[var] = node
        node.meta["type"] = var.type
        if var.node.symbol is not None:
            self.symbols[var.node.symbol] = node
            node.meta["symbol"] = var.node.symbol

    def nodes(self) -> tuple[Any, ...]:
        """Copy all nodes, and return the outputs."""
        for node in self.captured.nodes:
            if node.op is None:
                value = self.captured.attributes[node.name]
                self.define(node.results[0], self.graph.get_attr(node.name, value))
            else:
                self.call(node)
        return tuple(map(self.arg, self.captured.outputs))

    def call(self, node: CapturedNode) -> None:
        args = tuple(map(self.arg, node.args))
        graphs = node.graphs
        bodies = {key: self.body(node, key, body) for key, body in graphs.items()}
        kwargs = {
            key: self.param(key, value, bodies) for key, value in node.params.items()
        }
        target = RegionOperation(node) if graphs else operation(node.op)
        call = self.graph.create_node("call_function", target, args, kwargs)
        call.line, call.module_path = node.line, node.module_path
        if len(node.results) == 1:
            self.define(node.results[0], call)
            return
        for i, var in enumerate(node.results):
            item = self.graph.call_function(getitem, call, i)
            item.line, item.module_path = node.line, node.module_path
            self.define(var, item)

    def arg(self, arg: Arg) -> Any:
        if isinstance(arg, Var):
            return self.env[arg]
        return arg.value if _is_bare(arg) else arg

    # --- params ---

    def param(self, key: str, value: Any, bodies: Mapping[str, Node]) -> Any:
        if key in bodies:
            return bodies[key]
        if isinstance(value, tuple):
            return tuple(
                self.param(f"{key}[{i}]", item, bodies) for i, item in enumerate(value)
            )
        if isinstance(value, SymInt):
            return self.size(value)
        if isinstance(value, TensorType) and not value.is_static:
            shape = tuple(self.param("", n, {}) for n in value.shape)
            return self.graph.call_function(type_of, value.dtype, shape, value.weak)
        return value

    def size(self, size: SymInt) -> Node:
        node = self.sizes.get(size.expression)
        if node is None:
            symbols = free_symbols(size)
            values = [self.symbols[s] for s in symbols]
            node = self.graph.call_function(SizeOf(size, symbols), *values)
            self.sizes[size.expression] = node
        return node

    def body(self, node: CapturedNode, key: str, body: CapturedGraph) -> Node:
        """Return the node that reads the module of a body."""
        if id(body) not in self.bodies:
            graph = Graph("body")
            importer = _Importer(body, graph, self.bodies)
            for var in body.inputs:
                importer.define(var, graph.placeholder(var.node.name))
            graph.output(importer.nodes())
            base = re.sub(r"\W+", "_", f"{node.op.name}_{key}").strip("_")
            path, number = base, 1
            while path in self.graph.attributes:
                path, number = f"{base}_{number}", number + 1
            self.bodies[id(body)] = path, GraphModule(graph)
        path, module = self.bodies[id(body)]
        while self.graph.attributes.get(path, module) is not module:
            path += "_"
        return self.graph.get_attr(path, module)


def _is_bare(constant: Constant) -> bool:
    """Whether a literal in the source has the dtype of this constant."""
    return BARE.get(type(constant.value)) is constant.type.dtype
