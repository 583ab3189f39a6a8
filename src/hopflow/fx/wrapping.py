"""`wrap`: functions that a symbolic trace does not look into."""

import builtins
import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from hopflow.bind import recordable, recorded
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.trace.source import user_frame

# The names that `wrap` was given, each with the globals of its module.
_names: Final[list[tuple[dict[str, Any], str]]] = []
# While traces run: what those names were before, or that they were none.
_replaced: Final[list[tuple[dict[str, Any], str, Any]]] = []
_ABSENT: Final = object()


@entry
def wrap(f: Callable[..., Any] | str) -> Any:
    """`f`, which a symbolic trace does not look into: its calls are nodes.

        length = hf.wrap(len)

        @hf.wrap
        def lookup(table, ids): ...

        hf.wrap("len")  # at the top level of a module: what it calls by this name

    Args:
        f: A function; or the name of one, of the module that calls `wrap` or of
            Python's own. Calls by that name in the module are nodes then.

    Raises:
        ArgumentTypeError: `f` is no function.
        ArgumentValueError: `f` is the name of no function, or `wrap` is called with a
            name within a function.
    """
    if isinstance(f, str):
        frame = user_frame()
        assert frame is not None  # which has called
        return _wrap_name(f, frame)
    if not callable(f) or isinstance(f, type):
        raise ArgumentTypeError(
            f"wrap: expected a function, and found {f!r}. Give the function itself, as "
            "in `length = hf.wrap(len)`, and call what is returned."
        )
    return recordable(f)


def _wrap_name(name: str, frame: FrameType) -> str:
    """Have calls by a name in the module of `frame` recorded."""
    space = frame.f_globals
    if frame.f_code.co_name != "<module>":
        raise ArgumentValueError(
            f"wrap: {name!r} is a name, which `wrap` takes at the top level of a "
            f"module only, and not in `{frame.f_code.co_name}`. Give the function."
        )
    if not callable(_found(space, name)):
        raise ArgumentValueError(
            f"wrap: {name!r} is no function of the module `{space.get('__name__')}`, "
            "nor of Python's own. Call `wrap` after its definition."
        )
    if not any(known is space and other == name for known, other in _names):
        _names.append((space, name))
    return name


def _found(space: dict[str, Any], name: str) -> Any:
    return space.get(name, vars(builtins).get(name))


# --- while traces run -----------------------------------------------------------------


def replace_names() -> None:
    """Let the names that `wrap` was given mean functions whose calls are recorded."""
    for space, name in _names:
        f = _found(space, name)
        if callable(f):
            _replaced.append((space, name, space.get(name, _ABSENT)))
            space[name] = _recorded_as(f)


def restore_names() -> None:
    """Let those names mean what they did."""
    while _replaced:
        space, name, before = _replaced.pop()
        if before is _ABSENT:
            space.pop(name, None)
        else:
            space[name] = before


def _recorded_as(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls a symbolic trace records as calls of `f` itself."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = recorded(f, args, kwargs)
        return f(*args, **kwargs) if found is None else found

    return call


def with_recorded(scope: dict[str, Any]) -> dict[str, Any]:
    """The scope of a generated source, for the source to be traced again: calls of what
    was wrapped by name are recorded there too."""
    wrapped = {name: f for space, name in _names if callable(f := _found(space, name))}
    own = [vars(builtins).get(name) for name in wrapped]
    found = {
        name: _recorded_as(f) if any(f is other for other in wrapped.values()) else f
        for name, f in scope.items()
    }
    hidden = {f.__name__: _recorded_as(f) for f in own if callable(f)}
    return {**hidden, **found}
