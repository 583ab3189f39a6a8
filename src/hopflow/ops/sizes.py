"""Questions about sizes that shapes must answer: order, and exact division.

`less` records nothing. What Python asks (`if a < b`, `a == b`) is known, or becomes a
guard by the hints of backed symbols, or is a DataDependentError.
"""

from typing import Any

from hopflow.graph.types import is_one, is_zero, same_size
from hopflow.symbolic.asking import answer
from hopflow.symbolic.boolean import relation
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.scalars import as_size, terms_of
from hopflow.symbolic.size import Size, SymInt, free_symbols, sym_max, sym_min
from hopflow.symbolic.terms import divide, env_of


def less(a: Size, b: Size) -> bool | None:
    """Whether `a < b` whatever the symbols are; None: it depends on them."""
    difference = a - b
    if isinstance(difference, int):
        return difference < 0
    return answer(relation("<", terms_of(difference)))


def is_unbacked(size: Size) -> bool:
    """Whether only a run knows a size: it has a symbol without a hint, of a trace."""
    return isinstance(size, SymInt) and any(
        symbol.hint is None and symbol.env is not None for symbol in free_symbols(size)
    )


def may_be_zero(size: Size) -> bool:
    """Whether an axis of symbolic size may be empty."""
    return isinstance(size, SymInt) and less(0, size) is not True


def smaller(a: Size, b: Size) -> Size:
    """The smaller of two sizes: one of them if it is known which; no guard if not."""
    if less(b, a) is False:
        return a
    return b if less(a, b) is False else sym_min(a, b)


def larger(a: Size, b: Size) -> Size:
    """The larger of two sizes, as `smaller`."""
    if less(a, b) is False:
        return a
    return b if less(b, a) is False else sym_max(a, b)


def is_empty(size: Size) -> bool:
    """Whether a size is 0: asked where a hint can answer, else only if it is known."""
    if isinstance(size, SymInt) and size.hint is not None and env_of(size.expression):
        return size == 0
    return is_zero(size)


def steps(distance: Size, step: Size) -> Size:
    """How many numbers there are from 0 on, at distance `step`, before `distance`."""
    if isinstance(step, SymInt):
        return larger(0, -(-distance // step))
    if step < 0:
        distance, step = -distance, -step
    return larger(0, (distance + step - 1) // step)


def agreed(a: Size, b: Size) -> Size | None:
    """The size that two broadcast to; None: they do not.

    What must hold is asked as the hints have it, so that there is one guard at most.

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
    known, other = (n.hint if isinstance(n, SymInt) else n for n in (a, b))
    # A size without a hint is asked all of it.
    if (known is None or other is None or known == other) and a == b:
        return common
    if other in (None, 1) and b == 1:
        return a
    return b if known in (None, 1) and a == 1 else None


def equals(a: Size, b: Size) -> bool:
    """Whether two sizes are equal: asked where the hints say so, else only if known."""
    if same_size(a, b):
        return True
    x, y = (n.hint if isinstance(n, SymInt) else n for n in (a, b))
    has_env = any(env_of(terms_of(n)) is not None for n in (a, b))
    return x is not None and x == y and has_env and a == b


def specialised(number: Any) -> Any:
    """A symbolic size as the number it is in this call, which becomes a guard; anything
    else as it is. For what decides which program is made."""
    return int(number) if isinstance(number, SymInt) else number


def fits(size: Size, wanted: Size) -> bool:
    """Whether `size` broadcasts to `wanted`.

    Raises:
        DataDependentError: only a run can tell.
    """
    common = agreed(size, wanted)
    return common is not None and common == wanted


def divided(total: Size, by: Size) -> Size | None:
    """`total / by`; None if that is no whole number.

    Of numbers that only a run knows, it is rounded down (and 0 for a `by` of 0): the
    caller has the run check that it is exact.
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
    """Where a size is known to lie."""
    if isinstance(size, int):
        return ValueRange.point(size)
    env = env_of(terms_of(size))
    return (NOTHING if env is None else env).range(terms_of(size))
