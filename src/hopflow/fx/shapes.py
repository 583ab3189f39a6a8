"""`ShapeProp`: the types of all values of a graph, as notes on its nodes."""

from typing import Any

from hopflow import pytree
from hopflow.bind import Value
from hopflow.entries import entry
from hopflow.fx.interpreter import AnyNode, Interpreter
from hopflow.trace.capture import trace


class ShapeProp(Interpreter):
    """Notes on each node what its value is: `node.meta["type"]`, of tensors the type.

        fx.ShapeProp(module).propagate(hf.spec("f32[3, 4]"))

    Nothing is computed: types may stand for tensors. In containers there is a type for
    each tensor in them; what is none stays as it is.
    """

    runs_bodies = False

    @entry
    def propagate(self, *args: Any) -> Any:
        """Note the types for arguments of these types, and return those of the results.

        Raises:
            HopflowError: an operation does not fit its types; a note names the node.
        """
        found: Any = None

        def run(*args: Any) -> Any:
            nonlocal found
            result = self.run(*args)
            found = pytree.tree_map(_type, result)
            return result

        run.__name__ = getattr(self.module, "__name__", "forward")
        trace(run, *args, mode="fake", captures=True)
        return found

    def run_node(self, node: AnyNode) -> Any:
        result = super().run_node(node)
        node.meta["type"] = pytree.tree_map(_type, result)
        return result


def _type(leaf: Any) -> Any:
    return leaf.type if isinstance(leaf, Value) else leaf
