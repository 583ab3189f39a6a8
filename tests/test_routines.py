"""Library routines: what their reference implementations give, put back together."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hopflow.loop_ir.routines import ROUTINES

pytestmark = pytest.mark.slow

close: Any = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def spd(n: int, dtype: Any) -> Any:
    x = np.random.default_rng(n).normal(size=(n, n)).astype(dtype)
    return x @ x.T + n * np.eye(n, dtype=dtype)


def routine(name: str, arrays: Sequence[Any], *numbers: int) -> int:
    with np.errstate(all="ignore"):
        return ROUTINES[name].reference(arrays, numbers)


@pytest.mark.parametrize("name", ["gemm", "gemm_nt", "gemm_tn", "gemm_tt"])
def test_products_take_transposed_operands(name: str) -> None:
    random = np.random.default_rng(0)
    a, b, out = random.normal(size=(2, 3)), random.normal(size=(3, 4)), np.empty((2, 4))
    first = a.T.copy() if name.startswith("gemm_t") else a
    second = b.T.copy() if name in ("gemm_nt", "gemm_tt") else b
    assert [first.shape, second.shape, out.shape] == ROUTINES[name].shapes((2, 4, 3))
    assert routine(name, [first, second, out], 2, 4, 3) == 0
    close(out, a @ b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factorisations_multiply_back(dtype: Any) -> None:
    s = spd(4, dtype)
    lower = s.copy()
    assert routine("potrf", [lower], 4) == 0
    assert not np.triu(lower, 1).any()
    close(lower @ lower.T, s)

    a = np.random.default_rng(1).normal(size=(4, 3)).astype(dtype)
    lu, pivots = a.copy(), np.zeros(3, np.int32)
    assert routine("getrf", [lu, pivots], 4, 3) == 0
    rows = list(range(4))
    for i, p in enumerate(pivots):
        rows[i], rows[p] = rows[p], rows[i]
    unit = np.tril(lu, -1) + np.eye(4, 3, dtype=dtype)
    close(unit @ np.triu(lu[:3]), a[rows])

    for name, k in (("geqrf_orgqr", 3), ("geqrf_orgqr_complete", 4)):
        q, r = np.empty((4, k), dtype), np.empty((k, 3), dtype)
        assert routine(name, [a, q, r], 4, 3) == 0
        close(q @ r, a)
        close(q.T @ q, np.eye(k))

    for name, k in (("gesdd", 3), ("gesdd_full", 4)):
        u, w, vt = np.empty((4, k), dtype), np.empty(3, dtype), np.empty((3, 3), dtype)
        assert routine(name, [a, u, w, vt], 4, 3) == 0
        close(u[:, :3] * w @ vt, a)
        only = np.empty(3, dtype)
        assert routine("gesdd_values", [a, only], 4, 3) == 0
        close(only, w)

    values, vectors, only = np.empty(4, dtype), s.copy(), np.empty(4, dtype)
    assert routine("syevd", [values, vectors], 4) == 0
    close(s @ vectors, vectors * values)
    assert routine("syevd_values", [s, only], 4) == 0
    close(only, values)


def test_systems_are_solved() -> None:
    a, b = spd(3, np.float64), np.arange(6.0).reshape(3, 2)
    x = b.copy()
    assert routine("gesv", [a, x], 3, 2) == 0
    close(a @ x, b)
    inverse = a.copy()
    assert routine("inv", [inverse], 3) == 0
    close(a @ inverse, np.eye(3))
    for upper in (0, 1):
        for transposed in (0, 1):
            for unit in (0, 1):
                t = np.triu(a) if upper else np.tril(a)
                if unit:
                    np.fill_diagonal(t, 1)
                x = b.copy()
                assert routine("trsm", [a, x], 3, 2, upper, transposed, unit) == 0
                close((t.T if transposed else t) @ x, b, atol=1e-12)


def test_what_has_no_factorisation_has_a_status() -> None:
    zeros = np.zeros((2, 2))
    assert routine("inv", [zeros.copy()], 2) > 0
    assert routine("gesv", [zeros.copy(), np.ones((2, 1))], 2, 1) > 0
    assert routine("getrf", [zeros.copy(), np.zeros(2, np.int32)], 2, 2) == 0


def test_what_is_not_positive_definite_or_does_not_converge_is_nan() -> None:
    indefinite = np.array([[1.0, 2.0], [2.0, 1.0]])
    assert routine("potrf", [indefinite], 2) == 0
    np.testing.assert_array_equal(indefinite, [[math.nan, 0.0], [math.nan, math.nan]])

    bad, w, m, other = np.full((3, 3), math.nan), *np.zeros((3, 3, 3))
    calls: dict[str, tuple[list[Any], tuple[int, ...]]] = {
        "gesdd": ([bad, m, w[0], other], (3, 3)),
        "gesdd_values": ([bad, w[0]], (3, 3)),
        "syevd": ([w[0], bad.copy()], (3,)),
        "syevd_values": ([bad, w[0]], (3,)),
    }
    for name, (arrays, numbers) in calls.items():
        w[...] = m[...] = other[...] = 0
        assert routine(name, arrays, *numbers) == 0
        assert all(np.isnan(array).all() for array in arrays), name


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_argsort_is_stable_both_ways_with_nan_the_greatest(dtype: Any) -> None:
    keys = np.array([2, math.nan, 1, -0.0, 2, 0.0, math.nan], dtype)
    out, work = np.zeros(7, np.int64), np.zeros(7, np.int64)
    assert routine("argsort", [keys, out, work], 7, 0) == 0
    assert out.tolist() == [3, 5, 2, 0, 4, 1, 6]
    assert routine("argsort", [keys, out, work], 7, 1) == 0
    assert out.tolist() == [1, 6, 0, 4, 2, 3, 5]


def test_a_routine_says_what_it_reads_and_writes_and_of_which_shapes() -> None:
    sort, qr = ROUTINES["argsort"], ROUTINES["geqrf_orgqr"]
    assert sort.reads == frozenset({0})
    assert sort.writes == frozenset({1, 2, 3, 4})
    assert ROUTINES["potrf"].reads == ROUTINES["potrf"].writes == frozenset({0})
    assert qr.shapes((4, 3)) == [(4, 3), (4, 3), (3, 3)]
    assert qr.shapes((2, 3)) == [(2, 3), (2, 2), (2, 3)]


def test_arrays_without_elements_are_no_failure() -> None:
    for name, routine_ in ROUTINES.items():
        sizes = (0,) * len(routine_.scalars)
        arrays = [
            np.zeros(
                shape, {"i32": np.int32, "i64": np.int64}.get(array.dtype, np.float64)
            )
            for array, shape in zip(
                routine_.arrays, routine_.shapes(sizes), strict=True
            )
        ]
        assert routine(name, arrays, *sizes, *(0 for _ in routine_.flags)) == 0
