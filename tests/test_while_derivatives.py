"""Derivatives of loops whose number of steps only the run knows, within each operator,
against JAX's of a bounded `scan` with the same steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.graph.rewriting import eliminate_dead_code

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

X = np.linspace(0.3, 1.5, 6).reshape(2, 3).astype(np.float32)
W = np.linspace(0.5, 0.9, 3).astype(np.float32)
MOST = 8


class Library(NamedTuple):
    """The names that a program uses, of ours or of JAX's."""

    m: Any
    loop: Callable[..., Any]
    cond: Callable[..., Any]
    switch: Callable[..., Any]
    scan: Callable[..., Any]
    map: Callable[..., Any]
    prefix: Callable[..., Any]
    call: Callable[..., Any]
    vmap: Callable[..., Any]
    checkpoint: Callable[..., Any]


def bounded(test: Any, body: Any, carry: Any) -> Any:
    """JAX's `while_loop` of few steps, which has derivatives."""

    def step(c: Any, _: Any) -> Any:
        return lax.cond(test(*c), lambda: body(*c), lambda: c), None

    return lax.scan(step, jax.tree.map(jnp.asarray, carry), length=MOST)[0]


OURS = Library(
    *(hf, hf.while_loop, hf.cond, hf.switch, hf.scan, hf.map, hf.associative_scan),
    *(hf.invoke_subgraph, hf.vmap, hf.checkpoint),
)
THEIRS = Library(
    *(jnp, bounded, lax.cond, lax.switch, lax.scan, lax.map, lax.associative_scan),
    *(lambda f, *args: f(*args), jax.vmap, jax.checkpoint),
)


def repeat(n: Any, f: Any, c: Any, lib: Library) -> Any:
    """`n` steps of `f`."""
    return lib.loop(lambda i, c: i < n, lambda i, c: (i + 1, f(c)), (0, c))[1]


def alone(x: Any, w: Any, n: Any, lib: Library) -> Any:
    return repeat(n, lambda c: lib.m.sin(c * w) + x[0], w, lib)


def until_small(x: Any, w: Any, n: Any, lib: Library) -> Any:
    # How many steps there are depends on the carry; a count and a flag go along.
    def body(c: Any, k: Any, flag: Any) -> Any:
        return c * w, k + 1, lib.m.logical_not(flag)

    def more(c: Any, k: Any, flag: Any) -> Any:
        return lib.m.sum(c) > 2.2 - 0.4 * n

    c, k, flag = lib.loop(more, body, (w, 0, True))
    return lib.m.where(flag, c, c * c) * k


def in_scan(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def body(c: Any, v: Any) -> Any:
        c = repeat(n, lambda a: lib.m.sin(a * w) + v, c, lib)
        return c, c * v

    c, ys = lib.scan(body, w, x)
    return c + lib.m.sum(ys * x, axis=0)


def in_map(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def of_row(v: Any) -> Any:
        return until_small(lib.m.stack([v, v]), 0.6 * w * v, n, lib)

    return lib.m.sum(lib.map(of_row, x), axis=0)


def in_cond(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def then() -> Any:
        return repeat(n, lambda c: lib.m.sin(c * w), x[0], lib)

    return lib.cond(w[0] > 0.2, then, lambda: lib.m.exp(w))


def in_switch(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def one() -> Any:
        return repeat(n, lambda c: c * w, w, lib)

    def two() -> Any:
        return repeat(n + 1, lambda c: c * c + x[0], w, lib)

    return lib.switch(n % 2, [one, two]) * w


def in_while(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def step(c: Any) -> Any:
        return repeat(n, lambda a: lib.m.sin(a * w) + c, c, lib)

    return repeat(2, step, x[0], lib)


def in_call(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def f(c: Any) -> Any:
        return repeat(n, lambda a: lib.m.cos(a * c), c, lib)

    return lib.call(f, w) * lib.call(f, w * w)


def in_checkpoint(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def f(c: Any) -> Any:
        return lib.m.exp(repeat(n, lambda a: lib.m.cos(a * c), c, lib))

    return lib.checkpoint(f)(w * x[0])


def in_prefix(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def product(a: Any, b: Any) -> Any:  # by a loop that makes sums of a product
        return repeat(n, lambda c: c * 1.5, a * b, lib) / 1.5**n

    return lib.m.sum(lib.prefix(product, x * w), axis=0)


def deep(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def body(c: Any, v: Any) -> Any:
        def then() -> Any:
            each = lib.map(lambda a: repeat(n, lambda b: b * a + v[0], a, lib), c)
            return repeat(n, lambda a: lib.m.sin(a) * w, each, lib)

        return lib.cond(v[0] > 0.5, then, lambda: c * w), None

    return lib.scan(body, w, x)[0]


def in_vmap(x: Any, w: Any, n: Any, lib: Library) -> Any:
    def f(v: Any, own: Any) -> Any:  # each example has its own number of steps
        return repeat(own, lambda c: lib.m.sin(c * w) + v, w * v, lib)

    steps = lib.m.asarray(np.array([0, 1])) + n
    return lib.m.sum(lib.vmap(f)(x, steps), axis=0)


PROGRAMS = [
    *(alone, until_small, in_scan, in_map, in_cond, in_switch, in_while, in_call),
    *(in_checkpoint, in_prefix, deep, in_vmap),
]
COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "value": lambda d, f, s, w: f(w),
    "jvp": lambda d, f, s, w: d.jvp(f, (w,), (w,))[1],
    "grad": lambda d, f, s, w: d.grad(f)(w),
    "vjp of vjp": lambda d, f, s, w: d.grad(lambda w: s(d.grad(f)(w) * w))(w),
    "jvp of vjp": lambda d, f, s, w: d.jvp(d.grad(f), (w,), (w,))[1],
    "vjp of jvp": lambda d, f, s, w: d.grad(lambda w: d.jvp(f, (w,), (w,))[1])(w),
    "vmap of vjp": lambda d, f, s, w: d.vmap(d.grad(f))(w[None] * W[:2, None]),
    "vjp of vmap": lambda d, f, s, w: d.grad(
        lambda w: s(d.vmap(f)(w[None] * W[:2, None]))
    )(w),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_derivatives_are_those_of_jax(program: Any, composition: str) -> None:
    def run(d: Any, x: Any, w: Any, n: Any, lib: Library) -> Any:
        def total(w: Any) -> Any:
            return lib.m.sum(program(x, w, n, lib))

        return COMPOSITIONS[composition](d, total, lib.m.sum, w)

    def ours(x: Any, w: Any, n: Any) -> Any:
        return run(hf, x, w, n, OURS)

    theirs = jax.jit(lambda x, w, n: run(jax, x, w, n, THEIRS))
    jitted = hf.jit(ours)
    for steps in (0, 1, 3):
        want = np.asarray(theirs(X, W, steps))
        args = hf.asarray(X), hf.asarray(W), hf.asarray(steps)
        for found in (ours(*args), jitted(*args)):
            np.testing.assert_allclose(np.asarray(found), want, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("k", [0, 1])
def test_gradients_of_what_the_loop_and_the_operator_capture(k: int) -> None:
    weights = W * 0.5

    def f(x: Any, w: Any, lib: Library) -> Any:
        own = lib.m.asarray(weights)

        def body(c: Any, _: Any) -> Any:
            return repeat(3, lambda a: lib.m.sin(a * w + own) * x[1], c, lib), None

        return lib.m.sum(lib.scan(body, own, None, length=2)[0])

    args = X, W
    want = jax.grad(lambda x, w: f(x, w, THEIRS), k)(*map(jnp.asarray, args))
    found = hf.grad(lambda x, w: f(x, w, OURS), k)(*map(hf.asarray, args))
    np.testing.assert_allclose(np.asarray(found), want, rtol=1e-4)


def test_leaves_without_a_derivative_go_along() -> None:
    def f(w: Any, n: Any) -> Any:
        def body(c: Any) -> Any:
            flag = hf.logical_not(c["flag"])
            y = hf.where(flag, c["y"] * w, c["y"] + w)
            return {"i": c["i"] + 1, "flag": flag, "none": None, "y": y}

        first = {"i": 0, "flag": False, "none": None, "y": hf.ones(3)}
        return hf.while_loop(lambda c: c["i"] < n, body, first)

    def total(w: Any, n: Any) -> Any:
        return hf.sum(hf.invoke_subgraph(lambda w: f(w, n)["y"], w))

    found = hf.grad(total)(hf.asarray(W), 3)  # (1 * w + w) * w
    np.testing.assert_allclose(np.asarray(found), 4 * W, rtol=1e-6)


def test_random_bits_are_the_same_in_both_directions() -> None:
    def f(w: Any, key: Any, n: Any) -> Any:
        def drop(i: Any, c: Any) -> Any:
            keep = hf.random.uniform(hf.random.fold_in(key, i), (3,)) < 0.5
            return i + 1, hf.where(keep, c * w, c)

        return hf.while_loop(lambda i, c: i < n, drop, (0, hf.ones(3)))[1]

    def within(w: Any, key: Any, n: Any) -> Any:
        return hf.invoke_subgraph(lambda w: hf.sum(f(w, key, n)), w)

    # w * d/dw of w**k is k * w**k: as often as the forward pass took w.
    keys = hf.random.split(hf.random.key(0), 4)
    for key in keys:
        value = np.asarray(f(hf.asarray(W), key, 6))
        taken = np.round(np.log(value) / np.log(W))
        found = np.asarray(hf.jit(hf.grad(within))(hf.asarray(W), key, 6))
        np.testing.assert_allclose(found * W, taken * value, rtol=1e-5)
    each = hf.vmap(hf.grad(within), (None, 0, None))(hf.asarray(W), keys, 6)
    rows = [np.asarray(hf.grad(within)(hf.asarray(W), key, 6)) for key in keys]
    np.testing.assert_allclose(np.asarray(each), np.stack(rows), rtol=1e-5)


def test_gradients_of_masks_within_operators() -> None:
    def positive(v: Any) -> Any:
        return hf.sum(hf.exp(v[v > 0.7]))

    def total(x: Any) -> Any:
        return hf.sum(hf.map(positive, x))

    want = np.where(X > 0.7, np.exp(X), 0)
    for wrap in (lambda f: f, hf.jit):
        found = wrap(hf.grad(total))(hf.asarray(X))
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-6)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("reverse_mode", ["recompute", "save", "checkpoint"])
def test_gradients_of_loops_are_traced_in_each_mode(
    mode: str, reverse_mode: Any
) -> None:
    def f(x: Any, n: Any) -> Any:
        return hf.while_loop(
            lambda i, _: i < n,
            lambda i, y: (i + 1, y * hf.sum(x)),
            (0, x[0]),
            reverse_mode=reverse_mode,
        )[1]

    def rows(x: Any, n: Any) -> Any:
        return hf.sum(
            hf.while_loop(
                lambda i, _: i < n,
                lambda i, y: (i + 1, y * x),
                (0, x),
                reverse_mode=reverse_mode,
            )[1]
        )

    x, n = hf.asarray([1.0, 2.0]), hf.asarray(3)
    second = hf.grad(lambda x, n: hf.sum(hf.grad(f)(x, n)))
    for derivative in (hf.grad(f), second, hf.grad(rows), hf.hessian(rows)):
        graph = hf.trace(derivative, x, n, mode=mode)
        for steps in (n, n - 3, n + 2):
            found, want = graph(x, steps), derivative(x, steps)
            np.testing.assert_allclose(found, want, rtol=1e-5)


def test_the_forward_pass_over_examples_runs_each_loop_once() -> None:
    def root(a: Any) -> Any:  # Newton's method
        far = lambda x: hf.abs(x * x - a) > 1e-9  # noqa: E731
        return hf.while_loop(far, lambda x: (x + a / x) / 2, a)

    def total(xs: Any) -> Any:
        return hf.sum(hf.vmap(root)(xs))

    xs = np.array([0.25, 2.0, 900.0])
    graph = hf.trace(hf.value_and_grad(total), xs).graph
    eliminate_dead_code(graph)
    [forward] = graph.nodes_of("map")
    assert [n.op.name for n in forward.graphs["body"].walk() if n.graphs] == [
        "while_loop"
    ]
    np.testing.assert_allclose(hf.grad(total)(xs), 0.5 / np.sqrt(xs))
