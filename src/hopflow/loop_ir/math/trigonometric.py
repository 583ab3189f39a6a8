"""sin, cos and tan for every finite argument.

`x = k pi / 2 + r` with |r| <= pi / 4; k mod 4 chooses the function of r and the sign.

Arguments up to `NEAR` take the reduction of Cody and Waite with three words of pi / 2:
`x - k * word` is exact in an fma for the first word, and correctly rounded for the
others. Larger ones take that of Payne and Hanek: only those bits of 2 / pi are
multiplied that matter to the last two bits of k and to r. Both are evaluated and one is
selected, unless the caller says that its arguments are near.

Sources: W. Cody and W. Waite, "Software Manual for the Elementary Functions", 1980;
M. Payne and R. Hanek, "Radian reduction for trigonometric functions", 1983; J.-M.
Muller, "Elementary Functions", 3rd edition, chapter 11, for how near a number may be to
a multiple of pi / 2.
"""

from typing import Final

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
    sub,
    table,
    to_bits,
)

NEAR: Final = {"f32": 2.0**17, "f64": 2.0**30}


def _cody_waite(x: Expr) -> tuple[Expr, Expr]:
    """r, and an integer that is k in its low bits."""
    magic = format_of(x).magic
    high, middle, low = table(c.HALF_PI, x)
    total = fma(x, table(c.TWO_OVER_PI, x)[0], magic)
    k = sub(total, magic)
    r = fma(k, -low, fma(k, -middle, fma(k, -high, x)))
    return r, to_bits(total)


def _modulo_4(x: Expr) -> Expr:
    """x - 4 n, of magnitude at most 2, exactly."""
    return fma(expr.unary("rint", mul(x, 0.25)), -4.0, x)


def _payne_hanek_single(x: Expr) -> tuple[Expr, Expr]:
    """As `_cody_waite`, for f32 beyond `NEAR`, in double precision.

    x has 24 bits: its product with a chunk of 29 bits of 2 / pi is exact. Chunks that
    give multiples of 4 only are skipped, and the first two reduced modulo 4.
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
    r = mul(turn, c.HALF_PI["f64"][0])
    k_bits = expr.cast(to_bits(total), dtypes.int32)
    return expr.cast(r, dtypes.float32), k_bits


def _window(exponent: Expr) -> list[Expr]:
    """192 bits of 2 / pi as three words, from the bit of weight 2**(54 - exponent) on.

    Four words of the table are found by the upper bits of the exponent, halving what
    is left with each; the lower bits shift them.
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
        for high, low in zip(words[:-1], words[1:], strict=True)
    ]


def _high_product(x: Expr, y: Expr) -> Expr:
    """`x * y >> 64` for x < 2**53, by halves of 32 bits."""
    mask = 2**32 - 1
    x_high, x_low = lshr(x, 32), binary("and", x, mask)
    y_high, y_low = lshr(y, 32), binary("and", y, mask)
    crossed, straight = mul(x_low, y_high), mul(x_high, y_low)
    middle = add(straight, add(binary("and", crossed, mask), lshr(mul(x_low, y_low), 32)))
    return add(mul(x_high, y_high), add(lshr(crossed, 32), lshr(middle, 32)))


def _payne_hanek_double(x: Expr) -> tuple[Expr, Expr]:
    """As `_cody_waite`, for f64 beyond `NEAR`, in integers.

    The significand times 192 bits of 2 / pi, modulo 2**192: k mod 4 is in the upper two
    bits, and r * 2 / pi in 126 more, of which up to 62 may cancel.
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
    # To double in three parts, so that the sum is rounded once.
    lower = binary("and", signed, 2**32 - 1)
    upper = expr.cast(sub(signed, lower), f64)
    last = expr.cast(expr.bitcast(lshr(low, 1), i64), f64)
    rest = fma(last, 2.0**-125, mul(expr.cast(lower, f64), 2.0**-62))
    turn = fma(upper, 2.0**-62, rest)
    r = fma(turn, c.HALF_PI["f64"][0], mul(turn, c.HALF_PI["f64"][1]))
    # The sign of x goes to both; inf and NaN give NaN.
    negative = lt(x, 0.0)
    r = add(select(negative, neg(r), r), sub(x, x))
    k = expr.bitcast(k, i64)
    return r, select(negative, expr.unary("neg", k), k)


def _reduce(x: Expr, near: bool) -> tuple[Expr, Expr]:
    r, k = _cody_waite(x)
    if near:
        return r, k
    far = gt(absolute(x), NEAR[x.dtype.short])
    double = x.dtype is dtypes.float64
    r_far, k_far = _payne_hanek_double(x) if double else _payne_hanek_single(x)
    return select(far, r_far, r), select(far, k_far, k)


def _sin_or_cos(x: Expr, quarter: int, near: bool) -> Expr:
    """sin(x + quarter pi / 2)."""
    f = format_of(x)
    r, k = _reduce(x, near)
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
    sign = binary("and", shl(k, f.int.bits - 2), f.sign_bit)
    return from_bits(binary("xor", to_bits(value), sign), f)


def sin(x: Expr, near: bool = False) -> Expr:
    return _sin_or_cos(x, 0, near)


def cos(x: Expr, near: bool = False) -> Expr:
    return _sin_or_cos(x, 1, near)


def tan(x: Expr, near: bool = False) -> Expr:
    """tan(r), or -1 / tan(r) where k is odd."""
    r, k = _reduce(x, near)
    square = mul(r, r)
    t = fma(mul(r, square), polynomial(square, table(c.TAN, x)), r)
    odd = compare("ne", binary("and", k, 1), 0)
    return div(select(odd, -1.0, t), select(odd, t, 1.0))
