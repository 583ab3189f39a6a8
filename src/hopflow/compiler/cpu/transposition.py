"""Vector loops that transpose an array, by a function that programs share.

    for i in 0..n vector 16:                 for i in 0..n by 16:
        out[k, i] = x[i, k]            ->        transpose(x from [i, k] on,
        ...                                                out from [k, i] on)
        out[k + 15, i] = x[i, k + 15]

LLVM takes longer for the shuffles of 16 vectors than for most loops, and programs have
several such loops: one for each array, and others for the rows that remain.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from hopflow.compiler.cpu.interleaving import (
    Member,
    Place,
    transpose_block,
    without_constants,
)
from hopflow.compiler.cpu.lanes import LaneLoop
from hopflow.compiler.llvm.module import OPAQUE, Function, Module
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import Stmt, Store
from hopflow.loop_ir.walk import same

FEWEST: Final = 16
"""The vectors of the smallest block for which a call pays."""
WORK: Final = 5
"""The instructions for each vector of a block."""


class Block(NamedTuple):
    """The elements of one array that the lanes of a vector copy.

    first  the distance of the first lane's first element from the start of the buffer
    lane   the distance from the elements of a lane to those of the next
    step   the distance from one row in memory to the next
    """

    buffer: Buffer
    first: Expr
    lane: Expr
    step: Expr


class Transposition(NamedTuple):
    """What is copied in blocks of `size` rows, one of each lane, and columns."""

    size: int
    source: Block
    target: Block


def transposition(body: Sequence[Stmt], loop: LaneLoop) -> Transposition | None:
    """Return what a vector loop transposes; None: it does something else."""
    size, stores = len(body), [s for s in body if isinstance(s, Store)]
    if not FEWEST <= size <= loop.width or loop.width % size or size != len(stores):
        return None
    source, target = _source(stores, loop), _target(stores, loop)
    if source is None or target is None or source.buffer is target.buffer:
        return None
    return Transposition(size, source, target)


def _source(stores: Sequence[Store], loop: LaneLoop) -> Block | None:
    """Return the block of the adjacent elements that each lane stores as they are."""
    members: list[Member | None] = []
    for s in stores:
        x = s.value
        if x.op != "load" or x.dtype is not s.buffer.dtype:
            return None
        if e.condition_of(x) is not None:
            return None
        members.append(loop.member(x.attr, e.index_of(x)))
    if members[0] is None:
        return None
    group, first = members[0]
    adjacent = [Member(group, first + k) for k in range(len(stores))]
    if group.is_reversed or members != adjacent:
        return None
    offset = e.add(group.first, e.index(first))
    step = e.index(group.factor) if group.stride is None else group.stride
    return Block(group.buffer, offset, step, step)


def _target(stores: Sequence[Store], loop: LaneLoop) -> Block | None:
    """Return the block of adjacent rows to which the lanes store."""
    buffer, at = stores[0].buffer, stores[0].indices
    form = loop.affine.of(loop.emitter.memory.linear(buffer, at))
    if form is None or not (form[0].is_const and form[0].attr == 1):
        return None
    axes = {_axis(stores[0], s, k) for k, s in enumerate(stores[1:], 1)}
    axis = axes.pop()
    if axes or axis is None:
        return None
    step = loop.emitter.memory.strides(buffer)[axis]
    return Block(buffer, form[1], e.index(1), step)


def _axis(first: Store, other: Store, by: int) -> int | None:
    """Return the only axis along which a store is so many elements behind another."""
    if other.buffer is not first.buffer:
        return None
    axes = list[int]()
    for axis, (x, y) in enumerate(zip(first.indices, other.indices, strict=True)):
        if not same(x, y):
            (base, k), (other_base, m) = without_constants(x), without_constants(y)
            if m - k != by or not same(base, other_base):
                return None
            axes.append(axis)
    return axes[0] if len(axes) == 1 else None


def transpose(
    f: Function, dtype: DType, size: int, source: Place, target: Place, rows: str
) -> None:
    """Emit the call that transposes a block.

    Args:
        size: The number of rows and of columns.
        source: Where the rows are.
        target: Where the columns are written.
        rows: The number of rows that there are, one at least.
    """
    name = f"hf_transpose_{size}_i{8 * dtype.itemsize}"
    f.module.external(f"void @{name}(ptr, i64, ptr, i64, i64)", OPAQUE)
    arguments = [f"ptr {address}, i64 {step}" for address, step in (source, target)]
    f.do(f"call void @{name}({', '.join(arguments)}, i64 {rows})")
    f.work += WORK * size


def define(module: Module, name: str, size: int, bits: int) -> None:
    """Define the function that `transpose` calls."""
    f = Function(
        module,
        f"void @{name}(ptr %source, i64 %step, ptr %target, i64 %next, i64 %rows)",
        f'"prefer-vector-width"="{size * bits}" nounwind',
    )
    source, target = ("%source", "%step"), ("%target", "%next")
    is_whole = f.emit(f"icmp eq i64 %rows, {size}")
    f.branch_if(is_whole, "whole", "part")
    f.start("whole")
    transpose_block(f, size, bits, source, target)
    f.do("ret void")
    f.start("part")
    transpose_block(f, size, bits, source, target, "%rows")
    f.do("ret void")
    module.define(name, f.text)
