"""Access paths: how traced code reaches a value from outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from types import CellType, FunctionType, MethodType
from typing import Any, Final

ERRORS: Final = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""Errors for a path that does not exist; an empty cell raises ValueError."""

_FUNCTIONS: Final = (FunctionType, MethodType, partial)

_UNSEEN: Final = frozenset(("__func__", "__wrapped__", "__class__", "fget"))
"""Attributes that are not in the user's code: their text is that of the owner."""


MISSING: Final[Any] = object()
"""The sentinel for a missing value."""


def member_of(cls: type, name: str, start: int = 0) -> Any:
    """Return a member of a class or its bases, without binding; `MISSING`: none.

    Args:
        start: The position in `__mro__` at which the search begins, as for `super`.
    """
    for base in cls.__mro__[start:]:
        if name in vars(base):
            return vars(base)[name]
    return MISSING


@dataclass(frozen=True, eq=False, slots=True)
class Path:
    """A path: one step from the value at `parent`; paths are compared by identity.

    kind    "constant": the object `key`; "argument": the leaf at position `key`;
            "global": the name `key` in the namespace `scope` of a module; "cell": the
            variable `key` of the function `parent`, at position `scope`; "default",
            "keyword default": that of its parameter `key`; "attribute"; "item"; "held":
            an attribute read without `__getattribute__` of the class; "member": the
            unbound member `key` of the class `parent`, searched from position `scope`
            in `__mro__`; "result of": the result of the function `key` for the value
    """

    parent: "Path | None"
    kind: str
    key: Any
    scope: Any = None

    def expression(self, parent: str, hold: Callable[[Any], str]) -> str:
        """Return Python code for the value, in which `leaves` are those of a call.

        Args:
            parent: The code for the value at the parent.
            hold: A constant -> its name.
        """
        match self.kind:
            case "constant":
                return hold(self.key)
            case "argument":
                return f"leaves[{self.key}]"
            case "global":
                return f"{hold(self.scope)}[{self.key!r}]"
            case "cell":
                cell = self._cell()
                if cell is not None:
                    return f"{hold(cell)}.cell_contents"
                return f"{parent}.__closure__[{self.scope}].cell_contents"
            case "default":
                return f"{parent}.__defaults__[{self.scope}]"
            case "keyword default":
                return f"{parent}.__kwdefaults__[{self.key!r}]"
            case "attribute" if self.key.isidentifier() and not iskeyword(self.key):
                return f"{parent}.{self.key}"
            case "attribute":
                return f"getattr({parent}, {self.key!r})"
            case "held":
                return f"{hold(object.__getattribute__)}({parent}, {self.key!r})"
            case "member":
                start = self.scope or 0
                return f"{hold(member_of)}({parent}, {self.key!r}, {start})"
            case "result of":
                return f"{hold(self.key)}({parent})"
        is_literal = type(self.key) in (int, str)
        return f"{parent}[{repr(self.key) if is_literal else hold(self.key)}]"

    def value(self, parent: Any, leaves: Sequence[Any]) -> Any:
        """Return the current value; it raises `ERRORS` if the path does not exist."""
        match self.kind:
            case "constant":
                return self.key
            case "argument":
                return leaves[self.key]
            case "global":
                return self.scope[self.key]
            case "cell":
                cell = self._cell() or parent.__closure__[self.scope]
                return cell.cell_contents
            case "default":
                return parent.__defaults__[self.scope]
            case "keyword default":
                return parent.__kwdefaults__[self.key]
            case "attribute":
                return getattr(parent, self.key)
            case "held":
                return object.__getattribute__(parent, self.key)
            case "member":
                return member_of(parent, self.key, self.scope or 0)
            case "result of":
                return self.key(parent)
        return parent[self.key]

    @property
    def is_rooted(self) -> bool:
        """Whether the expression does not use the parent's value."""
        return self.parent is None or self._cell() is not None

    def _cell(self) -> CellType | None:
        """The cell object, if the function is a constant, whose cells cannot change."""
        parent = self.parent
        if self.kind != "cell" or parent is None or parent.kind != "constant":
            return None
        function = parent.key
        if not isinstance(function, FunctionType) or function.__closure__ is None:
            return None
        cell: CellType = function.__closure__[self.scope]
        return cell

    def text(self, arguments: Sequence[str] = ()) -> str:
        """Return the user's expression: `global scale`, `self.w`, `config["lr"]`.

        Args:
            arguments: The user's expressions for the leaves of the arguments.
        """
        match self.kind:
            case "global":
                return f"global {self.key}"
            case "cell":
                return f"closure {self.key}"
            case "default" | "keyword default":
                return f"default {self.key}"
        return self._text(arguments)

    def _text(self, arguments: Sequence[str]) -> str:
        owner = "" if self.parent is None else self.parent._text(arguments)
        match self.kind:
            case "constant":
                return "" if isinstance(self.key, _FUNCTIONS) else "self"
            case "argument":
                is_named = self.key < len(arguments)
                return arguments[self.key] if is_named else f"args[{self.key}]"
            case "attribute" if self.key == "__self__":
                return owner or "self"
            case "attribute" if self.key in _UNSEEN:
                return owner
            case "result of":
                return owner
            case "attribute" | "held" | "member":
                return f"{owner}.{self.key}" if owner else self.key
            case "item":
                key = self.key
                quoted = f'"{key}"' if isinstance(key, str) else repr(key)
                return f"{owner}[{quoted}]"
        return str(self.key)
