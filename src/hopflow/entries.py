"""Entries: the public functions, which process errors on their way to the user.

The traceback of an error that leaves the outermost entry shows the user's frames only
(see `config.traceback`). An error that hopflow did not raise on purpose, such as a
`KeyError` in its frames, is a defect: it becomes an `InternalError`, with a script that
reproduces the call. Errors of the user's functions pass unchanged.

    entry         makes a function an entry
    mark_entry    declares an entry that calls `process_error` itself
    blames_user   declares that errors raised in a function are the user's
"""

import ast
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, TypeVar

from hopflow.config import config
from hopflow.errors import HopflowError, InternalError
from hopflow.tracebacks import (
    Entry,
    frames_of,
    is_library_file,
    is_own_file,
    shortened,
    stack_above,
)

_F = TypeVar("_F", bound=Callable[..., Any])

_codes: set[CodeType] = set()
"""The code of all entries, by which their frames are known."""


class _Slots:
    """Functions that a higher layer assigns.

    program   (callee, args, kwargs, error) -> the text of a script that reproduces the
              call
    """

    program: Callable[[Any, tuple[Any, ...], dict[str, Any], InternalError], str]


slots: Final = _Slots()


class _State(threading.local):
    """Whether this thread is writing a script: its own errors get none."""

    is_writing = False


_state: Final = _State()


def mark_entry(f: _F) -> _F:
    """Mark an entry that calls `process_error` itself, in a `try`: a wrapper would take
    too much time for a function that is called as often."""
    _codes.add(f.__code__)
    return f


def entry(f: _F) -> _F:
    """Wrap `f` so that its errors are processed by `process_error`."""

    @mark_entry
    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            process_error(error, call, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def entries(cls: type, *names: str) -> None:
    """Replace methods and properties of a class by entries."""
    for name in names:
        value = vars(cls)[name]
        if isinstance(value, property):
            assert value.fget is not None
            setattr(cls, name, property(entry(value.fget), doc=value.__doc__))
        else:
            setattr(cls, name, entry(value))


def process_error(
    error: Exception, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Process an error that leaves an entry: shorten its traceback, or report a defect.

    Args:
        callee, args, kwargs: The call that failed.

    Raises:
        InternalError: the error is a defect of hopflow.
    """
    caller = sys._getframe(1)
    is_outermost = all(frame.f_code not in _codes for frame in stack_above(caller))
    if is_internal(error, caller):
        internal = InternalError(
            error, _place_of(error, caller), _name_of(callee, args)
        )
        if is_outermost:
            _write_program(internal, callee, args, kwargs)
        raise internal from error
    if not is_outermost:
        return
    if isinstance(error, InternalError) and not error.program:
        _write_program(error, callee, args, kwargs)
    if config.traceback == "user":
        _shorten(error)


def _shorten(error: BaseException) -> None:
    """Shorten the traceback of an error, and of those that led to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, InternalError):  # its cause stays whole, for the report
            current.__traceback__ = shortened(current.__traceback__)
            return
        stack = current.stack if isinstance(current, HopflowError) else ()
        current.__traceback__ = shortened(current.__traceback__, stack)
        if isinstance(current, HopflowError):
            current.stack = ()  # the traceback shows it now
        if current.__suppress_context__:
            current = current.__cause__
            continue
        context = current.__context__
        if context is not None and not _has_user_frame(context):
            current.__context__ = None  # hopflow's own error is of no use
        current = current.__context__


def _has_user_frame(error: BaseException) -> bool:
    files = (e.frame.f_code.co_filename for e in frames_of(error.__traceback__))
    return any(not is_own_file(f) and not is_library_file(f) for f in files)


# --- classification: the user's error or a defect -------------------------------------

# Errors of the machine, the installation or the user's settings, wherever they occur.
# (KeyboardInterrupt is no `Exception`.)
_OUTSIDE: Final = (MemoryError, OSError, ImportError, Warning)
_MANY: Final = 20  # calls of one function on a stack: it recurses


def is_internal(error: Exception, reached: FrameType) -> bool:
    """Return True if an error is a defect of hopflow, not raised on purpose.

    Args:
        reached: The frame that the error has reached.
    """
    if isinstance(error, (HopflowError, *_OUTSIDE)):
        return False
    frames = list(frames_of(error.__traceback__))
    if isinstance(error, RecursionError):
        above = (frame.f_code for frame in stack_above(reached))
        return not _recurses(chain(above, (e.frame.f_code for e in frames)))
    # The innermost frame that is not a library's says whose error it is.
    for frame_entry in reversed(frames):
        code = frame_entry.frame.f_code
        if code in _user_error_codes:
            return False
        if is_own_file(code.co_filename):
            return not (
                _refused_by_entry(error, frame_entry) or _calls_user(frame_entry)
            )
        if not is_library_file(code.co_filename):
            return False
    return False


_user_error_codes: set[CodeType] = set()
"""The code of the functions that `blames_user` marks."""


def blames_user(f: _F) -> _F:
    """Mark a function in whose frame errors are the user's: it runs the user's `assert`
    statements, or calls the user's function with the user's arguments."""
    _user_error_codes.add(f.__code__)
    return f


def _recurses(codes: Iterator[CodeType]) -> bool:
    """Whether a user's function recurses, possibly through hopflow."""
    counts: dict[CodeType, int] = {}
    for code in codes:
        if not is_own_file(code.co_filename):
            counts[code] = counts.get(code, 0) + 1
    return max(counts.values(), default=0) > _MANY


def _refused_by_entry(error: Exception, frame_entry: Entry) -> bool:
    """Whether a public function was called with arguments it does not take."""
    return (
        isinstance(error, TypeError)
        and frame_entry.frame.f_code in _codes
        and _is_refusal(error)
    )


def _is_refusal(error: TypeError) -> bool:
    """Whether Python's message says that a function does not take the arguments."""
    name, bracket, rest = str(error).partition("() ")
    return bool(bracket and " " not in name) and rest.startswith(
        ("takes", "missing", "got")
    )


def _calls_user(frame_entry: Entry) -> bool:
    """Whether a frame failed while it called a user's function that has no frame: a
    builtin, or a function that does not take the arguments."""
    target = _target_of_call(frame_entry)
    called = None if target is None else _value_of(target, frame_entry.frame.f_locals)
    if called is None:
        return False
    if isinstance(called, MethodType):
        called = called.__func__
    if isinstance(called, FunctionType):
        file = called.__code__.co_filename
        return not is_own_file(file) and not is_library_file(file)
    module = getattr(called, "__module__", None) or ""  # a builtin's, a class's
    return _is_function_name(target) and not module.startswith("hopflow")


def _target_of_call(frame_entry: Entry) -> ast.expr | None:
    """Return the expression that a frame calls; None: it is at no call, or its source
    is unavailable."""
    positions = list(frame_entry.frame.f_code.co_positions())
    line, last, start, end = positions[max(frame_entry.lasti, 0) // 2]
    if line is None or last is None or start is None or end is None:
        return None
    lines = linecache.getlines(frame_entry.frame.f_code.co_filename)[line - 1 : last]
    if not lines:
        return None
    encoded = [text.encode() for text in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        call = ast.parse(b"(" + b"".join(encoded) + b")", mode="eval").body
    except SyntaxError:
        return None
    return call.func if isinstance(call, ast.Call) else None


def _value_of(target: ast.expr, names: Any) -> Any:
    """Return the value of a local name or of an attribute of one: `self.rule.where`."""
    match target:
        case ast.Name(name):
            return names.get(name)
        case ast.Attribute(owner, name):
            return getattr(_value_of(owner, names), name, None)
    return None


# The names of parameters that hold users' functions: builtins have no frames.
_FUNCTION_NAMES: Final = ("f", "fn", "fun", "function", "_f")


def _is_function_name(target: ast.expr | None) -> bool:
    match target:
        case ast.Name(name) | ast.Attribute(ast.Name("self"), name):
            return name in _FUNCTION_NAMES
    return False


# --- the report of a defect -----------------------------------------------------------


def _place_of(error: Exception, reached: FrameType) -> str:
    """Return the text for where an error was raised, and for the user's line that led
    there.

    Args:
        reached: The frame that the error has reached.
    """
    frames = list(frames_of(error.__traceback__))
    internal = [e for e in frames if is_own_file(e.frame.f_code.co_filename)]
    users = (
        (e.frame.f_code, e.lineno)
        for e in reversed(frames)
        if _is_users(e.frame.f_code)
    )
    above = (
        (f.f_code, f.f_lineno) for f in stack_above(reached) if _is_users(f.f_code)
    )
    where = ""
    if internal:
        code, lineno = internal[-1].frame.f_code, internal[-1].lineno
        where = f" at {_short(code.co_filename)}:{lineno}, in `{code.co_name}`"
    line = next(users, None) or next(above, None)
    if line is not None:
        code, lineno = line
        text = linecache.getline(code.co_filename, lineno).strip()
        where += f",\nwhile your program was at {_short(code.co_filename)}:{lineno}"
        where += f":  {text}" if text else ""
    return where


def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    return not (
        is_own_file(file) or is_library_file(file) or file.startswith("<frozen")
    )


def _short(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def _name_of(callee: Any, args: tuple[Any, ...]) -> str:
    transform = getattr(callee, "transform", None)
    if transform is not None:
        return f"hf.{transform[0]}"
    if type(callee).__module__.startswith("hopflow"):
        return repr(callee)
    name: str = getattr(callee, "__qualname__", None) or type(callee).__name__
    return repr(args[0]) if name.endswith(".__call__") else name


def _write_program(
    error: InternalError, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if _state.is_writing:
        return
    _state.is_writing = True
    try:
        error.program = slots.program(callee, args, kwargs, error)
    except Exception as failure:
        error.program = (
            f"# No program could be written: {type(failure).__name__}: {failure}"
        )
    finally:
        _state.is_writing = False
