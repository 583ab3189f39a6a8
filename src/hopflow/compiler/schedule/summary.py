"""Summaries of what loops read and write, from one walk over the statements.

Passes over loops ask whether two loops may be merged, or may be interchanged. The
summary of a merged loop is the union of those of its parts, so that no statement is
walked twice.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    Invoke,
    Let,
    Ref,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.walk import (
    attribute,
    base_and_constant,
    bodies,
    expressions,
    merged_axes,
    named,
    nodes,
    statements,
)

LONGEST: Final = 16
"""Nodes of an expression that is compared as a shift of an index, at most."""
_ORDERED = (Allocate, Barrier, Call, Copy, HostCall, Invoke, Swap, Tick, Trap)
_SHARED = (Allocate, Barrier, HostCall, Invoke)
"""Statements that access memory which iterations share."""


_Shift: TypeAlias = tuple[Hashable, frozenset[Var | Buffer]]
"""The structure of an expression, and what its value depends on."""
NO_SHIFT: _Shift = 0, frozenset()
_Row: TypeAlias = tuple[int, int, int, _Shift]
"""The first and the last of the axes that the index of a loop indexes, and the constant
and the shift added to it. There are several axes if it counts the elements of all."""
_At: TypeAlias = tuple[Buffer, list[tuple[Var, _Row]]]
"""An access: the buffer, and the loop variables that index its axes."""


@dataclass(slots=True)
class Summary:
    """What the iterations of a loop read and write.

    var         the variable of the loop
    size        about how many instructions one iteration takes
    read        the variables that expressions read, those of the loop among them
    assigned    the variables that are assigned
    declared    the variables that an iteration declares
    varying     the variables that an iteration sets, and those of loops in it
    stored      the buffers that are written, by element or as a whole
    uses        how often statements name each buffer
    at          the accesses, except those of functions and Python
    is_ordered  whether a statement must not be reordered with others
    """

    var: Var
    size: int = 0
    read: set[Var] = field(default_factory=set)
    assigned: set[Var] = field(default_factory=set)
    declared: set[Var] = field(default_factory=set)
    varying: set[Var] = field(default_factory=set)
    stored: set[Buffer] = field(default_factory=set)
    uses: Counter[Buffer] = field(default_factory=Counter)
    at: list[_At] = field(default_factory=list)
    is_ordered: bool = False
    _axes: dict[Buffer, set[_Row]] = field(default_factory=dict)

    @classmethod
    def of(cls, loop: For) -> "Summary":
        return Summaries().of(loop)

    @property
    def changed(self) -> set[Var]:
        """The variables from outside that the loop changes (or may: its own count)."""
        return self.assigned - self.declared

    @property
    def axes(self) -> dict[Buffer, set[_Row]]:
        """For each buffer, except the arguments of functions and Python, the axes that
        the loop's own index always indexes: `(1, 1, 1, s)` if iteration i accesses only
        `[..., i + 1 + s]`, for an `s` that is the same in all of them."""
        if not self._axes:
            for buffer, at in self.at:
                axes = {row for var, row in at if var is self.var and self._stays(row)}
                self._axes[buffer] = self._axes.get(buffer, axes) & axes
        return self._axes

    def _stays(self, row: _Row) -> bool:
        """Return whether the shift of a row is the same in all iterations."""
        *_, (_, sources) = row
        if self.is_ordered and any(isinstance(x, Buffer) for x in sources):
            return False  # functions and Python may write them
        return self.var not in sources and all(
            sources.isdisjoint(changing) for changing in (self.varying, self.stored)
        )

    def join(self, other: "Summary") -> None:
        """Add the summary of another loop, whose body follows this one's."""
        joined = self.axes
        for buffer, axes in other.axes.items():
            joined[buffer] = joined.get(buffer, axes) & axes
        self.add(other)

    def add(self, other: "Summary") -> None:
        """Add the summary of a statement or a loop inside this loop."""
        self.size += other.size
        self.read |= other.read
        self.assigned |= other.assigned
        self.declared |= other.declared
        self.varying |= other.varying
        self.stored |= other.stored
        self.uses.update(other.uses)
        self.at += other.at
        self.is_ordered = self.is_ordered or other.is_ordered


class Summaries:
    """A memo table of summaries, so that each statement is walked only once."""

    def __init__(self) -> None:
        self._loops: dict[For, Summary] = {}

    def set(self, loop: For, summary: Summary) -> None:
        self._loops[loop] = summary

    def of(self, loop: For) -> Summary:
        if loop not in self._loops:
            summary = self._loops[loop] = Summary(loop.var)
            pending = loop.body[::-1]
            while pending:
                statement = pending.pop()
                _add(summary, statement)
                if isinstance(statement, For):
                    summary.add(self.of(statement))
                else:
                    pending += reversed([*chain(*bodies(statement))])
        return self._loops[loop]


def _add(summary: Summary, statement: Stmt) -> None:
    """Add what a statement itself reads and writes, without the statements in it."""
    size = 1
    for node in nodes(*expressions(statement)):
        op = node.op
        if op == "var":
            summary.read.add(node.attr)
            continue
        size += weight(node)
        if op == "load":
            summary.at.append((node.attr, _rows(node.attr, e.index_of(node))))
            summary.uses[node.attr] += 1
    summary.size += size
    for buffer in named(statement):
        summary.uses[buffer] += 1
    summary.is_ordered = summary.is_ordered or isinstance(statement, _ORDERED)
    for buffer, at, is_written in _accesses(statement):
        summary.at.append((buffer, _rows(buffer, at)))
        if is_written:
            summary.stored.add(buffer)
    if isinstance(statement, Declare):
        summary.declared.add(statement.var)
    elif isinstance(statement, Accumulate | Assign):
        summary.assigned.add(statement.var)
    if isinstance(statement, Accumulate | Assign | Declare | For | Let):
        summary.varying.add(statement.var)


def _rows(buffer: Buffer, at: Index) -> list[tuple[Var, _Row]]:
    rows = [row for axis, i in enumerate(at) for row in _rows_of(i, axis, axis)]
    if any(i.op == "rem" for i in at):
        merged = merged_axes(at, buffer.shape)
        shared = [m for m in merged if m.first < m.last]
        rows += [row for m in shared for row in _rows_of(m.position, m.first, m.last)]
    return rows


def _rows_of(position: Expr, first: int, last: int) -> list[tuple[Var, _Row]]:
    """Return the row by each variable that a position may be the number of."""
    base, constant = base_and_constant(position)
    if base.op == "var":
        return [(base.attr, (first, last, constant, NO_SHIFT))]
    if base.op != "add":
        return []
    rows = list[tuple[Var, _Row]]()
    for number, other in (base.args, base.args[::-1]):
        shift = _shift(other) if number.op == "var" else None
        if shift is not None:
            rows.append((number.attr, (first, last, constant, shift)))
    return rows


def _shift(x: Expr) -> _Shift | None:
    """Return an expression as a shift; None: it is too long to be compared."""
    order = nodes(x)
    if len(order) > LONGEST:
        return None
    keys: dict[Expr, Hashable] = {}
    for node in order:
        inside = tuple([keys[a] for a in node.args])
        keys[node] = node.op, node.dtype, attribute(node), inside
    return keys[x], frozenset([n.attr for n in order if n.op in ("var", "load")])


def _accesses(statement: Stmt) -> Iterator[tuple[Buffer, Index, bool]]:
    """Yield the accesses of a statement other than the loads in its expressions: the
    buffer, the index as far as it is known, and whether it is written."""
    match statement:
        case Store():
            yield statement.buffer, statement.indices, True
        case Copy(target, source):
            yield target, (), True
            yield source, (), False
        case Swap(a, b):
            yield a, (), True
            yield b, (), True
        case Call(routine, args):
            writes = ROUTINES[routine].writes
            for k, ref in enumerate(args):
                if isinstance(ref, Ref):
                    single = ref.at if ref.rows is None else ref.at[:-1]
                    yield ref.buffer, single, k in writes


def writes_rows(loop: For, summary: Summary, private: Collection[Buffer] = ()) -> bool:
    """Return whether iterations write only rows of their own and private buffers."""
    if any(isinstance(s, _SHARED) for s in statements(loop.body)):
        return False
    return all(summary.axes[b] for b in summary.stored.difference(private))


def reads(statement: Stmt, variables: set[Var], memory: set[Buffer]) -> bool:
    """Return whether a statement itself, without those in it, reads one of these."""
    return any(
        (node.op == "var" and node.attr in variables)
        or (node.op == "load" and node.attr in memory)
        for node in nodes(*expressions(statement))
    )
