"""Guards: conditions that a trace relies on, checked before it is used again."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from hopflow.symbolic.boolean import SymBool, compare_floats, relation
from hopflow.symbolic.facts import Facts
from hopflow.symbolic.ranges import ANY_FLOAT, EVERY, INT64, NON_NEGATIVE
from hopflow.symbolic.terms import (
    OPERATIONS,
    Atom,
    Symbol,
    Terms,
    is_constant,
    of_factor,
    plus_constant,
)

DECLARED: Final = "declared"  # the `line` of a guard that states a declared range
MANY: Final = 48  # beyond it, a guard is compared with the later ones only


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on backed symbols that a trace decided by the values of its call."""

    expression: SymBool  # as the user's code wrote it
    truth: bool  # the answer
    line: str = ""  # the user's line that asked, "model.py:12"

    @property
    def holds(self) -> SymBool:
        """The condition under which the answer is the same."""
        return self.expression if self.truth else ~self.expression

    @property
    def is_simple(self) -> bool:
        """Whether this is only a range, a linear equality or a divisibility.

        Callers can satisfy these by their choice of sizes. Where a graph is to serve as
        many sizes as possible, other guards are checked in the run.
        """
        holds = self.holds
        if holds.op in ("<.", "<=.", "==."):
            return all(isinstance(a, str | Symbol) for a in holds.args)
        if holds.op not in ("<=", ">=", "=="):
            return False
        terms, k = holds.args
        if holds.op == "==" and _is_remainder(terms):
            return bool(k == 0)
        linear = all(len(m) == 1 and isinstance(m[0], Symbol) for m, _ in terms)
        return linear and (holds.op == "==" or len(terms) == 1)

    @property
    def at(self) -> str:
        """The line that asked, phrased to follow the condition in a sentence."""
        if self.line == DECLARED:
            return ", as declared,"
        return f" at {self.line}" if self.line else ""

    def __str__(self) -> str:
        return f"{self.holds}  ({self.line})" if self.line else str(self.holds)


def _is_remainder(terms: Terms) -> bool:
    """Return True if it is `n % 8` with n linear."""
    if len(terms) != 1 or len(terms[0][0]) != 1:
        return False
    atom = terms[0][0][0]
    if not isinstance(atom, Atom) or atom.op != "%":
        return False
    total, divisor = atom.args
    return (
        isinstance(total, tuple)
        and isinstance(divisor, tuple)
        and is_constant(divisor)
        and all(len(m) < 2 and not isinstance(f, Atom) for m, _ in total for f in m)
    )


def declared_guards(symbols: Iterable[Symbol]) -> tuple[Guard, ...]:
    """Return the declared ranges of symbols, as guards."""
    guards = []
    for symbol in symbols:
        if symbol.range in (EVERY, INT64, NON_NEGATIVE, ANY_FLOAT):
            continue  # fulfilled by each size, or each number
        for op, end in ((">=", symbol.range.low), ("<=", symbol.range.high)):
            condition: bool | SymBool
            if symbol.real:
                condition = compare_floats(op, symbol, float(end).hex())
            elif end in (inf, -inf):
                continue
            else:
                condition = relation(op, plus_constant(of_factor(symbol), -int(end)))
            assert isinstance(condition, SymBool)
            guards.append(Guard(condition, True, DECLARED))
    return tuple(guards)


def _undecided(guards: Iterable[Guard], kept: Iterable[Guard]) -> list[Guard]:
    """Return the guards that `kept` do not decide when they are learned in their order.

    What facts can prove depends on the order in which they are learned: `x*y == x` is
    solved for `y` only if `x != 0` is known.
    """
    facts = Facts()
    for guard in kept:
        facts.learn(guard.holds)
    rest = []
    for guard in guards:
        if facts.decide(guard.holds) is not True:
            facts.learn(guard.holds)
            rest.append(guard)
    return rest


@dataclass(frozen=True, slots=True)
class GuardSet:
    """Guards in the order in which they were recorded. All must hold."""

    guards: tuple[Guard, ...] = ()

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols of the guards, in order of appearance."""
        return tuple(dict.fromkeys(s for g in self.guards for s in g.holds.symbols))

    def simplified(self) -> "GuardSet":
        """Return the guards without those that others, and declared ranges, imply.

        Facts learned from the result, in its order, decide each guard that is left out.
        """
        # An earlier guard decides what it implies, so only later ones can make a guard
        # redundant.
        later = Facts()
        kept: list[Guard] = []
        declared = [g for g in self.guards if g.line == DECLARED]
        for guard in reversed(self.guards[len(declared) :]):
            if later.decide(guard.holds) is not True:
                later.learn(guard.holds)
                kept.insert(0, guard)
        for guard in kept[:] if len(kept) <= MANY else ():
            others = Facts()
            for other in kept:
                if other is not guard:
                    others.learn(other.holds)
            if others.decide(guard.holds) is True:
                kept.remove(guard)
        kept += _undecided(self.guards[len(declared) :], kept)
        # `Facts` take declared ranges as given, so they cannot tell which are
        # redundant.
        needed = [g for g in declared if not any(_implies(k, g) for k in kept)]
        return GuardSet((*needed, *kept))

    def compile(self) -> Callable[[Mapping[Symbol, Any]], bool]:
        """Return a function from symbols' values to whether all guards hold."""
        check = self.compile_for(self.symbols)
        symbols = self.symbols
        return lambda values: check(*[values[s] for s in symbols])

    def compile_for(self, order: Sequence[Symbol]) -> Callable[..., bool]:
        """Return a function of the symbols' values, by position in this order."""
        if not self.guards:
            return lambda *_: True
        scope: dict[str, Any] = dict(_SCOPE)
        exec(self.source(order), scope)
        check: Callable[..., bool] = scope["check"]
        return check

    def source(self, order: Sequence[Symbol]) -> str:
        """Return the Python source that `compile_for` executes."""
        # Names of symbols need not be identifiers.
        names = {symbol: f"v{i}" for i, symbol in enumerate(order)}
        lines = [f"def check({', '.join(names.values())}):", "    try:", "        pass"]
        for guard in self.guards:
            test = guard.holds.format(names.__getitem__)
            lines.append(f"        if not ({test}): return False")
        # If evaluating a guard divides by zero, overflows a float or gives a complex
        # number, the call differs from the traced one.
        lines.append("    except (ArithmeticError, TypeError, ValueError):")
        lines.append("        return False")
        return "\n".join([*lines, "    return True", ""])

    def explain(self, values: Mapping[Symbol, Any]) -> list[str]:
        """Return a line for each guard that fails, in the user's names."""
        failures = []
        for guard in self.guards:
            try:
                if guard.holds.evaluate(values.__getitem__):
                    continue
                reason = ""
            except (ArithmeticError, TypeError, ValueError) as error:
                reason = f" ({error})"
            origin = "as declared" if guard.line == DECLARED else ""
            origin = origin or (f"which {guard.line} asked" if guard.line else "")
            where = f", {origin}," if origin else ""
            env = guard.holds.env
            names = {s: s.name if env is None else env.name(s) for s in values}
            bindings = ", ".join(
                f"{names[s]} = {values[s]}" for s in guard.holds.symbols
            )
            shown = guard.holds.format(names.__getitem__)
            failures.append(f"`{shown}`{where} fails: {bindings}{reason}")
        return failures

    def __str__(self) -> str:
        return "\n".join(map(str, self.guards))


def _implies(guard: Guard, end: Guard) -> bool:
    """Return True if a guard bounds the same symbol as tightly as `end`."""
    a, b = guard.holds, end.holds
    if a.op != b.op or a.args[0] != b.args[0] or a.op not in ("<=", ">="):
        return False
    closer: bool = a.args[1] <= b.args[1] if a.op == "<=" else a.args[1] >= b.args[1]
    return closer


_SCOPE: Final = {
    "floor": math.floor,
    "ceil": math.ceil,
    "inf": inf,
    "nan": math.nan,
    "sign": OPERATIONS["sign."],
}
