"""Store-to-load forwarding: straight-line code reads no element that it has stored.

    y[step, i] = a                           let y_0 = a
    s[i] = y[step, i] * 2.0          ->      y[step, i] = y_0
    s[i] = s[i] + 1.0                        let s_1 = y_0 * 2.0
                                             s[i] = s_1 + 1.0

A store is dead if its element is stored again, and nothing may load it in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Assign, For, Let, Program, Stmt, Store
from hopflow.loop_ir.walk import (
    base_and_constant,
    loaded,
    names,
    nodes,
    replace,
    same,
    same_shape,
    statements,
)

S = TypeVar("S", bound=Stmt)


def forward(program: Program, _target: Target) -> None:
    """Edit the vector loops of a program in place, without the functions that it calls:
    vectors would be read from memory that parts of them were just written to."""
    for s in statements(program.body):
        if not (isinstance(s, For) and s.binding.kind == "vector"):
            continue
        if all(isinstance(x, Let | Store) for x in s.body):
            s.body = [*forwarded(s.body, s.var.name)]


def forwarded(
    body: Sequence[S],
    name: str,
    stays: Callable[[Buffer, Index], bool] = lambda _buffer, _at: False,
) -> list[S | Let]:
    """Return statements of which each reads the variable of what one before has stored.

    Args:
        body: Statements without a body; they are changed.
        name: For the names of the variables.
        stays: Whether an element is read from memory nonetheless.
    """
    known: dict[Buffer, list[_Stored]] = {}
    all_stored: dict[Store, _Stored] = {}

    def stored(node: Expr) -> Expr | None:
        if node.op != "load" or e.condition_of(node) is not None:
            return None
        for one in known.get(node.attr, ()):
            if same_shape(one.at, e.index_of(node)):
                one.is_forwarded = True
                return e.read(one.value)
        return None

    for number, s in enumerate(body):
        replace(s, stored)
        for node in loaded(s):
            for one in known.get(node.attr, ()):
                one.is_loaded |= not _differ(one.at, e.index_of(node))
        if isinstance(s, Assign | Store):
            for buffer, elements in known.items():
                known[buffer] = [one for one in elements if not _moves(s, one.at)]
        if isinstance(s, Store):
            earlier = known.get(s.buffer, [])
            for one in earlier:
                one.is_dead = not one.is_loaded and same_shape(one.at, s.indices)
            known[s.buffer] = [one for one in earlier if _differ(one.at, s.indices)]
            if not (stays(s.buffer, s.indices) or _moves(s, s.indices)):
                value = Var(f"{s.buffer.name}_{name}_stored{number}", s.value.dtype)
                all_stored[s] = _Stored(s.indices, value)
                known[s.buffer].append(all_stored[s])
    new: list[S | Let] = []
    for s in body:
        found = all_stored.get(s) if isinstance(s, Store) else None
        if isinstance(s, Store) and found is not None and found.is_forwarded:
            new.append(Let(found.value, s.value))
            s.value = e.read(found.value)
        if found is None or not found.is_dead:
            new.append(s)
    return new


@dataclass
class _Stored:
    """An element that code has stored, and the variable of its value."""

    at: Index
    value: Var
    is_forwarded: bool = False
    is_loaded: bool = False
    is_dead: bool = False


def _differ(x: Index, y: Index) -> bool:
    """Return whether two indices are of different elements, whatever the run knows."""
    for i, j in zip(x, y, strict=True):
        (a, k), (b, m) = base_and_constant(i), base_and_constant(j)
        if k != m and same(a, b):
            return True
    return False


def _moves(s: Stmt, at: Index) -> bool:
    """Return whether an index is another one after a statement."""
    if all(i.is_const for i in at):
        return False
    if isinstance(s, Assign):
        return any(names(i, {s.var}) for i in at)
    read = [node.attr for node in nodes(*at) if node.op == "load"]
    return isinstance(s, Store) and s.buffer in read
