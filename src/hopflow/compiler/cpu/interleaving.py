"""Interleaved accesses of vector loops: contiguous vectors, and shuffles of them.

    for i in 0..n vector 4:                  v0, v1, v2 = x[i, 0], ..., 12 of them
        out[i] = x[i, 0] * x[i, 2]     ->    x0 = lanes 0, 3, 6, 9
                                             x2 = lanes 2, 5, 8, 11

A gather of 16 elements takes as long as some 30 shuffles, and CPUs without gathers load
each lane alone. The members of a group that a body stores one after the other are
interleaved in the same way, and stored as contiguous vectors.

So are elements by steps along an axis, as `x[2 * i]` and `x[2 * i + 1]`. The groups of
the iterations may also lie in rows of memory that are far apart, as those
of a body that computes several rows of a transposed array:

    for i in 0..n vector 4:                  r0, r1, r2, r3 = x[i, k..k+3], ...
        out[k, i] = x[i, k]            ->    c0, c1, c2, c3 = their columns
        ...
        out[k + 3, i] = x[i, k + 3]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain, groupby
from typing import Final, NamedTuple, TypeAlias

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function
from hopflow.compiler.llvm.operations import broadcast
from hopflow.compiler.llvm.types import lanes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    Let,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import (
    base_and_constant,
    loaded,
    nodes,
    same,
    same_shape,
    statements,
)

MOST: Final = 16
"""The largest factor of a group: the elements of a matrix of 4 by 4."""
PART_BITS: Final = 128
"""The bits of a part of a register within which most shuffles move elements."""
FENCED_BITS: Final = 256
"""From this size of vectors on LLVM must not combine the stages of a transposition. It
tries to for a third of the time that it takes for them, and finds nothing better."""


class Member(NamedTuple):
    """An element that an iteration accesses: member `number` of a group."""

    group: "Group"
    number: int


@dataclass(eq=False)
class Group:
    """An interleave group: the `factor` adjacent elements of each iteration, as those
    of a row of `x[n, 3]`; or, with a stride, all of a row, in vectors of `factor`.

    first   the distance of the first iteration's elements from the start of the buffer
    stride  the distance from one iteration's elements to those of the next; None: they
            lie one iteration after the other
    is_reversed  whether the next iteration's elements lie before one's
    loaded  the members that the body reads
    blocks  with a stride, the members that are loaded as a vector of each iteration
    stores  by member, the statement that writes it; None: not as vectors
    """

    buffer: Buffer
    factor: int
    first: Expr
    stride: Expr | None = None
    is_reversed: bool = False
    loaded: set[int] = field(default_factory=set)
    blocks: list[range] = field(default_factory=list)
    stores: dict[int, Store] | None = field(default_factory=dict)

    @property
    def is_split(self) -> bool:
        """Whether all members that the body reads are shuffled together, which takes
        fewer shuffles than one after the other."""
        if self.stride is not None or self.is_reversed:
            return False
        return _shuffles(self.factor) < len(self.loaded) * (self.factor - 1)

    def block(self, number: int) -> range | None:
        """Return the first block with a member."""
        return next((block for block in self.blocks if number in block), None)


class Groups:
    """The groups that the straight-line statements of a body read and write as vectors.

    Args:
        width: The number of lanes of a vector.
        is_filled: Whether all lanes have an iteration.
    """

    def __init__(
        self,
        body: Sequence[Stmt],
        width: int,
        affine: Affine,
        memory: Memory,
        target: CpuTarget,
        *,
        is_filled: bool,
    ) -> None:
        self._groups: dict[Buffer, list[Group]] = {}
        self._affine, self._memory = affine, memory
        self._width, self._target = width, target
        self._is_filled = is_filled
        self._changing = {
            x.var for x in statements(body) if isinstance(x, Assign | Accumulate)
        }
        for statement in filter(is_straight, body):
            for node in loaded(statement):
                if e.condition_of(node) is None:
                    member = self._find(node.attr, e.index_of(node))
                    if member is not None:
                        member.group.loaded.add(member.number)
            if isinstance(statement, Store):
                member = self._find(statement.buffer, statement.indices)
                if member is not None and member.group.stores is not None:
                    if member.number in member.group.stores:
                        member.group.stores = None
                    else:
                        member.group.stores[member.number] = statement
        self.stores: dict[Store, Member] = {}
        for groups in self._groups.values():
            for group in groups:
                if group.stride is not None:
                    group.blocks = [*_blocks(sorted(group.loaded), group.factor)]
                self._settle(group, body)
        for run in self._runs(body):
            self._store_rows(run)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.stores) or any(self._loaded())

    @property
    def has_rows(self) -> bool:
        """Whether rows are transposed, which takes much code."""
        return any(group.stride is not None for group in self._loaded())

    @property
    def shuffles(self) -> int:
        """About how many shuffles one vector takes."""
        stored = {member.group for member in self.stores.values()}
        return sum(
            _shuffles(group.factor)
            * max(1, self._width // self._target.lanes(group.buffer.dtype))
            for group in (*self._loaded(), *stored)
        )

    def _loaded(self) -> Iterator[Group]:
        """Yield the groups that are loaded as vectors."""
        for group in chain.from_iterable(self._groups.values()):
            is_strided = group.stride is None
            if self._pays(group, len(group.loaded)) if is_strided else group.blocks:
                yield group

    def load(self, buffer: Buffer, at: Index) -> Member | None:
        """Return the member that a read without condition takes; None: it is no
        interleaved access."""
        member = self._find(buffer, at) if buffer in self._groups else None
        if member is None:
            return None
        group, number = member
        if group.stride is not None:
            return member if group.block(number) else None
        return member if self._pays(group, len(group.loaded)) else None

    def _settle(self, group: Group, body: Sequence[Stmt]) -> None:
        """Decide whether the stores of a group are vectors.

        All its members are stored, and until the last is, no one reads the buffer, and
        there is no control flow.
        """
        stores = group.stores or {}
        if len(stores) != group.factor or not self._pays(group, group.factor):
            return
        numbers = sorted(body.index(store) for store in stores.values())
        between = body[numbers[0] : numbers[-1] + 1]
        if not all(map(is_straight, between)):
            return
        if any(
            node.attr is group.buffer for x in between[1:] for node in loaded(x)
        ) or any(
            isinstance(x, Store)
            and x.buffer is group.buffer
            and x not in stores.values()
            for x in between
        ):
            return
        self.stores |= {store: Member(group, k) for k, store in stores.items()}

    def _runs(self, body: Sequence[Stmt]) -> Iterator[list[Store]]:
        """Yield stores of adjacent elements, one after the other, which are not stored
        as vectors yet: no one reads the buffer before the last of them."""
        run: list[Store] = []
        for s in body:
            is_read = run and any(node.attr is run[0].buffer for node in loaded(s))
            if is_read or not is_straight(s):
                yield run
                run = []
            if not isinstance(s, Store):
                continue
            if run and not (s.buffer is run[0].buffer and _follows(run[-1], s)):
                yield run
                run = []
            if s not in self.stores:
                run.append(s)
        yield run

    def _store_rows(self, run: Sequence[Store]) -> None:
        """Let the elements of a row of each iteration be stored as vectors, if the rows
        do not lie side by side."""
        while len(run) > 1:
            first = run[0]
            most = min(self._width, self._target.lanes(first.buffer.dtype), len(run))
            factor = 1 << (most.bit_length() - 1)
            row, run = run[:factor], run[factor:]
            form = self._affine.of(self._memory.linear(first.buffer, first.indices))
            if form is None or first.buffer.strides is not None or factor < 2:
                return
            if self._may_change(first.indices):
                return
            stride, start = form
            if stride.is_const and abs(stride.attr) < factor:
                return
            group = Group(first.buffer, factor, start, stride)
            self.stores |= {store: Member(group, k) for k, store in enumerate(row)}

    def _find(self, buffer: Buffer, at: Index) -> Member | None:
        """Return the member of a group that an iteration accesses."""
        if buffer.strides is not None or not at or self._may_change(at):
            return None
        row = buffer.shape[-1]
        if row.is_const and row.attr >= self._target.lanes(buffer.dtype):
            # Square blocks take fewer shuffles than groups of several vectors.
            return self._find_in_rows(buffer, at) or self._find_strided(buffer, at)
        return self._find_strided(buffer, at) or self._find_in_rows(buffer, at)

    def _may_change(self, at: Index) -> bool:
        """Return whether an index reads a variable that the body assigns: before and
        after that it is another place."""
        if not self._changing:
            return False
        return any(node.attr in self._changing for node in nodes(*at))

    def _find_strided(self, buffer: Buffer, at: Index) -> Member | None:
        """Return the member that an access by steps of a few elements takes. Memory is
        divided into groups of as many: all of them are within the buffer."""
        form = self._affine.of(self._memory.linear(buffer, at))
        if form is None or not form[0].is_const or not self._is_filled:
            return None
        (step, offset), elements = form, reduce(e.mul, buffer.shape, e.index(1))
        factor = abs(step.attr)
        if not 2 <= factor <= MOST or not _is_multiple(elements, factor):
            return None
        base, k = base_and_constant(offset)
        if not _is_multiple(base, factor):
            return None
        start = e.add(base, e.index(k // factor * factor))
        group = self._group(buffer, factor, start, is_reversed=step.attr < 0)
        return Member(group, k % factor)

    def _find_in_rows(self, buffer: Buffer, at: Index) -> Member | None:
        """Return the member of a group in a row of its own that an iteration
        accesses."""
        *axes, last = at
        if not axes or not self._affine.is_uniform(last):
            return None
        base, k = without_constants(last)
        factor = min(self._width, self._target.lanes(buffer.dtype))
        form = self._affine.of(self._memory.linear(buffer, (*axes, base)))
        if form is None or (form[0].is_const and abs(form[0].attr) < 2):
            return None
        stride, first = form
        return Member(self._group(buffer, factor, first, stride), k)

    def _group(
        self,
        buffer: Buffer,
        factor: int,
        first: Expr,
        stride: Expr | None = None,
        is_reversed: bool = False,
    ) -> Group:
        """Return a group, which is made if it is new."""
        groups = self._groups.setdefault(buffer, [])
        for group in groups:
            if group.factor != factor or group.is_reversed is not is_reversed:
                continue
            if stride is None or group.stride is None:
                is_same = stride is group.stride
            else:
                is_same = same(stride, group.stride)
            if is_same and same(group.first, first):
                return group
        is_stored = stride is None and not is_reversed
        stores: dict[int, Store] | None = {} if is_stored else None
        group = Group(buffer, factor, first, stride, is_reversed, stores=stores)
        groups.append(group)
        return group

    def _pays(self, group: Group, used: int) -> bool:
        """Return whether shuffles take less time than gathers."""
        if not used or self._target.lanes(group.buffer.dtype) < 2:
            return False
        shuffle = 1 if self._target.has_masks else 3
        shuffles = used * (group.factor - 1)
        if not group.is_reversed:
            shuffles = min(shuffles, _shuffles(group.factor))
        return group.factor + shuffle * shuffles <= 2 * used * self._width


def is_straight(s: Stmt) -> bool:
    """Return whether a statement only computes values, and stores them."""
    return isinstance(s, (Let, Declare, Assign, Accumulate, Store))


def _blocks(members: Sequence[int], most: int) -> Iterator[range]:
    """Yield blocks of adjacent members of rows, of a power of two of them. No element
    is loaded that the body does not read: the last block may overlap the one before."""
    for _, numbered in groupby(enumerate(members), lambda pair: pair[1] - pair[0]):
        run = [member for _, member in numbered]
        first, stop = run[0], run[-1] + 1
        size = min(most, 1 << (len(run).bit_length() - 1))
        for at in range(first, stop, size) if size > 1 else ():
            start = min(at, stop - size)
            yield range(start, start + size)


def _follows(before: Store, after: Store) -> bool:
    """Return whether a store is to the element after that of the one before."""
    *axes, last = after.indices or [e.index(0)]
    *same_axes, first = before.indices or [e.index(0)]
    if not same_shape(axes, same_axes):
        return False
    return same(last, e.add(first, e.index(1)))


def without_constants(position: Expr) -> tuple[Expr, int]:
    """Return a sum without the constants among its terms, and the sum of these.

    Unlike `base_and_constant`, it takes the constants of `n - 1 - i`, too. Without them
    a place may lie before the buffer: it tells groups apart, and is no address.
    """
    if position.is_const:
        return e.index(0), position.attr
    if position.op in ("add", "sub"):
        (x, k), (y, m) = map(without_constants, position.args)
        if position.op == "add":
            return e.add(x, y), k + m
        return e.sub(x, y), k - m
    if position.op == "mul" and position.args[1].is_const:
        x, k = without_constants(position.args[0])
        return e.mul(x, position.args[1]), k * position.args[1].attr
    return position, 0


def _is_multiple(x: Expr, factor: int) -> bool:
    """Return whether an integer is known to be a multiple of a factor."""
    if x.is_const:
        return bool(x.attr % factor == 0)
    if x.op == "mul":
        return any(_is_multiple(a, factor) for a in x.args)
    return x.op in ("add", "sub") and all(_is_multiple(a, factor) for a in x.args)


def _stages(factor: int) -> list[int]:
    """Return the prime factors of a number."""
    stages, divisor = list[int](), 2
    while factor > 1:
        if factor % divisor:
            divisor += 1
        else:
            stages.append(divisor)
            factor //= divisor
    return stages


def _shuffles(factor: int) -> int:
    """Return how many shuffles separate, or interleave, all members of groups: `p - 1`
    a vector for each prime factor `p`."""
    return factor * sum(p - 1 for p in _stages(factor))


def split(f: Function, vectors: Sequence[str], scalar: str, width: int) -> list[str]:
    """Emit all members of `width` iterations, whose groups lie in vectors: of every
    p-th element at a time, `p` being a prime factor of their number."""
    factor = len(vectors)
    if factor == 1:
        return list(vectors)
    p = _stages(factor)[0]
    members = [""] * factor
    for k in range(p):
        places = [divmod(p * t + k, width) for t in range(width)]
        every = [
            shuffled(f, vectors[first : first + p], scalar, places)
            for first in range(0, factor, p)
        ]
        members[k::p] = split(f, every, scalar, width)
    return members


def deinterleaved(
    f: Function, vectors: Sequence[str], scalar: str, width: int, member: Member
) -> str:
    """Emit a member of `width` iterations, whose groups lie in vectors."""
    factor, iterations = len(vectors), range(width)
    if member.group.is_reversed:
        iterations = iterations[::-1]
    places = [divmod(k * factor + member.number, width) for k in iterations]
    return shuffled(f, vectors, scalar, places)


def interleaved(
    f: Function, members: Sequence[str], scalar: str, width: int
) -> list[str]:
    """Emit groups as contiguous vectors, from the vector of each member."""
    factor = len(members)
    if factor == 1:
        return list(members)
    p = _stages(factor)[0]
    every = [interleaved(f, members[k::p], scalar, width) for k in range(p)]
    whole = [(n % p, n // p) for n in range(p * width)]
    return [
        shuffled(f, [vectors[at] for vectors in every], scalar, whole[k : k + width])
        for at in range(factor // p)
        for k in range(0, p * width, width)
    ]


def transposed(
    f: Function, rows: Sequence[str], scalar: str, columns: int
) -> list[str]:
    """Emit the columns of rows, each of which is a vector; there is a multiple of
    `columns` of them.

    Square blocks are transposed in stages, each of which replaces pairs of vectors.
    """
    width = len(rows)
    vectors = [joined(f, [*rows[k::columns]], scalar, columns) for k in range(columns)]
    stages = stages_of(columns, min(width, PART_BITS // _bits(scalar)))
    t = lanes(scalar, width)
    for step, order in stages:
        for k in (k for k in range(columns) if not k & step):
            pair = f"{t} {vectors[k]}, {t} {vectors[k + step]}"
            for second in (0, 1):
                sources = [order(lane, second) for lane in range(width)]
                mask = ", ".join(f"i32 {at * width + lane}" for at, lane in sources)
                vectors[k + second * step] = f.emit(
                    f"shufflevector {pair}, <{width} x i32> <{mask}>"
                )
        if columns >= 4 and width * _bits(scalar) >= FENCED_BITS:
            vectors = [_fenced(f, x, scalar, width) for x in vectors]
    return vectors


def _fenced(f: Function, vector: str, scalar: str, width: int) -> str:
    """Return a vector, which LLVM takes for another one. No instruction does this."""
    t, bits = lanes(scalar, width), width * _bits(scalar)
    floats = lanes("float", bits // 32)
    name = f"llvm.arithmetic.fence.v{bits // 32}f32"
    f.module.declare(f"{floats} @{name}({floats})")
    same = vector if t == floats else f.emit(f"bitcast {t} {vector} to {floats}")
    other = f.emit(f"call {floats} @{name}({floats} {same})")
    return other if t == floats else f.emit(f"bitcast {floats} {other} to {t}")


Place: TypeAlias = tuple[str, str]
"""The address of the first row of a block, and the distance between rows in bytes."""


def transpose_block(
    f: Function, size: int, bits: int, source: Place, target: Place, rows: str = ""
) -> None:
    """Emit the transposition of a block.

    Args:
        size: The number of rows and of columns.
        bits: The size of an element.
        source: Where the rows are.
        target: Where the columns are written.
        rows: The number of rows that there are, one at least; empty: all.
    """
    scalar, vector, flags = f"i{bits}", lanes(f"i{bits}", size), lanes("i1", size)
    align, (address, step) = f"align {bits // 8}", source
    loaded = list[str]()
    for k in range(size):
        loaded.append(f.emit(f"load {vector}, ptr {address}, {align}"))
        distance = step
        if rows:  # the last row again, where there is none
            is_there = f.emit(f"icmp ult i64 {k + 1}, {rows}")
            distance = f.emit(f"select i1 {is_there}, i64 {step}, i64 0")
        address = f.emit(f"getelementptr i8, ptr {address}, i64 {distance}")
    store, mask = f"llvm.masked.store.v{size}{scalar}.p0", ""
    if rows:
        f.module.declare(f"void @{store}({vector}, ptr, {flags})")
        count = broadcast(f, rows, "i64", size)
        numbers = ", ".join(f"i64 {k}" for k in range(size))
        mask = f.emit(f"icmp ugt {lanes('i64', size)} {count}, <{numbers}>")
    address, step = target
    for column in transposed(f, loaded, scalar, size):
        if rows:
            arguments = f"{vector} {column}, ptr {align} {address}, {flags} {mask}"
            f.do(f"call void @{store}({arguments})")
        else:
            f.do(f"store {vector} {column}, ptr {address}, {align}")
        address = f.emit(f"getelementptr i8, ptr {address}, i64 {step}")


_Order: TypeAlias = Callable[[int, int], tuple[int, int]]
"""For a lane of the first or the second result (0 or 1) of a stage: which of its two
vectors it comes from, and from which lane."""
_Stage: TypeAlias = tuple[int, _Order]
"""The difference of the numbers of two vectors, which a stage replaces, and the order
of the lanes of its results."""


def stages_of(columns: int, part: int) -> list[_Stage]:
    """Return the stages that transpose blocks of as many vectors as lanes.

    Vectors exchange halves, then quarters, down to single lanes; or down to parts of
    128 bits, within which elements then alternate. That is one instruction for each
    result (`unpcklps`), where LLVM makes two of an exchange, or takes longer to find
    one.

    Args:
        columns: The size of a block, a power of two.
        part: The number of lanes in 128 bits.
    """
    alternate = part if columns >= part else 1
    exchanges = [_exchange(half) for half in _halves(columns) if half >= alternate]
    steps = _halves(alternate)
    return exchanges + [(step, partial(_alternating, part)) for step in steps]


def _halves(size: int) -> list[int]:
    """Return half of a power of two, a quarter, and so on, down to 1."""
    return [1 << k for k in reversed(range(size.bit_length() - 1))]


def _exchange(half: int) -> _Stage:
    """Exchange the later half of each `2 * half` lanes of the first vector with the
    earlier half of the second one."""

    def order(lane: int, second: int) -> tuple[int, int]:
        if lane & half:
            return 1, lane - half + second * half
        return 0, lane + second * half

    return half, order


def _alternating(part: int, lane: int, second: int) -> tuple[int, int]:
    """The elements of the first, or the second, half of a part of both vectors."""
    first, place = lane // part * part, lane % part
    return place % 2, first + place // 2 + second * part // 2


def _bits(scalar: str) -> int:
    """Return the size of an LLVM type in bits."""
    return {"half": 16, "float": 32, "double": 64}.get(scalar) or int(scalar[1:])


def shuffled(
    f: Function, vectors: Sequence[str], scalar: str, sources: list[tuple[int, int]]
) -> str:
    """Emit a vector of as many lanes, each given as `(vector, lane)`."""
    width = len(sources)
    t = lanes(scalar, width)
    found = vectors[0]
    for j, vector in enumerate(vectors[1:], 1):
        order = []
        for k, (source, lane) in enumerate(sources):
            if source == j:
                order.append(f"i32 {width + lane}")
            elif source < j:  # it is in its lane already, unless this is the first step
                order.append(f"i32 {lane if j == 1 else k}")
            else:
                order.append("i32 poison")
        found = f.emit(
            f"shufflevector {t} {found}, {t} {vector}, "
            f"<{width} x i32> <{', '.join(order)}>"
        )
    return found


def part(f: Function, vector: str, scalar: str, width: int, at: int, of: int) -> str:
    """Emit `of` of the `width` lanes of a vector, from lane `at` on."""
    if of == width:
        return vector
    t, order = lanes(scalar, width), ", ".join(f"i32 {k}" for k in range(at, at + of))
    if of == 1:
        return f.emit(f"extractelement {t} {vector}, i64 {at}")
    return f.emit(f"shufflevector {t} {vector}, {t} poison, <{of} x i32> <{order}>")


def joined(f: Function, parts: list[str], scalar: str, width: int) -> str:
    """Emit vectors of `width` lanes, a power of two of them, as one."""
    while len(parts) > 1:
        t, order = lanes(scalar, width), ", ".join(f"i32 {k}" for k in range(2 * width))
        parts = [
            f.emit(f"shufflevector {t} {x}, {t} {y}, <{2 * width} x i32> <{order}>")
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]
