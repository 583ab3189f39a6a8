"""What only the same iteration reads again needs no memory.

    buffer b0: f64[8] in arena
    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        b0[i0] = x[i0] * 2.0       ->        let b0_0: f64 = x[i0] * 2.0
        out0[i0] = b0[i0] + 1.0              out0[i0] = b0_0 + 1.0

A buffer of the arena becomes values if each of its loads comes after a store to the
same index, in the list of statements of that store or deeper, with no other store to
the buffer in between. Such pairs come of loops that `merge` made one.

A buffer that has rows for the iterations of a loop, and that nothing else names, needs
one row, which each iteration writes before it reads it.

    buffer b0: f64[8, 9] in arena        buffer b0: f64[9] in arena
    for i0 in 0..8 independent:          for i0 in 0..8 independent:
        for i1 in 0..9:                      for i1 in 0..9:
            b0[i0, i1] = exp(x[i0, i1])          b0[i1] = exp(x[i0, i1])
        for i2 in 0..9:            ->        for i2 in 0..9:
            out0[i0, i2] = b0[i0, 8 - i2]        out0[i0, i2] = b0[8 - i2]
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from hopflow.compiler.schedule.summary import Summary
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
    """What a store has put at an index: a variable, if the buffer is contracted."""

    at: Index
    var: Var


_Known: TypeAlias = Mapping[Buffer, _Value]


def contract(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    candidates = _only_by_element(program)
    if not candidates:
        return
    finder = _Finder(program.body, candidates)
    finder.list(program.body, {})
    contracted = finder.candidates.intersection(finder.buffers)
    if contracted:
        _rewrite(program.body, {}, finder, target)
        program.arena = [b for b in program.arena if b not in contracted]
    _drop_rows(program, _only_by_element(program))


def _only_by_element(program: Program) -> set[Buffer]:
    """The buffers of the arena that are stored to and loaded from, and nothing else."""
    found = {b for b in program.arena if b.space == "arena" and b.shape}
    for s in statements(program.body):
        if not isinstance(s, Store):
            found.difference_update(named(s))
    return found


class _Finder:
    """Finds for each load the store whose value it reads.

    candidates   the buffers of which no load has been found that reads another value
    buffers      those that are stored to
    values       by a store the value that it puts
    """

    def __init__(self, body: list[Stmt], candidates: set[Buffer]) -> None:
        self.candidates = candidates
        self.buffers: dict[Buffer, int] = {}
        self.values: dict[Store, _Value] = {}
        self._mutable = {
            s.var for s in statements(body) if isinstance(s, Assign | Accumulate)
        }

    def list(self, body: list[Stmt], known: _Known) -> None:
        """Look at a list of statements, before which these values are known."""
        own = dict(known)
        for s in body:
            if isinstance(s, While):
                self._loop(s, own)
                continue
            self._read(s, own)
            if isinstance(s, Store):
                self._store(s, own)
            elif isinstance(s, For):
                self._loop(s, own)
            else:
                for inner in bodies(s):
                    self.list(inner, own)
                self._forget(s, own)

    def _loop(self, s: For | While, known: dict[Buffer, _Value]) -> None:
        """Look at a loop. A step may read what the one before has stored."""
        self._forget(s, known)
        if isinstance(s, While):
            self._read(s, known)
        for inner in bodies(s):
            self.list(inner, known)

    def _forget(self, s: Stmt, known: dict[Buffer, _Value]) -> None:
        """Forget the values that a statement with bodies may change."""
        for inner in bodies(s):
            for t in statements(inner):
                if isinstance(t, Store):
                    known.pop(t.buffer, None)

    def _read(self, s: Stmt, known: _Known) -> None:
        for buffer, at in _loads(s):
            value = known.get(buffer)
            if value is None or not same_shape(value.at, at):
                self.candidates.discard(buffer)

    def _store(self, s: Store, known: dict[Buffer, _Value]) -> None:
        buffer = s.buffer
        if buffer not in self.candidates:
            return
        if any(n.op == "load" or n.attr in self._mutable for n in _leaves(s.indices)):
            self.candidates.discard(buffer)
            return
        number = self.buffers[buffer] = self.buffers.get(buffer, -1) + 1
        value = _Value(s.indices, Var(f"{buffer.name}_{number}", buffer.dtype))
        known[buffer] = self.values[s] = value


def _loads(s: Stmt) -> Iterator[tuple[Buffer, Index]]:
    for node in nodes(*expressions(s)):
        if node.op == "load":
            yield node.attr, e.index_of(node)


def _leaves(index: Index) -> Iterator[Expr]:
    """The variables and loads of an index."""
    return (n for n in nodes(*index) if n.op in ("var", "load"))


def _rewrite(body: list[Stmt], known: _Known, finder: _Finder, target: Target) -> None:
    """Replace stores to contracted buffers, and loads from them, in place."""
    own = dict(known)

    def value(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in own:
            return None
        return e.read(own[node.attr].var)

    for k, s in enumerate(body):
        if own:
            replace(s, value)
        if isinstance(s, Store) and s.buffer in finder.candidates:
            own[s.buffer] = finder.values[s]
            body[k] = Let(own[s.buffer].var, s.value)
        for inner in bodies(s):
            stores = any(
                isinstance(x, Store) and x.buffer in finder.candidates for x in inner
            )
            _rewrite(inner, own, finder, target)
            if stores and isinstance(s, For) and s.binding.kind == "vector":
                # What it stored may have been wider than what it stores now.
                s.binding = vector_binding(s.extent, inner, target)


# --- rows -----------------------------------------------------------------------------


def _drop_rows(program: Program, candidates: set[Buffer]) -> None:
    """Leave one row of each buffer that has a row for each iteration of a loop."""
    uses = walk.uses(program.body) if candidates else {}
    pending = [s for s in program.body if isinstance(s, For)]
    while pending:
        loop = pending.pop()
        inner = [s for s in statements(loop.body) if isinstance(s, For)]
        if not inner:
            continue
        if loop.independent and loop.binding.kind != "vector":
            axes = Summary.of(loop).axes
            own = walk.uses(loop.body)
            for buffer in candidates.intersection(own):
                rows = axes.get(buffer)
                if rows and uses[buffer] == own[buffer] and _is_fresh(buffer, loop):
                    _drop_axis(buffer, min(rows)[0], loop)
        pending += [s for t in loop.body for s in _next(t)]


def _next(s: Stmt) -> list[For]:
    """The outermost loops in a statement."""
    if isinstance(s, For):
        return [s]
    return [t for inner in bodies(s) for x in inner for t in _next(x)]


def _is_fresh(buffer: Buffer, loop: For) -> bool:
    """Whether each iteration writes the same elements of a buffer, whatever is around
    the loop, before it reads any."""
    known, is_read = {loop.var}, False
    pending: list[tuple[Stmt, bool]] = [(s, True) for s in reversed(loop.body)]
    while pending:
        s, always = pending.pop()
        if isinstance(s, For):
            known.add(s.var)
        reads = [at for b, at in _loads(s) if b is buffer]
        is_read = is_read or bool(reads)
        writes = [s.indices] if isinstance(s, Store) and s.buffer is buffer else []
        if writes and (is_read or not always):
            return False
        if not all(_names_only(at, known) for at in (*reads, *writes)):
            return False
        always = always and isinstance(s, For)
        inside = [t for inner in bodies(s) for t in inner]
        pending += [(t, always) for t in reversed(inside)]
    return True


def _names_only(at: Index, variables: set[Var]) -> bool:
    return all(n.op == "var" and n.attr in variables for n in _leaves(at))


def _drop_axis(buffer: Buffer, axis: int, loop: For) -> None:
    def row(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr is not buffer:
            return None
        at = [rewrite(i, row) for i in without(e.index_of(node))]
        condition = e.condition_of(node)
        return e.load(buffer, at, condition and rewrite(condition, row))

    def without(index: Index) -> Index:
        return (*index[:axis], *index[axis + 1 :])

    for s in statements(loop.body):
        replace(s, row)
        if isinstance(s, Store) and s.buffer is buffer:
            s.indices = without(s.indices)
    buffer.shape = without(buffer.shape)
