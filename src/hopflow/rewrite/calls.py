"""What rewritten code calls instead of what the user names: helpers are rewritten too,
and built-in functions know what operators run over."""

import builtins
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from hopflow.bind import Value
from hopflow.errors import ControlFlowError
from hopflow.ops.elementwise import equal
from hopflow.ops.joining import concat, stack
from hopflow.ops.manipulation import moveaxis, reshape
from hopflow.ops.reduce import any as any_of
from hopflow.rewrite import folds, items
from hopflow.rewrite.convert import SKIP, converted, is_rewritten
from hopflow.rewrite.items import Items, items_of
from hopflow.rewrite.rows import Rows
from hopflow.rewrite.values import or_
from hopflow.symbolic.size import SymInt
from hopflow.tensor.convert import asarray
from hopflow.tracebacks import is_own_file


def called(f: Any) -> Any:
    """What is called for `f`."""
    kind = type(f)
    if kind is FunctionType:
        by = _OF_ROWS.get(id(f.__dict__.get("__wrapped__")))
        return _function(f) if by is None else partial(by, f)
    if kind is BuiltinFunctionType or kind is type:
        return _REPLACED.get(id(f), f)
    if kind is MethodType:
        made = _function(f.__func__)
        return f if made is f.__func__ else MethodType(made, f.__self__)
    if kind is partial:
        return partial(called(f.func), *f.args, **f.keywords)
    call = getattr(kind, "__call__", None)  # noqa: B004 - which one, not whether
    if type(call) is FunctionType:
        made = _function(call)
        return f if made is call else MethodType(made, f)
    return f


_made: WeakKeyDictionary[Any, FunctionType] = WeakKeyDictionary()


def _function(f: Any) -> Any:
    """A user's function, rewritten; others as they are."""
    if type(f) is not FunctionType:
        return f
    known = _made.get(f)
    if known is not None:
        return known
    code = f.__code__
    if is_rewritten(code) or SKIP in f.__dict__:
        return f
    if _is_installed(code.co_filename) and f.__module__ != folds.__name__:
        if is_own_file(code.co_filename) and _takes_functions(f):
            return partial(_with_functions, f)
        return f
    try:
        made = converted(f)
    except ControlFlowError:  # it has no source: it stays as it is
        made = f
    _made[f] = made
    return made


def _takes_functions(f: FunctionType) -> bool:
    kinds = map(str, f.__annotations__.values())
    return any("Callable" in kind for kind in kinds) and f.__name__ not in _AT_RUN_TIME


_AT_RUN_TIME: Final = ("callback", "custom_jvp", "custom_vjp", "jit")
"""Functions that call others with values, or keep them by identity."""


def _with_functions(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator, with functions of the user's that are rewritten too."""
    kinds = (FunctionType, MethodType)
    args = tuple([called(x) if type(x) in kinds else x for x in args])
    kwargs = {n: called(x) if type(x) in kinds else x for n, x in kwargs.items()}
    return f(*args, **kwargs)


_installed: dict[str, bool] = {}


def _is_installed(file: str) -> bool:
    """Whether code is of a library: of Python's own, or one that was installed."""
    known = _installed.get(file)
    if known is None:
        path = Path(file)
        parts = {"site-packages", "dist-packages"}
        known = is_own_file(file) or not parts.isdisjoint(path.parts)
        known = known or any(path.is_relative_to(place) for place in _STANDARD)
        _installed[file] = known
    return known


_STANDARD: Final = {
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")
}


# --- built-in functions ---------------------------------------------------------------


def list_of(
    iterable: Any, python: Callable[[Any], Any], looped: Callable[..., Any]
) -> Any:
    """A list comprehension over items; `looped` has it as a loop."""
    return python(iterable) if items_of(iterable) is None else looped(iterable)


def consumed(
    f: Any,
    kind: str,
    iterable: Any,
    python: Callable[[Any], Any],
    looped: Callable[..., Any],
    *rest: Any,
) -> Any:
    """`f(generator, *rest)`; `looped` is what `f` does with the items if it is the
    built-in function of the name `kind`, else a list of them."""
    if items_of(iterable) is not None:
        if kind != "list" and f is getattr(builtins, kind):
            return looped(iterable, *rest)
        ours = id(getattr(f, "__wrapped__", None)) in _OF_ROWS
        if kind == "list" and (ours or id(f) in _REPLACED):
            return called(f)(looped(iterable), *rest)
    return called(f)(python(iterable), *rest)


def contains(item: Any, container: Any) -> Any:
    """`item in container`."""
    if isinstance(container, Value):
        return any_of(equal(container, item))
    if isinstance(container, Rows) or (
        isinstance(container, list | tuple | set | frozenset | range)
        and any(isinstance(x, Value | SymInt) for x in (item, *container))
    ):
        found: Any = False
        for value in container:
            found = or_(found, partial(_same, value, item))
        return found
    return item in container


def _same(value: Any, item: Any) -> Any:
    return value is item or value == item


def _list(*args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], Rows) and args[0].tree is not None:
        return Rows(args[0].tree, args[0].weak)
    return list(*args)


def _locals() -> dict[str, Any]:
    """The names of the function that calls, without those that were made."""
    names = sys._getframe(1).f_locals
    return {n: v for n, v in names.items() if not n.startswith("hopflow_")}


def _len(value: Any) -> Any:
    if isinstance(value, Value) and value.type.shape:
        return value.type.shape[0]
    return value.length if isinstance(value, Rows | Items) else len(value)


def _stack(f: Any, arrays: Any, /, *, axis: Any = 0) -> Any:
    if isinstance(arrays, Rows) and isinstance(arrays.tree, Value):
        return moveaxis(arrays.tree, 0, axis)
    return f(arrays, axis=axis)


def _asarray(f: Any, value: Any, /, **options: Any) -> Any:
    if isinstance(value, Rows) and isinstance(value.tree, Value):
        value = value.tree
    return f(value, **options)


def _concat(f: Any, arrays: Any, /, *, axis: Any = 0) -> Any:
    if isinstance(arrays, Rows) and isinstance(arrays.tree, Value) and axis == 0:
        tree = arrays.tree
        if tree.type.ndim > 1:
            n, m, *rest = tree.shape
            return reshape(tree, (n * m, *rest))
    return f(arrays, axis=axis)


def _folding(python: Callable[..., Any], fold: Callable[..., Any]) -> Any:
    """A built-in function of items, which may be those of a tensor."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = items_of(args[0]) if len(args) == 1 or python is sum else None
        if found is None:
            return python(*args, **kwargs)
        return called(fold)(found, *args[1:], **kwargs)

    return run


_REPLACED: Final[dict[int, Any]] = {
    id(f): by
    for f, by in (
        (range, items.range_),
        (enumerate, items.enumerated),
        (zip, items.zipped),
        (reversed, items.reversed_),
        (map, items.mapped),
        (list, _list),
        (len, _len),
        (locals, _locals),
        (sum, _folding(sum, folds.sum_)),
        (any, _folding(any, folds.any_)),
        (all, _folding(all, folds.all_)),
        (min, _folding(min, folds.min_)),
        (max, _folding(max, folds.max_)),
    )
}
_OF_ROWS: Final[dict[int, Any]] = {
    id(stack): _stack,
    id(asarray): _asarray,
    id(concat): _concat,
}
"""Functions of ours, by what is public of them, that take lists of rows whole."""
