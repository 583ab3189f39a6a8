"""Factorisations and linear systems.

Solutions and determinants have derivatives of their own, as in hopflow: they are
computed from factors that have none.
"""

from collections.abc import Callable
from functools import partial
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


def _solution(_site: Site, *operands: Array, transposed: bool) -> Array:
    return _as_solution(*operands, transposed=transposed)


def _as_solution(*operands: Array, transposed: bool) -> Array:
    """`x`, of which it is known that it solves `a @ x = b`."""
    jax = library()
    function = jax.custom_jvp(lambda _a, _b, x, *_: x)
    function.defjvp(partial(_solution_jvp, transposed=transposed))
    return function(*operands)


def _solution_jvp(
    primals: Any, tangents: Any, *, transposed: bool
) -> tuple[Array, Array]:
    (a, _, _, lu, order), (da, db, *_) = primals, tangents
    jnp = library().numpy
    solution = _as_solution(*primals, transposed=transposed)
    change = db - jnp.matmul(da.mT if transposed else da, solution)
    solved = _solved(change, lu, order, transposed=transposed)
    return solution, _as_solution(a, change, solved, lu, order, transposed=transposed)


def _solved(b: Array, lu: Array, order: Array, *, transposed: bool) -> Array:
    """The solution by factors, without derivatives."""
    jax = library()
    b = jax.lax.stop_gradient(b)
    rows = order[..., None]
    if not transposed:
        b = jax.numpy.take_along_axis(b, rows, axis=-2)
    for upper in (True, False) if transposed else (False, True):
        b = _solve(lu, b, upper=upper, transposed=transposed, unit=not upper)
    if transposed:
        back = jax.numpy.argsort(order, axis=-1)[..., None]
        b = jax.numpy.take_along_axis(b, back, axis=-2)
    return b


def _determinant(site: Site, x: Array, det: Array) -> Array:
    function = site.jax.custom_jvp(lambda _, det: det)

    @function.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x, det), (dx, _) = primals, tangents
        return det, site.jax.jvp(site.jnp.linalg.det, (x,), (dx,))[1]

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
