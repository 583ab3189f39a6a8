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
from operator import is_
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.errors import DataDependentError, ImpurityError
from hopflow.graph.core import SourceLine
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.trace.iterators import position, remainder
from hopflow.trace.outside.bytecode import sets_attributes
from hopflow.trace.outside.checks import is_same
from hopflow.trace.outside.objects import (
    all_attributes,
    attributes_of,
    cells_of,
    held_by,
    is_constant,
    is_iterator,
    is_of_trace,
    is_plain,
    slots_of,
)
from hopflow.trace.outside.paths import MISSING
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
        if isinstance(scope, type):
            return vars(scope).get(name, MISSING)
        return all_attributes(scope).get(name, MISSING)

    def hold(self, value: Any) -> None:
        """Have it hold another value; `MISSING`: none."""
        scope, name = self.scope, self.name
        if isinstance(scope, dict):
            scope[name] = value
            if value is MISSING:
                del scope[name]
        elif isinstance(scope, CellType):
            scope.cell_contents = value
            if value is MISSING:
                del scope.cell_contents
        else:  # and not as the class may have it
            base = type if isinstance(scope, type) else object
            if value is not MISSING:
                base.__setattr__(scope, name, value)
            elif self.value() is not MISSING:
                base.__delattr__(scope, name)

    @property
    def is_changed(self) -> bool:
        return not _is_unchanged(self.before, self.value())


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
            if not isinstance(value, _HELD_WHOLE) and not _has_attributes(value):
                return
            if isinstance(value, np.ndarray) and not value.flags.writeable:
                return
            self._known[id(value)] = _Known(value, text, _copied(value))
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
        if id(owner) not in self._known or isinstance(owner, _HELD_WHOLE):
            inner = partial(_attribute_text, text, name)
            self._know_slot(_scope_of(owner), name, self._line, inner)

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
        place = id(_scope_of(owner)), key
        slot = self._variables.get(place) if isinstance(key, str) else None
        if slot is not None and slot.value() is part:
            return slot.before is not part
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
            if known is not None and not _is_as(known.before, _held(known.value)):
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
        inner = _Inner(self._held_before())
        for key, taken in advanced:
            known = self._iterators.get(key) or self._known[key]
            rows.append(self._row(key, known.text(arguments), taken))
        for key, (value, text, before) in self._known.items():
            if isinstance(value, np.ndarray) or _is_as(before, _held(value)):
                continue  # an array holds nothing of the trace
            inner.settle_parts(value)
            what = inner.gets(_held(value)) or _loses(before, _held(value))
            if what is not None:
                rows.append(self._row(key, text(arguments), what))
        for variable in self._variables.values():
            if variable.is_changed:
                now = inner.settled(variable.value())
                variable.hold(now)
                if (what := inner.gets([now])) is not None:
                    name = variable.text(arguments)
                    rows.append(f"  {variable.line}: `{name}` {what}")
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

    def has_changed(self, value: Any) -> bool:
        """Whether the trace has changed a container."""
        known = self._known.get(id(value))
        return known is not None and not _is_as(known.before, _held(value))

    def undo(self) -> None:
        """Give all that the trace has changed what it held before."""
        for variable in self._variables.values():
            if variable.value() is not variable.before:
                variable.hold(variable.before)
        for value, _, before in self._known.values():
            if not _is_as(before, _held(value)):
                _restore(value, before)

    def _held_before(self) -> list[Any]:
        """All that was outside before, as far as it is known."""
        known = [x for x in self._known.values() if not isinstance(x.value, np.ndarray)]
        parts = [
            [*x.before, *x.before.values()] if isinstance(x.before, dict) else x.before
            for x in known
        ]
        variables = [v.before for v in self._variables.values()]
        return [*variables, *(x.value for x in known), *(p for ps in parts for p in ps)]

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
_HELD_WHOLE: Final = (list, dict, set, deque, bytearray, array, np.ndarray)
"""What is copied with its items; objects of a user's are, with their attributes."""


def _scope_of(owner: Any) -> Any:
    """What an attribute of an object is a variable of."""
    return vars(owner) if isinstance(owner, ModuleType) else owner


def _has_attributes(value: Any) -> bool:
    has_any = type(value).__dictoffset__ or slots_of(type(value))
    return is_plain(value) and bool(has_any)


def _held(value: Any) -> Any:
    return value if isinstance(value, _HELD_WHOLE) else all_attributes(value)


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


def _is_unchanged(before: Any, now: Any) -> bool:
    """Whether no code can tell two values from each other."""
    if before is now or (is_constant(before) and is_same(before, now)):
        return True
    if not (type(before) is type(now) is tuple) or len(before) != len(now):
        return False
    return all(map(_is_unchanged, before, now))


def _is_as(before: Any, now: Any) -> bool:
    """Whether a container holds what it held, in the same order."""
    if isinstance(before, bytearray | array):
        return bool(before == now)
    if isinstance(before, np.ndarray):
        return _is_same_array(before, now)
    if isinstance(before, set):
        return len(before) == len(now) and all(x in now for x in before)
    if not isinstance(before, dict):
        return len(before) == len(now) and all(map(_is_unchanged, before, now))
    return [*before] == [*now] and all(
        _is_unchanged(x, now[k]) for k, x in before.items()
    )


def _is_same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether arrays have the same bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.flags.c_contiguous and b.flags.c_contiguous and not a.dtype.hasobject:
        a, b = (x.reshape(-1).view(np.uint8) for x in (a, b))  # without a copy
        return bool(np.array_equal(a, b))
    return a.tobytes() == b.tobytes()


def _attribute_text(
    owner: Callable[[Sequence[str]], str], name: str, arguments: Sequence[str]
) -> str:
    return f"{owner(arguments)}.{name}"


def _copied(value: Any) -> Any:
    """What a container or an object holds, in a container without code of a user's."""
    held = _held(value)
    if isinstance(held, array | bytearray):
        return held[:]
    if isinstance(held, np.ndarray):
        return held.copy()
    kinds = {dict: dict, set: set}
    make = next((make for kind, make in kinds.items() if isinstance(held, kind)), list)
    return make(held)


class _Inner:
    """What objects from outside have come to hold in a trace, at any depth.

    Args:
        before: What was outside: it is not entered again.
    """

    def __init__(self, before: Sequence[Any]) -> None:
        self._before = {id(x): x for x in before}
        self._settled: dict[int, Any] = {}

    def gets(self, parts: Any) -> str | None:
        """Whether there is a value of the trace among new parts, as a user is told."""
        todo = [*parts, *parts.values()] if isinstance(parts, dict) else [*parts]
        seen = dict(self._before)
        while todo:
            x = todo.pop()
            if id(x) in seen or is_constant(x):
                continue
            if is_of_trace(x):
                return f"gets a value of the trace ({getattr(x, 'type', x)})"
            seen[id(x)] = x
            todo += _parts(x)
        return None

    def settled(self, value: Any) -> Any:
        """A new part, in which numbers stand for the symbols of the trace: it serves
        no other call, so that they are what they are in this one."""
        if isinstance(value, SymInt | SymFloat | SymBool):
            kind = {SymInt: int, SymFloat: float, SymBool: bool}[type(value)]
            with suppress(DataDependentError):  # only the run knows it
                return kind(value)
            return value
        if id(value) in self._before or is_constant(value):
            return value
        if isinstance(value, tuple):
            parts = [*map(self.settled, value)]
            is_as = all(map(is_, parts, value))
            return value if is_as else tuple.__new__(type(value), parts)
        if isinstance(value, list | dict | set | deque) or _has_attributes(value):
            self.settle_parts(value)
        return value

    def settle_parts(self, value: Any) -> None:
        """The same for what a container or an object holds."""
        if id(value) in self._settled:
            return
        self._settled[id(value)] = value
        held = _held(value)
        found: Any
        if isinstance(held, dict):
            found = {self.settled(k): self.settled(x) for k, x in [*held.items()]}
            old, new = [*held, *held.values()], [*found, *found.values()]
        elif isinstance(held, list | deque | set):
            found = [*map(self.settled, [*held])]
            old, new = [*held], found
        else:
            return
        if len(old) != len(new) or not all(map(is_, old, new)):
            _restore(value, found)


def _parts(value: Any) -> list[Any]:
    """What a new object leads to, by which a value of a trace may be reached."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, *(x for _, _, x in cells_of(value))]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [*all_attributes(value).values()] if is_plain(value) else []


def _loses(before: Any, now: Any) -> str | None:
    """What a container or an object holds no more; None: nothing."""
    if isinstance(before, dict):
        missing = [key for key in before if key not in now]
        return f"loses {missing[0]!r}" if missing else None
    old, new = list(before), list(now)
    if len(new) < len(old) or _are_missing(old, new):
        return "loses an item"
    return None


def _are_missing(old: Iterable[Any], new: Iterable[Any]) -> bool:
    present = {id(x) for x in new}
    return any(id(x) not in present and not is_constant(x) for x in old)


def _restore(value: Any, before: Any) -> None:
    """Give a container or an object what it held."""
    if isinstance(value, np.ndarray):
        if value.shape == before.shape and value.flags.writeable:  # as it was
            value[...] = before
    elif isinstance(value, bytearray | array):
        value[:] = before
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    else:
        slots = dict(slots_of(type(value)))
        held = attributes_of(value)
        held.clear()
        held.update((k, x) for k, x in before.items() if k not in slots)
        for name, member in slots.items():
            if name in before:
                member.__set__(value, before[name])
            elif held_by(value, member) is not MISSING:
                member.__delete__(value)
