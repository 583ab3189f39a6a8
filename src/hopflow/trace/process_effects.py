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

__all__ = ["is_library", "watching_process"]

_Note = Callable[[str, SourceLine], None]

_LIBRARIES: Final = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS: Final = frozenset(
    "os.chmod os.chown os.link os.mkdir os.remove os.rename os.rmdir os.symlink "
    "os.system os.truncate os.utime socket.connect subprocess.Popen".split()
)


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
    handle = logging.Logger.handle

    def noted(self: logging.Logger, record: logging.LogRecord) -> None:
        _tell("it logs")
        handle(self, record)

    logging.Logger.handle = noted  # type: ignore[method-assign]
    try:
        with (
            contextlib.redirect_stdout(_Stream(sys.stdout, "it prints")),
            contextlib.redirect_stderr(_Stream(sys.stderr, "it prints to stderr")),
        ):
            yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]
        _watched.note = outer


class _Watched(threading.local):
    """Who is told what this thread does."""

    note: _Note | None = None


_watched: Final = _Watched()
_has_hook = False


def _tell(what: str) -> None:
    """Note what is done, if it is the user's code that does it."""
    note, line = _watched.note, None
    if note is not None:
        line = _users_line(sys._getframe(2))
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
        if text.strip():
            _tell(self.what)
        return self.to.write(text)

    def flush(self) -> None:
        self.to.flush()


def _install_hook() -> None:
    """Have Python tell of files and processes: such a hook cannot be removed."""
    global _has_hook
    if not _has_hook:
        _has_hook = True
        sys.addaudithook(_hook)


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
