"""Loops that select by a test which all of their iterations share."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.schedule.unswitch import LARGEST, unswitch
from hopflow.dtypes import bool_, float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.printer import format_program
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Binding,
    Declare,
    For,
    If,
    Let,
    Program,
    Stmt,
    Store,
    While,
)
from hopflow.loop_ir.verifier import verify
from hopflow.loop_ir.walk import statements

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
N = 240
INDEX, T, V, W, SUM = (
    Var("i", int64),
    Var("t", bool_),
    Var("v", float64),
    Var("w", float64),
    Var("sum", float64),
)
FLAG = Buffer("flag", bool_, (e.index(2),), "input")
X = Buffer("x", float64, (e.index(N),), "input")
Y = Buffer("y", float64, (e.index(N),), "output")
TEST = e.read(T)


def x(at: Expr) -> Expr:
    return e.load(X, (at,))


def y(at: Expr) -> Expr:
    return e.load(Y, (at,))


def set_y(at: Expr, value: Expr) -> Store:
    return Store(Y, (at,), value)


def other(at: Expr) -> Expr:
    return e.sub(e.index(N - 1), at)


def program(body: list[Stmt], *, extent: int = N, width: int = 1) -> Program:
    """A loop over `body` after `t = flag[0]`; y starts as 0, 1, 2, ..."""
    start = For(Var("k", int64), e.index(N), [], independent=True)
    start.body.append(set_y(e.read(start.var), e.cast(e.read(start.var), float64)))
    binding = Binding("vector", width) if width > 1 else Binding("serial")
    loop = For(INDEX, e.index(extent), body, independent=True, binding=binding)
    body = [start, Let(T, e.load(FLAG, (e.index(0),))), loop]
    return Program("f", [], [FLAG, X], [Y], [], [], body, [])


def branches(edited: Program) -> list[If]:
    return [s for s in statements(edited.body) if isinstance(s, If)]


i = e.read(INDEX)
DOUBLE = e.mul(x(i), e.const(2.0, float64))
BODIES: dict[str, tuple[list[Stmt], int, int]] = {
    # What a body is, the tests that are made, and the loops that remain beside the
    # first.
    "kept or new": ([set_y(i, e.select(TEST, DOUBLE, y(i)))], 1, 1),
    "new or kept": ([set_y(i, e.select(TEST, y(i), DOUBLE))], 1, 1),
    "negated": ([set_y(i, e.select(e.unary("not", TEST), DOUBLE, y(i)))], 1, 1),
    "and": (
        [
            set_y(
                i,
                e.select(
                    e.binary("and", TEST, e.compare("gt", x(i), e.const(0.0, float64))),
                    DOUBLE,
                    y(i),
                ),
            )
        ],
        1,
        1,
    ),
    "dear or cheap": (
        [set_y(i, e.select(TEST, e.call("exp", x(i)), x(i)))],
        1,
        2,
    ),
    "by a variable": (
        [Let(V, e.select(TEST, DOUBLE, y(i))), set_y(i, e.read(V))],
        1,
        1,
    ),
    "by an element": (
        [
            set_y(
                i,
                e.select(e.load(FLAG, (e.index(1),)), DOUBLE, y(i)),
            )
        ],
        1,
        1,
    ),
    "the other element": (
        [set_y(i, e.select(TEST, e.call("exp", x(i)), y(other(i))))],
        1,
        2,
    ),
    "a varying test": (
        [set_y(i, e.select(e.compare("lt", i, e.index(5)), DOUBLE, y(i)))],
        0,
        1,
    ),
    "a test of what changes": (
        [
            set_y(
                i,
                e.select(
                    e.compare("gt", y(e.index(0)), e.const(0.5, float64)),
                    DOUBLE,
                    y(i),
                ),
            )
        ],
        0,
        1,
    ),
    "two of the same": (
        [
            Let(V, e.select(TEST, DOUBLE, y(i))),
            Let(W, e.select(TEST, e.call("exp", x(i)), e.read(V))),
            set_y(i, e.add(e.read(V), e.read(W))),
        ],
        1,
        2,
    ),
}


@pytest.mark.parametrize("flags", [(False, True), (True, False)])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("body", BODIES)
def test_a_case_does_what_the_loop_did(
    body: str, width: int, flags: tuple[bool, bool]
) -> None:
    made, tests, loops = BODIES[body]
    before = program([*made], width=width)
    args = [np.array(flags), np.linspace(-1, 1, N)]
    [want] = run(before, (), args)
    edited = program([*made], width=width)
    unswitch(edited, host())
    verify(edited)
    [found] = run(edited, (), args)
    np.testing.assert_array_equal(found, want)
    assert len(branches(edited)) == tests, format_program(edited)
    assert len([s for s in edited.body if isinstance(s, For)]) == 2 - min(tests, 1)
    assert len([s for s in statements(edited.body) if isinstance(s, For)]) == 1 + loops


def test_a_sum_keeps_its_order() -> None:
    term = e.select(TEST, e.call("exp", x(i)), e.const(0.0, float64))
    for flag in (False, True):
        results: list[Array] = []
        for edit in (False, True):
            made = program([Accumulate(SUM, "add", term)], width=8)
            made.body.insert(2, Declare(SUM, e.const(1.0, float64)))
            made.body.append(set_y(e.index(3), e.read(SUM)))
            if edit:
                unswitch(made, host())
                assert len(branches(made)) == 1
            verify(made)
            args = [np.array([flag, flag]), np.linspace(-1, 1, N)]
            results.append(run(made, (), args)[0])
        np.testing.assert_array_equal(results[0], results[1])


def test_a_store_that_another_one_precedes_is_kept() -> None:
    """y[i] is stored to after its value was read, at an index that may be the same."""
    body: list[Stmt] = [
        Let(V, y(i)),
        set_y(other(i), e.select(TEST, DOUBLE, x(i))),
        set_y(i, e.select(TEST, DOUBLE, e.read(V))),
    ]
    edited = program(body)
    unswitch(edited, host())
    for branch in branches(edited):
        for case in (branch.then, branch.else_):
            assert len([s for s in statements(case) if isinstance(s, Store)]) == 2


def test_what_saves_little_stays_a_select() -> None:
    large = x(i)
    for _ in range(LARGEST):
        large = e.add(large, x(i))
    for body, extent, width in (
        ([set_y(i, e.select(TEST, e.call("exp", x(i)), large))], N, 1),
        ([set_y(i, e.select(TEST, DOUBLE, x(i)))], 2, 1),
        ([set_y(i, e.select(TEST, DOUBLE, x(i)))], N, 8),
    ):
        edited = program([*body], extent=extent, width=width)
        unswitch(edited, host())
        assert not branches(edited)


def test_what_one_case_reads_is_computed_there() -> None:
    """A variable that another statement reads, too, stays before the branch."""
    root, both = Var("root", float64), Var("both", float64)
    first = e.load(X, (e.index(0),))
    new = e.mul(e.read(root), e.call("exp", e.add(x(i), e.read(both))))
    edited = program([set_y(i, e.select(TEST, new, y(i)))])
    lets = [Let(both, first), Let(root, e.unary("sqrt", e.read(both)))]
    edited.body[2:2] = lets
    edited.body.append(set_y(e.index(1), e.read(both)))
    unswitch(edited, host())
    verify(edited)
    [branch] = branches(edited)
    assert branch.then[0] is lets[1]
    assert lets[0] in edited.body
    assert lets[1] not in edited.body


@pytest.mark.parametrize("is_read", [False, True])
def test_what_the_test_of_a_loop_reads_stays_in_its_head(is_read: bool) -> None:
    root, count = Var("root", float64), Var("count", int64)
    first = e.add(e.load(X, (e.index(0),)), e.const(2.0, float64))
    new = e.mul(e.read(root), x(i))
    row = For(INDEX, e.index(N), [set_y(i, e.select(TEST, new, y(i)))], True)
    goes_on = e.compare("lt", e.read(count), e.index(3))
    if is_read:
        zero = e.const(0.0, float64)
        goes_on = e.binary("and", goes_on, e.compare("gt", e.read(root), zero))
    head: list[Stmt] = [Let(root, e.unary("sqrt", first)), row]
    body: list[Stmt] = [Assign(count, e.add(e.read(count), e.index(1)))]
    edited = program([])
    edited.body[2:] = [Declare(count, e.index(0)), While(head, goes_on, body)]
    unswitch(edited, host())
    verify(edited)
    assert isinstance(head[0], Let) is is_read
    assert len(branches(edited)) == 1


def test_a_divisor_that_may_be_0_is_no_divisor_before_the_loop() -> None:
    """It divides in each iteration, and there may be none."""
    divisor, at = Var("d", int64), e.index(7)
    is_even = e.compare("eq", e.binary("rem", at, e.read(divisor)), e.index(0))
    made = program([set_y(i, e.select(is_even, DOUBLE, y(i)))])
    made.body.insert(2, Let(divisor, e.cast(TEST, int64)))
    unswitch(made, host())
    assert not branches(made)


# --- programs of users ----------------------------------------------------------------


def _sieve(m: Any, fori: Callable[..., Any]) -> Callable[..., Any]:
    def primes(x: Any, flags: Any) -> Any:
        at = m.arange(x.shape[0])

        def step(k: Any, s: Any) -> Any:
            is_multiple = (at % k == 0) & (at > k)
            return m.where(s[k], m.where(is_multiple, False, s), s)

        return fori(2, 17, step, at + 0 * flags[0] >= 2)

    return primes


def _switched(m: Any, fori: Callable[..., Any]) -> Callable[..., Any]:
    def steps(x: Any, flags: Any) -> Any:
        def step(k: Any, x: Any) -> Any:
            return m.where(flags[k] > 0, m.sin(x) * 1.5, x)

        return fori(0, flags.shape[0], step, x)

    return steps


def _row(m: Any, fori: Callable[..., Any]) -> Callable[..., Any]:
    def steps(x: Any, flags: Any) -> Any:
        table = m.stack([x, x * 2.0, x * 3.0])

        def step(k: Any, table: Any) -> Any:
            row = table[k % 3]
            new = m.where(flags[k] > 0, row * 0.5 + table[0], row)
            return table.at[k % 3].set(new)

        return fori(0, flags.shape[0], step, table)

    return steps


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [_sieve, _switched, _row])
def test_users_programs_make_a_test_once(
    make: Callable[..., Callable[..., Any]], dynamic: bool
) -> None:
    rng = np.random.default_rng(0)
    args = (rng.normal(size=300), rng.integers(0, 2, 20))
    compiled = hf.jit(make(hf, hf.fori_loop), dynamic=dynamic)
    want = make(jax.numpy, jax.lax.fori_loop)(*map(jax.numpy.asarray, args))
    np.testing.assert_allclose(np.asarray(compiled(*args)), want, rtol=1e-6)
    with hf.debug():
        plain = make(hf, hf.fori_loop)(*map(hf.asarray, args))
    np.testing.assert_allclose(np.asarray(compiled(*args)), plain, rtol=1e-12)
    assert "\n        if " in compiled.loop_ir
