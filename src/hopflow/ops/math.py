"""Elementary and special functions of floats; integers become the default float."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.loop_ir.expr import unary
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
    run: Callable[..., Any],
    low: float = -3.0,
    high: float = 3.0,
    *,
    arity: int = 1,
) -> OpDef:
    """A function of `loop_ir.math`; samples are drawn from [low, high]."""
    return elementwise(
        name,
        doc,
        run,
        scalar.math_call(name),
        arity=arity,
        promote=floating,
        low=low,
        high=high,
    )


def _special(name: str) -> Callable[..., Any]:
    """A function of `scipy.special`, which is imported when it is first called."""

    def run(*arrays: Any) -> Any:
        from scipy import special

        return getattr(special, name)(*arrays)

    return run


# --- exponentials and logarithms ------------------------------------------------------

exp: Final = _function("exp", "e to the power `x`.", np.exp)
exp2: Final = _function("exp2", "2 to the power `x`.", np.exp2)
expm1: Final = _function("expm1", "`exp(x) - 1`, accurate near 0.", np.expm1)
log: Final = _function("log", "The natural logarithm.", np.log, 0.1, 9.0)
log2: Final = _function("log2", "The logarithm to base 2.", np.log2, 0.1, 9.0)
log10: Final = _function("log10", "The logarithm to base 10.", np.log10, 0.1, 9.0)
log1p: Final = _function("log1p", "`log(1 + x)`, accurate near 0.", np.log1p, -0.9, 9.0)
logistic: Final = _function(
    "logistic", "`1 / (1 + exp(-x))`, the sigmoid function.", _special("expit")
)
sigmoid: Final = logistic

# --- trigonometry ---------------------------------------------------------------------

sin: Final = _function("sin", "The sine, of radians.", np.sin)
cos: Final = _function("cos", "The cosine, of radians.", np.cos)
tan: Final = _function("tan", "The tangent, of radians.", np.tan, -1.4, 1.4)
asin: Final = _function("asin", "The inverse of `sin`.", np.arcsin, -1.0, 1.0)
acos: Final = _function("acos", "The inverse of `cos`.", np.arccos, -1.0, 1.0)
atan: Final = _function("atan", "The inverse of `tan`.", np.arctan)
atan2: Final = _function(
    "atan2",
    "The angle of the point (`x2`, `x1`), in (-pi, pi].",
    np.arctan2,
    arity=2,
)
sinh: Final = _function("sinh", "The hyperbolic sine.", np.sinh)
cosh: Final = _function("cosh", "The hyperbolic cosine.", np.cosh)
tanh: Final = _function("tanh", "The hyperbolic tangent.", np.tanh)
asinh: Final = _function("asinh", "The inverse of `sinh`.", np.arcsinh)
acosh: Final = _function("acosh", "The inverse of `cosh`.", np.arccosh, 1.0, 9.0)
atanh: Final = _function("atanh", "The inverse of `tanh`.", np.arctanh, -0.9, 0.9)

# --- roots ----------------------------------------------------------------------------

sqrt: Final = elementwise(
    "sqrt",
    "The square root, correctly rounded; a NaN below 0.",
    np.sqrt,
    lambda x: unary("sqrt", x),
    arity=1,
    promote=floating,
    low=0.0,
    high=9.0,
)
cbrt: Final = _function("cbrt", "The cube root.", np.cbrt)
hypot: Final = _function(
    "hypot", "`sqrt(x1**2 + x2**2)`, without overflow.", np.hypot, arity=2
)


def rsqrt(x: Any, /) -> Value:
    """`1 / sqrt(x)`."""
    return reciprocal(sqrt(x))


# --- special functions ----------------------------------------------------------------

erf: Final = _function("erf", "The error function.", _special("erf"))
erfc: Final = _function("erfc", "`1 - erf(x)`, accurate far out.", _special("erfc"))


def _erfinv_run(x: Any) -> Any:
    from scipy import special

    return np.copysign(special.erfinv(x), x)  # SciPy has 0 at -0


erfinv: Final = _function("erfinv", "The inverse of `erf`.", _erfinv_run, -0.99, 0.99)


def _lgamma_run(x: Any) -> Any:
    from scipy import special

    # SciPy has -inf at -inf; C and JAX have inf at all poles, and this is one's limit.
    return np.where(np.isinf(x), np.inf, special.gammaln(x))


lgamma: Final = _function(
    "lgamma", "The logarithm of |gamma(x)|.", _lgamma_run, 0.1, 9.0
)


def logaddexp(x1: Any, x2: Any, /) -> Value:
    """`log(exp(x1) + exp(x2))`, without overflow."""
    x, y = map(as_value, divide.operands((x1, x2)))
    difference = subtract(x, y)
    # Of two equal infinities the difference is a NaN, and their sum is the answer.
    undefined = isnan(difference)
    distance = abs(where(undefined, 0.0, difference))
    smooth = add(maximum(x, y), log1p(exp(negative(distance))))
    return where(undefined, add(x, y), smooth)
