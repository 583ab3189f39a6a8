"""log and its family, and the inverse hyperbolic functions, which are logarithms.

`log(x) = k log 2 + log(1 + f)`, where `x = 2**k (1 + f)` and 1 + f is between the
roots of 1/2 and 2: so nothing cancels, and near x = 1 it is all in f, which is exact.
Source: J.-M. Muller, "Elementary Functions", 3rd edition, chapter 11.
"""

from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import coefficients as c
from hopflow.loop_ir.math.arith import (
    INF,
    NAN,
    Format,
    absolute,
    add,
    binary,
    both,
    compare,
    copysign,
    div,
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
    table,
    to_bits,
)

# The upper part of the bits of sqrt(1/2): where the significand starts over.
_ROOT_HALF = {"f32": 0x3F3504F3, "f64": 0x3FE6A09E667F3BCD}
# From here on log(1 + x) is log(x) to the last bit; below, x**2 does not overflow.
_LARGE = {"f32": 2.0**28, "f64": 2.0**56}


def _exponent(y: Expr) -> tuple[Expr, Expr]:
    """Return k + bias as an integer, and the bits of y shifted so that exponents count
    from sqrt(1/2)."""
    f = format_of(y)
    shifted = add(to_bits(y), (f.bias << f.mantissa) - _ROOT_HALF[y.dtype.short])
    return lshr(shifted, f.mantissa), shifted


def _exponent_as_float(exponent: Expr, f: Format, bias: Expr | float) -> Expr:
    """Return `exponent - bias` from the low bits of 2**mantissa: no conversion."""
    power = 2.0**f.mantissa
    bits = (f.bias + f.mantissa) << f.mantissa
    number = from_bits(binary("or", exponent, bits), f)
    if isinstance(bias, Expr):
        return sub(number, bias)
    return sub(number, power + bias)


def split(x: Expr, *, subnormal: bool = True) -> tuple[Expr, Expr]:
    """Return k and f with `x = 2**k (1 + f)`, for positive and finite x."""
    f = format_of(x)
    bias: Expr | float = float(f.bias)
    if subnormal:
        small = lt(x, f.tiny)
        power = f.mantissa + 1
        base = 2.0**f.mantissa + f.bias
        bias = select(small, base + power, base, x.dtype)
        x = select(small, mul(x, 2.0**power), x)
    exponent, shifted = _exponent(x)
    k = _exponent_as_float(exponent, f, bias)
    significand = binary("and", shifted, (1 << f.mantissa) - 1)
    m = from_bits(add(significand, _ROOT_HALF[x.dtype.short]), f)
    return k, sub(m, 1.0)


def split_plus_one(x: Expr, *, wide: bool) -> tuple[Expr, Expr]:
    """Return k and f with `1 + x = 2**k (1 + f)`, for finite x > -1.

    f is `2**-k x + (2**-k - 1)`, of which only the sum is rounded. A `wide` x may be so
    large that 2**-k is subnormal; it may not be subnormal itself.
    """
    f = format_of(x)
    exponent, _ = _exponent(add(x, 1.0))
    k = _exponent_as_float(exponent, f, float(f.bias))
    spare = 2 if wide else 0
    power = shl(sub(2 * f.bias + spare, exponent), f.mantissa)
    s = from_bits(power, f)  # 2**(spare - k)
    if wide:
        return k, fma(mul(x, 0.25), s, fma(s, 0.25, -1.0))
    return k, fma(x, s, sub(s, 1.0))


def parts(k: Expr, f: Expr, low: Expr | None = None) -> tuple[Expr, Expr]:
    """Return k and y: `k log(2) + y = k log 2 + log(1 + f) + low`, log(2) rounded."""
    _, ln2_low = table(c.LN2, f)
    low = fma(k, ln2_low, low) if low else mul(k, ln2_low)
    return k, add(f, fma(mul(f, f), polynomial(f, table(c.LOG, f)), low))


def _join(k: Expr, f: Expr, low: Expr | None = None) -> Expr:
    """Return k log 2 + log(1 + f) + low."""
    k, y = parts(k, f, low)
    return fma(k, table(c.LN2, f)[0], y)


def log_positive(x: Expr, *, subnormal: bool = True) -> Expr:
    """Return log(x) for positive and finite x."""
    return _join(*split(x, subnormal=subnormal))


def _with_poles(x: Expr, pole: float, result: Expr) -> Expr:
    """Return a logarithm's result, but -inf at the pole, NaN below it, inf at inf."""
    outside = select(eq(x, pole), -INF, NAN, x.dtype)
    return select(gt(x, pole), select(lt(x, INF), result, x), outside)


def log(x: Expr) -> Expr:
    return _with_poles(x, 0.0, log_positive(x))


def log2(x: Expr) -> Expr:
    k, f = split(x)
    scale, scale_low = table(c.LOG2_E, x)
    rest = mul(mul(f, f), polynomial(f, table(c.LOG, x)))
    fraction = fma(f, scale, fma(rest, scale, mul(f, scale_low)))
    return _with_poles(x, 0.0, add(k, fraction))


def log10(x: Expr) -> Expr:
    k, f = split(x)
    scale, scale_low = table(c.LOG10_E, x)
    two, two_low = table(c.LOG10_2, x)
    rest = mul(mul(f, f), polynomial(f, table(c.LOG, x)))
    low = fma(k, two_low, fma(rest, scale, mul(f, scale_low)))
    return _with_poles(x, 0.0, fma(k, two, fma(f, scale, low)))


def log1p(x: Expr) -> Expr:
    result = _join(*split_plus_one(x, wide=True))
    small = lt(absolute(x), format_of(x).tiny * 4)
    return select(small, x, _with_poles(x, -1.0, result))


def asinh(x: Expr) -> Expr:
    """Return log1p(a + a**2 / (1 + sqrt(1 + a**2))), a = |x|, or log(2 a) if large."""
    a = absolute(x)
    large = gt(a, _LARGE[x.dtype.short])
    square = mul(a, a)
    whole = add(a, div(square, add(sqrt(add(square, 1.0)), 1.0)))
    k, f = split_plus_one(select(large, a, whole), wide=True)
    result = _join(add(k, select(large, 1.0, 0.0, x.dtype)), f)
    usual = both(compare("ge", a, format_of(x).tiny * 4), lt(a, INF))
    return copysign(select(usual, result, a), x)


def acosh(x: Expr) -> Expr:
    """Return log1p(v), `v = t + sqrt(2 t + t**2)`, t = x - 1, or log(2 x) if large.

    What rounding loses of v changes the logarithm by `lost / (1 + v)`.
    """
    large = gt(x, _LARGE[x.dtype.short])
    t = sub(x, 1.0)
    square = fma(t, t, add(t, t))
    root = sqrt(square)
    v, lost = fast_two_sum(root, t)
    twice = add(root, root)
    lost = fma(lost, twice, fma(neg(root), root, square))
    low = div(lost, fma(twice, v, twice))
    k, f = split_plus_one(select(large, x, v), wide=True)
    low = select(gt(x, 1.0), select(large, 0.0, low), 0.0)
    result = _join(add(k, select(large, 1.0, 0.0, x.dtype)), f, low)
    result = select(lt(x, INF), result, x)
    return select(lt(x, 1.0), NAN, result)


def atanh(x: Expr) -> Expr:
    """Return log1p(v) / 2 of v = 2 a / (1 - a), a = |x|.

    The error of v is known, and changes the logarithm by `error / (1 + a)`: to a tenth
    of that, by `error * (1 - a / 2)`.
    """
    a = absolute(x)
    twice, d = add(a, a), sub(1.0, a)
    v = div(twice, d)
    error = fma(neg(v), sub(sub(1.0, d), a), fma(neg(v), d, twice))
    k, f = split_plus_one(v, wide=False)
    result = mul(_join(k, f, mul(error, fma(a, -0.5, 1.0))), 0.5)
    outside = select(eq(a, 1.0), INF, NAN, x.dtype)
    return copysign(select(lt(a, 1.0), result, outside), x)
