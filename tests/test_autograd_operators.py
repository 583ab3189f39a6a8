"""Derivatives through operators, in every composition, against JAX."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.testing.libraries import HOPFLOW, Library, jax_library

jax = pytest.importorskip("jax")
jnp = jax.numpy

X = np.linspace(0.3, 1.5, 6).reshape(2, 3).astype(np.float32)
W = np.linspace(0.1, 0.9, 3).astype(np.float32)


JAX = jax_library()
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]


def cond(x: Any, w: Any, lib: Library) -> Any:
    return lib.m.sum(
        lib.cond(x[0, 0] > 0.2, lambda: lib.m.sin(x) * w, lambda: lib.m.exp(x))
    )


def singular(x: Any, w: Any, lib: Library) -> Any:
    # The branch that is not taken has an infinite derivative.
    return lib.m.sum(lib.cond(w[0] > 0, lambda: x * w, lambda: x / (w * 0)))


def switch(x: Any, w: Any, lib: Library) -> Any:
    branches = [lambda: w, lambda: w * w * x[0], lambda: lib.m.exp(w)]
    return lib.m.sum(lib.switch(1, branches))


def scan(x: Any, w: Any, lib: Library) -> Any:
    def body(c: Any, v: Any) -> Any:
        new = lib.m.tanh(c * w + v)
        return new, lib.m.sin(new) * v

    c, ys = lib.scan(body, w * 0 + 0.5, x)
    return lib.m.sum(c * c) + lib.m.sum(ys * x)


def reverse(x: Any, w: Any, lib: Library) -> Any:
    c, ys = lib.scan(lambda c, v: (c * v + w, {"c": c}), w, x, reverse=True)
    return lib.m.sum(c) + lib.m.sum(ys["c"] * x)


def mixed(x: Any, w: Any, lib: Library) -> Any:
    # A counter and a constant carry, which have no tangent.
    def body(c: Any, v: Any) -> Any:
        i, k, s = c
        return (i + 1, k, s * k + v[0] * w), None

    (_, _, s), _ = lib.scan(body, (0, lib.m.asarray(np.float32(2)), w), x)
    return lib.m.sum(s * s)


def no_steps(x: Any, w: Any, lib: Library) -> Any:
    c, _ = lib.scan(lambda c, v: (c * v * 3, None), w * w, x[:0])
    return lib.m.sum(c)


def cond_in_scan(x: Any, w: Any, lib: Library) -> Any:
    def body(c: Any, v: Any) -> Any:
        return lib.cond(v[0] > 0.5, lambda: c * w, lambda: lib.m.sin(c)), c

    return lib.m.sum(lib.scan(body, w, x)[1] * x)


def scan_in_cond(x: Any, w: Any, lib: Library) -> Any:
    def then() -> Any:
        return lib.scan(lambda c, v: (c * v, None), w, x)[0]

    return lib.m.sum(lib.cond(x[0, 0] > 0.2, then, lambda: w))


def scan_in_scan(x: Any, w: Any, lib: Library) -> Any:
    def inner(c: Any, s: Any) -> Any:
        return c * s + w[0], None

    def outer(c: Any, v: Any) -> Any:
        return lib.scan(inner, c, v)[0], c

    return lib.m.sum(lib.scan(outer, w, x)[0])


def mapped(x: Any, w: Any, lib: Library) -> Any:
    return lib.m.sum(lib.map(lambda v: lib.m.sin(v) * w * w, x))


def prefix(x: Any, w: Any, lib: Library) -> Any:
    return lib.m.sum(lib.prefix(lambda a, b: a * b, x * w) * x)


def prefix_pair(x: Any, w: Any, lib: Library) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lib.m.sum(lib.prefix(combine, (x, x * w), reverse=True)[1])


def called(x: Any, w: Any, lib: Library) -> Any:
    def f(v: Any) -> Any:
        return lib.m.sin(v) * w

    return lib.m.sum(lib.call(f, x) * lib.call(f, x * 2))


PROGRAMS = [
    *(cond, singular, switch, scan, reverse, mixed, no_steps, cond_in_scan),
    *(scan_in_cond, scan_in_scan, mapped, prefix, prefix_pair, called),
]


def scalar(program: Any, x: Any, lib: Library) -> Callable[[Any], Any]:
    return lambda w: program(x, w, lib)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "value": lambda d, f, s, w: f(w),
    "jvp": lambda d, f, s, w: d.jvp(f, (w,), (w,))[1],
    "grad": lambda d, f, s, w: d.grad(f)(w),
    "vjp of vjp": lambda d, f, s, w: d.grad(lambda w: s(d.grad(f)(w) * w))(w),
    "jvp of vjp": lambda d, f, s, w: d.jvp(d.grad(f), (w,), (w,))[1],
    "vjp of jvp": lambda d, f, s, w: d.grad(lambda w: d.jvp(f, (w,), (w,))[1])(w),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_derivatives_are_those_of_jax(program: Any, composition: str) -> None:
    apply = COMPOSITIONS[composition]
    theirs = scalar(program, jnp.asarray(X), JAX)
    want = jax.jit(lambda w: apply(jax, theirs, jnp.sum, w))(W)
    ours = scalar(program, hf.asarray(X), HOPFLOW)

    def run(w: Any) -> Any:
        return apply(hf, ours, hf.sum, w)

    for found in (run(hf.asarray(W)), hf.jit(run)(hf.asarray(W))):
        np.testing.assert_allclose(
            np.asarray(found), np.asarray(want), rtol=5e-5, atol=5e-6
        )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients_of_what_is_sliced(program: Any) -> None:
    want = jax.grad(lambda x: program(x, jnp.asarray(W), JAX))(jnp.asarray(X))
    found = hf.grad(lambda x: program(x, hf.asarray(W), HOPFLOW))(hf.asarray(X))
    np.testing.assert_allclose(np.asarray(found), want, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_derivatives_through_a_while_loop(steps: int, wrap: Any) -> None:
    def f(w: Any, n: Any) -> Any:
        c = (0, w)
        return hf.while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * c), c)[1]

    def total(w: Any, n: Any) -> Any:
        return hf.sum(f(w, n))

    n = hf.asarray(steps)
    power = 2**steps
    first = power * W ** (power - 1)
    second = power * (power - 1) * W ** max(power - 2, 0)
    _, tangent = wrap(lambda w, n: hf.jvp(lambda w: f(w, n), (w,), (w,)))(W, n)
    np.testing.assert_allclose(np.asarray(tangent), first * W, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(wrap(hf.grad(total))(W, n)), first, rtol=1e-5)

    def again(w: Any, n: Any) -> Any:
        return hf.sum(hf.grad(total)(w, n))

    found = np.asarray(wrap(hf.grad(again))(W, n))
    np.testing.assert_allclose(found, second, rtol=1e-5)


def test_a_while_loop_has_gradients_of_what_it_captures() -> None:
    def f(w: Any, x: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            return i + 1, hf.sin(c * w)

        return hf.sum(hf.while_loop(lambda i, c: hf.sum(c) > 0.1, body, (0, x))[1])

    def unrolled(w: Any, x: Any) -> Any:
        while jnp.sum(x) > 0.1:
            x = jnp.sin(x * w)
        return jnp.sum(x)

    for wrap in (lambda f: f, hf.jit):
        for k in (0, 1):
            found = wrap(hf.grad(f, k))(W, X[0])
            want = jax.grad(unrolled, k)(jnp.asarray(W), jnp.asarray(X[0]))
            np.testing.assert_allclose(np.asarray(found), want, rtol=1e-4)


def scanned(step: Any, w: Any) -> Any:
    return hf.scan(lambda c, _: (step(c), None), w, None, length=2)[0]


def counted(step: Any, w: Any) -> Any:
    return hf.while_loop(lambda i, _: i < 2, lambda i, c: (i + 1, step(c)), (0, w))[1]


@pytest.mark.parametrize("twice", [scanned, counted])
def test_what_is_the_same_in_each_step_is_kept_without_the_checks_of_steps(
    twice: Any,
) -> None:
    def f(w: Any) -> Any:
        def step(c: Any) -> Any:
            hf.check(c[0, 0] < 9, "it is small")
            return hf.sin((w @ w) * c)

        return hf.sum(twice(step, w))

    w = np.full((3, 3), 0.5, np.float32)
    want = jax.grad(lambda w: jnp.sum(jnp.sin(w @ w * jnp.sin(w @ w * w))))(w)
    np.testing.assert_allclose(np.asarray(hf.grad(f)(w)), want, rtol=1e-5)


def test_writes_to_captured_tensors_in_bodies_are_values() -> None:
    def f(w: Any) -> Any:
        total = w * 0

        def body(c: Any, v: Any) -> Any:
            total[...] = total + v * w
            return c, None

        hf.scan(body, 0, X)
        return hf.sum(total * total)

    want = jax.grad(lambda w: jnp.sum((X.sum(0) * w) ** 2))(W)
    np.testing.assert_allclose(np.asarray(hf.grad(f)(W)), want, rtol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_derivatives_serve_all_sizes(program: Any) -> None:
    def gradient(lib: Library, of: Any) -> Any:
        return of(lambda x, w: program(x, w, lib), (0, 1))

    jitted = hf.jit(gradient(HOPFLOW, hf.grad), dynamic=True)
    before = hf.stats().traces
    for rows, columns in ((2, 3), (4, 3), (3, 5)):
        x: Any = np.linspace(0.3, 1.5, rows * columns, dtype=np.float32)
        x = x.reshape(rows, columns)
        w = np.linspace(0.1, 0.9, columns, dtype=np.float32)
        want = gradient(JAX, jax.grad)(jnp.asarray(x), jnp.asarray(w))
        for got, expected in zip(jitted(x, w), want, strict=True):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=5e-5, atol=5e-6)
    assert hf.stats().traces == before + 1
