"""Facts about expressions, bounds and equalities, and the conditions that they decide.

A fact on integers is a range of a polynomial in the normal form of `boolean.relation`,
so that a bound on `2*x` also bounds `4*x`, and `x < y` is a bound on `x - y`. An
equality that can be solved for a symbol replaces the symbol everywhere.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from hopflow.symbolic import algebra
from hopflow.symbolic.atoms import replace, replace_terms
from hopflow.symbolic.boolean import SymBool, difference_of, relation
from hopflow.symbolic.bounds import BoundsFinder
from hopflow.symbolic.ranges import EVERY, ValueRange
from hopflow.symbolic.terms import (
    Atom,
    Monomial,
    Operand,
    Symbol,
    Terms,
    add,
    has_atoms,
    normal,
    of_factor,
    plus_constant,
    scale,
    symbols_of,
    without,
)

MAX_FACTORED: Final = 4096  # the most expressions whose factors are memoised
_INTEGERS: Final = frozenset(["<=", ">=", "==", "!="])


def _by_name(symbol: Symbol) -> tuple[int, int]:
    return len(symbol.name), 0


class Facts:
    """A growing set of facts. An answer never changes, except None to True or False.

    `seniority` orders symbols: of those that an equality could replace, the greatest is
    replaced.
    """

    def __init__(
        self, seniority: Callable[[Symbol], tuple[int, int]] = _by_name
    ) -> None:
        self.version = 0  # changes with each fact; then None may be another answer
        self.solved: dict[Symbol, Terms] = {}
        self._seniority = seniority
        self._ranges: dict[Terms, ValueRange] = {}
        self._excluded: dict[Terms, set[int]] = {}
        self._products: dict[Terms, None] = {}  # with a factor that is not positive yet
        self._settled: dict[SymBool, bool] = {}
        # Factors depend on the expression alone, not on facts, so sympy is asked only
        # once.
        self._factors: dict[Terms, tuple[tuple[Terms, int], ...]] = {}
        self._bounds = BoundsFinder(self._ranges, self._excluded)

    # --- questions ---

    def canonical(self, terms: Terms) -> Terms:
        """Return the expression with symbols replaced by what facts say they equal."""
        return replace_terms(terms, self.solved.get) if self.solved else terms

    def range(self, operand: Operand) -> ValueRange:
        if self.solved:
            operand = replace(operand, self.solved.get)
        return self._bounds.range(operand)

    def decide(self, condition: SymBool) -> bool | None:
        """Return whether the facts imply the condition or its negation, else None."""
        settled = self._settled.get(condition)
        if settled is not None:
            return settled
        match condition.op:
            case "and" | "or":
                absorbing = condition.op == "or"
                answers = [self.decide(part) for part in condition.args]
                if absorbing in answers:
                    return absorbing
                return None if None in answers else not absorbing
            case "not":
                answer = self.decide(condition.args[0])
                return None if answer is None else not answer
        if condition.op not in _INTEGERS:
            x, y = map(self.range, condition.args)
            return _compare_ranges(condition.op, x, y)
        if not self.solved:
            return self._decide(condition)
        reduced = relation(condition.op, self.canonical(difference_of(condition)))
        return self._decide(reduced) if isinstance(reduced, SymBool) else reduced

    def _decide(self, condition: SymBool) -> bool | None:
        settled = self._settled.get(condition)
        if settled is not None:
            return settled
        op = condition.op
        terms, k = condition.args
        answer = _answer(op, self._bounds.range(terms), k)
        if answer is None and k in self._excluded.get(terms, ()):
            answer = {"==": False, "!=": True}.get(op)
        if answer is None and (rest := self._divided(condition)) is not None:
            answer = self._decide(rest) if isinstance(rest, SymBool) else rest
        if answer is None and has_atoms(terms) and any(len(m) > 1 for m, _ in terms):
            answer = self._decide_factored(op, plus_constant(terms, -k))
        return answer

    def _divided(self, condition: SymBool) -> bool | SymBool | None:
        """Divide by positive factors: `x*P <= 0` is `P <= 0`."""
        op = condition.op
        terms, k = condition.args
        if k and (op, k) not in ((">=", 1), ("<=", -1)):
            return None
        shared: Monomial = ()
        for factor in terms[0][0]:
            longer = (*shared, factor)
            if _divides(longer, terms) and (
                self._bounds.range(of_factor(factor)).low > 0
            ):
                shared = longer
        if not shared:
            return None
        rest = normal({without(m, shared) or (): factor for m, factor in terms})
        return relation(op, plus_constant(rest, -k))

    def _decide_factored(self, op: str, terms: Terms) -> bool | None:
        """Decide by the signs of the irreducible factors, which sympy finds."""
        parts = self._factors.get(terms)
        if parts is None:
            if len(self._factors) >= MAX_FACTORED:
                self._factors.clear()
            parts = self._factors[terms] = algebra.factors(terms)
        product = ValueRange.point(1)
        for part, power in parts:
            product = product * self._bounds.range(part).power(power)
        return _answer(op, product, 0)

    # --- facts ---

    def learn(self, condition: SymBool) -> None:
        """Take the condition as a fact; the facts must not imply its negation."""
        if condition.op == "and":
            for part in condition.args:
                self.learn(part)
            return
        self._settled[condition] = True
        self._settled[~condition] = False
        symbols = dict.fromkeys(condition.symbols)
        if condition.op in _INTEGERS:
            reduced = relation(condition.op, self.canonical(difference_of(condition)))
            if isinstance(reduced, SymBool):
                self._learn(reduced)
                symbols |= dict.fromkeys(reduced.symbols)
        self._changed()
        for symbol in symbols:
            self._take_number(symbol)
        while any(map(self._divide, [*self._products])):
            self._changed()

    def _divide(self, product: Terms) -> bool:
        """Learn what follows from the range of a product if a factor of it is positive
        by now: of `x*y == y`, that `x` is 1. Return whether it is."""
        range_ = self._ranges.get(product)
        if range_ is None:  # a symbol of it was replaced
            del self._products[product]
            return False
        ends = self._ends(product, range_)
        divided = [rest for x in ends if isinstance(rest := self._divided(x), SymBool)]
        if divided:
            del self._products[product]
        for rest in divided:
            self._learn(rest)
        return bool(divided)

    def _take_number(self, symbol: Symbol) -> None:
        """Replace a symbol by the only number that the facts allow: of `min(1, x)` and
        `x - 1`, which are equal for 2 alone, neither is a symbol."""
        range_ = self.range(of_factor(symbol))
        if range_.is_point and symbol not in self.solved and not symbol.real:
            fact = relation("==", plus_constant(of_factor(symbol), -int(range_.low)))
            if isinstance(fact, SymBool):
                self._learn(fact)
                self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._bounds = BoundsFinder(self._ranges, self._excluded)

    def _learn(self, condition: SymBool) -> None:
        rest = self._divided(condition)
        terms, k = condition.args
        if isinstance(rest, SymBool):
            self._learn(rest)
        elif len(terms) > 1 and _has_shared_factor(terms):
            self._products[terms] = None
        if condition.op == "!=":
            self._excluded.setdefault(terms, set()).add(k)
            return
        low = k if condition.op != "<=" else -inf
        high = k if condition.op != ">=" else inf
        before = self._ranges.get(terms, EVERY)
        after = before & ValueRange(low, high)
        if after == before or after.is_empty:
            return
        total = after & self._bounds.range(terms)
        if total.is_point:
            after = total
        self._ranges[terms] = after
        self._derive(terms, after)
        if after.is_point:
            self._solve(plus_constant(terms, -int(after.low)))

    def _bound(self, terms: Terms, range_: ValueRange) -> None:
        for fact in self._ends(terms, range_):
            self._learn(fact)

    def _ends(self, terms: Terms, range_: ValueRange) -> list[SymBool]:
        """Return the conditions that together are a range."""
        ends = [
            relation(op, plus_constant(terms, -int(end)))
            for op, end in ((">=", range_.low), ("<=", range_.high))
            if end not in (inf, -inf)
        ]
        return [fact for fact in ends if isinstance(fact, SymBool)]

    def _derive(self, terms: Terms, range_: ValueRange) -> None:
        """Learn the facts on arguments that follow from one on the result."""
        match terms:
            case (((Atom(op="//", args=(x, (((), y),))),), 1),):
                assert isinstance(x, tuple)
                lasts = ValueRange(0, y - 1)
                self._bound(x, range_.scaled(y) + lasts)
            case (((Atom(op="min", args=args),), 1),):
                for arg in args:
                    assert isinstance(arg, tuple)
                    self._bound(arg, ValueRange(range_.low, inf))
            case (((Atom(op="max", args=args),), 1),):
                for arg in args:
                    assert isinstance(arg, tuple)
                    self._bound(arg, ValueRange(-inf, range_.high))
            case ((monomial, 1),) if len(monomial) > 1 and range_.low > 0:
                # A positive product of non-negative integers has factors >= 1.
                parts = [of_factor(factor) for factor in monomial]
                if all(self._bounds.range(part).low >= 0 for part in parts):
                    for part in parts:
                        self._bound(part, ValueRange(1, inf))

    def _solve(self, zero: Terms) -> None:
        """Solve `zero == 0` for a symbol if possible, and replace the symbol."""
        candidates = [
            (self._seniority(monomial[0]), factor, monomial[0])
            for monomial, factor in zero
            if len(monomial) == 1
            and abs(factor) == 1
            and isinstance(monomial[0], Symbol)
            and _occurrences(zero, monomial[0]) == 1
        ]
        if not candidates:
            return
        _, factor, symbol = max(candidates, key=lambda candidate: candidate[0])
        value = scale(add(zero, scale(of_factor(symbol), -factor)), -factor)
        solution = {symbol: value}
        self.solved = {
            s: replace_terms(t, solution.get) for s, t in self.solved.items()
        } | solution
        ranges, excluded = dict(self._ranges), dict(self._excluded)
        self._ranges.clear()
        self._excluded.clear()
        self._bound(self.canonical(value), symbol.range)
        for terms, range_ in ranges.items():
            self._bound(self.canonical(terms), range_)
        for terms, numbers in excluded.items():
            new = self.canonical(terms)
            for number in numbers:
                fact = relation("!=", plus_constant(new, -number))
                if isinstance(fact, SymBool):
                    self._learn(fact)


def _divides(monomial: Monomial, terms: Terms) -> bool:
    return all(without(m, monomial) is not None for m, _ in terms)


def _has_shared_factor(terms: Terms) -> bool:
    return any(_divides((factor,), terms) for factor in terms[0][0])


def _occurrences(terms: Terms, symbol: Symbol) -> int:
    return sum(
        symbol in symbols_of(factor, {}) for monomial, _ in terms for factor in monomial
    )


def _answer(op: str, x: ValueRange, k: int) -> bool | None:
    """Return True if `x op k` for all x of the range, False if for none, else None."""
    match op:
        case "<=":
            return True if x.high <= k else False if x.low > k else None
        case ">=":
            return True if x.low >= k else False if x.high < k else None
    equal = False if k not in x else True if x.is_point else None
    return equal if op == "==" or equal is None else not equal


def _compare_ranges(op: str, x: ValueRange, y: ValueRange) -> bool | None:
    numbers = not (x.nan or y.nan)  # comparisons with NaN are false
    match op:
        case "<.":
            if x.low >= y.high:
                return False
            return True if numbers and x.high < y.low else None
        case "<=.":
            if x.low > y.high:
                return False
            return True if numbers and x.high <= y.low else None
    equal = None
    if x.high < y.low or y.high < x.low:
        equal = False
    elif numbers and x.is_point and y.is_point:
        equal = True
    return equal if op == "==." or equal is None else not equal


NOTHING: Final = Facts()
"""No facts: only declared ranges decide."""
