"""Symbolic sizes: `Size = int | SymInt` stands wherever a size does.

Arithmetic records nothing; an expression becomes nodes only where its value is used.
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
    """A new symbol, as a size. It has no environment: see `ShapeEnv` for those."""
    return SymInt(of_factor(Symbol(name, hint)))


def free_symbols(*sizes: Size) -> tuple[Symbol, ...]:
    """The symbols of `sizes`, each once, in order of appearance."""
    found: dict[Symbol, None] = {}
    for size in sizes:
        if isinstance(size, SymInt):
            symbols_of(size.expression, found)
    return tuple(found)


def substitute(size: Size, values: Mapping[Symbol, Size]) -> Size:
    """`size` with symbols replaced; those without a value stay.

    Raises:
        ZeroDivisionError: a divisor became 0.
    """
    if not isinstance(size, SymInt):
        return size

    def known(s: Symbol) -> Any:
        value = values.get(s)
        return None if value is None else terms_of(value)

    return as_size(replace_terms(size.expression, known))


def renamed(size: SymInt, name: Callable[[Symbol], str]) -> str:
    """The text of `size` where the symbols have other names.

    It is of the normal form under these names, whose order decides that of the terms:
    sizes that differ in names only have one text. `FUNCTIONS` reads it back.
    """
    if len(size.expression) == 1 and size.expression[0][1] == 1:
        [((first, *more), _)] = size.expression
        if isinstance(first, Symbol) and not more:
            return name(first)
    known = {s: replace(s, name=name(s), env=None) for s in free_symbols(size)}
    terms = replace_terms(size.expression, lambda s: of_factor(known[s]))
    return format_operand(terms, lambda s: known[s].name if s in known else s.name)


def evaluate(
    size: Size,
    value: Callable[[Symbol], Any],
    number: Callable[[int], Any],
    operations: Mapping[str, Callable[..., Any]] = OPERATIONS,
) -> Any:
    """`size` computed in another arithmetic.

    value        what a symbol is
    number       what an integer is
    operations   what the operations of atoms are; `+` and `*` are those of the values
    """
    if not isinstance(size, SymInt):
        return number(size)
    return compute(size.expression, value, number, operations)


# --- functions that stay one expression ---


def sym_min(*sizes: Size) -> Size:
    """The smallest, as one expression; `min` would ask which one it is."""
    return as_size(smallest(map(terms_of, sizes)))


def sym_max(*sizes: Size) -> Size:
    """The largest, as one expression; `max` would ask which one it is."""
    return as_size(largest(map(terms_of, sizes)))


def sym_int(number: Number) -> Size:
    """`int(number)` as an expression; `int` itself would ask for the value."""
    if isinstance(number, SymFloat):
        return rounded("trunc", number)
    return number if isinstance(number, SymInt) else int(number)


def sym_float(number: Number) -> float | SymFloat:
    """`float(number)` as an expression; `float` itself would ask for the value."""
    if isinstance(number, SymInt):
        return SymFloat(Atom("float", (number.expression,)))
    return number if isinstance(number, SymFloat) else float(number)


# What the text of an expression calls; nothing of it asks for a value.
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
