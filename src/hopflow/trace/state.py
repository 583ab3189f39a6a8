"""The names of captured tensors: how the traced function comes to them."""

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
"""Objects that are looked at: a dataset may hang on to a model."""
_OPAQUE: Final = (str, bytes, int, float, complex, type, ModuleType, np.ndarray)


def name_captures(f: Callable[..., Any], tracer: Tracer) -> None:
    """Name the inputs for captured tensors of a root graph: `layers.0.weight`, from the
    module that is traced or from a name that the function reads; else `tensor0`."""
    captures = tracer.captures.values()
    own = {id(c.input) for c in captures}
    used = {v.node.name for v in tracer.graph.inputs if id(v) not in own}
    # What the function has made of numbers nothing leads to.
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


def _paths(f: Callable[..., Any], wanted: Collection[int]) -> dict[int, str]:
    """The paths to the values of these ids, of those that a function can read."""
    found: dict[int, str] = {}
    if wanted:
        for path, value in _reached(f):
            if id(value) in wanted:
                found.setdefault(id(value), path)
                if len(found) == len(wanted):
                    break
    return found


def _reached(f: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Every value that a function can read, by a path to it, the nearest first."""
    waiting: deque[tuple[str, Any]] = deque([("", f)])
    seen: dict[int, Any] = {}  # alive, so that no other gets their ids
    while waiting and len(seen) < _MOST:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        yield path, value
        if not isinstance(value, Value):
            waiting.extend(_parts(path, value))


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """What a value refers to. What a function reads has its name, wherever it is."""
    is_users = isinstance(value, FunctionType) and not is_own_file(
        value.__code__.co_filename
    )
    if is_users:
        return _read_by(value)
    own = _held(value)
    if "__wrapped__" in own:
        return [(path, own["__wrapped__"])]
    if isinstance(value, FunctionType):
        return ()
    attributes = own.get("attributes")
    if isinstance(attributes, dict) and type(value).__module__.startswith("hopflow."):
        return list(attributes.items())  # of a graph: the paths that they had before
    if isinstance(value, MethodType):
        return [(path, value.__self__), (path, value.__func__)]
    if isinstance(value, partial):
        given = [*enumerate(value.args), *value.keywords.items()]
        return [(path, value.func), *_joined(path, given)]
    if isinstance(value, dict):
        return _joined(path, value.items())
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        return _joined(path, zip(names, value, strict=True))
    members = [x for c in type(value).__mro__ for x in vars(c).values()]
    methods = [(path, x) for x in members if isinstance(x, FunctionType)]
    return [*_joined(path, own.items()), *methods]


def _held(value: Any) -> dict[str, Any]:
    """The attributes that an object holds; it is asked for nothing that it computes."""
    slots = [name for c in type(value).__mro__ for name in vars(c).get("__slots__", ())]
    found: dict[str, Any] = {}
    for name in ("__dict__", *slots):
        with suppress(AttributeError):
            held = object.__getattribute__(value, name)
            found.update(held if name == "__dict__" else {name: held})
    return found


def _joined(path: str, items: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    some = islice(items, _MOST)
    return [(f"{path}.{key}" if path else str(key), part) for key, part in some]


def _read_by(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads by names of enclosing scopes, and its defaults."""
    if hasattr(f, "__wrapped__"):
        yield "", f.__wrapped__
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(f.__code__):
        if name in f.__globals__:
            yield name, f.__globals__[name]
    positional = f.__code__.co_varnames[: f.__code__.co_argcount]
    defaults = f.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (f.__kwdefaults__ or {}).items()


def _global_names(code: CodeType) -> Iterator[str]:
    """The names that code, and the functions defined in it, may look up as globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
