"""Building a program: the statement list at hand, names, buffers and loops."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hopflow import dtypes
from hopflow.compiler.llvm.target import Target
from hopflow.compiler.schedule.places import (
    REGISTER_LIMIT,
    Epoch,
    Pending,
    Place,
    Registers,
    Slot,
    Stored,
    indices,
    is_small,
    static_size,
)
from hopflow.compiler.schedule.sizes import lowered
from hopflow.dtypes import DType
from hopflow.errors import CompileError
from hopflow.graph.core import Graph
from hopflow.graph.types import TensorType, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.nest import (
    SERIAL,
    Accumulate,
    Allocate,
    Assign,
    Binding,
    Buffer,
    Declare,
    For,
    Let,
    Program,
    Site,
    Stmt,
    Store,
    Var,
)
from hopflow.loop_ir.walk import nodes, replace
from hopflow.symbolic.size import Size, Symbol

UNROLL = 16
"""Loops of at most so many steps in all are written out, if they are too narrow for
vectors."""
_VECTOR_STATEMENTS = (Let, Store, Accumulate)


class Builder:
    """A program in the making. `statements` is the list that is being written.

    loop     a token for the innermost loop body: which buffers may be changed in place
    depth    how many loops are around
    owners   for each buffer of the arena, the loop whose every step may overwrite it
    mutable  the variables that may be assigned again
    slots    all values that may still be read
    functions   what has been made of the graphs of functions
    """

    def __init__(self, name: str, target: Target) -> None:
        self.program = Program(name, [], [], [], [], [], [], [])
        self.statements: list[Stmt] = self.program.body
        self.target = target
        self.loop: object = self
        self.depth = 0
        self.owners: dict[Buffer, object] = {}
        self.slots: list[Slot] = []
        self.symbols: dict[Symbol, Expr] = {}
        self.mutable: set[Var] = set()
        self.functions: dict[Graph, Program] = {}
        self._count = 0

    # --- names ---

    def var(self, dtype: DType, name: str = "t") -> Var:
        sizes = {size.name for size in self.program.sizes}  # named by the user, or s0
        self._count += 1
        while f"{name}{self._count}" in sizes:
            self._count += 1
        return Var(f"{name}{self._count}", dtype)

    def site(self, kind: Any, node: int) -> int:
        self.program.sites.append(Site(kind, node))
        return len(self.program.sites) - 1

    # --- sizes ---

    def extent(self, size: Size) -> Expr:
        """A size as an expression over the program's size parameters."""
        if isinstance(size, int):
            return e.index(size)
        return lowered(size, self._symbol)

    def _symbol(self, symbol: Symbol) -> Expr:
        if symbol not in self.symbols:
            raise CompileError(
                f"the size `{symbol}` is made within a body, and used outside it. Let "
                "the body return a result of a size that is known outside."
            )
        return self.symbols[symbol]

    def define(self, symbol: Symbol, value: Expr) -> None:
        """Say what a symbol is from here on."""
        self.symbols[symbol] = self.let(value, "s")

    def is_known_at_entry(self, shape: Sequence[Expr]) -> bool:
        """Whether a shape is over the program's sizes alone."""
        return all(
            node.attr in self.program.sizes
            for node in nodes(*shape)
            if node.op == "var"
        )

    def shape(self, type_: TensorType) -> tuple[Expr, ...]:
        return tuple(self.extent(n) for n in type_.shape)

    # --- statements ---

    def add(self, statement: Stmt) -> None:
        if self.symbols:
            replace(statement, self._resolved)
        self.statements.append(statement)

    def _resolved(self, node: Expr) -> Expr | None:
        return self.extent(node.attr) if node.op == "size" else None

    @contextmanager
    def into(self, statements: list[Stmt]) -> Iterator[list[Stmt]]:
        """Write to another list within the block."""
        before = self.statements
        self.statements = statements
        try:
            yield statements
        finally:
            self.statements = before

    @contextmanager
    def loop_body(self, statements: list[Stmt], token: object) -> Iterator[list[Stmt]]:
        """Write the body of a loop: what it writes anew each step is its own."""
        before = self.loop
        self.loop = token
        self.depth += 1
        try:
            with self.into(statements):
                yield statements
        finally:
            self.loop = before
            self.depth -= 1

    def let(self, value: Expr, name: str = "t") -> Expr:
        """`value`, computed here and now."""
        if value.op == "const" or (
            value.op == "var" and value.attr not in self.mutable
        ):
            return value
        var = self.var(value.dtype, name)
        self.add(Let(var, value))
        return e.read(var)

    def declare(self, value: Expr, name: str = "v") -> Var:
        """A new mutable variable."""
        var = self.var(value.dtype, name)
        self.mutable.add(var)
        self.add(Declare(var, value))
        return var

    def assign(self, var: Var, value: Expr) -> None:
        if not (value.op == "var" and value.attr is var):
            self.add(Assign(var, value))

    def temporary(
        self, type_: TensorType, name: str = "b", *, allocate: bool = True
    ) -> Buffer:
        """A new buffer in the arena, owned by the innermost loop, and made here (unless
        the caller will `allocate` it) if its size is not known before."""
        self._count += 1
        buffer = Buffer(f"{name}{self._count}", type_.dtype, self.shape(type_), "arena")
        self.program.arena.append(buffer)
        self.owners[buffer] = self.loop
        is_known = type_.is_static or self.is_known_at_entry(buffer.shape)
        if allocate and not is_known:
            self.add(Allocate(buffer))
        return buffer

    def forget(self, buffer: Buffer) -> None:
        """Take back a temporary that nothing came to use."""
        if buffer in self.owners:
            del self.owners[buffer]
            self.program.arena.remove(buffer)
            self.statements[:] = [
                s
                for s in self.statements
                if not (isinstance(s, Allocate) and s.buffer is buffer)
            ]

    # --- loops ---

    def nest(
        self,
        shape: Sequence[Size],
        body: Callable[[Index], None],
        *,
        independent: bool = True,
    ) -> None:
        """`body(i)` for each index of `shape`; the last axis as vectors if it can."""
        static = [n for n in shape if isinstance(n, int)]
        if len(static) == len(shape):
            total = 1
            for n in static:
                total *= n
            if total <= UNROLL and (total <= REGISTER_LIMIT or static[-1] < 4):
                for at in indices(static):
                    body(at)
                return
        self._axis(tuple(shape), (), body, independent)

    def _axis(
        self,
        shape: tuple[Size, ...],
        outer: Index,
        body: Callable[[Index], None],
        independent: bool,
    ) -> None:
        if len(outer) == len(shape):
            body(outer)
            return
        size = shape[len(outer)]
        if is_one(size):
            self._axis(shape, (*outer, e.index(0)), body, independent)
            return
        var = self.var(dtypes.int64, "i")
        with self.into([]) as statements:
            self._axis(shape, (*outer, e.read(var)), body, independent)
        self.for_(var, self.extent(size), statements, independent)

    def for_(self, var: Var, extent: Expr, body: list[Stmt], independent: bool) -> None:
        """A loop; as vectors where its body is straight and its axis independent."""
        binding = self._vector(extent, body) if independent else SERIAL
        self.add(For(var, extent, body, independent, binding))

    def _vector(self, extent: Expr, body: list[Stmt]) -> Binding:
        if not body or not all(isinstance(s, _VECTOR_STATEMENTS) for s in body):
            return SERIAL
        reduces = any(isinstance(s, Accumulate) for s in body)
        width = min(
            self.target.vector_width(s.value.dtype, reduces=reduces)
            for s in body
            if isinstance(s, _VECTOR_STATEMENTS)
        )
        if extent.is_const:
            while width > 1 and width > extent.attr:
                width //= 2
        return Binding("vector", width) if width > 1 else SERIAL

    # --- places ---

    def slot(self, place: Place, uses: int) -> Slot:
        """A new value that so many readers will ask for."""
        slot = Slot(place, uses, self.statements)
        self.slots.append(slot)
        return slot

    def probe(self, rank: int) -> Index:
        """The index at which elements are looked at without being computed."""
        while len(_PROBES) < rank:
            _PROBES.append(e.read(Var(f"probe{len(_PROBES)}", dtypes.int64)))
        return tuple(_PROBES[:rank])

    def settle(self, slot: Slot, target: Buffer | None = None) -> None:
        """Give a pending value registers or a buffer (`target`, if one is given)."""
        place = slot.place
        if not isinstance(place, Pending):
            return
        if is_small(place.type) and target is None:
            elements = [self.let(slot[at]) for at in _static_indices(place.type)]
            self.move(slot, Registers(place.type, tuple(elements)))
            return
        buffer = target or self.temporary(place.type)
        self.store([slot], [Stored(place.type, buffer)])
        self.move(slot, Stored(place.type, buffer))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Values made within the block are forgotten after it."""
        before = list(self.slots)
        try:
            yield
        finally:
            self.slots = before

    def move(self, slot: Slot, place: Place) -> None:
        """Give a value another place: pending ones that may read it read that now."""
        old = slot.place
        if isinstance(old, Pending) and place.buffers:
            for other in [s.place for s in self.slots if s is not slot]:
                if (
                    isinstance(other, Pending)
                    and other.depth >= old.depth
                    and other.reads >= old.reads
                ):
                    other.reads |= place.buffers
        slot.place = place
        slot.memo.clear()
        Epoch.now += 1

    def store(self, slots: Sequence[Slot], targets: Sequence[Stored]) -> None:
        """Write values of one shape to memory, in one loop nest."""

        def body(at: Index) -> None:
            values = [slot[at] for slot in slots]
            if len(values) > 1:  # all are read before any is written
                values = [self.let(v) for v in values]
            for target, value in zip(targets, values, strict=True):
                self.add(Store(target.buffer, (*target.prefix, *at), value))

        self.nest(slots[0].type.shape, body)

    def readers(self, buffer: Buffer, but: Slot | None = None) -> list[Slot]:
        """The live values that are in a buffer, or read it when they are computed."""
        self.slots = [s for s in self.slots if s.uses > 0]
        return [s for s in self.slots if s is not but and buffer in s.place.buffers]

    def may_overwrite(self, slot: Slot) -> bool:
        """Whether the buffer of a dying value may be changed in place.

        Values that are pending on its contents are given places of their own first.
        """
        place = slot.place
        if not isinstance(place, Stored) or place.prefix or slot.uses > 0:
            return False
        if self.owners.get(place.buffer) is not self.loop:
            return False
        others = self.readers(place.buffer, but=slot)
        if any(
            isinstance(s.place, Stored) or s.home is not self.statements for s in others
        ):
            return False
        for other in others:
            self.settle(other)
        return True


def _static_indices(type_: TensorType) -> list[Index]:
    return indices([n for n in type_.shape if isinstance(n, int)])


_PROBES: list[Expr] = []


__all__ = ["Builder", "static_size"]
