"""Factorisations, of which ONNX has none: as loops, in our own operations.

Each is the textbook's algorithm with the choices of LAPACK where there are several: the
first of equal pivots, the signs of Householder's reflections (E. Anderson et al.,
"LAPACK Users' Guide", 3rd edition, 1999). So results are equal up to rounding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from hopflow import dtypes
from hopflow.errors import ExportError
from hopflow.export.onnx.frames import Frame, Site
from hopflow.export.onnx.scopes import Value
from hopflow.graph.types import is_zero
from hopflow.hops.while_loop import fori_loop
from hopflow.ops import reduce
from hopflow.ops.convert import astype
from hopflow.ops.creation import arange, eye, tril, triu, zeros, zeros_like
from hopflow.ops.elementwise import abs, copysign, equal, isnan, where
from hopflow.ops.indexing import take, take_along_axis
from hopflow.ops.manipulation import broadcast_to, expand_dims
from hopflow.ops.math import sqrt
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.views import part
from hopflow.trace.capture import trace

# --- factorisations -------------------------------------------------------------------


def _cholesky(x: Any) -> Any:
    """Column by column; of a matrix that is not positive definite all is NaN."""
    n = x.shape[-1]
    rows = arange(n)

    def column(j: Any, l: Any) -> Any:  # noqa: E741
        before = expand_dims(take(l, j, axis=-2), axis=-1)
        rest = take(x, j, axis=-1) - matmul(l, before)[..., 0]
        root = sqrt(expand_dims(take(rest, j, axis=-1), axis=-1))
        column = where(rows >= j, rest / root, 0.0)
        return where(rows == j, expand_dims(column, axis=-1), l)

    factor: Any = fori_loop(0, n, column, zeros_like(x))
    fails = reduce.any(isnan(factor), axis=(-2, -1), keepdims=True)
    return where(fails, tril(zeros_like(x) + math.nan), factor)


def _lu(x: Any) -> Any:
    """By columns, with the largest element of each as the pivot."""
    *batch, m, n = x.shape
    count = min(m, n)
    rows, columns, steps = arange(m), arange(n), arange(count)

    def step(j: Any, a: Any, pivots: Any) -> Any:
        sizes = where(rows >= j, abs(take(a, j, axis=-1)), -1.0)
        at = expand_dims(reduce.argmax(sizes, axis=-1), axis=-1)
        order = where(rows == j, at, where(rows == at, j, rows))
        a = take_along_axis(a, expand_dims(order, axis=-1), axis=-2)
        row = take(a, j, axis=-2)
        pivot = expand_dims(take(row, j, axis=-1), axis=-1)
        scaled = take(a, j, axis=-1) / where(equal(pivot, 0), 1.0, pivot)
        factors = expand_dims(where(rows > j, scaled, 0.0), axis=-1)
        rest = expand_dims(where(columns > j, row, 0.0), axis=-2)
        below = (expand_dims(rows, axis=-1) > j) & (columns == j)
        a = where(below, factors, a - factors * rest)
        return a, where(steps == j, astype(at, dtypes.int32), pivots)

    first = x, zeros((*batch, count), dtype=dtypes.int32)
    return fori_loop(0, count, step, first)


def _lu_permutation(pivots: Any, *, size: int) -> Any:
    """The exchanges, done to the numbers of the rows."""
    rows = arange(size)

    def exchange(step: Any, order: Any) -> Any:
        other = expand_dims(astype(take(pivots, step, axis=-1), dtypes.int64), axis=-1)
        here = expand_dims(take(order, step, axis=-1), axis=-1)
        there = take_along_axis(order, other, axis=-1)
        return where(rows == other, here, where(rows == step, there, order))

    first = broadcast_to(rows, (*pivots.shape[:-1], size))
    return fori_loop(0, pivots.shape[-1], exchange, first)


def _triangular_solve(
    a: Any, b: Any, *, upper: bool, transposed: bool, unit: bool
) -> Any:
    """By substitution, a row at a time; the other triangle is not read."""
    if transposed:
        a, upper = matrix_transpose(a), not upper
    n = a.shape[-1]
    rows = arange(n)

    def row(step: Any, x: Any) -> Any:
        i = n - 1 - step if upper else step
        line = take(a, i, axis=-2)
        known = where(rows > i if upper else rows < i, line, 0.0)
        rest = take(b, i, axis=-2) - matmul(expand_dims(known, axis=-2), x)[..., 0, :]
        if not unit:
            rest = rest / expand_dims(take(line, i, axis=-1), axis=-1)
        here = expand_dims(rows == i, axis=-1)
        return where(here, expand_dims(rest, axis=-2), x)

    return fori_loop(0, n, row, zeros_like(b))


def _qr(x: Any, *, complete: bool) -> Any:
    """By Householder's reflections."""
    *batch, m, n = x.shape
    count, rows = min(m, n), arange(m)

    def reflect(j: Any, q: Any, r: Any) -> Any:
        column = take(r, j, axis=-1)
        alpha = expand_dims(take(column, j, axis=-1), axis=-1)
        below = where(rows > j, column, 0.0)
        square = reduce.sum(below * below, axis=-1, keepdims=True)
        beta = -copysign(sqrt(alpha * alpha + square), alpha)
        is_done = equal(square, 0)
        tau = where(is_done, 0.0, (beta - alpha) / where(is_done, 1.0, beta))
        scaled = below / where(is_done, 1.0, alpha - beta)
        v = expand_dims(where(rows == j, 1.0, scaled), axis=-1)
        tau, flat = expand_dims(tau, axis=-1), matrix_transpose(v)
        return q - tau * matmul(matmul(q, v), flat), r - tau * v * matmul(flat, r)

    first = broadcast_to(eye(m, dtype=x.dtype), (*batch, m, m)), x
    q, r = fori_loop(0, count, reflect, first)
    if not complete:
        q, r = part(q, x.ndim - 1, 0, count), part(r, x.ndim - 2, 0, count)
    return q, triu(r)


# --- as rules -------------------------------------------------------------------------


def _composed(f: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation that is a function of our own operations."""

    def rule(site: Site, *operands: Value, **params: Any) -> Sequence[Value]:
        if any(is_zero(n) for t in site.results for n in t.shape):
            return [
                site.expanded(site.constant(0, t.dtype), t.shape) for t in site.results
            ]
        module = trace(lambda *xs: f(*xs, **params), *site.types, mode="fake")
        symbols = [None] * len(module.graph.symbols)
        args = [*symbols, *operands]
        return Frame(site.writer, site.scope, module.graph, args).run()

    return rule


def _refused(what: str) -> Callable[..., Any]:
    def rule(_site: Site, *_operands: Value, **_params: Any) -> Any:
        raise ExportError(
            f"ONNX has no {what}, and the signs of LAPACK's vectors follow from no "
            "rule that a model could repeat. Compute them before, or after it."
        )

    return rule


RULES: Final[dict[str, Callable[..., Any]]] = {
    "cholesky": _composed(_cholesky),
    "eigh": _refused("eigenvalues"),
    "lu": _composed(_lu),
    "lu_permutation": _composed(_lu_permutation),
    "qr": _composed(_qr),
    "svd": _refused("singular values"),
    "triangular_solve": _composed(_triangular_solve),
}
