"""pow, cbrt and hypot.

`pow(x, y) = exp2(y log2|x|)`, where the logarithm needs 11 bits more than the result:
the exponent multiplies its error. In single precision that is what double precision
gives; in double precision the logarithm is a sum of two numbers.

Sources: J.-M. Muller et al., "Handbook of Floating-Point Arithmetic", 2nd edition,
chapters 4 and 5; C99, annex F.9.4.4 for the special cases of pow.
"""

from math import factorial
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
    at_least,
    at_most,
    binary,
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
    lshr,
    lt,
    mul,
    neg,
    polynomial,
    select,
    shl,
    sqrt,
    sub,
    to_bits,
    two_product,
)
from hopflow.loop_ir.math.exponential import (
    exp2_parts,
    nearest_power,
    nearest_power_in_two,
)
from hopflow.loop_ir.math.logarithmic import split


def pow(x: Expr, y: Expr) -> Expr:
    a = absolute(x)
    if x.dtype is dtypes.float32:
        return _with_ends(x, y, _pow_single(a, y))
    e, s, t = exp2_parts(*_exponent(a, y))
    return _with_ends(x, y, mul(mul(add(e, 1.0), s), t))


def pow_nearest(x: Expr, y: Expr) -> Expr:
    """Return the float64 that is nearest to `x ** y`, but for about one in 1000.

    C's `pow`, which Python uses for sizes, is as exact: its error is at most 0.52 units
    in the last place in glibc. The exact `125 ** (1 / 3)` is 4.99999999999999955, which
    lies between 5 and the float before it: which one is nearest decides its floor.
    """
    if x.dtype is dtypes.float32:
        return pow(x, y)
    return _with_ends(x, y, _exp2_nearest(*_exponent(absolute(x), y)))


def _with_ends(x: Expr, y: Expr, size: Expr) -> Expr:
    """Return the power of this size where none of the special cases holds."""
    a = absolute(x)
    size = select(either(eq(y, 0.0), eq(a, 1.0)), 1.0, size)
    half = mul(y, 0.5)
    fractional = compare("ne", y, expr.unary("rint", y))
    uneven = compare("ne", half, expr.unary("rint", half))
    odd = both(uneven, expr.unary("not", fractional))
    result = select(odd, copysign(size, x), size)
    undefined = both(fractional, both(lt(x, 0.0), gt(x, -INF)))
    return select(undefined, NAN, result)


def _log2_ends(a: Expr, log2_a: Expr) -> Expr:
    """Return log2 of 0, inf and NaN, or else `log2_a`."""
    return select(eq(a, 0.0), -INF, select(lt(a, INF), log2_a, a))


def _pow_single(a: Expr, y: Expr) -> Expr:
    wide = expr.cast(a, dtypes.float64)
    k, f = split(wide, subnormal=False)
    log_m = fma(mul(f, f), polynomial(f, c.LOG_WIDE["f64"]), f)
    log2_a = _log2_ends(wide, fma(log_m, c.LOG2_E["f64"][0], k))
    exponent = mul(expr.cast(y, dtypes.float64), log2_a)
    exponent = at_most(at_least(exponent, -200.0), 200.0)
    n, power, _ = nearest_power(exponent, 1.0, 0)
    r = expr.cast(sub(exponent, n), dtypes.float32)
    rest = mul(mul(r, r), polynomial(r, c.EXP2["f32"]))
    fraction = add(fma(r, c.LN2["f32"][0], rest), 1.0)
    product = mul(expr.cast(fraction, dtypes.float64), power)
    return expr.cast(product, dtypes.float32)


def _log_double(f: Expr) -> tuple[Expr, Expr]:
    """Return log(1 + f) / 2 = atanh(f / (2 + f)), to 66 bits, as a sum of two."""
    d, d_low = fast_two_sum(2.0, f)
    inverse = div(1.0, d)
    s = mul(f, inverse)
    minus_s = neg(s)
    s_low = mul(fma(minus_s, d_low, fma(minus_s, d, f)), inverse)
    w, w_low = two_product(s, s)
    w_low = fma(add(s, s), s_low, w_low)
    # a = 1/3 + w Q(w), b = w a, and the result s + s b, all in two words.
    third = 1.0 / 3.0
    u = mul(w, polynomial(w, c.ATANH["f64"]))
    a, a_low = fast_two_sum(third, u)
    a_low = add(a_low, third / 2**54)  # the rounding error of third
    b, b_low = two_product(w, a)
    b_low = add(b_low, fma(w, a_low, mul(w_low, a)))
    p, p_low = two_product(s, b)
    p_low = add(p_low, fma(s, b_low, fma(s_low, b, s_low)))
    total, low = fast_two_sum(s, p)
    return total, add(low, p_low)


def _exponent(a: Expr, y: Expr) -> tuple[Expr, Expr]:
    """Return y log2(a) as a sum of two."""
    k, f = split(a)
    log_m, log_m_low = _log_double(f)
    scale, scale_low = (2 * word for word in c.LOG2_E["f64"])
    high, low = two_product(log_m, scale)
    low = add(low, fma(log_m, scale_low, mul(log_m_low, scale)))
    log2_a, rest = fast_two_sum(k, high)
    rest = add(rest, low)
    log2_a = _log2_ends(a, log2_a)
    exponent, lost = two_product(log2_a, y)
    lost = fma(rest, y, lost)
    lost = select(lt(absolute(exponent), 1100.0), lost, 0.0)  # or NaN, of infinities
    return at_most(at_least(exponent, -1100.0), 1100.0), lost


def _exp2_nearest(x: Expr, low: Expr) -> Expr:
    """Return 2**(x + low), with an error of 2**-62 before the last rounding: the powers
    of z = log(2**r) up to the third are sums of two, of the rest a double is enough."""
    ln2, ln2_low = c.LN2["f64"]
    n, s, t = nearest_power_in_two(x, 1.0)
    r, r_low = fast_two_sum(sub(x, n), low)
    z, z_low = two_product(r, ln2)
    z_low = add(z_low, fma(r, ln2_low, mul(r_low, ln2)))
    square, square_low = two_product(z, z)
    square_low = fma(add(z, z), z_low, square_low)
    cube, cube_low = two_product(square, z)
    cube_low = add(cube_low, fma(square, z_low, mul(square_low, z)))
    sixth, sixth_low = two_product(cube, 1 / 6)
    sixth_low = add(sixth_low, fma(cube, 1 / 6 / 2**54, mul(cube_low, 1 / 6)))
    rest = mul(mul(square, square), polynomial(z, _SERIES))
    total, low_1 = fast_two_sum(z, mul(square, 0.5))
    total, low_2 = fast_two_sum(total, sixth)
    total, low_3 = fast_two_sum(1.0, total)
    lows = add(add(fma(square_low, 0.5, z_low), sixth_low), add(low_1, low_2))
    return mul(mul(add(total, add(low_3, add(lows, rest))), s), t)


_SERIES: Final = tuple(1 / factorial(k) for k in range(4, 18))
"""Of (exp(z) - 1 - z - z**2 / 2 - z**3 / 6) / z**4: for |z| < 0.35 what follows is less
than 2**-70."""


def hypot(x: Expr, y: Expr) -> Expr:
    """Return sqrt(x**2 + y**2), scaled where a square would overflow or lose bits."""
    a, b = absolute(x), absolute(y)
    larger = select(gt(a, b), a, b)
    bias = format_of(x).bias
    huge, minute = (
        gt(larger, 2.0 ** (bias // 2 - 2)),
        lt(larger, 2.0 ** (-bias // 2 + 28)),
    )
    up = 2.0 ** (bias // 2 + bias // 8)
    scale = select(huge, 1 / up, select(minute, up, 1.0, x.dtype))
    back = select(huge, up, select(minute, 1 / up, 1.0, x.dtype))
    a_scaled, b_scaled = mul(a, scale), mul(b, scale)
    root = sqrt(fma(a_scaled, a_scaled, mul(b_scaled, b_scaled)))
    infinite = either(eq(a, INF), eq(b, INF))  # even beside a NaN
    return select(infinite, INF, mul(root, back))


# The upper bits (23 or 31) of 2**(4/3 bias), minus the constant that minimises the
# seed's largest error. They are in the low bits of a float, like a third of those of
# the argument.
_SEED: Final = {"f32": (8, 0x54A21D), "f64": (32, 0x553EF0FF)}


def cbrt(x: Expr) -> Expr:
    """Return x z**2, of z = x**(-1/3), with one last correction by the residual.

    The seed of z divides the bits of x by -3, which divides its exponent. Each
    iteration multiplies z by the series of `(1 - h)**(-1/3)`, where `h = 1 - x z**3`
    (Householder's method).
    """
    f = format_of(x)
    a = absolute(x)
    small = lt(a, f.tiny)
    power = 3 * (f.mantissa // 3 + 1)
    m = select(small, mul(a, 2.0**power), a)
    shift, seed = _SEED[x.dtype.short]
    ulp_one = 2.0**f.mantissa
    one_bits = (f.bias + f.mantissa) << f.mantissa
    upper = sub(from_bits(binary("or", lshr(to_bits(m), shift), one_bits), f), ulp_one)
    z = from_bits(shl(to_bits(fma(upper, -1 / 3, ulp_one + seed)), shift), f)
    for _ in range(1 if x.dtype is dtypes.float32 else 2):
        h = fma(mul(neg(mul(m, z)), z), z, 1.0)
        z = fma(mul(z, h), fma(h, fma(h, 14 / 81, 2 / 9), 1 / 3), z)
    square = mul(z, z)
    t = mul(m, square)
    excess = fma(mul(t, t), t, neg(m))
    correction = mul(excess, square)  # relative to m, times t
    t = fma(correction, fma(mul(correction, z), 2 / 9, -1 / 3), t)
    t = select(small, mul(t, 2.0 ** -(power // 3)), t)
    return copysign(select(lt(a, INF), t, a), x)


def integer_power(x: Expr, y: Expr) -> Expr:
    """Return `x ** y` of integers by repeated squaring, a step for each bit of `y`."""
    zero, result = expr.const(0, y.dtype), expr.const(1, x.dtype)
    bits = y.dtype.bits - (y.dtype.kind == "i")
    for bit in range(bits):
        chosen = compare("ne", binary("and", y, expr.const(1 << bit, y.dtype)), zero)
        result = select(chosen, mul(result, x), result)
        x = mul(x, x) if bit + 1 < bits else x
    return result
