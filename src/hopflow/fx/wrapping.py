"""`wrap`: functions that a symbolic trace does not trace into."""

import builtins
import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from hopflow.bind import recordable, recorded
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.trace.source import user_frame

# The names passed to `wrap`, each with the globals of its module.
_names: Final[list[tuple[dict[str, Any], str]]] = []
# While traces run: the previous values of those names, or `_ABSENT`.
_replaced: Final[list[tuple[dict[str, Any], str, Any]]] = []
_ABSENT: Final = object()


@entry
def wrap(f: Callable[..., Any] | str) -> Any:
    """Let a symbolic trace record calls of `f` as nodes, instead of tracing into it.

        length = hf.wrap(len)

        @hf.wrap
        def lookup(table, ids): ...

        hf.wrap("len")  # at the top level of a module: its calls by this name

    Args:
        f: A function; or the name of a builtin, or of a function of the module that
            calls `wrap`. Calls by that name in the module are then recorded.

    Returns:
        A function that is recorded, or the name.

    Raises:
        ArgumentTypeError: `f` is no function.
        ArgumentValueError: `f` is the name of no function, or `wrap` is called with a
            name within a function.
    """
    if isinstance(f, str):
        frame = user_frame()
        assert frame is not None  # the caller
        return _wrap_name(f, frame)
    if not callable(f) or isinstance(f, type):
        raise ArgumentTypeError(
            f"wrap: expected a function, and found {f!r}. Give the function itself, as "
            "in `length = hf.wrap(len)`, and call what is returned."
        )
    return recordable(f)


def _wrap_name(name: str, frame: FrameType) -> str:
    """Let calls by a name in the module of `frame` be recorded."""
    space = frame.f_globals
    if frame.f_code.co_name != "<module>":
        raise ArgumentValueError(
            f"wrap: {name!r} is a name, which `wrap` takes at the top level of a "
            f"module only, and not in `{frame.f_code.co_name}`. Give the function."
        )
    if not callable(_lookup(space, name)):
        raise ArgumentValueError(
            f"wrap: {name!r} is no function of the module `{space.get('__name__')}`, "
            "nor of Python's own. Call `wrap` after its definition."
        )
    if not any(module is space and wrapped == name for module, wrapped in _names):
        _names.append((space, name))
    return name


def _lookup(space: dict[str, Any], name: str) -> Any:
    return space.get(name, vars(builtins).get(name))


# --- while traces run -----------------------------------------------------------------


def replace_names() -> None:
    """Bind the names passed to `wrap` to functions whose calls are recorded."""
    for space, name in _names:
        f = _lookup(space, name)
        if callable(f):
            _replaced.append((space, name, space.get(name, _ABSENT)))
            space[name] = _recorded_as(f)


def restore_names() -> None:
    """Restore the values of those names."""
    while _replaced:
        space, name, previous = _replaced.pop()
        if previous is _ABSENT:
            space.pop(name, None)
        else:
            space[name] = previous


def _recorded_as(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls a symbolic trace records as calls of `f`."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        node = recorded(f, args, kwargs)
        return f(*args, **kwargs) if node is None else node

    return call


def with_recorded(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the scope of a generated source in which calls of functions that were
    wrapped by name are recorded too, so that the source can be traced again."""
    wrapped = {name: f for space, name in _names if callable(f := _lookup(space, name))}
    builtin_functions = [vars(builtins).get(name) for name in wrapped]
    recorded_scope = {
        name: _recorded_as(f) if any(f is other for other in wrapped.values()) else f
        for name, f in scope.items()
    }
    hidden = {f.__name__: _recorded_as(f) for f in builtin_functions if callable(f)}
    return {**hidden, **recorded_scope}
