"""Sizes that are only known at runtime, as checked expressions of the Loop IR.

The caller of a program knows the symbols of inputs, and computes the sizes that depend
on them alone (see `Program.derived`). The program computes the others: in i64, with f64
inside, and it stops where the result differs from Python's exact integers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final, Protocol, TypeAlias

from hopflow import dtypes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.ops import scalar
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.ranges import INT64, ValueRange
from hopflow.symbolic.size import Size, Symbol, SymInt
from hopflow.symbolic.terms import compute


class Trapping(Protocol):
    """Adds a trap to the program: it stops if `test` holds."""

    def __call__(
        self, test: Expr, kind: str, detail: str, values: Sequence[Expr] = ()
    ) -> None: ...


def computed(size: Size, value: Callable[[Symbol], Expr], trap: Trapping) -> Expr:
    """Return `size` over the expressions of its symbols.

    Each operation that may overflow, divide by zero, or round a float that does not fit
    64 bits, is preceded by a trap, unless ranges prove that it is not needed.
    """
    if not isinstance(size, SymInt):
        return e.index(size)
    result: _Number = _evaluated(size.expression, value, trap)
    return result.expr


def computed_condition(
    condition: SymBool, value: Callable[[Symbol], Expr], trap: Trapping
) -> Expr:
    """Return a condition on symbols, as `computed` does a size."""
    if condition.op in ("and", "or", "not"):
        parts = [computed_condition(part, value, trap) for part in condition.args]
        if condition.op == "not":
            return scalar.negate(parts[0])
        return reduce(scalar.both if condition.op == "and" else scalar.either, parts)
    left, right = (
        side if isinstance(side, int) else _evaluated(side, value, trap)
        for side in condition.args
    )
    assert not isinstance(left, int)
    op = _RELATIONS[condition.op.rstrip(".")]
    if condition.op.endswith("."):
        return e.compare(op, _f64(left), _f64(right))
    if right not in INT64:  # `left` is on one side of it
        is_below = {"le": right > 0, "ge": right < 0, "eq": False, "ne": True}
        return scalar.true() if is_below[op] else scalar.false()
    return e.compare(op, left.expr, e.index(right))


_RELATIONS: Final = {"<": "lt", "<=": "le", ">=": "ge", "==": "eq", "!=": "ne"}


def _evaluated(operand: Any, value: Callable[[Symbol], Expr], trap: Trapping) -> Any:
    """Return an integer as a `_Number`, and a float as an expression or a float."""
    arithmetic = _Arithmetic(trap)
    operations = {
        name: partial(operation, arithmetic) for name, operation in _OPERATIONS.items()
    }

    def symbol(s: Symbol) -> Any:
        return value(s) if s.real else _Number(arithmetic, value(s), s.range & INT64)

    return compute(
        operand,
        symbol,
        lambda n: _Number(arithmetic, e.index(n), ValueRange.point(n)),
        operations,
    )


@dataclass(slots=True)
class _Number:
    """An integer in checked arithmetic: its expression and its range."""

    arithmetic: "_Arithmetic"
    expr: Expr
    range: ValueRange

    def __add__(self, other: "_Number") -> "_Number":
        return self.arithmetic.checked("add", self, other, self.range + other.range)

    def __mul__(self, other: "_Number") -> "_Number":
        return self.arithmetic.checked("mul", self, other, self.range * other.range)


@dataclass(slots=True)
class _Arithmetic:
    trap: Trapping

    def checked(self, op: str, x: _Number, y: _Number, exact: ValueRange) -> _Number:
        """Return a sum or a product whose exact value is in a range."""
        if not _fits_int64(exact):
            test = e.compare(f"{op}_overflows", x.expr, y.expr)
            self.trap(test, "size", _SIGNS[op], (x.expr, y.expr))
        return _Number(self, e.binary(op, x.expr, y.expr), exact & INT64)

    def divided(self, rule: "_Division", x: _Number, y: _Number) -> _Number:
        """Return a quotient or a remainder, rounded as in Python."""
        if 0 in y.range:
            zero = e.compare("eq", y.expr, e.index(0))
            self.trap(zero, "divide", "", (x.expr, y.expr))
        exact = rule.range(x.range, y.range)
        if not _fits_int64(exact):
            least = e.compare("eq", x.expr, e.index(int(INT64.low)))
            minus_one = e.compare("eq", y.expr, e.index(-1))
            both = scalar.both(least, minus_one)
            self.trap(both, "size", "//", (x.expr, y.expr))
        return _Number(self, rule.expr(x.expr, y.expr), exact & INT64)

    def chosen(self, op: str, *args: _Number) -> _Number:
        """Return the minimum or the maximum."""
        join = ValueRange.minimum if op == "min" else ValueRange.maximum
        expr = reduce(partial(e.binary, op), [a.expr for a in args])
        return _Number(self, expr, reduce(join, [a.range for a in args]))

    def rounded(self, op: str, x: Any) -> _Number:
        """Return a float rounded to an integer."""
        value = e.unary(op, _f64(x))
        fits = scalar.both(
            e.compare("ge", value, e.const(-(2.0**63), dtypes.float64)),
            e.compare("lt", value, e.const(2.0**63, dtypes.float64)),
        )
        self.trap(scalar.negate(fits), "size", "")
        return _Number(self, e.cast(value, dtypes.int64), INT64)

    def float_division(self, rule: Callable[..., Expr], x: Any, y: Any) -> Expr:
        """Return a float operation for which a divisor of 0 is an error in Python."""
        dividend, divisor = _f64(x), _f64(y)
        if not divisor.is_const or divisor.attr == 0:
            zero = e.compare("eq", divisor, e.const(0.0, dtypes.float64))
            self.trap(zero, "divide", "")
        return rule(dividend, divisor)

    def float_operation(self, rule: Callable[..., Expr], *args: Any) -> Expr:
        return rule(*map(_f64, args))


def _fits_int64(bounds: ValueRange) -> bool:
    return INT64.low <= bounds.low and bounds.high <= INT64.high


def _f64(x: Any) -> Expr:
    """Return an operand of a float operation: an integer, a constant, or a float."""
    if isinstance(x, int | float):
        return e.const(x, dtypes.float64)
    return e.cast(x.expr if isinstance(x, _Number) else x, dtypes.float64)


@dataclass(frozen=True, slots=True)
class _Division:
    expr: Callable[[Expr, Expr], Expr]
    range: Callable[[ValueRange, ValueRange], ValueRange]


_SIGNS: Final = {"add": "+", "mul": "*"}
_Operation: TypeAlias = Callable[..., Any]


def _divided(rule: _Division) -> _Operation:
    return lambda arithmetic, x, y: arithmetic.divided(rule, x, y)


def _chosen(op: str) -> _Operation:
    return lambda arithmetic, *args: arithmetic.chosen(op, *args)


def _rounded(op: str) -> _Operation:
    return lambda arithmetic, x: arithmetic.rounded(op, x)


def _float_division(rule: Callable[..., Expr]) -> _Operation:
    return lambda arithmetic, x, y: arithmetic.float_division(rule, x, y)


def _floats(rule: Callable[..., Expr]) -> _Operation:
    return lambda arithmetic, *args: arithmetic.float_operation(rule, *args)


_OPERATIONS: Final[Mapping[str, _Operation]] = {
    "//": _divided(_Division(e.floor_div, ValueRange.__floordiv__)),
    "%": _divided(_Division(e.floor_mod, ValueRange.__mod__)),
    "min": _chosen("min"),
    "max": _chosen("max"),
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "trunc": _rounded("trunc"),
    "round": _rounded("rint"),
    "float": _floats(lambda x: x),
    "/": _float_division(e.div),
    "+.": _floats(e.add),
    "-.": _floats(e.sub),
    "*.": _floats(e.mul),
    "/.": _float_division(e.div),
    "//.": _float_division(scalar.floor_divide),
    "%.": _float_division(scalar.remainder),
    "**.": _floats(scalar.math_call("pow_nearest")),
    "abs.": _floats(lambda x: e.unary("abs", x)),
    "neg.": _floats(lambda x: e.unary("neg", x)),
    "sign.": _floats(lambda x: e.binary("copysign", scalar.like(1.0, x), x)),
}
