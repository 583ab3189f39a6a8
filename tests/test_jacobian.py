"""`jacfwd`, `jacrev` and `hessian`."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.errors import ArgumentTypeError, ArgumentValueError, DerivativeError
from hopflow.testing.executions import agree, fails
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

hf: Any = hopflow

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
V = np.linspace(0.5, 2, 3, dtype=np.float32)
both = pytest.mark.parametrize("name", ["jacfwd", "jacrev"])


def model(np: Any, x: Any, v: Any) -> Any:
    y = np.tanh(x * v)
    return {"y": y * y, "z": (np.sum(x) * v, np.sum(y * x))}


def quadratic(np: Any, x: Any, v: Any) -> Any:
    return np.sum(np.sin(x * v)) * np.sum(x) + np.sum(v * v * v)


@requires("jax")
@both
@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1,)])
@pytest.mark.parametrize("jit", [False, True])
def test_jacobians_are_those_of_jax(name: str, argnums: Any, jit: bool) -> None:
    import jax
    import jax.numpy as jnp

    ours = getattr(hf, name)(lambda x, v: model(hf, x, v), argnums)
    theirs = getattr(jax, name)(lambda x, v: model(jnp, x, v), argnums)
    got = (hf.jit(ours) if jit else ours)(hf.asarray(X), hf.asarray(V))
    want = jax.tree.map(np.asarray, theirs(X, V))
    agree(got, want)


@requires("jax")
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_the_hessian_is_that_of_jax(argnums: Any) -> None:
    import jax
    import jax.numpy as jnp

    ours = hf.hessian(lambda x, v: quadratic(hf, x, v), argnums)
    theirs = jax.hessian(lambda x, v: quadratic(jnp, x, v), argnums)
    want = jax.tree.map(np.asarray, theirs(X, V))
    agree(ours(hf.asarray(X), hf.asarray(V)), want)


@both
def test_the_function_may_look_at_values(name: str) -> None:
    def f(x: Any) -> Any:
        return x * x if float(x[0]) > 0 else x

    x = hf.asarray(V)
    agree(getattr(hf, name)(f)(x), np.diag(2 * V))
    agree(getattr(hf, name)(f)(-x), np.eye(3, dtype=np.float32))


@both
def test_trees_of_arguments(name: str) -> None:
    def f(p: Any) -> Any:
        return p["a"] * p["b"]

    a, b = np.float32(2), V
    got = getattr(hf, name)(f)({"a": hf.asarray(a), "b": hf.asarray(b)})
    agree(got, {"a": V, "b": a * np.eye(3, dtype=np.float32)})


@both
def test_a_batch_of_jacobians(name: str) -> None:
    got = hf.vmap(getattr(hf, name)(lambda x: hf.sin(x) * x[0]))(hf.asarray(X))
    each = [getattr(hf, name)(lambda x: hf.sin(x) * x[0])(hf.asarray(x)) for x in X]
    agree(got, np.stack([np.asarray(x) for x in each]))


@both
def test_errors(name: str) -> None:
    jacobian = getattr(hf, name)
    x = hf.asarray(V)
    fails(
        ArgumentTypeError,
        f"{name}: `f` must be a function, and is `int`.",
        lambda: jacobian(3),
    )
    fails(
        ArgumentValueError,
        f"{name}: `argnums` names argument 1, and 1 were given by position. Count from "
        "0, and pass by position what is to be differentiated.",
        lambda: jacobian(lambda x: x, 1)(x),
    )
    fails(
        DerivativeError,
        f"{name}: `x` is i64[3], and only floats have gradients. Convert it, or leave "
        "it out of `argnums`.",
        lambda: jacobian(lambda x: x)(hf.arange(3)),
    )
    fails(
        DerivativeError,
        f"{name}: `result[1]` is i64[], which has no derivative.",
        lambda: jacobian(lambda x: (x, 3))(x),
    )
    fails(
        DerivativeError,
        f"{name}: `<lambda>` returns nothing that has a derivative. Return a float "
        "tensor, or a tree of them.",
        lambda: jacobian(lambda x: None)(x),
    )
    fails(
        DerivativeError,
        f"{name}: the arguments of `<lambda>` that `argnums` names hold no tensor. "
        "Name one that does.",
        lambda: jacobian(lambda x, y: y, 0)((), x),
    )


def through_scan(v: Any) -> Any:
    return hf.scan(lambda c, a: (hf.sin(c) * a, c * c), v[0], v)


def through_cond(v: Any) -> Any:
    return hf.cond(v[0] > 0, lambda: hf.sin(v) * v[1], lambda: v)


def through_while(v: Any) -> Any:
    return hf.while_loop(lambda a: hf.sum(a) < 100, lambda a: a * a + a[0], v)


def through_vmap_in_scan(v: Any) -> Any:
    def step(c: Any, a: Any) -> Any:
        return hf.vmap(lambda x: hf.tanh(x * a) + hf.sum(c))(c), None

    return hf.scan(step, v, v)[0]


@pytest.mark.parametrize(
    "f", [through_scan, through_cond, through_while, through_vmap_in_scan]
)
def test_through_operators_forward_and_reverse_agree(f: Any) -> None:
    v = hf.asarray(V.astype(np.float64))
    forward, reverse = hf.jacfwd(f)(v), hf.jacrev(f)(v)
    agree(reverse, pytree.tree_map(np.asarray, forward))
    eps = 1e-6
    leaves = pytree.flatten(forward)[0]
    for k, unit in enumerate(np.eye(3)):
        up, down = (f(v + sign * eps * hf.asarray(unit)) for sign in (1, -1))
        pairs = zip(pytree.flatten(up)[0], pytree.flatten(down)[0], strict=True)
        for (a, b), jacobian in zip(pairs, leaves, strict=True):
            difference = (np.asarray(a) - np.asarray(b)) / (2 * eps)
            agree(jacobian[..., k], difference, rtol=1e-4)
    twice = np.asarray(hf.hessian(lambda v: hf.sum(pytree.flatten(f(v))[0][0]))(v))
    agree(twice, twice.T)
