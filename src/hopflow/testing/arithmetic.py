"""The kinds of programs: their values and operations.

Exact     small whole numbers, to compare bits: sums are exact in any order
Large     the same, with up to a million elements in a value
Special   NaN, infinities, signed zeros, denormals and the extremes of integers, to
          compare bits; without sums of floats
Smooth    smooth functions in a bounded range, for derivatives; conditions compare with
          a number that no value equals by chance
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from hopflow.dtypes import DType, as_dtype
from hopflow.testing.aliasing import ALIASING_OPERATIONS, ALIASING_OPERATORS
from hopflow.testing.orders import ORDERS
from hopflow.testing.products import PRODUCTS
from hopflow.testing.programs import (
    OPERATORS,
    STRUCTURAL,
    Operation,
    Pool,
    axis,
    write,
)

DTYPES: Final = tuple(
    """float64 float32 int64 int32 int8 bool float16 uint8 uint16 uint32 uint64
    bfloat16""".split()
)


def unary(f: Callable[[Any, Any], Any]) -> Operation:
    return lambda p, a, *_: f(p.m, p.number(p.pick(a)))


def binary(f: Callable[[Any, Any, Any], Any]) -> Operation:
    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = p.number(p.pick(a))
        return p.bounded(f(p.m, x, p.number(p.mate(b, x))))

    return apply


# --- small whole numbers --------------------------------------------------------------


class Exact(Pool):
    """Programs on small whole numbers.

    bounds      dtype -> the largest absolute value, so that sums are exact
    """

    exact = True
    operators = OPERATORS | ALIASING_OPERATORS
    bounds: Mapping[str, float] = {
        "float64": 400.0,
        "float32": 400.0,
        "float16": 15.0,
        "bfloat16": 2.0,
    }
    # JAX promotes uint64 and signed integers to its default float, which is not that of
    # hopflow; `Special` draws uint64.
    dtypes = (*(d for d in DTYPES if d != "uint64"), "int16")

    def bounded(self, x: Any) -> Any:
        if x.dtype.name == "uint64":
            return self.m.astype(x, self.m.int64)
        if x.dtype.kind != "f":
            return x
        bound = self.bounds[x.dtype.name]
        return self.m.minimum(self.m.maximum(x, -bound), bound)

    def number(self, x: Any) -> Any:
        return self.m.astype(x, self.m.int32) if x.dtype.kind == "b" else x

    def terms(self, x: Any, y: Any) -> int:
        """Return how many terms are summed exactly, in the wider of both dtypes."""
        if x.dtype.kind != "f":
            return self.largest
        digits = max(ml_dtypes.finfo(as_dtype(v.dtype).dtype).nmant + 1 for v in (x, y))
        bounds = self.bounds[x.dtype.name] * self.bounds[y.dtype.name]
        return min(int(2**digits / bounds), self.largest)

    @classmethod
    def argument(cls, dtype: DType, shape: tuple[int, ...], seed: int) -> Any:
        """Return different numbers, small enough for exact sums."""
        spread = 5 if dtype.bits > 16 or dtype.kind != "f" else 2
        values = (np.arange(math.prod(shape)) * 3 + seed) % (2 * spread + 1) - spread
        values = np.abs(values) if dtype.kind == "u" else values
        return values.reshape(shape).astype(dtype.dtype)


class Large(Exact):
    """Programs with values large enough for threads, tiles and BLAS."""

    largest = 1_000_000
    bounds: Mapping[str, float] = {"float64": 8.0, "float32": 8.0}
    dtypes = ("float64", "float32", "int64", "int32", "bool", "uint8")
    shapes = (
        *((), (3,), (1_000_000,), (1000, 1000), (70_000,), (300, 400), (256, 64)),
        *((64, 256), (40, 50, 60), (2, 3, 10_000), (100_000, 3), (3, 100_000)),
        *((1025,), (1, 999), (0,), (2, 1, 130, 1, 70)),
    )

    def stack(self, k: int) -> Any:
        """Return a value with few rows, each of which is a step of a loop."""
        return self.like(k, lambda v: v.ndim > 0 and v.shape[0] <= 64)


def _convert(p: Pool, a: int, b: int, *_: int) -> Any:
    x, dtype = p.pick(a), as_dtype(DTYPES[b % len(DTYPES)])
    return p.bounded(p.m.astype(x, dtype))


def _divide(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.number(p.pick(a))
    y = p.number(p.mate(b, x))
    f = p.m.floor_divide if c % 2 else p.m.remainder
    return p.bounded(f(x, p.m.where(y == 0, 1, y)))


def _bits(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.like(a, lambda v: v.dtype.kind == "i")
    y = p.like(b, lambda v: v.dtype.kind == "i" and p.broadcasts(v.shape, x.shape))
    match c % 6:
        case 0:
            return p.m.bitwise_invert(x)
        case 1:
            return p.m.bitwise_left_shift(x, p.m.bitwise_and(y, 7))
        case 2:
            return p.m.bitwise_right_shift(x, p.m.bitwise_and(y, 7))
    return (p.m.bitwise_and, p.m.bitwise_or, p.m.bitwise_xor)[c % 3](x, y)


def _compare(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.number(p.pick(a))
    names = ("equal", "not_equal", "less_equal", "greater_equal")
    return getattr(p.m, names[c % 4])(x, p.number(p.mate(b, x)))


def _sign(p: Pool, a: int, b: int, *_: int) -> Any:
    m, x = p.m, p.number(p.pick(a))
    return p.bounded((m.negative, m.abs, m.sign, m.square, m.trunc)[b % 5](x))


_EXACT: Final[dict[str, Operation]] = {
    "add": binary(lambda _, x, y: x + y),
    "subtract": binary(lambda _, x, y: x - y),
    "multiply": binary(lambda _, x, y: x * y),
    "maximum": binary(lambda m, x, y: m.maximum(x, y)),
    "less": binary(lambda _, x, y: x < y),
    "compare": _compare,
    "any": axis(lambda m, x, axis: m.any(x > 0, axis=axis)),
    "sign": _sign,
    "argmin": axis(lambda m, x, axis: m.argmin(x, axis=axis)),
    "convert": _convert,
    "divide": _divide,
    "bits": _bits,
    "write": write,
}
Exact.operations = STRUCTURAL | PRODUCTS | ORDERS | _EXACT | ALIASING_OPERATIONS
Large.operations = {
    name: operation
    for name, operation in Exact.operations.items()
    if name
    not in (
        "convert",
        "sized",
    )  # small floats overflow; powers of lengths are too large
}


# --- special numbers ------------------------------------------------------------------


class Special(Pool):
    """Programs on special values: NaN, infinities, denormals, extremes of integers."""

    exact = True
    operators = OPERATORS | ALIASING_OPERATORS
    signed = True
    dtypes = (*DTYPES, "int16")

    def bounded(self, x: Any) -> Any:
        return x

    def number(self, x: Any) -> Any:
        return self.m.astype(x, self.m.int32) if x.dtype.kind == "b" else x

    def total(self, x: Any) -> Any:
        return self.m.sum(self.m.astype(self.number(x) > 0, self.m.int64))

    @classmethod
    def argument(cls, dtype: DType, shape: tuple[int, ...], seed: int) -> Any:
        if dtype.kind == "b":
            values = np.array([True, False, False])
        elif dtype.kind == "f":
            values = _special_floats(dtype)
        else:
            ends = np.iinfo(dtype.dtype)
            numbers = [ends.min, 1, ends.max, 0, 2, ends.max - 1, 7, ends.min + 1]
            values = np.array(numbers if ends.min == 0 else [-1, *numbers, -3])
        with np.errstate(all="ignore"):
            values = values.astype(dtype.dtype)
        return np.resize(np.roll(values, -3 * seed), shape)


def _special_floats(dtype: DType) -> Any:
    info = ml_dtypes.finfo(dtype.dtype)
    ends = (info.smallest_subnormal, info.tiny, info.max, info.eps)
    least, normal, most, eps = map(float, ends)
    payload = np.array(0x7FF8_DEAD_BEEF_0001).view(np.float64)
    return np.array(
        [
            *(-0.0, 1.0, math.nan, 2.5, math.inf, 0.0, least, -1.5, most, 1 + eps),
            *(-math.inf, -normal, 3.0, -least, payload, -most, 0.5, normal, -2.0),
        ]
    )


def _unsigned_zero(x: Any) -> Any:
    """Return `x` with 0 for -0, where the standard does not define the sign."""
    return x + 0 if x.dtype.kind == "f" else x


def _of_integers(f: Callable[[Any, Any, int], Any]) -> Operation:
    """Return an operation on integers, whose sums do not depend on the order."""
    return axis(lambda m, x, axis: f(m, m.astype(x, m.int64), axis))


def _special_unary(p: Pool, a: int, b: int, *_: int) -> Any:
    m, x = p.m, p.number(p.pick(a))
    functions = (m.negative, m.abs, m.square, m.trunc, m.floor, m.ceil, m.round, m.sqrt)
    return functions[b % (8 if x.dtype.kind == "f" else 7)](x)


def _special_divide(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x = p.number(p.pick(a))
    y = p.number(p.mate(b, x))
    if "f" in (x.dtype.kind, y.dtype.kind):
        return x / y
    return _divide(p, a, b, c, d)


def _unsigned(operation: Operation) -> Operation:
    """Return an operation without the signs of its zeros."""
    return lambda p, *numbers: _unsigned_zero(operation(p, *numbers))


def _special_test(p: Pool, a: int, b: int, *_: int) -> Any:
    functions = (p.m.isnan, p.m.isinf, p.m.isfinite)
    return functions[b % 3](p.number(p.pick(a)))


_OF_SPECIAL: Final[dict[str, Operation]] = {
    "sum": _of_integers(lambda m, x, axis: m.sum(x, axis=axis)),
    "cumsum": _of_integers(lambda m, x, axis: m.cumulative_sum(x, axis=axis)),
    "max": axis(lambda m, x, axis: _unsigned_zero(m.max(x, axis=axis))),
    "min": axis(lambda m, x, axis: _unsigned_zero(m.min(x, axis=axis))),
    "maximum": binary(lambda m, x, y: _unsigned_zero(m.maximum(x, y))),
    "minimum": binary(lambda m, x, y: _unsigned_zero(m.minimum(x, y))),
    "sign": _special_unary,
    "divide": _special_divide,
    "test": _special_test,
    "sort": _unsigned(ORDERS["sort"]),
    "top_k": _unsigned(ORDERS["top_k"]),
    "running": axis(lambda m, x, axis: _unsigned_zero(m.cummax(x, axis=axis))),
}
Special.operations = {
    name: operation
    for name, operation in (Exact.operations | _OF_SPECIAL).items()
    if name not in (*PRODUCTS, "sum_by")  # they sum floats
}


# --- smooth functions -----------------------------------------------------------------


class Smooth(Pool):
    """Programs of smooth functions with values in a bounded range."""

    operators = OPERATORS | ALIASING_OPERATORS
    dtypes = ("float64", "float64", "float32", "int64", "bool")
    threshold = 0.1237
    enough = 1.371

    def bounded(self, x: Any) -> Any:
        return 2 * self.m.tanh(x / 2) if x.dtype.kind == "f" else x

    def number(self, x: Any) -> Any:
        return x if x.dtype.kind == "f" else self.m.astype(x, self.m.float64)

    @classmethod
    def argument(cls, dtype: DType, shape: tuple[int, ...], seed: int) -> Any:
        if dtype.kind != "f":
            return Exact.argument(dtype, shape, seed)
        waves = np.sin(1.7 * np.arange(math.prod(shape)) + seed + 1)
        return waves.reshape(shape).astype(dtype.dtype)


def _function(p: Pool, a: int, b: int, *_: int) -> Any:
    m, x = p.m, p.number(p.pick(a))
    functions = (m.atan, m.asinh, m.expm1, m.exp2, m.sinh, m.cosh)
    return p.bounded(functions[b % 6](x))


def _whole(p: Pool, a: int, *_: int) -> Any:
    return p.m.astype(p.m.floor(3 * p.number(p.pick(a))), p.m.int64)


def _prefix(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    """An associative scan, whose function may capture a value from outside."""
    x = p.number(p.stack(a))
    w = p.m.astype(p.bounded(p.m.sum(p.number(p.pick(b)))), x.dtype)
    if x.ndim == 0:
        return x
    combine = (
        lambda u, v: {"s": u["s"] * v["s"] * w},
        lambda u, v: {"s": (u["s"] + v["s"]) / (1 + u["s"] * v["s"])},
        lambda u, v: {"r": u["r"] * v["r"], "s": v["r"] * u["s"] + v["s"]},
    )[c % 3]
    elements = {"s": p.m.tanh(x)}
    if c % 3 == 2:
        elements["r"] = p.m.cos(x + w)
    return p.bounded(p.lib.prefix(combine, elements, reverse=bool(b % 2))["s"])


def _noisy(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.number(p.pick(a))
    return x * p.lib.noise(p.integer(b), x.shape)


def _guarded(p: Pool, a: int, *_: int) -> Any:
    """A branch whose derivative is not finite where the branch is not taken."""
    s = p.m.sum(p.number(p.pick(a)))
    return p.lib.cond(s * s > 0.04, lambda: 0.1 / s, lambda: s)


_SMOOTH: Final[dict[str, Operation]] = {
    "sin": unary(lambda m, x: m.sin(x)),
    "exp": unary(lambda m, x: m.exp(-x * x)),
    "root": unary(lambda m, x: m.sqrt(1.2 + m.cos(x))),
    "softplus": unary(lambda m, x: m.logaddexp(x, 0.3)),
    "function": _function,
    "log": unary(lambda m, x: m.log1p(x * x)),
    "angle": binary(lambda m, x, y: m.atan2(x, 1.2 + m.hypot(y, 0.7))),
    "less": unary(lambda _, x: x < Smooth.threshold),
    "add": binary(lambda _, x, y: x + y),
    "multiply": binary(lambda _, x, y: x * y),
    "divide": binary(lambda m, x, y: x / (1.5 + m.sin(y))),
    "power": binary(lambda m, x, y: (1.1 + m.tanh(x)) ** y),
    "maximum": binary(lambda m, x, y: m.maximum(x, y)),
    "prod": axis(lambda m, x, axis: m.prod(x, axis=axis)),
    "whole": _whole,
    "prefix": _prefix,
    "noise": _noisy,
    "guarded": _guarded,
    "write": write,
}
Smooth.operations = STRUCTURAL | PRODUCTS | ORDERS | _SMOOTH | ALIASING_OPERATIONS
