"""Vector loops: `width` iterations of a straight-line body at a time.

The remaining iterations are the last ones of a vector that overlaps the one before, if
they may run twice; or they run under a mask, if the CPU has masks, or one by one. Code
that does not depend on the loop's variable runs once, before the loop. The code of a
large body is emitted once, for all vectors, or it is that of one element for the rest:
LLVM takes long for it. If it has many shuffles, its vectors are single registers for
the same reason, which add to the registers of a sum by turns.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from hopflow.compiler.cpu.affine import Affine, Form
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.interleaving import Groups, Member, part
from hopflow.compiler.cpu.lanes import LaneLoop, Lanes
from hopflow.compiler.cpu.transposition import (
    Block,
    Transposition,
    transpose,
    transposition,
)
from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.operations import broadcast
from hopflow.compiler.llvm.types import (
    lanes,
    memory_type,
    register_type,
    splat,
)
from hopflow.dtypes import bool_, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Accumulate, Assign, Declare, For, Let, Stmt, Store
from hopflow.loop_ir.walk import accessed, loaded

MAX_UNROLLED: Final = 4
"""A loop of constant extent with at most this many vectors is unrolled completely."""
LARGE_BODY: Final = 48
"""A body of more operations is emitted once, for all vectors. If iterations remain, the
last vector overlaps the one before, or all are masked, which costs little in such a
body."""
FEW: Final = 2
"""Iterations that remain of a large body run one by one, if there are so many times as
many whole vectors: then they take a small part of the time. They also do if they take
less time than a vector and its shuffles."""


def suits(s: For) -> bool:
    """Return whether `s` can run as vectors.

    Its body must be straight-line code that assigns only its own variables and
    accumulators.
    """
    declared = {x.var for x in s.body if isinstance(x, Declare)}
    return 1 < s.binding.width <= 64 and all(
        isinstance(x, (Let, Declare, Store, Accumulate))
        or (isinstance(x, Assign) and x.var in declared)
        for x in s.body
    )


def emit(emitter: CpuEmitter, s: For) -> None:
    """Emit `s` as a vector loop and its remaining iterations."""
    VectorLoop(emitter, s).emit()


class VectorLoop(LaneLoop):
    """An emitter of a vector loop: its preheader, the loop, the rest, the results."""

    def __init__(self, emitter: CpuEmitter, s: For) -> None:
        super().__init__(emitter, s, _width(s), Affine.of_straight(s))
        self._size = self.affine.size
        self.groups = self._grouped()
        self.slots: dict[Var, str] = {}  # of mutable variables
        self.accumulators: dict[Var, str] = {}  # with the names of their operations
        self._parts = 1  # the vectors of an accumulator
        self._depth = emitter.f.depth  # of the enclosing loops
        self._splats: dict[tuple[str, str], str] = {}
        self._rows: dict[tuple[Buffer, Expr], str] = {}
        self._declared = {x.var for x in s.body if isinstance(x, Declare)}
        for x in s.body:
            if isinstance(x, Accumulate) and x.var not in self._declared:
                self.accumulators[x.var] = x.combine
        if self.accumulators and self.groups.shuffles > LARGE_BODY:
            self._split_accumulators()
        f = emitter.f
        for var in (*self.accumulators, *self._declared):
            count = self._lanes_of_sums if var in self.accumulators else self.width
            self.slots[var] = f.slot(register_type(var.dtype, count), var.name)

    def _grouped(self) -> Groups:
        extent = self.s.extent
        return Groups(
            self.s.body,
            self.width,
            self.affine,
            self.emitter.memory,
            self.emitter.unit.target,
            is_filled=not extent.is_const or extent.attr >= self.width,
        )

    def _split_accumulators(self) -> None:
        """Let vectors be registers: as many of them make one of an accumulator."""
        types = {var.dtype for var in self.accumulators}
        fewest = min(self.emitter.unit.target.vector_width(t) for t in types)
        if bool_ not in types and fewest < self.width:
            self._parts, self.width = self.width // fewest, fewest
            self.groups = self._grouped()

    def _form(self, buffer: Buffer, at: Index) -> Form | None:
        return self.affine.of(self.emitter.memory.linear(buffer, at))

    def accumulator(self, var: Var, position: str) -> str:
        """Return the address of the vector of an accumulator that iterations from a
        position on add to."""
        if self._parts == 1 or var not in self.accumulators:
            return self.slots[var]
        f, t = self.emitter.f, register_type(var.dtype, self.width)
        number = f.emit(f"lshr i64 {position}, {self.width.bit_length() - 1}")
        part_ = f.emit(f"and i64 {number}, {self._parts - 1}")
        return f.emit(f"getelementptr {t}, ptr {self.slots[var]}, i64 {part_}")

    # --- code that runs once, before the loop

    def uniform(self, expr: Expr) -> str:
        with self._before():
            return self.emitter.values.value(expr)

    def define(self, var: Var, value: Expr) -> None:
        """Compute a `Let` that is uniform over the iterations."""
        self.emitter.values.constants[var] = self.uniform(value)

    def uniform_lanes(self, expr: Expr) -> str:
        scalar, type_ = self.uniform(expr), register_type(expr.dtype)
        vector = self._splats.get((type_, scalar))
        if vector is None:
            with self._before():
                vector = broadcast(self.emitter.f, scalar, type_, self.width)
            self._splats[type_, scalar] = vector
        return vector

    def member(self, buffer: Buffer, at: Index) -> Member | None:
        return self.groups.load(buffer, at)

    def row(self, buffer: Buffer, offset: Expr) -> str:
        address = self._rows.get((buffer, offset))
        if address is None:
            with self._before():
                address = self.emitter.values.address(buffer, offset)
            self._rows[buffer, offset] = address
        return address

    def _before(self) -> AbstractContextManager[None]:
        """Return a context that emits into the preheader."""
        return self.emitter.values.preheader(self._depth)

    # --- the loop

    def emit(self) -> None:
        """Emit the whole loop, with a preheader that all of its parts share."""
        emitter, f, extent = self.emitter, self.emitter.f, self.s.extent
        name = f.name("vector")
        values = emitter.values
        stop = values.value(extent)
        if not extent.is_const:
            some = f.emit(f"icmp sgt i64 {stop}, 0")
            f.branch_if(some, name, f"end.{name}")
        else:
            f.branch(name)
        f.start(name)
        with values.scope(), values.loop():
            with self._before():
                self._clear_accumulators()
            f.branch(f"main.{name}")
            f.start(f"main.{name}")
            copied = transposition(self.s.body, self)
            if copied is not None:
                self._transpose(copied, stop)
            elif self._is_by_element():
                self._one_by_one("0", stop, extent)
            elif self._is_large() and self._overlaps(stop):
                self._overlapping(stop)
            elif self._is_large() and self._has_rest() and self._masks_all():
                self._masked(stop)
            else:
                whole = self._whole(stop)
                self._main(whole)
                self._rest(name, whole, stop)
            self._finish()
        f.branch(f"end.{name}")
        f.start(f"end.{name}")
        values.forget_loads()

    def _clear_accumulators(self) -> None:
        for var, combine in self.accumulators.items():
            type_, width = register_type(var.dtype), self._lanes_of_sums
            value = splat(type_, operations.neutral(combine, var.dtype), width)
            self.emitter.f.do(
                f"store {lanes(type_, width)} {value}, ptr {self.slots[var]}"
            )

    def _whole(self, stop: str) -> str:
        """Return the number of iterations in whole vectors; in whole ones of the
        accumulators, if the rest runs one by one."""
        has_masks = self.emitter.unit.target.has_masks
        width = self.width * (1 if has_masks else self._parts)
        if self.s.extent.is_const:
            return str(self.s.extent.attr // width * width)
        return self.emitter.f.emit(f"and i64 {stop}, {-width}")

    def _main(self, whole: str) -> None:
        """Emit all whole vectors."""
        count = None if whole.startswith("%") else int(whole)
        copies = 1 if self._is_large() else MAX_UNROLLED
        if count is not None and count <= copies * self.width:
            for position in range(0, count, self.width):
                self._run(str(position))
        else:
            trips = self._trips(self.s.extent)
            self.emitter.unpolled_loop("0", whole, self.width, trips, self._run)

    def _trips(self, iterations: Expr) -> Expr:
        """Return the number of whole vectors in so many iterations."""
        if iterations.is_const:
            return e.index(iterations.attr // self.width)
        return e.binary("ashr", iterations, e.index(self.width.bit_length() - 1))

    def _is_large(self) -> bool:
        """Return whether the code of the body is to be emitted once."""
        if self.groups.has_rows:
            return True
        return self._size + self.groups.shuffles > LARGE_BODY

    def _has_rest(self) -> bool:
        """Return whether iterations may remain after whole vectors."""
        extent = self.s.extent
        if not extent.is_const:
            return True
        return bool(extent.attr > self.width and extent.attr % self.width)

    def _masks_all(self) -> bool:
        """Return whether all vectors may have masks: contiguous accesses cost as little
        with them."""
        return self.emitter.unit.target.has_masks and not self.groups

    def _is_by_element(self) -> bool:
        """Return whether the loop copies elements, each of which a vector would read
        and write alone."""
        copies = [x for x in self.s.body if isinstance(x, Let | Store)]
        if len(copies) < len(self.s.body) or self.groups:
            return False
        return {x.value.op for x in copies} <= {"load", "const", "var"} and all(
            self._lies_apart(*access) for x in self.s.body for access in accessed(x)
        )

    def _lies_apart(self, buffer: Buffer, at: Index) -> bool:
        """Return whether the elements of a vector are accessed one by one."""
        if self.has_gather(buffer):
            return False
        form = self._form(buffer, at)
        return form is None or not (form[0].is_const and form[0].attr in (1, 0, -1))

    def _overlaps(self, stop: str) -> bool:
        """Return whether the last vector overlaps the one before."""
        if not (self._has_rest() and self._may_repeat()):
            return False
        return not self._are_few(self._whole(stop), stop)

    def _may_repeat(self) -> bool:
        """Return whether iterations may run twice, so that the last vector may overlap
        the one before: none reads what another one has written."""
        extent, body = self.s.extent, self.s.body
        if not extent.is_const or extent.attr < self.width:
            return False
        if not all(isinstance(x, Let | Store) for x in body):
            return False
        stored = [(x.buffer, x.indices) for x in body if isinstance(x, Store)]
        return not any(
            buffer is node.attr and not _never_meet(at, e.index_of(node))
            for x in body
            for node in loaded(x)
            for buffer, at in stored
        )

    def _masked(self, stop: str) -> None:
        """Emit all iterations under masks."""

        def iteration(position: str) -> None:
            self._run(position, self.mask(position, stop))

        self._all(self.emitter.loop, iteration)

    def _transpose(self, whole: Transposition, stop: str) -> None:
        """Emit all iterations as blocks that a function transposes."""
        f, self.width = self.emitter.f, whole.size

        def place(block: Block, position: str) -> tuple[str, str]:
            start, element = self.row(block.buffer, block.first), block.buffer.dtype
            distance = f.emit(f"mul i64 {position}, {self.uniform(block.lane)}")
            address = f.emit(
                f"getelementptr {memory_type(element)}, ptr {start}, i64 {distance}"
            )
            return address, self.uniform(e.mul(block.step, e.index(element.itemsize)))

        def iteration(position: str) -> None:
            before = f.size + f.work
            left = f.emit(f"sub i64 {stop}, {position}")
            count = operations.operation(f, "min", int64, 1, [left, str(whole.size)])
            source = place(whole.source, position)
            target = place(whole.target, position)
            dtype = whole.source.buffer.dtype
            transpose(f, dtype, whole.size, source, target, count)
            self.emitter.cost.fixed += f.size + f.work - before

        self._all(self.emitter.unpolled_loop, iteration)

    def _overlapping(self, stop: str) -> None:
        """Emit all iterations as whole vectors, the last of which overlaps the one
        before."""
        f, last = self.emitter.f, int(stop) - self.width

        def iteration(position: str) -> None:
            is_last = f.emit(f"icmp sgt i64 {position}, {last}")
            self._run(f.emit(f"select i1 {is_last}, i64 {last}, i64 {position}"))

        self._all(self.emitter.unpolled_loop, iteration)

    def _all(self, loop: Callable[..., None], iteration: Callable[[str], None]) -> None:
        """Emit a loop over all vectors, the last of which may have fewer iterations."""
        trips = self._trips(e.add(self.s.extent, e.index(self.width - 1)))
        end = self.uniform(e.mul(trips, e.index(self.width)))
        loop("0", end, self.width, trips, iteration)

    def _run(self, position: str, mask: str = "") -> None:
        """Emit one vector of iterations from `position` on."""
        f = self.emitter.f
        before = f.size + f.work
        _StraightLanes(self, position, mask).run(self.s.body)
        self.emitter.cost.fixed += f.size + f.work - before

    def _rest(self, name: str, whole: str, stop: str) -> None:
        """Emit the iterations after the `whole` vectors."""
        f, is_static = self.emitter.f, self.s.extent.is_const
        if whole == stop:
            return
        if not is_static:
            left = f.emit(f"icmp slt i64 {whole}, {stop}")
            f.branch_if(left, f"rest.{name}", f"all.{name}")
            f.start(f"rest.{name}")
        if is_static and self._overlaps(stop):
            self._run(str(int(stop) - self.width))
            return
        is_one = is_static and int(stop) - int(whole) == 1
        has_masks = self.emitter.unit.target.has_masks
        if has_masks and is_one and self.accumulators:
            # The order of additions must not depend on whether the extent is static.
            self._run(whole, self.mask(whole, self.unknown(stop)))
        elif has_masks and not is_one and not self._are_few(whole, stop):
            self._run(whole, self.mask(whole, stop))
        else:
            self._one_by_one(whole, stop, e.index(self._lanes_of_sums))
        if not is_static:
            f.branch(f"all.{name}")
            f.start(f"all.{name}")

    def _are_few(self, whole: str, stop: str) -> bool:
        """Return whether the iterations that remain of a large body are few."""
        if not (self.s.extent.is_const and self._is_large()) or self.accumulators:
            return False
        left, size = int(stop) - int(whole), self._size
        if FEW * left <= int(whole) // self.width:
            return True
        return left * size < size + self.groups.shuffles

    def _one_by_one(self, start: str, stop: str, trips: Expr) -> None:
        """Emit iterations, at least one, as scalar code."""
        emitter, f = self.emitter, self.emitter.f
        most = self._lanes_of_sums - 1

        def iteration(position: str, lane: str) -> None:
            emitter.values.constants[self.var] = position
            with self._in_lane(sums, lane):
                emitter.body(self.s.body)

        def any_iteration(position: str) -> None:
            iteration(position, f.emit(f"and i64 {position}, {most}") if sums else "")

        with self._copied_sums() as sums:
            few = sums and self.s.extent.is_const and not self._is_large()
            if few and int(stop) - int(start) <= MAX_UNROLLED:
                for at in range(int(start), int(stop)):
                    with emitter.values.scope():
                        # A register of the iteration: values of a constant would be
                        # kept for the next one.
                        iteration(f.emit(f"add i64 {at}, 0"), str(at & most))
            else:
                emitter.unpolled_loop(start, stop, 1, trips, any_iteration)

    @contextmanager
    def _copied_sums(self) -> Iterator[dict[Var, str]]:
        """Yield the addresses of copies of the accumulators of floats.

        Iterations that run one by one add to the element that their lane of a vector
        has: the order of additions must not depend on whether the extent is static. A
        pointer that only the run knows would keep the accumulators of the vectors out
        of registers.
        """
        f = self.emitter.f
        floats = [v for v in self.accumulators if v.dtype.kind == "f"]
        types = {v: lanes(register_type(v.dtype), self._lanes_of_sums) for v in floats}
        sums = {v: f.slot(t, f"{v.name}_rest") for v, t in types.items()}
        for source, target in ((self.slots, sums), (sums, self.slots)):
            for v, t in types.items():
                f.do(
                    f"store {t} {f.emit(f'load {t}, ptr {source[v]}')}, ptr {target[v]}"
                )
            if target is sums:
                yield sums

    @property
    def _lanes_of_sums(self) -> int:
        return self.width * self._parts

    @contextmanager
    def _in_lane(self, sums: Mapping[Var, str], lane: str) -> Iterator[None]:
        """Let scalar code accumulate in the elements of a lane."""
        f, slots = self.emitter.f, self.emitter.values.slots
        kept = {v: slots[v] for v in sums}
        for v, address in sums.items():
            t = register_type(v.dtype)
            slots[v] = f.emit(f"getelementptr {t}, ptr {address}, i64 {lane}")
        yield
        slots.update(kept)

    def _finish(self) -> None:
        """Combine the lanes of the accumulators, always in the same tree."""
        emitter, f = self.emitter, self.emitter.f
        for var, combine in self.accumulators.items():
            type_, width = register_type(var.dtype), self._lanes_of_sums
            value = f.emit(f"load {lanes(type_, width)}, ptr {self.slots[var]}")
            is_extremum = combine in ("min", "max") and var.dtype.kind == "f"
            if is_extremum and width > 2 and not f.module.has_extrema:
                value = operations.extremum_of_lanes(
                    f, combine, var.dtype, width, value
                )
                width = 1
            while width > 1:
                width //= 2
                halves = [
                    part(f, value, type_, 2 * width, k, width) for k in (0, width)
                ]
                value = operations.operation(f, combine, var.dtype, width, halves)
            emitter.combine(var, combine, value)


def _never_meet(x: Index, y: Index) -> bool:
    """Return whether indices are of different elements in all iterations."""
    pairs = zip(x, y, strict=True)
    return any(i.is_const and j.is_const and i.attr != j.attr for i, j in pairs)


def _width(s: For) -> int:
    """Return the lanes of the binding, or as many as a short loop can use."""
    if not s.extent.is_const:
        return s.binding.width
    enough: int = max(2, 1 << (s.extent.attr - 1).bit_length())
    return min(s.binding.width, enough)


class _StraightLanes(Lanes):
    """Lanes that run a straight-line body."""

    loop: VectorLoop

    def __init__(self, loop: VectorLoop, position: str, mask: str) -> None:
        super().__init__(loop, position, mask)
        self.slots = loop.slots
        self._distances: dict[str, str] = {}

    def distance(self, step: str) -> str:
        if step not in self._distances:
            self._distances[step] = super().distance(step)
        return self._distances[step]

    def run(self, body: list[Stmt]) -> None:
        """Emit the body for these lanes."""
        for s in body:
            match s:
                case Let(var, value):
                    if self.loop.affine.is_uniform(value):
                        self.loop.define(var, value)
                    else:
                        self.lets[var] = self.value(value)
                case Declare(var, value) | Assign(var, value):
                    self._set(var, self.value(value))
                case Accumulate(var, combine, value):
                    self._accumulate(var, combine, self.value(value))
                case Store(buffer, at, value):
                    member = self.loop.groups.stores.get(s)
                    self.store(buffer, at, self.value(value), member)
                    self.forget_changed(buffer)

    def _set(self, var: Var, value: str) -> None:
        t = register_type(var.dtype, self.width)
        self.f.do(f"store {t} {value}, ptr {self.slots[var]}")
        self.forget_changed()

    def _accumulate(self, var: Var, combine: str, value: str) -> None:
        t = register_type(var.dtype, self.width)
        slot = self.loop.accumulator(var, self.position)
        if self.mask and var in self.loop.accumulators:
            mask = f"{lanes('i1', self.width)} {self.mask}"
            neutral_lanes = splat(
                register_type(var.dtype),
                operations.neutral(combine, var.dtype),
                self.width,
            )
            value = self.f.emit(f"select {mask}, {t} {value}, {t} {neutral_lanes}")
        old = self.f.emit(f"load {t}, ptr {slot}")
        new = operations.operation(self.f, combine, var.dtype, self.width, [old, value])
        self.f.do(f"store {t} {new}, ptr {slot}")
        self.forget_changed()
