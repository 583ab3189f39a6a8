"""Sizes, conditions on them, and their symbols as plain data, and back.

A size is a number, the name of a symbol, or `{"op": "//", "args": [...]}`; of a float
in it, `{"float": "0x1.8p+1"}`. It is read by doing the arithmetic again, so that what
is read is in normal form, whatever a file says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf
from typing import Any, Final

from hopflow.errors import HopflowError, ProgramFormatError
from hopflow.export.fields import Part
from hopflow.symbolic import atoms, terms
from hopflow.symbolic.boolean import (
    SymBool,
    all_of,
    any_of,
    compare_floats,
    difference_of,
    negation,
    relation,
)
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import ANY_FLOAT, INT64, ValueRange
from hopflow.symbolic.scalars import as_size
from hopflow.symbolic.size import Size, Symbol, SymFloat, SymInt, free_symbols
from hopflow.symbolic.terms import Atom, Operand, Terms

MAX_DEPTH: Final = 32  # of operations in each other
MAX_TERMS: Final = 64  # of a size, and args of an operation
MAX_TEXT: Final = 4096  # characters of a size as a text
MAX_BITS: Final = 256  # of a factor

# By the operation of an atom, what its arguments are: an integer or a float.
_WHOLE: Final = {"//": "ii", "%": "ii", "floor": "f", "ceil": "f", "trunc": "f"}
_WHOLE_OF: Final = {**_WHOLE, "round": "f"}
_REAL: Final = {"float": "i", "/": "ii"} | dict.fromkeys(
    ("+.", "-.", "*.", "/.", "//.", "%.", "**."), "ff"
)
_REAL_OF: Final = {**_REAL, "abs.": "f", "neg.": "f", "sign.": "f"}


# --- writing --------------------------------------------------------------------------


@dataclass(slots=True)
class SymbolWriter:
    """Gives each symbol a name of its own in the file.

    sources   of those that arguments of the program tell, how a user writes where
    """

    sources: Mapping[Symbol, str]
    names: dict[Symbol, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    _twins: dict[Symbol, Symbol] = field(default_factory=dict)

    def name(self, symbol: Symbol) -> str:
        known = self.names.get(symbol)
        if known is None:
            known, number = symbol.name, 1
            while known in self.taken:
                known, number = f"{symbol.name}_{number}", number + 1
            self.taken.add(known)
            self.names[symbol] = known
        return known

    def size(self, size: Size | SymFloat) -> Any:
        if isinstance(size, SymInt):
            return self._written(size.expression)
        return self._written(size.node) if isinstance(size, SymFloat) else int(size)

    def _written(self, operand: Operand) -> Any:
        """An expression in the normal form that it has under the names of the file."""
        found: dict[Symbol, None] = terms.symbols_of(operand, {})
        if any(self.name(symbol) != symbol.name for symbol in found):
            twins = {symbol: self._twin(symbol) for symbol in found}
            operand = _replaced(operand, twins)
        return _operand(operand)

    def _twin(self, symbol: Symbol) -> Symbol:
        """A symbol that has the name of another one in the file."""
        if symbol not in self._twins:
            self._twins[symbol] = replace(symbol, name=self.name(symbol), env=None)
        return self._twins[symbol]

    def condition(self, condition: SymBool) -> Any:
        """A condition, on integers as a comparison of their difference with 0."""
        if condition.op in ("and", "or", "not"):
            args = [self.condition(part) for part in condition.args]
        elif condition.is_integral:
            args = [self._written(difference_of(condition)), 0]
        else:
            args = [self._written(side) for side in condition.args]
        return {"op": condition.op, "args": args}

    def table(self) -> list[Any]:
        """All symbols that have been named."""
        return [self._row(symbol, name) for symbol, name in self.names.items()]

    def _row(self, symbol: Symbol, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name}
        if symbol.real:
            row["real"] = True
        else:
            row |= {
                key: int(end)
                for key, end in (("min", symbol.range.low), ("max", symbol.range.high))
                if end not in (inf, -inf)
            }
        if symbol in self.sources:
            row["source"] = self.sources[symbol]
            if symbol.hint is not None:
                real = {"float": float(symbol.hint).hex()}
                row["hint"] = real if symbol.real else int(symbol.hint)
        return row


def _replaced(operand: Operand, known: Mapping[Symbol, Symbol]) -> Operand:
    """An expression over other symbols, of floats too, as it is when it is read."""
    if isinstance(operand, str):
        return operand
    if isinstance(operand, Symbol):
        return known[operand]
    if isinstance(operand, Atom):
        return Atom(operand.op, tuple([_replaced(a, known) for a in operand.args]))
    total: Terms = ()
    for monomial, factor in operand:
        product = terms.constant(factor)
        for f in monomial:
            if isinstance(f, Symbol):
                new = terms.of_factor(known[f])
            else:
                new = atoms.apply(f.op, [_replaced(a, known) for a in f.args])
            product = terms.multiply(product, new)
        total = terms.add(total, product)
    return total


def _operand(operand: Operand) -> Any:
    """An expression over symbols whose names are those of the file."""
    if isinstance(operand, str):
        return {"float": operand}
    if isinstance(operand, Symbol):
        return operand.name
    if isinstance(operand, Atom):
        return _operation(operand.op, map(_operand, operand.args))
    return _operation("+", [_term(*term) for term in operand])


def _term(monomial: Sequence[Any], factor: int) -> Any:
    factors = [_operand(f) for f in monomial]
    return _operation("*", [factor] * (factor != 1 or not factors) + factors)


def _operation(op: str, args: Any) -> Any:
    args = list(args)
    if op in ("+", "*") and len(args) < 2:
        return args[0] if args else 0
    return {"op": op, "args": args}


# --- reading --------------------------------------------------------------------------


def read_float(part: Part) -> float:
    """A float that is written exactly, `{"float": "0x1.8p+1"}`."""
    text = part.members(["float"])["float"].text()
    try:
        return float.fromhex(text) if len(text) < 40 else part.fail("a float")
    except (ValueError, OverflowError):
        part.fail("a float in hexadecimal")


@dataclass(slots=True)
class SymbolReader:
    """The symbols of a file.

    env      answers for those that arguments tell, and for no others
    inputs   those symbols
    """

    env: ShapeEnv = field(default_factory=ShapeEnv)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    inputs: dict[Symbol, None] = field(default_factory=dict)

    def read_table(self, part: Part) -> None:
        for row in part.items():
            found = row.members(["name"], ["real", "min", "max", "source", "hint"])
            name = found["name"].text()
            if not name or name in self.symbols:
                found["name"].fail("a name of its own")
            self.symbols[name] = self._symbol(name, found)

    def _symbol(self, name: str, found: Mapping[str, Part]) -> Symbol:
        real = "real" in found and found["real"].flag()
        ends = self._ends(found)
        if "source" not in found:
            return Symbol(
                name, None, ANY_FLOAT if real else ValueRange(*ends), None, real
            )
        source = found["source"].text()
        size: SymInt | SymFloat
        if "hint" not in found:  # a size that the function treats as unknown
            size = self.env.unbacked(name, *ends, source)
        elif real:
            size = self.env.backed_float(name, read_float(found["hint"]), source)
        else:
            hint = found["hint"].integer(int(INT64.low), int(INT64.high))
            try:
                size = self.env.backed(name, hint, *ends, source)
            except HopflowError:
                found["hint"].fail("a number of the symbol's range")
        if isinstance(size, SymFloat):
            assert isinstance(size.node, Symbol)
            symbol = size.node
        else:
            [symbol] = free_symbols(size)
        self.inputs[symbol] = None
        return symbol

    def _ends(self, found: Mapping[str, Part]) -> tuple[float, float]:
        limits = int(INT64.low), int(INT64.high)
        low = found["min"].integer(*limits) if "min" in found else -inf
        high = found["max"].integer(*limits) if "max" in found else inf
        if low > high:
            found["max"].fail("an end that is no less than the other")
        return low, high

    def symbol(self, part: Part) -> Symbol:
        """The symbol of a name."""
        return part.known(self.symbols, "a symbol")

    def size(self, part: Part) -> Size:
        """An integer, over symbols or not."""
        if type(part.value) is int:
            return part.integer(int(INT64.low), int(INT64.high))
        size = as_size(_whole(self._operand(part, 0), part))
        if isinstance(size, int) and size not in INT64:
            part.fail("an integer that int64 holds")
        return size

    def number(self, part: Part) -> Size | SymFloat:
        """An integer or a float over symbols."""
        operand = self._operand(part, 0)
        if isinstance(operand, tuple):
            return as_size(operand)
        if isinstance(operand, str):
            part.fail("an expression over symbols")
        return SymFloat(operand)

    def _operand(self, part: Part, depth: int) -> Operand:
        value = part.value
        if type(value) is int:
            return terms.constant(value)
        if type(value) is str:
            symbol = self.symbol(part)
            return symbol if symbol.real else terms.of_factor(symbol)
        if depth > MAX_DEPTH:
            part.fail("an expression that is less deep")
        if "float" in part.named():
            return read_float(part).hex()
        found = part.members(["op", "args"])
        args = found["args"].items()
        if not 0 < len(args) <= MAX_TERMS:
            found["args"].fail(f"from 1 to {MAX_TERMS} arguments")
        operands = [self._operand(arg, depth + 1) for arg in args]
        try:
            result = _computed(found["op"], operands, args)
        except ProgramFormatError:
            raise
        except (HopflowError, ArithmeticError, TypeError, ValueError):
            part.fail("an expression that has a value")
        _check_small(result, part)
        return result

    def condition(self, part: Part, depth: int = 0) -> SymBool:
        """A condition that depends on symbols."""
        found = part.members(["op", "args"])
        op, args = found["op"].text(), found["args"].items()
        condition: bool | SymBool
        if depth > MAX_DEPTH or not 0 < len(args) <= MAX_TERMS:
            part.fail("a condition that is small")
        if op in ("and", "or", "not"):
            parts = [self.condition(arg, depth + 1) for arg in args]
            if op == "not" and len(parts) != 1:
                part.fail("one condition")
            condition = {"and": all_of, "or": any_of}.get(op, negation)(*parts)
        else:
            condition = self._comparison(op, found["args"], part)
        if not isinstance(condition, SymBool):
            part.fail("a condition that depends on symbols")
        return condition

    def _comparison(self, op: str, args: Part, part: Part) -> bool | SymBool:
        left, right = (self._operand(arg, 1) for arg in args.items(2))
        if op in ("<=", ">=", "==", "!="):
            difference = terms.subtract(_whole(left, args), _whole(right, args))
            return relation(op, difference)
        if op not in ("<.", "<=.", "==.", "!=."):
            part.fail("a comparison")
        if not any(isinstance(x, Symbol | Atom) for x in (left, right)):
            part.fail("a comparison of floats over symbols")
        return compare_floats(op[:-1], left, right)


def _whole(operand: Operand, part: Part) -> Terms:
    if not isinstance(operand, tuple):
        part.fail("an integer, and no float")
    return operand


def _computed(op: Part, operands: Sequence[Operand], parts: Sequence[Part]) -> Operand:
    """An operation on operands, in normal form."""
    name = op.text()
    pairs = list(zip(operands, parts, strict=True))
    if name in _JOINED:
        return _JOINED[name]([_whole(x, part) for x, part in pairs])
    kinds = _WHOLE_OF.get(name) or _REAL_OF.get(name) or op.fail("an operation")
    if len(kinds) != len(operands):
        op.fail(f"an operation of {len(operands)} arguments")
    for kind, (operand, part) in zip(kinds, pairs, strict=True):
        if kind == "i":
            _whole(operand, part)
        elif name in _WHOLE_OF and isinstance(operand, tuple):
            part.fail("a float, and no integer")
    if name in _WHOLE_OF:
        return atoms.apply(name, operands)
    return Atom(name, tuple(operands))


def _sum(args: Sequence[Terms]) -> Terms:
    return reduce(terms.add, args)


def _product(args: Sequence[Terms]) -> Terms:
    found = args[0]
    for other in args[1:]:
        if len(found) * len(other) > MAX_TERMS:
            raise ValueError("a product of too many terms")
        found = terms.multiply(found, other)
        if any(abs(factor) >> MAX_BITS for _, factor in found):
            raise ValueError("a factor of too many digits")
    return found


_JOINED: Final[dict[str, Callable[[Sequence[Terms]], Terms]]] = {
    "+": _sum,
    "*": _product,
    "min": atoms.smallest,
    "max": atoms.largest,
}


def _check_small(operand: Operand, part: Part) -> None:
    is_large = isinstance(operand, tuple) and len(operand) > MAX_TERMS
    if is_large or len(terms.format_operand(operand)) > MAX_TEXT:
        part.fail("an expression that is smaller")
