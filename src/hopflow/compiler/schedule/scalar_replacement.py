"""Scalar replacement of what earlier iterations stored (Callahan, Carr and Kennedy,
"Improving register allocation for subscripted variables", PLDI 1990).

    for i0 in 0..n:                          var x_last1: f64 = x[0] if n > 0
        x[i0 + 1] = x[i0] * y[i0]    ->      for i0 in 0..n:
                                                 let x_new: f64 = x_last1 * y[i0]
                                                 x[i0 + 1] = x_new
                                                 x_last1 = x_new

A load of what was stored just before waits for the store, four or five cycles on the
CPUs of today; in a recurrence, each iteration would wait so long for the one before.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from hopflow.compiler.schedule.copies import substituted
from hopflow.compiler.target import Target
from hopflow.dtypes import int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    For,
    Let,
    Program,
    Stmt,
    Store,
    Trap,
)
from hopflow.loop_ir.walk import (
    Interned,
    bodies,
    loaded,
    nodes,
    replace,
)

Terms: TypeAlias = Counter[Expr | Var | None]
"""The coefficients of the terms of a sum: of a loop's variable, of what is the same in
all iterations, and, by None, the constant."""
FARTHEST: Final = 3
"""Iterations for which a value is kept, at most: each takes a register."""
_STRAIGHT: Final = (Let, Declare, Assign, Accumulate, Store, Trap)
"""The statements of a straight-line body."""


def scalar_replacement(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    _edit(program.body)


def _edit(body: list[Stmt]) -> None:
    edited: list[Stmt] = []
    for s in body:
        if isinstance(s, For) and s.binding.kind in ("gang", "vector"):
            edited.append(s)
            continue
        if isinstance(s, For) and not s.independent:
            edited += _kept(s)
        for inner in bodies(s):
            _edit(inner)
        edited.append(s)
    body[:] = edited


class _Recurrence(NamedTuple):
    """A store, and the loads of what it stored in earlier iterations.

    at      the index of the store, without variables of the body
    loads   by the number of iterations since the store
    """

    store: Store
    at: Index
    loads: Mapping[int, Sequence[Expr]]


def _kept(loop: For) -> list[Stmt]:
    """Replace the loads of what earlier iterations stored, in place. Return what stands
    before the loop."""
    if not all(isinstance(s, _STRAIGHT) for s in loop.body):
        return []
    may_stop = any(isinstance(s, Trap) for s in loop.body)
    before: list[Stmt] = []
    for store, at, loads in _recurrences(loop):
        buffer, name = store.buffer, f"{loop.var.name}_{store.buffer.name}"
        last = [Var(f"{name}_last{k}", buffer.dtype) for k in range(1, max(loads) + 1)]
        for k, var in enumerate(last, 1):
            place = [substituted(i, {loop.var: e.index(-k)}) for i in at]
            # The iteration in which this element is loaded first.
            first = min(distance for distance in loads if distance >= k) - k
            runs = e.compare("gt", loop.extent, e.index(first))
            if may_stop:  # before it loads an element that there is not
                runs = e.binary("and", runs, _is_in_range(place, buffer))
            before.append(Declare(var, e.load(buffer, place, runs)))
        values = {x: e.read(last[k - 1]) for k in loads for x in loads[k]}
        for s in loop.body:
            replace(s, values.get)
        new = Var(f"{name}_new", buffer.dtype)
        loop.body.insert(loop.body.index(store), Let(new, store.value))
        store.value = e.read(new)
        moved = [*zip(last, [new, *last], strict=False)]
        loop.body += [Assign(var, e.read(value)) for var, value in reversed(moved)]
    return before


def _is_in_range(at: Sequence[Expr], buffer: Buffer) -> Expr:
    tests = [
        e.compare(op, i, limit)
        for i, extent in zip(at, buffer.shape, strict=True)
        for op, limit in (("ge", e.index(0)), ("lt", extent))
    ]
    return e.all_of(tests)


def _recurrences(loop: For) -> list[_Recurrence]:
    """Return the stores of a straight-line body whose elements later iterations load
    before they store."""
    stores = Counter(s.buffer for s in loop.body if isinstance(s, Store))
    loads = defaultdict[Buffer, list[Expr]](list)
    positions = _Positions(loop)
    found: list[_Recurrence] = []
    for s in loop.body:
        for node in loaded(s):
            loads[node.attr].append(node)
        if isinstance(s, Store) and stores[s.buffer] == 1:
            near = defaultdict[int, list[Expr]](list)
            for node in loads[s.buffer]:
                if distance := positions.distance(node, s):
                    near[distance].append(node)
            if near:
                found.append(_Recurrence(s, positions.index(s.indices), near))
    return found


class _Positions:
    """The positions of elements that a straight-line body accesses, as sums of its
    loop's variable and of what is the same in all iterations."""

    def __init__(self, loop: For) -> None:
        self._var = loop.var
        self._varies = {loop.var}
        self._values: dict[Var, Expr] = {}
        for s in loop.body:
            if isinstance(s, Let) and not any(n.op == "load" for n in nodes(s.value)):
                self._values[s.var] = substituted(s.value, self._values)
            elif isinstance(s, Let | Declare | Assign | Accumulate):
                self._varies.add(s.var)
        self._interned = Interned()
        self._sums: dict[Expr, Terms | None] = {}

    def index(self, at: Index) -> Index:
        """Return an index without variables of the body."""
        return tuple([substituted(i, self._values) for i in at])

    def distance(self, load: Expr, store: Store) -> int | None:
        """Return how many iterations before a load its element was stored; None: it is
        not the same number in all iterations, or a large one."""
        if e.condition_of(load) is not None:
            return None
        moved: list[tuple[Terms, Terms, int]] = []
        for x, y in zip(e.index_of(load), store.indices, strict=True):
            loads, stores = self._terms(x), self._terms(y)
            if loads is None or stores is None:
                return None
            moved.append((loads, stores, loads[self._var]))
        for distance in range(1, FARTHEST + 1):
            if all(
                _added(x, Terms({None: distance}), step) == y for x, y, step in moved
            ):
                return distance
        return None

    def _terms(self, position: Expr) -> Terms | None:
        """Return the terms of a position; None: it is no such sum."""
        position = self._interned.of(substituted(position, self._values))
        if position not in self._sums:
            sums: dict[Expr, Terms | None] = {}
            varies: set[Expr] = set()
            for node in nodes(position):
                if not varies.isdisjoint(node.args) or self._is_varying(node):
                    varies.add(node)
                sums[node] = self._sum(
                    node, [sums[x] for x in node.args], varies=node in varies
                )
            self._sums[position] = sums[position]
        return self._sums[position]

    def _is_varying(self, node: Expr) -> bool:
        """Return whether a node itself is not the same in all iterations, or only where
        a check in the body has passed, as an element at an index that is not known."""
        return node.op == "load" or (node.op == "var" and node.attr in self._varies)

    def _sum(
        self, node: Expr, parts: Sequence[Terms | None], *, varies: bool
    ) -> Terms | None:
        if node.op == "var" and node.attr is self._var:
            return Terms({self._var: 1})
        if node.is_const and node.dtype is int64:
            return Terms({None: node.attr})
        x, y = (*parts, None, None)[:2]
        if x is not None and y is not None and node.op in ("add", "sub"):
            return _added(x, y, 1 if node.op == "add" else -1)
        if x is not None and node.op == "mul" and node.args[1].is_const:
            return _added(Terms(), x, node.args[1].attr)
        return None if varies else Terms({node: 1})


def _added(x: Terms, y: Terms, factor: int) -> Terms:
    total = Terms(x)
    for term, n in y.items():
        total[term] += factor * n
    return total
