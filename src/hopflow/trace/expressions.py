"""Symbolic numbers and conditions as values of a trace: nodes of arithmetic on symbols.

Integers are i64, and floats f64 whatever the default dtype is, as Python's are.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from hopflow import dtypes
from hopflow.ops import elementwise, logic
from hopflow.ops.convert import astype
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Symbol, SymFloat, SymInt, evaluate
from hopflow.symbolic.terms import compute

__all__ = ["value_of"]


def value_of(
    number: SymInt | SymFloat | SymBool, value: Callable[[Symbol], Any]
) -> Any:
    """`number` as i64[], f64[] or bool[], of values for its symbols."""
    if isinstance(number, SymInt):
        return evaluate(number, value, int, OPERATIONS)
    if isinstance(number, SymFloat):
        return compute(number.node, value, int, OPERATIONS)
    return _condition(number, value)


def _condition(condition: SymBool, value: Callable[[Symbol], Any]) -> Any:
    if condition.op in _CONNECTIVES:
        parts = [_condition(part, value) for part in condition.args]
        return _CONNECTIVES[condition.op](*parts)
    x, y = [
        a if isinstance(a, int) else compute(a, value, int, OPERATIONS)
        for a in condition.args
    ]
    if condition.op.endswith("."):
        x, y = _f64(x), _f64(y)
    return _COMPARISONS[condition.op.rstrip(".")](x, y)


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
