"""Building a program: the statement list at hand, names, buffers and loops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import Function, axes
from hopflow.compiler.schedule.places import (
    REGISTER_LIMIT,
    Epoch,
    Pending,
    Place,
    Registers,
    Slot,
    Stored,
    evaluated,
    indices,
    indices_of,
    is_small,
    static_size,
)
from hopflow.compiler.schedule.sizes import computed
from hopflow.compiler.target import Target
from hopflow.dtypes import DType
from hopflow.errors import CompileError
from hopflow.graph.core import Graph, Node, plain_symbol
from hopflow.graph.rewriting import sizes_of
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
    DerivedSize,
    For,
    Let,
    Program,
    Site,
    SizedType,
    Stmt,
    Store,
    Trap,
    Var,
)
from hopflow.loop_ir.walk import nodes, replace
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute
from hopflow.symbolic.terms import Terms

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
    entry    what the program's sizes are, over the symbols of the program
    node     the number of the node that is being scheduled
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
        self._allocated: set[Buffer] = set()  # of the temporaries
        self.slots: list[Slot] = []
        self.symbols: dict[Symbol, Expr] = {}
        self.mutable: set[Var] = set()
        self.entry: dict[Var, Size] = {}
        self.node = 0
        self.functions: dict[Graph, Program] = {}
        self._count = 0
        self._derived: dict[Terms, Expr] = {}
        self._noted: dict[tuple[str, ...], int] = {}  # the widest items of each shape
        # By a size and the variables that its symbols are: where it is computed.
        self._computed: dict[tuple[Any, ...], Expr] = {}
        self._nest: list[Stmt] | None = (
            None  # where the outermost open nest is to stand
        )

    # --- names ---

    def var(self, dtype: DType, name: str = "t") -> Var:
        sizes = {size.name for size in self.program.sizes}  # named by the user, or s0
        self._count += 1
        while f"{name}{self._count}" in sizes:
            self._count += 1
        return Var(f"{name}{self._count}", dtype)

    def site(self, kind: Any, node: int, what: str = "") -> int:
        self.program.sites.append(Site(kind, node, what))
        return len(self.program.sites) - 1

    # --- sizes ---

    def extent(self, size: Size) -> Expr:
        """A size as an expression: one of the program's sizes, where those decide it;
        else one that is computed once, here."""
        if isinstance(size, int):
            return e.index(size)
        symbol = plain_symbol(size)
        if symbol is not None:
            return self._symbol(symbol)
        values = {s: self._symbol(s) for s in free_symbols(size)}
        known = self._at_entry(size, values)
        return known or self._at_run(size, values)

    def _at_entry(self, size: SymInt, values: Mapping[Symbol, Expr]) -> Expr | None:
        """The program's size that `size` is, added if there is none yet."""
        found = self._over_entry(size, values)
        if found is None or isinstance(found, int):
            return None if found is None else e.index(found)
        terms = found.expression
        if terms not in self._derived:
            self._derived[terms] = e.read(self._derived_var(found))
        return self._derived[terms]

    def _over_entry(self, size: Size, values: Mapping[Symbol, Expr]) -> Size | None:
        """A size over the program's symbols; None: those do not decide it."""
        known = {s: self.entry_size(value) for s, value in values.items()}
        sizes = {s: n for s, n in known.items() if n is not None}
        if any(s not in sizes for s in free_symbols(size)):
            return None
        try:
            return substitute(size, sizes)
        except ZeroDivisionError:  # where the program comes to it, it stops
            return None

    def note(self, type_: TensorType) -> None:
        """Have a call, or the run, refuse sizes at which there can be no such value."""
        if type_.is_static:
            return
        symbols = free_symbols(*type_.shape)
        if not all(s in self.symbols for s in symbols):
            return
        values = {s: self.symbols[s] for s in symbols}
        shape = [self._over_entry(n, values) for n in type_.shape]
        if all(n is not None for n in shape):
            known = type_.with_shape([n for n in shape if n is not None])
            self._note_at_entry(known)
        elif sum(n is None for n in shape) > 1:
            self.extent(type_.size * type_.dtype.itemsize)

    def is_sized(self, node: Node) -> bool:
        """Whether the program need not compute sizes of a node, and stop where int64
        cannot hold them."""
        products = [v.type.size for v in node.results]
        for size in (*sizes_of(node), *products):
            if isinstance(size, int) or plain_symbol(size) is not None:
                continue
            values = {
                s: self.symbols[s] for s in free_symbols(size) if s in self.symbols
            }
            if self._over_entry(size, values) is None:
                return False
        return True

    def _note_at_entry(self, type_: TensorType) -> None:
        key = tuple(sorted([str(n) for n in type_.shape]))
        itemsize = type_.dtype.itemsize
        if not type_.is_static and self._noted.get(key, 0) < itemsize:
            self._noted[key] = itemsize
            self.program.types.append(SizedType(type_, self.node))

    def _derived_var(self, size: SymInt) -> Var:
        symbol = plain_symbol(size)
        for var, known in self.entry.items() if symbol is not None else ():
            if plain_symbol(known) is symbol:
                return var
        var = self.var(dtypes.int64, "n")
        self.program.sizes.append(var)
        self.program.derived.append(DerivedSize(size, self.node))
        self.entry[var] = size
        return var

    def entry_size(self, value: Expr) -> Size | None:
        """What an expression is over the program's symbols, if it is known at entry."""
        if value.is_const:
            return int(value.attr)
        return self.entry.get(value.attr) if value.op == "var" else None

    def _at_run(self, size: SymInt, values: Mapping[Symbol, Expr]) -> Expr:
        """A size of what the run finds, computed before the nest that is open."""
        known = [v.attr for v in values.values() if v.op == "var"]
        if not self.mutable.isdisjoint(known):  # it is another one each time
            return computed(size, values.__getitem__, lambda *_: None)
        key = (size.expression, *map(id, known))
        if key not in self._computed:
            with self.into(self.statements if self._nest is None else self._nest):
                value = computed(size, values.__getitem__, self._size_trap)
                found = self.let(value, "n")
            self._computed[key] = found
        return self._computed[key]

    def _size_trap(
        self, test: Expr, kind: Any, what: str, values: Sequence[Expr] = ()
    ) -> None:
        self.add(Trap(test, self.site(kind, self.node, what), tuple(values)))

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

    @contextmanager
    def symbols_as(self, values: Mapping[Symbol, Expr]) -> Iterator[None]:
        """Take these values for symbols within the block. A function may have symbols
        of the program that calls it, for other sizes."""
        before = self.symbols
        values = {symbol: self.let(value, "s") for symbol, value in values.items()}
        self.symbols = before | values
        try:
            yield
        finally:
            self.symbols = before

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
        before, computed = self.statements, self._computed
        self.statements = statements
        if self._nest is None:  # what is computed within is known nowhere else
            self._computed = dict(computed)
        try:
            yield statements
        finally:
            self.statements = before
            if self._nest is None:
                self._computed = computed

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
            self._allocated.add(buffer)
            self.add(Allocate(buffer))
        return buffer

    def forget(self, buffer: Buffer) -> None:
        """Take back a temporary that nothing came to use."""
        if buffer in self.owners:
            del self.owners[buffer]
            self.program.arena.remove(buffer)
            if buffer in self._allocated:
                self._allocated.remove(buffer)
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
        if self._nest is None:
            self._nest = self.statements
            try:
                self._loops(shape, body, independent)
            finally:
                self._nest = None
        else:
            self._loops(shape, body, independent)

    def _loops(
        self, shape: Sequence[Size], body: Callable[[Index], None], independent: bool
    ) -> None:
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

    def at(self, value: Expr, at: Index) -> Expr:
        """An expression of a definition with its axes set to an index."""
        return evaluated(value, dict(zip(axes(len(at)), at, strict=True)))

    def call(
        self, function: Function, given: Sequence[Expr], at: Index = ()
    ) -> list[Expr]:
        """The results of a function for these parameters, with its axes set."""
        values = dict(zip(axes(len(at)), at, strict=True))
        values |= zip(function.parameters, given, strict=True)
        return [evaluated(result, values) for result in function.results]

    def settle(self, slot: Slot, target: Buffer | None = None) -> None:
        """Give a pending value registers or a buffer (`target`, if one is given)."""
        place = slot.place
        if not isinstance(place, Pending):
            return
        if is_small(place.type) and target is None:
            elements = [self.let(slot.at(at)) for at in indices_of(place.type)]
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
            for other in [s.place for s in self._live_slots() if s is not slot]:
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
            values = [slot.at(at) for slot in slots]
            if len(values) > 1:  # all are read before any is written
                values = [self.let(v) for v in values]
            for target, value in zip(targets, values, strict=True):
                self.add(Store(target.buffer, (*target.prefix, *at), value))

        self.nest(slots[0].type.shape, body)

    def readers(self, buffer: Buffer, but: Slot | None = None) -> list[Slot]:
        """The live values that are in a buffer, or read it when they are computed."""
        live = self._live_slots()
        return [s for s in live if s is not but and buffer in s.place.buffers]

    def _live_slots(self) -> list[Slot]:
        """The values that someone is still to read; the others are forgotten."""
        self.slots = [s for s in self.slots if s.uses > 0]
        return self.slots

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


__all__ = ["Builder", "static_size"]
