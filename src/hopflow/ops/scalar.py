"""Scalar functions that are composed of several operations of the Loop IR.

They write no code, but take expressions of the Loop IR, of one dtype, and return one.
Lowering rules of several families of operations share them.
"""

from collections.abc import Callable
from typing import Final

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir.expr import (
    Expr,
    add,
    binary,
    bitcast,
    call,
    cast,
    compare,
    const,
    floor_div,
    floor_mod,
    select,
    sub,
    unary,
)

_UNSIGNED: Final = {d.bits: d for d in dtypes.UNSIGNED}
_SIGNED: Final = {d.bits: d for d in dtypes.SIGNED}


def true() -> Expr:
    return const(True, dtypes.bool_)


def false() -> Expr:
    return const(False, dtypes.bool_)


def like(value: bool | int | float, x: Expr) -> Expr:
    """Return `value` in the dtype of `x`."""
    return const(value, x.dtype)


def both(x: Expr, y: Expr) -> Expr:
    return binary("and", x, y)


def either(x: Expr, y: Expr) -> Expr:
    return binary("or", x, y)


def negate(x: Expr) -> Expr:
    """Return `not x` of a bool."""
    return unary("not", x)


def is_nan(x: Expr) -> Expr:
    return unary("isnan", x) if x.dtype.is_float else false()


def in_float32(fn: Callable[..., Expr]) -> Callable[..., Expr]:
    """Return `fn` with 16-bit floats computed in float32 and rounded once."""

    def wide(*args: Expr) -> Expr:
        dtype = args[0].dtype
        if not (dtype.is_float and dtype.bits == 16):
            return fn(*args)
        return cast(fn(*(cast(a, dtypes.float32) for a in args)), dtype)

    return wide


def math_call(name: str) -> Callable[..., Expr]:
    """Return the function `name` of `loop_ir.math`."""
    return in_float32(lambda *args: call(name, *args))


# --- comparison -----------------------------------------------------------------------


def comparison(name: str) -> Callable[[Expr, Expr], Expr]:
    """Return the comparison `name` as a function."""
    return lambda x, y: compare(name, x, y)


def maximum(x: Expr, y: Expr) -> Expr:
    """Return the larger value; NaN if either is NaN."""
    return binary("max", x, y)


def minimum(x: Expr, y: Expr) -> Expr:
    """Return the smaller value; NaN if either is NaN."""
    return binary("min", x, y)


def sign(x: Expr) -> Expr:
    """Return -1, 0 or 1; 0 for zeros of either sign, and NaN for NaN."""
    zero, one = like(0, x), like(1, x)
    if x.dtype.is_float:
        ordinary = either(compare("gt", x, zero), compare("lt", x, zero))
        rest = select(compare("eq", x, zero), zero, x)
        return select(ordinary, binary("copysign", one, x), rest)
    positive = select(compare("gt", x, zero), one, zero)
    if x.dtype.kind == "u":
        return positive
    return select(compare("lt", x, zero), like(-1, x), positive)


# --- division -------------------------------------------------------------------------


def floor_divide(x: Expr, y: Expr) -> Expr:
    """Return `floor(x / y)`; an integer divided by 0 is 0."""
    if x.dtype.is_float:
        return in_float32(_float_floor_divide)(x, y)
    return _unless_zero(floor_div, x, y)


def remainder(x: Expr, y: Expr) -> Expr:
    """Return `x - y * floor(x / y)`, with the sign of `y`; an integer modulo 0 is 0."""
    if x.dtype.is_float:
        return in_float32(_float_remainder)(x, y)
    return _unless_zero(floor_mod, x, y)


def _unless_zero(fn: Callable[[Expr, Expr], Expr], x: Expr, y: Expr) -> Expr:
    if y.is_const and y.attr != 0:
        return fn(x, y)
    is_zero = compare("eq", y, like(0, y))
    return select(is_zero, like(0, x), fn(x, select(is_zero, like(1, y), y)))


def _float_parts(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """Return `fmod(x, y)`, and whether `y` must be added for the floored remainder."""
    rest = call("fmod", x, y)
    zero = like(0, x)
    signs = compare("ne", _as_bit(rest, "lt", zero), _as_bit(y, "lt", zero))
    return rest, both(compare("ne", rest, zero), signs)


def _as_bit(x: Expr, name: str, y: Expr) -> Expr:
    return cast(compare(name, x, y), dtypes.uint8)


def _float_floor_divide(x: Expr, y: Expr) -> Expr:
    # As in CPython and NumPy: the remainder is exact, so the quotient is within one
    # rounding of an integer, to which it is rounded.
    rest, adjust = _float_parts(x, y)
    quotient = binary("div", sub(x, rest), y)
    quotient = select(adjust, sub(quotient, like(1, x)), quotient)
    floored = unary("floor", quotient)
    above = compare("gt", sub(quotient, floored), like(0.5, x))
    snapped = select(above, add(floored, like(1, x)), floored)
    plain = binary("div", x, y)
    zero = like(0, x)
    snapped = select(
        compare("eq", quotient, zero), binary("copysign", zero, plain), snapped
    )
    return select(compare("eq", y, zero), plain, snapped)


def _float_remainder(x: Expr, y: Expr) -> Expr:
    rest, adjust = _float_parts(x, y)
    zero = like(0, x)
    exact = select(compare("eq", rest, zero), binary("copysign", zero, y), rest)
    return select(adjust, add(rest, y), exact)


# --- powers ---------------------------------------------------------------------------


def integer_power(x: Expr, y: Expr) -> Expr:
    """Return `x ** y` of integers, which wraps as NumPy's does; `y` is not negative.

    All bits of the exponent count. `jax.numpy.power` ignores those from the seventh on,
    which matter for even bases, and for odd ones other than -1 and 1.
    """
    return call("ipow", x, y)


# --- bits -----------------------------------------------------------------------------


def bits_of(x: Expr, *, signed: bool = False) -> Expr:
    """Return the bits of a float as an integer of its width."""
    return bitcast(x, bit_dtype(x.dtype, signed=signed))


def bit_dtype(dtype: DType, *, signed: bool = False) -> DType:
    """Return the integer dtype of the same width."""
    return (_SIGNED if signed else _UNSIGNED)[dtype.bits]


def _shift(name: str, x: Expr, y: Expr, beyond: Expr) -> Expr:
    # A negative amount is a huge one as an unsigned number.
    amount = bitcast(y, bit_dtype(y.dtype))
    inside = compare("lt", amount, like(x.dtype.bits, amount))
    return select(inside, binary(name, x, select(inside, y, like(0, y))), beyond)


def shift_left(x: Expr, y: Expr) -> Expr:
    """Return `x << y`; 0 where `y` is negative, or the width or more."""
    return _shift("shl", x, y, like(0, x))


def shift_right(x: Expr, y: Expr) -> Expr:
    """Return `x >> y`; only sign bits where `y` is negative, or the width or more."""
    if x.dtype.kind == "u":
        return _shift("lshr", x, y, like(0, x))
    return _shift("ashr", x, y, binary("ashr", x, like(x.dtype.bits - 1, x)))


def sign_bit(x: Expr) -> Expr:
    """Return whether the sign bit is set, also for zeros and NaNs."""
    if x.dtype.kind == "u":
        return false()
    whole = bits_of(x, signed=True) if x.dtype.is_float else x
    return compare("lt", whole, like(0, whole))


def is_finite(x: Expr) -> Expr:
    if not x.dtype.is_float:
        return true()
    return compare("lt", unary("abs", x), like(float("inf"), x))


def is_inf(x: Expr) -> Expr:
    if not x.dtype.is_float:
        return false()
    return compare("eq", unary("abs", x), like(float("inf"), x))


def next_after(x: Expr, y: Expr) -> Expr:
    """Return the next float from `x` towards `y`."""
    bits, target = bits_of(x), bits_of(y)
    top = like(1 << (bits.dtype.bits - 1), bits)
    rest = like((1 << (bits.dtype.bits - 1)) - 1, bits)
    size, target_size = binary("and", bits, rest), binary("and", target, rest)
    one = like(1, bits)
    smallest = binary("or", binary("and", target, top), one)
    signs = compare("ne", binary("and", binary("xor", bits, target), top), like(0, top))
    inwards = either(compare("gt", size, target_size), signs)
    moved = select(inwards, sub(bits, one), add(bits, one))
    moved = select(compare("eq", size, like(0, size)), smallest, moved)
    result = select(compare("eq", x, y), y, bitcast(moved, x.dtype))
    return select(either(is_nan(x), is_nan(y)), add(x, y), result)
