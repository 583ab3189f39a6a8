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
    both,
    compare,
    copysign,
    div,
    either,
    eq,
    fast_two_sum,
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
from hopflow.loop_ir.math.logarithmic import log_positive, parts, split

_ERFC_ZERO: Final = {"f32": 10.2, "f64": 27.5}  # beyond these erfc is 0
_ERFC_CENTRE: Final = 0.609375
_ERF_CENTRE: Final = 2.475


def _erf_small(x: Expr) -> Expr:
    """Return erf(x) for |x| <= 1."""
    return fma(x, polynomial(mul(x, x), table(c.ERF, x)), x)


def _erfc_large(a: Expr) -> Expr:
    """Return `exp(-a**2) / (a + 1/2) (C + P(t))`, t = (a - 3) / (a + 3), for a >= 1/2.

    The rounding errors of `a**2`, of C + P, of a + 1/2 and of the quotient are known,
    and are added to the exponent, as a relative correction (C + P is nearly constant).
    """
    a = at_most(a, _ERFC_ZERO[a.dtype.short])
    square, square_low = two_product(a, a)
    t = fma(div(1.0, add(a, 3.0)), -6.0, 1.0)
    p, p_low = fast_two_sum(_ERFC_CENTRE, polynomial(t, table(c.ERFC, a)))
    d = add(a, 0.5)
    d_low = sub(a, sub(d, 0.5))
    scaled = div(p, d)
    minus = neg(scaled)
    lost = add(fma(minus, d_low, fma(minus, d, p)), p_low)
    relative = fma(lost, 1 / _ERFC_CENTRE, neg(square_low))
    e, power, other = exp_parts(neg(square), relative)
    return mul(mul(fma(scaled, e, scaled), power), other)


def erfc(x: Expr) -> Expr:
    a = absolute(x)
    near = sub(1.0, _erf_small(x))
    tail = _erfc_large(a)
    far = select(lt(x, 0.0), sub(2.0, tail), tail)
    return select(lt(a, 0.5), near, far)


def erf(x: Expr) -> Expr:
    a = absolute(x)
    if x.dtype is dtypes.float32:  # one polynomial covers the range until erfc is 0
        shifted = sub(at_most(a, 3.95), _ERF_CENTRE)
        tail = polynomial(shifted, c.ERF_TAIL["f32"])
    else:
        tail = _erfc_large(a)
    far = sub(1.0, tail)
    return copysign(select(lt(a, 1.0), _erf_small(a), far), x)


def erfinv(x: Expr) -> Expr:
    """Return x P(w) of w = -log(1 - x**2), and x P(sqrt(w)) towards the ends.

    Source: M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2011; the
    coefficients are our own.
    """
    a = absolute(x)
    w = neg(log_positive(fma(neg(a), a, 1.0), subnormal=False))
    middle = polynomial(sub(w, 3.0), table(c.ERFINV, x), 1)
    tail = polynomial(sub(sqrt(w), 4.0), table(c.ERFINV_TAIL, x), 2)
    result = mul(x, select(lt(w, 6.0), middle, tail))
    ends = select(eq(a, 1.0), copysign(INF, x), NAN)
    return select(lt(a, 1.0), result, ends)


def _log_sin_pi(a: Expr) -> Expr:
    """Return log(a |sin(pi a)|), for a > 0 that is no integer."""
    r = absolute(sub(a, expr.unary("rint", a)))  # to the nearest integer, exactly
    far = gt(r, 0.25)
    pi, pi_low = table(c.PI, a)
    s = select(far, sub(0.5, r), r)
    y = fma(s, pi, mul(s, pi_low))
    z = mul(y, y)
    sine = fma(mul(y, z), polynomial(z, table(c.SIN, a)), y)
    tail = fma(z, polynomial(z, table(c.COS, a)), -0.5)
    return log_positive(mul(a, select(far, fma(z, tail, 1.0), sine)))


def _lgamma_positive(a: Expr) -> Expr:
    """Return lgamma(a), 0 < a < inf: Stirling's series (fitted) from 5/2 on.

    Below 5/2, the recurrence leads to a polynomial about 2, where lgamma is 0.
    """
    stirling = compare("ge", a, 2.5)
    low, middle = lt(a, 0.5), lt(a, 1.25)
    shift = select(low, 0.0, select(middle, 1.0, 2.0, a.dtype))
    d = sub(a, shift)
    product = select(low, fma(a, a, a), select(middle, a, 1.0))
    k, y = parts(*split(select(stirling, a, product)))
    ln2, _ = table(c.LN2, a)
    near = fma(d, polynomial(d, table(c.LGAMMA, a), 1), neg(fma(k, ln2, y)))
    inverse = div(1.0, a)
    z = mul(inverse, inverse)
    rest = fma(
        inverse, polynomial(z, table(c.STIRLING, a)), table(c.HALF_LOG_2PI, a)[0]
    )
    # (a - 1/2) (log a - 1) - 1/2, which does not overflow before the result.
    far = fma(sub(a, 0.5), add(fma(k, ln2, -1.0), y), sub(rest, 0.5))
    return select(stirling, far, near)


def lgamma(x: Expr) -> Expr:
    """Return log |gamma(x)| to 8 units, or a difference's error near zeros below 0.

    Below 0 by the reflection formula, `gamma(-a) gamma(a) = -pi / (a sin(pi a))`.
    """
    a = absolute(x)
    positive = _lgamma_positive(a)
    pi, pi_low = table(c.LOG_PI, x)
    reflected = add(sub(sub(pi, _log_sin_pi(a)), positive), pi_low)
    # Nearer to 0 the square of a might underflow, but there lgamma(-a) is lgamma(a).
    result = select(lt(x, -(2.0**-60)), reflected, positive)
    pole = both(eq(x, expr.unary("rint", x)), compare("le", x, 0.0))
    result = select(pole, INF, result)
    return select(lt(a, INF), result, mul(x, x))  # inf of either sign, and NaN


def nextafter(x: Expr, y: Expr) -> Expr:
    """Return the next number after x towards y: bits are ordered like floats."""
    f = format_of(x)
    bits = to_bits(x)
    away = compare("eq", lt(x, y), gt(x, 0.0))
    moved = from_bits(add(bits, select(away, 1, -1, f.integer)), f)
    least = copysign(from_bits(expr.const(1, f.integer), f), y)
    result = select(eq(x, 0.0), least, moved)
    result = select(eq(x, y), y, result)
    unordered = either(expr.unary("isnan", x), expr.unary("isnan", y))
    return select(unordered, add(x, y), result)
