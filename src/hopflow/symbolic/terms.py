"""The normal form of integer expressions: polynomials over symbols and atoms.

An atom is an operation that polynomials lack, applied to arguments in normal form:
`//`, `%`, min, max, and float operations, which stay trees because reordering would
round differently. This file only represents expressions; `scalars.py` wraps them in
numbers.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any, Final, Protocol, TypeAlias, final

from hopflow.symbolic.ranges import NON_NEGATIVE, ValueRange


class Env(Protocol):
    """The part of `env.ShapeEnv` that symbols and expressions use.

    Conditions are `SymBool`s, which this module cannot import.
    """

    symbols: "dict[Symbol, str]"

    @property
    def facts(self) -> tuple[Any, ...]: ...

    def decide(self, condition: Any) -> bool | None: ...

    def ask(self, condition: Any) -> bool: ...

    def assume(self, condition: Any) -> bool: ...

    def describe(self, condition: Any) -> str: ...

    def name(self, symbol: "Symbol") -> str: ...

    def origins(self, condition: Any) -> str: ...

    def range(self, operand: "Operand") -> ValueRange: ...

    def concrete(self, expression: "Operand") -> Any: ...

    def simplify(self, size: Any) -> Any: ...


@dataclass(frozen=True, eq=False, slots=True)
class Symbol:
    """An unknown number: `s…` if an input backs it, `u…` if only a run knows it.

    Symbols are compared by identity; names are for display. An integer symbol is
    non-negative unless `range` says otherwise, and may be 0 or 1. `range` is declared
    and fixed; facts learned later are in `env`: see `docs/notes/symbols_and_owners.md`.
    Without an `env`, a comparison that ranges leave open is an error.
    """

    name: str
    hint: float | None = None
    range: ValueRange = NON_NEGATIVE
    env: Env | None = None
    real: bool = False  # True for floats

    def __repr__(self) -> str:
        return self.name


@final
class Atom:
    """`op(*args)`. Atoms are equal if their operations and arguments are equal."""

    __slots__ = ("_hash", "args", "op", "order")

    op: str
    args: tuple["Operand", ...]
    order: tuple[str, int]

    def __init__(self, op: str, args: tuple["Operand", ...]) -> None:
        self.op = op
        self.args = args
        self._hash = hash((op, tuple([hash_terms(a) for a in args])))
        self.order = (format_operand(self), self._hash)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Atom)
            and self._hash == other._hash
            and self.op == other.op
            and self.args == other.args
        )

    def __repr__(self) -> str:
        return self.order[0]


Factor: TypeAlias = Symbol | Atom
# A monomial is the sorted tuple of its factors, repeated for powers; () is 1.
Monomial: TypeAlias = tuple[Factor, ...]
# Terms in order of falling degree, then by name, so that the constant is last. No
# coefficient is 0; () is the polynomial 0.
Terms: TypeAlias = tuple[tuple[Monomial, int], ...]
# An argument of an atom: an integer; a float symbol or atom; or a float constant, in
# hexadecimal.
Operand: TypeAlias = Terms | Symbol | Atom | str

ONE: Final[Terms] = (((), 1),)
MAX_TERMS: Final = 64  # the most terms of a quotient


def hash_terms(operand: Operand) -> int:
    # hash(-1) == hash(-2), so `n - m` and `n - 2*m` would collide in a dict, whose `==`
    # may then record a guard. Odd numbers keep them apart.
    if isinstance(operand, tuple):
        return hash(tuple([(monomial, 2 * f + 1) for monomial, f in operand]))
    return hash(operand)


# --- arithmetic -----------------------------------------------------------------------


def constant(value: int) -> Terms:
    return (((), int(value)),) if value else ()


def of_factor(factor: Factor) -> Terms:
    return (((factor,), 1),)


def order(factor: Factor) -> tuple[str, int]:
    if isinstance(factor, Symbol):
        return factor.name, id(factor)
    return factor.order


def _term_order(term: tuple[Monomial, int]) -> tuple[int, list[tuple[str, int]]]:
    return -len(term[0]), [order(factor) for factor in term[0]]


def normal(total: Mapping[Monomial, int]) -> Terms:
    kept = [term for term in total.items() if term[1]]
    if len(kept) > 1:
        kept.sort(key=_term_order)
    return tuple(kept)


def plus_constant(a: Terms, k: int) -> Terms:
    if not k:
        return a
    if a and a[-1][0] == ():
        total = a[-1][1] + k
        return (*a[:-1], ((), total)) if total else a[:-1]
    return (*a, ((), k))


def add(a: Terms, b: Terms) -> Terms:
    if is_constant(b):
        return plus_constant(a, b[0][1] if b else 0)
    if is_constant(a):
        return plus_constant(b, a[0][1] if a else 0)
    total = dict(a)
    for monomial, factor in b:
        total[monomial] = total.get(monomial, 0) + factor
    return normal(total)


def scale(a: Terms, k: int) -> Terms:
    if k == 1:
        return a
    return tuple([(monomial, factor * k) for monomial, factor in a]) if k else ()


def negate(a: Terms) -> Terms:
    return scale(a, -1)


def subtract(a: Terms, b: Terms) -> Terms:
    return add(a, scale(b, -1))


def multiply(a: Terms, b: Terms) -> Terms:
    if is_constant(b):
        return scale(a, b[0][1] if b else 0)
    if is_constant(a):
        return scale(b, a[0][1] if a else 0)
    total: dict[Monomial, int] = {}
    for left, x in a:
        for right, y in b:
            monomial = (
                tuple(sorted(left + right, key=order))
                if left and right
                else left or right
            )
            total[monomial] = total.get(monomial, 0) + x * y
    return normal(total)


def is_constant(a: Terms) -> bool:
    return not a or a[0][0] == ()


def split_constant(a: Terms) -> tuple[Terms, int]:
    """Return the terms without the constant, and the constant."""
    return (a[:-1], a[-1][1]) if a and a[-1][0] == () else (a, 0)


def content(a: Terms) -> int:
    """Return the greatest common divisor of the coefficients."""
    return reduce(gcd, (factor for _, factor in a), 0)


def without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return `monomial / divisor`; None if the quotient is no monomial."""
    rest = list(monomial)
    for factor in divisor:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def divide(a: Terms, by: Terms) -> tuple[Terms, Terms]:
    """Return (q, r) with `a == q * by + r`; no term of r has `by`'s leading term."""
    lead, factor = by[0]
    whole = a
    quotient: Terms = ()
    rest: Terms = ()
    while a:
        monomial, f = a[0]
        left = None if f % factor else without(monomial, lead)
        if left is None:
            rest, a = add(rest, a[:1]), a[1:]
            continue
        step: Terms = ((left, f // factor),)
        quotient = add(quotient, step)
        if len(quotient) > MAX_TERMS:  # e.g. `s0**1000 // (s0 - 1)`: stays an atom
            return (), whole
        a = subtract(a, multiply(step, by))
    return quotient, rest


# --- walking --------------------------------------------------------------------------


def symbols_of(operand: Operand, symbols: dict[Symbol, None]) -> dict[Symbol, None]:
    """Add the symbols to `symbols`, in order of appearance, and return it."""
    if isinstance(operand, Symbol):
        symbols[operand] = None
    elif isinstance(operand, Atom):
        for arg in operand.args:
            symbols_of(arg, symbols)
    elif isinstance(operand, tuple):
        for monomial, _ in operand:
            for factor in monomial:
                symbols_of(factor, symbols)
    return symbols


def env_of(operand: Operand) -> Env | None:
    """Return the environment of the first symbol that has one; None if none has."""
    for symbol in symbols_of(operand, {}):
        if symbol.env is not None:
            return symbol.env
    return None


def has_atoms(terms: Terms) -> bool:
    return any(isinstance(f, Atom) for monomial, _ in terms for f in monomial)


# The operations of atoms in Python. Names that end in a dot are float operations.
OPERATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": int,
    "round": round,
    "float": float,
    "/": operator.truediv,
    "+.": operator.add,
    "-.": operator.sub,
    "*.": operator.mul,
    "/.": operator.truediv,
    "//.": operator.floordiv,
    "%.": operator.mod,
    "**.": operator.pow,
    "abs.": abs,
    "neg.": operator.neg,
    "sign.": lambda x: math.copysign(1.0, x),
}


def compute(
    operand: Operand,
    value: Callable[[Symbol], Any],
    number: Callable[[int], Any] = int,
    operations: Mapping[str, Callable[..., Any]] = OPERATIONS,
) -> Any:
    """Evaluate an expression in another arithmetic."""
    if isinstance(operand, str):
        return float.fromhex(operand)
    if isinstance(operand, Symbol):
        return value(operand)
    if isinstance(operand, Atom):
        args = [compute(a, value, number, operations) for a in operand.args]
        return operations[operand.op](*args)
    terms = []
    for monomial, factor in operand:
        factors = [compute(f, value, number, operations) for f in monomial]
        if factor != 1 or not factors:
            factors.insert(0, number(factor))
        terms.append(reduce(operator.mul, factors))
    return reduce(operator.add, terms) if terms else number(0)


# --- text -----------------------------------------------------------------------------

_INFIX: Final = frozenset(["//", "%", "/", "+.", "-.", "*.", "/.", "//.", "%.", "**."])
Namer: TypeAlias = Callable[[Symbol], str]


def _name_of(symbol: Symbol) -> str:
    return symbol.name


def format_operand(operand: Operand, name: Namer = _name_of) -> str:
    """Return the expression as Python code."""
    if isinstance(operand, str):
        return repr(float.fromhex(operand))
    if isinstance(operand, Symbol):
        return name(operand)
    if isinstance(operand, tuple):
        return _format_terms(operand, name)
    texts = [format_operand(a, name) for a in operand.args]
    if operand.op in _INFIX:
        left, right = map(_closed, operand.args, texts)
        return f"{left} {operand.op.rstrip('.')} {right}"
    if operand.op == "neg.":
        return f"-{_closed(operand.args[0], texts[0])}"
    return f"{_CALLS.get(operand.op, operand.op)}({', '.join(texts)})"


_CALLS: Final = {"trunc": "int", "abs.": "abs", "sign.": "sign"}


def _closed(operand: Operand, text: str) -> str:
    """Put a text in parentheses unless it is a name, a number or a call."""
    plain = text.replace(".", "").isidentifier() or text.isdecimal()
    if plain or (isinstance(operand, str) and not text.startswith("-")):
        return text
    factor = operand
    if isinstance(operand, tuple) and len(operand) == 1 and operand[0][1] == 1:
        [(monomial, _)] = operand
        factor = monomial[0] if len(monomial) == 1 else operand
    if isinstance(factor, Atom) and factor.op not in _INFIX and factor.op != "neg.":
        return text
    return text if isinstance(factor, Symbol) else f"({text})"


def _format_terms(terms: Iterable[tuple[Monomial, int]], name: Namer) -> str:
    text = ""
    for monomial, factor in terms:
        factors = [format_operand(f, name) for f in monomial]
        number = [str(abs(factor))] * (abs(factor) != 1 or not monomial)
        if len(number) + len(factors) > 1 or (factor < 0 and not text):
            factors = list(map(_closed, monomial, factors))
        body = "*".join(number + factors)
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {body}" if text else ("-" if factor < 0 else "") + body
    return text or "0"
