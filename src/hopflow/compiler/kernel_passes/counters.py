"""Loops that count become counted loops, and what they count is no carry.

    v0, v1 = while, carry c2 = 0, c3 = x:       v1 = for t0 < 8, carry c3 = x:
        v4 = c2[] < 8                               v6 = c3[i0] * y[t0]
        test v4                                     yield v6
    do, carry c2, c3:                     ->
        v5 = c2[] + 1
        v6 = c3[i0] * y[c2[]]
        yield v5, v6

A `While` counts if its test compares one carry with what no step changes, and each step
adds a positive constant to that carry. It stays a `While` if the carry might wrap
around before the test fails, if the limit of its steps might be reached, and if it
ticks without a known end.

In a counted loop, an integer that changes by a constant is the first value plus the
constant times the number of the step: in two's complement that is so where it wraps
around, too. So it is no carry, and stacks of it are no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, axes
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
    equations,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    drop_unread,
    elements,
)
from hopflow.dtypes import iinfo
from hopflow.graph.core import plain_symbol, size_of
from hopflow.graph.types import SYMBOL_TYPE
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.symbolic.atoms import declared, interval
from hopflow.symbolic.ranges import INT64, ValueRange
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size, Symbol, free_symbols, sym_max

_MOST: Final = int(INT64.high)


def counters(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    rewriter = _Rewriter(_known_sizes(program), frozenset(program.symbols))
    for equation in equations(program.block):
        rewriter.loops += isinstance(equation.definition, Loop)
    for block in all_blocks(program.block):
        rewriter.block(block)


def _known_sizes(program: KernelProgram) -> dict[Value, Size]:
    """The scalars that are sizes, each with what it is."""
    found: dict[Value, Size] = {}
    for value, symbol in zip(program.block.parameters, program.symbols, strict=False):
        found[value] = size_of(symbol)
    for equation in equations(program.block):
        own = equation.definition
        if equation.symbol is not None:
            found[equation.results[0]] = size_of(equation.symbol)
        elif isinstance(own, Pointwise) and own.elements[0].op == "size":
            found[equation.results[0]] = own.elements[0].attr
    return found


# --- loops with a test ----------------------------------------------------------------


class _Trips(NamedTuple):
    """How many steps a loop makes.

    size    the number, if it is over sizes alone
    steps   the number as an expression, where it does not
    last    what a carry ends with
    carry   which one
    range   where it lies within a step
    most    as many steps there are at most
    """

    size: Size | None
    steps: Expr
    last: Expr
    carry: int
    range: ValueRange
    most: int


@dataclass
class _Rewriter:
    """Rewrites the blocks of a program.

    sizes    the scalars that are sizes
    entry    the symbols that callers know
    loops    how many counted loops there are
    ranges   where the carries of loops lie that were counted
    """

    sizes: dict[Value, Size]
    entry: frozenset[Symbol]
    loops: int = 0
    ranges: dict[Value, ValueRange] = field(default_factory=dict)

    def block(self, block: Block) -> None:
        """Rewrite the loops of a block, without those in their blocks."""
        before, block.equations = block.equations, []
        changed = False
        for equation in before:
            last: dict[int, Expr] = {}
            if isinstance(equation.definition, While):
                trips = self.trips(equation.definition)
                if trips is not None:
                    block.equations += self.counted(equation, trips)
                    last = {trips.carry: trips.last}
            after: list[Equation] = []
            if isinstance(equation.definition, Loop):
                after = _without_counters(equation, equation.definition, last)
            if not after or not _is_empty(equation.definition):
                block.equations.append(equation)
            block.equations += after
            changed = changed or bool(after)
        if changed:
            drop_unread(block)

    def trips(self, loop: While) -> _Trips | None:
        """How often a loop steps, if that is known before it begins."""
        tested = _tested(loop)
        if tested is None or (loop.ticks and loop.bounds is None):
            return None
        step = _step(loop.body, tested.carry)
        if step is None or step < 1:
            return None
        first = loop.carry[tested.carry][()]
        found = self.count(first, step, tested)
        most = loop.max_steps
        if found is None or most is None:
            return found
        if found.size is None or _interval(found.size).high > most:
            return None
        return found

    def count(self, first: Expr, step: int, tested: "_Tested") -> _Trips | None:
        """How many steps there are from `first` on, if none wraps around."""
        end, size = tested.end, self.size(tested.end)
        a, b = self.range(first), self.range(end)
        greatest = iinfo(end.dtype).max
        if tested.op == "ne" and (step > 1 or a.high > b.low):
            return None
        if tested.op == "le":
            if b.high + step > greatest:
                return None
            one = e.const(1, end.dtype)
            end, b = e.add(end, one), b + ValueRange.point(1)
            size = None if size is None else size + 1
        apart = b.high - a.low
        if step > 1 and (b.high - 1 + step > greatest or apart + step > _MOST):
            return None
        found = self.difference(self.size(first), size, step, end)
        steps = e.extent(found) if found is not None else None
        if steps is None:
            steps = _steps(first, end, step, may_wrap=apart > _MOST)
        last = e.binary("max", first, end)
        if step > 1:
            last = _progressed(first, step, steps)
        within = ValueRange(a.low, b.high - 1)
        at_most = min(max(int(apart), 0), _MOST)
        return _Trips(found, steps, last, tested.carry, within, at_most)

    def difference(
        self, first: Size | None, end: Size | None, step: int, of: Expr
    ) -> Size | None:
        """The number of steps over sizes, if no program has to check how it is
        computed."""
        if first is None or end is None:
            return None
        if isinstance(first, int) and isinstance(end, int):
            return min(max(-((first - end) // step), 0), _MOST)
        apart = end - first
        found = _interval(apart)
        is_simple = plain_symbol(end) is not None and isinstance(first, int)
        if not (is_simple or self.entry.issuperset(free_symbols(first, end))):
            return None
        if of.dtype is not dtypes.int64 or step > 1 or not _is_within(found, INT64):
            return None
        return apart if found.low >= 0 else sym_max(apart, 0)

    def size(self, x: Expr) -> Size | None:
        """What an integer is, if it is a size."""
        if x.is_const:
            return int(x.attr)
        if x.op == "size":
            found: Size = x.attr
            return found
        return self.sizes.get(x.attr) if x.op == "element" and not x.args else None

    def range(self, x: Expr) -> ValueRange:
        """Where an integer lies."""
        size = self.size(x)
        if size is not None and x.dtype is dtypes.int64:
            return _interval(size) & INT64
        if x.is_const:
            return ValueRange.point(x.attr)
        limits = iinfo(x.dtype)
        known = self.ranges.get(x.attr) if x.op == "element" else None
        return known or ValueRange(limits.min, limits.max)

    def counted(self, equation: Equation, trips: _Trips) -> list[Equation]:
        """Make a loop a counted one; what has to be computed before it."""
        loop = equation.definition
        assert isinstance(loop, While)
        rows = equation.results[len(loop.carry) :]
        number, self.loops = self.loops, self.loops + 1
        before: list[Equation] = []
        self.ranges[loop.body.parameters[trips.carry]] = trips.range
        length = trips.size
        if rows or length is None:
            name = f"steps{number}"
            symbol: Symbol | None = Symbol(name, None, ValueRange(0, trips.most))
            if rows:
                symbol = plain_symbol(rows[0].shape[0])
            assert symbol is not None
            value, steps = Value(name, SYMBOL_TYPE), Pointwise((trips.steps,))
            before.append(Equation((value,), steps, equation.node, symbol))
            length = size_of(symbol)
        counter = Var(f"t{number}", dtypes.int64)
        equation.definition = Loop(
            counter, length, loop.carry, loop.body, ticks=loop.ticks
        )
        return before


def _interval(size: Size) -> ValueRange:
    """Where a size lies whose symbols are integers of 64 bits."""
    return interval(terms_of(size), lambda factor: declared(factor) & INT64)


def _is_within(found: ValueRange, other: ValueRange) -> bool:
    return other.low <= found.low and found.high <= other.high


class _Tested(NamedTuple):
    """A test `carry op end`, of the carry of a number; op is "lt", "le" or "ne"."""

    carry: int
    op: str
    end: Expr


def _tested(loop: While) -> _Tested | None:
    """What the test of a loop compares, if it does no more than that."""
    if len(loop.test.equations) != 1:
        return None
    [test] = loop.test.equations
    own, carried = test.definition, loop.test.parameters
    if not isinstance(own, Pointwise) or own.checks or test.results[0].type.ndim:
        return None
    [holds] = own.elements
    if holds.op not in _MIRRORED or loop.test.results != list(test.results):
        return None
    x, y = holds.args
    for own_side, end, op in ((x, y, holds.op), (y, x, _MIRRORED[holds.op])):
        if own_side.op != "element" or own_side.attr not in carried:
            continue
        is_outer = all(node.attr not in carried for node in elements([end]))
        if is_outer and op in ("lt", "le", "ne") and own_side.dtype.is_integer:
            return _Tested(carried.index(own_side.attr), op, end)
    return None


_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def _steps(first: Expr, end: Expr, step: int, *, may_wrap: bool) -> Expr:
    """The number of steps as an i64 expression; the largest i64 where it is larger."""
    dtype = end.dtype if end.dtype.bits == 64 else dtypes.int64
    first, end = e.cast(first, dtype), e.cast(end, dtype)
    apart = e.sub(e.binary("max", end, first), first)
    most = e.const(_MOST, dtype)
    if step > 1:
        more = e.add(apart, e.const(step - 1, dtype))
        apart = e.div(more, e.const(step, dtype))
    elif may_wrap and dtype is dtypes.int64:
        wraps = e.compare("lt", apart, e.const(0, dtype))
        apart = e.select(wraps, most, apart)
    elif may_wrap:
        apart = e.binary("min", apart, most)
    return e.cast(apart, dtypes.int64)


# --- what is counted ------------------------------------------------------------------


def _step(body: Block, number: int) -> int | None:
    """What each step adds to a carry, if that is a constant."""
    own, following = body.parameters[number], body.results[number]
    if own.type.ndim or not own.dtype.is_integer:
        return None
    for equation in body.equations:
        definition = equation.definition
        if following not in equation.results or not isinstance(definition, Pointwise):
            continue
        element = definition.elements[equation.results.index(following)]
        if element.op not in ("add", "sub") or equation.symbol is not None:
            return None
        x, y = element.args
        if x.op == "element" and x.attr is own and y.is_const:
            return int(y.attr) if element.op == "add" else -int(y.attr)
    return None


def _without_counters(
    equation: Equation, loop: Loop, last: dict[int, Expr]
) -> list[Equation]:
    """Have the carries that count be no carries; the equations of what they and their
    stacks are after the loop.

    last   what some of them end with, by number, where that is known
    """
    count, body = len(loop.carry), loop.body
    steps = {k: step for k in range(count) if (step := _step(body, k)) is not None}
    if not steps:
        return []
    length = e.extent(loop.length)

    def at(number: int, index: Expr) -> Expr:
        """A carry in the step of an index."""
        back = e.sub(e.sub(length, e.index(1)), index)
        done = back if loop.reverse else index
        return _progressed(loop.carry[number][()], steps[number], done)

    after: list[Equation] = []
    within: list[Equation] = []
    gone: set[int] = set()
    for number, step in steps.items():
        own = body.parameters[number]
        element = Pointwise((at(number, e.read(loop.counter)),))
        within.append(Equation((own,), element, equation.node))
        end = last.get(number)
        if end is None:
            end = _progressed(loop.carry[number][()], step, length)
        result = (equation.results[number],)
        after.append(Equation(result, Pointwise((end,)), equation.node))
        gone.add(number)
        for position in range(count, len(body.results)):
            if body.results[position] is own:
                stack = Pointwise((at(number, axes(1)[0]),))
                result = (equation.results[position],)
                after.append(Equation(result, stack, equation.node))
                gone.add(position)
    _take_out(equation, loop, gone)
    body.equations = within + body.equations
    drop_unread(body)
    return after


def _progressed(first: Expr, step: int, done: Expr) -> Expr:
    """What an integer has become after so many steps."""
    dtype = first.dtype
    return e.add(first, e.mul(e.cast(done, dtype), e.const(step, dtype)))


def _take_out(equation: Equation, loop: Loop, gone: set[int]) -> None:
    """Take carries and rows out of a loop, by their numbers."""

    def kept(values: Sequence[Value]) -> list[Value]:
        return [v for k, v in enumerate(values) if k not in gone]

    loop.body.parameters = kept(loop.body.parameters)
    loop.body.results = kept(loop.body.results)
    equation.results = tuple(kept(equation.results))
    equation.definition = replace(loop, carry=tuple(kept(loop.carry)))


def _is_empty(loop: object) -> bool:
    """Whether a counted loop does nothing."""
    return isinstance(loop, Loop) and not (
        loop.ticks or loop.body.equations or loop.body.results
    )
