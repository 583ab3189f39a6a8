"""The reference implementation of each operation of `loop_ir.expr`, on NumPy scalars.

Scalars have the exact dtype. The code is slow and as plain as possible, for native code
is compared with it. The caller sets `np.errstate(all="ignore")`.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.dtypes import DType, finfo
from hopflow.errors import LoopIRError
from hopflow.loop_ir.expr import COMPARE, MATH, Expr

Scalar: TypeAlias = Any
"""A NumPy scalar; bfloat16's is not an `np.generic` that type checkers know."""
Operation: TypeAlias = Callable[..., Scalar]


def scalar(value: bool | int | float, dtype: DType) -> Scalar:
    """Return `value`, which `dtype` can represent, as a scalar of `dtype`."""
    return dtype.dtype.type(value)


def operation(node: Expr) -> Operation:
    """Return the function that `node`, which is no leaf, applies to its operands."""
    op = node.op
    if op in MATH:
        return _math(op, node.dtype)
    if op in COMPARE:
        return _COMPARE[op]
    if op == "cast":
        return _cast(node.args[0].dtype, node.dtype)
    if op == "bitcast":
        to = node.dtype.dtype
        return lambda x: x.view(to)
    if op == "fma":
        dtype = node.dtype
        return lambda x, y, z: fma(x, y, z, dtype)
    if op == "select":
        return lambda test, x, y: x if test else y
    if op == "isnan":
        return np.isnan
    kind = node.dtype.kind
    table = _FLOAT if kind == "f" else _BOOL if kind == "b" else _INTEGER
    function, dtype = table[op], node.dtype
    if table is _INTEGER:
        return lambda *args: wrap(function(dtype, *map(int, args)), dtype)
    return function


def combine(name: str, dtype: DType) -> Operation:
    """Return the operation by which an `Accumulate` combines values."""
    x = Expr("const", (), dtype, 0)
    return operation(Expr(name, (x, x), dtype))


# --- integers: computed exactly, then wrapped -----------------------------------------


def wrap(value: int, dtype: DType) -> Scalar:
    """Return the scalar of an integer `dtype` that is `value` modulo 2 ** bits."""
    value &= (1 << dtype.bits) - 1
    if dtype.kind == "i" and value >> (dtype.bits - 1):
        value -= 1 << dtype.bits
    return dtype.dtype.type(value)


def _divide(dtype: DType, x: int, y: int) -> int:
    """Return the quotient truncated, as machines do; raise an error where they trap."""
    if y == 0 or (y == -1 and x == -1 << (dtype.bits - 1)):
        raise LoopIRError(f"the integer division {x} / {y} of {dtype} is evaluated")
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _remainder(dtype: DType, x: int, y: int) -> int:
    return x - _divide(dtype, x, y) * y


def _pattern(dtype: DType, x: int) -> int:
    return x & ((1 << dtype.bits) - 1)


def _shift_left(dtype: DType, x: int, amount: int) -> int:
    amount = _pattern(dtype, amount)
    return x << amount if amount < dtype.bits else 0


def _shift_right(dtype: DType, x: int, amount: int) -> int:
    return _pattern(dtype, x) >> _pattern(dtype, amount)


def _shift_right_signed(dtype: DType, x: int, amount: int) -> int:
    return x >> _pattern(dtype, amount)


_INTEGER: Final[dict[str, Callable[..., int]]] = {
    "neg": lambda _, x: -x,
    "abs": lambda _, x: abs(x),
    "not": lambda _, x: ~x,
    "popcount": lambda dtype, x: _pattern(dtype, x).bit_count(),
    "clz": lambda dtype, x: dtype.bits - _pattern(dtype, x).bit_length(),
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "mul": lambda _, x, y: x * y,
    "div": _divide,
    "rem": _remainder,
    "min": lambda _, x, y: min(x, y),
    "max": lambda _, x, y: max(x, y),
    "and": lambda _, x, y: x & y,
    "or": lambda _, x, y: x | y,
    "xor": lambda _, x, y: x ^ y,
    "shl": _shift_left,
    "lshr": _shift_right,
    "ashr": _shift_right_signed,
}

_BOOL: Final[dict[str, Operation]] = {
    "not": np.logical_not,
    "add": np.logical_or,
    "sub": np.logical_xor,
    "mul": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}

_COMPARE: Final[dict[str, Operation]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "add_overflows": lambda x, y: _overflows(x, int(x) + int(y)),
    "mul_overflows": lambda x, y: _overflows(x, int(x) * int(y)),
}


def _overflows(like: Scalar, value: int) -> bool:
    """Return whether the dtype of `like` cannot represent an integer."""
    info = np.iinfo(like.dtype)
    return not info.min <= value <= info.max


# --- floats ---------------------------------------------------------------------------


def _minimum(x: Scalar, y: Scalar) -> Scalar:
    """Return the minimum: NaN if either operand is; -0 is less than 0."""
    if x != x or y != y:
        return x if x != x else y
    return x if x < y or (x == y and np.signbit(x)) else y


def _maximum(x: Scalar, y: Scalar) -> Scalar:
    if x != x or y != y:
        return x if x != x else y
    return x if x > y or (x == y and not np.signbit(x)) else y


_FLOAT: Final[dict[str, Operation]] = {
    "neg": lambda x: -x,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "rem": np.fmod,
    "min": _minimum,
    "max": _maximum,
    "copysign": np.copysign,
}


def fma(x: Scalar, y: Scalar, z: Scalar, dtype: DType) -> Scalar:
    """Return `x * y + z`, computed exactly and rounded once."""
    wide = [float(v) for v in (x, y, z)]
    if not all(map(math.isfinite, wide)):
        finite = math.isfinite(wide[0]) and math.isfinite(wide[1])
        return z if finite else x * y + z
    product = Fraction(wide[0]) * Fraction(wide[1])
    exact = product + Fraction(wide[2])
    if exact == 0:  # zeros of one sign keep it; else the sum is +0
        negative = product == 0 and np.signbit(x * y) and np.signbit(z)
        return scalar(-0.0 if negative else 0.0, dtype)
    return round_exactly(exact, dtype)


def round_exactly(exact: Fraction, dtype: DType) -> Scalar:
    """Return the nonzero `exact` rounded to a floating `dtype`, ties to even."""
    info = finfo(dtype)
    digits = 2 - math.frexp(info.eps)[1]  # of the significand: eps is 2 ** (1 - p)
    lowest = math.frexp(info.smallest_normal)[1] - 1
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = max(exponent, lowest) - (digits - 1)
    steps = round(size / Fraction(2) ** step)
    try:
        rounded = math.ldexp(steps, step)
    except OverflowError:
        rounded = math.inf
    return scalar(math.copysign(rounded, 1 if exact > 0 else -1), dtype)


# --- conversions ----------------------------------------------------------------------


def _cast(source: DType, target: DType) -> Operation:
    if source.kind != "f" or target.kind == "f":
        to = target.dtype
        return lambda x: x.astype(to)
    info = np.iinfo(target.dtype)
    low, high = int(info.min), int(info.max)

    def saturate(x: Scalar) -> Scalar:
        value = float(x)
        if math.isnan(value):
            return scalar(0, target)
        if math.isinf(value):
            return scalar(high if value > 0 else low, target)
        return scalar(min(max(int(value), low), high), target)

    return saturate


# --- mathematical functions -----------------------------------------------------------


@cache
def array_function(name: str) -> Operation:
    """Return a function in MATH on arrays, with the special cases of C and JAX."""
    if name in _SCIPY:
        function = scipy_function(_SCIPY[name])
    else:
        function = getattr(np, _NUMPY.get(name, name))
    corrected = _CORRECTED.get(name)
    return function if corrected is None else lambda *args: corrected(function, *args)


def scipy_function(name: str) -> Operation:
    """Return a function of `scipy.special`, which is imported at the first call."""

    def function(*args: Any) -> Any:
        from scipy import special

        return getattr(special, name)(*args)

    return function


_NUMPY: Final = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
    "atan2": "arctan2",
    "pow": "power",
    "pow_nearest": "power",
    "ipow": "power",
}
_SCIPY: Final = {
    "erf": "erf",
    "erfc": "erfc",
    "erfinv": "erfinv",
    "lgamma": "gammaln",
    "logistic": "expit",
}


def _power(power: Operation, x: Any, y: Any) -> Any:
    # NumPy takes the square root for a scalar exponent 0.5: it differs at -inf and -0.
    root = (y == 0.5) & (np.isinf(x) | (x == 0))
    return np.where(root, np.abs(x), power(x, y))


def _inverse_erf(erfinv: Operation, x: Any) -> Any:
    return np.copysign(erfinv(x), x)  # SciPy returns 0 at -0


def _log_gamma(gammaln: Operation, x: Any) -> Any:
    # SciPy returns -inf at -inf, where C and JAX return inf, as at the poles. It also
    # returns inf where 1/x overflows.
    size = np.abs(x)
    near_pole = size < np.finfo(x.dtype).smallest_normal
    finite = np.where(near_pole, -np.log(size), gammaln(x))
    return np.where(np.isinf(x), np.inf, finite)


def _next_after(nextafter: Operation, x: Any, y: Any) -> Any:
    # For equal operands C returns the second (0 or -0); NumPy's float16 does not.
    return np.where(x == y, y, nextafter(x, y))


_CORRECTED: Final[dict[str, Operation]] = {
    "pow": _power,
    "erfinv": _inverse_erf,
    "lgamma": _log_gamma,
    "nextafter": _next_after,
}


@cache
def _math(name: str, dtype: DType) -> Operation:
    """Return a function in MATH that computes in float64 and rounds."""
    function, to = array_function(name), dtype.dtype
    if name == "ipow":  # a negative exponent, which NumPy refuses, is checked elsewhere
        return lambda x, y: np.power(x, max(y, y.dtype.type(0)))
    if name == "nextafter":  # the next value of the dtype itself
        return lambda x, y: function(x, y).astype(to)[()]
    return lambda *args: np.float64(function(*map(np.float64, args))).astype(to)
