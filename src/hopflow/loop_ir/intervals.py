"""Bounds of floats, by interval arithmetic over choices and monotone operations.

Rounding to nearest keeps the order of numbers, so that the rounded ends bound what is
rounded. An interval says nothing of NaN, which any operation may give.
"""

import operator
from collections.abc import Callable
from itertools import product
from math import inf, isnan
from typing import Final, TypeAlias

import numpy as np

from hopflow.dtypes import DType, bool_, iinfo
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr

Interval: TypeAlias = tuple[float, float]
"""The least and the greatest value, unless it is NaN."""

EVERYTHING: Final[Interval] = (-inf, inf)
_MONOTONE: Final[dict[str, Callable[..., float]]] = {
    "min": min,
    "max": max,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "cast": lambda x: x,
    **{name: getattr(np, name) for name in ("floor", "ceil", "trunc", "rint")},
}


def interval(node: Expr, operand: Callable[[Expr], Interval]) -> Interval:
    """Return the bounds of a float.

    Args:
        operand: Returns the bounds of an operand of the node: of a float, or of an
            integer that is converted.
    """
    if node.op == "const":
        return EVERYTHING if isnan(node.attr) else (node.attr, node.attr)
    if node.op == "select":
        lows, highs = zip(*map(operand, node.args[1:]), strict=True)
        return min(lows), max(highs)
    if node.op not in _MONOTONE:
        return EVERYTHING
    args: list[Interval] = []
    for arg in node.args:
        args.append(operand(arg))
        if args[-1] == EVERYTHING and node.op not in ("min", "max"):
            return EVERYTHING
    values = [_MONOTONE[node.op](*ends) for ends in product(*args)]
    if any(map(isnan, values)):
        return EVERYTHING
    low, high = (e.const(x, node.dtype).attr for x in (min(values), max(values)))
    return low, high


def limits(dtype: DType) -> tuple[int, int]:
    """Return the least and the greatest number of a dtype of integers or bools."""
    if dtype is bool_:
        return 0, 1
    bounds = iinfo(dtype)
    return bounds.min, bounds.max
