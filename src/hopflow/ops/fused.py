"""`fma`, the fused multiply-add: `x * y + z`, rounded once."""

from typing import Any, Final

import numpy as np

from hopflow.dtypes import float64
from hopflow.loop_ir import expr
from hopflow.loop_ir.scalars import fma as exact_fma
from hopflow.ops.opdef import Reference
from hopflow.ops.rules import Array, elementwise, floating


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and the exact rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded product and the exact rounding error (Dekker, Veltkamp)."""

    def split(x: Array) -> tuple[Array, Array]:
        scaled = x * 134217729.0  # 2**27 + 1
        high = scaled - (scaled - x)
        return high, x - high

    (ah, al), (bh, bl) = split(a), split(b)
    product = a * b
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def _odd_sum(a: Array, b: Array) -> Array:
    """Return `a + b` rounded to odd: the neighbour with an odd last bit, so that
    rounding it again to fewer bits equals rounding once."""
    total, error = _two_sum(a, b)
    bits = np.asarray(total).view(np.int64)
    even = (bits & 1 == 0) & (error != 0)
    away = (error > 0) == (total > 0)
    return np.where(even, bits + np.where(away, 1, -1), bits).view(np.float64)


def _double_fma(x: Array, y: Array, z: Array) -> Array:
    """Return the float64 result by rounding a sum to odd.

    S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Trans. Comput. 57 (2008).
    """
    high, low = _two_product(x, y)
    middle, rest = _two_sum(z, low)
    top, carried = _two_sum(high, middle)
    result = np.asarray(top + _odd_sum(rest, carried))
    # Elements whose partial results may overflow or underflow are computed one by one.
    parts = np.stack([np.abs(v) for v in (x, y, z, high)])
    plain = np.all((parts < 2.0**900) & (parts > 2.0**-900), axis=0)
    for i in zip(*np.nonzero(~plain), strict=True):
        result[i] = exact_fma(x[i], y[i], z[i], float64)
    return result


def _run(x: Array, y: Array, z: Array) -> Any:
    x, y, z = np.broadcast_arrays(x, y, z)
    if x.dtype == np.float64:
        shape = x.shape
        return _double_fma(*(np.atleast_1d(v) for v in (x, y, z))).reshape(shape)
    # The product of two float32 is exact in float64, and a sum that is rounded to odd
    # there can be rounded again.
    wide = [np.asarray(v, np.float64) for v in (x, y, z)]
    product = wide[0] * wide[1]
    total = product + wide[2]
    finite = np.isfinite(total) & (total != 0)
    return np.where(finite, _odd_sum(product, wide[2]), total).astype(np.float32)


fma: Final = elementwise(
    "fma",
    "`x1 * x2 + x3`, rounded once.",
    _run,
    expr.fma,
    arity=3,
    promote=floating,
    reference=Reference(None, None),
    jvp=(
        lambda t, out, x, y, z: t * y,
        lambda t, out, x, y, z: x * t,
        lambda t, out, x, y, z: t,
    ),
)
