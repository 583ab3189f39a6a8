"""Long bodies as several functions, called one after the other.

LLVM's register allocator takes time quadratic in the length of a function: of 6,000
operations in one function it took nine tenths of the time to compile. A long body is
therefore divided into segments of about `LENGTH` statements, each a function of its
own. A segment gets the variables and buffers that it names in an array of words; a
variable of a segment that later ones read too has a stack slot of the function around.

Statements that find memory or let buffers change their places remain in that function.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from hopflow.compiler.cpu.captures import Cells, captured
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.target import HOT
from hopflow.compiler.llvm.module import RARE, Function
from hopflow.compiler.llvm.types import register_type
from hopflow.loop_ir import walk
from hopflow.loop_ir.nest import (
    Allocate,
    Buffer,
    Declare,
    For,
    Let,
    Stmt,
    Swap,
    Var,
    While,
)

if TYPE_CHECKING:
    from hopflow.compiler.cpu.statements import CpuEmitter

__all__ = ["emit", "is_long"]

LENGTH: Final = 1024
"""Statements of a segment, at any depth: some 3,000 instructions."""
MOST_BUFFERS: Final = 64
"""Buffers that a segment names: the address of each is in a register from its start."""
_LOOP: Final = 16
"""A loop counts for so many more."""


def is_long(statements: Sequence[Stmt]) -> bool:
    """Whether a body is to be divided."""
    # That of one level of a deep nest has few statements, and is not searched.
    return len(statements) > LENGTH // _LOOP and _length(statements) > 2 * LENGTH


def emit(emitter: "CpuEmitter", statements: Sequence[Stmt]) -> None:
    """Emit the statements of a long body, in the open scope."""
    runs = list(_runs(statements))
    captures = [captured(run) for run in runs]
    last_read = {var: k for k, (read, _) in enumerate(captures) for var in read}
    for k, run in enumerate(runs):
        if _stays(run):
            emitter.straight(run)
            continue
        defined = [s.var for s in run if isinstance(s, Let | Declare)]
        shared = [var for var in defined if last_read.get(var, k) > k]
        _Segment(emitter, run, *captures[k], shared).emit()


def _runs(statements: Sequence[Stmt]) -> Iterator[list[Stmt]]:
    """The statements in groups: of about `LENGTH`, or of those that stay."""
    run: list[Stmt] = []
    length, stayed = 0, False
    buffers: set[Buffer] = set()
    for statement in statements:
        more, stays = _length([statement]), _stays([statement])
        named = set(walk.buffers(statement))
        is_full = length + more > LENGTH or len(buffers | named) > MOST_BUFFERS
        if run and (is_full or stays != stayed):
            yield run
            run, length, buffers = [], 0, set()
        run.append(statement)
        length, stayed = length + more, stays
        buffers |= named
    yield run


def _length(statements: Sequence[Stmt]) -> int:
    """About how much code statements come to; a vector loop has a tail and checks."""
    is_loop = [isinstance(s, For | While) for s in walk.statements(statements)]
    return len(is_loop) + _LOOP * sum(is_loop)


def _stays(run: Sequence[Stmt]) -> bool:
    """Whether statements find memory, or let buffers change their places."""
    return any(isinstance(s, Allocate | Swap) for s in walk.statements(run))


class _Segment:
    """A run of statements as a function, and the call of it."""

    def __init__(
        self,
        emitter: "CpuEmitter",
        run: Sequence[Stmt],
        variables: Sequence[Var],
        buffers: Sequence[Buffer],
        shared: Sequence[Var],
    ) -> None:
        """
        Args:
            variables, buffers: What the run takes from around it.
            shared: The variables of the run that later statements read.
        """
        self.emitter, self.run, self.shared = emitter, run, shared
        self.variables, self.buffers = variables, buffers
        self.cells = Cells()
        outer = emitter.f
        self.name = outer.module.fresh("segment")
        signature = f"internal i64 @{self.name}(ptr %block, ptr %cells)"
        self.f = Function(outer.module, signature, f"noinline {HOT}")
        self.inner = emitter.within(self.f, ProgramMemory.of(self.f, emitter.memory))

    def emit(self) -> None:
        self._capture()
        slots = self._share()
        f, inner, outer = self.f, self.inner, self.emitter
        f.branch("first")
        prologue = f.take()
        f.start("first")
        inner.straight(self.run)
        for var, slot in zip(self.shared, slots, strict=True):
            type_ = register_type(var.dtype)
            f.do(f"store {type_} {inner.values.variable(var)}, ptr {slot}")
        inner.finish()
        f.start("exit")
        f.do(f"ret i64 {f.emit(f'load i64, ptr {inner.status}')}")
        rest = f.take()
        f.insert(prologue[:-1])
        f.insert(inner.memory.starts)
        f.branch("first")
        f.insert(rest)
        f.module.define(self.name, f.text)
        outer.cost.add(inner.cost)
        self._call()

    def _capture(self) -> None:
        """Pass what the run reads, and let it be found in the function."""
        inner, outer = self.inner, self.emitter
        for var in self.variables:
            if var in outer.values.slots:
                inner.values.slots[var] = self._pass("ptr", outer.values.slots[var])
            else:
                register = outer.values.constants[var]
                type_ = register_type(var.dtype)
                inner.values.constants[var] = self._pass(type_, register)
        if outer.memory.arena:
            inner.memory.arena = self._pass("ptr", outer.memory.arena)
        private = set(chain(*outer.private.values()))
        for buffer in [b for b in self.buffers if b not in private]:
            root = outer.memory.root(buffer)
            if root is None:
                inner.memory.place(
                    buffer, self._pass("ptr", outer.memory.pointer(buffer))
                )
            else:
                inner.memory.place_by_root(buffer, root)
        inner.private, inner.may_poll = outer.private, outer.may_poll
        if outer.first_site:
            inner.first_site = self._pass("i64", outer.first_site)

    def _share(self) -> list[str]:
        """Slots in the function around for what later statements read."""
        slots = []
        for var in self.shared:
            slot = self.emitter.f.slot(register_type(var.dtype), var.name)
            self.emitter.values.slots[var] = slot
            slots.append(self._pass("ptr", slot))
        return slots

    def _pass(self, type_: str, register: str) -> str:
        """Pass a register of the function around; return that in this one."""
        return self.cells.loaded(self.f, self.cells.add(type_, register))

    def _call(self) -> None:
        """Call the function; if it stops the program does, for the same reason."""
        outer, f = self.emitter, self.emitter.f
        cells = self.cells.stored(f)
        status = f.emit(f"call i64 @{self.name}(ptr %block, ptr {cells})")
        outer.values.forget_loads()
        if self.inner.may_stop:
            go_on, stop = f.name("joined"), f.name("stopped")
            f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), stop, go_on, RARE)
            f.start(stop)
            outer.leave(status)
            f.start(go_on)
