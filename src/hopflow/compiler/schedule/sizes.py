"""Sizes as expressions of the loop language: i64, and f64 within."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

from hopflow import dtypes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.ops import scalar
from hopflow.symbolic.size import Size, Symbol, evaluate

__all__ = ["lowered"]


def lowered(size: Size, value: Callable[[Symbol], Expr]) -> Expr:
    """`size` over the expressions that its symbols are.

    A quotient by 0, which no size that is used has, is 0 instead of a signal.
    """
    result: _Number = evaluate(size, lambda s: _Number(value(s)), _Number, _OPERATIONS)
    return result.expr


class _Number:
    """Sizes evaluate in this arithmetic to expressions."""

    __slots__ = ("expr",)

    def __init__(self, value: int | float | Expr) -> None:
        if isinstance(value, float):
            value = e.const(value, dtypes.float64)
        self.expr = e.index(value) if isinstance(value, int) else value

    def __add__(self, other: "_Number") -> "_Number":
        return _Number(e.add(self.expr, other.expr))

    def __mul__(self, other: "_Number") -> "_Number":
        return _Number(e.mul(self.expr, other.expr))


def _integers(f: Callable[..., Expr]) -> Callable[..., _Number]:
    return lambda *args: _Number(f(*[a.expr for a in args]))


def _f64(x: Any) -> Expr:
    number = x if isinstance(x, _Number) else _Number(x)
    return e.cast(number.expr, dtypes.float64)


def _floats(f: Callable[..., Expr]) -> Callable[..., _Number]:
    return lambda *args: _Number(f(*map(_f64, args)))


def _folded(name: str) -> Callable[..., _Number]:
    return _integers(lambda *args: reduce(lambda x, y: e.binary(name, x, y), args))


def _rounded(name: str) -> Callable[..., _Number]:
    return _floats(lambda x: e.cast(e.unary(name, x), dtypes.int64))


_OPERATIONS: Final[Mapping[str, Callable[..., _Number]]] = {
    "//": _integers(scalar.floor_divide),
    "%": _integers(scalar.remainder),
    "min": _folded("min"),
    "max": _folded("max"),
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "trunc": _rounded("trunc"),
    "round": _rounded("rint"),
    "float": _floats(lambda x: x),
    "/": _floats(e.div),
    "+.": _floats(e.add),
    "-.": _floats(e.sub),
    "*.": _floats(e.mul),
    "/.": _floats(e.div),
    "//.": _floats(scalar.floor_divide),
    "%.": _floats(scalar.remainder),
    "**.": _floats(scalar.power),
    "abs.": _floats(lambda x: e.unary("abs", x)),
    "neg.": _floats(lambda x: e.unary("neg", x)),
    "sign.": _floats(lambda x: e.binary("copysign", scalar.like(1.0, x), x)),
}
