"""A program of the Loop IR as LLVM functions: the entry, and one for each callee.

The entry is `i64 @name(ptr block)`. The block is an array of words: a header (see
`hopflow.compiler.cpu.stubs`), the sizes, and the addresses of the inputs and of the
outputs (of words for an output that the program allocates: its address, then its
shape). The function returns 0, `site + 1` of a trap, or a negative code.

A function that the program calls takes the block for its header, and as further
arguments the number of its first site, the sizes, and the addresses. It returns the
same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from hopflow.compiler.cpu import host_calls
from hopflow.compiler.cpu.cost import FUEL, RELEASE, Cost
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.statements import StatementEmitter
from hopflow.compiler.cpu.stubs import HEADER
from hopflow.compiler.cpu.target import HOT, CpuTarget
from hopflow.compiler.cpu.unit import Callee, Constants, Unit
from hopflow.compiler.llvm.expressions import ScalarEvaluator
from hopflow.compiler.llvm.memory import note_aliasing
from hopflow.compiler.llvm.module import (
    OPAQUE,
    Function,
    Module,
    plain,
    symbol,
)
from hopflow.compiler.private import private_buffers
from hopflow.compiler.reuse import ALIGNMENT, ArenaPlan, reuse, rounded_up
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import Program, Swap
from hopflow.ops.opdef import MOST_BYTES

ON_STACK: Final = 4096
"""An arena of at most this many bytes is on the stack."""
OWN_SLOT: Final = 512
"""A buffer there of at most this many bytes has a slot of its own: LLVM keeps it in
registers, if all its indices are constants, whatever those of other buffers are."""
OWN_SLOTS: Final = 16_384
"""The bytes of all such slots of a function, at most."""
ON_SMALL_STACK: Final = 256
"""The same of microcontrollers, whose stacks have a few thousand bytes."""
EMBEDDED: Final = 1024
"""Constants of at most this many bytes are part of the code, which is loaded as a
whole. All are, where the linker takes addresses from nowhere else."""


@dataclass(frozen=True, slots=True)
class Emission:
    """The LLVM IR of a program, and what must be linked to it.

    name        the name of the function that Python calls
    constants   the data of large "constant" buffers among the symbols of the module
    """

    name: str
    module: Module
    constants: Constants


def emit_llvm(program: Program, arena: ArenaPlan, target: CpuTarget) -> str:
    """Return the LLVM IR of `program`, for reading."""
    return emit(program, arena, target).module.text


def emit(
    program: Program, arena: ArenaPlan, target: CpuTarget, *, guarded: bool = False
) -> Emission:
    """Return the LLVM IR of `program`, with the layout of its arena in `arena`.

    If `guarded`, each buffer of the arena has separate memory of
    `compiler.cpu.guarded`.
    """
    module = Module(has_extrema=target.has_extrema, has_fma=target.has_fma)
    unit = Unit(module, target, guarded)
    emit_into(unit, program, arena)
    return Emission(symbol(program.name), module, unit.constants)


def emit_into(unit: Unit, program: Program, arena: ArenaPlan) -> None:
    """Define the entry of `program`, and the functions that it calls, in a module."""
    for function in walk.functions(program):
        _FunctionEmitter(function, unit, reuse(function)).emit()
    _EntryEmitter(program, unit, arena).emit()


def is_on_stack(arena: ArenaPlan, target: CpuTarget) -> bool:
    """Return whether the memory of an arena is on the stack."""
    most = ON_SMALL_STACK if target.is_microcontroller else ON_STACK
    return arena.total.is_const and arena.total.attr <= most


class _FunctionEmitter:
    """An emitter of the function around the statements: parameters, memory, exit."""

    def __init__(self, program: Program, unit: Unit, arena: ArenaPlan) -> None:
        self.program, self.unit, self.arena = program, unit, arena
        self.name = symbol(program.name)
        self.f = Function(unit.module, *self._signature())
        self.memory = ProgramMemory(self.f)
        self.emitter = StatementEmitter(self.f, self.memory, unit)
        self.emitter.has_block = True
        self.statements = list(walk.statements(program.body))
        self.allocated = walk.allocated(program.body)
        self._heap: list[str] = []  # slots of the addresses of heap memory
        self._mark = ""  # of the heap, at the start of the function

    def emit(self) -> None:
        f = self.f
        note_aliasing(self.memory, self.program, self.statements, self.unit.module)
        self.emitter.name_trap_values()
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
        f.insert(self.memory.starts)
        f.insert(self._start())
        f.insert(rest)
        self.unit.module.define(self.name, f.text)
        callee = Callee(self._known_cost(), self.emitter.may_stop)
        self.unit.functions[self.name] = callee

    def _signature(self) -> tuple[str, str]:
        sizes = [f"i64 {argument(var)}" for var in self.program.sizes]
        buffers = dict.fromkeys((*self.program.inputs, *self.program.outputs))
        pointers = [f"ptr noalias {argument(buffer)}" for buffer in buffers]
        parameters = ", ".join(("ptr %block", "i64 %site", *sizes, *pointers))
        return f"internal i64 @{self.name}({parameters})", f"noinline {HOT}"

    def _parameters(self) -> None:
        self.emitter.first_site = "%site"
        for var in self.program.sizes:
            self.emitter.values.constants[var] = argument(var)
        for buffer in (*self.program.inputs, *self.program.outputs):
            self.memory.place(buffer, argument(buffer))

    def _constants(self) -> None:
        for number, buffer in enumerate(self.program.constants):
            assert buffer.data is not None
            data = np.ascontiguousarray(buffer.data)
            name = f"{self.name}.data.{number}"
            if data.nbytes <= EMBEDDED or self.unit.target.freestanding:
                self.unit.module.data(name, data.tobytes() or b"\0")
            else:
                self.unit.module.external_data(name)
                self.unit.constants[name] = data
            self.memory.place(buffer, f"@{name}")

    def _allocate(self) -> None:
        """Allocate the arena, and place the buffers in it."""
        f, values, arena = self.f, self.emitter.values, self.arena
        self._mark = self.unit.heap.mark(f)
        swapped = {
            b for s in self.statements if isinstance(s, Swap) for b in (s.a, s.b)
        }
        for buffer in self.allocated:
            self.memory.place_in_slot(buffer, "null")
            capacity = f.slot("i64", "capacity")
            f.do(f"store i64 0, ptr {capacity}")
            self.emitter.capacities[buffer] = capacity
        private = self.emitter.private = private_buffers(self.program.body)
        apart = {*self.emitter.capacities, *chain(*private.values())}
        placed = [b for b in self.program.arena if b not in apart]
        if not placed:
            return
        guarded = self.unit.guarded
        if not (guarded or arena.total.is_const):
            self._check_sizes(placed)
        base = "" if guarded else self._arena_base(arena.total)
        self.memory.arena = base
        own = self._own_slots(placed)
        for buffer in placed:
            offset = arena.offsets[buffer]
            if guarded:
                pointer = self._on_heap(self.emitter.allocation(buffer))
            elif buffer in own:
                pointer = f.slot(f"[{own[buffer]} x i8]", buffer.name, ALIGNMENT)
            elif offset.is_const and buffer not in swapped:
                self.memory.place_in_arena(buffer, offset.attr)
                continue
            else:
                distance = values.value(offset)
                pointer = f.emit(f"getelementptr i8, ptr {base}, i64 {distance}")
            if buffer in swapped:
                self.memory.place_in_slot(buffer, pointer)
            else:
                self.memory.place(buffer, pointer)

    def _own_slots(self, buffers: Sequence[Buffer]) -> dict[Buffer, int]:
        """Return the sizes of those buffers that have a slot of their own."""
        target = self.unit.target
        if target.is_microcontroller or not is_on_stack(self.arena, target):
            return {}
        sizes = {
            b: rounded_up(math.prod(n.attr for n in b.shape) * b.dtype.itemsize)
            for b in buffers
            if all(n.is_const for n in b.shape)
        }
        own = {b: size for b, size in sizes.items() if size <= OWN_SLOT}
        return own if sum(own.values()) <= OWN_SLOTS else {}

    def _check_sizes(self, buffers: Sequence[Buffer]) -> None:
        """Leave the program if the size of the arena would overflow an i64."""
        checked: set[tuple[Any, ...]] = set()
        for buffer in buffers:
            key = buffer.dtype.itemsize, *buffer.shape
            if key not in checked and not all(n.is_const for n in buffer.shape):
                checked.add(key)
                self.emitter.allocation(buffer, MOST_BYTES // len(buffers))

    def _arena_base(self, total: Expr) -> str:
        f = self.f
        if is_on_stack(self.arena, self.unit.target):
            return f.slot(f"[{rounded_up(total.attr)} x i8]", "arena", ALIGNMENT)
        size = self.emitter.values.value(total)
        rounded = f.emit(f"add i64 {size}, {ALIGNMENT}")
        return self._on_heap(f.emit(f"and i64 {rounded}, {-ALIGNMENT}"))

    def _on_heap(self, size: str) -> str:
        """Allocate `size` bytes until the program ends, and return their address."""
        f = self.f
        slot = f.early_slot("ptr", "heap", "null")
        self._heap.append(slot)
        base = self.unit.heap.take(f, size)
        f.do(f"store ptr {base}, ptr {slot}")
        self.emitter.no_memory_if(f.emit(f"icmp eq ptr {base}, null"))
        return base

    def _exit(self) -> None:
        """Emit the block in which every path ends."""
        f = self.f
        f.start("exit")
        for slot in self._heap:
            self.unit.heap.give(f, f.emit(f"load ptr, ptr {slot}"))
        for slot in map(self.memory.slot, self.emitter.capacities):
            self.unit.heap.free(f, f.emit(f"load ptr, ptr {slot}"))
        self.unit.heap.release(f, self._mark)
        status = f.emit(f"load i64, ptr {self.emitter.status}")
        f.do(f"ret i64 {status}")

    def _start(self) -> list[str]:
        """Return the lines before the first statement."""
        lines: list[str] = []
        with self.f.hoisted(lines):
            if self.emitter.polls:
                self.f.do(f"store i64 {FUEL}, ptr {self.emitter.fuel()}")
            self._begin()
        return lines

    def _begin(self) -> None:
        self.f.branch("start")

    def _known_cost(self) -> Cost:
        """Return the cost for callers, which lack the variables of its terms."""
        cost = self.emitter.cost
        return Cost(cost.fixed, [], cost.unbounded or bool(cost.terms), cost.polls)


class _EntryEmitter(_FunctionEmitter):
    """An emitter of the function that Python calls."""

    def _signature(self) -> tuple[str, str]:
        return f"i64 @{self.name}(ptr %block)", HOT

    def _parameters(self) -> None:
        f, program = self.f, self.program
        has_ticks = any(site.kind == "progress" for site in program.sites)
        if has_ticks and not self.unit.target.freestanding:
            host_calls.start_ticks(f, len(program.sites))
        position = HEADER
        for var in program.sizes:
            word = f.emit(f"getelementptr i64, ptr %block, i64 {position}")
            self.emitter.values.constants[var] = f.emit(f"load i64, ptr {word}")
            position += 1
        for buffer in (*program.inputs, *program.outputs):
            if buffer in self.allocated:
                word = f.emit(f"getelementptr i64, ptr %block, i64 {position}")
                self.emitter.returned[buffer] = f.emit(f"load ptr, ptr {word}")
            else:
                self.memory.place_by_word(buffer, position)
            position += 1

    def _begin(self) -> None:
        """Release the GIL if the program is going to run for long.

        The cost is known once all statements are emitted; the code goes before the
        first.
        """
        f, cost = self.f, self.emitter.cost
        if self.unit.target.freestanding:
            f.branch("start")
            return
        is_bounded = not cost.unbounded and self._is_known(cost)
        if is_bounded and not cost.terms and cost.fixed < RELEASE:
            f.branch("start")
            return
        f.module.external("void @hf_release(ptr)", OPAQUE)
        if is_bounded and cost.terms:
            values = ScalarEvaluator(f, self.memory)
            values.constants = self.emitter.values.constants
            long = f.emit(f"icmp sgt i64 {values.value(cost.total)}, {RELEASE}")
            f.branch_if(long, "release", "start")
            f.start("release")
        f.do("call void @hf_release(ptr %block)")
        f.branch("start")

    def _is_known(self, cost: Cost) -> bool:
        """Return whether the sizes alone determine the cost."""
        pending, sizes = list(cost.terms), set(self.program.sizes)
        while pending:
            node = pending.pop()
            if node.op == "load" or (node.op == "var" and node.attr not in sizes):
                return False
            pending += node.args
        return True


def argument(parameter: Var | Buffer) -> str:
    """Return the register of a parameter: a size, or the start of a buffer."""
    return f"%arg.{plain(parameter.name)}"
