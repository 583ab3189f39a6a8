"""The error function and its kin, the logarithm of the gamma function, nextafter."""

from typing import Final

from hopflow import dtypes
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import coefficients as c
from hopflow.loop_ir.math.arith import (
    INF,
    NAN,
    absolute,
    add,
    at_most,
    binary,
    compare,
    copysign,
    div,
    eq,
    fma,
    format_of,
    from_bits,
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
    two_product,
)
from hopflow.loop_ir.math.exponential import exp_parts
from hopflow.loop_ir.math.logarithmic import log_positive

_ERFC_ZERO: Final = {"f32": 10.2, "f64": 27.5}  # from here on erfc is 0
_ERF_CENTRE: Final = 2.475


def _erf_small(x: Expr) -> Expr:
    """erf(x) / x, for |x| <= 1."""
    return polynomial(mul(x, x), table(c.ERF, x))


def _erfc_large(a: Expr) -> Expr:
    """`exp(-a**2) / (a + 3) P(t)`, t = (a - 3) / (a + 3), for a >= 1/2.

    What rounding loses of `a**2`, of `d = a + 3` and of 1 / d is known, and goes into
    the exponent, where it is a relative correction. P is changed by the last two as
    well, by about 1.05 times the change of t.
    """
    a = at_most(a, _ERFC_ZERO[a.dtype.short])
    square, square_low = two_product(a, a)
    d = add(a, 3.0)
    d_low = sub(a, sub(d, 3.0))
    q = div(1.0, d)
    minus_q = neg(q)
    lost = fma(minus_q, d_low, fma(minus_q, d, 1.0))
    relative = fma(mul(lost, q), 6.3, lost)
    scaled = mul(q, polynomial(fma(q, -6.0, 1.0), table(c.ERFC, a)))
    e, s = exp_parts(neg(square), sub(relative, square_low))
    return mul(mul(fma(scaled, e, scaled), s), s)


def erfc(x: Expr) -> Expr:
    a = absolute(x)
    near = fma(neg(x), _erf_small(x), 1.0)
    tail = _erfc_large(a)
    far = select(lt(x, 0.0), sub(2.0, tail), tail)
    return select(lt(a, 0.5), near, far)


def erf(x: Expr) -> Expr:
    a = absolute(x)
    if x.dtype is dtypes.float32:  # a polynomial reaches until it is 1
        shifted = sub(at_most(a, 3.95), _ERF_CENTRE)
        far = polynomial(shifted, c.ERF_TAIL["f32"])
    else:
        far = sub(1.0, _erfc_large(a))
    return copysign(select(lt(a, 1.0), mul(a, _erf_small(a)), far), x)


def erfinv(x: Expr) -> Expr:
    """x P(w) of w = -log(1 - x**2), and x P(sqrt(w)) towards the ends.

    Source: M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2011; the
    coefficients are our own.
    """
    a = absolute(x)
    w = neg(log_positive(fma(neg(a), a, 1.0), subnormal=False))
    middle = polynomial(sub(w, 3.0), table(c.ERFINV, x))
    tail = polynomial(sub(sqrt(w), 4.0), table(c.ERFINV_TAIL, x))
    result = mul(x, select(lt(w, 6.0), middle, tail))
    ends = select(eq(a, 1.0), copysign(INF, x), NAN)
    return select(lt(a, 1.0), result, ends)


def _log_sin_pi(a: Expr) -> Expr:
    """log(a |sin(pi a)|) for a > 0; -inf where a is an integer."""
    r = absolute(sub(a, expr.unary("rint", a)))  # to the nearest integer, exactly
    far = gt(r, 0.25)
    pi, pi_low = table(c.PI, a)
    s = select(far, sub(0.5, r), r)
    y = fma(s, pi, mul(s, pi_low))
    z = mul(y, y)
    sine = fma(mul(y, z), polynomial(z, table(c.SIN, a)), y)
    tail = fma(z, polynomial(z, table(c.COS, a)), -0.5)
    value = mul(a, select(far, fma(z, tail, 1.0), sine))
    return select(eq(r, 0.0), -INF, log_positive(value))


def _lgamma_positive(a: Expr) -> Expr:
    """lgamma(a), 0 < a < inf: Stirling's series (fitted) from 5/2 on.

    Below, by the recurrence, from a polynomial about 2, where it is 0.
    """
    stirling = compare("ge", a, 2.5)
    low, middle = lt(a, 0.5), lt(a, 1.5)
    shift = select(low, 0.0, select(middle, 1.0, 2.0, a.dtype))
    d = sub(a, shift)
    product = select(low, fma(a, a, a), select(middle, a, 1.0))
    logarithm = log_positive(select(stirling, a, product))
    near = fma(d, polynomial(d, table(c.LGAMMA, a)), neg(logarithm))
    inverse = div(1.0, a)
    z = mul(inverse, inverse)
    rest = fma(inverse, polynomial(z, table(c.STIRLING, a)), table(c.HALF_LOG_2PI, a)[0])
    # (a - 1/2) (log a - 1) - 1/2, which does not overflow before the result.
    far = fma(sub(a, 0.5), sub(logarithm, 1.0), sub(rest, 0.5))
    return select(stirling, far, near)


def lgamma(x: Expr) -> Expr:
    """log |gamma(x)|, to 8 units; near its zeros below 0, to the error of a difference.

    Below 0 by the reflection formula, `gamma(-a) gamma(a) = -pi / (a sin(pi a))`.
    """
    a = absolute(x)
    positive = _lgamma_positive(a)
    pi, pi_low = table(c.LOG_PI, x)
    reflected = add(sub(sub(pi, _log_sin_pi(a)), positive), pi_low)
    result = select(lt(x, 0.0), reflected, positive)
    result = select(eq(a, 0.0), INF, result)
    return select(lt(a, INF), result, mul(x, x))  # inf of either sign, and NaN


def nextafter(x: Expr, y: Expr) -> Expr:
    """The next number after x towards y; the bits of floats are ordered as they are."""
    f = format_of(x)
    bits = to_bits(x)
    away = compare("eq", lt(x, y), gt(x, 0.0))
    moved = from_bits(add(bits, select(away, 1, -1, f.int)), f)
    least = copysign(from_bits(expr.const(1, f.int), f), y)
    result = select(eq(x, 0.0), least, moved)
    ordered = compare("ne", expr.unary("isnan", x), True)
    result = select(eq(x, y), y, select(ordered, result, x))
    return select(binary("or", expr.unary("isnan", y), lt(y, y)), y, result)
