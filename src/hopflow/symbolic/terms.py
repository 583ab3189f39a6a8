"""The normal form of integer expressions: polynomials over symbols and atoms.

An atom is an operation that polynomials have not, applied to arguments in normal form:
`//`, `%`, min, max, and the float operations, which stay trees, for to reorder them
would round otherwise. This file is representation only; `scalars.py` has the faces.
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
    """What a symbol asks of the environment it belongs to; see `env.ShapeEnv`.

    Conditions are `SymBool`s, which are made of symbols.
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


@dataclass(frozen=True, eq=False, slots=True)
class Symbol:
    """An unknown number: `s…` backed by an input, `u…` by nothing yet.

    Symbols are compared by identity; the name is for people. An integer is not negative
    unless `range` says so, and 0 and 1 are like any other. `range` is declared; what is
    learned since is in `env`: see `docs/notes/symbols_and_owners.md`. Without an `env`,
    a comparison that ranges leave open is an error.
    """

    name: str
    hint: float | None = None
    range: ValueRange = NON_NEGATIVE
    env: Env | None = None
    real: bool = False  # a float

    def __repr__(self) -> str:
        return self.name


@final
class Atom:
    """`op(*args)`. Atoms are equal if they are the same operation on the same terms."""

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
# A monomial is its factors in order, repeated for powers; () is the constant one.
Monomial: TypeAlias = tuple[Factor, ...]
# Higher degrees first, then by name: so the constant is last. No factor is 0; () is 0.
Terms: TypeAlias = tuple[tuple[Monomial, int], ...]
# Of an atom: an integer; a float symbol or atom; a float constant, in hexadecimal.
Operand: TypeAlias = Terms | Symbol | Atom | str

ONE: Final[Terms] = (((), 1),)
MAX_TERMS: Final = 64  # of a quotient


def hash_terms(operand: Operand) -> int:
    # hash(-1) == hash(-2), so `n - m` and `n - 2*m` would meet in a dict, and ask
    # whether they are equal. Odd numbers keep apart.
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
    """The terms without the constant, and it."""
    return (a[:-1], a[-1][1]) if a and a[-1][0] == () else (a, 0)


def content(a: Terms) -> int:
    """The greatest common divisor of the factors."""
    return reduce(gcd, (factor for _, factor in a), 0)


def without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """`monomial / divisor`; None if that is no monomial."""
    left = list(monomial)
    for factor in divisor:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def divide(a: Terms, by: Terms) -> tuple[Terms, Terms]:
    """(q, r) with `a == q * by + r`; r is `a` reduced as far as the first term goes."""
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
        if len(quotient) > MAX_TERMS:  # `s0**1000 // (s0 - 1)` is best left alone
            return (), whole
        a = subtract(a, multiply(step, by))
    return quotient, rest


# --- walking --------------------------------------------------------------------------


def symbols_of(operand: Operand, found: dict[Symbol, None]) -> dict[Symbol, None]:
    """Add the symbols to `found`, in order of appearance."""
    if isinstance(operand, Symbol):
        found[operand] = None
    elif isinstance(operand, Atom):
        for arg in operand.args:
            symbols_of(arg, found)
    elif isinstance(operand, tuple):
        for monomial, _ in operand:
            for factor in monomial:
                symbols_of(factor, found)
    return found


def env_of(operand: Operand) -> Env | None:
    """The environment to ask: that of the first symbol that has one."""
    for symbol in symbols_of(operand, {}):
        if symbol.env is not None:
            return symbol.env
    return None


def has_atoms(terms: Terms) -> bool:
    return any(isinstance(f, Atom) for monomial, _ in terms for f in monomial)


# The operations of atoms, as Python does them. Those with a dot are of floats.
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
    """An expression in another arithmetic."""
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


def _own_name(symbol: Symbol) -> str:
    return symbol.name


def format_operand(operand: Operand, name: Namer = _own_name) -> str:
    """The expression as Python, which also computes it."""
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
    """In parentheses, unless it is a name, a number or a call."""
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
