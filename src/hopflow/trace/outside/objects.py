"""Classification of objects for the recorder, and access to their attributes.

Nothing here runs user code: computed attributes are not looked up.
"""

from array import array
from collections import deque, namedtuple
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from threading import local
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple
from weakref import ReferenceType

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.tensor import EagerTensor
from hopflow.trace.outside.checks import CONSTANTS
from hopflow.trace.outside.modules import is_library
from hopflow.trace.outside.paths import MISSING, member_of

CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)

BUFFERS: Final = (bytearray, array, memoryview)
"""Containers of numbers, which are compared as a whole."""

BOXES: Final = (ContextVar, ReferenceType)
"""Objects that hold one value, read by a call or a method."""

_Named = namedtuple("_Named", ("field",))
_HELD: Final = (MemberDescriptorType, GetSetDescriptorType, type(_Named.field))
_WITH_ATTRIBUTES: Final = (*CONTAINERS, *CONSTANTS, FunctionType, Enum)
_NO_OBJECTS: Final = (type, ModuleType, FunctionType, MethodType, Value, np.ndarray)


class _Kind(NamedTuple):
    """Properties of all objects of a class; see the functions of these names."""

    is_of_trace: bool
    is_constant: bool
    is_plain: bool
    is_open: bool


@lru_cache(1 << 12)
def _kind(cls: Hashable) -> _Kind:
    assert isinstance(cls, type)
    is_tensor = issubclass(cls, Value)
    if is_tensor and hasattr(cls, "process"):  # a user's tensor type
        return _Kind(False, is_constant=False, is_plain=True, is_open=True)
    if is_tensor or issubclass(cls, SymInt | SymFloat | SymBool):
        return _Kind(cls is not EagerTensor, False, is_plain=False, is_open=False)
    is_own = cls.__module__.partition(".")[0] == "hopflow"
    is_open = (
        cls.__module__.startswith("hopflow.nn") if is_own else _has_attributes(cls)
    )
    is_other = issubclass(cls, (*CONTAINERS, *BUFFERS, *_NO_OBJECTS, Enum))
    is_compared = cls.__eq__ is not object.__eq__
    is_hashed = cls.__hash__ not in (None, object.__hash__)
    is_value = is_library(cls.__module__) and is_compared and is_hashed
    if issubclass(cls, CONSTANTS) or (is_value and not is_other):
        is_open = is_open and issubclass(cls, _WITH_ATTRIBUTES)
        return _Kind(False, is_constant=True, is_plain=False, is_open=is_open)
    is_plain = is_open and not is_other
    is_open = is_plain or (is_open and issubclass(cls, _WITH_ATTRIBUTES))
    return _Kind(False, False, is_plain, is_open or issubclass(cls, tuple))


def _has_attributes(cls: type) -> bool:
    if cls.__dictoffset__ != 0 or issubclass(cls, local):
        return True
    return any("__slots__" in vars(c) for c in cls.__mro__)


def _kind_of(value: Any) -> _Kind:
    cls: Any = type(value)
    return _kind(cls)


def is_of_trace(value: Any) -> bool:
    """Whether a value belongs to a trace, and so is not from outside."""
    return _kind_of(value).is_of_trace


def is_constant(value: Any) -> bool:
    """Whether a value is immutable and compared by value."""
    return _kind_of(value).is_constant


def is_plain(value: Any) -> bool:
    """Whether it is an object whose attributes are tracked: of a user's class, a module
    of `hopflow.nn`, a namespace."""
    return _kind_of(value).is_plain


def is_open(value: Any) -> bool:
    """Whether reads of its attributes are tracked: it is plain, or another object with
    attributes, such as a function or an instance of a subclass of list."""
    return _kind_of(value).is_open


def is_tree(value: Any) -> bool:
    """Whether its class is registered as a pytree, and is no builtin container."""
    if isinstance(value, (*CONTAINERS, *_NO_OBJECTS, *CONSTANTS)):
        return False
    return not pytree.is_leaf(pytree.structure(value))


def is_library_collection(value: Any) -> bool:
    """Whether it is a collection whose items unwatched code reads from attributes, such
    as `UserDict` and `ChainMap`."""
    if not is_plain(value) or not isinstance(value, Mapping | Sequence | Set):
        return False
    return is_library(getattr(type(value).__iter__, "__module__", None))


def has_identity(value: Any) -> bool:
    """Whether its identity matters: it is a container, has attributes or is data."""
    return isinstance(value, (*CONTAINERS, Value, np.ndarray)) or is_plain(value)


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that is implemented in C, whose position is no
    attribute."""
    step = member_of(type(value), "__next__")
    return step is not MISSING and not isinstance(step, FunctionType)


def is_key(value: Any) -> bool:
    """Whether a value can be the key of an item in a path."""
    if isinstance(value, tuple):
        return all(map(is_key, value))
    return isinstance(value, (*CONSTANTS, type, Enum)) and not isinstance(value, slice)


def is_data_descriptor(member: Any) -> bool:
    """Whether a member of a class is a data descriptor, which precedes attributes of
    the object."""
    return hasattr(type(member), "__set__") or hasattr(type(member), "__delete__")


def is_computed(member: Any) -> bool:
    """Whether a member of a class is a descriptor implemented in Python."""
    return isinstance(getattr(type(member), "__get__", None), FunctionType)


def content_of_box(box: Any) -> Any:
    """Return the current value of one of `BOXES`; None: it has none."""
    return box.get(None) if isinstance(box, ContextVar) else box()


def misses_of(function: Any) -> int:
    """Return how often a function with `functools.lru_cache` ran: reads of a cached
    call are unknown."""
    misses: int = function.cache_info().misses
    return misses


def held_by(owner: Any, member: Any) -> Any:
    """Return the value that an object stores for a descriptor, such as a slot;
    `MISSING`: none, or it is computed."""
    if not isinstance(member, _HELD):
        return MISSING
    try:
        return member.__get__(owner, type(owner))
    except AttributeError:
        return MISSING


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object itself, or an empty dict; the class's
    `__getattribute__` is not called."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes


@lru_cache(1 << 12)
def _slots_of(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    assert isinstance(cls, type)
    namespaces = [vars(c) for c in reversed(cls.__mro__) if "__slots__" in vars(c)]
    pairs = {k: m for members in namespaces for k, m in members.items()}.items()
    slots = [(k, m) for k, m in pairs if isinstance(m, MemberDescriptorType)]
    return tuple([(k, m) for k, m in slots if k not in ("__dict__", "__weakref__")])


def slots_of(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names of a class's slots, with their descriptors."""
    return _slots_of(cls)


def all_attributes(owner: Any) -> dict[str, Any]:
    """Return a new dict of all attributes that an object stores, also in slots."""
    slots = [(name, held_by(owner, m)) for name, m in slots_of(type(owner))]
    stored = {name: value for name, value in slots if value is not MISSING}
    return {**attributes_of(owner), **stored}


def is_users_class(value: Any) -> bool:
    """Whether it is a user's class, whose attributes are tracked."""
    return isinstance(value, type) and not (
        is_library(value.__module__) or value.__module__.startswith("hopflow.")
    )


def may_have(owner: Any, name: str) -> bool:
    """Whether an object or its class, or a user's class, stores an attribute."""
    if is_users_class(owner):
        return not name.startswith("__") and member_of(owner, name) is not MISSING
    if not is_open(owner):
        return False
    attributes = attributes_of(owner)
    return name in attributes or member_of(type(owner), name) is not MISSING


def cells_of(function: FunctionType) -> Iterator[tuple[int, str, Any]]:
    """Yield the free variables of a function: position, name and value."""
    for at, name in enumerate(function.__code__.co_freevars):
        yield at, name, content_of(function, at)


def content_of(function: FunctionType, at: int) -> Any:
    """Return the value of a free variable; `MISSING` if it is unassigned."""
    try:
        return (function.__closure__ or ())[at].cell_contents
    except ValueError:
        return MISSING


def inner_codes(code: CodeType) -> list[CodeType]:
    """Return the code of functions that are defined in a function."""
    return [c for c in code.co_consts if isinstance(c, CodeType)]
