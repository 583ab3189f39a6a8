"""Sizes and other symbolic numbers as nodes: i64[] and f64[] of the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ExportError
from hopflow.export.onnx.scopes import Scope, Value
from hopflow.symbolic.atoms import ROUND
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.size import Size, Symbol, SymFloat, SymInt
from hopflow.symbolic.terms import Atom, Factor, Operand, Terms, compute

Known = int | float | Value


@dataclass(frozen=True, slots=True)
class Number:
    """A number of Python, or one that the model computes. Arithmetic of the first kind
    is done at once."""

    scope: Scope
    value: Known

    def tensor(self) -> Value:
        """As a tensor without axes.

        Raises:
            ExportError: it is an integer that int64 cannot hold.
        """
        if isinstance(self.value, Value):
            return self.value
        dtype = dtypes.int64 if isinstance(self.value, int) else dtypes.float64
        if dtype is dtypes.int64 and self.value not in INT64:
            raise ExportError(f"int64 cannot hold {self.value}, of which a size is.")
        return self.scope.constant(self.value, dtype)

    def __add__(self, other: Any) -> "Number":
        return _apply("Add", self, _as_number(self.scope, other))

    def __sub__(self, other: Any) -> "Number":
        return _apply("Sub", self, _as_number(self.scope, other))

    def __mul__(self, other: Any) -> "Number":
        return _apply("Mul", self, _as_number(self.scope, other))


def _as_number(scope: Scope, x: Any) -> Number:
    return x if isinstance(x, Number) else Number(scope, x)


_FOLDED: Final[dict[str, Callable[..., Any]]] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Min": min,
    "Max": max,
}
_NEUTRAL: Final = {"Add": 0, "Sub": 0, "Mul": 1}


def _apply(operator: str, x: Number, y: Number) -> Number:
    if not isinstance(x.value, Value) and not isinstance(y.value, Value):
        return Number(x.scope, _FOLDED[operator](x.value, y.value))
    if type(y.value) is int and _NEUTRAL.get(operator) == y.value:
        return x
    if type(x.value) is int and operator != "Sub" and _NEUTRAL.get(operator) == x.value:
        return y
    return Number(x.scope, x.scope(operator, x.tensor(), y.tensor()))


def _divisor(y: Number) -> Value:
    """A divisor that is not 0: where it is, no one uses the quotient, and machines must
    not stop."""
    value = y.tensor()
    if not isinstance(y.value, Value):
        return value
    is_zero = y.scope("Equal", value, y.scope.constant(0, value.dtype))
    return y.scope("Where", is_zero, y.scope.constant(1, value.dtype), value)


def _floor_divide(x: Number, y: Number) -> Number:
    scope, a, b = x.scope, x.tensor(), _divisor(y)
    rest = scope("Mod", a, b)
    return Number(scope, scope("Div", scope("Sub", a, rest), b))


def _remainder(x: Number, y: Number) -> Number:
    return Number(x.scope, x.scope("Mod", x.tensor(), _divisor(y)))


def _float_remainder(x: Number, y: Number) -> Number:
    scope, a, b = x.scope, x.tensor(), y.tensor()
    rest, zero = scope("Mod", a, b, fmod=1), scope.constant(0.0, dtypes.float64)
    signs = scope("Xor", scope("Less", rest, zero), scope("Less", b, zero))
    is_inexact = scope("Not", scope("Equal", rest, zero))
    turned = scope("And", is_inexact, signs)
    return Number(scope, scope("Where", turned, scope("Add", rest, b), rest))


def _float_floor_divide(x: Number, y: Number) -> Number:
    exact = x - _float_remainder(x, y)
    return _unary("Round", _binary("Div")(exact, y))


def _unary(operator: str, x: Number, dtype: DType | None = None) -> Number:
    found = x.scope(operator, x.tensor())
    return Number(x.scope, found if dtype is None else x.scope.cast(found, dtype))


def _binary(operator: str) -> Callable[[Number, Number], Number]:
    return lambda x, y: Number(x.scope, x.scope(operator, x.tensor(), y.tensor()))


def _rounded(operator: str) -> Callable[[Number], Number]:
    return lambda x: _unary(operator, x, dtypes.int64)


def _as_float(x: Number) -> Number:
    if not isinstance(x.value, Value):
        return Number(x.scope, float(x.value))
    return Number(x.scope, x.scope.cast(x.value, dtypes.float64))


def _float_operation(operator: str) -> Callable[..., Number]:
    def apply(*args: Number) -> Number:
        return _binary(operator)(*map(_as_float, args))

    return apply


def _extremum(operator: str) -> Callable[..., Number]:
    return lambda *args: reduce(lambda x, y: _apply(operator, x, y), args)


def _sign(x: Number) -> Number:
    scope, bits = x.scope, x.scope.bitcast(x.tensor(), dtypes.int64)
    negative = scope("Less", bits, scope.constant(0))
    ends = (scope.constant(v, dtypes.float64) for v in (-1.0, 1.0))
    return Number(scope, scope("Where", negative, *ends))


_OPERATIONS: Final[Mapping[str, Callable[..., Number]]] = {
    "//": _floor_divide,
    "%": _remainder,
    "min": _extremum("Min"),
    "max": _extremum("Max"),
    "floor": _rounded("Floor"),
    "ceil": _rounded("Ceil"),
    "trunc": lambda x: Number(x.scope, x.scope.cast(x.tensor(), dtypes.int64)),
    "round": _rounded("Round"),
    "float": _as_float,
    "/": _float_operation("Div"),
    "+.": _float_operation("Add"),
    "-.": _float_operation("Sub"),
    "*.": _float_operation("Mul"),
    "/.": _float_operation("Div"),
    "//.": lambda x, y: _float_floor_divide(_as_float(x), _as_float(y)),
    "%.": lambda x, y: _float_remainder(_as_float(x), _as_float(y)),
    "**.": _float_operation("Pow"),
    "abs.": lambda x: _unary("Abs", _as_float(x)),
    "neg.": lambda x: _unary("Neg", _as_float(x)),
    "sign.": lambda x: _sign(_as_float(x)),
}


class _Arithmetic(dict[str, Callable[..., Number]]):
    """The operations of atoms; a float constant among operands comes as a float."""

    def __init__(self, scope: Scope) -> None:
        def lifted(f: Callable[..., Number]) -> Callable[..., Number]:
            return lambda *args: f(*(_as_number(scope, a) for a in args))

        super().__init__({op: lifted(f) for op, f in _OPERATIONS.items()})


def number(
    scope: Scope, size: Size | SymFloat | float, known: Callable[[Symbol], Known]
) -> Number:
    """A symbolic number, from what its symbols are."""
    if isinstance(size, SymInt):
        return _computed(scope, size.expression, known)
    if isinstance(size, SymFloat):
        return _computed(scope, size.node, known)
    return Number(scope, size)


def _computed(scope: Scope, operand: Any, known: Callable[[Symbol], Known]) -> Number:
    found = compute(
        operand,
        lambda s: Number(scope, known(s)),
        lambda n: Number(scope, n),
        _Arithmetic(scope),
    )
    return _as_number(scope, found)


def fits(scope: Scope, terms: Terms, known: Callable[[Symbol], Known]) -> Value:
    """Whether int64 has room for an expression, as bool[]: the sum of the magnitudes
    of its terms, in float64, says so."""
    total = Number(scope, 0.0)
    for monomial, factor in terms:
        product = Number(scope, abs(float(factor)))
        for part in monomial:
            product *= _magnitude(scope, part, known)
        total += product
    return scope("Less", total.tensor(), scope.constant(2.0**63, dtypes.float64))


def _magnitude(
    scope: Scope, factor: Factor, known: Callable[[Symbol], Known]
) -> Number:
    operand: Operand = factor
    if isinstance(factor, Atom) and factor.op in ROUND:
        [operand] = factor.args  # before it becomes an integer
    return _unary("Abs", _as_float(_computed(scope, operand, known)))


_COMPARISONS: Final = {
    "<=": "LessOrEqual",
    ">=": "GreaterOrEqual",
    "==": "Equal",
    "<.": "Less",
    "<=.": "LessOrEqual",
    "==.": "Equal",
}


def compared(holds: SymBool) -> Iterator[Operand]:
    """Yield the expressions that a condition compares."""
    for arg in holds.args:
        if isinstance(arg, SymBool):
            yield from compared(arg)
        elif not isinstance(arg, int | float):
            yield arg


def condition(scope: Scope, holds: SymBool, known: Callable[[Symbol], Known]) -> Value:
    """A condition on symbolic numbers, as bool[]."""
    if holds.op in ("and", "or", "not"):
        parts = [condition(scope, part, known) for part in holds.args]
        if holds.op == "not":
            return scope("Not", parts[0])
        return reduce(lambda x, y: scope(holds.op.title(), x, y), parts)
    if isinstance(holds.args[1], int) and holds.args[1] not in INT64:
        is_above = holds.args[1] > 0
        found = {"<=": is_above, ">=": not is_above, "==": False, "!=": True}
        return scope.constant(found[holds.op], dtypes.bool_)
    left, right = (
        Number(scope, side) if isinstance(side, int) else _computed(scope, side, known)
        for side in holds.args
    )
    if holds.op.endswith("."):
        left, right = _as_float(left), _as_float(right)
    if holds.op in ("!=", "!=."):
        return scope("Not", scope("Equal", left.tensor(), right.tensor()))
    return scope(_COMPARISONS[holds.op], left.tensor(), right.tensor())


def vector(scope: Scope, numbers: Sequence[Number]) -> Value:
    """Integers as i64[n]: a constant if all are known."""
    if all(isinstance(n.value, int) for n in numbers):
        return scope.integers([int(n.value) for n in numbers])  # type: ignore[arg-type]
    parts = [
        scope("Reshape", n.value, scope.integers((1,)))
        if isinstance(n.value, Value)
        else scope.integers((int(n.value),))
        for n in numbers
    ]
    return parts[0] if len(parts) == 1 else scope("Concat", *parts, axis=0)
