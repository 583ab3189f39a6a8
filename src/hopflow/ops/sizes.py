"""Questions about symbolic sizes: order, equality and exact division.

`less` records nothing. Python's comparisons (`if a < b`, `a == b`) are decided by
facts, become guards by the hints of backed symbols, or raise a DataDependentError.
"""

from typing import Any

from hopflow.graph.types import is_one, is_zero, same_size
from hopflow.symbolic.asking import implied_truth
from hopflow.symbolic.boolean import relation
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.scalars import as_size, terms_of
from hopflow.symbolic.size import Size, SymInt, free_symbols, sym_max, sym_min
from hopflow.symbolic.terms import divide, env_of


def less(a: Size, b: Size) -> bool | None:
    """Return whether `a < b` for all values of the symbols; None if it depends."""
    difference = a - b
    if isinstance(difference, int):
        return difference < 0
    return implied_truth(relation("<", terms_of(difference)))


def is_unbacked(size: Size) -> bool:
    """Return True if only a run knows a size: it has an unbacked symbol."""
    return isinstance(size, SymInt) and any(
        symbol.hint is None and symbol.env is not None for symbol in free_symbols(size)
    )


def may_be_zero(size: Size) -> bool:
    """Return True if an axis of symbolic size may be empty."""
    return isinstance(size, SymInt) and less(0, size) is not True


def smaller(a: Size, b: Size) -> Size:
    """Return the smaller size: `a` or `b` if facts decide, else `sym_min`; no guard."""
    if less(b, a) is False:
        return a
    return b if less(a, b) is False else sym_min(a, b)


def larger(a: Size, b: Size) -> Size:
    """Return the larger size: `a` or `b` if facts decide, else `sym_max`; no guard."""
    if less(a, b) is False:
        return a
    return b if less(b, a) is False else sym_max(a, b)


def is_empty(size: Size) -> bool:
    """Return True if a size is 0; recorded as a guard if it has a hint."""
    if isinstance(size, SymInt) and size.hint is not None and env_of(size.expression):
        return size == 0
    return is_zero(size)


def steps(distance: Size, step: Size) -> Size:
    """Return the number of multiples of `step` from 0 to before `distance`."""
    if isinstance(step, SymInt):
        return larger(0, -(-distance // step))
    if step < 0:
        distance, step = -distance, -step
    return larger(0, (distance + step - 1) // step)


def agreed(a: Size, b: Size) -> Size | None:
    """Return the size that two sizes broadcast to; None if they do not broadcast.

    The question is chosen by the hints, so that it records at most one guard.

    Raises:
        DataDependentError: only a run can tell.
    """
    if is_one(a):
        return b
    if is_one(b):
        return a
    common = b if isinstance(b, int) else a
    if same_size(a, b):
        return common
    hint_a, hint_b = (n.hint if isinstance(n, SymInt) else n for n in (a, b))
    # For a size without a hint every question is asked.
    if (hint_a is None or hint_b is None or hint_a == hint_b) and a == b:
        return common
    if hint_b in (None, 1) and b == 1:
        return a
    return b if hint_a in (None, 1) and a == 1 else None


def equals(a: Size, b: Size) -> bool:
    """Return True if two sizes are equal, with a guard if only hints are equal."""
    if same_size(a, b):
        return True
    x, y = (n.hint if isinstance(n, SymInt) else n for n in (a, b))
    has_env = any(env_of(terms_of(n)) is not None for n in (a, b))
    return x is not None and x == y and has_env and a == b


def specialised(number: Any) -> Any:
    """Return the value of a symbolic size in this call, which becomes a guard; others
    unchanged. Use it for numbers that decide which program is traced."""
    return int(number) if isinstance(number, SymInt) else number


def fits(size: Size, target: Size) -> bool:
    """Return True if `size` broadcasts to `target`.

    Raises:
        DataDependentError: only a run can tell.
    """
    common = agreed(size, target)
    return common is not None and common == target


def divided(total: Size, by: Size) -> Size | None:
    """Return `total / by`; None if it is not an integer.

    With unbacked sizes it is rounded down (and is 0 if `by` is 0): the caller lets the
    run check that it is exact.
    """
    if isinstance(by, int) and by == 0:
        return None
    quotient, rest = divide(terms_of(total), terms_of(by))
    if not rest:
        return as_size(quotient)
    if is_unbacked(total) or is_unbacked(by):
        known_positive = less(0, by) is True
        return total // (by if known_positive else larger(1, by))
    if isinstance(by, SymInt) and by.hint == 0 and by == 0:
        return None
    return total // by if total % by == 0 else None


def range_of(size: Size) -> ValueRange:
    """Return the range of a size that declarations and facts imply."""
    if isinstance(size, int):
        return ValueRange.point(size)
    env = env_of(terms_of(size))
    return (NOTHING if env is None else env).range(terms_of(size))
