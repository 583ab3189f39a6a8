"""Sizes that bodies make: results of branches, and carries that steps change."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.bind import bind
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BranchTypeError,
    CarryTypeError,
    CheckError,
    ShapeError,
    TraceError,
)
from hopflow.graph.hashing import equal
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.verifier import verify
from hopflow.hops.cond import COND
from hopflow.hops.while_loop import WHILE
from hopflow.ops.opdef import OPERATIONS
from hopflow.symbolic.ranges import ValueRange
from hopflow.testing.executions import (
    SYMBOLIC,
    agree,
    in_turn,
    run_debug,
    run_dynamic,
    run_native,
    run_symbolic_native,
)
from hopflow.testing.symbolic_traces import every_way, without_lines

pytestmark = pytest.mark.slow

hf: Any = hopflow

X = np.arange(6, dtype=np.float32)
Run = Callable[..., Any]


# --- sizes that branches make ---------------------------------------------------------


def of_two_sizes(x: Any, p: Any) -> Any:
    y = hf.cond(p, lambda: x[:3], lambda: x[:5])
    return y, hf.zeros(y.shape[0])


def test_a_size_in_which_branches_differ_is_a_symbol() -> None:
    expected = """
def of_two_sizes(x: f32[6], p: bool) -> tuple[f32[u0], f32[u0]]:
    def then(*, x: f32[6]) -> f32[3]:
        v0: f32[3] = slice(x, starts=(0,), sizes=(3,), steps=(1,))
        return v0
    def else_(*, x: f32[6]) -> f32[5]:
        v0: f32[5] = slice(x, starts=(0,), sizes=(5,), steps=(1,))
        return v0
    v0: f32[u0] = cond(p, x, then=then, else_=else_)
    u0: i64 = int(dim_size(v0, axis=0))
    v1: f32[u0] = full(0.0, shape=(u0,))
    return v0, v1
"""
    p = hf.asarray(True)
    module = hf.trace(of_two_sizes, X, p, mode="symbolic", dynamic=False)
    verify(module.graph)
    assert without_lines(module.graph) == expected
    [made] = module.graph.nodes_of("dim_size")
    assert made.symbol.range == ValueRange(3, 5)
    read = parse(format_graph(module.graph), {**OPERATIONS, "cond": COND})
    verify(read)
    assert equal(read, module.graph)
    agree(interpret(read, [hf.asarray(X), p], bind), (X[:3], np.zeros(3)))


def of_masks(x: Any, p: Any) -> Any:
    return hf.cond(p, lambda: x[x > 2], lambda: x[:5])


def of_equal_sizes(x: Any, p: Any) -> Any:
    def then() -> Any:
        y = x[x > 2]
        return y, y * 2, x[:1]

    y, z, w = hf.cond(p, then, lambda: (x, x + 1, x))
    return y + z, w, hf.scan(lambda c, v: (c + v, c), 0.0, y)


def of_matrices(x: Any, p: Any) -> Any:
    a = hf.reshape(x[:6], (2, 3))
    y = hf.cond(p, lambda: hf.concat([a, a]), lambda: a.T)
    z = hf.cond(p, lambda: y[1:], lambda: y[:, 1:])
    return y * 2, z, hf.sum(z, axis=0), y @ hf.ones((y.shape[1], 2))


def of_three(x: Any, p: Any) -> Any:
    i = hf.where(p, 2, 0)
    y = hf.switch(i, [lambda: x[:1], lambda: x, lambda: hf.zeros(0)])
    return hf.concat([y, x, y])


def within_loops(x: Any, p: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        y = hf.cond(a > 2 * i, lambda: x[:i], lambda: x[x > a])
        return a + hf.sum(y) + y.shape[0]

    a = hf.fori_loop(0, 5, step, hf.where(p, 1.0, 3.0))
    return a, hf.map(
        lambda v: hf.sum(hf.cond(v > 2, lambda: x[x > v] * v, lambda: x[1:])), x
    )


def nested(x: Any, p: Any) -> Any:
    def then(x: Any) -> Any:
        return hf.cond(hf.sum(x) > 3, lambda: x[x > 1], lambda: x[:2])

    y = hf.cond(p, then, lambda x: x[x < 3], (x,))
    return y, hf.map(lambda v: v + hf.sum(y), y), hf.cond(p, lambda: y, lambda: x)


def invoked(x: Any, p: Any) -> Any:
    y, z = hf.invoke_subgraph(lambda x: (x[x > 2], x[1:]), x)
    return hf.cond(p, lambda: y * 2, lambda: y), z, y.shape[0]


def written(x: Any, p: Any) -> Any:
    x = x * 1

    def then() -> Any:
        x[0] = 9
        return x[:2] * 1

    y = hf.cond(p, then, lambda: x * 2)
    return x, y


def unread(x: Any, p: Any) -> Any:
    y = hf.cond(p, lambda: x[:3], lambda: x[:5])
    return y.shape[0], hf.zeros(y.shape)


@every_way
@pytest.mark.parametrize("p", [True, False])
@pytest.mark.parametrize(
    "f",
    [
        of_two_sizes,
        of_masks,
        of_equal_sizes,
        of_matrices,
        of_three,
        within_loops,
        nested,
        invoked,
        written,
        unread,
    ],
)
def test_branches_make_results_of_their_own_sizes(
    run: Run, f: Run, p: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "verify", True)
    args = hf.asarray(X), hf.asarray(p)
    agree(run(f, *args), run_debug(f, *args))


@every_way
def test_sizes_that_are_equal_however_they_are_written_agree(run: Run) -> None:
    def f(x: Any, p: Any) -> Any:
        y = hf.cond(p, lambda: hf.concat([x, x]), lambda: hf.zeros(2 * x.shape[0]))
        return y + hf.ones(x.shape[0] * 3 - x.shape[0])

    agree(run(f, hf.asarray(X), hf.asarray(True)), np.concatenate([X, X]) + 1)


def test_one_program_serves_all_sizes_of_its_branches() -> None:
    jitted = hf.jit(of_equal_sizes, dynamic=True)
    traces = hf.stats().traces
    for n in (6, 2, 0, 9):
        for p in (True, False):
            args = hf.arange(float(n)), hf.asarray(p)
            agree(jitted(*args), run_debug(of_equal_sizes, *args))
    assert hf.stats().traces - traces == 1


def test_without_symbols_branches_agree_in_size() -> None:
    with pytest.raises(BranchTypeError, match=r"axis 0: 3 != 5"):
        hf.trace(of_two_sizes, X, np.array(True))


@pytest.mark.parametrize("run", [run_native, *SYMBOLIC])
def test_a_step_that_makes_a_size_cannot_stack_it(run: Run) -> None:
    with pytest.raises(ShapeError, match="each step makes the size"):
        run(lambda x: hf.map(lambda v: x[x > v], x), hf.asarray(X))


# --- carries of changing size ---------------------------------------------------------


def doubled(x: Any, dim: Any) -> Any:
    i, y = hf.while_loop(
        lambda i, y: (i < 3) & (y.shape[0] < 40),
        lambda i, y: (i + 1, hf.concat([y, y * 2])),
        (0, x),
        dynamic_carry={"y": {0: dim}},
    )
    return i, y, hf.sum(y), hf.zeros(y.shape[0])


def thinned(x: Any, dim: Any) -> Any:
    def step(c: Any, v: Any) -> Any:
        kept = hf.cond(v > 2, lambda: c["kept"][c["kept"] > 1], lambda: c["kept"])
        return {"kept": hf.concat([kept, hf.ones(1) * v]), "n": c["n"] + 1}, hf.sum(
            kept
        )

    first = {"kept": x, "n": 0}
    return hf.scan(step, first, x, dynamic_carry={"c": {"kept": {0: dim}}})


def of_rows(x: Any, dim: Any) -> Any:
    a = hf.reshape(x[:4], (2, 2))

    def body(i: Any, a: Any, b: Any) -> Any:
        return i + 1, hf.concat([a, b[:, :1]], axis=1), b[:, : i + 1] + hf.sum(a)

    return hf.while_loop(
        lambda i, a, b: i < 4,
        body,
        (0, a, a),
        dynamic_carry={"a": {1: dim}, "b": {1: hf.Dim("m", max=60)}},
    )


def until_the_end(x: Any, dim: Any) -> Any:
    def step(y: Any, v: Any) -> Any:
        return hf.concat([y, hf.ones(1) * v]), hf.sum(y)

    choice = {"y": {0: dim}}
    last = hf.scan(step, x[:0], x, dynamic_carry=choice, reverse=True)
    ended = hf.scan(step, x[:0], x, dynamic_carry=choice, until=lambda y: hf.sum(y) > 4)
    return last, ended


def of_two_that_change(x: Any, dim: Any) -> Any:
    def body(i: Any, y: Any, z: Any, w: Any) -> Any:
        sizes[i] = z.shape[0]
        return i + 1, z, hf.concat([y[y > 1], z]), w

    sizes = hf.zeros(4)
    choice = {"y": {0: dim}, "z": {0: hf.Dim("m")}, "w": {0: True}}
    found = hf.while_loop(
        lambda i, y, z, _: (i < 4) & (hf.sum(z) < 70),
        body,
        (0, x, x[:2], x[x > 2]),
        dynamic_carry=choice,
        max_steps=9,
    )
    return found, sizes


def of_one_size(x: Any, dim: Any) -> Any:
    def body(y: Any, z: Any, w: Any) -> Any:
        y = hf.concat([y, z + y])
        return y, hf.concat([z, z])[: y.shape[0]], hf.concat([w, w[1:]])

    sizes = {"y": {0: dim}, "z": {0: dim}, "w": {0: 2 * dim + 1}}
    start = x[:3], x[1:4], hf.arange(7.0)
    return hf.while_loop(
        lambda y, z, w: hf.sum(y * z) + hf.sum(w) < 500,
        body,
        start,
        dynamic_carry=sizes,
        max_steps=5,
    )


def within_a_loop(x: Any, dim: Any) -> Any:
    def outer(k: Any, total: Any) -> Any:
        _, y = hf.while_loop(
            lambda i, _: i < k,
            lambda i, y: (i + 1, hf.concat([y, x[:i]])),
            (0, x[:1]),
            dynamic_carry={"y": {0: dim}},
        )
        return total + hf.sum(y) + y.shape[0]

    return hf.fori_loop(0, 5, outer, 0.0)


CHANGING = [
    *(doubled, thinned, of_rows, until_the_end, of_two_that_change, of_one_size),
    within_a_loop,
]


@every_way
@pytest.mark.parametrize("dim", [hf.Dim("n"), hf.Dim("n", max=60)], ids=str)
@pytest.mark.parametrize("f", CHANGING)
def test_steps_may_change_the_size_of_a_carry(
    run: Run, f: Run, dim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "verify", True)
    x = hf.asarray(X)
    agree(run(lambda x: f(x, dim), x), run_debug(f, x, dim))


def captured(f: Run, x: Any) -> Any:
    return hf.trace(f, x, mode="symbolic")


@pytest.mark.parametrize(
    ("f", "copies"), [(doubled, 0), (thinned, 0), (of_two_that_change, 1)]
)
def test_what_a_carry_of_another_size_becomes_waits_where_it_was_made(
    f: Run, copies: int
) -> None:
    """Only what is in the memory of another carry is copied first."""
    jitted = hf.jit(lambda x: f(x, hf.Dim("n", max=60)))
    jitted(X)
    lines = [line.strip() for line in jitted.loop_ir.splitlines()]
    inner = lines[lines.index("do:") if "do:" in lines else 0 :]
    assert sum(" again" in line for line in inner) >= 1
    assert sum(line.startswith("copy next") for line in inner) == copies


REWRITES: dict[str, Callable[[Run, Any], Any]] = {
    "captured": lambda f, x: hf.fx.Transformer(captured(f, x)).transform(),
    "imported": lambda f, x: hf.symbolic_trace(captured(f, x)),
    "symbolic": lambda f, _: hf.fx.Transformer(hf.symbolic_trace(f)).transform(),
    "opened": lambda f, _: hf.fx.open_bodies(hf.symbolic_trace(f)),
    "run": lambda f, _: hf.fx.Interpreter(hf.fx.open_bodies(hf.symbolic_trace(f))).run,
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
@pytest.mark.parametrize("f", CHANGING)
def test_rewriting_keeps_carries_of_changing_size(f: Run, rewrite: Any) -> None:
    x, dim = hf.asarray(X), hf.Dim("n", max=60)
    agree(rewrite(lambda x: f(x, dim), x)(x), run_debug(f, x, dim))


class Growing:
    """An object that can be called."""

    def __call__(self, i: Any, y: Any) -> Any:
        return i + 1, hf.concat([y, y])

    def scaled(self, scale: Any, i: Any, y: Any) -> Any:
        return i + 1, hf.concat([y, y * scale])


class GrowingLayer(hf.nn.Module):  # type: ignore[misc]
    def forward(self, i: Any, y: Any) -> Any:
        return i + 1, hf.concat([y, y])


@pytest.mark.parametrize(
    "body",
    [
        Growing(),
        Growing().__call__,
        partial(Growing().scaled, 1.0),
        partial(partial(Growing.scaled, Growing()), 1.0),
        GrowingLayer(),
        hf.symbolic_trace(GrowingLayer()),
        hf.jit(lambda i, y: (i + 1, hf.concat([y, y]))),
    ],
)
def test_a_carry_has_its_name_from_any_callable(body: Any) -> None:
    _, y = hf.while_loop(
        lambda i, _: i < 2, body, (0, hf.ones(2)), dynamic_carry={"y": {0: True}}
    )
    assert y.shape == (8,)


def growing(x: Any, steps: Any, **choice: Any) -> Any:
    return hf.while_loop(
        lambda i, _: i < steps,
        lambda i, y: (i + 1, hf.concat([y, y[:2]])),
        (0, x),
        dynamic_carry=choice or {"y": {0: hf.Dim("n", min=2, max=9)}},
    )[1]


@every_way
def test_a_carry_grows_no_further_than_it_may(run: Run) -> None:
    steps = hf.asarray(1)
    agree(run(growing, hf.asarray(X), steps), np.concatenate([X, X[:2]]))
    agree(run(growing, hf.asarray(X), steps - 1), X)
    with pytest.raises(
        CheckError, match=r"axis 0 of `carry\[1\]`.* from 2 to 9"
    ) as found:
        run(growing, hf.asarray(X), steps + 1)
    if run in (run_native, run_symbolic_native, run_dynamic):
        assert "test_sizes_of_bodies.py:" in str(found.value)
    with pytest.raises(CheckError, match="from 2 to 9"):
        run(growing, hf.asarray(X[:1]), steps)


@every_way
@pytest.mark.parametrize(
    ("sizes", "w", "message"),
    [
        ((2, 2), 6, None),
        ((2, 3), 6, r"axis 0 of `carry\[1\]` must have the `n` that axis 0 of `carry"),
        ((2, 2), 8, r"axis 0 of `carry\[2\]` must have the `2\*n \+ 2` that axis 0"),
        ((2, 2), 7, r"axis 0 of `carry\[2\]` must have a size `2\*n \+ 2`"),
        ((9, 9), 20, "a size from 0 to 8"),
    ],
)
def test_a_name_of_changing_sizes_is_one_size(
    run: Run, sizes: tuple[int, int], w: int, message: str | None
) -> None:
    n = hf.Dim("n", max=8)

    def f(x: Any, y: Any, w: Any) -> Any:
        return hf.while_loop(
            lambda x, y, w: x[0] < 2,
            lambda x, y, w: (x + y, y, w),
            (x, y, w),
            dynamic_carry={"x": {0: n}, "y": {0: n}, "w": {0: 2 * n + 2}},
        )

    args = *map(hf.ones, sizes), hf.ones(w)
    if message is None:
        agree(run(f, *args)[0], np.full(2, 2.0, np.float32))
    else:
        with pytest.raises(CheckError, match=message):
            run(f, *args)


def test_a_carry_of_changing_size_is_a_symbol_of_each_graph() -> None:
    expected = """
def growing(x: f32[6], steps: i64) -> f32[u2]:
    def test(i: i64, y: f32[u1], *, steps: i64) -> bool:
        u1: i64 = int(dim_size(y, axis=0))
        v0: bool = less(i, steps)
        return v0
    def body(i: i64, y: f32[u0], *, steps: i64) -> tuple[i64, f32[u0 + 2]]:
        u0: i64 = int(dim_size(y, axis=0))
        v0: bool = less_equal(u0, 7)
        check(v0, u0, 7, message="while_loop: axis 0 of `carry[1]` must have a size \
from 2 to 9, as `dynamic_carry` has it", condition="u0 <= 7", where="`u0` is made \
at test")
        v1: i64 = add(i, 1)
        v2: f32[2] = slice(y, starts=(0,), sizes=(2,), steps=(1,))
        v3: f32[u0 + 2] = concat(y, v2, axis=0)
        return v1, v3
    v0: tuple[i64, f32[u2]] = while_loop(0, x, steps, test=test, body=body, """
    module = hf.trace(growing, X, hf.asarray(1), mode="symbolic", dynamic=False)
    verify(module.graph)
    found = re.sub(r"made at [^\"]*", "made at test", without_lines(module.graph))
    assert found.startswith(expected)


def test_carries_of_changing_size_are_read_from_text() -> None:
    module = hf.trace(
        lambda x, n: growing(x, n, y={0: True}), X, hf.asarray(1), mode="symbolic"
    )
    table = {**OPERATIONS, "while_loop": WHILE}
    read = parse(format_graph(module.graph), table)
    verify(read)
    assert equal(read, module.graph)


def test_memory_is_made_once_for_the_largest_size_or_doubles() -> None:
    bounded = hf.jit(growing)
    agree(bounded(hf.asarray(X), hf.asarray(1)), np.concatenate([X, X[:2]]))
    free = hf.jit(lambda x, n: growing(x, n, y={0: True}))
    agree(free(hf.asarray(X), hf.asarray(500))[-2:], X[:2])
    assert free(hf.asarray(X), hf.asarray(500)).shape == (1006,)
    texts = [f.loop_ir for f in (bounded, free)]
    assert ["[9]" in t or " = 9" in t for t in texts] == [True, False]


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"z": {0: True}}, ArgumentValueError, "`dynamic_carry` names an argument 'z'"),
        ({"y": {1: True}}, ArgumentValueError, "names axis 1"),
        ({"y": {0: 3}}, ArgumentTypeError, "and is 3"),
    ],
)
def test_dynamic_carry_is_checked(
    choice: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        growing(hf.asarray(X), hf.asarray(1), **choice)


def test_other_sizes_of_a_carry_stay() -> None:
    def body(i: Any, y: Any) -> Any:
        return i + 1, hf.concat([y, y], axis=1)

    with pytest.raises(CarryTypeError, match="axis 1: 2 != 4"):
        hf.while_loop(
            lambda i, _: i < 2,
            body,
            (0, hf.ones((2, 2))),
            dynamic_carry={"y": {0: True}},
        )
    with pytest.raises(TraceError, match="mode="):
        hf.trace(growing, X, np.array(1))


def grown(x: Any) -> Any:
    steps = hf.asarray(2)
    return hf.sum(growing(x, steps, y={0: True}))


def of_the_larger(x: Any) -> Any:
    return hf.sum(hf.cond(x[0] > 0, lambda: x[:3], lambda: x[:5]))


def in_one(f: Run, *dim: Any) -> Run:
    """All that `f` returns in one number."""

    def total(x: Any) -> Any:
        leaves, _ = pytree.flatten(f(x, *dim))
        return sum(hf.sum(hf.sin(leaf / 4) * x[1]) for leaf in leaves)

    return total


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: hf.grad(f)(x),
    "jvp": lambda f, x: hf.jvp(f, (x,), (hf.cos(x),)),
    "grad of grad": lambda f, x: hf.grad(lambda x: hf.sum(hf.grad(f)(x) * x))(x),
    "jvp of grad": lambda f, x: hf.jvp(hf.grad(f), (x,), (hf.cos(x),))[1],
    "vmap of grad": lambda f, x: hf.vmap(hf.grad(f))(hf.stack([x, x[::-1] + 1])),
    "grad of vmap": lambda f, x: hf.grad(
        lambda xs: hf.sum(hf.vmap(f)(xs) * hf.asarray([1.0, 2.0]))
    )(hf.stack([x, x[::-1] + 1])),
}


WAYS = {
    "free": (hf.Dim("n"), True),
    "bounded": (hf.Dim("n", max=60), True),
    "eager": (hf.Dim("n"), False),
}


@pytest.mark.parametrize(
    ("f", "composition", "way"),
    in_turn([f for f in CHANGING if f is not thinned], [*DERIVATIVES], of=[*WAYS]),
)
def test_derivatives_of_carries_whose_sizes_change(
    f: Run, composition: str, way: str
) -> None:
    dim, jit = WAYS[way]

    def run(x: Any) -> Any:
        return DERIVATIVES[composition](in_one(f, dim), x)

    x = hf.asarray(X + 0.5)
    want = run_debug(run, x)
    agree(hf.jit(run)(x) if jit else run(x), want, rtol=1e-4)


@pytest.mark.parametrize("f", [grown, of_the_larger])
@pytest.mark.parametrize("jit", [False, True])
def test_each_example_may_have_sizes_of_its_own_in_bodies(f: Run, jit: bool) -> None:
    mapped = hf.jit(hf.vmap(f)) if jit else hf.vmap(f)
    rows = [hf.asarray(x) for x in (X, -X, X)]
    agree(mapped(hf.stack(rows)), np.stack([np.asarray(f(row)) for row in rows]))


# --- results of a size that a branch makes --------------------------------------------

# Each beside what it is in Python, where all sizes are known.
PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {}


def in_python(plain: Callable[..., Any]) -> Callable[..., Any]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        PLAIN[f] = plain
        return f

    return keep


@in_python(lambda x: 2 * x[x > 1])
def chosen(x: Any) -> Any:
    return hf.cond(hf.sum(x) > 0, lambda: 2 * x[x > 1], lambda: x[:1])


@in_python(lambda x: x)
def by_index(x: Any) -> Any:
    index = hf.astype(hf.sum(x) > 0, hf.int64) + 1
    return hf.switch(index, [lambda: x[:2], lambda: x[x > 0] ** 2, lambda: x])


@in_python(lambda x: hf.concat([x[x > 1] ** 2, x]))
def of_a_call(x: Any) -> Any:
    return hf.invoke_subgraph(lambda x: hf.concat([x[x > 1] ** 2, x]), x)


@in_python(lambda x: hf.stack([x[x > 1] ** 3] * 2))
def kept(x: Any) -> Any:
    rows = hf.checkpoint(lambda y: hf.stack([y, y]), policy="everything")
    return hf.checkpoint(lambda x: rows(x[x > 1] ** 3))(x)


@in_python(lambda x: x[x > 1] * x[1:3][0])
def of_branches(x: Any) -> Any:
    def inner() -> Any:
        return hf.cond(x[0] > 0, lambda: (x[x > 1], x[1:3]), lambda: (x, x[:1]))

    y, z = hf.cond(hf.sum(x) > 0, inner, lambda: (x[:2], x[:2]))
    return y * z[0]


@in_python(lambda x: hf.sum(x[x > 1]) * x[x > 1])
def of_integers(x: Any) -> Any:
    def then() -> Any:
        which = x > 1
        return hf.nonzero(which)[0], x[which]

    i, y = hf.cond(x[0] > 0, then, lambda: (hf.arange(2), x[:2]))
    return hf.sum(y) * x[i]


@in_python(lambda x: hf.concat([x, x, x[:2] * 3]))
def of_a_loop(x: Any) -> Any:
    def grow(y: Any) -> Any:
        return (hf.concat([y, x]),)

    def then() -> Any:
        [y] = hf.while_loop(
            lambda y: hf.sum(y) < 1.5 * hf.sum(x), grow, (x,), dynamic_carry=GROWS
        )
        return hf.concat([y, x[:2] * 3])

    return hf.cond(x[0] > 0, then, lambda: x)


GROWS = {"y": {0: True}}


@in_python(lambda x: hf.concat([x, x[:2] * 3]))
def of_the_smaller_of_two(x: Any) -> Any:
    def grow(y: Any) -> Any:
        return (hf.concat([y, x]),)

    def grown(most: float) -> Any:
        [y] = hf.while_loop(
            lambda y: hf.sum(y) < most * hf.sum(x), grow, (x,), dynamic_carry=GROWS
        )
        return hf.concat([y, x[:2] * 3])

    return hf.cond(x[0] > 0, lambda: grown(0.5), lambda: hf.concat([grown(0.5)] * 9))


@in_python(lambda x: sum(x[0] * hf.sum(x[x > a] if a > 1 else x[:1]) for a in X + 0.5))
def in_a_scan(x: Any) -> Any:
    def step(total: Any, a: Any) -> Any:
        more = hf.cond(a > 1, lambda: x[x > a], lambda: x[:1])
        return total + x[0] * hf.sum(more), None

    return hf.scan(step, 0.0, hf.asarray(X + 0.5))[0]


@in_python(lambda x: x[x > 100])
def of_nothing(x: Any) -> Any:
    return hf.cond(x[0] > 0, lambda: x[x > 100], lambda: x)


@pytest.mark.parametrize(
    ("f", "composition", "run"),
    in_turn([*PLAIN], [*DERIVATIVES], of=[run_native, run_dynamic]),
)
def test_derivatives_of_results_whose_size_a_branch_makes(
    f: Run, composition: str, run: Run
) -> None:
    def derivative(f: Run) -> Run:
        return lambda x: DERIVATIVES[composition](in_one(f), x)

    x = hf.asarray(X + 0.5)
    agree(run(derivative(f), x), derivative(PLAIN[f])(x), rtol=1e-4)
