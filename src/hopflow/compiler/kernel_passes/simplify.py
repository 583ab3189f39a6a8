"""Index arithmetic in canonical form, and comparisons decided by ranges.

    v0 = x[i0 / 4 * 4 + i0 % 4] for i0 < 8          v0 = x[i0] for i0 < 8
    v1 = select(i0 < 0, y[i0 + 8], y[i0])     ->    v1 = y[i0]

An axis, or the counter of a loop, is at least 0 and less than its extent. This bounds
the expressions over it, and so do masks, shifts and remainders (interval analysis), and
the clamps of a float that becomes an index (`clip(x * 256.0, 0.0, 255.0)`); the bounds
of what an equation computes hold where another one reads it. Only 64-bit
integers and comparisons of them are rewritten, and every result stays the same to the
last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Definition,
    Effect,
    Pointwise,
    Reduction,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    equations,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    all_expressions,
    drop_unread,
    map_expressions,
    space_of,
)
from hopflow.compiler.kernel_program.sizes import size_of_expr
from hopflow.dtypes import DType
from hopflow.graph.core import Constant, Node
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.intervals import EVERYTHING, Interval, interval
from hopflow.loop_ir.walk import nodes
from hopflow.ops.reducers import reduce_find, reduce_max, reduce_min
from hopflow.symbolic.atoms import declared
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.scalars import as_size, terms_of
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute
from hopflow.symbolic.terms import Atom


class _Bounds(NamedTuple):
    """The least and the greatest value of an integer, and a size that it is less than,
    if there is one."""

    low: int
    high: int
    below: Size | None = None


_ANY: Final = _Bounds(int(INT64.low), int(INT64.high))
_STEPS: Final = 1 << 56
"""No loop has more steps."""
_DEPTH: Final = 6
"""How many operations on floats are looked at, one inside the other."""


def simplify(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    facts, is_proven = _Facts(), False
    for equation in equations(program.block):
        definition = equation.definition
        if isinstance(definition, Loop):
            facts.loops[definition.counter] = facts.index(definition.length)
        if isinstance(definition, Effect):
            equation.definition = _without_proven(definition, facts)
            is_proven |= len(equation.definition.checks) < len(definition.checks)
        elif not isinstance(definition, Region):
            equation.definition = _simplified(equation, definition, facts)
    if is_proven:  # what only those checks have read is computed for nothing
        for block in reversed([*all_blocks(program.block)]):
            drop_unread(block)


@dataclass(slots=True)
class _Facts:
    """The facts about the values of a program, up to an equation.

    loops     the bounds of loop counters
    elements  the bounds of the integers in a value
    floats    the bounds of the floats in a value
    sizes     what symbols equal, over symbols defined earlier
    """

    loops: dict[Var, _Bounds] = field(default_factory=dict)
    elements: dict[Value, _Bounds] = field(default_factory=dict)
    floats: dict[Value, Interval] = field(default_factory=dict)
    sizes: dict[Symbol, Size] = field(default_factory=dict)

    def size(self, size: Size) -> Size:
        """Return a size with the known symbols substituted."""
        if isinstance(size, int) or not self.sizes:
            return size
        try:
            return substitute(size, self.sizes)
        except ZeroDivisionError:  # the program stops where it computes the size
            return size

    def index(self, size: Size) -> _Bounds:
        """Return the bounds of an index that is less than a size."""
        size = self.size(size)
        if isinstance(size, int):
            return _Bounds(0, size - 1)
        most = min(declared(terms_of(size)).high - 1, _STEPS)
        return _Bounds(0, int(most), _if_positive(size))

    def interval(self, node: Expr) -> Interval:
        """Return the bounds of a float element of a value."""
        low, high = self.floats.get(node.attr, EVERYTHING)
        if e.condition_of(node) is None:
            return low, high
        return min(low, 0.0), max(high, 0.0)  # 0 where it is false

    def learn(
        self, equation: Equation, elements: Sequence[Expr], simplifier: "_Simplifier"
    ) -> None:
        """Record the bounds of the numbers that an equation computes."""
        for value, x in zip(equation.results, elements, strict=False):
            if x.dtype.is_integer and simplifier.bounds(x) != _limits(x.dtype):
                self.elements[value] = simplifier.bounds(x)
            if x.dtype.is_float and (ends := simplifier.interval(x)) != EVERYTHING:
                self.floats[value] = ends
        if equation.symbol is not None and elements[0].op in ("const", "size"):
            size = self.size(elements[0].attr)
            if equation.symbol not in free_symbols(size):
                self.sizes[equation.symbol] = size


def _if_positive(size: Size) -> Size:
    """Return what a size equals if it is positive."""
    match terms_of(size):
        case (((Atom(op="max", args=(x, y)),), 1),) if () in (x, y):
            other = x or y
            return as_size(other) if isinstance(other, tuple) else size
    return size


@cache
def _limits(dtype: DType) -> _Bounds:
    """Return the least and the greatest value of an integer dtype."""
    if not dtype.is_integer:
        return _Bounds(0, 1) if dtype is dtypes.bool_ else _ANY
    limits = dtypes.iinfo(dtype)
    return _Bounds(limits.min, limits.max)


def _without_proven(effect: Effect, facts: _Facts) -> Effect:
    """Return an effect without the checks that always pass."""
    found = [_simplified_check(check, facts) for check in effect.checks]
    remaining = [x for x in found if not (x.holds.is_const and x.holds.attr)]
    return replace(effect, checks=tuple(remaining))


def _simplified(equation: Equation, kernel: Definition, facts: _Facts) -> Definition:
    shape = space_of(equation)
    roots = all_expressions(kernel)
    order = nodes(*roots)
    is_pointwise = isinstance(kernel, Pointwise)
    simplifier, elements = _Simplifier(shape, facts), roots
    changes = any(map(_has_bounds, order))
    if changes or any(v.dtype.is_integer for v in equation.results):
        elements = simplifier.of(roots, order)
    if is_pointwise:
        facts.learn(equation, elements, simplifier)
    node, results = equation.node, equation.results
    if isinstance(kernel, Reduction) and len(results) == 1 and _is_position(node):
        facts.elements[results[0]] = facts.index(kernel.space[-1])
    if elements is roots:
        return kernel
    replaced = iter(elements)
    return map_expressions(kernel, lambda _: next(replaced))


def _is_position(node: Node) -> bool:
    """Return whether a node finds the first place of an extremum, which has one."""
    if node.op is not reduce_find:
        return False
    x, best = node.args
    if isinstance(best, Constant) or best.node.op not in (reduce_max, reduce_min):
        return False
    axes = best.node.params["axes"]
    return best.node.args[0] is x and axes == (node.params["axis"],)


def _has_bounds(node: Expr) -> bool:
    """Return whether a node computes with a 64-bit integer."""
    return (
        bool(node.args)
        and node.op not in ("element", "load")
        and node.args[-1].dtype is dtypes.int64
    )


def _simplified_check(check: Check, facts: _Facts) -> Check:
    roots = [check.holds, *check.values]
    holds, *values = _Simplifier(check.shape, facts).of(roots, nodes(*roots))
    return replace(check, holds=holds, values=tuple(values))


class _Simplifier:
    """Simplifies expressions over the axes of one shape, and bounds each node."""

    def __init__(self, shape: Sequence[Size], facts: _Facts) -> None:
        pairs = zip(axes(len(shape)), shape, strict=True)
        self._axes = {axis.attr: n for axis, n in pairs}
        self._facts = facts
        self._bounds: dict[Expr, _Bounds] = {}

    def of(self, roots: Sequence[Expr], order: Sequence[Expr]) -> list[Expr]:
        """Return these expressions, simplified; `order` holds their nodes."""
        values: dict[Expr, Expr] = {}
        for node in order:
            args = tuple([values[a] for a in node.args])
            values[node] = self._node(e.with_args(node, args))
        return [values[root] for root in roots]

    def bounds(self, node: Expr) -> _Bounds:
        """Return the bounds of an integer whose operands are already simplified."""
        bounds = self._bounds.get(node)
        if bounds is None:
            bounds, limits = self._of(node), _limits(node.dtype)
            if bounds.low < limits.low or bounds.high > limits.high:
                bounds = limits  # it may wrap around
            self._bounds[node] = bounds
        return bounds

    def interval(self, node: Expr, depth: int = _DEPTH) -> Interval:
        """Return the bounds of a number, by at most `depth` operations on floats."""
        if node.dtype.is_integer:
            return self.bounds(node)[:2]
        if not node.dtype.is_float:
            return _limits(node.dtype)[:2]
        if node.op == "element":
            return self._facts.interval(node)
        if not depth:
            return EVERYTHING
        return interval(node, lambda operand: self.interval(operand, depth - 1))

    def _of(self, node: Expr) -> _Bounds:
        """Return the bounds of a node if it does not wrap around."""
        facts, limits = self._facts, _limits(node.dtype)
        if node.op == "var":
            size = self._axes.get(node.attr)
            return (
                facts.loops.get(node.attr, limits)
                if size is None
                else facts.index(size)
            )
        if node.op == "element":
            found = facts.elements.get(node.attr, limits)
            if e.condition_of(node) is None:
                return found
            return _Bounds(min(found.low, 0), max(found.high, 0))  # 0 where it is false
        if node.op == "size":
            bounds = declared(terms_of(facts.size(node.attr))) & INT64
            return _Bounds(int(bounds.low), int(bounds.high))
        if node.op == "cast" and node.args[0].dtype.is_float:
            return _converted(*self.interval(node.args[0]), limits)
        args = [a for a in node.args if a.dtype.is_integer]
        return _bounds_of(node, [self.bounds(a) for a in args]) or limits

    def _node(self, node: Expr) -> Expr:
        if node.args and node.args[-1].dtype is dtypes.int64:
            node = self._rewritten(node)
        if node.dtype.is_integer:
            self.bounds(node)  # operands first, so that no recursion is deep
        return node

    def _rewritten(self, node: Expr) -> Expr:
        if node.op in _DECIDED and len(node.args) == 2:
            decided = _decided(node.op, *map(self.bounds, node.args))
            if decided is None:
                decided = self._decided_by_size(node.op, *node.args)
            return node if decided is None else e.const(decided, dtypes.bool_)
        if node.dtype is not dtypes.int64 or len(node.args) != 2:
            return node
        x, y = node.args
        if node.op in ("min", "max"):
            return self._extremum(node, x, y)
        if node.op == "add" and _is_quotient_of(x, y):
            return y.args[0]
        if node.op in ("add", "sub") and x.op in ("add", "sub"):
            return _moved_twice(node)
        if node.op in ("div", "rem") and y.is_const and y.attr > 0:
            return self._divided(node, x, y)
        return node

    def _extremum(self, node: Expr, x: Expr, y: Expr) -> Expr:
        """Return the operand that is always the smaller, or larger, one."""
        for less, more in ((x, y), (y, x)):
            if self.bounds(less).high <= self.bounds(more).low or self._decided_by_size(
                "le", less, more
            ):
                return less if node.op == "min" else more
        return node

    def _decided_by_size(self, op: str, x: Expr, y: Expr) -> bool | None:
        """Return the result of a comparison with a size if it is always the same."""
        if x.op == "size":
            x, y, op = y, x, _MIRRORED.get(op, op)
        below = self.bounds(x).below
        if y.op != "size" or below is None:
            return None
        least = declared(terms_of(self._facts.size(y.attr) - below)).low
        if least >= 0:
            return op in ("lt", "le", "ne")
        return op == "le" if least >= -1 and op in ("le", "gt") else None

    def _divided(self, node: Expr, x: Expr, y: Expr) -> Expr:
        """Simplify a quotient or remainder of `x` by a positive constant."""
        size, bounds = y.attr, self.bounds(x)
        if bounds.low >= 0 and bounds.high < size:
            return x if node.op == "rem" else e.index(0)
        if x.op != "add" or bounds.low < 0:
            return node
        for whole, rest in (x.args, x.args[::-1]):
            rest_bounds = self.bounds(rest)
            times = _multiple(whole, size)
            if times is not None and rest_bounds.low >= 0 and rest_bounds.high < size:
                return rest if node.op == "rem" else times
        return node


def _converted(low: float, high: float, limits: _Bounds) -> _Bounds:
    """Return the bounds of floats as integers: NaN becomes 0, and what is too large the
    nearest that there is."""
    ends = [int(min(max(x, limits.low), limits.high)) for x in (low, high)]
    return _Bounds(min(ends[0], 0), max(ends[1], 0))


def _moved_twice(node: Expr) -> Expr:
    """Return `x + m + n` as `x + k` if `k` is a constant."""
    inner, offset = node.args
    x, other = inner.args
    m, n = size_of_expr(other), size_of_expr(offset)
    if m is None or n is None:
        return node
    total = (m if inner.op == "add" else -m) + (n if node.op == "add" else -n)
    return e.add(x, e.const(total, dtypes.int64)) if isinstance(total, int) else node


def _is_quotient_of(x: Expr, y: Expr) -> bool:
    """Return whether `x + y` is `a / n * n + a % n`, which is `a`."""
    if x.op != "mul" or y.op != "rem" or x.args[0].op != "div":
        return False
    (quotient, n), (a, m) = x.args, y.args
    same = n.is_const and m.is_const and n.attr == m.attr
    b, k = quotient.args
    return same and b is a and k.is_const and k.attr == n.attr


def _multiple(x: Expr, size: int) -> Expr | None:
    """Return the factor `k` if `x` is `size * k`."""
    if x.op != "mul" or not x.args[1].is_const or x.args[1].attr % size:
        return None
    return e.mul(x.args[0], e.index(x.args[1].attr // size))


_DECIDED: Final = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))


def _decided(op: str, x: _Bounds, y: _Bounds) -> bool | None:
    """Return the result of a comparison if it is the same for all such values."""
    if op in ("gt", "ge"):
        x, y, op = y, x, {"gt": "lt", "ge": "le"}[op]
    always = x.high < y.low or (op == "le" and x.high == y.low)
    never = x.low > y.high or (op == "lt" and x.low == y.high)
    if op in ("eq", "ne"):
        return (op == "ne") if always or never else None
    return True if always else False if never else None


_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _bounds_of(node: Expr, args: Sequence[_Bounds]) -> _Bounds | None:
    """Return the bounds of a node whose operands are within bounds, or None."""
    match node.op:
        case "const" if node.dtype.is_integer:
            return _Bounds(node.attr, node.attr)
        case "cast" if args:
            return args[0]
        case "cast" if node.args[0].dtype is dtypes.bool_:
            return _Bounds(0, 1)
        case "add":
            [x, y] = args
            below = x.below + y.high if x.below is not None else None
            return _Bounds(x.low + y.low, x.high + y.high, below)
        case "sub":
            [x, y] = args
            below = x.below - y.low if x.below is not None else None
            return _Bounds(x.low - y.high, x.high - y.low, below)
        case "mul":
            ends = [a * b for a in args[0][:2] for b in args[1][:2]]
            return _Bounds(min(ends), max(ends))
        case "min":
            return _Bounds(min(a.low for a in args), min(a.high for a in args))
        case "max":
            return _Bounds(max(a.low for a in args), max(a.high for a in args))
        case "div" if _is_divided(node, args):
            n = node.args[1].attr
            return _Bounds(args[0].low // n, args[0].high // n)
        case "rem" if node.args[1].is_const and node.args[1].attr > 0:
            most = node.args[1].attr - 1
            return _Bounds(
                max(min(args[0].low, 0), -most), min(max(args[0].high, 0), most)
            )
        case "select" if _is_modulo(node):
            return _Bounds(0, node.args[1].args[1].attr - 1)
        case "select" if args:
            [x, y] = args
            return _Bounds(min(x.low, y.low), max(x.high, y.high))
        case "and" if highs := [a.high for a in args if a.low >= 0]:
            return _Bounds(0, min(highs))
        case "or" | "xor" if all(a.low >= 0 for a in args):
            return _Bounds(0, (1 << max(a.high for a in args).bit_length()) - 1)
        case "shl" | "ashr" | "lshr" if _is_shifted(node):
            low, high, k = args[0].low, args[0].high, node.args[1].attr
            if node.op == "shl":
                return _Bounds(low << k, high << k)
            if node.op == "ashr" or low >= 0:
                return _Bounds(low >> k, high >> k)
        case "popcount" | "clz":
            return _Bounds(0, node.dtype.bits)
    return None


def _is_shifted(node: Expr) -> bool:
    """Return whether a constant that the dtype has bits for shifts an integer."""
    k = node.args[1]
    return k.is_const and 0 <= k.attr < node.dtype.bits


def _is_modulo(node: Expr) -> bool:
    """Return whether `node` is the remainder by a positive constant that
    `expr.floor_mod` makes of one that may be negative."""
    test, wrapped, rest = node.args
    return (
        rest.op == "rem"
        and rest.args[1].is_const
        and rest.args[1].attr > 0
        and wrapped.op == "add"
        and wrapped.args[0] is rest
        and wrapped.args[1].is_const
        and wrapped.args[1].attr == rest.args[1].attr
        and test.op == "lt"
        and test.args[0] is rest
        and test.args[1].is_const
        and test.args[1].attr == 0
    )


def _is_divided(node: Expr, args: Sequence[_Bounds]) -> bool:
    """Return whether a nonnegative integer is divided by a positive constant."""
    y = node.args[1]
    return y.is_const and y.attr > 0 and args[0].low >= 0
