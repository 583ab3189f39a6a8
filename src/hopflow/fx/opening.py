"""`open_bodies`: convert the functions that operators run to modules, for rewriting."""

from collections.abc import Callable, Mapping
from functools import partial
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import Any

from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, TraceError
from hopflow.fx.bodies import Maker
from hopflow.fx.folder import slots as folder_slots
from hopflow.fx.graph import Graph
from hopflow.fx.module import GraphModule, owning, require_module
from hopflow.fx.node import Node, map_items
from hopflow.fx.tracer import Tracer
from hopflow.trace.source import name_of
from hopflow.tracebacks import is_own_file


@entry
def open_bodies(module: GraphModule) -> GraphModule:
    """Return a copy of `module` in which the bodies of operators are modules, at any
    depth.

        module = hf.symbolic_trace(lambda xs: hf.map(lambda x: hf.sin(x), xs))
        module = hf.fx.open_bodies(module)

    A function passed to a function of hopflow becomes `partial(body, *captured)`:
    `body` is an attribute, traced symbolically, whose first parameters are the values
    that the function closes over. A function that needs the value of a proxy stays as
    it is, and so does one that is given to an operator of a user's.

    Raises:
        ArgumentTypeError: `module` is no module of `fx`.
    """
    require_module("open_bodies", module)
    module = owning(module)
    graph = Graph(module.graph.name)
    copies: dict[Node, Any] = {}
    for node in module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.kind == "get_attr" and (body := _body_at(node)) is not None:
            graph.attributes[copy.target] = open_bodies(body)
        if node.kind == "call_function":
            with graph.inserting_before(copy):
                copy.args, copy.kwargs = map_bodies(
                    node.target, copy.args, copy.kwargs, _Opener(graph, copy).of
                )
    opened = GraphModule(graph)
    opened.graph.eliminate_dead_code(lambda node: not isinstance(node.target, Maker))
    return opened.recompile()


folder_slots.opened = open_bodies


def bodies_of(module: GraphModule) -> list[GraphModule]:
    """Return the bodies of the operators of a module, and the bodies within these."""
    bodies: dict[int, GraphModule] = {}
    for node in module.graph.find_nodes("get_attr"):
        body = _body_at(node)
        if body is not None and id(body) not in bodies:
            bodies[id(body)] = body
            bodies.update((id(inner), inner) for inner in bodies_of(body))
    return list(bodies.values())


def _body_at(node: Node) -> GraphModule | None:
    value = node.graph.attributes[node.target]
    return value if isinstance(value, GraphModule) else None


def is_users_function(value: Any) -> bool:
    """Whether a value is a function of the user, which an operator may run."""
    code = getattr(value, "__code__", None)
    is_function = isinstance(value, FunctionType | MethodType | partial)
    return is_function and (code is None or not is_own_file(code.co_filename))


def map_bodies(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    f: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with `f` applied to those that may hold bodies.

    The function of a callback is no body: it runs as Python code at run time.
    """
    if not _is_builtin(target) or getattr(target, "__name__", "") == "callback":
        return args, dict(kwargs)
    named = {k: v if k == "progress" else f(v) for k, v in kwargs.items()}
    return tuple(map(f, args)), named


def _is_builtin(target: Any) -> bool:
    home = getattr(target, "__module__", "") or type(target).__module__
    return home.split(".")[0] == "hopflow" and not isinstance(target, Maker)


class _Opener:
    """Open the functions among the arguments of one node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def of(self, value: Any) -> Any:
        if isinstance(value, Node):
            if isinstance(value.target, Maker) and value.target.makes_function:
                return self.opened(value, value.target, value.args)
            return value
        if is_users_function(value):
            return self.opened(value, lambda: value, ())
        return map_items(value, self.of)

    def opened(
        self, value: Any, make: Callable[..., Any], captured: tuple[Any, ...]
    ) -> Any:
        name = name_of(make if isinstance(value, Node) else value)
        body = traced(make, len(captured), name.removeprefix("make_"))
        if body is None:
            return value
        path, number = body.graph.name, 1
        while path in self.graph.attributes:
            path, number = f"{body.graph.name}_{number}", number + 1
        body_node = self.graph.get_attr(path, open_bodies(body))
        name = f"{body_node.name}_with" if captured else f"{body_node.name}_alone"
        function = self.graph.create_node(
            "call_function", partial, (body_node, *captured), name=name
        )
        body_node.line = function.line = self.node.line
        return function


def traced(make: Callable[..., Any], count: int, name: str) -> GraphModule | None:
    """Return the module of the function that `make` returns for `count` values,
    which are its first parameters; None if it needs the value of a proxy."""
    base = name if name.isidentifier() and not iskeyword(name) else "body"
    try:
        return Tracer().trace_factory(make, count, base)
    except (TraceError, ArgumentTypeError):
        return None
