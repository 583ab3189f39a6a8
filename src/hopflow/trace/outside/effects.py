"""What traced code does to containers and objects from outside.

It is done while the function is traced, and compiled code does none of it. So a trace
that has changed something serves the call alone that it was made for: counters and logs
have in each call what Python would give them. Where the trace itself cannot do what a
call does, it is refused: something from outside comes to hold a tensor of the trace,
loses an item, or is an iterator that is advanced.

Few iterators can be set back, so code is stopped where it is about to take an item.
What is only found out at the end, by how far the iterator has come then, is what code
that is not watched has taken.
"""

import io
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FrameType, GeneratorType
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ImpurityError
from hopflow.graph.core import SourceLine
from hopflow.trace.iterators import position, remainder
from hopflow.trace.outside.bytecode import sets_attributes
from hopflow.trace.outside.checks import is_same
from hopflow.trace.outside.objects import (
    held_by,
    is_constant,
    is_iterator,
    is_of_trace,
    is_plain,
)
from hopflow.trace.outside.paths import MISSING, member_of
from hopflow.trace.source import name_of


class _Stop(ImpurityError):
    """Ends a trace whose code is about to advance an iterator from outside."""


class _Known(NamedTuple):
    """A container or an object; how a user writes it, and what it held."""

    value: Any
    text: Callable[[Sequence[str]], str]
    before: Any


class _Variable(NamedTuple):
    """A global, a variable of an enclosing function, or an attribute of what is copied
    as no container: of a class, a module, a function, an object with slots. The line
    binds it.

    scope   the globals, the cell, or the owner of the attribute
    text    how a user writes it
    """

    scope: Any
    name: str
    line: SourceLine | None
    text: Callable[[Sequence[str]], str]
    before: Any

    def value(self) -> Any:
        """What it holds; `MISSING`: nothing yet."""
        scope, name = self.scope, self.name
        if isinstance(scope, dict):
            return scope.get(name, MISSING)
        if isinstance(scope, CellType):
            try:
                return scope.cell_contents
            except ValueError:
                return MISSING
        held = getattr(scope, "__dict__", {})
        is_there = name in held or isinstance(scope, type)
        member = MISSING if is_there else member_of(type(scope), name)
        return held.get(name, MISSING) if is_there else held_by(scope, member)

    def restore(self) -> None:
        scope, name, before = self.scope, self.name, self.before
        if isinstance(scope, dict):
            scope[name] = before
            if before is MISSING:
                del scope[name]
        elif isinstance(scope, CellType):
            scope.cell_contents = before
            if before is MISSING:
                del scope.cell_contents
        elif self.value() is not before:
            delattr(scope, name) if before is MISSING else setattr(scope, name, before)

    @property
    def is_changed(self) -> bool:
        return not is_unchanged(self.before, self.value())

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


class _Iterator(NamedTuple):
    """An iterator; how a user writes it, how far it had come, and where that is in what
    it iterates over, if it can be set back."""

    value: Any
    text: Callable[[Sequence[str]], str]
    before: Any
    place: int | None

    @property
    def has_moved(self) -> bool:
        return bool(_progress(self.value) != self.before)

    def set_back(self) -> bool:
        """Have it give again what it has given; False: it cannot."""
        with suppress(Exception):
            if isinstance(self.value, io.IOBase):
                self.value.seek(self.before)
            elif self.place is not None:
                self.value.__setstate__(self.place)
        return self.before is not None and not self.has_moved


class Effects:
    """Compares containers, objects and iterators from outside with what they held when
    the traced code first met them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._iterators: dict[int, _Iterator] = {}
        self._stopped: set[int] = set()  # iterators that were about to be advanced
        self._ran: set[int] = set()  # generators that ran, objects of which `__next__`
        self._restarted: set[int] = set()  # objects of which `__iter__` sets attributes
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
        if is_iterator(value):
            if id(value) not in self._iterators:
                state = _progress(value), _place(value)
                self._iterators[id(value)] = _Iterator(value, text, *state)
        elif id(value) not in self._known:
            if not isinstance(value, _CHANGING) and not _has_attributes(value):
                return
            self._known[id(value)] = _Known(value, text, _copied(value))
        if self._line is not None:
            self._lines[id(value)] = self._line

    def know_array(
        self, value: np.ndarray[Any, Any], text: Callable[[Sequence[str]], str]
    ) -> None:
        """Take note of an array that code reads which sets items of some; see `know`.

        What all arrays contain is not copied.
        """
        if value.flags.writeable and id(value) not in self._known:
            self._known[id(value)] = _Known(value, text, value.copy())
            if self._line is not None:
                self._lines[id(value)] = self._line

    def know_variable(
        self, scope: dict[str, Any] | CellType, name: str, line: SourceLine
    ) -> Callable[[], Any]:
        """Take note of a variable that code may bind anew, at a line.

        Returns:
            What gives its value; see `_Variable.value`.
        """
        kind = "global" if isinstance(scope, dict) else "closure"
        return self._know_slot(scope, name, line, lambda _: f"{kind} {name}").value

    def know_attribute(
        self, owner: Any, name: str, text: Callable[[Sequence[str]], str]
    ) -> None:
        """Take note of an attribute that code is about to bind.

        Args:
            text: How a user writes the owner, if the arguments are written like this.
        """
        if id(owner) not in self._known:
            inner = partial(_attribute_text, text, name)
            self._know_slot(owner, name, self._line, inner)

    def _know_slot(
        self,
        scope: Any,
        name: str,
        line: SourceLine | None,
        text: Callable[[Sequence[str]], str],
    ) -> _Variable:
        key = id(scope), name
        if key not in self._variables:
            variable = _Variable(scope, name, line, text, None)
            self._variables[key] = variable._replace(before=variable.value())
        return self._variables[key]

    # --- iterators ---

    def is_own(self, owner: Any, key: Any, part: Any) -> bool:
        """Whether the trace itself has put a part into an object from outside, under a
        key or as an attribute: it is not read from there."""
        known = self._known.get(id(owner))
        if known is None:
            return False
        before = known.before
        try:
            if _held(owner)[key] is not part:  # it is of a class, or computed
                return False
        except (LookupError, TypeError):
            return False
        with suppress(LookupError):
            if before[key] is part:
                return False
        parts = before.values() if isinstance(before, dict) else before
        return all(part is not x for x in parts)

    def is_own_variable(self, value: Any) -> bool:
        """The same for what a variable from outside holds."""
        return any(
            variable.value() is value and variable.before is not value
            for variable in self._variables.values()
        )

    def stop(self, iterator: Any) -> None:
        """End the trace, whose code is about to advance an iterator.

        Raises:
            ImpurityError: always; `checked` says more.
        """
        self._stopped.add(id(iterator))
        raise _Stop(f"jit: {_article(iterator)} from outside is about to be advanced.")

    def run(self, frame: FrameType) -> None:
        """Take note that code begins or goes on to run: that of a generator, or of a
        method of an iterator that is an object of a user's class."""
        for key, one in self._iterators.items():
            if isinstance(one.value, GeneratorType) and one.value.gi_frame is frame:
                self._ran.add(key)
        code = frame.f_code
        if code.co_name in ("__next__", "__iter__") and code.co_argcount:
            key = id(frame.f_locals.get(code.co_varnames[0]))
            if code.co_name == "__next__":
                self._ran.add(key)
            elif sets_attributes(code):
                self._restarted.add(key)

    def _advanced(self) -> Iterator[tuple[int, str]]:
        """The iterators that were advanced, or would have been; they are set back."""
        for key, one in self._iterators.items():
            text = f"is {_article(one.value)} of which an item is taken"
            if key in self._stopped:
                yield key, text
            elif key in self._ran or one.has_moved:
                lost = "" if one.set_back() else ", which cannot be put back"
                yield key, text + lost
        for key in self._ran - self._restarted:
            known = self._known.get(key)
            if known is not None and not _is_as(known.before, vars(known.value)):
                yield key, "is an iterator of which an item is taken"

    # --- the end ---

    @contextmanager
    def checked(
        self, f: Callable[..., Any], arguments: Sequence[str]
    ) -> Iterator[None]:
        """Check what the trace has done that is made within the block: that calls lose
        nothing by it. If they do, all that was changed is as it was before, as far as
        iterators can be set back.

        Args:
            arguments: How a user would write the leaves of the arguments.

        Raises:
            ImpurityError: calls lose something.
        """
        try:
            yield
        except _Stop:
            if not self._stopped:  # it is of the trace around this one
                raise
        self._check(f, arguments)

    def _check(self, f: Callable[..., Any], arguments: Sequence[str]) -> None:
        rows = []
        advanced = list(self._advanced())
        for key, taken in advanced:
            known = self._iterators.get(key) or self._known[key]
            rows.append(self._row(key, known.text(arguments), taken))
        for key, (value, text, before) in self._known.items():
            what = _lost(before, _held(value))
            if what is not None:
                rows.append(self._row(key, text(arguments), what))
        for variable in self._variables.values():
            what = variable.lost()
            if what is not None:
                rows.append(f"  {variable.line}: `{variable.text(arguments)}` {what}")
        if not rows:
            return
        self.undo()
        advice = _OF_ITERATORS if len(advanced) == len(rows) else _OF_CONTAINERS
        raise ImpurityError(
            f"jit: `{name_of(f)}` changes what is from outside, which the trace alone "
            "would do, and no later call:\n" + "\n".join(rows) + f"\n{advice}"
        ) from None

    def changes(self, arguments: Sequence[str]) -> list[str]:
        """What the trace has changed, each with the line that met it first.

        Args:
            arguments: How a user would write the leaves of the arguments.
        """
        found = [
            (known.text(arguments), self._lines.get(key))
            for key, known in self._known.items()
            if not _is_as(known.before, _held(known.value))
        ]
        variables = [v for v in self._variables.values() if v.is_changed]
        found += [(v.text(arguments), v.line) for v in variables]
        return [f"`{text}`" + (f" ({line})" if line else "") for text, line in found]

    def undo(self) -> None:
        """Give all that the trace has changed what it held before."""
        for variable in self._variables.values():
            variable.restore()
        for value, _, before in self._known.values():
            if not _is_as(before, _held(value)):
                _restore(value, before)

    def _row(self, key: int, text: str, what: str) -> str:
        return f"  {self._lines.get(key) or '?'}: `{text}` {what}"


_OF_CONTAINERS: Final = (
    "Return the new value and keep it after the call, or pass the container as an "
    "argument: what is done to arguments is done at each call."
)
_OF_ITERATORS: Final = (
    "Take the items before the call, and pass them as arguments; or keep them in a "
    "list, and pass an index."
)
_CHANGING: Final = (list, dict, set, deque, bytearray, array)


def _has_attributes(value: Any) -> bool:
    return is_plain(value) and hasattr(value, "__dict__")


def _held(value: Any) -> Any:
    is_itself = isinstance(value, (*_CHANGING, np.ndarray))
    return value if is_itself else vars(value)


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _progress(value: Any) -> Any:
    """How far an iterator has come; None: it does not tell. A file that may be written
    is left alone: to write moves its position too."""
    if not isinstance(value, io.IOBase):
        return None if isinstance(value, GeneratorType) else remainder(value)
    try:
        return None if value.writable() else position(value)
    except (OSError, ValueError):  # it is closed, or code iterates over its lines
        return None


def _place(value: Any) -> int | None:
    """Where an iterator of a sequence is, which can be set to it."""
    if not hasattr(value, "__setstate__") or not hasattr(value, "__length_hint__"):
        return None
    index = value.__reduce__()[-1]
    return index if type(index) is int else None


def is_unchanged(before: Any, now: Any) -> bool:
    """Whether no code can tell two values from each other."""
    if before is now or (is_constant(before) and is_same(before, now)):
        return True
    if not (type(before) is type(now) is tuple) or len(before) != len(now):
        return False
    return all(map(is_unchanged, before, now))


def _is_as(before: Any, now: Any) -> bool:
    """Whether a container holds what it held, in the same order."""
    if isinstance(before, bytearray | array):
        return bool(before == now)
    if isinstance(before, np.ndarray):
        return bool(before.tobytes() == now.tobytes())
    if isinstance(before, set):
        return len(before) == len(now) and all(x in now for x in before)
    if not isinstance(before, dict):
        return len(before) == len(now) and all(map(is_unchanged, before, now))
    return [*before] == [*now] and all(
        is_unchanged(x, now[k]) for k, x in before.items()
    )


def _attribute_text(
    owner: Callable[[Sequence[str]], str], name: str, arguments: Sequence[str]
) -> str:
    return f"{owner(arguments)}.{name}"


def _copied(value: Any) -> Any:
    held = _held(value)
    if isinstance(held, array):
        return held[:]
    return dict(held) if isinstance(held, dict) else type(held)(held)


def _lost(before: Any, now: Any) -> str | None:
    """What is wrong with a change that no call will make; None: nothing."""
    if isinstance(before, np.ndarray):
        return None
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
    elif isinstance(held, np.ndarray):
        held[...] = before
    elif isinstance(held, bytearray | array):
        held[:] = before
    else:
        held.clear()
        held.extend(before)
