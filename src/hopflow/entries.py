"""What stands between users and hopflow: every public function is an entry.

An error that leaves the outermost entry has a traceback of the user's frames alone
(see `config.traceback`). One that nobody raised on purpose, such as a `KeyError` in
hopflow's own frames, becomes an `InternalError`. What the user's functions raise passes
as it is.
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


class _Slots:
    """What a layer above fills in.

    program   writes a script that repeats a call: callee, args, kwargs, the error ->
              its text
    """

    program: Callable[[Any, tuple[Any, ...], dict[str, Any], InternalError], str]


slots: Final = _Slots()


class _State(threading.local):
    """Whether a script is being written: nothing is reported meanwhile."""

    is_writing = False


_state: Final = _State()


def is_entry(f: _F) -> _F:
    """Mark a function that calls `surface` itself, being called too often for a
    wrapper: a `try` costs nothing."""
    _codes.add(f.__code__)
    return f


def entry(f: _F) -> _F:
    """`f` as users call it."""

    @is_entry
    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            surface(error, call, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def entries(cls: type, *names: str) -> None:
    """Make entries of methods and properties of a class."""
    for name in names:
        value = vars(cls)[name]
        if isinstance(value, property):
            assert value.fget is not None
            setattr(cls, name, property(entry(value.fget), doc=value.__doc__))
        else:
            setattr(cls, name, entry(value))


def surface(
    error: Exception, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make an error that leaves an entry what its user is to see.

    Args:
        callee, args, kwargs: The call that failed.

    Raises:
        InternalError: the error is a defect of hopflow.
    """
    here = sys._getframe(1)
    is_outermost = all(frame.f_code not in _codes for frame in stack_above(here))
    if is_internal(error, here):
        internal = InternalError(error, _place_of(error, here), _name_of(callee, args))
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
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, InternalError):  # whose cause is for its report
            found.__traceback__ = shortened(found.__traceback__)
            return
        stack = found.stack if isinstance(found, HopflowError) else ()
        found.__traceback__ = shortened(found.__traceback__, stack)
        if isinstance(found, HopflowError):
            found.stack = ()  # it is in the traceback now
        if found.__suppress_context__:
            found = found.__cause__
            continue
        before = found.__context__
        if before is not None and not _has_user_frame(before):
            found.__context__ = None  # which is nothing of the user's
        found = found.__context__


def _has_user_frame(error: BaseException) -> bool:
    files = (e.frame.f_code.co_filename for e in frames_of(error.__traceback__))
    return any(not is_own_file(f) and not is_library_file(f) for f in files)


# --- whose error it is ----------------------------------------------------------------

# What says something of the machine, the installation or the user's settings, whoever
# meets it. (Ctrl-C and its like are no `Exception`.)
_OUTSIDE: Final = (MemoryError, OSError, ImportError, Warning)
_MANY: Final = 20


def is_internal(error: Exception, here: FrameType) -> bool:
    """Return True if an error is a defect of hopflow: nobody raised it on purpose.

    Args:
        here: The frame that it has reached.
    """
    if isinstance(error, (HopflowError, *_OUTSIDE)):
        return False
    entries_ = list(frames_of(error.__traceback__))
    if isinstance(error, RecursionError):
        above = (frame.f_code for frame in stack_above(here))
        return not _recurses(chain(above, (e.frame.f_code for e in entries_)))
    for found in reversed(entries_):
        code = found.frame.f_code
        if code in _speaking:
            return False
        if is_own_file(code.co_filename):
            return not (_refused_by_entry(error, found) or _calls_user(found))
        if not is_library_file(code.co_filename):
            return False
    return False


_speaking: set[CodeType] = set()


def speaks_for_user(f: _F) -> _F:
    """Mark a function whose own errors are the user's: of an `assert` that it runs, or
    of a call that passes on the arguments which it was given."""
    _speaking.add(f.__code__)
    return f


def _recurses(codes: Iterator[CodeType]) -> bool:
    """Whether a function of the user's calls itself, by way of hopflow or not."""
    counts: dict[CodeType, int] = {}
    for code in codes:
        if not is_own_file(code.co_filename):
            counts[code] = counts.get(code, 0) + 1
    return max(counts.values(), default=0) > _MANY


def _refused_by_entry(error: Exception, found: Entry) -> bool:
    """Whether a public function was called with arguments that it does not have."""
    return (
        isinstance(error, TypeError)
        and found.frame.f_code in _codes
        and _is_refusal(error)
    )


def _is_refusal(error: TypeError) -> bool:
    """Whether Python says that a function does not take the arguments."""
    name, bracket, rest = str(error).partition("() ")
    return bool(bracket and " " not in name) and rest.startswith(
        ("takes", "missing", "got")
    )


def _calls_user(found: Entry) -> bool:
    """Whether a frame has failed in a call of what the user gave: a builtin, or a
    function that does not take the arguments."""
    target = _target_of_call(found)
    called = None if target is None else _value_of(target, found.frame.f_locals)
    if called is None:
        return False
    if isinstance(called, MethodType):
        called = called.__func__
    if isinstance(called, FunctionType):
        file = called.__code__.co_filename
        return not is_own_file(file) and not is_library_file(file)
    module = getattr(called, "__module__", None) or ""  # a builtin's, a class's
    return _is_given(target) and not module.startswith("hopflow")


def _target_of_call(found: Entry) -> ast.expr | None:
    """What a frame calls, as its source has it; None: it calls nothing, or its source
    is not known."""
    positions = list(found.frame.f_code.co_positions())
    line, last, start, end = positions[max(found.lasti, 0) // 2]
    if line is None or last is None or start is None or end is None:
        return None
    lines = linecache.getlines(found.frame.f_code.co_filename)[line - 1 : last]
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
    """The value of a local name or an attribute of one: `f`, `self.rule.where`."""
    match target:
        case ast.Name(name):
            return names.get(name)
        case ast.Attribute(owner, name):
            return getattr(_value_of(owner, names), name, None)
    return None


# The names by which what users give is called: builtins have no frames of their own.
_GIVEN: Final = ("f", "fn", "fun", "function", "_f")


def _is_given(target: ast.expr | None) -> bool:
    match target:
        case ast.Name(name) | ast.Attribute(ast.Name("self"), name):
            return name in _GIVEN
    return False


# --- what is said of a defect ---------------------------------------------------------


def _place_of(error: Exception, here: FrameType) -> str:
    """Where an error was raised that has reached a frame, and the user's line that led
    there."""
    found = list(frames_of(error.__traceback__))
    own = [e for e in found if is_own_file(e.frame.f_code.co_filename)]
    users = (
        (e.frame.f_code, e.lineno) for e in reversed(found) if _is_users(e.frame.f_code)
    )
    above = ((f.f_code, f.f_lineno) for f in stack_above(here) if _is_users(f.f_code))
    where = ""
    if own:
        code, lineno = own[-1].frame.f_code, own[-1].lineno
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
    made = getattr(callee, "made", None)
    if made is not None:
        return f"hf.{made[0]}"
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
    except Exception as why:
        error.program = f"# No program could be written: {type(why).__name__}: {why}"
    finally:
        _state.is_writing = False
