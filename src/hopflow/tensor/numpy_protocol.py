"""NumPy's functions on tensors: `np.sin(x)`, `np.sum(x)`, `np.concatenate([x, y])`.

NumPy asks `__array_ufunc__` and `__array_function__` of its arguments. What is one of
our operations is done by ours, eagerly and in a trace. All else is NumPy's own on the
elements, which a traced tensor refuses with an error that names the user's line.
"""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes, pytree
from hopflow.bind import Value, current
from hopflow.errors import ArgumentTypeError, TraceError
from hopflow.ops import (
    creation,
    elementwise,
    indexing,
    joining,
    logic,
    manipulation,
    math,
    matmul,
    reduce,
    searching,
    sorting,
)
from hopflow.ops.convert import astype
from hopflow.symbolic import scalars
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt

__all__ = ["call_function", "call_ufunc"]

Function = Callable[..., Any]


# --- universal functions --------------------------------------------------------------


def _divmod(x: Any, y: Any) -> tuple[Value, Value]:
    return elementwise.floor_divide(x, y), elementwise.remainder(x, y)


_SAME_NAME: Final = """
    add subtract multiply divide floor_divide remainder negative positive sign square
    reciprocal maximum minimum floor ceil trunc copysign nextafter signbit
    isfinite isinf isnan equal not_equal less less_equal greater greater_equal
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
    sin cos tan sinh cosh tanh exp exp2 expm1 log log2 log10 log1p logaddexp sqrt cbrt
    hypot matmul vecdot
"""
_OTHER_NAMES: Final[Mapping[str, Function]] = {
    "absolute": elementwise.abs,
    "fabs": elementwise.abs,
    "power": elementwise.pow,
    "rint": elementwise.round,
    "conjugate": elementwise.conj,
    "invert": elementwise.bitwise_invert,
    "left_shift": elementwise.bitwise_left_shift,
    "right_shift": elementwise.bitwise_right_shift,
    "divmod": _divmod,
    "arcsin": math.asin,
    "arccos": math.acos,
    "arctan": math.atan,
    "arctan2": math.atan2,
    "arcsinh": math.asinh,
    "arccosh": math.acosh,
    "arctanh": math.atanh,
}
_SPECIAL: Final[Mapping[str, Function]] = {
    "erf": math.erf,
    "erfc": math.erfc,
    "erfinv": math.erfinv,
    "gammaln": math.lgamma,
    "psi": math.digamma,
    "expit": math.sigmoid,
}
"""Of `scipy.special`, which is not imported for it."""


def _home(name: str) -> Function:
    for module in (elementwise, math, matmul):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    raise AssertionError(name)


_UFUNCS: Final[Mapping[np.ufunc, Function]] = {
    **{getattr(np, name): _home(name) for name in _SAME_NAME.split()},
    **{getattr(np, name): f for name, f in _OTHER_NAMES.items()},
}
_REDUCTIONS: Final[Mapping[np.ufunc, Function]] = {
    np.add: reduce.sum,
    np.multiply: reduce.prod,
    np.maximum: reduce.max,
    np.minimum: reduce.min,
    np.logical_and: reduce.all,
    np.logical_or: reduce.any,
}
_KNOWN: Final = (
    *(Value, np.ndarray, np.generic, bool, int, float, complex, list, tuple),
    *(SymInt, SymFloat, SymBool),
)


def _operation(ufunc: np.ufunc, method: str) -> Function | None:
    """What we call a universal function; None: it is none of ours."""
    if method == "reduce":
        return _reduction(ufunc)
    if method != "__call__":
        return None
    if ufunc in _UFUNCS:
        return _UFUNCS[ufunc]
    special = _SPECIAL.get(ufunc.__name__)
    return special if special is not None and _is_of_scipy(ufunc) else None


def _is_of_scipy(ufunc: np.ufunc) -> bool:
    module = sys.modules.get("scipy.special")
    return getattr(module, ufunc.__name__, None) is ufunc


def _reduction(ufunc: np.ufunc) -> Function | None:
    found = _REDUCTIONS.get(ufunc)
    if found is None:
        return None

    def reduced(x: Any, axis: Any = 0, dtype: Any = None, **options: Any) -> Value:
        if dtype is not None:
            x = astype(x, dtype, copy=False)
        return found(x, axis=axis, **options)  # type: ignore[no-any-return]

    return reduced


def call_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """What `__array_ufunc__` of a tensor returns.

    Raises:
        ArgumentTypeError: `out` has a tensor that is traced.
        TraceError: the function is none of ours, and a tensor is traced, or
            differentiated.
    """
    if not all(isinstance(x, _KNOWN) for x in inputs):
        return NotImplemented
    outs = options.pop("out", None) or ()
    operation = _operation(ufunc, method)
    kept = {k: v for k, v in options.items() if not _is_default(k, v)}
    if operation is not None and set(kept) <= _OPTIONS[method]:
        dtype = kept.pop("dtype", None) if method == "__call__" else None
        operands = [_operand(x, dtype) for x in inputs]
        found = operation(*operands, **kept)
    else:
        name = f"numpy.{ufunc.__name__}"
        options = {k: _elements(x, name) for k, x in options.items()}
        arrays = [_elements(x, name) for x in inputs]
        if outs and not any(isinstance(out, Value) for out in outs):
            found = getattr(ufunc, method)(*arrays, out=outs, **options)
            _check_constant(name, found, inputs)
            return found
        found = getattr(ufunc, method)(*arrays, **options)
        _check_constant(name, found, inputs)
    return _stored(ufunc, found, outs) if outs else found


def _ufunc_with_number(
    ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """What `__array_ufunc__` of a symbolic number returns: of numbers alone what Python
    computes, where it can, and else what it is of tensors."""
    if method == "__call__" and not options and not any(map(_is_array, inputs)):
        plain = [
            x.item() if isinstance(x, np.generic | np.ndarray) else x for x in inputs
        ]
        if ufunc in _COMPARISONS:  # NumPy would ask for the answer
            return _COMPARISONS[ufunc](*plain)
        with suppress(TypeError):  # Python has no sine
            return ufunc(*[np.array(x, object) for x in plain])
        # Of a Python number NumPy makes an f64.
        inputs = tuple([astype(x, dtypes.float64) for x in plain])
    return call_ufunc(ufunc, method, inputs, options)


_COMPARISONS: Final[Mapping[np.ufunc, Function]] = {
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
}


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray):  # one without axes is a number
        return x.ndim > 0
    return isinstance(x, Value | list | tuple)


scalars.slots.ufunc = _ufunc_with_number


_OPTIONS: Final = {
    "__call__": {"dtype"},
    "reduce": {"axis", "dtype", "keepdims"},
    **dict.fromkeys(("accumulate", "outer", "at", "reduceat"), frozenset[str]()),
}


def _operand(x: Any, dtype: Any) -> Any:
    x = np.asarray(x) if isinstance(x, list | tuple) else x
    return x if dtype is None else astype(x, dtype, copy=False)


def _stored(ufunc: np.ufunc, found: Any, outs: Sequence[Any]) -> Any:
    """The results, written to what `out` names."""
    results = found if isinstance(found, tuple) else (found,)
    stored = []
    for result, out in zip(results, outs, strict=True):
        if isinstance(out, Value):
            out[...] = result
        elif out is not None:
            name = f"numpy.{ufunc.__name__}"
            elements = _elements(result, name)
            _check_constant(name, elements, result)
            np.copyto(out, elements, casting="same_kind")
        stored.append(result if out is None else out)
    return tuple(stored) if isinstance(found, tuple) else stored[0]


# --- other functions ------------------------------------------------------------------


class _Rule(NamedTuple):
    """How a function of NumPy is one of ours.

    call        ours
    parameters  NumPy's names of what it takes, in NumPy's order: the first `positional`
                are passed by position, the rest by name. `theirs=ours` renames one, and
                `-` stands for one that we do not have
    """

    call: Function
    parameters: str
    positional: int = 1

    def bound(self, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The arguments of a call of ours; None: it asks for what ours has not."""
        words = [word.partition("=") for word in self.parameters.split()]
        if len(args) > len(words):
            return None
        given = {w[0]: x for w, x in zip(words, args, strict=False)} | named
        given = {k: x for k, x in given.items() if not _is_default(k, x)}
        ours = {theirs: name or theirs for theirs, _, name in words if theirs != "-"}
        if not given.keys() <= ours.keys():
            return None
        first = [theirs for theirs, _, _ in words[: self.positional]]
        options = {ours[k]: x for k, x in given.items() if k not in first}
        return [given[k] for k in first if k in given], options


def _is_default(name: str, value: Any) -> bool:
    """Whether an argument says no more than its absence does."""
    if value is None:
        return name != "axis"
    return value is _ABSENT or (
        isinstance(value, bool | str) and (name, value) in _DEFAULTS
    )


_ABSENT: Final = getattr(np, "_NoValue", object())
_DEFAULTS: Final = {
    *(("where", True), ("casting", "same_kind"), ("subok", True), ("copy", True)),
    *(("order", "K"), ("order", "C")),
}


def _with_dtype(f: Function) -> Function:
    """A reduction of ours that also takes `dtype`, as NumPy's do."""

    def reduced(x: Any, *, dtype: Any = None, **options: Any) -> Any:
        return f(x if dtype is None else astype(x, dtype, copy=False), **options)

    return reduced


def _round(x: Any, *, decimals: int = 0) -> Value:
    return elementwise.round_to(x, decimals)


def _flat_unless(f: Function) -> Function:
    """A function along an axis that NumPy calls without one for all elements."""

    def along(x: Any, *, axis: Any = None, **options: Any) -> Value:
        if axis is None:
            return f(manipulation.ravel(x), axis=0, **options)  # type: ignore[no-any-return]
        return f(x, axis=axis, **options)  # type: ignore[no-any-return]

    return along


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None and y is None:
        return searching.nonzero(condition)
    return logic.where(condition, _operand(x, None), _operand(y, None))


def _searchsorted(x: Any, values: Any, **options: Any) -> Value:
    return searching.searchsorted(_operand(x, None), _operand(values, None), **options)


def _clip(x: Any, *, low: Any = None, high: Any = None, **bounds: Any) -> Value:
    return elementwise.clip(x, bounds.get("min", low), bounds.get("max", high))


def _dot(x: Any, y: Any) -> Value:
    x, y = (v if isinstance(v, Value) else np.asarray(v) for v in (x, y))
    if not x.ndim or not y.ndim:
        return elementwise.multiply(x, y)  # type: ignore[no-any-return]
    return matmul.tensordot(x, y, axes=((-1,), (0 if y.ndim == 1 else -2,)))


def _outer(x: Any, y: Any) -> Value:
    return matmul.outer(manipulation.ravel(x), manipulation.ravel(y))


def _transpose(x: Any, axes: Any = None) -> Value:
    order = tuple(reversed(range(x.ndim))) if axes is None else axes
    return manipulation.permute_dims(x, order)


def _squeeze(x: Any, *, axis: Any = None) -> Any:
    return x.squeeze(axis)


def _sizes(x: Any, *, axis: Any = None) -> Any:
    return x.size if axis is None else x.shape[axis]


_FUNCTIONS: Final[Mapping[Function, _Rule]] = {
    np.sum: _Rule(reduce.sum, "a axis dtype - keepdims"),
    np.prod: _Rule(reduce.prod, "a axis dtype - keepdims"),
    np.mean: _Rule(_with_dtype(reduce.mean), "a axis dtype - keepdims"),
    np.std: _Rule(
        _with_dtype(reduce.std), "a axis dtype - ddof=correction keepdims correction"
    ),
    np.var: _Rule(
        _with_dtype(reduce.var), "a axis dtype - ddof=correction keepdims correction"
    ),
    np.max: _Rule(reduce.max, "a axis - keepdims"),
    np.min: _Rule(reduce.min, "a axis - keepdims"),
    np.amax: _Rule(reduce.max, "a axis - keepdims"),
    np.amin: _Rule(reduce.min, "a axis - keepdims"),
    np.any: _Rule(reduce.any, "a axis - keepdims"),
    np.all: _Rule(reduce.all, "a axis - keepdims"),
    np.argmax: _Rule(reduce.argmax, "a axis - keepdims"),
    np.argmin: _Rule(reduce.argmin, "a axis - keepdims"),
    np.count_nonzero: _Rule(reduce.count_nonzero, "a axis keepdims"),
    np.cumsum: _Rule(_flat_unless(reduce.cumulative_sum), "a axis dtype"),
    np.cumprod: _Rule(_flat_unless(reduce.cumulative_prod), "a axis dtype"),
    np.diff: _Rule(reduce.diff, "a n axis prepend append"),
    np.concatenate: _Rule(joining.concat, "arrays axis"),
    np.stack: _Rule(joining.stack, "arrays axis"),
    np.roll: _Rule(joining.roll, "a shift axis", 2),
    np.where: _Rule(_where, "condition x y", 3),
    np.clip: _Rule(_clip, "a a_min=low a_max=high - min max"),
    np.isclose: _Rule(elementwise.isclose, "a b rtol atol equal_nan", 2),
    np.nan_to_num: _Rule(elementwise.nan_to_num, "x - nan posinf neginf"),
    np.round: _Rule(_round, "a decimals"),
    np.around: _Rule(_round, "a decimals"),
    np.real: _Rule(elementwise.real, "val"),
    np.imag: _Rule(elementwise.imag, "val"),
    np.copy: _Rule(elementwise.copy, "a"),
    np.reshape: _Rule(manipulation.reshape, "a shape", 2),
    np.ravel: _Rule(manipulation.ravel, "a"),
    np.transpose: _Rule(_transpose, "a axes"),
    np.expand_dims: _Rule(manipulation.expand_dims, "a axis"),
    np.squeeze: _Rule(_squeeze, "a axis"),
    np.moveaxis: _Rule(manipulation.moveaxis, "a source destination", 3),
    np.swapaxes: _Rule(manipulation.swapaxes, "a axis1 axis2", 3),
    np.broadcast_to: _Rule(manipulation.broadcast_to, "array shape", 2),
    np.flip: _Rule(manipulation.flip, "m axis"),
    np.tile: _Rule(manipulation.tile, "A reps", 2),
    np.repeat: _Rule(manipulation.repeat, "a repeats axis", 2),
    np.take: _Rule(indexing.take, "a indices axis", 2),
    np.take_along_axis: _Rule(indexing.take_along_axis, "arr indices axis", 2),
    np.sort: _Rule(sorting.sort, "a axis"),
    np.nonzero: _Rule(searching.nonzero, "a"),
    np.searchsorted: _Rule(_searchsorted, "a v side sorter", 2),
    np.argsort: _Rule(sorting.argsort, "a axis"),
    np.dot: _Rule(_dot, "a b", 2),
    np.outer: _Rule(_outer, "a b", 2),
    np.tensordot: _Rule(matmul.tensordot, "a b axes", 2),
    np.tril: _Rule(creation.tril, "m k"),
    np.triu: _Rule(creation.triu, "m k"),
    np.zeros_like: _Rule(creation.zeros_like, "a dtype"),
    np.ones_like: _Rule(creation.ones_like, "a dtype"),
    np.empty_like: _Rule(creation.empty_like, "prototype dtype"),
    np.full_like: _Rule(creation.full_like, "a fill_value dtype", 2),
    np.shape: _Rule(lambda x: x.shape, "a"),
    np.ndim: _Rule(lambda x: x.ndim, "a"),
    np.size: _Rule(_sizes, "a axis"),
    np.iscomplexobj: _Rule(lambda _: False, "x"),
    np.isrealobj: _Rule(lambda _: True, "x"),
}


def call_function(
    function: Function, args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """What `__array_function__` of a tensor returns.

    Raises:
        ArgumentTypeError: `out` is a tensor, and the function none of ours.
        TraceError: the function is none of ours, and a tensor is traced, or
            differentiated.
    """
    rule = _FUNCTIONS.get(function)
    bound = None if rule is None else rule.bound(args, named)
    if rule is not None and bound is not None:
        positional, options = bound
        return rule.call(*positional, **options)
    name = f"numpy.{function.__name__}"
    if isinstance(named.get("out"), Value):
        raise ArgumentTypeError(
            f"{name}: `out` must be a NumPy array here, and is a tensor. Write the "
            "result to it: `x[...] = ...`."
        )
    options = {k: _elements(x, name) for k, x in named.items()}
    found = function(*[_elements(x, name) for x in args], **options)
    _check_constant(name, found, (args, list(named.values())))
    return found


def _check_constant(name: str, found: Any, inputs: Any) -> None:
    """Check that what NumPy computed is not to be differentiated.

    Raises:
        TraceError: it has floats, and was computed of a tensor that has a tangent.
    """
    results, operands = (pytree.flatten(tree)[0] for tree in (found, inputs))
    if not any(np.asarray(x).dtype.kind == "f" for x in results):
        return
    interpreter = current()
    for x in operands:
        if isinstance(x, Value) and interpreter.has_tangent(x):
            raise TraceError(
                f"{name}() of a tensor {x.type} that is differentiated: NumPy's result "
                "has no derivative. Compute with `hf` functions, or say that it is a "
                "constant, with `hf.stop_gradient(x)`."
            )


def _elements(x: Any, name: str) -> Any:
    """A tensor as the array of its elements, for the use that `name` says, in sequences
    too; anything else as it is.

    Raises:
        TraceError: it is traced.
    """
    if isinstance(x, list | tuple):
        return type(x)([_elements(item, name) for item in x])
    return x._concrete(name) if isinstance(x, Value) else x
