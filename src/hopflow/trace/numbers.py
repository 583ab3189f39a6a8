"""Conversion between numbers over symbols and values of a traced graph.

Numbers over symbols are `SymInt`, `SymFloat` and `SymBool`, which Python code computes
with; values are tensors, made by nodes. Conversion works in both directions, and
conditions on numbers become nodes that check them.
"""

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
    """The part of a tracer that converts numbers over symbols; see `Tracer` for the
    attributes."""

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
        """Return the var of a symbol, which is lifted from the parent if necessary."""
        raise NotImplementedError

    def known_size(self, var: Var) -> Size | None:
        """Return the size that a var holds, by this trace or one below, or None."""
        raise NotImplementedError

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        """Return a number over symbols as a weak tensor."""
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
        """Return an integer that depends on float arguments as one symbol, which each
        call computes; return any other integer unchanged.

        Raises:
            ArgumentRangeError: its value in this call is out of the range of int64.
        """
        symbols = free_symbols(size)
        if not any(s.real for s in symbols):
            return size
        env, outermost = self.env, self.outermost
        if env is None or any(s.hint is None for s in symbols):
            return size
        number = outermost.computed.get(size.expression)
        if number is None:
            text = format_operand(
                size.expression, lambda s: env.symbols.get(s) or s.name
            )
            hint = int(evaluate(size, lambda s: s.hint, int))
            if hint not in INT64:
                raise beyond_int64(text, hint)
            number = env.backed(None, hint, INT64.low, INT64.high, text)
            outermost.computed[size.expression] = number
        [symbol] = free_symbols(number)
        if symbol not in outermost.symbols:  # new, or removed by a rollback
            outermost.define(symbol)
        return number

    @property
    def outermost(self) -> "Numbers":
        """The tracer of the whole function."""
        tracer: Numbers = self
        while isinstance(tracer.parent, Numbers):
            tracer = tracer.parent
        return tracer

    def define(self, symbol: Symbol) -> Var:
        """Make a new input for a symbol."""
        raise NotImplementedError

    def _expression(self, expression: Any) -> Var:
        """Return the var of an expression: arithmetic nodes on symbols, shared by equal
        expressions."""
        key = expression  # compared by structure, which makes no guard
        if type(expression) is SymInt:
            key = expression.expression
        elif type(expression) is SymFloat:
            key = expression.node
        cached, position = self._expressions.get(key, (None, -1))
        nodes = self.graph.nodes
        # A rollback may have removed the node.
        if (
            cached is not None
            and position < len(nodes)
            and nodes[position] is cached.node
        ):
            return cached
        var: Var = expressions.value_of(expression, self._symbol_value).source
        if var.node.section is None and var.node.symbol is None:
            self._expressions[key] = var, len(nodes) - 1
        return var

    def _symbol_value(self, symbol: Symbol) -> TracedTensor:
        if symbol.real:
            return self.float_value(symbol)
        return TracedTensor(self, self.symbol(symbol))

    def size_of(self, tensor: TracedTensor) -> Size:
        size = self.known_size(self.read(tensor))
        if size is None:
            tensor._concrete("operator.index")  # raises: only `ValueTracer` has values
            raise AssertionError
        return size

    def number_held(self, value: Value) -> Size | None:
        return self.known_size(self.read(self.localize(value)))

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        """Return one symbol for each value of a tensor: that of a new `item` node,
        unless the value is that of a size, or equal to one by its nodes: `x[m] + y[m]`
        has one size.

        Raises:
            TraceError: this trace makes no symbols.
        """
        tensor = self.localize(value)
        var = self.read(tensor)
        existing = self.known_size(var)
        if existing is not None:
            return existing
        for defined in self.symbols.values():
            if defined.node.op is item and equal_values(defined.node.args[0], var):
                return self.size_of(TracedTensor(self, defined))
        if self.env is None:
            tensor._concrete("item")
        assert self.env is not None
        bound = inf if isinstance(max, SymInt) else max
        allowed = ValueRange(min, bound) & self.ranges.get(var, EVERY)
        # Symbols are i64: the program fails for a larger u64.
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
        """Note the ranges of integers of rank 0, for those that become symbols."""
        for value, range_ in zip(values, ranges, strict=False):
            if range_ != EVERY and not (has_process(value) and self.dispatches(value)):
                self.ranges[self.read(self.localize(value))] = range_

    def range_of(self, value: Value) -> ValueRange:
        """Return the range of the integer that a tensor of rank 0 holds."""
        var = self.read(self.localize(value))
        size = self.known_size(var)
        if size is not None and self.env is not None:
            return self.env.range_of(size)
        return self.ranges.get(var, EVERY)

    def number_of(self, tensor: TracedTensor) -> Number | SymBool:
        """Return `item` of a tensor of rank 0: a number over symbols."""
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
        for symbol, source in self.asked.items():
            if source is var:
                return SymFloat(symbol)
        if self.env is None:
            tensor._concrete("item")
        assert self.env is not None
        if var in self.hints:
            hint, text = self.hints[var]
            number = self.env.backed_float(None, hint, text)
        else:
            number = self.env.unbacked_float()
        node = number.node
        assert isinstance(node, Symbol)
        self.asked[node] = var
        params = {"dtype": FLOAT_TYPE.dtype, "weak": True}
        [self.floats[node]] = self.record(convert, (TracedTensor(self, var),), params)
        return number

    def expect(self, condition: SymBool, message: str) -> None:
        """Assume a condition on symbols, and add a node that checks it as early as
        possible.

        Raises:
            CheckError: the condition never holds.
        """
        if self.env is not None:
            try:
                if self.env.assume(condition):
                    return
            except CheckError:
                text = self.env.describe(condition)
                raise CheckError(f"{message}: `{text}` never holds.") from None
        self.insert_check(condition, message)

    def insert_check(self, condition: SymBool, message: str) -> None:
        """Add a node that checks a condition, after the definitions of its symbols and
        after earlier checks, on which it may rely: `s0 % s1 == 0` needs `s1 != 0`."""
        nodes = self.graph.nodes
        start = len(nodes)
        self.record(check_op, *condition_operands(condition, message))
        added = nodes[start:]
        reads = reader(self.graph)
        predecessors = {id(v.node) for node in added for v in reads(node)}
        predecessors |= {id(node) for node in nodes[:start] if node.op is check_op}
        position = start
        while position and id(nodes[position - 1]) not in predecessors:
            position -= 1
        nodes[position:] = [*added, *nodes[position:start]]

        def take_back() -> None:  # move the nodes to the end, for a rollback
            del self.graph.nodes[position : position + len(added)]
            self.graph.nodes += added

        if position < start:
            self.changes.append(take_back)

    def float_value(self, symbol: Symbol) -> TracedTensor:
        """Return the tensor f64[] that holds a float symbol, lifted if necessary.

        Raises:
            EscapedValueError: no tracer below has the symbol.
        """
        tracer: Interpreter | None = self
        while isinstance(tracer, Numbers):
            if symbol in tracer.floats:
                return self.localize(tracer.floats[symbol])
            tracer = tracer.parent
        raise escaped_number(symbol)
