"""Watches code run, for a recorder: which functions begin, and which loads are reached.

From Python 3.12 on `sys.monitoring` tells it, beside debuggers and coverage tools. In
Python 3.11 a trace function does, which calls the one that there was.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, Final

from hopflow.bind import Value, slots
from hopflow.trace.outside.bytecode import Load, loads_of
from hopflow.trace.outside.modules import is_watched
from hopflow.trace.outside.recorder import Recorder


class _Present(threading.local):
    """The recorders of this thread, the innermost one at the end."""

    recorders: tuple[Recorder, ...] = ()


_present: Final = _Present()


def recorders() -> tuple[Recorder, ...]:
    """The recorders of traces that this thread makes, each within the one before."""
    return _present.recorders


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Have a recorder told what code reads that runs in the block, in this thread."""
    before = _present.recorders
    _present.recorders = (*before, recorder)
    try:
        with _events(), _gifts:
            yield
    finally:
        _present.recorders = before


# By the id of code, which the entry keeps alive: to hash code takes the longer the more
# code there is.
_loads: dict[int, tuple[dict[int, tuple[Load, ...]], CodeType]] = {}
_MOST_LOADS: Final = 1 << 12


def _loads_at(code: CodeType, offset: int) -> tuple[Load, ...]:
    known = _loads.get(id(code))
    if known is None:
        if len(_loads) >= _MOST_LOADS:
            _loads.clear()
        known = _loads[id(code)] = loads_of(code), code
    return known[0].get(offset, ())


def _enter(frame: FrameType) -> None:
    for recorder in _present.recorders:
        recorder.enter(frame)


def _resume(frame: FrameType) -> None:
    for recorder in _present.recorders:
        recorder.resume(frame)


def _reach(frame: FrameType, loads: tuple[Load, ...]) -> None:
    for recorder in _present.recorders:
        for load in loads:
            recorder.load(frame, load)


def _give(tensor: Value) -> None:
    for recorder in _present.recorders:
        recorder.give(tensor)


class _Gifts:
    """Has tensors tell when Python is given their elements, as long as any thread
    watches: it costs nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            slots.note_elements = _give

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                slots.note_elements = None


_gifts: Final = _Gifts()


class _Monitor:
    """Asks `sys.monitoring` for events, as long as any thread watches; if other tools
    have all that it has for tools, a trace function is told."""

    def __init__(self) -> None:
        # The collector may run code, which is told of, where the lock is held.
        self._lock = threading.RLock()
        self._count = 0
        self._codes: dict[int, CodeType] = {}
        self._tool: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._begin()
            is_asked = self._tool is not None
        try:
            with nullcontext() if is_asked else by_tracing():
                yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._end()

    def _begin(self) -> None:
        monitoring: Any = sys.monitoring
        free = [n for n in (4, 3) if monitoring.get_tool(n) is None]
        if not free:
            self._tool = None
            return
        self._tool = free[0]
        monitoring.use_tool_id(self._tool, "hopflow")
        events = monitoring.events
        monitoring.register_callback(self._tool, events.PY_START, self._start)
        monitoring.register_callback(self._tool, events.PY_RESUME, self._resume)
        monitoring.register_callback(self._tool, events.INSTRUCTION, self._instruction)
        monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)

    def _end(self) -> None:
        monitoring: Any = sys.monitoring
        if self._tool is None:
            return
        monitoring.set_events(self._tool, 0)
        for code in self._codes.values():
            monitoring.set_local_events(self._tool, code, 0)
        self._codes.clear()
        events = monitoring.events
        for event in (events.PY_START, events.PY_RESUME, events.INSTRUCTION):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)
        self._tool = None

    def _start(self, code: CodeType, _: int) -> Any:
        """Events come from all threads, also from those that do not trace, and an event
        may be handled after the last trace has ended and freed the tool."""
        monitoring: Any = sys.monitoring
        if not _present.recorders:
            return None
        frame = sys._getframe(1)
        if not is_watched(frame):
            return monitoring.DISABLE
        with self._lock:
            if self._tool is None:
                return None
            if id(code) not in self._codes:
                self._codes[id(code)] = code
                events = monitoring.events.INSTRUCTION
                monitoring.set_local_events(self._tool, code, events)
        _enter(frame)
        return None

    def _resume(self, _: CodeType, __: int) -> Any:
        """A generator goes on: it may be one from outside."""
        if _present.recorders:
            _resume(sys._getframe(1))

    def _instruction(self, code: CodeType, offset: int) -> Any:
        if not _present.recorders:
            return None
        loads = _loads_at(code, offset)
        if not loads:
            return sys.monitoring.DISABLE
        _reach(sys._getframe(1), loads)
        return None


@contextmanager
def by_tracing() -> Iterator[None]:
    """Have a trace function told of events in this thread."""
    before = sys.gettrace()
    if len(_present.recorders) > 1:  # the trace around has set it
        yield
        return

    def begin(frame: FrameType, event: Any, arg: Any) -> Any:
        other = None if before is None else before(frame, event, arg)
        if not is_watched(frame):
            return other
        _enter(frame)
        # Python 3.13 takes note of the flag only if the frame has its function already.
        frame.f_trace = step = _step(other)
        frame.f_trace_opcodes = True
        return step

    sys.settrace(begin)
    try:
        yield
    finally:
        # What a debugger has set meanwhile stays; Python takes a function that raised.
        if sys.gettrace() in (begin, None):
            sys.settrace(before)


def _step(other: Callable[..., Any] | None) -> Callable[..., Any]:
    """A trace function for one call, around the one that another tool has for it."""

    def step(frame: FrameType, event: Any, arg: Any) -> Any:
        nonlocal other
        if event != "opcode":
            other = other and other(frame, event, arg)
        elif loads := _loads_at(frame.f_code, frame.f_lasti):
            _reach(frame, loads)
        return step

    return step


_events: Final = _Monitor() if sys.version_info >= (3, 12) else by_tracing
