"""How functions that were transformed are pickled, for other processes.

A function that a module has under a name is pickled by that name, as Python's own
functions are. Any other, one of `__main__` too, is pickled by value: by cloudpickle,
where the pickler is none that does so itself. Nothing that was compiled is sent.
"""

import functools
import importlib
import sys
from types import FunctionType
from typing import Any

from hopflow.errors import PicklingError

__all__ = ["portable", "reference"]


def reference(thing: Any) -> str | None:
    """The name by which another process finds it in its module; None: it has none."""
    module, name = (
        getattr(thing, "__module__", None),
        getattr(thing, "__qualname__", None),
    )
    if name is None or (module == "__main__" and _cloudpickle() is not None):
        return None  # a worker may have another main module
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is thing else None


def portable(thing: Any) -> Any:
    """What any pickler can write of a function, in its place; of all else itself."""
    if type(thing) is functools.partial:
        keywords = {key: portable(value) for key, value in thing.keywords.items()}
        args = map(portable, thing.args)
        return functools.partial(portable(thing.func), *args, **keywords)
    if not isinstance(thing, FunctionType) or reference(thing) is not None:
        return thing
    return thing if _is_by_value() else _ByValue(thing)


class _ByValue:
    """A function that cloudpickle writes; it can be called, as a `partial` demands."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """
        Raises:
            PicklingError: there is no cloudpickle, or it cannot write the function.
        """
        cloudpickle, name = _cloudpickle(), self._function.__qualname__
        if cloudpickle is None:
            raise PicklingError(
                f"`{name}` has no name in a module, and is pickled by value, for which "
                "cloudpickle is missing. Install it (`pip install cloudpickle`), or "
                "define the function at the top of a module."
            )
        try:
            written = cloudpickle.dumps(self._function)
        except Exception as error:  # of whatever the function holds
            raise PicklingError(
                f"`{name}` has no name in a module, and cannot be pickled by value: "
                f"{error}. Pass what cannot be pickled as an argument, or define the "
                "function at the top of a module."
            ) from error
        return cloudpickle.loads, (written,)


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def _is_by_value() -> bool:
    """Whether the pickler that asks writes functions by value: cloudpickle, or a copy
    that a library brings. It keeps together what a function shares with the rest."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "cloudpickle" in frame.f_globals.get("__name__", "")


_OWN = (__name__, "hopflow.jit")
