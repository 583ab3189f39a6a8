"""Let buffers that are not live at once share the arena, the memory of a program.

    buffer a0: f64[8] in arena              arena of 64 bytes: a0 at 0, b1 at 0
    buffer b1: f64[8] in arena
    for i2 in 0..8: a0[i2] = x[i2]    ->
    copy out0 <- a0
    for i3 in 0..8: b1[i3] = y[i3]
    copy out1 <- b1

Statements are numbered in program order. A buffer is live from its first access to its
last, in the innermost body that contains all accesses, if that body writes all of it
before anything else accesses it. Otherwise its value may come from an earlier
iteration, and it is live throughout the outermost loop around all accesses.

A loop that runs its iterations concurrently (gang, threads, GPU axes) counts as one
statement, since a buffer that is dead in one iteration may be live in another.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow.compiler.private import private_buffers
from hopflow.dtypes import DType
from hopflow.logs import passing
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.printer import format_expr
from hopflow.loop_ir.program import (
    Allocate,
    Call,
    Copy,
    For,
    HostCall,
    If,
    Invoke,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
    While,
)
from hopflow.loop_ir.routines import ROUTINES

ALIGNMENT: Final = 64
"""Bytes of a cache line, or more. Sizes are rounded up to it: vectors may write behind
the end of a buffer that ends within a line."""
NDArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The layout of the arena.

    It has neither the buffers that the program or a thread allocates, nor those in
    shared memory.

    offsets   offsets in bytes, multiples of 64, as i64 expressions over the
              program's sizes
    total     the size in bytes
    """

    offsets: Mapping[Buffer, Expr]
    total: Expr

    def __str__(self) -> str:
        places = [f"{b.name} at {format_expr(at)}" for b, at in self.offsets.items()]
        return "\n".join([f"arena of {format_expr(self.total)} bytes", *places])


class Interval(NamedTuple):
    """The statements from `start` to `stop`, by number, both included."""

    start: int
    stop: int

    def overlaps(self, other: "Interval") -> bool:
        return self.start <= other.stop and other.start <= self.stop


def reuse(program: Program) -> ArenaPlan:
    """Return the layout of a program's arena."""
    plans: list[ArenaPlan] = []
    with passing("reuse", program.name, lambda: "\n".join(map(str, plans))):
        plans.append(_laid_out(program))
    return plans[0]


def _laid_out(program: Program) -> ArenaPlan:
    """Assign an offset to each buffer.

    Buffers of static size are placed by first fit, the largest first; the others
    follow, each in the place of an earlier one of the same size if that is dead.
    """
    planned = _planned(program)
    live = _live(program, planned)
    offsets: dict[Buffer, Expr] = {}
    sizes = {b: size_in_bytes(b.shape, b.dtype) for b in live}
    static = [b for b in live if sizes[b].is_const]
    end = 0
    # The placed buffers in the order of their offsets; together they leave no hole.
    first, last, start, stop = np.zeros((4, len(static)), np.int64)
    latest, earliest = -1, inf
    for k, b in enumerate(sorted(static, key=lambda b: -sizes[b].attr)):
        size, when = sizes[b].attr, live[b]
        if latest <= when.stop and when.start <= earliest:  # overlaps all others
            at, offset = k, rounded_up(end)
        else:
            taken = ((start[:k] <= when.stop) & (stop[:k] >= when.start)).nonzero()[0]
            offset = _first_fit(size, first[taken], last[taken])
            at = int(first[:k].searchsorted(offset))
            for column in (first, last, start, stop):
                column[at + 1 : k + 1] = column[at:k]
        first[at], last[at] = offset, rounded_up(offset + size)
        start[at], stop[at] = when
        latest, earliest = max(latest, when.start), min(earliest, when.stop)
        offsets[b] = e.index(offset)
        end = max(end, offset + size)
    symbolic = {b: sizes[b] for b in live if b not in offsets}
    total = _place_symbolic(symbolic, live, end, offsets)
    unused = dict.fromkeys(planned, e.index(0))
    return ArenaPlan(unused | offsets, total)


def _planned(program: Program) -> list[Buffer]:
    if not program.arena:
        return []
    apart = {s.buffer for s in walk.statements(program.body) if isinstance(s, Allocate)}
    apart.update(*private_buffers(program.body).values())
    return [b for b in program.arena if b.space == "arena" and b not in apart]


def _first_fit(size: int, first: NDArray, end: NDArray) -> int:
    """Return the lowest offset of `size` free bytes.

    The bytes from each of `first`, in order, up to the aligned `end` are taken.
    """
    if not len(first) or first[0] >= size:
        return 0
    free = np.maximum.accumulate(end)
    holes = (first[1:] - free[:-1] >= size).nonzero()[0]
    return int(free[holes[0] if len(holes) else -1])


def rounded_up(size: int) -> int:
    """Return the bytes that a buffer of this size takes: whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _place_symbolic(
    sizes: Mapping[Buffer, Expr],
    live: Mapping[Buffer, Interval],
    start: int,
    offsets: dict[Buffer, Expr],
) -> Expr:
    """Place buffers whose sizes are not constants from `start` on; return the end."""
    # Each place has its offset, its size, and disjoint live intervals in order.
    places: list[tuple[Expr, Expr, list[Interval]]] = []
    end = e.index(rounded_up(start)) if sizes else e.index(start)
    for b, size in sizes.items():
        for offset, taken, tenants in places:
            at = bisect_right(tenants, live[b].stop, key=attrgetter("start"))
            is_free = at == 0 or not live[b].overlaps(tenants[at - 1])
            if is_free and walk.same(taken, size):
                offsets[b] = offset
                tenants.insert(at, live[b])
                break
        else:
            offsets[b] = end
            places.append((end, size, [live[b]]))
            padded = e.add(size, e.index(ALIGNMENT - 1))
            end = e.add(end, e.binary("and", padded, e.index(-ALIGNMENT)))
    return end


def size_in_bytes(shape: Sequence[Expr], dtype: DType) -> Expr:
    """Return the size of a dense array in bytes."""
    total = e.index(dtype.itemsize)
    for extent in shape:
        total = e.mul(extent, total)
    return total


# --- liveness -------------------------------------------------------------------------


class _Access(NamedTuple):
    """A statement that accesses a buffer, with its number and the enclosing bodies."""

    number: int
    path: tuple["_Body", ...]
    statement: Stmt


@dataclass(eq=False, slots=True)
class _Body:
    """A body of `enclosing`; its statements have numbers from `start` to `stop`.

    The body of a loop is the code of an iteration: of a `While` the head, the test and
    the body.
    """

    enclosing: Stmt | None
    start: int
    stop: int = 0

    @property
    def is_loop(self) -> bool:
        return isinstance(self.enclosing, (For, While))


def live_intervals(program: Program) -> dict[Buffer, Interval]:
    """Return the live interval of each buffer of the arena that is used."""
    return _live(program, _planned(program))


def _live(program: Program, planned: Sequence[Buffer]) -> dict[Buffer, Interval]:
    live: dict[Buffer, Interval] = {}
    if not planned:
        return live
    numbering = _Numbering()
    numbering.body(None, program.body, ())
    swapped = _swap_groups(program)
    named = _Named(numbering.named)
    for b in planned:
        group = swapped.get(b, (b,))
        accesses = [a for member in group for a in numbering.accesses.get(member, ())]
        if accesses:
            live[b] = _interval(b, accesses, named, may_define=len(group) == 1)
    return live


class _Numbering:
    """Numbers statements, and collects the accesses of buffers.

    named      the buffers that each statement names; a loop that runs its iterations
               concurrently names those of its body too
    accesses   the accesses of each buffer
    """

    def __init__(self) -> None:
        self.named: dict[Stmt, dict[Buffer, None]] = {}
        self.accesses: dict[Buffer, list[_Access]] = {}
        self._count = 0

    def body(
        self, enclosing: Stmt | None, statements: list[Stmt], path: tuple[_Body, ...]
    ) -> None:
        body = _Body(enclosing, self._count)
        path = (*path, body)
        if isinstance(enclosing, While):
            for s in enclosing.head:
                self._statement(s, path)
            self._record(enclosing, walk.buffers(enclosing), path)
        for s in statements:
            self._statement(s, path)
        body.stop = self._count - 1

    def _statement(self, s: Stmt, path: tuple[_Body, ...]) -> None:
        if isinstance(s, While):
            self.body(s, s.body, path)
        elif isinstance(s, For) and s.binding.kind not in ("serial", "vector"):
            inside = (b for inner in walk.statements([s]) for b in walk.buffers(inner))
            self._record(s, inside, path)
        else:
            self._record(s, walk.buffers(s), path)
            for inner in walk.bodies(s):
                self.body(s, inner, path)

    def _record(
        self, s: Stmt, buffers: Iterator[Buffer], path: tuple[_Body, ...]
    ) -> None:
        self.named[s] = dict.fromkeys(buffers)
        for b in self.named[s]:
            self.accesses.setdefault(b, []).append(_Access(self._count, path, s))
        self._count += 1


def _swap_groups(program: Program) -> dict[Buffer, tuple[Buffer, ...]]:
    """Return for each buffer that is swapped all that it may exchange memory with."""
    groups: dict[Buffer, tuple[Buffer, ...]] = {}
    for s in walk.statements(program.body):
        if isinstance(s, Swap):
            members = (*groups.get(s.a, (s.a,)), *groups.get(s.b, (s.b,)))
            group = tuple(dict.fromkeys(members))
            groups |= dict.fromkeys(group, group)
    return groups


def _interval(
    buffer: Buffer, accesses: Sequence[_Access], named: "_Named", *, may_define: bool
) -> Interval:
    common = _common_path([a.path for a in accesses])
    if len(common) == 1 == max(len(a.path) for a in accesses):  # no enclosing loop
        numbers = [a.number for a in accesses]
        return Interval(min(numbers), max(numbers))
    body = common[-1]
    first = min(accesses, key=lambda a: a.number)
    statement = _statement_in(body, first)
    loops = [b for b in common if b.is_loop]
    if loops and not (may_define and _defines(statement, buffer, named)):
        return Interval(loops[0].start, loops[0].stop)
    ends = [_extent_in(body, access) for access in accesses]
    return Interval(min(start for start, _ in ends), max(stop for _, stop in ends))


def _common_path(paths: Sequence[tuple[_Body, ...]]) -> list[_Body]:
    if all(path is paths[0] for path in paths):
        return [*paths[0]]
    common = []
    for level in zip(*paths, strict=False):
        if any(b is not level[0] for b in level):
            break
        common.append(level[0])
    return common


def _statement_in(body: _Body, access: _Access) -> Stmt:
    """Return the statement of `body` that is or contains the access."""
    depth = access.path.index(body)
    inner = access.path[depth + 1 :]
    return access.statement if not inner else inner[0].enclosing or access.statement


def _extent_in(body: _Body, access: _Access) -> tuple[int, int]:
    """Return the numbers of an access in `body`, those of a loop if in one."""
    depth = access.path.index(body)
    for inner in access.path[depth + 1 :]:
        if inner.is_loop:
            return inner.start, inner.stop
    return access.number, access.number


# --- whether all of a buffer is written before anything reads it ----------------------


class _Named:
    """The buffers that statements and those in them name, in a memo table."""

    def __init__(self, named: Mapping[Stmt, Collection[Buffer]]) -> None:
        """Begin with `named`, the buffers that each statement names itself."""
        self._named = named
        self._names: dict[Stmt, set[Buffer]] = {}

    def touches(self, s: Stmt, buffer: Buffer) -> bool:
        if not walk.bodies(s):
            return buffer in self._named.get(s, ())
        if s not in self._names:
            names = [self._named.get(inner, ()) for inner in walk.statements([s])]
            self._names[s] = set(chain.from_iterable(names))
        return buffer in self._names[s]


def _defines(s: Stmt, buffer: Buffer, named: _Named) -> bool:
    """Return whether `s` writes all of `buffer` before it reads any of it."""
    match s:
        case If():
            return not _reads(s, buffer) and all(
                _body_defines(side, buffer, named) for side in (s.then, s.else_)
            )
        case While():
            return not _reads(s, buffer) and _body_defines(s.head, buffer, named)
        case For():
            return _nest_fills(s, buffer, named)
        case _:
            return _fills(s, buffer, {})


def _reads(s: Stmt, buffer: Buffer) -> bool:
    return any(node.attr is buffer for node in walk.loaded(s))


def _body_defines(body: Sequence[Stmt], buffer: Buffer, named: _Named) -> bool:
    for s in body:
        if named.touches(s, buffer):
            return _defines(s, buffer, named)
    return False


def _nest_fills(nest: For, buffer: Buffer, named: _Named) -> bool:
    """Return whether a nest of loops writes all of `buffer`, and never reads it.

    Each iteration writes one element or one sub-array.
    """
    extents: dict[Var, Expr] = {}
    s: Stmt = nest
    while isinstance(s, For):
        extents[s.var] = s.extent
        touching = [inner for inner in s.body if named.touches(inner, buffer)]
        if len(touching) != 1 or _reads(s, buffer):
            return False
        [s] = touching
    return _fills(s, buffer, extents)


def _fills(s: Stmt, buffer: Buffer, extents: Mapping[Var, Expr]) -> bool:
    """Return whether `s` does so, run for all values of the variables in `extents`."""
    if _reads(s, buffer):
        return False
    match s:
        case Store():
            return _covers(s.indices, buffer, extents)
        case Copy():
            return s.target is buffer and s.source is not buffer and not extents
        case Call():
            roles = [
                (array.role, arg)
                for array, arg in zip(ROUTINES[s.routine].arrays, s.args, strict=False)
                if isinstance(arg, Ref) and arg.buffer is buffer
            ]
            return len(roles) == 1 and all(
                role == "out" and _covers_by(arg, extents) for role, arg in roles
            )
        case HostCall() | Invoke():
            results = [ref for ref in s.results if ref.buffer is buffer]
            is_read = any(ref.buffer is buffer for ref in s.operands)
            return not is_read and any(_covers_by(ref, extents) for ref in results)
        case _:
            return False


def _covers_by(ref: Ref, extents: Mapping[Var, Expr]) -> bool:
    return ref.rows is None and _covers(ref.at, ref.buffer, extents)


def _covers(at: Sequence[Expr], buffer: Buffer, extents: Mapping[Var, Expr]) -> bool:
    """Return whether `at` takes every value of the leading axes of `buffer`."""
    remaining = dict(extents)
    for i, extent in zip(at, buffer.shape, strict=False):
        if i.is_const and i.attr == 0 and extent.is_const and extent.attr == 1:
            continue
        if (
            i.op != "var"
            or i.attr not in remaining
            or not walk.same(remaining.pop(i.attr), extent)
        ):
            return False
    # The remaining loops must run at least once.
    return all(n.is_const and n.attr > 0 for n in remaining.values())
