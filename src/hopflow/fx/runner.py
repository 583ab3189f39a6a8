"""`Runner`: run a graph node by node. `Interpreter` also runs bodies so."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from hopflow.backends import module_of
from hopflow.bind import bind, current
from hopflow.entries import blames_user, entry
from hopflow.errors import ArgumentTypeError, GraphError, OperatorError
from hopflow.fx.graph import Graph
from hopflow.fx.node import Node, map_nodes
from hopflow.fx.retrace import bind_retraced
from hopflow.graph.core import Graph as CapturedGraph
from hopflow.graph.core import Node as CapturedNode
from hopflow.graph.interpreter import Frame
from hopflow.graph.module import GraphModule as Captured
from hopflow.graph.origin import Place, replaying
from hopflow.hops.base import run_interpreted
from hopflow.trace.source import check_arity, name_of

AnyNode: TypeAlias = Node | CapturedNode


class Runner:
    """Run `module` node by node, by a method for each kind of node.

    module   an object with a `graph` and `attributes`; for `jitted.graph` a function of
             all its inputs
    env      node -> its value; in a captured graph: var -> its value
    """

    @entry
    def __init__(self, module: Any) -> None:
        """Prepare to run a module.

        Raises:
            ArgumentTypeError: `module` has no graph.
        """
        if isinstance(module, CapturedGraph):
            module = module_of(module)
        needed = ("graph", "attributes", "__signature__")
        is_module = all(hasattr(module, name) for name in needed)
        if not is_module and not isinstance(module, Captured):
            raise ArgumentTypeError(
                f"{type(self).__name__}: expected a graph module, and found "
                f"`{type(module).__name__}`. Make one with `hf.symbolic_trace` or "
                "`hf.trace`."
            )
        self.module = module
        self.env: dict[Any, Any] = {}
        self._arguments: Mapping[AnyNode, Any] = {}  # by parameter
        self._node: AnyNode | None = None  # the running node
        self._frame: Frame | None = None  # of the running captured graph

    @entry
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the graph for these arguments.

        Raises:
            ArgumentTypeError: the module does not take these arguments.
            GraphError: the parameters of the graph have changed since it was compiled.
            Exception: an error of a node, with a note that names the node.
        """
        if isinstance(self.module, Captured) and not kwargs:
            return self.module.evaluated(self.run_graph, *args)
        check_arity(type(self).__name__, self.module, args, "module", kwargs)
        bound = self.module.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        parameters = self.module.graph.placeholders
        if len(parameters) != len(bound.arguments):
            raise GraphError(
                f"{type(self).__name__}: the parameters of graph "
                f"`{self.module.graph.name}` have changed since it was compiled. Call "
                "`module.recompile()`."
            )
        previous = self._arguments, self.env, self._node
        self._arguments = dict(zip(parameters, bound.arguments.values(), strict=True))
        try:
            return self.run_nodes()
        finally:
            if not current().is_eager:  # values of a trace must not outlive it
                self._arguments, self.env, self._node = previous

    def run_nodes(self) -> Any:
        """Run the nodes in order, and return the value of the output."""
        self.env = {}
        for node in self.module.graph.nodes:
            result = self._run_noted(node, Place(node.line, node.module_path))
            if node.kind == "output":
                return result
            self.env[node] = result
        return None

    def run_graph(self, graph: CapturedGraph, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a captured graph, or of a body in one."""
        previous = self._frame, self.env, self._arguments
        frame = self._frame = Frame(graph, args)
        self.env = frame.env
        self._arguments = {v.node: frame.env[v] for v in graph.inputs}
        try:
            for node in (*(v.node for v in graph.inputs), *graph.nodes):
                frame.store(node, _results(node, self._run_noted(node, node)))
            output = CapturedNode("output", None, graph.outputs, {})
            output.line = graph.output_line
            return tuple(self._run_noted(output, output))
        finally:
            self._frame, self.env, self._arguments = previous

    @blames_user
    def _run_noted(self, node: AnyNode, place: Any) -> Any:
        """Return the value of a node; add a note to an error that names the node."""
        self._node = node
        try:
            with replaying(place):
                return self.run_node(node)
        except Exception as error:
            at = f" ({node.line})" if node.line else ""
            error.add_note(f"in node `{node.name or _target_name(node.target)}`{at}")
            raise

    @blames_user
    def run_node(self, node: AnyNode) -> Any:
        """Return the value of a node, computed by the method of its kind."""
        args, kwargs = self.fetch(node)
        return getattr(self, node.kind)(node.target, args, kwargs)

    def fetch(self, node: AnyNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments, with values in place of nodes."""
        if isinstance(node, CapturedNode):
            assert self._frame is not None
            args = tuple(self._frame.operands(node))
            if node.kind == "output":
                return (args,), {}
            return args, self._frame.params(node)
        args, kwargs = map_nodes((node.args, node.kwargs), self.env.__getitem__)
        return args, kwargs

    # --- the kinds of nodes ---

    def placeholder(
        self, _target: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        assert self._node is not None
        return self._arguments[self._node]

    def get_attr(
        self, target: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        value = self.module.attributes[target]
        is_body = isinstance(getattr(value, "graph", None), Graph)
        return self._run_by(value) if is_body else value

    def _run_by(self, module: Any) -> Callable[..., Any]:
        """Return the body of an operator as a function that runs it node by node."""

        def body(*args: Any, **kwargs: Any) -> Any:
            previous = self.module, self.env, self._arguments
            self.module = module
            try:
                return self.run(*args, **kwargs)
            finally:
                self.module, self.env, self._arguments = previous

        body.__name__ = module.__name__
        body.__signature__ = module.__signature__  # type: ignore[attr-defined]
        _bodies.add(body)
        return body

    @blames_user
    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._frame is None:
            return target(*args, **kwargs)
        if not CapturedNode("call_function", target, (), kwargs).graphs:
            results = bind(target, args, kwargs)
        elif current().is_eager:
            results = run_interpreted(target, args, kwargs, self.run_graph)
        else:
            results = bind_retraced(target, args, kwargs, self.run_graph)
        return results[0] if len(results) == 1 else results

    @blames_user
    def call_method(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        owner, *rest = args
        return getattr(owner, target)(*rest, **kwargs)

    @blames_user
    def call_module(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.module.attributes[target](*args, **kwargs)

    def output(
        self, _target: str, args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> Any:
        return args[0]


# The functions that run a body node by node.
_bodies: Final[WeakSet[Callable[..., Any]]] = WeakSet()


def runs_by_node(f: Any) -> bool:
    """Whether a function, or the function of a `partial`, runs a body node by node."""
    while isinstance(f, partial):
        f = f.func
    return isinstance(f, FunctionType) and f in _bodies


def _target_name(target: Any) -> str:
    return str(getattr(target, "name", "")) or name_of(target)


def _results(node: CapturedNode, value: Any) -> tuple[Any, ...]:
    """Return a value for each result of a node.

    Raises:
        OperatorError: a method returned another number of values.
    """
    count = len(node.results)
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    if value is None and not count:
        return ()
    if len(values) != count:
        raise OperatorError(
            f"`{node.kind}` of `{_target_name(node.target)}` must give "
            f"{'one value' if count == 1 else f'a tuple of {count} values'}, and gave "
            f"{len(values)}."
        )
    return values
