"""Bounds of floats, by interval arithmetic over the operations that are monotone.

Rounding to nearest keeps the order of numbers, so that the rounded ends bound what is
rounded. An interval says nothing of NaN, which any operation may give.
"""

import operator
from collections.abc import Callable
from itertools import product
from math import inf, isnan
from typing import Final, TypeAlias

import numpy as np

from hopflow.dtypes import DType, iinfo
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr

Interval: TypeAlias = tuple[float, float]
"""The least and the greatest value, unless it is NaN."""

DEPTH: Final = 6
"""How many operations are looked at, one inside the other."""
_MONOTONE: Final[dict[str, Callable[..., float]]] = {
    "min": min,
    "max": max,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    **{name: getattr(np, name) for name in ("floor", "ceil", "trunc", "rint")},
}
_EVERYTHING: Final[Interval] = (-inf, inf)


def interval(
    node: Expr,
    integers: Callable[[Expr], tuple[int, int]],
    depth: int = DEPTH,
) -> Interval:
    """Return the bounds of a float.

    Args:
        integers: Returns the bounds of an integer that is converted.
    """
    if node.op == "const":
        return _EVERYTHING if isnan(node.attr) else (node.attr, node.attr)
    if node.op == "cast" and node.args[0].dtype.is_integer:
        low, high = (e.const(n, node.dtype).attr for n in integers(node.args[0]))
        return low, high
    if not depth or node.op not in _MONOTONE:
        return _EVERYTHING
    args = [interval(a, integers, depth - 1) for a in node.args]
    values = [_MONOTONE[node.op](*ends) for ends in product(*args)]
    if any(map(isnan, values)):
        return _EVERYTHING
    low, high = (e.const(x, node.dtype).attr for x in (min(values), max(values)))
    return low, high


def limits(dtype: DType) -> tuple[int, int]:
    """Return the least and the greatest integer of a dtype."""
    bounds = iinfo(dtype)
    return bounds.min, bounds.max
