"""The emitter of a CPU's functions: exits from the program, polls, and heap memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Self

from hopflow import dtypes
from hopflow.compiler.cpu.cost import CALL, FUEL, Cost
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.stubs import INTERRUPTED, OUT_OF_MEMORY, TRAP_VALUES
from hopflow.compiler.cpu.unit import Unit
from hopflow.compiler.llvm.module import OPAQUE, RARE, Function
from hopflow.compiler.llvm.statements import Emitter
from hopflow.compiler.reuse import ALIGNMENT
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import (
    Allocate,
    Barrier,
    Call,
    Copy,
    For,
    If,
    Stmt,
    Swap,
    Trap,
    While,
)
from hopflow.ops.opdef import MOST_BYTES


class CpuEmitter(Emitter):
    """An emitter of statements of one program into one function.

    `statements.StatementEmitter` adds the forms of loops and calls.
    """

    memory: ProgramMemory

    def __init__(self, f: Function, memory: ProgramMemory, unit: Unit) -> None:
        super().__init__(f, memory)
        self.unit = unit
        self.status = f.slot("i64", "status")
        self.cost = Cost()  # so far, of the innermost open body
        # For buffers with memory of their own the slots of their capacities in bytes;
        # for outputs among them the caller's words for the address and the shape.
        self.capacities: dict[Buffer, str] = {}
        self.returned: dict[Buffer, str] = {}
        self.private: dict[For, list[Buffer]] = {}  # allocated by each thread
        self.first_site = ""  # the register with the number of a function's first site
        self.may_stop = False  # whether the code may leave the program early
        self.polls = False  # whether the code polls
        self.may_poll = not unit.target.freestanding
        self.has_block = False  # whether the function has the program's block
        self._fuel = ""
        self._ticks: dict[int, str] = {}
        self._depth = 0  # the number of open loops
        self._stops: dict[int, str] = {}
        self.emitters |= {
            Trap: self._trap,
            Barrier: self._barrier,
            Allocate: self._allocate,
        }

    def for_function(self, f: Function, memory: ProgramMemory) -> Self:
        """Return an emitter into a function that the code of this one calls."""
        inner = type(self)(f, memory, self.unit)
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

    def emit(self, statement: Stmt) -> None:
        before = self.f.size + self.f.work
        super().emit(statement)
        if not isinstance(statement, (Copy, For, While, If, Call)):
            self.cost.fixed += self.f.size + self.f.work - before

    # --- cost

    @contextmanager
    def measured(self) -> Iterator[Cost]:
        """Count the cost of a loop's body separately in this context."""
        outer, self.cost = self.cost, Cost()
        self._depth += 1
        yield self.cost
        self._depth -= 1
        self.cost = outer

    def count(self, cost: Cost) -> None:
        """Add the cost of code that does not poll; it brings the next poll nearer."""
        self.cost.add(cost)
        if self._depth and cost.terms and not self.unit.target.freestanding:
            with self.values.scope():
                self._burn(self.values.value(Cost(0, cost.terms).total))

    def count_call(self, cost: Cost) -> None:
        """Add the cost of a call of a function, which has a countdown of its own: that
        never reaches zero if each call is short."""
        self.cost.add(cost)
        is_fixed = not (cost.terms or cost.unbounded)
        if self._depth and not is_fixed and not self.unit.target.freestanding:
            self._burn(str(CALL))

    # --- statements that the CPU emits differently

    def copy_bytes(self, s: Copy, size: Expr) -> None:
        super().copy_bytes(s, size)
        self.count(Cost(1).times(e.binary("lshr", size, e.index(4))))

    def swap(self, s: Swap) -> None:
        super().swap(s)
        if s.a in self.capacities:
            slots = [self.capacities[b] for b in (s.a, s.b)]
            first, second = (self.f.emit(f"load i64, ptr {slot}") for slot in slots)
            self.f.do(f"store i64 {second}, ptr {slots[0]}")
            self.f.do(f"store i64 {first}, ptr {slots[1]}")

    def iterate(
        self, iteration: Callable[[], None], onward: str, trips: Expr | None
    ) -> None:
        f, name = self.f, self.f.name("step")
        place = f.size
        f.branch(name)
        f.start(name)
        with self.measured() as cost, self.values.scope():
            iteration()
        f.branch(onward)
        cost.fixed += 2
        if trips is None:
            total, polls = Cost(unbounded=True, polls=True), True
        else:
            total = cost.times(trips)
            polls = not total.is_small
        if polls and self.may_poll:
            total.polls = True
            # After the iteration LLVM would move parts of it behind the poll.
            with f.before(place):
                self._poll(cost.fixed, name)
        self.cost.add(total)

    def unpolled_loop(
        self,
        start: str,
        stop: str,
        step: int,
        trips: Expr,
        iteration: Callable[[str], None],
    ) -> None:
        """Emit a loop without polls in it; its cost is counted at the end."""
        may_poll, self.may_poll = self.may_poll, False
        with self.measured() as cost:
            self.loop(start, stop, step, trips, iteration)
        self.may_poll = may_poll
        self.count(cost)

    def branch(
        self,
        test: Expr,
        then: Callable[[], None],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        polled = self.cost.polls
        super().branch(test, then, otherwise)
        self.cost.polls = polled  # the side that polls may not be taken

    def _barrier(self, s: Barrier) -> None:
        """Emit nothing, since iterations run sequentially."""

    # --- leaving

    def _trap(self, s: Trap) -> None:
        with self.trap_if(self.values.value(s.test), s.site):
            for word, value in enumerate(s.values):
                register = self.values.value(e.cast(value, dtypes.int64))
                self.report(word, register)

    @contextmanager
    def trap_if(self, test: str, site: int) -> Iterator[None]:
        """Leave with `site` if the register `test` holds; report values in it."""
        f, name = self.f, self.f.name("trap")
        f.branch_if(test, name, f"pass.{name}", RARE)
        f.start(name)
        with self.values.scope():
            yield
        self.leave(self.site(site + 1))
        f.start(f"pass.{name}")

    def site(self, number: int) -> str:
        """Return the number of a site, in a function relative to the call's first."""
        if not self.first_site:
            return str(number)
        return self.f.emit(f"add i64 {self.first_site}, {number}")

    def report(self, word: int, register: str) -> None:
        """Report an i64 as the first or second value of the current trap."""
        self.f.do(f"store i64 {register}, ptr %trap{word}")

    def leave(self, status: int | str) -> None:
        """End the current block by leaving the program."""
        self.may_stop = True
        self.f.do(f"store i64 {status}, ptr {self.status}")
        self.f.branch("exit")

    def fuel(self) -> str:
        """Return the slot of the countdown to the next poll."""
        if not self._fuel:
            self._fuel = self.f.slot("i64", "fuel")
        return self._fuel

    def ticks(self, site: int) -> str:
        """Return the slot of a site's countdown."""
        if site not in self._ticks:
            self._ticks[site] = self.f.early_slot("i64", "fuel", "0")
        return self._ticks[site]

    def _burn(self, amount: str) -> str:
        """Decrease the countdown by `amount`; return the rest."""
        slot = self.fuel()
        fuel = self.f.emit(f"load i64, ptr {slot}")
        rest = self.f.emit(f"sub i64 {fuel}, {amount}")
        self.f.do(f"store i64 {rest}, ptr {slot}")
        return rest

    def _poll(self, cost: int, onward: str) -> None:
        """Count down, poll at zero, and branch to `onward`."""
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
        """Leave if the register `test` holds: Python then has an error set."""
        self._stops[INTERRUPTED] = "interrupted"
        self.f.branch_if(test, "interrupted", onward, RARE)

    def finish(self) -> None:
        """End the last block, and add the blocks that leave the program early."""
        f = self.f
        for buffer, words in self.returned.items():  # the caller owns the memory now
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

    # --- memory of sizes that are computed at runtime

    def _allocate(self, s: Allocate) -> None:
        """Allocate memory for the current shape, unless the capacity suffices."""
        f, name = self.f, self.f.name("allocate")
        extents = [self.values.value(n) for n in s.buffer.shape]
        size = self.allocation(s.buffer)
        slot = self.capacities[s.buffer]
        capacity = f.emit(f"load i64, ptr {slot}")
        fits = f.emit(f"icmp sle i64 {size}, {capacity}")
        f.branch_if(fits, f"end.{name}", name)
        f.start(name)
        # A buffer that grows in a loop is moved each time its size doubles.
        double = f.emit(f"shl i64 {capacity}, 1")
        more = f.emit(f"icmp sgt i64 {double}, {size}")
        size = f.emit(f"select i1 {more}, i64 {double}, i64 {size}")
        old = self.memory.pointer(s.buffer)
        # With these capacities there is nothing to free if this fails.
        heap = self.unit.heap
        if s.keeps:
            new = heap.reallocate(f, old, capacity, size)
            # If it fails, the old memory stays, and is freed at the exit.
            self.no_memory_if(f.emit(f"icmp eq ptr {new}, null"))
        else:
            heap.free(f, old)
            new = heap.allocate(f, size)
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
        """Return the bytes of a buffer, rounded up to at least one cache line.

        Guarded memory is not rounded up, since each byte too many would hide a fault.
        The code leaves the program if the extents need more than `most` bytes.
        """
        f, itemsize = self.f, buffer.dtype.itemsize
        multiple = itemsize if self.unit.guarded else ALIGNMENT
        least = 0 if self.unit.guarded else multiple
        if all(n.is_const for n in buffer.shape):
            size = itemsize * prod(n.attr for n in buffer.shape)
            if size + multiple <= most:
                return str(max(-(-size // multiple) * multiple, least))
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
        return f.emit(f"call i64 @llvm.smax.i64(i64 {whole}, i64 {least})")
