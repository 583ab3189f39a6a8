"""asin, acos, atan and atan2: a polynomial on half the range, identities for the rest.

`asin(a) = pi / 2 - 2 asin(sqrt((1 - a) / 2))` beyond 1/2, and `atan(a) = pi / 2 -
atan(1 / a)` beyond 1. Where pi / 2 cancels some of the result, its second word is added
to the smallest terms. Source: J.-M. Muller, "Elementary Functions", 3rd edition.
"""

from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import coefficients as c
from hopflow.loop_ir.math.arith import (
    absolute,
    add,
    copysign,
    div,
    eq,
    fma,
    format_of,
    gt,
    lt,
    mul,
    neg,
    polynomial,
    select,
    sqrt,
    sub,
    table,
    to_bits,
)


def _asin_parts(x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return whether |x| is large, s >= 0, and p = asin(s) - s."""
    a = absolute(x)
    large = gt(a, 0.5)
    z = select(large, fma(a, -0.5, 0.5), mul(a, a))
    s = select(large, sqrt(z), a)
    return large, s, mul(mul(s, z), polynomial(z, table(c.ASIN, x)))


def asin(x: Expr) -> Expr:
    large, s, p = _asin_parts(x)
    high, low = table(c.HALF_PI, x)
    base = fma(s, -2.0, high)
    lost = fma(s, -2.0, sub(high, base))
    reflected = sub(base, fma(p, 2.0, sub(-low, lost)))
    return copysign(select(large, reflected, add(s, p)), x)


def acos(x: Expr) -> Expr:
    """Return pi / 2 - asin(x); for large |x|, return 2 asin(s) if x > 0, and pi - 2
    asin(s) if x < 0."""
    large, s, p = _asin_parts(x)
    signed = copysign(add(s, p), x)
    far = select(lt(x, 0.0), table(c.PI, x)[0], 0.0, x.dtype)
    base = select(large, far, table(c.HALF_PI, x)[0])
    return fma(select(large, 2.0, -1.0, x.dtype), signed, base)


def _atan_from(base: Expr, base_low: Expr, t: Expr) -> Expr:
    """Return base + atan(t), for |t| <= 1."""
    z = mul(t, t)
    rest = fma(mul(t, z), polynomial(z, table(c.ATAN, t)), base_low)
    return add(base, add(t, rest))


def atan(x: Expr) -> Expr:
    a = absolute(x)
    high, low = table(c.HALF_PI, x)
    large = gt(a, 1.0)
    t = select(large, div(-1.0, a), a)
    base = select(large, high, 0.0, x.dtype)
    base_low = select(large, low, 0.0, x.dtype)
    return copysign(_atan_from(base, base_low, t), x)


def atan2(y: Expr, x: Expr) -> Expr:
    """Return the angle of (x, y): `t = smaller / larger`, and a multiple of pi / 2."""
    a, b = absolute(x), absolute(y)
    steep = gt(b, a)
    larger, smaller = select(steep, b, a), select(steep, a, b)
    # If both are equal they may be 0, with an angle of 0, or infinite.
    diagonal = select(eq(larger, 0.0), 0.0, 1.0, x.dtype)
    t = select(eq(larger, smaller), diagonal, div(smaller, larger))
    negative = lt(to_bits(x), expr.const(0, format_of(x).integer))  # -0 too
    # Past the y axis, and towards the x axis, the angle decreases as t grows.
    falls = expr.compare("ne", steep, negative)
    (half, half_low), (pi, pi_low) = table(c.HALF_PI, x), table(c.PI, x)
    zero = expr.const(0.0, x.dtype)
    base = select(steep, half, select(negative, pi, zero))
    base_low = select(steep, half_low, select(negative, pi_low, zero))
    return copysign(_atan_from(base, base_low, select(falls, neg(t), t)), y)
