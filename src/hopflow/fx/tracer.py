"""`symbolic_trace`: trace a function by running it on proxies.

A call of a function of hopflow, or of one passed to `hf.wrap`, is recorded as a single
node if a proxy is among its arguments (`bind.recordable`). Other Python code runs.
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
from hopflow.entries import blames_user, entry
from hopflow.errors import ArgumentTypeError, TraceError
from hopflow.fx.bodies import Maker, find_proxy, lifted, snapshot
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
    """Trace `f` to a graph that is independent of shapes and dtypes.

    `f` runs once, on proxies that record the operations on them. See docs/fx.md.

    Args:
        f: A function or a module. Calls of modules are traced into, except for leaf
            modules. If `f` is a captured module (`hf.trace`), the nodes are its
            operations, and the bodies of operators become modules among the attributes.
        concrete_args: Values of parameters, by name. They become constants of the
            graph; the result does not have these parameters.

    Returns:
        A module that is called as `f` is.

    Raises:
        ArgumentTypeError: `f` is no function, or `concrete_args` names no parameter.
        TraceError: `f` needs the value of a proxy.

    >>> print(hf.symbolic_trace(lambda x, y: hf.sin(x) + y))
    def forward(self, x, y):
        sin = hf.sin(x)  # ...
        add = sin + y  # ...
        return add
    <BLANKLINE>
    """
    if isinstance(f, Captured) and not concrete_args:
        return imported(f)
    return Tracer().trace(f, concrete_args)


class Tracer(TracerBase):
    """Trace a function to a graph. Subclass it to decide which calls become nodes.

    graph        the nodes recorded so far
    root         the traced function or module
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.root: Any = None
        self._paths: dict[int, str] = {}
        # Modules and tensors outside of `root`, kept alive since the keys of `_paths`
        # are their ids.
        self._foreign: list[Any] = []
        # The path of the called module, and its `module_path` with the classes.
        self._current_module = "", ""

    # --- hooks for subclasses ---

    def is_leaf_module(self, module: Any, path: str) -> bool:  # noqa: ARG002
        """Whether a call of a module becomes a node; other modules are traced into.

        By default the layers of `hf.nn`, and classes with `is_leaf = True`, do.
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
        """Add a node to the graph, with the user's line."""
        node = self.graph.create_node(kind, target, args, kwargs, name, type_)
        if kind not in ("placeholder", "output"):  # no line of the user makes these
            node.line = user_line(2)
        node.module_path = origin.module_path
        return node

    def proxy(self, node: Node) -> Proxy:
        """Return the proxy for the value of a node in the traced function."""
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
        """Record a use of proxies, and return the proxy of its result.

        Raises:
            TraceError: the trace has ended.
        """
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
        """Return a value of the traced function as an argument of a node.

        A function that closes over proxies or tensors, or a tree that contains some,
        becomes the value of a node that makes it.

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
            return snapshot(value)
        args = tuple([self.create_arg(leaf) for leaf in leaves])
        maker = Maker(value, leaves)
        return self.create_node("call_function", maker, args, {}, name_of(value))

    def path_of(self, value: Any) -> str:
        """Return the path of a module or tensor; a foreign one gets a new path."""
        existing = self._paths.get(id(value))
        if existing is not None:
            return existing
        base = "tensor" if isinstance(value, Value | np.ndarray) else name_of(value)
        base = base.lower()
        path, number = base, 1
        while path in self._paths.values():
            path, number = f"{base}_{number}", number + 1
        self._paths[id(value)] = path
        self._foreign.append(value)
        for part, inner in paths_of(value).items():
            self._paths.setdefault(part, f"{path}.{inner}")
        return path

    @blames_user
    def call_module(
        self,
        module: Any,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a call of a module. Modules report their calls here."""
        path = self.path_of(module)
        module_path = self._module_path(module, path)
        if find_proxy((args, kwargs)) is not None and self.is_leaf_module(module, path):
            self.graph.attributes[path] = module
            with in_module(module_path):
                return self.create_proxy("call_module", path, args, kwargs)
        previous, self._current_module = self._current_module, (path, module_path)
        try:
            with in_module(module_path):
                return forward(*args, **kwargs)
        finally:
            self._current_module = previous

    def _module_path(self, module: Any, path: str) -> str:
        """Return the path of a module with the classes of the modules on the way, as
        captured graphs have it: `parts.0:Sequential.layers.1:Linear`. A module
        outside of `root` that no other module contains has its class for a path."""
        caller, caller_path = self._current_module
        if caller and path.startswith(f"{caller}."):
            path = caller_path + path.removeprefix(caller)
        elif any(value is module for value in self._foreign):
            return path
        return f"{path}:{type(module).__name__}"

    # --- the trace ---

    def start(self, root: Any, name: str, paths: dict[int, str]) -> None:
        """Start a new graph.

        Args:
            paths: id of a module or tensor of `root` -> its path.
        """
        self.root, self.graph, self._paths = root, Graph(name), paths
        self._foreign, self._current_module = [], ("", "")

    @entry
    def trace(
        self, root: Callable[..., Any], concrete_args: Mapping[str, Any] | None = None
    ) -> GraphModule:
        """Trace `root` to a module; see `symbolic_trace`."""
        if not callable(root):
            raise ArgumentTypeError(
                f"symbolic_trace: `f` must be a function, and is "
                f"`{type(root).__name__}`."
            )
        f = getattr(root, "forward", root)
        name = name_of(root) if f is root else "forward"
        paths = paths_of(getattr(root, "__self__", root))
        self.start(root, name if name.isidentifier() else "forward", paths)
        constants = _checked(
            {} if concrete_args is None else concrete_args, _signature(f)
        )
        with tracing(self):
            self._run(f, constants)
        return GraphModule(self.graph)

    def trace_factory(
        self, make: Callable[..., Any], count: int, name: str
    ) -> GraphModule:
        """Trace the function that `make` returns for `count` values. The values
        become its first parameters."""
        self.start(None, name, {})
        with tracing(self):
            values = [
                self.create_proxy("placeholder", f"c{i}", (), {}) for i in range(count)
            ]
            function = make(*values)
            defaults = {
                p.name: p.default for p in _signature(function).parameters.values()
            }
            # A default that depends on the values is a constant, not a parameter.
            computed = {k: d for k, d in defaults.items() if find_proxy(d) is not None}
            self._run(function, computed)
        return GraphModule(self.graph)

    def _run(self, f: Callable[..., Any], constants: Mapping[str, Any]) -> None:
        """Run `f` on proxies for its parameters, except for those in `constants`."""
        signature = _signature(f)
        args = {
            p.name: constants[p.name] if p.name in constants else self._parameter(p)
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
        reads = self.graph.find_nodes("get_attr", path)
        if reads:
            return reads[0]
        self.graph.attributes[path] = tensor
        return self.create_node("get_attr", path, (), {})


def paths_of(root: Any) -> dict[int, str]:
    """Return the paths of the modules and tensors of a module, by id."""
    if isinstance(root, GraphModule):
        return {id(value): path for path, value in root.attributes.items()}
    paths: dict[int, str] = {}
    for walk in ("named_modules", "named_parameters"):
        for path, part in getattr(root, walk, dict)().items():
            paths.setdefault(id(part), path)
    return paths


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
    """Return a call of `f` that takes the values of its parameters by name. `*args` and
    `**kwargs` count as parameters: one proxy is the tuple, another the dict.

    Raises:
        ArgumentTypeError: `f` takes any number of arguments, and is not written in
            Python.
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


def _checked(concrete_args: Any, signature: inspect.Signature) -> Mapping[str, Any]:
    """Return `concrete_args`.

    Raises:
        ArgumentTypeError: it is no mapping, or names no parameter.
    """
    if not isinstance(concrete_args, Mapping):
        raise ArgumentTypeError(
            "symbolic_trace: `concrete_args` must be a mapping from the names of "
            f"parameters to values, and is `{type(concrete_args).__name__}`."
        )
    for name in concrete_args:
        if name not in signature.parameters:
            raise ArgumentTypeError(
                f"symbolic_trace: `concrete_args` has {name!r}, and the parameters are "
                f"{', '.join(signature.parameters)}."
            )
    return concrete_args


# --- active traces --------------------------------------------------------------------


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
    """Return the innermost symbolic trace of this thread, or None."""
    return _active.tracers[-1] if _active.tracers else None


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Within the block, `tracer` records the operations on its proxies."""
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
    """Record a call as a node, if a proxy is among its arguments."""
    proxy = find_proxy((args, kwargs))
    if proxy is None:
        return None
    return proxy.tracer.create_proxy("call_function", f, args, kwargs)
