"""The carries of loops: where they live, and how a step gives them new values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeGuard

from hopflow.compiler.kernel_program.program import Block, Equation, Loop, Value, While
from hopflow.compiler.kernel_program.registers import (
    indices_of,
    is_small,
    static_size,
)
from hopflow.compiler.schedule.builder import Builder
from hopflow.compiler.schedule.values import Place, Registers, Stored
from hopflow.graph.core import plain_symbol
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import Allocate, Copy, Let, Stmt, Store, Swap
from hopflow.loop_ir.walk import same_shape
from hopflow.symbolic.size import Symbol

MOST_VARIABLES: Final = 64
"""Variables that carries are in. More find no registers anyway, and LLVM takes more
than linear time to find that out: the others are in memory."""


@dataclass(slots=True)
class Carry:
    """One leaf of a loop's carry: variables, or a buffer, or a row of one.

    row     its number, where small carries of one type share a buffer
    sizes   by axis the variables of sizes that steps change
    """

    type: TensorType
    variables: tuple[Var, ...] = ()
    buffer: Buffer | None = None
    row: int | None = None
    sizes: dict[int, Var] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        if self.buffer is not None:
            at = () if self.row is None else (e.index(self.row),)
            return Stored(self.type, self.buffer, at)
        return Registers(self.type, tuple(map(e.read, self.variables)))


def start(b: Builder, equation: Equation, loop: Loop | While) -> list[Carry]:
    """Variables and buffers that start as the operands and change in each step."""
    made: list[Carry] = []
    rows: list[tuple[Value, Buffer, int]] = []
    shared = _shared_buffers(b, [value.type for value in loop.carry])
    parameters = loop.body.parameters
    sizes = [_changing(b, v.type) for v in parameters]  # two may be of one symbol
    for number, first in enumerate(loop.carry):
        within, changing = parameters[number], sizes[number]
        if changing:
            made.append(_start_changing(b, first, within.type, changing))
        elif number in shared:
            buffer, row = shared[number]
            made.append(Carry(first.type, buffer=buffer, row=row))
            rows.append((first, buffer, row))
        elif is_small(first.type):
            variables = [b.declare(x, "c") for x in b.elements_of(first)]
            made.append(Carry(first.type, tuple(variables)))
        else:
            allocation = b.plan.of(equation.results[number])
            assert allocation is not None
            made.append(Carry(first.type, buffer=b.memory(allocation).buffer))
    for carry, first in zip(made, loop.carry, strict=True):
        if carry.buffer is not None and carry.row is None and not carry.sizes:
            b.fill(first, Stored(carry.type, carry.buffer))
    _store_rows(b, rows)
    return made


def _shared_buffers(
    b: Builder, types: Sequence[TensorType]
) -> dict[int, tuple[Buffer, int]]:
    """By position the buffer, and the row of it, of small carries that are in memory:
    there is one buffer for each type."""
    positions: dict[TensorType, list[int]] = {}
    variables = 0
    for k, type_ in enumerate(types):
        if is_small(type_):
            variables += static_size(type_) or 0
            if variables > MOST_VARIABLES:
                positions.setdefault(type_, []).append(k)
    found: dict[int, tuple[Buffer, int]] = {}
    for type_, those in positions.items():
        rows = type_.with_shape((len(those), *type_.shape))
        buffer = b.temporary(rows, "carries")
        found |= {k: (buffer, row) for row, k in enumerate(those)}
    return found


def _changing(b: Builder, type_: TensorType) -> dict[int, Symbol]:
    """The axes of a type that are no size which is known before the loop."""
    plain = enumerate(map(plain_symbol, type_.shape))
    return {axis: s for axis, s in plain if s is not None and s not in b.symbols}


def _start_changing(
    b: Builder, first: Value, type_: TensorType, changing: Mapping[int, Symbol]
) -> Carry:
    """A buffer for a carry whose size steps change: at once as large as it may get, if
    there is such a bound."""
    extents = {axis: b.let(b.extent(first.shape[axis])) for axis in changing}
    sizes = {axis: b.declare(n, "n") for axis, n in extents.items()}
    b.symbols.update({symbol: e.read(sizes[axis]) for axis, symbol in changing.items()})
    buffer = b.temporary(type_, "carry", allocate=False)
    bounded = all(s.range.high != inf for s in changing.values())
    if bounded:
        for axis, symbol in changing.items():
            b.assign(sizes[axis], e.index(int(symbol.range.high)))
    b.add(Allocate(buffer))
    if bounded:
        for axis, size in extents.items():
            b.assign(sizes[axis], size)
        b.add(Allocate(buffer, again=True))
    b.fill(first, Stored(first.type, buffer))
    return Carry(type_, buffer=buffer, sizes=sizes)


def begin_step(b: Builder, carries: Sequence[Carry], block: Block) -> None:
    """Say what is carried into a step, and the sizes of it before any changes."""
    for carry, parameter in zip(carries, block.parameters, strict=True):
        for axis, size in carry.sizes.items():
            symbol = plain_symbol(parameter.shape[axis])
            assert symbol is not None
            b.define(symbol, e.read(size))
        b.places[parameter] = carry.place


def finish(b: Builder, carries: Sequence[Carry], results: Sequence[Value]) -> None:
    """Say what was carried out of the last step."""
    for carry, result in zip(carries, results, strict=False):
        for axis, size in carry.sizes.items():
            symbol = plain_symbol(result.shape[axis])
            assert symbol is not None
            b.define(symbol, e.read(size))
        place = carry.place
        if carry.sizes and carry.buffer is not None:
            place = Stored(result.type, carry.buffer)
        b.places[result] = place


def update(b: Builder, carries: Sequence[Carry], results: Sequence[Value]) -> None:
    """The end of a step: new values are known before old ones are given up."""
    assigned: list[tuple[Var, Expr]] = []
    for c, value in zip(carries, results, strict=False):
        elements = b.elements_of(value, c.type) if c.variables else []
        for var, x in zip(c.variables, elements, strict=True):
            if not (x.op == "var" and x.attr is var):
                assigned.append((var, b.let(x, "n")))
    shared = _update_rows(b, carries, results)
    resized: list[tuple[Carry, dict[int, Expr], Buffer]] = []
    named = _named(b, carries, results)
    moving: list[tuple[Buffer, Value]] = []
    for c, value in zip(carries, results, strict=False):
        if c.buffer is None or c.row is not None:
            continue
        target, source = Stored(c.type, c.buffer), b.place(value)
        if target.is_at(source):
            continue
        if not c.sizes:
            moving.append((c.buffer, value))
            continue
        extents = {i: b.let(b.extent(value.shape[i])) for i in c.sizes}
        if _stays(source, named):
            resized.append((c, extents, source.buffer))
            continue
        fresh = b.temporary(value.type, "next")
        b.fill(value, Stored(value.type, fresh))
        resized.append((c, extents, fresh))
    _move(b, moving)
    for var, x in assigned:
        b.assign(var, x)
    for buffer, fresh in shared:
        b.add(Swap(buffer, fresh))
    for c, extents, fresh in resized:
        assert c.buffer is not None
        for axis, size in extents.items():
            b.assign(c.sizes[axis], size)
        b.add(Allocate(c.buffer, again=True))
        b.add(Copy(c.buffer, fresh))


def _stays(source: Place, named: Counter[Buffer]) -> TypeGuard[Stored]:
    """Whether a new value is all of a buffer in which nothing else comes to be."""
    return (
        isinstance(source, Stored)
        and source.is_whole
        and source.buffer.strides is None
        and named[source.buffer] == 1
    )


def _named(
    b: Builder, carries: Sequence[Carry], results: Sequence[Value]
) -> Counter[Buffer]:
    """How many carries, and new values of them, are in a buffer."""
    places = [b.place(value) for _, value in zip(carries, results, strict=False)]
    found = Counter(p.buffer for p in places if isinstance(p, Stored))
    found.update(c.buffer for c in carries if c.buffer is not None)
    return found


def _update_rows(
    b: Builder, carries: Sequence[Carry], results: Sequence[Value]
) -> list[tuple[Buffer, Buffer]]:
    """Store the new values of carries that share buffers; the buffers, and those that
    are to take their places."""
    fresh: dict[Buffer, Buffer] = {}
    rows: list[tuple[Value, Buffer, int]] = []
    for c, value in zip(carries, results, strict=False):
        if c.buffer is None or c.row is None:
            continue
        if c.buffer not in fresh:
            type_ = c.type.with_shape((c.buffer.shape[0].attr, *c.type.shape))
            fresh[c.buffer] = b.temporary(type_, "next")
        rows.append((value, fresh[c.buffer], c.row))
    _store_rows(b, rows)
    return list(fresh.items())


def _store_rows(b: Builder, rows: Sequence[tuple[Value, Buffer, int]]) -> None:
    """Store small values, each as soon as it is known: what waits needs a register."""
    stores: dict[Var, list[Stmt]] = {}
    for value, buffer, row in rows:
        place = b.place(value)
        for i in indices_of(value.type):
            x = b.let(place.read(i), "n")
            store = Store(buffer, (e.index(row), *i), x)
            if x.op == "var":
                stores.setdefault(x.attr, []).append(store)
            else:
                b.add(store)
    before = list(b.statements)
    b.statements.clear()
    for statement in before:
        b.statements.append(statement)
        if isinstance(statement, Let):
            b.statements += stores.pop(statement.var, ())
    for others in stores.values():  # of variables of a body around
        b.statements += others


def _move(b: Builder, moving: Sequence[tuple[Buffer, Value]]) -> None:
    """Give buffers new values at once, by exchanges of memory where that can be."""
    sources = {buffer: b.place(value) for buffer, value in moving}
    read = [p.buffer for p in sources.values() if isinstance(p, Stored)]
    swaps: list[tuple[Buffer, Buffer]] = []
    taken: set[Buffer] = set()
    copies: list[tuple[Buffer, Buffer]] = []
    for buffer, value in moving:
        source = sources[buffer]
        fits = _may_swap(b, buffer, sources, value)
        if isinstance(source, Stored) and fits and source.buffer not in taken:
            swaps.append((buffer, source.buffer))
            taken.add(source.buffer)
            continue
        if buffer not in read:
            b.fill(value, Stored(value.type, buffer))
            continue
        fresh = b.temporary(value.type, "next")
        b.fill(value, Stored(value.type, fresh))
        (swaps if buffer.space == "arena" else copies).append((buffer, fresh))
    # By buffer where its contents are now, and whose contents are there.
    now = {x: x for pair in swaps for x in pair}
    held = dict(now)
    for buffer, wanted in swaps:
        at, other = now[wanted], held[buffer]
        if at is not buffer:
            b.add(Swap(buffer, at))
            now[wanted], now[other] = buffer, at
            held[buffer], held[at] = wanted, other
    for buffer, fresh in copies:
        b.add(Copy(buffer, fresh))


def _may_swap(
    b: Builder, buffer: Buffer, moving: Mapping[Buffer, Place], value: Value
) -> bool:
    """Whether a carry may take the memory of a new value, which nothing reads there
    after the step."""
    source, allocation = moving[buffer], b.plan.of(value)
    if not isinstance(source, Stored) or not source.is_whole:
        return False
    found = source.buffer
    if not (found.space == buffer.space == "arena"):
        return False
    if not same_shape(found.shape, buffer.shape):
        return False
    return found in moving or (allocation is not None and b.is_of_step(allocation))


# --- stacks ---------------------------------------------------------------------------


def stacks(
    b: Builder, results: Sequence[Value], rows: Var | None, most: int | None
) -> list[Buffer]:
    """Memory for what each step adds a row to: at once for `most` rows, if so many are
    all. The variable `rows` says how many there are."""
    if rows is None or not results:
        return []
    b.symbols.update(dict.fromkeys(_symbols_of_rows(results), e.read(rows)))
    made = [b.temporary(v.type, "ys", allocate=False) for v in results]
    if most is not None:
        b.assign(rows, e.index(most))
        for stack in made:
            b.add(Allocate(stack))
        b.assign(rows, e.index(0))
    for stack, value in zip(made, results, strict=True):
        b.add(Allocate(stack, again=most is not None))
        allocation = b.plan.of(value)
        assert allocation is not None
        b.buffers[allocation] = stack
    return made


def add_row(b: Builder, made: Sequence[Buffer]) -> None:
    """Make room for one more row in each stack, which `rows` counts already."""
    for stack in made:
        b.add(Allocate(stack, again=True, keeps=True))


def end_stacks(b: Builder, results: Sequence[Value], rows: Var | None) -> None:
    """After the last step the number of rows is known."""
    if rows is not None:
        for symbol in _symbols_of_rows(results):
            b.define(symbol, e.read(rows))


def _symbols_of_rows(results: Sequence[Value]) -> list[Symbol]:
    found = {plain_symbol(value.shape[0]): None for value in results}
    return [symbol for symbol in found if symbol is not None]
