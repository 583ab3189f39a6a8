"""Exact evaluation of scalar expressions on NumPy arrays.

NumPy has no FMA. It is emulated by error-free transformations: the exact product and
sum are two floats each, and rounding to odd in between makes the last rounding correct
(S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
algorithms using rounding to odd", 2008).
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.loop_ir.expr import Expr, Var

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def evaluate(expression: Expr, variables: Mapping[Var, Array]) -> Array:
    """Return the value of an expression for each element of the arrays."""
    memo: dict[int, Array] = {}

    def value(node: Expr) -> Array:
        if id(node) not in memo:
            memo[id(node)] = operation(node, [value(a) for a in node.args])
        return memo[id(node)]

    def operation(node: Expr, args: list[Array]) -> Array:
        if node.op == "var":
            return variables[node.attr]
        if node.op == "const":
            return np.array([node.attr], node.dtype.dtype)
        if node.op == "cast":
            return args[0].astype(node.dtype.dtype)
        if node.op == "bitcast":
            return args[0].view(node.dtype.dtype)
        return _OPERATIONS[node.op](*args)

    with np.errstate(all="ignore"):
        return value(expression)


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """Return `x + y` exactly, as a float and an error term (D. Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _to_odd(total: Array, error: Array) -> Array:
    """Return `total + error` rounded to odd; `total` is the nearest float64 of it."""
    even = (total.view(np.int64) & 1) == 0
    towards = np.copysign(np.inf, error)
    return np.where((error != 0) & even, np.nextafter(total, towards), total)


def _fma_single(x: Array, y: Array, z: Array) -> Array:
    product = x.astype(np.float64) * y.astype(np.float64)  # exact
    total, error = _two_sum(product, z.astype(np.float64))
    odd = np.where(np.isfinite(total), _to_odd(total, error), total)
    return odd.astype(np.float32)


def _split(x: Array) -> tuple[Array, Array]:
    """Return x as the sum of two floats of 26 bits (G. Veltkamp)."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _fma_double(x: Array, y: Array, z: Array) -> Array:
    x, y, z = (np.ascontiguousarray(a) for a in np.broadcast_arrays(x, y, z))
    product = x * y
    (x1, x0), (y1, y0) = _split(x), _split(y)
    lost = x0 * y0 - (((product - x1 * y1) - x0 * y1) - x1 * y0)
    high, low = _two_sum(z, lost)
    total, error = _two_sum(product, high)
    result = total + _to_odd(*_two_sum(low, error))
    # `usual`: no intermediate result overflows or underflows. `plain`: the result is
    # exact, or not finite.
    sizes = np.abs(np.stack([x, y, z, product]))
    usual = ((sizes > 2.0**-900) & (sizes < 2.0**900)).all(axis=0)
    plain = (x == 0) | (y == 0) | ~np.isfinite(sizes[:3]).all(axis=0)
    result[plain] = (product + z)[plain]
    for i in np.flatnonzero(~usual & ~plain):
        result[i] = _fma_exact(float(x[i]), float(y[i]), float(z[i]))
    return result


def _fma_exact(x: float, y: float, z: float) -> float:
    """Compute an FMA by rational numbers, whose quotient Python rounds correctly."""
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if not exact:
        return x * y + z  # with the correct sign of zero
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _fma(x: Array, y: Array, z: Array) -> Array:
    return _fma_double(x, y, z) if x.dtype == np.float64 else _fma_single(x, y, z)


def _shift_logically(x: Array, bits: Array) -> Array:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    shifted: Array = x.view(unsigned) >> bits.view(unsigned)
    return shifted.view(x.dtype)


_OPERATIONS: Final[dict[str, Callable[..., Array]]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "ashr": np.right_shift,
    "copysign": np.copysign,
    "div": np.divide,
    "eq": np.equal,
    "fma": _fma,
    "ge": np.greater_equal,
    "gt": np.greater,
    "isnan": np.isnan,
    "le": np.less_equal,
    "lshr": _shift_logically,
    "lt": np.less,
    "max": np.maximum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.bitwise_or,
    "rint": np.rint,
    "select": np.where,
    "shl": np.left_shift,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
