"""Write the factorisations of small matrices out, as arithmetic on their elements.

A routine of LAPACK takes some 100 ns for a matrix of two rows, and one matrix at a
time. Written out, the matrices of a batch are lanes of vectors, and one that a step of
a loop solves with stays in registers (a Kalman filter, Newton's method in the plane).
The algorithms, and the choice of pivots, are LAPACK's for one block (E. Anderson et
al., "LAPACK Users' Guide", 3rd edition, 1999), so results agree up to rounding.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.graph.core import Graph, Node
from hopflow.graph.regions import bind_symbols, has_regions, signature_of
from hopflow.graph.rewriting import inline, replace_uses
from hopflow.graph.types import TensorType
from hopflow.ops import linalg_factor
from hopflow.ops.creation import zeros, zeros_like
from hopflow.ops.elementwise import abs, where
from hopflow.ops.joining import stack
from hopflow.ops.manipulation import expand_dims
from hopflow.ops.math import sqrt
from hopflow.ops.matmul import matrix_transpose
from hopflow.symbolic.size import Size, symbol
from hopflow.trace.capture import trace

MOST: Final = 3
"""The most rows of a matrix that is written out: with four it is a hundred operations,
which take long to compile."""


def small_matrices(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if has_regions(node):
            for region in signature_of(node).regions:
                small_matrices(region.graph)
        if node.op in _WRITTEN and _is_small(node):
            at = _write_out(graph, at)
        else:
            at += 1
    return graph


def _is_small(node: Node) -> bool:
    """Return whether the matrices are square, and have few rows."""
    if node.op is linalg_factor.lu_permutation:
        sizes: tuple[Size, ...] = (node.args[0].type.shape[-1], node.params["size"])
    else:
        sizes = node.args[0].type.shape[-2:]
    rows, columns = sizes
    return (
        isinstance(rows, int)
        and isinstance(columns, int)
        and 0 < rows == columns <= MOST
    )


def _write_out(graph: Graph, at: int) -> int:
    """Replace the node number `at`; return the number of the one after it."""
    node = graph.nodes.pop(at)
    kinds = tuple([(a.type.dtype, a.type.ndim) for a in node.args])
    body = _body(node.op, kinds, node.args[0].type.shape[-1], *node.params.items())
    unknown = [None] * len(body.symbols)
    sizes = bind_symbols(body, [*unknown, *node.args])
    before = len(graph.nodes)
    outputs = inline(graph, at, body, [*unknown, *node.args], sizes)  # type: ignore[list-item]
    count = len(graph.nodes) - before
    for inserted in graph.nodes[at : at + count]:
        inserted.line, inserted.module_path = node.line, node.module_path
        inserted.operator_path = node.operator_path
        inserted.meta.update(node.meta)
    replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
    return at + count


@cache
def _body(
    op: Any, kinds: tuple[tuple[DType, int], ...], rows: int, *params: tuple[str, Any]
) -> Graph:
    """Return the graph of an operation on matrices of so many rows.

    Args:
        kinds: The dtypes and ranks of the operands.
        params: Of the operation, and their values.
    """
    first, *others = kinds
    vector = op is linalg_factor.lu_permutation
    batch = tuple([symbol(f"batch{k}") for k in range(first[1] - (1 if vector else 2))])
    inner = (rows,) if vector else (rows, rows)
    types = [TensorType(first[0], (*batch, *inner))]
    types += [
        TensorType(dtype, (*batch, rows, symbol("columns"))) for dtype, _ in others
    ]
    rule = _WRITTEN[op]
    return trace(lambda *xs: rule(*xs, **dict(params)), *types, mode="fake").graph


# --- the algorithms -------------------------------------------------------------------

_Matrix: TypeAlias = list[list[Any]]


def _elements(a: Any) -> _Matrix:
    rows, columns = a.shape[-2:]
    return [[a[..., i, j] for j in range(columns)] for i in range(rows)]


def _matrix(rows: _Matrix) -> Any:
    return stack([stack(row, axis=-1) for row in rows], axis=-2)


def _exchanged(test: Any, x: list[Any], y: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return two rows, exchanged where the test holds."""
    pairs = list(zip(x, y, strict=True))
    return [where(test, b, a) for a, b in pairs], [where(test, a, b) for a, b in pairs]


def _lu(a: Any) -> Any:
    """Column by column, with the first of the largest elements as the pivot."""
    rows, pivots = _elements(a), []
    for k in range(len(rows)):
        largest = abs(rows[k][k])
        pivot = zeros(largest.shape, dtype=dtypes.int32) + k
        for i in range(k + 1, len(rows)):
            size = abs(rows[i][k])
            is_larger = size > largest
            largest, pivot = where(is_larger, size, largest), where(is_larger, i, pivot)
        for i in range(k + 1, len(rows)):
            rows[k], rows[i] = _exchanged(pivot == i, rows[k], rows[i])
        divisor = where(rows[k][k] == 0, 1, rows[k][k])
        for i in range(k + 1, len(rows)):
            rows[i][k] = rows[i][k] / divisor
            for j in range(k + 1, len(rows)):
                rows[i][j] = rows[i][j] - rows[i][k] * rows[k][j]
        pivots.append(pivot)
    return _matrix(rows), stack(pivots, axis=-1)


def _lu_permutation(pivots: Any, *, size: int) -> Any:
    """The exchanges one after the other."""
    zero = zeros(pivots.shape[:-1], dtype=dtypes.int64)
    order = [[zero + i] for i in range(size)]
    for k in range(size):
        for i in range(k + 1, size):
            order[k], order[i] = _exchanged(pivots[..., k] == i, order[k], order[i])
    return stack([x for [x] in order], axis=-1)


def _triangular_solve(
    a: Any, b: Any, *, upper: bool, transposed: bool, unit: bool
) -> Any:
    """By substitution, a row at a time; the other triangle is not read."""
    rows = _elements(matrix_transpose(a) if transposed else a)
    count, solved = len(rows), dict[int, Any]()
    for i in reversed(range(count)) if upper is not transposed else range(count):
        rest = b[..., i, :]
        for j, x in solved.items():
            rest = rest - expand_dims(rows[i][j], axis=-1) * x
        solved[i] = rest if unit else rest / expand_dims(rows[i][i], axis=-1)
    return stack([solved[i] for i in range(count)], axis=-2)


def _cholesky(a: Any) -> Any:
    """Column by column; of a matrix that is not positive definite all is NaN."""
    rows = _elements(a)
    factor = [[zeros_like(x) for x in row] for row in rows]
    is_positive: Any = True
    for j in range(len(rows)):
        rest = rows[j][j] - sum([x * x for x in factor[j][:j]])
        is_positive = (rest > 0) & is_positive
        factor[j][j] = sqrt(rest)
        for i in range(j + 1, len(rows)):
            products = [
                x * y for x, y in zip(factor[i][:j], factor[j][:j], strict=True)
            ]
            factor[i][j] = (rows[i][j] - sum(products)) / factor[j][j]
    for i, row in enumerate(factor):
        for j in range(i + 1):
            row[j] = where(is_positive, row[j], math.nan)
    return _matrix(factor)


_WRITTEN: Final[dict[Any, Callable[..., Any]]] = {
    linalg_factor.lu: _lu,
    linalg_factor.lu_permutation: _lu_permutation,
    linalg_factor.triangular_solve: _triangular_solve,
    linalg_factor.cholesky: _cholesky,
}
