"""Loop unswitching: a test that is the same in all iterations is made once.

    for i0 in 0..n vector 8 independent:               if t1:
        y[i0] = select(t1, x[i0] * 2.0, y[i0])  ->         for i0 in 0..n vector 8 ...:
                                                               y[i0] = x[i0] * 2.0

Each case has a copy of the loop, or of the nest whose iterations all make the test,
without what only the other case needs; variables that one case alone reads are computed
there. A store of what its element holds already is
dropped, and with it the loops that do nothing else.

The pass `branches` does the same for whole values, before loops are merged: there a
case must save more, since loops are not merged across a branch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import nest_copy
from hopflow.compiler.target import Target
from hopflow.dtypes import bool_
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    For,
    If,
    Let,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.walk import (
    bodies,
    expressions,
    nodes,
    perfect_nest,
    same,
    same_shape,
    statements,
)

SHARE: Final = 2
"""A case must save at least one part in so many of the work: the rest is duplicated."""
DEAR: Final = 8
"""Instructions of an element that a case without fewer stores must save: fewer take no
longer than reading and writing memory."""
LEAST: Final = 64
"""Vector instructions that a case must save in all: a mispredicted test costs some
dozens."""
UNKNOWN: Final = 64
"""The assumed number of vectors of a loop whose length only the run knows."""
LARGEST: Final = 256
"""Instructions of a body that is duplicated, at most."""
DEEPEST: Final = 2
"""At most so many nested branches are made of one loop."""
TESTS: Final = 4
"""At most so many tests of one loop are tried."""


def unswitch(program: Program, _target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    _edit(program.body, Counter())


def _edit(body: list[Stmt], after: Counter[Var]) -> None:
    """Edit a body, and those in it; `after` counts reads of its variables elsewhere."""
    edited: list[Stmt] = []
    for statement in body:
        if isinstance(statement, For):
            edited += _unswitched(statement, DEEPEST)
        else:
            edited.append(statement)
    if any(isinstance(s, If) for s in edited) and len(edited) > 1:
        edited = _sink(edited, after)
    body[:] = edited
    for statement in body:
        for inner in bodies(statement):
            elsewhere: Counter[Var] = Counter()
            if isinstance(statement, While) and inner is statement.head:
                elsewhere = _reads([statement]) - _reads(inner)
            _edit(inner, elsewhere)


def _unswitched(loop: For, depth: int) -> list[Stmt]:
    """Return the statements in place of a loop."""
    nest = perfect_nest(loop)
    body = nest[-1].body
    if not (depth and nest[-1].independent and _is_straight(body)):
        return [loop]
    if _work(body) > LARGEST:
        return [loop]
    for test in _tests(nest):
        sides = [_side(body, test, holds=holds) for holds in (True, False)]
        if not any(_pays(nest[-1], side) for side in sides):
            continue
        yes, no = (
            _unswitched(nest_copy(nest, side, f"_{k}"), depth - 1) if side else []
            for k, side in enumerate(sides)
        )
        return [If(test, yes, no) if yes else If(e.unary("not", test), no)]
    return [loop]


def _sink(body: Sequence[Stmt], after: Counter[Var]) -> list[Stmt]:
    """Return a body in which variables before a branch, that only one of its cases
    reads, are computed there (code sinking)."""
    everywhere = _reads(body) + after
    left: list[Stmt] = []
    lets: list[Let] = []  # the last ones, which the next branch may take
    for s in body:
        if isinstance(s, Let):
            lets.append(s)
            continue
        if isinstance(s, If):
            for case in (s.then, s.else_):
                lets, moved = _parted(lets, _reads(case), everywhere)
                case[:0] = moved
        left += [*lets, s]
        lets = []
    return left + lets


def _parted(
    lets: Sequence[Let], reads: Counter[Var], everywhere: Counter[Var]
) -> tuple[list[Let], list[Let]]:
    """Return the variables that others read, too, and those that one case alone reads,
    perhaps by variables among these."""
    kept: list[Let] = []
    moved: list[Let] = []
    for s in reversed(lets):
        if reads[s.var] and reads[s.var] == everywhere[s.var]:
            moved.append(s)
            reads.update(_reads([s]))
        else:
            kept.append(s)
    return kept[::-1], moved[::-1]


def _reads(body: Sequence[Stmt]) -> Counter[Var]:
    """Count how often a body reads each variable."""
    roots = [x for s in statements(body) for x in expressions(s)]
    return Counter(n.attr for x in roots for n in nodes(x) if n.op == "var")


def _is_straight(body: Sequence[Stmt]) -> bool:
    return all(isinstance(s, Let | Store | Accumulate) for s in body)


def _work(body: Sequence[Stmt]) -> int:
    """Return about how many instructions an iteration takes."""
    work = sum(weight(n) for s in body for n in nodes(*expressions(s)))
    return work + _stores(body)


def _stores(body: Sequence[Stmt]) -> int:
    return sum(isinstance(s, Store) for s in body)


def _pays(loop: For, side: Sequence[Stmt]) -> bool:
    """Return whether a case saves enough of the work of the innermost loop."""
    whole, vectors = _work(loop.body), UNKNOWN
    saved = whole - _work(side)
    if loop.extent.is_const:
        vectors = -(-loop.extent.attr // loop.binding.width)
    is_dear = saved >= DEAR or _stores(side) < _stores(loop.body)
    return is_dear and saved * SHARE >= whole and saved * vectors >= LEAST


# --- the tests of a nest --------------------------------------------------------------


def _tests(nest: Sequence[For]) -> list[Expr]:
    """Return tests by which a nest selects, and which all of its iterations share."""
    body = nest[-1].body
    changed = {loop.var for loop in nest}
    changed.update(s.var for s in body if isinstance(s, Let | Accumulate))
    stored = {s.buffer for s in body if isinstance(s, Store)}
    tests: list[Expr] = []
    for statement in body:
        for node in nodes(*expressions(statement)):
            for test in _parts(node.args[0]) if node.op == "select" else ():
                is_new = not any(same(test, other) for other in tests)
                if not is_new or _compares_trip_count(test, nest):
                    continue
                if _is_invariant(test, changed, stored):
                    tests.append(test)
    return tests[:TESTS]


def _parts(test: Expr) -> Iterator[Expr]:
    """Yield the tests that a test combines."""
    if test.op in ("and", "or", "not"):
        for part in test.args:
            if part.dtype is bool_:
                yield from _parts(part)
    elif not test.is_const:
        yield test


def _compares_trip_count(test: Expr, nest: Sequence[For]) -> bool:
    """Return whether a test compares the length of a loop, as that of a divisor which
    is one: it would tell whether there is anything to do."""
    return any(same(x, loop.extent) for x in test.args for loop in nest)


def _is_invariant(test: Expr, changed: set[Var], stored: set[Buffer]) -> bool:
    """Return whether a test is the same in all iterations, and may be made if there are
    none."""
    for node in nodes(test):
        if node.op == "var" and node.attr in changed:
            return False
        if node.op in ("div", "rem") and not node.args[1].is_const:
            return False  # by 0, if there are no iterations
        if node.op == "load" and (node.attr in stored or not _is_in_range(node)):
            return False
    return True


def _is_in_range(load: Expr) -> bool:
    """Return whether an element is surely one of its buffer."""
    at = e.index_of(load)
    return e.condition_of(load) is None and all(
        i.is_const and extent.is_const and 0 <= i.attr < extent.attr
        for i, extent in zip(at, load.attr.shape, strict=True)
    )


# --- cases ----------------------------------------------------------------------------


def _side(body: Sequence[Stmt], test: Expr, *, holds: bool) -> list[Stmt]:
    """Return what is left of a body where a test holds, or does not."""
    values: dict[Expr, Expr] = {}
    constant = e.const(holds, test.dtype)

    def value(root: Expr) -> Expr:
        for node in nodes(root):
            if node not in values:
                args = tuple([values[a] for a in node.args])
                is_test = node.op == test.op and same(node, test)
                values[node] = constant if is_test else e.with_args(node, args)
        return values[root]

    side: list[Stmt] = []
    for s in body:
        match s:
            case Let(var, x):
                side.append(Let(var, value(x)))
            case Accumulate(var, combine, x):
                side.append(Accumulate(var, combine, value(x)))
            case Store(buffer, at, x):
                side.append(Store(buffer, tuple(map(value, at)), value(x)))
    return _without_dead_code(_without_redundant_stores(side))


def _without_redundant_stores(body: Sequence[Stmt]) -> list[Stmt]:
    """Return a body without the stores of what an element holds already."""
    left: list[Stmt] = []
    held: dict[Var, Expr] = {}  # by variable, the load whose value it still has
    for s in body:
        if isinstance(s, Let):
            value = _held(s.value, held)
            if value is not None:
                held[s.var] = value
        elif isinstance(s, Store):
            value = _held(s.value, held)
            if value is not None and _is_at(value, s):
                continue
            held = {v: x for v, x in held.items() if x.attr is not s.buffer}
        left.append(s)
    return left


def _is_at(load: Expr, s: Store) -> bool:
    return load.attr is s.buffer and same_shape(e.index_of(load), s.indices)


def _held(value: Expr, held: dict[Var, Expr]) -> Expr | None:
    """Return the load whose value an expression is, if its element is unchanged."""
    if value.op == "var":
        return held.get(value.attr)
    return value if value.op == "load" and e.condition_of(value) is None else None


def _without_dead_code(body: Sequence[Stmt]) -> list[Stmt]:
    """Return a body without the variables that nothing reads."""
    left: list[Stmt] = []
    read: set[Var] = set()
    for s in reversed(body):
        if isinstance(s, Let) and s.var not in read:
            continue
        left.append(s)
        read.update(n.attr for n in nodes(*expressions(s)) if n.op == "var")
    return left[::-1]
