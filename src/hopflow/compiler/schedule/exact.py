"""Operations that combine numbers in any order to the same bits."""

from collections.abc import Callable
from typing import Final

from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.intervals import limits

_NEUTRAL: Final[dict[str, Callable[[DType], int]]] = {
    "or": lambda _: 0,
    "and": lambda dtype: 1 if dtype.kind == "b" else -1,
    "add": lambda _: 0,
    "mul": lambda _: 1,
    "min": lambda dtype: limits(dtype)[1],
    "max": lambda dtype: limits(dtype)[0],
}


def is_exact(combine: str, dtype: DType) -> bool:
    """Return whether an operation of this name is associative and commutative for
    numbers of this dtype: not if it rounds, nor if it orders zeros and NaNs."""
    return combine in _NEUTRAL and not dtype.is_float


def neutral(combine: str, dtype: DType) -> Expr:
    """Return the number that such an operation changes no other by."""
    return e.const(_NEUTRAL[combine](dtype), dtype)
