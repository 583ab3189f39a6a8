"""Programs that count and time their own loops, for `jitted.profile`.

    program f():                       program f():
        ...                                ...
        for step5 in 0..99:                buffer profile.0: i64[9] in output
            call g(c[])                    ...
                                           entries.1 = entries.1 + 1
                                           trips.1 = trips.1 + 99
                                           call clock(now.0[])
                                           let start.1: i64 = now.0[]
                                  ->       for step5 in 0..99:
                                               ...
                                               call g(c[])
                                               ...
                                           call clock(now.0[])
                                           time.1 = time.1 + (now.0[] - start.1)
                                           ...
                                           profile.0[1] = profile.0[1] + entries.1

Each loop, copy and call has a row of counters. To read the clock takes as long as a
short loop. A statement that a loop runs is therefore timed in its first `ALL` runs, and
then in one of `EVERY`, which counts for all of these. What the clock itself takes is
measured at the start of the program, and taken off.

Iterations that run side by side count in variables of their own. They are stored by
iteration, and added after the loop. The lanes of a gang read no clock: their loops are
counted alone. A function adds to the counters of its program, whoever calls it.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.compiler.reuse import size_in_bytes
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Binding,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Invoke,
    Let,
    Program,
    Ref,
    Stmt,
    Store,
    Timed,
    While,
)
from hopflow.loop_ir.routines import CLOCK
from hopflow.recursion import deep_recursion

ALL: Final = 256
"""So many runs of a statement are timed, the first ones."""
EVERY: Final = 17
"""Of the runs after these, one of so many is timed. Loops that do something else every
few steps do it every 2, 10 or 16: a prime number meets all of their steps alike."""
CLOCKS: Final = 64
"""How often the clock is read to tell how long that takes."""
LEAST_SHARE: Final = 0.01
"""Of a time that was measured, what is at least no reading of the clock."""
_SUMS: Final = 8
"""So many counters are added at once."""
_ITERATION: Final = "iteration"
_ONE: Final = e.index(1)
_Counters: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(eq=False, slots=True)
class Row:
    """A statement whose runs are counted, or the program, or a function of it.

    what      "program", "function f", "for", "while", "vector 8", "gang 32",
              "threads", "copy", "call gemm", "call f", "python"; or "iteration": the
              iterations of a loop over threads, which are in its row
    parent    the row in which it runs
    nodes     the nodes of the graph that it computes, by number
    moved     the bytes that a trip of a loop loads and stores, without inner loops
    lanes     of the gang that it is, or is in; 1: none
    function  the row of the function that it calls
    slots     the positions of its counters, by name
    """

    number: int
    what: str
    parent: "Row | None"
    nodes: tuple[int, ...] = ()
    moved: int = 0
    lanes: int = 1
    function: "Row | None" = None
    slots: dict[str, int] = field(default_factory=dict)


class Measured(NamedTuple):
    """What the counters of a run say of a row.

    depth    the number of rows that it is in, not counting the program
    seconds  None: it runs in lanes of a gang
    entries  how often it ran
    trips    the steps of a loop; None: it is no loop
    active   the share of lanes that were active in the steps of a gang; None: no gang
    """

    row: Row
    depth: int
    seconds: float | None
    entries: int
    trips: int | None
    bytes: int
    active: float | None


class Table:
    """The rows of an instrumented program. Slot 0 has the time of `CLOCKS` reads of the
    clock."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.size = 1

    def add(self, what: str, parent: Row | None, **fields: Any) -> Row:
        """Add a row."""
        self.rows.append(Row(len(self.rows), what, parent, **fields))
        return self.rows[-1]

    def slot(self, row: Row, name: str) -> int:
        """Return the position of a counter of a row."""
        if name not in row.slots:
            row.slots[name] = self.size
            self.size += 1
        return row.slots[name]

    @deep_recursion()
    def measured(self, counters: _Counters) -> list[Measured]:
        """Return what the counters of a run say, each row before those in it."""
        return list(_Reader(self, counters).measured())


def with_counters(program: Program) -> tuple[Program, Table]:
    """Return the program with one more output, its counters, and their table."""
    table, done = Table(), dict[Program, tuple[Program, Row]]()
    profiles: list[Buffer] = []
    root = table.add("program", None)
    counted = _Pass(table, done, profiles, program, 0).program(root)
    for profile in profiles:  # all rows are known now
        profile.shape = (e.index(table.size),)
    return counted, table


# --- the counters of a run ------------------------------------------------------------


class _Reader:
    """Reads the counters of a run.

    clock      the nanoseconds that it takes to read the clock
    children   the rows in each row; those of None are the program and its functions
    """

    def __init__(self, table: Table, counters: _Counters) -> None:
        self.counters = counters
        self.clock = float(counters[0]) / CLOCKS
        self.children: dict[Row | None, list[Row]] = {}
        for row in table.rows:
            self.children.setdefault(row.parent, []).append(row)
        self._reads: dict[Row, float] = {}

    def value(self, row: Row, name: str) -> int:
        """Return a counter; 0 if the row has none of the name."""
        return int(self.counters[row.slots[name]]) if name in row.slots else 0

    def measured(self) -> Iterator[Measured]:
        program, *functions = self.children[None]
        pending = [(0, row, self.nanoseconds(row)) for row in reversed(functions)]
        pending.append((-1, program, self.nanoseconds(program)))
        while pending:
            depth, row, time = pending.pop()
            yield self.of(depth, row, time)
            inner = [(depth + 1, r, t) for r, t in self.within(row, time)]
            pending += reversed(inner)

    def within(self, row: Row, time: float) -> list[tuple[Row, float]]:
        """Return the rows in a row with their times, which together are at most its
        own. Times of iterations side by side are scaled to what has passed."""
        inner, total = self.children.get(row, []), time
        if inner and inner[0].what == _ITERATION:
            total = self.nanoseconds(inner[0])
            inner = self.children.get(inner[0], [])
        times = [self.nanoseconds(r) for r in inner]
        longest = max(time, total, sum(times))
        scale = time / longest if longest else 1.0
        return [(r, t * scale) for r, t in zip(inner, times, strict=True)]

    def nanoseconds(self, row: Row) -> float:
        """Return the time of a row without that of the clock: one read of it in each
        entry, and two for each statement in it that was timed. The clock is never all
        of it, as it seems if something else ran while its reads were timed."""
        time = self.value(row, "time")
        reads = self.value(row, "entries") + 2 * self.reads(row)
        return max(LEAST_SHARE * time, time - reads * self.clock)

    def reads(self, row: Row) -> float:
        """Return how often statements in a row were timed."""
        if row not in self._reads:
            inner = self.children.get(row, [])
            total = float(sum(self.value(r, "timed") + self.reads(r) for r in inner))
            called = row.function
            if called is not None and self.value(called, "entries"):
                share = self.value(row, "entries") / self.value(called, "entries")
                total += share * (self.value(called, "timed") + self.reads(called))
            self._reads[row] = total
        return self._reads[row]

    def of(self, depth: int, row: Row, time: float) -> Measured:
        entries, trips = self.value(row, "entries"), self.value(row, "trips")
        is_gang = row.what.startswith("gang")
        steps = row.lanes * (entries if is_gang else self.value(row, "steps"))
        return Measured(
            row,
            depth,
            time * 1e-9 if "time" in row.slots else None,
            entries,
            trips if "trips" in row.slots else None,
            self.value(row, "bytes") + trips * row.moved,
            trips / steps if steps else None,
        )


# --- the instrumented program ---------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Region:
    """Code that counts in variables of its own: a function, an iteration, a lane.

    now      what the clock is read into; None: it is not read
    weight   of how many runs of the region this one has the time; 0: it is not timed
    prefix   of the names of its counters
    totals   its counters
    """

    now: Buffer | None
    weight: Expr = _ONE
    prefix: str = ""
    totals: dict[tuple[Row, str], Var] = field(default_factory=dict)

    def count(self, row: Row, name: str, value: Expr = _ONE) -> Assign:
        """Return the statement that adds to a counter."""
        key = row, name
        if key not in self.totals:
            name = f"{self.prefix}{name}.{row.number}"
            self.totals[key] = Var(name, dtypes.int64)
        return Assign(self.totals[key], e.add(e.read(self.totals[key]), value))

    def opened(self, body: Sequence[Stmt]) -> list[Stmt]:
        """Return a body after the declarations of its counters."""
        declared: list[Stmt] = [Declare(v, e.index(0)) for v in self.totals.values()]
        if self.now is not None:  # what is not timed reads it, too
            declared.append(Store(self.now, (), e.index(0)))
        return [*declared, *body]

    def timed(self, row: Row, run: Sequence[Stmt], weight: Expr) -> list[Stmt]:
        """Return statements that are timed, if `weight` is not 0."""
        assert self.now is not None
        now = e.load(self.now, ())
        start = Let(Var(f"start.{row.number}", dtypes.int64), now)
        passed = e.mul(weight, e.sub(now, e.read(start.var)))
        before: Stmt = Call(CLOCK.name, (Ref(self.now),))
        after: list[Stmt] = [Call(CLOCK.name, (Ref(self.now),))]
        after += [self.count(row, "time", passed), self.count(row, "timed")]
        if not weight.is_const:
            is_timed = e.compare("gt", weight, e.index(0))
            before, after = If(is_timed, [before]), [If(is_timed, after)]
        return [before, start, *run, *after]


def _weight(
    row: Row, total: Expr, number: Expr, outer: Expr
) -> tuple[list[Stmt], Expr]:
    """Return of how many runs one has the time; and the statements that compute it.

    Args:
        total: Up to `ALL` of these are all timed.
        number: The number of the run.
        outer: The weight of the region.
    """
    is_one_of = e.compare("eq", e.binary("rem", number, e.index(EVERY)), e.index(0))
    chosen = e.select(is_one_of, e.index(EVERY), e.index(0))
    few = e.compare("le", total, e.index(ALL))
    weight = e.mul(outer, e.select(few, _ONE, chosen))
    if weight.is_const:
        return [], weight
    let = Let(Var(f"weight.{row.number}", dtypes.int64), weight)
    return [let], e.read(let.var)


class _At(NamedTuple):
    """A place in a program: its region, its row, and whether a loop repeats it."""

    region: _Region
    row: Row
    is_repeated: bool = False


@dataclass(eq=False, slots=True)
class _Pass:
    """The rewriting of one program.

    functions   for each function its instrumented form and its row
    profiles    the buffers of counters: of this program, and of others
    base        the number from which its nodes are counted
    arena       its buffers, and the new ones
    """

    table: Table
    functions: dict[Program, tuple[Program, Row]]
    profiles: list[Buffer]
    source: Program
    base: int
    profile: Buffer = field(init=False)
    arena: list[Buffer] = field(init=False)

    def __post_init__(self) -> None:
        # Names of the user have no dots.
        self.profile = Buffer("profile.0", dtypes.int64, (e.index(0),), "output")
        self.profiles.append(self.profile)
        self.arena = list(self.source.arena)

    def buffer(self, name: str, row: Row, *shape: Expr) -> Buffer:
        """Return a new buffer of the program."""
        self.arena.append(Buffer(f"{name}.{row.number}", dtypes.int64, shape, "arena"))
        return self.arena[-1]

    # --- programs

    def program(self, root: Row) -> Program:
        """Return the program, whose counters begin with zero."""
        now = self.buffer("now", root)
        region = _Region(now)
        whole = self.whole(root, region)
        slot, first = (Var(f"{name}.0", dtypes.int64) for name in ("slot", "first"))
        zero = Store(self.profile, (e.read(slot),), e.index(0))
        clock = [Call(CLOCK.name, (Ref(now),)) for _ in range(2)]
        passed = e.sub(e.load(now, ()), e.read(first))
        body = [
            For(slot, e.index(self.table.size), [zero]),
            clock[0],
            Let(first, e.load(now, ())),
            For(Var("clock.0", dtypes.int64), e.index(CLOCKS), [clock[1]]),
            Store(self.profile, (e.index(0),), passed),
            *whole,
        ]
        return self.rebuilt(
            region.opened(body), outputs=[*self.source.outputs, self.profile]
        )

    def function(self, root: Row) -> Program:
        """Return the program as a function, which adds to the counters it is given."""
        slot = e.index(self.table.slot(root, "entries"))
        calls = e.add(e.load(self.profile, (slot,)), _ONE)
        before, weight = _weight(root, calls, calls, _ONE)
        region = _Region(self.buffer("now", root), weight)
        return self.rebuilt(
            region.opened([*before, *self.whole(root, region)]),
            inputs=[*self.source.inputs, self.profile],
            outputs=[*self.source.outputs, self.profile],
        )

    def rebuilt(self, body: list[Stmt], **fields: Any) -> Program:
        functions = self.source.functions
        called = [self.functions[f][0] for f in functions if f in self.functions]
        return replace(
            self.source, body=body, arena=self.arena, functions=called, **fields
        )

    def whole(self, root: Row, region: _Region) -> list[Stmt]:
        """Return the statements of the program, timed; and those that add its counters
        to the profile."""
        run = self.body(self.source.body, _At(region, root))
        body = [region.count(root, "entries"), *region.timed(root, run, region.weight)]
        for (row, name), var in region.totals.items():
            at = (e.index(self.table.slot(row, name)),)
            total = e.add(e.load(self.profile, at), e.read(var))
            body.append(Store(self.profile, at, total))
        return body

    # --- statements

    def body(self, statements: Iterable[Stmt], at: _At) -> list[Stmt]:
        counted: list[Stmt] = []
        for s in statements:
            if isinstance(s, If):
                sides = self.body(s.then, at), self.body(s.else_, at)
                counted.append(If(s.test, *sides))
            elif isinstance(s, Timed):
                counted += self.counted(s, at)
            else:
                counted.append(s)
        return counted

    def counted(self, s: Timed, at: _At) -> list[Stmt]:
        """Return a statement with what counts and times it."""
        region = at.region
        nodes = tuple(self.base + n for n in s.nodes) or at.row.nodes
        row = self.table.add(_what(s), at.row, nodes=nodes, lanes=at.row.lanes)
        entries = region.count(row, "entries")
        if isinstance(s, For | While):
            row.moved = _moved(s)
            before, run, after = self.loop(s, row, at)
        else:
            moved = [size_in_bytes(shape, dtype) for shape, dtype in _operands(s)]
            before = [region.count(row, "bytes", reduce(e.add, moved, e.index(0)))]
            run, after = self.call(s, row), []
        if region.now is None:
            return [entries, *before, run, *after]
        weight = region.weight
        if at.is_repeated:
            number = e.read(entries.var)
            chosen, weight = _weight(row, number, number, weight)
            before += chosen
        return [entries, *before, *region.timed(row, [run], weight), *after]

    def call(self, s: Copy | Call | HostCall | Invoke, row: Row) -> Stmt:
        if not isinstance(s, Invoke):
            return s
        if s.function not in self.functions:
            root = self.table.add(f"function {s.function.name}", None, nodes=row.nodes)
            base = row.nodes[0] + 1
            inner = _Pass(self.table, self.functions, self.profiles, s.function, base)
            self.functions[s.function] = inner.function(root), root
        function, row.function = self.functions[s.function]
        operands, results = ((*r, Ref(self.profile)) for r in (s.operands, s.results))
        return replace(s, function=function, operands=operands, results=results)

    # --- loops

    def loop(
        self, s: For | While, row: Row, at: _At
    ) -> tuple[list[Stmt], Stmt, list[Stmt]]:
        """Return a loop that counts its steps, and what comes before and after it."""
        region = at.region
        inside = _At(region, row, is_repeated=True)
        if isinstance(s, While):
            head, body = self.body(s.head, inside), self.body(s.body, inside)
            body.insert(0, region.count(row, "trips"))
            return [], replace(s, head=head, body=body), []
        extent = e.binary("max", s.extent, e.index(0))
        trips = region.count(row, "trips", extent)
        if s.binding.kind == "threads":
            before, run, after = self.threads(s, row, extent, region)
            return [trips, *before], run, after
        if s.binding.kind == "gang":
            run, after = self.gang(s, row, region)
            return [trips], run, after
        rows = len(self.table.rows)
        body = self.body(s.body, inside)
        independent = s.independent and len(self.table.rows) == rows
        return [trips], replace(s, body=body, independent=independent), []

    def threads(
        self, s: For, row: Row, extent: Expr, outer: _Region
    ) -> tuple[list[Stmt], Stmt, list[Stmt]]:
        before: list[Stmt] = []
        if not extent.is_const:
            let = Let(Var(f"extent.{row.number}", dtypes.int64), extent)
            before, extent = [let], e.read(let.var)
        each = self.table.add(_ITERATION, row, nodes=row.nodes)
        chosen, weight = _weight(each, extent, e.read(s.var), _ONE)
        region = _Region(self.buffer("now", each), weight, "each.")
        run = self.body(s.body, _At(region, each))
        body = [
            *chosen,
            region.count(each, "entries"),
            *region.timed(each, run, weight),
        ]
        parts = self.buffer("parts", row, e.index(len(region.totals)), extent)
        if not extent.is_const:
            before.append(Allocate(parts))
        body += _stored(region, parts, s.var)
        after = self.summed(region, parts, row, extent, outer)
        return before, replace(s, body=region.opened(body)), after

    def gang(self, s: For, row: Row, outer: _Region) -> tuple[Stmt, list[Stmt]]:
        row.lanes = s.binding.width
        region = _Region(None, prefix="lane.")
        body = self.body(s.body, _At(region, row))
        width = e.index(row.lanes)
        parts = self.buffer("parts", row, e.index(len(region.totals)), width)
        body += _stored(region, parts, s.var)
        after = self.summed(region, parts, row, s.extent, outer)
        return replace(s, body=region.opened(body)), after

    def summed(
        self, region: _Region, parts: Buffer, row: Row, extent: Expr, outer: _Region
    ) -> list[Stmt]:
        """Return the loop that adds the counters of iterations to those around them.

        The lanes of a gang go through a loop together: it takes as many steps as the
        lane with the most. (A loop in another one may take more: its lanes need not
        have most steps in the same step of that.)
        """
        at = Var(f"part.{row.number}", dtypes.int64)
        before: list[Stmt] = []
        body: list[Stmt] = []
        after: list[Stmt] = []

        def combine(how: str, inner: Row, name: str, part: Expr) -> None:
            total = Var(f"{how}.{name}.{inner.number}.{row.number}", dtypes.int64)
            before.append(Declare(total, e.index(0)))
            body.append(Accumulate(total, how, part))
            after.append(outer.count(inner, name, e.read(total)))

        for k, (inner, name) in enumerate(region.totals):
            part = e.load(parts, (e.index(k), e.read(at)))
            combine("add", inner, name, part)
            if row.what.startswith("gang") and name == "trips":
                combine("max", inner, "steps", part)
        loop = For(at, extent, body, True, Binding("vector", _SUMS))
        return [*before, loop, *after]


def _stored(region: _Region, parts: Buffer, position: Var) -> list[Stmt]:
    """Return statements that store the counters of an iteration."""
    return [
        Store(parts, (e.index(k), e.read(position)), e.read(var))
        for k, var in enumerate(region.totals.values())
    ]


# --- what statements are, and what they move ------------------------------------------


def _what(s: Timed) -> str:
    match s:
        case For():
            kind, width = s.binding.kind, s.binding.width
            if kind == "serial":
                return "for"
            return kind if width == 1 else f"{kind} {width}"
        case Call():
            return f"call {s.routine}"
        case Invoke():
            return f"call {s.function.name}"
        case HostCall():
            return "python"
    return type(s).__name__.lower()


def _operands(
    s: Copy | Call | HostCall | Invoke,
) -> list[tuple[tuple[Expr, ...], DType]]:
    """Return the shapes and dtypes of the arrays that a call reads and writes."""
    match s:
        case Copy():
            return [(b.shape, b.dtype) for b in (s.target, s.source)]
        case Call():
            refs = [a for a in s.args if isinstance(a, Ref)]
        case _:
            refs = list(s.refs)
    return [(ref.shape, ref.buffer.dtype) for ref in refs]


def _moved(loop: For | While) -> int:
    """Return the bytes that a step loads and stores, each element once: of all sides of
    its branches, and not of the loops and calls in it."""
    interned = walk.Interned()
    elements: dict[Hashable, int] = {}
    roots = [loop.test] if isinstance(loop, While) else []
    pending = [s for body in walk.bodies(loop) for s in body]
    while pending:
        s = pending.pop()
        if isinstance(s, If):
            pending += [*s.then, *s.else_]
        if isinstance(s, Store):
            at = tuple(map(interned.of, s.indices))
            elements["store", s.buffer, at] = s.buffer.dtype.itemsize
        if not isinstance(s, Timed):
            roots += walk.expressions(s)
    for node in walk.nodes(*map(interned.of, roots)):
        if node.op == "load":
            elements["load", node] = node.dtype.itemsize
    return sum(elements.values())
