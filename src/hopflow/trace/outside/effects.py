"""Side effects of traced code on containers and objects from outside.

They happen while the function is traced, and compiled code does not repeat them. A
trace with side effects therefore serves only the call that it was made for, so that
counters and logs are updated in each call as in Python. Effects that a trace cannot
perform correctly are errors: something from outside gets a tensor of the trace, loses
an item, or is an iterator that advances.

Few iterators can be reset, so that code is stopped before it takes an item. Items taken
by unwatched code are detected at the end, by the position of the iterator.
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
    """Stops a trace whose code is about to advance an iterator from outside."""


class _Object(NamedTuple):
    """A container or object, with the user's expression for it and a snapshot."""

    value: Any
    text: Callable[[Sequence[str]], str]
    before: Any


class _Variable(NamedTuple):
    """A global, a free variable, or an attribute of an owner without a snapshot: of a
    class, a module, a function, an object with slots.

    scope   the globals, the cell, or the owner of the attribute
    line    the line that assigns it
    text    the user's expression, for given expressions of the arguments
    before  its value before the trace
    """

    scope: Any
    name: str
    line: SourceLine | None
    text: Callable[[Sequence[str]], str]
    before: Any

    def value(self) -> Any:
        """Return its current value; `MISSING`: it is unassigned."""
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
        """Assign a value; `MISSING`: delete it."""
        scope, name = self.scope, self.name
        if isinstance(scope, dict):
            scope[name] = value
            if value is MISSING:
                del scope[name]
        elif isinstance(scope, CellType):
            scope.cell_contents = value
            if value is MISSING:
                del scope.cell_contents
        else:  # without `__setattr__` of the class
            base = type if isinstance(scope, type) else object
            if value is not MISSING:
                base.__setattr__(scope, name, value)
            elif self.value() is not MISSING:
                base.__delattr__(scope, name)

    @property
    def is_changed(self) -> bool:
        return not _is_unchanged(self.before, self.value())


class _Iterator(NamedTuple):
    """An iterator, with the user's expression, its position before the trace, and its
    index in the sequence, if it can be reset to that."""

    value: Any
    text: Callable[[Sequence[str]], str]
    before: Any
    place: int | None

    @property
    def has_moved(self) -> bool:
        return bool(_progress(self.value) != self.before)

    def set_back(self) -> bool:
        """Reset it to its position before the trace; return False if it cannot be."""
        with suppress(Exception):
            if isinstance(self.value, io.IOBase):
                self.value.seek(self.before)
            elif self.place is not None:
                self.value.__setstate__(self.place)
        return self.before is not None and not self.has_moved


class Effects:
    """Compares containers, objects and iterators from outside with snapshots from when
    the traced code first read them.

    Args:
        stops: Whether code is stopped that is about to advance an iterator.
    """

    def __init__(self, *, stops: bool = True) -> None:
        self._stops = stops
        self._objects: dict[int, _Object] = {}
        self._iterators: dict[int, _Iterator] = {}
        self._stopped: set[int] = set()  # iterators that were about to be advanced
        self._ran: set[int] = (
            set()
        )  # generators that ran, and objects whose `__next__` did
        self._restarted: set[int] = set()  # objects whose `__iter__` sets attributes
        self._variables: dict[tuple[int, str], _Variable] = {}
        self._lines: dict[int, SourceLine] = {}
        self._line: SourceLine | None = None

    def reach(self, frame: FrameType) -> None:
        """Note the line that is about to read something from outside."""
        self._line = SourceLine(frame.f_code.co_filename, frame.f_lineno)

    def track(self, value: Any, text: Callable[[Sequence[str]], str]) -> None:
        """Take a snapshot of an object, and note the line that reads it.

        Args:
            text: The user's expressions for the arguments -> that for the object.
        """
        if is_iterator(value):
            if id(value) not in self._iterators:
                state = _progress(value), _place(value)
                self._iterators[id(value)] = _Iterator(value, text, *state)
        elif id(value) not in self._objects:
            if not isinstance(value, _HELD_WHOLE) and not _has_attributes(value):
                return
            if isinstance(value, np.ndarray) and not value.flags.writeable:
                return
            self._objects[id(value)] = _Object(value, text, _copied(value))
        if self._line is not None:
            self._lines[id(value)] = self._line

    def track_variable(
        self, scope: dict[str, Any] | CellType, name: str, line: SourceLine
    ) -> Callable[[], Any]:
        """Note a variable that a line may assign.

        Returns:
            The function that returns its value; see `_Variable.value`.
        """
        kind = "global" if isinstance(scope, dict) else "closure"
        return self._track_slot(scope, name, line, lambda _: f"{kind} {name}").value

    def track_attribute(
        self, owner: Any, name: str, text: Callable[[Sequence[str]], str]
    ) -> None:
        """Note an attribute that code is about to assign.

        Args:
            text: The user's expressions for the arguments -> that for the owner.
        """
        if id(owner) not in self._objects or isinstance(owner, _HELD_WHOLE):
            inner = partial(_attribute_text, text, name)
            self._track_slot(_scope_of(owner), name, self._line, inner)

    def _track_slot(
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

    def has_put(self, owner: Any, key: Any, part: Any) -> bool:
        """Whether the trace itself has stored a part in an object from outside, as an
        item or attribute: then reading it is no read from outside."""
        slot_key = id(_scope_of(owner)), key
        slot = self._variables.get(slot_key) if isinstance(key, str) else None
        if slot is not None and slot.value() is part:
            return slot.before is not part
        tracked = self._objects.get(id(owner))
        if tracked is None:
            return False
        before = tracked.before
        try:
            if _held(owner)[key] is not part:  # inherited or computed
                return False
        except (LookupError, TypeError):
            return False
        with suppress(LookupError):
            if before[key] is part:
                return False
        parts = before.values() if isinstance(before, dict) else before
        return all(part is not x for x in parts)

    def was_assigned(self, value: Any) -> bool:
        """Whether the trace itself has assigned a value to a variable from outside."""
        return any(
            variable.value() is value and variable.before is not value
            for variable in self._variables.values()
        )

    def stop(self, iterator: Any) -> None:
        """Stop the trace, whose code is about to advance an iterator.

        Raises:
            ImpurityError: always, unless nothing is to be stopped; `checked` replaces
                it by one with the details.
        """
        self._stopped.add(id(iterator))
        if self._stops:
            raise _Stop(
                f"jit: {_article(iterator)} from outside is about to be advanced."
            )

    def run(self, frame: FrameType) -> None:
        """Note that a frame of a generator, or of a method of an iterator of a user's
        class, starts or resumes."""
        for key, iterator in self._iterators.items():
            if (
                isinstance(iterator.value, GeneratorType)
                and iterator.value.gi_frame is frame
            ):
                self._ran.add(key)
        code = frame.f_code
        if code.co_name in ("__next__", "__iter__") and code.co_argcount:
            key = id(frame.f_locals.get(code.co_varnames[0]))
            if code.co_name == "__next__":
                self._ran.add(key)
            elif sets_attributes(code):
                self._restarted.add(key)

    @property
    def has_advanced(self) -> bool:
        """Whether an iterator advanced, or was about to."""
        if self._stopped or self._ran - self._restarted:
            return True
        moved = (key in self._ran or x.has_moved for key, x in self._iterators.items())
        return any(moved)

    def _advanced(self) -> Iterator[tuple[int, str]]:
        """Yield the iterators that advanced, or would have, and reset them."""
        for key, iterator in self._iterators.items():
            text = f"is {_article(iterator.value)} of which an item is taken"
            if key in self._stopped:
                yield key, text
            elif key in self._ran or iterator.has_moved:
                suffix = "" if iterator.set_back() else ", which cannot be put back"
                yield key, text + suffix
        for key in self._ran - self._restarted:
            tracked = self._objects.get(key)
            if tracked is not None and not _is_same(
                tracked.before, _held(tracked.value)
            ):
                yield key, "is an iterator of which an item is taken"

    # --- the end ---

    @contextmanager
    def checked(
        self, f: Callable[..., Any], arguments: Sequence[str]
    ) -> Iterator[None]:
        """Check that the side effects of the trace within the block are allowed. If one
        is not, all of them are undone, as far as iterators can be reset.

        Args:
            arguments: The user's expressions for the leaves of the arguments.

        Raises:
            ImpurityError: a side effect is not allowed.
        """
        try:
            yield
        except _Stop:
            if not self._stopped:  # raised by the trace around this one
                raise
        self._check(f, arguments)

    def _check(self, f: Callable[..., Any], arguments: Sequence[str]) -> None:
        rows = []
        advanced = list(self._advanced())
        inner = _Inner(self._held_before())
        for key, description in advanced:
            tracked = self._iterators.get(key) or self._objects[key]
            rows.append(self._row(key, tracked.text(arguments), description))
        for key, (value, text, before) in self._objects.items():
            if isinstance(value, np.ndarray) or _is_same(before, _held(value)):
                continue  # an array cannot hold a traced value
            inner.settle_parts(value)
            problem = inner.gets(_held(value)) or _loses(before, _held(value))
            if problem is not None:
                rows.append(self._row(key, text(arguments), problem))
        for variable in self._variables.values():
            if variable.is_changed:
                now = inner.settled(variable.value())
                variable.hold(now)
                if (problem := inner.gets([now])) is not None:
                    name = variable.text(arguments)
                    rows.append(f"  {variable.line}: `{name}` {problem}")
        if not rows:
            return
        self.undo()
        advice = _OF_ITERATORS if len(advanced) == len(rows) else _OF_CONTAINERS
        raise ImpurityError(
            f"jit: `{name_of(f)}` changes what is from outside, which the trace alone "
            "would do, and no later call:\n" + "\n".join(rows) + f"\n{advice}"
        ) from None

    def changes(self, arguments: Sequence[str]) -> list[str]:
        """Return what the trace has changed, each with the line that read it first.

        Args:
            arguments: The user's expressions for the leaves of the arguments.
        """
        changed = [
            (tracked.text(arguments), self._lines.get(key))
            for key, tracked in self._objects.items()
            if not _is_same(tracked.before, _held(tracked.value))
        ]
        variables = [v for v in self._variables.values() if v.is_changed]
        changed += [(v.text(arguments), v.line) for v in variables]
        return [f"`{text}`" + (f" ({line})" if line else "") for text, line in changed]

    def has_changed(self, value: Any) -> bool:
        """Whether the trace has changed a container."""
        tracked = self._objects.get(id(value))
        return tracked is not None and not _is_same(tracked.before, _held(value))

    def undo(self) -> None:
        """Restore everything that the trace has changed."""
        for variable in self._variables.values():
            if variable.value() is not variable.before:
                variable.hold(variable.before)
        for value, _, before in self._objects.values():
            if not _is_same(before, _held(value)):
                _restore(value, before)

    def _held_before(self) -> list[Any]:
        """Return the tracked objects and their contents before the trace."""
        objects = [
            x for x in self._objects.values() if not isinstance(x.value, np.ndarray)
        ]
        parts = [
            [*x.before, *x.before.values()] if isinstance(x.before, dict) else x.before
            for x in objects
        ]
        variables = [v.before for v in self._variables.values()]
        return [
            *variables,
            *(x.value for x in objects),
            *(p for ps in parts for p in ps),
        ]

    def _row(self, key: int, text: str, problem: str) -> str:
        return f"  {self._lines.get(key) or '?'}: `{text}` {problem}"


_OF_CONTAINERS: Final = (
    "Return the new value and keep it after the call, or pass the container as an "
    "argument: what is done to arguments is done at each call."
)
_OF_ITERATORS: Final = (
    "Take the items before the call, and pass them as arguments; or keep them in a "
    "list, and pass an index."
)
_HELD_WHOLE: Final = (list, dict, set, deque, bytearray, array, np.ndarray)
"""Types whose snapshot has the items; that of other objects has the attributes."""


def _scope_of(owner: Any) -> Any:
    """Return the scope of an attribute; see `_Variable`."""
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
    """Return the position of an iterator; None: unknown. That of a writable file is not
    used, because writes change it too."""
    if not isinstance(value, io.IOBase):
        return None if isinstance(value, GeneratorType) else remainder(value)
    try:
        return None if value.writable() else position(value)
    except (OSError, ValueError):  # it is closed, or code iterates over its lines
        return None


def _place(value: Any) -> int | None:
    """Return the index of an iterator over a sequence, which can be reset to it."""
    if not hasattr(value, "__setstate__") or not hasattr(value, "__length_hint__"):
        return None
    index = value.__reduce__()[-1]
    return index if type(index) is int else None


def _is_unchanged(before: Any, after: Any) -> bool:
    """Whether no code can distinguish two values."""
    if before is after or (is_constant(before) and is_same(before, after)):
        return True
    if not (type(before) is type(after) is tuple) or len(before) != len(after):
        return False
    return all(map(_is_unchanged, before, after))


def _is_same(before: Any, after: Any) -> bool:
    """Whether a container has the same contents as before, in the same order."""
    if isinstance(before, bytearray | array):
        return bool(before == after)
    if isinstance(before, np.ndarray):
        return _is_same_array(before, after)
    if isinstance(before, set):
        return len(before) == len(after) and all(x in after for x in before)
    if not isinstance(before, dict):
        return len(before) == len(after) and all(map(_is_unchanged, before, after))
    return [*before] == [*after] and all(
        _is_unchanged(x, after[k]) for k, x in before.items()
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
    """Return the contents of a container or object, in a builtin container."""
    contents = _held(value)
    if isinstance(contents, array | bytearray):
        return contents[:]
    if isinstance(contents, np.ndarray):
        return contents.copy()
    kinds = {dict: dict, set: set}
    make = next(
        (make for kind, make in kinds.items() if isinstance(contents, kind)), list
    )
    return make(contents)


class _Inner:
    """The new contents of objects from outside, at any depth.

    Args:
        before: The objects from before the trace, which are not searched.
    """

    def __init__(self, before: Sequence[Any]) -> None:
        self._before = {id(x): x for x in before}
        self._settled: dict[int, Any] = {}

    def gets(self, parts: Any) -> str | None:
        """Return the error text if there is a traced value among new parts, or None."""
        stack = [*parts, *parts.values()] if isinstance(parts, dict) else [*parts]
        seen = dict(self._before)
        while stack:
            x = stack.pop()
            if id(x) in seen or is_constant(x):
                continue
            if is_of_trace(x):
                return f"gets a value of the trace ({getattr(x, 'type', x)})"
            seen[id(x)] = x
            stack += _parts(x)
        return None

    def settled(self, value: Any) -> Any:
        """Return a new part with symbols replaced by their numbers in this call, the
        only one that the trace serves."""
        if isinstance(value, SymInt | SymFloat | SymBool):
            kind = {SymInt: int, SymFloat: float, SymBool: bool}[type(value)]
            with suppress(DataDependentError):  # unbacked
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
        """Replace the symbols in the contents of a container or object."""
        if id(value) in self._settled:
            return
        self._settled[id(value)] = value
        contents = _held(value)
        settled: Any
        if isinstance(contents, dict):
            settled = {self.settled(k): self.settled(x) for k, x in [*contents.items()]}
            before, after = (
                [*contents, *contents.values()],
                [*settled, *settled.values()],
            )
        elif isinstance(contents, list | deque | set):
            settled = [*map(self.settled, [*contents])]
            before, after = [*contents], settled
        else:
            return
        if len(before) != len(after) or not all(map(is_, before, after)):
            _restore(value, settled)


def _parts(value: Any) -> list[Any]:
    """Return the objects that a new object refers to, among them traced values."""
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


def _loses(before: Any, after: Any) -> str | None:
    """Return the error text for what a container or object has lost, or None."""
    if isinstance(before, dict):
        missing = [key for key in before if key not in after]
        return f"loses {missing[0]!r}" if missing else None
    old, new = list(before), list(after)
    if len(new) < len(old) or _are_missing(old, new):
        return "loses an item"
    return None


def _are_missing(old: Iterable[Any], new: Iterable[Any]) -> bool:
    present = {id(x) for x in new}
    return any(id(x) not in present and not is_constant(x) for x in old)


def _restore(value: Any, before: Any) -> None:
    """Restore the contents of a container or object."""
    if isinstance(value, np.ndarray):
        if value.shape == before.shape and value.flags.writeable:  # in place
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
        attributes = attributes_of(value)
        attributes.clear()
        attributes.update((k, x) for k, x in before.items() if k not in slots)
        for name, member in slots.items():
            if name in before:
                member.__set__(value, before[name])
            elif held_by(value, member) is not MISSING:
                member.__delete__(value)
