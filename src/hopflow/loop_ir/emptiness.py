"""Which loops do nothing, whatever they count, because what they write to is empty."""

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
    """The symbolic extents, known before `loop`, without each of which it does nothing;
    None if it does nothing in any case."""
    own = [s for s in statements([loop]) if isinstance(s, Let | Declare | For)]
    local = {s.var for s in own}
    changed = local | {
        s.var for s in statements(loop.body) if isinstance(s, Assign | Accumulate)
    }
    common: list[Expr] | None = None
    for effect in _effects(loop, (), local):
        known = [n for n in effect if _is_known(n, changed)]
        if any(n.is_const and n.attr <= 0 for n in known):
            continue
        if common is None:
            common = [n for n in known if not n.is_const]
        common = [n for n in common if any(same(n, other) for other in known)]
        if not common:
            break
    return common


def _effects(
    s: Stmt, extents: tuple[Expr, ...], local: set[Var]
) -> Iterator[Sequence[Expr]]:
    """Of each thing that `s` does, the extents around it and of what it writes to."""
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


def _is_known(extent: Expr, changed: set[Var]) -> bool:
    """Whether it can be computed before what changes `changed` and the memory."""
    for node in nodes(extent):
        if node.op not in _PURE or (node.op == "var" and node.attr in changed):
            return False
        if node.op in ("div", "rem") and not (
            node.args[1].is_const and node.args[1].attr
        ):
            return False
    return True
