"""Rows of few elements that stay in registers through all steps of a loop.

    for step in 0..20:                     for i_block in 0..n / 8 threads independent:
        for i in 0..n vector 8 ...:            for i_row in 0..8 gang 8 independent:
            s[i, 0] = s[i, 0] + s[i, 1]            var kept0: u32 = s[.. i_row, 0]
            s[i, 1] = s[i, 1] ^ s[i, 0]            var kept1: u32 = s[.. i_row, 1]
                                       ->          for step in 0..20:
                                                       kept0 = kept0 + kept1
                                                       kept1 = kept1 ^ kept0
                                                   s[.. i_row, 0] = kept0
                                                   s[.. i_row, 1] = kept1

An example's state, of which a step reads and writes single elements, lies apart from
that of the next example: each step would gather and scatter it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias

from hopflow.compiler.schedule.blocks import block_of, over_blocks
from hopflow.compiler.schedule.copies import copied
from hopflow.compiler.schedule.groups import body_size
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    SERIAL,
    THREADS,
    Assign,
    Binding,
    Declare,
    For,
    Let,
    Program,
    Stmt,
    Store,
)
from hopflow.loop_ir.walk import (
    accessed,
    bodies,
    loaded,
    names,
    nodes,
    replace,
    same,
    statements,
    uses,
)

MOST: Final = 16
"""Elements of a row in registers, at most."""
LARGEST: Final = 2048
"""Instructions of a step, at most."""
FEW: Final = 6
"""Elements of a row, at most, of which two vectors at a time fit into the registers."""


_Key: TypeAlias = tuple[Buffer, tuple[int | None, ...]]
"""An element of a row: its buffer, and its index; None stands for that of the row."""
_Simple: TypeAlias = Let | Store


def rows_in_registers(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    _Pass(program, THREADS if target.has_threads else SERIAL).body(program.body)


class _Pass:
    def __init__(self, program: Program, binding: Binding) -> None:
        self._program, self._binding = program, binding
        self._uses = cache(lambda: uses(program.body))

    def body(self, body: list[Stmt]) -> None:
        """Edit such loops in a list of statements, and in those inside."""
        for k, s in enumerate(body):
            if isinstance(s, For) and s.independent:
                continue  # a thread or the lanes of a gang run the loops in it
            moved = self._moved(s) if isinstance(s, For) else None
            if moved is not None:
                body[k] = moved
                continue
            for inner in bodies(s):
                self.body(inner)

    def _moved(self, steps: For) -> For | None:
        """Return the loop over rows in place of that over steps; None: it stays."""
        rows = next((s for s in steps.body if isinstance(s, For)), None)
        body = None if rows is None else _iteration(steps, rows)
        if rows is None or body is None:
            return None
        elements = _elements(body, rows.var)
        temporary = self._temporary(body, rows.var)
        kept = {
            key: Var(f"{rows.var.name}_kept{number}", load.dtype)
            for number, (key, load) in enumerate(elements.items())
        }
        held = [key for key in kept if key[0] not in temporary]
        if not any(map(_lies_apart, held)) or len(held) > MOST:
            return None
        self._program.arena = [b for b in self._program.arena if b not in temporary]
        stores = {
            key: Store(s.buffer, s.indices, e.read(kept[key]))
            for s in body
            if isinstance(s, Store)
            and (key := _key(s.buffer, s.indices, rows.var)) in held
        }
        steps.body = [*_on_variables(body, rows.var, kept, temporary)]
        declared = [Declare(kept[key], elements[key]) for key in held]
        rows.body = [*declared, steps, *stores.values()]
        width = rows.binding.width * (2 if len(held) <= FEW else 1)
        rows.binding = Binding("gang", width)
        if rows.extent.is_const and rows.extent.attr <= width:
            return rows
        number, lanes = block_of(rows, width)
        return over_blocks(number, rows, width, [lanes], self._binding)

    def _temporary(self, body: Sequence[_Simple], row: Var) -> set[Buffer]:
        """Return the buffers that only this body names, and of which it stores every
        element before it loads it, once."""
        inside, stored = uses(body), set[_Key]()
        found = {
            b for b, n in inside.items() if b.space == "arena" and self._uses()[b] == n
        }
        for s in body:
            for node in loaded(s):
                if _key(node.attr, e.index_of(node), row) not in stored:
                    found.discard(node.attr)
            if isinstance(s, Store):
                key = _key(s.buffer, s.indices, row)
                if key is None or key in stored:
                    found.discard(s.buffer)
                else:
                    stored.add(key)
        return found


def _iteration(steps: For, rows: For) -> list[_Simple] | None:
    """Return what a step does for a row, if its loops are vectors of as many rows, and
    what is around them is the same for all rows; None: it does something else."""
    stored = {s.buffer for s in statements(steps.body) if isinstance(s, Store)}
    if any(node.op == "load" and node.attr in stored for node in nodes(steps.extent)):
        return None
    within, body = {steps.var}, list[_Simple]()
    for s in steps.body:
        if isinstance(s, Let):
            if any(node.attr in stored for node in loaded(s)):
                return None
            within.add(s.var)
            body.append(s)
            continue
        if not (isinstance(s, For) and s.binding == rows.binding):
            return None
        if s.binding.kind != "vector" or not same(s.extent, rows.extent):
            return None
        if names(s.extent, within):
            return None
        values: dict[Var, Expr] = {s.var: e.read(rows.var)}
        for inner in s.body:
            copy = copied(inner, values, "") if isinstance(inner, Let | Store) else None
            if not isinstance(copy, Let | Store):
                return None
            body.append(copy)
    return body if body_size(body) <= LARGEST else None


def _on_variables(
    body: Sequence[_Simple],
    row: Var,
    kept: Mapping[_Key, Var],
    temporary: Collection[Buffer],
) -> Iterator[Stmt]:
    """Yield the statements of an iteration with variables in place of elements."""

    def variable(node: Expr) -> Expr | None:
        key = _key(node.attr, e.index_of(node), row) if node.op == "load" else None
        var = None if key is None else kept.get(key)
        return None if var is None else e.read(var)

    for s in body:
        replace(s, variable)
        key = _key(s.buffer, s.indices, row) if isinstance(s, Store) else None
        if key is None:
            yield s
        elif key[0] in temporary:
            yield Let(kept[key], s.value)
        else:
            yield Assign(kept[key], s.value)


def _lies_apart(key: _Key) -> bool:
    """Return whether an element of a row does not lie beside that of the next one."""
    buffer, at = key
    return any(
        not (n.is_const and n.attr == 1) for n in buffer.shape[at.index(None) + 1 :]
    )


def _elements(body: Sequence[_Simple], row: Var) -> dict[_Key, Expr]:
    """Return the elements of a row, each with its load, of the buffers that a body
    stores; none if it accesses others of them, too."""
    stored = {s.buffer for s in body if isinstance(s, Store)}
    elements: dict[_Key, Expr] = {}
    axes: dict[Buffer, int] = {}
    for s in body:
        for node in loaded(s):
            if node.attr in stored and e.condition_of(node) is not None:
                return {}
        for buffer, at in accessed(s):
            if buffer not in stored:
                continue
            key = _key(buffer, at, row)
            if key is None:
                return {}
            axis = key[1].index(None)
            if axes.setdefault(buffer, axis) != axis:
                return {}
            elements.setdefault(key, e.load(buffer, at))
    return elements


def _key(buffer: Buffer, at: Index, row: Var) -> _Key | None:
    """Return the element of a row at an index; None: it is not that row's alone, or not
    always the same one."""
    index = tuple([int(i.attr) if i.is_const else None for i in at])
    others = [i for i in at if not i.is_const]
    is_of_row = len(others) == 1 and others[0].op == "var" and others[0].attr is row
    return (buffer, index) if is_of_row else None
