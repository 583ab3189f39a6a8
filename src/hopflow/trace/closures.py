"""Memo keys for what a function reads besides its arguments: cells, defaults, globals.

One trace serves all calls with equal keys. Code and static values are compared by
value, tensors by type, as they become operands. Values of globals are compared by
identity, except for functions and containers of tensors, which are compared like cells.
An object without `__eq__` is compared by identity, and its attributes like globals.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import product
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, slots
from hopflow.errors import UnhashableCaptureError
from hopflow.graph.types import TensorType
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.trace.source import name_of, where
from hopflow.tracebacks import is_own_file


class Same:
    """A key that compares an object by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Surroundings:
    """What a function reads: a memo key, and the tensors in it, in order.

    Args:
        static_args: The static arguments of the function.

    Raises:
        UnhashableCaptureError: a cell or a default can neither be a key nor an operand.
    """

    def __init__(
        self, op: str, fn: Callable[..., Any], static_args: Sequence[Any] = ()
    ) -> None:
        self.op, self.fn = op, fn
        self.tensors: list[Value] = []
        self._seen: dict[int, int] = {}
        self._objects = {id(x): x for x in static_args if _is_plain(x)}
        self._words: dict[str, None] = {}  # the names in the code read so far
        self.key = self._read(fn, ""), self._attributes()

    def _attributes(self) -> Hashable:
        """Return the key of the attributes of plain objects that the code may read.
        Their methods are code too, which may read more."""
        keys: dict[tuple[int, str], Hashable] = {}
        while True:
            pairs = product(list(self._objects), list(self._words))
            new = [pair for pair in pairs if pair not in keys]
            if not new:
                return tuple(keys.values())
            for i, word in new:
                owner = self._objects[i]
                if word in vars(owner):
                    keys[i, word] = word, self._global(vars(owner)[word])
                else:
                    member = getattr(type(owner), word, None)
                    code = member.fget if type(member) is property else member
                    keys[i, word] = word, self._global(code)

    def _read(self, value: Any, name: str) -> Hashable:
        """Return the key of a value that a function reads by a name."""
        if isinstance(value, Value):
            self.tensors.append(value)
            return type_key(value.type)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self._read(value.__func__, name), self._read(value.__self__, name)
        if isinstance(value, partial):
            parts = value.func, value.args, value.keywords
            return partial, *(self._read(part, name) for part in parts)
        if isinstance(value, type | ModuleType):
            return Same(value)
        if isinstance(value, np.ndarray):
            # Its elements are part of the key, as Python code may depend on them; an
            # operation on it reads the array of the current call.
            if value.dtype.kind in "biuf":
                self.tensors.append(slots.from_array(value))
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, SymInt):
            return value.expression
        if isinstance(value, SymFloat | SymBool):
            return Same(value)
        if _is_transformed(value):
            parts = value.__wrapped__, *getattr(value, "rules", ())
            return type(value), *(self._read(part, name) for part in parts)
        if (code := _code_of(value)) is not None:  # a call reads what `__call__` reads
            return self._function(code), self._tree(value, name)
        return self._tree(value, name)

    def _function(self, fn: FunctionType) -> Hashable:
        if id(fn) in self._seen:  # it may be recursive
            return "again", self._seen[id(fn)]
        self._seen[id(fn)] = len(self._seen)
        code = fn.__code__
        self._words |= dict.fromkeys(_names(code))
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        parts: list[Hashable] = [Same(code)]
        parts += [self._cell(cell, name) for name, cell in cells]
        defaults = (fn.__defaults__ or ()), (fn.__kwdefaults__ or {})
        parts += [self._read(v, "a default") for v in defaults if v]
        if not is_own_file(code.co_filename):
            scope = fn.__globals__
            parts += [self._global(scope[n]) for n in _names(code) if n in scope]
        return tuple(parts)

    def _cell(self, cell: Any, name: str) -> Hashable:
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            return "empty"
        return self._read(value, f"`{name}`")

    def _global(self, value: Any) -> Hashable:
        kinds = Value, FunctionType, MethodType, partial, tuple, list, dict
        is_read = isinstance(value, kinds) or _is_transformed(value) or _code_of(value)
        if is_read or _has_tensors(value):
            count = len(self.tensors)
            try:
                return self._read(value, "")
            except UnhashableCaptureError:
                del self.tensors[count:]
        if _is_plain(value):
            self._objects[id(value)] = value
        return Same(value)

    def _tree(self, value: Any, name: str) -> Hashable:
        leaves, spec = pytree.flatten(value)
        if not pytree.is_leaf(spec):
            return spec, *(self._read(leaf, name) for leaf in leaves)
        try:
            hash(value)
        except TypeError:
            reads = f"closes over {name}" if name.startswith("`") else f"has {name}"
            raise UnhashableCaptureError(
                f"{self.op}: `{name_of(self.fn)}` ({where(self.fn)}) {reads}, which is "
                f"a `{type(value).__name__}` and cannot be hashed: calls that read "
                "another one could not be told apart. Make it a pytree of tensors and "
                "hashable values, or pass what is needed of it as an argument."
            ) from None
        if _is_plain(value):
            self._objects[id(value)] = value
        return pytree.exact_key(value)


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's class without `__eq__`."""
    cls: Any = type(value)
    is_same = cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__
    return is_same and hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)


_NO_OBJECTS: Final = (type, ModuleType, FunctionType, Value, SymBool, SymFloat)


def _is_transformed(value: Any) -> bool:
    """Whether it is the result of `jit` or another transform of this package."""
    is_own = type(value).__module__.startswith("hopflow.")
    return is_own and getattr(value, "__wrapped__", None) is not None


def _code_of(value: Any) -> FunctionType | None:
    """Return the `__call__` of an object's class if that is a Python function."""
    code: Any = type(value).__call__ if callable(value) else None
    return code if isinstance(code, FunctionType) else None


def _has_tensors(value: Any) -> bool:
    """Whether it is a container of tensors, such as a module of `hf.nn`."""
    leaves, spec = pytree.flatten(value)
    is_tree = not pytree.is_leaf(spec)
    return is_tree and any(isinstance(leaf, Value) for leaf in leaves)


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that code, and code nested in it, may read."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(
        dict.fromkeys((*code.co_names, *(n for c in inner for n in _names(c))))
    )


def _fixed(size: Size) -> Hashable:
    return "symbol" if isinstance(size, SymInt) else size


def type_key(
    type_: TensorType, of_size: Callable[[Size], Hashable] = _fixed
) -> Hashable:
    """Return the key of a type. A symbolic size contributes only that it is symbolic,
    or `of_size(size)` (`terms_of`: its expression, compared without guards)."""
    return type_.dtype, tuple(map(of_size, type_.shape)), type_.weak
