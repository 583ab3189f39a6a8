"""The vocabulary of this package: primitive expressions that also take Python numbers.

A number beside an expression becomes a constant of that expression's dtype, so that
formulas read as usual. `Format` describes the bits of a floating dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr

Operand: TypeAlias = Expr | int | float

INF: Final = float("inf")
NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class Format:
    """The layout of a binary floating dtype (IEEE 754, and bfloat16)."""

    floating: DType
    integer: DType  # signed, of the same width
    mantissa: int  # stored bits of the significand
    bias: int  # of the exponent

    @property
    def magic(self) -> float:
        """1.5 * 2**mantissa: adding it rounds a small number to an integer, and leaves
        this in the low bits of the sum (D. Knuth; also T. Dekker, 1971)."""
        return 1.5 * 2.0**self.mantissa

    @property
    def magic_bits(self) -> int:
        """The bits of `magic`."""
        return (self.bias + self.mantissa << self.mantissa) | 1 << self.mantissa - 1

    @property
    def tiny(self) -> float:
        """The smallest normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def sign_bit(self) -> int:
        return -(1 << self.integer.bits - 1)


F64: Final = Format(dtypes.float64, dtypes.int64, 52, 1023)
_FORMATS: Final = {
    dtypes.float16: Format(dtypes.float16, dtypes.int16, 10, 15),
    dtypes.bfloat16: Format(dtypes.bfloat16, dtypes.int16, 7, 127),
    dtypes.float32: Format(dtypes.float32, dtypes.int32, 23, 127),
    dtypes.float64: F64,
}


def format_of(x: Expr) -> Format:
    return _FORMATS[x.dtype]


def table(coefficients: dict[str, tuple[float, ...]], x: Expr) -> tuple[float, ...]:
    """Return the row of a table in `coefficients` for the dtype of `x`."""
    return coefficients[x.dtype.short]


# --- operations -----------------------------------------------------------------------


def lift(x: Operand, dtype: DType) -> Expr:
    return x if isinstance(x, Expr) else expr.const(x, dtype)


def _dtype(*operands: Operand) -> DType:
    return next(x.dtype for x in operands if isinstance(x, Expr))


def binary(name: str, x: Operand, y: Operand) -> Expr:
    dtype = _dtype(x, y)
    return expr.binary(name, lift(x, dtype), lift(y, dtype))


def add(x: Operand, y: Operand) -> Expr:
    return binary("add", x, y)


def sub(x: Operand, y: Operand) -> Expr:
    return binary("sub", x, y)


def mul(x: Operand, y: Operand) -> Expr:
    return binary("mul", x, y)


def div(x: Operand, y: Operand) -> Expr:
    return binary("div", x, y)


def shl(x: Expr, bits: int) -> Expr:
    return binary("shl", x, bits)


def lshr(x: Expr, bits: int) -> Expr:
    return binary("lshr", x, bits)


def neg(x: Expr) -> Expr:
    return expr.unary("neg", x)


def absolute(x: Expr) -> Expr:
    return expr.unary("abs", x)


def sqrt(x: Expr) -> Expr:
    return expr.unary("sqrt", x)


def copysign(x: Operand, y: Expr) -> Expr:
    return binary("copysign", x, y)


def fma(x: Operand, y: Operand, z: Operand) -> Expr:
    """Return `x * y + z`, rounded once."""
    dtype = _dtype(x, y, z)
    return expr.fma(lift(x, dtype), lift(y, dtype), lift(z, dtype))


def compare(name: str, x: Operand, y: Operand) -> Expr:
    dtype = _dtype(x, y)
    return expr.compare(name, lift(x, dtype), lift(y, dtype))


def lt(x: Operand, y: Operand) -> Expr:
    return compare("lt", x, y)


def gt(x: Operand, y: Operand) -> Expr:
    return compare("gt", x, y)


def eq(x: Operand, y: Operand) -> Expr:
    return compare("eq", x, y)


def both(x: Expr, y: Expr) -> Expr:
    return expr.binary("and", x, y)


def either(x: Expr, y: Expr) -> Expr:
    return expr.binary("or", x, y)


def select(test: Expr, x: Operand, y: Operand, dtype: DType | None = None) -> Expr:
    """Return `x if test else y`; `dtype` is that of the result if both are numbers."""
    dtype = dtype or _dtype(x, y)
    return expr.select(test, lift(x, dtype), lift(y, dtype))


def at_most(x: Expr, limit: float) -> Expr:
    """Return `min(x, limit)`, or NaN if x is."""
    return select(gt(x, limit), limit, x)


def at_least(x: Expr, limit: float) -> Expr:
    """Return `max(x, limit)`, or NaN if x is."""
    return select(lt(x, limit), limit, x)


def to_bits(x: Expr) -> Expr:
    return expr.bitcast(x, format_of(x).integer)


def from_bits(bits: Expr, f: Format) -> Expr:
    return expr.bitcast(bits, f.floating)


# --- compounds ------------------------------------------------------------------------


def polynomial(x: Expr, coefficients: Sequence[float], horner: int = 0) -> Expr:
    """Return the polynomial with these coefficients, the constant one first.

    Estrin's scheme evaluates pairs, then pairs of pairs, so that the latency grows with
    the logarithm of the degree. It takes one node for each degree, and one for each
    squaring. The first `horner` terms are added one by one, which rounds less.
    """
    terms: list[Operand] = list(coefficients[horner:])
    power = x
    while len(terms) > 1:
        pairs: list[Operand] = [
            fma(power, high, low)
            for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = pairs + terms[2 * len(pairs) :]
        if len(terms) > 1:
            power = mul(power, power)
    result = lift(terms[0], x.dtype)
    for term in coefficients[:horner][::-1]:
        result = fma(x, result, term)
    return result


def two_product(x: Expr, y: Operand) -> tuple[Expr, Expr]:
    """Return `x * y` exactly, as its rounded value and the rounding error."""
    product = mul(x, y)
    return product, fma(x, y, neg(product))


def fast_two_sum(x: Operand, y: Expr) -> tuple[Expr, Expr]:
    """Return `x + y` exactly, likewise, if |x| >= |y| or x is 0 (T. Dekker, 1971)."""
    total = add(x, y)
    return total, add(sub(x, total), y)
