"""`open_bodies`: the functions that operators run, as modules that can be rewritten."""

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
    """A copy of `module` in which the bodies of operators are modules, at any depth.

        module = hf.symbolic_trace(lambda xs: hf.map(lambda x: hf.sin(x), xs))
        module = hf.fx.open_bodies(module)

    A function that is given to a function of hopflow's becomes `partial(body, *read)`:
    `body` is an attribute, traced symbolically, and takes what the function reads from
    outside before its own parameters. One that asks proxies for values stays as it is.

    Raises:
        ArgumentTypeError: `module` is no module of `fx`.
    """
    require_module("open_bodies", module)
    module = owning(module)
    graph = Graph(module.graph.name)
    known: dict[Node, Any] = {}
    for node in module.graph.nodes:
        copy = known[node] = graph.node_copy(node, known.__getitem__)
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
    """The bodies of the operators of a module, those of bodies too."""
    found: dict[int, GraphModule] = {}
    for node in module.graph.find_nodes("get_attr"):
        body = _body_at(node)
        if body is not None and id(body) not in found:
            found[id(body)] = body
            found.update((id(inner), inner) for inner in bodies_of(body))
    return list(found.values())


def _body_at(node: Node) -> GraphModule | None:
    value = node.graph.attributes[node.target]
    return value if isinstance(value, GraphModule) else None


def is_users_function(value: Any) -> bool:
    """Whether a value is a function of the user's, which an operator may run."""
    code = getattr(value, "__code__", None)
    is_function = isinstance(value, FunctionType | MethodType | partial)
    return is_function and (code is None or not is_own_file(code.co_filename))


def map_bodies(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    f: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with `f` of each that may hold bodies of operators.

    A function that runs as Python, whenever the program does, is none.
    """
    if not _is_ours(target) or getattr(target, "__name__", "") == "callback":
        return args, dict(kwargs)
    named = {k: v if k == "progress" else f(v) for k, v in kwargs.items()}
    return tuple(map(f, args)), named


def _is_ours(target: Any) -> bool:
    home = getattr(target, "__module__", "") or type(target).__module__
    return home.split(".")[0] == "hopflow" and not isinstance(target, Maker)


class _Opener:
    """Opens the functions among the arguments of one node."""

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
        self, value: Any, make: Callable[..., Any], read: tuple[Any, ...]
    ) -> Any:
        name = name_of(make if isinstance(value, Node) else value)
        body = traced(make, len(read), name.removeprefix("make_"))
        if body is None:
            return value
        path, number = body.graph.name, 1
        while path in self.graph.attributes:
            path, number = f"{body.graph.name}_{number}", number + 1
        made = self.graph.get_attr(path, open_bodies(body))
        name = f"{made.name}_with" if read else f"{made.name}_alone"
        function = self.graph.create_node(
            "call_function", partial, (made, *read), name=name
        )
        made.line = function.line = self.node.line
        return function


def traced(make: Callable[..., Any], count: int, name: str) -> GraphModule | None:
    """The module of the function that `make` makes of `count` values, which are its
    first parameters; None: it asks proxies for values."""
    base = name if name.isidentifier() and not iskeyword(name) else "body"
    try:
        return Tracer().trace_made(make, count, base)
    except (TraceError, ArgumentTypeError):
        return None
