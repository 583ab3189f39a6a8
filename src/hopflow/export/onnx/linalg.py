"""Factorisations, of which ONNX has none: as loops, in our own operations.

Each is the textbook's algorithm with the choices of LAPACK where there are several: the
first of equal pivots, the signs of Householder's reflections (E. Anderson et al.,
"LAPACK Users' Guide", 3rd edition, 1999). So results are equal up to rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from hopflow import dtypes
from hopflow.dtypes import finfo
from hopflow.errors import ExportError
from hopflow.export.onnx.frames import Frame, Site
from hopflow.export.onnx.pointwise import positions
from hopflow.export.onnx.scopes import Value
from hopflow.graph.types import TensorType, is_zero, same_size
from hopflow.hops.while_loop import fori_loop, while_loop
from hopflow.ops import reduce
from hopflow.ops.convert import astype
from hopflow.ops.creation import arange, eye, tril, triu, zeros, zeros_like
from hopflow.ops.elementwise import (
    abs,
    copysign,
    equal,
    isnan,
    logical_and,
    logical_or,
    where,
)
from hopflow.ops.indexing import take, take_along_axis
from hopflow.ops.linalg_det import diagonal
from hopflow.ops.manipulation import broadcast_to, expand_dims
from hopflow.ops.math import sqrt
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.sizes import smaller
from hopflow.ops.sorting import sort
from hopflow.ops.views import part
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute, symbol
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
    count = smaller(m, n)
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


def _exchanged(pivots: Any, rows: Any) -> Any:
    """The numbers of the rows after the exchanges."""

    def exchange(step: Any, order: Any) -> Any:
        other = expand_dims(astype(take(pivots, step, axis=-1), dtypes.int64), axis=-1)
        here = expand_dims(take(order, step, axis=-1), axis=-1)
        there = take_along_axis(order, other, axis=-1)
        return where(rows == other, here, where(rows == step, there, order))

    first = broadcast_to(rows, (*pivots.shape[:-1], *rows.shape))
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
    count, rows = smaller(m, n), arange(m)

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


# --- values alone, by Jacobi's rotations ----------------------------------------------

_MOST_SWEEPS: Final = 30
"""Jacobi's method converges quadratically: few sweeps are needed."""


def _turned(a: Any, b: Any, c: Any, p: Any, q: Any, n: Any) -> Any:
    """The rotation of the axes p < q that makes [[a, c], [c, b]] diagonal, [*b, n, n]
    (G. Golub and C. Van Loan, "Matrix Computations", 4th edition, section 8.5)."""
    is_done = logical_or(equal(c, 0), p >= q)
    ratio = (b - a) / (2.0 * where(is_done, 1.0, c))
    tangent = copysign(1.0, ratio) / (abs(ratio) + sqrt(ratio * ratio + 1.0))
    tangent = where(is_done, 0.0, tangent)
    cosine = 1.0 / sqrt(tangent * tangent + 1.0)
    sine, cosine = (expand_dims(v, axis=(-2, -1)) for v in (tangent * cosine, cosine))
    columns = arange(n)
    rows = expand_dims(columns, axis=-1)
    is_p, is_q = equal(rows, p), equal(rows, q)
    ends = logical_or(is_p, is_q)
    beside = where(logical_and(is_p, equal(columns, q)), sine, 0.0)
    beside = where(logical_and(is_q, equal(columns, p)), -sine, beside)
    return where(equal(rows, columns), where(ends, cosine, 1.0), beside)


def _swept(x: Any, n: Any, rotate: Any, is_far: Any) -> Any:
    """`x` after sweeps of rotations, one for each pair of axes, while it `is_far`."""

    def sweep(step: Any, x: Any) -> Any:
        return step + 1, fori_loop(0, n * n, rotate, x)

    def goes_on(step: Any, x: Any) -> Any:
        return logical_and(step < _MOST_SWEEPS, reduce.any(is_far(x)))

    return while_loop(goes_on, sweep, (0, x))[1]


def _at(x: Any, i: Any, j: Any) -> Any:
    return take(take(x, i, axis=-2), j, axis=-1)


def _eigenvalues(x: Any, *, vectors: bool) -> Any:
    if vectors:
        raise ExportError(_NO_VECTORS.format("eigenvectors"))
    n = x.shape[-1]
    least = float(finfo(x.dtype).eps) / 8

    def rotate(k: Any, a: Any) -> Any:
        p, q = k // n, k % n
        turn = _turned(_at(a, p, p), _at(a, q, q), _at(a, p, q), p, q, n)
        turn = astype(turn, a.dtype)
        return matmul(matmul(matrix_transpose(turn), a), turn)

    def is_far(a: Any) -> Any:
        below, size = tril(a, k=-1), reduce.sum(a * a, axis=(-2, -1))
        return reduce.sum(below * below, axis=(-2, -1)) > least * least * size

    symmetric = tril(x) + matrix_transpose(tril(x, k=-1))
    found = _swept(symmetric, n, rotate, is_far)
    return sort(diagonal(found), axis=-1)


def _singular_values(x: Any, *, mode: str) -> Any:
    """Those of the columns once they are orthogonal (M. Hestenes, 1958)."""
    if mode != "values":
        raise ExportError(_NO_VECTORS.format("singular vectors"))
    count = smaller(*x.shape[-2:])
    if same_size(x.shape[-2], count):
        x = matrix_transpose(x)
    n = x.shape[-1]
    least = float(finfo(x.dtype).eps)

    def rotate(k: Any, a: Any) -> Any:
        p, q = k // n, k % n
        first, second = take(a, p, axis=-1), take(a, q, axis=-1)
        pairs = ((first, first), (second, second), (first, second))
        sizes = (reduce.sum(u * v, axis=-1) for u, v in pairs)
        turn: Any = _turned(*(*sizes, p, q, n))
        return matmul(a, astype(turn, a.dtype))

    def is_far(a: Any) -> Any:
        products = matmul(matrix_transpose(a), a)
        sizes = sqrt(diagonal(products))
        scale = expand_dims(sizes, axis=-1) * expand_dims(sizes, axis=-2)
        return abs(tril(products, k=-1)) > least * scale

    found = _swept(x, n, rotate, is_far)
    sizes = sqrt(reduce.sum(found * found, axis=-2))
    return part(sort(sizes, axis=-1, descending=True), x.ndim - 2, 0, count)


_NO_VECTORS: Final = (
    "ONNX has no {}, and the signs of LAPACK's follow from no rule that a model could "
    "repeat. Compute them before, or after it."
)


# --- as rules -------------------------------------------------------------------------


def _composed(f: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation that is a function of our own operations."""

    def rule(site: Site, *operands: Value, **params: Any) -> Sequence[Value]:
        return traced(site, partial(f, **params), site.types, operands)

    return rule


def _lu_permutation(site: Site, pivots: Value, *, size: Size) -> Sequence[Value]:
    rows = positions(site, site.size(size))
    types = [*site.types, TensorType(dtypes.int64, (size,))]
    return traced(site, _exchanged, types, (pivots, rows))


def traced(
    site: Site,
    f: Callable[..., Any],
    types: Sequence[TensorType],
    operands: Sequence[Value],
) -> Sequence[Value]:
    """The results of a function of operands of these types."""
    if any(is_zero(n) for t in site.results for n in t.shape):
        return [site.expanded(site.constant(0, t.dtype), t.shape) for t in site.results]
    own = _with_own_symbols(types)
    module = trace(lambda *xs: f(*xs), *own, mode="fake")
    args = [*[None] * len(module.graph.symbols), *operands]
    return Frame(site.writer, site.scope, module.graph, args).run()


def _with_own_symbols(types: Sequence[TensorType]) -> list[TensorType]:
    """The types over new symbols, for those of the program belong to its own trace. The
    equal ones are one symbol."""
    shapes = [[_simplified(n) for n in t.shape] for t in types]
    outer = free_symbols(*(n for shape in shapes for n in shape))
    own: dict[Symbol, Size] = {s: symbol(s.name) for s in outer}
    return [
        t.with_shape([substitute(n, own) for n in shape])
        for t, shape in zip(types, shapes, strict=True)
    ]


def _simplified(size: Size) -> Size:
    """A size by what its trace knows of it."""
    env = next((s.env for s in free_symbols(size) if s.env is not None), None)
    if env is None:
        return size
    known: Size = env.simplify(size)
    return known


RULES: Final[dict[str, Callable[..., Any]]] = {
    "cholesky": _composed(_cholesky),
    "eigh": _composed(_eigenvalues),
    "lu": _composed(_lu),
    "lu_permutation": _lu_permutation,
    "qr": _composed(_qr),
    "svd": _composed(_singular_values),
    "triangular_solve": _composed(_triangular_solve),
}
