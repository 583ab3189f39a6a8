"""Arrays of a few elements that the steps of a loop keep in variables.

                                        var kept0: f64 = s[0]
    for step in 0..20:                  var kept1: f64 = s[1]
        for i in 0..2 vector 2 ...:     for step in 0..20:
            t[i] = a[i] * s[1 - i] ->       let t_0: f64 = a[0] * kept1
        for j in 0..2 vector 2 ...:         let t_1: f64 = a[1] * kept0
            s[j] = t[j] + x[step, j]        kept0 = t_0 + x[step, 0]
                                            kept1 = t_1 + x[step, 1]
                                        s[0] = kept0
                                        s[1] = kept1

Each step would wait for what the one before has stored: a processor forwards a store to
a load only if the load is a part of it, which vectors of what was stored element by
element, or of other elements, are not. The loops over elements are written out. Where
that is too much, as for products of matrices of four rows, only the loops over rows
are: LLVM then keeps their vectors in registers.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple, TypeGuard

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.schedule.copies import copied, substituted
from hopflow.compiler.schedule.expansion import Expansion
from hopflow.compiler.schedule.forwarding import forwarded
from hopflow.compiler.schedule.row_steps import (
    Key,
    Simple,
    key_of,
    on_variables,
    temporaries,
)
from hopflow.compiler.target import Target
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    For,
    Let,
    Program,
    Stmt,
    Store,
    Swap,
)
from hopflow.loop_ir.walk import (
    bodies,
    expressions,
    is_order_free,
    loaded,
    nodes,
    statements,
    uses,
)

SHORT: Final = 16
"""Steps of a loop that is written out, at most."""
MOST: Final = 24
"""Elements in variables, at most."""
LARGEST: Final = 1024
"""Operations of a step that is written out, at most."""
WAIT: Final = 24
"""The operations that a processor could execute while a loop waits for what the one
before has stored."""
LONGEST: Final = 256
"""Instructions of vectors of rows that are written out, at most."""
AT_ONCE: Final = 2
"""Operations on numbers that a processor begins at once."""


def short_states(program: Program, target: Target) -> None:
    """Edit a program in place, without the functions that it calls."""
    if target.has_gangs:
        _edit(program.body, program)


def _edit(body: list[Stmt], program: Program) -> None:
    at = 0
    while at < len(body):
        s = body[at]
        for inner in bodies(s):
            _edit(inner, program)
        found: list[Stmt] | None = None
        if isinstance(s, For) and not s.independent:
            found = _in_variables(s, program)
            if found is None:
                _write_out(s)
        body[at : at + 1] = found or [s]
        at += len(found or [s])


def _in_variables(steps: For, program: Program) -> list[Stmt] | None:
    """Return the statements in place of a loop over steps; None: it stays."""
    loops = [s for s in steps.body if isinstance(s, For)]
    if not loops or not all(map(_is_short, loops)):
        return None
    step = _written_out(steps)
    if step is None or not _pays(steps.body, step):
        return None
    accesses = [access for s in step for access in _accesses(s)]
    others = {access.buffer for access in accesses if access.key is None}
    state = {access.buffer for access in accesses if access.is_store} - others
    carried = _carried(access for access in accesses if access.buffer in state)
    if not carried or len(carried) > MOST:
        return None
    name = steps.var.name
    kept = {
        key: Var(f"{name}_kept{number}", key[0].dtype)
        for number, key in enumerate(carried)
    }
    temporary = temporaries(steps, step, None, uses(program.body))

    def is_variable(buffer: Buffer, at: Index) -> bool:
        return buffer in temporary or key_of(buffer, at, None) in kept

    step = forwarded(step, name, is_variable)
    written = {key_of(s.buffer, s.indices, None) for s in step if isinstance(s, Store)}
    steps.body = [*on_variables(step, None, name, kept, temporary)]
    program.arena = [b for b in program.arena if b not in temporary]
    return [
        *(Declare(var, _element(key)) for key, var in kept.items()),
        steps,
        *(
            Store(key[0], e.index_of(_element(key)), e.read(var))
            for key, var in kept.items()
            if key in written
        ),
    ]


def _write_out(steps: For) -> None:
    """Write out the loops over rows of short arrays in a step, in place: LLVM keeps the
    vectors of such an array in registers, if they lie at constant places."""
    nests = [s for s in steps.body if _is_nest(s)]
    if not nests or not all(map(_is_small_nest, nests)):
        return
    if sum(map(_vectors, nests)) <= LONGEST:
        steps.body = _rows(steps.body, {}, "")


def _is_nest(s: Stmt) -> TypeGuard[For]:
    return isinstance(s, For) and any(isinstance(x, For) for x in s.body)


def _is_small_nest(nest: For) -> bool:
    """Return whether a nest has few steps of loops over elements and straight-line
    code, and writes short arrays only."""
    inside = [*statements([nest])]
    return (
        _is_short(nest)
        and all(
            isinstance(s, For | Let | Declare | Assign | Accumulate | Store)
            for s in inside
        )
        and not any(_is_nest(s) and s.binding.kind != "serial" for s in inside)
        and all(_is_small(s.buffer) for s in inside if isinstance(s, Store))
    )


def _rows(body: Sequence[Stmt], values: dict[Var, Expr], suffix: str) -> list[Stmt]:
    """Return a body whose loops over rows are written out."""
    rows: list[Stmt] = []
    for s in body:
        if not isinstance(s, For):
            rows.append(copied(s, values, suffix) if suffix else s)
        elif _is_nest(s):
            for k in range(s.extent.attr):
                own = values | {s.var: e.index(k)}
                rows += _rows(s.body, own, f"{suffix}_{k}")
        elif suffix:
            var = Var(f"{s.var.name}{suffix}", s.var.dtype)
            inner = _rows(s.body, values | {s.var: e.read(var)}, suffix)
            rows.append(For(var, s.extent, inner, True, s.binding, s.nodes))
        else:
            rows.append(s)
    return rows


def _is_short(loop: For) -> bool:
    """Return whether a loop over elements has few steps, with those in it."""
    if not (loop.independent and loop.extent.is_const and loop.extent.attr <= SHORT):
        return False
    inner = [s for s in loop.body if isinstance(s, For)]
    return all(map(_is_short, inner))


def _written_out(steps: For) -> list[Simple] | None:
    """Return what a step does as straight-line code; None: it is long, or something
    else."""
    if sum(map(_length, steps.body)) > LARGEST:
        return None
    expansion = Expansion({steps.var: steps.extent})
    for s in steps.body:
        if isinstance(s, Swap):
            exchanged = _exchanged(s)
            if exchanged is None:
                return None
            expansion.statements += exchanged
        elif isinstance(s, Assign) and s.var not in expansion.accumulators:
            value = substituted(s.value, expansion.values)
            expansion.statements.append(Assign(s.var, value))
        elif not all(map(expansion.add, _with_sums(s))):
            return None
    found = [s for s in expansion.statements if isinstance(s, Simple)]
    return found if len(found) == len(expansion.statements) else None


def _with_sums(s: Stmt) -> list[Stmt]:
    """Return what a vector loop adds up, in the order in which it combines its lanes:
    the second half is added to the first one, and so on. So is what follows on one
    vector: it is added in the lanes. Other statements stay."""
    if not isinstance(s, For) or s.binding.kind != "vector":
        return [s]
    count, sums = s.extent.attr, [x for x in s.body if isinstance(x, Accumulate)]
    if not all(isinstance(x, Let | Store | Accumulate) for x in s.body):
        return [s]
    if all(map(is_order_free, s.body)) or count > 2 * s.binding.width:
        return [s]
    lanes: dict[Accumulate, list[Expr]] = {x: [] for x in sums}
    straight: list[Stmt] = []
    for k in range(count):
        values = {s.var: e.index(k)}
        for x in s.body:
            if isinstance(x, Accumulate):
                lane = Var(f"{x.var.name}_lane{k}", x.var.dtype)
                straight.append(Let(lane, substituted(x.value, values)))
                lanes[x].append(e.read(lane))
            else:
                straight.append(copied(x, values, f"_{k}"))
    return straight + [
        Accumulate(x.var, x.combine, _tree(x.combine, lanes[x])) for x in sums
    ]


def _tree(combine: str, lanes: list[Expr]) -> Expr:
    while len(lanes) > 1:
        half = 1 << ((len(lanes) - 1).bit_length() - 1)
        others = dict(enumerate(lanes[half:]))
        lanes = [
            e.binary(combine, x, others[k]) if k in others else x
            for k, x in enumerate(lanes[:half])
        ]
    return lanes[0]


def _length(s: Stmt) -> int:
    """Return the operations of a statement, its loops written out."""
    if isinstance(s, For):
        trips: int = s.extent.attr if s.extent.is_const else LARGEST
        return trips * sum(map(_length, s.body))
    operations = nodes(*expressions(s)[-1:])
    return sum(weight(n) for n in operations if n.op not in ("load", "const", "var"))


def _is_small(buffer: Buffer) -> bool:
    """Return whether an array has so few elements that they may be variables."""
    shape = buffer.shape
    return all(n.is_const for n in shape) and prod(n.attr for n in shape) <= MOST


def _exchanged(swap: Swap) -> list[Stmt] | None:
    """Return the assignments of elements in place of an exchange of memory; None: there
    are many elements."""
    shape = swap.a.shape
    if not _is_small(swap.a):
        return None
    before, after = list[Stmt](), list[Stmt]()
    for at in product(*[range(n.attr) for n in shape]):
        index = tuple(map(e.index, at))
        for target, source in ((swap.a, swap.b), (swap.b, swap.a)):
            name = "_".join([target.name, "from", source.name, *map(str, at)])
            value = Var(name, target.dtype)
            before.append(Let(value, e.load(source, index)))
            after.append(Store(target, index, e.read(value)))
    return before + after


def _pays(body: Sequence[Stmt], step: Sequence[Stmt]) -> bool:
    """Return whether straight-line code takes less time than the loops of a step."""
    loops = [s for s in body if isinstance(s, For)]
    others = [s for s in body if not isinstance(s, For)]
    work = sum(map(_vectors, loops)) + sum(map(_length, others)) / AT_ONCE
    return sum(map(_length, step)) / AT_ONCE <= work + WAIT * len(loops)


def _vectors(s: Stmt) -> float:
    """Return about how many instructions the vectors of a loop take."""
    if not isinstance(s, For):
        return _length(s)
    width = s.binding.width if s.binding.kind == "vector" else 1
    trips: int = -(-s.extent.attr // width)
    return trips * sum(map(_vectors, s.body))


# --- elements -------------------------------------------------------------------------


def _element(key: Key) -> Expr:
    buffer, at = key
    return e.load(buffer, tuple([e.index(i) for i in at if i is not None]))


class _Access(NamedTuple):
    """An access of an element, which is always the same one, or `key` is None."""

    buffer: Buffer
    key: Key | None
    is_store: bool = False


def _accesses(s: Stmt) -> Iterator[_Access]:
    """Yield the accesses of a statement, in their order."""
    for node in loaded(s):
        is_known = e.condition_of(node) is None
        key = key_of(node.attr, e.index_of(node), None) if is_known else None
        yield _Access(node.attr, key)
    if isinstance(s, Store):
        yield _Access(s.buffer, key_of(s.buffer, s.indices, None), is_store=True)


def _carried(accesses: Iterable[_Access]) -> dict[Key, None]:
    """Return the elements that a step reads before it stores them."""
    carried: dict[Key, None] = {}
    stored: set[Key] = set()
    for _, key, is_store in accesses:
        assert key is not None
        if is_store:
            stored.add(key)
        elif key not in stored:
            carried[key] = None
    return carried
