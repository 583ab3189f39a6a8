"""Array contraction: elements that only the same iteration reads become variables.

    buffer b0: f64[8] in arena
    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        b0[i0] = x[i0] * 2.0       ->        let b0_0: f64 = x[i0] * 2.0
        out0[i0] = b0[i0] + 1.0              out0[i0] = b0_0 + 1.0

A buffer of the arena becomes variables if each of its loads comes after a store to the
same index, in the list of statements of that store or deeper, with no other store in
between that may write the same element. Such pairs result from loops that `merge` has
merged. Stores to different rows, as of the pieces of a `stack`, have variables of their
own: after `b0[0, i] = ...; b0[1, i] = ...` both elements are known.

A buffer that has a row for each iteration of a loop, and that is not used elsewhere, is
reduced to one row if each iteration writes the row before it reads it.

    buffer b0: f64[8, 9] in arena        buffer b0: f64[9] in arena
    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        for i1 in 0..9:                      for i1 in 0..9:
            b0[i0, i1] = exp(x[i0, i1])          b0[i1] = exp(x[i0, i1])
        for i2 in 0..9:            ->        for i2 in 0..9:
            out0[i0, i2] = b0[i0, 8 - i2]        out0[i0, i2] = b0[8 - i2]
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from hopflow.compiler.schedule.summary import Summaries
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var, rewrite
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    For,
    Let,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.walk import (
    bodies,
    expressions,
    named,
    nodes,
    replace,
    same_shape,
    statements,
)


class _Value(NamedTuple):
    """A stored value: its index, and its variable if the buffer is contracted."""

    at: Index
    var: Var


_Rows: TypeAlias = tuple[int | None, ...]
"""The constants in an index; None: another expression."""
_Axes: TypeAlias = dict[Buffer, set[int]]


class _Values:
    """The stored values that are known at a statement, by buffer and row."""

    def __init__(self, outer: "_Values | None" = None) -> None:
        self._known: dict[Buffer, dict[_Rows, _Value]] = {}
        if outer is not None:
            self._known = {b: dict(rows) for b, rows in outer._known.items()}

    def __bool__(self) -> bool:
        return bool(self._known)

    def at(self, buffer: Buffer, index: Index) -> _Value | None:
        """Return the value of an element; None: it is not known."""
        rows = self._known.get(buffer)
        value = rows and rows.get(_rows(index))
        return value if value and same_shape(value.at, index) else None

    def put(self, buffer: Buffer, value: _Value) -> None:
        """Replace the values of all elements that may be that of `value`: those of
        other rows are not, if the same axes have constants."""
        row = _rows(value.at)
        rows = self._known.setdefault(buffer, {})
        if rows and _axes_of(next(iter(rows))) != _axes_of(row):
            rows.clear()
        rows[row] = value

    def drop(self, buffer: Buffer) -> None:
        """Forget the values of a buffer."""
        self._known.pop(buffer, None)


def _rows(index: Index) -> _Rows:
    return tuple([i.attr if i.is_const else None for i in index])


def _axes_of(row: _Rows) -> tuple[bool, ...]:
    """Return which axes have a constant."""
    return tuple([i is not None for i in row])


def contract(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    summaries = Summaries()
    homes = _homes(program, _only_by_element(program), summaries)
    if not homes:
        return
    finder = _Finder(program.body, set(homes))
    wanted = {s for stmts in homes.values() for s in stmts}
    finder.list([s for s in program.body if s in wanted], _Values())
    contracted = finder.candidates.intersection(finder.buffers)
    if contracted:
        _rewrite(program.body, _Values(), finder, target)
        program.arena = [b for b in program.arena if b not in contracted]
        summaries = Summaries()
    loops: dict[For, set[Buffer]] = {}
    for buffer, [home, *others] in homes.items():
        if isinstance(home, For) and not others and buffer not in contracted:
            loops.setdefault(home, set()).add(buffer)
    for loop, buffers in loops.items():
        _drop_rows(loop, buffers, summaries)


def _only_by_element(program: Program) -> set[Buffer]:
    """Return the buffers of the arena that are only stored to and loaded from."""
    buffers = {b for b in program.arena if b.space == "arena" and b.shape}
    for s in statements(program.body) if buffers else ():
        if not isinstance(s, Store):
            buffers.difference_update(named(s))
    return buffers


def _homes(
    program: Program, buffers: set[Buffer], summaries: Summaries
) -> dict[Buffer, list[Stmt]]:
    """Return the statements of a program that name each buffer.

    A buffer of several statements is left out, unless one is a store: a load elsewhere
    does not follow a store in its list.
    """
    homes: dict[Buffer, list[Stmt]] = {}
    stored: set[Buffer] = set()
    for s in program.body if buffers else ():
        if isinstance(s, For):
            own = {*summaries.of(s).uses, *walk.buffers(s)}
        else:
            own = set(walk.uses([s]))
        for buffer in buffers.intersection(own):
            homes.setdefault(buffer, []).append(s)
        if isinstance(s, Store):
            stored.add(s.buffer)
    return {b: all_ for b, all_ in homes.items() if len(all_) == 1 or b in stored}


class _Finder:
    """Finds for each load the store whose value it reads.

    candidates   the buffers whose loads so far all read a known value
    buffers      the buffers that are stored to, with the number of their last value
    values       by store, the value that it writes
    """

    def __init__(self, body: list[Stmt], candidates: set[Buffer]) -> None:
        self.candidates = candidates
        self.buffers: dict[Buffer, int] = {}
        self.values: dict[Store, _Value] = {}
        self._mutable = {
            s.var for s in statements(body) if isinstance(s, Assign | Accumulate)
        }

    def list(self, body: list[Stmt], outer: _Values) -> None:
        """Visit a list of statements; `outer` are the values known before it."""
        values = _Values(outer)
        for s in body:
            if isinstance(s, While):
                self._loop(s, values)
                continue
            self._read(s, values)
            if isinstance(s, Store):
                self._store(s, values)
            elif isinstance(s, For):
                self._loop(s, values)
            else:
                for inner in bodies(s):
                    self.list(inner, values)
                self._forget(s, values)

    def _loop(self, s: For | While, values: _Values) -> None:
        """Visit a loop. A step may read values that an earlier step has stored."""
        self._forget(s, values)
        if isinstance(s, While):
            self._read(s, values)
        for inner in bodies(s):
            self.list(inner, values)

    def _forget(self, s: Stmt, values: _Values) -> None:
        """Drop the values that a statement with bodies may change."""
        for inner in bodies(s) if values else ():
            for t in statements(inner):
                if isinstance(t, Store):
                    values.drop(t.buffer)

    def _read(self, s: Stmt, values: _Values) -> None:
        for buffer, at in _loads(s):
            if values.at(buffer, at) is None:
                self.candidates.discard(buffer)

    def _store(self, s: Store, values: _Values) -> None:
        buffer = s.buffer
        if buffer not in self.candidates:
            return
        if any(n.op == "load" or n.attr in self._mutable for n in _leaves(s.indices)):
            self.candidates.discard(buffer)
            return
        number = self.buffers[buffer] = self.buffers.get(buffer, -1) + 1
        value = _Value(s.indices, Var(f"{buffer.name}_{number}", buffer.dtype))
        self.values[s] = value
        values.put(buffer, value)


def _loads(s: Stmt) -> Iterator[tuple[Buffer, Index]]:
    for node in nodes(*expressions(s)):
        if node.op == "load":
            yield node.attr, e.index_of(node)


def _leaves(index: Index) -> Iterator[Expr]:
    """Return the variables and loads of an index."""
    return (n for n in nodes(*index) if n.op in ("var", "load"))


def _rewrite(body: list[Stmt], outer: _Values, finder: _Finder, target: Target) -> None:
    """Replace stores to contracted buffers, and loads from them, in place."""
    values = _Values(outer)

    def value(node: Expr) -> Expr | None:
        found = values.at(node.attr, e.index_of(node)) if node.op == "load" else None
        if found is None:
            return None
        known, condition = e.read(found.var), e.condition_of(node)
        if condition is None:
            return known
        return e.select(rewrite(condition, value), known, e.const(0, known.dtype))

    for k, s in enumerate(body):
        if values:
            replace(s, value)
        if isinstance(s, Store) and s.buffer in finder.candidates:
            value_of_store = finder.values[s]
            values.put(s.buffer, value_of_store)
            body[k] = Let(value_of_store.var, s.value)
        for inner in bodies(s):
            stores = any(
                isinstance(x, Store) and x.buffer in finder.candidates for x in inner
            )
            _rewrite(inner, values, finder, target)
            if stores and isinstance(s, For) and s.binding.kind == "vector":
                # The stores that remain may be narrower, so more lanes fit.
                s.binding = vector_binding(s.extent, inner, target)


# --- rows -----------------------------------------------------------------------------


def _drop_rows(outermost: For, buffers: set[Buffer], summaries: Summaries) -> None:
    """Reduce each buffer that has a row for each iteration of a loop to one row.

    Args:
        outermost: A loop that is the only statement which names the buffers.
    """
    uses = summaries.of(outermost).uses + Counter(walk.buffers(outermost))
    pending = [(outermost, buffers)]
    dropped: _Axes = {b: set() for b in buffers}
    while pending:
        loop, candidates = pending.pop()
        inner = [t for s in loop.body for t in _next(s)]
        if not inner:
            continue
        summary = summaries.of(loop)
        private = {b for b in candidates if summary.uses[b] == uses[b]}
        if not private:
            continue  # nothing is private to the loops in it, either
        if loop.independent and loop.binding.kind != "vector":
            rows = {
                b: min(row[0] for row in axes)
                for b in private
                if (axes := summary.axes.get(b))
            }
            for buffer in _fresh(rows, loop, dropped) if rows else ():
                dropped[buffer].add(rows[buffer])
        pending += [(t, private) for t in inner]
    _drop_axes({b: axes for b, axes in dropped.items() if axes}, outermost)


def _next(s: Stmt) -> list[For]:
    """Return the outermost loops in a statement."""
    if isinstance(s, For):
        return [s]
    return [t for inner in bodies(s) for x in inner for t in _next(x)]


def _fresh(buffers: Iterable[Buffer], loop: For, dropped: _Axes) -> set[Buffer]:
    """Return the buffers of which each iteration writes the same elements, whatever
    encloses the loop, before it reads any; `dropped` are the axes that will go."""
    fresh, loaded, variables = set(buffers), set[Buffer](), {loop.var}
    pending: list[tuple[Stmt, bool]] = [(s, True) for s in reversed(loop.body)]
    while pending and fresh:
        s, always = pending.pop()
        if isinstance(s, For):
            variables.add(s.var)
        for buffer, at in _loads(s):
            loaded.add(buffer)
            if buffer in fresh and not _names_only(
                _without(dropped[buffer], at), variables
            ):
                fresh.discard(buffer)
        if isinstance(s, Store) and s.buffer in fresh:
            is_late = s.buffer in loaded or not always
            at = _without(dropped[s.buffer], s.indices)
            if is_late or not _names_only(at, variables):
                fresh.discard(s.buffer)
        always = always and isinstance(s, For)
        inside = [t for inner in bodies(s) for t in inner]
        pending += [(t, always) for t in reversed(inside)]
    return fresh


def _names_only(at: Index, variables: set[Var]) -> bool:
    for i in at:
        if i.op == "var":  # nearly always
            if i.attr not in variables:
                return False
        elif not all(n.op == "var" and n.attr in variables for n in _leaves((i,))):
            return False
    return True


def _drop_axes(axes: _Axes, loop: For) -> None:
    """Drop axes of each buffer, and the indices along them."""

    def row(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in axes:
            return None
        at = [rewrite(i, row) for i in _without(axes[node.attr], e.index_of(node))]
        condition = e.condition_of(node)
        return e.load(node.attr, at, condition and rewrite(condition, row))

    for s in statements(loop.body) if axes else ():
        replace(s, row)
        if isinstance(s, Store) and s.buffer in axes:
            s.indices = _without(axes[s.buffer], s.indices)
    for buffer, dropped in axes.items():
        buffer.shape = _without(dropped, buffer.shape)


def _without(axes: set[int], index: Index) -> Index:
    if not axes:
        return index
    return tuple(i for axis, i in enumerate(index) if axis not in axes)
