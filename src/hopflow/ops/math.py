"""Elementary and special functions of floats; integers become the default float."""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.loop_ir.expr import unary
from hopflow.loop_ir.math import coefficients
from hopflow.loop_ir.scalars import array_function
from hopflow.ops import scalar
from hopflow.ops.convert import as_value, astype
from hopflow.ops.elementwise import (
    abs,
    add,
    divide,
    equal,
    floor,
    greater_equal,
    isnan,
    less,
    logical_and,
    multiply,
    reciprocal,
    round,
    subtract,
    where,
)
from hopflow.ops.opdef import OpDef, Reference, Rules
from hopflow.ops.rules import elementwise, floating


def _by_slope(slope: Callable[[Any, Any], Any]) -> Rules:
    return (lambda t, out, x: t * slope(out, x),)


def _function(
    name: str,
    doc: str,
    low: float = -3.0,
    high: float = 3.0,
    *,
    arity: int = 1,
    slope: Callable[[Any, Any], Any] | None = None,
    jvp: Rules | None = None,
    ulps: int = 4,
    special: str = "",
    jax_ulps: int = 4,
) -> OpDef:
    """Return a function of `loop_ir.math`; samples are drawn from [low, high].

    slope       (result, x) -> the derivative, for a function of one operand
    special     its name in `scipy.special`, if it is one of those
    """
    space = f"scipy.special.{special}" if special else f"numpy.{name}"
    return elementwise(
        name,
        doc,
        array_function(name),
        scalar.math_call(name),
        arity=arity,
        promote=floating,
        low=low,
        high=high,
        jvp=jvp if slope is None else _by_slope(slope),
        ulps=ulps,
        reference=Reference(space, f"jax.{space}", jax_ulps),
    )


# --- exponentials and logarithms ------------------------------------------------------

exp: Final[OpDef] = _function("exp", "e to the power `x`.", slope=lambda out, x: out)
exp2: Final[OpDef] = _function(
    "exp2", "2 to the power `x`.", slope=lambda out, x: out * math.log(2)
)
expm1: Final[OpDef] = _function(
    "expm1", "`exp(x) - 1`, accurate near 0.", slope=lambda out, x: out + 1
)
log: Final[OpDef] = _function(
    "log", "The natural logarithm.", 0.1, 9.0, slope=lambda out, x: 1 / x
)
log2: Final[OpDef] = _function(
    *("log2", "The logarithm to base 2.", 0.1, 9.0),
    slope=lambda out, x: 1 / (x * math.log(2)),
)
log10: Final[OpDef] = _function(
    *("log10", "The logarithm to base 10.", 0.1, 9.0),
    slope=lambda out, x: 1 / (x * math.log(10)),
)
log1p: Final[OpDef] = _function(
    *("log1p", "`log(1 + x)`, accurate near 0.", -0.9, 9.0),
    jax_ulps=16,
    slope=lambda out, x: 1 / (x + 1),
)
logistic: Final[OpDef] = _function(
    "logistic",
    "`1 / (1 + exp(-x))`, the sigmoid function.",
    slope=lambda out, x: out * (1 - out),
    special="expit",
)
sigmoid: Final = logistic

# --- trigonometry ---------------------------------------------------------------------

sin: Final[OpDef] = _function(
    "sin", "The sine, of radians.", slope=lambda out, x: cos(x)
)
cos: Final[OpDef] = _function(
    "cos", "The cosine, of radians.", slope=lambda out, x: -sin(x)
)
tan: Final[OpDef] = _function(
    *("tan", "The tangent, of radians.", -1.4, 1.4),
    jax_ulps=8,
    slope=lambda out, x: out * out + 1,
)
asin: Final[OpDef] = _function(
    *("asin", "The inverse of `sin`.", -1.0, 1.0),
    slope=lambda out, x: rsqrt(1 - x * x),
)
acos: Final[OpDef] = _function(
    *("acos", "The inverse of `cos`.", -1.0, 1.0),
    jax_ulps=16,
    slope=lambda out, x: -rsqrt(1 - x * x),
)
atan: Final[OpDef] = _function(
    "atan", "The inverse of `tan`.", slope=lambda out, x: 1 / (x * x + 1)
)
atan2: Final[OpDef] = _function(
    "atan2",
    "The angle of the point (`x2`, `x1`), in (-pi, pi].",
    arity=2,
    jvp=(
        lambda t, out, y, x: t * (x / (x * x + y * y)),
        lambda t, out, y, x: -t * (y / (x * x + y * y)),
    ),
)
sinh: Final[OpDef] = _function(
    "sinh", "The hyperbolic sine.", slope=lambda out, x: cosh(x), jax_ulps=8
)
cosh: Final[OpDef] = _function(
    "cosh", "The hyperbolic cosine.", slope=lambda out, x: sinh(x), jax_ulps=8
)
tanh: Final[OpDef] = _function(
    "tanh", "The hyperbolic tangent.", slope=lambda out, x: 1 - out * out
)
asinh: Final[OpDef] = _function(
    "asinh",
    "The inverse of `sinh`.",
    slope=lambda out, x: rsqrt(x * x + 1),
    jax_ulps=16,
)
acosh: Final[OpDef] = _function(
    *("acosh", "The inverse of `cosh`.", 1.0, 9.0),
    jax_ulps=16,
    slope=lambda out, x: rsqrt(x - 1) * rsqrt(x + 1),
)
atanh: Final[OpDef] = _function(
    *("atanh", "The inverse of `tanh`.", -0.9, 0.9),
    jax_ulps=16,
    slope=lambda out, x: 1 / ((1 - x) * (1 + x)),
)

# --- roots ----------------------------------------------------------------------------

sqrt: Final[OpDef] = elementwise(
    "sqrt",
    "The square root, correctly rounded; NaN below 0.",
    np.sqrt,
    lambda x: unary("sqrt", x),
    arity=1,
    promote=floating,
    low=0.0,
    high=9.0,
    jvp=_by_slope(lambda out, x: 0.5 / out),
)
cbrt: Final[OpDef] = _function(
    "cbrt", "The cube root.", slope=lambda out, x: 1 / (3 * out * out)
)
hypot: Final[OpDef] = _function(
    "hypot",
    "`sqrt(x1**2 + x2**2)`, without overflow.",
    arity=2,
    jvp=(lambda t, out, x, y: t * (x / out), lambda t, out, x, y: t * (y / out)),
)


def rsqrt(x: Any, /) -> Value:
    """Return `1 / sqrt(x)`."""
    return reciprocal(sqrt(x))


# --- special functions ----------------------------------------------------------------

_BELL: Final = 2 / math.sqrt(math.pi)

erf: Final[OpDef] = _function(
    "erf",
    "The error function.",
    slope=lambda out, x: _BELL * exp(-x * x),
    special="erf",
)
erfc: Final[OpDef] = _function(
    *("erfc", "`1 - erf(x)`, accurate for large `x`."),
    slope=lambda out, x: -_BELL * exp(-x * x),
    ulps=16,
    special="erfc",
    jax_ulps=64,
)
erfinv: Final[OpDef] = _function(
    *("erfinv", "The inverse of `erf`.", -0.99, 0.99),
    slope=lambda out, x: exp(out * out) / _BELL,
    ulps=16,
    special="erfinv",
    jax_ulps=400,
)
lgamma: Final[OpDef] = _function(
    *("lgamma", "The logarithm of |gamma(x)|.", 0.1, 9.0),
    slope=lambda out, x: digamma(x),
    ulps=16,
    special="gammaln",
    jax_ulps=40,
)

# B(2k) / 2k, with Bernoulli's numbers: the asymptotic series of digamma.
_BERNOULLI: Final = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_SHIFT: Final = 10  # from here on the series has the precision of float64


def digamma(x: Any, /) -> Value:
    """Return the derivative of `lgamma`: -inf at 0, NaN at negative integers.

    f[*s] -> f[*s]; integers become the default float. The error is at most 16 units in
    the last place. Near the negative zeros, where a difference cancels, it is 16 units
    of the larger of 1 and the terms digamma(1 - x) and pi / tan(pi x). Results of 16
    bits are computed in float32 and rounded.
    """
    [operand] = map(as_value, lgamma.operands((x,)))
    if operand.type.dtype.bits == 16:
        wide = _digamma(astype(operand, dtypes.float32))
        return astype(wide, operand.type.dtype)
    return _digamma(operand)


def _digamma_near_root(x: Value) -> tuple[Value, Value]:
    """Return whether the positive root is near, where summing terms would cancel all
    digits, and the value there."""
    short = x.type.dtype.short
    root, root_low = coefficients.DIGAMMA_ROOT[short]
    distance = subtract(subtract(x, root), root_low)
    factor: Any = 0.0
    for c in reversed(coefficients.DIGAMMA[short]):
        factor = add(multiply(factor, distance), c)
    return less(abs(distance), 0.85), multiply(distance, factor)


def _digamma(x: Value) -> Value:
    mirrored = less(x, 0.5)
    z = where(mirrored, subtract(1.0, x), x)
    far = add(z, _SHIFT)
    square = reciprocal(multiply(far, far))
    tail: Any = 0.0
    for term in reversed(_BERNOULLI):
        tail = multiply(add(tail, term), square)
    result = subtract(subtract(log(far), divide(0.5, far)), tail)
    steps: Any = 0.0  # the smallest term first
    for k in reversed(range(_SHIFT)):
        steps = add(steps, reciprocal(add(z, k)))
    is_near, near = _digamma_near_root(z)
    result = where(is_near, near, subtract(result, steps))
    # digamma(1 - x) - digamma(x) = pi / tan(pi x), which has period 1: the distance to
    # the nearest integer is exact.
    turn = multiply(where(mirrored, subtract(x, round(x)), 0.5), math.pi)
    result = subtract(result, where(mirrored, divide(math.pi, tan(turn)), 0.0))
    pole = logical_and(less(x, 0.0), equal(x, floor(x)))
    return where(pole, math.nan, result)


def logaddexp(x1: Any, x2: Any, /) -> Value:
    """Return `log(exp(x1) + exp(x2))`, without overflow."""
    x, y = map(as_value, divide.operands((x1, x2)))
    # `where` instead of `maximum`, whose derivative would be split at a tie.
    first = greater_equal(x, y)
    large, small = where(first, x, y), where(first, y, x)
    difference = subtract(small, large)
    # The difference of equal infinities is NaN; their sum is the result.
    undefined = isnan(difference)
    smooth = add(large, log1p(exp(where(undefined, 0.0, difference))))
    return where(undefined, add(x, y), smooth)
