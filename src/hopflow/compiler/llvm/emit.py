"""A program of the Loop IR as one LLVM function.

The function is `i64 @name(ptr block)`. The block is an array of words: a header (see
`hopflow.compiler.llvm.stubs`), the sizes, and the addresses of the inputs and of the
outputs (of words for one that the program allocates: its address, then its shape). The
function returns 0, `site + 1` of a trap, or a negative code.
"""

import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np

from hopflow.compiler.llvm.cost import FUEL, RELEASE, Cost
from hopflow.compiler.llvm.expressions import ScalarEvaluator
from hopflow.compiler.llvm.memory import (
    Memory,
    allocate,
    free,
    note_aliasing,
    size_in_bytes,
)
from hopflow.compiler.llvm.module import HOT, OPAQUE, Function, Module
from hopflow.compiler.llvm.statements import Emitter
from hopflow.compiler.llvm.stubs import HEADER
from hopflow.compiler.llvm.target import Target
from hopflow.compiler.plan import ALIGNMENT, ArenaPlan
from hopflow.compiler.private import private_buffers
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.nest import Program, Swap

ON_STACK: Final = 4096
"""An arena of at most this many bytes is on the stack."""
EMBEDDED: Final = 1024
"""Constants of at most this many bytes are part of the code."""


@dataclass(frozen=True, slots=True)
class Emission:
    """The LLVM IR of a program, and what must be linked to it.

    symbols     names of functions and data that the linker must be given
    constants   those of them that are the data of large "constant" buffers
    """

    name: str
    text: str
    symbols: frozenset[str]
    constants: dict[str, np.ndarray[Any, np.dtype[Any]]] = field(default_factory=dict)


def emit_llvm(program: Program, arena: ArenaPlan, target: Target) -> str:
    """The LLVM IR of `program`, for reading."""
    return emit(program, arena, target).text


def emit(
    program: Program, arena: ArenaPlan, target: Target, *, guarded: bool = False
) -> Emission:
    """The LLVM IR of `program`, whose arena is laid out as `arena` says.

    If `guarded`, each buffer of the arena has memory of its own, of `compiler.guarded`.
    """
    return _ProgramEmitter(program, arena, target, guarded).emit()


class _ProgramEmitter:
    """The function around the statements: parameters, memory, and the way out."""

    def __init__(
        self, program: Program, arena: ArenaPlan, target: Target, guarded: bool
    ) -> None:
        self.program, self.arena, self.target = program, arena, target
        self.name = symbol(program.name)
        self.module = Module(guarded=guarded)
        self.f = Function(self.module, f"i64 @{self.name}(ptr %block)", HOT)
        self.memory = Memory(self.f)
        self.emitter = Emitter(self.f, self.memory, target)
        self.all = list(walk.statements(program.body))
        self.allocated = walk.allocated(program.body)
        self.constants: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        self._heap: list[str] = []  # slots of the addresses of what is not on the stack

    def emit(self) -> Emission:
        f = self.f
        metadata = note_aliasing(self.memory, self.program, self.all)
        self._parameters()
        self._constants()
        self._allocate()
        f.branch("start")
        prologue = f.take()
        f.start("start")
        self.emitter.body(self.program.body)
        self.emitter.finish()
        self._exit()
        rest = f.take()
        f.insert(prologue[:-1])
        f.insert(self._release())
        f.insert(rest)
        self.module.define(self.name, f.text)
        return Emission(
            self.name,
            f"{self.module.text}{metadata}",
            frozenset(self.module.symbols),
            self.constants,
        )

    def _word(self, position: int) -> str:
        return self.f.emit(f"getelementptr i64, ptr %block, i64 {position}")

    def _parameters(self) -> None:
        f, program = self.f, self.program
        self.emitter.name_trap_values()
        position = HEADER
        for var in program.sizes:
            register = f.emit(f"load i64, ptr {self._word(position)}")
            self.emitter.values.constants[var] = register
            position += 1
        for buffer in (*program.inputs, *program.outputs):
            register = f.emit(f"load ptr, ptr {self._word(position)}")
            if buffer in self.allocated:
                self.emitter.returned[buffer] = register
            else:
                self.memory.place(buffer, register)
            position += 1

    def _constants(self) -> None:
        for number, buffer in enumerate(self.program.constants):
            assert buffer.data is not None
            data = np.ascontiguousarray(buffer.data)
            name = f"{self.name}.data.{number}"
            if data.nbytes <= EMBEDDED:
                self.module.data(name, data.tobytes() or b"\0")
            else:
                self.module.external_data(name)
                self.constants[name] = data
            self.memory.place(buffer, f"@{name}")

    def _allocate(self) -> None:
        """Find memory for the arena, and lay out the buffers in it."""
        f, values, arena = self.f, self.emitter.values, self.arena
        growing = walk.growing(self.program.body)
        swapped = {b for s in self.all if isinstance(s, Swap) for b in (s.a, s.b)}
        for buffer in (*growing, *self.allocated):
            self.memory.place_in_slot(buffer, "null")
            capacity = f.slot("i64", "capacity")
            f.do(f"store i64 0, ptr {capacity}")
            self.emitter.capacities[buffer] = capacity
        private = self.emitter.private = private_buffers(self.program.body)
        apart = {*self.emitter.capacities, *chain(*private.values())}
        placed = [b for b in self.program.arena if b not in apart]
        if not placed:
            return
        base = "" if self.module.guarded else self._arena_base(arena.total)
        for buffer in placed:
            if self.module.guarded:
                size = size_in_bytes(buffer.shape, buffer.dtype)
                pointer = self._on_heap(values.value(size))
            else:
                offset = values.value(arena.offsets[buffer])
                pointer = f.emit(f"getelementptr i8, ptr {base}, i64 {offset}")
            if buffer in swapped:
                self.memory.place_in_slot(buffer, pointer)
            else:
                self.memory.place(buffer, pointer)

    def _arena_base(self, total: Expr) -> str:
        f = self.f
        if total.is_const and total.attr <= ON_STACK:
            return f.slot(f"[{total.attr} x i8]", "arena", ALIGNMENT)
        size = self.emitter.values.value(total)
        rounded = f.emit(f"add i64 {size}, {ALIGNMENT}")
        return self._on_heap(f.emit(f"and i64 {rounded}, {-ALIGNMENT}"))

    def _on_heap(self, size: str) -> str:
        """Memory of `size` bytes until the program ends."""
        f = self.f
        slot = f.early_slot("ptr", "heap", "null")
        self._heap.append(slot)
        base = allocate(f, size)
        f.do(f"store ptr {base}, ptr {slot}")
        self.emitter.no_memory_if(f.emit(f"icmp eq ptr {base}, null"))
        return base

    def _exit(self) -> None:
        """The block in which every way out ends."""
        f = self.f
        f.start("exit")
        for slot in (*self._heap, *map(self.memory.slot, self.emitter.capacities)):
            free(f, f.emit(f"load ptr, ptr {slot}"))
        status = f.emit(f"load i64, ptr {self.emitter.status}")
        f.do(f"ret i64 {status}")

    def _release(self) -> list[str]:
        """Release the GIL if the program is going to run for long: known at the end,
        and placed before the first statement."""
        f, cost = self.f, self.emitter.cost
        lines: list[str] = []
        with f.hoisted(lines):
            if self.emitter.polls:
                f.do(f"store i64 {FUEL}, ptr {self.emitter.fuel()}")
            known = not cost.unbounded and self._is_known(cost)
            if known and not cost.terms and cost.fixed < RELEASE:
                f.branch("start")
                return lines
            f.module.external("void @hf_release(ptr)", OPAQUE)
            if known and cost.terms:
                values = ScalarEvaluator(f, self.memory)
                values.constants = self.emitter.values.constants
                long = f.emit(f"icmp sgt i64 {values.value(cost.total)}, {RELEASE}")
                f.branch_if(long, "release", "start")
                f.start("release")
            f.do("call void @hf_release(ptr %block)")
            f.branch("start")
        return lines

    def _is_known(self, cost: Cost) -> bool:
        """Whether the sizes alone decide the cost."""
        pending, sizes = list(cost.terms), set(self.program.sizes)
        while pending:
            node = pending.pop()
            if node.op == "load" or (node.op == "var" and node.attr not in sizes):
                return False
            pending += node.args
        return True


def symbol(name: str) -> str:
    """`name` as LLVM and linkers take it without quotes."""
    return "hf_kernel_" + re.sub(r"[^0-9A-Za-z_]", "_", name)
