"""`Module`: a function with parameters, as a dataclass and a pytree."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final, TypeAlias, dataclass_transform

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.entries import blames_user, entry
from hopflow.fx.tracer import current_tracer
from hopflow.graph.origin import in_module, origin

_STATIC: Final = "static"


def static(**options: Any) -> Any:
    """Return a field that is no parameter, such as a number of heads. Its value must be
    hashable.

    Args:
        options: The options of `dataclasses.field`, such as `default=`.
    """
    return dataclasses.field(**options, metadata={_STATIC: True})


class _Calls(threading.local):
    """The innermost module that is being called in this thread."""

    module: "Module | None" = None


_calls = _Calls()


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field)
)
class Module:
    """The base class of functions with parameters.

    A subclass declares its fields, as a dataclass does, and defines `forward`:

        class Network(hf.nn.Module):
            first: hf.nn.Linear
            second: hf.nn.Linear

            def forward(self, x):
                return self.second(hf.tanh(self.first(x)))

    Fields are tensors, modules, and lists, tuples and dicts of these; or `static()`. A
    module is a pytree of its tensors, so `hf.grad`, `hf.jit` and the operators take it
    as an argument. It is immutable: `dataclasses.replace` returns a changed copy.

    is_leaf   whether symbolic traces record its calls as nodes
    """

    is_leaf: ClassVar[bool] = False
    _data: ClassVar[tuple[str, ...]] = ()
    _static_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls._data = tuple(f.name for f in fields if not f.metadata.get(_STATIC))
        cls._static_fields = tuple(f.name for f in fields if f.metadata.get(_STATIC))
        unflatten = _unflatten_as(cls)
        pytree.register(cls, _flatten, unflatten, by_name=True)

    @blames_user
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call."""
        raise NotImplementedError(f"`{type(self).__name__}` defines no `forward`.")

    @entry
    @blames_user  # wrong arguments of `forward` are the user's error
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; nodes that traces record meanwhile have the module's path."""
        tracer = current_tracer()
        if tracer is not None:
            return tracer.call_module(self, self.forward, args, kwargs)
        if current().is_eager:  # no trace records the path
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
        """Return the modules within this one, by path: `layers.0`."""
        return {p: v for p, v in _parts(self) if isinstance(v, Module)}

    def named_parameters(self) -> dict[str, Any]:
        """Return all tensors, those of inner modules too, by path: `layers.0.weight`.

        A shared tensor appears once, under its first path. For a module that holds
        gradients, these are the gradients.
        """
        children, (_, ties), names = _flatten(self)
        if ties is not None:
            return dict(zip(names, children, strict=True))
        return {p: v for p, v in _parts(self) if not isinstance(v, Module)}

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={_shown(getattr(self, name))}"
            for name in (*self._data, *self._static_fields)
        )
        return f"{type(self).__name__}({fields})"


def _shown(value: Any) -> str:
    return str(value.type) if isinstance(value, Value) else repr(value)


def _path(parent: Module | None, module: Module) -> str:
    """Return the path of a called module within its caller, with its class, as
    `network.layers.0:Linear`; without a caller, its class."""
    kind = type(module).__name__
    if parent is None:
        return kind.lower()
    for path, part in parent.named_modules().items():
        if part is module:
            return f"{origin.module_path}.{path}:{kind}"
    return f"{origin.module_path}.{kind.lower()}"


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the modules and leaves within a module or container, by path."""
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


# --- as pytrees -----------------------------------------------------------------------

_Structure: TypeAlias = tuple[pytree.Exact, pytree.Ties | None]


def _flatten(module: Module) -> tuple[list[Any], _Structure, tuple[str, ...]]:
    fields = [getattr(module, name) for name in module._data]
    static_values = pytree.Exact(
        [getattr(module, name) for name in module._static_fields]
    )
    ties = pytree.Ties.kept(module, fields, Value | np.ndarray)
    distinct = None if ties is None else ties.distinct(fields)
    if ties is None or distinct is None:
        return fields, (static_values, None), module._data
    return distinct, (static_values, ties), ties.names(module._data)


def _unflatten_as(cls: type[Module]) -> Callable[[Any, Iterable[Any]], Module]:
    def unflatten(structure: _Structure, children: Iterable[Any]) -> Module:
        static_values, ties = structure
        # The constructor may check types, which other leaves of a pytree do not have.
        module = object.__new__(cls)
        fields = children if ties is None else ties.tree(children)
        vars(module).update(zip(cls._data, fields, strict=True))
        vars(module).update(zip(cls._static_fields, static_values, strict=True))
        # Ties are those of the original: equal leaves here may be a coincidence.
        vars(module)["_ties"] = ties
        return module

    return unflatten
