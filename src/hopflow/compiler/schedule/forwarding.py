"""Store-to-load forwarding: straight-line code reads no element that it has stored.

    y[step, i] = a                           let y_0 = a
    s[i] = y[step, i] * 2.0          ->      y[step, i] = y_0
    s[i] = s[i] + 1.0                        let s_1 = y_0 * 2.0
                                             let s_2 = s_1 + 1.0
                                             s[i] = s_2

Stores are dead if the element is stored again before anything reads its buffer.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Assign, Let, Stmt, Store
from hopflow.loop_ir.walk import loaded, names, nodes, replace, same_shape

S = TypeVar("S", bound=Stmt)


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
    read = {node.attr for s in body for node in loaded(s)}
    latest: dict[Buffer, tuple[Index, Var]] = {}
    unread: dict[Buffer, Store] = {}
    dead: set[Store] = set()
    new: list[S | Let] = []

    def stored(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in latest:
            return None
        at, value = latest[node.attr]
        is_same = e.condition_of(node) is None and same_shape(at, e.index_of(node))
        return e.read(value) if is_same else None

    for number, s in enumerate(body):
        replace(s, stored)
        for node in loaded(s):
            unread.pop(node.attr, None)
        for buffer in [b for b, (at, _) in latest.items() if _moves(s, at)]:
            del latest[buffer]
            unread.pop(buffer, None)
        if isinstance(s, Store):
            latest.pop(s.buffer, None)
            before = unread.pop(s.buffer, None)
            if before is not None and same_shape(before.indices, s.indices):
                dead.add(before)
            if s.buffer in read and not stays(s.buffer, s.indices):
                value = Var(f"{s.buffer.name}_{name}_stored{number}", s.value.dtype)
                new.append(Let(value, s.value))
                s.value = e.read(value)
                latest[s.buffer] = s.indices, value
                unread[s.buffer] = s
        new.append(s)
    return [s for s in new if s not in dead]


def _moves(s: Stmt, at: Index) -> bool:
    """Return whether an index is another one after a statement."""
    if isinstance(s, Assign):
        return any(names(i, {s.var}) for i in at)
    read = [node.attr for node in nodes(*at) if node.op == "load"]
    return isinstance(s, Store) and s.buffer in read
