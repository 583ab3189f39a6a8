"""Side effects of Python code on streams, logs, files and processes."""

import contextlib
import io
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TextIO

from hopflow.graph.core import SourceLine
from hopflow.tracebacks import is_own_file

_Note = Callable[[str, SourceLine], None]

_LIBRARIES: Final = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS: Final = frozenset(
    "os.chdir os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill "
    "os.killpg os.link os.lockf os.mkdir os.posix_spawn os.remove os.removexattr "
    "os.rename os.rmdir os.setxattr os.spawn os.startfile os.symlink os.system "
    "os.truncate os.utime pty.spawn resource.setrlimit socket.bind socket.connect "
    "socket.sendmsg socket.sendto sqlite3.connect subprocess.Popen".split()
)
_CALLS: Final = {  # functions without an audit event
    call: f"it calls `os.{name}`"
    for name in ("pwrite", "pwritev", "sendfile", "umask", "write", "writev")
    if (call := getattr(os, name, None)) is not None
}
_METHODS: Final = frozenset(("write", "writelines", "send", "sendall"))


def is_library(file: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package."""
    return file.startswith(_LIBRARIES)


@contextlib.contextmanager
def watching_process(note: _Note) -> Iterator[None]:
    """Within the block, report side effects of the user's code in this thread to
    `note(description, line)`: output, logs, writes to files, new processes."""
    _install_hook()
    outer_note = _watched.note
    _watched.note = note
    handle, profile = logging.Logger.handle, sys.getprofile()
    streams = {name: getattr(sys, name) for name in _STREAMS}

    def noted(self: logging.Logger, record: logging.LogRecord) -> None:
        with _noted("it logs"):
            handle(self, record)

    def profiled(frame: FrameType, event: Any, called: Any) -> None:
        if profile is not None:
            profile(frame, event, called)
        _note_call(event, called)

    logging.Logger.handle = noted  # type: ignore[method-assign]
    for name, stream in streams.items():
        if stream is not None:
            setattr(sys, name, _Stream(stream, _STREAMS[name]))
    sys.setprofile(profiled)
    try:
        yield
    finally:
        sys.setprofile(profile)
        for name, stream in streams.items():
            setattr(sys, name, stream)
        logging.Logger.handle = handle  # type: ignore[method-assign]
        _watched.note = outer_note


class _Watched(threading.local):
    """The function that side effects of this thread are reported to."""

    note: _Note | None = None


_watched: Final = _Watched()
_has_hook = False
_STREAMS: Final = {
    "stdout": "it prints",
    "stderr": "it prints to stderr",
    "__stdout__": "it prints",
    "__stderr__": "it prints to stderr",
}


@contextlib.contextmanager
def _noted(effect: str) -> Iterator[None]:
    """Report an effect, but not the effects within the block that implement it."""
    _note(effect)
    note, _watched.note = _watched.note, None
    try:
        yield
    finally:
        _watched.note = note


def _note(effect: str) -> None:
    """Report an effect if the user's code causes it."""
    note, line = _watched.note, None
    if note is not None:
        line = _users_line(sys._getframe(1))
    if note is not None and line is not None:
        note(effect, line)


def _users_line(frame: FrameType | None) -> SourceLine | None:
    """Return the user's line that causes an effect, possibly through a library; None:
    hopflow or an import of a module causes it."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            return None
        if code.co_filename != __file__ and not is_library(code.co_filename):
            if is_own_file(code.co_filename):
                return None
            return SourceLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


class _Stream(io.TextIOBase):
    """Forwards writes to a stream, and reports them."""

    def __init__(self, to: TextIO, effect: str) -> None:
        self.to = to
        self.effect = effect

    def write(self, text: str) -> int:
        with _noted(self.effect):
            return self.to.write(text)

    def flush(self) -> None:
        self.to.flush()


def _install_hook() -> None:
    """Install the audit hook, once: hooks cannot be removed."""
    global _has_hook
    if not _has_hook:
        _has_hook = True
        sys.addaudithook(_hook)


def _note_call(event: str, called: Any) -> None:
    """Report writes by functions that have no audit event."""
    if event != "c_call" or _watched.note is None:
        return
    try:
        if called in _CALLS:
            _note(_CALLS[called])
        elif called.__name__ in _METHODS:
            number = called.__self__.fileno()
            _note(f"it writes to the file {number}")
    except (AttributeError, OSError, TypeError, ValueError):
        return  # no file, or one in memory


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """The audit hook; see `sys.addaudithook`."""
    if _watched.note is None:
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(path, str | bytes | os.PathLike) and (
            set(mode or "") & set("wax+") or flags & _WRITES
        ):
            _note(f"it writes to the file `{os.fsdecode(path)}`")
    elif event in _EVENTS:
        _note(f"it calls `{event}`")
