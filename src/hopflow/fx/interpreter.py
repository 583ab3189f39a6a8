"""`Interpreter`: runs a graph node by node. Subclass it to do something at each."""

from collections.abc import Mapping
from typing import Any

from hopflow.errors import ArgumentTypeError
from hopflow.fx.node import Node, map_nodes
from hopflow.graph.origin import Place, replaying

__all__ = ["Interpreter"]


class Interpreter:
    """Runs `module`; a method for each kind of node says what it means.

    module   what is run: anything with a `graph` and `attributes`
    env      the values of the nodes so far
    """

    def __init__(self, module: Any) -> None:
        """
        Raises:
            ArgumentTypeError: `module` has no graph.
        """
        if not hasattr(module, "graph") or not hasattr(module, "attributes"):
            raise ArgumentTypeError(
                f"Interpreter: expected a `hf.fx.GraphModule`, and found "
                f"`{type(module).__name__}`. Make one with `hf.symbolic_trace`."
            )
        self.module = module
        self.env: dict[Node, Any] = {}
        self._given: Mapping[str, Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph returns for these arguments.

        Raises:
            Exception: what a node raises, with a note that says which.
        """
        bound = self.module.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        self._given = bound.arguments
        return self.run_nodes()

    def run_nodes(self) -> Any:
        """Run one node after the other, and return what the output returns."""
        self.env = {}
        for node in self.module.graph.nodes:
            try:
                with replaying(Place(node.line, node.module_path)):
                    result = self.run_node(node)
            except Exception as error:
                at = f" ({node.line})" if node.line else ""
                error.add_note(f"in node `{node.name}`{at}")
                raise
            if node.kind == "output":
                return result
            self.env[node] = result
        return None

    def run_node(self, node: Node) -> Any:
        """The value of one node: what the method of its kind says."""
        args, kwargs = self.fetch(node)
        return getattr(self, node.kind)(node.target, args, kwargs)

    def fetch(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A node's arguments, with values in place of nodes."""
        args, kwargs = map_nodes((node.args, node.kwargs), self.env.__getitem__)
        return args, kwargs

    # --- what each kind of node means ---

    def placeholder(
        self, target: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        return self._given[target.lstrip("*")]

    def get_attr(
        self, target: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        return self.module.attributes[target]

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return target(*args, **kwargs)

    def call_method(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        owner, *rest = args
        return getattr(owner, target)(*rest, **kwargs)

    def call_module(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.module.attributes[target](*args, **kwargs)

    def output(
        self, _target: str, args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        return args[0]
