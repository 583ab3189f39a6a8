"""The rules of a memory plan, checked without trust in the passes that made it.

The program is walked forward, with a note of which value each memory holds. A read of a
value whose memory holds another one is an error, and so is an equation that writes over
elements which it has still to read. The body of a loop is walked twice: what it reads
from around it must still be there in the second step.

Where an allocation is follows from what loops are written: in that of a parameter, in
the row of a stack, in the caller's memory for a result, in a part of another, or by
itself. Nothing is taken from live ranges, nor from what a pass noted about an
allocation. `docs/notes/memory_and_aliases.md` states what is checked.
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
    """The row of a stack that a step of a loop adds."""

    memory: Hashable
    stack: Value


class _Rest(NamedTuple):
    """What is left of a value where parts of its memory are written over."""

    value: Value
    parts: frozenset[Hashable]


_Held: TypeAlias = dict[Hashable, Value | _Rest | None]


def verify_memory(plan: MemoryPlan) -> None:
    """Check a plan.

    Raises:
        KernelProgramError: A value is read after its memory was given to another, or
            values are in memory that cannot hold them. The message names them.
    """
    places = _Places(plan)
    places.check()
    _Walk(plan, places).program()


def _fail(plan: MemoryPlan, value: Value, rule: str) -> None:
    name = plan.program.name
    raise KernelProgramError(f"memory of `{name}`: `{value.name}` {rule}.")


# --- where allocations are ------------------------------------------------------------


class _Places:
    """Where each allocation is, from its values alone.

    values    by allocation, in the order of the text
    carries   of a value that is carried by a loop: the loop, and its number there
    types     of such a value, that of what the loop begins with: its memory has that
    resized   such values of which steps change the size
    known     sizes, as far as the text goes
    around    by block, the blocks that it is in, and itself
    part_of   by memory, the part of a result that it is
    parts     by memory, the memory of its parts
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.values: dict[Allocation, list[Value]] = {}
        self.carries: dict[Value, tuple[Equation, int]] = {}
        self.types: dict[Value, TensorType] = {}
        self.resized: set[Value] = set()
        self.known: set[Symbol] = set()
        self.block_of: dict[Value, Block] = {}
        self.around: dict[Block, tuple[Block, ...]] = {}
        self._places: dict[Allocation, Hashable] = {}
        self._enter(plan.program.block, ())
        self.part_of: dict[Hashable, Part] = {}
        self.parts: dict[Hashable, list[Hashable]] = {}
        for allocation in self.values:
            if allocation.part_of is not None:
                whole = self.of(allocation.part_of.result)
                self.part_of[allocation] = allocation.part_of
                self.parts.setdefault(whole, []).append(allocation)

    def _enter(self, block: Block, around: tuple[Block, ...]) -> None:
        self.around[block] = (*around, block)
        for value in block.parameters:
            self._note(value, block)
        for equation in block.equations:
            if isinstance(own := equation.definition, Loop | While):
                self._carry(equation, own)
            for inner in blocks(equation.definition):
                self._enter(inner, self.around[block])
            for value in equation.results:
                self._note(value, block)
            if equation.symbol is not None:
                self.known.add(equation.symbol)

    def _carry(self, equation: Equation, loop: Loop | While) -> None:
        for k, first in enumerate(loop.carry):
            parameters = [inner.parameters[k] for inner in blocks(loop)]
            group = [*parameters, equation.results[k]]
            sizes = {plain_symbol(n) for v in parameters for n in v.shape}
            self.carries |= dict.fromkeys(group, (equation, k))
            self.types |= dict.fromkeys(group, first.type)
            if not sizes <= {None, *self.known}:
                self.resized.update(group)

    def type_of(self, value: Value) -> TensorType:
        """That of the memory of a value."""
        return self.types.get(value, value.type)

    def _note(self, value: Value, block: Block) -> None:
        self.block_of[value] = block
        symbols = map(plain_symbol, value.shape)
        self.known.update(s for s in symbols if s is not None)
        allocation = self.plan.of(value)
        if allocation is not None:
            self.values.setdefault(allocation, []).append(value)

    def of(self, value: Value) -> Hashable:
        """The memory of a value; None: it is in registers."""
        allocation = self.plan.of(value)
        return None if allocation is None else self.at(allocation)

    def at(self, allocation: Allocation) -> Hashable:
        if allocation not in self._places:
            self._places[allocation] = allocation  # if it were a row of itself
            self._places[allocation] = self._place(allocation)
        return self._places[allocation]

    def _place(self, allocation: Allocation) -> Hashable:
        parameters = self.plan.program.block.parameters
        if any(self.plan.of(v) is allocation for v in parameters):
            return allocation
        if allocation.row_of is not None:
            memory, equation = allocation.row_of
            own = equation.definition
            count = len(own.carry) if isinstance(own, Loop | While) else 0
            for stack in equation.results[count:]:
                if self.plan.of(stack) is memory and memory is not allocation:
                    return _Row(self.at(memory), stack)
        if allocation.output is None:
            return allocation
        # The memory for a result is that of the parameter which it updates, if any.
        k = self.plan.updated.get(allocation.output)
        return allocation.output if k is None else self.plan.of(parameters[k])

    # --- parts ---

    def enclosing(self, memory: Hashable) -> list[Hashable]:
        """The memory that one is a part of, from itself on."""
        found = [memory]
        while (part := self.part_of.get(found[-1])) is not None:
            whole = self.of(part.result)
            if whole in found:
                break
            found.append(whole)
        return found

    def is_dense(self, memory: Hashable) -> bool:
        """Whether memory has no gaps: each part, or row, that it is in has none."""
        if isinstance(memory, _Row):
            return self.is_dense(memory.memory)
        *parts, outermost = self.enclosing(memory)
        if not all(is_dense(self.part_of[inner]) for inner in parts):
            return False
        return not isinstance(outermost, _Row) or self.is_dense(outermost)

    def overlapping(self, memory: Hashable) -> Iterator[Hashable]:
        """The memory that has elements of another, and that itself."""
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

    def _are_apart(self, one: Hashable, other: Hashable) -> bool:
        """Whether two parts of one memory are different pieces of one definition."""
        a, b = self.part_of[one], self.part_of[other]
        same = a.equation is b.equation and a.number == b.number
        return same and a.piece is not b.piece

    def is_piece(self, memory: Hashable, whole: Hashable, equation: Equation) -> bool:
        """Whether memory is, or is in, a part that an equation need not write as it
        writes a whole."""
        inner = self.enclosing(memory)
        if whole not in inner[1:]:
            return False
        return self.part_of[inner[inner.index(whole) - 1]].equation is equation

    # --- rules ---

    def check(self) -> None:
        """Check what does not depend on the order of reads and writes."""
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
            given = self.plan.donated.get(number) == k
            same = given and self.plan.of(value) is self.plan.of(parameter)
            self._require(same, value, f"does not update `{parameter.name}`")

    def _require(self, holds: object, value: Value, rule: str) -> None:
        if not holds:
            _fail(self.plan, value, rule)

    def _check_layout(self, allocation: Allocation, value: Value) -> None:
        """Values of one allocation have one layout, but for a carry whose size steps
        change: that has memory of its own."""
        first, mine = self.values[allocation][0], self.carries.get(value)
        alike = same_layout(self.type_of(first), self.type_of(value))
        if value in self.resized:
            alike = all(self.carries.get(v) == mine for v in self.values[allocation])
        rule = f"has not the layout of `{first.name}`, in whose memory it is"
        self._require(alike, value, rule)

    def _check_row(
        self, allocation: Allocation, memory: Allocation, equation: Equation
    ) -> None:
        value, own = self.values[allocation][0], equation.definition
        is_row = isinstance(own, Loop | While) and isinstance(self.at(allocation), _Row)
        self._require(is_row, value, "is in the row of what is no stack")
        assert isinstance(own, Loop | While)
        [stack, *_] = self.values[memory]
        type_ = self.type_of(value)
        fits = same_layout(type_, stack.type.with_shape(stack.shape[1:]))
        self._require(fits, value, f"is no row of `{stack.name}`")
        for value in self.values[allocation]:
            inside = own.body in self.around[self.block_of[value]]
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
        """A part is all of a value, and where the piece is that has its elements."""
        value, whole = self.values[allocation][0], self.of(part.result)
        alike = same_layout(self.type_of(value), self.type_of(part.value))
        rule = f"is not laid out as `{part.value.name}`, a part of `{part.result.name}`"
        self._require(alike, value, rule)
        rule = f"is no part of `{part.result.name}`"
        self._require(_is_part(part) and whole is not None, value, rule)
        self._require(self.at(allocation) is allocation, value, rule)
        for value in self.values[allocation]:
            self._require(value not in self.carries, value, f"is a carry, and {rule}")
        self._require(
            self.part_of.get(self.enclosing(allocation)[-1]) is None, value, rule
        )

    def is_sized(self, type_: TensorType) -> bool:
        """Whether memory of a type can be made when the program begins."""
        inputs = self.plan.program.block.parameters
        known = {s for value in inputs for s in free_symbols(*value.shape)}
        return known.issuperset(free_symbols(*type_.shape))


# --- what memory holds ----------------------------------------------------------------


class _Walk:
    """The value that each memory holds, or what is left of one; None: parts of several,
    or no one's.

    views   what is read of a value that has no memory of its own
    also    the rows that a value is, beside its own memory
    made    the block in which memory of a size that the run knows was made
    known   the sizes that are known
    """

    def __init__(self, plan: MemoryPlan, places: _Places) -> None:
        self.plan, self.places = plan, places
        self.held: _Held = {}
        self.views: dict[Value, tuple[Value, ...]] = {}
        self.also: dict[Value, list[_Row]] = {}
        self.made: dict[Allocation, Block] = {}
        self.known: set[Symbol] = set()
        self.block = plan.program.block

    def program(self) -> None:
        block, places = self.plan.program.block, self.places
        for value in block.parameters:
            self.know(value.type)
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
        """What is read of a value: itself, or what it is a view of."""
        return self.views.get(value, (value,))

    def read(self, values: Iterable[Value], equation: Equation | None = None) -> None:
        """Values are read, by the expressions of an equation or as a whole."""
        for value in values:
            for base in self.bases(value):
                memory = self.places.of(base)
                if memory is not None:
                    other = self.held.get(memory)
                    name = "another value"
                    if isinstance(other, Value):
                        name = f"`{other.name}`"
                    rule = f"is read where its memory holds {name}"
                    left = self.reads_what_is_left(equation, base, other)
                    self.require(other is base or left, base, rule)

    def reads_what_is_left(
        self, equation: Equation | None, value: Value, held: Value | _Rest | None
    ) -> bool:
        """Whether an equation reads of a value no element of parts that are written
        over: it has them as pieces in which it does not read the value."""
        if equation is None or not isinstance(held, _Rest):
            return False
        definition = equation.definition
        if not isinstance(definition, d.Cut):
            return False
        parts = [self.places.part_of[memory] for memory in held.parts]
        there = [n.attr for part in parts for n in elements(part.piece.elements)]
        at = d.axes(equation.results[0].type.ndim)
        nodes = [n for n in elements(all_expressions(definition)) if n.attr is value]
        return (
            held.value is value
            and all(part.equation is equation for part in parts)
            and value not in there
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
        self.make(value)

    def written(self, value: Value) -> list[Hashable]:
        """The memory that a value is written to as it is computed."""
        memory = self.places.of(value)
        return [*([] if memory is None else [memory]), *self.also.get(value, ())]

    def make(self, value: Value) -> None:
        """Memory of a size that the run finds is made where it is written first, as
        soon as that is in a part of it, and is there to the end of that block."""
        allocation = self.plan.of(value)
        if allocation is None:
            return
        for whole in self.plan.allocations.around(allocation):
            if self.places.is_sized(whole.type):
                continue
            home = self.made.setdefault(whole, self.block)
            rule = "is in memory that was made in another block"
            self.require(home in self.places.around[self.block], value, rule)
            found = {*free_symbols(*whole.type.shape)} - self.plan.entry
            rule = "is in memory whose size is not known yet"
            self.require(whole is allocation or found <= self.known, value, rule)

    def know(self, type_: TensorType) -> None:
        symbols = map(plain_symbol, type_.shape)
        self.known.update(s for s in symbols if s is not None)

    # --- equations ---

    @contextmanager
    def within(self, block: Block) -> Iterator[None]:
        before, self.block = self.block, block
        yield
        self.block = before

    def equations(self, block: Block) -> None:
        with self.within(block):
            for equation in block.equations:
                self.equation(equation)
                for value in equation.results:
                    self.know(value.type)
                if equation.symbol is not None:
                    self.known.add(equation.symbol)

    def equation(self, equation: Equation) -> None:
        definition = equation.definition
        self.read(operands(definition))
        self.dense(equation)
        self.distinct(equation.results)
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

    def dense(self, equation: Equation) -> None:
        """What is read or made as a whole has memory without gaps."""
        definition = equation.definition
        values: list[Value] = []
        if isinstance(definition, Library | Callback | Call):
            values = [*operands(definition), *equation.results]
        elif isinstance(definition, d.Pointwise) and definition.is_view:
            values = [node.attr for node in elements(definition.elements)]
        for value in values:
            rule = "has memory with gaps, and is read or made as a whole"
            self.require(self.places.is_dense(self.places.of(value)), value, rule)

    def distinct(self, values: Sequence[Value]) -> None:
        """What is written at once is in different memory."""
        known: dict[Hashable, Value] = {}
        for value in values:
            memory = self.places.of(value)
            if memory is not None:
                other = known.get(memory, value)
                rule = f"is written at once with `{other.name}`, to the same memory"
                self.require(other is value, value, rule)
                known |= dict.fromkeys(self.places.overlapping(memory), value)

    def definition(self, equation: Equation) -> None:
        definition = equation.definition
        inside: list[Expr] = []
        if not isinstance(definition, Region):
            inside = list(elements(all_expressions(definition)))
        self.read((node.attr for node in inside), equation)
        ordered = isinstance(definition, d.Pointwise | d.Cut | d.Prefix)
        kept = self._kept(definition)
        for number, made in enumerate(equation.results):
            for memory in self.written(made):
                over = set(self.places.overlapping(memory))
                for node in inside:
                    own = ordered and index_of(node) == d.axes(made.type.ndim)
                    for base in self.bases(node.attr):
                        read = self.places.of(base)
                        fits = read not in over or (
                            own and base is node.attr
                            if read == memory
                            else self.places.is_piece(read, memory, equation)
                        )
                        rule = f"is written over by `{made.name}` before it is read"
                        self.require(fits, base, rule)
                for k, value in enumerate(operands(definition)):
                    for base in self.bases(value):
                        read = self.places.of(base)
                        own = read == memory and kept.get(number) == k and base is value
                        rule = f"is an operand in the memory of `{made.name}`"
                        self.require(read not in over or own, base, rule)
        for made in equation.results:
            self.write(made)

    def _kept(self, definition: object) -> dict[int, int]:
        """By the number of a result the operand that it may start as."""
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
            if self.known.issuperset(free_symbols(*value.shape)):
                self.make(value)  # both sides may write it
        before, after = self.held, list[_Held]()
        for block in branch.blocks:
            self.held = dict(before)
            self.equations(block)
            self.read(block.results)
            self.moves(block.results, equation.results)
            after.append(self.held)
        self.held = dict(before)
        for memory in {m for held in after for m in held}:
            found = {id(h.get(memory)): h.get(memory) for h in after}
            self.held[memory] = next(iter(found.values())) if len(found) == 1 else None
        for value in equation.results:
            self.write(value)

    def moves(self, values: Sequence[Value], targets: Sequence[Value]) -> None:
        """Values are copied one after the other to where others are."""
        there = []
        for value, target in zip(values, targets, strict=True):
            memory, own = self.places.of(target), self.places.of(value)
            if memory is None or own == memory:
                there.append(target)
            else:
                self.read([value])
                rule = f"is copied to memory that it is in, that of `{target.name}`"
                self.require(own not in self.places.overlapping(memory), value, rule)
                self.write(target)
        for target in there:
            self.write(target)

    def carried(self, parameters: Sequence[Value]) -> None:
        """Parameters are where the carry is, each in memory of its own."""
        for value in parameters:
            self.know(value.type)
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
        own = {*body.parameters, *stacks}
        for memory, held in before.items():  # it may take no step
            if self.held.get(memory) is not held and held not in own:
                self.held[memory] = None
        for value in equation.results[:count]:
            self.write(value)

    def test(self, loop: Loop | While) -> None:
        """The test of a loop leaves the carry as it is."""
        if isinstance(loop, While):
            self.carried(loop.test.parameters)
            self.equations(loop.test)
            self.read([*loop.test.results, *loop.test.parameters])

    def step(self, body: Block, rows: Sequence[tuple[Value, Value]]) -> None:
        """One step of a loop; its `rows` are values of the body, with their stacks."""
        self.carried(body.parameters)
        before = self.also
        places = [(row, _Row(self.places.of(stack), stack)) for row, stack in rows]
        self.also = {v: list(those) for v, those in before.items()}
        for row, place in places:
            self.also.setdefault(row, []).append(place)
            self.held[place] = None  # another one than that of the step before
        self.equations(body)
        self.also = before
        for row, place in places:
            self.read([row])
            self.held[place] = row


def _is_part(part: Part) -> bool:
    """Whether a piece of a result is all of a value, and where the part says."""
    return any(
        found.value is part.value
        and found.piece is part.piece
        and found.number == part.number
        and same_window(found.window, part.window)
        for found in parts(part.equation)
    )
