"""Questions about sizes that shapes must answer: order, and exact division."""

from math import prod
from typing import TypeAlias

from hopflow.errors import DataDependentError
from hopflow.graph.types import same_size
from hopflow.symbolic.size import Size, Symbol, SymInt

__all__ = ["divided", "less", "surely_less"]

_Term: TypeAlias = tuple[tuple[Symbol, ...], int]


def less(a: Size, b: Size) -> bool | None:
    """Whether `a < b`, for symbols that are any numbers from 0; None: it depends."""
    difference = a - b
    if isinstance(difference, int):
        return difference < 0
    factors = [factor for _, factor in difference.terms]
    if all(factor > 0 for factor in factors):
        return False
    constant = next((f for m, f in difference.terms if m == ()), 0)
    if constant < 0 and all(factor < 0 for factor in factors):
        return True
    return None


def surely_less(a: Size, b: Size) -> bool:
    """Whether `a < b`.

    Raises:
        DataDependentError: it depends on the symbols.
    """
    known = less(a, b)
    if known is None:
        raise DataDependentError(f"{a} < {b}")
    return known


def divided(total: Size, by: Size) -> Size | None:
    """`total / by`; None if that is no whole number.

    Raises:
        DataDependentError: it may be one or not, which only a run can tell.
    """
    if isinstance(total, int) and isinstance(by, int):
        return None if total % by else total // by
    if same_size(total, by):
        return 1
    undecided = DataDependentError(f"({total}) % ({by}) == 0")
    if len(_terms(by)) != 1:
        raise undecided
    [(divisor, factor)] = _terms(by)
    result: Size = 0
    for symbols, coefficient in _terms(total):
        left = list(symbols)
        for symbol in divisor:
            if symbol not in left:
                raise undecided
            left.remove(symbol)
        if coefficient % factor:
            raise undecided
        sizes = (SymInt((((symbol,), 1),)) for symbol in left)
        result = result + prod(sizes, start=coefficient // factor)
    return result


def _terms(size: Size) -> tuple[_Term, ...]:
    return size.terms if isinstance(size, SymInt) else (((), size),)
