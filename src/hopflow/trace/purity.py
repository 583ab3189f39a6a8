"""What a traced function does besides computing, which is done in the trace alone."""

import contextlib
import dis
import functools
import inspect
import io
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    ModuleType,
)
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ImpurityError
from hopflow.graph.core import Graph
from hopflow.graph.printer import format_graph
from hopflow.trace.source import closed_over, is_own_file, name_of, user_line

__all__ = ["check_same", "watching"]


@contextlib.contextmanager
def watching(f: Callable[..., Any], args: Any) -> Iterator[None]:
    """Watch what `f`, called within the block, does to what was there before.

    Raises:
        ImpurityError: it has printed, or changed a global, a name of an enclosing
            scope, or an object (a list, an instance) that it got or found there.
    """
    watch = _Watch(f, args)
    before, printed = sys.gettrace(), _Printed(watch.effects)
    with contextlib.redirect_stdout(printed):
        sys.settrace(watch.enter)
        try:
            yield
        finally:
            sys.settrace(before)
    if watch.effects:
        rows = "\n".join(f"  {line or '?'}: {what}" for what, line in watch.effects)
        raise ImpurityError(
            f"trace: `{name_of(f)}` does what only happens in the trace, and not when "
            f"the graph runs:\n{rows}\nReturn a result instead, or trace without "
            "`strict`."
        )


def check_same(f: Callable[..., Any], first: Graph, second: Graph) -> None:
    """Check that two traces gave one graph.

    Raises:
        ImpurityError: they did not: something is hidden that changes.
    """
    lines = [format_graph(graph).splitlines() for graph in (first, second)]
    for one, other in zip_longest(*lines, fillvalue="(nothing)"):
        if one.partition("  # ")[0].rstrip() != other.partition("  # ")[0].rstrip():
            raise ImpurityError(
                f"trace: `{name_of(f)}` gives another graph each time, so it depends "
                "on what is no argument (random numbers, the time, a counter):\n"
                f"  {one.strip()}\n  {other.strip()}\nMake it an argument."
            )


class _Printed(io.TextIOBase):
    """Takes what is printed, and passes it on."""

    def __init__(self, effects: "dict[tuple[str, Any], None]") -> None:
        self.effects = effects
        self.to = sys.stdout

    def write(self, text: str) -> int:
        if text.strip():
            self.effects["it prints", user_line()] = None
        return self.to.write(text)


@dataclass(slots=True)
class _Place:
    """A namespace or an object whose parts are watched."""

    text: str
    read: Callable[[], dict[Any, Any]]
    known: dict[Any, Any] = field(default_factory=dict)


class _Watch:
    """Compares what `f` can reach with what it was, at each line of the user's code.

    effects  what was done, and on which line
    """

    def __init__(self, f: Callable[..., Any], args: Any) -> None:
        self.effects: dict[tuple[str, Any], None] = {}
        self.places: list[_Place] = []
        self.seen: set[int] = set()
        self.codes: set[CodeType] = set()
        self.line: Any = None
        for name, value in closed_over(f).items():
            self.reach(name, value)
        self.reach("self", getattr(f, "__self__", None))
        for name, value in _defaults(f).items():
            self.reach(name, value)
        for k, leaf in enumerate(args):
            self.reach(f"args[{k}]", leaf)
        code = getattr(f, "__code__", None)
        names = getattr(code, "co_freevars", ())
        cells = getattr(f, "__closure__", None) or ()
        for name, cell in zip(names, cells, strict=True):
            self.add(name, functools.partial(_content, name, cell))

    def add(self, text: str, read: Callable[[], dict[Any, Any]]) -> None:
        place = _Place(text, read)
        place.known = _parts(read)
        self.places.append(place)

    def reach(self, text: str, value: Any, depth: int = 0) -> None:
        """Watch an object, and those in it."""
        if id(value) in self.seen or depth > _DEPTH or isinstance(value, _LEFT):
            return
        self.seen.add(id(value))
        items: dict[Any, Any]
        if isinstance(value, list | dict | set | bytearray):
            self.add(text, lambda: _items(value))
            items = _items(value) if not isinstance(value, set) else {}
            for key, item in list(items.items())[:_MOST]:
                self.reach(f"{text}[{key!r}]", item, depth + 1)
        elif isinstance(value, tuple):
            for key, item in enumerate(value[:_MOST]):
                self.reach(f"{text}[{key}]", item, depth + 1)
        elif isinstance(value, np.ndarray):
            self.add(text, lambda: {"": value.tobytes()})
        elif hasattr(value, "__dict__"):
            self.add(text, lambda: vars(value))
            for key, item in list(vars(value).items())[:_MOST]:
                self.reach(f"{text}.{key}", item, depth + 1)

    # --- while it runs ----------------------------------------------------------------

    # Python calls these two with a frame, the event, and what belongs to it.

    def enter(self, frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if is_own_file(file) or file == "<string>" or file.startswith(_LIBRARIES):
            return None  # what dataclasses make has such a file; libraries have caches
        if code not in self.codes:
            self.codes.add(code)
            scope, written = frame.f_globals, _globals_written(code)
            self.add("", lambda: {n: scope[n] for n in written if n in scope})
            for name in code.co_names:
                self.reach(name, scope.get(name))
        return self.step

    def step(self, _: FrameType, event: str, *__: Any) -> Any:
        if event in ("line", "return"):
            self.compare()
            self.line = user_line() if event == "line" else self.line
        return self.step

    def compare(self) -> None:
        """Note what the line before has changed."""
        for place in self.places:
            now, known = _parts(place.read), place.known
            changed = [k for k in {**known, **now} if not _same(k, known, now)]
            if changed:
                place.known = now
                text = place.text or changed[0]
                self.effects[f"it changes `{text}`", self.line] = None


_DEPTH: Final = 3
_MOST: Final = 100
_NOTHING: Final = object()
_LEFT: Final = (
    *(Value, ModuleType, FunctionType, BuiltinFunctionType, type, str, bytes, int),
    *(float, complex, type(None)),
)


_LIBRARIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def _defaults(f: Callable[..., Any]) -> dict[str, Any]:
    """What the parameters of a function are if they are not given."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a builtin need not have one
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _content(name: str, cell: CellType) -> dict[Any, Any]:
    return {name: cell.cell_contents}


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, set):
        return dict.fromkeys(value)
    return dict(enumerate(value))


def _parts(read: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """What is in a place now, by name."""
    try:
        return dict(read())
    except ValueError:  # an empty cell
        return {}


def _same(key: Any, known: dict[Any, Any], now: dict[Any, Any]) -> bool:
    before, after = known.get(key, _NOTHING), now.get(key, _NOTHING)
    return before is after or (type(before) is type(after) is bytes and before == after)


def _globals_written(code: CodeType) -> list[str]:
    stores = ("STORE_GLOBAL", "DELETE_GLOBAL")
    return [i.argval for i in dis.get_instructions(code) if i.opname in stores]
