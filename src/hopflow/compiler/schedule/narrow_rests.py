"""The rest of vector loops that work in place: narrower vectors, without masks.

                                              for i1 in 0..8 vector 8 independent:
    for i1 in 0..10 vector 8 independent:         c[i0, i1] = c[i0, i1] + x[i1]
        c[i0, i1] = c[i0, i1] + x[i1]    ->   for i1_rest8 in 0..2 vector 2 independent:
                                                  c[i0, i1_rest8 + 8] = ...

A load under a mask waits until the store under a mask before it is in the cache:
processors forward only whole vectors from one to the other. A loop that runs again soon
reads what it has just written.
"""

from collections.abc import Iterator
from typing import Final

from hopflow import dtypes
from hopflow.compiler.schedule.copies import copied
from hopflow.compiler.schedule.groups import body_size
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Var
from hopflow.loop_ir.program import (
    SERIAL,
    Binding,
    For,
    Let,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.walk import bodies, loaded

MOST: Final = 2
"""Vectors of the rest, at most."""
LARGEST: Final = 24
"""Instructions of a body, at most, of which there are more copies."""


def narrow_rests(program: Program, target: Target) -> None:
    """Edit the steps of a program in place, without the functions that it calls."""
    if target.has_masks:
        _edit(program.body, in_steps=False)


def _edit(body: list[Stmt], in_steps: bool) -> None:
    new: list[Stmt] = []
    for s in body:
        if in_steps and isinstance(s, For) and s.binding.kind == "vector":
            new += _parts(s)
            continue
        new.append(s)
        has_steps = isinstance(s, While) or (isinstance(s, For) and not s.independent)
        for inner in bodies(s):
            _edit(inner, in_steps or has_steps)
    body[:] = new


def _parts(loop: For) -> Iterator[For]:
    """Yield the loops over whole vectors in place of a loop; itself, if it stays."""
    widths = _widths(loop)
    if not widths:
        yield loop
        return
    start = 0
    for width, count in widths:
        var = Var(f"{loop.var.name}_rest{start}", dtypes.int64) if start else loop.var
        body = loop.body
        if start:
            values = {loop.var: e.add(e.read(var), e.index(start))}
            body = [copied(s, values, f"_rest{start}") for s in body]
        binding = Binding("vector", width) if width > 1 else SERIAL
        yield For(var, e.index(width * count), body, True, binding, loop.nodes)
        start += width * count


def _widths(loop: For) -> list[tuple[int, int]]:
    """Return the widths of the vectors that a loop consists of, each with how many
    there are of it; none, if it has no rest, or masks are as fast."""
    if not loop.extent.is_const or body_size(loop.body) > LARGEST:
        return []
    count, left = divmod(loop.extent.attr, loop.binding.width)
    narrower = [1 << k for k in range(left.bit_length()) if left >> k & 1][::-1]
    if not 0 < len(narrower) <= MOST or left == 1 or not _is_in_place(loop):
        return []
    whole = [(loop.binding.width, count)] if count else []
    return whole + [(width, 1) for width in narrower]


def _is_in_place(loop: For) -> bool:
    """Return whether straight-line code reads elements of an array that it writes. The
    code generator reads rows of the arena without masks."""
    if not all(isinstance(s, Let | Store) for s in loop.body):
        return False
    written = {s.buffer for s in loop.body if isinstance(s, Store)}
    read = {node.attr for s in loop.body for node in loaded(s)}
    return any(b.space != "arena" or len(b.shape) > 1 for b in written & read)
