"""The range of an expression: intervals, tightened by facts and by laws of atoms."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from hopflow.symbolic.atoms import atom_range, declared, interval, modulo
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.terms import (
    Atom,
    Factor,
    Monomial,
    Operand,
    Symbol,
    Terms,
    add,
    content,
    is_constant,
    multiply,
    of_factor,
    plus_constant,
    scale,
    split_constant,
    subtract,
    without,
)

MAX_MEMO: Final = 4096  # the most ranges that are memoised
# (number of facts, depth): how many laws and facts are combined to find a bound.
_DEPTHS: Final = ((8, 3), (24, 2))


def primitive(terms: Terms) -> tuple[Terms, int, int]:
    """Return (P, factor, k) with `terms == factor * P + k` and P as in `relation`."""
    inner, k = split_constant(terms)
    factor = content(inner)
    if inner and inner[0][1] < 0:
        factor = -factor
    return tuple([(m, f // factor) for m, f in inner]), factor, k


class BoundsFinder:
    """Ranges under a fixed set of facts, memoised.

    ranges     ranges of primitive polynomials, by polynomial
    excluded   numbers that these polynomials do not equal
    """

    def __init__(
        self,
        ranges: Mapping[Terms, ValueRange],
        excluded: Mapping[Terms, set[int]],
    ) -> None:
        self._ranges = ranges
        self._excluded = excluded
        # Facts on single symbols and atoms are part of the interval arithmetic already.
        self._sums = [
            (terms, range_) for terms, range_ in ranges.items() if len(terms) > 1
        ]
        self._depth = next((d for n, d in _DEPTHS if len(self._sums) <= n), 1)
        self._memo: dict[tuple[Terms, int], ValueRange] = {}

    def range(self, operand: Operand) -> ValueRange:
        if isinstance(operand, tuple):
            return self._range(operand, self._depth)
        return self._operand_range(operand)

    def _range(self, terms: Terms, depth: int) -> ValueRange:
        if is_constant(terms):
            return ValueRange.point(terms[0][1] if terms else 0)
        inner, factor, k = primitive(terms)
        key = (inner, depth)
        range_ = self._memo.get(key)
        if range_ is None:
            if len(self._memo) >= MAX_MEMO:  # keys hold symbols alive
                self._memo.clear()
            range_ = self._memo[key] = self._primitive_range(inner, depth)
        return range_.scaled(factor) + ValueRange.point(k)

    def _primitive_range(self, terms: Terms, depth: int) -> ValueRange:
        total = interval(terms, self._factor_range)
        total = self._with_facts(terms, total)
        if depth and not total.is_point:
            for other in self._by_laws(terms, depth - 1):
                total = total & other
            for other in self._by_facts(terms, depth - 1):
                total = total & other
            total = self._with_facts(terms, total)
        return total

    def _with_facts(self, terms: Terms, total: ValueRange) -> ValueRange:
        range_ = self._ranges.get(terms)
        if range_ is not None:
            total = total & range_
        numbers = self._excluded.get(terms)
        if numbers:
            low, high = total.low, total.high
            while low in numbers:
                low += 1
            while high in numbers:
                high -= 1
            total = ValueRange(low, high)
        return total

    def _factor_range(self, factor: Factor) -> ValueRange:
        if isinstance(factor, Symbol):
            total = factor.range
        else:
            total = atom_range(factor, self._operand_range)
        return self._with_facts(of_factor(factor), total)

    def _operand_range(self, operand: Operand) -> ValueRange:
        if isinstance(operand, tuple):
            return self._range(operand, 0)
        if isinstance(operand, Atom):
            return atom_range(operand, self._operand_range)
        return declared(operand)

    # --- facts ---

    def _by_facts(self, terms: Terms, depth: int) -> Iterator[ValueRange]:
        """Yield `c*F + (P - c*F)` for each fact on F that cancels a term of P."""
        factors = dict(terms)
        for fact, range_ in self._sums:
            tried = set()
            for monomial, f in fact:
                times, left = divmod(factors.get(monomial, 0), f)
                if times and not left and times not in tried:
                    tried.add(times)
                    rest = subtract(terms, scale(fact, times))
                    yield range_.scaled(times) + self._range(rest, depth)

    # --- laws ---

    def _by_laws(self, terms: Terms, depth: int) -> Iterator[ValueRange]:
        for monomial, factor in terms:
            for atom in dict.fromkeys(monomial):
                if not isinstance(atom, Atom):
                    continue
                rest = subtract(terms, ((monomial, factor),))
                if atom.op == "//":
                    yield from self._by_remainder(rest, monomial, factor, atom, depth)
                if len(monomial) == 1:
                    yield self._by_limits(rest, factor, atom, depth)

    def _by_remainder(
        self, rest: Terms, monomial: Monomial, factor: int, atom: Atom, depth: int
    ) -> Iterator[ValueRange]:
        """Yield the range by `y * (x // y) == x - x % y`."""
        x, y = atom.args
        assert isinstance(x, tuple)
        assert isinstance(y, tuple)
        if len(y) != 1:
            return
        [(divisor, by)] = y
        others = without(without(monomial, (atom,)) or (), divisor)
        if others is None:
            return
        exact = multiply(((others, factor),), subtract(x, modulo(x, y)))
        total = self._range(add(scale(rest, by), exact), depth)
        if by > 1:
            ends = -(-total // ValueRange.point(by)), total // ValueRange.point(by)
            total = ValueRange(ends[0].low, ends[1].high)
        yield total

    def _by_limits(
        self, rest: Terms, factor: int, atom: Atom, depth: int
    ) -> ValueRange:
        """Return the range by the limits that an atom's arguments give it."""
        least, most = self._limits(atom)
        low, high = -inf, inf
        for limit in least if factor > 0 else most:
            low = max(low, self._range(add(rest, scale(limit, factor)), depth).low)
        for limit in most if factor > 0 else least:
            high = min(high, self._range(add(rest, scale(limit, factor)), depth).high)
        if atom.op in ("min", "max"):  # the atom equals one of its arguments
            cases = [
                self._range(add(rest, scale(arg, factor)), depth)
                for arg in atom.args
                if isinstance(arg, tuple)
            ]
            low = max(low, min(case.low for case in cases))
            high = min(high, max(case.high for case in cases))
        return ValueRange(low, high)

    def _limits(self, atom: Atom) -> tuple[list[Terms], list[Terms]]:
        """Return the (lower, upper) limits of an atom."""
        whole = [arg for arg in atom.args if isinstance(arg, tuple)]
        match atom.op, whole:
            case "min", _:
                return [], whole
            case "max", _:
                return whole, []
            case "%", [x, y] if self._range(y, 0).low > 0:
                natural = self._range(x, 0).low >= 0
                return [()], [plus_constant(y, -1), *([x] if natural else [])]
            case "//", [x, y] if self._range(y, 0).low > 0:
                if self._range(x, 0).low >= 0:
                    return [()], [x]
        return [], []
