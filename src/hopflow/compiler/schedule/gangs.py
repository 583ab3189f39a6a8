"""Loops over examples that take different ways become gangs: lanes under masks.

    for step1 in 0..n threads independent:
        var c2: f64 = x[step1]
        do:
        while c2 < 1.0:
            c2 = c2 * y[step1]
        out0[step1] = c2

becomes, where a gang has 32 lanes,

    for step1_gang in 0..(n + 31) / 32 threads independent:
        for step1_lane in 0..min(32, n - step1_gang * 32) gang 32 independent:
            let step1: i64 = step1_gang * 32 + step1_lane
            let step1_row0: f64 = y[step1]
            var c2: f64 = x[step1]
            do:
            while c2 < 1.0:
                c2 = c2 * step1_row0
            out0[step1] = c2

What a step reads of a row of its example is read before the first: in the lanes that
are on then it is the same.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hopflow import dtypes
from hopflow.compiler.divergence import Divergence
from hopflow.compiler.schedule.summary import Summary
from hopflow.compiler.schedule.threads import writes_rows
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Binding,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
    Trap,
    While,
)
from hopflow.loop_ir.walk import bodies, loaded, replace, same, statements

LARGEST: Final = 600
"""Instructions of an iteration. A gang has them several times over."""
_STATEMENTS = (Let, Declare, Assign, Accumulate, Store, For, While, If, Trap)
"""Those that lanes may run."""


def gangs(body: list[Stmt], target: Target) -> None:
    """Bind such loops in a list of statements, and in all lists within it, in place."""
    _bind(body, target)


def _bind(body: list[Stmt], target: Target) -> bool:
    """The same; whether there are any."""
    found = False
    for k, s in enumerate(body):
        if isinstance(s, For) and s.binding.kind == "vector":
            continue
        within = [_bind(inner, target) for inner in bodies(s)]
        found = found or any(within)
        if isinstance(s, For) and s.independent and not any(within):
            width = _width(s, target)
            if width > 1:
                body[k] = _gang(s, width)
                found = True
    return found


# --- which loops ----------------------------------------------------------------------


def _width(loop: For, target: Target) -> int:
    """The lanes of the gangs that a loop becomes; 1: none."""
    inside = list(statements(loop.body))
    if not all(isinstance(s, _STATEMENTS) for s in inside):
        return 1
    if not any(isinstance(s, While) or _counts(s) for s in inside):
        return 1
    summary = Summary.of(loop)
    if summary.size > LARGEST or summary.changed or not writes_rows(loop):
        return 1
    if any(map(_sums, inside)) or not _may_run_again(inside, summary):
        return 1
    divergence = Divergence(loop)
    width = target.gang_width(loop, divergence) if divergence.diverges else 1
    if loop.extent.is_const:
        while width > 1 and width >= 2 * loop.extent.attr:
            width //= 2
    return width


def _counts(s: Stmt) -> bool:
    return isinstance(s, For) and s.binding.kind == "serial"


def _sums(s: Stmt) -> bool:
    """Whether `s` adds floats in an order that comes of its vectors."""
    return (
        isinstance(s, For)
        and s.binding.kind == "vector"
        and any(isinstance(x, Accumulate) and x.var.dtype.kind == "f" for x in s.body)
    )


def _may_run_again(inside: Sequence[Stmt], summary: Summary) -> bool:
    """Whether an iteration that was stopped by another lane's trap may run once more:
    it does not read what it has written."""
    if not any(isinstance(s, Trap) for s in inside):
        return True
    read = {node.attr for s in inside for node in loaded(s)}
    return read.isdisjoint(summary.stored)


# --- what they become -----------------------------------------------------------------


def _gang(loop: For, width: int) -> For:
    """The loop, whose iterations are lanes."""
    rows = _rows(loop)
    _count_together(loop)
    if loop.binding.kind != "threads":
        return For(
            loop.var, loop.extent, [*rows, *loop.body], True, Binding("gang", width)
        )
    number = Var(f"{loop.var.name}_gang", dtypes.int64)
    lane = Var(f"{loop.var.name}_lane", dtypes.int64)
    first = e.mul(e.read(number), e.index(width))
    extent = e.binary("min", e.index(width), e.sub(loop.extent, first))
    own = Let(loop.var, e.add(first, e.read(lane)))
    inner = For(lane, extent, [own, *rows, *loop.body], True, Binding("gang", width))
    count = e.div(e.add(loop.extent, e.index(width - 1)), e.index(width))
    return For(number, count, [inner], True, loop.binding)


def _count_together(loop: For) -> None:
    """Count the steps that lanes have made together in variables of their own: those
    are the same in all lanes, and only what is read after the loop differs.

        var c2: i64 = 0                        var c2: i64 = 0
        do:                                    var c2_all: i64 = 0
        while y3 > x4 and c2 < 10:             do:
            ...                         ->     while y3 > x4 and c2_all < 10:
            c2 = c2 + 1                            ...
        out0[lane1] = c2                           c2 = c2_all + 1
                                                   c2_all = c2_all + 1
                                               out0[lane1] = c2
    """
    divergence = Divergence(loop)
    changes = Counter(
        s.var for s in statements(loop.body) if isinstance(s, Assign | Accumulate)
    )
    pending = [loop.body]
    while pending:
        body = pending.pop()
        declared: dict[Var, Expr] = {}
        for s in list(body):
            pending += bodies(s)
            if isinstance(s, Declare) and divergence.is_uniform(s.value):
                declared[s.var] = s.value
            if isinstance(s, While) and divergence.is_divergent(s):
                counters = [
                    x
                    for x in s.body
                    if isinstance(x, Assign)
                    and x.var in declared
                    and x.var in divergence.varying
                    and changes[x.var] == 1
                    and _counts_on(x, s.body)
                ]
                for counter in counters:
                    together = Var(f"{counter.var.name}_all", counter.var.dtype)
                    _count_in(s, counter, together)
                    first = Declare(together, declared[counter.var])
                    body.insert(body.index(s), first)


def _counts_on(s: Assign, body: Sequence[Stmt]) -> bool:
    """Whether `s` adds a constant to a variable."""
    values = {x.var: x.value for x in body if isinstance(x, Let)}
    value = s.value
    if value.op == "var":
        value = values.get(value.attr, value)
    if value.op != "add":
        return False
    x, y = value.args
    return x.op == "var" and x.attr is s.var and y.is_const


def _count_in(loop: While, counter: Assign, together: Var) -> None:
    """Count in `together` what `counter` does, too, and read only that in the loop."""

    def renamed(node: Expr) -> Expr | None:
        if node.op == "var" and node.attr is counter.var:
            return e.read(together)
        return None

    for s in statements([loop]):
        replace(s, renamed)
    at = loop.body.index(counter) + 1
    loop.body.insert(at, Assign(together, counter.value))


def _rows(loop: For) -> list[Stmt]:
    """Read before the loops within `loop` what each of their steps would read of the
    same row."""
    stored = Summary.of(loop).stored
    found: list[tuple[Expr, Let]] = []
    for outer in loop.body:
        inside = [s for inner in bodies(outer) for s in statements(inner)]
        for s in (outer, *inside) if isinstance(outer, While) else inside:
            replaced: dict[Expr, Expr] = {}
            for node in loaded(s):
                if _is_row(node, loop) and node.attr not in stored:
                    replaced[node] = _row(node, loop, found)
            if replaced:
                replace(s, replaced.get)
    return [let for _, let in found]


def _row(node: Expr, loop: For, found: list[tuple[Expr, Let]]) -> Expr:
    for known, let in found:
        if same(known, node):
            return e.read(let.var)
    var = Var(f"{loop.var.name}_row{len(found)}", node.dtype)
    found.append((node, Let(var, node)))
    return e.read(var)


def _is_row(node: Expr, loop: For) -> bool:
    """Whether a load is of an element that there is for each iteration."""
    buffer: Buffer = node.attr
    if e.condition_of(node) is not None:
        return False
    own = 0
    for i, extent in zip(e.index_of(node), buffer.shape, strict=True):
        if i.op == "var" and i.attr is loop.var and same(extent, loop.extent):
            own += 1
        elif not (i.is_const and extent.is_const and 0 <= i.attr < extent.attr):
            return False
    return own > 0
