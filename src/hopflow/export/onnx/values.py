"""Operations on values and sizes of the run: conversions, items, checks; and those of
which ONNX has a shorter form than what they lower to."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.scalars import converted
from hopflow.export.onnx.scopes import Value
from hopflow.symbolic.size import Size


def _convert(site: Site, x: Value, *, dtype: DType, **_: Any) -> Value:
    return converted(site.scope, x, dtype)


def _sign(site: Site, x: Value) -> Value:
    return site("Sign", x)


def _logistic(site: Site, x: Value) -> Value:
    """`1 / (1 + exp(-x))`: onnxruntime's own function is 0 from -18 on."""
    wide = site.scope.cast(x, dtypes.float32) if x.dtype.bits == 16 else x
    one = site.constant(1, wide.dtype)
    below = site("Add", one, site("Exp", site("Neg", wide)))
    return site.scope.cast(site("Div", one, below), x.dtype)


def _item(
    site: Site, x: Value, *, min: float = -inf, max: float = inf, known: bool = False
) -> Value:
    found = site.scope.cast(x, dtypes.int64)
    for operator, end in (("Less", min), ("Greater", max)):
        if not known and end not in (-inf, inf):
            outside = site(operator, found, site.constant(int(end)))
            site.check(site("Not", outside), f"an integer is not from {min} to {max}")
    return found


def _dim_size(site: Site, x: Value, *, axis: int) -> Value:
    return site.frame.axis_size(x, axis)


def _symbolic_int(site: Site, *, value: Size) -> Value:
    return site.size(value).tensor()


def _check(
    site: Site, test: Value, *_sides: Value, message: Any, **_: Any
) -> list[Value]:
    site.check(test, str(message), site.types[0])
    return []


def _require(
    site: Site, x: Value, test: Value, *_sides: Value, message: Any, **_: Any
) -> Value:
    site.check(test, str(message), site.types[1])
    return x


RULES: Final[dict[str, Callable[..., Value | Sequence[Value]]]] = {
    "check": _check,
    "convert": _convert,
    "dim_size": _dim_size,
    "item": _item,
    "logistic": _logistic,
    "require": _require,
    "sign": _sign,
    "symbolic_int": _symbolic_int,
}
