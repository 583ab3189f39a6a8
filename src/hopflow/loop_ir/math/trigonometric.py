"""sin, cos and tan for every finite argument.

`x = k pi / 2 + r` with |r| <= pi / 4; k mod 4 chooses the function of r and the sign.

Arguments up to `NEAR` take the reduction of Cody and Waite with three words of pi / 2:
`x - k * word` is exact in an fma for the first word, and correctly rounded for the
others. A `precise` reduction, for functions that amplify its error, keeps the rounding
error. Larger arguments take the reduction of Payne and Hanek: it multiplies only the
bits of 2 / pi that affect the last two bits of k and r. Both are evaluated and one is
selected, unless the caller states that its arguments are near.

Sources: W. Cody and W. Waite, "Software Manual for the Elementary Functions", 1980;
M. Payne and R. Hanek, "Radian reduction for trigonometric functions", 1983; J.-M.
Muller, "Elementary Functions", 3rd edition, chapter 11, for how near a number may be to
a multiple of pi / 2.
"""

from itertools import pairwise
from typing import Final, TypeAlias

from hopflow import dtypes
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import coefficients as c
from hopflow.loop_ir.math.arith import (
    F64,
    absolute,
    add,
    binary,
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
    polynomial,
    select,
    shl,
    sub,
    table,
    to_bits,
    two_product,
)

# r, its rounding error, and an integer whose low bits are k.
_Reduced: TypeAlias = tuple[Expr, Expr, Expr]

NEAR: Final = {"f32": 2.0**17, "f64": 2.0**30}


def _cody_waite(x: Expr, precise: bool) -> _Reduced:
    magic = format_of(x).magic
    # All words are positive, so that the fma with 0 preserves -0.
    high, middle, low = table(c.CODY_WAITE, x)
    total = fma(x, table(c.TWO_OVER_PI, x)[0], magic)
    k = sub(total, magic)
    r = fma(k, -high, x)
    if not precise:
        r = fma(k, -low, fma(k, -middle, r))
        return r, expr.const(0.0, x.dtype), to_bits(total)
    step, step_low = two_product(k, -middle)
    r, lost = fast_two_sum(r, step)
    return *fast_two_sum(r, fma(k, -low, add(lost, step_low))), to_bits(total)


def _modulo_4(x: Expr) -> Expr:
    """Return x - 4 n, of magnitude at most 2, exactly."""
    return fma(expr.unary("rint", mul(x, 0.25)), -4.0, x)


def _payne_hanek_single(x: Expr) -> _Reduced:
    """Reduce an f32 beyond `NEAR`, in double precision.

    x has 24 bits: its product with a chunk of 29 bits of 2 / pi is exact. Chunks that
    only give multiples of 4 are skipped, and the first two products taken modulo 4.
    """
    wide = expr.cast(x, dtypes.float64)
    large = gt(absolute(wide), 2.0**76)
    first, second, third, last = (
        select(large, high, low, dtypes.float64)
        for low, high in zip(c.TWO_OVER_PI_LOW, c.TWO_OVER_PI_HIGH, strict=True)
    )
    one, two = _modulo_4(mul(wide, first)), _modulo_4(mul(wide, second))
    total = add(fma(wide, third, add(one, two)), F64.magic)
    k = sub(total, F64.magic)
    turn = fma(wide, last, fma(wide, third, add(sub(one, k), two)))
    exact = mul(turn, c.HALF_PI["f64"][0])
    r = expr.cast(exact, dtypes.float32)
    lost = expr.cast(sub(exact, expr.cast(r, dtypes.float64)), dtypes.float32)
    return r, lost, expr.cast(to_bits(total), dtypes.int32)


def _window(exponent: Expr) -> list[Expr]:
    """Return 192 bits of 2 / pi as three words, from weight 2**(54 - exponent) on.

    The upper bits of the exponent choose four words of the table, each bit halving the
    candidates; the lower bits shift them.
    """
    u64 = dtypes.uint64
    words = [expr.const(word, u64) for word in c.TWO_OVER_PI_WORDS]
    for step in (8, 4, 2, 1):
        skip = compare("ne", binary("and", exponent, step * 64), 0)
        words = [
            select(skip, words[i + step], words[i])
            for i in range(min(len(words) - step, 3 + step))
        ]
    shift = binary("and", exponent, 63)
    back = binary("xor", shift, 63)
    return [
        binary(
            "or",
            binary("shl", high, shift),
            binary("lshr", lshr(low, 1), back),  # a shift by 64 would be undefined
        )
        for high, low in pairwise(words)
    ]


def _high_product(x: Expr, y: Expr) -> Expr:
    """Return `x * y >> 64` for x < 2**53, by halves of 32 bits."""
    mask = 2**32 - 1
    x_high, x_low = lshr(x, 32), binary("and", x, mask)
    y_high, y_low = lshr(y, 32), binary("and", y, mask)
    crossed, straight = mul(x_low, y_high), mul(x_high, y_low)
    middle = add(
        straight, add(binary("and", crossed, mask), lshr(mul(x_low, y_low), 32))
    )
    return add(mul(x_high, y_high), add(lshr(crossed, 32), lshr(middle, 32)))


def _payne_hanek_double(x: Expr) -> _Reduced:
    """Reduce an f64 beyond `NEAR`, in integers.

    It is the significand times 192 bits of 2 / pi, modulo 2**192: k mod 4 is in the
    upper two bits, and r * 2 / pi in 126 more, of which up to 62 may cancel.
    """
    u64, i64, f64 = dtypes.uint64, dtypes.int64, dtypes.float64
    bits = expr.bitcast(absolute(x), u64)
    exponent = sub(lshr(bits, 52), 1023)
    significand = binary("or", binary("and", bits, 2**52 - 1), 2**52)
    one, two, three = _window(exponent)
    carried = mul(significand, two)
    low = add(carried, _high_product(significand, three))
    carry = expr.cast(lt(low, carried), u64)
    high = add(mul(significand, one), _high_product(significand, two))
    high = add(high, carry)
    k = lshr(add(high, 2**61), 62)
    signed = expr.bitcast(sub(high, shl(k, 62)), i64)
    # Convert to double in three parts, so that the sum is rounded once.
    lower = binary("ashr", shl(signed, 32), 32)
    upper = expr.cast(sub(signed, lower), f64)
    last = expr.cast(expr.bitcast(lshr(low, 1), i64), f64)
    rest = fma(last, 2.0**-125, mul(expr.cast(lower, f64), 2.0**-62))
    turn, turn_low = fast_two_sum(mul(upper, 2.0**-62), rest)
    half_pi, half_pi_low = c.HALF_PI["f64"]
    r, r_low = two_product(turn, half_pi)
    r_low = add(r_low, fma(turn, half_pi_low, mul(turn_low, half_pi)))
    # All results take the sign of x; inf and NaN give NaN.
    sign = copysign(add(sub(x, x), 1.0), x)
    k = expr.bitcast(k, i64)
    k = select(lt(x, 0.0), expr.unary("neg", k), k)
    return *fast_two_sum(mul(r, sign), mul(r_low, sign)), k


def _reduce(x: Expr, near: bool, precise: bool = False) -> _Reduced:
    close = _cody_waite(x, precise)
    if near:
        return close
    double = x.dtype is dtypes.float64
    distant = _payne_hanek_double(x) if double else _payne_hanek_single(x)
    far = gt(absolute(x), NEAR[x.dtype.short])
    r, low, k = (select(far, d, c) for d, c in zip(distant, close, strict=True))
    return r, low, k


def _sin_or_cos(x: Expr, quarter: int, near: bool) -> Expr:
    """Return sin(x + quarter pi / 2)."""
    f = format_of(x)
    r, _, k = _reduce(x, near)
    square = mul(r, r)
    sine = fma(mul(r, square), polynomial(square, table(c.SIN, x)), r)
    tail = fma(square, polynomial(square, table(c.COS, x)), -0.5)
    cosine = fma(square, tail, 1.0)
    odd = compare("ne", binary("and", k, 1), 0)
    if quarter == 0:
        sine = copysign(sine, r)  # for -0
        value = select(odd, cosine, sine)
    else:
        value = select(odd, sine, cosine)
        k = add(k, 1)
    sign = binary("and", shl(k, f.integer.bits - 2), f.sign_bit)
    return from_bits(binary("xor", to_bits(value), sign), f)


def sin(x: Expr, near: bool = False) -> Expr:
    return _sin_or_cos(x, 0, near)


def cos(x: Expr, near: bool = False) -> Expr:
    return _sin_or_cos(x, 1, near)


def tan(x: Expr, near: bool = False) -> Expr:
    """Return tan(r), or -1 / tan(r), corrected by the tangent's error, if k is odd."""
    r, low, k = _reduce(x, near, precise=True)
    square = mul(r, r)
    rest = fma(mul(r, square), polynomial(square, table(c.TAN, x)), low)
    t, lost = fast_two_sum(r, rest)
    q = div(-1.0, t)
    cotangent = fma(q, fma(q, lost, fma(q, t, 1.0)), q)
    odd = compare("ne", binary("and", k, 1), 0)
    return select(eq(x, 0.0), x, select(odd, cotangent, t))  # for -0
