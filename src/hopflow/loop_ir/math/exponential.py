"""exp and its family: reduction by powers of 2, and a polynomial of the remainder.

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
    fast_two_sum,
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
# Beyond these logistic is 0, and 1.
_LOGISTIC_RANGE = {"f32": (-104.0, 20.0), "f64": (-746.0, 40.0)}
_LOGISTIC_SCALE = -64  # as an exponent
# Beyond these expm1 is -1, and tanh is 1, to the last bit.
_EXPM1_LOW = {"f32": -20.0, "f64": -40.0}
_TANH_HIGH = {"f32": 10.0, "f64": 20.0}
# The first numbers (nearly) whose sinh and cosh are infinite.
_SINH_HIGH = {"f32": 89.5, "f64": 710.6}


def nearest_power(x: Expr, scale: float, offset: int) -> tuple[Expr, Expr, Expr]:
    """Return n = rint(x * scale) as a float, 2**(n + offset), and the magic sum.

    The power is correct if n + offset is the exponent of a normal number.
    """
    f = format_of(x)
    magic = f.magic + f.bias + offset
    total = fma(x, scale, magic)
    return sub(total, magic), from_bits(shl(to_bits(total), f.mantissa), f), total


def nearest_power_in_two(x: Expr, scale: float) -> tuple[Expr, Expr, Expr]:
    """Return n = rint(x * scale) as a float, and two factors of 2**n.

    Each factor has about half of the exponent, so that both are normal numbers even if
    2**n is subnormal or infinite.
    """
    f = format_of(x)
    total = fma(x, scale, f.magic)
    bits, one = to_bits(total), f.bias << f.mantissa
    # floor(n / 2) in the place of the exponent.
    half = binary("and", shl(bits, f.mantissa - 1), -1 << f.mantissa)
    other = sub(add(shl(bits, f.mantissa), one), half)
    return sub(total, f.magic), from_bits(add(half, one), f), from_bits(other, f)


def exp_parts(x: Expr, low: Expr | None = None) -> tuple[Expr, Expr, Expr]:
    """Return e, s, t with `exp(x + low) = (1 + e) * s * t`; x is clamped, low tiny."""
    ln2, ln2_low = table(c.LN2, x)
    n, s, t = nearest_power_in_two(x, table(c.LOG2_E, x)[0])
    r = fma(n, -ln2, x)
    if low is None:
        r = lost = fma(n, -ln2_low, r)
    else:
        r, lost = fast_two_sum(r, fma(n, -ln2_low, low))
    rest = fma(mul(r, r), polynomial(r, table(c.EXP, x)), lost)
    return (rest if low is None else add(r, rest)), s, t


def exp(x: Expr) -> Expr:
    low, high = _EXP_RANGE[x.dtype.short]
    e, s, t = exp_parts(at_most(at_least(x, low), high))
    return mul(mul(add(e, 1.0), s), t)


def exp2_parts(x: Expr, low: Expr | None = None) -> tuple[Expr, Expr, Expr]:
    """Return e, s, t with `2**(x + low) = (1 + e) * s * t`, like `exp_parts`."""
    ln2, ln2_low = table(c.LN2, x)
    n, s, t = nearest_power_in_two(x, 1.0)
    r = sub(x, n)  # exactly
    if low is None:
        rest = mul(r, ln2_low)
    else:
        r, lost = fast_two_sum(r, low)
        rest = fma(r, ln2_low, mul(lost, ln2))
    rest = fma(mul(r, r), polynomial(r, table(c.EXP2, x)), rest)
    return fma(r, ln2, rest), s, t


def exp2(x: Expr) -> Expr:
    low, high = _EXP2_RANGE[x.dtype.short]
    e, s, t = exp2_parts(at_most(at_least(x, low), high))
    return mul(mul(add(e, 1.0), s), t)


def expm1(x: Expr) -> Expr:
    low, high = _EXPM1_LOW[x.dtype.short], _EXP_RANGE[x.dtype.short][1]
    ln2, ln2_low = table(c.LN2, x)
    y = at_most(at_least(x, low), high)
    # Half of the result, so that the power of 2 is finite where the result is.
    n, s, _ = nearest_power(y, table(c.LOG2_E, x)[0], -1)
    # The rounding error of r is kept beside it, for where n = 1, the difference at the
    # end would double it.
    r, lost = fast_two_sum(fma(n, -ln2, y), mul(n, -ln2_low))
    e = add(r, fma(mul(r, r), polynomial(r, table(c.EXP, x)), lost))
    half = fma(s, e, sub(s, 0.5))
    return copysign(add(half, half), x)  # for -0


def logistic(x: Expr) -> Expr:
    """Return 1 / (1 + exp(-x)), with about one rounding of `1 + exp(-x) = 1 + s + s e`.

    It is scaled, so as to be finite where the result is subnormal.
    """
    low, high = _LOGISTIC_RANGE[x.dtype.short]
    ln2, ln2_low = table(c.LN2, x)
    y = at_most(at_least(x, low), high)
    n, s, _ = nearest_power(y, -table(c.LOG2_E, x)[0], _LOGISTIC_SCALE)
    r = fma(n, -ln2_low, fma(n, -ln2, neg(y)))
    e = fma(mul(r, r), polynomial(r, table(c.EXP, x)), r)
    one = 2.0**_LOGISTIC_SCALE
    exact = lt(s, one * 2.0 ** format_of(x).mantissa)  # is 1 + s
    total = select(exact, fma(s, e, add(s, one)), add(s, fma(s, e, one)))
    return mul(div(1.0, total), one)


def tanh(x: Expr) -> Expr:
    """Return m / (m + 1), `m = (exp(2 |x|) - 1) / 2 = s (r + rest) + (s - 1) / 2`.

    All from |x| to m is half of what it is in exp, by constants scaled by powers of 2.
    Where m is small the result is `m - m * m / (m + 1)`: what the quotient has lost in
    rounding weighs less there.
    """
    a = absolute(x)
    y = at_most(a, _TANH_HIGH[x.dtype.short])
    ln2, ln2_low = table(c.LN2, x)
    n, s, _ = nearest_power(y, 2 * table(c.LOG2_E, x)[0], 0)
    r = fma(n, -ln2 / 2, y)
    scaled = [k * 2.0 ** (power + 1) for power, k in enumerate(table(c.EXP, x))]
    rest = fma(mul(r, r), polynomial(r, scaled), mul(n, -ln2_low / 2))
    m = fma(s, rest, fma(s, r, fma(s, 0.5, -0.5)))
    ratio = div(m, add(m, 1.0))
    small = fma(neg(m), ratio, m)
    return copysign(select(lt(a, 0.3), small, ratio), x)


def _hyperbolic(a: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    """Return halves of cosh, sinh of n log 2, and cosh - 1, sinh of r = a - n log 2.

    The powers 2**(n - 2) and 2**(-n - 2) both come from the magic sum; the second is 0
    where it would be subnormal.
    """
    f = format_of(a)
    ln2, ln2_low = table(c.LN2, a)
    n, up, total = nearest_power(a, table(c.LOG2_E, a)[0], -2)
    exponent = sub(f.magic_bits + 2 * (f.bias - 2), to_bits(total))
    down = from_bits(shl(binary("max", exponent, 0), f.mantissa), f)
    r, lost = fast_two_sum(fma(n, -ln2, a), mul(n, -ln2_low))
    square = mul(r, r)
    rest = fma(mul(r, square), polynomial(square, table(c.SINH, a)), lost)
    sinh_r = add(r, rest)
    cosh_r = mul(square, polynomial(square, table(c.COSH, a)))
    return add(up, down), sub(up, down), cosh_r, sinh_r


def sinh(x: Expr) -> Expr:
    """Return sinh(n log 2) cosh(r) + cosh(n log 2) sinh(r)."""
    a = absolute(x)
    cosh_n, sinh_n, cosh_r, sinh_r = _hyperbolic(at_most(a, _SINH_HIGH[x.dtype.short]))
    half = add(sinh_n, fma(sinh_n, cosh_r, mul(cosh_n, sinh_r)))
    # Half of the smallest subnormal number is not representable.
    return copysign(select(lt(a, 2.0**-30), a, add(half, half)), x)


def cosh(x: Expr) -> Expr:
    """Return cosh(n log 2) cosh(r) + sinh(n log 2) sinh(r)."""
    a = at_most(absolute(x), _SINH_HIGH[x.dtype.short])
    cosh_n, sinh_n, cosh_r, sinh_r = _hyperbolic(a)
    half = add(cosh_n, fma(cosh_n, cosh_r, mul(sinh_n, sinh_r)))
    return add(half, half)
