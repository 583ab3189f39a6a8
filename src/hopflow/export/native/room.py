"""How much of a workspace a program needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from hopflow.compiler.cpu.emit import is_on_stack
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.reuse import ALIGNMENT, reuse
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Invoke, Let, Program


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of the workspace that a program needs.

    is_exact   whether it never needs more; else a run may, whose data tell how much
    """

    total: Expr
    is_exact: bool


def room(program: Program, target: CpuTarget) -> Room:
    """Return what a program needs, over its sizes."""
    arena, total = reuse(program), e.index(0)
    if not is_on_stack(arena, target):
        total = rounded(arena.total)
    most, is_exact = e.index(0), not walk.allocated(program.body)
    definitions = {
        s.var: s.value for s in walk.statements(program.body) if isinstance(s, Let)
    }
    sizes = set(program.sizes)
    for call in walk.statements(program.body):
        if not isinstance(call, Invoke):
            continue
        inner = room(call.function, target)
        given = [_closed(size, sizes, definitions) for size in call.sizes]
        arguments = dict(zip(call.function.sizes, given, strict=True))
        needs = _substituted(inner.total, arguments)
        is_exact = is_exact and inner.is_exact and needs is not None
        most = e.binary("max", most, e.index(0) if needs is None else needs)
    return Room(e.add(total, most), is_exact)


def rounded(total: Expr) -> Expr:
    """Return how much the workspace is asked for, for an array of so many bytes."""
    return e.binary("and", e.add(total, e.index(ALIGNMENT)), e.index(-ALIGNMENT))


def _closed(
    value: Expr, sizes: set[Var], definitions: Mapping[Var, Expr]
) -> Expr | None:
    """Return an expression over the sizes of a program; None: it depends on data."""
    for node in walk.nodes(value):
        if node.op == "load":
            return None
        if node.op == "var" and node.attr not in sizes:
            inner = definitions.get(node.attr)
            closed = None if inner is None else _closed(inner, sizes, definitions)
            if closed is None:
                return None
            value = replaced(value, {node.attr: closed})
    return value


def _substituted(value: Expr, given: Mapping[Var, Expr | None]) -> Expr | None:
    """Return an expression with what its variables are; None: one is unknown."""
    named = {n.attr for n in walk.nodes(value) if n.op == "var"}
    known = {var: x for var, x in given.items() if x is not None}
    return replaced(value, known) if named <= known.keys() else None


def replaced(value: Expr, given: Mapping[Var, Expr]) -> Expr:
    """Return an expression with others in place of variables."""
    return e.rewrite(value, lambda n: given.get(n.attr) if n.op == "var" else None)
