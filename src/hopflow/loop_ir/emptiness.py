"""Loops that do nothing, whatever their extents, because they write to empty memory."""

from collections.abc import Iterator, Sequence

from hopflow.loop_ir.expr import BINARY, COMPARE, UNARY, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Call,
    Copy,
    Declare,
    For,
    Let,
    Ref,
    Stmt,
    Store,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.walk import bodies, nodes, same, statements

_PURE = UNARY | BINARY | COMPARE | {"const", "var", "select", "cast"}


def needed(loop: For) -> list[Expr] | None:
    """Return the symbolic extents, computable before `loop`, that must all be positive
    for it to have an effect. None if it has none in any case."""
    definitions = [s for s in statements([loop]) if isinstance(s, Let | Declare | For)]
    local = {s.var for s in definitions}
    changed = local | {
        s.var for s in statements(loop.body) if isinstance(s, Assign | Accumulate)
    }
    common: list[Expr] | None = None
    for effect in _effects(loop, (), local):
        extents = [n for n in effect if _is_computable(n, changed)]
        if any(n.is_const and n.attr <= 0 for n in extents):
            continue
        if common is None:
            common = [n for n in extents if not n.is_const]
        common = [n for n in common if any(same(n, other) for other in extents)]
        if not common:
            break
    return common


def _effects(
    s: Stmt, extents: tuple[Expr, ...], local: set[Var]
) -> Iterator[Sequence[Expr]]:
    """Yield for each effect of `s` the extents of the enclosing loops and of the buffer
    that it writes."""
    match s:
        case For():
            extents = (*extents, s.extent)
        case Let() | Declare():
            return
        case Assign() | Accumulate():
            if s.var not in local:
                yield extents
        case Store():
            yield (*extents, *s.buffer.shape)
        case Copy():
            yield (*extents, *s.target.shape)
        case Call(site=None):
            for position in ROUTINES[s.routine].writes:
                ref = s.args[position]
                assert isinstance(ref, Ref)
                yield (*extents, *ref.buffer.shape)
        case _ if not bodies(s):
            yield extents
    for body in bodies(s):
        for inner in body:
            yield from _effects(inner, extents, local)


def _is_computable(extent: Expr, changed: set[Var]) -> bool:
    """Return whether an extent can be computed before the loop: it reads no memory and
    no variable that is `changed`."""
    for node in nodes(extent):
        if node.op not in _PURE or (node.op == "var" and node.attr in changed):
            return False
        if node.op in ("div", "rem") and not (
            node.args[1].is_const and node.args[1].attr
        ):
            return False
    return True
