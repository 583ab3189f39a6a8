"""`Transformer`: an interpreter that runs on proxies, and so records a new graph."""

from typing import Any

from hopflow.entries import entry
from hopflow.fx.interpreter import AnyNode, Interpreter
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.fx.opening import open_bodies
from hopflow.fx.proxy import Proxy
from hopflow.fx.retrace import retraced, with_graph
from hopflow.fx.tracer import Tracer, paths_of, tracing
from hopflow.graph.core import Node as CapturedNode
from hopflow.graph.module import GraphModule as Captured
from hopflow.graph.verifier import verify


class Transformer(Interpreter):
    """Make a new module from `module`, node by node.

    The method for a kind of node gets proxies, and returns a replacement for the node:
    by default a copy of it. Operations of the method on proxies are recorded. The
    bodies of operators are transformed too, as modules (see `open_bodies`).

    For a captured module, tensors without values take the place of proxies, and the
    methods run for the nodes of bodies too. A value that a method reads there from
    outside (a tensor, or a value of a node around the operator) is passed to the
    operator.

    >>> class Cosines(hf.fx.Transformer):
    ...     def call_function(self, target, args, kwargs):
    ...         target = hf.cos if target is hf.sin else target
    ...         return super().call_function(target, args, kwargs)
    >>> print(Cosines(hf.symbolic_trace(lambda x: hf.sin(x))).transform())
    def forward(self, x):
        cos = hf.cos(x)  # ...
        return cos
    <BLANKLINE>
    """

    runs_bodies = False

    @entry
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.tracer = Tracer()

    @entry
    def transform(self) -> Any:
        """Return the new module, of the same kind; the old one does not change.

        Raises:
            CarryTypeError: a method changed the type of a carry.
            GraphError: the new graph breaks a rule of captured graphs.
            MutationError: a method wrote to a value of a captured graph.
        """
        if isinstance(self.module, Captured):
            return self._retraced(self.module)
        original = self.module
        try:
            return self._transformed(open_bodies(original))
        finally:
            self.module = original

    def _transformed(self, module: GraphModule) -> GraphModule:
        """Return the new module for one of `fx`, which may be a body."""
        previous = self.module, self.tracer, self.env
        self.module, self.tracer = module, type(self.tracer)()
        try:
            self.tracer.start(module, module.graph.name, paths_of(module))
            with tracing(self.tracer):
                self.run_nodes()
            return GraphModule(self.tracer.graph)
        finally:
            self.module, self.tracer, self.env = previous

    def _retraced(self, module: Captured) -> Captured:
        graph = retraced(module.graph, self.run_graph)
        verify(graph)
        return with_graph(module, graph)

    def run_node(self, node: AnyNode) -> Any:
        if isinstance(node, CapturedNode):
            return super().run_node(node)
        result = super().run_node(node)
        if isinstance(result, Proxy):  # keep the notes
            result.node.meta = {**node.meta, **result.node.meta}
        return result

    def placeholder(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._frame is not None:
            return super().placeholder(target, args, kwargs)
        return self.tracer.create_proxy(
            "placeholder", target, args, kwargs, type_=self._annotation()
        )

    def get_attr(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._frame is not None:
            return super().get_attr(target, args, kwargs)
        value = self.module.attributes[target]
        if isinstance(value, GraphModule):  # the body of an operator
            value = self._transformed(value)
        self.tracer.graph.attributes[target] = value
        return self.tracer.create_proxy("get_attr", target, args, kwargs)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._frame is not None:
            return super().call_function(target, args, kwargs)
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
        if self._frame is not None:
            return super().output(target, args, kwargs)
        return self.tracer.create_proxy(
            "output", target, args, kwargs, type_=self._annotation()
        )

    def _annotation(self) -> Any:
        """Return the user's annotation of the running node."""
        return self._node.type if isinstance(self._node, Node) else None
