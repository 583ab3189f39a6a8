"""Store-to-load forwarding: straight-line code reads no element that it has stored.

y[step, i] = a                           let y_0 = a
s[i, 0] = y[step, i] * 2.0       ->      y[step, i] = y_0
                                         s[i, 0] = y_0 * 2.0
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Assign, Let, Stmt, Store
from hopflow.loop_ir.walk import loaded, names, replace, same_shape

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
    new: list[S | Let] = []

    def stored(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in latest:
            return None
        at, value = latest[node.attr]
        is_same = e.condition_of(node) is None and same_shape(at, e.index_of(node))
        return e.read(value) if is_same else None

    for number, s in enumerate(body):
        replace(s, stored)
        if isinstance(s, Assign):
            changed = [b for b, (at, _) in latest.items() if _names(at, s.var)]
            for buffer in changed:
                del latest[buffer]
        if isinstance(s, Store):
            latest.pop(s.buffer, None)
            if s.buffer in read and not stays(s.buffer, s.indices):
                value = Var(f"{s.buffer.name}_{name}_stored{number}", s.value.dtype)
                new.append(Let(value, s.value))
                s.value = e.read(value)
                latest[s.buffer] = s.indices, value
        new.append(s)
    return new


def _names(at: Index, var: Var) -> bool:
    return any(names(i, {var}) for i in at)
