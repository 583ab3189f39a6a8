"""Sizes and other symbolic numbers in JAX: Python numbers, symbolic dimensions of
`jax.export`, or arrays without axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

from hopflow.errors import ExportError
from hopflow.export.jax.library import library
from hopflow.symbolic.boolean import COMPARISONS, SymBool
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.size import Size, Symbol, SymFloat, SymInt
from hopflow.symbolic.terms import OPERATIONS, Operand, compute

Number: TypeAlias = Any
"""An int or float, a symbolic dimension, an i64[] or f64[]."""

Known: TypeAlias = Callable[[Symbol], Number]


def is_dimension(x: Number) -> bool:
    """Whether it may be a size of an array that JAX traces."""
    return isinstance(x, int) or bool(library().export.is_symbolic_dim(x))


def as_array(x: Number) -> Any:
    """A number as i64[] or f64[]."""
    jnp = library().numpy
    if isinstance(x, int | float):
        return jnp.asarray(x, jnp.float64 if isinstance(x, float) else jnp.int64)
    return jnp.asarray(x)


def number(size: Size | SymFloat | float, known: Known) -> Number:
    """A symbolic number, from what its symbols are."""
    if isinstance(size, SymInt):
        return side(size.expression, known)
    return side(size.node, known) if isinstance(size, SymFloat) else size


def condition(holds: SymBool, known: Known) -> Any:
    """A condition on symbolic numbers: a bool if it is decided, or bool[].

    Raises:
        ExportError: it is about symbolic dimensions of which JAX knows too little.
    """
    if holds.op in ("and", "or", "not"):
        return _connected(holds.op, [condition(part, known) for part in holds.args])
    left, right = (x if isinstance(x, int) else side(x, known) for x in holds.args)
    op = holds.op.rstrip(".")
    if isinstance(right, int) and right not in INT64:
        left = 0  # every int64 compares so
    try:
        if op in ("==", "!=") and is_dimension(left) and is_dimension(right):
            # JAX takes dimensions that may differ for different ones.
            is_equal = left >= right and left <= right
            return is_equal if op == "==" else not is_equal
        return COMPARISONS[op](left, right)
    except library().extend.core.InconclusiveDimensionOperation as error:
        raise ExportError(
            f"to_jax: JAX cannot decide `{holds}` of symbolic dimensions. Say it in "
            "the `constraints` of `jax.export.symbolic_shape`."
        ) from error


def _connected(op: str, parts: Sequence[Any]) -> Any:
    if all(isinstance(part, bool) for part in parts):
        return {"and": all(parts), "or": any(parts), "not": not parts[0]}[op]
    jnp = library().numpy
    if op == "not":
        return jnp.logical_not(parts[0])
    return reduce(jnp.logical_and if op == "and" else jnp.logical_or, parts)


def side(operand: Operand, known: Known) -> Number:
    """A side of a condition, or another expression."""
    return compute(operand, known, int, _ARITHMETIC)


# --- arithmetic -----------------------------------------------------------------------


def _divisor(x: Any) -> Any:
    """A divisor that is not 0: where it is, no one uses the quotient."""
    return library().numpy.where(x == 0, 1, x)


def _whole(function: str) -> Callable[..., Any]:
    def apply(x: Any) -> Any:
        jnp = library().numpy
        return getattr(jnp, function)(x).astype(jnp.int64)

    return apply


def _named(function: str) -> Callable[..., Any]:
    def apply(*args: Any) -> Any:
        jnp = library().numpy
        return reduce(getattr(jnp, function), args)

    return apply


def _of_floats(function: str) -> Callable[..., Any]:
    def apply(*args: Any) -> Any:
        jnp = library().numpy
        return getattr(jnp, function)(*(jnp.asarray(a, jnp.float64) for a in args))

    return apply


_OF_ARRAYS: Final[Mapping[str, Callable[..., Any]]] = {
    "//": lambda x, y: library().numpy.floor_divide(x, _divisor(y)),
    "%": lambda x, y: library().numpy.remainder(x, _divisor(y)),
    "min": _named("minimum"),
    "max": _named("maximum"),
    "floor": _whole("floor"),
    "ceil": _whole("ceil"),
    "trunc": _whole("trunc"),
    "round": _whole("round"),
    "float": _of_floats("asarray"),
    "/": _of_floats("divide"),
    "+.": _of_floats("add"),
    "-.": _of_floats("subtract"),
    "*.": _of_floats("multiply"),
    "/.": _of_floats("divide"),
    "//.": _of_floats("floor_divide"),
    "%.": _of_floats("remainder"),
    "**.": _of_floats("power"),
    "abs.": _of_floats("abs"),
    "neg.": _of_floats("negative"),
    "sign.": lambda x: library().numpy.copysign(1.0, x),
}
_OF_DIMENSIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "//": OPERATIONS["//"],
    "%": OPERATIONS["%"],
    "min": lambda *args: reduce(library().core.min_dim, args),
    "max": lambda *args: reduce(library().core.max_dim, args),
}


def _operation(op: str) -> Callable[..., Number]:
    def apply(*args: Number) -> Number:
        if all(isinstance(a, int | float) for a in args):
            try:
                return OPERATIONS[op](*args)
            except ZeroDivisionError:
                return math.nan if op.endswith((".", "/")) and op != "//" else 0
        if op in _OF_DIMENSIONS and all(map(is_dimension, args)):
            return _OF_DIMENSIONS[op](*args)
        return _OF_ARRAYS[op](*map(as_array, args))

    return apply


_ARITHMETIC: Final = {op: _operation(op) for op in OPERATIONS}
