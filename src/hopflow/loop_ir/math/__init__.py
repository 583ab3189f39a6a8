"""Transcendental functions as straight-line code, in the operations of `expr`.

Every function is a range reduction and a polynomial, without branches, tables or calls,
and with explicit fma. So its results have the same bits on every target whose fma
rounds once: see `docs/notes/numerics_and_bits.md`. `tools/polynomials.py` computes the
coefficients.

Errors are at most 2 units in the last place over the whole range, subnormal numbers and
huge angles included, and at most 8 for erfinv and lgamma
(`tests/test_math_expansion.py` and `tests/test_special_functions.py` measure them).
Special cases are those of C99, annex F, and so of the array API.
"""

from collections.abc import Callable
from typing import Final

from hopflow import dtypes
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.math import (
    exponential,
    inverse,
    logarithmic,
    power,
    special,
    trigonometric,
)

__all__ = ["expand", "near"]

_UNARY: Final[dict[str, Callable[[Expr], Expr]]] = {
    "exp": exponential.exp,
    "exp2": exponential.exp2,
    "expm1": exponential.expm1,
    "logistic": exponential.logistic,
    "tanh": exponential.tanh,
    "sinh": exponential.sinh,
    "cosh": exponential.cosh,
    "log": logarithmic.log,
    "log2": logarithmic.log2,
    "log10": logarithmic.log10,
    "log1p": logarithmic.log1p,
    "asinh": logarithmic.asinh,
    "acosh": logarithmic.acosh,
    "atanh": logarithmic.atanh,
    "sin": trigonometric.sin,
    "cos": trigonometric.cos,
    "tan": trigonometric.tan,
    "asin": inverse.asin,
    "acos": inverse.acos,
    "atan": inverse.atan,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "lgamma": special.lgamma,
    "cbrt": power.cbrt,
}
_BINARY: Final[dict[str, Callable[[Expr, Expr], Expr]]] = {
    "pow": power.pow,
    "pow_nearest": power.pow_nearest,
    "atan2": inverse.atan2,
    "hypot": power.hypot,
    "nextafter": special.nextafter,
    "ipow": power.integer_power,
}
# An inherent loop, with one step for each bit of the quotient: LLVM's `frem` on a CPU.
_PRIMITIVE: Final = frozenset({"fmod"})
_NEAR: Final = {
    "sin": trigonometric.sin,
    "cos": trigonometric.cos,
    "tan": trigonometric.tan,
}


def expand(name: str, *args: Expr) -> Expr:
    """Return `name(*args)`, for a name in `expr.MATH`, in primitive operations.

    The arguments have one dtype, a floating one but for "ipow". float16 and bfloat16
    are computed in float32 and rounded once more. "fmod" stays one node.
    """
    dtype = args[0].dtype
    if name in _PRIMITIVE:
        return expr.call(name, *args)
    narrow = dtype in (dtypes.float16, dtypes.bfloat16)
    if narrow and name != "nextafter":
        result = expand(name, *(expr.cast(a, dtypes.float32) for a in args))
        return expr.cast(result, dtype)
    if name in _BINARY:
        x, y = args
        return _BINARY[name](x, y)
    [x] = args
    return _UNARY[name](x)


def near(name: str, x: Expr) -> tuple[Expr, float] | None:
    """Return a shorter expansion, and the largest |x| at which it has the bits of
    `expand`.

    Only sin, cos and tan have one, with a fifth to a half of the nodes: a target that
    can branch takes it, and the full one out of line if a lane is beyond the limit.
    """
    if name not in _NEAR or x.dtype.short not in trigonometric.NEAR:
        return None
    return _NEAR[name](x, near=True), trigonometric.NEAR[x.dtype.short]
