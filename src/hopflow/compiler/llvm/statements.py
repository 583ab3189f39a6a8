"""Structured statements as basic blocks: the emitter that all targets share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hopflow import dtypes
from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.expressions import MOST_TRIPS, ScalarEvaluator
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function
from hopflow.compiler.llvm.types import register_type
from hopflow.compiler.reuse import size_in_bytes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.emptiness import needed
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Copy,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
    Swap,
    While,
)
from hopflow.loop_ir.walk import same


class Emitter:
    """An emitter of statements into one function.

    Its loops run sequentially. A target's emitter adds its own forms of statements to
    `emitters`, and overrides `steps` for the bindings that its loops may have.
    """

    def __init__(self, f: Function, memory: Memory) -> None:
        self.f, self.memory = f, memory
        self.values = ScalarEvaluator(f, memory)
        self.emitters: dict[type[Stmt], Callable[[Any], None]] = {
            Let: self._let,
            Declare: self._declare,
            Assign: self._assign,
            Accumulate: self._accumulate,
            Store: self._store,
            Copy: self._copy,
            Swap: self.swap,
            For: self._for,
            While: self._while,
            If: self._if,
        }
        self._within_guard = False  # whether an enclosing loop has a guard

    # --- bodies

    def body(self, statements: Sequence[Stmt]) -> None:
        """Emit statements in sequence, in the open scope."""
        self.straight(statements)

    def straight(self, statements: Sequence[Stmt]) -> None:
        """Emit statements into this function, so that later code can use them."""
        for statement in statements:
            self.emit(statement)

    def emit(self, statement: Stmt) -> None:
        """Emit one statement."""
        self.emitters[type(statement)](statement)

    # --- scalars and memory

    def _let(self, s: Let) -> None:
        self.values.constants[s.var] = self.values.value(s.value)

    def _declare(self, s: Declare) -> None:
        value = self.values.value(s.value)
        slot = self.f.slot(register_type(s.var.dtype), s.var.name)
        self.values.slots[s.var] = slot
        self._set(s.var, value)

    def _assign(self, s: Assign) -> None:
        self._set(s.var, self.values.value(s.value))

    def _set(self, var: Var, value: str) -> None:
        slot = self.values.slots[var]
        self.f.do(f"store {register_type(var.dtype)} {value}, ptr {slot}")
        self.values.forget_loads()

    def _accumulate(self, s: Accumulate) -> None:
        value = self.values.value(s.value)
        self.combine(s.var, s.combine, value)

    def combine(self, var: Var, combine: str, value: str) -> None:
        """Emit `var = combine(var, value)`."""
        old = self.values.value(e.read(var))
        self._set(
            var, operations.operation(self.f, combine, var.dtype, 1, [old, value])
        )

    def _store(self, s: Store) -> None:
        value = self.values.value(s.value)
        distance = self.memory.linear(s.buffer, s.indices)
        self.memory.store(s.buffer, self.values.address(s.buffer, distance), value)
        self.values.forget_loads()

    def _copy(self, s: Copy) -> None:
        if s.target.strides is not None or s.source.strides is not None:
            self.body([_copy_loops(s)])
            return
        self.copy_bytes(s, size_in_bytes(s.source.shape, s.source.dtype))
        self.values.forget_loads()

    def copy_bytes(self, s: Copy, size: Expr) -> None:
        """Emit a copy of this many bytes between dense arrays."""
        pointers = [self.memory.pointer(b) for b in (s.target, s.source)]
        self.f.module.declare("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        to, from_ = (f"ptr align {s.source.dtype.itemsize} {p}" for p in pointers)
        length = self.values.value(size)
        self.f.do(
            f"call void @llvm.memcpy.p0.p0.i64({to}, {from_}, i64 {length}, i1 false)"
        )

    def swap(self, s: Swap) -> None:
        """Exchange the pointers of two buffers."""
        a, b = self.memory.pointer(s.a), self.memory.pointer(s.b)
        self.memory.move(s.a, b)
        self.memory.move(s.b, a)
        self.values.forget_loads()

    # --- control flow

    def _for(self, s: For) -> None:
        extents = [] if self._within_guard else needed(s)
        if extents is None or (s.extent.is_const and s.extent.attr <= 0):
            return
        zero = e.index(0)
        tests = [e.compare("lt", zero, n) for n in extents if not same(n, s.extent)]
        if not tests:
            self.steps(s)
            return
        self._within_guard = True
        self.branch(e.all_of(tests), lambda: self.steps(s))
        self._within_guard = False

    def steps(self, s: For) -> None:
        """Emit the iterations of a loop, sequentially."""
        if s.extent.is_const and s.extent.attr == 1:
            with self.values.scope():
                self.values.constants[s.var] = "0"
                self.body(s.body)
        else:
            self._serial(s)

    def _serial(self, s: For) -> None:
        """Emit the iterations in unrolled groups, then the remainder one by one."""
        start, width = e.index(0), s.binding.width
        if width > 1:
            rest = e.binary("rem", s.extent, e.index(width))
            groups = e.sub(s.extent, rest)
            self._strided(s, start, groups, width)
            start = groups
        self._strided(s, start, s.extent, 1)

    def _strided(self, s: For, start: Expr, stop: Expr, width: int) -> None:
        """Emit the iterations from `start` to `stop`, in groups of `width`."""
        trips = e.div(e.sub(stop, start), e.index(width))
        if trips.is_const and trips.attr <= 0:
            return

        def group(position: str) -> None:
            for k in range(width):
                with self.values.scope():
                    at = self.f.emit(f"add nuw nsw i64 {position}, {k}") if k else ""
                    self.values.constants[s.var] = at or position
                    self.body(s.body)

        first, last = self.values.value(start), self.values.value(stop)
        self.loop(first, last, width, trips, group)

    def loop(
        self,
        start: str,
        stop: str,
        step: int,
        trips: Expr,
        iteration: Callable[[str], None],
    ) -> None:
        """Emit a loop; `iteration` receives the register of the position.

        Args:
            start: The first position.
            stop: The end, a multiple of `step` after `start`.
            trips: The number of iterations.
        """
        f, name = self.f, self.f.name("loop")
        position, after = f"%i.{name}", f"%next.{name}"
        with self.values.loop():
            before = f.block
            if trips.is_const:
                f.branch(name)
            else:
                enter = f.emit(f"icmp slt i64 {start}, {stop}")
                f.branch_if(enter, name, f"done.{name}")
            f.start(name)
            both = f"[ {start}, %{before} ], [ {after}, %latch.{name} ]"
            f.do(f"{position} = phi i64 {both}")
            f.define(position)
            most = trips.attr * step if trips.is_const else MOST_TRIPS
            f.bounds[position] = most if start == "0" else MOST_TRIPS
            self.values.forget_loads()
            self.iterate(partial(iteration, position), f"latch.{name}", trips)
            f.start(f"latch.{name}")
            f.do(f"{after} = add nuw nsw i64 {position}, {step}")
            # LLVM turns "slt" into a comparison of the position before the step.
            again = f.emit(f"icmp ne i64 {after}, {stop}")
            f.branch_if(again, name, f"done.{name}")
            f.start(f"done.{name}")
        self.values.forget_loads()

    def iterate(
        self,
        iteration: Callable[[], None],
        onward: str,
        trips: Expr | None,  # noqa: ARG002
    ) -> None:
        """Emit an iteration of a loop, which then branches to the block `onward`.

        Args:
            trips: The number of iterations; None if it depends on the data.
        """
        with self.values.scope():
            iteration()
        self.f.branch(onward)

    def _while(self, s: While) -> None:
        f, name = self.f, self.f.name("while")

        def iteration() -> None:
            self.straight(s.head)
            test = self.values.value(s.test)
            f.branch_if(test, f"body.{name}", f"done.{name}")
            f.start(f"body.{name}")
            self.body(s.body)

        with self.values.loop():
            f.branch(name)
            f.start(name)
            self.values.forget_loads()
            self.iterate(iteration, name, None)
            f.start(f"done.{name}")
        self.values.forget_loads()

    def _if(self, s: If) -> None:
        otherwise = partial(self.body, s.else_) if s.else_ else None
        self.branch(s.test, partial(self.body, s.then), otherwise)

    def branch(
        self,
        test: Expr,
        then: Callable[[], None],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Emit a branch, whose sides the functions `then` and `otherwise` emit."""
        f, name = self.f, self.f.name("if")
        end = f"end.{name}"
        other = f"else.{name}" if otherwise else end
        f.branch_if(self.values.value(test), f"then.{name}", other)
        f.start(f"then.{name}")
        with self.values.scope():
            then()
        f.branch(end)
        if otherwise:
            f.start(other)
            with self.values.scope():
                otherwise()
            f.branch(end)
        f.start(end)
        self.values.forget_loads()


def _copy_loops(s: Copy) -> Stmt:
    """Return a copy between arrays that are not both dense as nested loops."""
    variables = [
        Var(f"copy{axis}", dtypes.int64) for axis in range(len(s.target.shape))
    ]
    at = tuple(e.read(var) for var in variables)
    statement: Stmt = Store(s.target, at, e.load(s.source, at))
    for var, extent in reversed(list(zip(variables, s.target.shape, strict=True))):
        statement = For(var, extent, [statement], independent=True)
    return statement
