"""The rules of a memory plan, checked independently of the passes that made it.

The verifier walks the program forward and records which value each memory holds. It is
an error to read a value whose memory holds another one, and so is an equation that
overwrites elements which it has still to read. The body of a loop is walked twice:
values from outside the loop must still be in memory in the second step.

The place of an allocation follows from the writes of loops: in that of a parameter, in
the row of a stack, in the caller's memory for a result, in a part of another, or by
itself. The verifier uses neither live ranges nor what passes recorded about an
allocation. `docs/notes/memory_and_aliases.md` states the rules.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    operands,
)
from hopflow.compiler.memory.allocations import Allocation, same_layout
from hopflow.compiler.memory.parts import Part, is_dense, parts, same_window
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.errors import KernelProgramError
from hopflow.graph.core import plain_symbol
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import Expr, index_of
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.symbolic.size import Symbol, free_symbols


class _Row(NamedTuple):
    """The row of a stack that a step of a loop writes."""

    memory: Hashable
    stack: Value


class _Rest(NamedTuple):
    """A value parts of whose memory are overwritten."""

    value: Value
    parts: frozenset[Hashable]


_Held: TypeAlias = dict[Hashable, Value | _Rest | None]


def verify_memory(plan: MemoryPlan) -> None:
    """Check a plan.

    Raises:
        KernelProgramError: A value is read after its memory was reused for another, or
            memory cannot hold its values. The message names them.
    """
    places = _Places(plan)
    places.check()
    _Walk(plan, places).program()


def _fail(plan: MemoryPlan, value: Value, rule: str) -> None:
    name = plan.program.name
    raise KernelProgramError(f"memory of `{name}`: `{value.name}` {rule}.")


# --- where allocations are ------------------------------------------------------------


class _Places:
    """The place of each allocation, derived from its values alone.

    values    by allocation its values, in program order
    carries   for a value that a loop carries the loop, and the number of the carry
    types     for such a value the type of the initial carry, which its memory has
    resized   such values whose size changes between steps
    symbols   the symbols that the program defines up to here
    ancestors by block, the blocks that contain it, and itself
    part_of   by memory, the part of a result that it is
    parts     by memory, the memory of its parts
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.values: dict[Allocation, list[Value]] = {}
        self.carries: dict[Value, tuple[Equation, int]] = {}
        self.types: dict[Value, TensorType] = {}
        self.resized: set[Value] = set()
        self.symbols: set[Symbol] = set()
        self.block_of: dict[Value, Block] = {}
        self.ancestors: dict[Block, tuple[Block, ...]] = {}
        self._places: dict[Allocation, Hashable] = {}
        self._enter(plan.program.block, ())
        self.part_of: dict[Hashable, Part] = {}
        self.parts: dict[Hashable, list[Hashable]] = {}
        for allocation in self.values:
            if allocation.part_of is not None:
                whole = self.of(allocation.part_of.result)
                self.part_of[allocation] = allocation.part_of
                self.parts.setdefault(whole, []).append(allocation)

    def _enter(self, block: Block, ancestors: tuple[Block, ...]) -> None:
        self.ancestors[block] = (*ancestors, block)
        for value in block.parameters:
            self._record(value, block)
        for equation in block.equations:
            if isinstance(definition := equation.definition, Loop | While):
                self._carry(equation, definition)
            for inner in blocks(equation.definition):
                self._enter(inner, self.ancestors[block])
            for value in equation.results:
                self._record(value, block)
            if equation.symbol is not None:
                self.symbols.add(equation.symbol)

    def _carry(self, equation: Equation, loop: Loop | While) -> None:
        for k, first in enumerate(loop.carry):
            parameters = [inner.parameters[k] for inner in blocks(loop)]
            group = [*parameters, equation.results[k]]
            sizes = {plain_symbol(n) for v in parameters for n in v.shape}
            self.carries |= dict.fromkeys(group, (equation, k))
            self.types |= dict.fromkeys(group, first.type)
            if not sizes <= {None, *self.symbols}:
                self.resized.update(group)

    def type_of(self, value: Value) -> TensorType:
        """Return the type of a value's memory."""
        return self.types.get(value, value.type)

    def _record(self, value: Value, block: Block) -> None:
        self.block_of[value] = block
        symbols = map(plain_symbol, value.shape)
        self.symbols.update(s for s in symbols if s is not None)
        allocation = self.plan.of(value)
        if allocation is not None:
            self.values.setdefault(allocation, []).append(value)

    def of(self, value: Value) -> Hashable:
        """Return the memory of a value, or None if it is in registers."""
        allocation = self.plan.of(value)
        return None if allocation is None else self.at(allocation)

    def at(self, allocation: Allocation) -> Hashable:
        if allocation not in self._places:
            # This ends the recursion if it is a row of itself.
            self._places[allocation] = allocation
            self._places[allocation] = self._place(allocation)
        return self._places[allocation]

    def _place(self, allocation: Allocation) -> Hashable:
        parameters = self.plan.program.block.parameters
        if any(self.plan.of(v) is allocation for v in parameters):
            return allocation
        if allocation.row_of is not None:
            memory, equation = allocation.row_of
            definition = equation.definition
            count = len(definition.carry) if isinstance(definition, Loop | While) else 0
            for stack in equation.results[count:]:
                if self.plan.of(stack) is memory and memory is not allocation:
                    return _Row(self.at(memory), stack)
        if allocation.output is None:
            return allocation
        # A result that updates a parameter is in the memory of the parameter.
        k = self.plan.updated.get(allocation.output)
        return allocation.output if k is None else self.plan.of(parameters[k])

    # --- parts ---

    def enclosing(self, memory: Hashable) -> list[Hashable]:
        """Return the memory, the one that it is a part of, and so on outwards."""
        chain = [memory]
        while (part := self.part_of.get(chain[-1])) is not None:
            whole = self.of(part.result)
            if whole in chain:
                break
            chain.append(whole)
        return chain

    def is_dense(self, memory: Hashable) -> bool:
        """Return whether memory is contiguous, as is each part or row around it."""
        if isinstance(memory, _Row):
            return self.is_dense(memory.memory)
        *parts, outermost = self.enclosing(memory)
        if not all(is_dense(self.part_of[inner]) for inner in parts):
            return False
        return not isinstance(outermost, _Row) or self.is_dense(outermost)

    def overlapping(self, memory: Hashable) -> Iterator[Hashable]:
        """Yield the memory itself and all memory that shares elements with it."""
        yield from self._with_parts(memory)
        inner, *wholes = self.enclosing(memory)
        for whole in wholes:
            yield whole
            for part in self.parts[whole]:
                if part != inner and not self._are_apart(part, inner):
                    yield from self._with_parts(part)
            inner = whole

    def _with_parts(self, memory: Hashable) -> Iterator[Hashable]:
        yield memory
        for part in self.parts.get(memory, ()):
            yield from self._with_parts(part)

    def _are_apart(self, part: Hashable, other: Hashable) -> bool:
        """Return whether two parts are different pieces of one definition."""
        a, b = self.part_of[part], self.part_of[other]
        same = a.equation is b.equation and a.number == b.number
        return same and a.piece is not b.piece

    def is_piece(self, memory: Hashable, whole: Hashable, equation: Equation) -> bool:
        """Return whether memory lies in a part that an equation leaves unwritten.

        The equation writes the other pieces of `whole`.
        """
        inner = self.enclosing(memory)
        if whole not in inner[1:]:
            return False
        return self.part_of[inner[inner.index(whole) - 1]].equation is equation

    # --- rules ---

    def check(self) -> None:
        """Check the rules that do not depend on the order of reads and writes."""
        for allocation, values in self.values.items():
            for value in values:
                self._check_layout(allocation, value)
            if allocation.row_of is not None:
                self._check_row(allocation, *allocation.row_of)
            if allocation.output is not None:
                self._check_output(allocation, allocation.output)
            if allocation.part_of is not None:
                self._check_part(allocation, allocation.part_of)
        for value, (equation, k) in self.carries.items():
            same = self.plan.of(value) is self.plan.of(equation.results[k])
            self._require(same, value, "is not in the memory of its loop's carry")
        for number, k in self.plan.updated.items():
            value = self.plan.program.block.results[number]
            parameter = self.plan.program.block.parameters[k]
            is_donated = self.plan.donated.get(number) == k
            same = is_donated and self.plan.of(value) is self.plan.of(parameter)
            self._require(same, value, f"does not update `{parameter.name}`")

    def _require(self, holds: object, value: Value, rule: str) -> None:
        if not holds:
            _fail(self.plan, value, rule)

    def _check_layout(self, allocation: Allocation, value: Value) -> None:
        """Check that all values of an allocation have the same layout.

        A carry whose size changes between steps has its own memory instead.
        """
        first, carry = self.values[allocation][0], self.carries.get(value)
        fits = same_layout(self.type_of(first), self.type_of(value))
        if value in self.resized:
            fits = all(self.carries.get(v) == carry for v in self.values[allocation])
        rule = f"has not the layout of `{first.name}`, in whose memory it is"
        self._require(fits, value, rule)

    def _check_row(
        self, allocation: Allocation, memory: Allocation, equation: Equation
    ) -> None:
        value, loop = self.values[allocation][0], equation.definition
        is_row = isinstance(loop, Loop | While) and isinstance(
            self.at(allocation), _Row
        )
        self._require(is_row, value, "is in the row of what is no stack")
        assert isinstance(loop, Loop | While)
        [stack, *_] = self.values[memory]
        type_ = self.type_of(value)
        fits = same_layout(type_, stack.type.with_shape(stack.shape[1:]))
        self._require(fits, value, f"is no row of `{stack.name}`")
        for value in self.values[allocation]:
            inside = loop.body in self.ancestors[self.block_of[value]]
            rule = f"is in a row of `{stack.name}`, and not made in a step"
            self._require(inside and value not in self.carries, value, rule)

    def _check_output(self, allocation: Allocation, number: int) -> None:
        value, results = self.values[allocation][0], self.plan.program.block.results
        fits = (
            number < len(results)
            and same_layout(self.type_of(value), self.type_of(results[number]))
            and self.is_sized(self.type_of(value))
        )
        self._require(fits, value, f"is not laid out as result {number} is")

    def _check_part(self, allocation: Allocation, part: Part) -> None:
        """Check that a part is all of a value, at the place of its piece."""
        value, whole = self.values[allocation][0], self.of(part.result)
        fits = same_layout(self.type_of(value), self.type_of(part.value))
        rule = f"is not laid out as `{part.value.name}`, a part of `{part.result.name}`"
        self._require(fits, value, rule)
        rule = f"is no part of `{part.result.name}`"
        self._require(_is_part(part) and whole is not None, value, rule)
        self._require(self.at(allocation) is allocation, value, rule)
        for value in self.values[allocation]:
            self._require(value not in self.carries, value, f"is a carry, and {rule}")
        self._require(
            self.part_of.get(self.enclosing(allocation)[-1]) is None, value, rule
        )

    def is_sized(self, type_: TensorType) -> bool:
        """Return whether the entry of the program knows the size of a type."""
        inputs = self.plan.program.block.parameters
        symbols = {s for value in inputs for s in free_symbols(*value.shape)}
        return symbols.issuperset(free_symbols(*type_.shape))


# --- what memory holds ----------------------------------------------------------------


class _Walk:
    """A walk that follows which value each memory holds.

    held      by memory its value, or what is left of that; None: several, or none
    views     the values that a view reads
    rows      the rows that a value is written to beside its own memory
    homes     the block in which memory of a size known only at runtime is allocated
    symbols   the symbols defined so far
    """

    def __init__(self, plan: MemoryPlan, places: _Places) -> None:
        self.plan, self.places = plan, places
        self.held: _Held = {}
        self.views: dict[Value, tuple[Value, ...]] = {}
        self.rows: dict[Value, list[_Row]] = {}
        self.homes: dict[Allocation, Block] = {}
        self.symbols: set[Symbol] = set()
        self.block = plan.program.block

    def program(self) -> None:
        block, places = self.plan.program.block, self.places
        for value in block.parameters:
            self.define_sizes(value.type)
            self.write(value)
        self.equations(block)
        self.read(block.results)
        for number, value in enumerate(block.results):
            if number not in self.plan.updated and places.of(value) != number:
                self.read([value])
                self.held[number] = value
        donated = {block.parameters[k] for k in self.plan.updated.values()}
        for value in block.parameters:
            memory = places.of(value)
            if memory is not None and value not in donated:
                self.require(self.held[memory] is value, value, "is written over")

    def require(self, holds: bool, value: Value, rule: str) -> None:
        if not holds:
            _fail(self.plan, value, rule)

    # --- reads and writes ---

    def bases(self, value: Value) -> tuple[Value, ...]:
        """Return the values that a read touches: the value, or a view's bases."""
        return self.views.get(value, (value,))

    def read(self, values: Iterable[Value], equation: Equation | None = None) -> None:
        """Check reads of values, by the expressions of an equation or as a whole."""
        for value in values:
            for base in self.bases(value):
                memory = self.places.of(base)
                if memory is not None:
                    other = self.held.get(memory)
                    name = "another value"
                    if isinstance(other, Value):
                        name = f"`{other.name}`"
                    rule = f"is read where its memory holds {name}"
                    left = self.reads_the_rest_only(equation, base, other)
                    self.require(other is base or left, base, rule)

    def reads_the_rest_only(
        self, equation: Equation | None, value: Value, held: Value | _Rest | None
    ) -> bool:
        """Return whether an equation reads only those elements that still exist.

        That holds where the overwritten parts are pieces of the equation in which it
        does not read the value.
        """
        if equation is None or not isinstance(held, _Rest):
            return False
        definition = equation.definition
        if not isinstance(definition, d.Cut):
            return False
        parts = [self.places.part_of[memory] for memory in held.parts]
        in_parts = [n.attr for part in parts for n in elements(part.piece.elements)]
        at = d.axes(equation.results[0].type.ndim)
        nodes = [n for n in elements(all_expressions(definition)) if n.attr is value]
        return (
            held.value is value
            and all(part.equation is equation for part in parts)
            and value not in in_parts
            and all(index_of(node) == at for node in nodes)
        )

    def write(self, value: Value) -> None:
        for memory in self.written(value):
            if isinstance(memory, _Row):
                whole = self.held.get(memory.memory) is memory.stack
                rule = f"is a row of `{memory.stack.name}`, which is written over"
                self.require(whole, value, rule)
            before = dict(self.held)
            self.held |= dict.fromkeys(self.places.overlapping(memory))
            inner, *wholes = self.places.enclosing(memory)
            for outer in wholes:
                held = before.get(outer)
                if isinstance(held, Value):
                    held = _Rest(held, frozenset())
                if held is not None:
                    self.held[outer] = _Rest(held.value, held.parts | {inner})
                inner = outer
            self.held[memory] = value
        self.allocate(value)

    def written(self, value: Value) -> list[Hashable]:
        """Return the memory that is written when a value is computed."""
        memory = self.places.of(value)
        return [*([] if memory is None else [memory]), *self.rows.get(value, ())]

    def allocate(self, value: Value) -> None:
        """Record where memory whose size is known only at runtime is allocated.

        It is allocated at the first write to it, or to a part of it, and exists until
        the end of that block.
        """
        allocation = self.plan.of(value)
        if allocation is None:
            return
        for whole in self.plan.allocations.enclosing(allocation):
            if self.places.is_sized(whole.type):
                continue
            home = self.homes.setdefault(whole, self.block)
            rule = "is in memory that was made in another block"
            self.require(home in self.places.ancestors[self.block], value, rule)
            unknown = {*free_symbols(*whole.type.shape)} - self.plan.entry
            rule = "is in memory whose size is not known yet"
            self.require(whole is allocation or unknown <= self.symbols, value, rule)

    def define_sizes(self, type_: TensorType) -> None:
        symbols = map(plain_symbol, type_.shape)
        self.symbols.update(s for s in symbols if s is not None)

    # --- equations ---

    @contextmanager
    def in_block(self, block: Block) -> Iterator[None]:
        before, self.block = self.block, block
        yield
        self.block = before

    def equations(self, block: Block) -> None:
        with self.in_block(block):
            for equation in block.equations:
                self.equation(equation)
                for value in equation.results:
                    self.define_sizes(value.type)
                if equation.symbol is not None:
                    self.symbols.add(equation.symbol)

    def equation(self, equation: Equation) -> None:
        definition = equation.definition
        self.read(operands(definition))
        self.require_dense(equation)
        self.require_distinct(equation.results)
        match definition:
            case Branch():
                self.branch(equation, definition)
            case Loop() | While():
                self.loop(equation, definition)
            case d.Pointwise() if definition.is_view:
                [view] = equation.results
                read = [self.bases(n.attr) for n in elements(definition.elements)]
                self.views[view] = tuple(base for bases in read for base in bases)
            case _:
                self.definition(equation)

    def require_dense(self, equation: Equation) -> None:
        """Check that values read or written as a whole have contiguous memory."""
        definition = equation.definition
        values: list[Value] = []
        if isinstance(definition, Library | Callback | Call):
            values = [*operands(definition), *equation.results]
        elif isinstance(definition, d.Pointwise) and definition.is_view:
            values = [node.attr for node in elements(definition.elements)]
        for value in values:
            rule = "has memory with gaps, and is read or made as a whole"
            self.require(self.places.is_dense(self.places.of(value)), value, rule)

    def require_distinct(self, values: Sequence[Value]) -> None:
        """Check that values that are written at once have disjoint memory."""
        writers: dict[Hashable, Value] = {}
        for value in values:
            memory = self.places.of(value)
            if memory is not None:
                other = writers.get(memory, value)
                rule = f"is written at once with `{other.name}`, to the same memory"
                self.require(other is value, value, rule)
                writers |= dict.fromkeys(self.places.overlapping(memory), value)

    def definition(self, equation: Equation) -> None:
        definition = equation.definition
        nodes: list[Expr] = []
        if not isinstance(definition, Region):
            nodes = list(elements(all_expressions(definition)))
        self.read((node.attr for node in nodes), equation)
        ordered = isinstance(definition, d.Pointwise | d.Cut | d.Prefix)
        updated = self._updated_operands(definition)
        for number, result in enumerate(equation.results):
            for memory in self.written(result):
                over = set(self.places.overlapping(memory))
                for node in nodes:
                    is_in_place = ordered and index_of(node) == d.axes(result.type.ndim)
                    for base in self.bases(node.attr):
                        read = self.places.of(base)
                        fits = read not in over or (
                            is_in_place and base is node.attr
                            if read == memory
                            else self.places.is_piece(read, memory, equation)
                        )
                        rule = f"is written over by `{result.name}` before it is read"
                        self.require(fits, base, rule)
                for k, value in enumerate(operands(definition)):
                    for base in self.bases(value):
                        read = self.places.of(base)
                        is_in_place = (
                            read == memory
                            and updated.get(number) == k
                            and base is value
                        )
                        rule = f"is an operand in the memory of `{result.name}`"
                        self.require(read not in over or is_in_place, base, rule)
        for result in equation.results:
            self.write(result)

    def _updated_operands(self, definition: object) -> dict[int, int]:
        """Return by the number of a result the operand that it updates in place."""
        match definition:
            case d.Scatter():
                return {0: 0}
            case Call():
                return definition.function.updated
            case Library():
                pairs = enumerate(definition.overwrites)
                return {number: k for number, k in pairs if k is not None}
        return {}

    # --- regions ---

    def branch(self, equation: Equation, branch: Branch) -> None:
        for value in equation.results:
            if self.symbols.issuperset(free_symbols(*value.shape)):
                self.allocate(value)  # both blocks may write it
        before, after = self.held, list[_Held]()
        for block in branch.blocks:
            self.held = dict(before)
            self.equations(block)
            self.read(block.results)
            self.moves(block.results, equation.results)
            after.append(self.held)
        self.held = dict(before)
        for memory in {m for held in after for m in held}:
            contents = {id(h.get(memory)): h.get(memory) for h in after}
            self.held[memory] = (
                next(iter(contents.values())) if len(contents) == 1 else None
            )
        for value in equation.results:
            self.write(value)

    def moves(self, values: Sequence[Value], targets: Sequence[Value]) -> None:
        """Check the copies of values, one after the other, to the memory of targets."""
        unmoved = []
        for value, target in zip(values, targets, strict=True):
            memory, source = self.places.of(target), self.places.of(value)
            if memory is None or source == memory:
                unmoved.append(target)
            else:
                self.read([value])
                rule = f"is copied to memory that it is in, that of `{target.name}`"
                self.require(source not in self.places.overlapping(memory), value, rule)
                self.write(target)
        for target in unmoved:
            self.write(target)

    def carried(self, parameters: Sequence[Value]) -> None:
        """Write the parameters of a loop to the memory of its carries."""
        for value in parameters:
            self.define_sizes(value.type)
            self.write(value)
        self.read(parameters)

    def loop(self, equation: Equation, loop: Loop | While) -> None:
        body, count = loop.body, len(loop.carry)
        stacks = equation.results[count:]
        self.moves(loop.carry, body.parameters)
        for value in stacks:
            self.write(value)
        self.read(body.parameters)
        before = dict(self.held)
        rows = list(zip(body.results[count:], stacks, strict=True))
        for _ in range(2):
            self.test(loop)
            self.step(body, rows)
            self.read([*body.results[:count], *stacks])
            self.carried(body.parameters)
        self.test(loop)
        loop_values = {*body.parameters, *stacks}
        for memory, held in before.items():  # the loop may run zero steps
            if self.held.get(memory) is not held and held not in loop_values:
                self.held[memory] = None
        for value in equation.results[:count]:
            self.write(value)

    def test(self, loop: Loop | While) -> None:
        """Check that the test of a loop keeps the carry."""
        if isinstance(loop, While):
            self.carried(loop.test.parameters)
            self.equations(loop.test)
            self.read([*loop.test.results, *loop.test.parameters])

    def step(self, body: Block, rows: Sequence[tuple[Value, Value]]) -> None:
        """Walk one step of a loop; `rows` are values of the body with their stacks."""
        self.carried(body.parameters)
        before = self.rows
        places = [(row, _Row(self.places.of(stack), stack)) for row, stack in rows]
        self.rows = {v: list(targets) for v, targets in before.items()}
        for row, place in places:
            self.rows.setdefault(row, []).append(place)
            self.held[place] = None  # a new row in each step
        self.equations(body)
        self.rows = before
        for row, place in places:
            self.read([row])
            self.held[place] = row


def _is_part(part: Part) -> bool:
    """Return whether a part is a whole value at the place that its window states."""
    return any(
        candidate.value is part.value
        and candidate.piece is part.piece
        and candidate.number == part.number
        and same_window(candidate.window, part.window)
        for candidate in parts(part.equation)
    )
