"""Powers of integers modulo an integer: `pow(x, exponent, modulus)`."""

from typing import Any, Final

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.dtypes import iinfo
from hopflow.errors import ArgumentTypeError, ArgumentValueError, PowerError
from hopflow.ops import reduce
from hopflow.ops.check import check
from hopflow.ops.convert import astype
from hopflow.ops.creation import full_like
from hopflow.ops.elementwise import abs, maximum, remainder
from hopflow.ops.logic import (
    bitwise_and,
    less,
    less_equal,
    logical_and,
    not_equal,
    where,
)
from hopflow.ops.opdef import as_operand
from hopflow.symbolic.size import SymInt

_MOST: Final = 1 << 32
"""Products of two numbers below this fit uint64."""


def modular_power(x: Any, exponent: Any, modulus: Any) -> Value:
    """Return `x ** exponent % modulus` of integers without overflow, as `pow`.

    Shapes:
        x          i[*s]
        exponent   an int, or i[*t]
        modulus    i[*u]; the three broadcast

    Raises:
        ArgumentTypeError: an operand is no integer.
        ArgumentValueError: `modulus` is a number of more than 32 bits.
        PowerError: the exponent is a negative number.
        DivisionError: `modulus` is 0 (in the run).
        CheckError: an exponent in a tensor is negative, or an element of `modulus` has
            more than 32 bits (in the run).

    >>> pow(hf.asarray([2, 3]), 100, 7)
    Tensor([2, 4], i64[2])
    """
    operands = [as_operand("pow", i, a) for i, a in enumerate((x, exponent, modulus))]
    for operand in operands:
        if not operand.type.dtype.is_integer:
            raise ArgumentTypeError(
                f"pow: with a modulus operands must be integers, and one is "
                f"{operand.type}. Use `x ** y % z` for floats."
            )
    if isinstance(modulus, int) and not -_MOST <= modulus <= _MOST:
        raise ArgumentValueError(
            f"pow: `modulus` must be from -2**32 to 2**32, and is {modulus}."
        )
    rest = remainder(x, modulus)
    divisor = astype(modulus, dtypes.int64)
    magnitude: Any = abs(divisor)
    if not isinstance(modulus, int) and rest.type.dtype.bits > 32:
        holds = less_equal(maximum(magnitude, -divisor), _MOST)
        check(reduce.all(holds), "pow: `modulus` must be from -2**32 to 2**32")
    # Now both have at most 32 bits, and `rest` has the sign of the modulus.
    base = remainder(astype(rest, dtypes.int64), magnitude)
    power = astype(_power(base, exponent, magnitude), dtypes.int64)
    signed = where(logical_and(less(divisor, 0), less(0, power)), divisor, 0)
    return astype(power + signed, rest.type.dtype)


def _power(base: Any, exponent: Any, size: Any) -> Any:
    """Return the power in uint64, of a base from 0 to `size`."""
    size, square = astype(size, dtypes.uint64), astype(base, dtypes.uint64)
    result = remainder(full_like(square, 1), size)
    if isinstance(exponent, int | SymInt):
        remaining = int(exponent)
        if remaining < 0:
            raise PowerError("pow", remaining)
        while remaining:
            result = remainder(result * square, size) if remaining & 1 else result
            remaining >>= 1
            square = remainder(square * square, size) if remaining else square
        return result
    check(reduce.all(less_equal(0, exponent)), "pow: an exponent must not be negative")
    for bit in range(iinfo(exponent.dtype).max.bit_length()):
        chosen = not_equal(bitwise_and(exponent, 1 << bit), 0)
        result = where(chosen, remainder(result * square, size), result)
        square = remainder(square * square, size)
    return result
