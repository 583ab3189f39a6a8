"""exp and its family: reduction by powers of 2, and a polynomial on what is left.

`exp(x) = 2**n exp(r)` with `n = rint(x / log 2)`. The addition of a magic number (see
`Format.magic`) rounds, and leaves n, with the bias of the exponent, in the low bits of
the sum: one shift makes 2**n. `r = x - n log 2` takes two words of log 2; the first fma
is exact. Source: J.-M. Muller, "Elementary Functions", 3rd edition, chapter 11.
"""

from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import coefficients as c
from hopflow.loop_ir.math.arith import (
    absolute,
    add,
    at_least,
    at_most,
    binary,
    copysign,
    div,
    fma,
    format_of,
    from_bits,
    lt,
    mul,
    neg,
    polynomial,
    select,
    shl,
    sub,
    table,
    to_bits,
)

# Beyond these exp is 0, or infinite, in each type.
_EXP_RANGE = {"f32": (-104.0, 89.0), "f64": (-746.0, 710.0)}
_EXP2_RANGE = {"f32": (-151.0, 129.0), "f64": (-1076.0, 1025.0)}
# Beyond these expm1 is -1, and tanh(x / 2) is 1, to the last bit.
_EXPM1_LOW = {"f32": -20.0, "f64": -40.0}
# The first numbers (nearly) whose sinh and cosh are infinite.
_SINH_HIGH = {"f32": 89.5, "f64": 710.6}


def nearest_power(x: Expr, scale: float, offset: int) -> tuple[Expr, Expr, Expr]:
    """n = rint(x * scale) as a float; 2**(n + offset); and the magic sum behind them.

    The power is right where n + offset is the exponent of a normal number.
    """
    f = format_of(x)
    magic = f.magic + f.bias + offset
    total = fma(x, scale, magic)
    return sub(total, magic), from_bits(shl(to_bits(total), f.mantissa), f), total


def exp_parts(x: Expr, low: Expr | None = None) -> tuple[Expr, Expr]:
    """e and s with `exp(x + low) = (1 + e) * s * s`, for clamped x and a tiny low.

    n is even, so that the two factors s = 2**(n / 2) are normal numbers even where the
    result is subnormal or overflows; |r| <= log 2 costs one or two coefficients more.
    """
    ln2, ln2_low = table(c.LN2, x)
    half, power, _ = nearest_power(x, table(c.LOG2_E, x)[0] / 2, 0)
    r = fma(half, -2 * ln2_low, fma(half, -2 * ln2, x))
    if low is not None:
        r = add(r, low)
    return fma(mul(r, r), polynomial(r, table(c.EXP, x)), r), power


def _exp_clamped(x: Expr) -> Expr:
    e, s = exp_parts(x)
    return mul(mul(add(e, 1.0), s), s)


def exp(x: Expr) -> Expr:
    low, high = _EXP_RANGE[x.dtype.short]
    return _exp_clamped(at_most(at_least(x, low), high))


def exp2(x: Expr) -> Expr:
    low, high = _EXP2_RANGE[x.dtype.short]
    x = at_most(at_least(x, low), high)
    half, s, _ = nearest_power(x, 0.5, 0)
    r = fma(half, -2.0, x)
    return mul(mul(fma(r, polynomial(r, table(c.EXP2, x)), 1.0), s), s)


def expm1(x: Expr) -> Expr:
    low, high = _EXPM1_LOW[x.dtype.short], _EXP_RANGE[x.dtype.short][1]
    ln2, ln2_low = table(c.LN2, x)
    y = at_most(at_least(x, low), high)
    # Half of the result, so that the power of 2 is finite where the result is.
    n, s, _ = nearest_power(y, table(c.LOG2_E, x)[0], -1)
    rough = fma(n, -ln2, y)
    r = fma(n, -ln2_low, rough)
    # What rounding took from r comes back beside it: where n = 1, the difference at the
    # end doubles the error.
    lost = fma(n, -ln2_low, sub(rough, r))
    e = add(r, fma(mul(r, r), polynomial(r, table(c.EXPM1, x)), lost))
    half = fma(s, e, sub(s, 0.5))
    return copysign(add(half, half), x)  # for -0


def logistic(x: Expr) -> Expr:
    """1 / (1 + exp(-x)), by exp(-|x|), which does not overflow."""
    low, _ = _EXP_RANGE[x.dtype.short]
    e = _exp_clamped(at_least(neg(absolute(x)), low))
    return div(select(lt(x, 0.0), e, 1.0), add(e, 1.0))


def tanh(x: Expr) -> Expr:
    """expm1(-2 |x|) / (expm1(-2 |x|) + 2), with the sign of x."""
    y = at_least(mul(absolute(x), -2.0), _EXPM1_LOW[x.dtype.short])
    ln2, ln2_low = table(c.LN2, x)
    n, s, _ = nearest_power(y, table(c.LOG2_E, x)[0], 0)
    r = fma(n, -ln2_low, fma(n, -ln2, y))
    e = fma(mul(r, r), polynomial(r, table(c.EXPM1, x)), r)
    d = fma(s, e, sub(s, 1.0))
    return copysign(div(d, add(d, 2.0)), x)


def _hyperbolic(a: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    """cosh and sinh of n log 2, both halved; cosh - 1 and sinh of r: a = n log 2 + r.

    The powers 2**(n - 2) and 2**(-n - 2) both come from the magic sum; the second is 0
    where it would be subnormal.
    """
    f = format_of(a)
    ln2, ln2_low = table(c.LN2, a)
    n, up, total = nearest_power(a, table(c.LOG2_E, a)[0], -2)
    exponent = sub(f.magic_bits + 2 * (f.bias - 2), to_bits(total))
    down = from_bits(shl(binary("max", exponent, 0), f.mantissa), f)
    r = fma(n, -ln2_low, fma(n, -ln2, a))
    square = mul(r, r)
    sinh_r = fma(mul(r, square), polynomial(square, table(c.SINH, a)), r)
    cosh_r = mul(square, polynomial(square, table(c.COSH, a)))
    return add(up, down), sub(up, down), cosh_r, sinh_r


def sinh(x: Expr) -> Expr:
    """sinh(n log 2) cosh(r) + cosh(n log 2) sinh(r)."""
    a = absolute(x)
    cosh_n, sinh_n, cosh_r, sinh_r = _hyperbolic(at_most(a, _SINH_HIGH[x.dtype.short]))
    half = add(sinh_n, fma(sinh_n, cosh_r, mul(cosh_n, sinh_r)))
    # Half of the smallest subnormal number is none.
    return copysign(select(lt(a, 2.0**-30), a, add(half, half)), x)


def cosh(x: Expr) -> Expr:
    """cosh(n log 2) cosh(r) + sinh(n log 2) sinh(r)."""
    a = at_most(absolute(x), _SINH_HIGH[x.dtype.short])
    cosh_n, sinh_n, cosh_r, sinh_r = _hyperbolic(a)
    half = add(cosh_n, fma(cosh_n, cosh_r, mul(sinh_n, sinh_r)))
    return add(half, half)
