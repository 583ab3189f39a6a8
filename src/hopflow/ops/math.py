"""Elementary and special functions of floats; integers become the default float."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.loop_ir.expr import unary
from hopflow.loop_ir.scalars import array_function
from hopflow.ops import scalar
from hopflow.ops.convert import as_value
from hopflow.ops.elementwise import (
    abs,
    add,
    divide,
    isnan,
    maximum,
    negative,
    reciprocal,
    subtract,
    where,
)
from hopflow.ops.opdef import OpDef
from hopflow.ops.rules import elementwise, floating

__all__ = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "hypot",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logistic",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]


def _function(
    name: str,
    doc: str,
    low: float = -3.0,
    high: float = 3.0,
    *,
    arity: int = 1,
    slope: Callable[[Any, Any], Any] | None = None,
) -> OpDef:
    """A function of `loop_ir.math`; samples are drawn from [low, high].

    slope   (result, x) -> the derivative, of a function of one operand
    """
    jvp = None if slope is None else (lambda t, out, x: t * slope(out, x),)
    return elementwise(
        name,
        doc,
        array_function(name),
        scalar.math_call(name),
        arity=arity,
        promote=floating,
        low=low,
        high=high,
        jvp=jvp,
    )


# --- exponentials and logarithms ------------------------------------------------------

exp: Final[OpDef] = _function("exp", "e to the power `x`.", slope=lambda out, x: out)
exp2: Final[OpDef] = _function("exp2", "2 to the power `x`.")
expm1: Final[OpDef] = _function("expm1", "`exp(x) - 1`, accurate near 0.")
log: Final[OpDef] = _function(
    "log", "The natural logarithm.", 0.1, 9.0, slope=lambda out, x: 1 / x
)
log2: Final[OpDef] = _function("log2", "The logarithm to base 2.", 0.1, 9.0)
log10: Final[OpDef] = _function("log10", "The logarithm to base 10.", 0.1, 9.0)
log1p: Final[OpDef] = _function("log1p", "`log(1 + x)`, accurate near 0.", -0.9, 9.0)
logistic: Final[OpDef] = _function(
    "logistic", "`1 / (1 + exp(-x))`, the sigmoid function."
)
sigmoid: Final = logistic

# --- trigonometry ---------------------------------------------------------------------

sin: Final[OpDef] = _function(
    "sin", "The sine, of radians.", slope=lambda out, x: cos(x)
)
cos: Final[OpDef] = _function(
    "cos", "The cosine, of radians.", slope=lambda out, x: -sin(x)
)
tan: Final[OpDef] = _function("tan", "The tangent, of radians.", -1.4, 1.4)
asin: Final[OpDef] = _function("asin", "The inverse of `sin`.", -1.0, 1.0)
acos: Final[OpDef] = _function("acos", "The inverse of `cos`.", -1.0, 1.0)
atan: Final[OpDef] = _function("atan", "The inverse of `tan`.")
atan2: Final[OpDef] = _function(
    "atan2",
    "The angle of the point (`x2`, `x1`), in (-pi, pi].",
    arity=2,
)
sinh: Final[OpDef] = _function("sinh", "The hyperbolic sine.")
cosh: Final[OpDef] = _function("cosh", "The hyperbolic cosine.")
tanh: Final[OpDef] = _function(
    "tanh", "The hyperbolic tangent.", slope=lambda out, x: 1 - out * out
)
asinh: Final[OpDef] = _function("asinh", "The inverse of `sinh`.")
acosh: Final[OpDef] = _function("acosh", "The inverse of `cosh`.", 1.0, 9.0)
atanh: Final[OpDef] = _function("atanh", "The inverse of `tanh`.", -0.9, 0.9)

# --- roots ----------------------------------------------------------------------------

sqrt: Final[OpDef] = elementwise(
    "sqrt",
    "The square root, correctly rounded; a NaN below 0.",
    np.sqrt,
    lambda x: unary("sqrt", x),
    arity=1,
    promote=floating,
    low=0.0,
    high=9.0,
)
cbrt: Final[OpDef] = _function("cbrt", "The cube root.")
hypot: Final[OpDef] = _function(
    "hypot", "`sqrt(x1**2 + x2**2)`, without overflow.", arity=2
)


def rsqrt(x: Any, /) -> Value:
    """`1 / sqrt(x)`."""
    return reciprocal(sqrt(x))


# --- special functions ----------------------------------------------------------------

erf: Final[OpDef] = _function("erf", "The error function.")
erfc: Final[OpDef] = _function("erfc", "`1 - erf(x)`, accurate far out.")


erfinv: Final[OpDef] = _function("erfinv", "The inverse of `erf`.", -0.99, 0.99)
lgamma: Final[OpDef] = _function("lgamma", "The logarithm of |gamma(x)|.", 0.1, 9.0)


def logaddexp(x1: Any, x2: Any, /) -> Value:
    """`log(exp(x1) + exp(x2))`, without overflow."""
    x, y = map(as_value, divide.operands((x1, x2)))
    difference = subtract(x, y)
    # Of two equal infinities the difference is a NaN, and their sum is the answer.
    undefined = isnan(difference)
    distance = abs(where(undefined, 0.0, difference))
    smooth = add(maximum(x, y), log1p(exp(negative(distance))))
    return where(undefined, add(x, y), smooth)
