"""Classification of frames, and tracebacks that show the user's code only.

A shortened traceback has the user's frames. The frames of an operator between them are
replaced by one entry that names the operator and its function (`while_loop/body`), so
that the path through the operators can be read from top to bottom.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

_PACKAGE: Final = Path(__file__).resolve().parent
_ROOT: Final = _PACKAGE.parent.parent
_OWN: Final = (str(_PACKAGE), str(_ROOT / "hops"), str(_ROOT / "autograd"))
# These subpackages are programs that use hopflow, so that their code is a user's.
_USERS: Final = (str(_PACKAGE / "demo"), str(_PACKAGE / "testing"))
_STANDARD: Final = sysconfig.get_path("stdlib")
_DEPENDENCIES: Final = ("numpy", "scipy", "optree", "llvmlite", "ml_dtypes", "sympy")

OPERATOR_FILE: Final = "<hopflow>"
"""The file name of traceback entries that stand for an operator."""

_F = TypeVar("_F", bound=Callable[..., Any])


class _OwnFiles(dict[str, bool]):
    """Memo table: name of a file -> whether it is hopflow's."""

    def __missing__(self, file: str) -> bool:
        path = str(Path(file).resolve())
        is_own = path.startswith(_OWN) and not path.startswith(_USERS)
        self[file] = is_own = is_own or file.startswith("<frozen")
        return is_own


OWN_FILES: Final = _OwnFiles()
"""Name of a file -> True if its code is hopflow's, and not a user's."""


def is_own_file(file: str) -> bool:
    """Return True if a file's code is hopflow's, and not a user's."""
    return OWN_FILES[file]


def is_library_file(file: str) -> bool:
    """Return True for files of the standard library and of hopflow's dependencies."""
    inside = file.partition("site-packages")[2].strip("/\\")
    if inside:
        return inside.startswith(_DEPENDENCIES)
    return file.startswith(_STANDARD)


# --- operators between the frames -----------------------------------------------------

# Keyed by the id of the code, because hashing a code object takes time linear in it.
_operators: dict[int, Callable[[Any], str]] = {}


def calls_operator_function(path: Callable[[Any], str]) -> Callable[[_F], _F]:
    """Mark a function that calls the user's function of an operator.

    Args:
        path: The local variables of the marked function -> the operator and the user's
            function, as `while_loop/body`.
    """

    def mark(f: _F) -> _F:
        _operators[id(f.__code__)] = path
        return f

    return mark


def operator_at(frame: FrameType) -> str:
    """Return the operator whose function a frame calls: `while_loop/body`; "": none."""
    path = _operators.get(id(frame.f_code))
    return "" if path is None else path(frame.f_locals).rpartition(" → ")[2]


def calls_above(frame: FrameType, root: FrameType | None) -> list[FrameType | str]:
    """Return a frame and its callers up to a root, the innermost first: the user's
    frames, and the operators whose functions are called between them.

    It runs for every traced operation, so that the loop over frames calls no function.
    """
    calls: list[FrameType | str] = [frame]
    outer = frame.f_back
    for _ in range(_DEEPEST):
        if outer is None or outer is root:
            break
        code = outer.f_code
        if not OWN_FILES[code.co_filename]:
            calls.append(outer)
        elif id(code) in _operators and (operator := operator_at(outer)):
            calls.append(operator)
        outer = outer.f_back
    # The traced function may itself be called by an eager operator.
    caller = outer.f_back if outer is not None and outer is root else None
    if caller is not None and (operator := operator_at(caller)):
        calls.append(operator)
    return calls


_DEEPEST: Final = 1 << 10  # the most frames that `calls_above` visits


# --- tracebacks -----------------------------------------------------------------------


class Line(Protocol):
    """A line of the user's code."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def function(self) -> str: ...


class Entry(NamedTuple):
    """An entry of a traceback; see `types.TracebackType`."""

    frame: FrameType
    lasti: int
    lineno: int


def frames_of(traceback: TracebackType | None) -> Iterator[Entry]:
    """Yield the entries of a traceback, the outermost first."""
    while traceback is not None:
        yield Entry(traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
        traceback = traceback.tb_next


def shortened(
    traceback: TracebackType | None, stack: Sequence[Line] = ()
) -> TracebackType | None:
    """Return a traceback without the frames of hopflow and of libraries it calls.

    Args:
        stack: Lines of the user's code to append, the innermost last: where the failed
            operation was traced.
    """
    entries: list[Entry] = []
    is_hidden = False
    for entry in frames_of(traceback):
        file = entry.frame.f_code.co_filename
        if operator := operator_at(entry.frame):
            entries.append(_entry(OPERATOR_FILE, 1, operator))
        is_hidden = is_own_file(file) or (is_hidden and is_library_file(file))
        if not is_hidden:
            entries.append(entry)
    while entries and entries[-1].frame.f_code.co_filename == OPERATOR_FILE:
        entries.pop()  # the operator failed itself, not its function
    entries += [_entry(x.file, x.line, x.function or "<module>") for x in stack]
    result: TracebackType | None = None
    for frame, lasti, lineno in reversed(entries):
        result = TracebackType(result, frame, lasti, lineno)
    return result


def _fail() -> None:
    raise LookupError


def _entry(file: str, line: int, function: str) -> Entry:
    """Return a traceback entry for a line whose frame no longer exists.

    An entry needs a frame, so that a dummy function of this name in this file is run.
    It has no column positions: tracebacks show the whole line.
    """
    code = _fail.__code__.replace(
        co_filename=file,
        co_name=function,
        co_qualname=function,
        co_firstlineno=line,
        co_linetable=b"",
    )
    try:
        FunctionType(code, {"__name__": function})()
    except LookupError as error:
        *_, last = frames_of(error.__traceback__)
        return last._replace(lasti=-1, lineno=line)
    raise AssertionError


def stack_above(frame: FrameType) -> Iterator[FrameType]:
    """Yield the callers of a frame, the innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back
