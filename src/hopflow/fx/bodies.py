"""Functions that close over proxies: what an operator's body reads is lifted.

    def f(x, w):
        return hf.map(lambda row: row @ w, x)

is recorded with one node more, which makes the body of what it closes over:

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
    """A proxy in an argument: in a container, a tree, or what a function reads."""
    return next((v for v in _leaves(value, set()) if isinstance(v, Proxy)), None)


def lifted(value: Any) -> list[Any]:
    """The proxies and tensors that a function or a tree holds, each once."""
    return list(
        {
            id(v): v for v in _leaves(value, set()) if isinstance(v, Proxy | Value)
        }.values()
    )


def as_it_is_now(value: Any) -> Any:
    """A user's function with its own cells: a loop around it may go on."""
    is_users = isinstance(value, FunctionType) and value.__closure__
    if is_users and not is_own_file(value.__code__.co_filename):
        return _Copy({}).of(value)
    return value


class Maker:
    """A function or tree with places for what is lifted out of it; a call fills them.

    value    the function or tree as it is now
    leaves   what the places are of, in the order of the call's arguments
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
    """Where a lifted value goes."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Place":
        # Functions, whose cells have it, are the same ones in a copy.
        return self


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """What is in a value: in containers and trees, cells and defaults of functions."""
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
            return None  # its proxies are arguments of nodes
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
    except ValueError:  # nothing was assigned to it yet
        return None


class _Copy:
    """Copies of functions and trees with some of their leaves replaced.

    What holds none of these is the same object in the copy.
    """

    def __init__(self, new: dict[int, Any]) -> None:
        self.new = new
        self.functions: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self.new:
            return self.new[id(value)]
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
        is_changed = any(id(leaf) in self.new for leaf in _leaves(value, set()))
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
            except ValueError:  # it is empty here too
                continue
        return copy
