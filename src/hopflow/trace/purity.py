"""Detection of a traced function's side effects, which later calls do not repeat."""

import contextlib
import functools
import gc
import inspect
import io
import os
import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ImpurityError
from hopflow.graph.core import Graph
from hopflow.graph.printer import format_graph
from hopflow.trace.iterators import position, remainder
from hopflow.trace.process_effects import is_library, watching_process
from hopflow.trace.source import (
    closed_over,
    name_of,
    parameter_names,
    user_line,
)
from hopflow.tracebacks import is_own_file


class Watch:
    """Detects side effects of a function while it is traced."""

    def __init__(self, f: Callable[..., Any], args: Any) -> None:
        self._f = f
        self._reachable = _Reachable(f, args)

    def watch_arguments(self, names: Sequence[str], args: Sequence[Any]) -> None:
        """Watch the containers passed to the function, which are copies."""
        for name, arg in zip(names, args, strict=True):
            self._reachable.reach(name, arg)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the function, which runs within the block.

        Raises:
            ImpurityError: the function printed, logged, wrote to a file, drew random
                numbers, or changed a global, a variable of an enclosing function, the
                environment, or an object reachable from these or from its arguments.
        """
        reachable = self._reachable
        with _lock, watching_process(reachable.note):
            outer_tracer = sys.gettrace()
            sys.settrace(reachable.enter)
            try:
                yield
            finally:
                sys.settrace(outer_tracer)
        if reachable.effects:
            rows = [f"  {line or '?'}: {effect}" for effect, line in reachable.effects]
            raise ImpurityError(
                f"trace: `{name_of(self._f)}` does what only happens in the trace, and "
                "not when the graph runs:\n" + "\n".join(rows) + "\nReturn a result "
                "instead, or trace without `strict`."
            )


_lock: Final = threading.RLock()  # streams and loggers are global


def check_same(f: Callable[..., Any], first: Graph, second: Graph) -> None:
    """Check that two traces of a function have equal graphs.

    Raises:
        ImpurityError: they differ, so that the function reads some hidden state.
    """
    lines = [format_graph(graph).splitlines() for graph in (first, second)]
    for line, second_line in zip_longest(*lines, fillvalue="(nothing)"):
        if (
            line.partition("  # ")[0].rstrip()
            != second_line.partition("  # ")[0].rstrip()
        ):
            raise ImpurityError(
                f"trace: `{name_of(f)}` gives another graph each time, so it depends "
                "on what is no argument (random numbers, the time, a counter):\n"
                f"  {line.strip()}\n  {second_line.strip()}\nMake it an argument."
            )


@dataclass(slots=True)
class _Place:
    """A namespace or an object whose parts are watched.

    text   the user's expression for it; with a dot at the end for a module
    read   returns its parts by name
    parts  its parts when they were last compared
    """

    text: str
    read: Callable[[], dict[Any, Any]]
    parts: dict[Any, Any] = field(default_factory=dict)


class _Reachable:
    """Compares the state that `f` can reach after each line of the user's code.

    effects  the changes found so far, each with its line
    """

    def __init__(self, f: Callable[..., Any], args: Any) -> None:
        self.effects: dict[tuple[str, Any], None] = {}
        self.places: list[_Place] = []
        self.seen: dict[
            int, Any
        ] = {}  # keeps the objects alive, so that ids stay unique
        self.codes: set[CodeType] = set()
        self.words: set[str] = set()  # the names in the codes
        self.modules: list[tuple[str, dict[str, Any]]] = []  # the user's
        self.watched: defaultdict[int, set[str]] = defaultdict(
            set
        )  # names by namespace
        self.generators: dict[FrameType, str] = {}
        self.line: Any = None
        for name, value in closed_over(f).items():
            self.reach(name, value)
        for k, leaf in enumerate(args):
            self.reach(f"args[{k}]", leaf)
        self.reach("self", f)
        for text, read in _STATES.items():
            self.add(text, read)

    def note(self, effect: str, line: Any) -> None:
        self.effects[effect, line] = None

    def add(self, text: str, read: Callable[[], dict[Any, Any]]) -> None:
        place = _Place(text, read)
        place.parts = _parts(read)
        self.places.append(place)

    def reach(self, text: str, value: Any, depth: int = 0) -> None:
        """Watch an object and the objects reachable from it."""
        if id(value) in self.seen or depth > _DEPTH or isinstance(value, _LEFT):
            return
        self.seen[id(value)] = value
        if isinstance(value, FunctionType):
            self.function(value, depth)
        elif isinstance(value, ModuleType):
            if _is_users_module(value):
                self.modules.append((text, vars(value)))
                self.namespace(f"{text}.", vars(value), self.words)
        elif isinstance(value, type):
            if _is_users(value):
                self.object(text, lambda: _class_parts(value), depth)
                for kind in (*value.__bases__, type(value)):
                    self.reach(kind.__name__, kind, depth)
        elif isinstance(value, MethodType):
            self.reach(text, value.__self__, depth)
            self.reach(text, value.__func__, depth)
        elif isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                self.reach(text, part, depth)
        else:
            self.state(text, value, depth)
            if hasattr(value, "__dict__") or _is_users(type(value)):
                self.object(text, lambda: _attributes(value), depth)
                self.reach(type(value).__name__, type(value), depth)

    def state(self, text: str, value: Any, depth: int) -> None:
        """Watch the state of an object besides its attributes."""
        state = _state_of(value)
        if state is not None:
            self.add(text, state)
        elif isinstance(value, tuple | list | dict | deque):
            if not isinstance(value, tuple):
                self.add(text, lambda: _items(value))
            self.items(lambda key: f"{text}[{key!r}]", _items(value), depth)
        elif isinstance(value, set | frozenset):
            self.add(text, lambda: _items(value))
            self.inner(text, value, depth)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            self.reach(text, value.__self__, depth)
        elif isinstance(value, partial):
            names = parameter_names(value.func, len(value.args))
            arguments = {**dict(zip(names, value.args, strict=True)), **value.keywords}
            self.items(str, arguments, depth)
            self.reach(text, value.func, depth)
        elif isinstance(value, GeneratorType):  # `enter` sees when it resumes
            if value.gi_frame is not None:
                self.generators[value.gi_frame] = text
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            self.add(text, lambda: _digest(remainder(value)))
            for referents in gc.get_referents(value):
                self.inner(
                    text,
                    referents if isinstance(referents, tuple) else (referents,),
                    depth,
                )

    def inner(self, text: str, values: Iterable[Any], depth: int) -> None:
        """Watch objects that have no name of their own in the user's code."""
        for item in list(values)[:_MOST]:
            self.reach(text, item, depth + 1)

    def namespace(self, text: str, scope: dict[str, Any], names: set[str]) -> None:
        """Watch these names of a module, and their values."""
        new = names - self.watched[id(scope)]
        if not new:
            return
        self.watched[id(scope)] |= new
        self.add(text, lambda: {n: scope[n] for n in new if n in scope})
        for name in new:
            self.reach(f"{text}{name}", scope.get(name))

    def object(self, text: str, read: Callable[[], dict[Any, Any]], depth: int) -> None:
        """Watch the attributes of an object or a class."""
        self.add(text, read)
        self.items(lambda key: f"{text}.{key}", read(), depth)

    def items(
        self, text: Callable[[Any], str], values: dict[Any, Any], depth: int
    ) -> None:
        for key, item in list(values.items())[:_MOST]:
            self.reach(text(key), item, depth + 1)

    def function(self, value: FunctionType, depth: int) -> None:
        """Watch the closure, the defaults and the attributes of a user's function."""
        code = value.__code__
        if is_own_file(code.co_filename) or is_library(code.co_filename):
            return
        # Closures do not increase the depth; `seen` ends the recursion.
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            read = functools.partial(_content, name, cell)
            self.add(name, read)
            for item in _parts(read).values():
                self.reach(name, item, depth)
        self.items(str, _defaults(value), depth)
        self.object(value.__name__, lambda: vars(value), depth)

    # --- while it runs ----------------------------------------------------------------

    # `enter` and `step` are trace functions; see `sys.settrace`.

    def enter(self, frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if frame in self.generators:
            self.note(f"it changes the state of `{self.generators[frame]}`", self.line)
        if is_own_file(file) or file == "<string>" or is_library(file):
            return None  # generated by dataclasses, or with private caches
        if code not in self.codes:
            self.codes.add(code)
            self.words.update(code.co_names)
            self.namespace("", frame.f_globals, {*code.co_names})
            package = frame.f_globals.get("__package__")
            for name in code.co_names:  # they may be imported
                self.reach(name, sys.modules.get(name))
                self.reach(name, sys.modules.get(f"{package}.{name}"))
            for text, scope in [*self.modules]:
                self.namespace(f"{text}.", scope, self.words)
        return self.step

    def step(self, _: FrameType, event: str, *__: Any) -> Any:
        if event in ("line", "return"):
            self.compare()
            self.line = user_line() if event == "line" else self.line
        return self.step

    def compare(self) -> None:
        """Record the changes that the last line made."""
        for place in self.places:
            now, before = _parts(place.read), place.parts
            changed = [k for k in {**before, **now} if not _same(k, before, now)]
            if changed:
                place.parts = now
                text = place.text
                if not text or text.endswith("."):  # of a module
                    text += changed[0]
                prefix = "the state of " if changed == [""] else ""
                self.effects[f"it changes {prefix}`{text}`", self.line] = None


_DEPTH: Final = 3
_MOST: Final = 100
_NOTHING: Final = object()
_LEFT: Final = (Value, str, bytes, int, float, complex, type(None))
# Global state of the process.
_STATES: Final[dict[str, Callable[[], dict[Any, Any]]]] = {
    "os.environ": lambda: {k: os.fsencode(v) for k, v in os.environ.items()},
    "random": lambda: _digest(random.getstate()),
    "numpy.random": lambda: _digest(np.random.get_state(legacy=False)),
}


def _digest(state: Any) -> dict[str, bytes]:
    """Return a digest of an object's internal state."""
    return {"": str(hash(_frozen(state))).encode()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple([(k, _frozen(v)) for k, v in value.items()])
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _state_of(value: Any) -> Callable[[], dict[Any, Any]] | None:
    """Return a function that reads an object's internal state; None: it has none."""
    if isinstance(value, np.ndarray):
        return lambda: {"elements": value.tobytes()}
    if isinstance(value, random.Random):
        return lambda: _digest(value.getstate())
    if isinstance(value, np.random.Generator):
        return lambda: _digest(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: _digest(value.get_state(legacy=False))
    if isinstance(value, io.IOBase):
        return lambda: _digest(position(value))
    if isinstance(value, ContextVar):
        return lambda: {"": value.get(_NOTHING)}
    return (lambda: {"elements": bytes(value)}) if _has_buffer(value) else None


def _has_buffer(value: Any) -> bool:
    """Whether it supports the buffer protocol, like a bytearray."""
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _is_users(value: type) -> bool:
    """Whether a class is a user's: neither hopflow's nor a library's."""
    module = sys.modules.get(value.__module__)
    return module is not None and _is_users_module(module)


def _is_users_module(module: ModuleType) -> bool:
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    file = next(filter(None, paths), None)
    if file is None:
        return module.__name__ == "__main__"
    return not is_own_file(file) and not is_library(file)


def _class_parts(value: type) -> dict[Any, Any]:
    """Return the attributes of a class, without special ones."""
    return {k: v for k, v in vars(value).items() if not k.startswith("__")}


def _attributes(value: Any) -> dict[Any, Any]:
    """Return the attributes of an object, in its dict and its slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in filter(
        _is_users, type(value).__mro__
    ):  # slots of library classes may be caches
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):  # unassigned
                attributes[name] = getattr(value, name)
    return attributes


def _defaults(f: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's parameters."""
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
    if isinstance(value, set | frozenset):
        return dict.fromkeys(value)
    return dict(enumerate(value))


def _parts(read: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Return the current parts of a place by name."""
    try:
        return dict(read())
    except ValueError:  # an empty cell
        return {}


def _same(key: Any, before_parts: dict[Any, Any], after_parts: dict[Any, Any]) -> bool:
    before, after = before_parts.get(key, _NOTHING), after_parts.get(key, _NOTHING)
    return before is after or (type(before) is type(after) is bytes and before == after)
