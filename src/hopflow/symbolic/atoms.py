"""`//`, `%`, min and max, which no polynomial has: their normal form and ranges.

The normal form depends on declared ranges only, so it never changes: see
`docs/notes/symbols_and_owners.md`. A quotient raises where Python's does, so nothing is
cancelled that may be zero.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import ceil, floor, gcd, inf
from typing import TypeAlias

from hopflow.errors import DivisionError
from hopflow.symbolic.ranges import ANY_FLOAT, INT64, ValueRange
from hopflow.symbolic.terms import (
    ONE,
    Atom,
    Factor,
    Monomial,
    Operand,
    Symbol,
    Terms,
    add,
    compute,
    constant,
    content,
    divide,
    is_constant,
    multiply,
    negate,
    normal,
    of_factor,
    plus_constant,
    scale,
    split_constant,
    subtract,
    symbols_of,
    without,
)

RangeOf: TypeAlias = Callable[[Factor], ValueRange]

# --- ranges ---------------------------------------------------------------------------


def interval(terms: Terms, range_of: RangeOf) -> ValueRange:
    """Return the range of a polynomial by interval arithmetic on its factors."""
    total = ValueRange.point(0)
    for monomial, factor in terms:
        total = total + monomial_range(monomial, range_of).scaled(factor)
    return total


def monomial_range(monomial: Monomial, range_of: RangeOf) -> ValueRange:
    if len(monomial) == 1:
        return range_of(monomial[0])
    powers: dict[Factor, int] = {}
    for factor in monomial:
        powers[factor] = powers.get(factor, 0) + 1
    total = ValueRange.point(1)
    for factor, power in powers.items():
        total = total * range_of(factor).power(power)
    return total


def atom_range(atom: Atom, range_of: Callable[[Operand], ValueRange]) -> ValueRange:
    """Return the range of an atom, given those of its arguments."""
    args = [range_of(a) for a in atom.args]
    if atom.op.endswith("."):  # float operations convert integers
        ints = [isinstance(a, tuple) for a in atom.args]
        args = [a.as_float() if i else a for a, i in zip(args, ints, strict=True)]
    match atom.op, args:
        case "//", [x, y]:
            return x // y
        case "%", [x, y]:
            return x % y
        case "min", _:
            return reduce(ValueRange.minimum, args)
        case "max", _:
            return reduce(ValueRange.maximum, args)
        case "floor" | "ceil" | "trunc" | "round", [x]:
            return _rounded(atom.op, x)
    return _float_range(atom.op, args)


def _rounded(op: str, x: ValueRange) -> ValueRange:
    # Rounding infinities and NaN raises, so they give no values.
    def end(bound: float) -> float:
        return bound if bound in (inf, -inf) else ROUND[op](bound)

    return ValueRange(end(x.low), end(x.high))


ROUND: dict[str, Callable[[float], int]] = {
    "floor": floor,
    "ceil": ceil,
    "trunc": int,
    "round": round,
}


def _float_range(op: str, args: Sequence[ValueRange]) -> ValueRange:
    match op, args:
        case "float", [x]:
            return x.as_float()
        case "+.", [x, y]:
            return x.float_add(y)
        case "-.", [x, y]:
            return x.float_add(-y)
        case "*.", [x, y]:
            return x.float_multiply(y)
        case "/", [x, y]:
            return x.true_divide(y)
        case "/.", [x, y]:
            return x.float_divide(y)
        case "**.", [x, y] if x.is_point and 0 < x.low < inf and not y.nan:
            ends = [_power(x.low, end) for end in (y.low, y.high)]
            return ValueRange(min(ends), max(ends))
        case "neg.", [x]:
            return -x
        case "abs.", [x]:
            low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
            return ValueRange(low, max(abs(x.low), abs(x.high)), x.nan)
    return ANY_FLOAT


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return inf


def declared(operand: Operand) -> ValueRange:
    """Return the range of an expression by its symbols' declarations alone."""
    if isinstance(operand, Symbol):
        return operand.range
    if isinstance(operand, str):
        value = float.fromhex(operand)
        return ANY_FLOAT if value != value else ValueRange.point(value)
    if isinstance(operand, Atom):
        return atom_range(operand, declared)
    return interval(operand, declared)


def not_zero(terms: Terms) -> bool:
    return 0 not in declared(terms)


# --- floor division and remainder -----------------------------------------------------


def floor_divide(a: Terms, b: Terms, nonzero: bool = False) -> Terms:
    """Return `a // b`. Pass `nonzero` if facts imply that `b` is not 0.

    Raises:
        DivisionError: `b` is the constant 0.
    """
    if not b:
        raise DivisionError("integer division or modulo by zero")
    if b[0][1] < 0:
        a, b = negate(a), negate(b)
    if is_constant(b):
        return _floor_divide_by(a, b[0][1])
    nonzero = nonzero or not_zero(b)
    quotient, rest = divide(a, b) if nonzero else ((), a)
    if not rest and nonzero:
        return quotient
    rest, b, _ = _reduced(rest, b)
    if nonzero:
        whole = declared(rest) // declared(b)
        if whole.is_point:
            return plus_constant(quotient, int(whole.low))
    if is_constant(b):
        return add(quotient, _floor_divide_by(rest, b[0][1]))
    return add(quotient, of_factor(Atom("//", (rest, b))))


def _floor_divide_by(a: Terms, by: int) -> Terms:
    """Return `a // by` for a positive int, multiples of `by` divided exactly."""
    whole = normal({monomial: factor // by for monomial, factor in a})
    rest = normal({monomial: factor % by for monomial, factor in a})
    inner, k = split_constant(rest)
    # (g*x + k) // (g*y) == (x + k // g) // y
    common = gcd(content(inner), by)
    inner, k, by = _exactly(inner, common), k // common, by // common
    if by == 1 or not inner:
        return plus_constant(add(whole, inner), k // by)
    if common > 1:  # the rest may have another common divisor
        return add(whole, _floor_divide_by(plus_constant(inner, k), by))
    match inner:
        case (((Atom(op="//", args=(x, (((), y),))),), 1),):
            # (x // y + k) // z == (x + k*y) // (y*z)
            assert isinstance(x, tuple)
            return add(whole, _floor_divide_by(plus_constant(x, k * y), y * by))
    rest = plus_constant(inner, k)
    quotient = declared(rest) // ValueRange.point(by)
    if quotient.is_point:
        return plus_constant(whole, int(quotient.low))
    return add(whole, of_factor(Atom("//", (rest, constant(by)))))


def modulo(a: Terms, b: Terms, nonzero: bool = False) -> Terms:
    """Return `a % b`, which has the sign of `b`; `nonzero` as in `floor_divide`.

    Raises:
        DivisionError: `b` is the constant 0.
    """
    if not b:
        raise DivisionError("integer division or modulo by zero")
    if b[0][1] < 0:
        return negate(modulo(negate(a), negate(b), nonzero))
    if is_constant(b):
        return _modulo(a, b[0][1])
    nonzero = nonzero or not_zero(b)
    rest = divide(a, b)[1] if nonzero else a
    if not rest and nonzero:
        return ()
    rest, b, common = _reduced(rest, b)
    if is_constant(b):
        return multiply(common, _modulo(rest, b[0][1]))
    (x, y) = declared(rest), declared(b)
    if x.low >= 0 and x.high < y.low:
        return multiply(common, rest)
    return multiply(common, of_factor(Atom("%", (rest, b))))


def _modulo(a: Terms, by: int) -> Terms:
    """Return `a % by` for a positive int, without its multiples."""
    a = _without_inner_remainders(a, by)
    rest = normal({monomial: factor % by for monomial, factor in a})
    inner, k = split_constant(rest)
    # (g*x + k) % (g*y) == g * ((x + k // g) % y) + k % g
    common = gcd(content(inner), by)
    inner, remainder, by = _exactly(inner, common), k % common, by // common
    if by == 1 or not inner:
        return constant(k % (by * common))
    if common > 1:
        inner = _modulo(plus_constant(inner, k // common), by)
        return plus_constant(scale(inner, common), remainder)
    quotient = declared(rest) // ValueRange.point(by)
    if quotient.is_point:
        return plus_constant(rest, -int(quotient.low) * by)
    return of_factor(Atom("%", (rest, constant(by))))


def _without_inner_remainders(a: Terms, by: int) -> Terms:
    """Replace `x % (by * n)` by `x`, which has the same remainder by `by`."""
    total: Terms = ()
    for monomial, factor in a:
        match monomial:
            case (Atom(op="%", args=(x, (((), y),))),) if factor * y % by == 0:
                assert isinstance(x, tuple)
                total = add(total, scale(x, factor))
            case _:
                total = add(total, ((monomial, factor),))
    return total


def _exactly(a: Terms, by: int) -> Terms:
    return tuple([(monomial, factor // by) for monomial, factor in a])


def _reduced(a: Terms, b: Terms) -> tuple[Terms, Terms, Terms]:
    """Return (x, y, g) with `a == x*g`, `b == y*g` and g not zero."""
    common = gcd(content(a), content(b))
    shared: Monomial = ()
    for factor in b[0][0]:
        longer = (*shared, factor)
        if 0 not in declared(of_factor(factor)) and all(
            without(monomial, longer) is not None for monomial, _ in (*a, *b)
        ):
            shared = longer

    def divided(terms: Terms) -> Terms:
        return normal(
            {without(m, shared) or (): factor // common for m, factor in terms}
        )

    return divided(a), divided(b), ((shared, common),)


# --- min and max ----------------------------------------------------------------------


def smallest(args: Iterable[Terms]) -> Terms:
    return _extreme("min", args)


def largest(args: Iterable[Terms]) -> Terms:
    return _extreme("max", args)


def _extreme(op: str, args: Iterable[Terms]) -> Terms:
    """Return the minimum or maximum, without arguments that another always beats."""
    kept: list[Terms] = []
    for arg in _flat(op, args):
        if any(_beats(op, other, arg) for other in kept):
            continue
        kept = [other for other in kept if not _beats(op, arg, other)]
        kept.append(arg)
    if len(kept) == 1:
        return kept[0]
    kept.sort(key=lambda terms: Atom("min", (terms,)).order)
    return of_factor(Atom(op, tuple(kept)))


def _flat(op: str, args: Iterable[Terms]) -> Iterable[Terms]:
    for arg in args:
        match arg:
            case (((Atom(op=inner, args=parts),), 1),) if inner == op:
                yield from (part for part in parts if isinstance(part, tuple))
            case _:
                yield arg


def _beats(op: str, a: Terms, b: Terms) -> bool:
    """Return True if `b` is never the extreme of the two unless `a` is too."""
    difference = declared(subtract(a, b))
    return difference.high <= 0 if op == "min" else difference.low >= 0


def saturated(terms: Terms) -> Terms:
    """Return an integer clamped to int64; unchanged if its declared range fits."""
    range_ = interval(terms, lambda factor: declared(factor) & INT64)
    if INT64.low <= range_.low and range_.high <= INT64.high:
        return terms
    low, high = constant(int(INT64.low)), constant(int(INT64.high))
    return smallest([largest([terms, low]), high])


def power(a: Terms, exponent: int) -> Terms:
    total = ONE
    for _ in range(exponent):
        total = multiply(total, a)
    return total


def apply(op: str, args: Sequence[Operand]) -> Terms:
    """Apply an integer operation to arguments, in normal form."""
    whole = tuple([a for a in args if isinstance(a, tuple)])
    match op:
        case "//":
            return floor_divide(whole[0], whole[1])
        case "%":
            return modulo(whole[0], whole[1])
        case "min" | "max":
            return _extreme(op, whole)
    atom = Atom(op, tuple(args))
    if symbols_of(atom, {}):
        return of_factor(atom)
    return constant(compute(atom, lambda symbol: symbol.hint))


def replace(operand: Operand, value: Callable[[Symbol], Terms | None]) -> Operand:
    """Return an expression in normal form, with symbols replaced by `value`."""
    if isinstance(operand, Symbol | str):
        return operand
    if isinstance(operand, Atom):
        args = tuple([replace(a, value) for a in operand.args])
        return operand if args == operand.args else Atom(operand.op, args)
    return replace_terms(operand, value)


def replace_terms(terms: Terms, value: Callable[[Symbol], Terms | None]) -> Terms:
    total: Terms = ()
    for monomial, factor in terms:
        product = constant(factor)
        for f in monomial:
            new: Terms | None
            if isinstance(f, Symbol):
                new = value(f)
            else:
                args = tuple([replace(a, value) for a in f.args])
                new = None if args == f.args else apply(f.op, args)
            product = multiply(product, of_factor(f) if new is None else new)
        total = add(total, product)
    return total
