"""`ShapeEnv`: the symbols of a trace, the facts about them, and the guards recorded."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import copysign, inf, isnan
from typing import Any, Final, TypeAlias

from hopflow.errors import ArgumentValueError, CheckError, DataDependentError
from hopflow.logs import log
from hopflow.symbolic.boolean import SymBool, all_of, compare_floats, relation
from hopflow.symbolic.declared import Declaration, narrowed
from hopflow.symbolic.facts import Facts
from hopflow.symbolic.guards import Guard, GuardSet, declared_guards
from hopflow.symbolic.ranges import ANY_FLOAT, INT64, ValueRange
from hopflow.symbolic.scalars import (
    Number,
    Size,
    SymFloat,
    SymInt,
    as_size,
    operand_of,
    terms_of,
)
from hopflow.symbolic.terms import (
    Atom,
    Operand,
    Symbol,
    compute,
    format_operand,
    of_factor,
    plus_constant,
    symbols_of,
)

Noted: TypeAlias = tuple[SymBool, bool] | None
"""A condition and its answer; None for a question about a range."""


class ShapeEnv:
    """Creates symbols, and answers questions about them.

    Declared ranges and facts decide a condition. Where they leave it open:

    - For *backed* symbols (inputs, whose hints are their values in this call) the
      hints answer. The answer is recorded as a guard, and is a fact from then on.
    - For *unbacked* symbols (values that only a run knows) a DataDependentError is
      raised.

    Args:
        line: Returns the line of the user's code that is now running, or None.
        on_guard: Called with each guard when it is recorded.
        expression: Returns the text of the user's expression that is being evaluated,
            or "".
    """

    def __init__(
        self,
        line: Callable[[], object] | None = None,
        on_guard: Callable[[Guard], None] | None = None,
        expression: Callable[[], str] | None = None,
    ) -> None:
        self.symbols: dict[Symbol, str] = {}  # to their sources, in order of creation
        self._origins: dict[Symbol, str] = {}  # of unbacked symbols: what defined them
        self._expressions: dict[
            Symbol, str
        ] = {}  # of unbacked symbols: the user's code
        self._declared: dict[Symbol, Declaration] = {}
        self._line = line
        self._expression = expression
        self._on_guard = on_guard
        self._counts = {"s": 0, "u": 0}
        self._names: set[str] = set()
        self._ages: dict[Symbol, int] = {}
        self._facts = Facts(self._seniority)
        self._learned: list[SymBool] = []
        self._guards: list[Guard] = []
        self._noted: list[Noted] | None = None
        # Condition -> (answer, version of the facts). Answers True and False never
        # change.
        self._answers: dict[SymBool, tuple[bool | None, int]] = {}

    # --- symbols ---

    def backed(
        self,
        name: str | None,
        hint: int,
        min: float = 0,
        max: float = inf,
        source: str = "",
        declared: Declaration | None = None,
    ) -> SymInt:
        """Return a new symbol for an integer input, named `s0`, `s1`, … by default.

        Args:
            declared: The user's declaration, which guards must not narrow, or None.

        Raises:
            ArgumentValueError: `hint` is not from `min` to `max`.
        """
        range_ = ValueRange(min, max)
        if hint not in range_:
            why = (
                f"{hint} is not from {min} to {max}, as was declared"
                if hint in INT64
                else f"int64, which numbers of a trace are held in, cannot hold {hint}"
            )
            raise ArgumentValueError(f"{source or name}: {why}.")
        symbol = self._new(name, "s", hint, range_, source)
        if declared is not None:
            self._declared[symbol] = declared
        return SymInt(of_factor(symbol))

    def unbacked(
        self,
        name: str | None = None,
        min: float = 0,
        max: float = inf,
        source: str = "",
    ) -> SymInt:
        """Return a new symbol for an integer of a run, named `u0`, … by default."""
        symbol = self._new(name, "u", None, ValueRange(min, max), source)
        self._note_origin(symbol, source)
        return SymInt(of_factor(symbol))

    def backed_float(self, name: str | None, hint: float, source: str = "") -> SymFloat:
        """Return a new symbol for a float input, which may be infinite or NaN."""
        return SymFloat(self._new(name, "s", float(hint), ANY_FLOAT, source, True))

    def unbacked_float(self, name: str | None = None, source: str = "") -> SymFloat:
        """Return a new symbol for a float of a run."""
        symbol = self._new(name, "u", None, ANY_FLOAT, source, True)
        self._note_origin(symbol, source)
        return SymFloat(symbol)

    def _note_origin(self, symbol: Symbol, source: str) -> None:
        text, at = self._present_text(), self._where(None)
        if source:
            self._origins[symbol] = f"`{source}`"
        elif text:
            self._origins[symbol] = f"made by `{text}`" + (f" ({at})" if at else "")
        elif at:
            self._origins[symbol] = f"made at {at}"
        if source or text.endswith(".item()"):
            self._expressions[symbol] = source or text

    def _new(
        self,
        name: str | None,
        letter: str,
        hint: float | None,
        range_: ValueRange,
        source: str,
        real: bool = False,
    ) -> Symbol:
        while name is None:
            number = self._counts[letter]
            self._counts[letter] += 1
            if f"{letter}{number}" not in self._names:
                name = f"{letter}{number}"
        self._names.add(name)
        symbol = Symbol(name, hint, range_, self, real)
        self._ages[symbol] = len(self._ages)
        self.symbols[symbol] = source
        low, high = symbol.range.low, symbol.range.high
        log("sizes", lambda: f"{symbol} = {source or 'of a run'}, {low} to {high}")
        return symbol

    def _seniority(self, symbol: Symbol) -> tuple[int, int]:
        # An equality replaces an unbacked symbol first, then the younger one.
        return int(symbol.hint is None), self._ages.get(symbol, -1)

    # --- recording the questions ---

    @contextmanager
    def noting(self) -> Iterator[list[Noted]]:
        """Yield a list to which every answer within the block is appended."""
        outer, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            if outer is not None:
                outer += self._noted
            self._noted = outer

    def _note(self, noted: Noted) -> None:
        if self._noted is not None:
            self._noted.append(noted)

    # --- questions that record nothing ---

    def decide(self, condition: bool | SymBool) -> bool | None:
        """Return the answer that ranges and facts imply; None if they leave it open."""
        if not isinstance(condition, SymBool):
            return condition
        answer, version = self._answers.get(condition, (None, -1))
        if answer is None and version != self._facts.version:
            answer = self._facts.decide(condition)
            self._answers[condition] = answer, self._facts.version
        if answer is not None:
            self._note((condition, answer))
        return answer

    def range_of(self, number: Number) -> ValueRange:
        """Return the range of a number."""
        return self.range(operand_of(number))

    def range(self, operand: Operand) -> ValueRange:
        """Return the range of an expression."""
        self._note(None)
        return self._facts.range(operand)

    def simplify(self, size: Size) -> Size:
        """Return the size with symbols replaced by what facts say they equal.

        The result is an int if backed symbols leave only one value.
        """
        self._note(None)
        terms = terms_of(size)
        range_ = self._facts.range(terms)
        if range_.is_point and all(s.hint is not None for s in symbols_of(terms, {})):
            return int(range_.low)
        return as_size(self._facts.canonical(terms))

    def describe(self, condition: bool | SymBool) -> str:
        """Return the condition as Python, with symbols named by their sources."""
        if not isinstance(condition, SymBool):
            return str(condition)
        return condition.format(self.name)

    def name(self, symbol: Symbol) -> str:
        """Return the source of a symbol as a user would write it, or its name."""
        return self.symbols.get(symbol) or symbol.name

    def origins(self, condition: SymBool) -> str:
        """Describe what defined the unbacked symbols that have no source."""
        return self._described(
            [s for s in condition.symbols if not self.symbols.get(s)]
        )

    def _described(self, symbols: Iterable[Symbol]) -> str:
        origins = [(s, self._origins.get(s)) for s in symbols]
        return ", ".join(f"`{s}` is {text}" for s, text in origins if text)

    def _present_text(self) -> str:
        return self._expression() if self._expression is not None else ""

    def legend(self, text: str) -> str:
        """Describe the symbols that a text names: "`s0` is `x.shape[0]`, here 3"."""
        symbols = [s for s in self.symbols if re.search(rf"\b{s.name}\b", text)]
        parts = []
        for symbol in symbols:
            source = self.symbols[symbol]
            if source and source != symbol.name:
                here = "" if symbol.hint is None else f", here {symbol.hint}"
                parts.append(f"`{symbol}` is `{source}`{here}")
            elif (origin := self._origins.get(symbol)) and origin not in text:
                parts.append(f"`{symbol}` is {origin}")
        return "; ".join(parts)

    @property
    def facts(self) -> tuple[SymBool, ...]:
        """What was learned beyond declared ranges, in order: guards and assumptions."""
        return tuple(self._learned)

    @property
    def asked(self) -> tuple[Guard, ...]:
        """The guards, in the order in which they were recorded."""
        return tuple(self._guards)

    @property
    def guards(self) -> GuardSet:
        """What a call must fulfil: declared ranges, then recorded guards in order."""
        inputs = [
            s for s, source in self.symbols.items() if source or s.hint is not None
        ]
        return GuardSet((*declared_guards(inputs), *self._guards))

    # --- questions that record ---

    def ask(self, condition: SymBool) -> bool:
        """Return `bool(condition)`: decided by facts, or a guard on the user's line.

        Raises:
            DataDependentError: only a run can tell.
        """
        return self.guard(condition)

    def guard(self, condition: bool | SymBool, line: object = None) -> bool:
        """Return the answer for the hints, recorded as a guard unless facts decide it.

        Raises:
            DataDependentError: a symbol has no hint, or is not of this environment.
            DimError: it would narrow what was declared.
        """
        answer = self.decide(condition)
        if answer is not None:
            return answer
        assert isinstance(condition, SymBool)
        if any(s.hint is None or s.env is not self for s in condition.symbols):
            raise self._undecided(condition, self._where(line))
        truth = condition.evaluate(lambda symbol: symbol.hint)
        guard = Guard(condition, truth, self._trail(line))
        if self._declared.keys() >= {*condition.symbols}:
            shown = self.describe(guard.holds)
            raise narrowed(guard.holds, self._declared, guard.line, shown)
        self._guards.append(guard)
        self._learn(guard.holds)
        self._note((condition, truth))
        log("guards", lambda: f"{self.describe(guard.holds)}  ({guard.line})")
        if self._on_guard is not None:
            self._on_guard(guard)
        return truth

    def _trail(self, line: object) -> str:
        """Return the line that asks, with its callers if they are known."""
        if line is None and self._line is not None:
            line = self._line()
        return str(getattr(line, "trail", line or ""))

    def _undecided(self, condition: SymBool, where: str) -> DataDependentError:
        """Return the error for a decision that only a run can make."""
        promises = _comparison(self._present_text())
        if promises is None and self._are_writable(condition.symbols):
            promises = _comparison(condition.format(self._written))
        return DataDependentError(
            str(condition),
            where,
            origins=self._described(condition.symbols),
            promises=[] if promises is None else promises,
        )

    def _where(self, line: object) -> str:
        if line is None and self._line is not None:
            line = self._line()
        return "" if line is None else str(line)

    def assume(self, condition: bool | SymBool) -> bool:
        """Take a condition that a run will check as a fact. Return True if facts imply
        it already, so that it needs no check.

        Raises:
            CheckError: facts imply that it does not hold.
        """
        answer = self.decide(condition)
        if answer is None:
            assert isinstance(condition, SymBool)
            self._learn(condition)
            return False
        if not answer:
            raise CheckError(f"`{self.describe(condition)}` never holds.")
        return True

    def _no_number(self, expression: Operand) -> DataDependentError:
        """Return the error for the Python value of a number that only a run knows."""
        shown = format_operand(expression, self._written)
        symbols = symbols_of(expression, {})
        return DataDependentError(
            format_operand(expression),
            self._where(None),
            origins=self._described(symbols),
            promises=[f"{shown} == 4"] if self._are_writable(symbols) else [],
            is_number=True,
        )

    def _written(self, symbol: Symbol) -> str:
        """Return the user's text for a symbol if there is one, else its name."""
        return self.symbols.get(symbol) or self._expressions.get(symbol) or symbol.name

    def _are_writable(self, symbols: Iterable[Symbol]) -> bool:
        return all(self.symbols.get(s) or s in self._expressions for s in symbols)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Forget the assumptions made within the block at its end; guards stay facts.

        See `docs/notes/symbols_and_owners.md`.
        """
        learned, guards = len(self._learned), len(self._guards)
        try:
            yield
        finally:
            kept = [guard.holds for guard in self._guards[guards:]]
            if len(self._learned) > learned + len(kept):
                kept = self._learned[:learned] + kept
                self._facts, self._learned = Facts(self._seniority), []
                self._answers.clear()
                for condition in kept:
                    self._learn(condition)

    def _learn(self, condition: SymBool) -> None:
        self._learned.append(condition)
        self._facts.learn(condition)

    def concrete(self, expression: Operand) -> Any:
        """Return the value of an expression in this call, which becomes a guard.

        Raises:
            DataDependentError: a symbol has no hint, and its range is not one number.
        """
        self._note(None)
        range_ = self._facts.range(expression)
        if isinstance(expression, tuple) and range_.is_point:
            return range_.low
        if any(s.hint is None or s.env is not self for s in symbols_of(expression, {})):
            raise self._no_number(expression)
        value = compute(expression, lambda symbol: symbol.hint)
        if isinstance(expression, tuple):
            self.guard(relation("==", plus_constant(expression, -value)))
            return value
        self.guard(_is_float(expression, value))
        return value


def _comparison(text: str) -> tuple[str, str] | None:
    """Return the comparison that a text is, and its opposite; None if it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(tree, ast.Compare) or type(tree.ops[0]) not in _OPPOSITES:
        return None
    if len(tree.ops) > 1:
        return None
    other = _OPPOSITES[type(tree.ops[0])]()
    opposite = ast.Compare(tree.left, [other], tree.comparators)
    return ast.unparse(tree), ast.unparse(opposite)


_OPPOSITES: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}


def _is_float(expression: Operand, value: float) -> bool | SymBool:
    """Return the condition that an expression is this float, NaN or -0.0."""
    if isnan(value):
        return compare_floats("!=", expression, expression)
    equal = compare_floats("==", expression, value.hex())
    if value != 0:
        return equal
    sign = compare_floats("==", Atom("sign.", (expression,)), copysign(1, value).hex())
    return all_of(equal, sign)
