"""Factorisations of small matrices, which compiled code writes out."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.passes.small_matrices import MOST
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, np.dtype[Any]]

RNG: Final = np.random.default_rng(0)
BATCHES: Final[list[tuple[int, ...]]] = [(), (0,), (5,), (2, 3)]


def matrices(n: int, batch: tuple[int, ...], dtype: str = "float64") -> Array:
    return (RNG.normal(size=(*batch, n, n)) + np.eye(n)).astype(dtype)


def positive(n: int, batch: tuple[int, ...], dtype: str = "float64") -> Array:
    a = matrices(n, batch, dtype)
    return (a @ a.swapaxes(-1, -2) + np.eye(n)).astype(dtype)


def near(found: Any, wanted: Any, dtype: str = "float64") -> None:
    tolerance = 1e-9 if dtype == "float64" else 1e-3
    np.testing.assert_allclose(
        np.asarray(found), wanted, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("n", range(1, MOST + 2))
def test_results_are_those_of_numpy(
    n: int, batch: tuple[int, ...], dtype: str, dynamic: bool
) -> None:
    def f(a: Any, b: Any, c: Any) -> Any:
        results = hf.linalg.solve(a, b), hf.linalg.inv(a), hf.linalg.det(a)
        return *results, hf.linalg.cholesky(c)

    a, c = matrices(n, batch, dtype), positive(n, batch, dtype)
    b = RNG.normal(size=(*batch, n, 2)).astype(dtype)
    run = hf.jit(f, dynamic=dynamic)
    x, inverse, determinant, factor = run(a, b, c)
    near(x, np.linalg.solve(a, b), dtype)
    near(inverse, np.linalg.inv(a), dtype)
    near(determinant, np.linalg.det(a), dtype)
    near(factor, np.linalg.cholesky(c), dtype)
    if not dynamic and 0 not in batch:
        assert ("call getrf" in run.loop_ir) is (n > MOST)


@pytest.mark.parametrize("n", range(2, MOST + 1))
def test_the_first_of_the_largest_elements_is_the_pivot(n: int) -> None:
    for values in np.ndindex(*(3,) * n):
        a = np.triu(np.ones((n, n))) + np.eye(n)
        a[:, 0] = [value - 1.0 for value in values]
        found = hf.jit(lambda a: hf.linalg.inv(a))(a)
        if abs(np.linalg.det(a)) > 1e-9:
            near(found, np.linalg.inv(a))


def test_a_singular_matrix_has_no_solution() -> None:
    a, b = np.array([[1.0, 2.0], [2.0, 4.0]]), np.ones((2, 1))
    solve = hf.linalg.solve
    found, eager = hf.jit(solve)(a, b), solve(a, b)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(eager))
    zero = hf.jit(hf.linalg.solve)(np.zeros((2, 2)), b)
    assert not np.isfinite(np.asarray(zero)).any()


@pytest.mark.parametrize(
    "a", [[[-1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]
)
def test_a_matrix_that_is_not_positive_definite_has_no_factor(a: Any) -> None:
    factor = np.asarray(hf.jit(hf.linalg.cholesky)(np.asarray(a)))
    assert np.isnan(factor[np.tril_indices(2)]).all()
    assert factor[0, 1] == 0.0


def test_the_other_triangle_is_not_read() -> None:
    a, b = matrices(3, (4,)), RNG.normal(size=(4, 3, 2))
    for upper in (False, True):
        half = np.triu(a) if upper else np.tril(a)
        noise = np.where(half == 0.0, np.nan, a)
        f = lambda a, b, upper=upper: hf.linalg.solve_triangular(a, b, lower=not upper)  # noqa: E731
        near(hf.jit(f)(noise, b), np.linalg.solve(half, b))


DERIVATIVES: Final[dict[str, Callable[[Any], Any]]] = {
    "grad": lambda d: d.grad(lambda a, b: d.sum(d.solve(a, b) ** 2), argnums=(0, 1)),
    "vmap of grad": lambda d: d.vmap(d.grad(lambda a, b: d.sum(d.solve(a, b) ** 2))),
    "grad of vmap": lambda d: d.grad(lambda a, b: d.sum(d.vmap(d.solve)(a, b) ** 2)),
    "grad of cholesky": lambda d: d.grad(
        lambda a, b: d.sum(d.cholesky(a @ d.transposed(a) + d.eye(3)) * b[..., :1])
    ),
}


class _Hopflow:
    grad, vmap, sum, eye = hf.grad, hf.vmap, hf.sum, hf.eye
    solve, cholesky = hf.linalg.solve, hf.linalg.cholesky
    transposed = hf.matrix_transpose


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_jax(name: str) -> None:
    jax = load("jax")

    class Jax:
        grad, vmap, sum, eye = jax.grad, jax.vmap, jax.numpy.sum, jax.numpy.eye
        solve, cholesky = jax.numpy.linalg.solve, jax.numpy.linalg.cholesky
        transposed = jax.numpy.matrix_transpose

    a, b = matrices(3, (4,)), RNG.normal(size=(4, 3, 2))
    make = DERIVATIVES[name]
    found = hf.jit(make(_Hopflow))(a, b)
    with jax.enable_x64(True):
        wanted = jax.jit(make(Jax))(a, b)
    pairs = zip(found, wanted, strict=True) if name == "grad" else [(found, wanted)]
    for x, y in pairs:
        near(x, np.asarray(y))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loop_solves_in_each_step(dynamic: bool) -> None:
    def f(a: Any, x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return hf.linalg.solve(a + hf.eye(2, dtype=a.dtype) * i, x)

        return hf.fori_loop(1, 5, step, x)

    a, x = positive(2, ()), np.ones((2, 1))
    wanted = x
    for i in range(1, 5):
        wanted = np.linalg.solve(a + np.eye(2) * i, wanted)
    near(hf.jit(f, dynamic=dynamic)(a, x), wanted)
