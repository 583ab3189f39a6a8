"""The arena: what is live at once lies apart, and what is not may share."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from hopflow.compiler.reuse import (
    ALIGNMENT,
    ArenaPlan,
    Interval,
    live_intervals,
    reuse,
)
from hopflow.dtypes import DType, bool_, float64, int64
from hopflow.errors import LoopIRError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.printer import format_expr
from hopflow.loop_ir.program import (
    SERIAL,
    Allocate,
    Binding,
    Call,
    Copy,
    For,
    If,
    Invoke,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
    While,
)

pytestmark = pytest.mark.slow

N, M = Var("n", int64), Var("m", int64)
X = Buffer("x", int64, (e.index(4),), "input")
Y = Buffer("y", int64, (e.index(4),), "output")
ALWAYS = e.compare("lt", e.read(N), e.index(100))


def arena(names: str, *shape: Any, dtype: DType = int64) -> list[Buffer]:
    """Buffers of one shape, [4] by default, given as ints and variables."""
    extents = tuple(
        e.index(s) if isinstance(s, int) else e.read(s) for s in shape or [4]
    )
    return [Buffer(name, dtype, extents, "arena") for name in names.split()]


def program(buffers: Sequence[Buffer], *body: Stmt) -> Program:
    return Program("f", [N, M], [X], [Y], [*buffers], [], [*body], [])


class Counter:
    """Fresh variables."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Var:
        self.count += 1
        return Var(f"i{self.count}", int64)


@pytest.fixture
def fresh() -> Counter:
    return Counter()


def add(target: Buffer, source: Buffer, fresh: Counter, amount: int = 1) -> For:
    """`target[i] = source[i] + amount` for all four i."""
    i = fresh()
    at = (e.read(i),)
    return For(
        i, e.index(4), [Store(target, at, e.add(e.load(source, at), e.index(amount)))]
    )


def repeat(fresh: Counter, *body: Stmt, binding: Binding = SERIAL) -> For:
    return For(fresh(), e.index(3), [*body], binding is not SERIAL, binding)


def offsets(planned: ArenaPlan) -> dict[str, Any]:
    return {b.name: o.attr if o.is_const else o for b, o in planned.offsets.items()}


def agree(f: Program) -> None:
    """The program runs the same in its planned arena as with memory for each buffer."""
    x = np.arange(4)
    planned = reuse(f)
    apart = run(f, [3, 2], [x])
    together = run(f, [3, 2], [x], offsets=planned.offsets)
    np.testing.assert_array_equal(together, apart)
    live = live_intervals(f)
    for a, b in combinations(live, 2):
        if live[a].overlaps(live[b]):
            (at_a, size_a), (at_b, size_b) = (place(planned, v) for v in (a, b))
            assert at_a + size_a <= at_b or at_b + size_b <= at_a, (a.name, b.name)


def place(planned: ArenaPlan, buffer: Buffer) -> tuple[int, int]:
    size = buffer.dtype.itemsize
    for extent in buffer.shape:
        size *= value(extent)
    return value(planned.offsets[buffer]), size


def value(expr: Expr) -> int:
    """An i64 expression for n = 3 and m = 2."""
    if expr.is_const:
        return int(expr.attr)
    if expr.op == "var":
        return {N: 3, M: 2}[expr.attr]
    x, y = (value(a) for a in expr.args)
    return {"add": x + y, "mul": x * y, "and": x & y, "max": max(x, y)}[expr.op]


# --- straight code --------------------------------------------------------------------


def test_what_is_dead_gives_its_place_to_what_comes_after(fresh: Counter) -> None:
    a, b, c = buffers = arena("a b c")
    f = program(
        buffers, add(a, X, fresh), add(b, a, fresh), add(c, b, fresh), Copy(Y, c)
    )
    assert offsets(reuse(f)) == {"a": 0, "b": 64, "c": 0}
    assert reuse(f).total.attr == 64 + 32
    agree(f)


def test_places_are_aligned_and_the_largest_goes_first(fresh: Counter) -> None:
    [small], [large] = arena("small", 4), arena("large", 9)
    [byte] = arena("byte", 3, dtype=bool_)
    f = program(
        [small, byte, large],
        add(small, X, fresh),
        *(Store(large, (e.index(i),), e.index(0)) for i in range(9)),
        *(Store(byte, (e.index(i),), e.const(True, bool_)) for i in range(3)),
        add(Y, small, fresh),
    )
    assert offsets(reuse(f)) == {"small": 128, "byte": 0, "large": 0}
    agree(f)


def test_what_is_never_used_takes_no_room() -> None:
    f = program(arena("a b"), Copy(Y, X))
    assert offsets(reuse(f)) == {"a": 0, "b": 0}
    assert reuse(f).total.attr == 0


def test_what_is_allocated_and_shared_memory_are_not_in_the_arena() -> None:
    shared = Buffer("tile", int64, (e.index(4),), "shared")
    [made] = arena("made", 4)
    f = program([shared, made], Allocate(made))
    assert offsets(reuse(f)) == {}


# --- loops ----------------------------------------------------------------------------


def test_what_an_iteration_defines_anew_is_live_in_it_only(fresh: Counter) -> None:
    a, b, c, d = buffers = arena("a b c d")
    f = program(
        buffers,
        add(d, X, fresh),
        repeat(
            fresh,
            add(a, d, fresh),
            add(b, a, fresh),
            add(c, b, fresh),
            add(d, c, fresh),
        ),
        Copy(Y, d),
    )
    assert offsets(reuse(f)) == {"a": 0, "b": 64, "c": 0, "d": 128}
    agree(f)


def test_a_carry_lives_through_the_whole_loop(fresh: Counter) -> None:
    a, b, c = buffers = arena("a b c")
    f = program(
        buffers,
        add(a, X, fresh),
        repeat(fresh, add(b, a, fresh), add(c, b, fresh), add(a, c, fresh)),
        add(Y, a, fresh),
    )
    live = live_intervals(f)
    assert live[a].overlaps(live[b])
    assert live[a].overlaps(live[c])
    agree(f)


def test_what_each_step_reads_lives_until_the_last(fresh: Counter) -> None:
    a, b = buffers = arena("a b")
    step = [add(Y, a, fresh), add(b, X, fresh), add(Y, b, fresh)]
    f = program(buffers, add(a, X, fresh), repeat(fresh, *step))
    assert offsets(reuse(f)) == {"a": 0, "b": 64}
    agree(f)


def only_first(loop: Var, *body: Stmt) -> If:
    return If(e.compare("eq", e.read(loop), e.index(0)), [*body])


def test_what_is_not_surely_defined_lives_through_the_outermost_loop(
    fresh: Counter,
) -> None:
    a, b, c = buffers = arena("a b c")
    outer, inner = fresh(), fresh()
    carried = only_first(outer, only_first(inner, add(a, X, fresh)))
    body: list[Stmt] = [carried, add(Y, a, fresh), add(b, X, fresh), add(Y, b, fresh)]
    last = [add(c, X, fresh), add(Y, c, fresh)]
    loop = For(outer, e.index(2), [For(inner, e.index(2), body), *last])
    f = program(buffers, loop)
    assert offsets(reuse(f)) == {"a": 0, "b": 64, "c": 64}
    agree(f)


def test_the_test_of_a_while_sees_what_the_iteration_before_left(
    fresh: Counter,
) -> None:
    a, b, c = buffers = arena("a b c")
    small = e.compare("lt", e.load(a, (e.index(0),)), e.index(9))
    loop = While([], small, [add(b, X, fresh), add(c, b, fresh), add(a, c, fresh, 9)])
    f = program(buffers, repeat(fresh, add(a, X, fresh), loop), add(Y, X, fresh))
    live = live_intervals(f)
    assert live[a].overlaps(live[b])
    assert live[a].overlaps(live[c])
    agree(f)


def test_a_head_defines_for_test_and_body(fresh: Counter) -> None:
    a, b = buffers = arena("a b")
    head: list[Stmt] = [add(a, X, fresh)]
    test = e.compare("gt", e.load(a, (e.index(0),)), e.index(5))
    f = program(
        buffers,
        repeat(fresh, While(head, test, [Copy(Y, a)]), add(b, X, fresh), Copy(Y, b)),
    )
    live = live_intervals(f)
    assert not live[a].overlaps(live[b])
    agree(f)


def test_a_head_defines_for_what_comes_after_too(fresh: Counter) -> None:
    a, b = buffers = arena("a b")
    never = e.compare("lt", e.load(X, (e.index(0),)), e.index(0))
    loop = While([add(a, X, fresh)], never, [])
    f = program(buffers, repeat(fresh, loop, Copy(Y, a), Copy(b, X), Copy(Y, b)))
    assert offsets(reuse(f)) == {"a": 0, "b": 0}
    agree(f)


def test_both_branches_may_define(fresh: Counter) -> None:
    a, b = buffers = arena("a b")
    both = If(ALWAYS, [add(a, X, fresh)], [add(a, X, fresh, 2)])
    f = program(
        buffers, repeat(fresh, both, Copy(Y, a), add(b, X, fresh), add(Y, b, fresh))
    )
    assert offsets(reuse(f)) == {"a": 0, "b": 0}
    agree(f)
    one = If(ALWAYS, [add(a, X, fresh)])
    f = program(
        buffers, repeat(fresh, one, Copy(Y, a), add(b, X, fresh), add(Y, b, fresh))
    )
    assert offsets(reuse(f)) == {"a": 0, "b": 64}
    agree(f)


@pytest.mark.parametrize("kind", ["threads", "gang", "grid"])
def test_iterations_that_run_at_once_share_nothing(fresh: Counter, kind: Any) -> None:
    a, b, c = buffers = arena("a b c")
    i = fresh()
    at = (e.read(i),)
    body: list[Stmt] = [
        Store(a, at, e.load(X, at)),
        Store(b, at, e.load(a, at)),
        Store(c, at, e.load(b, at)),
        Store(Y, at, e.load(c, at)),
    ]
    f = program(buffers, For(i, e.index(4), body, True, Binding(kind, 4)))
    assert len(set(offsets(reuse(f)).values())) == 3
    agree(f)


def test_swapped_buffers_lie_apart_and_live_together(fresh: Counter) -> None:
    a, b, c, d = buffers = arena("a b c d")
    f = program(
        buffers,
        add(a, X, fresh),
        repeat(fresh, add(b, a, fresh), Swap(a, b), add(c, a, fresh)),
        add(d, a, fresh),
        Copy(Y, d),
    )
    live = live_intervals(f)
    assert live[a] == live[b]
    assert len({offsets(reuse(f))[name] for name in "abd"}) == 3
    agree(f)


def test_a_swapped_buffer_may_hold_what_an_earlier_iteration_left(
    fresh: Counter,
) -> None:
    a, b, c = buffers = arena("a b c")
    loop = For(fresh(), e.index(3), [])
    later = e.compare("gt", e.read(loop.var), e.index(0))
    loop.body += [Copy(a, X), If(later, [Copy(Y, b)]), Copy(b, X), Swap(a, b)]
    loop.body += [Copy(c, X), Copy(Y, c)]
    f = program(buffers, loop)
    assert len(set(offsets(reuse(f)).values())) == 3
    agree(f)


# --- what counts as a definition ------------------------------------------------------


def fills(*definition: Stmt, matrix: Buffer) -> bool:
    """Whether the planner sees that `matrix` is wholly defined in each iteration."""
    [other] = arena("other")
    read = Store(Y, (e.index(0),), e.load(matrix, (e.index(0), e.index(0))))
    body = [*definition, read, Copy(other, X), Copy(Y, other)]
    loop = For(Var("again", int64), e.index(3), body)
    live = live_intervals(program([matrix, other], loop))
    return not live[matrix].overlaps(live[other])


def nest(matrix: Buffer, at: Any, *extents: Expr, reads: Buffer | None = None) -> For:
    """Loops over r, s, ... that store to matrix[at(r, s, ...)]."""
    variables = [Var(name, int64) for name in "rstu"[: len(extents)]]
    where = at(*map(e.read, variables))
    stored = e.index(0) if reads is None else e.load(reads, where)
    s: Stmt = Store(matrix, where, stored)
    for var, extent in reversed(list(zip(variables, extents, strict=True))):
        s = For(var, extent, [s])
    assert isinstance(s, For)
    return s


def test_nests_of_loops_define_what_they_cover() -> None:
    [a] = arena("a", 4, N)
    four, n, one = e.index(4), e.read(N), e.index(1)
    assert fills(nest(a, lambda r, s: (r, s), four, n), matrix=a)
    assert fills(nest(a, lambda r, s: (s, r), n, four), matrix=a)
    assert fills(nest(a, lambda r, s, t: (s, t), one, four, n), matrix=a)
    assert not fills(nest(a, lambda r, s: (r, s), four, four), matrix=a)
    assert not fills(nest(a, lambda r: (r, r), four), matrix=a)
    assert not fills(nest(a, lambda r: (r, e.index(0)), four), matrix=a)
    assert not fills(nest(a, lambda r, s, t: (s, t), n, four, n), matrix=a)
    assert not fills(nest(a, lambda r, s: (r, s), four, n, reads=a), matrix=a)
    plus = nest(a, lambda r, s: (r, e.add(s, one)), four, n)
    assert not fills(plus, matrix=a)
    row = Buffer("a", int64, (one, n), "arena")
    assert fills(nest(row, lambda s: (e.index(0), s), n), matrix=row)


def test_copies_and_routines_define_what_they_write() -> None:
    [a, b] = arena("a b", 4, 4)
    [keys] = arena("keys", 4)
    assert fills(Copy(a, b), matrix=a)
    assert not fills(Copy(b, a), matrix=a)
    i = Var("row", int64)
    row = Ref(a, (e.read(i),))
    args = (Ref(X), row, Ref(keys), e.index(4), e.const(False, bool_))
    assert fills(For(i, e.index(4), [Call("argsort", args)]), matrix=a)
    assert not fills(Call("argsort", args), matrix=a)
    [f] = arena("f", 4, 4, dtype=float64)
    assert not fills(Call("potrf", (Ref(f), e.index(4))), matrix=f)

    p, q = arena("p q", 4, 4)
    g = Program("g", [], [p], [q], [], [], [], [])
    assert fills(Invoke(g, (), (Ref(b),), (Ref(a),), 0), matrix=a)
    assert not fills(Invoke(g, (), (Ref(a),), (Ref(a),), 0), matrix=a)


# --- sizes that are not known ---------------------------------------------------------


def test_symbolic_buffers_follow_and_reuse_equal_places(fresh: Counter) -> None:
    [k] = arena("k", 4)
    a, b, c = arena("a b c", N)
    [wide] = arena("wide", N, M)
    zero = (e.index(0),)
    f = program(
        [a, k, b, c, wide],
        add(k, X, fresh),
        Store(a, zero, e.load(k, zero)),
        Store(b, zero, e.load(a, zero)),
        Store(c, zero, e.load(b, zero)),
        Store(wide, zero * 2, e.load(c, zero)),
        For(i := fresh(), e.index(4), [Store(Y, (e.read(i),), e.load(wide, zero * 2))]),
    )
    planned = reuse(f)
    texts = {b.name: format_expr(o) for b, o in planned.offsets.items()}
    assert texts["k"] == "0"
    assert texts["a"] == texts["c"] == "64"
    assert texts["b"] == "(n * 8 + 63 & -64) + 64"
    assert [value(o) % ALIGNMENT for o in planned.offsets.values()] == [0] * 5
    assert value(planned.total) == 64 + 64 + 64 + 64
    agree(f)


def chain(buffers: Sequence[Buffer]) -> list[Stmt]:
    """Each buffer is made of the one before."""
    zero, sources = (e.index(0),), [X, *buffers]
    pairs = zip([*buffers, Y], sources, strict=True)
    return [Store(b, zero, e.load(source, zero)) for b, source in pairs]


def test_what_is_dead_between_two_others_shares_their_place() -> None:
    a, b, c, d, last = arena("a b c d last", N)
    f = program([a, last, c, d, b], *chain([a, b, c, d, last]))
    found = reuse(f).offsets
    assert found[a] is found[c] is found[last]
    assert found[b] is found[d] is not found[a]


def test_symbolic_buffers_find_their_places_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    overlaps = Interval.overlaps

    def counted(a: Interval, b: Interval) -> bool:
        nonlocal compared
        compared += 1
        return overlaps(a, b)

    monkeypatch.setattr(Interval, "overlaps", counted)
    buffers = arena(" ".join(f"b{k}" for k in range(200)), N)
    reuse(program(buffers, *chain(buffers)))
    assert compared <= 2 * 200


def test_a_plan_that_lets_live_buffers_overlap_is_found_out(fresh: Counter) -> None:
    a, b = buffers = arena("a b")
    f = program(buffers, add(a, X, fresh), add(b, X, fresh), add(Y, a, fresh))
    wrong = dict.fromkeys(buffers, e.index(0))
    with pytest.raises(LoopIRError, match="after another buffer in its place"):
        run(f, [3, 2], [np.arange(4)], offsets=wrong)
