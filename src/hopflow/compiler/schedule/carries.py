"""The carries of loops: where they live, and how a step gives them new values; and the
stacks of loops of which nobody knows the number of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.schedule.builder import Builder
from hopflow.compiler.schedule.kernels import Kernels
from hopflow.compiler.schedule.places import (
    Pending,
    Place,
    Registers,
    Slot,
    Stored,
    indices_of,
    is_small,
    static_size,
)
from hopflow.graph.core import Var as GraphVar
from hopflow.graph.core import plain_symbol
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.nest import Allocate, Buffer, Copy, Let, Stmt, Store, Swap, Var
from hopflow.loop_ir.walk import nodes, same_shape
from hopflow.symbolic.size import Symbol, free_symbols

MOST_VARIABLES: Final = 64
"""Variables that carries are in. More find no registers anyway, and LLVM takes more
than linear time to find that out: the others are in memory."""


@dataclass(slots=True)
class Carry:
    """One leaf of a loop's carry: variables, or a buffer, or a row of one.

    type    in the loop
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


def start(
    b: Builder,
    operands: Sequence[Slot],
    inner: Sequence[TensorType],
    others: Sequence[Slot],
    token: object,
) -> list[Carry]:
    """Variables and buffers that start as the operands and change in each step.

    `inner` are their types in the loop. `others` are what else the loop reads: their
    memory is not taken over.
    """
    made: list[Carry] = []
    shared = _shared_buffers(b, [slot.type for slot in operands], token)
    rows: list[tuple[Slot, Buffer, int]] = []
    sizes = [_changing(b, within) for within in inner]  # two may be of one symbol
    for slot, within, changing in zip(operands, inner, sizes, strict=True):
        type_ = slot.type
        if changing:
            made.append(_start_changing(b, slot, within, changing, token))
            continue
        if len(made) in shared:
            buffer, row = shared[len(made)]
            made.append(Carry(type_, buffer=buffer, row=row))
            rows.append((slot, buffer, row))
            continue
        if is_small(type_):
            values = [slot.at(i) for i in indices_of(type_)]
            variables = tuple(b.declare(v, "c") for v in values)
            made.append(Carry(type_, variables))
            continue
        taken = [c.buffer for c in made]
        also = [s for s in (*operands, *others) if s is not slot]
        place = slot.place
        if (
            isinstance(place, Stored)
            and place.buffer not in taken
            and not any(place.buffer in s.place.buffers for s in also)
            and operands.count(slot) + others.count(slot) == 1
            and b.may_overwrite(slot)
            and not b.readers(place.buffer, but=slot)
        ):
            buffer = place.buffer
        else:
            buffer = b.temporary(type_, "carry")
            Kernels(b, 0).fill(slot, Stored(type_, buffer))
        b.owners[buffer] = token
        made.append(Carry(type_, buffer=buffer))
    _store_rows(b, rows)
    return made


def _shared_buffers(
    b: Builder, types: Sequence[TensorType], token: object
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
        b.owners[buffer] = token
        found |= {k: (buffer, row) for row, k in enumerate(those)}
    return found


def _changing(b: Builder, type_: TensorType) -> dict[int, Symbol]:
    """The axes of a type that are no size which is known before the loop."""
    plain = enumerate(map(plain_symbol, type_.shape))
    return {axis: s for axis, s in plain if s is not None and s not in b.symbols}


def _start_changing(
    b: Builder,
    slot: Slot,
    type_: TensorType,
    changing: Mapping[int, Symbol],
    token: object,
) -> Carry:
    """A buffer for a carry whose size steps change: at once as large as it may get, if
    there is such a bound."""
    first = {axis: b.let(b.extent(slot.type.shape[axis])) for axis in changing}
    sizes = {axis: b.declare(n, "n") for axis, n in first.items()}
    b.symbols.update({symbol: e.read(sizes[axis]) for axis, symbol in changing.items()})
    buffer = b.temporary(type_, "carry", allocate=False)
    bounded = all(s.range.high != inf for s in changing.values())
    if bounded:
        for axis, symbol in changing.items():
            b.assign(sizes[axis], e.index(int(symbol.range.high)))
    b.add(Allocate(buffer))
    if bounded:
        for axis, size in first.items():
            b.assign(sizes[axis], size)
        b.add(Allocate(buffer, again=True))
    Kernels(b, 0).fill(slot, Stored(type_, buffer))
    b.owners[buffer] = token
    return Carry(type_, buffer=buffer, sizes=sizes)


def begin_step(b: Builder, carries: Sequence[Carry], inner: Sequence[GraphVar]) -> None:
    """Say what the sizes of this step are, before any of them changes."""
    for carry, var in zip(carries, inner, strict=True):
        for axis, size in carry.sizes.items():
            symbol = plain_symbol(var.type.shape[axis])
            assert symbol is not None
            b.define(symbol, e.read(size))


def finish(
    b: Builder,
    carries: Sequence[Carry],
    types: Sequence[TensorType],
    uses: Sequence[int],
) -> list[Slot]:
    """The carry's places once the loop is done; the outer loop owns them now."""
    slots = []
    for carry, type_, n in zip(carries, types, uses, strict=True):
        place = carry.place
        if carry.buffer is not None:
            b.owners[carry.buffer] = b.loop
            for axis, size in carry.sizes.items():
                symbol = plain_symbol(type_.shape[axis])
                assert symbol is not None
                b.define(symbol, e.read(size))
                place = Stored(type_, carry.buffer)
        slots.append(b.slot(place, n))
    return slots


def update(b: Builder, carries: Sequence[Carry], results: Sequence[Slot]) -> None:
    """The end of a step: new values are known before old ones are given up."""
    assigned: list[tuple[Var, Expr]] = []
    for c, slot in zip(carries, results, strict=True):
        at = indices_of(c.type) if c.variables else []
        for var, i in zip(c.variables, at, strict=True):
            value = slot.at(i)
            if not (value.op == "var" and value.attr is var):
                assigned.append((var, b.let(value, "n")))
    shared = _update_rows(b, carries, results)
    resized: list[tuple[Carry, dict[int, Expr], Buffer]] = []
    moving: list[tuple[Buffer, Slot]] = []
    for c, slot in zip(carries, results, strict=True):
        if c.buffer is None or c.row is not None or _is_at(slot, c.buffer):
            continue
        if c.sizes:
            extents = {i: b.let(b.extent(slot.type.shape[i])) for i in c.sizes}
            fresh = b.temporary(slot.type, "next")
            Kernels(b, 0).fill(slot, Stored(slot.type, fresh))
            resized.append((c, extents, fresh))
        else:
            moving.append((c.buffer, slot))
    own = [c.buffer for c in carries if c.buffer]
    _update_buffers(b, own, moving)
    for var, value in assigned:
        b.assign(var, value)
    for buffer, fresh in shared:
        b.add(Swap(buffer, fresh))
    for c, extents, fresh in resized:
        assert c.buffer is not None
        for axis, size in extents.items():
            b.assign(c.sizes[axis], size)
        b.add(Allocate(c.buffer, again=True))
        b.add(Copy(c.buffer, fresh))


def _update_rows(
    b: Builder, carries: Sequence[Carry], results: Sequence[Slot]
) -> list[tuple[Buffer, Buffer]]:
    """Store the new values of carries that share buffers; the buffers, and those that
    are to take their places."""
    fresh: dict[Buffer, Buffer] = {}
    rows: list[tuple[Slot, Buffer, int]] = []
    for c, slot in zip(carries, results, strict=True):
        if c.buffer is None or c.row is None:
            continue
        if c.buffer not in fresh:
            type_ = c.type.with_shape((c.buffer.shape[0].attr, *c.type.shape))
            fresh[c.buffer] = b.temporary(type_, "next")
        rows.append((slot, fresh[c.buffer], c.row))
    _store_rows(b, rows)
    return list(fresh.items())


def _store_rows(b: Builder, rows: Sequence[tuple[Slot, Buffer, int]]) -> None:
    """Store small values, each as soon as it is known: what waits needs a register."""
    stores: dict[Var, list[Stmt]] = {}
    for slot, buffer, row in rows:
        for i in indices_of(slot.type):
            value = b.let(slot.at(i), "n")
            store = Store(buffer, (e.index(row), *i), value)
            if value.op == "var":
                stores.setdefault(value.attr, []).append(store)
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


def _update_buffers(
    b: Builder, own: Sequence[Buffer], moving: Sequence[tuple[Buffer, Slot]]
) -> None:
    changed = {buffer for buffer, _ in moving}
    direct: dict[tuple[str, ...], list[tuple[Buffer, Slot]]] = {}
    swaps: list[tuple[Buffer, Buffer]] = []
    for buffer, slot in moving:
        place = slot.place
        if isinstance(place, Pending) and _is_elementwise(
            slot, changed, buffer, moving
        ):
            direct.setdefault(tuple(map(str, slot.type.shape)), []).append(
                (buffer, slot)
            )
        elif _is_own(b, slot, own, [t for _, t in swaps]):
            assert isinstance(place, Stored)
            swaps.append((buffer, place.buffer))
        else:
            fresh = b.temporary(slot.type, "next")
            Kernels(b, 0).fill(slot, Stored(slot.type, fresh))
            swaps.append((buffer, fresh))
    for group in direct.values():
        b.store(
            [slot for _, slot in group],
            [Stored(slot.type, buffer) for buffer, slot in group],
        )
    for buffer, fresh in swaps:
        if fresh.space == buffer.space == "arena" and same_shape(
            fresh.shape, buffer.shape
        ):
            b.add(Swap(buffer, fresh))
        else:
            b.add(Copy(buffer, fresh))


def _is_own(
    b: Builder, slot: Slot, own: Sequence[Buffer], taken: Sequence[Buffer]
) -> bool:
    """Whether a value lies in a temporary of this step that may be swapped in."""
    place = slot.place
    return (
        isinstance(place, Stored)
        and not place.prefix
        and place.buffer.space == "arena"
        and place.buffer not in own
        and place.buffer not in taken
        and b.owners.get(place.buffer) is b.loop
    )


def _is_elementwise(
    slot: Slot,
    changed: set[Buffer],
    buffer: Buffer,
    moving: Sequence[tuple[Buffer, Slot]],
) -> bool:
    """Whether a pending value may be written over carries while it is computed.

    Of the carries that change it may read only those of its own shape (which are
    written in the same loop, each element after all reads of it), at its own index.
    """
    at = axes(slot.type.ndim)
    alike = {
        other
        for other, s in moving
        if tuple(map(str, s.type.shape)) == tuple(map(str, slot.type.shape))
    }
    for node in nodes(slot.at(at)):
        if node.op == "load" and node.attr in changed:
            own = e.index_of(node)
            same = len(own) == len(at) and all(
                x is y for x, y in zip(own, at, strict=True)
            )
            if not same or node.attr not in alike:
                return False
    return buffer in alike


def _is_at(slot: Slot, buffer: Buffer) -> bool:
    place = slot.place
    return isinstance(place, Stored) and place.buffer is buffer and not place.prefix


# --- stacks ---------------------------------------------------------------------------


def stacks(
    b: Builder, types: Sequence[TensorType], rows: Var | None, most: int | None
) -> list[Buffer]:
    """Memory for what each step adds a row to: at once for `most` rows, if so many are
    all. The variable `rows` says how many there are."""
    if rows is None or not types:
        return []
    b.symbols.update(dict.fromkeys(_symbols_of_rows(types), e.read(rows)))
    made = [b.temporary(t, "ys", allocate=False) for t in types]
    if most is not None:
        b.assign(rows, e.index(most))
        for stack in made:
            b.add(Allocate(stack))
        b.assign(rows, e.index(0))
    for stack in made:
        b.add(Allocate(stack, again=most is not None))
    return made


def push(b: Builder, made: Sequence[Buffer], row: Sequence[Slot], at: Expr) -> None:
    """Write the last row of each stack, which `rows` counts already."""
    for stack, slot in zip(made, row, strict=True):
        b.add(Allocate(stack, again=True, keeps=True))
        Kernels(b, 0).fill(slot, Stored(slot.type, stack, (at,)))


def stacked(
    b: Builder,
    made: Sequence[Buffer],
    types: Sequence[TensorType],
    uses: Sequence[int],
    rows: Var | None,
) -> list[Slot]:
    """The stacks after the last step, when their number of rows is known."""
    if rows is not None:
        for symbol in _symbols_of_rows(types):
            b.define(symbol, e.read(rows))
    return [
        b.slot(Stored(t, stack), n)
        for stack, t, n in zip(made, types, uses, strict=True)
    ]


def _symbols_of_rows(types: Sequence[TensorType]) -> set[Symbol]:
    return {s for t in types for s in free_symbols(t.shape[0])}
