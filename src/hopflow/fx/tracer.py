"""`symbolic_trace`: the graph of a function, by running it on proxies.

A function of hopflow's, or one that `hf.wrap` was given, is recorded as one call if a
proxy is among its arguments (`bind.recordable`). Python between the calls runs.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

import numpy as np

from hopflow.bind import Value, slots
from hopflow.entries import entry, speaks_for_user
from hopflow.errors import ArgumentTypeError, TraceError
from hopflow.fx.bodies import Maker, as_it_is_now, find_proxy, lifted
from hopflow.fx.graph import Graph
from hopflow.fx.importing import imported
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Kind, Node, map_items
from hopflow.fx.proxy import Proxy, TracerBase
from hopflow.fx.wrapping import replace_names, restore_names
from hopflow.graph.module import GraphModule as Captured
from hopflow.graph.origin import called_from, in_module, origin, replaying
from hopflow.trace.source import name_of, user_line


@entry
def symbolic_trace(
    f: Callable[..., Any], concrete_args: Mapping[str, Any] | None = None
) -> GraphModule:
    """The graph of what `f` does, for arguments of any shapes and dtypes.

    `f` runs as Python, once, on proxies that record what is done with them. See
    docs/fx.md.

    Args:
        f: A function or a module. Modules that it calls are traced into, but for leaf
            modules. Of a captured module (`hf.trace`) the nodes are its operations, and
            the bodies of operators are modules among the attributes.
        concrete_args: Values of parameters, by name: they are constants of the graph,
            and no parameters of what is returned.

    Raises:
        ArgumentTypeError: `f` is no function, or `concrete_args` names what is no
            parameter.
        TraceError: `f` asks a proxy for a value.
    """
    if isinstance(f, Captured) and not concrete_args:
        return imported(f)
    return Tracer().trace(f, concrete_args)


class Tracer(TracerBase):
    """Records one function into `graph`; subclass it to decide what is a node.

    graph        what was recorded so far
    root         what is traced
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.root: Any = None
        self._paths: dict[int, str] = {}
        # Modules and tensors from outside of `root`: what `_paths` tells apart by
        # identity must live as long.
        self._kept: list[Any] = []
        # Of the module that is called: its path, and its place with the classes.
        self._called = "", ""

    # --- what a subclass may decide ---

    def is_leaf_module(self, module: Any, path: str) -> bool:  # noqa: ARG002
        """Whether calls of a module are nodes; else they are traced into.

        Here those are the layers of `hf.nn`, and any class with `is_leaf = True`.
        """
        return bool(getattr(module, "is_leaf", False))

    def create_node(
        self,
        kind: Kind,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str | None = None,
        type_: Any = None,
    ) -> Node:
        """A new node of the graph, which knows the user's line."""
        node = self.graph.create_node(kind, target, args, kwargs, name, type_)
        if kind not in ("placeholder", "output"):  # which no line of the user's makes
            node.line = user_line(2)
        node.module_path = origin.module_path
        return node

    def proxy(self, node: Node) -> Proxy:
        """What stands for the value of a node in the function that is traced."""
        return Proxy(node, self)

    def create_proxy(
        self,
        kind: Kind,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str | None = None,
        type_: Any = None,
    ) -> Proxy:
        """Record a use of proxies, and return what stands for its result."""
        if not _is_active(self):
            raise TraceError(
                f"symbolic trace: a proxy of `{self.graph.name}` is used after its "
                "trace. Return what is wanted from the function, and let the bodies of "
                "operators close over what they read."
            )
        args = tuple([self.create_arg(a) for a in args])
        kwargs = {k: self.create_arg(v) for k, v in kwargs.items()}
        return self.proxy(self.create_node(kind, target, args, kwargs, name, type_))

    def create_arg(self, value: Any) -> Any:
        """What stands for a value of the traced function in arguments of nodes.

        A function that closes over proxies or tensors, and a tree that holds some, is
        the value of a node that makes it.

        Raises:
            TraceError: it is a proxy of another trace.
        """
        if isinstance(value, Proxy):
            if value.tracer is not self:
                raise TraceError(
                    f"symbolic trace: `{value.node.name}` is a proxy of another trace. "
                    "Give it to the function as an argument."
                )
            return value.node
        if isinstance(value, Value | np.ndarray):
            return self._attribute(value)
        items = map_items(value, self.create_arg)
        if items is not value:
            return items
        leaves = lifted(value)
        if not leaves:
            return as_it_is_now(value)
        args = tuple([self.create_arg(leaf) for leaf in leaves])
        maker = Maker(value, leaves)
        return self.create_node("call_function", maker, args, {}, name_of(value))

    def path_of(self, value: Any) -> str:
        """The path of a module or tensor in what is traced; a new one for another."""
        known = self._paths.get(id(value))
        if known is not None:
            return known
        base = "tensor" if isinstance(value, Value | np.ndarray) else name_of(value)
        base = base.lower()
        path, number = base, 1
        while path in self._paths.values():
            path, number = f"{base}_{number}", number + 1
        self._paths[id(value)] = path
        self._kept.append(value)
        for part, inner in paths_of(value).items():
            self._paths.setdefault(part, f"{path}.{inner}")
        return path

    @speaks_for_user
    def call_module(
        self,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a call of a module gives: modules announce their calls here."""
        path = self.path_of(module)
        place = self._place_of(module, path)
        if find_proxy((args, kwargs)) is not None and self.is_leaf_module(module, path):
            self.graph.attributes[path] = module
            with in_module(place):
                return self.create_proxy("call_module", path, args, kwargs)
        before, self._called = self._called, (path, place)
        try:
            with in_module(place):
                return forward(*args, **kwargs)
        finally:
            self._called = before

    def _place_of(self, module: Any, path: str) -> str:
        """The path of a module with the classes of the modules on the way, as in
        captured graphs: `parts.0:Sequential.layers.1:Linear`. One from outside of
        `root` that no other is around has its class for a path."""
        outer, place = self._called
        if outer and path.startswith(f"{outer}."):
            path = place + path.removeprefix(outer)
        elif any(value is module for value in self._kept):
            return path
        return f"{path}:{type(module).__name__}"

    # --- the trace ---

    def start(self, root: Any, name: str, paths: dict[int, str]) -> None:
        """Begin a new graph.

        Args:
            paths: Of the modules and tensors of `root`, by identity.
        """
        self.root, self.graph, self._paths = root, Graph(name), paths
        self._kept, self._called = [], ("", "")

    @entry
    def trace(
        self, root: Callable[..., Any], concrete_args: Mapping[str, Any] | None = None
    ) -> GraphModule:
        """The graph of `root`; see `symbolic_trace`."""
        if not callable(root):
            raise ArgumentTypeError(
                f"symbolic_trace: `f` must be a function, and is "
                f"`{type(root).__name__}`."
            )
        f = getattr(root, "forward", root)
        name = name_of(root) if f is root else "forward"
        paths = paths_of(getattr(root, "__self__", root))
        self.start(root, name if name.isidentifier() else "forward", paths)
        given = _checked({} if concrete_args is None else concrete_args, _signature(f))
        with tracing(self):
            self._run(f, given)
        return GraphModule(self.graph)

    def trace_made(
        self, make: Callable[..., Any], count: int, name: str
    ) -> GraphModule:
        """The graph of the function that `make` makes of `count` values. These are its
        first parameters."""
        self.start(None, name, {})
        with tracing(self):
            values = [
                self.create_proxy("placeholder", f"c{i}", (), {}) for i in range(count)
            ]
            function = make(*values)
            defaults = {
                p.name: p.default for p in _signature(function).parameters.values()
            }
            # A default that was made of the values is no parameter's: it is read.
            read = {k: d for k, d in defaults.items() if find_proxy(d) is not None}
            self._run(function, read)
        return GraphModule(self.graph)

    def _run(self, f: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Run `f` on proxies for its parameters, but those that are given."""
        signature = _signature(f)
        args = {
            p.name: given[p.name] if p.name in given else self._parameter(p)
            for p in signature.parameters.values()
        }
        call = _of_fixed_parameters(f, signature)
        with called_from(sys._getframe()), replaying():
            result = self.create_arg(call(args))
        returns = signature.return_annotation
        self.graph.output(result, None if returns is signature.empty else returns)

    def _parameter(self, parameter: inspect.Parameter) -> Proxy:
        empty = inspect.Parameter.empty
        default = () if parameter.default is empty else (parameter.default,)
        type_ = None if parameter.annotation is empty else parameter.annotation
        target = f"{_STARS.get(parameter.kind, '')}{parameter.name}"
        return self.create_proxy("placeholder", target, default, {}, type_=type_)

    def _attribute(self, tensor: Any) -> Node:
        path = self.path_of(tensor)
        found = self.graph.find_nodes("get_attr", path)
        if found:
            return found[0]
        self.graph.attributes[path] = tensor
        return self.create_node("get_attr", path, (), {})


def paths_of(root: Any) -> dict[int, str]:
    """The paths of the modules and tensors of a module, by identity."""
    if isinstance(root, GraphModule):
        return {id(value): path for path, value in root.attributes.items()}
    found: dict[int, str] = {}
    for walk in ("named_modules", "named_parameters"):
        for path, part in getattr(root, walk, dict)().items():
            found.setdefault(id(part), path)
    return found


def _signature(f: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"symbolic_trace: Python does not tell the parameters of {f!r}. Give a "
            "function that calls it."
        ) from None
    return signature


_STARS: Final[Mapping[Any, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _of_fixed_parameters(
    f: Callable[..., Any], signature: inspect.Signature
) -> Callable[[dict[str, Any]], Any]:
    """A call of `f` with values of its parameters by name. `*args` and `**kwargs` are
    two of them: one proxy stands for the tuple, another for the dict.

    Raises:
        ArgumentTypeError: `f` takes any number of arguments, and Python does not show
            its code.
    """
    parameters = signature.parameters.values()
    if not any(p.kind in _STARS for p in parameters):
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

        def call(args: dict[str, Any]) -> Any:
            by_name = {name: args[name] for name in named}
            return f(*(v for k, v in args.items() if k not in by_name), **by_name)

        return call
    function = getattr(f, "__func__", f)
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        raise ArgumentTypeError(
            f"symbolic_trace: `{name_of(f)}` takes any number of arguments, and is no "
            "function of Python's own. Trace a function that calls it with as many as "
            "there will be."
        )
    code, bound = function.__code__, [f.__self__] if inspect.ismethod(f) else []
    several = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = len(bound) + len(signature.parameters)
    code = code.replace(
        co_flags=code.co_flags & ~several,
        co_argcount=count,
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
    )
    fixed = FunctionType(
        code, function.__globals__, function.__name__, None, function.__closure__
    )
    order = code.co_varnames[len(bound) : count]
    return lambda args: fixed(*bound, *(args[name] for name in order))


def _checked(given: Any, signature: inspect.Signature) -> Mapping[str, Any]:
    """`concrete_args`, which names parameters."""
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            "symbolic_trace: `concrete_args` must be a mapping from the names of "
            f"parameters to values, and is `{type(given).__name__}`."
        )
    for name in given:
        if name not in signature.parameters:
            raise ArgumentTypeError(
                f"symbolic_trace: `concrete_args` has {name!r}, and the parameters are "
                f"{', '.join(signature.parameters)}."
            )
    return given


# --- which traces run -----------------------------------------------------------------


class _Active(threading.local):
    """The traces that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.tracers: list[Tracer] = []


_active = _Active()
_lock: Final = threading.Lock()
_running = 0  # in all threads


def _is_active(tracer: Tracer) -> bool:
    return any(t is tracer for t in _active.tracers)


def current_tracer() -> Tracer | None:
    """The innermost symbolic trace that runs in this thread."""
    return _active.tracers[-1] if _active.tracers else None


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Within the block, `tracer` records what is done with its proxies."""
    global _running
    with _lock:
        _running += 1
        slots.record = _record
        if _running == 1:
            replace_names()
    _active.tracers.append(tracer)
    try:
        yield
    finally:
        _active.tracers.pop()
        with _lock:
            _running -= 1
            if not _running:
                slots.record = None
                restore_names()


def _record(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy | None:
    """The call as a node, if a proxy is among its arguments."""
    proxy = find_proxy((args, kwargs))
    if proxy is None:
        return None
    return proxy.tracer.create_proxy("call_function", f, args, kwargs)
