"""The tensor: its Python face, views and writes, and the eager interpreter."""

import copy
import operator
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.bind import bind
from hopflow.config import config
from hopflow.devices import Device
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArgumentValueError,
    ConversionError,
    DeviceError,
    DTypeError,
    EscapedValueError,
    IndexingError,
    InternalError,
    InvalidTensorError,
    ReadOnlyError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Pointwise
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.tensor import EagerTensor, Storage, Tensor, scalar

# The functions' declared results are `Value`s; what users hold has more.
hf: Any = hopflow


def eager(obj: Any, dtype: Any = None) -> EagerTensor:
    tensor = hf.asarray(obj, dtype=dtype)
    assert isinstance(tensor, EagerTensor)
    return tensor


def values(tensor: Any) -> Any:
    return tensor.tolist()


# --- making ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (True, "bool[]"),
        (3, "i64[]"),
        (2.5, "f32[]"),
        ([1, 2.5], "f32[2]"),
        ([True, 2], "i64[2]"),
        ([True, False], "bool[2]"),
        ([], "f32[0]"),
        ([[], []], "f32[2, 0]"),
        (((1,), (2,)), "i64[2, 1]"),
        (range(3), "i64[3]"),
        ([np.float64(1.5), 2], "f64[2]"),
        (np.float64(1.5), "f64[]"),
        (np.zeros((2, 3), np.int8), "i8[2, 3]"),
    ],
)
def test_asarray_infers_the_type(obj: Any, text: str) -> None:
    assert str(eager(obj).type) == text


@pytest.mark.parametrize(
    ("obj", "dtype", "error", "message"),
    [
        (1j, None, DTypeError, "keep real and imaginary parts apart"),
        ([1, 2j], None, DTypeError, "keep real and imaginary parts apart"),
        (np.array([1j]), None, DTypeError, "Complex types are not supported"),
        ("a", None, ArgumentTypeError, "found `str`"),
        ([None], None, ArgumentTypeError, "found `NoneType`"),
        ([1, [2]], None, ShapeError, "equal lengths"),
        ([[1], [2, 3]], None, ShapeError, "equal lengths"),
        (2**63, None, ArgumentRangeError, "does not fit int64"),
        ([1, 300], "int8", ArgumentRangeError, "300 does not fit int8"),
        ([float("nan")], "int8", ArgumentRangeError, "NaN"),
        (10**400, "float32", ArgumentRangeError, "too large"),
    ],
)
def test_asarray_refuses(
    obj: Any, dtype: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hf.asarray(obj, dtype=dtype)


def test_asarray_takes_integers_that_only_the_dtype_holds() -> None:
    assert values(hf.asarray([2**64 - 1], dtype="uint64")) == [2**64 - 1]
    assert values(hf.asarray(2**70, dtype="float64")) == 2.0**70


def test_asarray_stacks_tensors_and_numbers() -> None:
    x = hf.asarray([1.0, 2.0])
    assert str(eager([x, [3, 4]]).type) == "f32[2, 2]"
    assert str(eager([x[0], 7], dtype="float64").type) == "f64[2]"
    assert values(hf.asarray([[x[1], 1], [2, 3.5]])) == [[2, 1], [2, 3.5]]


def test_asarray_of_a_tensor_is_that_tensor_unless_something_changes() -> None:
    x = hf.asarray([1, 2])
    assert hf.asarray(x) is x
    assert hf.asarray(x, copy=True) is not x
    assert hf.asarray(x, dtype="float32").dtype is hf.float32
    with pytest.raises(ArgumentValueError, match="`copy` is False"):
        hf.asarray(x, dtype="float32", copy=False)


def test_a_device_other_than_the_cpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="asarray"):
        hf.asarray(1, device="gpu")
    x = hf.asarray(1)
    assert x.device == "cpu"
    assert x.to_device("cpu") is x
    with pytest.raises(DeviceError, match="to_device"):
        x.to_device("gpu")
    with pytest.raises(ArgumentValueError, match="no streams"):
        x.to_device("cpu", stream=1)


def test_a_number_is_a_weak_tensor_in_expressions() -> None:
    assert scalar(2.0).type.weak
    assert not scalar(True).type.weak
    assert (hf.asarray([1], dtype="int8") + scalar(2)).dtype is hf.int8
    assert (hf.asarray([1], dtype="int8") + hf.asarray(2)).dtype is hf.int64


# --- attributes, text -----------------------------------------------------------------


def test_attributes() -> None:
    x = hf.zeros((2, 3), dtype="int16")
    assert (x.dtype, x.shape, x.ndim, x.size) == (hf.int16, (2, 3), 2, 6)
    assert x.T.shape == x.mT.shape == (3, 2)
    with pytest.raises(ShapeError, match="T: expected a tensor with 2 axes"):
        _ = hf.zeros((1, 2, 3)).T


def test_text() -> None:
    x = hf.asarray([1.5, 2.0])
    assert repr(x) == "Tensor([1.5, 2. ], f32[2])"
    assert repr(hf.astype(x, "bfloat16")) == "Tensor([1.5, 2. ], bf16[2])"
    assert f"{x[0]:.3f}" == "1.500"
    assert f"{x}" == str(x) == repr(x)


def test_the_namespace_is_the_package() -> None:
    x = hf.asarray(1)
    assert x.__array_namespace__() is hf
    assert x.__array_namespace__(api_version="2024.12") is hf
    with pytest.raises(ArgumentValueError, match=r"no version `1\.0`"):
        x.__array_namespace__(api_version="1.0")


# --- to Python ------------------------------------------------------------------------


def test_conversions_to_python_numbers() -> None:
    assert int(hf.asarray(3.7)) == 3
    assert float(hf.asarray([[2]])) == 2.0
    assert bool(hf.asarray(0)) is False
    assert complex(hf.asarray(1.5)) == 1.5
    assert [10, 20, 30][hf.asarray(2, dtype="uint8")] == 30
    item = hf.asarray([1.5], dtype="bfloat16").item()
    assert (type(item), item) == (float, 1.5)
    assert hf.asarray([[1, 2]], dtype="bfloat16").tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("convert", [int, float, bool, complex, Tensor.item])
def test_only_one_element_is_a_number(convert: Any) -> None:
    with pytest.raises(ConversionError, match="expected a tensor with one element"):
        convert(hf.zeros(2))


def test_a_float_is_no_index() -> None:
    with pytest.raises(ConversionError, match="must be an integer, and is f32"):
        operator.index(hf.asarray(1.0))


def test_containers() -> None:
    x = hf.asarray([[1, 2], [3, 4]])
    assert len(x) == 2
    assert [values(row) for row in x] == [[1, 2], [3, 4]]
    assert 3 in x
    assert 5 not in x
    assert len({x, x}) == 1  # by identity
    with pytest.raises(ConversionError, match=r"len\(\)"):
        len(hf.asarray(1))
    with pytest.raises(ConversionError, match="no items"):
        iter(hf.asarray(1))


# --- operators ------------------------------------------------------------------------

ARITHMETIC = [
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
]
UNSUPPORTED = r"not supported between|unsupported operand"
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
COMPARE = [
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
]


@pytest.mark.parametrize("op", ARITHMETIC + BITWISE + COMPARE)
def test_operators_are_numpys(op: Any) -> None:
    a, b = np.array([5, 2, 7]), np.array([1, 3, 2])
    x, y = hf.asarray(a), hf.asarray(b)
    for got in (op(x, y), op(x, b), op(a, y)):
        assert isinstance(got, Tensor)
        np.testing.assert_allclose(np.asarray(got), op(a, b), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(op(x, 2)), op(a, 2), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(op(2, y)), op(2, b), rtol=1e-6)


def test_unary_operators_and_products() -> None:
    x = hf.asarray([1, -2])
    assert values(-x) == [-1, 2]
    assert values(+x) == [1, -2]
    assert values(abs(x)) == [1, 2]
    assert values(~x) == [-2, 1]
    assert values(x @ x) == 5
    assert values(np.array([2, 1]) @ x) == 0


@pytest.mark.parametrize("op", ARITHMETIC + BITWISE + [operator.matmul, operator.lt])
def test_operators_leave_foreign_operands_to_python(op: Any) -> None:
    with pytest.raises(TypeError, match=UNSUPPORTED):
        op(hf.asarray([1]), object())
    with pytest.raises(TypeError, match=UNSUPPORTED):
        op(None, hf.asarray([1]))
    with pytest.raises(ArgumentTypeError, match=r"is `list`. Convert it with"):
        op([1], hf.asarray([1]))
    assert (hf.asarray([1]) == "a") is False


def test_in_place_operators_write() -> None:
    x: Any = eager([1.0, 2.0])
    alias, view = x, x[1:]
    x += 1
    x *= hf.asarray([2.0, 3.0], dtype="float64")
    assert x is alias
    assert str(x) == "Tensor([4., 9.], f32[2])"
    assert values(view) == [9.0]
    assert x.storage is view.storage
    assert x.storage.version == 2


def test_in_place_operators_keep_shape_and_kind() -> None:
    x, i = hf.asarray([1.0, 2.0]), hf.asarray([1, 2])
    with pytest.raises(ShapeError, match=r"f32\[2\] would become f32\[3, 2\]"):
        x += hf.zeros((3, 2))
    with pytest.raises(DTypeError, match="float32 cannot be written"):
        i /= 2
    with pytest.raises(TypeError, match="unsupported operand"):
        x += "a"
    assert values(x) == [1.0, 2.0]


# --- views and writes -----------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[0],
        lambda x: x[:, 1:],
        lambda x: x[1, 2, ...],
        lambda x: x[..., None],
        lambda x: x[::-1],
        lambda x: x.T,
        lambda x: x.reshape(3, 2),
        lambda x: x.reshape((6,)),
        lambda x: hf.expand_dims(x, axis=0),
    ],
)
def test_views_share_memory_both_ways(view: Any) -> None:
    x = eager(np.arange(6.0).reshape(2, 3))
    part = view(x)
    assert part.storage is x.storage
    part[...] = -1.0
    assert np.array_equal(view(x.array), np.full(part.shape, -1.0)) or bool(
        hf.all(part == -1.0)
    )
    assert x.storage.version == 1
    x[...] = 7.0
    assert bool(hf.all(part == 7.0))


COPIES = [
    lambda x: x.T.reshape(-1),
    lambda x: x[::-1].reshape((3, 2)),
    lambda x: x.T.reshape(-1)[1::2],
    lambda x: x.T.reshape((2, 3)).T.reshape(-1)[::-1],
]


@pytest.mark.parametrize("view", COPIES)
def test_a_reshape_is_a_view_however_the_elements_lie(view: Any) -> None:
    places = view(eager(np.arange(6.0).reshape(2, 3))).array.astype(int)
    x = eager(np.arange(6.0).reshape(2, 3))
    parts = [view(x), view(x), x.T.reshape((3, 2))]

    def check() -> None:
        for part in parts[:2]:
            assert np.array_equal(part.array, x.array.reshape(-1)[places])
        assert np.array_equal(parts[2].array, x.array.T.reshape((3, 2)))

    parts[0][...] = hf.reshape(-hf.arange(parts[0].size), parts[0].shape)
    check()
    x[1] = 7.0
    check()
    parts[2] *= 3
    check()
    assert x.storage is parts[0].storage
    del parts[:]
    assert not x.storage._living()  # nobody has one


def test_a_reshape_of_a_broadcast_is_read_only() -> None:
    x = eager(np.arange(3.0))
    flat = hf.reshape(hf.broadcast_to(x, (2, 3)), -1)
    with pytest.raises(ReadOnlyError):
        flat[0] = 1.0
    x[0] = 5.0
    assert values(flat) == [5, 1, 2, 5, 1, 2]


@pytest.mark.parametrize(
    "copied",
    [lambda x: x + 0, lambda x: x[[0, 1]], lambda x: x[x > -1], lambda x: x.copy()],
)
def test_other_results_have_memory_of_their_own(copied: Any) -> None:
    x = eager([1.0, 2.0])
    other = copied(x)
    other[...] = 5.0
    assert values(x) == [1.0, 2.0]
    assert other.storage is not x.storage


KEYS: list[Any] = [
    *(0, -1, slice(None), slice(1, None, 2), slice(None, None, -1), ..., None),
    *((0, 1), (..., 1), (None, 0, ..., slice(2)), ()),
    *([0, 2], ([0, 1], [1, 2]), np.array([True, False, True])),
    *((slice(None), np.array([1, 0])), (0, None, [1])),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_indexing_is_numpys(key: Any) -> None:
    a = np.arange(12.0).reshape(3, 4)
    x = eager(a.copy())
    assert np.array_equal(np.asarray(x[key]), a[key])
    x[key] = a[key] + 100
    a[key] = a[key] + 100
    assert np.array_equal(x.array, a)
    x[key] = 5
    a[key] = 5
    assert np.array_equal(x.array, a)


def test_tensors_are_indices() -> None:
    x = hf.asarray([10, 20, 30])
    i = hf.asarray([2, 0])
    assert values(x[i]) == [30, 10]
    assert values(x[i[0]]) == 30
    x[i] = i
    assert values(x) == [0, 20, 2]
    x[x > 1] = 7
    assert values(x) == [0, 7, 7]


def test_overlapping_writes_read_first() -> None:
    x = hf.asarray([1, 2, 3, 4])
    x[1:] = x[:-1]
    assert values(x) == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (3, 0, IndexingError, "3 is out of range for axis 0 of size 3"),
        ((0, 0), 0, IndexingError, "the index names 2"),
        ("a", 0, IndexingError, "is `str`"),
        (1.5, 0, IndexingError, "is `float`"),
        ([3], 0, IndexingError, "3 is out of range"),
        (0, [1], ArgumentTypeError, "is `list`"),
        (0, 1.5, DTypeError, "float32 cannot be written"),
        (slice(None), np.arange(2), ShapeError, "does not fit"),
    ],
)
def test_writes_that_fail_say_why_and_write_nothing(
    key: Any, value: Any, error: type[Exception], message: str
) -> None:
    x = eager([1, 2, 3])
    with pytest.raises(error, match=message):
        x[key] = value
    assert values(x) == [1, 2, 3]
    assert x.storage.version == 0


@pytest.mark.parametrize("jit", [hf.jit, lambda f: f])
def test_a_slice_has_steps(jit: Any) -> None:
    with pytest.raises(IndexingError, match="the step of a slice must not be 0"):
        jit(lambda x: x[::0])(eager([1, 2, 3]))


def test_a_broadcast_cannot_be_written() -> None:
    x = hf.broadcast_to(hf.asarray([1.0]), (3,))
    with pytest.raises(ReadOnlyError, match="elements of a broadcast share memory"):
        x[0] = 2.0
    with pytest.raises(ReadOnlyError, match="broadcast"):
        x += 1
    y = x.copy()
    y[0] = 2.0


def test_memory_of_another_device_is_not_used_as_the_hosts() -> None:
    other = Device("other:0", (2, 0))
    x = EagerTensor(np.zeros(2), storage=Storage(device=other))
    assert x.device == "other:0"
    assert x.__dlpack_device__() == (2, 0)
    assert repr(x) == "Tensor(<on other:0>, f64[2])"
    y = hf.ones(2, dtype="float64")
    uses: list[Any] = [
        lambda: x + 1,
        lambda: hf.jit(lambda x: x + 1)(x),
        lambda: hf.scan(lambda c, x: (c, x), 0, x),
        lambda: x.tolist(),
        lambda: np.asarray(x),
        lambda: x.__dlpack__(),
        lambda: x[0],
        lambda: x.__setitem__(0, 1.0),
        lambda: y.__setitem__(slice(None), x),
        lambda: copy.copy(x),
        x.__reduce__,
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="is on `other:0`, and only memory"):
            use()


def test_an_invalid_tensor_raises_at_any_use() -> None:
    x = eager([1.0])
    view = x[:]
    x.storage.invalidate("donated to `f`")
    uses: list[Any] = [
        lambda: view + 1,
        lambda: float(x),
        lambda: np.asarray(x),
        lambda: x[0],
        lambda: x.__setitem__(0, 1.0),
        lambda: copy.copy(x),
        lambda: hf.zeros(1).__setitem__(slice(None), x),
    ]
    for use in uses:
        with pytest.raises(InvalidTensorError, match="it was donated to `f`"):
            use()
    assert repr(x) == "Tensor(<donated to `f`>, f32[1])"


# --- copies and pickles ---------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_copies_have_memory_of_their_own(clone: Any) -> None:
    x = scalar(2.5)
    y = clone(x)
    assert y.type.weak
    y[...] = 1.0
    assert float(x) == 2.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_reduced_tensor_comes_back(dtype: str) -> None:
    x = hf.asarray([1, 0], dtype=dtype)
    make, args = x.__reduce__()[:2]  # what pickling stores
    y = make(*args)
    assert y.type == x.type
    assert values(y) == values(x)


# --- methods --------------------------------------------------------------------------


def test_methods_are_functions() -> None:
    x = hf.asarray([[1.0, 2.0], [3.0, 6.0]])
    assert float(x.sum()) == 12
    assert float(x.prod()) == 36
    assert values(x.mean(0)) == [2, 4]
    assert values(x.max(axis=1)) == [2, 6]
    assert values(x.min(1, keepdims=True)) == [[1], [3]]
    assert float(x.var()) == 3.5
    assert float(x.std()) == pytest.approx(3.5**0.5)
    assert bool(x.any()) is True
    assert bool(x.all()) is True
    assert int(x.argmax()) == 3
    assert int(x.argmin()) == 0
    assert x.astype("int8").dtype is hf.int8
    assert x.transpose().shape == x.transpose(1, 0).shape == x.transpose((1, 0)).shape
    assert x.flatten().shape == (4,)
    assert x.reshape(1, 4).squeeze().shape == (4,)
    assert x.reshape(1, 4, 1).squeeze(0).shape == (4, 1)
    assert values(x.at[0].set(0.0)) == [[0, 0], [3, 6]]


# --- the eager interpreter ------------------------------------------------------------


@pytest.fixture
def declare(request: pytest.FixtureRequest) -> Any:
    def make(**rules: Any) -> OpDef:
        name = f"test_{request.node.name}"
        request.addfinalizer(lambda: OPERATIONS.pop(name, None))
        return OpDef(
            **{
                "name": name,
                "promote": None,
                "infer": lambda x, **_: x,
                "lower": lambda _, x, **_params: Pointwise(lambda at: x[at]),
                "samples": (),
                **rules,
            }
        )

    return make


def test_a_result_that_is_no_view_never_shares_memory(declare: Any) -> None:
    op = declare(run=lambda x: x)
    x = eager([1.0])
    y = op(x)
    y[0] = 2.0
    assert values(x) == [1.0]


def test_types_are_inferred_before_anything_runs(declare: Any) -> None:
    ran = []

    def infer(_: TensorType) -> TensorType:
        raise ShapeError("not this one")

    op = declare(infer=infer, run=lambda x: ran.append(x))
    for _ in range(2):
        with pytest.raises(ShapeError, match="not this one"):
            op(hf.asarray(1))
    assert ran == []


def test_inference_is_remembered_by_types_and_parameters(declare: Any) -> None:
    calls: list[Any] = []

    def infer(x: TensorType, *, n: Any = 0) -> TensorType:
        calls.append((str(x), n))
        return x

    op = declare(infer=infer, run=lambda x, n=0: x + x.dtype.type(1))
    for _ in range(3):
        op(hf.asarray([1.0]))
        op(hf.asarray([1]))
        op(hf.asarray([1]), n=1)
        op(hf.asarray([1]), n=True)
    assert calls == [("f32[1]", 0), ("i64[1]", 0), ("i64[1]", 1), ("i64[1]", True)]


def test_parameters_that_cannot_be_hashed_are_allowed(declare: Any) -> None:
    op = declare(run=lambda x, table: np.asarray(x + table[0]))
    assert values(op(hf.asarray([1]), table=[2])) == [3]


def test_verification_catches_a_run_that_gives_another_type(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = declare(run=lambda x: x.astype(np.float64))
    monkeypatch.setattr(config, "verify", True)
    with pytest.raises(InternalError, match=r"gave float64\[1\] for f32\[1\]"):
        op(hf.asarray([1.0]))


def test_numpys_warnings_stay_inside() -> None:
    x = hf.asarray([0.0, -1.0])  # the test run makes any warning an error
    assert values(x[:1] / x[:1] == x[:1]) == [False]
    assert np.isnan(values(hf.log(x)))[1]


def test_a_value_of_no_live_trace_is_refused() -> None:
    class Stray(Tensor):
        type = TensorType(hf.float32)

    with pytest.raises(EscapedValueError, match="outside the trace that made it"):
        bind(OPERATIONS["negative"], [Stray()], {})


# --- dtypes ---------------------------------------------------------------------------


def test_result_type_takes_tensors_dtypes_and_weak_numbers() -> None:
    x = hf.zeros(1, dtype="int8")
    assert hf.result_type(x, 1) is hf.int8
    assert hf.result_type(x, 1.0) is hf.float32
    assert hf.result_type(x, hf.uint8) is hf.int16
    assert hf.result_type(np.zeros(1), "f16") is hf.float64
    with pytest.raises(ArgumentTypeError, match="at least one"):
        hf.result_type()
    with pytest.raises(DTypeError, match="is not a hopflow dtype"):
        hf.result_type("x")
