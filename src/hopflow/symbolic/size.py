"""Symbolic sizes: polynomials over symbols, in a normal form that decides equality.

`Size = int | SymInt` stands wherever a size does. Arithmetic records nothing; an
expression becomes nodes only where a value of it is used.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from hopflow.errors import DataDependentError

__all__ = [
    "Size",
    "SymInt",
    "Symbol",
    "evaluate",
    "free_symbols",
    "substitute",
    "symbol",
]


@dataclass(frozen=True, eq=False, slots=True)
class Symbol:
    """An unknown non-negative integer: `s…` backed by an input, `u…` by nothing yet.

    Symbols are compared by identity; the name is for people.
    """

    name: str
    hint: int | None = None

    def __repr__(self) -> str:
        return self.name


# A monomial is its symbols in name order, repeated for powers; () is the constant one.
_Monomial: TypeAlias = tuple[Symbol, ...]


class SymInt:
    """A polynomial with integer coefficients over symbols; never a constant."""

    __slots__ = ("__dict__", "terms")

    terms: tuple[tuple[_Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[_Monomial, int], ...]) -> None:
        self.terms = terms

    # The sums below keep `terms` sorted: higher degrees first, then by name.
    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether both are the same polynomial. A *possible* equality is undecided.

        Raises:
            DataDependentError: the two may or may not be equal at run time.
        """
        if isinstance(other, SymInt) and self.terms == other.terms:
            return True
        if not isinstance(other, int | SymInt):
            return NotImplemented
        difference = self - other
        if isinstance(difference, int):
            return difference == 0
        raise DataDependentError(f"{self} == {other}")

    def same(self, other: "Size") -> bool:
        """Whether both are provably equal; never raises."""
        return isinstance(other, SymInt) and self.terms == other.terms

    def __add__(self, other: "Size") -> "Size":
        if not isinstance(other, int | SymInt):
            return NotImplemented
        total = dict(self.terms)
        for monomial, factor in _terms(other):
            total[monomial] = total.get(monomial, 0) + factor
        return _normal(total)

    def __mul__(self, other: "Size") -> "Size":
        if not isinstance(other, int | SymInt):
            return NotImplemented
        total: dict[_Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right, key=_order))
                total[monomial] = total.get(monomial, 0) + a * b
        return _normal(total)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> "Size":
        return self * -1

    def __sub__(self, other: "Size") -> "Size":
        if not isinstance(other, int | SymInt):
            return NotImplemented
        return self + (-other)

    def __rsub__(self, other: int) -> "Size":
        return -self + other

    def _undecided(self, sign: str, other: object) -> DataDependentError:
        return DataDependentError(f"{self} {sign} {other}")

    def __lt__(self, other: "Size") -> bool:
        difference = self - other
        if isinstance(difference, int):
            return difference < 0
        raise self._undecided("<", other)

    def __le__(self, other: "Size") -> bool:
        difference = self - other
        if isinstance(difference, int):
            return difference <= 0
        raise self._undecided("<=", other)

    def __gt__(self, other: "Size") -> bool:
        return not self <= other

    def __ge__(self, other: "Size") -> bool:
        return not self < other

    def __bool__(self) -> bool:
        raise self._undecided("!=", 0)

    def __index__(self) -> int:
        raise self._undecided("as a Python int", "")

    def __repr__(self) -> str:
        text = ""
        for monomial, factor in self.terms:
            body = "*".join(
                [str(abs(factor))] * (abs(factor) != 1 or not monomial)
                + [s.name for s in monomial]
            )
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {body}" if text else ("-" if factor < 0 else "") + body
        return text


Size: TypeAlias = int | SymInt


def _order(symbol_: Symbol) -> tuple[str, int]:
    return symbol_.name, id(symbol_)


def _terms(size: Size) -> Iterable[tuple[_Monomial, int]]:
    return size.terms if isinstance(size, SymInt) else (((), size),)


def _normal(total: Mapping[_Monomial, int]) -> Size:
    kept = [(m, f) for m, f in total.items() if f]
    if all(m == () for m, _ in kept):
        return kept[0][1] if kept else 0
    kept.sort(key=lambda term: (-len(term[0]), [_order(s) for s in term[0]]))
    return SymInt(tuple(kept))


def symbol(name: str, hint: int | None = None) -> SymInt:
    """A new symbol, as a size."""
    return SymInt((((Symbol(name, hint),), 1),))


def free_symbols(*sizes: Size) -> tuple[Symbol, ...]:
    """The symbols of `sizes`, each once, in order of appearance."""
    found: dict[Symbol, None] = {}
    for size in sizes:
        if isinstance(size, SymInt):
            for monomial, _ in size.terms:
                found.update(dict.fromkeys(monomial))
    return tuple(found)


def substitute(size: Size, values: Mapping[Symbol, Size]) -> Size:
    """`size` with symbols replaced; those without a value stay."""
    if not isinstance(size, SymInt):
        return size

    def keep(s: Symbol) -> Size:
        return values.get(s, SymInt((((s,), 1),)))

    total: Size = 0
    for monomial, factor in size.terms:
        total = total + factor * prod((keep(s) for s in monomial), start=1)
    return total


def evaluate(
    size: Size, value: Callable[[Symbol], Any], number: Callable[[int], Any]
) -> Any:
    """`size` computed in another arithmetic (`+` and `*` of what `value` gives)."""
    if not isinstance(size, SymInt):
        return number(size)
    terms = [
        prod((value(symbol) for symbol in monomial), start=number(factor))
        for monomial, factor in size.terms
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
