"""Linear algebra: against JAX and NumPy, and what lowers against what runs."""

import math
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.dtypes import FLOATS, INTEGERS
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Library, Reduction
from hopflow.ops import linalg_factor
from hopflow.ops.matmul import matmul_op
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import symbol
from hopflow.testing.kernels import ArrayOperand, evaluate
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

# The functions' declared results are `Value`s; what users hold has more.
hf: Any = hopflow
jax = load("jax")
jnl = jax.numpy.linalg
la = hf.linalg
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _wide_jax() -> Any:
    with jax.enable_x64(True):
        yield


def agree(got: Any, want: Any) -> None:
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            agree(g, w)
        return
    a, b = np.asarray(got), np.asarray(want)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    tolerance = 1e-4 if a.dtype == np.float32 else 1e-9
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def draw(*shape: int, dtype: Any = np.float64) -> Any:
    return RANDOM.normal(size=shape).astype(dtype)


def definite(*shape: int, dtype: Any = np.float64) -> Any:
    x = draw(*shape, dtype=dtype)
    return x @ np.swapaxes(x, -1, -2) + np.eye(shape[-1], dtype=dtype)


# --- products -------------------------------------------------------------------------

PRODUCTS = [
    *(((3, 4), (4, 2)), ((2, 3, 4), (4, 5)), ((4,), (4,)), ((4,), (2, 4, 3))),
    *(((2, 3, 4), (4,)), ((5, 1, 3, 4), (2, 4, 2)), ((0, 4), (4, 2))),
    *(((2, 0), (0, 3)), ((0, 2, 3), (3, 1)), ((40, 30), (30, 50))),
]


@pytest.mark.parametrize(("left", "right"), PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint64"])
def test_matmul_is_jaxs(left: Any, right: Any, dtype: Any) -> None:
    a, b = (5 * draw(*left)).astype(dtype), (5 * draw(*right)).astype(dtype)
    agree(hf.matmul(a, b), jax.numpy.matmul(a, b))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_small_floats_are_summed_in_float32(dtype: str) -> None:
    a = hf.ones((1, 4096), dtype=dtype)
    assert (a @ a.T).item() == 4096  # 2048 + 1 is no float16, 256 + 1 no bfloat16
    [lowered] = evaluate(matmul_op, [np.asarray(a), np.asarray(a).T])
    assert float(lowered[0, 0]) == 4096


def test_matmul_promotes() -> None:
    x = hf.ones((2, 2), dtype="int8") @ hf.ones((2, 2), dtype="float16")
    assert x.dtype is hf.float16
    with pytest.raises(DTypeError, match="matmul: operands must be numeric"):
        hf.matmul(hf.ones((2, 2), dtype="bool"), hf.ones((2, 2), dtype="bool"))


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((2, 3), (2, 3), r"f32\[2, 3\] and f32\[2, 3\] are 3 != 2"),
        ((), (2,), "the operands need an axis"),
        ((2, 1, 3), (3, 3, 1), "do not broadcast"),
    ],
)
def test_matmul_says_what_does_not_fit(left: Any, right: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        hf.matmul(hf.zeros(left), hf.zeros(right))


def test_other_products_are_numpys() -> None:
    a, b = draw(2, 3, 4), draw(4, 3, 5)
    pairs = ([1, 2], [1, 0])
    agree(hf.tensordot(a, b, axes=pairs), np.tensordot(a, b, pairs))
    agree(hf.tensordot(a, b, axes=1), np.tensordot(a, b, 1))
    agree(hf.tensordot(a, a, axes=0), np.tensordot(a, a, 0))
    agree(hf.vecdot(a, a[0]), np.vecdot(a, a[0]))
    c = b[:2, :1, :1]
    agree(hf.vecdot(a, c, axis=0), np.sum(a * c, axis=0))
    agree(hf.matrix_transpose(a), np.swapaxes(a, 1, 2))
    agree(la.outer(a[0, 0], b[:, 0, 0]), np.outer(a[0, 0], b[:, 0, 0]))
    agree(la.cross(a[..., :3], b[0, 0, :3]), np.cross(a[..., :3], b[0, 0, :3]))
    agree(la.cross(a, a, axis=1), np.cross(a, a, axis=1))


def test_products_check_their_arguments() -> None:
    x = hf.zeros((2, 3))
    with pytest.raises(ArgumentValueError, match="must not be negative"):
        hf.tensordot(x, x, axes=-1)
    with pytest.raises(AxisError, match="`axes` is 3"):
        hf.tensordot(x, x, axes=3)
    with pytest.raises(ArgumentTypeError, match="an int or a pair"):
        hf.tensordot(x, x, axes="ab")
    with pytest.raises(ArgumentValueError, match="names 2 and 1 axes"):
        hf.tensordot(x, x, axes=([0, 1], [0]))
    with pytest.raises(ShapeError, match="3 != 2"):
        hf.tensordot(x, x, axes=1)
    with pytest.raises(ShapeError, match="two vectors"):
        la.outer(x, x)
    with pytest.raises(ShapeError, match="2 axes or more"):
        hf.matrix_transpose(x[0])
    with pytest.raises(ShapeError, match="vectors of 3 elements along axis 0"):
        la.cross(x, x, axis=0)
    with pytest.raises(AxisError, match="vecdot"):
        hf.vecdot(x, x, axis=2)
    with pytest.raises(ShapeError, match="vecdot: the axes summed over"):
        hf.vecdot(x, x[:, :2])


# --- factorisations, against JAX ------------------------------------------------------

BATCHES = [(), (2,), (0,), (2, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_square_factorisations_are_jaxs(batch: Any, n: int, dtype: str) -> None:
    a, x = definite(*batch, n, n, dtype=dtype), draw(*batch, n, n, dtype=dtype)
    b, v = draw(*batch, n, 3, dtype=dtype), draw(n, dtype=dtype)
    agree(la.cholesky(a), jnl.cholesky(a))
    agree(la.cholesky(a, upper=True), jnl.cholesky(a, upper=True))
    agree(la.solve(a, b), jnl.solve(a, b))
    agree(la.solve(a, v), jnl.solve(a, v))
    agree(la.inv(a), jnl.inv(a))
    agree(la.det(x), jnl.det(x))
    agree(tuple(la.slogdet(x)), tuple(jnl.slogdet(x)))
    agree(la.eigvalsh(a), jnl.eigvalsh(a))
    agree(la.eigh(a).eigenvalues, jnl.eigh(a).eigenvalues)
    for power in (-2, 0, 1, 5):
        agree(la.matrix_power(a, power), jnl.matrix_power(a, power))


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (2, 3, 4), (5, 0), (0, 2)])
def test_rectangular_factorisations_are_jaxs(shape: Any) -> None:
    x = draw(*shape)
    for mode in ("reduced", "complete"):
        agree(tuple(la.qr(x, mode=mode)), tuple(jnl.qr(x, mode=mode)))
    agree(la.svdvals(x), jnl.svdvals(x))
    for full in (False, True):
        got = la.svd(x, full_matrices=full)
        assert [t.shape for t in got] == [t.shape for t in jnl.svd(x, full)]
        k = min(shape[-2:])
        u, s, vh = (np.asarray(t) for t in got)
        agree(u[..., :k] * s[..., None, :] @ vh[..., :k, :], x)
    agree(la.matrix_rank(x), np.linalg.matrix_rank(x).astype(np.int64))
    agree(la.pinv(x), np.linalg.pinv(x))


def test_eigenvectors_and_orthogonal_factors_are_orthogonal() -> None:
    a = definite(2, 5, 5)
    values, vectors = (np.asarray(t) for t in la.eigh(a))
    agree(a @ vectors, vectors * values[:, None, :])
    agree(np.swapaxes(vectors, -1, -2) @ vectors, np.stack([np.eye(5)] * 2))


def test_systems_broadcast_their_batches() -> None:
    a, b = definite(3, 1, 4, 4), draw(2, 4, 2)
    agree(la.solve(a, b), np.linalg.solve(a, b))
    agree(
        la.solve_triangular(a, b, lower=True),
        np.linalg.solve(np.tril(a), b),
    )


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_solves_are_jaxs(lower: bool, transpose: bool, unit: bool) -> None:
    a, b = definite(4, 4), draw(4, 3)
    for right in (b, b[:, 0]):
        got = la.solve_triangular(
            a, right, lower=lower, transpose=transpose, unit_diagonal=unit
        )
        solve = jax.scipy.linalg.solve_triangular
        want = solve(a, right, trans=int(transpose), lower=lower, unit_diagonal=unit)
        agree(got, want)


SINGULAR = [
    *(np.array([[1.0, 2.0], [2.0, 4.0]]), np.zeros((2, 2)), np.full((2, 2), np.nan)),
    np.stack([np.eye(2), np.zeros((2, 2)), 2 * np.eye(2)]),
]


@pytest.mark.parametrize("a", SINGULAR, ids=["singular", "zero", "nan", "batch"])
def test_singular_matrices_give_what_jax_gives(a: Any) -> None:
    agree(la.inv(a), jnl.inv(a))
    agree(la.solve(a, np.array([1.0, 2.0])), jnl.solve(a, np.array([1.0, 2.0])))
    agree(la.det(a), jnl.det(a))
    agree(tuple(la.slogdet(a)), tuple(jnl.slogdet(a)))


def test_only_the_matrix_that_has_no_factor_is_nan() -> None:
    bad = np.array([[1.0, 2.0], [2.0, 1.0]])
    batch = np.stack([np.eye(2), bad, np.full((2, 2), np.nan), 4 * np.eye(2)])
    agree(la.cholesky(batch), jnl.cholesky(batch))
    agree(la.svdvals(batch), jnl.svdvals(batch))
    agree(la.eigvalsh(batch), jnl.eigvalsh(batch))
    for got in (*la.svd(batch), *la.eigh(batch)):
        finite = np.isfinite(np.asarray(got)).reshape(4, -1).all(1)
        assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf])
@pytest.mark.parametrize("keepdims", [False, True])
def test_matrix_norms_are_numpys(ord: Any, keepdims: bool) -> None:
    x = draw(2, 3, 4)
    want = np.linalg.matrix_norm(x, ord=ord, keepdims=keepdims)
    agree(la.matrix_norm(x, ord=ord, keepdims=keepdims), want)


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, math.inf, -math.inf])
@pytest.mark.parametrize("axis", [None, -1, (0, 2)])
def test_vector_norms_are_numpys(ord: Any, axis: Any) -> None:
    x = draw(2, 3, 4)
    for keepdims in (False, True):
        options = {"axis": axis, "ord": ord, "keepdims": keepdims}
        agree(la.vector_norm(x, **options), np.linalg.vector_norm(x, **options))


def test_norms_of_nothing_are_zero() -> None:
    for ord in (1, 2, math.inf):
        assert la.vector_norm(hf.zeros((0,)), ord=ord).item() == 0


@pytest.mark.parametrize("offset", [-5, -2, 0, 1, 9])
def test_diagonals_are_numpys(offset: int) -> None:
    x = draw(2, 3, 4)
    agree(la.diagonal(x, offset=offset), np.linalg.diagonal(x, offset=offset))
    agree(la.trace(x, offset=offset), np.linalg.trace(x, offset=offset))


def test_rank_and_pseudoinverse_take_a_tolerance_for_each_matrix() -> None:
    x = np.stack([np.diag([1.0, 0.1]), np.diag([1.0, 0.1])])
    assert la.matrix_rank(x, rtol=np.array([0.01, 0.5])).tolist() == [2, 1]
    assert la.matrix_rank(x, rtol=0.5).tolist() == [1, 1]
    agree(la.pinv(x, rtol=0.5)[0], np.diag([1.0, 0.0]))


def test_integers_become_floats_and_small_floats_stay() -> None:
    assert la.det(hf.asarray([[1, 2], [3, 4]])).dtype is hf.float32
    half = hf.eye(2, dtype="bfloat16")
    for result in (
        la.inv(half),
        la.cholesky(half),
        *la.svd(half),
        la.matrix_norm(half),
    ):
        assert result.dtype is hf.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: la.cholesky(x),
            ShapeError,
            r"square matrices, and found f32\[2, 3\]",
        ),
        (lambda x: la.det(x), ShapeError, "2 != 3"),
        (lambda x: la.qr(x[0]), ShapeError, "2 axes or more"),
        (
            lambda x: la.solve(x[:, :2], x[0]),
            ShapeError,
            r"must be \[2\] or \[..., 2, k",
        ),
        (lambda x: la.solve(x[:, :2], x[0, 0]), ShapeError, "right-hand side"),
        (lambda x: la.qr(x, mode="r"), ArgumentValueError, "`mode` must be"),
        (lambda x: la.svd(x, full_matrices=1), ArgumentTypeError, "must be a bool"),
        (lambda x: la.matrix_norm(x, ord="max"), ArgumentValueError, "'max'"),
        (lambda x: la.vector_norm(x, ord="fro"), ArgumentTypeError, "must be a number"),
        (lambda x: la.matrix_power(x, 2), ShapeError, "square"),
        (lambda x: la.matrix_power(x, 1.5), ArgumentTypeError, "must be an int"),
        (lambda x: la.diagonal(x, offset="a"), ArgumentTypeError, "must be an int"),
        (lambda x: la.matrix_rank(x[0]), ShapeError, "2 axes or more"),
    ],
)
def test_arguments_are_checked(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(hf.zeros((2, 3)))


# --- lowering -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((2, 3, 0), (2, 0, 2))])
def test_small_products_lower_to_a_reduction(shapes: Any, dtype: Any) -> None:
    a, b = ((4 * draw(*s)).astype(np.int8).astype(dtype.dtype) for s in shapes)
    operands = [ArrayOperand(a), ArrayOperand(b)]
    types = matmul_op.result_types([o.type for o in operands], {})
    assert isinstance(matmul_op.lower(types, *operands), Reduction)
    [lowered] = evaluate(matmul_op, [a, b])
    assert np.array_equal(lowered, matmul_op.run(a, b))


def test_large_and_unknown_products_call_a_library() -> None:
    n = symbol("n")
    for shape, other in (((20, 20), (20, 20)), ((n, n), (n, n)), ((n, 8), (8, 20))):
        x, y = (
            ArrayOperand(np.empty((0,)), TensorType(hf.float32, s))
            for s in (shape, other)
        )
        types = matmul_op.result_types([x.type, y.type], {})
        kernel = matmul_op.lower(types, x, y)
        assert isinstance(kernel, Library)
        assert kernel.routine == "gemm"


OPERATIONS: list[tuple[OpDef, list[Any], dict[str, Any]]] = [
    (linalg_factor.cholesky, [definite(2, 3, 3)], {}),
    (linalg_factor.lu, [draw(2, 4, 3)], {}),
    (linalg_factor.lu, [draw(3, 4, dtype="float32")], {}),
    (linalg_factor.qr, [draw(2, 4, 3)], {"complete": False}),
    (linalg_factor.qr, [draw(4, 3)], {"complete": True}),
    (linalg_factor.eigh, [definite(2, 3, 3)], {"vectors": True}),
    (linalg_factor.eigh, [definite(3, 3)], {"vectors": False}),
    *(
        (linalg_factor.svd, [draw(2, 4, 3)], {"mode": mode})
        for mode in ("full", "reduced", "values")
    ),
    *(
        (
            linalg_factor.triangular_solve,
            [definite(2, 3, 3), draw(2, 3, 2)],
            {"upper": upper, "transposed": transposed, "unit": unit},
        )
        for upper in (False, True)
        for transposed in (False, True)
        for unit in (False, True)
    ),
    (matmul_op, [draw(2, 20, 17), draw(2, 17, 19)], {}),
]


@pytest.mark.parametrize(("op", "operands", "params"), OPERATIONS, ids=str)
def test_routines_do_what_runs(op: OpDef, operands: Any, params: Any) -> None:
    ran = op.run(*operands, **params)
    lowered = evaluate(op, operands, **params)
    agree(tuple(lowered), ran if isinstance(ran, tuple) else (ran,))


def test_row_exchanges_make_the_permutation() -> None:
    pivots = np.array([[2, 1, 3], [0, 3, 2]], np.int32)
    want = []
    for steps in pivots:
        rows = list(range(5))
        for i, j in enumerate(steps):
            rows[i], rows[j] = rows[j], rows[i]
        want.append(rows)
    op = linalg_factor.lu_permutation
    assert op.run(pivots, size=5).tolist() == want
    assert evaluate(op, [pivots], size=5)[0].tolist() == want
    none = np.zeros((0,), np.int32)
    assert evaluate(op, [none], size=2)[0].tolist() == [0, 1]
