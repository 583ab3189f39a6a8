"""Two kinds of programs: of small whole numbers, and of smooth functions.

`Exact` is for comparing bits: every order of a sum gives the same. `Smooth` is for
derivatives: central differences exist, and values stay in a bounded range; its
conditions compare with an odd number, which no value is by chance.
"""

from collections.abc import Callable
from typing import Any, Final

from hopflow.dtypes import as_dtype
from hopflow.testing.programs import (
    STRUCTURAL,
    Operation,
    Pool,
    axis,
    broadcasts,
    write,
)

__all__ = ["Exact", "Smooth"]

BOUNDS: Final = {"float16": 15.0, "bfloat16": 2.0}
"""Where sums of these are whole numbers that the dtype has."""

DTYPES: Final = ("float64", "float32", "int64", "int32", "int8", "bool", "float16")


def unary(f: Callable[[Any, Any], Any]) -> Operation:
    return lambda p, a, *_: f(p.m, p.number(p.pick(a)))


def binary(f: Callable[[Any, Any, Any], Any]) -> Operation:
    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = p.number(p.pick(a))
        return p.bounded(f(p.m, x, p.number(p.mate(b, x))))

    return apply


# --- small whole numbers --------------------------------------------------------------


class Exact(Pool):
    """Values that are small whole numbers."""

    exact = True

    def bounded(self, x: Any) -> Any:
        if x.dtype.name == "uint64":  # has no integer dtype in common with signed ones
            return self.m.astype(x, self.m.int64)
        if x.dtype.kind != "f":
            return x
        bound = BOUNDS.get(x.dtype.name, 400.0)
        return self.m.minimum(self.m.maximum(x, -bound), bound)

    def number(self, x: Any) -> Any:
        return self.m.astype(x, self.m.int32) if x.dtype.kind == "b" else x


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
    y = p.like(b, lambda v: v.dtype.kind == "i" and broadcasts(v.shape, x.shape))
    return (p.m.bitwise_and, p.m.bitwise_or, p.m.bitwise_xor)[c % 3](x, y)


def _sign(p: Pool, a: int, b: int, *_: int) -> Any:
    m, x = p.m, p.number(p.pick(a))
    return p.bounded((m.negative, m.abs, m.sign, m.square, m.trunc)[b % 5](x))


_EXACT: Final[dict[str, Operation]] = {
    "add": binary(lambda _, x, y: x + y),
    "subtract": binary(lambda _, x, y: x - y),
    "multiply": binary(lambda _, x, y: x * y),
    "maximum": binary(lambda m, x, y: m.maximum(x, y)),
    "less": binary(lambda _, x, y: x < y),
    "equal": binary(lambda _, x, y: x == y),
    "any": axis(lambda m, x, axis: m.any(x > 0, axis=axis)),
    "sign": _sign,
    "argmin": axis(lambda m, x, axis: m.argmin(x, axis=axis)),
    "convert": _convert,
    "divide": _divide,
    "bits": _bits,
    "write": write,
}
Exact.operations = STRUCTURAL | _EXACT


# --- smooth functions -----------------------------------------------------------------


class Smooth(Pool):
    """Values in a bounded range."""

    threshold = 0.1237
    enough = 1.371

    def bounded(self, x: Any) -> Any:
        return 2 * self.m.tanh(x / 2) if x.dtype.kind == "f" else x

    def number(self, x: Any) -> Any:
        return x if x.dtype.kind == "f" else self.m.astype(x, self.m.float64)


def _whole(p: Pool, a: int, *_: int) -> Any:
    return p.m.astype(p.m.floor(3 * p.number(p.pick(a))), p.m.int64)


def _prefix(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    """A scan of something associative, which may take in a value of outside."""
    x = p.number(p.stack(a))
    w = p.m.astype(p.bounded(p.m.sum(p.number(p.pick(b)))), x.dtype)
    if x.ndim == 0:
        return x
    combine = (
        lambda u, v: {"s": u["s"] * v["s"] * w},
        lambda u, v: {"s": (u["s"] + v["s"]) / (1 + u["s"] * v["s"])},
        lambda u, v: {"r": u["r"] * v["r"], "s": v["r"] * u["s"] + v["s"]},
    )[c % 3]
    given = {"s": p.m.tanh(x)}
    if c % 3 == 2:
        given["r"] = p.m.cos(x + w)
    return p.bounded(p.lib.prefix(combine, given, reverse=bool(b % 2))["s"])


def _noisy(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.number(p.pick(a))
    return x * p.lib.noise(p.integer(b), x.shape)


def _guarded(p: Pool, a: int, *_: int) -> Any:
    """A branch that has no finite derivative where it is not taken."""
    s = p.m.sum(p.number(p.pick(a)))
    return p.lib.cond(s * s > 0.04, lambda: 0.1 / s, lambda: s)


_SMOOTH: Final[dict[str, Operation]] = {
    "sin": unary(lambda m, x: m.sin(x)),
    "exp": unary(lambda m, x: m.exp(-x * x)),
    "root": unary(lambda m, x: m.sqrt(1.2 + m.cos(x))),
    "softplus": unary(lambda m, x: m.logaddexp(x, 0.3)),
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
Smooth.operations = STRUCTURAL | _SMOOTH
