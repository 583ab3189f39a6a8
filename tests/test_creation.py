"""Functions that make tensors, against NumPy's and JAX's."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DeviceError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.ops import creation as hf
from hopflow.symbolic.size import symbol
from hopflow.tensor import asarray

pytestmark = pytest.mark.slow

NUMPY: Any = np  # its overloads do not take unpacked arguments


@pytest.fixture(autouse=True)
def _wide() -> Any:
    with jax.enable_x64(True):
        yield


def same(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def near(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = 2 * dtypes.finfo(got.dtype).eps
    a, b = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# --- primitives -----------------------------------------------------------------------


def test_shapes_may_be_symbolic() -> None:
    n = symbol("n")
    scalar = TensorType(dtypes.float32)
    assert str(hf.fill.infer(scalar, shape=(n, 2))) == "f32[n, 2]"
    assert str(hf.iota.infer(shape=(2, n), axis=1, dtype=dtypes.int64)) == "i64[2, n]"


def test_primitives_refuse_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="full: the value must be a scalar"):
        hf.fill.infer(TensorType(dtypes.float32, (2,)), shape=(2,))
    with pytest.raises(ArgumentTypeError, match="full: takes 1 operand"):
        hf.fill.infer(shape=(2,))
    with pytest.raises(DTypeError, match="iota: the dtype must be numeric"):
        hf.iota.infer(shape=(2,), axis=0, dtype=dtypes.bool_)
    with pytest.raises(AxisError, match="iota: `axis` is 1"):
        hf.iota.infer(shape=(2,), axis=1, dtype=dtypes.int32)


# --- constants ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), 3, (2, 3), [2, 0], (np.int64(2),)], ids=str)
def test_constants(shape: Any) -> None:
    same(hf.zeros(shape), np.zeros(shape, np.float32))
    same(hf.ones(shape), np.ones(shape, np.float32))
    same(hf.full(shape, 2.5), np.full(shape, 2.5, np.float32))
    assert hf.empty(shape).shape == np.zeros(shape).shape


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_constants_of_every_dtype(dtype: DType) -> None:
    x = np.zeros((2, 2), dtype.dtype)
    same(hf.zeros((2, 2), dtype=dtype), x)
    same(hf.ones((2, 2), dtype=dtype.name), np.ones_like(x))
    same(hf.full((2,), 1, dtype=dtype.dtype), np.ones(2, dtype.dtype))
    for like in (asarray(x), x):
        same(hf.zeros_like(like), x)
        same(hf.ones_like(like), np.ones_like(x))
        same(hf.full_like(like, 1), np.ones_like(x))
        assert hf.empty_like(like).type.dtype is dtype
        same(hf.ones_like(like, dtype="f64"), np.ones((2, 2)))


def test_the_dtype_of_a_value() -> None:
    for value, dtype in ((True, "bool"), (3, "i64"), (0.5, "f32")):
        assert hf.full(2, value).type.dtype is dtypes.as_dtype(dtype)
    x = asarray(np.asarray(7, np.int8))
    same(hf.full((2,), x), np.asarray([7, 7], np.int8))
    assert not hf.full(2, 1).type.weak


def test_a_tensor_is_broadcast_to_the_shape() -> None:
    x = np.asarray([1.0, 2.0])
    same(hf.full((2, 2), asarray(x)), np.full((2, 2), x))


def test_constants_can_be_written() -> None:
    x: Any = hf.zeros((2, 2))
    x[0, 1] = 5.0
    same(x, np.asarray([[0, 5], [0, 0]], np.float32))


# --- ranges ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [(5,), (0,), (-3,), (2, 7), (7, 2), (7, 2, -2), (0, 10, 3), (1, 2, 5), (5, 5)],
    ids=str,
)
def test_ranges_of_integers(args: tuple[int, ...]) -> None:
    same(hf.arange(*args), np.arange(*args))
    for name in ("i8", "u16", "f32", "f64"):
        dtype = dtypes.as_dtype(name)
        if dtype.kind == "u" and min(args) < 0:
            continue
        same(hf.arange(*args, dtype=name), np.arange(*args, dtype=dtype.dtype))


@pytest.mark.parametrize(
    "args",
    [(0.0, 1.0, 0.1), (5.5,), (1.0, 0.0, -0.25), (0.0, 3.0), (0.5, 0.5)],
    ids=str,
)
def test_ranges_of_floats(args: tuple[float, ...]) -> None:
    near(hf.arange(*args), np.arange(*args).astype(np.float32))
    near(hf.arange(*args, dtype="f64"), np.arange(*args))
    near(hf.arange(*args, dtype="bf16"), np.arange(*args).astype(jnp.bfloat16))


@given(
    st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7).filter(lambda n: n)
)
def test_any_range_of_integers(start: int, stop: int, step: int) -> None:
    same(hf.arange(start, stop, step), np.arange(start, stop, step))


def test_long_ranges_do_not_add_up_rounding() -> None:
    got = np.asarray(hf.arange(0.0, 1000.0, 0.1))
    same(got, np.asarray([i * 0.1 for i in range(10000)], np.float32))


@pytest.mark.parametrize("num", [0, 1, 2, 5, 50])
@pytest.mark.parametrize("endpoint", [True, False])
def test_linspace_is_that_of_numpy(num: int, endpoint: bool) -> None:
    pairs: Any = [(0.0, 1.0), (-3, 7), (2.5, 2.5), (1.0, -1.0)]
    for a, b in pairs:
        want = np.linspace(a, b, num, endpoint=endpoint)
        near(hf.linspace(a, b, num, endpoint=endpoint), want.astype(np.float32))
        near(hf.linspace(a, b, num, endpoint=endpoint, dtype="f64"), want)
        got = hf.linspace(a, b, num, endpoint=endpoint, dtype="i32")
        same(got, np.linspace(a, b, num, endpoint=endpoint, dtype=np.int32))


def test_linspace_of_tensors() -> None:
    start = asarray(np.asarray(1.0))
    near(hf.linspace(start, 2, 3), np.asarray([1.0, 1.5, 2.0]))
    assert np.asarray(hf.linspace(0.0, 0.1, 7))[-1] == np.float32(0.1)


# --- matrices and grids ---------------------------------------------------------------


@pytest.mark.parametrize("k", [-2, -1, 0, 1, 3])
def test_eye_is_that_of_numpy(k: int) -> None:
    for sizes in ((3,), (2, 4), (4, 2), (0,)):
        same(hf.eye(*sizes, k=k), NUMPY.eye(*sizes, k=k, dtype=np.float32))
        same(hf.eye(*sizes, k=k, dtype="i8"), NUMPY.eye(*sizes, k=k, dtype=np.int8))
        same(hf.eye(*sizes, k=k, dtype=bool), NUMPY.eye(*sizes, k=k, dtype=bool))


@pytest.mark.parametrize("k", [-2, 0, 1])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_triangles_are_those_of_numpy(dtype: DType, k: int) -> None:
    x = np.ones((2, 3, 4), dtype.dtype)
    same(hf.tril(asarray(x), k=k), np.tril(x, k))
    same(hf.triu(asarray(x), k=k), np.triu(x, k))


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_meshgrid_is_that_of_numpy(indexing: Any) -> None:
    x, y, z = np.arange(3), np.arange(2.0), np.asarray(True)
    for arrays in ((), (x,), (x, y), (x, y, z)):
        got = hf.meshgrid(*map(asarray, arrays), indexing=indexing)
        want = np.meshgrid(*arrays, indexing=indexing)
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            same(ours, theirs)


# --- errors ---------------------------------------------------------------------------

n = symbol("n")
HALF: Any = 0.5
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: hf.zeros(1.5), ArgumentTypeError, "zeros: `shape` must be an int"),
    (lambda: hf.zeros((2, -1)), ArgumentValueError, "must not be negative, and has -1"),
    (lambda: hf.ones(True), ArgumentTypeError, "ones: `shape` must be an int"),
    (lambda: hf.zeros(2, device="gpu:0"), DeviceError, "zeros: .* no device 'gpu:0'"),
    (lambda: hf.zeros(2, dtype="c64"), DTypeError, "`c64` is not a hopflow dtype"),
    (lambda: hf.full(2, 300, dtype="u8"), ArgumentRangeError, "300 does not fit uint8"),
    (lambda: hf.full(2, "a"), ArgumentTypeError, "full: argument 1 must be a tensor"),
    (lambda: hf.full((3,), np.zeros(2)), ShapeError, "broadcast"),
    (lambda: hf.arange("a"), ArgumentTypeError, "arange: `start, stop, step` must be"),
    (lambda: hf.arange(1, 5, 0), ArgumentValueError, "arange: `step` must not be 0"),
    (lambda: hf.arange(float("inf")), ArgumentValueError, "there are inf steps"),
    (lambda: hf.arange(3, dtype=bool), DTypeError, "arange: `dtype` must be numeric"),
    (lambda: hf.linspace(0, 1, -1), ArgumentValueError, "`num` must not be negative"),
    (lambda: hf.linspace(0, 1, HALF), ArgumentTypeError, "`num` must be an int"),
    (lambda: hf.linspace(np.zeros(2), 1, 3), ShapeError, "must be scalars"),
    (lambda: hf.eye(2.0), ArgumentTypeError, "eye: `n_rows` must be an int"),
    (lambda: hf.eye(2, k=HALF), ArgumentTypeError, "eye: `k` must be an int"),
    (lambda: hf.tril(np.zeros(3)), ShapeError, "tril: `x` must be a matrix"),
    (lambda: hf.meshgrid(np.zeros(3), indexing="yx"), ArgumentValueError, "`indexing`"),
    (
        lambda: hf.meshgrid(np.zeros((3, 1))),
        ShapeError,
        "argument 0 must have one",
    ),
]


HUGE: Final[dict[str, Callable[[], Any]]] = {
    "zeros": lambda: hf.zeros((2**40, 2**40)),
    "ones": lambda: hf.ones(2**62),
    "empty": lambda: hf.empty(2**62),
    "full": lambda: hf.full(2**62, 1),
    "arange": lambda: hf.arange(2**62),
    "linspace": lambda: hf.linspace(0, 1, 2**62),
    "eye": lambda: hf.eye(2**40),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_too_large_is_named_by_the_function_called(name: str) -> None:
    with pytest.raises(ShapeError, match=f"^{name}: .*larger than any memory"):
        HUGE[name]()


@pytest.mark.parametrize(
    ("call", "error", "text"), ERRORS, ids=[t for _, _, t in ERRORS]
)
def test_wrong_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64", "int8"])
@pytest.mark.parametrize("ends", [(7, -1, -1), (120, 3, -7), (5, 5, -1), (9, 0, -3)])
def test_arange_downwards_takes_what_its_elements_fit(
    ends: tuple[int, int, int], dtype: str
) -> None:
    found = np.asarray(hf.arange(*ends, dtype=dtype))
    expected = np.arange(*ends, dtype=dtype)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
