"""Index arithmetic in a canonical form, and tests that ranges decide.

    v0 = x[i0 / 4 * 4 + i0 % 4] for i0 < 8          v0 = x[i0] for i0 < 8
    v1 = select(i0 < 0, y[i0 + 8], y[i0])     ->    v1 = y[i0]

An axis, or the counter of a loop, is at least 0 and less than its extent. From that
follow bounds of what is computed of it, and of scalars that are read. Only integers of
64 bits and tests of them are changed, and only where no bit of a result depends on it.
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
    Scatter,
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
    map_expressions,
)
from hopflow.compiler.kernel_program.sizes import size_of_expr
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.atoms import declared
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.scalars import as_size, terms_of
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute
from hopflow.symbolic.terms import Atom


class _Bounds(NamedTuple):
    """The least and the greatest value of an integer; and, if there is one, a size that
    it is less than."""

    low: int
    high: int
    below: Size | None = None


_ANY: Final = _Bounds(int(INT64.low), int(INT64.high))
_STEPS: Final = 1 << 56
"""No loop makes as many steps."""


def simplify(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    known = _Known()
    unread: set[Value] = set()  # which told whether checks pass that are gone
    for equation in equations(program.block):
        own = equation.definition
        if isinstance(own, Loop):
            known.loops[own.counter] = known.index(own.length)
        if isinstance(own, Effect):
            equation.definition, gone = _without_proven(own, known)
            unread.update(gone)
        elif not isinstance(own, Region):
            equation.definition = _simplified(equation, own, known)
    if unread:
        for block in all_blocks(program.block):
            block.equations = [
                q for q in block.equations if unread.isdisjoint(q.results)
            ]


@dataclass(slots=True)
class _Known:
    """What is known of the values of a program, up to an equation.

    loops    the counters of loops
    scalars  values without axes
    sizes    what symbols are, over symbols that were known before
    """

    loops: dict[Var, _Bounds] = field(default_factory=dict)
    scalars: dict[Value, _Bounds] = field(default_factory=dict)
    sizes: dict[Symbol, Size] = field(default_factory=dict)

    def size(self, size: Size) -> Size:
        """A size, with what is known of its symbols."""
        if isinstance(size, int) or not self.sizes:
            return size
        try:
            return substitute(size, self.sizes)
        except ZeroDivisionError:  # where the program comes to it, it stops
            return size

    def index(self, size: Size) -> _Bounds:
        """The bounds of an index below a size."""
        size = self.size(size)
        if isinstance(size, int):
            return _Bounds(0, size - 1)
        most = min(declared(terms_of(size)).high - 1, _STEPS)
        return _Bounds(0, int(most), _if_positive(size))

    def learn(
        self, equation: Equation, made: Sequence[Expr], simplifier: "_Simplifier"
    ) -> None:
        """Note what the integers are that an equation gives."""
        for value, x in zip(equation.results, made, strict=False):
            if x.dtype.is_integer and simplifier.bounds(x) != _limits(x.dtype):
                self.scalars[value] = simplifier.bounds(x)
        if equation.symbol is not None and made[0].op in ("const", "size"):
            size = self.size(made[0].attr)
            if equation.symbol not in free_symbols(size):
                self.sizes[equation.symbol] = size


def _if_positive(size: Size) -> Size:
    """What a size is, where it is more than 0."""
    match terms_of(size):
        case (((Atom(op="max", args=(x, y)),), 1),) if () in (x, y):
            other = x or y
            return as_size(other) if isinstance(other, tuple) else size
    return size


@cache
def _limits(dtype: DType) -> _Bounds:
    """The least and the greatest value of a dtype of integers."""
    if not dtype.is_integer:
        return _Bounds(0, 1) if dtype is dtypes.bool_ else _ANY
    limits = dtypes.iinfo(dtype)
    return _Bounds(limits.min, limits.max)


def _without_proven(own: Effect, known: _Known) -> tuple[Effect, list[Value]]:
    """The checks that may fail; and what told of the others whether they pass."""
    left: list[Check] = []
    gone: list[Value] = []
    for given in own.checks:
        check = _simplified_check(given, known)
        if not (check.holds.is_const and check.holds.attr):
            left.append(check)
        elif check.passed is not None and check.passed.op == "element":
            gone.append(check.passed.attr)
    return replace(own, checks=tuple(left)), gone


def _simplified(equation: Equation, own: Definition, known: _Known) -> Definition:
    shape: tuple[Size, ...] = equation.results[0].shape if equation.results else ()
    is_scalar = isinstance(own, Pointwise) and not shape
    if isinstance(own, Scatter):
        shape = own.space
    if isinstance(own, Reduction):
        shape = (*shape, *own.space)
    roots = all_expressions(own)
    order = nodes(*roots)
    learns = is_scalar and any(v.dtype.is_integer for v in equation.results)
    if not learns and not any(map(_has_bounds, order)):
        return own
    simplifier = _Simplifier(shape, known)
    made = simplifier.of(roots, order)
    if learns:
        known.learn(equation, made, simplifier)
    found = iter(made)
    return map_expressions(own, lambda _: next(found))


def _has_bounds(node: Expr) -> bool:
    """Whether a node computes with an integer of 64 bits."""
    return (
        bool(node.args)
        and node.op not in ("element", "load")
        and node.args[-1].dtype is dtypes.int64
    )


def _simplified_check(check: Check, known: _Known) -> Check:
    roots = [check.holds, *check.values]
    holds, *values = _Simplifier(check.shape, known).of(roots, nodes(*roots))
    return replace(check, holds=holds, values=tuple(values))


class _Simplifier:
    """Expressions over the axes of one shape, with the bounds of each node."""

    def __init__(self, shape: Sequence[Size], known: _Known) -> None:
        pairs = zip(axes(len(shape)), shape, strict=True)
        self._axes = {axis.attr: n for axis, n in pairs}
        self._known = known
        self._bounds: dict[Expr, _Bounds] = {}

    def of(self, roots: Sequence[Expr], order: Sequence[Expr]) -> list[Expr]:
        """These expressions, simplified; `order` are their nodes."""
        values: dict[Expr, Expr] = {}
        for node in order:
            args = tuple([values[a] for a in node.args])
            values[node] = self._node(e.with_args(node, args))
        return [values[root] for root in roots]

    def bounds(self, node: Expr) -> _Bounds:
        """The bounds of an integer, whose operands were simplified before it."""
        found = self._bounds.get(node)
        if found is None:
            found, most = self._of(node), _limits(node.dtype)
            if found.low < most.low or found.high > most.high:
                found = most  # it may wrap around
            self._bounds[node] = found
        return found

    def _of(self, node: Expr) -> _Bounds:
        """The bounds of a node if it does not wrap around."""
        known, limits = self._known, _limits(node.dtype)
        if node.op == "var":
            size = self._axes.get(node.attr)
            return (
                known.loops.get(node.attr, limits)
                if size is None
                else known.index(size)
            )
        if node.op == "element":
            return limits if node.args else known.scalars.get(node.attr, limits)
        if node.op == "size":
            found = declared(terms_of(known.size(node.attr))) & INT64
            return _Bounds(int(found.low), int(found.high))
        args = [a for a in node.args if a.dtype.is_integer]
        return _bounds_of(node, [self.bounds(a) for a in args]) or limits

    def _node(self, node: Expr) -> Expr:
        if node.args and node.args[-1].dtype is dtypes.int64:
            node = self._rewritten(node)
        if node.dtype.is_integer:
            self.bounds(node)  # here, so that none is computed by deep recursion
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
        if node.op == "add" and _is_quotient_of(x, y):
            return y.args[0]
        if node.op in ("add", "sub") and x.op in ("add", "sub"):
            return _moved_twice(node)
        if node.op in ("div", "rem") and y.is_const and y.attr > 0:
            return self._divided(node, x, y)
        return node

    def _decided_by_size(self, op: str, x: Expr, y: Expr) -> bool | None:
        """What a comparison with a size gives, if it is always that."""
        if x.op == "size":
            x, y, op = y, x, _MIRRORED.get(op, op)
        below = self.bounds(x).below
        if y.op != "size" or below is None:
            return None
        least = declared(terms_of(self._known.size(y.attr) - below)).low
        if least >= 0:
            return op in ("lt", "le", "ne")
        return op == "le" if least >= -1 and op in ("le", "gt") else None

    def _divided(self, node: Expr, x: Expr, y: Expr) -> Expr:
        """`x` divided by a positive number, or what is left of it."""
        size, bounds = y.attr, self.bounds(x)
        if bounds.low >= 0 and bounds.high < size:
            return x if node.op == "rem" else e.index(0)
        if x.op != "add" or bounds.low < 0:
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
    m, n = size_of_expr(other), size_of_expr(own)
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


_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _bounds_of(node: Expr, args: Sequence[_Bounds]) -> _Bounds | None:
    """The bounds of a node of operands within bounds; None if nothing is known."""
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
        case "rem" if _is_divided(node, args):
            return _Bounds(0, min(args[0].high, node.args[1].attr - 1))
        case "select" if args:
            [x, y] = args
            return _Bounds(min(x.low, y.low), max(x.high, y.high))
    return None


def _is_divided(node: Expr, args: Sequence[_Bounds]) -> bool:
    """Whether what is at least 0 is divided by a positive number."""
    y = node.args[1]
    return y.is_const and y.attr > 0 and args[0].low >= 0
