"""Users' tensor types in traces: tensors whose class has `process`.

An argument of such a type is flattened: the tensors and numbers among its attributes
become inputs of the trace, and the function gets an instance of the same type with
traced attributes. A result is unflattened in the same way. A class that is registered
as a pytree is flattened as that.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

import numpy as np

from hopflow import pytree
from hopflow.bind import Interpreter, Value, current, has_process, has_processors
from hopflow.errors import ArgumentTypeError, OperatorError
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.trace.functional import TracedTensor


def opened(tree: Any, here: Interpreter | None = None) -> Any:
    """Return a tree in which tensors of users' types are trees of their attributes.

    Unflattening its structure makes instances of the same types again.

    Args:
        here: The interpreter that dispatches to the types; by default the current one.
    """
    if not has_processors():  # the common case
        return tree
    here = here or current()
    return pytree.tree_map(
        lambda x: _Parts(x) if has_process(x) and here.dispatches(x) else x, tree
    )


def tracer_of(value: Value) -> Any:
    """Return the innermost tracer of the tensors in a tensor of a user's type; None:
    none of them is traced."""
    innermost: Any = None
    for leaf in pytree.flatten(_Parts(value))[0]:
        tracer = tracer_of(leaf) if has_process(leaf) else None
        if isinstance(leaf, TracedTensor):
            tracer = leaf.tracer
        if tracer is not None and (innermost is None or innermost in _around(tracer)):
            innermost = tracer
    return innermost


def _around(tracer: Interpreter) -> Iterator[Interpreter]:
    parent = tracer.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def held_by_type(value: Value) -> OperatorError:
    """Return the error for a tensor of a user's type that is used as a plain tensor."""
    name = type(value).__name__
    return OperatorError(
        f"a `{name}` {value.type} is used where the trace needs a plain tensor. Handle "
        f"the operation in `{name}.process`, or pass the tensors that it holds."
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tensor of a user's type, as a tree of its attributes."""

    value: Value


@dataclass(frozen=True, slots=True, repr=False)
class _Rest:
    """The static part of an instance.

    cls     its class
    names   the names of the attributes that are data
    static  the names and values of other attributes
    """

    cls: type
    names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"{self.cls.__name__}: {', '.join(self.names)}"


_DATA = (Value, np.ndarray, np.generic, bool, int, float, SymInt, SymFloat, SymBool)


def _flatten(parts: _Parts) -> tuple[Sequence[Any], Hashable, Sequence[str]]:
    """Flatten a tensor of a user's type.

    Raises:
        ArgumentTypeError: an attribute is neither data nor hashable.
    """
    children: dict[str, Any] = {}
    static: dict[str, Any] = {}
    cls = type(parts.value)
    for name, value in _attributes(parts.value):
        if all(isinstance(x, _DATA) for x in pytree.flatten(value)[0]):
            children[name] = opened(value)
        else:
            static[name] = _checked(cls, name, value)
    rest = _Rest(cls, tuple(children), tuple(static.items()))
    return tuple(children.values()), rest, tuple(children)


def _attributes(value: Value) -> Iterable[tuple[str, Any]]:
    slots: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                slots[name] = getattr(value, name)
    return (slots | getattr(value, "__dict__", {})).items()


def _checked(cls: type, name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(
            f"a `{cls.__name__}` in a trace has the attribute `{name}`, a "
            f"`{type(value).__name__}`, which is neither data nor hashable. Keep "
            "tensors, numbers, or values that can be hashed, or register the class as "
            "a pytree."
        ) from None
    hashable: Hashable = value
    return hashable


def _unflatten(rest: Any, children: Iterable[Any]) -> Value:
    value: Value = rest.cls.__new__(rest.cls)
    pairs = zip(rest.names, children, strict=True)
    for name, attribute in (*pairs, *rest.static):
        object.__setattr__(value, name, attribute)
    return value


pytree.register(_Parts, _flatten, _unflatten, by_name=True)
