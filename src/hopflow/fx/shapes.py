"""`ShapeProp`: note the types of all values of a graph on its nodes."""

from typing import Any

from hopflow import pytree
from hopflow.bind import Value
from hopflow.entries import entry
from hopflow.fx.interpreter import AnyNode, Interpreter
from hopflow.trace.capture import trace


class ShapeProp(Interpreter):
    """Set `node.meta["type"]` of each node to the type of its value.

        fx.ShapeProp(module).propagate(hf.spec("f32[3, 4]"))

    Nothing is computed, so that types may take the place of tensors. In a container
    each tensor is replaced by its type; other values are kept.
    """

    runs_bodies = False

    @entry
    def propagate(self, *args: Any) -> Any:
        """Note the types for arguments of these types, and return those of the results.

        Args:
            args: Tensors, types in place of tensors, or constants.

        Raises:
            HopflowError: an operation does not accept its types; a note names the node.
        """
        types: Any = None

        def run(*args: Any) -> Any:
            nonlocal types
            result = self.run(*args)
            types = pytree.tree_map(_type, result)
            return result

        run.__name__ = getattr(self.module, "__name__", "forward")
        trace(run, *args, mode="fake", captures=True)
        return types

    def run_node(self, node: AnyNode) -> Any:
        result = super().run_node(node)
        node.meta["type"] = pytree.tree_map(_type, result)
        return result


def _type(leaf: Any) -> Any:
    return leaf.type if isinstance(leaf, Value) else leaf
