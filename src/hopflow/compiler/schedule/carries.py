"""The carries of loops: their places, and how a step updates them."""

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
"""Carries take at most so many variables; the others are in memory. More would find no
registers, and LLVM takes more than linear time for them."""


@dataclass(slots=True)
class Carry:
    """One leaf of a loop's carry: variables, or a buffer, or a row of one.

    row     its number, where small carries of one type share a buffer
    sizes   by axis, the variables of sizes that steps change
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
    """Return variables and buffers that start as the operands and then change."""
    carries: list[Carry] = []
    rows: list[tuple[Value, Buffer, int]] = []
    shared = _shared_buffers(b, [value.type for value in loop.carry])
    parameters = loop.body.parameters
    sizes = [_changing(b, v.type) for v in parameters]  # they may share a symbol
    for number, first in enumerate(loop.carry):
        parameter, changing = parameters[number], sizes[number]
        if changing:
            carries.append(_start_changing(b, first, parameter.type, changing))
        elif number in shared:
            buffer, row = shared[number]
            carries.append(Carry(first.type, buffer=buffer, row=row))
            rows.append((first, buffer, row))
        elif is_small(first.type):
            variables = [b.declare(x, "c") for x in b.elements_of(first)]
            carries.append(Carry(first.type, tuple(variables)))
        else:
            allocation = b.plan.of(equation.results[number])
            assert allocation is not None
            carries.append(Carry(first.type, buffer=b.memory(allocation).buffer))
    for carry, first in zip(carries, loop.carry, strict=True):
        if carry.buffer is not None and carry.row is None and not carry.sizes:
            b.fill(first, Stored(carry.type, carry.buffer))
    _store_rows(b, rows)
    return carries


def _shared_buffers(
    b: Builder, types: Sequence[TensorType]
) -> dict[int, tuple[Buffer, int]]:
    """Return by position the buffer and the row of small carries that are in memory.
    Carries of one type share a buffer."""
    positions: dict[TensorType, list[int]] = {}
    variables = 0
    for k, type_ in enumerate(types):
        if is_small(type_):
            variables += static_size(type_) or 0
            if variables > MOST_VARIABLES:
                positions.setdefault(type_, []).append(k)
    rows_of: dict[int, tuple[Buffer, int]] = {}
    for type_, numbers in positions.items():
        rows = type_.with_shape((len(numbers), *type_.shape))
        buffer = b.temporary(rows, "carries")
        rows_of |= {k: (buffer, row) for row, k in enumerate(numbers)}
    return rows_of


def _changing(b: Builder, type_: TensorType) -> dict[int, Symbol]:
    """Return the axes of a type whose size is not known before the loop."""
    plain = enumerate(map(plain_symbol, type_.shape))
    return {axis: s for axis, s in plain if s is not None and s not in b.symbols}


def _start_changing(
    b: Builder, first: Value, type_: TensorType, changing: Mapping[int, Symbol]
) -> Carry:
    """Return a buffer for a carry whose size steps change: allocated at its maximal
    size if there is a bound."""
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
    """Set the places of the carries in a step, and their sizes before any changes."""
    for carry, parameter in zip(carries, block.parameters, strict=True):
        for axis, size in carry.sizes.items():
            symbol = plain_symbol(parameter.shape[axis])
            assert symbol is not None
            b.define(symbol, e.read(size))
        b.places[parameter] = carry.place


def finish(b: Builder, carries: Sequence[Carry], results: Sequence[Value]) -> None:
    """Set the places of the carries after the last step."""
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
    """Write the end of a step, which computes all new values before it replaces any."""
    assigned: list[tuple[Var, Expr]] = []
    for c, value in zip(carries, results, strict=False):
        elements = b.elements_of(value, c.type) if c.variables else []
        for var, x in zip(c.variables, elements, strict=True):
            if not (x.op == "var" and x.attr is var):
                assigned.append((var, b.let(x, "n")))
    shared = _update_rows(b, carries, results)
    resized: list[tuple[Carry, dict[int, Expr], Buffer]] = []
    named = _named(b, carries, results)
    moving: list[tuple[Carry, Value]] = []
    for c, value in zip(carries, results, strict=False):
        if c.buffer is None or c.row is not None:
            continue
        target, source = Stored(c.type, c.buffer), b.place(value)
        if target.is_at(source):
            continue
        if not c.sizes:
            moving.append((c, value))
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
    """Return whether a buffer holds just this new value, and no other carry."""
    return (
        isinstance(source, Stored)
        and source.is_whole
        and source.buffer.strides is None
        and named[source.buffer] == 1
    )


def _named(
    b: Builder, carries: Sequence[Carry], results: Sequence[Value]
) -> Counter[Buffer]:
    """Count the carries, and their new values, in each buffer."""
    places = [b.place(value) for _, value in zip(carries, results, strict=False)]
    uses = Counter(p.buffer for p in places if isinstance(p, Stored))
    uses.update(c.buffer for c in carries if c.buffer is not None)
    return uses


def _update_rows(
    b: Builder, carries: Sequence[Carry], results: Sequence[Value]
) -> list[tuple[Buffer, Buffer]]:
    """Store the new values of carries that share buffers. Return the buffers with those
    that replace them."""
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
    """Store small values, each as soon as it is computed, to free its register."""
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
    for remaining in stores.values():  # of variables of an enclosing body
        b.statements += remaining


def _move(b: Builder, moving: Sequence[tuple[Carry, Value]]) -> None:
    """Give buffers new values in parallel, by swaps of memory where possible."""
    sources = {c.buffer: b.place(value) for c, value in moving if c.buffer}
    read = [p.buffer for p in sources.values() if isinstance(p, Stored)]
    swaps: list[tuple[Buffer, Buffer]] = []
    taken: set[Buffer] = set()
    copies: list[tuple[Buffer, Buffer]] = []
    for c, value in moving:
        assert c.buffer is not None
        buffer, source = c.buffer, sources[c.buffer]
        fits = _may_swap(b, buffer, sources, value)
        if isinstance(source, Stored) and fits and source.buffer not in taken:
            swaps.append((buffer, source.buffer))
            taken.add(source.buffer)
            continue
        if buffer not in read:
            b.fill(value, Stored(value.type, buffer))
            continue
        # The types of the value and of the carry may name equal sizes differently: only
        # memory of the type of the carry may take its place.
        fresh = b.temporary(c.type, "next")
        b.fill(value, Stored(c.type, fresh))
        (swaps if buffer.space == "arena" else copies).append((buffer, fresh))
    # By buffer, where its contents are now, and whose contents it holds.
    now = {x: x for pair in swaps for x in pair}
    held = dict(now)
    for buffer, origin in swaps:
        holder, other = now[origin], held[buffer]
        if holder is not buffer:
            b.add(Swap(buffer, holder))
            now[origin], now[other] = buffer, holder
            held[buffer], held[holder] = origin, other
    for buffer, fresh in copies:
        b.add(Copy(buffer, fresh))


def _may_swap(
    b: Builder, buffer: Buffer, moving: Mapping[Buffer, Place], value: Value
) -> bool:
    """Return whether a carry may take the memory of a new value, which nothing reads
    there after the step."""
    source, allocation = moving[buffer], b.plan.of(value)
    if not isinstance(source, Stored) or not source.is_whole:
        return False
    memory = source.buffer
    if not (memory.space == buffer.space == "arena"):
        return False
    if not same_shape(memory.shape, buffer.shape):
        return False
    return memory in moving or (allocation is not None and b.is_of_step(allocation))


# --- stacks ---------------------------------------------------------------------------


def stacks(
    b: Builder, results: Sequence[Value], rows: Var | None, most: int | None
) -> list[Buffer]:
    """Return memory for the stacks to which each step adds a row, allocated for `most`
    rows if that bound is known. The variable `rows` counts them."""
    if rows is None or not results:
        return []
    b.symbols.update(dict.fromkeys(_symbols_of_rows(results), e.read(rows)))
    buffers = [b.temporary(v.type, "ys", allocate=False) for v in results]
    if most is not None:
        b.assign(rows, e.index(most))
        for stack in buffers:
            b.add(Allocate(stack))
        b.assign(rows, e.index(0))
    for stack, value in zip(buffers, results, strict=True):
        b.add(Allocate(stack, again=most is not None))
        allocation = b.plan.of(value)
        assert allocation is not None
        b.buffers[allocation] = stack
    return buffers


def add_row(b: Builder, buffers: Sequence[Buffer]) -> None:
    """Grow each stack to `rows` rows, which count the new row already."""
    for stack in buffers:
        b.add(Allocate(stack, again=True, keeps=True))


def end_stacks(b: Builder, results: Sequence[Value], rows: Var | None) -> None:
    """Set the number of rows after the last step."""
    if rows is not None:
        for symbol in _symbols_of_rows(results):
            b.define(symbol, e.read(rows))


def _symbols_of_rows(results: Sequence[Value]) -> list[Symbol]:
    symbols = {plain_symbol(value.shape[0]): None for value in results}
    return [symbol for symbol in symbols if symbol is not None]
