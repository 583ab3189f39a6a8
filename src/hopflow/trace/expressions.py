"""Lowering of symbolic numbers and conditions to arithmetic nodes on symbols.

Integers are i64, and floats f64 like Python's, whatever the default dtype is.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from hopflow import dtypes
from hopflow.graph.core import plain_symbol
from hopflow.ops import elementwise, logic
from hopflow.ops.convert import astype
from hopflow.ops.symbolic_int import symbolic_int
from hopflow.symbolic.atoms import saturated
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.scalars import as_size
from hopflow.symbolic.size import Symbol, SymFloat, SymInt, free_symbols
from hopflow.symbolic.terms import (
    Atom,
    Operand,
    Terms,
    compute,
    plus_constant,
)


def value_of(
    number: SymInt | SymFloat | SymBool, value: Callable[[Symbol], Any]
) -> Any:
    """Return `number` as i64[], f64[] or bool[], by the values of its symbols."""
    if isinstance(number, SymInt):
        return _integer(number.expression, value)
    if isinstance(number, SymFloat):
        return _computed(number.node, value)
    return _condition(number, value)


def _integer(terms: Terms, value: Callable[[Symbol], Any]) -> Any:
    """Return an integer expression as one node, which is evaluated exactly; one over
    floats, which are no sizes, as arithmetic nodes."""
    size = as_size(terms)
    if not isinstance(size, SymInt):
        return size
    symbol = plain_symbol(size)
    if symbol is not None:
        return value(symbol)
    if any(s.real for s in free_symbols(size)):
        return compute(terms, value, int, OPERATIONS)
    return symbolic_int(value=size)


def _computed(operand: Operand, value: Callable[[Symbol], Any]) -> Any:
    """Return the value of a float expression, or of an integer in one."""
    if isinstance(operand, tuple):
        return _integer(operand, value)
    if isinstance(operand, Atom):
        args = [_computed(a, value) for a in operand.args]
        return OPERATIONS[operand.op](*args)
    return value(operand) if isinstance(operand, Symbol) else float.fromhex(operand)


def _condition(condition: SymBool, value: Callable[[Symbol], Any]) -> Any:
    if condition.op in _CONNECTIVES:
        parts = [_condition(part, value) for part in condition.args]
        return _CONNECTIVES[condition.op](*parts)
    x, y = condition.args
    if isinstance(x, tuple) and isinstance(y, int):
        x, y = _clamped(x, y)
    x, y = [a if isinstance(a, int) else _computed(a, value) for a in (x, y)]
    if condition.op.endswith("."):
        x, y = _f64(x), _f64(y)
    return _COMPARISONS[condition.op.rstrip(".")](x, y)


def _clamped(terms: Terms, k: int) -> tuple[Terms, int]:
    """Return an expression and a number that fit int64 and compare like `terms` and
    `k`."""
    if saturated(terms) == terms and k in INT64:
        return terms, k
    return saturated(plus_constant(terms, -k)), 0


def _f64(x: Any) -> Any:
    return float(x) if isinstance(x, int | float) else astype(x, dtypes.float64)


def _of_floats(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f(*map(_f64, args))


def _rounded(f: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x: astype(f(_f64(x)), dtypes.int64)


def _folded(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def fold(first: Any, *rest: Any) -> Any:
        for arg in rest:
            first = f(first, arg)
        return first

    return fold


OPERATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "//": elementwise.floor_divide,
    "%": elementwise.remainder,
    "min": _folded(elementwise.minimum),
    "max": _folded(elementwise.maximum),
    "floor": _rounded(elementwise.floor),
    "ceil": _rounded(elementwise.ceil),
    "trunc": _rounded(elementwise.trunc),
    "round": _rounded(elementwise.round),
    "float": _f64,
    "/": _of_floats(elementwise.divide),
    "+.": _of_floats(elementwise.add),
    "-.": _of_floats(elementwise.subtract),
    "*.": _of_floats(elementwise.multiply),
    "/.": _of_floats(elementwise.divide),
    "//.": _of_floats(elementwise.floor_divide),
    "%.": _of_floats(elementwise.remainder),
    "**.": _of_floats(elementwise.pow),
    "abs.": _of_floats(elementwise.abs),
    "neg.": _of_floats(elementwise.negative),
    "sign.": lambda x: elementwise.copysign(1.0, _f64(x)),
}
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<": logic.less,
    "<=": logic.less_equal,
    ">=": logic.greater_equal,
    "==": logic.equal,
    "!=": logic.not_equal,
}
_CONNECTIVES: Final[Mapping[str, Callable[..., Any]]] = {
    "and": _folded(logic.logical_and),
    "or": _folded(logic.logical_or),
    "not": logic.logical_not,
}
