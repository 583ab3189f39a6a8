"""Names of captured tensors, by the paths on which the traced function reads them."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.trace.tracer import Tracer
from hopflow.tracebacks import is_own_file

_MOST: Final = 5_000
"""The most objects that are searched: a dataset may be reachable from a model."""
_OPAQUE: Final = (str, bytes, int, float, complex, type, ModuleType, np.ndarray)


def name_captures(f: Callable[..., Any], tracer: Tracer) -> None:
    """Name the captures of a root graph: `layers.0.weight`, by the path from the traced
    module or from a variable that the function reads; else `tensor0`."""
    captures = tracer.captures.values()
    capture_ids = {id(c.input) for c in captures}
    used = {v.node.name for v in tracer.graph.inputs if id(v) not in capture_ids}
    # No path leads to a tensor that the function makes from numbers.
    named = [c.origin for c in captures if not tracer.is_adopted(c.origin)]
    paths = _paths(f, {id(origin) for origin in named})
    for capture in captures:
        path = paths.get(id(capture.origin), "")
        name, number = path or "tensor0", 0
        while name in used:
            number += 1
            name = f"{path}_{number}" if path else f"tensor{number}"
        used.add(name)
        capture.input.node.name = name


def _paths(f: Callable[..., Any], ids: Collection[int]) -> dict[int, str]:
    """Return the paths to the values of these ids that a function can read."""
    paths: dict[int, str] = {}
    if ids:
        for path, value in _reached(f):
            if id(value) in ids:
                paths.setdefault(id(value), path)
                if len(paths) == len(ids):
                    break
    return paths


def _reached(f: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value that a function can read, with a path, the nearest first."""
    queue: deque[tuple[str, Any]] = deque([("", f)])
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    while queue and len(seen) < _MOST:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        yield path, value
        if not isinstance(value, Value):
            queue.extend(_parts(path, value))


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the values that a value refers to, with paths. The path of a variable that
    a function reads is its name, wherever the function is."""
    is_users = isinstance(value, FunctionType) and not is_own_file(
        value.__code__.co_filename
    )
    if is_users:
        return _read_by(value)
    stored = _held(value)
    if "__wrapped__" in stored:
        return [(path, stored["__wrapped__"])]
    if isinstance(value, FunctionType):
        return ()
    attributes = stored.get("attributes")
    if isinstance(attributes, dict) and type(value).__module__.startswith("hopflow."):
        return list(attributes.items())  # of a graph: they have paths as names
    if isinstance(value, MethodType):
        return [(path, value.__self__), (path, value.__func__)]
    if isinstance(value, partial):
        arguments = [*enumerate(value.args), *value.keywords.items()]
        return [(path, value.func), *_joined(path, arguments)]
    if isinstance(value, dict):
        return _joined(path, value.items())
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        return _joined(path, zip(names, value, strict=True))
    members = [x for c in type(value).__mro__ for x in vars(c).values()]
    methods = [(path, x) for x in members if isinstance(x, FunctionType)]
    return [*_joined(path, stored.items()), *methods]


def _held(value: Any) -> dict[str, Any]:
    """Return the attributes that an object stores, without computed ones."""
    slots = [name for c in type(value).__mro__ for name in vars(c).get("__slots__", ())]
    attributes: dict[str, Any] = {}
    for name in ("__dict__", *slots):
        with suppress(AttributeError):
            stored = object.__getattribute__(value, name)
            attributes.update(stored if name == "__dict__" else {name: stored})
    return attributes


def _joined(path: str, items: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    first_items = islice(items, _MOST)
    return [(f"{path}.{key}" if path else str(key), part) for key, part in first_items]


def _read_by(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the free variables, globals and defaults that a function reads."""
    if hasattr(f, "__wrapped__"):
        yield "", f.__wrapped__
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # unassigned
            continue
    for name in _global_names(f.__code__):
        if name in f.__globals__:
            yield name, f.__globals__[name]
    positional = f.__code__.co_varnames[: f.__code__.co_argcount]
    defaults = f.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (f.__kwdefaults__ or {}).items()


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that code, and code nested in it, may look up as globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
