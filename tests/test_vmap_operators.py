"""`vmap` of operators: each kind of their inputs batched, in every execution."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.errors import CheckError, LoopLimitError
from hopflow.graph.core import Graph
from hopflow.testing.executions import NAMES, RUNNERS, agree, in_turn
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

N = 4
RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.normal(size=(N, 3)).astype(np.float32)
STACKS = RANDOM.normal(size=(N, 5, 3)).astype(np.float32)
COUNTS = np.array([3, 0, 7, 1])
FLAGS = np.array([True, False, False, True])


def t(x: Any) -> Any:
    return hf.asarray(x)


def stacked(rows: Any) -> Any:
    return pytree.tree_map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *rows)


# Each takes a vector, a stack of vectors, a count, a flag, and a vector more.


def scan(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.scan(lambda c, x: (hf.tanh(c + x * w), (hf.sum(c), k)), v, xs)


def reversed_scan(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        i, a, b = carry
        return (i + 1, a + x, b), a * w + i

    return hf.scan(step, (0, v, k), xs, reverse=True)


def scan_until(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.scan(
        lambda c, x: (c + hf.abs(x), c * w), v, xs, until=lambda c: hf.sum(c) > 3
    )


def map_(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.map(lambda x: (x * v, hf.where(p, w, 1.0), k), xs)


def associative(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return {"g": a["g"] * b["g"], "s": b["g"] * a["s"] + b["s"]}

    gates = hf.broadcast_to(hf.tanh(v), xs.shape)
    return hf.associative_scan(combine, {"g": gates, "s": xs * w})


def invoke(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.invoke_subgraph(lambda a, b: (a @ b, hf.sum(w), 2), xs, v)


def cond(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.cond(
        p, lambda a: (a * k, hf.sum(xs), w), lambda a: (w, hf.sum(a), a), (v,)
    )


def switch(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.switch(k, [hf.sin, lambda a: a * w, lambda a: xs[1] + a], (v,))


def while_(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.while_loop(
        lambda i, a, b: i < k,
        lambda i, a, b: (i + 1, hf.tanh(a * w) + b, b + xs[i % 5, 0]),
        (0, v, 0.0),
    )


def while_by_carry(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.while_loop(
        lambda a, n: hf.sum(hf.abs(a)) < 5, lambda a, n: (a * 1.5 + w, n + 1), (v, 0)
    )


def fori(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    return hf.fori_loop(0, k, lambda i, a: hf.cos(a) + i * w, v)


def nested(v: Any, xs: Any, k: Any, p: Any, w: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        d = hf.cond(
            c[0] > 0, lambda: hf.fori_loop(0, k, lambda i, a: a * 0.5, c), lambda: c
        )
        return d + x, hf.map(lambda a: hf.where(p, a, w[0]), d)

    return hf.scan(step, v, xs)


OPERATORS = (
    *(scan, reversed_scan, scan_until, map_, associative, invoke, cond, switch),
    *(while_, while_by_carry, fori, nested),
)
ALL = (VECTORS, STACKS, COUNTS, FLAGS, np.abs(VECTORS[::-1]))


def batch_of(mask: Any) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    args = tuple(x if b else x[2] for x, b in zip(ALL, mask, strict=True))
    return args, tuple(0 if b else None for b in mask)


def loop_of(f: Any, args: Any, in_dims: Any) -> Any:
    rows = [
        f(*(t(x if d is None else x[i]) for x, d in zip(args, in_dims, strict=True)))
        for i in range(N)
    ]
    return stacked(rows)


@pytest.mark.parametrize("mask", list(product((False, True), repeat=5))[1:])
@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_each_subset_of_inputs_batched(f: Any, mask: Any) -> None:
    args, in_dims = batch_of(mask)
    got = hf.vmap(f, in_dims)(*map(t, args))
    agree(got, loop_of(f, args, in_dims))


@pytest.mark.parametrize(("f", "k", "run"), in_turn(OPERATORS, range(6), of=RUNNERS))
def test_one_input_batched_or_all(f: Any, k: int, run: Any) -> None:
    mask = [k in (i, 5) for i in range(5)]
    args, in_dims = batch_of(mask)
    agree(run(hf.vmap(f, in_dims), *map(t, args)), loop_of(f, args, in_dims))


@pytest.mark.parametrize(("f", "run"), in_turn(OPERATORS, of=RUNNERS))
def test_an_input_is_batched_and_shared_by_all_examples(f: Any, run: Any) -> None:
    def over_rows(x: Any, counts: Any, flags: Any) -> Any:
        return hf.vmap(lambda v, k, p: f(v, x, k, p, v))(x, counts, flags)

    x, counts, flags = VECTORS[:3], np.array([2, 0, 1]), FLAGS[:3]
    rows = [f(t(x[i]), t(x), t(counts[i]), t(flags[i]), t(x[i])) for i in range(3)]
    agree(run(over_rows, t(x), t(counts), t(flags)), stacked(rows))


@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_vmap_of_vmap_of_operators(f: Any) -> None:
    args = tuple(map(t, ALL))
    in_dims = (None, 0, None, None, 0)
    inner = hf.vmap(f, in_dims)
    got = hf.jit(hf.vmap(inner, (0, None, 0, 0, None)))(*args)
    rows = [
        loop_of(
            f,
            (ALL[0][i], ALL[1], ALL[2][i], ALL[3][i], ALL[4]),
            (None, 0, None, None, 0),
        )
        for i in range(N)
    ]
    agree(got, stacked(rows))


@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_a_symbolic_number_of_examples(f: Any) -> None:
    in_dims = (0, 0, 0, None, None)

    def g(*args: Any) -> Any:
        return hf.vmap(f, in_dims)(*args)

    jitted = hf.jit(g, dynamic=True)
    rest = ALL[3][0], ALL[4][0]
    for n in (4, 3, 2):
        args = (*(x[:n] for x in ALL[:3]), *rest)
        rows = [f(*(t(x[i]) for x in args[:3]), *map(t, rest)) for i in range(n)]
        agree(jitted(*map(t, args)), stacked(rows))


@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_no_example(f: Any) -> None:
    args = [x[:0] for x in ALL]
    got = hf.vmap(f)(*map(t, args))
    shapes = [np.asarray(x).shape for x in pytree.flatten(got)[0]]
    one = loop_of(f, ALL, (0,) * 5)
    assert shapes == [(0, *x.shape[1:]) for x in pytree.flatten(one)[0]]


# --- what is not run ------------------------------------------------------------------


def names_of(graph: Graph) -> list[str]:
    found = []
    for node in graph.nodes:
        found.append(getattr(node.op, "name", ""))
        for own in node.graphs.values():
            found += names_of(own)
    return found


@pytest.mark.parametrize(
    ("f", "batched", "want"),
    [
        (lambda v, k: hf.fori_loop(0, k, lambda i, a: a + 1, v), (0, None), False),
        (lambda v, k: hf.fori_loop(0, k, lambda i, a: a + 1, v), (0, 0), True),
        (lambda v, k: hf.cond(k > 1, hf.sin, hf.cos, (v,)), (0, None), False),
        (lambda v, k: hf.cond(k > 1, hf.sin, hf.cos, (v,)), (None, 0), True),
    ],
)
def test_only_what_takes_ways_of_its_own_is_a_map(
    f: Any, batched: Any, want: bool
) -> None:
    args = [
        t(x if d == 0 else x[0])
        for x, d in zip((VECTORS, COUNTS), batched, strict=True)
    ]
    graph = hf.trace(hf.vmap(f, batched), *args).graph
    assert ("map" in names_of(graph)) is want


@each_execution
def test_a_branch_that_is_not_taken_traps_nothing_and_cannot_hang(run: Any) -> None:
    def forever(x: Any) -> Any:
        hf.check(x < 0, "not for these")
        return hf.while_loop(lambda a: a > -1, lambda a: a + 1, x)

    def f(x: Any) -> Any:
        return hf.cond(x > 100, forever, lambda a: a * 2, (x,))

    agree(run(hf.vmap(f), t(COUNTS)), COUNTS * 2)
    with pytest.raises(CheckError, match="not for these"):
        run(hf.vmap(f), t(COUNTS + 100))


@each_execution
def test_a_limit_of_steps_holds_for_each_example(run: Any) -> None:
    def f(n: Any) -> Any:
        return hf.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=7)

    agree(run(hf.vmap(f), t(COUNTS)), COUNTS)
    with pytest.raises(LoopLimitError):
        run(hf.vmap(f), t(COUNTS + 1))


def test_random_numbers_in_branches_follow_the_keys() -> None:
    def f(key: Any, p: Any) -> Any:
        return hf.cond(
            p, lambda: hf.random.normal(key), lambda: hf.random.uniform(key) + 10
        )

    keys = hf.random.split(hf.random.key(1), N)
    want = [np.asarray(f(key, t(p))) for key, p in zip(keys, FLAGS, strict=True)]
    agree(hf.vmap(f)(keys, t(FLAGS)), np.stack(want))


def test_nested_loops_are_batched_once_for_each_kind_of_input() -> None:
    def nest(depth: int, v: Any) -> Any:
        if not depth:
            return hf.tanh(v)
        return hf.fori_loop(0, 2, lambda i, a: nest(depth - 1, a), v)

    got = hf.vmap(lambda v: nest(7, v))(t(VECTORS))
    assert got.shape == VECTORS.shape


# --- derivatives ----------------------------------------------------------------------


def singular(x: Any) -> Any:
    return hf.cond(x > 0, hf.sqrt, lambda a: a * 3, (x,))


@pytest.mark.parametrize("jit", [False, True])
def test_a_singular_branch_that_is_not_taken_has_no_part_in_a_gradient(
    jit: bool,
) -> None:
    wrap: Callable[..., Any] = hf.jit if jit else lambda f: f
    x = np.array([0.0, 4.0, -1.0, 0.0, 1.0], np.float32)
    want = np.array([3, 0.25, 3, 3, 0.5], np.float32)
    agree(wrap(hf.vmap(hf.grad(singular)))(t(x)), want)
    agree(wrap(hf.grad(lambda x: hf.sum(hf.vmap(singular)(x))))(t(x)), want)
    _, tangent = hf.jvp(hf.vmap(singular), (t(x),), (hf.ones(5),))
    agree(tangent, want)


DERIVED = (scan, reversed_scan, map_, cond, switch, invoke, while_, fori, nested)


def loss_of(f: Any) -> Callable[..., Any]:
    def loss(v: Any, *rest: Any) -> Any:
        leaves, _ = pytree.flatten(f(v, *rest))
        floats = [x for x in leaves if hf.isdtype(x.dtype, "real floating")]
        return sum(hf.sum(x * x) for x in floats)

    return loss


def gradients(f: Any) -> Any:
    rows = [[t(x[i]) for x in ALL] for i in range(N)]
    return np.stack([np.asarray(hf.grad(loss_of(f))(*row)) for row in rows])


@pytest.mark.parametrize("f", DERIVED, ids=lambda f: f.__name__)
def test_vmap_of_grad(f: Any) -> None:
    got = hf.vmap(hf.grad(loss_of(f)))(*map(t, ALL))
    agree(got, gradients(f), rtol=1e-4)


@pytest.mark.parametrize("f", DERIVED, ids=lambda f: f.__name__)
def test_grad_of_vmap(f: Any) -> None:
    got = hf.grad(lambda *args: hf.sum(hf.vmap(loss_of(f))(*args)))(*map(t, ALL))
    agree(got, gradients(f), rtol=1e-4)


def scaled_sine(v: Any, w: Any) -> Any:
    return hf.sin(v) * w


def forward(primals: Any, tangents: Any) -> Any:
    # Of one example: neither a derivative nor the same for a batch of them.
    v, w = primals
    return with_tangent(v, w), tangents[0] * hf.sum(v) + w[0] * tangents[1]


def backward(kept: Any, ct: Any) -> Any:
    v, w = kept
    return ct * hf.sum(v), ct * w[0]


with_tangent, with_cotangent = hf.custom_jvp(scaled_sine), hf.custom_vjp(scaled_sine)
with_tangent.defjvp(forward)
with_cotangent.defvjp(lambda v, w: (with_cotangent(v, w), (v, w)), backward)


@pytest.mark.parametrize("f", [with_tangent, with_cotangent])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("jit", [False, True])
def test_rules_of_the_user_are_for_one_example(f: Any, in_dims: Any, jit: bool) -> None:
    wrap: Callable[..., Any] = hf.jit if jit else lambda f: f
    args, _ = batch_of([d == 0 for d in (in_dims[0], 0, 0, 0, in_dims[1])])
    v, w = t(args[0]), t(args[4])

    def loss(v: Any, w: Any) -> Any:
        return hf.sum(f(v, w) ** 2)

    each = loop_of(hf.grad(loss, (0, 1)), (args[0], args[4]), in_dims)
    agree(wrap(hf.vmap(hf.grad(loss, (0, 1)), in_dims))(v, w), each)
    total = wrap(hf.grad(lambda v, w: hf.sum(hf.vmap(loss, in_dims)(v, w)), (0, 1)))
    pairs = zip(each, in_dims, strict=True)
    agree(total(v, w), tuple(g if d == 0 else g.sum(0) for g, d in pairs), rtol=1e-4)


# --- JAX ------------------------------------------------------------------------------


@requires("jax")
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_loops_under_vmap_are_those_of_jax(in_dims: Any) -> None:
    import jax

    def collatz(np: Any, lib: Any, n: Any, v: Any) -> Any:
        def step(state: Any) -> Any:
            m, steps, a = state
            return np.where(m % 2 == 0, m // 2, 3 * m + 1), steps + 1, np.sin(a) + 1

        return lib.while_loop(lambda state: state[0] != 1, step, (n, 0, v))[1:]

    def ours(n: Any, v: Any) -> Any:
        def step(m: Any, steps: Any, a: Any) -> Any:
            return hf.where(m % 2 == 0, m // 2, 3 * m + 1), steps + 1, hf.sin(a) + 1

        return hf.while_loop(lambda m, k, a: m != 1, step, (n, 0, v))[1:]

    args = (COUNTS.astype(np.int32) + 5, VECTORS)
    given = [x if d == 0 else x[0] for x, d in zip(args, in_dims, strict=True)]
    want = jax.vmap(lambda n, v: collatz(jax.numpy, jax.lax, n, v), in_dims)(*given)
    got = hf.vmap(ours, in_dims)(*map(t, given))
    agree(got, tuple(np.asarray(x) for x in want))


def test_sizes_of_data_twice_after_several_results_of_one_node() -> None:
    """The second part of the graph has two results of one node among its inputs."""
    xs, vs = hf.arange(5.0), hf.asarray([1.0, 2.0, 3.0])

    def f(v: Any) -> Any:
        a, b, c = hf.map(lambda w: (w, w * v, w + v), xs)
        rows = xs[a > 2]

        def grow(n: Any, y: Any) -> Any:
            return n - 1, hf.concat([y, y[:1] + hf.sum(rows)])

        sizes = {"y": {0: hf.Dim("rows")}}
        start = v.astype(hf.int64), b
        grown = hf.while_loop(lambda n, y: n > 0, grow, start, dynamic_carry=sizes)[1]
        return hf.sum(grown) + hf.sum(c) * hf.sum(rows)

    with hf.debug():
        expected = [float(f(v)) for v in vs]
    assert hf.vmap(f)(vs).tolist() == expected
    assert hf.map(f, vs, batch_size=2).tolist() == expected
    assert hf.jit(hf.vmap(f))(vs).tolist() == expected
