"""Instruments running code for a recorder: function entries, and the loads reached.

From Python 3.12 on it uses `sys.monitoring`, which works together with debuggers and
coverage tools. In Python 3.11 it uses a trace function that calls the previous one.
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
    """The recorders of this thread, the innermost last."""

    recorders: tuple[Recorder, ...] = ()


_present: Final = _Present()


def recorders() -> tuple[Recorder, ...]:
    """Return the recorders of the current traces of this thread, the innermost last."""
    return _present.recorders


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Notify a recorder of the reads of code that this thread runs in the block."""
    outer_recorders = _present.recorders
    _present.recorders = (*outer_recorders, recorder)
    try:
        with _events(), _element_reads:
            yield
    finally:
        _present.recorders = outer_recorders


# Keyed by the id of code, which the entry keeps alive: hashing code takes time linear
# in its length.
_loads: dict[int, tuple[dict[int, tuple[Load, ...]], CodeType]] = {}
_MOST_LOADS: Final = 1 << 12


def _loads_at(code: CodeType, offset: int) -> tuple[Load, ...]:
    entry = _loads.get(id(code))
    if entry is None:
        if len(_loads) >= _MOST_LOADS:
            _loads.clear()
        entry = _loads[id(code)] = loads_of(code), code
    return entry[0].get(offset, ())


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


class _ElementReads:
    """Enables notifications of reads of tensor elements while any thread watches."""

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


_element_reads: Final = _ElementReads()


class _Monitor:
    """Enables events of `sys.monitoring` while any thread watches; if all tool ids are
    in use, a trace function is used instead."""

    def __init__(self) -> None:
        # The garbage collector may run monitored code while the lock is held.
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
            is_monitoring = self._tool is not None
        try:
            with nullcontext() if is_monitoring else by_tracing():
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
        """Handle the start of a function.

        Events come from all threads, also from those that do not trace, and an event
        may be handled after the last trace has ended and freed the tool.
        """
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
        """Handle the resumption of a generator, which may be from outside."""
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
    """Use a trace function for the events of this thread."""
    previous = sys.gettrace()
    if len(_present.recorders) > 1:  # set by the trace around this one
        yield
        return

    def begin(frame: FrameType, event: Any, arg: Any) -> Any:
        other = None if previous is None else previous(frame, event, arg)
        if not is_watched(frame):
            return other
        _enter(frame)
        # Python 3.13 reads the flag only if the frame already has a trace function.
        frame.f_trace = step = _step(other)
        frame.f_trace_opcodes = True
        return step

    sys.settrace(begin)
    try:
        yield
    finally:
        # A trace function that a debugger set meanwhile stays; None: ours raised.
        if sys.gettrace() in (begin, None):
            sys.settrace(previous)


def _step(other: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a trace function for one call, which also calls another tool's."""

    def step(frame: FrameType, event: Any, arg: Any) -> Any:
        nonlocal other
        if event != "opcode":
            other = other and other(frame, event, arg)
        elif loads := _loads_at(frame.f_code, frame.f_lasti):
            _reach(frame, loads)
        return step

    return step


_events: Final = _Monitor() if sys.version_info >= (3, 12) else by_tracing
