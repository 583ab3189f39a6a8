"""Turns `while` loops that count into counted loops, and removes their counters.

    v0, v1 = while, carry c2 = 0, c3 = x:       v1 = for t0 < 8, carry c3 = x:
        v4 = c2[] < 8                               v6 = c3[i0] * y[t0]
        test v4                                     yield v6
    do, carry c2, c3:                     ->
        v5 = c2[] + 1
        v6 = c3[i0] * y[c2[]]
        yield v5, v6

A `While` counts if its test compares one carry with a loop invariant, and each step
adds a constant to that carry, towards the invariant. It stays a `While` if the carry
may wrap around before the test fails, if the limit of its steps may be reached, and if
it reports progress (ticks) without a known trip count. A loop that is known to make no
step is gone, and with it what only the loop has read.

In a counted loop, an integer that each step changes by a constant (a basic induction
variable) equals its first value plus the constant times the step number; in two's
complement this also holds where it wraps around. So it need not be carried, and its
stacks need not be stored as rows.
"""

from collections.abc import Mapping, Sequence
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
from hopflow.compiler.kernel_program.registers import shape_key
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
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.atoms import declared, interval
from hopflow.symbolic.ranges import INT64, ValueRange
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size, Symbol, free_symbols, sym_max

_MOST: Final = int(INT64.high)


def counters(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    rewriter = _Rewriter(_scalar_sizes(program), frozenset(program.symbols))
    for equation in equations(program.block):
        rewriter.loops += isinstance(equation.definition, Loop)
    for block in all_blocks(program.block):
        rewriter.block(block)


def _scalar_sizes(program: KernelProgram) -> dict[Value, Size]:
    """Return the integers that are sizes or constants, with these."""
    sizes: dict[Value, Size] = {}
    for value, symbol in zip(program.block.parameters, program.symbols, strict=False):
        sizes[value] = size_of(symbol)
    for equation in equations(program.block):
        definition = equation.definition
        if equation.symbol is not None:
            sizes[equation.results[0]] = size_of(equation.symbol)
        elif isinstance(definition, Pointwise) and not definition.checks:
            [result, *_] = equation.results
            size = _size(definition.elements[0], sizes) if not result.shape else None
            if size is not None:
                sizes[result] = size
    return sizes


def _size(x: Expr, sizes: Mapping[Value, Size]) -> Size | None:
    """Return the size, or the constant, that an integer is; None: it is another one."""
    if x.op == "size":
        named: Size = x.attr
        return named
    known: dict[Expr, Expr] = {}
    for node in nodes(x):
        size = sizes.get(node.attr) if node.op == "element" and not node.args else None
        if isinstance(size, int):
            known[node] = e.const(size, node.dtype)
        elif node.op == "element" or node.dtype.kind not in "iu":
            return None
        else:
            known[node] = e.with_args(node, tuple([known[a] for a in node.args]))
    return int(known[x].attr) if known[x].is_const else None


# --- loops with a test ----------------------------------------------------------------


class _Trips(NamedTuple):
    """How many steps a loop makes (its trip count).

    size    the trip count, if it is an expression of sizes alone
    steps   the trip count as an expression
    last    the final value of a carry
    carry   the number of that carry
    range   the range of the carry inside a step
    most    an upper bound of the trip count
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
    entry    the symbols that the caller's arguments define
    loops    how many counted loops there are
    ranges   the ranges of the carries that count
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
            loop, after = equation.definition, list[Equation]()
            if isinstance(loop, Loop) and _makes_no_step(equation, loop):
                after = _not_begun(equation, loop)
            elif isinstance(loop, Loop):
                after = _without_counters(equation, loop, last)
            if not (after and _is_empty(equation.definition)):
                block.equations.append(equation)
            block.equations += after
            changed = changed or bool(after)
        if changed:
            drop_unread(block)

    def trips(self, loop: While) -> _Trips | None:
        """Return the trip count of a loop, if it is known before the loop begins."""
        tested = _tested(loop)
        if tested is None or (loop.ticks and loop.bounds is None):
            return None
        step = _step(loop.body, tested.carry)
        if not step or tested.op not in _TESTS[step > 0]:
            return None
        first = loop.carry[tested.carry][()]
        trips = self.count(first, step, tested)
        most = loop.max_steps
        if trips is None or most is None:
            return trips
        if trips.size is None or _interval(trips.size).high > most:
            return None
        return trips

    def count(self, first: Expr, step: int, tested: "_Tested") -> _Trips | None:
        """Return the trip count from `first` on; None if the carry may wrap around."""
        is_upward, step = step > 0, abs(step)
        low, high = (first, tested.end) if is_upward else (tested.end, first)
        least, greatest = (iinfo(low.dtype).min, iinfo(low.dtype).max)
        a, b = self.range(low), self.range(high)
        low_size, high_size = self.size(low), self.size(high)
        if tested.op == "ne" and (step > 1 or a.high > b.low):
            return None
        one = e.const(1, low.dtype)
        if tested.op == "le":
            if b.high + step > greatest:
                return None
            high, b = e.add(high, one), b + ValueRange.point(1)
            high_size = None if high_size is None else high_size + 1
        elif tested.op == "ge":
            if a.low - step < least:
                return None
            low, a = e.sub(low, one), a + ValueRange.point(-1)
            low_size = None if low_size is None else low_size - 1
        distance = b.high - a.low
        if step > 1:
            is_far = distance + step > _MOST
            wraps = (
                b.high - 1 + step > greatest if is_upward else a.low + 1 - step < least
            )
            if is_far or wraps:
                return None
        trips = self.difference(low_size, high_size, step, low)
        steps = e.extent(trips) if trips is not None else None
        if steps is None:
            steps = _steps(low, high, step, may_wrap=distance > _MOST)
        last = e.binary("max" if is_upward else "min", low, high)
        if step > 1:
            last = _progressed(first, step if is_upward else -step, steps)
        inside = ValueRange(a.low, b.high - 1)
        if not is_upward:
            inside = ValueRange(a.low + 1, b.high)
        at_most = min(max(int(distance), 0), _MOST)
        return _Trips(trips, steps, last, tested.carry, inside, at_most)

    def difference(
        self, first: Size | None, end: Size | None, step: int, limit: Expr
    ) -> Size | None:
        """Return the trip count as a size, or None if computing it needs a check."""
        if first is None or end is None:
            return None
        if isinstance(first, int) and isinstance(end, int):
            return min(max(-((first - end) // step), 0), _MOST)
        distance = end - first
        bounds = _interval(distance)
        is_simple = plain_symbol(end) is not None and isinstance(first, int)
        if not (is_simple or self.entry.issuperset(free_symbols(first, end))):
            return None
        if limit.dtype is not dtypes.int64 or step > 1 or not _is_within(bounds, INT64):
            return None
        return distance if bounds.low >= 0 else sym_max(distance, 0)

    def size(self, x: Expr) -> Size | None:
        """Return the size that an integer is, or None."""
        if x.op == "element" and not x.args and x.attr in self.sizes:
            return self.sizes[x.attr]
        return _size(x, self.sizes)

    def range(self, x: Expr) -> ValueRange:
        """Return the range of an integer."""
        size = self.size(x)
        if size is not None and x.dtype is dtypes.int64:
            return _interval(size) & INT64
        if x.is_const:
            return ValueRange.point(x.attr)
        limits = iinfo(x.dtype)
        carried = self.ranges.get(x.attr) if x.op == "element" else None
        return carried or ValueRange(limits.min, limits.max)

    def counted(self, equation: Equation, trips: _Trips) -> list[Equation]:
        """Make a loop a counted one. Return the equations to compute before it."""
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
    """Return the range of a size whose symbols are 64-bit integers."""
    return interval(terms_of(size), lambda factor: declared(factor) & INT64)


def _is_within(inner: ValueRange, outer: ValueRange) -> bool:
    return outer.low <= inner.low and inner.high <= outer.high


class _Tested(NamedTuple):
    """A test `carry op end` of a carry by its number."""

    carry: int
    op: str
    end: Expr


def _tested(loop: While) -> _Tested | None:
    """Return the comparison that the test of a loop is, or None."""
    if len(loop.test.equations) != 1:
        return None
    [test] = loop.test.equations
    compared, carried = test.definition, loop.test.parameters
    if (
        not isinstance(compared, Pointwise)
        or compared.checks
        or test.results[0].type.ndim
    ):
        return None
    [holds] = compared.elements
    if holds.op not in _MIRRORED or loop.test.results != list(test.results):
        return None
    x, y = holds.args
    for side, end, op in ((x, y, holds.op), (y, x, _MIRRORED[holds.op])):
        if side.op != "element" or side.attr not in carried:
            continue
        is_outer = all(node.attr not in carried for node in elements([end]))
        if is_outer and side.dtype.is_integer:
            return _Tested(carried.index(side.attr), op, end)
    return None


_TESTS: Final = {True: ("lt", "le", "ne"), False: ("gt", "ge", "ne")}
"""The tests of loops that count up, and down."""
_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}


def _steps(first: Expr, end: Expr, step: int, *, may_wrap: bool) -> Expr:
    """Return the trip count as an i64 expression, at most the largest i64."""
    dtype = end.dtype if end.dtype.bits == 64 else dtypes.int64
    first, end = e.cast(first, dtype), e.cast(end, dtype)
    distance = e.sub(e.binary("max", end, first), first)
    most = e.const(_MOST, dtype)
    if step > 1:
        rounded_up = e.add(distance, e.const(step - 1, dtype))
        distance = e.div(rounded_up, e.const(step, dtype))
    elif may_wrap and dtype is dtypes.int64:
        wraps = e.compare("lt", distance, e.const(0, dtype))
        distance = e.select(wraps, most, distance)
    elif may_wrap:
        distance = e.binary("min", distance, most)
    return e.cast(distance, dtypes.int64)


def _not_begun(equation: Equation, loop: Loop) -> list[Equation]:
    """Remove the carries and rows of a loop that makes no step. Return the equations
    that compute its results."""
    after: list[Equation] = []
    for position, result in enumerate(equation.results):
        if position < len(loop.carry):
            final = loop.carry[position][axes(result.type.ndim)]
        else:
            final = e.const(0, result.dtype)  # of no element: a stack has no row
        after.append(Equation((result,), Pointwise((final,)), equation.node))
    _remove(equation, loop, set(range(len(equation.results))))
    loop.body.equations = []
    return after


# --- the carries that count -----------------------------------------------------------


def _step(body: Block, number: int) -> int | None:
    """Return the constant that each step adds to a carry, or None."""
    carry, following = body.parameters[number], body.results[number]
    if carry.type.ndim or not carry.dtype.is_integer:
        return None
    for equation in body.equations:
        definition = equation.definition
        if following not in equation.results or not isinstance(definition, Pointwise):
            continue
        element = definition.elements[equation.results.index(following)]
        if element.op not in ("add", "sub") or equation.symbol is not None:
            return None
        x, y = element.args
        if x.op == "element" and x.attr is carry and y.is_const:
            return int(y.attr) if element.op == "add" else -int(y.attr)
    return None


def _without_counters(
    equation: Equation, loop: Loop, last: dict[int, Expr]
) -> list[Equation]:
    """Remove the carries that count from a loop. Return the equations that compute
    their final values and their stacks after the loop.

    last   the final values that are known, by number
    """
    count, body = len(loop.carry), loop.body
    steps = {k: step for k in range(count) if (step := _step(body, k)) is not None}
    if not steps:
        return []
    length = e.extent(loop.length)

    def at(number: int, index: Expr) -> Expr:
        """Return a carry in the step of an index."""
        back = e.sub(e.sub(length, e.index(1)), index)
        done = back if loop.reverse else index
        return _progressed(loop.carry[number][()], steps[number], done)

    after: list[Equation] = []
    inside: list[Equation] = []
    removed: set[int] = set()
    for number, step in steps.items():
        carry = body.parameters[number]
        element = Pointwise((at(number, e.read(loop.counter)),))
        inside.append(Equation((carry,), element, equation.node))
        end = last.get(number)
        if end is None:
            end = _progressed(loop.carry[number][()], step, length)
        result = (equation.results[number],)
        after.append(Equation(result, Pointwise((end,)), equation.node))
        removed.add(number)
        for position in range(count, len(body.results)):
            if body.results[position] is carry:
                stack = Pointwise((at(number, axes(1)[0]),))
                result = (equation.results[position],)
                after.append(Equation(result, stack, equation.node))
                removed.add(position)
    _remove(equation, loop, removed)
    body.equations = inside + body.equations
    drop_unread(body)
    return after


def _progressed(first: Expr, step: int, done: Expr) -> Expr:
    """Return the value of a carry after so many steps."""
    dtype = first.dtype
    return e.add(first, e.mul(e.cast(done, dtype), e.const(step, dtype)))


def _remove(equation: Equation, loop: Loop, removed: set[int]) -> None:
    """Remove carries and rows from a loop, by their numbers."""

    def kept(values: Sequence[Value]) -> list[Value]:
        return [v for k, v in enumerate(values) if k not in removed]

    loop.body.parameters = kept(loop.body.parameters)
    loop.body.results = kept(loop.body.results)
    equation.results = tuple(kept(equation.results))
    equation.definition = replace(loop, carry=tuple(kept(loop.carry)))


def _makes_no_step(equation: Equation, loop: Loop) -> bool:
    """Return whether a loop is known to make no step, and its results have the sizes of
    its carries: other sizes are defined by the loop."""
    if not isinstance(loop.length, int) or loop.length or loop.ticks:
        return False
    count = len(loop.carry)
    finals, rows = equation.results[:count], equation.results[count:]
    return all(not free_symbols(*value.shape) for value in rows) and all(
        shape_key(value.shape) == shape_key(first.shape)
        for value, first in zip(finals, loop.carry, strict=True)
    )


def _is_empty(loop: object) -> bool:
    """Return whether a counted loop does nothing."""
    return isinstance(loop, Loop) and not (
        loop.ticks or loop.body.equations or loop.body.results
    )
