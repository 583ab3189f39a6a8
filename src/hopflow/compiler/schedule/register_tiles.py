"""Register tiling: rows of results that read the same elements load these once.

    for i0 in 0..8 independent:
        for i1 in 0..9 independent:
            var acc: f64 = 0.0
            for i2 in 0..12:
                acc = acc + x[i0, i2] * y[i2, i1]
            out0[i0, i1] = acc

becomes, of two rows at a time,

    for i0_rows in 0..4 independent:
        for i1 in 0..9 independent:
            var acc_0: f64 = 0.0
            var acc_1: f64 = 0.0
            for i2 in 0..12:
                acc_0 = acc_0 + x[i0_rows * 2, i2] * y[i2, i1]
                acc_1 = acc_1 + x[i0_rows * 2 + 1, i2] * y[i2, i1]
            out0[i0_rows * 2, i1] = acc_0
            out0[i0_rows * 2 + 1, i1] = acc_1

The sums of several rows are also independent of each other, so that their latencies
overlap.
"""

from collections.abc import Collection, Iterable
from functools import cache, partial
from math import prod
from typing import Final, TypeGuard

from hopflow.compiler.private import private_to
from hopflow.compiler.schedule.groups import body_size, edit_nests, in_groups
from hopflow.compiler.schedule.summary import Summaries
from hopflow.compiler.target import Target
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    For,
    Let,
    Program,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import (
    dependent,
    loaded,
    names,
    nodes,
    perfect_nest,
    statements,
)

MOST: Final = 8
"""Vectors of sums at once, at most: they stay in the registers, with what they read."""
LARGEST: Final = 512
"""Instructions of all rows, at most."""
PRIVATE: Final = 1 << 14
"""Bytes of memory that is private to the rows of a tile, at most."""
_STATEMENTS: Final = (Let, Declare, Assign, Accumulate, Store, For)
"""Statements that a tile may have."""


def register_tiles(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    uses = cache(lambda: walk.uses(program.body))
    summaries = Summaries()

    def tiles_of(outermost: For) -> list[For] | None:
        """Return the nests in place of one; None: there is nothing to gain."""
        nest = perfect_nest(outermost)
        if len(nest) > 1 and _shares(nest[-1], nest[-2].var, ()):
            nest.pop()
        rows = nest[-1]
        if not any(isinstance(s, For) for s in rows.body) or not _may_be_tiled(rows):
            return None
        private = private_to(summaries.of(rows), uses())
        tiles = [s for s in rows.body if _is_tile(s, rows.var, private)]
        if not tiles:
            return None
        vectors = max(_vectors(row, target) for row in tiles)
        most = min(MOST // vectors, LARGEST // body_size(rows.body))
        if most < 2 or _bytes(private) * most > PRIVATE:
            return None
        tiled = in_groups(nest, len(nest) - 1, partial(_count, most), private)
        if tiled is None:
            return None
        program.arena = [b for b in program.arena if b not in private] + tiled.buffers
        return tiled.nests

    edit_nests(program.body, tiles_of)


def _may_be_tiled(rows: For) -> bool:
    """Return whether iterations of a loop may run together, statement by statement."""
    inside = list(statements(rows.body))
    if not rows.independent or not all(isinstance(s, _STATEMENTS) for s in inside):
        return False
    own = {s.var for s in inside if isinstance(s, Declare)}
    if any(isinstance(s, Assign | Accumulate) and s.var not in own for s in inside):
        return False
    return _have_same_steps(inside, rows.var)


def _have_same_steps(body: Collection[Stmt], rows: Var) -> bool:
    """Return whether each loop in a body has as many steps for all rows."""
    # What is computed in the body may differ between rows.
    computed = {rows, *(s.var for s in body if isinstance(s, Declare | Let))}
    extents = nodes(*(s.extent for s in body if isinstance(s, For)))
    return not any(
        n.op == "load" or (n.op == "var" and n.attr in computed) for n in extents
    )


def _is_tile(s: Stmt, rows: Var, private: Collection[Buffer]) -> TypeGuard[For]:
    return isinstance(s, For) and _shares(s, rows, private)


def _shares(row: For, rows: Var, private: Collection[Buffer]) -> bool:
    """Return whether the elements of a row are sums by loops, and most of what they
    read is the same for all rows.

    Args:
        private: Buffers that differ between rows.
    """
    inside = list(statements(row.body))
    loops = [s for s in inside if isinstance(s, For)]
    if not row.independent or any(s.binding.kind != "serial" for s in loops):
        return False
    by_rows, by_lane = dependent(inside, rows), dependent(inside, row.var)
    own = shared = 0
    for node in (n for s in inside for n in loaded(s)):
        if names(node, by_lane):
            is_own = node.attr in private or names(node, by_rows)
            own, shared = own + is_own, shared + (not is_own)
    return shared > own and bool(loops)


def _bytes(buffers: Iterable[Buffer]) -> int:
    """Return the size of buffers; too many bytes, if it is unknown."""
    total = 0
    for buffer in buffers:
        if not all(n.is_const for n in buffer.shape):
            return PRIVATE
        total += prod(n.attr for n in buffer.shape) * buffer.dtype.itemsize
    return total


def _vectors(row: For, target: Target) -> int:
    """Return of how many vectors a row of results consists, as far as these are
    computed together."""
    if row.binding.kind == "vector":
        return 1
    stored = [s for s in row.body if isinstance(s, Store)]
    width = min((target.vector_width(s.value.dtype) for s in stored), default=1)
    return -(-row.extent.attr // width) if row.extent.is_const else MOST


def _count(most: int, left: Expr) -> int:
    """Return how many rows are computed at once: groups of about the same size."""
    if not left.is_const:
        return most
    rows: int = left.attr
    groups = max(1, -(-rows // most))
    return -(-rows // groups)
