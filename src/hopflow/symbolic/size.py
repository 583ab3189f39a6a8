"""Symbolic sizes: `Size = int | SymInt` is the type of every size.

Arithmetic records nothing; an expression becomes graph nodes only where its value is
used.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hopflow.symbolic.atoms import largest, replace_terms, smallest
from hopflow.symbolic.scalars import (
    Number,
    Size,
    SymFloat,
    SymInt,
    as_size,
    rounded,
    terms_of,
)
from hopflow.symbolic.terms import (
    OPERATIONS,
    Atom,
    Symbol,
    compute,
    format_operand,
    of_factor,
    symbols_of,
)

__all__ = [
    "FUNCTIONS",
    "Number",
    "Size",
    "SymFloat",
    "SymInt",
    "Symbol",
    "evaluate",
    "free_symbols",
    "renamed",
    "substitute",
    "sym_float",
    "sym_int",
    "sym_max",
    "sym_min",
    "symbol",
]


def symbol(name: str, hint: float | None = None) -> SymInt:
    """Return a new symbol as a size, without an environment (see `ShapeEnv`)."""
    return SymInt(of_factor(Symbol(name, hint)))


def free_symbols(*sizes: Size) -> tuple[Symbol, ...]:
    """Return the symbols of `sizes`, each once, in order of appearance."""
    symbols: dict[Symbol, None] = {}
    for size in sizes:
        if isinstance(size, SymInt):
            symbols_of(size.expression, symbols)
    return tuple(symbols)


def substitute(size: Size, values: Mapping[Symbol, Size]) -> Size:
    """Return `size` with symbols replaced; those without a value stay.

    Raises:
        ZeroDivisionError: a divisor becomes 0.
    """
    if not isinstance(size, SymInt):
        return size

    def replacement(s: Symbol) -> Any:
        value = values.get(s)
        return None if value is None else terms_of(value)

    return as_size(replace_terms(size.expression, replacement))


def renamed(size: SymInt, name: Callable[[Symbol], str]) -> str:
    """Return the text of `size` with symbols renamed.

    The text is that of the normal form under the new names, which determine the order
    of terms. Sizes that differ only in names have the same text. `FUNCTIONS` evaluates
    it.
    """
    if len(size.expression) == 1 and size.expression[0][1] == 1:
        [((first, *more), _)] = size.expression
        if isinstance(first, Symbol) and not more:
            return name(first)
    symbols = {s: replace(s, name=name(s), env=None) for s in free_symbols(size)}
    terms = replace_terms(size.expression, lambda s: of_factor(symbols[s]))
    return format_operand(terms, lambda s: symbols[s].name if s in symbols else s.name)


def evaluate(
    size: Size,
    value: Callable[[Symbol], Any],
    number: Callable[[int], Any],
    operations: Mapping[str, Callable[..., Any]] = OPERATIONS,
) -> Any:
    """Evaluate `size` in another arithmetic.

    value        maps a symbol to its value
    number       maps an integer to its value
    operations   the operations of atoms; `+` and `*` are those of the values
    """
    if not isinstance(size, SymInt):
        return number(size)
    return compute(size.expression, value, number, operations)


# --- functions that stay one expression ---


def sym_min(*sizes: Size) -> Size:
    """Return the minimum as one expression, where `min` would record a guard."""
    return as_size(smallest(map(terms_of, sizes)))


def sym_max(*sizes: Size) -> Size:
    """Return the maximum as one expression, where `max` would record a guard."""
    return as_size(largest(map(terms_of, sizes)))


def sym_int(number: Number) -> Size:
    """Return `int(number)` as an expression, where `int` would record a guard."""
    if isinstance(number, SymFloat):
        return rounded("trunc", number)
    return number if isinstance(number, SymInt) else int(number)


def sym_float(number: Number) -> float | SymFloat:
    """Return `float(number)` as an expression, where `float` would record a guard."""
    if isinstance(number, SymInt):
        return SymFloat(Atom("float", (number.expression,)))
    return number if isinstance(number, SymFloat) else float(number)


# The functions that the text of an expression calls. None of them records a guard.
FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "min": sym_min,
    "max": sym_max,
    "int": sym_int,
    "float": sym_float,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "abs": abs,
}
