"""Gangs: iterations of a loop with control flow as lanes of vectors, under masks.

A vector is as wide as a register; a gang of more lanes has several, whose instructions
are interleaved. Values, tests and loops that are uniform over the lanes stay scalar.
Where lanes diverge, a mask has the active ones: a loop continues while some lane is
active, and a side of a branch that no lane takes is skipped, unless it has only a few
instructions. Values are blended only for later readers (see `compiler.divergence`).

If a lane stops the program, the iterations of the gang run once more, one by one, so
that the first of them stops it, as it does without a gang.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.gang_width import register_lanes
from hopflow.compiler.cpu.interleaving import Groups, Member
from hopflow.compiler.cpu.lanes import LaneLoop, Lanes
from hopflow.compiler.divergence import Divergence
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.expressions import MOST_TRIPS
from hopflow.compiler.llvm.module import RARE
from hopflow.compiler.llvm.operations import broadcast
from hopflow.compiler.llvm.types import lanes, overload, register_type, splat
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
    Trap,
    While,
)

FLAT: Final = 16
"""The most instructions of a branch both of whose sides are computed."""


def emit(emitter: CpuEmitter, s: For) -> None:
    """Emit the loop `s` as gangs."""
    _Gang(emitter, s).emit()


class _Gang(LaneLoop):
    """A loop as gangs: the code of one gang, and the loop over gangs."""

    def __init__(self, emitter: CpuEmitter, s: For) -> None:
        self.divergence = Divergence(s)
        width = register_lanes(s, self.divergence, emitter.unit.target.register_bits)
        width = min(width, s.binding.width)
        affine = Affine(s.var, self.divergence.lets, self.divergence.varying)
        super().__init__(emitter, s, width, affine)
        self.f = emitter.f
        self.parts: list[Part] = []
        self._groups = self._grouped(())  # of the body that is being emitted
        self._splats: dict[int, dict[tuple[str, str], str]] = {}  # by loop depth
        self._again = ""  # the block that runs the iterations one by one

    # --- uniform values

    def uniform(self, expr: Expr) -> str:
        return self.emitter.values.value(expr)

    def uniform_lanes(self, expr: Expr) -> str:
        return self.splat(self.uniform(expr), register_type(expr.dtype))

    def splat(self, scalar: str, type_: str) -> str:
        """Return a scalar register, or a constant, in every lane.

        The vector is computed in the outermost loop in which the scalar is defined.
        """
        depth = self.f.depth_of(scalar)
        if not scalar.startswith("%"):
            return splat(type_, scalar, self.width)
        if depth >= self.f.depth:
            return broadcast(self.f, scalar, type_, self.width)
        splats = self._splats.setdefault(depth, {})
        if (type_, scalar) not in splats:
            with self.emitter.values.preheader(depth):
                vector = broadcast(self.f, scalar, type_, self.width)
            splats[type_, scalar] = vector
        return splats[type_, scalar]

    def row(self, buffer: Buffer, offset: Expr) -> str:
        return self.emitter.values.address(buffer, offset)

    def member(self, buffer: Buffer, at: Index) -> Member | None:
        return self._groups.load(buffer, at)

    # --- the loop over gangs

    def emit(self) -> None:
        """Emit the loop over gangs, or its only gang without a loop."""
        extent, width = self.s.extent, self.s.binding.width
        if _is_at_most(extent, width):
            stop = self.emitter.values.value(extent)
            run = partial(self._gang, "0", stop)
            if extent.is_const:
                run()
            else:
                self.emitter.branch(e.compare("lt", e.index(0), extent), run)
            return
        trips = e.binary(
            "ashr",
            e.add(extent, e.index(width - 1)),
            e.index(width.bit_length() - 1),
        )
        stop = self.emitter.values.value(extent)
        end = self.emitter.values.value(e.mul(trips, e.index(width)))
        self.emitter.loop(
            "0", end, width, trips, lambda position: self._gang(position, stop)
        )

    def _gang(self, position: str, stop: str) -> None:
        """Emit the iterations from `position` up to `stop`, at least one."""
        f = self.f
        count, full = self._counts()
        if not stop.startswith("%"):
            stop = self.unknown(stop)
        f.module.declare("i64 @llvm.smax.i64(i64, i64)")
        self.parts = []
        for k in range(count):
            first, end = position, stop
            if k:
                first = f.emit(f"add i64 {position}, {k * self.width}")
            if k < full:
                self.parts.append(Part(self, first, self.mask("0", str(self.width))))
                continue
            if k:
                end = f.emit(f"call i64 @llvm.smax.i64(i64 {stop}, i64 {first})")
            self.parts.append(Part(self, first, self.mask(first, end)))
        with self.emitter.values.scope(), self._scope():
            self.body(self.s.body)
        if self._again:
            self._run_again(position, stop)
        self._forget()

    def _counts(self) -> tuple[int, int]:
        """Return how many parts a gang has, and how many of each gang have an iteration
        in every lane."""
        extent, width = self.s.extent, self.s.binding.width
        if not extent.is_const or not extent.attr:
            return width // self.width, 0
        last: int = (extent.attr - 1) % width + 1
        used = min(width, extent.attr)
        return -(-used // self.width), last // self.width

    def _run_again(self, position: str, stop: str) -> None:
        """Emit the iterations one by one, for gangs with a lane that traps."""
        emitter, f, width = self.emitter, self.f, self.s.binding.width
        done = f.name("done")
        f.branch(done)
        f.start(self._again)
        f.module.declare("i64 @llvm.smin.i64(i64, i64)")
        end = f.emit(f"add i64 {position}, {width}")
        end = f.emit(f"call i64 @llvm.smin.i64(i64 {end}, i64 {stop})")

        def iteration(at: str) -> None:
            emitter.values.constants[self.s.var] = at
            emitter.body(self.s.body)

        # The cost does not count, since this code hardly ever runs.
        with emitter.measured(), emitter.values.scope():
            emitter.values.forget_loads()
            emitter.loop(position, end, 1, e.index(width), iteration)
        f.branch(done)
        f.start(done)

    # --- statements

    def body(self, statements: Sequence[Stmt]) -> None:
        """Emit statements for the active lanes, of which there is at least one."""
        f, cost = self.f, self.emitter.cost
        outer, self._groups = self._groups, self._grouped(statements)
        for s in statements:
            before = f.size + f.work
            match s:
                case For():
                    self._for(s)
                case While():
                    self._while(s)
                case If():
                    self._if(s)
                case _ if self._is_uniform(s):
                    self.emitter.emit(s)
                    self._forget()
                case _:
                    self._vectors(s)
                    cost.fixed += f.size + f.work - before
        self._groups = outer

    def _grouped(self, body: Sequence[Stmt]) -> Groups:
        """Return the interleave groups of a body, if all lanes of some vectors run
        it."""
        is_filled = any(part.is_full for part in self.parts)
        return Groups(
            body if is_filled else (),
            self.width,
            self.affine,
            self.emitter.memory,
            self.emitter.unit.target,
            is_filled=is_filled,
        )

    def _is_uniform(self, s: Stmt) -> bool:
        """Return whether `s` runs once for all lanes.

        It does if it allocates memory, or sets a variable that is uniform.
        """
        if isinstance(s, (Let, Declare, Assign, Accumulate)):
            return s.var not in self.divergence.varying
        return isinstance(s, Allocate)

    def _vectors(self, s: Stmt) -> None:
        match s:
            case Let(var, value):
                for part in self.parts:
                    part.lets[var] = part.value(value)
            case Declare(var, value):
                for part in self.parts:
                    part.set(var, part.value(value))
            case Assign(var, value):
                for part in self.parts:
                    part.change(var, part.value(value), self.divergence.keeps(s))
            case Accumulate(var, combine, value):
                for part in self.parts:
                    both = [part.value(e.read(var)), part.value(value)]
                    new = operations.operation(
                        self.f, combine, var.dtype, self.width, both
                    )
                    part.change(var, new, self.divergence.keeps(s))
            case Store(buffer, at, value):
                member = (
                    self._groups.stores.get(s) if self._groups is not None else None
                )
                for part in self.parts:
                    part.store(buffer, at, part.value(value), member)
                self._forget()
            case Trap():
                self._trap(s)
            case _:
                raise TypeError(f"`{type(s).__name__}` stands in a gang")

    def _trap(self, s: Trap) -> None:
        f, go_on = self.f, self.f.name("pass")
        self._again = self._again or f.name("again")
        if self.divergence.is_uniform(s.test):
            stops = self.uniform(s.test)
        else:
            stops = self._any([part.masked(part.value(s.test)) for part in self.parts])
        f.branch_if(stops, self._again, go_on, RARE)
        f.start(go_on)
        self.emitter.may_stop = True

    # --- masks

    @property
    def _masks(self) -> list[str]:
        return [part.mask for part in self.parts]

    @contextmanager
    def _under(self, masks: Sequence[str]) -> Iterator[None]:
        """Emit for the lanes of other masks in this context."""
        before = self._masks
        for part, mask in zip(self.parts, masks, strict=True):
            part.mask = mask
        yield
        for part, mask in zip(self.parts, before, strict=True):
            part.mask = mask

    def _any(self, masks: Sequence[str]) -> str:
        """Return whether some lane is active in one of these masks."""
        f, t = self.f, lanes("i1", self.width)
        merged = masks[0]
        for mask in masks[1:]:
            merged = f.emit(f"or {t} {merged}, {mask}")
        bits = f.emit(f"bitcast {t} {merged} to i{self.width}")
        return f.emit(f"icmp ne i{self.width} {bits}, 0")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Drop at the end the vectors that were computed inside."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.scope())
            yield

    def _forget(self) -> None:
        """Drop the vectors that a write, or another block, may have changed."""
        for part in self.parts:
            part.forget_loads()

    def _merged(self) -> None:
        """Drop, where blocks join, the vectors that only some of them computed."""
        self.emitter.values.forget_loads()
        self._forget()
        for depth in [d for d in self._splats if d >= self.f.depth]:
            del self._splats[depth]

    # --- control flow

    def _if(self, s: If) -> None:
        if not self.divergence.is_divergent(s):
            otherwise = partial(self._side, s.else_) if s.else_ else None
            self.emitter.branch(s.test, partial(self._side, s.then), otherwise)
            self._merged()
            return
        holds = [part.value(s.test) for part in self.parts]
        is_flat, is_local = self._is_flat(s), self._is_local(s)
        for body, taken in ((s.then, True), (s.else_, False)):
            if not body:
                continue
            pairs = zip(self.parts, holds, strict=True)
            masks = [part.side(mask, taken) for part, mask in pairs]
            if not (is_flat and is_local):
                pairs = zip(self.parts, masks, strict=True)
                masks = [part.masked(mask) for part, mask in pairs]
            with self._under(masks):
                if is_flat:
                    with self.emitter.values.scope():
                        self._side(body)
                else:
                    self._if_any(masks, partial(self._side, body))

    def _if_any(self, masks: Sequence[str], run: Callable[[], None]) -> None:
        """Emit code that runs if some lane is active in one of these masks."""
        f, name = self.f, self.f.name("lanes")
        polled = self.emitter.cost.polls
        f.branch_if(self._any(masks), name, f"none.{name}")
        f.start(name)
        with self.emitter.values.scope():
            run()
        f.branch(f"none.{name}")
        f.start(f"none.{name}")
        self.emitter.cost.polls = polled
        self._merged()

    def _side(self, body: Sequence[Stmt]) -> None:
        with self._scope():
            self.body(body)

    def _is_flat(self, s: If) -> bool:
        """Return whether both sides have few instructions, safe to run for no lane."""
        total = 0
        for x in (*s.then, *s.else_):
            if not isinstance(x, (Let, Declare, Assign, Accumulate)):
                return False
            for node in walk.nodes(x.value):
                divides = node.op in ("div", "rem") and node.dtype.kind in "iu"
                if node.op == "load" or node.op in e.MATH or divides:
                    return False
                total += weight(node)
        return total <= FLAT

    def _is_local(self, s: If) -> bool:
        """Return whether inactive lanes may take either side.

        They may if nothing reads the values that the sides assign.
        """
        inside = [*s.then, *s.else_]
        changes = [x for x in inside if isinstance(x, (Assign, Accumulate))]
        return all(map(self.divergence.is_local, changes))

    def _for(self, s: For) -> None:
        if self.divergence.is_divergent(s):
            self._lanes_count(s)
            return
        if s.extent.is_const and s.extent.attr <= 0:
            return

        def iteration(position: str) -> None:
            self._forget()
            self.emitter.values.constants[s.var] = position
            self._side(s.body)

        if s.extent.is_const and s.extent.attr == 1:
            with self.emitter.values.scope():
                iteration("0")
        else:
            stop = self.uniform(s.extent)
            self.emitter.loop("0", stop, 1, s.extent, iteration)
        self._merged()

    def _lanes_count(self, s: For) -> None:
        """Emit a loop whose number of steps differs between lanes.

        The lanes begin together, or end together.
        """
        f, t = self.f, lanes("i64", self.width)
        counts = [part.value(s.extent) for part in self.parts]
        ends_together = self.divergence.ends_together(s)
        counter = s.var
        if ends_together and isinstance(s.body[0], Let):
            counter = s.body[0].var
        first = self._most(counts) if ends_together else "0"
        slot = f.slot("i64", s.var.name)
        f.do(f"store i64 {first}, ptr {slot}")
        before = self._masks

        def step() -> str | Sequence[str]:
            position = f.emit(f"load i64, ptr {slot}")
            if ends_together:
                some = f.emit(f"icmp sgt i64 {position}, 0")
                position = f.emit(f"sub i64 {position}, 1")
                f.do(f"store i64 {position}, ptr {slot}")
            f.bounds[position] = MOST_TRIPS
            self.emitter.values.constants[counter] = position
            positions = self.splat(position, "i64")
            goes_on = [f.emit(f"icmp slt {t} {positions}, {n}") for n in counts]
            masks = [
                f.emit(f"and {lanes('i1', self.width)} {mask}, {more}")
                for mask, more in zip(before, goes_on, strict=True)
            ]
            if not ends_together:
                return masks
            for part, mask in zip(self.parts, masks, strict=True):
                part.mask = mask
            return some

        def body() -> None:
            if ends_together:
                self.body(s.body[1:])
                return
            self.body(s.body)
            after = f.emit(f"add nuw nsw i64 {self.uniform(e.read(counter))}, 1")
            f.do(f"store i64 {after}, ptr {slot}")

        self._loop(step, body)

    def _most(self, counts: Sequence[str]) -> str:
        """Return the largest count of an active lane, or 0 if all are negative."""
        f, t = self.f, lanes("i64", self.width)
        name = f"llvm.vector.reduce.smax{overload('i64', self.width)}"
        f.module.declare(f"i64 @{name}({t})")
        f.module.declare("i64 @llvm.smax.i64(i64, i64)")
        most = "0"
        for part, count in zip(self.parts, counts, strict=True):
            mask = f"{lanes('i1', self.width)} {part.mask}"
            largest = f.emit(f"select {mask}, {t} {count}, {t} zeroinitializer")
            largest = f.emit(f"call i64 @{name}({t} {largest})")
            most = f.emit(f"call i64 @llvm.smax.i64(i64 {most}, i64 {largest})")
        return most

    def _while(self, s: While) -> None:
        if not self.divergence.is_divergent(s):

            def uniform_step() -> str:
                self.body(s.head)
                return self.uniform(s.test)

            self._loop(uniform_step, partial(self.body, s.body))
            return
        live = [part.mask_slot() for part in self.parts]

        def step() -> Sequence[str]:
            for part, slot in zip(self.parts, live, strict=True):
                part.mask = part.load_mask(slot)
            self.body(s.head)
            masks = [part.masked(part.value(s.test)) for part in self.parts]
            for part, slot, mask in zip(self.parts, live, masks, strict=True):
                part.store_mask(slot, mask)
            return masks

        self._loop(step, partial(self.body, s.body))

    def _loop(
        self, step: Callable[[], str | Sequence[str]], body: Callable[[], None]
    ) -> None:
        """Emit a loop.

        Args:
            step: Emits the code before the test of a step, and returns the test: one
                for all lanes, or one mask for each part.
            body: Emits the step.
        """
        emitter, f, name = self.emitter, self.f, self.f.name("while")

        def iteration() -> None:
            with self._scope():
                goes_on = step()
                if isinstance(goes_on, str):
                    masks = self._masks
                else:
                    masks, goes_on = list(goes_on), self._any(goes_on)
                f.branch_if(goes_on, f"body.{name}", f"done.{name}")
                f.start(f"body.{name}")
                with self._under(masks):
                    body()

        before = self._masks
        with emitter.values.loop():
            f.branch(name)
            f.start(name)
            emitter.values.forget_loads()
            self._forget()
            emitter.iterate(iteration, name, None)
            f.start(f"done.{name}")
        for part, mask in zip(self.parts, before, strict=True):
            part.mask = mask
        self._merged()


def _is_at_most(extent: Expr, width: int) -> bool:
    """Return whether the extent alone bounds a loop to `width` iterations."""
    bounds = extent.args if extent.op == "min" else (extent,)
    return any(n.is_const and n.attr <= width for n in bounds)


class Part(Lanes):
    """As many lanes of a gang as a register has.

    mask   the active lanes
    """

    loop: _Gang

    def __init__(self, loop: _Gang, position: str, mask: str) -> None:
        super().__init__(loop, position, mask)
        self._scopes: list[tuple[list[Expr], list[object]]] = []

    # --- memo tables

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Drop at the end the vectors that were computed inside."""
        self._scopes.append(([], []))
        before = {**self._vectors}
        yield
        self._vectors = {k: v for k, v in self._vectors.items() if before.get(k) is v}
        computed, numbered = self._scopes.pop()
        for node in computed:
            self.memo.pop(node, None)
            self.volatile.discard(node)
        for key in numbered:
            self.numbers.pop(key, None)

    def remember(self, node: Expr, register: str) -> None:
        super().remember(node, register)
        if self.loop.affine.is_uniform(node):
            self.volatile.add(node)  # it is valid as long as the scalar is
        self._scopes[-1][0].append(node)

    def number(self, key: object, register: str) -> None:
        super().number(key, register)
        self._scopes[-1][1].append(key)

    # --- variables

    def set(self, var: Var, value: str) -> None:
        """Assign to a variable in every lane."""
        t = register_type(var.dtype, self.width)
        if var not in self.slots:
            self.slots[var] = self.f.slot(t, var.name)
        self.f.do(f"store {t} {value}, ptr {self.slots[var]}")
        self.forget_loads()

    def change(self, var: Var, value: str, keeps: bool) -> None:
        """Assign to a variable, with `keeps` in the active lanes only."""
        if keeps:
            t, mask = register_type(var.dtype, self.width), self.mask
            old = self.value(e.read(var))
            mask_type = lanes("i1", self.width)
            value = self.f.emit(f"select {mask_type} {mask}, {t} {value}, {t} {old}")
        self.set(var, value)

    # --- masks

    def masked(self, mask: str) -> str:
        """Return the active lanes that are also in `mask`."""
        return self.f.emit(f"and {lanes('i1', self.width)} {self.mask}, {mask}")

    def side(self, mask: str, taken: bool) -> str:
        """Return the lanes that take a side of a branch: those in a mask, or not."""
        if taken:
            return mask
        return self.f.emit(f"xor {lanes('i1', self.width)} {mask}, splat (i1 true)")

    # A mask that lives longer than a block is as wide as the lanes that it selects, if
    # the CPU has no mask registers: otherwise each step would pack and unpack it.

    @property
    def _wide(self) -> str:
        target = self.loop.emitter.unit.target
        if target.has_masks:
            return ""
        return lanes(f"i{target.register_bits // self.width}", self.width)

    def mask_slot(self) -> str:
        """Return a new slot that holds the mask of active lanes."""
        slot = self.f.slot(self._wide or lanes("i1", self.width), "live")
        self.store_mask(slot, self.mask)
        return slot

    def store_mask(self, slot: str, mask: str) -> None:
        """Store a mask to a slot."""
        narrow = lanes("i1", self.width)
        if self._wide:
            mask = self.f.emit(f"sext {narrow} {mask} to {self._wide}")
        self.f.do(f"store {self._wide or narrow} {mask}, ptr {slot}")

    def load_mask(self, slot: str) -> str:
        """Return the mask in a slot."""
        narrow = lanes("i1", self.width)
        mask = self.f.emit(f"load {self._wide or narrow}, ptr {slot}")
        if self._wide:
            mask = self.f.emit(f"icmp slt {self._wide} {mask}, zeroinitializer")
        return mask
