"""Factorisations and linear systems.

Solutions and determinants have derivatives of their own, as in hopflow, which computes
them from factors that have none.
"""

from collections.abc import Callable
from typing import Any, Final

from hopflow.export.jax.frames import Array, Site
from hopflow.export.jax.library import library
from hopflow.symbolic.size import Size


def _cholesky(site: Site, x: Array) -> Array:
    return site.lax.linalg.cholesky(x, symmetrize_input=False)


def _lu(site: Site, x: Array) -> list[Array]:
    packed, pivots, _ = site.lax.linalg.lu(x)
    return [packed, pivots]


def _lu_permutation(site: Site, pivots: Array, *, size: Size) -> Array:
    count = site.dimension(size)
    order = site.lax.linalg.lu_pivots_to_permutation(pivots, count)
    return order.astype(site.jnp.int64)


def _triangular_solve(_site: Site, a: Array, b: Array, **kind: bool) -> Array:
    return _solve(a, b, **kind)


def _solve(a: Array, b: Array, *, upper: bool, transposed: bool, unit: bool) -> Array:
    return library().lax.linalg.triangular_solve(
        *(a, b),
        left_side=True,
        lower=not upper,
        transpose_a=transposed,
        unit_diagonal=unit,
    )


def _qr(site: Site, x: Array, *, complete: bool) -> list[Array]:
    return list(site.lax.linalg.qr(x, full_matrices=complete))


def _eigh(site: Site, x: Array, *, vectors: bool) -> Any:
    found = site.lax.linalg.eigh(x, lower=True, symmetrize_input=False)
    return [found[1], found[0]] if vectors else found[1]


def _svd(site: Site, x: Array, *, mode: str) -> Any:
    if mode == "values":
        return site.lax.linalg.svd(x, compute_uv=False)
    return list(site.lax.linalg.svd(x, full_matrices=mode == "full"))


# --- solutions ------------------------------------------------------------------------


def _solution(
    site: Site,
    a: Array,
    b: Array,
    _x: Array,
    lu: Array,
    order: Array,
    *,
    transposed: bool,
) -> Array:
    """The solution of `a @ x = b`, or `a^T @ x = b`, by the factors of `a`. JAX solves
    again, instead of taking the solution that it is given, and knows what it does."""

    def product(x: Array) -> Array:
        return site.jnp.matmul(a.mT if transposed else a, x)

    def solve(_: Any, b: Array) -> Array:
        return _solved(b, lu, order, transposed=transposed)

    def solve_transposed(_: Any, b: Array) -> Array:
        return _solved(b, lu, order, transposed=not transposed)

    return site.lax.custom_linear_solve(product, b, solve, solve_transposed)


def _solved(b: Array, lu: Array, order: Array, *, transposed: bool) -> Array:
    jnp, rows = library().numpy, order[..., None]
    if not transposed:
        b = jnp.take_along_axis(b, rows, axis=-2)
    for upper in (True, False) if transposed else (False, True):
        b = _solve(lu, b, upper=upper, transposed=transposed, unit=not upper)
    if transposed:
        b = jnp.take_along_axis(b, jnp.argsort(rows, axis=-2), axis=-2)
    return b


def _determinant(site: Site, x: Array, det: Array) -> Array:
    function = site.jax.custom_jvp(lambda _, det: det)

    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x, _), (dx, _) = primals, tangents
        tangent = site.jax.jvp(site.jnp.linalg.det, (x,), (dx,))[1]
        return function(*primals), tangent

    function.defjvp(rule)
    return function(x, det)


RULES: Final[dict[str, Callable[..., Any]]] = {
    "cholesky": _cholesky,
    "determinant": _determinant,
    "eigh": _eigh,
    "lu": _lu,
    "lu_permutation": _lu_permutation,
    "qr": _qr,
    "solution": _solution,
    "svd": _svd,
    "triangular_solve": _triangular_solve,
}
