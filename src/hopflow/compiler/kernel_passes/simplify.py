"""Index arithmetic in a canonical form, and tests that ranges decide.

    v0 = x[i0 / 4 * 4 + i0 % 4] for i0 < 8          v0 = x[i0] for i0 < 8
    v1 = select(i0 < 0, y[i0 + 8], y[i0])     ->    v1 = y[i0]

An axis is at least 0 and less than its extent. From that follow bounds of what is
computed of it, as far as they are known numbers. Only integers of 64 bits and tests of
them are changed, and only where no bit of a result depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Definition,
    Effect,
    Pointwise,
    Reduction,
    Scatter,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    all_expressions,
    map_expressions,
)
from hopflow.compiler.kernel_program.sizes import as_size
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.nest import Var
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Size

__all__ = ["simplify"]


class _Bounds(NamedTuple):
    """The least and the greatest value."""

    low: float
    high: float


_ANY: Final = _Bounds(-inf, inf)
_LIMIT: Final = 1 << 62
"""Larger bounds are as good as none: sums of them would wrap around."""


def simplify(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    inner = [*all_blocks(program.block)]
    equations = [q for block in inner for q in block.equations]
    counters: dict[Var, _Bounds] = {}
    for equation in equations:
        if isinstance(loop := equation.definition, Loop):
            counters[loop.counter] = _below(loop.length)
    unread: set[Value] = set()  # which told whether checks pass that are gone
    for equation in equations:
        own = equation.definition
        if isinstance(own, Effect):
            equation.definition, gone = _without_proven(own, counters)
            unread.update(gone)
        elif not isinstance(own, Region):
            equation.definition = _simplified(equation, own, counters)
    if unread:
        for block in inner:
            block.equations = [
                q for q in block.equations if unread.isdisjoint(q.results)
            ]


def _without_proven(
    own: Effect, counters: Mapping[Var, _Bounds]
) -> tuple[Effect, list[Value]]:
    """The checks that may fail; and what told of the others whether they pass."""
    left: list[Check] = []
    gone: list[Value] = []
    for given in own.checks:
        check = _simplified_check(given, counters)
        if not (check.holds.is_const and check.holds.attr):
            left.append(check)
        elif check.passed is not None and check.passed.op == "element":
            gone.append(check.passed.attr)
    return replace(own, checks=tuple(left)), gone


def _simplified(
    equation: Equation, own: Definition, counters: Mapping[Var, _Bounds]
) -> Definition:
    shape: tuple[Size, ...] = equation.results[0].shape if equation.results else ()
    if isinstance(own, Pointwise) and not shape and not counters:
        return own  # there is nothing that has bounds
    if isinstance(own, Scatter):
        shape = own.space
    if isinstance(own, Reduction):
        shape = (*shape, *own.space)
    roots = all_expressions(own)
    order = nodes(*roots)
    if not any(_has_bounds(node) for node in order):
        return own
    found = iter(_Simplifier(shape, counters).of(roots, order))
    return map_expressions(own, lambda _: next(found))


def _has_bounds(node: Expr) -> bool:
    """Whether a node computes with an integer of 64 bits."""
    return (
        bool(node.args)
        and node.op not in ("element", "load")
        and node.args[-1].dtype is dtypes.int64
    )


def _simplified_check(check: Check, counters: Mapping[Var, _Bounds]) -> Check:
    known = _Simplifier(check.shape, counters)
    roots = [check.holds, *check.values]
    holds, *values = known.of(roots, nodes(*roots))
    return replace(check, holds=holds, values=tuple(values))


def _below(size: Size) -> _Bounds:
    """The bounds of an index below a size."""
    return _Bounds(0, size - 1 if isinstance(size, int) else inf)


class _Simplifier:
    """Expressions over the axes of one shape, with the bounds of each node."""

    def __init__(self, shape: Sequence[Size], counters: Mapping[Var, _Bounds]) -> None:
        pairs = zip(axes(len(shape)), shape, strict=True)
        self._vars = {axis.attr: _below(n) for axis, n in pairs} | dict(counters)
        self._bounds: dict[Expr, _Bounds] = {}

    def of(self, roots: Sequence[Expr], order: Sequence[Expr]) -> list[Expr]:
        """These expressions, simplified; `order` are their nodes."""
        values: dict[Expr, Expr] = {}
        for node in order:
            args = tuple([values[a] for a in node.args])
            values[node] = self._node(e.with_args(node, args))
        return [values[root] for root in roots]

    def bounds(self, node: Expr) -> _Bounds:
        """The bounds of a node, whose operands were simplified before it."""
        known = self._bounds.get(node)
        if known is None:
            known = _bounds_of(node, [self._bounds.get(a, _ANY) for a in node.args])
            if node.op == "var":
                known = self._vars.get(node.attr, _ANY)
            if max(-known.low, known.high) > _LIMIT:
                high = known.high if known.high <= _LIMIT else inf
                known = _Bounds(known.low if -known.low <= _LIMIT else -inf, high)
            self._bounds[node] = known
        return known

    def _node(self, node: Expr) -> Expr:
        if node.args and node.args[-1].dtype is dtypes.int64:
            for arg in node.args:
                self.bounds(arg)
            node = self._rewritten(node)
        if node.dtype is dtypes.int64:
            self.bounds(node)
        return node

    def _rewritten(self, node: Expr) -> Expr:
        if node.op in _DECIDED and len(node.args) == 2:
            decided = _decided(node.op, *map(self.bounds, node.args))
            return node if decided is None else e.const(decided, dtypes.bool_)
        if node.dtype is not dtypes.int64 or len(node.args) != 2:
            return node
        x, y = node.args
        if node.op == "add" and _is_quotient_of(x, y):
            return y.args[0]
        if node.op in ("add", "sub") and x.op in ("add", "sub"):
            return _moved_twice(node)
        if node.op in ("div", "rem") and y.is_const and y.attr > 0:
            return self._divided(node, x, y)
        return node

    def _divided(self, node: Expr, x: Expr, y: Expr) -> Expr:
        """`x` divided by a positive number, or what is left of it."""
        size, bounds = y.attr, self.bounds(x)
        if bounds.low >= 0 and bounds.high < size:
            return x if node.op == "rem" else e.index(0)
        if x.op != "add" or bounds.low < 0 or bounds.high == inf:
            return node
        for whole, rest in (x.args, x.args[::-1]):
            left = self.bounds(rest)
            times = _multiple(whole, size)
            if times is not None and left.low >= 0 and left.high < size:
                return rest if node.op == "rem" else times
        return node


def _moved_twice(node: Expr) -> Expr:
    """`x + m + n` as `x + k`, where that is a known number."""
    inner, own = node.args
    x, other = inner.args
    m, n = as_size(other), as_size(own)
    if m is None or n is None:
        return node
    total = (m if inner.op == "add" else -m) + (n if node.op == "add" else -n)
    return e.add(x, e.const(total, dtypes.int64)) if isinstance(total, int) else node


def _is_quotient_of(x: Expr, y: Expr) -> bool:
    """Whether `x + y` is `a / n * n + a % n`, which is `a`."""
    if x.op != "mul" or y.op != "rem" or x.args[0].op != "div":
        return False
    (quotient, n), (a, m) = x.args, y.args
    same = n.is_const and m.is_const and n.attr == m.attr
    b, k = quotient.args
    return same and b is a and k.is_const and k.attr == n.attr


def _multiple(x: Expr, size: int) -> Expr | None:
    """What `x` is a multiple of `size` by."""
    if x.op != "mul" or not x.args[1].is_const or x.args[1].attr % size:
        return None
    return e.mul(x.args[0], e.index(x.args[1].attr // size))


_DECIDED: Final = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))


def _decided(op: str, x: _Bounds, y: _Bounds) -> bool | None:
    """What a comparison gives for all values within bounds, if it is always that."""
    if op in ("gt", "ge"):
        x, y, op = y, x, {"gt": "lt", "ge": "le"}[op]
    always = x.high < y.low or (op == "le" and x.high == y.low)
    never = x.low > y.high or (op == "lt" and x.low == y.high)
    if op in ("eq", "ne"):
        return (op == "ne") if always or never else None
    return True if always else False if never else None


def _bounds_of(node: Expr, args: Sequence[_Bounds]) -> _Bounds:
    """The bounds of a node of operands within bounds; a variable's are unknown."""
    match node.op:
        case "const":
            return _Bounds(node.attr, node.attr)
        case "add":
            [x, y] = args
            return _Bounds(x.low + y.low, x.high + y.high)
        case "sub":
            [x, y] = args
            return _Bounds(x.low - y.high, x.high - y.low)
        case "mul" if _is_finite(*args):
            ends = [a * b for a in args[0] for b in args[1]]
            return _Bounds(min(ends), max(ends))
        case "min":
            return _Bounds(min(a.low for a in args), min(a.high for a in args))
        case "max":
            return _Bounds(max(a.low for a in args), max(a.high for a in args))
        case "div" if _is_divided(node, args):
            n = node.args[1].attr
            high = args[0].high
            return _Bounds(args[0].low // n, high // n if high < inf else inf)
        case "rem" if _is_divided(node, args):
            return _Bounds(0, min(args[0].high, node.args[1].attr - 1))
        case "select":
            [_, x, y] = args
            return _Bounds(min(x.low, y.low), max(x.high, y.high))
    return _ANY


def _is_finite(*bounds: _Bounds) -> bool:
    return all(b.low > -inf and b.high < inf for b in bounds)


def _is_divided(node: Expr, args: Sequence[_Bounds]) -> bool:
    """Whether what is at least 0 is divided by a positive number."""
    y = node.args[1]
    return y.is_const and y.attr > 0 and args[0].low >= 0
