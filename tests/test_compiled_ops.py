"""Every operation, compiled, against its NumPy meaning: all dtypes, small and large."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu.target import host
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function, Module
from hopflow.compiler.pipeline import Executable
from hopflow.config import config
from hopflow.dtypes import DType, as_dtype
from hopflow.errors import DivisionError, HopflowError
from hopflow.graph.core import Graph
from hopflow.loop_ir.expr import Buffer, Var, binary, index, read
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.tensor import EagerTensor
from hopflow.testing.kernels import sample_arrays

pytestmark = pytest.mark.slow

NDArray = np.ndarray[Any, np.dtype[Any]]

# The order of a sum is the schedule's choice; a factorisation is LAPACK's.
REORDERED: Final = {"reduce_sum", "reduce_prod", "matmul", "conv"}
FACTORISATIONS: Final = {"cholesky", "lu", "qr", "eigh", "svd", "triangular_solve"}
GROWN: Final = {3: 67, 4: 71, 5: 37}
"""Sizes for vector loops, with a rest that no vector width divides."""
BATCH: Final = 16
"""Calls in a program: LLVM's time grows faster than their number."""
# Their parameters hold sizes, or positions in the tensors of their samples.
SIZED: Final = frozenset(
    "reshape broadcast_to match_size update_slice lu_permutation full iota conv".split()
)
LARGE: Final = {
    "reshape": Sample(("T[6, 71]",), {"shape": (71, 6)}, dtypes.ALL),
    "broadcast_to": Sample(("T[3, 1]",), {"shape": (2, 3, 71)}, dtypes.ALL),
    "full": Sample(("T[]",), {"shape": (3, 71)}, dtypes.ALL),
    "update_slice": Sample(
        ("T[4, 171]", "T[2, 81]"), {"starts": (1, 169), "steps": (2, -2)}, dtypes.ALL
    ),
    "lu_permutation": Sample(
        ("i32[2, 30]",), {"size": 71}, (dtypes.int32,), 30.0, 70.0
    ),
}
FLOAT_CORNERS: Final = (
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -1.0, 1.0, 2.0, 1.5, 2.5, -2.5),
    *(3e38, 1e300, 1e-300, 6e4, 1e-7, 1e-42, 1e5, -700.0, 88.0, 100.0, -1e-30),
)


class Case(NamedTuple):
    """One call: `want` are its results."""

    label: str
    operands: list[NDArray]
    params: dict[str, Any]
    want: tuple[NDArray, ...]


def grown(sample: Sample) -> Sample:
    """The same call with larger operands, which fit together as before."""

    def larger(text: str) -> str:
        name, sizes = text.rstrip("]").split("[")
        found = [int(n) for n in sizes.split(",") if n.strip()]
        return f"{name}[{', '.join(str(GROWN.get(n, n)) for n in found)}]"

    return replace(sample, operands=tuple(map(larger, sample.operands)))


def with_corners(array: NDArray) -> NDArray:
    """`array` with its dtype's special values from the fourth element on."""
    dtype = as_dtype(array.dtype)
    corners: tuple[float, ...] = FLOAT_CORNERS
    if dtype.kind == "b":
        return array
    if not dtype.is_float:
        low, high = dtypes.iinfo(dtype).min, dtypes.iinfo(dtype).max
        corners = (low, high, 0, 1, high - 1, high // 3, low + 1)
    result, flat = array.copy(), array.size
    with np.errstate(all="ignore"):
        for k, i in enumerate(range(3, flat, 2)):
            result.flat[i] = np.array(corners[k * 5 % len(corners)]).astype(array.dtype)
    return result


def samples(op: OpDef) -> Iterator[tuple[str, Sample, DType]]:
    for k, sample in enumerate(op.samples):
        for dtype in sample.dtypes:
            yield f"sample {k} {dtype}", sample, dtype
            if op.name not in SIZED and (large := grown(sample)) != sample:
                yield f"sample {k} grown {dtype}", large, dtype
    if own := LARGE.get(op.name):
        for dtype in own.dtypes:
            yield f"large {dtype}", own, dtype


def cases(op: OpDef) -> Iterator[Case]:
    """All calls of an operation that do not stop it."""
    for label, sample, dtype in samples(op):
        operands = sample_arrays(sample, dtype)
        if op.name not in REORDERED | FACTORISATIONS and any(
            a.size > 3 for a in operands
        ):
            cornered = [
                with_corners(a) if text.startswith("T") else a
                for a, text in zip(operands, sample.operands, strict=True)
            ]
            calls = [(label, operands), (f"{label} corners", cornered)]
        else:
            calls = [(label, operands)]
        for name, given in calls:
            try:
                with np.errstate(all="ignore"):
                    want = op.run(*given, **sample.params)
            except HopflowError:
                assert op.effects, f"{op.name}, {name}"
                continue
            results = want if isinstance(want, tuple) else (want,)
            yield Case(name, given, sample.params, tuple(map(np.asarray, results)))


def compiled(op: OpDef, calls: list[Case]) -> list[NDArray]:
    """The results of all calls, from one native program."""
    graph = Graph(op.name)
    arguments: list[EagerTensor] = []
    for case in calls:
        tensors = [EagerTensor(a) for a in case.operands]
        types = [t.type for t in tensors]
        first = len(arguments)
        inputs = [graph.add_input(t, f"x{first + i}") for i, t in enumerate(types)]
        results = op.result_types(types, case.params)
        graph.outputs += graph.call(op, inputs, case.params, results).results
        arguments += tensors
    return [tensor.array for tensor in Executable(graph)(arguments)]


def spacing(x: NDArray) -> NDArray:
    """One unit in the last place at `x`, as f64."""
    info = dtypes.finfo(as_dtype(x.dtype))
    size = np.maximum(np.abs(x.astype(np.float64)), float(info.smallest_normal))
    unit: NDArray = np.exp2(np.floor(np.log2(size))) * float(info.eps)
    return unit


def tolerance(op: OpDef, case: Case, want: NDArray) -> Any:
    """How far a result may be from `want`."""
    if op.name == "lgamma":  # near its zeros, neither has all digits
        return op.ulps * spacing(np.maximum(np.abs(want), want.dtype.type(0.125)))
    if op.ulps:
        return op.ulps * spacing(want)
    if op.name in REORDERED:
        magnitude = op.run(*map(np.abs, case.operands), **case.params)
        return 32 * spacing(np.asarray(magnitude))
    return 0.0


def choosing(op: OpDef, case: Case) -> bool:
    """Whether NumPy leaves open which of 0 and -0 is the smaller."""
    combine = case.params.get("combine", op.name)
    return op.name in REORDERED or "max" in combine or "min" in combine


def check(op: OpDef, case: Case, got: NDArray, want: NDArray) -> None:
    where = f"{op.name}, {case.label}, {case.params}"
    assert got.dtype == want.dtype, where
    assert got.shape == want.shape, where
    if not as_dtype(got.dtype).is_float:
        np.testing.assert_array_equal(got, want, where)
        return
    with np.errstate(all="ignore"):
        x, y = got.astype(np.float64), want.astype(np.float64)
        same = (x == y) | np.isnan(x) & np.isnan(y)
        same &= ~((x == 0) & (np.signbit(x) != np.signbit(y))) | choosing(op, case)
        wrong = ~(same | (np.abs(x - y) < tolerance(op, case, want)))
    assert not wrong.any(), f"{where}: {got[wrong][:4]} for {want[wrong][:4]}"


def check_factorisation(case: Case, results: list[NDArray]) -> None:
    """Columns and rows may have the other sign."""
    for got, want in zip(results, case.want, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        small = 2e-3 if got.dtype == np.float32 else 1e-9
        size = np.max(np.abs(want), initial=1.0, where=np.isfinite(want))
        np.testing.assert_allclose(
            np.abs(got), np.abs(want), small, small * size, err_msg=case.label
        )


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", True)


@pytest.mark.parametrize("op", OPERATIONS.values(), ids=list(OPERATIONS))
def test_native_code_computes_what_numpy_does(op: OpDef) -> None:
    calls = list(cases(op))
    for at in range(0, len(calls), BATCH):
        batch = calls[at : at + BATCH]
        results = compiled(op, batch)
        for case in batch:
            found, results = results[: len(case.want)], results[len(case.want) :]
            if op.name in FACTORISATIONS:
                check_factorisation(case, found)
                continue
            for got, want in zip(found, case.want, strict=True):
                check(op, case, got, want)
        assert not results


def test_no_operation_is_left_out() -> None:
    # `check` has no result, and `callback` those of a function (test_callbacks.py); the
    # other operations have a call that does not stop them.
    for op in OPERATIONS.values():
        assert any(True for _ in cases(op)) or op.name in ("check", "callback"), op.name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_cannot_be_factored_is_nan(dtype: Any) -> None:
    matrices = np.array([[[2, 1], [1, 2]], [[1, 2], [2, 1]]], dtype)
    graph = Graph()
    op = OPERATIONS["cholesky"]
    tensor = EagerTensor(matrices)
    x = graph.add_input(tensor.type, "x")
    graph.outputs = graph.call(op, [x], {}, op.result_types([x.type], {})).results
    [factor] = Executable(graph)([tensor])
    np.testing.assert_allclose(factor.array, op.run(matrices), rtol=1e-6)
    assert np.isnan(factor.array[1]).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("name", ["eigh", "svd"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_of_a_matrix_that_is_not_finite_every_factor_is_nan(
    name: str, bad: float
) -> None:
    op = OPERATIONS[name]
    for sample in op.samples:
        [matrix] = sample_arrays(sample, dtypes.float64)
        matrix[..., 1, 0] = bad
        case = Case(name, [matrix], sample.params, ())
        with np.errstate(all="ignore"):
            want = op.run(matrix, **sample.params)
        for got, wanted in zip(
            compiled(op, [case]),
            want if isinstance(want, tuple) else (want,),
            strict=True,
        ):
            assert np.isnan(wanted).all()
            assert np.isnan(got).all()


# --- division in vectors --------------------------------------------------------------


def edges(dtype: str) -> np.ndarray[Any, Any]:
    """Integers at which a quotient of floats would be wrong first."""
    limits = np.iinfo(dtype)
    if limits.bits == 8:
        return np.arange(limits.min, limits.max + 1).astype(dtype)
    near = [limits.min, limits.max, 0, 1 << 24, 1 << 16, 1 << 15, 1 << 12, 46341, 3, 7]
    around = [n + d for n in near for d in range(-3, 4)]
    kept = [n for n in around if limits.min <= n <= limits.max]
    drawn = np.random.default_rng(0).integers(limits.min, limits.max, 200, dtype)
    return np.unique(np.concatenate([np.asarray(kept, dtype), drawn]))


@pytest.mark.parametrize("by", [None, 1, 3, 8, -1, -7])
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_integers_are_divided_exactly_in_vectors(dtype: str, by: int | None) -> None:
    if by is not None and by < 0 and dtype.startswith("u"):
        by = 100 - by
    every = edges(dtype)
    y = every[every != 0] if by is None else np.asarray([by], dtype)
    x, y = (a.ravel() for a in np.broadcast_arrays(every[:, None], y))
    divide = hf.jit(lambda x, y: (x // y, x % y) if by is None else (x // by, x % by))
    with np.errstate(over="ignore"):
        want = x // y, x % y
    for found, expected in zip(divide(x, y), want, strict=True):
        np.testing.assert_array_equal(np.asarray(found), expected)
        assert np.asarray(found).dtype == dtype


WIDE_DIVISORS: Final = (5, 6, 7, 9, 641, 10**6 + 3, 2**31 - 1, 2**32 + 1, 2**62 + 1)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_are_divided_by_any_constant(dtype: str) -> None:
    limits = np.iinfo(dtype)
    divisors = [*WIDE_DIVISORS, limits.max, limits.max - 1]
    divisors += [-d for d in divisors if limits.min < 0] + [limits.min, 2**63 + 1, -2]
    for by in (d for d in divisors if d and limits.min <= d <= limits.max):
        multiples = [by * k + d for k in (1, 2, 3, 10**6) for d in (-1, 0, 1)]
        kept = [n for n in multiples if limits.min <= n <= limits.max]
        x = np.concatenate([edges(dtype), np.asarray(kept, dtype)])
        found = hf.jit(lambda x, by=by: (x // by, x % by))(x)
        divisor = np.asarray(by, dtype)
        for y, want in zip(found, (x // divisor, x % divisor), strict=True):
            np.testing.assert_array_equal(np.asarray(y), want)


@pytest.mark.parametrize("bits", [3, 20, 40, 50, 51, 52, 63])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_are_divided_exactly_whatever_their_bits(
    dtype: str, bits: int
) -> None:
    """Vectors of less than 52 bits are divided as float64; the last ones are mixed."""
    rng = np.random.default_rng(bits)
    low = -(1 << bits) + 1 if dtype == "int64" else 0
    x, y = (rng.integers(low, (1 << bits) - 1, 999, dtype) for _ in range(2))
    y[::2] >>= np.asarray(bits // 2, dtype)
    y[y == 0] = 3
    x[::3] -= x[::3] % y[::3]  # multiples, and what is 1 less
    x[1::3] -= x[1::3] % y[1::3] + np.asarray(1, dtype)
    x[-8:] = edges(dtype)[-8:]
    with np.errstate(over="ignore"):
        want = x // y, x % y
    found = hf.jit(lambda x, y: (x // y, x % y))(x, y)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)
    one = np.asarray(y[3])  # the same for all
    found = hf.jit(lambda x, y: (x // y, x % y))(x, one)
    for got, expected in zip(found, (x // one, x % one), strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("bits", [40, 62])
def test_lanes_that_are_done_divide_no_more(bits: int) -> None:
    """The greatest common divisors of pairs, which take different numbers of steps."""

    def divisor(a: Any, b: Any) -> Any:
        return hf.while_loop(lambda _, b: b != 0, lambda a, b: (b, a % b), (a, b))[0]

    pairs = np.random.default_rng(bits).integers(0, 1 << bits, (2, 333))
    found = hf.jit(hf.vmap(divisor))(*pairs)
    np.testing.assert_array_equal(np.asarray(found), np.gcd(*pairs))


@pytest.mark.parametrize("scale", [1, 8, 20, 40, 60, 100])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainders_of_floats_are_exact(dtype: str, scale: int) -> None:
    rng, info = np.random.default_rng(scale), np.finfo(dtype)
    x, y = (
        (rng.normal(size=3000) * 2.0 ** rng.uniform(-scale, scale, 3000)).astype(dtype)
        for _ in range(2)
    )
    multiple = y[:2000] * rng.integers(1, 1000, 2000).astype(dtype)
    x[:1000], x[1000:2000] = multiple[:1000], np.nextafter(multiple[1000:], 0)
    special = [*FLOAT_CORNERS, info.tiny, -info.smallest_subnormal, info.max, 2.0**52]
    with np.errstate(over="ignore"):
        corners = np.asarray(special).astype(dtype)
    x, y = (
        np.concatenate([a, b.ravel()])
        for a, b in zip((x, y), np.meshgrid(corners, corners), strict=True)
    )
    with np.errstate(all="ignore"):
        want = np.remainder(x, y), np.floor_divide(x, y)

    def both(x: Any, y: Any) -> Any:
        return hf.remainder(x, y), hf.floor_divide(x, y)

    def one_by_one(x: Any, y: Any) -> Any:
        """In a loop that carries a scalar from step to step, and so has no vectors."""

        def step(carry: Any, pair: Any) -> Any:
            first, second = both(*pair)
            return hf.where(carry == first, carry, first), (first, second)

        return hf.scan(step, x[0], (x, y))[1]

    for f in (both, one_by_one):
        for got, expected in zip(map(np.asarray, hf.jit(f)(x, y)), want, strict=True):
            np.testing.assert_array_equal(got, expected)
            known = ~np.isnan(expected)
            np.testing.assert_array_equal(
                np.signbit(got[known]), np.signbit(expected[known])
            )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_powers_of_integers_wrap_in_vectors(dtype: str) -> None:
    rng, most = np.random.default_rng(0), np.iinfo(dtype).max
    x = rng.integers(np.iinfo(dtype).min, most, 500, dtype)
    y = rng.integers(0, 9, 500, dtype=dtype)
    x[::2] = rng.integers(0, 7, 250, dtype=dtype)
    y[-20:-16], x[-20:-16] = most, np.asarray([0, 1, 3, 2]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(hf.jit(hf.pow)(x, y)), x**y)
    for k in (0, 1, 5, 70):
        one = np.asarray(k, dtype)
        np.testing.assert_array_equal(np.asarray(hf.jit(hf.pow)(x, one)), x**one)


@pytest.mark.parametrize("n", [5, 64, 1000])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_division_by_zero_stops_wherever_it_is(dtype: str, n: int) -> None:
    divide = hf.jit(lambda x, y: (x // y, hf.sum(x % y)))
    x, y = np.arange(n).astype(dtype), np.full(n, 3, dtype)
    assert divide(x, y)[0].tolist() == (x // y).tolist()
    for at in (0, n // 2, n - 1):
        bad = y.copy()
        bad[at] = 0
        with pytest.raises(DivisionError, match="division of an integer by zero"):
            divide(x, bad)


# --- reshaped reads -------------------------------------------------------------------

RESHAPES: Final = [
    ((30, 28, 28), (30, 784)),
    ((30, 28, 28), (23520,)),
    ((23520,), (30, 28, 28)),
    ((30, 28, 28), (840, 28)),
    ((30, 28, 28), (49, 480)),
    ((4, 5, 6), (3, 40)),
    ((2, 3, 5, 7), (7, 5, 3, 2)),
    ((1, 64), (64, 1)),
    ((0, 5), (5, 0)),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("shape", "new"), RESHAPES)
def test_a_reshaped_array_is_read_by_its_one_index(
    shape: tuple[int, ...], new: tuple[int, ...], dynamic: bool
) -> None:
    def f(x: Any) -> Any:
        y = hf.reshape(x, new)
        return y * 2.0, hf.sum(y, axis=-1), hf.reshape(hf.sin(x), new)[::-1]

    x = np.random.default_rng(0).standard_normal(shape)
    jitted = hf.jit(f, dynamic=dynamic)
    double, total, turned = jitted(x)
    y = x.reshape(new)
    np.testing.assert_array_equal(np.asarray(double), y * 2.0)
    np.testing.assert_allclose(np.asarray(total), y.sum(axis=-1), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(np.asarray(turned), np.sin(y)[::-1], rtol=1e-14)
    if not dynamic:
        assert not re.search(r" [us](div|rem) ", jitted.llvm_ir)


def test_matrices_of_a_reshaped_batch_are_multiplied_where_they_are() -> None:
    def f(x: Any, w: Any) -> Any:
        y = hf.reshape(x, (2, 3, 5, 4))
        return hf.concat([hf.matmul(y, w), hf.matmul(y, w) * 2.0], axis=2)

    x = np.arange(120.0).reshape(6, 5, 4)
    w = np.arange(20.0).reshape(4, 5)
    y = x.reshape(2, 3, 5, 4) @ w
    for dynamic in (False, True):
        found = hf.jit(f, dynamic=dynamic)(x, w)
        np.testing.assert_array_equal(np.asarray(found), np.concatenate([y, y * 2], 2))


def test_the_distance_of_a_matrix_in_a_reshaped_batch() -> None:
    sizes = tuple(map(index, (2, 3, 5, 4)))
    buffer = Buffer("b", dtypes.float64, sizes, "arena")
    step = read(Var("step", dtypes.int64))
    at = binary("div", step, index(3)), binary("rem", step, index(3))
    memory = Memory(Function(Module(), "void @f()", ""))
    assert repr(memory.linear(buffer, at)) == "mul(step, 20:i64)"
    assert (
        repr(memory.linear(buffer, (*at, index(1)))) == "add(mul(step, 20:i64), 4:i64)"
    )


def test_a_reshaped_view_is_read_where_its_elements_are() -> None:
    x = np.arange(60.0).reshape(3, 20)[:, ::2]
    f = hf.jit(lambda x: hf.reshape(x, (5, 6)) + 1.0)
    np.testing.assert_array_equal(np.asarray(f(x)), x.reshape(5, 6) + 1.0)


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: m.repeat(x, 40),
        lambda m, x: m.tile(x, (7,)) * 2.0,
        lambda m, x: m.repeat(x[:, None], 64, axis=1) + x[0],
        lambda m, x: m.reshape(m.repeat(x, 32) - m.tile(x, (32,)), (-1, 4)),
        lambda m, x: m.tile(m.repeat(x, 50), (3,))[::-1],
    ],
)
@pytest.mark.parametrize("n", [1, 4, 33, 100])
def test_what_is_repeated_is_read_in_rows(f: Any, n: int) -> None:
    x = np.arange(float(n))
    np.testing.assert_array_equal(np.asarray(hf.jit(partial(f, hf))(x)), f(np, x))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "float16"])
@pytest.mark.parametrize("n", [1, 7, 31, 64, 100, 1000])
def test_narrow_elements_fill_vectors(dtype: str, n: int) -> None:
    x = (np.arange(n * 3) % 5 % 2).astype(dtype).reshape(3, n)
    y = x[:, ::-1]
    f = hf.jit(lambda x, y: (x == y, hf.where(x > y, x, y), hf.max(x, axis=0)))
    want = x == y, np.where(x > y, x, y), x.max(axis=0)
    for found, expected in zip(f(x, y), want, strict=True):
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_loop_over_bytes_has_a_lane_for_each_byte_of_a_register() -> None:
    x = np.zeros(1000, np.uint8)
    f = hf.jit(lambda x: x ^ (x + x))
    f(x)
    assert f"vector {host().register_bits // 8} " in f.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 4), (0, 9), (5, 0), (7, 9), (2, 5, 9), (6, 3, 8), (4, 1, 17), (9, 64)]
)
def test_prefixes_along_each_axis_have_the_bits_of_numpy(
    shape: Any, dynamic: bool
) -> None:
    """Along the first axes rows are gone through as vectors, in the same order."""
    x = np.random.default_rng(0).normal(size=shape)
    for axis in range(len(shape)):
        for ours, theirs in (
            (hf.cumulative_sum, np.cumsum),
            (hf.cumulative_prod, np.cumprod),
            (hf.cummax, np.maximum.accumulate),
        ):

            def reversed_(x: Any, axis: int = axis, f: Any = ours) -> Any:
                return hf.flip(f(hf.flip(x, axis=axis), axis=axis), axis=axis)

            found = hf.jit(partial(ours, axis=axis), dynamic=dynamic)(x)
            np.testing.assert_array_equal(found, theirs(x, axis=axis))
            found = hf.jit(reversed_, dynamic=dynamic)(x)
            want = np.flip(theirs(np.flip(x, axis), axis=axis), axis)
            np.testing.assert_array_equal(found, want)
