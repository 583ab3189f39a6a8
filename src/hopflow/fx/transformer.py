"""`Transformer`: an interpreter whose values are proxies, so that it writes a graph."""

from typing import Any

from hopflow.fx.interpreter import Interpreter
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.fx.proxy import Proxy
from hopflow.fx.tracer import Tracer, paths_of, tracing

__all__ = ["Transformer"]


class Transformer(Interpreter):
    """Makes a new module of `module`, node by node.

    A method for a kind of node gets proxies, and returns what shall stand for the node:
    by default a node like it. What it computes from the proxies is recorded.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.tracer = Tracer()
        self._type: Any = None

    def transform(self) -> GraphModule:
        """The new module; the old one stays as it is."""
        paths = paths_of(self.module)
        self.tracer.start(self.module, self.module.graph.name, paths)
        with tracing(self.tracer):
            self.run_nodes()
        return GraphModule(self.tracer.graph)

    def run_node(self, node: Node) -> Any:
        self._type = node.type
        result = super().run_node(node)
        if isinstance(result, Proxy):  # notes go along
            result.node.meta = {**node.meta, **result.node.meta}
        return result

    def placeholder(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.tracer.create_proxy(
            "placeholder", target, args, kwargs, type_=self._type
        )

    def get_attr(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.tracer.graph.attributes[target] = self.module.attributes[target]
        return self.tracer.create_proxy("get_attr", target, args, kwargs)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def call_method(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.tracer.create_proxy("call_method", target, args, kwargs)

    def call_module(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.tracer.graph.attributes[target] = self.module.attributes[target]
        return self.tracer.create_proxy("call_module", target, args, kwargs)

    def output(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.tracer.create_proxy(
            "output", target, args, kwargs, type_=self._type
        )
