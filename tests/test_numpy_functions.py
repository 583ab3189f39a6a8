"""NumPy's functions take tensors: ours are recorded in a trace, others compute."""

import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import optree
import pytest
from scipy import integrate, optimize, special

import hopflow as hf
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckError,
    DivisionError,
    PowerError,
    ShapeError,
    TraceError,
)
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymInt
from hopflow.tensor import numpy_protocol

pytestmark = pytest.mark.slow

V: Final = np.arange(3.0)
X: Final = np.linspace(-0.9, 0.9, 12).reshape(3, 4)
Y: Final = np.linspace(0.5, 2.0, 4)
W: Final = np.linspace(-0.5, 0.8, 4)
INTEGERS: Final = np.arange(-6, 6).reshape(3, 4)

UFUNCS: Final = sorted(numpy_protocol.universal_functions(), key=lambda f: f.__name__)
SPECIAL: Final = {
    name: op
    for name, op in numpy_protocol.special_functions().items()
    if isinstance(op, OpDef)
}


def inside(op: OpDef, x: Any) -> Any:
    """Numbers from -1 to 1, moved to the range of an operation's samples."""
    low, high = op.samples[0].low, op.samples[0].high
    return low + (x + 1) * ((high - low) / 2)


def special_call(name: str, op: OpDef) -> Callable[[Any], Any]:
    """A function of `scipy.special`, of numbers of its domain."""
    others = [inside(op, W)] * (len(op.samples[0].operands) - 1)
    return lambda x: getattr(special, name)(inside(op, x), *others)


FUNCTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "sum": lambda x: np.sum(x),
    "sum axis": lambda x: np.sum(x, 0),
    "sum out": lambda x: np.sum(x, axis=1, out=None, keepdims=True),
    "sum dtype": lambda x: np.sum(x, dtype=np.float32),
    "mean": lambda x: np.mean(x, axis=-1, dtype=None, out=None),
    "mean dtype": lambda x: np.mean(x, dtype="float32"),
    "std": lambda x: np.std(x, axis=0, ddof=1),
    "var": lambda x: np.var(x, correction=1),
    "prod": lambda x: np.prod(x, axis=(0, 1)),
    "max": lambda x: np.max(x, 1),
    "amin": lambda x: np.amin(x),
    "any": lambda x: np.any(x > 0, axis=0),
    "all": lambda x: np.all(x > 0),
    "argmax": lambda x: np.argmax(x, axis=1),
    "argmin": lambda x: np.argmin(x, axis=0, keepdims=True),
    "count": lambda x: np.count_nonzero(x, axis=0),
    "cumsum": lambda x: np.cumsum(x),
    "cumprod": lambda x: np.cumprod(x, axis=1),
    "diff": lambda x: np.diff(x, axis=0),
    "concatenate": lambda x: np.concatenate([x, 2 * x], axis=1),
    "concatenate flat": lambda x: np.concatenate((x, x), axis=None),
    "concatenate array": lambda x: np.concatenate([x, X]),
    "stack": lambda x: np.stack([x, x], axis=1),
    "roll": lambda x: np.roll(x, 1, axis=0),
    "where": lambda x: np.where(x > 0, x, 0.0),
    "clip": lambda x: np.clip(x, -0.5, None),
    "clip by name": lambda x: np.clip(x, min=-0.5, max=0.5),
    "isclose": lambda x: np.isclose(x, x + 1e-9),
    "nan_to_num": lambda x: np.nan_to_num(x / 0, nan=1.0, posinf=2.0, neginf=3.0),
    "round": lambda x: np.round(x, 1),
    "around": lambda x: np.around(10 * x),
    "real": lambda x: np.real(x),
    "imag": lambda x: np.imag(x),
    "copy": lambda x: np.copy(x),
    "reshape": lambda x: np.reshape(x, (4, -1)),
    "ravel": lambda x: np.ravel(x),
    "transpose": lambda x: np.transpose(x),
    "transpose axes": lambda x: np.transpose(x, (1, 0)),
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "squeeze": lambda x: np.squeeze(x[None]),
    "moveaxis": lambda x: np.moveaxis(x, 0, 1),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "broadcast_to": lambda x: np.broadcast_to(x, (2, 3, 4)),
    "flip": lambda x: np.flip(x, axis=1),
    "tile": lambda x: np.tile(x, (2, 1)),
    "repeat": lambda x: np.repeat(x, 2, axis=0),
    "take": lambda x: np.take(x, [2, 0], axis=1),
    "take_along_axis": lambda x: np.take_along_axis(x, INTEGERS % 3, axis=0),
    "sort": lambda x: np.sort(-x, axis=0),
    "argsort": lambda x: np.argsort(-x),
    "dot": lambda x: np.dot(x, Y),
    "dot number": lambda x: np.dot(x, 2.0),
    "dot matrices": lambda x: np.dot(x, x.T),
    "outer": lambda x: np.outer(x, Y),
    "tensordot": lambda x: np.tensordot(x, x, axes=((0, 1), (0, 1))),
    "tril": lambda x: np.tril(x, -1),
    "triu": lambda x: np.triu(x, k=1),
    "zeros_like": lambda x: np.zeros_like(x),
    "ones_like": lambda x: np.ones_like(x, dtype=np.float32),
    "full_like": lambda x: np.full_like(x, 7.0),
    "sum where": lambda x: np.sum(x, axis=0, where=x > 0),
    "sum initial": lambda x: np.sum(x, axis=0, initial=2.0, where=x > 0),
    "prod where": lambda x: np.prod(x, where=x > 0),
    "mean where": lambda x: np.mean(x, axis=1, where=x > -0.5, keepdims=True),
    "max initial": lambda x: np.max(x, axis=1, initial=0.0),
    "min where": lambda x: np.min(x, axis=0, initial=9.0, where=x > 0),
    "any where": lambda x: np.any(x > 0.5, axis=0, where=x > 0),
    "all where": lambda x: np.all(x > 0.5, axis=0, where=[[True], [False], [True]]),
    "average": lambda x: np.average(x, axis=0),
    "ptp": lambda x: np.ptp(x, axis=1),
    "concatenate dtype": lambda x: np.concatenate([x, x], dtype=np.float32),
    "stack dtype": lambda x: np.stack([x, x], dtype=np.float32),
    "hstack": lambda x: np.hstack([x, x]),
    "hstack flat": lambda x: np.hstack([x[0, 0], x[0]]),
    "vstack": lambda x: np.vstack([x[0], x, [1.0, 2.0, 3.0, 4.0]]),
    "dstack": lambda x: np.dstack([x, 2 * x]),
    "dstack rows": lambda x: np.dstack([x[0], x[1]]),
    "column_stack": lambda x: np.column_stack([x, x[:, 0]]),
    "append": lambda x: np.append(x, [[1.0, 2.0, 3.0, 4.0]], axis=0),
    "append flat": lambda x: np.append(x, 1.0),
    "pad": lambda x: np.pad(x, 1),
    "pad value": lambda x: np.pad(x, [(0, 1), (2, 0)], constant_values=3.0),
    "clip from above": lambda x: np.clip(x, a_min=None, a_max=0.5),
    "array_equal": lambda x: np.array_equal(x, x + 0.0),
    "allclose": lambda x: np.allclose(x, x + 1.0),
    "reshape by columns": lambda x: np.reshape(x, (4, -1), order="F"),
    "ravel by columns": lambda x: np.ravel(x, order="F"),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x[0], x)[0],
    "meshgrid": lambda x: np.meshgrid(x[0], Y)[0],
    "meshgrid ij": lambda x: np.meshgrid(x[0], Y, indexing="ij")[1],
    "flipud": lambda x: np.flipud(x),
    "fliplr": lambda x: np.fliplr(x),
    "take flat": lambda x: np.take(x, [2, 0]),
    "take wrap": lambda x: np.take(x, [5, -1, -9], axis=1, mode="wrap"),
    "take clip": lambda x: np.take(x, [5, -9], axis=1, mode="clip"),
    "sort stable": lambda x: np.sort(-x, axis=1, kind="stable"),
    "sort flat": lambda x: np.sort(-x, axis=None),
    "argsort flat": lambda x: np.argsort(-x, axis=None),
    "searchsorted": lambda x: np.searchsorted(x[0], -0.7, side="right"),
    "nonzero": lambda x: np.nonzero(x > 0)[1],
    "where one": lambda x: np.where(x > 0)[0],
    "argwhere": lambda x: np.argwhere(x > 0),
    "flatnonzero": lambda x: np.flatnonzero(x > 0),
    "vdot": lambda x: np.vdot(x, x),
    "inner": lambda x: np.inner(x, Y),
    "inner matrices": lambda x: np.inner(x, 2 * x),
    "cross": lambda x: np.cross(x[:, :3], [1.0, 2.0, 3.0]),
    "trace": lambda x: np.trace(x, 1),
    "trace axes": lambda x: np.trace(x[:, None], axis1=2, axis2=0),
    "diagonal": lambda x: np.diagonal(x, offset=-1),
    "diag": lambda x: np.diag(x, 1),
    "diag of a row": lambda x: np.diag(x[0], -1),
    "diag of a row above": lambda x: np.diag(x[0], k=2),
    "norm": lambda x: np.linalg.norm(x),
    "norm of rows": lambda x: np.linalg.norm(x, axis=1, keepdims=True),
    "norm of a row": lambda x: np.linalg.norm(x[0], 3),
    "norm of a matrix": lambda x: np.linalg.norm(x, np.inf),
    "norm of matrices": lambda x: np.linalg.norm(
        x[None], "fro", axis=(2, 1), keepdims=True
    ),
    "nuclear norm": lambda x: np.linalg.norm(x + np.eye(3, 4), "nuc"),
    "det": lambda x: np.linalg.det(x @ x.T + np.eye(3)),
    "inv": lambda x: np.linalg.inv(x @ x.T + np.eye(3)),
    "solve": lambda x: np.linalg.solve(x @ x.T + np.eye(3), x),
    "cholesky": lambda x: np.linalg.cholesky(x @ x.T + np.eye(3)),
    "slogdet": lambda x: np.linalg.slogdet(x @ x.T + np.eye(3))[1],
    "eigvalsh": lambda x: np.linalg.eigvalsh(x @ x.T + np.diag(Y[:3])),
    "svd values": lambda x: np.linalg.svd(x + np.eye(3, 4), compute_uv=False),
    "qr": lambda x: np.abs(np.linalg.qr(x[:, :3] + np.eye(3))[1]),
    "pinv": lambda x: np.linalg.pinv(x + np.eye(3, 4)),
    "matrix_power": lambda x: np.linalg.matrix_power(x[:, :3], 2),
    "add.reduce where": lambda x: np.add.reduce(x, where=x > 0),
    "add.reduce initial": lambda x: np.add.reduce(x, axis=1, initial=1.0),
    "add.reduce": lambda x: np.add.reduce(x),
    "maximum.reduce": lambda x: np.maximum.reduce(x, axis=None),
    "dtype": lambda x: np.add(x, 1, dtype=np.float32),
    "list": lambda x: np.add(x, [1.0, 2.0, 3.0, 4.0]),
    "array on the left": lambda x: X * x - x / Y,
    "comparison": lambda x: np.less(X, 2 * x),
    "psi": lambda x: special.psi(x + 2),
    **{name: special_call(name, op) for name, op in SPECIAL.items()},
}
MODES: Final[dict[str, Callable[..., Any]]] = {
    "eager": lambda f: f,
    "jit": hf.jit,
    "dynamic": lambda f: hf.jit(f, dynamic=True),
    "trace": lambda f: lambda *args: hf.trace(f, *args)(*args),
    "functionalize": hf.functionalize,
}
every_mode = pytest.mark.parametrize("mode", MODES)


def agree(found: Any, wanted: Any) -> None:
    assert isinstance(found, hf.Tensor)
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype or wanted.dtype.kind in "if"
    rtol = 1e-5 if found.dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol)


def arguments(ufunc: np.ufunc) -> tuple[Any, ...]:
    """What a universal function takes: of an operation, numbers of its domain."""
    ours, name = numpy_protocol.universal_functions()[ufunc], ufunc.__name__
    x: Any = X
    y: Any = Y
    if name == "matmul":
        y = X.T
    elif isinstance(ours, OpDef):
        x, y = inside(ours, X), inside(ours, W)
        if hf.float64 not in ours.samples[0].dtypes:
            x, y = INTEGERS, np.arange(4)
    elif name in ("power", "float_power"):
        x = np.abs(X) + 1.0
    return (x, y)[: ufunc.nin]


@every_mode
@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda f: f.__name__)
def test_universal_functions_are_ours(mode: str, ufunc: np.ufunc) -> None:
    args = arguments(ufunc)
    found = MODES[mode](lambda *a: ufunc(*a))(*map(hf.asarray, args))
    wanted = ufunc(*args)
    pairs = zip(found, wanted, strict=True) if ufunc.nout > 1 else [(found, wanted)]
    for got, want in pairs:
        agree(got, want)


@every_mode
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_ours(mode: str, name: str) -> None:
    with np.errstate(all="ignore"):
        wanted = FUNCTIONS[name](X)
    agree(MODES[mode](FUNCTIONS[name])(hf.asarray(X)), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_functions_are_those_of_differences(name: str) -> None:
    f, (x, dx) = FUNCTIONS[name], (X + 0.01, np.cos(np.arange(12.0)).reshape(3, 4))
    with np.errstate(all="ignore"):
        y = np.asarray(f(x))
        if y.dtype != np.float64 or "dtype" in name:
            return
        more, less = f(x + 1e-6 * dx), f(x - 1e-6 * dx)
        wanted = np.where(more == less, 0, (more - less) / 2e-6)
    found = hf.jvp(f, (hf.asarray(x),), (hf.asarray(dx),))[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.fabs(x),
        lambda x: np.fmax(x, np.cos(x)),
        lambda x: np.fmin(x, np.nan),
        lambda x: np.fmax(np.nan, x),
        lambda x: np.float_power(x + 3, x),
        lambda x: np.logaddexp2(x, Y),
        lambda x: np.deg2rad(x) + np.radians(x),
        lambda x: np.rad2deg(x) + np.degrees(x),
        lambda x: np.modf(7 * x)[0],
        lambda x: np.modf(7 * x)[1] * x,
    ],
)
def test_derivatives_of_universal_functions_are_those_of_differences(f: Any) -> None:
    dx = np.cos(np.arange(12.0)).reshape(3, 4)
    wanted = (f(X + 1e-6 * dx) - f(X - 1e-6 * dx)) / 2e-6
    found = hf.jvp(f, (hf.asarray(X),), (hf.asarray(dx),))[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


@every_mode
def test_fmax_and_modf_at_values_that_are_special(mode: str) -> None:
    x = np.asarray([-np.inf, -3.0, -2.5, -0.0, 0.0, 1.75, np.inf, np.nan])
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda x: np.modf(x)[0],
        lambda x: np.modf(x)[1],
        lambda x: np.fmax(x, 1.0),
        lambda x: np.fmin(x, x[::-1]),
    )
    for f in functions:
        found, wanted = MODES[mode](f)(hf.asarray(x)), f(x)
        np.testing.assert_array_equal(found, wanted)
    signs = np.signbit(MODES[mode](lambda x: np.modf(x)[0])(hf.asarray(x)))
    np.testing.assert_array_equal(signs, np.signbit(np.modf(x)[0]))
    slopes = hf.grad(lambda x: np.sum(np.modf(x)[0]))(hf.asarray([-3.0, -0.0, 2.0]))
    assert slopes.tolist() == [1, 1, 1]


def test_a_reduction_without_an_identity_needs_initial_for_where() -> None:
    with pytest.raises(ArgumentValueError, match="Give `initial` too"):
        np.max(hf.asarray(X), where=X > 0)


def test_matrices_have_two_axes() -> None:
    x = hf.ones((2, 2, 2))
    with pytest.raises(ShapeError, match="expected a vector or a matrix, and found"):
        np.diag(x)
    with pytest.raises(ShapeError, match="expected one axis or two, and found 3"):
        np.linalg.norm(x, 2)


def test_options_without_a_counterpart_are_numpys() -> None:
    x = hf.asarray(X)
    for f in (
        lambda x: np.pad(x, 1, mode="edge"),
        lambda x: np.pad(x, 1, constant_values=(1.0, 2.0)),
        lambda x: np.linalg.qr(x, mode="r"),
        lambda x: np.average(x, weights=X + 1),
        lambda x: np.std(x, where=X > 0),
    ):
        found = f(x)
        assert not isinstance(found, hf.Tensor)
        np.testing.assert_allclose(found, f(X))
    y = np.reshape(x, (4, 3), copy=True)
    y += 1.0
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda a, n: a * V,
        lambda a, n: V * a,
        lambda a, n: V**n - n / (V + 3.0),
        lambda a, n: (a < V) | (n < V),
        lambda a, n: np.maximum(n, V) + np.sin(a),
        lambda a, n: np.float64(2.0) * a + np.int64(2) * n + V,
    ],
)
def test_a_number_of_a_call_meets_numpys_arrays(f: Any, dynamic: Any) -> None:
    jitted = hf.jit(lambda a, n: hf.asarray(f(a, n)), dynamic=dynamic)
    for a, n in ((0.3, 2), (-1.5, 3)):
        agree(jitted(a, n), f(a, n))


def test_sizes_times_numbers_of_numpy_are_sizes() -> None:
    def f(x: Any) -> Any:
        n = x.shape[0]
        assert isinstance(np.int64(2) * n, SymInt)
        assert isinstance(np.int64(2) < n, bool | SymBool)
        return hf.ones((np.int64(2) * n,)) + n * V[:1]

    agree(hf.jit(f, dynamic=True)(np.zeros(3)), np.full(6, 1 + 3 * V[0]))


def test_a_trace_records_numpys_functions_as_ours() -> None:
    graph = hf.trace(lambda x: np.sum(np.sin(x)), hf.spec("f32[n]"), mode="fake").graph
    assert [node.op.name for node in graph.nodes] == ["sin", "reduce_sum"]
    slope = hf.grad(lambda x: np.sum(np.sin(x) * np.exp(x)))(hf.asarray(Y))
    np.testing.assert_allclose(slope, np.exp(Y) * (np.sin(Y) + np.cos(Y)))
    rows = hf.vmap(lambda x: np.max(np.abs(x)))(hf.asarray(X))
    np.testing.assert_allclose(rows, np.max(np.abs(X), axis=1))


def test_shapes_are_asked_of_traced_tensors() -> None:
    def f(x: Any) -> Any:
        assert np.ndim(x) == 2
        assert not np.iscomplexobj(x)
        assert np.isrealobj(x)
        return x * np.shape(x)[0] + np.size(x) + np.size(x, 1)

    agree(hf.jit(f)(hf.asarray(X)), 3 * X + 12 + 4)


def test_what_is_not_ours_is_computed_by_numpy() -> None:
    x = hf.asarray(X)
    for f in (np.median, np.linalg.cond, lambda x: np.einsum("ij,ij->", x, x)):
        found = f(x)
        assert not isinstance(found, hf.Tensor)
        np.testing.assert_allclose(found, f(X))
    assert isinstance(np.heaviside(x, 0.5), np.ndarray)
    assert isinstance(np.add.outer(x, x), np.ndarray)
    assert np.allclose(x, X)
    np.testing.assert_array_equal(
        np.add(x, 1, where=X > 0, out=np.zeros((3, 4)))[X < 0], 0
    )
    with pytest.raises(TypeError):
        np.add(x, object())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: np.median(x), "numpy.median"),
        (lambda x: np.heaviside(x, 0.5), "numpy.heaviside"),
        (lambda x: np.add.accumulate(x), "numpy.add.accumulate"),
        (lambda x: np.sum(x, out=np.zeros(())), "numpy.sum"),
        (lambda x: np.add(x, 1, out=np.zeros((3, 4))), "numpy.add"),
    ],
)
def test_what_is_not_ours_refuses_a_traced_tensor(f: Any, name: str) -> None:
    message = rf"{name}\(\) of a traced tensor f64\[3, 4\] at test_numpy_functions"
    with pytest.raises(TraceError, match=message):
        hf.trace(f, hf.asarray(X), mode="fake")


def test_results_are_written_to_out() -> None:
    x, array, tensor = (
        hf.asarray(X),
        np.zeros((3, 4)),
        hf.zeros((3, 4), dtype="float64"),
    )
    assert np.add(x, 1, out=array) is array
    multiply: Any = np.multiply
    assert multiply(x, 2, out=tensor) is tensor
    array += x
    np.testing.assert_allclose(array, 2 * X + 1)
    np.testing.assert_allclose(tensor, 2 * X)
    np.testing.assert_allclose(np.sum(x, axis=0, out=np.zeros(4)), X.sum(0))
    with pytest.raises(ArgumentTypeError, match=r"numpy.median: `out` must be a NumPy"):
        np.median(x, out=tensor)


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", hf.__array_namespace_info__().dtypes().values())
def test_a_dtype_equals_what_names_it(dtype: Any) -> None:
    same = [np.dtype(dtype.name), getattr(np, dtype.name), dtype.name, dtype]
    for other in same:
        assert dtype == other
        assert other == dtype
        assert dtype != np.complex64
    x = hf.zeros((2,), dtype=dtype)
    assert x.dtype.type is np.dtype(dtype.name).type
    assert np.dtype(x.dtype) == np.dtype(dtype.name)
    assert x.dtype.itemsize == np.dtype(dtype.name).itemsize
    assert {dtype: 1}[dtype] == 1
    assert [
        d for d in hf.__array_namespace_info__().dtypes().values() if d == dtype
    ] == [dtype]


@pytest.mark.parametrize(
    "other", ["float31", "complex64", complex, object, None, 4, []]
)
def test_a_dtype_equals_nothing_else(other: Any) -> None:
    assert hf.float32 != other
    assert (hf.float32 == other) is False


def test_the_standards_dtypes_are_listed() -> None:
    found = hf.__array_namespace_info__().dtypes()
    assert {"float16", "bfloat16"}.isdisjoint(found)
    assert list(hf.__array_namespace_info__().dtypes(kind="real floating")) == [
        "float32",
        "float64",
    ]


# --- operations of Python and the standard --------------------------------------------


@every_mode
def test_the_sign_of_a_zero_is_zero(mode: str) -> None:
    for dtype in (hf.float16, hf.bfloat16, hf.float32, hf.float64):
        x = hf.asarray([-0.0, 0.0, -3.0, 2.0, float("nan"), float("-inf")], dtype=dtype)
        found = MODES[mode](hf.sign)(x).astype(hf.float32)
        np.testing.assert_array_equal(found, [0, 0, -1, 1, np.nan, -1])
        assert not hf.signbit(found)[0]


@every_mode
def test_real_dtypes_are_their_own_conjugates(mode: str) -> None:
    x = hf.asarray(X)
    for f in (hf.real, hf.conj, lambda x: x.real, lambda x: x.conj()):
        agree(MODES[mode](f)(x), X)
    for f in (hf.imag, lambda x: x.imag):
        agree(MODES[mode](f)(x), 0 * X)
    y = hf.real(x)
    y += 1.0
    np.testing.assert_array_equal(x, X)
    assert (
        hf.grad(lambda x: hf.sum(hf.conj(x) * x.real))(x).tolist() == (2 * X).tolist()
    )


@every_mode
def test_axes_are_added_by_position(mode: str) -> None:
    assert MODES[mode](lambda x: hf.expand_dims(x, 1))(hf.asarray(X)).shape == (3, 1, 4)
    assert MODES[mode](lambda x: hf.expand_dims(x, (0, -1)))(hf.ones(2)).shape == (
        *(1, 2, 1),
    )


@every_mode
@pytest.mark.parametrize("digits", [None, 0, 1, 3, -1])
def test_round_is_numpys(mode: str, digits: Any) -> None:
    x = 37.0 * X
    found = MODES[mode](lambda x: round(x, digits))(hf.asarray(x))
    agree(found, np.round(x, digits or 0))
    whole = MODES[mode](lambda x: round(x, digits))(hf.asarray(INTEGERS))
    agree(whole, np.round(INTEGERS, digits or 0))
    assert whole.dtype == hf.int64


@every_mode
def test_divmod_is_pythons(mode: str) -> None:
    for x in (37.0 * X, INTEGERS):
        for n in (3, -3):
            found = MODES[mode](lambda x, n: divmod(x, n))(hf.asarray(x), n)
            for got, want in zip(found, np.divmod(x, n), strict=True):
                agree(got, want)
    found = MODES[mode](lambda x: divmod(7, x))(hf.asarray([2, -3]))
    assert [x.tolist() for x in found] == [[3, -3], [1, -2]]


@every_mode
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("modulus", [1, 7, 97, -7, 2**31 - 1, 2**32])
def test_modular_powers_are_pythons(mode: str, dtype: str, modulus: int) -> None:
    info = np.iinfo(dtype)
    if not info.min <= modulus <= info.max:
        return
    x = np.asarray([0, 1, 2, 126, info.max, info.min], dtype)
    for exponent in (0, 1, 2, 77, 10**15):
        found = MODES[mode](lambda x, e=exponent: pow(x, e, modulus))(hf.asarray(x))
        assert found.tolist() == [pow(int(v), exponent, modulus) for v in x]
        assert found.dtype == dtype
    found = MODES[mode](lambda x, e, m: pow(x, e, m))(
        *(
            hf.asarray(v, dtype=dtype)
            for v in (x, [3, 0, 5, 100, 7, 2], [5, 1, 3, 7, 9, 2])
        )
    )
    triples = zip(x, (3, 0, 5, 100, 7, 2), (5, 1, 3, 7, 9, 2), strict=True)
    assert found.tolist() == [pow(int(v), e, m) for v, e, m in triples]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((1.5, 2, 5), ArgumentTypeError, "operands must be integers, and one is f32"),
        ((2, -1, 5), PowerError, "negative power -1"),
        ((2, 3, 2**33), ArgumentValueError, r"from -2\*\*32 to 2\*\*32, and is 8589"),
        ((2, 3, 0), DivisionError, "divided by 0"),
        ((2, hf.asarray(-1), 5), CheckError, "an exponent must not be negative"),
        ((2, 3, hf.asarray(2**33)), CheckError, "`modulus` must be from"),
    ],
)
def test_modular_powers_that_are_refused(args: Any, error: Any, message: str) -> None:
    x, *rest = args
    with pytest.raises(error, match=message):
        pow(hf.asarray(x), *rest)


# --- SciPy ----------------------------------------------------------------------------


def rosenbrock(x: Any) -> Any:
    return hf.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-B", "Newton-CG", "trust-constr"])
def test_scipy_minimizes_jitted_functions(method: str) -> None:
    second = {"hess": hf.jit(hf.hessian(rosenbrock))}
    minimize: Any = optimize.minimize
    found = minimize(
        hf.jit(rosenbrock),
        np.array([1.3, 0.7, 0.8]),
        jac=hf.jit(hf.grad(rosenbrock)),
        method=method,
        **(second if method in ("Newton-CG", "trust-constr") else {}),
    )
    np.testing.assert_allclose(found.x, 1.0, atol=1e-3)


def test_scipy_minimizes_values_with_gradients_and_by_values_alone() -> None:
    start = np.array([1.3, 0.7, 0.8])
    minimize: Any = optimize.minimize
    both = hf.jit(hf.value_and_grad(rosenbrock))
    np.testing.assert_allclose(minimize(both, start, jac=True).x, 1, atol=1e-3)
    alone = minimize(hf.jit(rosenbrock), start, method="Nelder-Mead")
    np.testing.assert_allclose(alone.x, 1, atol=1e-3)
    scalar = optimize.minimize_scalar(hf.jit(lambda t: (t - 1) ** 2))
    np.testing.assert_allclose(scalar.x, 1.0)


def test_scipy_finds_roots_and_integrals_of_jitted_functions() -> None:
    def f(x: Any) -> Any:
        return x**3 - 2

    root = 2 ** (1 / 3)
    assert abs(optimize.brentq(hf.jit(f), 0.0, 2.0) - root) < 1e-10
    newton = optimize.newton(hf.jit(f), 1.0, fprime=hf.jit(hf.grad(f)))
    assert abs(float(newton) - root) < 1e-6
    many = optimize.root(hf.jit(f), np.ones(3), jac=hf.jit(hf.jacfwd(f)))
    np.testing.assert_allclose(many.x, root)
    least = optimize.least_squares(hf.jit(f), np.ones(3), jac=hf.jit(hf.jacfwd(f)))
    np.testing.assert_allclose(least.x, root)
    area, _ = integrate.quad(hf.jit(lambda t: hf.exp(-t)), 0, 1)
    assert abs(area - (1 - np.exp(-1))) < 1e-6
    path = integrate.solve_ivp(hf.jit(lambda t, y: -y), (0.0, 1.0), [1.0], rtol=1e-8)
    assert abs(path.y[0, -1] - np.exp(-1)) < 1e-6


# --- optimizers of trees --------------------------------------------------------------


def adam(rate: float) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """An optimizer in the style of optax: pure functions of trees, by NumPy's names."""
    each = optree.tree_map

    def init(params: Any) -> Any:
        return 0, each(np.zeros_like, params), each(np.zeros_like, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        count, first, second = state
        count = count + 1
        first = each(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = each(lambda v, g: 0.999 * v + 0.001 * np.square(g), second, grads)
        scale = np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        steps = each(lambda m, v: rate * scale * m / (np.sqrt(v) + 1e-8), first, second)
        return each(operator.sub, params, steps), (count, first, second)

    return init, update


@pytest.mark.parametrize("compile_", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_optimizers_of_trees_run(compile_: Any) -> None:
    init, update = adam(0.1)

    def loss(params: Any) -> Any:
        return np.sum((params["w"] - 3.0) ** 2) + np.sum(np.abs(params["b"][0] + 1.0))

    def next_(params: Any, state: Any) -> Any:
        return update(hf.grad(loss)(params), state, params)

    step = compile_(next_)

    params: Any = {"w": hf.zeros((3,)), "b": [hf.zeros(())]}
    state = init(params)
    for _ in range(200):
        params, state = step(params, state)
    np.testing.assert_allclose(params["w"], 3.0, atol=0.05)
    np.testing.assert_allclose(params["b"][0], -1.0, atol=0.2)
    assert state[0] == 200


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.linalg.cond(np.outer(x, x) + np.eye(2)),
        lambda x: np.median(x),
        lambda x: np.std(x, where=[True, True]),
        lambda x: hf.sum(np.pad(x, 1, mode="edge")),
        lambda x: np.einsum("i,i", x, x),
        lambda x: np.subtract.reduce(x),
        lambda x: hf.sum(np.add.outer(x, x)),
        lambda x: hf.sum(np.add(x, x, out=np.zeros(2))),
        lambda x: hf.sum(np.asarray(x)),
        lambda x: hf.sum(np.array([x[0], x[1]])),
        lambda x: hf.sum(np.from_dlpack(x)),
    ],
)
def test_numpys_own_functions_refuse_what_is_differentiated(f: Any) -> None:
    x = hf.asarray([3.0, 4.0])

    def scaled(x: Any) -> Any:
        return x[0] * f(x)

    for transformed in (
        hf.grad(scaled),
        hf.jacfwd(scaled),
        hf.grad(lambda x: hf.sum(hf.grad(scaled)(x))),
        lambda x: hf.jvp(scaled, (x,), (x,)),
        lambda x: hf.grad(lambda y: hf.sum(hf.jvp(scaled, (x,), (y,))[1]))(x),
    ):
        with pytest.raises(TraceError, match="NumPy's result has no derivative"):
            transformed(x)
    # In bodies, too, which read the tensor from outside.
    for within in (
        lambda x: hf.scan(lambda c, e: (c + e * f(x), c), x[0], x)[0],
        lambda x: hf.sum(hf.vmap(lambda e: e * f(x))(hf.ones(3))),
        lambda x: hf.cond(x[0] > 0, lambda: x[0] * f(x), lambda: x[0]),
        lambda x: hf.sum(np.add(x, f(hf.ones(2)), out=np.zeros(2, np.float32)) * x),
    ):
        with pytest.raises(TraceError, match=r"has no derivative|of a traced tensor"):
            hf.grad(within)(x)
    # What has no tangent is a constant, and so are positions.
    stopped = hf.grad(lambda x: x[0] * f(hf.stop_gradient(x)))
    np.testing.assert_allclose(stopped(x), [float(f(x)), 0], rtol=1e-6)
    assert hf.grad(lambda x: x[np.argpartition(x, 1)[1]])(x).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("f", "remedy"),
    [
        (np.einsum, "Use `hf.tensordot` or `hf.matmul`"),
        (np.linalg.cond, "hopflow has no `cond`. What it has is in `hf.__all__`"),
        (np.pad, "Use `hf.pad`, with the options that it has"),
        (np.asarray, "Compute with `hf` functions"),
    ],
)
@pytest.mark.parametrize("transform", [hf.grad, hf.jit, hf.vmap])
def test_what_is_not_ours_names_what_is(transform: Any, f: Any, remedy: str) -> None:
    args: dict[Any, Any] = {
        np.einsum: lambda x: ("ij,ij->", x, x),
        np.pad: lambda x: (x, 1, "edge"),
    }
    x = hf.ones((2, 2, 2))
    with pytest.raises(TraceError, match=re.escape(remedy)):
        transform(lambda x: hf.sum(f(*args.get(f, lambda x: (x,))(x[0]))))(x)


def test_python_numbers_of_what_is_differentiated_are_constants() -> None:
    def f(x: Any) -> Any:
        return x[0] * (float(x[1]) + x.tolist()[0] + x[1].item() + int(x[1]))

    assert hf.grad(f)(hf.asarray([3.0, 4.0])).tolist() == [15, 0]


@pytest.mark.parametrize("mode", ["eager", "jit", "debug"])
def test_clip_with_one_bound(mode: str) -> None:
    x = hf.asarray([-2.0, 0.25, 3.0])

    def f(x: Any) -> Any:
        return (
            np.clip(x, None, 0.5),
            np.clip(x, a_min=None, a_max=0.5),
            np.clip(x, 0.5, None),
            np.clip(x, a_min=0.5, a_max=None),
            np.clip(x, max=0.5),
            np.clip(x, -1, 1),
        )

    with hf.debug() if mode == "debug" else nullcontext():
        found = (hf.jit(f) if mode == "jit" else f)(x)
    for ours, numpys in zip(found, f(np.asarray(x)), strict=True):
        np.testing.assert_array_equal(ours, numpys)


def test_a_ufunc_takes_a_tensor_for_where() -> None:
    x = hf.asarray([3.0, 4.0])
    where: Any = x > 3
    assert np.add(x, x, where=where, out=np.zeros(2, np.float32)).tolist() == [0, 8]
    assert np.add.reduce(x, where=where) == 4
    assert np.sum(np.ones(2), where=where) == 1


def test_positions_are_those_of_numpy_in_traces() -> None:
    def f(x: Any) -> Any:
        return np.where(x > 3), np.nonzero(x - 3), np.searchsorted(x, [3.5, 9.0])

    x = hf.asarray([3.0, 4.0, 5.0])
    for found in (f(x), hf.jit(f)(x)):
        for ours, numpys in zip(
            hf.pytree.flatten(found)[0],
            hf.pytree.flatten(f(np.asarray(x)))[0],
            strict=True,
        ):
            np.testing.assert_array_equal(ours, numpys)
