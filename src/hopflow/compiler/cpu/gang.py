"""Gangs: iterations of a loop with control flow as lanes of vectors, under masks.

A vector is as wide as a register; a gang of more lanes has several, whose instructions
take turns. What is the same in all lanes stays a scalar: values, tests, loops. Where
lanes go different ways there is a mask of those that are on: a loop goes on while some
lane does, and a side of a branch that no lane takes is left out, if it is more than a
few instructions. Values are blended only for those who read them after that (see
`compiler.divergence`).

Where a lane is to stop the program, the iterations of the gang run once more, one by
one: so that the first of them stops it, as it would without a gang.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.gang_width import register_lanes
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
from hopflow.loop_ir.expr import Buffer, Expr, Var
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
"""A branch of at most so many instructions is no branch: both sides are computed."""


def emit(emitter: CpuEmitter, s: For) -> None:
    """Emit `s` as gangs."""
    _Gang(emitter, s).emit()


class _Gang(LaneLoop):
    """A loop as gangs: the code of one gang, and the loop over them."""

    def __init__(self, emitter: CpuEmitter, s: For) -> None:
        self.divergence = Divergence(s)
        width = register_lanes(s, self.divergence, emitter.unit.target.register_bits)
        width = min(width, s.binding.width)
        affine = Affine(s.var, self.divergence.lets, self.divergence.varying)
        super().__init__(emitter, s, width, affine)
        self.f = emitter.f
        self.parts: list[Part] = []
        self._splats: dict[int, dict[tuple[str, str], str]] = {}  # by depth
        self._again = ""  # the block in which the iterations run one by one

    # --- what is the same in all lanes

    def uniform(self, expr: Expr) -> str:
        return self.emitter.values.value(expr)

    def uniform_lanes(self, expr: Expr) -> str:
        return self.splat(self.uniform(expr), register_type(expr.dtype))

    def splat(self, scalar: str, held: str) -> str:
        """A scalar register, or a constant, in every lane: as far outside of loops as
        it is known."""
        depth = self.f.depth_of(scalar)
        if not scalar.startswith("%"):
            return splat(held, scalar, self.width)
        if depth >= self.f.depth:
            return broadcast(self.f, scalar, held, self.width)
        known = self._splats.setdefault(depth, {})
        if (held, scalar) not in known:
            with self.emitter.values.preheader(depth):
                made = broadcast(self.f, scalar, held, self.width)
            known[held, scalar] = made
        return known[held, scalar]

    def row(self, buffer: Buffer, offset: Expr) -> str:
        return self.emitter.values.address(buffer, offset)

    # --- the loop over gangs

    def emit(self) -> None:
        """Emit the loop over gangs; none if there is one gang at most."""
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
        """The iterations from `position` on, as many as there are, one at least."""
        f = self.f
        if not stop.startswith("%"):
            stop = self.unknown(stop)
        f.module.declare("i64 @llvm.smax.i64(i64, i64)")
        self.parts = []
        for k in range(self.s.binding.width // self.width):
            first, end = position, stop
            if k:
                first = f.emit(f"add i64 {position}, {k * self.width}")
                end = f.emit(f"call i64 @llvm.smax.i64(i64 {stop}, i64 {first})")
            self.parts.append(Part(self, first, self.mask(first, end)))
        with self.emitter.values.scope(), self._scope():
            self.body(self.s.body)
        if self._again:
            self._run_again(position, stop)
        self._forget()

    def _run_again(self, position: str, stop: str) -> None:
        """The iterations one by one, for gangs in which one is to stop the program."""
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

        with emitter.measured(), emitter.values.scope():  # hardly ever
            emitter.values.forget_loads()
            emitter.loop(position, end, 1, e.index(width), iteration)
        f.branch(done)
        f.start(done)

    # --- statements

    def body(self, statements: Sequence[Stmt]) -> None:
        """Emit statements for the lanes that are on, of which there are some."""
        f, cost = self.f, self.emitter.cost
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

    def _is_uniform(self, s: Stmt) -> bool:
        """Whether `s` is done once for all lanes: it makes memory, or what is
        the same in all of them."""
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
                for part in self.parts:
                    part.store(buffer, at, part.value(value))
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
            stops = self._any([part.both(part.value(s.test)) for part in self.parts])
        f.branch_if(stops, self._again, go_on, RARE)
        f.start(go_on)
        self.emitter.may_stop = True

    # --- masks

    @property
    def _masks(self) -> list[str]:
        return [part.mask for part in self.parts]

    @contextmanager
    def _under(self, masks: Sequence[str]) -> Iterator[None]:
        """Emit for other lanes meanwhile."""
        before = self._masks
        for part, mask in zip(self.parts, masks, strict=True):
            part.mask = mask
        yield
        for part, mask in zip(self.parts, before, strict=True):
            part.mask = mask

    def _any(self, masks: Sequence[str]) -> str:
        """Whether a lane is on in one of these masks."""
        f, held = self.f, lanes("i1", self.width)
        some = masks[0]
        for mask in masks[1:]:
            some = f.emit(f"or {held} {some}, {mask}")
        bits = f.emit(f"bitcast {held} {some} to i{self.width}")
        return f.emit(f"icmp ne i{self.width} {bits}, 0")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Forget at the end which vectors were computed within."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.scope())
            yield

    def _forget(self) -> None:
        """Forget what a write, or another block, may have changed."""
        for part in self.parts:
            part.forget_loads()

    def _merged(self) -> None:
        """Several blocks come together here."""
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
            masks = [part.either(mask, taken) for part, mask in pairs]
            if not (is_flat and is_local):
                pairs = zip(self.parts, masks, strict=True)
                masks = [part.both(mask) for part, mask in pairs]
            with self._under(masks):
                if is_flat:
                    with self.emitter.values.scope():
                        self._side(body)
                else:
                    self._if_any(masks, partial(self._side, body))

    def _if_any(self, masks: Sequence[str], run: Callable[[], None]) -> None:
        """Emit what runs if a lane is on in one of these masks."""
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
        """Whether both sides are a few instructions that may run for no lane."""
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
        """Whether lanes that were off before may take either side: nobody reads what
        they make of it."""
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
        """A loop in which each lane has a number of steps of its own: lanes begin
        together, or end together."""
        f, held = self.f, lanes("i64", self.width)
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
            every = self.splat(position, "i64")
            goes_on = [f.emit(f"icmp slt {held} {every}, {n}") for n in counts]
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
        """The largest number of a lane that is on; 0 if all are negative."""
        f, held = self.f, lanes("i64", self.width)
        name = f"llvm.vector.reduce.smax{overload('i64', self.width)}"
        f.module.declare(f"i64 @{name}({held})")
        f.module.declare("i64 @llvm.smax.i64(i64, i64)")
        most = "0"
        for part, count in zip(self.parts, counts, strict=True):
            mask = f"{lanes('i1', self.width)} {part.mask}"
            own = f.emit(f"select {mask}, {held} {count}, {held} zeroinitializer")
            own = f.emit(f"call i64 @{name}({held} {own})")
            most = f.emit(f"call i64 @llvm.smax.i64(i64 {most}, i64 {own})")
        return most

    def _while(self, s: While) -> None:
        if not self.divergence.is_divergent(s):

            def uniform_step() -> str:
                self.body(s.head)
                return self.uniform(s.test)

            self._loop(uniform_step, partial(self.body, s.body))
            return
        live = [part.kept_mask() for part in self.parts]

        def step() -> Sequence[str]:
            for part, slot in zip(self.parts, live, strict=True):
                part.mask = part.loaded_mask(slot)
            self.body(s.head)
            masks = [part.both(part.value(s.test)) for part in self.parts]
            for part, slot, mask in zip(self.parts, live, masks, strict=True):
                part.keep_mask(slot, mask)
            return masks

        self._loop(step, partial(self.body, s.body))

    def _loop(
        self, step: Callable[[], str | Sequence[str]], body: Callable[[], None]
    ) -> None:
        """Emit a loop.

        Args:
            step: Emits what comes before the test of a step; whether there is one, for
                all lanes or for each.
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
    """Whether a loop has at most so many iterations, for all that its extent says."""
    bounds = extent.args if extent.op == "min" else (extent,)
    return any(n.is_const and n.attr <= width for n in bounds)


class Part(Lanes):
    """As many lanes of a gang as a register has.

    mask   those that are on
    """

    loop: _Gang

    def __init__(self, loop: _Gang, position: str, mask: str) -> None:
        super().__init__(loop, position, mask)
        self._scopes: list[tuple[list[Expr], list[object]]] = []

    # --- what is known where

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget at the end what was computed within."""
        self._scopes.append(([], []))
        yield
        computed, numbered = self._scopes.pop()
        for node in computed:
            self.memo.pop(node, None)
            self.volatile.discard(node)
        for key in numbered:
            self.numbers.pop(key, None)

    def remember(self, node: Expr, register: str) -> None:
        super().remember(node, register)
        if self.loop.affine.is_uniform(node):
            self.volatile.add(node)  # the scalar is remembered, for as long as it holds
        self._scopes[-1][0].append(node)

    def number(self, key: object, register: str) -> None:
        super().number(key, register)
        self._scopes[-1][1].append(key)

    # --- variables

    def set(self, var: Var, value: str) -> None:
        """Give a variable its value, in every lane."""
        t = register_type(var.dtype, self.width)
        if var not in self.slots:
            self.slots[var] = self.f.slot(t, var.name)
        self.f.do(f"store {t} {value}, ptr {self.slots[var]}")
        self.forget_loads()

    def change(self, var: Var, value: str, keeps: bool) -> None:
        """Give a variable a new value; where `keeps`, in the lanes that are on."""
        if keeps:
            t, mask = register_type(var.dtype, self.width), self.mask
            old = self.value(e.read(var))
            held = lanes("i1", self.width)
            value = self.f.emit(f"select {held} {mask}, {t} {value}, {t} {old}")
        self.set(var, value)

    # --- masks

    def both(self, mask: str) -> str:
        """The lanes that are on, and in `mask`."""
        return self.f.emit(f"and {lanes('i1', self.width)} {self.mask}, {mask}")

    def either(self, mask: str, taken: bool) -> str:
        """The lanes that are in a mask, or those that are not."""
        if taken:
            return mask
        return self.f.emit(f"xor {lanes('i1', self.width)} {mask}, splat (i1 true)")

    # A mask that lives longer than a block is as wide as what it selects where the CPU
    # has no registers for masks: else it would be packed and unpacked in each step.

    @property
    def _wide(self) -> str:
        target = self.loop.emitter.unit.target
        if target.has_masks:
            return ""
        return lanes(f"i{target.register_bits // self.width}", self.width)

    def kept_mask(self) -> str:
        """A slot that holds which lanes are on."""
        slot = self.f.slot(self._wide or lanes("i1", self.width), "live")
        self.keep_mask(slot, self.mask)
        return slot

    def keep_mask(self, slot: str, mask: str) -> None:
        """Store a mask."""
        held = lanes("i1", self.width)
        if self._wide:
            mask = self.f.emit(f"sext {held} {mask} to {self._wide}")
        self.f.do(f"store {self._wide or held} {mask}, ptr {slot}")

    def loaded_mask(self, slot: str) -> str:
        """What `keep_mask` stored."""
        held = lanes("i1", self.width)
        mask = self.f.emit(f"load {self._wide or held}, ptr {slot}")
        if self._wide:
            mask = self.f.emit(f"icmp slt {self._wide} {mask}, zeroinitializer")
        return mask
