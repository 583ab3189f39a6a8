"""Buffers in LLVM IR: their pointers, the addresses of elements, and aliasing."""

from collections.abc import Iterable, Sequence
from typing import Final, Self

from hopflow.compiler.llvm.module import Function, Module
from hopflow.compiler.llvm.operations import from_memory, to_memory
from hopflow.compiler.llvm.types import memory_type
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import (
    Call,
    Copy,
    HostCall,
    Invoke,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.walk import merged_axes

INVARIANT: Final = ", !invariant.load !0"
MOST_SCOPES: Final = 64
"""Each scope names all others, and the text grows with the square of their number."""


class Memory:
    """The addresses of a program's buffers within one function."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self._pointers: dict[Buffer, str] = {}
        self._slots: dict[Buffer, str] = {}
        self._strides: dict[Buffer, tuple[Expr, ...]] = {}
        self._distances: dict[tuple[Buffer, tuple[Expr, ...]], Expr] = {}
        self._load_notes: dict[Buffer, str] = {}
        self._store_notes: dict[Buffer, str] = {}

    @classmethod
    def of(cls, f: Function, other: Self) -> Self:
        """Return a memory for another function: its metadata, without pointers."""
        memory = cls(f)
        memory._load_notes, memory._store_notes = other._load_notes, other._store_notes
        return memory

    # --- where buffers begin

    def place(self, buffer: Buffer, pointer: str) -> None:
        """Set the register that always points to the start of `buffer`."""
        self._pointers[buffer] = pointer

    def place_in_slot(self, buffer: Buffer, pointer: str) -> str:
        """Set the initial start of a buffer that may move; return its slot."""
        slot = self._slots[buffer] = self.f.slot("ptr", buffer.name)
        self.f.do(f"store ptr {pointer}, ptr {slot}")
        return slot

    def move(self, buffer: Buffer, pointer: str) -> None:
        """Emit the store of a new start of `buffer` to its slot."""
        self.f.do(f"store ptr {pointer}, ptr {self._slots[buffer]}")

    def pointer(self, buffer: Buffer) -> str:
        """Return the register that points to the start of `buffer` here."""
        fixed = self._pointers.get(buffer)
        return fixed or self.f.emit(f"load ptr, ptr {self._slots[buffer]}")

    def slot(self, buffer: Buffer) -> str:
        """Return the slot of a buffer that may move."""
        return self._slots[buffer]

    def note(self, buffer: Buffer, load: str, store: str) -> None:
        """Attach metadata to all loads and stores of `buffer`."""
        self._load_notes[buffer], self._store_notes[buffer] = load, store

    def notes(self, buffer: Buffer) -> tuple[str, str]:
        """Return the metadata of loads and of stores of `buffer`."""
        return self._load_notes.get(buffer, ""), self._store_notes.get(buffer, "")

    def is_invariant(self, buffer: Buffer) -> bool:
        """Return whether nothing in the program writes to `buffer`."""
        return self._load_notes.get(buffer) == INVARIANT

    # --- addresses

    def strides(self, buffer: Buffer) -> tuple[Expr, ...]:
        """Return the number of elements between neighbors, for each axis."""
        strides = self._strides.get(buffer)
        if strides is None:
            strides = buffer.strides or dense_strides(buffer.shape)
            self._strides[buffer] = strides
        return strides

    def linear(self, buffer: Buffer, at: Sequence[Expr]) -> Expr:
        """Return the distance of `buffer[at]` from the start, in elements.

        `at` may index the leading axes only.
        """
        key = buffer, tuple(at)
        distance = self._distances.get(key)
        if distance is None:
            distance = self._distances[key] = self._distance(buffer, at)
        return distance

    def _distance(self, buffer: Buffer, at: Sequence[Expr]) -> Expr:
        strides = self.strides(buffer)
        if buffer.strides is None and any(position.op == "rem" for position in at):
            # Of a reshaped array, or in a coalesced loop: `x[i / n, i % n]` is at `i`.
            merged, inner = merged_axes(at, buffer.shape), buffer.shape[len(at) :]
            at = [axis.position for axis in merged]
            strides = dense_strides([*(axis.extent for axis in merged), *inner])
        total = e.index(0)
        for position, stride in zip(at, strides, strict=False):
            total = e.add(total, e.mul(position, stride))
        return total

    def address(self, buffer: Buffer, distance: str, start: str = "") -> str:
        """Return the address of an element at a linear distance from `start`."""
        pointer = start or self.pointer(buffer)
        if distance == "0":
            return pointer
        element = memory_type(buffer.dtype)
        return self.f.emit(
            f"getelementptr inbounds {element}, ptr {pointer}, i64 {distance}"
        )

    def readable(self, address: str, condition: str) -> str:
        """Return the address, or that of zeros where the i1 `condition` is false."""
        zeros = self.f.module.zeros()
        return self.f.emit(f"select i1 {condition}, ptr {address}, ptr {zeros}")

    def load(self, buffer: Buffer, address: str, width: int = 1) -> str:
        """Load one element, or `width` consecutive ones."""
        stored = memory_type(buffer.dtype, width)
        align = f", align {buffer.dtype.itemsize}" if width > 1 else ""
        note = self._load_notes.get(buffer, "")
        value = self.f.emit(f"load {stored}, ptr {address}{align}{note}")
        return from_memory(self.f, value, buffer.dtype, width)

    def store(self, buffer: Buffer, address: str, value: str, width: int = 1) -> None:
        """Store one element, or `width` consecutive ones."""
        stored = memory_type(buffer.dtype, width)
        align = f", align {buffer.dtype.itemsize}" if width > 1 else ""
        note = self._store_notes.get(buffer, "")
        bits = to_memory(self.f, value, buffer.dtype, width)
        self.f.do(f"store {stored} {bits}, ptr {address}{align}{note}")


def dense_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the strides of a row-major array."""
    strides = [e.index(1)]
    for extent in reversed(shape[1:]):
        strides.append(e.mul(strides[-1], extent))
    return tuple(reversed(strides[: len(shape)]))


# --- aliasing -------------------------------------------------------------------------


def note_aliasing(
    memory: Memory, program: Program, statements: Iterable[Stmt], module: Module
) -> None:
    """Tell LLVM by alias metadata which buffers cannot overlap.

    Buffers that the program only reads are invariant. The arena and the buffers that
    are exchanged have one scope, since they share memory in turn. Each other buffer
    that the program writes itself has its own scope. Those without one may alias
    anything, as far as LLVM knows: outputs that only functions write that it calls, and
    some of very many. The memory that a block of a GPU shares has none either.
    """
    written: dict[Buffer, None] = {}
    called: dict[Buffer, None] = {}
    swapped: dict[Buffer, None] = {}
    for s in statements:
        match s:
            case Store(buffer) | Copy(buffer):
                written[buffer] = None
            case Swap(a, b):
                written[a] = written[b] = None
                swapped[a] = swapped[b] = None
            case Call(routine, args):
                for position in ROUTINES[routine].writes:
                    argument = args[position]
                    assert isinstance(argument, Ref)
                    written[argument.buffer] = None
            case HostCall():
                written |= dict.fromkeys(ref.buffer for ref in s.results)
            case Invoke():  # typically most of many outputs
                called |= dict.fromkeys(ref.buffer for ref in s.results)
    together = dict.fromkeys([*program.arena, *swapped])
    groups = [list(together)] if together else []
    alone = [b for b in written if b not in together and b.space != "shared"]
    groups += [[b] for b in alone]
    del groups[MOST_SCOPES:]
    domain = module.note(distinct=True)
    scopes = [module.note(domain, distinct=True) for _ in groups]
    for group, scope in zip(groups, scopes, strict=True):
        others = [s for s in scopes if s != scope]
        note = f", !alias.scope {module.note(scope)}"
        note += f", !noalias {module.note(*others)}" if others else ""
        for buffer in group:
            memory.note(buffer, note, note)
    for buffer in (*program.inputs, *program.constants):
        if buffer not in written and buffer not in called:
            memory.note(buffer, INVARIANT, "")
