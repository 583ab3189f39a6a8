"""Derivatives: of functions of Python, of traces, and of each other; against JAX."""

from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    MutationError,
    ResultTypeError,
    ShapeError,
    StructureError,
)

jax = pytest.importorskip("jax")
jnp = jax.numpy

X = np.linspace(0.3, 1.5, 6).reshape(2, 3).astype(np.float32)


GRAD: Any = hf.grad
JVP: Any = hf.jvp


def f(x: Any, m: Any) -> Any:
    inner = m.sin(x) * x / (x + 2.0) - m.exp(-x)[0] + m.tanh(x.T).reshape(2, 3)
    return m.sum(inner)


def ours(x: Any) -> Any:
    return f(x, hf)


def theirs(x: Any) -> Any:
    return f(x, jnp)


def close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(want), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    "wrap", [lambda g: g, lambda g: hf.jit(g)], ids=["eager", "jit"]
)
def test_compositions_agree_with_jax(wrap: Any) -> None:
    close(wrap(hf.grad(ours))(X), jax.grad(theirs)(X))
    second = wrap(hf.grad(lambda x: hf.sum(hf.grad(ours)(x) * x)))(X)
    close(second, jax.grad(lambda x: jnp.sum(jax.grad(theirs)(x) * x))(X))
    forward = wrap(lambda x: hf.jvp(ours, (x,), (x,))[1])(X)
    close(forward, jax.jvp(theirs, (X,), (X,))[1])
    over = wrap(lambda x: hf.jvp(hf.grad(ours), (x,), (x,))[1])(X)
    close(over, jax.jvp(jax.grad(theirs), (X,), (X,))[1])
    under = wrap(hf.grad(lambda x: hf.jvp(ours, (x,), (x,))[1]))(X)
    close(under, jax.grad(lambda x: jax.jvp(theirs, (x,), (x,))[1])(X), 1e-5)


def test_python_may_look_at_values() -> None:
    def g(x: Any) -> Any:
        return x * x if x > 0 else -x

    assert hf.grad(g)(3.0).item() == 6.0
    assert hf.grad(g)(-3.0).item() == -1.0
    assert hf.grad(hf.grad(g))(3.0).item() == 2.0


def test_linearize_and_vjp_are_adjoint() -> None:
    value, push = hf.linearize(lambda x: hf.sin(x) * X, X)
    same, pull = hf.vjp(lambda x: hf.sin(x) * X, X)
    close(value, same)
    t, ct = X + 1, X - 2
    left = hf.sum(push(t) * ct)
    [back] = pull(ct)
    close(left, hf.sum(back * t), 1e-5)


def test_arguments_and_results_are_trees() -> None:
    def g(params: Any, x: Any, n: Any) -> Any:
        return hf.sum(params["w"] * x) * n + params["b"], {"aux": x}

    params = {"w": hf.asarray(X), "b": hf.asarray(2.0)}
    (value, aux), (dp, dx) = hf.value_and_grad(g, (0, 1), has_aux=True)(params, X, 3)
    close(value, 3 * np.sum(X * X) + 2, 1e-5)
    close(dp["w"], 3 * X)
    assert dp["b"].item() == 1.0
    close(dx, 3 * X)
    close(aux["aux"], X)
    _, pull = hf.vjp(lambda x, k: (x * 2, k), hf.ones(2), hf.asarray(3))
    dx, dk = pull((hf.ones(2), None))
    assert dx.tolist() == [2, 2]
    assert dk.dtype is hf.int64


def test_writes_are_values() -> None:
    def g(x: Any) -> Any:
        y = x * 1
        z = y[0]
        y += x
        return hf.sum(y * y) + hf.sum(z)

    want = jax.grad(lambda x: jnp.sum(4 * x * x) + jnp.sum(2 * x[0]))(X)
    close(hf.grad(g)(X), want)


def test_what_a_derivative_needs_is_not_to_be_written() -> None:
    x = hf.asarray(X, copy=True)
    _, pull = hf.vjp(lambda y: hf.sum(y * x), hf.asarray(X))
    x[0] = 1.0
    with pytest.raises(MutationError, match="has been written since"):
        pull(1.0)


@pytest.mark.parametrize("form", [lambda f: f, hf.jit, hf.functionalize])
@pytest.mark.parametrize("view", [lambda c: c, lambda c: c[::-1], lambda c: c[:, :1]])
def test_what_a_function_writes_after_it_read_it(view: Any, form: Any) -> None:
    def loss(x: Any, c: Any) -> Any:
        y = hf.sum(x * view(c))
        c[1:] = 5.0
        return y + hf.sum(c)

    x = hf.asarray(X)
    want = hf.broadcast_to(view(x), X.shape)
    derivatives: list[Any] = [
        lambda c: hf.grad(form(lambda x: loss(x, c)))(x),
        lambda c: form(lambda x: hf.grad(lambda x: loss(x, c))(x))(x),
        lambda c: hf.vjp(form(lambda x: loss(x, c)), x)[1](1.0)[0],
    ]
    for derivative in derivatives:
        c = hf.asarray(X, copy=True)
        close(derivative(c), want)
        close(c[1:], np.full_like(X[1:], 5.0))


def test_what_an_inner_derivative_writes_after_it_read_it() -> None:
    def f(x: Any) -> Any:
        y = x * 2

        def inner(z: Any) -> Any:
            value = hf.sum(z * y * z)
            y[0] = z[0] * 0 + 7.0
            return value

        return hf.sum(hf.grad(inner)(x) * y)

    x = hf.asarray(X)
    want = jax.grad(lambda x: jnp.sum(4 * x * x * (2 * x).at[0].set(7.0)))(X)
    for run in (hf.grad(f), hf.jit(hf.grad(f)), hf.grad(hf.jit(f))):
        close(run(x), want)


@pytest.mark.parametrize("transform", [hf.vjp, hf.linearize])
def test_writes_after_the_function_ran(transform: Any) -> None:
    def late(x: Any) -> Any:
        y = x * 1.0  # nothing has viewed it
        _, derivative = transform(lambda z: z * y * z, x)
        y[0] = 100.0
        return derivative(x)

    x = hf.asarray([1.0, 2.0])
    with pytest.raises(MutationError, match="has been written since"):
        late(x)
    [got] = hf.jit(lambda x: late(x) if transform is hf.vjp else (late(x),))(x)
    close(got, [2.0, 16.0])  # a trace has the value that was


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: GRAD(3), ArgumentTypeError, "`f` must be a function"),
        (lambda: GRAD(ours, "0"), ArgumentTypeError, "argnums"),
        (lambda: hf.grad(ours, 1)(X), ArgumentValueError, "names argument 1"),
        (lambda: hf.grad(ours)(3), DerivativeError, "only floats have gradients"),
        (lambda: hf.grad(lambda x: x)(X), DerivativeError, "must return one scalar"),
        (lambda: hf.grad(lambda x: hf.sum(x) > 1)(X), DerivativeError, "Return one."),
        (lambda: hf.grad(lambda x: None)(X), DerivativeError, "and returns nothing."),
        (lambda: hf.grad(ours, (0, -1))(X), ArgumentValueError, "each argument once"),
        (lambda: hf.grad(lambda x: "a")(X), ResultTypeError, "must return tensors"),
        (lambda: JVP(ours, X, X), ArgumentTypeError, "must be a tuple"),
        (lambda: hf.jvp(ours, (X,), (X[0],)), ShapeError, r"`tangents\[0\]` must be"),
        (lambda: hf.jvp(ours, (X,), (X, X)), StructureError, "structure"),
        (lambda: hf.vjp(ours, "a"), ArgumentTypeError, "must be a tensor"),
        (lambda: hf.vjp(hf.sin, X)[1]((X,)), StructureError, "structure"),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_powers_of_zero_to_integers_have_slopes() -> None:
    x, y = np.array([0.0, 0.0, 0.0, 0.3, 2.0], np.float32), np.array([0, 1, 2, 0, 3])
    found = hf.grad(lambda x: hf.sum(x ** hf.asarray(y)))(hf.asarray(x))
    want = jax.grad(lambda x: jax.numpy.sum(x**y))(x)
    assert np.allclose(np.asarray(found), want)
    assert hf.grad(lambda x: x ** np.int64(0) + 2.0 ** hf.asarray(3))(0.0).item() == 0
