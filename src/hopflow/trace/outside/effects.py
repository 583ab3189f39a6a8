"""What traced code does to containers and objects from outside.

A trace does it once, and calls never again. So it is refused where that would be wrong:
where something from outside comes to hold a tensor of the trace, or loses an item.
Counters and caches of plain values are left alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import CellType, FrameType
from typing import Any, Final, NamedTuple

from hopflow.bind import Value
from hopflow.errors import ImpurityError
from hopflow.graph.core import SourceLine
from hopflow.trace.outside.objects import is_constant, is_of_trace, is_plain
from hopflow.trace.outside.paths import MISSING
from hopflow.trace.source import name_of

__all__ = ["Effects"]


class _Known(NamedTuple):
    """A container or an object; how a user writes it, and what it held."""

    value: Any
    text: Callable[[Sequence[str]], str]
    before: Any


class _Variable(NamedTuple):
    """A global, or a variable of an enclosing function; and the line that binds it."""

    scope: dict[str, Any] | CellType
    name: str
    line: SourceLine
    before: Any

    @property
    def text(self) -> str:
        return f"{'global' if isinstance(self.scope, dict) else 'closure'} {self.name}"

    def value(self) -> Any:
        """What it holds; `MISSING`: nothing yet."""
        if isinstance(self.scope, dict):
            return self.scope.get(self.name, MISSING)
        try:
            return self.scope.cell_contents
        except ValueError:
            return MISSING

    def restore(self) -> None:
        if isinstance(self.scope, dict):
            self.scope[self.name] = self.before
            if self.before is MISSING:
                del self.scope[self.name]
        else:
            self.scope.cell_contents = self.before
            if self.before is MISSING:
                del self.scope.cell_contents

    def lost(self) -> str | None:
        """What is wrong with its value now; None: nothing."""
        value = self.value()
        if value is self.before:
            return None
        parts = value.values() if isinstance(value, dict) else value
        inner = [*parts] if isinstance(value, (dict, list, tuple, set)) else []
        # Sizes may be kept in containers, as in a list of shapes.
        rows = [value, *(x for x in inner if isinstance(x, Value))]
        return next((_gets(x) for x in rows if is_of_trace(x)), None)


class Effects:
    """Compares containers and objects from outside with what they held when the traced
    code first met them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._variables: dict[tuple[int, str], _Variable] = {}
        self._lines: dict[int, SourceLine] = {}
        self._line: SourceLine | None = None

    def reach(self, frame: FrameType) -> None:
        """Take note of the line that is about to read something from outside."""
        self._line = SourceLine(frame.f_code.co_filename, frame.f_lineno)

    def know(self, value: Any, text: Callable[[Sequence[str]], str]) -> None:
        """Take note of an object, and of the line that reads it.

        Args:
            text: How a user writes it, if the arguments are written like this.
        """
        if id(value) not in self._known:
            if not isinstance(value, _CHANGING) and not _has_attributes(value):
                return
            self._known[id(value)] = _Known(value, text, _copied(value))
        if self._line is not None:
            self._lines[id(value)] = self._line

    def know_variable(
        self, scope: dict[str, Any] | CellType, name: str, line: SourceLine
    ) -> None:
        """Take note of a variable that code may bind anew, at a line."""
        key = id(scope), name
        if key not in self._variables:
            variable = _Variable(scope, name, line, None)
            self._variables[key] = variable._replace(before=variable.value())

    def check(self, f: Callable[..., Any], arguments: Sequence[str]) -> None:
        """Check that calls lose nothing by what the trace alone has done; if they do,
        all that was changed is as it was before.

        Args:
            arguments: How a user would write the leaves of the arguments.

        Raises:
            ImpurityError: they do.
        """
        rows = []
        for key, (value, text, before) in self._known.items():
            what = _lost(before, _held(value))
            if what is not None:
                line = self._lines.get(key)
                rows.append(f"  {line or '?'}: `{text(arguments)}` {what}")
        for variable in self._variables.values():
            what = variable.lost()
            if what is not None:
                rows.append(f"  {variable.line}: `{variable.text}` {what}")
        if not rows:
            return
        for variable in self._variables.values():
            variable.restore()
        for value, _, before in self._known.values():
            _restore(value, before)
        raise ImpurityError(
            f"jit: `{name_of(f)}` changes what is from outside, which the trace alone "
            "would do, and no later call:\n" + "\n".join(rows) + "\nReturn the new "
            "value and keep it after the call, or pass the container as an argument: "
            "what is done to arguments is done at each call."
        )


_CHANGING: Final = (list, dict, set, deque)


def _has_attributes(value: Any) -> bool:
    return is_plain(value) and hasattr(value, "__dict__")


def _held(value: Any) -> Any:
    return value if isinstance(value, _CHANGING) else vars(value)


def _copied(value: Any) -> Any:
    held = _held(value)
    return dict(held) if isinstance(held, dict) else type(held)(held)


def _lost(before: Any, now: Any) -> str | None:
    """What is wrong with a change that no call will make; None: nothing."""
    is_dict = isinstance(before, dict)
    old, new = (list(x.values()) if is_dict else list(x) for x in (before, now))
    kept = {id(x) for x in old}
    for x in new:
        if is_of_trace(x) and id(x) not in kept:
            return _gets(x)
    if is_dict:
        missing = [key for key in before if key not in now]
        return f"loses {missing[0]!r}" if missing else None
    if len(new) < len(old) or _are_missing(old, new):
        return "loses an item"
    return None


def _gets(x: Any) -> str:
    return f"gets a value of the trace ({getattr(x, 'type', x)})"


def _are_missing(old: Iterable[Any], new: Iterable[Any]) -> bool:
    present = {id(x) for x in new}
    return any(id(x) not in present and not is_constant(x) for x in old)


def _restore(value: Any, before: Any) -> None:
    """Give a container or an object what it held."""
    held = _held(value)
    if isinstance(held, dict | set):
        held.clear()
        held.update(before)
    else:
        held.clear()
        held.extend(before)
