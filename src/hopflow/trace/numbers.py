"""Numbers over symbols in a trace: as values of its graph, and from values of it."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from hopflow.bind import Interpreter, Value, has_process
from hopflow.dtypes import iinfo, int64, uint64
from hopflow.errors import CheckError
from hopflow.graph.core import Graph, Var
from hopflow.graph.hashing import equal_values
from hopflow.graph.rewriting import reader
from hopflow.graph.types import FLOAT_TYPE, SYMBOL_TYPE
from hopflow.ops.check import check_op
from hopflow.ops.convert import convert
from hopflow.ops.deferred import condition_operands
from hopflow.ops.item import item, range_params
from hopflow.ops.symbolic_int import beyond_int64
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import EVERY, INT64, ValueRange
from hopflow.symbolic.size import (
    Number,
    Size,
    Symbol,
    SymFloat,
    SymInt,
    evaluate,
    free_symbols,
)
from hopflow.symbolic.terms import Terms, format_operand
from hopflow.trace import expressions
from hopflow.trace.functional import Functional, TracedTensor, escaped_number


class Numbers(Functional):
    """The part of a tracer that knows numbers over symbols; see `Tracer` for fields."""

    __slots__ = ()

    graph: Graph
    env: ShapeEnv | None
    symbols: dict[Symbol, Var]
    hints: dict[Var, tuple[bool | int | float, str]]
    floats: dict[Symbol, TracedTensor]
    computed: dict[Terms, SymInt]
    asked: dict[Symbol, Var]
    ranges: dict[Var, ValueRange]
    changes: list[Callable[[], None]]
    _sizes: dict[Var, Size]
    _expressions: dict[Any, tuple[Var, int]]

    def symbol(self, symbol: Symbol) -> Var:
        """The input for a shape symbol, lifted from the parent first."""
        raise NotImplementedError

    def known_size(self, var: Var) -> Size | None:
        """The size that a var is the value of, here or where it was lifted from."""
        raise NotImplementedError

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        """A number over symbols as a tensor, weak as a Python number is."""
        if isinstance(number, SymInt):
            number = self.whole(number)
        var = self._expression(number)
        if isinstance(number, SymInt):
            var.type = SYMBOL_TYPE
            self._sizes[var] = number
        elif isinstance(number, SymFloat):
            var.type = FLOAT_TYPE
        return TracedTensor(self, var)

    def whole(self, size: SymInt) -> SymInt:
        """An integer that floats of the arguments decide, as a symbol that each call
        computes; any other as it is.

        Raises:
            ArgumentRangeError: an int64 cannot hold that of this call.
        """
        symbols = free_symbols(size)
        if not any(s.real for s in symbols):
            return size
        env, outermost = self.env, self.outermost
        if env is None or any(s.hint is None for s in symbols):
            return size
        known = outermost.computed.get(size.expression)
        if known is None:
            text = format_operand(
                size.expression, lambda s: env.symbols.get(s) or s.name
            )
            hint = int(evaluate(size, lambda s: s.hint, int))
            if hint not in INT64:
                raise beyond_int64(text, hint)
            known = env.backed(None, hint, INT64.low, INT64.high, text)
            outermost.computed[size.expression] = known
        [symbol] = free_symbols(known)
        if symbol not in outermost.symbols:  # or no more: it was taken back
            outermost.define(symbol)
        return known

    @property
    def outermost(self) -> "Numbers":
        """The tracer of the whole function."""
        tracer: Numbers = self
        while isinstance(tracer.parent, Numbers):
            tracer = tracer.parent
        return tracer

    def define(self, symbol: Symbol) -> Var:
        """A new input for a symbol."""
        raise NotImplementedError

    def _expression(self, expression: Any) -> Var:
        """The var that holds an expression: nodes of arithmetic on symbols, once."""
        key = expression  # equal where it is written the same, which asks nothing
        if type(expression) is SymInt:
            key = expression.expression
        elif type(expression) is SymFloat:
            key = expression.node
        known, position = self._expressions.get(key, (None, -1))
        nodes = self.graph.nodes
        # Nodes may have been taken back since.
        if (
            known is not None
            and position < len(nodes)
            and nodes[position] is known.node
        ):
            return known
        var: Var = expressions.value_of(expression, self._symbol_value).source
        if var.node.section is None and var.node.symbol is None:
            self._expressions[key] = var, len(nodes) - 1
        return var

    def _symbol_value(self, symbol: Symbol) -> TracedTensor:
        if symbol.real:
            return self.float_value(symbol)
        return TracedTensor(self, self.symbol(symbol))

    def size_of(self, tensor: TracedTensor) -> Size:
        known = self.known_size(self.read(tensor))
        if known is None:
            tensor._concrete("operator.index")
            raise AssertionError
        return known

    def number_held(self, value: Value) -> Size | None:
        return self.known_size(self.read(self.localize(value)))

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        """One symbol for each value that a tensor has held: a node of its own, unless
        it is the value of a size already, or made as one that is: `x[m] + y[m]` has
        one size.

        Raises:
            TraceError: this trace makes no symbols.
        """
        tensor = self.localize(value)
        var = self.read(tensor)
        known = self.known_size(var)
        if known is not None:
            return known
        for defined in self.symbols.values():
            if defined.node.op is item and equal_values(defined.node.args[0], var):
                return self.size_of(TracedTensor(self, defined))
        if self.env is None:
            tensor._concrete("item")
        assert self.env is not None
        bound = inf if isinstance(max, SymInt) else max
        allowed = ValueRange(min, bound) & self.ranges.get(var, EVERY)
        # The values of symbols are in i64: the program stops at one of u64 beyond it.
        fits = var.type.dtype is not uint64 or allowed.high <= INT64.high
        allowed = allowed if fits else allowed & ValueRange(0, INT64.high)
        if allowed.is_point:
            return int(allowed.low)
        params = range_params(allowed, known=fits)
        [result] = self.record(item, (TracedTensor(self, var),), params)
        size = self._sizes[var] = self.size_of(result)
        if isinstance(max, SymInt):
            self.env.assume(size <= max)
        return size

    def learn_ranges(
        self, values: Sequence[Value], ranges: Sequence[ValueRange]
    ) -> None:
        """Note where integers of no axes lie, for when one becomes a symbol."""
        for value, found in zip(values, ranges, strict=False):
            if found != EVERY and not (has_process(value) and self.asks(value)):
                self.ranges[self.read(self.localize(value))] = found

    def range_of(self, value: Value) -> ValueRange:
        """Where the integer that a tensor of no axes holds is known to lie."""
        var = self.read(self.localize(value))
        size = self.known_size(var)
        if size is not None and self.env is not None:
            return self.env.range_of(size)
        return self.ranges.get(var, EVERY)

    def number_of(self, tensor: TracedTensor) -> Number | SymBool:
        """What `item` of a tensor of no axes is: a number over symbols."""
        dtype = tensor.type.dtype
        if dtype.is_float:
            return self._float_of(tensor)
        if dtype is int64:
            return self.symbol_of(tensor)
        if dtype.is_integer:
            info = iinfo(dtype)
            return self.symbol_of(tensor, info.min, info.max)
        return self.symbol_of(tensor, 0, 1) == 1

    def _float_of(self, tensor: TracedTensor) -> SymFloat:
        var = self.read(tensor)
        for symbol, asked in self.asked.items():
            if asked is var:
                return SymFloat(symbol)
        if self.env is None:
            tensor._concrete("item")
        assert self.env is not None
        if var in self.hints:
            number, text = self.hints[var]
            found = self.env.backed_float(None, number, text)
        else:
            found = self.env.unbacked_float()
        made = found.node
        assert isinstance(made, Symbol)
        self.asked[made] = var
        params = {"dtype": FLOAT_TYPE.dtype, "weak": True}
        [self.floats[made]] = self.record(convert, (TracedTensor(self, var),), params)
        return found

    def expect(self, condition: SymBool, message: str) -> None:
        """Take a condition on symbols for true; a node checks it, as early as may be.

        Raises:
            CheckError: it is known not to hold.
        """
        if self.env is not None:
            try:
                if self.env.assume(condition):
                    return
            except CheckError:
                shown = self.env.describe(condition)
                raise CheckError(f"{message}: `{shown}` never holds.") from None
        self.insert_check(condition, message)

    def insert_check(self, condition: SymBool, message: str) -> None:
        """Have a node check a condition once its symbols, and what was checked before,
        are known: `s0 % s1 == 0` relies on `s1 != 0`."""
        nodes = self.graph.nodes
        start = len(nodes)
        self.record(check_op, *condition_operands(condition, message))
        made = nodes[start:]
        reads = reader(self.graph)
        before = {id(v.node) for node in made for v in reads(node)}
        before |= {id(node) for node in nodes[:start] if node.op is check_op}
        position = start
        while position and id(nodes[position - 1]) not in before:
            position -= 1
        nodes[position:] = [*made, *nodes[position:start]]

        def take_back() -> None:  # to the end, as all that was added
            del self.graph.nodes[position : position + len(made)]
            self.graph.nodes += made

        if position < start:
            self.changes.append(take_back)

    def float_value(self, symbol: Symbol) -> TracedTensor:
        """The tensor f64[] that holds a symbol of a float, lifted from where it is.

        Raises:
            EscapedValueError: it is known in no tracer around.
        """
        tracer: Interpreter | None = self
        while isinstance(tracer, Numbers):
            if symbol in tracer.floats:
                return self.localize(tracer.floats[symbol])
            tracer = tracer.parent
        raise escaped_number(symbol)
