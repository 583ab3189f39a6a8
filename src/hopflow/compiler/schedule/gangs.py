"""Turns divergent loops over batch elements into gangs: masked vector lanes.

    for step1 in 0..n threads independent:
        var c2: f64 = x[step1]
        do:
        while c2 < 1.0:
            c2 = c2 * y[step1]
        out0[step1] = c2

becomes, where a gang has 32 lanes,

    for step1_gang in 0..(n + 31) / 32 threads independent:
        for step1_lane in 0..min(32, n - step1_gang * 32) gang 32 independent:
            let step1: i64 = step1_gang * 32 + step1_lane
            let step1_row0: f64 = y[step1]
            var c2: f64 = x[step1]
            do:
            while c2 < 1.0:
                c2 = c2 * step1_row0
            out0[step1] = c2

Steps of the inner loop that read one element of the batch element's row share a read
before the first step: in active lanes its value is the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from math import prod
from typing import Final, NamedTuple, TypeGuard

from hopflow import dtypes
from hopflow.compiler.divergence import Divergence
from hopflow.compiler.private import private_to
from hopflow.compiler.schedule.row_reads import rows_read_before
from hopflow.compiler.schedule.summary import Summaries, Summary
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var, rewrite
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Binding,
    Copy,
    Declare,
    For,
    If,
    Let,
    Program,
    Stmt,
    Store,
    Swap,
    Trap,
    While,
)
from hopflow.loop_ir.walk import (
    accessed,
    bodies,
    expressions,
    loaded,
    names,
    nodes,
    replace,
    same,
    statements,
    step_of,
    uses,
)

LARGEST: Final = 6000
"""Instructions of an iteration, at most: for more LLVM takes seconds. Short of that a
gang takes a half to a tenth of the time of one example after the other, and LLVM about
as long."""
SHORT: Final = 8
"""Elements of an array, at most, for each lane to have its own and for all lanes to
step through their arrays together."""
_STATEMENTS = (Let, Declare, Assign, Accumulate, Store, For, While, If, Trap, Allocate)
"""Statements that lanes may run."""
_WHOLE = (Copy, Swap)
"""Statements that become loops over short arrays, which lanes may run."""


def gangs(program: Program, target: Target) -> None:
    """Bind divergent loops of a program to gangs, in place."""
    named, summaries = cache(lambda: uses(program.body)), Summaries()
    pending = [program.body]
    while pending:
        body = pending.pop()
        for k, s in enumerate(body):
            if _is_independent(s):
                width = _width(s, summaries, target, named)
                inner = statements(s.body) if width > 1 else ()
                # Of nested loops, choose the inner one if it fills as many lanes.
                if width > 1 and all(
                    width > _width(t, summaries, target, named)
                    for t in inner
                    if _is_independent(t)
                ):
                    body[k] = _gang(s, width, summaries.of(s), named())
                    continue
            pending += bodies(s)


def _is_independent(s: Stmt) -> TypeGuard[For]:
    """Return whether `s` is a loop of independent iterations that may become a gang."""
    kind = s.binding.kind if isinstance(s, For) else ""
    return isinstance(s, For) and s.independent and kind not in ("vector", "gang")


# --- which loops become gangs ---------------------------------------------------------


def is_candidate(loop: For) -> bool:
    """Return whether lanes may run all of a loop, which has an inner loop or a branch.

    Vectors that a branch alone guards stay vectors: lanes would gather and scatter
    their elements.
    """
    inside = list(statements(loop.body))
    has_vectors = any(isinstance(s, For) for s in inside)
    return any(
        isinstance(s, While) or _counts(s) or (isinstance(s, If) and not has_vectors)
        for s in inside
    ) and all(isinstance(s, _STATEMENTS + _WHOLE) and not is_long(s) for s in inside)


def _width(
    loop: For,
    summaries: Summaries,
    target: Target,
    named: Callable[[], Counter[Buffer]],
) -> int:
    """Return the number of lanes of a loop's gangs; 1 if it becomes none."""
    if not is_candidate(loop):
        return 1
    inside, summary = list(statements(loop.body)), summaries.of(loop)
    if summary.size > LARGEST or summary.changed:
        return 1
    private = private_to(summary, named())
    allocated = {s.buffer for s in inside if isinstance(s, Allocate)}
    rows = summary.stored.difference(private)
    exchanged = (b for s in inside if isinstance(s, _WHOLE) for b in walk.named(s))
    if (
        not allocated.issubset(private)
        or not all(summary.axes[b] for b in rows)
        or not all(b in private and _is_short(b) for b in exchanged)
    ):
        return 1
    # If a lane traps, the iterations run again one by one: they must not read rows that
    # the gang has written.
    traps = any(isinstance(s, Trap) for s in inside)
    if traps and any(node.attr in rows for s in inside for node in loaded(s)):
        return 1
    if not any(map(_may_diverge, inside)) and not _is_adjacent(inside, loop.var):
        return 1
    divergence = Divergence(loop, private)
    counted = {c.counter.var for c in _counters(loop, divergence)}
    for node in (n for b in allocated for n in nodes(*b.shape)):
        if node.op == "var" and node.attr in divergence.varying.difference(counted):
            return 1  # the shape differs between lanes
    pays = divergence.diverges or _is_adjacent(inside, loop.var, divergence)
    width = target.gang_width(loop, divergence) if pays else 1
    if loop.extent.is_const:
        while width > 1 and width >= 2 * loop.extent.attr:
            width //= 2
    return width


def _may_diverge(s: Stmt) -> bool:
    return isinstance(s, While | If) or (isinstance(s, For) and not s.extent.is_const)


def _is_adjacent(
    body: Sequence[Stmt], lane: Var, divergence: Divergence | None = None
) -> bool:
    """Return whether all that the lanes access differently are adjacent elements, as
    far as it is known from `lane` alone, if `divergence` is not given."""
    changing = divergence.varying.difference({lane}) if divergence else ()

    def is_uniform(position: Expr) -> bool:
        if divergence is None:
            return not names(position, {lane})
        return divergence.is_uniform(position)

    def is_adjacent(buffer: Buffer, at: Index) -> bool:
        long = [
            i
            for i, n in zip(at, buffer.shape, strict=True)
            if not (n.is_const and n.attr == 1)
        ]
        *outer, last = long or [e.index(0)]
        if not all(map(is_uniform, outer)):
            return False
        if is_uniform(last):
            return True
        is_step = buffer.strides is None and step_of(last, lane) == 1
        return is_step and not names(last, changing)

    return all(is_adjacent(*access) for s in body for access in accessed(s))


def _counts(s: Stmt) -> bool:
    return isinstance(s, For) and s.binding.kind == "serial"


def is_long(s: Stmt) -> bool:
    """Return whether `s` is a loop of vectors, which gains nothing from lanes, or adds
    floats in an order that its vectors determine."""
    if not (isinstance(s, For) and s.binding.kind == "vector"):
        return False
    sums = (isinstance(x, Accumulate) and x.var.dtype.kind == "f" for x in s.body)
    return not s.extent.is_const or s.extent.attr > SHORT or any(sums)


def _is_short(buffer: Buffer) -> bool:
    extents = [n.attr if n.is_const else SHORT + 1 for n in buffer.shape]
    return bool(extents) and prod(extents) <= SHORT


# --- rewriting ------------------------------------------------------------------------


def _gang(loop: For, width: int, summary: Summary, uses: Counter[Buffer]) -> For:
    """Return the loop over gangs, whose inner loop runs the iterations as lanes."""
    private = private_to(summary, uses)
    rows = rows_read_before(loop, summary.stored)
    if any(isinstance(s, While) for s in statements(loop.body)):
        _count_together(loop, private)
    _share_reverse_index(loop)
    _by_element(loop.body, count())
    gang, extent = Binding("gang", width), loop.extent
    if extent.is_const and extent.attr <= width:
        _give_each(loop.body, set(private), loop.var, width)
        return For(loop.var, extent, [*rows, *loop.body], True, gang, loop.nodes)
    number = Var(f"{loop.var.name}_gang", dtypes.int64)
    lane = Var(f"{loop.var.name}_lane", dtypes.int64)
    _give_each(loop.body, set(private), lane, width)
    first = e.mul(e.read(number), e.index(width))
    if extent.is_const and extent.attr % width == 0:
        extent = e.index(width)
    else:
        extent = e.binary("min", e.index(width), e.sub(extent, first))
    index = Let(loop.var, e.add(first, e.read(lane)))
    body = [index, *rows, *loop.body]
    inner = For(lane, extent, body, True, gang, loop.nodes)
    blocks = e.div(e.add(loop.extent, e.index(width - 1)), e.index(width))
    return For(number, blocks, [inner], True, loop.binding, loop.nodes)


def _by_element(body: list[Stmt], numbers: Iterator[int]) -> None:
    """Copy and exchange arrays by element, so that masks apply to each lane.

    swap b1, b2    ->    for b1_at0_0 in 0..6 independent:
                             let b1_was0: f64 = b1[b1_at0_0]
                             b1[b1_at0_0] = b2[b1_at0_0]
                             b2[b1_at0_0] = b1_was0
    """
    for k, s in enumerate(body):
        for inner in bodies(s):
            _by_element(inner, numbers)
        if isinstance(s, Swap):
            body[k] = _loops(s.a, s.b, next(numbers), exchanges=True)
        elif isinstance(s, Copy):
            body[k] = _loops(s.target, s.source, next(numbers), exchanges=False)


def _loops(a: Buffer, b: Buffer, number: int, *, exchanges: bool) -> Stmt:
    names = [f"{a.name}_at{number}_{axis}" for axis in range(len(a.shape))]
    variables = [Var(name, dtypes.int64) for name in names]
    at = tuple(map(e.read, variables))
    was = Var(f"{a.name}_was{number}", a.dtype)
    body: list[Stmt] = [Store(a, at, e.load(b, at))]
    if exchanges:
        first = Let(was, e.load(a, at))
        body = [first, *body, Store(b, at, e.read(was))]
    for var, extent in reversed(list(zip(variables, a.shape, strict=True))):
        body = [For(var, extent, body, independent=True)]
    return body[0]


def _give_each(
    body: Sequence[Stmt], private: set[Buffer], lane: Var, width: int
) -> None:
    """Give each lane its own part of the buffers that are private to an iteration.

    b1[i4] = b1[i4] * 2.0 -> b1[i4, step2_lane] = b1[i4, step2_lane] * 2.0
    """
    index = e.read(lane)

    def placed(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in private:
            return None
        at = [rewrite(i, placed) for i in e.index_of(node)]
        condition = e.condition_of(node)
        condition = condition and rewrite(condition, placed)
        return e.load(node.attr, (*at, index), condition)

    for s in statements(body):
        replace(s, placed)
        if isinstance(s, Store) and s.buffer in private:
            s.indices = (*s.indices, index)
    for buffer in private:
        buffer.shape = (*buffer.shape, e.index(width))


def _share_reverse_index(loop: For) -> None:
    """Name the index of lanes that count down, so that they reach 0 together: the index
    is then the same in all lanes.

        for i4 in 0..n3:                        for i4 in 0..n3:
            c5 = c5 * b1[n3 - 1 - i4]    ->         let i4_left: i64 = n3 - 1 - i4
                                                    c5 = c5 * b1[i4_left]
    """
    for s in statements(loop.body):
        if not (isinstance(s, For) and s.binding.kind == "serial") or s.extent.is_const:
            continue
        left = Var(f"{s.var.name}_left", dtypes.int64)
        reverse = e.sub(e.sub(s.extent, e.index(1)), e.read(s.var))
        inside = list(statements(s.body))
        equal = {n for x in inside for n in nodes(*expressions(x)) if same(n, reverse)}
        if equal:
            for x in inside:
                replace(x, dict.fromkeys(equal, e.read(left)).get)
            s.body.insert(0, Let(left, reverse))


def _count_together(loop: For, private: Sequence[Buffer]) -> None:
    """Count the steps of divergent loops in uniform variables beside the lanes' own:
    only the counts that are read after the loop differ between lanes.

        var c2: i64 = 0                        var c2: i64 = 0
        do:                                    var c2_all: i64 = 0
        while y3 > x4 and c2 < 10:             do:
            ...                         ->     while y3 > x4 and c2_all < 10:
            c2 = c2 + 1                            ...
        out0[lane1] = c2                           c2 = c2_all + 1
                                                   c2_all = c2_all + 1
                                               out0[lane1] = c2
    """
    for body, declared, steps, counter in _counters(loop, Divergence(loop, private)):
        together = Var(f"{counter.var.name}_all", counter.var.dtype)
        for s in statements([steps]):
            replace(s, partial(_renamed, counter.var, together))  # shapes, too
        body.insert(body.index(declared) + 1, Declare(together, declared.value))
        at = steps.body.index(counter) + 1
        steps.body.insert(at, Assign(together, counter.value))


class _Counter(NamedTuple):
    """A variable to which each step of a loop adds a constant: the body that declares
    it, its declaration, the loop, and the assignment in a step."""

    body: list[Stmt]
    declared: Declare
    steps: While
    counter: Assign


def _counters(loop: For, divergence: Divergence) -> list[_Counter]:
    """Return the counters of divergent loops that differ between lanes."""
    counters: list[_Counter] = []
    changes = Counter(
        s.var for s in statements(loop.body) if isinstance(s, Assign | Accumulate)
    )
    pending = [loop.body]
    while pending:
        body = pending.pop()
        declared: dict[Var, Declare] = {}
        for s in body:
            pending += bodies(s)
            if isinstance(s, Declare) and divergence.is_uniform(s.value):
                declared[s.var] = s
            if not (isinstance(s, While) and divergence.is_divergent(s)):
                continue
            for x in s.body:
                if (
                    isinstance(x, Assign)
                    and x.var in declared
                    and x.var in divergence.varying
                    and changes[x.var] == 1
                    and _counts_on(x, s.body)
                ):
                    counters.append(_Counter(body, declared[x.var], s, x))
    return counters


def _counts_on(s: Assign, body: Sequence[Stmt]) -> bool:
    """Return whether `s` adds a constant to its variable."""
    values = {x.var: x.value for x in body if isinstance(x, Let)}

    def origin(value: Expr) -> Expr:
        while value.op == "var" and value.attr in values:
            value = values[value.attr]
        return value

    value = origin(s.value)
    if value.op != "add" or not value.args[1].is_const:
        return False
    before = origin(value.args[0])
    return before.op == "var" and before.attr is s.var


def _renamed(old: Var, new: Var, node: Expr) -> Expr | None:
    return e.read(new) if node.op == "var" and node.attr is old else None
