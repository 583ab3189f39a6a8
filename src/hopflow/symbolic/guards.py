"""Guards: what a trace relied on, to be checked before it is used again."""

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

DECLARED: Final = "declared"  # in place of the line of a guard that nobody asked
MANY: Final = 48  # guards, beyond which each is compared with the later ones only


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on backed symbols that a trace decided by the values of its call."""

    expression: SymBool  # as the user's code asked it
    truth: bool  # the answer
    line: str = ""  # of the user's code that asked, "model.py:12"

    @property
    def holds(self) -> SymBool:
        """The condition under which the answer is the same."""
        return self.expression if self.truth else ~self.expression

    @property
    def is_simple(self) -> bool:
        """Whether it says no more than a range, a linear equality or a divisibility.

        A caller can keep to such by choosing sizes. The others are left to a run, where
        the graph is to serve whatever it can.
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
        """Who asked for it, as it follows the condition in a sentence."""
        if self.line == DECLARED:
            return ", as declared,"
        return f" at {self.line}" if self.line else ""

    def __str__(self) -> str:
        return f"{self.holds}  ({self.line})" if self.line else str(self.holds)


def _is_remainder(terms: Terms) -> bool:
    """Whether it is `n % 8` with n linear."""
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
    """The ranges that symbols were declared to have, as guards."""
    found = []
    for symbol in symbols:
        if symbol.range in (EVERY, INT64, NON_NEGATIVE, ANY_FLOAT):
            continue  # what each size, or each number, fulfils
        for op, end in ((">=", symbol.range.low), ("<=", symbol.range.high)):
            condition: bool | SymBool
            if symbol.real:
                condition = compare_floats(op, symbol, float(end).hex())
            elif end in (inf, -inf):
                continue
            else:
                condition = relation(op, plus_constant(of_factor(symbol), -int(end)))
            assert isinstance(condition, SymBool)
            found.append(Guard(condition, True, DECLARED))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class GuardSet:
    """Guards, in the order in which they were asked. All must hold."""

    guards: tuple[Guard, ...] = ()

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols that guards mention, in order of appearance."""
        return tuple(dict.fromkeys(s for g in self.guards for s in g.holds.symbols))

    def simplified(self) -> "GuardSet":
        """The guards without those that the others, and declared ranges, imply."""
        # What came earlier decided what it implies, and no guard was made of it.
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
        # Facts know declared ranges, and cannot tell whether they are implied.
        needed = [g for g in declared if not any(_implies(k, g) for k in kept)]
        return GuardSet((*needed, *kept))

    def compile(self) -> Callable[[Mapping[Symbol, Any]], bool]:
        """A function from the values of the symbols to whether all guards hold."""
        check = self.compile_for(self.symbols)
        symbols = self.symbols
        return lambda values: check(*[values[s] for s in symbols])

    def compile_for(self, order: Sequence[Symbol]) -> Callable[..., bool]:
        """A function of the values of the symbols, by position in this order."""
        if not self.guards:
            return lambda *_: True
        scope: dict[str, Any] = dict(_SCOPE)
        exec(self.source(order), scope)
        check: Callable[..., bool] = scope["check"]
        return check

    def source(self, order: Sequence[Symbol]) -> str:
        """The Python that `compile_for` runs."""
        # Names of symbols are for people, and need not be identifiers.
        names = {symbol: f"v{i}" for i, symbol in enumerate(order)}
        lines = [f"def check({', '.join(names.values())}):", "    try:", "        pass"]
        for guard in self.guards:
            test = guard.holds.format(names.__getitem__)
            lines.append(f"        if not ({test}): return False")
        # A division by zero, a number that no float holds, a power that is complex: not
        # the call of the trace.
        lines.append("    except (ArithmeticError, TypeError, ValueError):")
        lines.append("        return False")
        return "\n".join([*lines, "    return True", ""])

    def explain(self, values: Mapping[Symbol, Any]) -> list[str]:
        """One line for each guard that does not hold for these values, in the user's
        names."""
        found = []
        for guard in self.guards:
            try:
                if guard.holds.evaluate(values.__getitem__):
                    continue
                reason = ""
            except (ArithmeticError, TypeError, ValueError) as error:
                reason = f" ({error})"
            asked = "as declared" if guard.line == DECLARED else ""
            asked = asked or (f"which {guard.line} asked" if guard.line else "")
            where = f", {asked}," if asked else ""
            env = guard.holds.env
            names = {s: s.name if env is None else env.name(s) for s in values}
            given = ", ".join(f"{names[s]} = {values[s]}" for s in guard.holds.symbols)
            shown = guard.holds.format(names.__getitem__)
            found.append(f"`{shown}`{where} fails: {given}{reason}")
        return found

    def __str__(self) -> str:
        return "\n".join(map(str, self.guards))


def _implies(guard: Guard, end: Guard) -> bool:
    """Whether a guard is a bound on a symbol no further out than this one."""
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
