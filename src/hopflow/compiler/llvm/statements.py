"""Structured statements as basic blocks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from hopflow import dtypes
from hopflow.compiler.llvm import (
    calls,
    host_calls,
    operations,
    parallel,
    routines,
    segments,
    vector,
)
from hopflow.compiler.llvm.cost import FUEL, Cost
from hopflow.compiler.llvm.expressions import ScalarEvaluator
from hopflow.compiler.llvm.memory import (
    Memory,
    allocate,
    free,
    reallocate,
)
from hopflow.compiler.llvm.module import OPAQUE, RARE, Function
from hopflow.compiler.llvm.stubs import INTERRUPTED, OUT_OF_MEMORY, TRAP_VALUES
from hopflow.compiler.llvm.target import CpuTarget
from hopflow.compiler.llvm.types import register_type
from hopflow.compiler.plan import ALIGNMENT, size_in_bytes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.emptiness import needed
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.nest import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Buffer,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Invoke,
    Let,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    Var,
    While,
)
from hopflow.loop_ir.walk import same
from hopflow.ops.opdef import MOST_BYTES


class Emitter:
    """Emits the statements of one program into one function."""

    def __init__(self, f: Function, memory: Memory, target: CpuTarget) -> None:
        self.f, self.memory, self.target = f, memory, target
        self.values = ScalarEvaluator(f, memory)
        self.status = f.slot("i64", "status")
        self.cost = Cost()  # of the innermost open body, so far
        # Of what has memory of its own: the slots of capacities in bytes; of outputs
        # the caller's words for the address and the shape.
        self.capacities: dict[Buffer, str] = {}
        self.returned: dict[Buffer, str] = {}
        self.private: dict[For, list[Buffer]] = {}  # what each thread has for itself
        self.first_site = ""  # in a function: the register with its number
        self.may_stop = False  # whether it may leave the program early
        self.polls = False  # whether it does
        self.may_poll = True
        self.has_block = False  # whether the function takes the program's block
        self._fuel = ""
        self._ticks: dict[int, str] = {}
        self._depth = 0  # of loops
        self._within_guard = False  # whether a loop around is left out if it is empty
        self._stops: dict[int, str] = {}
        self._emit: dict[type, Callable[[Any], None]] = {
            Let: self._let,
            Declare: self._declare,
            Assign: self._assign,
            Accumulate: self._accumulate,
            Store: self._store,
            Copy: self._copy,
            Swap: self._swap,
            For: self._for,
            While: self._while,
            If: self._if,
            Call: self._call,
            HostCall: self._host_call,
            Tick: partial(host_calls.emit_tick, self),
            Invoke: lambda s: calls.emit(self, s),
            Trap: self._trap,
            Barrier: self._barrier,
            Allocate: self._allocate,
        }

    def within(self, f: Function, memory: Memory) -> "Emitter":
        """An emitter of statements into a function that this one's code calls."""
        inner = Emitter(f, memory, self.target)
        inner.has_block = self.has_block
        inner._fuel = f.early_slot("i64", "fuel", str(FUEL))
        inner.name_trap_values()
        return inner

    def name_trap_values(self) -> None:
        """Name the words in which a trap reports values."""
        for word in range(2):
            place = f"getelementptr i64, ptr %block, i64 {TRAP_VALUES + word}"
            self.f.do(f"%trap{word} = {place}")

    # --- bodies

    def body(self, statements: Sequence[Stmt]) -> None:
        """Emit statements one after the other, in the open scope."""
        if self.has_block and segments.is_long(statements):
            segments.emit(self, statements)
        else:
            self.straight(statements)

    def straight(self, statements: Sequence[Stmt]) -> None:
        """The same, all into this function: what they define is there to be read."""
        for statement in calls.runs(self, statements):
            if isinstance(statement, list):
                calls.emit_all(self, statement)
                continue
            before = self.f.size + self.f.work
            self._emit[type(statement)](statement)
            if not isinstance(statement, (Copy, For, While, If, Call)):
                self.cost.fixed += self.f.size + self.f.work - before

    @contextmanager
    def measured(self) -> Iterator[Cost]:
        """In the body of a loop: count its cost apart."""
        outer, self.cost = self.cost, Cost()
        self._depth += 1
        yield self.cost
        self._depth -= 1
        self.cost = outer

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
        """`var = combine(var, value)`."""
        old = self.values.value(e.read(var))
        self._set(
            var, operations.operation(self.f, combine, var.dtype, 1, [old, value])
        )

    def _store(self, s: Store) -> None:
        value = self.values.value(s.value)
        distance = self.values.value(self.memory.linear(s.buffer, s.indices))
        self.memory.store(s.buffer, self.memory.address(s.buffer, distance), value)
        self.values.forget_loads()

    def _copy(self, s: Copy) -> None:
        if s.target.strides is not None or s.source.strides is not None:
            self.body([_copy_loops(s)])
            return
        size = size_in_bytes(s.source.shape, s.source.dtype)
        pointers = [self.memory.pointer(b) for b in (s.target, s.source)]
        self.f.module.declare("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        to, from_ = (f"ptr align {s.source.dtype.itemsize} {p}" for p in pointers)
        length = self.values.value(size)
        self.f.do(
            f"call void @llvm.memcpy.p0.p0.i64({to}, {from_}, i64 {length}, i1 false)"
        )
        self.count(Cost(1).times(e.binary("lshr", size, e.index(4))))
        self.values.forget_loads()

    def count(self, cost: Cost) -> None:
        """Count what did not poll by itself; it brings the next poll nearer."""
        self.cost.add(cost)
        if self._depth and cost.terms:
            with self.values.scope():
                self._burn(self.values.value(Cost(0, cost.terms).total))

    def _swap(self, s: Swap) -> None:
        a, b = self.memory.pointer(s.a), self.memory.pointer(s.b)
        self.memory.move(s.a, b)
        self.memory.move(s.b, a)
        if s.a in self.capacities:
            slots = [self.capacities[b] for b in (s.a, s.b)]
            first, second = (self.f.emit(f"load i64, ptr {slot}") for slot in slots)
            self.f.do(f"store i64 {second}, ptr {slots[0]}")
            self.f.do(f"store i64 {first}, ptr {slots[1]}")
        self.values.forget_loads()

    def _barrier(self, s: Barrier) -> None:
        """One iteration runs after the other: there is nobody to wait for."""

    def _call(self, s: Call) -> None:
        routines.emit(self, s)
        self.values.forget_loads()

    def _host_call(self, s: HostCall) -> None:
        host_calls.emit(self, s)
        self.values.forget_loads()

    # --- control flow

    def _for(self, s: For) -> None:
        extents = [] if self._within_guard else needed(s)
        if extents is None or (s.extent.is_const and s.extent.attr <= 0):
            return
        zero = e.index(0)
        tests = [e.compare("lt", zero, n) for n in extents if not same(n, s.extent)]
        if not tests:
            self._steps(s)
            return
        self._within_guard = True
        self._branch(e.all_of(tests), lambda: self._steps(s))
        self._within_guard = False

    def _steps(self, s: For) -> None:
        if s.binding.kind == "threads":
            parallel.emit(self, s)
        elif s.binding.kind == "vector" and vector.suits(s):
            vector.emit(self, s)
        elif s.extent.is_const and s.extent.attr == 1:
            with self.values.scope():
                self.values.constants[s.var] = "0"
                self.body(s.body)
        else:
            self._serial(s)

    def _serial(self, s: For) -> None:
        """The iterations one after the other: in groups, then the rest one by one."""
        start, width = e.index(0), s.binding.width
        if width > 1:
            rest = e.binary("rem", s.extent, e.index(width))
            groups = e.sub(s.extent, rest)
            self._strided(s, start, groups, width)
            start = groups
        self._strided(s, start, s.extent, 1)

    def _strided(self, s: For, start: Expr, stop: Expr, width: int) -> None:
        """The iterations from `start` to `stop`, `width` of them at a time."""
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
        polls: bool = True,
    ) -> None:
        """Call `iteration` with the register that goes from `start` up to `stop`."""
        f, name = self.f, self.f.name("loop")
        before = f.block
        if trips.is_const:
            f.branch(name)
        else:
            enter = f.emit(f"icmp slt i64 {start}, {stop}")
            f.branch_if(enter, name, f"done.{name}")
        f.start(name)
        position, after = f"%i.{name}", f"%next.{name}"
        f.do(f"{position} = phi i64 [ {start}, %{before} ], [ {after}, %latch.{name} ]")
        self.values.forget_loads()
        with self.measured() as cost, self.values.scope():
            iteration(position)
        cost.fixed += 2
        total = cost.times(trips)
        if polls and self.may_poll and not (total.is_small or total.polls):
            total.polls = True
            self._poll(cost.fixed, f"latch.{name}")
        else:
            f.branch(f"latch.{name}")
        f.start(f"latch.{name}")
        f.do(f"{after} = add nuw nsw i64 {position}, {step}")
        again = f.emit(f"icmp slt i64 {after}, {stop}")
        f.branch_if(again, name, f"done.{name}")
        f.start(f"done.{name}")
        self.values.forget_loads()
        if polls:
            self.cost.add(total)
        else:
            self.count(total)

    def _while(self, s: While) -> None:
        f, name = self.f, self.f.name("while")
        f.branch(name)
        f.start(name)
        self.values.forget_loads()
        with self.measured() as cost, self.values.scope():
            self.straight(s.head)
            test = self.values.value(s.test)
            f.branch_if(test, f"body.{name}", f"done.{name}")
            f.start(f"body.{name}")
            self.body(s.body)
        if self.may_poll:
            self._poll(cost.fixed + 2, name)
        else:
            f.branch(name)
        f.start(f"done.{name}")
        self.values.forget_loads()
        self.cost.unbounded = self.cost.polls = True

    def _if(self, s: If) -> None:
        otherwise = partial(self.body, s.else_) if s.else_ else None
        self._branch(s.test, partial(self.body, s.then), otherwise)

    def _branch(
        self,
        test: Expr,
        then: Callable[[], None],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Emit a branch, whose sides these functions emit."""
        f, name = self.f, self.f.name("if")
        end = f"end.{name}"
        other = f"else.{name}" if otherwise else end
        polled = self.cost.polls
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
        self.cost.polls = polled
        self.values.forget_loads()

    # --- leaving

    def _trap(self, s: Trap) -> None:
        with self.trap_if(self.values.value(s.test), s.site):
            for word, value in enumerate(s.values):
                register = self.values.value(e.cast(value, dtypes.int64))
                self.report(word, register)

    @contextmanager
    def trap_if(self, test: str, site: int) -> Iterator[None]:
        """Leave with `site` if the register `test` holds; within, what is reported."""
        f, name = self.f, self.f.name("trap")
        f.branch_if(test, name, f"pass.{name}", RARE)
        f.start(name)
        with self.values.scope():
            yield
        self.leave(self.site(site + 1))
        f.start(f"pass.{name}")

    def site(self, number: int) -> str:
        """The number of a site, in a function that of a call's."""
        if not self.first_site:
            return str(number)
        return self.f.emit(f"add i64 {self.first_site}, {number}")

    def report(self, word: int, register: str) -> None:
        """Report an i64 with the trap that is being emitted: its first or second."""
        self.f.do(f"store i64 {register}, ptr %trap{word}")

    def leave(self, status: int | str) -> None:
        """End the open block: leave the program."""
        self.may_stop = True
        self.f.do(f"store i64 {status}, ptr {self.status}")
        self.f.branch("exit")

    def fuel(self) -> str:
        """The slot of the countdown to the next poll."""
        if not self._fuel:
            self._fuel = self.f.slot("i64", "fuel")
        return self._fuel

    def ticks(self, site: int) -> str:
        """The slot of a site's countdown."""
        if site not in self._ticks:
            self._ticks[site] = self.f.early_slot("i64", "fuel", "0")
        return self._ticks[site]

    def _burn(self, amount: str) -> str:
        """Let the countdown go on by `amount`; return what is left."""
        slot = self.fuel()
        left = self.f.emit(f"load i64, ptr {slot}")
        rest = self.f.emit(f"sub i64 {left}, {amount}")
        self.f.do(f"store i64 {rest}, ptr {slot}")
        return rest

    def _poll(self, cost: int, onward: str) -> None:
        """Count down, look for an interrupt at zero, and go on to `onward`."""
        f, name = self.f, self.f.name("poll")
        self.polls = True
        rest = self._burn(str(cost))
        empty = f.emit(f"icmp slt i64 {rest}, 0")
        f.branch_if(empty, name, onward, RARE)
        f.start(name)
        f.module.external("preserve_mostcc i64 @hf_poll(ptr)", f"cold {OPAQUE}")
        stop = f.emit("call preserve_mostcc i64 @hf_poll(ptr %block)")
        f.do(f"store i64 {FUEL}, ptr {self.fuel()}")
        stopped = f.emit(f"icmp ne i64 {stop}, 0")
        self.stop_if(stopped, onward)

    def stop_if(self, test: str, onward: str) -> None:
        """Leave if the register `test` holds, for Python has an error set."""
        self._stops[INTERRUPTED] = "interrupted"
        self.f.branch_if(test, "interrupted", onward, RARE)

    def finish(self) -> None:
        """End the last block, and add those that leave the program early."""
        f = self.f
        for buffer, words in self.returned.items():  # now the caller's
            f.do(f"store ptr {self.memory.pointer(buffer)}, ptr {words}")
            self.memory.move(buffer, "null")
        f.do(f"store i64 0, ptr {self.status}")
        f.branch("exit")
        for status, label in sorted(self._stops.items()):
            f.start(label)
            self.leave(status)

    def no_memory_if(self, test: str) -> None:
        """Leave if the register `test` holds, because memory ran out."""
        enough = self.f.name("enough")
        self._stops[OUT_OF_MEMORY] = "no.memory"
        self.f.branch_if(test, "no.memory", enough, RARE)
        self.f.start(enough)

    # --- memory found on the way

    def _allocate(self, s: Allocate) -> None:
        """Find memory for the shape that is known now, unless there is enough."""
        f, name = self.f, self.f.name("allocate")
        extents = [self.values.value(n) for n in s.buffer.shape]
        size = self.allocation(s.buffer)
        slot = self.capacities[s.buffer]
        capacity = f.emit(f"load i64, ptr {slot}")
        fits = f.emit(f"icmp sle i64 {size}, {capacity}")
        f.branch_if(fits, f"end.{name}", name)
        f.start(name)
        # What grows in a loop is moved as often as its size doubles.
        double = f.emit(f"shl i64 {capacity}, 1")
        more = f.emit(f"icmp sgt i64 {double}, {size}")
        size = f.emit(f"select i1 {more}, i64 {double}, i64 {size}")
        old = self.memory.pointer(s.buffer)
        # Capacities are such that there is nothing to free where this fails.
        if s.keeps:
            new = reallocate(f, old, size)
            self.no_memory_if(f.emit(f"icmp eq ptr {new}, null"))  # the old one stays
        else:
            free(f, old)
            new = allocate(f, size)
        self.memory.move(s.buffer, new)
        f.do(f"store i64 {size}, ptr {slot}")
        self.no_memory_if(f.emit(f"icmp eq ptr {new}, null"))
        f.branch(f"end.{name}")
        f.start(f"end.{name}")
        if s.buffer in self.returned:
            for word, extent in enumerate(extents, start=1):
                to = f.emit(
                    f"getelementptr i64, ptr {self.returned[s.buffer]}, i64 {word}"
                )
                f.do(f"store i64 {extent}, ptr {to}")
        self.values.forget_loads()

    def allocation(self, buffer: Buffer, most: int = MOST_BYTES) -> str:
        """The bytes of a buffer, rounded up to whole lines of the cache, one at least
        (but in guarded memory, where each byte too many hides a fault); leaves where
        the extents are such that it had more than `most`."""
        f, itemsize = self.f, buffer.dtype.itemsize
        multiple = itemsize if f.module.guarded else ALIGNMENT
        extents = [self.values.value(n) for n in buffer.shape]
        f.module.declare("i64 @llvm.smax.i64(i64, i64)")
        total, faults = str(itemsize), []
        for operation, terms in (("mul", extents), ("add", [str(multiple - 1)])):
            intrinsic = f"{{i64, i1}} @llvm.s{operation}.with.overflow.i64"
            f.module.declare(f"{intrinsic}(i64, i64)")
            for term in terms:
                both = f.emit(f"call {intrinsic}(i64 {total}, i64 {term})")
                total = f.emit(f"extractvalue {{i64, i1}} {both}, 0")
                faults.append(f.emit(f"extractvalue {{i64, i1}} {both}, 1"))
        faults += [f.emit(f"icmp slt i64 {n}, 0") for n in extents]
        faults.append(f.emit(f"icmp sgt i64 {total}, {most}"))
        for fault in faults[1:]:
            faults[0] = f.emit(f"or i1 {faults[0]}, {fault}")
        self.no_memory_if(faults[0])
        whole = f.emit(f"and i64 {total}, {-multiple}")
        if f.module.guarded:
            return whole
        return f.emit(f"call i64 @llvm.smax.i64(i64 {whole}, i64 {multiple})")


def _copy_loops(s: Copy) -> Stmt:
    """A copy between arrays that are not both dense, as nested loops."""
    variables = [
        Var(f"copy{axis}", dtypes.int64) for axis in range(len(s.target.shape))
    ]
    at = tuple(e.read(var) for var in variables)
    statement: Stmt = Store(s.target, at, e.load(s.source, at))
    for var, extent in reversed(list(zip(variables, s.target.shape, strict=True))):
        statement = For(var, extent, [statement], independent=True)
    return statement
