"""Conditions on symbolic numbers: `SymBool`, in a normal form to look facts up.

A comparison of integers becomes `P op k`, where P is a polynomial without a constant,
whose coefficients have no common divisor and the first of which is positive. Thus `2*x
< 4` and `x <= 1` are the same condition, and so are `x < y` and `y > x`. Where only the
sign of P decides, its common factors have no powers: `x*x*y == 0` is `x*y == 0`.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

from hopflow.entries import blames_user
from hopflow.errors import DataDependentError
from hopflow.symbolic.atoms import declared, replace, replace_terms
from hopflow.symbolic.lookups import is_asked_by_user
from hopflow.symbolic.terms import (
    Env,
    Namer,
    Operand,
    Symbol,
    Terms,
    compute,
    content,
    format_operand,
    hash_terms,
    is_constant,
    negate,
    normal,
    plus_constant,
    split_constant,
    symbols_of,
    without,
)
from hopflow.tracebacks import OWN_FILES

COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_INTEGERS: Final = frozenset(["<=", ">=", "==", "!="])


def _name_of(symbol: Symbol) -> str:
    return symbol.name


_Method: TypeAlias = Callable[[Any, Any], Any]


def _decided(operation: _Method) -> tuple[_Method, _Method]:
    """Return an operation on a condition's value, 0 or 1, and its reflection."""

    @blames_user
    def method(self: Any, other: Any) -> Any:
        if hasattr(other, "shape"):
            return NotImplemented  # the tensor's method handles it
        return operation(int(self), other)

    @blames_user
    def reflected(self: Any, other: Any) -> Any:
        return operation(other, int(self))

    return method, reflected


@final
class SymBool:
    """A condition that depends on symbols; never a constant.

    op                        args
    <=  >=  ==  !=            P, k      integers in the normal form above
    <.  <=.  ==.  !=.         a, b      floats, or a float and an integer
    and  or                   conditions
    not                       a condition on floats, where `not x < y` is no
                              `x >= y` because of NaN

    `bool()` asks the environment of the symbols, which may record a guard. So do
    arithmetic, comparisons and look-ups in sets and dicts, which act as on a `bool`.
    `&`, `|` and `~` combine conditions symbolically; `and`, `or` and `not` would ask.
    """

    __slots__ = ("_hash", "_symbols", "args", "op")

    op: str
    args: tuple[Any, ...]

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args
        self._hash = hash(
            (op, *[hash_terms(a) if isinstance(a, tuple) else a for a in args])
        )

    def __hash__(self) -> int:
        """Return the hash of the condition, or, where the user's code asks during a
        trace, the hash of the bool."""
        if not OWN_FILES[sys._getframe(1).f_code.co_filename] and is_asked_by_user(
            self.env
        ):
            return hash(bool(self))
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same condition, or, where the user's code asks
        during a trace, whether both bools are equal."""
        if isinstance(other, int | float):
            return int(self) == other
        if isinstance(other, SymBool) and (
            not OWN_FILES[sys._getframe(1).f_code.co_filename]
            and is_asked_by_user(self.env)
        ):
            return bool(self) is bool(other)
        return self is other or (
            isinstance(other, SymBool)
            and self._hash == other._hash
            and self.op == other.op
            and self.args == other.args
        )

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols, each once, in order of appearance."""
        try:
            return self._symbols
        except AttributeError:
            self._symbols: tuple[Symbol, ...] = tuple(self._found({}))
            return self._symbols

    def _found(self, symbols: dict[Symbol, None]) -> dict[Symbol, None]:
        for arg in self.args:
            if isinstance(arg, SymBool):
                arg._found(symbols)
            elif not isinstance(arg, int):
                symbols_of(arg, symbols)
        return symbols

    @property
    def env(self) -> Env | None:
        # A copy may be hashed before its symbols have their environments.
        envs = (getattr(symbol, "env", None) for symbol in self.symbols)
        return next((env for env in envs if env is not None), None)

    def __bool__(self) -> bool:
        """Return whether the condition holds; see `ShapeEnv.ask`.

        Raises:
            DataDependentError: only a run can tell.
        """
        if (env := self.env) is None:
            raise DataDependentError(str(self))
        return env.ask(self)

    def __invert__(self) -> "SymBool":
        match self.op:
            case "<=" | ">=":
                terms, k = self.args
                flipped, step = (">=", 1) if self.op == "<=" else ("<=", -1)
                return SymBool(flipped, (terms, k + step))
            case "and" | "or":
                opposite = "or" if self.op == "and" else "and"
                return SymBool(opposite, tuple([~part for part in self.args]))
            case "not":
                part: SymBool = self.args[0]
                return part
            case "<." | "<=.":
                return SymBool("not", (self,))
        return SymBool(_OPPOSITE[self.op], self.args)

    def __and__(self, other: "int | SymBool") -> "int | SymBool":
        if not isinstance(other, bool | SymBool):
            return int(self) & other if isinstance(other, int) else NotImplemented
        return all_of(self, other)

    def __or__(self, other: "int | SymBool") -> "int | SymBool":
        if not isinstance(other, bool | SymBool):
            return int(self) | other if isinstance(other, int) else NotImplemented
        return any_of(self, other)

    __rand__ = __and__
    __ror__ = __or__

    @blames_user
    def __index__(self) -> int:
        """Return 1 if the condition holds and 0 if not; see `ShapeEnv.ask`.

        Raises:
            DataDependentError: only a run can tell.
        """
        return int(bool(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __neg__(self) -> int:
        return -self.__index__()

    def __pos__(self) -> int:
        return self.__index__()

    __abs__ = __trunc__ = __pos__

    def __round__(self, digits: int | None = None) -> int:
        return round(self.__index__(), digits)

    __lt__, __gt__ = _decided(operator.lt)[0], _decided(operator.gt)[0]
    __le__, __ge__ = _decided(operator.le)[0], _decided(operator.ge)[0]
    __add__, __radd__ = _decided(operator.add)
    __sub__, __rsub__ = _decided(operator.sub)
    __mul__, __rmul__ = _decided(operator.mul)
    __truediv__, __rtruediv__ = _decided(operator.truediv)
    __floordiv__, __rfloordiv__ = _decided(operator.floordiv)
    __mod__, __rmod__ = _decided(operator.mod)
    __divmod__, __rdivmod__ = _decided(divmod)
    __xor__, __rxor__ = _decided(operator.xor)
    __pow__, __rpow__ = _decided(operator.pow)
    __lshift__, __rlshift__ = _decided(operator.lshift)
    __rshift__, __rrshift__ = _decided(operator.rshift)

    def evaluate(self, value: Callable[[Symbol], Any]) -> bool:
        """Return whether the condition holds for these values of the symbols."""
        match self.op:
            case "and":
                return all(part.evaluate(value) for part in self.args)
            case "or":
                return any(part.evaluate(value) for part in self.args)
            case "not":
                return not self.args[0].evaluate(value)
        x, y = [a if isinstance(a, int) else compute(a, value) for a in self.args]
        return _compared(self.op.rstrip("."), x, y)

    def substitute(self, value: Callable[[Symbol], Terms | None]) -> "bool | SymBool":
        """Return the condition with symbols replaced where `value` returns terms."""
        if self.op in ("and", "or", "not"):
            parts = [part.substitute(value) for part in self.args]
            return negation(parts[0]) if self.op == "not" else _joined(self.op, parts)
        if self.op in _INTEGERS:
            return relation(self.op, replace_terms(difference_of(self), value))
        return SymBool(self.op, tuple([replace(a, value) for a in self.args]))

    def __repr__(self) -> str:
        return self.format(_name_of)

    def format(self, name: Namer) -> str:
        """Return the condition as Python code."""
        match self.op:
            case "and" | "or":
                parts = [
                    f"({part.format(name)})"
                    if part.op in ("and", "or")
                    else part.format(name)
                    for part in self.args
                ]
                return f" {self.op} ".join(parts)
            case "not":
                return f"not {self.args[0].format(name)}"
        if self.op not in _INTEGERS:
            x, y = [format_operand(a, name) for a in self.args]
            return f"{x} {self.op.rstrip('.')} {y}"
        left, op, right = self.sides
        return f"{format_operand(left, name)} {op} {format_operand(right, name)}"

    @property
    def is_integral(self) -> bool:
        """Whether this is a single comparison of integers, which has `sides`."""
        return self.op in _INTEGERS

    @property
    def sides(self) -> tuple[Terms, str, Terms]:
        """The two sides of a comparison of integers, and the operator between them."""
        terms, k = self.args
        left = tuple([term for term in terms if term[1] > 0])
        right = negate(tuple([term for term in terms if term[1] < 0]))
        op = self.op
        if right and (op, k) in _STRICT:  # x - y <= -1 is x < y
            op, k = _STRICT[op, k], 0
        return left, op, plus_constant(right, k)


_STRICT: Final = {("<=", -1): "<", (">=", 1): ">"}
# Comparisons that only the sign of the left side decides.
_SIGNS: Final = {("==", 0), ("!=", 0), ("<=", 0), (">=", 0), ("<=", -1), (">=", 1)}
_OPPOSITE: Final = {"==": "!=", "!=": "==", "==.": "!=.", "!=.": "==."}


def relation(op: str, difference: Terms) -> bool | SymBool:
    """Return the condition `difference op 0` on integers, in normal form."""
    if is_constant(difference):
        return COMPARISONS[op](difference[0][1] if difference else 0, 0)
    terms, k = split_constant(difference)
    # terms op -k
    common = content(terms)
    if terms[0][1] < 0:
        op, terms, k = MIRRORED[op], negate(terms), -k
    if op == "<":
        op, k = "<=", k + 1
    elif op == ">":
        op, k = ">=", k - 1
    if common > 1:
        if op in ("==", "!=") and k % common:
            return op == "!="
        terms = tuple([(monomial, factor // common) for monomial, factor in terms])
    # common*P <= -k  is  P <= floor(-k / common); for >=, the ceiling
    bound = -(k // common) if op == ">=" else -k // common
    if (op, bound) in _SIGNS:
        lower = _with_sign_of(terms, is_zero_enough=op in ("==", "!="))
        if lower != terms:
            return relation(op, plus_constant(lower, -bound))
    return SymBool(op, (terms, bound))


def _with_sign_of(terms: Terms, *, is_zero_enough: bool) -> Terms:
    """Return terms with lower powers of the common factors, and the same sign.

    A product of sizes is zero, or positive, where the product without powers is. The
    latter is still a number of int64 where the former is none: compiled code, which
    computes in int64, would refuse it.

    Args:
        terms: A polynomial without a constant.
        is_zero_enough: Whether the result may have another sign where it is not zero.
    """
    for factor in dict.fromkeys(terms[0][0]):
        omitted = min(monomial.count(factor) for monomial, _ in terms) - 1
        if not is_zero_enough and declared(factor).low < 0:
            omitted -= omitted % 2
        if omitted > 0:
            divisor = (factor,) * omitted
            terms = normal({without(m, divisor) or (): k for m, k in terms})
    return terms


def difference_of(condition: SymBool) -> Terms:
    """Return `P - k` of a condition `P op k` on integers."""
    terms, k = condition.args
    return plus_constant(terms, -k)


def compare_floats(op: str, x: Operand, y: Operand) -> SymBool:
    """Return `x op y`, where at least one operand is a float."""
    if op in (">", ">="):
        op, x, y = MIRRORED[op], y, x
    return SymBool(f"{op}.", (x, y))


def compare_constant(op: str, terms: Terms, value: float) -> bool | SymBool:
    """Return `terms op value` for a float constant, compared exactly."""
    if value != value or value in (float("inf"), float("-inf")):
        return COMPARISONS[op](0, value)
    floor = int(value // 1)
    if floor != value:
        if op in ("==", "!="):
            return op == "!="
        op = "<=" if op in ("<", "<=") else ">"
    return relation(op, plus_constant(terms, -floor))


def all_of(*conditions: bool | SymBool) -> bool | SymBool:
    return _joined("and", conditions)


def any_of(*conditions: bool | SymBool) -> bool | SymBool:
    return _joined("or", conditions)


def negation(condition: bool | SymBool) -> bool | SymBool:
    return ~condition if isinstance(condition, SymBool) else not condition


def _joined(op: str, conditions: Iterable[bool | SymBool]) -> bool | SymBool:
    absorbing = op == "or"
    parts: dict[SymBool, None] = {}
    for condition in conditions:
        if not isinstance(condition, SymBool):
            if condition == absorbing:
                return absorbing
        elif condition.op == op:
            parts.update(dict.fromkeys(condition.args))
        else:
            parts[condition] = None
    if any(~part in parts for part in parts):
        return absorbing
    if len(parts) < 2:
        return next(iter(parts), not absorbing)
    return SymBool(op, tuple(parts))


@blames_user
def _compared(op: str, x: Any, y: Any) -> bool:
    """Compare numbers that the user's code defines, which may evaluate to complex ones.

    Raises:
        TypeError: one of them is complex.
    """
    return bool(COMPARISONS[op](x, y))
