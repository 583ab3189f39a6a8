"""Closures over proxies: the values that an operator's body closes over are lifted.

    def f(x, w):
        return hf.map(lambda row: row @ w, x)

is recorded with a further node, which makes the body from these values:

    lambda_ = make_lambda(w)
    map_1 = hf.map(lambda_, x)
"""

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from hopflow import pytree
from hopflow.bind import Value
from hopflow.fx.node import map_items
from hopflow.fx.proxy import Proxy
from hopflow.trace.source import name_of
from hopflow.tracebacks import is_own_file


def find_proxy(value: Any) -> Proxy | None:
    """Return a proxy in an argument, or None: in a container, a tree or a closure."""
    return next((v for v in _leaves(value, set()) if isinstance(v, Proxy)), None)


def lifted(value: Any) -> list[Any]:
    """Return the proxies and tensors in a function or a tree, each once."""
    return list(
        {
            id(v): v for v in _leaves(value, set()) if isinstance(v, Proxy | Value)
        }.values()
    )


def snapshot(value: Any) -> Any:
    """Return a user's function with copies of its cells, as a loop may change them."""
    is_closure = isinstance(value, FunctionType) and value.__closure__
    if is_closure and not is_own_file(value.__code__.co_filename):
        return _Copy({}).of(value)
    return value


class Maker:
    """A function or tree with the lifted values left open; a call fills them in.

    value    the function or tree
    leaves   the lifted values, in the order of the arguments of a call
    """

    def __init__(self, value: Any, leaves: list[Any]) -> None:
        self.__name__ = f"make_{name_of(value).strip('<>')}"
        self.makes_function = callable(value)
        self._places = [_Place() for _ in leaves]
        pairs = zip(leaves, self._places, strict=True)
        self._value = _Copy({id(leaf): place for leaf, place in pairs}).of(value)

    def __call__(self, *values: Any) -> Any:
        pairs = zip(self._places, values, strict=True)
        return _Copy({id(place): value for place, value in pairs}).of(self._value)


class _Place:
    """Stands for a lifted value."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Place":
        # `deepcopy` does not copy functions, so their cells keep this object.
        return self


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the leaves of a value: in containers and trees, cells and defaults."""
    parts = _parts(value)
    if parts is None:
        yield value
    elif id(value) not in seen:  # a function may close over itself
        seen.add(id(value))
        for part in parts:
            yield from _leaves(part, seen)


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, Proxy | Value):
        return None
    if isinstance(value, FunctionType):
        if is_own_file(value.__code__.co_filename):
            return None  # the arguments of nodes have its proxies
        cells, named = value.__closure__ or (), value.__kwdefaults__ or {}
        return [*map(_content, cells), *(value.__defaults__ or ()), *named.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    leaves, spec = pytree.flatten(value)
    return None if pytree.is_leaf(spec) else leaves


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


class _Copy:
    """Copy functions and trees, with some of their leaves replaced.

    A part without such leaves is not copied.

    replacements  id of a leaf -> the new leaf
    """

    def __init__(self, replacements: dict[int, Any]) -> None:
        self.replacements = replacements
        self.functions: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self.replacements:
            return self.replacements[id(value)]
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, MethodType):
            return MethodType(self.inner(value.__func__), self.inner(value.__self__))
        if isinstance(value, partial):
            args, keywords = self.inner((value.args, value.keywords))
            return partial(self.inner(value.func), *args, **keywords)
        if isinstance(value, tuple | list | dict | slice):
            return map_items(value, self.inner)
        leaves, spec = pytree.flatten(value)
        if pytree.is_leaf(spec):
            return value
        return pytree.unflatten(spec, map(self.inner, leaves))

    def inner(self, value: Any) -> Any:
        is_changed = any(
            id(leaf) in self.replacements for leaf in _leaves(value, set())
        )
        return self.of(value) if is_changed else value

    def function(self, value: FunctionType) -> FunctionType:
        if id(value) in self.functions:
            return self.functions[id(value)]
        closure = tuple([CellType() for _ in value.__closure__ or ()])
        copy = FunctionType(
            value.__code__,
            value.__globals__,
            value.__name__,
            self.inner(value.__defaults__),
            closure,
        )
        copy.__qualname__, copy.__doc__ = value.__qualname__, value.__doc__
        copy.__module__, copy.__annotations__ = value.__module__, value.__annotations__
        copy.__kwdefaults__ = self.inner(value.__kwdefaults__)
        vars(copy).update(vars(value))
        self.functions[id(value)] = copy
        for cell, new in zip(value.__closure__ or (), closure, strict=True):
            try:
                new.cell_contents = self.inner(cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        return copy
