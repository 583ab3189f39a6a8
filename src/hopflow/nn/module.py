"""`Module`: a function with parameters, as a dataclass and a pytree."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final, TypeAlias, dataclass_transform

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.entries import entry, speaks_for_user
from hopflow.fx.tracer import current_tracer
from hopflow.graph.origin import in_module, origin

_STATIC: Final = "static"


def static(**options: Any) -> Any:
    """A field that is no parameter: a number of heads, a function. It must be hashable.

    Args:
        options: As `dataclasses.field` takes them: `default=`, ...
    """
    return dataclasses.field(**options, metadata={_STATIC: True})


class _Calls(threading.local):
    """The module that is called in this thread, the innermost one."""

    module: "Module | None" = None


_calls = _Calls()


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field)
)
class Module:
    """A subclass declares its fields, as a dataclass does, and defines `forward`.

        class Network(hf.nn.Module):
            first: hf.nn.Linear
            second: hf.nn.Linear

            def forward(self, x):
                return self.second(hf.tanh(self.first(x)))

    Fields are tensors, modules, and lists, tuples and dicts of them; or `static()`. A
    module is a pytree of its tensors, so that `hf.grad`, `hf.jit` and the operators
    take it as an argument, and it is not changed: `dataclasses.replace` makes another.

    is_leaf   whether a symbolic trace takes calls of it for nodes
    """

    is_leaf: ClassVar[bool] = False
    _data: ClassVar[tuple[str, ...]] = ()
    _rest: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls._data = tuple(f.name for f in fields if not f.metadata.get(_STATIC))
        cls._rest = tuple(f.name for f in fields if f.metadata.get(_STATIC))
        unflatten = _unflatten_as(cls)
        pytree.register(cls, _flatten, unflatten, by_name=True)

    @speaks_for_user
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a call computes."""
        raise NotImplementedError(f"`{type(self).__name__}` defines no `forward`.")

    @entry
    @speaks_for_user  # who passes other arguments than `forward` takes
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, and the traces that run know which module it is."""
        tracer = current_tracer()
        if tracer is not None:
            return tracer.call_module(self, self.forward, args, kwargs)
        if current().is_eager:  # nobody asks
            return self.forward(*args, **kwargs)
        parent = _calls.module
        path = _path(parent, self)
        _calls.module = self
        try:
            with in_module(path):
                return self.forward(*args, **kwargs)
        finally:
            _calls.module = parent

    def named_modules(self) -> "dict[str, Module]":
        """The modules within this one, by path: `layers.0`."""
        return {p: v for p, v in _parts(self) if isinstance(v, Module)}

    def named_parameters(self) -> dict[str, Any]:
        """The tensors of this module and of those within, by path: `layers.0.weight`.

        One that is shared is there once, under its first path. Of a module that holds
        gradients, the gradients.
        """
        children, (_, ties), names = _flatten(self)
        if ties is not None:
            return dict(zip(names, children, strict=True))
        return {p: v for p, v in _parts(self) if not isinstance(v, Module)}

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_shown(getattr(self, name))}"
            for name in (*self._data, *self._rest)
        )
        return f"{type(self).__name__}({fields})"


def _shown(value: Any) -> str:
    return str(value.type) if isinstance(value, Value) else repr(value)


def _path(parent: Module | None, module: Module) -> str:
    """Where a module is that is called within another, with its class, as
    `network.layers.0:Linear`; of one that is in none the class alone."""
    kind = type(module).__name__
    if parent is None:
        return kind.lower()
    for path, part in parent.named_modules().items():
        if part is module:
            return f"{origin.module_path}.{path}:{kind}"
    return f"{origin.module_path}.{kind.lower()}"


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is within a module or container: modules, and leaves, by path."""
    if isinstance(value, Module):
        items: Iterable[tuple[Any, Any]] = [(k, getattr(value, k)) for k in value._data]
    elif isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value)
    for key, part in items:
        if part is None:
            continue
        inner = f"{path}.{key}" if path else str(key)
        is_container = isinstance(part, Module | list | tuple | dict)
        if isinstance(part, Module) or not is_container:
            yield inner, part
        if is_container:
            yield from _parts(part, inner)


# --- as trees -------------------------------------------------------------------------

_Structure: TypeAlias = tuple[pytree.Exact, pytree.Ties | None]


def _flatten(module: Module) -> tuple[list[Any], _Structure, tuple[str, ...]]:
    fields = [getattr(module, name) for name in module._data]
    rest = pytree.Exact([getattr(module, name) for name in module._rest])
    ties = pytree.Ties.kept(module, fields, Value | np.ndarray)
    distinct = None if ties is None else ties.distinct(fields)
    if ties is None or distinct is None:
        return fields, (rest, None), module._data
    return distinct, (rest, ties), ties.names(module._data)


def _unflatten_as(cls: type[Module]) -> Callable[[Any, Iterable[Any]], Module]:
    def unflatten(structure: _Structure, children: Iterable[Any]) -> Module:
        rest, ties = structure
        # Not by the constructor, which may check what a tree of other leaves is not.
        module = object.__new__(cls)
        fields = children if ties is None else ties.tree(children)
        vars(module).update(zip(cls._data, fields, strict=True))
        vars(module).update(zip(cls._rest, rest, strict=True))
        vars(module)["_ties"] = ties  # and not what happens to be the same in this one
        return module

    return unflatten
