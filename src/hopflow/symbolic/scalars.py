"""Symbolic integers and floats: Python's operators on normal forms.

Arithmetic records nothing. A comparison returns a `bool` where ranges and facts decide
it, else a `SymBool`, which asks its environment when it is used as a bool.
"""

import sys
from collections.abc import Callable
from math import inf
from operator import index
from typing import Any, Final, TypeAlias, cast, final

from hopflow.entries import blames_user
from hopflow.errors import ArgumentValueError, DataDependentError
from hopflow.symbolic import atoms, terms
from hopflow.symbolic.asking import (
    bool_if_implied,
    floor_divide,
    guarded_truth,
    hint_of,
    implied_truth,
    modulo,
    not_zero,
)
from hopflow.symbolic.boolean import (
    SymBool,
    compare_constant,
    compare_floats,
    relation,
)
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.lookups import is_asked_by_user
from hopflow.symbolic.terms import (
    Atom,
    Operand,
    Symbol,
    Terms,
    env_of,
    format_operand,
    hash_terms,
    plus_constant,
    symbols_of,
)
from hopflow.tracebacks import OWN_FILES

MAX_POWER: Final = 64  # the largest exponent k for which `n ** k` stays an expression
EXACT_POWER: Final = 2**51  # up to this, a float power rounds to the exact integer
EXACT_INTEGER: Final = 2**53  # up to this, floats hold every integer


class _Slots:
    """Functions that a higher layer fills in.

    ufunc   applies a NumPy ufunc to arguments some of which are symbolic numbers:
            (ufunc, method, inputs, options) -> results (filled by `tensor`)
    """

    ufunc: Callable[[Any, str, tuple[Any, ...], dict[str, Any]], Any]


slots: Final = _Slots()


class _Ordered:
    """Comparisons, which return a SymBool where undecided, and NumPy's ufuncs.

    Types say `bool`, as an `if` needs no distinction; whoever wants the condition
    itself asks `isinstance`.
    """

    __slots__ = ()

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> Any:
        return slots.ufunc(ufunc, method, inputs, options)

    def _compare(self, op: str, other: Any) -> Any:
        raise NotImplementedError

    def __lt__(self, other: "Number") -> bool:
        result: bool = self._compare("<", other)
        return result

    def __le__(self, other: "Number") -> bool:
        result: bool = self._compare("<=", other)
        return result

    def __gt__(self, other: "Number") -> bool:
        result: bool = self._compare(">", other)
        return result

    def __ge__(self, other: "Number") -> bool:
        result: bool = self._compare(">=", other)
        return result

    def __bool__(self) -> bool:
        return bool(self._compare("!=", 0))


@final
class SymInt(_Ordered):
    """An integer that depends on symbols; never a constant.

    A polynomial with integer coefficients over symbols and atoms: see `terms.py`.
    """

    __slots__ = ("_hash", "_is_one", "_value_hash", "expression")

    expression: Terms

    def __init__(self, terms: Terms) -> None:
        self.expression = terms

    def __hash__(self) -> int:
        """Return the hash of the expression, or, where the user's code asks during a
        trace, the hash of the value in this call, which becomes a guard.

        Raises:
            DataDependentError: the user's code asks, and only a run knows the value.
        """
        try:
            return self._value_hash
        except AttributeError:
            pass
        if not OWN_FILES[sys._getframe(1).f_code.co_filename] and is_asked_by_user(
            env_of(self.expression)
        ):
            self._value_hash: int = hash(int(self))
            return self._value_hash
        try:
            return self._hash
        except AttributeError:
            self._hash: int = hash_terms(self.expression)
            return self._hash

    @property
    def hint(self) -> int | None:
        """The value in the call that is traced; None if a symbol has none."""
        value: int | None = hint_of(self.expression)
        return value

    def same(self, other: "Size") -> bool:
        """Return True if both are provably equal; never raise, and record nothing.

        What a trace assumes of unbacked symbols proves nothing: a graph must be well
        typed also for a reader who does not know the assumption.
        """
        if isinstance(other, SymInt) and self.expression == other.expression:
            return True
        equal = self._equals(other)
        if isinstance(equal, SymBool) and any(s.hint is None for s in equal.symbols):
            return NOTHING.decide(equal) is True
        return implied_truth(equal) is True

    def _equals(self, other: "Size") -> bool | SymBool:
        """Return the condition `self == other`."""
        if other.__class__ is not int or other != 1:
            return relation("==", terms.subtract(self.expression, terms_of(other)))
        try:  # broadcasting asks at each operation
            return self._is_one
        except AttributeError:
            minus_one = terms.plus_constant(self.expression, -1)
            self._is_one: bool | SymBool = relation("==", minus_one)
            return self._is_one

    def _compare(self, op: str, other: Any) -> Any:
        if isinstance(other, int | SymInt):
            condition = relation(op, terms.subtract(self.expression, terms_of(other)))
        elif isinstance(other, float):
            condition = compare_constant(op, self.expression, other)
        else:
            return NotImplemented
        return bool_if_implied(condition, self, op, other)

    def __eq__(self, other: object) -> bool:
        """Return whether both are equal: a SymBool if that is undecided.

        Raises:
            DataDependentError: it is undecided, and there is no environment.
        """
        if isinstance(other, SymInt) and self.expression == other.expression:
            return True
        result: bool = self._compare("==", other)
        return result

    def __ne__(self, other: object) -> bool:
        if isinstance(other, SymInt) and self.expression == other.expression:
            return False
        result: bool = self._compare("!=", other)
        return result

    # --- arithmetic ---

    # `n + 1.5` is a SymFloat, but operands are nearly always sizes, so types say Size.
    def _apply(self, f: Callable[[Terms, Terms], Terms], op: str, other: Any) -> Any:
        if isinstance(other, int | SymInt):
            return as_size(f(self.expression, terms_of(other)))
        return _float(op, self, other)

    def _applied_to(self, f: Callable[[Terms, Terms], Terms], op: str, x: Any) -> Any:
        if isinstance(x, int):
            return as_size(f(terms.constant(x), self.expression))
        return _float(op, x, self)

    def __add__(self, other: "Size") -> "Size":
        result: Size = self._apply(terms.add, "+.", other)
        return result

    def __mul__(self, other: "Size") -> "Size":
        result: Size = self._apply(terms.multiply, "*.", other)
        return result

    __radd__ = __add__  # float operations commute too
    __rmul__ = __mul__

    def __sub__(self, other: "Size") -> "Size":
        result: Size = self._apply(terms.subtract, "-.", other)
        return result

    def __rsub__(self, other: int) -> "Size":
        result: Size = self._applied_to(terms.subtract, "-.", other)
        return result

    def __floordiv__(self, other: "Size") -> "Size":
        result: Size = self._apply(floor_divide, "//.", other)
        return result

    def __rfloordiv__(self, other: int) -> "Size":
        result: Size = self._applied_to(floor_divide, "//.", other)
        return result

    def __mod__(self, other: "Size") -> "Size":
        result: Size = self._apply(modulo, "%.", other)
        return result

    def __rmod__(self, other: int) -> "Size":
        result: Size = self._applied_to(modulo, "%.", other)
        return result

    def __divmod__(self, other: "Size") -> "tuple[Size, Size]":
        return self // other, self % other

    def __rdivmod__(self, other: int) -> "tuple[Size, Size]":
        return other // self, other % self

    def __truediv__(self, other: "Number") -> "SymFloat":
        if isinstance(other, int | SymInt):
            return _quotient(self.expression, terms_of(other))
        return _float("/.", self, other)

    def __rtruediv__(self, other: float) -> "SymFloat":
        if isinstance(other, int):
            return _quotient(terms_of(other), self.expression)
        return _float("/.", other, self)

    def __pow__(self, exponent: "Size", modulus: "Size | None" = None) -> "Size":
        if modulus is not None:
            return pow(int(self), index(exponent), index(modulus))
        if isinstance(exponent, SymInt):
            exponent = int(exponent)  # Python's result is an int or a float by its sign
        if isinstance(exponent, int) and 0 <= exponent <= MAX_POWER:
            return as_size(atoms.power(self.expression, exponent))
        if isinstance(exponent, int) and exponent > 0:
            return int(int(self) ** exponent)
        return cast("Size", _float("**.", self, exponent))

    @blames_user
    def __rpow__(self, base: float) -> "Number":
        is_float = isinstance(base, float)
        # NumPy's floats only warn where Python's raise.
        base = float(base) if is_float else base
        if self.hint is None or env_of(self.expression) is None:  # no guard is possible
            return _power(base, self) if is_float else base ** int(self)
        if not is_float and abs(base) > EXACT_POWER:
            return base ** int(self)
        power = _power(float(base), self)
        # Where Python raises (0 to a negative power, an overflow), this raises too.
        if power.hint is None or not abs(power) < inf:
            return base ** int(self)
        if is_float or self < 0:
            return power
        # Floats up to EXACT_POWER round to the exact integer.
        if not abs(power) <= EXACT_POWER:
            return base ** int(self)
        return rounded("round", power)

    def __lshift__(self, bits: "Size") -> "Size":
        return self * (1 << _bits(bits))

    @blames_user
    def __rlshift__(self, number: int) -> int:
        return number << int(self)

    def __rshift__(self, bits: "Size") -> "Size":
        return self // (1 << _bits(bits))

    @blames_user
    def __rrshift__(self, number: int) -> int:
        return number >> int(self)

    def __invert__(self) -> "Size":
        return -self - 1

    # Bitwise operations need the value.
    def __and__(self, other: "Size") -> int:
        return int(self) & index(other)

    def __or__(self, other: "Size") -> int:
        return int(self) | index(other)

    def __xor__(self, other: "Size") -> int:
        return int(self) ^ index(other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __neg__(self) -> "Size":
        return as_size(terms.negate(self.expression))

    def __pos__(self) -> "SymInt":
        return self

    def __abs__(self) -> "Size":
        return as_size(atoms.largest([self.expression, terms.negate(self.expression)]))

    def bit_length(self) -> int:
        return int(self).bit_length()

    def bit_count(self) -> int:
        return int(self).bit_count()

    def __floor__(self) -> "SymInt":
        return self

    __ceil__ = __trunc__ = __round__ = __floor__

    def __index__(self) -> int:
        """Return the value in this call, which becomes a guard.

        Raises:
            DataDependentError: there is no value, or no environment to guard it.
        """
        if (env := env_of(self.expression)) is None:
            raise DataDependentError(str(self), is_number=True)
        return int(env.concrete(self.expression))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __format__(self, spec: str) -> str:
        """Format the expression; with a format spec, the value in this call."""
        return format(int(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return format_operand(self.expression)


@final
class SymFloat(_Ordered):
    """A float that depends on symbols: a tree of operations as they were written."""

    __slots__ = ("_value_hash", "node")

    node: Symbol | Atom

    def __init__(self, node: Symbol | Atom) -> None:
        self.node = node

    def __hash__(self) -> int:
        """Return the hash as `SymInt.__hash__` does."""
        try:
            return self._value_hash
        except AttributeError:
            pass
        if not OWN_FILES[sys._getframe(1).f_code.co_filename] and is_asked_by_user(
            env_of(self.node)
        ):
            self._value_hash: int = hash(float(self))
            return self._value_hash
        return hash(self.node)

    @property
    def hint(self) -> float | None:
        """The value in the call that is traced; None if a symbol has none."""
        value: float | None = hint_of(self.node)
        return value

    def same(self, other: object) -> bool:
        """Return True if both are the same expression, so the same value (or NaN)."""
        return isinstance(other, SymFloat) and self.node == other.node

    def _compare(self, op: str, other: Any) -> Any:
        if not isinstance(other, int | float | SymInt | SymFloat):
            return NotImplemented
        condition = compare_floats(op, self.node, operand_of(other))
        return bool_if_implied(condition, self, op, other)

    def __eq__(self, other: object) -> bool:
        result: bool = self._compare("==", other)
        return result

    def __ne__(self, other: object) -> bool:
        result: bool = self._compare("!=", other)
        return result

    def __add__(self, other: "Number") -> "SymFloat":
        return _float("+.", self, other)

    def __radd__(self, other: "Number") -> "SymFloat":
        return _float("+.", other, self)

    def __sub__(self, other: "Number") -> "SymFloat":
        return _float("-.", self, other)

    def __rsub__(self, other: "Number") -> "SymFloat":
        return _float("-.", other, self)

    def __mul__(self, other: "Number") -> "SymFloat":
        return _float("*.", self, other)

    def __rmul__(self, other: "Number") -> "SymFloat":
        return _float("*.", other, self)

    def __truediv__(self, other: "Number") -> "SymFloat":
        return _float("/.", self, other)

    def __rtruediv__(self, other: "Number") -> "SymFloat":
        return _float("/.", other, self)

    def __floordiv__(self, other: "Number") -> "SymFloat":
        return _float("//.", self, other)

    def __rfloordiv__(self, other: "Number") -> "SymFloat":
        return _float("//.", other, self)

    def __mod__(self, other: "Number") -> "SymFloat":
        return _float("%.", self, other)

    def __rmod__(self, other: "Number") -> "SymFloat":
        return _float("%.", other, self)

    def __pow__(self, other: "Number") -> "SymFloat":
        return _float("**.", self, other)

    def __rpow__(self, other: "Number") -> "SymFloat":
        return _float("**.", other, self)

    def __divmod__(self, other: "Number") -> "tuple[SymFloat, SymFloat]":
        return self // other, self % other

    def __rdivmod__(self, other: "Number") -> "tuple[SymFloat, SymFloat]":
        return other // self, other % self

    def __neg__(self) -> "SymFloat":
        return SymFloat(Atom("neg.", (self.node,)))

    def __pos__(self) -> "SymFloat":
        return self

    def __abs__(self) -> "SymFloat":
        return SymFloat(Atom("abs.", (self.node,)))

    def __floor__(self) -> "Size":
        return rounded("floor", self)

    def __ceil__(self) -> "Size":
        return rounded("ceil", self)

    def __trunc__(self) -> "Size":
        return rounded("trunc", self)

    def __round__(self, digits: int | None = None) -> "Size | float":
        if digits is None:
            return rounded("round", self)
        return round(float(self), digits)

    def __int__(self) -> int:
        return int(rounded("trunc", self))

    def __float__(self) -> float:
        """Return the value in this call, which becomes a guard.

        Raises:
            DataDependentError: there is no value, or no environment to guard it.
        """
        if (env := env_of(self.node)) is None:
            raise DataDependentError(str(self), is_number=True)
        return float(env.concrete(self.node))

    def __format__(self, spec: str) -> str:
        """Format the expression; with a format spec, the value in this call."""
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return format_operand(self.node)


Size: TypeAlias = int | SymInt
Number: TypeAlias = int | float | SymInt | SymFloat


# --- from and to normal forms ---------------------------------------------------------


def as_size(expression: Terms) -> Size:
    """Return an expression as a size; a plain int if it is constant."""
    if terms.is_constant(expression):
        return expression[0][1] if expression else 0
    return SymInt(expression)


def terms_of(size: Size) -> Terms:
    return size.expression if isinstance(size, SymInt) else terms.constant(size)


def operand_of(number: Number) -> Operand:
    if isinstance(number, SymFloat):
        return number.node
    return number.hex() if isinstance(number, float) else terms_of(number)


@blames_user
def _float(op: str, x: Any, y: Any) -> SymFloat:
    """Apply a float operation of Python to two numbers, one of which is symbolic."""
    for number in (x, y):
        if not isinstance(number, int | float | SymInt | SymFloat):
            return cast("SymFloat", NotImplemented)
    if op in ("/.", "//.", "%."):
        not_zero(operand_of(y))
    if op == "**." and not _is_real_power(x, y):
        return cast("SymFloat", _in_this_call(x) ** _in_this_call(y))
    return SymFloat(Atom(op, (operand_of(x), operand_of(y))))


def _power(base: Number, exponent: Number) -> SymFloat:
    return SymFloat(Atom("**.", (operand_of(base), operand_of(exponent))))


def _is_real_power(base: Number, exponent: Number) -> bool:
    """Return False if a power is known not to be a float in the call that is traced: it
    may be complex for a negative base, and an error for 0."""
    is_number = isinstance(exponent, int | float)
    is_whole = isinstance(exponent, int | SymInt) or (
        is_number and float(exponent).is_integer()
    )
    if is_number and exponent >= 0:
        return (
            is_whole
            or guarded_truth(compare_floats(">=", operand_of(base), _ZERO)) is not False
        )
    op = "!=" if is_whole else ">"
    return guarded_truth(compare_floats(op, operand_of(base), _ZERO)) is not False


_ZERO: Final = (0.0).hex()


def _in_this_call(number: Number) -> float:
    if isinstance(number, SymInt):
        return int(number)
    return float(number) if isinstance(number, SymFloat) else number


def _quotient(a: Terms, b: Terms) -> SymFloat:
    """Return the quotient of two integers. Python rounds it once, whereas compiled code
    converts the integers first. Where floats do not hold the integers, the quotient is
    the constant of the traced call."""
    not_zero(b)
    if not (_is_exact(a) and _is_exact(b)):
        return cast("SymFloat", int(as_size(a)) / int(as_size(b)))
    return SymFloat(Atom("/", (a, b)))


def _is_exact(terms: Terms) -> bool:
    """Return False if floats are known not to hold an integer exactly. Expressions of
    non-negative symbols (sizes) are assumed to be small enough; only others, which may
    be arguments, are asked for."""
    symbols = symbols_of(terms, {})
    if symbols and all(symbol.range.low >= 0 for symbol in symbols):
        return True
    low = relation(">=", plus_constant(terms, EXACT_INTEGER))
    high = relation("<=", plus_constant(terms, -EXACT_INTEGER))
    return guarded_truth(low) is not False and guarded_truth(high) is not False


@blames_user
def rounded(op: str, number: SymFloat) -> Size:
    """Return the integer that a float is rounded to.

    Raises:
        ValueError, OverflowError: it is NaN or infinite in the call that is traced.
    """
    if number.hint is not None and not abs(number) < inf:
        return int(float(number))
    return as_size(atoms.apply(op, (number.node,)))


def _bits(count: Size) -> int:
    """Return a shift count as an int.

    Raises:
        ArgumentValueError: it is negative.
    """
    bits = index(count)
    if bits < 0:
        raise ArgumentValueError("negative shift count")
    return bits
