"""How functions that were transformed are pickled, for other processes.

A function that a module has under a name is pickled by that name, as Python's own
functions are. Any other, one of `__main__` too, is pickled by value: by cloudpickle,
where the pickler is none that does so itself. Nothing that was compiled is sent.
"""

import copy
import functools
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Self

from hopflow.errors import PicklingError


class Transformed(ABC):
    """A callable that stands in the place of a function: it is pickled by the name
    that a module has for it, and else as what it is made of; copied as functions are;
    and bound as methods are."""

    def __init__(self, f: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f)

    @abstractmethod
    def remade(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes such a callable, and its arguments, of which the first is the
        function."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, or what was made of it."""

    def set_later(self) -> dict[str, Any]:
        """The attributes that it was given after it was made: they may lead to it."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:  # what was compiled is not sent
        make, arguments = self.remade()
        made = make, tuple(map(portable, arguments))
        return reference(self) or (*made, portable(self.set_later()))

    def __copy__(self) -> Self:
        return self  # as of Python's own functions

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, (f, *options) = self.remade()
        copied = copy.deepcopy(f, memo)  # another one if it is a method of an object
        if copied is f:
            return self
        memo[id(self)] = made = make(copied, *options)
        vars(made).update(copy.deepcopy(self.set_later(), memo))
        return made

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # A bound method hands on attributes: `model.step.graph`.
        return self if instance is None else MethodType(self, instance)


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
    """What any pickler can write of a function, in its place; of all else itself, of
    a dict of options with its functions replaced so."""
    if type(thing) is functools.partial:
        keywords = {key: portable(value) for key, value in thing.keywords.items()}
        args = map(portable, thing.args)
        return functools.partial(portable(thing.func), *args, **keywords)
    if type(thing) is dict:
        return {key: portable(value) for key, value in thing.items()}
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


_OWN = (__name__,)
