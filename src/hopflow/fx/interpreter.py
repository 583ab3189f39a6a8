"""`Interpreter`: run a graph node by node. Subclass it to act at each node."""

from functools import partial
from typing import Any, ClassVar

from hopflow.fx.bodies import Maker, lifted
from hopflow.fx.node import Node, map_items
from hopflow.fx.opening import is_users_function, map_bodies, traced
from hopflow.fx.runner import AnyNode, Runner, runs_by_node
from hopflow.trace.source import name_of

__all__ = ["AnyNode", "Interpreter"]


class Interpreter(Runner):
    """Run `module` node by node, by a method for each kind of node.

    The methods of a subclass also run for the nodes of bodies (the functions that
    operators run; see `open_bodies`), unless `runs_bodies` is False. A function that
    needs the value of a proxy runs as it is.

    For a captured module (`hf.trace`) the methods run in each step of a loop. There
    `target` is the operation, `args` are tensors and `Constant`s, and `kwargs` are its
    params, with numbers for sizes. A method returns the result of a node, or a tuple of
    none or several.

    module   an object with a `graph` and `attributes`; for `jitted.graph` a function of
             all its inputs
    env      node -> its value; in a captured graph: var -> its value

    >>> class Calls(hf.fx.Interpreter):
    ...     def call_function(self, target, args, kwargs):
    ...         print(target.__name__)
    ...         return super().call_function(target, args, kwargs)
    >>> Calls(hf.symbolic_trace(lambda x: hf.sin(x) + 1.0)).run(hf.asarray(0.0))
    sin
    add
    Tensor(1., f32[])
    """

    runs_bodies: ClassVar[bool] = True

    def fetch(self, node: AnyNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments, with values in place of nodes."""
        args, kwargs = super().fetch(node)
        # Only methods of a subclass observe the nodes.
        is_seen = self.runs_bodies and type(self) is not Interpreter
        if is_seen and isinstance(node, Node):
            return map_bodies(node.target, args, kwargs, self._opened)
        return args, kwargs

    def _opened(self, value: Any) -> Any:
        """Return an argument with functions that run their bodies node by node."""
        if is_users_function(value) and not runs_by_node(value):
            values = lifted(value)
            body = traced(Maker(value, values), len(values), name_of(value))
            return value if body is None else partial(self._run_by(body), *values)
        return map_items(value, self._opened)
