"""`Interpreter`: runs a graph node by node. Subclass it to do something at each."""

from functools import partial
from typing import Any, ClassVar

from hopflow.fx.bodies import Maker, lifted
from hopflow.fx.node import Node, map_items
from hopflow.fx.opening import is_users_function, map_bodies, traced
from hopflow.fx.runner import AnyNode, Runner, runs_by_node
from hopflow.trace.source import name_of

__all__ = ["AnyNode", "Interpreter"]


class Interpreter(Runner):
    """Runs `module`; a method for each kind of node says what it means.

    The methods of a subclass are called for the nodes of bodies too: of functions that
    operators run, as `open_bodies` has them, unless `runs_bodies` is False. A function
    that asks proxies for values runs as it is.

    Of a captured module (`hf.trace`) they are called in each step. There `target` is
    the operation, `args` are tensors and `Constant`s, and `kwargs` are its params, with
    numbers for sizes. A method gives the one result of a node, or a tuple of as many as
    there are.

    module   what is run: anything with a `graph` and `attributes`; of `jitted.graph` a
             function of all its inputs
    env      the values of the nodes so far; in a captured graph of their results
    """

    runs_bodies: ClassVar[bool] = True

    def fetch(self, node: AnyNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A node's arguments, with values in place of nodes."""
        args, kwargs = super().fetch(node)
        # Without a subclass nobody sees the nodes.
        is_seen = self.runs_bodies and type(self) is not Interpreter
        if is_seen and isinstance(node, Node):
            return map_bodies(node.target, args, kwargs, self._opened)
        return args, kwargs

    def _opened(self, value: Any) -> Any:
        """An argument with functions that run their bodies node by node."""
        if is_users_function(value) and not runs_by_node(value):
            read = lifted(value)
            body = traced(Maker(value, read), len(read), name_of(value))
            return value if body is None else partial(self._run_by(body), *read)
        return map_items(value, self._opened)
