"""Access paths: how traced code comes to a value from outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from types import CellType, FunctionType, MethodType
from typing import Any, Final

ERRORS: Final = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""What is raised where a path leads nowhere; an empty cell is a ValueError."""

_FUNCTIONS: Final = (FunctionType, MethodType, partial)

_UNSEEN: Final = frozenset(("__func__", "__wrapped__", "__class__", "fget"))
"""Attributes that a user has not written: the text is that of what they belong to."""


MISSING: Final[Any] = object()
"""What stands where there is no value."""


def member_of(cls: type, name: str, start: int = 0) -> Any:
    """What a class has under a name, itself or by inheritance, as it stands there.

    Args:
        start: Of the classes that it inherits from, itself the first one, that at which
            the search begins, as `super` has it.
    """
    for base in cls.__mro__[start:]:
        if name in vars(base):
            return vars(base)[name]
    return MISSING


@dataclass(frozen=True, eq=False, slots=True)
class Path:
    """One step, from what `parent` leads to; paths are compared by identity.

    kind    "constant": `key` itself, that a trace holds; "argument": the leaf at
            position `key`; "global": the name `key` in the module that `scope` is of;
            "cell": the variable `key` of the function `parent`, at position `scope`;
            "default", "keyword default": of its parameter `key`; "attribute", "item";
            "held": an attribute, whatever `__getattribute__` the class defines;
            "member": what the class `parent` has under a name, as it stands there, in
            the classes from position `scope` of those that it inherits from;
            "result of": what the function `key` gives of it
    """

    parent: "Path | None"
    kind: str
    key: Any
    scope: Any = None

    def expression(self, parent: str, hold: Callable[[Any], str]) -> str:
        """Python code for the value, in which `parent` is the code for that of the
        parent, `leaves` are a call's, and `hold` gives names to constants."""
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
        """The same, computed now; it raises `ERRORS` if there is none."""
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
        """Whether the expression has no use for the parent's value."""
        return self.parent is None or self._cell() is not None

    def _cell(self) -> CellType | None:
        """The cell itself, if the function is a constant: it keeps its cells."""
        parent = self.parent
        if self.kind != "cell" or parent is None or parent.kind != "constant":
            return None
        function = parent.key
        if not isinstance(function, FunctionType) or function.__closure__ is None:
            return None
        cell: CellType = function.__closure__[self.scope]
        return cell

    def text(self, arguments: Sequence[str] = ()) -> str:
        """How a user would write it: `global scale`, `self.w`, `config["lr"]`.

        Args:
            arguments: How they would write the leaves of a call's arguments.
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
        before = "" if self.parent is None else self.parent._text(arguments)
        match self.kind:
            case "constant":
                return "" if isinstance(self.key, _FUNCTIONS) else "self"
            case "argument":
                known = self.key < len(arguments)
                return arguments[self.key] if known else f"args[{self.key}]"
            case "attribute" if self.key == "__self__":
                return before or "self"
            case "attribute" if self.key in _UNSEEN:
                return before
            case "result of":
                return before
            case "attribute" | "held" | "member":
                return f"{before}.{self.key}" if before else self.key
            case "item":
                key = self.key
                quoted = f'"{key}"' if isinstance(key, str) else repr(key)
                return f"{before}[{quoted}]"
        return str(self.key)
