"""How numbers are combined, and by what operations in any order to the same bits."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from hopflow.compiler.schedule.summary import Summary
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.intervals import limits
from hopflow.loop_ir.program import Accumulate, Assign, Stmt

_NEUTRAL: Final[dict[str, Callable[[DType], float]]] = {
    "or": lambda _: 0,
    "and": lambda dtype: 1 if dtype.kind == "b" else -1,
    "add": lambda _: 0,
    "mul": lambda _: 1,
    "min": lambda dtype: inf if dtype.is_float else limits(dtype)[1],
    "max": lambda dtype: -inf if dtype.is_float else limits(dtype)[0],
}


def is_exact(combine: str, dtype: DType) -> bool:
    """Return whether an operation of this name is associative and commutative for
    numbers of this dtype: not if it rounds, nor if it orders zeros and NaNs."""
    return combine in _NEUTRAL and not dtype.is_float


def neutral(combine: str, dtype: DType) -> Expr:
    """Return the number that such an operation changes no other by."""
    return e.const(_NEUTRAL[combine](dtype), dtype)


def combined(summary: Summary, inside: Iterable[Stmt]) -> dict[Var, str] | None:
    """Return how the iterations of a loop combine each variable that they change. None:
    they do more than combine one with numbers, by one operation.

    Args:
        inside: All statements of the loop.
    """
    combines: dict[Var, str] = {}
    for statement in inside:
        if isinstance(statement, Accumulate) and statement.var in summary.changed:
            name = combines.setdefault(statement.var, statement.combine)
            if name != statement.combine:
                return None
        elif isinstance(statement, Assign) and statement.var in summary.changed:
            return None
    return combines if summary.changed.isdisjoint(summary.read) else None
