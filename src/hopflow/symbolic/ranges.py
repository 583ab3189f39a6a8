"""Value ranges: intervals of integers or floats, which may be unbounded.

Integer arithmetic is exact, and an infinite end means "no bound": no integer is
infinite. Floats include the infinities, and NaN if `nan` is set. The ends of a float
result are Python's operation on ends, which is sound because rounding is monotone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isinf, isnan
from typing import Final, TypeAlias

Bound: TypeAlias = float  # an int or infinity; for floats, anything but NaN


def _add(x: Bound, y: Bound) -> Bound:
    # Python cannot add an infinity and an int that is too large for a float.
    if isinstance(x, float) and isinf(x):
        return x
    return y if isinstance(y, float) and isinf(y) else x + y


def _multiply(x: Bound, y: Bound) -> Bound:
    if x == 0 or y == 0:
        return 0  # also if the other is infinite: it stands for unbounded integers
    if (isinstance(x, float) and isinf(x)) or (isinstance(y, float) and isinf(y)):
        return inf if (x > 0) == (y > 0) else -inf
    return x * y


def _floor_divide(x: Bound, y: Bound) -> Bound:
    """Return the limit of `x // y`; not both are infinite."""
    if y in (inf, -inf):
        return 0 if x == 0 or (x > 0) == (y > 0) else -1
    if x in (inf, -inf):
        return x if y > 0 else -x
    return x // y


def _true_divide(x: Bound, y: Bound) -> Bound:
    if y in (inf, -inf):
        return 0.0
    try:
        return x / y
    except OverflowError:  # larger quotients raise, and are no values
        return LARGEST if (x > 0) == (y > 0) else -LARGEST


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The numbers from `low` to `high`, both included; empty if `low > high`."""

    low: Bound
    high: Bound
    nan: bool = False

    @classmethod
    def point(cls, value: Bound) -> "ValueRange":
        return cls(value, value)

    @property
    def is_point(self) -> bool:
        return self.low == self.high and not self.nan

    @property
    def is_empty(self) -> bool:
        return self.low > self.high and not self.nan

    def __contains__(self, value: Bound) -> bool:
        return self.low <= value <= self.high or (self.nan and value != value)

    def __and__(self, other: "ValueRange") -> "ValueRange":
        return ValueRange(
            max(self.low, other.low), min(self.high, other.high), self.nan and other.nan
        )

    def __or__(self, other: "ValueRange") -> "ValueRange":
        return ValueRange(
            min(self.low, other.low), max(self.high, other.high), self.nan or other.nan
        )

    # --- integers ---

    def __add__(self, other: "ValueRange") -> "ValueRange":
        return ValueRange(_add(self.low, other.low), _add(self.high, other.high))

    def __neg__(self) -> "ValueRange":
        return ValueRange(-self.high, -self.low, self.nan)

    def __sub__(self, other: "ValueRange") -> "ValueRange":
        return self + -other

    def scaled(self, factor: int) -> "ValueRange":
        ends = _multiply(self.low, factor), _multiply(self.high, factor)
        return ValueRange(*(ends if factor >= 0 else ends[::-1]))

    def __mul__(self, other: "ValueRange") -> "ValueRange":
        return self._corners(other, _multiply)

    def power(self, exponent: int) -> "ValueRange":
        """Return the range of `x ** exponent`, tighter than that of a product."""
        product = self
        for _ in range(exponent - 1):
            product = product * self
        if exponent % 2 == 0 and product.low < 0:
            return ValueRange(0, product.high)
        return product

    def __floordiv__(self, other: "ValueRange") -> "ValueRange":
        """Return the range of `x // y` for y != 0."""
        parts = [
            self._corners(part, _floor_divide)
            for part in other._signed()
            if not part.is_empty
        ]
        return _union(parts)

    def true_divide(self, other: "ValueRange") -> "ValueRange":
        """Return the range of `x / y` of integers, rounded once, for y != 0."""
        parts = other._signed()
        return _union([self._corners(p, _true_divide) for p in parts if not p.is_empty])

    def __mod__(self, other: "ValueRange") -> "ValueRange":
        """Return the range of `x % y` for y != 0."""
        negative, positive = other._signed()
        parts = []
        if not positive.is_empty:
            parts.append(self._remainders(positive))
        if not negative.is_empty:  # x % -y == -(-x % y)
            parts.append(-(-self)._remainders(-negative))
        return _union(parts)

    def _remainders(self, by: "ValueRange") -> "ValueRange":
        if self.low >= 0 and self.high < by.low:
            return self
        if by.is_point and not (isinf(self.low) or isinf(self.high)):
            below = self.low // by.low * by.low
            if self.high < below + by.low:  # no multiple of the divisor between them
                return ValueRange(self.low - below, self.high - below)
        highest = _add(by.high, -1)
        return ValueRange(0, min(self.high, highest) if self.low >= 0 else highest)

    def _signed(self) -> tuple["ValueRange", "ValueRange"]:
        return (self & ValueRange(-inf, -1), self & ValueRange(1, inf))

    def _corners(
        self, other: "ValueRange", f: Callable[[Bound, Bound], Bound]
    ) -> "ValueRange":
        # A corner of two infinities lies between two others, since the end of a divisor
        # of one sign that is nearer to 0 is finite.
        ends = [
            f(x, y)
            for x in (self.low, self.high)
            for y in (other.low, other.high)
            if f is _multiply or not (x in (inf, -inf) and y in (inf, -inf))
        ]
        return ValueRange(min(ends), max(ends))

    def minimum(self, other: "ValueRange") -> "ValueRange":
        return ValueRange(min(self.low, other.low), min(self.high, other.high))

    def maximum(self, other: "ValueRange") -> "ValueRange":
        return ValueRange(max(self.low, other.low), max(self.high, other.high))

    # --- floats ---

    def as_float(self) -> "ValueRange":
        """Return the range of `float(x)` of integers; too large ones raise."""
        return ValueRange(_to_float(self.low), _to_float(self.high))

    def float_add(self, other: "ValueRange") -> "ValueRange":
        opposite = (self.high == inf and other.low == -inf) or (
            self.low == -inf and other.high == inf
        )
        low, high = self.low + other.low, self.high + other.high
        return ValueRange(
            -inf if isnan(low) else low,
            inf if isnan(high) else high,
            self.nan or other.nan or opposite,
        )

    def float_multiply(self, other: "ValueRange") -> "ValueRange":
        ends = [x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        pairs = (self, other), (other, self)
        nan = any(0 in a and inf in (-b.low, b.high) for a, b in pairs)
        return _of_ends(ends, self.nan or other.nan or nan)

    def float_divide(self, other: "ValueRange") -> "ValueRange":
        """Return the range of `x / y`, where y = 0 raises."""
        if 0 in other:
            return ANY_FLOAT
        ends = [x / y for x in (self.low, self.high) for y in (other.low, other.high)]
        infinite = {abs(end) for end in (self.low, self.high)} & {inf}
        nan = bool(infinite) and inf in (-other.low, other.high)
        return _of_ends(ends, self.nan or other.nan or nan)


def _of_ends(ends: Iterable[Bound], nan: bool) -> ValueRange:
    numbers = [end for end in ends if not isnan(end)]
    # A NaN stands for a limit that the other corners may not enclose.
    if len(numbers) < 4:
        return ANY_FLOAT
    return ValueRange(min(numbers), max(numbers), nan)


def _union(parts: list[ValueRange]) -> ValueRange:
    if not parts:
        return EVERY  # every division raises
    total = parts[0]
    for part in parts[1:]:
        total = total | part
    return total


def _to_float(bound: Bound) -> float:
    if isinstance(bound, float) and isinf(bound):
        return LARGEST if bound > 0 else -LARGEST
    try:
        return float(bound)
    except OverflowError:
        return LARGEST if bound > 0 else -LARGEST


LARGEST: Final = float.fromhex("0x1.fffffffffffffp+1023")
EVERY: Final = ValueRange(-inf, inf)
INT64: Final = ValueRange(-(2**63), 2**63 - 1)
NON_NEGATIVE: Final = ValueRange(0, inf)
ANY_FLOAT: Final = ValueRange(-inf, inf, True)
