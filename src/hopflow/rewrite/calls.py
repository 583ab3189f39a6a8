"""Substitution of callees in rewritten code: users' functions are rewritten too, and
builtins support the iterables of operators."""

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
    """Return the function to call for `f`."""
    kind = type(f)
    if kind is FunctionType:
        replacement = _WITH_ROWS.get(id(f.__dict__.get("__wrapped__")))
        return _function(f) if replacement is None else partial(replacement, f)
    if kind is BuiltinFunctionType or kind is type:
        return _REPLACEMENTS.get(id(f), f)
    if kind is MethodType:
        rewritten = _function(f.__func__)
        return f if rewritten is f.__func__ else MethodType(rewritten, f.__self__)
    if kind is partial:
        return partial(called(f.func), *f.args, **f.keywords)
    call = getattr(kind, "__call__", None)  # noqa: B004 - which one, not whether
    if type(call) is FunctionType:
        rewritten = _function(call)
        return f if rewritten is call else MethodType(rewritten, f)
    return f


_memo: WeakKeyDictionary[Any, FunctionType] = WeakKeyDictionary()


def _function(f: Any) -> Any:
    """Return a user's function rewritten, and any other function unchanged."""
    if type(f) is not FunctionType:
        return f
    cached = _memo.get(f)
    if cached is not None:
        return cached
    code = f.__code__
    if is_rewritten(code) or SKIP in f.__dict__:
        return f
    if _is_installed(code.co_filename) and f.__module__ != folds.__name__:
        if is_own_file(code.co_filename) and _takes_functions(f):
            return partial(_with_functions, f)
        return f
    try:
        rewritten = converted(f)
    except ControlFlowError:  # without a source it is not rewritten
        rewritten = f
    _memo[f] = rewritten
    return rewritten


def _takes_functions(f: FunctionType) -> bool:
    """Whether a function of hopflow has functions as arguments to rewrite."""
    kinds = map(str, f.__annotations__.values())
    return any("Callable" in kind for kind in kinds) and f.__name__ not in _AT_RUN_TIME


_AT_RUN_TIME: Final = ("callback", "custom_jvp", "custom_vjp", "jit")
"""Functions that call their arguments with values, or compare them by identity."""


def _with_functions(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator with the user's functions rewritten."""
    kinds = (FunctionType, MethodType)
    args = tuple([called(x) if type(x) in kinds else x for x in args])
    kwargs = {n: called(x) if type(x) in kinds else x for n, x in kwargs.items()}
    return f(*args, **kwargs)


_installed: dict[str, bool] = {}


def _is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library or an installed package."""
    is_library = _installed.get(file)
    if is_library is None:
        path = Path(file)
        parts = {"site-packages", "dist-packages"}
        is_library = is_own_file(file) or not parts.isdisjoint(path.parts)
        is_library = is_library or any(
            path.is_relative_to(place) for place in _STANDARD
        )
        _installed[file] = is_library
    return is_library


_STANDARD: Final = {
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")
}


# --- builtin functions ----------------------------------------------------------------


def list_of(
    iterable: Any, python: Callable[[Any], Any], looped: Callable[..., Any]
) -> Any:
    """Evaluate a list comprehension.

    Args:
        python: The comprehension, as a function of the items.
        looped: The same as a loop.
    """
    return python(iterable) if items_of(iterable) is None else looped(iterable)


def consumed(
    f: Any,
    kind: str,
    iterable: Any,
    python: Callable[[Any], Any],
    looped: Callable[..., Any],
    *rest: Any,
) -> Any:
    """Evaluate `f(generator, *rest)`.

    Args:
        kind: The builtin that `looped` implements.
        python: The generator expression, as a function of the items.
        looped: A loop over the items that returns the result of the builtin `kind`.
    """
    if items_of(iterable) is not None:
        if kind != "list" and f is getattr(builtins, kind):
            return looped(iterable, *rest)
        takes_rows = id(getattr(f, "__wrapped__", None)) in _WITH_ROWS
        if kind == "list" and (takes_rows or id(f) in _REPLACEMENTS):
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
        result: Any = False
        for value in container:
            result = or_(result, partial(_same, value, item))
        return result
    return item in container


def _same(value: Any, item: Any) -> Any:
    return value is item or value == item


def _list(*args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], Rows) and args[0].tree is not None:
        return Rows(args[0].tree, args[0].weak)
    return list(*args)


def _locals() -> dict[str, Any]:
    """`locals()` of the caller, without generated names."""
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
    """Return a builtin that also supports items for operators."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operator_items = items_of(args[0]) if len(args) == 1 or python is sum else None
        if operator_items is None:
            return python(*args, **kwargs)
        return called(fold)(operator_items, *args[1:], **kwargs)

    return run


_REPLACEMENTS: Final[dict[int, Any]] = {
    id(f): replacement
    for f, replacement in (
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
_WITH_ROWS: Final[dict[int, Any]] = {
    id(stack): _stack,
    id(asarray): _asarray,
    id(concat): _concat,
}
"""Id of a function of hopflow that accepts `Rows` -> its implementation for those."""
