"""NumPy's functions on tensors: `np.sin(x)`, `np.sum(x)`, `np.concatenate([x, y])`.

NumPy calls `__array_ufunc__` and `__array_function__` of its arguments. A function with
a counterpart in hopflow calls that, eagerly and in a trace. NumPy computes any other
function on the elements. This is refused for a traced tensor, and for a differentiated
one if the result has floats, which would have no derivative.
"""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes, pytree
from hopflow.bind import Value
from hopflow.errors import ArgumentTypeError
from hopflow.ops import (
    creation,
    elementwise,
    indexing,
    joining,
    linalg,
    logic,
    manipulation,
    math,
    matmul,
    reduce,
    searching,
    sets,
)
from hopflow.ops.convert import astype
from hopflow.ops.opdef import OPERATIONS
from hopflow.symbolic import scalars
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.tensor import numpy_functions as composed
from hopflow.tensor.exported import check_constant

Function = Callable[..., Any]


# --- universal functions --------------------------------------------------------------


_COMPOSED: Final[Mapping[str, Function]] = {
    "floor_divide": elementwise.floor_divide,
    "remainder": elementwise.remainder,
    "power": elementwise.pow,
    "positive": elementwise.positive,
    "square": elementwise.square,
    "reciprocal": elementwise.reciprocal,
    "conjugate": elementwise.conj,
    "logical_and": logic.logical_and,
    "logical_or": logic.logical_or,
    "logical_xor": logic.logical_xor,
    "logical_not": logic.logical_not,
    "logaddexp": math.logaddexp,
    "matmul": matmul.matmul,
    "vecdot": matmul.vecdot,
    "divmod": composed.divmod_,
    "modf": composed.modf,
    "fabs": composed.fabs,
    "fmax": composed.fmax,
    "fmin": composed.fmin,
    "float_power": composed.float_power,
    "logaddexp2": composed.logaddexp2,
    "deg2rad": composed.radians,
    "radians": composed.radians,
    "rad2deg": composed.degrees,
    "degrees": composed.degrees,
}
"""Universal functions that hopflow composes of operations, or of one that depends on
the operands."""
_COMPOSED_SPECIAL: Final[Mapping[str, Function]] = {"psi": math.digamma}
"""The same for `scipy.special`."""


@cache
def special_functions() -> Mapping[str, Function]:
    """Return the counterparts of `scipy.special`'s functions, by name, without
    importing it: the operations whose records name such a reference, and compositions.
    """
    return {**_operations("scipy.special"), **_COMPOSED_SPECIAL}


@cache
def universal_functions() -> Mapping[np.ufunc, Function]:
    """Return the counterparts of NumPy's ufuncs: the operations whose records name such
    a reference, and compositions."""
    counterparts = {**_operations("numpy"), **_COMPOSED}
    pairs = ((getattr(np, name), function) for name, function in counterparts.items())
    return {ufunc: f for ufunc, f in pairs if isinstance(ufunc, np.ufunc)}


def _operations(library: str) -> dict[str, Function]:
    """Return the operations by the names that a library has for them."""
    references = (
        (op, (op.reference.numpy or "").rpartition("."))
        for op in OPERATIONS.values()
        if op.reference
    )
    return {name: op for op, (home, _, name) in references if home == library}


_REDUCTIONS: Final[Mapping[np.ufunc, Function]] = {
    np.add: composed.sum_,
    np.multiply: composed.prod,
    np.maximum: composed.max_,
    np.minimum: composed.min_,
    np.logical_and: composed.all_,
    np.logical_or: composed.any_,
}
_OPERANDS: Final = (
    *(Value, np.ndarray, np.generic, bool, int, float, complex, list, tuple),
    *(SymInt, SymFloat, SymBool),
)


def _operation(ufunc: np.ufunc, method: str) -> Function | None:
    """Return the counterpart of a method of a ufunc; None if there is none."""
    if method == "reduce":
        return _REDUCTIONS.get(ufunc)
    if method != "__call__":
        return None
    counterparts = universal_functions()
    if ufunc in counterparts:
        return counterparts[ufunc]
    special = special_functions().get(ufunc.__name__)
    return special if special is not None and _is_of_scipy(ufunc) else None


def _is_of_scipy(ufunc: np.ufunc) -> bool:
    module = sys.modules.get("scipy.special")
    return getattr(module, ufunc.__name__, None) is ufunc


def call_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Return the result of `__array_ufunc__` of a tensor.

    Raises:
        ArgumentTypeError: `out` has a traced tensor.
        TraceError: the function has no counterpart, and a tensor is traced or
            differentiated.
    """
    if not all(isinstance(x, _OPERANDS) for x in inputs):
        return NotImplemented
    outs = options.pop("out", None) or ()
    operation = _operation(ufunc, method)
    kept = {k: v for k, v in options.items() if not _is_default(k, v)}
    mask = kept.pop("where", True) if outs and method == "__call__" else True
    if operation is not None and set(kept) <= _OPTIONS[method]:
        if method == "reduce":
            kept.setdefault("axis", 0)
            operands = list(inputs)
        else:
            dtype = kept.pop("dtype", None)
            operands = [composed.converted(x, dtype) for x in inputs]
        result = operation(*operands, **kept)
    else:
        name = f"numpy.{ufunc.__name__}" + (
            f".{method}" if method != "__call__" else ""
        )
        if outs and not any(isinstance(out, Value) for out in outs):
            options["out"] = outs
        result = _numpys(name, getattr(ufunc, method), inputs, options)
        if "out" in options:
            return result
        mask = True
    return _stored(ufunc, result, outs, mask) if outs else result


def _ufunc_with_number(
    ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Return the result of `__array_ufunc__` of a symbolic number: of numbers alone the
    one that Python computes if it can, else that of tensors."""
    if method == "__call__" and not options and not any(map(_is_array, inputs)):
        plain = [
            x.item() if isinstance(x, np.generic | np.ndarray) else x for x in inputs
        ]
        if ufunc in _COMPARISONS:  # NumPy would ask for the bool
            return _COMPARISONS[ufunc](*plain)
        # Python's numbers have no sine (TypeError). Range checks may overflow
        # harmlessly.
        with suppress(TypeError), np.errstate(all="ignore"):
            return ufunc(*[np.array(x, object) for x in plain])
        # NumPy converts Python numbers to f64.
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
    if isinstance(x, np.ndarray):  # an array without axes is a number
        return x.ndim > 0
    return isinstance(x, Value | list | tuple)


scalars.slots.ufunc = _ufunc_with_number


_OPTIONS: Final = {
    "__call__": {"dtype"},
    "reduce": {"axis", "dtype", "keepdims", "initial", "where"},
    **dict.fromkeys(("accumulate", "outer", "at", "reduceat"), frozenset[str]()),
}


def _stored(ufunc: np.ufunc, output: Any, outs: Sequence[Any], mask: Any) -> Any:
    """Write the results to `out`, where the mask is true."""
    results = output if isinstance(output, tuple) else (output,)
    name = f"numpy.{ufunc.__name__}"
    stored = []
    for result, out in zip(results, outs, strict=True):
        if isinstance(out, Value):
            out[...] = result if mask is True else logic.where(mask, result, out)
        elif out is not None:
            check_constant(name, (result,))
            elements, where = _elements(result, name), _elements(mask, name)
            np.copyto(out, elements, casting="same_kind", where=where)
        stored.append(result if out is None else out)
    return tuple(stored) if isinstance(output, tuple) else stored[0]


# --- other functions ------------------------------------------------------------------


class _Rule(NamedTuple):
    """How a function of NumPy is called in hopflow.

    call        the counterpart; it returns NotImplemented where NumPy must compute
    parameters  NumPy's parameter names, in NumPy's order: the first `positional` are
                passed by position, the rest by name. `name=counterpart` renames one,
                `-name` is one that the counterpart lacks, and `*` stands for all
                positional arguments
    """

    call: Function
    parameters: str
    positional: int = 1

    def bound(
        self, args: Sequence[Any], named: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """Return the arguments for the counterpart; None if it lacks one of them."""
        words = [word.partition("=") for word in self.parameters.split()]
        arguments = named
        first: Sequence[str] = ()
        if words[0][0] != "*":
            if len(args) > len(words):
                return None
            names = [name.lstrip("-") for name, _, _ in words]
            first, arguments = (
                names[: self.positional],
                {**dict(zip(names, args, strict=False)), **named},
            )
        renamed = {name: new or name for name, _, new in words}
        options = {}
        for name, value in arguments.items():
            if name in first or _is_default(name, value, name in renamed):
                continue
            if name not in renamed:
                return None
            options[renamed[name]] = value
        if words[0][0] == "*":
            return args, options
        count = max([i for i, k in enumerate(first) if k in arguments], default=-1) + 1
        # Omitted arguments and None keep the positions of those that follow.
        values = [arguments.get(k) for k in first[:count]]
        return [None if v is _ABSENT else v for v in values], options


def _is_default(name: str, value: Any, is_ours: bool = False) -> bool:
    """Return True if an argument means the same as its absence.

    is_ours   whether the counterpart has a parameter of this name
    """
    if value is None:
        return name != "axis"
    if value is _ABSENT:
        return True
    is_plain = isinstance(value, bool | str)
    return is_plain and not is_ours and (name, value) in _DEFAULTS


_ABSENT: Final = getattr(np, "_NoValue", object())
_DEFAULTS: Final = {
    *(("where", True), ("casting", "same_kind"), ("subok", True), ("copy", True)),
    *(("order", "K"), ("order", "C"), ("order", "A"), ("sparse", False)),
    # The counterpart is stable, which satisfies each of these.
    *(("kind", k) for k in ("quicksort", "mergesort", "heapsort", "stable")),
    *(("hermitian", False), ("UPLO", "L"), ("returned", False), ("retstep", False)),
}

_TO_SUM: Final = "a axis dtype -out keepdims initial where"
_TO_MAX: Final = "a axis -out keepdims initial where"
_TO_VAR: Final = "a axis dtype -out ddof=correction keepdims -where -mean correction"
_TO_SORT: Final = "a axis -kind -order stable descending"
_NEW: Final = "dtype -order -subok -shape device"
_TO_COMPARE: Final = "a b rtol atol equal_nan"
_CUMULATIVE: Final = "x axis dtype -out include_initial"

# `np.atleast_1d` and its like stay NumPy's: libraries make arrays with them.
_FUNCTIONS: Final[Mapping[Function, _Rule]] = {
    np.sum: _Rule(composed.sum_, _TO_SUM),
    np.prod: _Rule(composed.prod, _TO_SUM),
    np.max: _Rule(composed.max_, _TO_MAX),
    np.min: _Rule(composed.min_, _TO_MAX),
    np.amax: _Rule(composed.max_, _TO_MAX),
    np.amin: _Rule(composed.min_, _TO_MAX),
    np.any: _Rule(composed.any_, "a axis -out keepdims where"),
    np.all: _Rule(composed.all_, "a axis -out keepdims where"),
    np.mean: _Rule(composed.mean, "a axis dtype -out keepdims where"),
    np.average: _Rule(composed.average, "a axis -weights -returned keepdims"),
    np.std: _Rule(composed.with_dtype(reduce.std), _TO_VAR),
    np.var: _Rule(composed.with_dtype(reduce.var), _TO_VAR),
    np.ptp: _Rule(composed.ptp, "a axis -out keepdims"),
    np.argmax: _Rule(reduce.argmax, "a axis -out keepdims"),
    np.argmin: _Rule(reduce.argmin, "a axis -out keepdims"),
    np.count_nonzero: _Rule(reduce.count_nonzero, "a axis keepdims"),
    np.cumsum: _Rule(composed.flat_unless(reduce.cumulative_sum), "a axis dtype -out"),
    np.cumprod: _Rule(
        composed.flat_unless(reduce.cumulative_prod), "a axis dtype -out"
    ),
    np.diff: _Rule(reduce.diff, "a n axis prepend append"),
    np.concatenate: _Rule(composed.concatenate, "arrays axis -out dtype -casting"),
    np.stack: _Rule(composed.stack, "arrays axis -out dtype -casting"),
    np.hstack: _Rule(composed.hstack, "tup dtype -casting"),
    np.vstack: _Rule(composed.vstack, "tup dtype -casting"),
    np.dstack: _Rule(composed.dstack, "tup"),
    np.column_stack: _Rule(composed.column_stack, "tup"),
    np.append: _Rule(composed.append, "arr values axis", 2),
    np.pad: _Rule(composed.pad, "array pad_width mode constant_values", 3),
    np.roll: _Rule(joining.roll, "a shift axis", 2),
    np.where: _Rule(composed.where, "condition x y", 3),
    np.clip: _Rule(composed.clip, "a a_min a_max -out min max", 3),
    np.isclose: _Rule(composed.of_arrays(elementwise.isclose), _TO_COMPARE, 2),
    np.allclose: _Rule(composed.allclose, _TO_COMPARE, 2),
    np.array_equal: _Rule(composed.array_equal, "a1 a2 equal_nan", 2),
    np.nan_to_num: _Rule(elementwise.nan_to_num, "x -copy nan posinf neginf"),
    np.round: _Rule(composed.round_, "a decimals -out"),
    np.around: _Rule(composed.round_, "a decimals -out"),
    np.real: _Rule(elementwise.real, "val"),
    np.imag: _Rule(elementwise.imag, "val"),
    np.copy: _Rule(elementwise.copy, "a -order -subok"),
    np.reshape: _Rule(composed.reshape, "a shape order copy", 2),
    np.ravel: _Rule(composed.ravel, "a order"),
    np.transpose: _Rule(composed.transpose, "a axes"),
    np.expand_dims: _Rule(manipulation.expand_dims, "a axis"),
    np.squeeze: _Rule(composed.squeeze, "a axis"),
    np.moveaxis: _Rule(manipulation.moveaxis, "a source destination", 3),
    np.swapaxes: _Rule(manipulation.swapaxes, "a axis1 axis2", 3),
    np.broadcast_to: _Rule(manipulation.broadcast_to, "array shape -subok", 2),
    np.broadcast_arrays: _Rule(
        composed.tupled(manipulation.broadcast_arrays), "* -subok"
    ),
    np.meshgrid: _Rule(composed.tupled(creation.meshgrid), "* indexing -copy -sparse"),
    np.flip: _Rule(manipulation.flip, "m axis"),
    np.flipud: _Rule(composed.flipped(0), "m"),
    np.fliplr: _Rule(composed.flipped(1), "m"),
    np.tile: _Rule(manipulation.tile, "A reps", 2),
    np.repeat: _Rule(manipulation.repeat, "a repeats axis", 2),
    np.take: _Rule(composed.take, "a indices axis -out mode", 2),
    np.take_along_axis: _Rule(indexing.take_along_axis, "arr indices axis", 2),
    np.sort: _Rule(composed.sort, _TO_SORT),
    np.argsort: _Rule(composed.argsort, _TO_SORT),
    np.searchsorted: _Rule(
        composed.of_arrays(searching.searchsorted), "a v side sorter", 2
    ),
    np.nonzero: _Rule(searching.nonzero, "a"),
    np.argwhere: _Rule(composed.argwhere, "a"),
    np.flatnonzero: _Rule(composed.flatnonzero, "a"),
    np.dot: _Rule(composed.dot, "a b -out", 2),
    np.vdot: _Rule(composed.vdot, "a b", 2),
    np.inner: _Rule(composed.inner, "a b", 2),
    np.outer: _Rule(composed.outer, "a b -out", 2),
    np.tensordot: _Rule(composed.of_arrays(matmul.tensordot), "a b axes", 2),
    np.cross: _Rule(composed.cross, "a b -axisa -axisb -axisc axis", 2),
    np.trace: _Rule(
        composed.of_matrices(linalg.trace), "a offset axis1 axis2 dtype -out"
    ),
    np.diagonal: _Rule(composed.of_matrices(linalg.diagonal), "a offset axis1 axis2"),
    np.diag: _Rule(composed.diag, "v k"),
    np.tril: _Rule(creation.tril, "m k"),
    np.triu: _Rule(creation.triu, "m k"),
    np.zeros_like: _Rule(creation.zeros_like, f"a {_NEW}"),
    np.ones_like: _Rule(creation.ones_like, f"a {_NEW}"),
    np.empty_like: _Rule(creation.empty_like, f"prototype {_NEW}"),
    np.full_like: _Rule(creation.full_like, f"a fill_value {_NEW}", 2),
    np.shape: _Rule(lambda x: x.shape, "a"),
    np.ndim: _Rule(lambda x: x.ndim, "a"),
    np.size: _Rule(composed.sizes, "a axis"),
    np.iscomplexobj: _Rule(lambda _: False, "x"),
    np.isrealobj: _Rule(lambda _: True, "x"),
    np.linalg.norm: _Rule(composed.norm, "x ord axis keepdims"),
    np.linalg.qr: _Rule(composed.qr, "a mode"),
    np.linalg.svd: _Rule(composed.svd, "a full_matrices compute_uv -hermitian"),
    np.linalg.eigh: _Rule(linalg.eigh, "a -UPLO"),
    np.linalg.eigvalsh: _Rule(linalg.eigvalsh, "a -UPLO"),
    np.linalg.pinv: _Rule(linalg.pinv, "a -rcond -hermitian rtol"),
    np.linalg.matrix_rank: _Rule(linalg.matrix_rank, "A -tol -hermitian rtol"),
    np.linalg.cholesky: _Rule(linalg.cholesky, "a upper"),
    np.linalg.det: _Rule(linalg.det, "a"),
    np.linalg.slogdet: _Rule(linalg.slogdet, "a"),
    np.linalg.inv: _Rule(linalg.inv, "a"),
    np.linalg.solve: _Rule(composed.of_arrays(linalg.solve), "a b", 2),
    np.linalg.matrix_power: _Rule(linalg.matrix_power, "a n", 2),
    # The array API functions that NumPy has since version 2.
    **{
        getattr(home, name): _Rule(composed.of_arrays(f), parameters, positional)
        for home, name, f, parameters, positional in (
            (np, "astype", astype, "x dtype copy device", 2),
            (np, "cumulative_sum", reduce.cumulative_sum, _CUMULATIVE, 1),
            (np, "cumulative_prod", reduce.cumulative_prod, _CUMULATIVE, 1),
            (np, "matrix_transpose", matmul.matrix_transpose, "x", 1),
            (np, "unstack", joining.unstack, "x axis", 1),
            (np, "unique_all", sets.unique_all, "x", 1),
            (np, "unique_counts", sets.unique_counts, "x", 1),
            (np, "unique_inverse", sets.unique_inverse, "x", 1),
            (np, "unique_values", sets.unique_values, "x", 1),
            (np.linalg, "matrix_transpose", matmul.matrix_transpose, "x", 1),
            (np.linalg, "matrix_norm", linalg.matrix_norm, "x keepdims ord", 1),
            (np.linalg, "vector_norm", linalg.vector_norm, "x axis keepdims ord", 1),
            (np.linalg, "svdvals", linalg.svdvals, "x", 1),
            (np.linalg, "diagonal", linalg.diagonal, "x offset", 1),
            (np.linalg, "trace", linalg.trace, "x offset dtype", 1),
            (np.linalg, "cross", linalg.cross, "x1 x2 axis", 2),
            (np.linalg, "matmul", matmul.matmul, "x1 x2", 2),
            (np.linalg, "outer", matmul.outer, "x1 x2", 2),
            (np.linalg, "tensordot", matmul.tensordot, "x1 x2 axes", 2),
            (np.linalg, "vecdot", matmul.vecdot, "x1 x2 axis", 2),
        )
        if hasattr(home, name)
    },
}


def call_function(
    function: Function, args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Return the result of `__array_function__` of a tensor.

    Raises:
        ArgumentTypeError: `out` is a tensor, and the function has no counterpart.
        TraceError: the function has no counterpart, and a tensor is traced or
            differentiated.
    """
    rule = _FUNCTIONS.get(function)
    bound = None if rule is None else rule.bound(args, named)
    if rule is not None and bound is not None:
        positional, options = bound
        result = rule.call(*positional, **options)
        if result is not NotImplemented:
            return result
    name = f"{function.__module__}.{function.__name__}"
    if isinstance(named.get("out"), Value):
        raise ArgumentTypeError(
            f"{name}: `out` must be a NumPy array here, and is a tensor. Write the "
            "result to it: `x[...] = ...`."
        )
    return _numpys(name, function, args, named)


def _numpys(
    name: str, function: Function, args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Call a function of NumPy's on the elements of tensors.

    Raises:
        TraceError: a tensor is traced, or is differentiated and the result has floats.
    """
    options = {k: _elements(x, name) for k, x in named.items()}
    result = function(*[_elements(x, name) for x in args], **options)
    results, operands = (pytree.flatten(x)[0] for x in (result, (args, named)))
    if any(np.asarray(x).dtype.kind in "fV" for x in results):  # V: bfloat16
        check_constant(name, operands)
    return result


def _elements(x: Any, name: str) -> Any:
    """Return the elements of a tensor, or of tensors in sequences; others unchanged.
    `name` names the use in messages.

    Raises:
        TraceError: a tensor is traced.
    """
    if isinstance(x, list | tuple):
        return type(x)([_elements(item, name) for item in x])
    return x._concrete(name) if isinstance(x, Value) else x
