"""Tensor types of users in traces: tensors whose class has `process`.

An argument of such a type is taken apart: the tensors and numbers among its attributes
become inputs of the trace, and an instance that holds those stands for it, so that the
function meets its own type. A result is put together again in the same way. Where a
class is registered as a pytree, that says how instead.
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
    """A tree in which tensors of users' types are trees too, of their attributes.

    What it flattens to is put together as instances of the same types.

    Args:
        here: Only those that this interpreter asks; see `Interpreter.asks`.
    """
    if not has_processors():  # as nearly always
        return tree
    here = here or current()
    return pytree.tree_map(
        lambda x: _Parts(x) if has_process(x) and here.dispatches(x) else x, tree
    )


def tracer_of(value: Value) -> Any:
    """The innermost tracer that tensors belong to which a tensor of a user's type
    holds; None: it holds none of a trace."""
    found: Any = None
    for leaf in pytree.flatten(_Parts(value))[0]:
        tracer = tracer_of(leaf) if has_process(leaf) else None
        if isinstance(leaf, TracedTensor):
            tracer = leaf.tracer
        if tracer is not None and (found is None or found in _around(tracer)):
            found = tracer
    return found


def _around(tracer: Interpreter) -> Iterator[Interpreter]:
    parent = tracer.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def held_by_type(value: Value) -> OperatorError:
    """The error for a tensor of a user's type where only one of the trace can stand."""
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
    """All of an instance that is no data: its class, and attributes by name.

    names   of the attributes that are data
    static  the others, and their values
    """

    cls: type
    names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"{self.cls.__name__}: {', '.join(self.names)}"


_DATA = (Value, np.ndarray, np.generic, bool, int, float, SymInt, SymFloat, SymBool)


def _flatten(parts: _Parts) -> tuple[Sequence[Any], Hashable, Sequence[str]]:
    """
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
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and hasattr(value, name):
                found[name] = getattr(value, name)
    return (found | getattr(value, "__dict__", {})).items()


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
    found: Hashable = value
    return found


def _unflatten(rest: Any, children: Iterable[Any]) -> Value:
    value: Value = rest.cls.__new__(rest.cls)
    pairs = zip(rest.names, children, strict=True)
    for name, attribute in (*pairs, *rest.static):
        object.__setattr__(value, name, attribute)
    return value


pytree.register(_Parts, _flatten, _unflatten, by_name=True)
