"""What Python code does outside of its own objects: streams, logs, files, processes."""

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
_CALLS: Final = {  # of which Python tells no such event
    call: f"it calls `os.{name}`"
    for name in ("pwrite", "pwritev", "sendfile", "umask", "write", "writev")
    if (call := getattr(os, name, None)) is not None
}
_METHODS: Final = frozenset(("write", "writelines", "send", "sendall"))


def is_library(file: str) -> bool:
    """Whether a file is of Python's own library, or of an installed package."""
    return file.startswith(_LIBRARIES)


@contextlib.contextmanager
def watching_process(note: _Note) -> Iterator[None]:
    """Within the block `note` is told what the user's code of this thread writes to
    stdout and stderr, logs, does to files, and starts: what it is, and the line."""
    _install_hook()
    outer = _watched.note
    _watched.note = note
    handle, profile = logging.Logger.handle, sys.getprofile()
    streams = {name: getattr(sys, name) for name in _STREAMS}

    def noted(self: logging.Logger, record: logging.LogRecord) -> None:
        with _told("it logs"):
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
        _watched.note = outer


class _Watched(threading.local):
    """Who is told what this thread does."""

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
def _told(what: str) -> Iterator[None]:
    """Note what is done within the block, and not of what it consists."""
    _tell(what)
    note, _watched.note = _watched.note, None
    try:
        yield
    finally:
        _watched.note = note


def _tell(what: str) -> None:
    """Note what is done, if it is the user's code that does it."""
    note, line = _watched.note, None
    if note is not None:
        line = _users_line(sys._getframe(1))
    if note is not None and line is not None:
        note(what, line)


def _users_line(frame: FrameType | None) -> SourceLine | None:
    """The line that asked a library for what is done; None: it is one of hopflow's
    own, or Python's that imports a module."""
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
    """Takes what is written to a stream, and passes it on."""

    def __init__(self, to: TextIO, what: str) -> None:
        self.to = to
        self.what = what

    def write(self, text: str) -> int:
        with _told(self.what):
            return self.to.write(text)

    def flush(self) -> None:
        self.to.flush()


def _install_hook() -> None:
    """Have Python tell of files and processes: such a hook cannot be removed."""
    global _has_hook
    if not _has_hook:
        _has_hook = True
        sys.addaudithook(_hook)


def _note_call(event: str, called: Any) -> None:
    """Note what is written by calls of which `_hook` is not told."""
    if event != "c_call" or _watched.note is None:
        return
    try:
        if called in _CALLS:
            _tell(_CALLS[called])
        elif called.__name__ in _METHODS:
            number = called.__self__.fileno()
            _tell(f"it writes to the file {number}")
    except (AttributeError, OSError, TypeError, ValueError):
        return  # not a file, or one in memory


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watched.note is None:
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(path, str | bytes | os.PathLike) and (
            set(mode or "") & set("wax+") or flags & _WRITES
        ):
            _tell(f"it writes to the file `{os.fsdecode(path)}`")
    elif event in _EVENTS:
        _tell(f"it calls `{event}`")
