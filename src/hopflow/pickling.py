"""Pickling of transformed functions, for other processes.

A function that its module has under its name is pickled by that name, as Python's own
functions are. Any other, also one of `__main__`, is pickled by value: by cloudpickle,
unless the pickler does so itself. Compiled programs are not pickled.
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
    """A callable made from a function, such as `hf.jit(f)`.

    It is pickled by its name in a module, or else as the function and the options; it
    is copied as functions are, and becomes a bound method in a class.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f)

    @abstractmethod
    def remade(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the constructor of an equal callable and its arguments; the first is
        the function."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformed function."""

    def set_later(self) -> dict[str, Any]:
        """Return the attributes that were set after construction; they may refer back
        to the callable."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:  # without compiled programs
        make, arguments = self.remade()
        construction = make, tuple(map(portable, arguments))
        return reference(self) or (*construction, portable(self.set_later()))

    def __copy__(self) -> Self:
        return self  # like Python's functions

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, (f, *options) = self.remade()
        function = copy.deepcopy(f, memo)  # a method's object is copied
        if function is f:
            return self
        memo[id(self)] = result = make(function, *options)
        vars(result).update(copy.deepcopy(self.set_later(), memo))
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # A bound method forwards attributes: `model.step.graph`.
        return self if instance is None else MethodType(self, instance)


def reference(function: Any) -> str | None:
    """Return the name by which its module has a function; None: it has none."""
    module, name = (
        getattr(function, "__module__", None),
        getattr(function, "__qualname__", None),
    )
    if name is None or (module == "__main__" and _cloudpickle() is not None):
        return None  # a worker may have another main module
    value: Any = sys.modules.get(module or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    return name if value is function else None


def portable(obj: Any) -> Any:
    """Return a value that any pickler can write: functions without a name, also in
    partials and dicts, are replaced by wrappers that are pickled by value."""
    if type(obj) is functools.partial:
        keywords = {key: portable(value) for key, value in obj.keywords.items()}
        args = map(portable, obj.args)
        return functools.partial(portable(obj.func), *args, **keywords)
    if type(obj) is dict:
        return {key: portable(value) for key, value in obj.items()}
    if not isinstance(obj, FunctionType) or reference(obj) is not None:
        return obj
    return obj if _is_by_value() else _ByValue(obj)


class _ByValue:
    """A function that cloudpickle writes; it is callable, as `partial` requires."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function by cloudpickle.

        Raises:
            PicklingError: cloudpickle is not installed, or cannot write the function.
        """
        cloudpickle, name = _cloudpickle(), self._function.__qualname__
        if cloudpickle is None:
            raise PicklingError(
                f"`{name}` has no name in a module, and is pickled by value, for which "
                "cloudpickle is missing. Install it (`pip install cloudpickle`), or "
                "define the function at the top of a module."
            )
        try:
            data = cloudpickle.dumps(self._function)
        except Exception as error:  # of whatever the function holds
            raise PicklingError(
                f"`{name}` has no name in a module, and cannot be pickled by value: "
                f"{error}. Pass what cannot be pickled as an argument, or define the "
                "function at the top of a module."
            ) from error
        return cloudpickle.loads, (data,)


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def _is_by_value() -> bool:
    """Whether the calling pickler itself writes functions by value: it is cloudpickle,
    or a library's copy. Then objects that functions share are pickled once."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "cloudpickle" in frame.f_globals.get("__name__", "")


_OWN = (__name__,)
