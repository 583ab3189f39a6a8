"""Vector loops: `width` iterations of a straight-line body as one.

The iterations that are left over run once more under a mask, where the CPU has masks,
and one by one elsewhere. What does not depend on the loop's variable is computed once,
before the loop.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.lanes import Lanes
from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.operations import broadcast
from hopflow.compiler.llvm.types import lanes, register_type, splat
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.nest import Accumulate, Assign, Declare, For, Let, Store

if TYPE_CHECKING:
    from hopflow.compiler.cpu.statements import CpuEmitter

MAX_UNROLLED: Final = 4
"""A loop of constant extent that is at most this many vectors has no loop left."""
LARGE_BODY: Final = 48
"""A body of this many operations is not emitted twice, for the whole vectors and for
the rest, but once, under masks throughout: there they cost little."""


def suits(s: For) -> bool:
    """Whether `s` can run as vectors: its body is straight, and its variables are its
    own but for accumulators."""
    own = {x.var for x in s.body if isinstance(x, Declare)}
    return 1 < s.binding.width <= 64 and all(
        isinstance(x, (Let, Declare, Store, Accumulate))
        or (isinstance(x, Assign) and x.var in own)
        for x in s.body
    )


def emit(emitter: "CpuEmitter", s: For) -> None:
    """Emit `s` as a vector loop and what is left over."""
    VectorLoop(emitter, s).emit()


class VectorLoop:
    """One vector loop: the code before, the main loop, the rest, and after."""

    def __init__(self, emitter: "CpuEmitter", s: For) -> None:
        self.emitter, self.s, self.var = emitter, s, s.var
        self.width = _width(s)
        self.affine = Affine(s)
        self.accumulators: dict[Var, str] = {}  # and how they combine
        self.slots: dict[Var, str] = {}
        self._before: list[str] = []
        self._splats: dict[Expr, str] = {}
        self._rows: dict[tuple[Buffer, Expr], str] = {}
        self._own = {x.var for x in s.body if isinstance(x, Declare)}
        f = emitter.f
        for x in s.body:
            if isinstance(x, (Declare, Accumulate)) and x.var not in self.slots:
                t = register_type(x.var.dtype, self.width)
                self.slots[x.var] = f.slot(t, x.var.name)
            if isinstance(x, Accumulate) and x.var not in self._own:
                self.accumulators[x.var] = x.combine

    # --- what is computed once, before the loop

    def uniform(self, expr: Expr) -> str:
        """The scalar register of an expression that is the same in all iterations."""
        with self.emitter.f.hoisted(self._before):
            return self.emitter.values.value(expr)

    def define(self, var: Var, value: Expr) -> None:
        """Compute a `Let` that is the same in all iterations."""
        self.emitter.values.constants[var] = self.uniform(value)

    def uniform_lanes(self, expr: Expr) -> str:
        """The same in every lane."""
        known = self._splats.get(expr)
        if known is None:
            scalar = self.uniform(expr)
            with self.emitter.f.hoisted(self._before):
                held = register_type(expr.dtype)
                known = broadcast(self.emitter.f, scalar, held, self.width)
            self._splats[expr] = known
        return known

    def row(self, buffer: Buffer, offset: Expr) -> str:
        """The address of the element `offset` from the beginning of `buffer`."""
        known = self._rows.get((buffer, offset))
        if known is None:
            distance = self.uniform(offset)
            with self.emitter.f.hoisted(self._before):
                known = self.emitter.memory.address(buffer, distance)
            self._rows[buffer, offset] = known
        return known

    def has_gather(self, buffer: Buffer) -> bool:
        """Whether the CPU gathers and scatters elements of this size."""
        return self.emitter.unit.target.has_masks and buffer.dtype.itemsize >= 4

    def has_masked_loads(self, buffer: Buffer) -> bool:
        """Whether a load of neighbours of this size under a mask is one instruction."""
        target = self.emitter.unit.target
        return target.has_masks or (target.has("avx") and buffer.dtype.itemsize >= 4)

    # --- the loop

    def emit(self) -> None:
        """Emit everything; the code before the loop is put in its place at the end."""
        emitter, f, extent = self.emitter, self.emitter.f, self.s.extent
        name = f.name("vector")
        values = emitter.values
        stop = values.value(extent)
        if not extent.is_const:
            some = f.emit(f"icmp sgt i64 {stop}, 0")
            f.branch_if(some, name, f"end.{name}")
        else:
            f.branch(name)
        with values.scope():
            f.start(name)
            earlier = f.take()
            with f.hoisted(self._before):
                self._clear_accumulators()
            f.branch(f"main.{name}")
            f.start(f"main.{name}")
            if self._is_large() and emitter.unit.target.has_masks:
                self._masked(stop)
            else:
                whole = self._whole(stop)
                self._main(whole)
                self._rest(name, whole, stop)
            self._finish()
            loop = f.take()
            f.restore(earlier)
            f.insert(self._before)
            f.insert(loop)
        f.branch(f"end.{name}")
        f.start(f"end.{name}")
        values.forget_loads()

    def _clear_accumulators(self) -> None:
        for var, combine in self.accumulators.items():
            held = register_type(var.dtype)
            value = splat(held, operations.neutral(combine, var.dtype), self.width)
            self.emitter.f.do(
                f"store {lanes(held, self.width)} {value}, ptr {self.slots[var]}"
            )

    def _whole(self, stop: str) -> str:
        """How many iterations are in whole vectors."""
        if self.s.extent.is_const:
            return str(self.s.extent.attr // self.width * self.width)
        return self.emitter.f.emit(f"and i64 {stop}, {-self.width}")

    def _main(self, whole: str) -> None:
        """All whole vectors."""
        if not whole.startswith("%") and int(whole) <= MAX_UNROLLED * self.width:
            for position in range(0, int(whole), self.width):
                self._run(str(position))
        else:
            trips = self._trips(self.s.extent)
            self.emitter.unpolled_loop("0", whole, self.width, trips, self._run)

    def _trips(self, iterations: Expr) -> Expr:
        """How many whole vectors so many iterations are."""
        if iterations.is_const:
            return e.index(iterations.attr // self.width)
        return e.binary("ashr", iterations, e.index(self.width.bit_length() - 1))

    def _is_large(self) -> bool:
        """Whether there is a rest, and the body is too large to be emitted twice."""
        extent = self.s.extent
        if extent.is_const:
            whole, left = divmod(extent.attr, self.width)
            if not whole or not left:
                return False
        return self.affine.size > LARGE_BODY

    def _masked(self, stop: str) -> None:
        """All iterations, under masks."""
        trips = self._trips(e.add(self.s.extent, e.index(self.width - 1)))

        def iteration(position: str) -> None:
            self._run(position, self._mask(position, stop))

        self.emitter.loop("0", stop, self.width, trips, iteration)

    def _run(self, position: str, mask: str = "") -> None:
        """One vector of iterations from `position` on."""
        f = self.emitter.f
        before = f.size + f.work
        Lanes(self, position, mask).run(self.s.body)
        self.emitter.cost.fixed += f.size + f.work - before

    def _rest(self, name: str, whole: str, stop: str) -> None:
        """The iterations after the `whole` vectors."""
        f, is_known = self.emitter.f, self.s.extent.is_const
        if whole == stop:
            return
        if not is_known:
            left = f.emit(f"icmp slt i64 {whole}, {stop}")
            f.branch_if(left, f"rest.{name}", f"all.{name}")
            f.start(f"rest.{name}")
        # Not under a constant mask of one lane: LLVM 22 makes of such a store after a
        # truncation (bf16, bool, a narrower integer) one of the untruncated element,
        # which writes past the end.
        is_one = is_known and int(stop) - int(whole) == 1
        if self.emitter.unit.target.has_masks and not is_one:
            self._run(whole, self._mask(whole, stop))
        else:
            self._one_by_one(whole, stop)
        if not is_known:
            f.branch(f"all.{name}")
            f.start(f"all.{name}")

    def _mask(self, position: str, stop: str) -> str:
        """The lanes from `position` on for which there is an iteration."""
        f, width = self.emitter.f, self.width
        if position.startswith("%") or stop.startswith("%"):
            left = f.emit(f"sub i64 {stop}, {position}")
            f.module.declare("i64 @llvm.umin.i64(i64, i64)")
            active = f.emit(f"call i64 @llvm.umin.i64(i64 {left}, i64 {width})")
            # In lanes that fill a register: of a comparison of fewer bits LLVM 22 takes
            # the lanes above, which are noise, for part of a narrow store's mask.
            lane = f"i{max(8, 128 // width)}"
            if lane != "i64":
                active = f.emit(f"trunc i64 {active} to {lane}")
            count = broadcast(f, active, lane, width)
            steps = ", ".join(f"{lane} {k}" for k in range(width))
            return f.emit(f"icmp ugt {lanes(lane, width)} {count}, <{steps}>")
        known = int(stop) - int(position)
        bits = ", ".join(f"i1 {str(lane < known).lower()}" for lane in range(width))
        return f"<{bits}>"

    def _one_by_one(self, whole: str, stop: str) -> None:
        """The rest, of one iteration at least."""
        emitter = self.emitter

        def iteration(position: str) -> None:
            emitter.values.constants[self.var] = position
            emitter.body(self.s.body)

        trips = e.index(self.width)
        emitter.unpolled_loop(whole, stop, 1, trips, iteration)

    def _finish(self) -> None:
        """Combine the lanes of the accumulators, always in the same tree."""
        emitter, f = self.emitter, self.emitter.f
        for var, combine in self.accumulators.items():
            held, width = register_type(var.dtype), self.width
            value = f.emit(f"load {lanes(held, width)}, ptr {self.slots[var]}")
            while width > 1:
                width //= 2
                halves = [
                    _half(f.emit, value, held, width, first) for first in (0, width)
                ]
                value = operations.operation(f, combine, var.dtype, width, halves)
            emitter.combine(var, combine, value)


def _half(
    emit: Callable[[str], str], vector: str, scalar: str, width: int, first: int
) -> str:
    """`width` lanes of a vector of twice as many, from `first` on."""
    t = lanes(scalar, 2 * width)
    if width == 1:
        return emit(f"extractelement {t} {vector}, i64 {first}")
    order = ", ".join(f"i32 {first + lane}" for lane in range(width))
    return emit(f"shufflevector {t} {vector}, {t} poison, <{width} x i32> <{order}>")


def _width(s: For) -> int:
    """The lanes: those asked for, or as many as a short loop can use."""
    if not s.extent.is_const:
        return s.binding.width
    enough: int = max(2, 1 << (s.extent.attr - 1).bit_length())
    return min(s.binding.width, enough)
