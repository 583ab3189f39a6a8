"""Builds a program: its open statement list, names, buffers and loops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, TypeGuard

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import Function, Pointwise, axes
from hopflow.compiler.kernel_program.program import Equation, Value
from hopflow.compiler.kernel_program.registers import (
    REGISTER_LIMIT,
    indices,
    indices_of,
)
from hopflow.compiler.memory.allocations import Allocation
from hopflow.compiler.memory.live_ranges import Scope
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.compiler.schedule.sizes import computed
from hopflow.compiler.schedule.values import Place, Registers, Stored
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.dtypes import DType
from hopflow.errors import CompileError
from hopflow.graph.core import Node, plain_symbol
from hopflow.graph.types import TensorType, is_one, same_size
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    SERIAL,
    Allocate,
    Assign,
    Copy,
    Declare,
    DerivedSize,
    For,
    Let,
    Program,
    Site,
    SizedType,
    Stmt,
    Store,
    Timed,
    Trap,
)
from hopflow.loop_ir.walk import nodes, same
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute
from hopflow.symbolic.terms import Terms

UNROLL = 16
"""Loops of at most so many steps in all are unrolled if they are too narrow for
vectors."""


def is_unrolled(shape: Sequence[Size | Expr]) -> TypeGuard[Sequence[int]]:
    """Return whether a nest over a shape is written as its steps."""
    static = [n for n in shape if isinstance(n, int)]
    total = prod(static)
    return len(static) == len(shape) and (
        total <= REGISTER_LIMIT or (total <= UNROLL and static[-1] < 4)
    )


def number_of(node: Node) -> int:
    """Return the number of a node in the graph; see `loop_ir.program.Site`."""
    number: int = node.meta.get("number", 0)
    return number


class Builder:
    """A program under construction. `statements` is the list that is being written.

    plan       which values share memory
    depth      the number of enclosing loops
    mutable    the variables that may be assigned again
    entry      the program's sizes, over the symbols of the program
    node       the number of the node that is being scheduled
    nodes      the numbers of all nodes that are computed together with it
    places     the places of values
    views      views that are computed where a library reads them
    buffers    the memory of allocations
    counters   the current step of a loop, by its counter
    rows       the row that the current step of a loop adds to its stacks
    copies     further places to which values are written when they are computed
    pending_tests   tests of flags, which come before what may rely on them
    """

    def __init__(self, name: str, target: Target, plan: MemoryPlan) -> None:
        self.program = Program(name, [], [], [], [], [], [], [])
        self.statements: list[Stmt] = self.program.body
        self.target, self.plan = target, plan
        self.depth = 0
        self.symbols: dict[Symbol, Expr] = {}
        self.mutable: set[Var] = set()
        self.entry: dict[Var, Size] = {}
        self.node = 0
        self.nodes: tuple[int, ...] = ()
        self.places: dict[Value, Place] = {}
        self.views: dict[Value, Pointwise] = {}
        self.buffers: dict[Allocation, Buffer] = {}
        self.counters: dict[Var, Expr] = {}
        self.rows: dict[Equation, Expr] = {}
        self.copies: dict[Value, list[Stored]] = {}
        self.pending_tests: list[Stmt] = []
        self._count = 0
        self._derived: dict[Terms, Expr] = {}
        self._checked: dict[tuple[str, ...], int] = {}  # by shape, the widest item
        # The variables of sizes that are computed at runtime, by size and operands.
        self._computed: dict[tuple[Any, ...], Expr] = {}
        self._step: Scope | None = None
        self._ones: dict[Terms, bool] = {}
        # The statement list that the outermost open nest is added to.
        self._nest: list[Stmt] | None = None

    # --- names ---

    def var(self, dtype: DType, name: str = "t") -> Var:
        # Sizes are named by the user, or s0.
        sizes = {size.name for size in self.program.sizes}
        self._count += 1
        while f"{name}{self._count}" in sizes:
            self._count += 1
        return Var(f"{name}{self._count}", dtype)

    def site(self, kind: Any, node: int, detail: str = "") -> int:
        self.program.sites.append(Site(kind, node, detail))
        return len(self.program.sites) - 1

    # --- checks ---

    def test_flags(self) -> None:
        """Write the pending tests."""
        self.statements += self.pending_tests
        self.pending_tests.clear()

    # --- sizes ---

    def extent(self, size: Size) -> Expr:
        """Return a size as an expression: a size of the program if the arguments of a
        call decide it, else a variable that is computed once, here."""
        if isinstance(size, int):
            return e.index(size)
        symbol = plain_symbol(size)
        if symbol is not None:
            return self._symbol(symbol)
        values = {s: self._symbol(s) for s in free_symbols(size)}
        at_entry = self._at_entry(size, values)
        return at_entry or self._at_run(size, values)

    def is_one(self, size: Size) -> bool:
        """Return whether a size is provably 1, with a memo: facts do not change."""
        if isinstance(size, int):
            return size == 1
        terms = size.expression
        if terms not in self._ones:
            self._ones[terms] = is_one(size)
        return self._ones[terms]

    def _at_entry(self, size: SymInt, values: Mapping[Symbol, Expr]) -> Expr | None:
        """Return the program's size that equals `size`, added if necessary."""
        derived = self._over_entry(size, values)
        if derived is None or isinstance(derived, int):
            return None if derived is None else e.index(derived)
        terms = derived.expression
        if terms not in self._derived:
            self._derived[terms] = e.read(self._derived_var(derived))
        return self._derived[terms]

    def _over_entry(self, size: Size, values: Mapping[Symbol, Expr]) -> Size | None:
        """Return a size over the program's symbols if these decide it, else None."""
        entry_sizes = {s: self.entry_size(value) for s, value in values.items()}
        sizes = {s: n for s, n in entry_sizes.items() if n is not None}
        if any(s not in sizes for s in free_symbols(size)):
            return None
        try:
            return substitute(size, sizes)
        except ZeroDivisionError:  # the program stops where it computes the size
            return None

    def check_size(self, type_: TensorType) -> None:
        """Reject sizes at which no such value exists, in the call or, for sizes
        computed at runtime, in the program."""
        if type_.is_static:
            return
        symbols = free_symbols(*type_.shape)
        if not all(s in self.symbols for s in symbols):
            return
        values = {s: self.symbols[s] for s in symbols}
        shape = [self._over_entry(n, values) for n in type_.shape]
        if all(n is not None for n in shape):
            at_entry = type_.with_shape([n for n in shape if n is not None])
            self._check_at_entry(at_entry)
        elif sum(n is None for n in shape) > 1:
            self.extent(type_.size * type_.dtype.itemsize)

    def _check_at_entry(self, type_: TensorType) -> None:
        key = tuple(sorted([str(n) for n in type_.shape]))
        itemsize = type_.dtype.itemsize
        if not type_.is_static and self._checked.get(key, 0) < itemsize:
            self._checked[key] = itemsize
            self.program.types.append(SizedType(type_, self.node))

    def _derived_var(self, size: SymInt) -> Var:
        symbol = plain_symbol(size)
        for var, existing in self.entry.items() if symbol is not None else ():
            if plain_symbol(existing) is symbol:
                return var
        var = self.var(dtypes.int64, "n")
        self.program.sizes.append(var)
        self.program.derived.append(DerivedSize(size, self.node))
        self.entry[var] = size
        return var

    def entry_size(self, value: Expr) -> Size | None:
        """Return an expression over the program's symbols if it is known at entry."""
        if value.is_const:
            return int(value.attr)
        if value.op == "mul":
            x, y = (self.entry_size(a) for a in value.args)
            return None if x is None or y is None else x * y
        return self.entry.get(value.attr) if value.op == "var" else None

    def same_extent(self, x: Expr, y: Expr) -> bool:
        """Return whether two extents are provably equal."""
        if same(x, y):
            return True
        a, b = self.entry_size(x), self.entry_size(y)
        return a is not None and b is not None and same_size(a, b)

    def _at_run(self, size: SymInt, values: Mapping[Symbol, Expr]) -> Expr:
        """Return a size known only at runtime, computed before the open nest."""
        variables = [v.attr for v in values.values() if v.op == "var"]
        if not self.mutable.isdisjoint(variables):  # it changes with them
            return computed(size, values.__getitem__, lambda *_: None)
        key = (size.expression, *map(id, variables))
        if key not in self._computed:
            with self.into(self.statements if self._nest is None else self._nest):
                value = computed(size, values.__getitem__, self._size_trap)
                result = self.let(value, "n")
            self._computed[key] = result
        return self._computed[key]

    def _size_trap(
        self, test: Expr, kind: Any, detail: str, values: Sequence[Expr] = ()
    ) -> None:
        self.add(Trap(test, self.site(kind, self.node, detail), tuple(values)))

    def _symbol(self, symbol: Symbol) -> Expr:
        if symbol not in self.symbols:
            raise CompileError(
                f"the size `{symbol}` is made within a body, and used outside it. Let "
                "the body return a result of a size that is known outside."
            )
        return self.symbols[symbol]

    def define(self, symbol: Symbol, value: Expr) -> None:
        """Set the value of a symbol from here on."""
        self.symbols[symbol] = self.let(value, "s")

    @contextmanager
    def symbols_as(self, values: Mapping[Symbol, Expr]) -> Iterator[None]:
        """Use these values for symbols inside the block. A function may have the same
        symbols as the program that calls it, for other sizes."""
        before = self.symbols
        values = {symbol: self.let(value, "s") for symbol, value in values.items()}
        self.symbols = before | values
        try:
            yield
        finally:
            self.symbols = before

    def is_known_at_entry(self, shape: Sequence[Expr]) -> bool:
        """Return whether a shape is over the program's sizes alone."""
        return all(
            node.attr in self.program.sizes
            for node in nodes(*shape)
            if node.op == "var"
        )

    def shape(self, type_: TensorType) -> tuple[Expr, ...]:
        return tuple(self.extent(n) for n in type_.shape)

    # --- statements ---

    def add(self, statement: Stmt) -> None:
        """Write a statement of the current nodes."""
        if isinstance(statement, Timed):
            statement.nodes = self.nodes
        self.statements.append(statement)

    @contextmanager
    def into(self, statements: list[Stmt]) -> Iterator[list[Stmt]]:
        """Write to another list inside the block."""
        before, computed = self.statements, self._computed
        self.statements = statements
        if self._nest is None:  # sizes computed inside are not available outside
            self._computed = dict(computed)
        try:
            yield statements
        finally:
            self.statements = before
            if self._nest is None:
                self._computed = computed

    @contextmanager
    def loop_body(self) -> Iterator[list[Stmt]]:
        """Write the body of a loop inside the block."""
        self.depth += 1
        try:
            with self.into([]) as statements:
                yield statements
        finally:
            self.depth -= 1

    def let(self, value: Expr, name: str = "t") -> Expr:
        """Return `value`, computed here and now."""
        if value.op == "const" or (
            value.op == "var" and value.attr not in self.mutable
        ):
            return value
        var = self.var(value.dtype, name)
        self.add(Let(var, value))
        return e.read(var)

    def declare(self, value: Expr, name: str = "v") -> Var:
        """Return a new mutable variable."""
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
        """Return a new buffer in the arena. If its size is not known at entry it is
        allocated here, unless the caller will `allocate` it."""
        self._count += 1
        buffer = Buffer(f"{name}{self._count}", type_.dtype, self.shape(type_), "arena")
        self.program.arena.append(buffer)
        is_known = type_.is_static or self.is_known_at_entry(buffer.shape)
        if allocate and not is_known:
            self.add(Allocate(buffer))
        return buffer

    # --- loops ---

    def nest(
        self,
        shape: Sequence[Size | Expr],
        body: Callable[[Index], None],
        *,
        independent: bool = True,
    ) -> None:
        """Write `body(i)` for each index of `shape`; the last axis as vectors if
        possible. Extents that are expressions are computed before the nest."""
        if self._nest is None:
            self._nest = self.statements
            try:
                self._loops(shape, body, independent)
            finally:
                self._nest = None
        else:
            self._loops(shape, body, independent)

    def _loops(
        self,
        shape: Sequence[Size | Expr],
        body: Callable[[Index], None],
        independent: bool,
    ) -> None:
        if is_unrolled(shape):
            for at in indices(shape):
                body(at)
        else:
            self._axis(tuple(shape), (), body, independent)

    def _axis(
        self,
        shape: tuple[Size | Expr, ...],
        outer: Index,
        body: Callable[[Index], None],
        independent: bool,
    ) -> None:
        if len(outer) == len(shape):
            body(outer)
            return
        size = shape[len(outer)]
        if not isinstance(size, Expr) and self.is_one(size):
            self._axis(shape, (*outer, e.index(0)), body, independent)
            return
        var = self.var(dtypes.int64, "i")
        with self.into([]) as statements:
            self._axis(shape, (*outer, e.read(var)), body, independent)
        extent = size if isinstance(size, Expr) else self.extent(size)
        self.for_(var, extent, statements, independent)

    def for_(self, var: Var, extent: Expr, body: list[Stmt], independent: bool) -> None:
        """Write a loop; as vectors if its body is straight and its axis independent."""
        binding = vector_binding(extent, body, self.target) if independent else SERIAL
        self.add(For(var, extent, body, independent, binding))

    # --- values ---

    def place(self, value: Value) -> Place:
        """Return the place of a value, whose memory is made at its first use."""
        place = self.places.get(value)
        if place is None and value.scalar is not None:
            return Registers(value.type, (self.at([value.scalar])[0],))
        if place is None:
            allocation = self.plan.of(value)
            if allocation is None:
                raise CompileError(f"the value `{value.name}` is nowhere")
            place = self.places[value] = self.memory(allocation, value.type)
        return place

    def memory(self, allocation: Allocation, type_: TensorType | None = None) -> Stored:
        """Return the memory of an allocation, made here if there is none yet."""
        type_ = type_ or allocation.type
        if allocation.row_of is not None:
            stack, loop = allocation.row_of
            return replace(self.memory(stack).row(self.rows[loop]), type=type_)
        if allocation.part_of is not None:
            part = allocation.part_of
            whole = self.memory(self.plan.allocations.of(part.result))
            window = [(axis, self.extent(n)) for axis, n in part.window]
            return whole.part(type_, tuple(window))
        if allocation not in self.buffers:
            if allocation.output is not None:
                buffer = self.program.outputs[allocation.output]
            else:
                name = "carry" if allocation.carries else "b"
                buffer = self.temporary(allocation.type, name)
            self.buffers[allocation] = buffer
        return Stored(type_, self.buffers[allocation])

    def at(
        self,
        roots: Sequence[Expr],
        at: Index = (),
        replacements: Mapping[Expr, Expr] = MappingProxyType({}),
    ) -> list[Expr]:
        """Return expressions of a definition with its axes set to an index, and with
        the elements that they read loaded from their places.

        Args:
            replacements: Nodes of the expressions, with their values at this index.
        """
        values = dict(zip(axes(len(at)), at, strict=True))
        return self._evaluated(roots, values | dict(replacements))

    def call(
        self, function: Function, arguments: Sequence[Expr], at: Index = ()
    ) -> list[Expr]:
        """Return the results of a function for these arguments, with its axes set."""
        values = dict(zip(axes(len(at)), at, strict=True))
        values |= zip(function.parameters, arguments, strict=True)
        return self._evaluated(function.results, values)

    def _evaluated(self, roots: Sequence[Expr], values: dict[Expr, Expr]) -> list[Expr]:
        for node in nodes(*roots):
            if node not in values:
                args = tuple([values[a] for a in node.args])
                values[node] = self._node(node, args)
        return [values[root] for root in roots]

    def _node(self, node: Expr, args: Index) -> Expr:
        match node.op:
            case "element":
                conditional = e.condition_of(node) is not None
                at = args[:-1] if conditional else args
                condition = args[-1] if conditional else None
                if condition is not None and condition.is_const:
                    if not condition.attr:
                        return e.const(0, node.dtype)
                    condition = None
                view = self.views.get(node.attr)
                if view is not None:
                    return self.at(view.elements, at)[0]
                return self.place(node.attr).read(at, condition)
            case "var":
                return self.counters.get(node.attr, node)
            case "size":
                return self.extent(node.attr)
        return e.with_args(node, args)

    def is_dense(self, value: Value) -> bool:
        """Return whether a value is in dense memory."""
        place, allocation = self.place(value), self.plan.of(value)
        if not isinstance(place, Stored) or place.buffer.strides is not None:
            return False
        return allocation is None or self.plan.allocations.is_dense(allocation)

    def is_of_step(self, allocation: Allocation) -> bool:
        """Return whether memory belongs to a step of the innermost loop, and is free
        after it."""
        return self._step is not None and allocation.home[0].is_within(self._step)

    @contextmanager
    def step_of(self, scope: Scope) -> Iterator[None]:
        """Write a step of a loop inside the block."""
        before, self._step = self._step, scope
        try:
            yield
        finally:
            self._step = before

    def scalar(self, value: Value) -> Expr:
        """Return the element of a value of rank 0."""
        return self.place(value).read(())

    def elements_of(self, value: Value, type_: TensorType | None = None) -> list[Expr]:
        """Return all elements of a small value, in row-major order. `type_` is its type
        if its own is less specific."""
        place = self.place(value)
        return [place.read(at) for at in indices_of(type_ or place.type)]

    def fill(self, value: Value | Place, target: Stored) -> None:
        """Write a value to memory, by a copy of whole buffers if possible."""
        source = self.place(value) if isinstance(value, Value) else value
        if target.is_at(source):
            return
        is_whole = isinstance(source, Stored) and source.is_whole and target.is_whole
        if isinstance(source, Stored) and is_whole and source.buffer.strides is None:
            self.add(Copy(target.buffer, source.buffer))
            return
        self.nest(
            source.type.shape,
            lambda at: self.store(target, at, source.read(at)),
        )

    def store(self, target: Stored, at: Index, value: Expr) -> None:
        """Write one element of a value."""
        self.add(Store(target.buffer, target.index(at), value))
