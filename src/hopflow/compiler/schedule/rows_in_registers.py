"""Rows of few elements that stay in registers through all steps of a loop.

    for step in 0..20:                     for i_block in 0..n / 8 threads independent:
        for i in 0..n vector 8 ...:            for i_row in 0..8 gang 8 independent:
            s[i, 0] = s[i, 0] + s[i, 1]            var kept0: u32 = s[.. i_row, 0]
            s[i, 1] = s[i, 1] ^ s[i, 0]            var kept1: u32 = s[.. i_row, 1]
            y[step, i, 0] = s[i, 0]                for step in 0..20:
            y[step, i, 1] = s[i, 1]    ->              kept0 = kept0 + kept1
    for j in 0..n:                                     kept1 = kept1 ^ kept0
        for step in 0..20:                             y[step, 0, i_row] = kept0
            out0[j, step] = y[step, j, 0]              y[step, 1, i_row] = kept1
            ...                                    s[.. i_row, 0] = kept0
                                                   s[.. i_row, 1] = kept1
                                               for j_row in 0..8:
                                                   for step in 0..20:
                                                       out0[...] = y[step, 0, j_row]
                                                       ...

The elements of an example lie apart from those of the next one: each step would gather
and scatter, or shuffle them. Loops over the same rows that follow run in the same
blocks, so that what is passed from one to the next stays in the cache, with the rows
along its last axis: the results of a scan, and what its gradient reads.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple, TypeAlias

from hopflow import dtypes
from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.row_copies import read_from_source, write_to_target
from hopflow.compiler.schedule.row_reads import rows_read_before
from hopflow.compiler.schedule.row_steps import (
    RowSteps,
    axes_of,
    steps_of_a_row,
    written,
)
from hopflow.compiler.schedule.summary import Summary
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    SERIAL,
    THREADS,
    Assign,
    Binding,
    Copy,
    For,
    Let,
    Program,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import (
    accessed,
    bodies,
    expressions,
    loaded,
    names,
    replace,
    same,
    statements,
    uses,
)

FEW: Final = 6
"""Elements of a row, at most, of which two vectors at a time fit into the registers."""
CACHE: Final = 1 << 20
"""Bytes that the loops over a block of rows pass to each other from the cache."""
LIMIT: Final = 1 << 25
"""Bytes that they pass to each other, at most. More than the cache has pass in the
order of memory, while steps would gather elements that lie far apart."""
AHEAD: Final = 8
"""Statements, at most, before which a loop moves to the block."""

_Axes: TypeAlias = dict[Buffer, set[int]]


def rows_in_registers(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    if target.has_gangs:
        _Pass(program, target).body(program.body)
        write_to_target(program)


class _Use(NamedTuple):
    """How often a statement names each buffer, and the buffers that it writes."""

    named: Counter[Buffer]
    stored: set[Buffer]


class _Loop(NamedTuple):
    """A loop that a block of rows may run: over the rows, or over steps of them.

    place  the statement in the program
    steps  what the steps do for a row; None: the loop is over rows
    rows   a loop over the rows, whose variable the statements name
    axes   by buffer, the axes of which all accesses take the element of the row
    use    the buffers that the loop names and writes
    """

    place: For
    steps: RowSteps | None
    rows: For
    axes: _Axes
    use: _Use

    def reads(self, buffer: Buffer) -> bool:
        """Return whether the loop loads an element of a buffer."""
        steps = self.steps
        inside = statements([*steps.before, *steps.body] if steps else [self.place])
        return any(n.attr is buffer for s in inside for n in loaded(s))


class _Rows(NamedTuple):
    """The memory of a block for the rows of a buffer, and the axis of the rows."""

    axis: int
    own: Buffer


@dataclass
class _Series:
    """Loops that a block of rows runs one after the other.

    width    the number of rows in a block
    earlier  statements between the loops, which move before them
    near     the buffers whose rows a block has in memory of its own: those that nothing
             else names, and inputs, of which it makes a copy
    size     the bytes of that memory
    """

    loops: list[_Loop]
    width: int
    earlier: Sequence[Stmt]
    near: dict[Buffer, _Rows] = field(default_factory=dict)
    size: int = 0

    def add(self, buffer: Buffer, rows: _Rows) -> None:
        """Give a block memory of its own for the rows of a buffer, if they are few."""
        size = _size(buffer, rows.axis) * self.width
        if 0 < size <= LIMIT - self.size and buffer not in self.near:
            self.near[buffer] = rows
            self.size += size

    @property
    def is_one(self) -> bool:
        """Whether all rows form one block."""
        extent = self.loops[0].rows.extent
        return bool(extent.is_const and extent.attr <= self.width)

    @property
    def saved(self) -> float:
        """About how many instructions fewer the lanes of a gang take for a row.

        What does not fit into the cache takes about one for each element, unless a
        thread waits for it while others compute.
        """
        steps = [loop.steps for loop in self.loops if loop.steps is not None]
        saved = sum(s.saved(self.width, self.near) for s in steps)
        if self.is_one and self.size > CACHE:
            for buffer, rows in self.near.items():
                saved -= _size(buffer, rows.axis) // buffer.dtype.itemsize
        return saved


class _Pass:
    def __init__(self, program: Program, target: Target) -> None:
        self._program, self._target = program, target
        self._uses = uses(program.body)

    def body(self, body: list[Stmt]) -> None:
        """Edit such loops in a list of statements, and in those inside."""
        at = 0
        while at < len(body):
            s, rest = body[at], body[at + 1 :]
            series = None
            if isinstance(s, For) and not s.independent:
                series = self._series(s, rest)
            if series is not None:
                at -= self._read_from_source(series, body, at)
                shared = [t for x in series.loops if x.steps for t in x.steps.shared]
                blocks = self._in_blocks(series)
                found: list[Stmt] = [*series.earlier, *shared, *blocks]
                moved = {*series.earlier, *(loop.place for loop in series.loops)}
                body[at:] = [*found, *(t for t in rest if t not in moved)]
                at += len(found)
                continue
            # A thread, or the lanes of a gang, run the loops in an independent one.
            for inner in (
                bodies(s) if not (isinstance(s, For) and s.independent) else ()
            ):
                self.body(inner)
            at += 1

    def _read_from_source(self, series: _Series, body: list[Stmt], at: int) -> int:
        """Remove copies that the steps of a series, which begins at a statement, do not
        need, and return how many there were."""
        needless: list[Copy] = []
        written = {b for s in series.earlier for b in uses([s])}
        for loop in series.loops:
            written |= loop.use.stored
        named: set[Buffer] = set()
        for loop in series.loops:
            if loop.steps is not None:
                steps = loop.steps
                needless += read_from_source(steps, body[:at], written, named)
            named |= loop.use.named.keys()
        body[:] = [s for s in body if s not in needless]
        return len(needless)

    # --- which loops ------------------------------------------------------------------

    def _series(self, first: For, rest: Sequence[Stmt]) -> _Series | None:
        """Return the loops to run in blocks of rows, from a loop over steps on; None:
        that does not pay."""
        steps = steps_of_a_row(first, self._uses)
        loops = [] if steps is None else [_of_steps(steps)]
        earlier, later = list[Stmt](), list[_Use]()
        for s in rest[:AHEAD] if loops else ():
            loop, use = self._next(s, loops), _use(s)
            if (loop is None or loop.steps is not None) and _names_shared(s, loops):
                break
            if loop is not None and _is_free(loop.use, later):
                loops.append(loop)
            elif use is None:
                break
            elif _is_free(use, [*(loop.use for loop in loops), *later]):
                earlier.append(s)
            elif isinstance(s, Let):
                break  # those after it read its variable
            else:
                later.append(use)
        while loops:
            while not _continues(loops):
                loops.pop()
            series = self._settled(loops, earlier)
            if series is not None and series.width > 1 and series.saved > 0:
                return series
            loops.pop()
        return None

    def _next(self, s: Stmt, loops: Sequence[_Loop]) -> _Loop | None:
        """Return a loop that may follow others in a block, because it needs only what
        they have written for the same rows; None: it is another statement."""
        if not isinstance(s, For):
            return None
        if s.independent:
            loop = _of_rows(s)
        else:
            steps = steps_of_a_row(s, self._uses)
            loop = None if steps is None else _of_steps(steps)
        if loop is None or not same(loop.rows.extent, loops[0].rows.extent):
            return None
        if not all(_is_by_row(loop, other) for other in loops):
            return None
        return loop

    def _settled(
        self, loops: Sequence[_Loop], earlier: Sequence[Stmt]
    ) -> _Series | None:
        """Return a series of loops, with the width of its gangs and what is private;
        None: something that nothing else names does not fit into the cache. A thread
        would have memory of its own for all of it."""
        extent = loops[0].rows.extent
        widths = [
            (vector_binding(extent, _straight(steps), self._target).width, steps)
            for loop in loops
            if (steps := loop.steps) is not None
        ]
        least = min(width for width, _ in widths)
        most = min(w * (2 if len(steps.before) <= FEW else 1) for w, steps in widths)
        if extent.is_const and extent.attr < most:
            most = least  # half of the lanes would have no row
        near: dict[Buffer, _Rows] = {}
        for loop in loops:
            for buffer in loop.axes:
                axis = self._row_axis(buffer, loops)
                if buffer in loop.use.stored and axis is not None:
                    near[buffer] = _Rows(axis, buffer)
        inputs: dict[Buffer, _Rows] = {}
        for loop in loops:
            for buffer, axis in loop.steps.inputs().items() if loop.steps else ():
                if all(_only_reads(other, buffer, axis) for other in loops):
                    name = f"{buffer.name}_{loop.rows.var.name}"
                    own = Buffer(name, buffer.dtype, buffer.shape, "arena")
                    inputs[buffer] = _Rows(axis, own)
        series = [_Series([*loops], width, earlier) for width in {most, least}]
        for one in series:
            for buffer, rows in (near | inputs).items():
                one.add(buffer, rows)
        return max(
            (one for one in series if near.keys() <= one.near.keys()),
            key=lambda one: (one.size <= CACHE, one.saved, one.width),
            default=None,
        )

    def _row_axis(self, buffer: Buffer, loops: Sequence[_Loop]) -> int | None:
        """Return the axis of the rows of a buffer that only these loops name, and that
        is written before it is read; None: it is none."""
        naming = [loop for loop in loops if buffer in loop.use.named]
        total = sum(loop.use.named[buffer] for loop in naming)
        if buffer.space != "arena" or total != self._uses[buffer]:
            return None
        if naming[0].reads(buffer):
            return None
        axes = set.intersection(*[loop.axes.get(buffer, set()) for loop in naming])
        return min(axes, default=None)

    # --- rewriting --------------------------------------------------------------------

    def _in_blocks(self, series: _Series) -> list[For]:
        """Return the loop over blocks of rows; the loops of a block, if all rows form
        one."""
        width, first = series.width, series.loops[0].rows
        number, block = Var(f"{first.var.name}_block", dtypes.int64), list[For]()

        def of_block(rows: For) -> For:
            return rows if series.is_one else block_of(rows, width, number)[1]

        for buffer, (axis, own) in series.near.items():
            if own is not buffer:
                self._program.arena.append(own)
                block.append(self._copy(buffer, axis, own, first, of_block))
        for loop in series.loops:
            rows = of_block(_over_rows(loop, width))
            for s in statements(rows.body):
                _name_row(s, series.near, e.read(rows.var))
            block.append(rows)
            self._drop(loop.steps.temporary if loop.steps else ())
        for axis, own in series.near.values():
            own.shape = _rows_last(own.shape, axis, e.index(width))
        if series.is_one:
            return block
        binding = THREADS if self._target.has_threads else SERIAL
        return [over_blocks(number, first, width, [*block], binding)]

    def _copy(
        self,
        buffer: Buffer,
        axis: int,
        own: Buffer,
        rows: For,
        of_block: Callable[[For], For],
    ) -> For:
        """Return the loops that copy the rows of a block to its own memory.

        Args:
            of_block: Returns the loop over the rows of a block.
        """
        names = [f"{own.name}_{k}" for k in range(len(own.shape))]
        variables = [Var(name, dtypes.int64) for name in names]
        at = tuple(map(e.read, variables))
        copy = Store(own, at, e.load(buffer, at))
        binding = vector_binding(rows.extent, [copy], self._target)
        row = variables[axis]
        loop = of_block(For(row, rows.extent, [copy], True, binding, rows.nodes))
        copy.indices = _rows_last(at, axis, e.read(loop.var))
        for k in reversed(range(len(at))):
            if k != axis:
                loop = For(variables[k], own.shape[k], [loop], independent=True)
        return loop

    def _drop(self, buffers: Collection[Buffer]) -> None:
        self._program.arena = [b for b in self._program.arena if b not in buffers]


def _straight(steps: RowSteps) -> list[Stmt]:
    """Return the values of a step, and what is stored in it or after the last one."""
    return [s for s in (*steps.body, *steps.after) if isinstance(s, Let | Store)]


def _names_shared(s: Stmt, loops: Sequence[_Loop]) -> bool:
    """Return whether a statement names a variable that all rows of earlier loops share:
    it needs the value between two loops, where loops over rows need the last one."""
    shared = [
        t for x in loops if x.steps for u in x.steps.shared for t in statements([u])
    ]
    changed = {t.var for t in shared if isinstance(t, Assign)}
    inside = [*statements([s])] if changed else []
    return any(
        (isinstance(t, Assign) and t.var in changed)
        or any(names(x, changed) for x in expressions(t))
        for t in inside
    )


def _of_steps(steps: RowSteps) -> _Loop:
    place, row = steps.steps, steps.rows.var
    body = [*steps.before, *steps.body, *steps.after]
    stored = {b for s in statements(place.body) for b in written(s)}
    return _Loop(
        place, steps, steps.rows, _axes(row, body), _Use(uses([place]), stored)
    )


def _of_rows(rows: For) -> _Loop | None:
    """Return a loop over rows; None: a row is more than loops over its elements."""
    use, inside = _use(rows), [*statements(rows.body)]
    return use and _Loop(rows, None, rows, _axes(rows.var, inside), use)


def _use(s: Stmt) -> _Use | None:
    """Return what a statement accesses; None: it must not be reordered with others."""
    match s:
        case Let():
            return _Use(uses([s]), set())
        case Copy():
            return _Use(uses([s]), {s.target})
        case For():
            summary = Summary.of(s)
            if not (summary.is_ordered or summary.changed):
                return _Use(uses([s]), summary.stored)
    return None


def _axes(row: Var, body: Sequence[Stmt]) -> _Axes:
    """Return by buffer the axes of which all accesses take the element of a row."""
    found: _Axes = {}
    for s in body:
        for buffer, at in accessed(s):
            axes = axes_of(row, at)
            found[buffer] = found.get(buffer, axes) & axes
    return found


def _continues(loops: Sequence[_Loop]) -> bool:
    """Return whether the last loop reads what those before it have written."""
    *others, last = loops
    written = set[Buffer]().union(*[loop.use.stored for loop in others])
    return not others or not written.isdisjoint(last.use.named)


def _is_by_row(loop: _Loop, other: _Loop) -> bool:
    """Return whether a row of a loop needs at most the same row of another loop."""
    shared = _shared(loop.use, other.use)
    return all(loop.axes.get(b, set()) & other.axes.get(b, set()) for b in shared)


def _only_reads(loop: _Loop, buffer: Buffer, axis: int) -> bool:
    """Return whether a loop reads at most the same row of a buffer."""
    if buffer in loop.use.stored:
        return False
    return buffer not in loop.use.named or axis in loop.axes.get(buffer, ())


def _is_free(use: _Use, others: Sequence[_Use]) -> bool:
    """Return whether a statement may change places with others."""
    return not any(_shared(use, other) for other in others)


def _shared(use: _Use, other: _Use) -> set[Buffer]:
    """Return the buffers that one of two statements writes, and the other one names."""
    return (use.stored & other.named.keys()) | (other.stored & use.named.keys())


def _size(buffer: Buffer, axis: int) -> int:
    """Return the bytes of a row of a buffer; 0: only the run knows."""
    others = [n for k, n in enumerate(buffer.shape) if k != axis]
    if not all(n.is_const for n in others):
        return 0
    return prod(int(n.attr) for n in others) * buffer.dtype.itemsize


def _over_rows(loop: _Loop, width: int) -> For:
    """Return the loop over rows that runs a loop for each of them."""
    rows, binding = loop.rows, Binding("gang", width)
    if loop.steps is not None:
        body = loop.steps.statements()
        found = For(rows.var, rows.extent, body, True, binding, rows.nodes)
        found.body = [*rows_read_before(found, loop.use.stored), *body]
        return found
    if rows.binding.width > width:
        rows.binding = Binding(rows.binding.kind, width)
    return rows


def _name_row(s: Stmt, near: Mapping[Buffer, _Rows], row: Expr) -> None:
    """Let a statement access the memory of a block for its rows."""

    def placed(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in near:
            return None
        axis, own = near[node.attr]
        at = [e.rewrite(i, placed) for i in e.index_of(node)]
        condition = e.condition_of(node)
        condition = condition and e.rewrite(condition, placed)
        return e.load(own, _rows_last(at, axis, row), condition)

    replace(s, placed)
    if isinstance(s, Store) and s.buffer in near:
        axis, s.buffer = near[s.buffer]
        s.indices = _rows_last(s.indices, axis, row)


def _rows_last(at: Sequence[Expr], axis: int, row: Expr) -> Index:
    return (*at[:axis], *at[axis + 1 :], row)
