"""Library routines in native code, against what `loop_ir.routines` says of them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.test_gangs import target

from hopflow import dtypes
from hopflow.compiler.cpu.blas import fortran
from hopflow.compiler.cpu.routines import FEW
from hopflow.compiler.cpu.runtime import Kernel, Trapped, compile_program
from hopflow.compiler.cpu.sort import LANES, RUN
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.dtypes import DType, bool_, float32, float64, int32, int64
from hopflow.errors import CompileError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import Call, Program, Ref, Site
from hopflow.loop_ir.routines import NUMBERS, ROUTINES

pytestmark = pytest.mark.slow

NDArray = np.ndarray[Any, np.dtype[Any]]

SHAPES = [(3, 5), (5, 3), (4, 4), (1, 1), (30, 20), (0, 3), (3, 0)]


@cache
def kernel(
    name: str, dtype: DType, flags: tuple[bool, ...], cpu: CpuTarget | None
) -> Kernel:
    """A program that calls one routine, for sizes known when it is called."""
    routine = ROUTINES[name]
    sizes = [Var(scalar, int64) for scalar in routine.scalars]
    kinds = {"i32": int32, "i64": int64}
    buffers = [
        Buffer(array.name, kinds.get(array.dtype, dtype), (), "output")
        for array in routine.arrays
    ]
    scalars = [e.read(var) for var in sizes]
    constants = [e.const(flag, bool_) for flag in flags]
    call = Call(name, (*map(Ref, buffers), *scalars, *constants), 0)
    sites = [Site("library", 0)]
    program = Program(name, sizes, [], buffers, [], [], [call], sites)
    return compile_program(program, cpu or host())


def run(
    name: str,
    arrays: Sequence[NDArray],
    scalars: Sequence[int],
    flags: tuple[bool, ...] = (),
    cpu: CpuTarget | None = None,
) -> Trapped | None:
    """Run a routine natively, on copies of `arrays` that replace them in the list."""
    dtype = dtypes.as_dtype(arrays[0].dtype)
    return kernel(name, dtype, flags, cpu)(*scalars, *(x.ctypes.data for x in arrays))


def matrix(dtype: DType, *shape: int) -> NDArray:
    if not dtype.is_float:  # products of these wrap around
        bits = np.random.default_rng(len(shape)).integers(0, 2**63, shape)
        return bits.astype(dtype.dtype)
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype.dtype)


def positive(dtype: DType, n: int) -> NDArray:
    x = matrix(float64, n, n)
    return (x @ x.T + np.eye(n)).astype(dtype.dtype)


def assert_close(got: NDArray, wanted: NDArray) -> None:
    tolerance = 1e-10 if got.dtype == np.float64 else 2e-4
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(got, wanted, atol=tolerance * scale, rtol=tolerance)


real = pytest.mark.parametrize("dtype", [float32, float64], ids=str)


@pytest.mark.parametrize("cpu", ["host", "avx2"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", ["gemm", "gemm_nt", "gemm_tn", "gemm_tt"])
def test_matrix_products(name: str, dtype: DType, cpu: str) -> None:
    flags = name.removeprefix("gemm_").ljust(2, "n") if "_" in name else "nn"
    sizes = [(3, 4, 5), (1, 4, 5), (3, 1, 5), (1, 1, 7), (3, 4, 1), (3, 4, 0)]
    sizes += [(0, 4, 5), (64, 33, 17), (5, 97, 300), (3, 48, 16), (70, 31, 15)]
    for m, n, k in sizes:
        a, b = matrix(dtype, m, k), matrix(dtype, k, n)
        given_a = np.ascontiguousarray(a.T if flags[0] == "t" else a)
        given_b = np.ascontiguousarray(b.T if flags[1] == "t" else b)
        never_read = np.nan if dtype.is_float else 7
        out = np.full((m, n), never_read, dtype.dtype)
        assert run(name, [given_a, given_b, out], [m, n, k], (), target(cpu)) is None
        if dtype.is_float:
            assert_close(out, a @ b)
        else:
            np.testing.assert_array_equal(out, a @ b)


@real
def test_cholesky(dtype: DType) -> None:
    for n in (0, 1, 2, 7, 40):
        a = positive(dtype, n)
        factor = a.copy()
        factor[np.triu_indices(n, 1)] = np.nan  # nor this
        assert run("potrf", [factor], [n]) is None
        assert_close(factor @ factor.T, a)
        np.testing.assert_array_equal(factor, np.tril(factor))


@real
def test_lu(dtype: DType) -> None:
    for m, n in SHAPES:
        a = matrix(dtype, m, n)
        lu, pivots = a.copy(), np.zeros(min(m, n), np.int32)
        assert run("getrf", [lu, pivots], [m, n]) is None
        k = min(m, n)
        lower = np.tril(lu[:, :k], -1) + np.eye(m, k, dtype=dtype.dtype)
        for i, other in enumerate(pivots):
            a[[i, int(other)]] = a[[int(other), i]]
        assert_close(lower @ np.triu(lu[:k]), a)


@real
def test_solving_and_inverting(dtype: DType) -> None:
    for n in (0, 1, 2, 7, 40):
        a = positive(dtype, n) + np.tril(matrix(dtype, n, n))
        for k in (0, 1, 3):
            b = matrix(dtype, n, k)
            x, kept = b.copy(), a.copy()
            assert run("gesv", [kept, x], [n, k]) is None
            assert_close(a @ x, b)
            np.testing.assert_array_equal(kept, a)
        inverse = a.copy()
        assert run("inv", [inverse], [n]) is None
        assert_close(a @ inverse, np.eye(n, dtype=dtype.dtype))


@real
@pytest.mark.parametrize("name", ["geqrf_orgqr", "geqrf_orgqr_complete"])
def test_qr(name: str, dtype: DType) -> None:
    for m, n in SHAPES:
        a, columns = matrix(dtype, m, n), m if "complete" in name else min(m, n)
        q, r = np.empty((m, columns), dtype.dtype), np.empty((columns, n), dtype.dtype)
        assert run(name, [a, q, r], [m, n]) is None
        assert_close(q @ r, a)
        assert_close(q.T @ q, np.eye(columns, dtype=dtype.dtype))
        np.testing.assert_array_equal(r, np.triu(r))


@real
def test_eigenvalues_and_vectors(dtype: DType) -> None:
    for n in (0, 1, 2, 7, 40):
        a = positive(dtype, n)
        v, w, values = a.copy(), np.empty(n, dtype.dtype), np.empty(n, dtype.dtype)
        v[np.triu_indices(n, 1)] = np.nan
        assert run("syevd", [w, v], [n]) is None
        assert_close((v * w) @ v.T, a)
        assert (np.diff(w) >= 0).all()
        assert run("syevd_values", [a, values], [n]) is None
        assert_close(values, w)


@real
@pytest.mark.parametrize("name", ["gesdd", "gesdd_full"])
def test_singular_values_and_vectors(name: str, dtype: DType) -> None:
    for m, n in SHAPES:
        a, k = matrix(dtype, m, n), min(m, n)
        columns, rows = (m, n) if "full" in name else (k, k)
        u, s, vt = (
            np.empty(shape, dtype.dtype) for shape in ((m, columns), (k,), (rows, n))
        )
        assert run(name, [a, u, s, vt], [m, n]) is None
        assert_close((u[:, :k] * s) @ vt[:k], a)
        assert_close(u.T @ u, np.eye(columns, dtype=dtype.dtype))
        assert_close(vt @ vt.T, np.eye(rows, dtype=dtype.dtype))
        values = np.empty(k, dtype.dtype)
        assert run("gesdd_values", [a, values], [m, n]) is None
        assert_close(values, s)


@real
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_solve(
    upper: bool, transposed: bool, unit: bool, dtype: DType
) -> None:
    n, k = 7, 3
    t, b = positive(dtype, n), matrix(dtype, n, k)
    used = np.triu(t) if upper else np.tril(t)
    if unit:
        np.fill_diagonal(used, 1)
    x = b.copy()
    assert run("trsm", [t, x], [n, k], (upper, transposed, unit)) is None
    got = (used.T if transposed else used) @ x
    np.testing.assert_allclose(got, b, atol=1e-3 * np.abs(x).max())


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_sorts_are_stable(dtype: DType, descending: bool) -> None:
    random = np.random.default_rng(0)
    # Runs end, runs are merged, and digits are counted from some length on.
    limits = [k * RUN // 2 for k in (1, 2, LANES, 2 * LANES, 4 * LANES)] + [
        FEW * bits for bits in (8, 16, 32, 64)
    ]
    near = {n + k for n in limits for k in (-1, 0, 1)}
    for n in (0, 1, 2, 3, 8, 100, 1001, *sorted(near)):
        keys = random.integers(0, 2 if dtype is bool_ else 20, n).astype(dtype.dtype)
        if dtype.is_float:
            keys = keys - np.array(10, dtype.dtype)
            keys[keys > 7] = np.nan
            keys[::2] *= np.array(-1, dtype.dtype)
        out, wanted = np.zeros(n, np.int64), np.zeros(n, np.int64)
        work = [np.zeros(n, np.int64) for _ in range(3)]
        assert run("argsort", [keys, out, *work], [n], (descending,)) is None
        ROUTINES["argsort"].reference([keys, wanted, *work], [n, descending])
        np.testing.assert_array_equal(out, wanted)
        in_order = np.zeros_like(keys)
        assert run("sort", [keys, in_order, *work[:2]], [n], (descending,)) is None
        assert in_order.tobytes() == keys[wanted].tobytes()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inv", lambda: ([np.ones((3, 3))], [3])),
        ("gesv", lambda: ([np.ones((3, 3)), np.ones((3, 2))], [3, 2])),
    ],
)
def test_a_matrix_that_a_factorisation_does_not_take_is_a_trap(
    name: str, arguments: Callable[[], tuple[list[NDArray], list[int]]]
) -> None:
    trapped = run(name, *arguments())
    assert trapped is not None
    assert trapped[0] == 0
    assert trapped[1] > 0


def test_a_size_too_large_for_lapack_is_a_trap() -> None:
    assert run("potrf", [np.eye(1)], [2**31]) == (0, -1, 0)


def test_an_unknown_function_of_lapack_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="no function `dnothing`"):
        fortran("dnothing")
