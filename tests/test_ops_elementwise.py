"""Elementwise operations: NumPy's meaning against JAX's, lowering against NumPy's."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hopflow import dtypes
from hopflow.autograd.api import vjp
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DivisionError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.ops import batching, convert, elementwise, logic, math
from hopflow.ops import elementwise as hf
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.symbolic.size import free_symbols, symbol
from hopflow.tensor import asarray
from hopflow.testing.kernels import ArrayOperand, KernelTrap, evaluate, sample_arrays
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

load("jax>=0.11")  # the functions of older ones are less exact

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def _wide() -> Any:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


RECORDS = {name: op for name, op in OPERATIONS.items() if op.reference is not None}


def in_jax(record: OpDef) -> Callable[..., Any]:
    """JAX's function for an operation, of operands of one dtype and NumPy's params."""
    assert record.reference is not None
    if record.reference.jax is None:
        return EXPRESSIONS[record.name]
    function: Callable[..., Any] = resolve_name(record.reference.jax)
    return function


def jax_param(value: Any) -> Any:
    return value.dtype if isinstance(value, DType) else value


def rough(record: OpDef) -> int:
    """By how many units in the last place JAX may differ."""
    assert record.reference is not None
    return record.reference.jax_ulps


# Of what JAX has no function for.
EXPRESSIONS: dict[str, Callable[..., Any]] = {"fma": lambda x, y, z: x * y + z}

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.5, -2.5, 0.5]
# The scalar reference takes NumPy's `power` and SciPy's `gammaln`, which are not those
# of C at -inf.
SCALARS_DIFFER = {"pow", "lgamma"}


def never(name: str, dtype: DType) -> bool:
    return False


def cases(special: bool, without: Callable[[str, DType], bool] = never) -> list[Any]:
    return [
        pytest.param(record, sample, dtype, id=f"{name}-{i}-{dtype}")
        for name, record in sorted(RECORDS.items())
        for i, sample in enumerate(record.samples)
        for dtype in sample.dtypes
        if not without(name, dtype)
        if not special or (i == 0 and sample.operands[0] == "T[3, 4]")
    ]


def special_arrays(sample: Sample, dtype: DType, name: str) -> list[Array]:
    """Operands with the numbers that break things."""
    rng = np.random.default_rng(1)
    arrays = sample_arrays(sample, dtype)
    for position, array in enumerate(arrays):
        of = dtypes.as_dtype(array.dtype)
        if of.is_float:
            values = np.asarray(SPECIAL, of.dtype)
        elif of.is_integer:
            info = dtypes.iinfo(of)
            numbers = [info.min, info.max, 0, 1, 3, *((-1, -3) if info.min else ())]
            values = np.asarray(numbers, of.dtype)
        else:
            continue
        if of.is_integer and name.endswith(("floor_divide", "remainder")):
            values = values[values != 0]
        if name == "checked_pow" and position == 1:
            # JAX has the low six bits of an exponent only.
            values = values[(values >= 0) & (values < 64)]
        repeats = -(-array.size // values.size)
        shuffled = rng.permutation(np.tile(values, repeats))
        array[...] = shuffled[: array.size].reshape(array.shape)
    return arrays


def run(record: OpDef, arrays: list[Array], params: dict[str, Any]) -> Array:
    """NumPy's meaning; checked to be of the type that `infer` gives."""
    types = [TensorType(dtypes.as_dtype(a.dtype), a.shape) for a in arrays]
    [inferred] = record.result_types(types, params)
    result = record.run(*arrays, **params)
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape) == (inferred.dtype.dtype, inferred.shape)
    return result


def near(got: Any, want: Any, ulps: float, name: str = "") -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    dtype = dtypes.as_dtype(got.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want)
        return
    tolerance = ulps * dtypes.finfo(dtype).eps
    a, b = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=name)


def differs_in_jax(name: str, dtype: DType) -> bool:
    reference = RECORDS[name].reference
    return reference is not None and dtype in reference.not_in_jax


def differs_in_scalars(name: str, dtype: DType) -> bool:
    return name in SCALARS_DIFFER and dtype.is_float


def compare_with_jax(
    record: OpDef, arrays: list[Array], params: dict[str, Any]
) -> None:
    given = map(jax_param, params.values())
    want = in_jax(record)(*map(jnp.asarray, arrays), *given)
    near(run(record, arrays, params), want, rough(record))


def test_every_elementwise_operation_has_a_reference() -> None:
    without = {
        op.name
        for op in OPERATIONS.values()
        if op.batch is batching.pointwise and op.reference is None
    }
    assert without == {"threefry2x32"}  # tests/test_random.py has its test vectors


@pytest.mark.parametrize(
    ("record", "sample", "dtype"), cases(special=False, without=differs_in_jax)
)
def test_run_means_what_jax_does(record: OpDef, sample: Sample, dtype: DType) -> None:
    compare_with_jax(record, sample_arrays(sample, dtype), sample.params)


@pytest.mark.parametrize(
    ("record", "sample", "dtype"), cases(special=True, without=differs_in_jax)
)
def test_run_means_what_jax_does_at_the_ends(
    record: OpDef, sample: Sample, dtype: DType
) -> None:
    arrays = special_arrays(sample, dtype, record.name)
    compare_with_jax(record, arrays, sample.params)


@pytest.mark.parametrize(
    ("record", "sample", "dtype"), cases(special=True, without=differs_in_scalars)
)
def test_lowering_means_what_numpy_does_at_the_ends(
    record: OpDef, sample: Sample, dtype: DType
) -> None:
    arrays = special_arrays(sample, dtype, record.name)
    [lowered] = evaluate(record, arrays, **sample.params)
    near(lowered, run(record, arrays, sample.params), max(2, record.ulps))


TINY = (1e-30, -1e-30)  # not for `divide`: JAX's square of it is 0


def ends_of(
    record: OpDef, dtype: DType
) -> Iterator[tuple[str, dict[str, Any], Sequence[Array], Sequence[Array]]]:
    """Calls of a record that have a derivative: params, bools, and ends with ends."""
    ends = np.asarray([*SPECIAL, *TINY, -1e-5, 30.5], dtype.dtype)
    if record.name == "divide":
        ends = ends[~np.isin(ends, np.asarray(TINY, dtype.dtype))]
    for i, sample in enumerate(record.samples):
        is_new = i == 0 or sample.params != record.samples[i - 1].params
        if is_new and sample.params.get("dtype", dtype).is_float:
            is_bool = [operand.startswith("bool") for operand in sample.operands]
            count = sum(is_bool)
            assert not any(is_bool[count:])  # they come first
            kinds = [np.asarray([False, True])] * count
            grid = np.meshgrid(*kinds, *[ends] * (len(is_bool) - count))
            yield f"{record.name} {i}", sample.params, grid[:count], grid[count:]


DIFFERENTIATED = [record for record in RECORDS.values() if record.jvp is not None]


def derivatives(vjp: Any, f: Any, xs: Any) -> Any:
    value, pull = vjp(f, *xs)
    return value, pull(np.ones(value.shape, value.dtype))


@cache
def jax_at_the_ends(dtype: DType) -> dict[str, Any]:
    """JAX's values and derivatives of all calls of `ends_of`, from one program."""
    calls = {
        label: (in_jax(record), bools, [jax_param(p) for p in params.values()], xs)
        for record in DIFFERENTIATED
        for label, params, bools, xs in ends_of(record, dtype)
    }

    def all_of_them(grids: Any) -> Any:
        return {
            label: derivatives(
                jax.vjp, lambda *x, f=f, b=b, p=p: f(*b, *x, *p), grids[label]
            )
            for label, (f, b, p, _) in calls.items()
        }

    grids = {label: xs for label, (*_, xs) in calls.items()}
    found: dict[str, Any] = jax.device_get(jax.jit(all_of_them)(grids))
    return found


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64], ids=str)
@pytest.mark.parametrize("record", DIFFERENTIATED, ids=lambda record: record.name)
def test_derivatives_are_those_of_jax_at_the_ends(record: OpDef, dtype: DType) -> None:
    calls = list(ends_of(record, dtype))
    assert calls
    for label, params, bools, xs in calls:
        value, want = jax_at_the_ends(dtype)[label]
        f = partial(record, *bools, **params)
        # Where the value is a NaN, so may be the derivative.
        defined = ~np.isnan(value)
        for got, w in zip(derivatives(vjp, f, xs)[1], want, strict=True):
            near(np.asarray(got)[defined], w[defined], rough(record), label)


def test_every_record_has_a_docstring() -> None:
    for record in RECORDS.values():
        assert record.__doc__, record


# --- promotion ------------------------------------------------------------------------


def dtype_of(x: Any) -> DType:
    return x.type.dtype  # type: ignore[no-any-return]


def zeros(dtype: DType) -> Any:
    return asarray(np.zeros(2, dtype.dtype))


@pytest.mark.parametrize("y", dtypes.ALL, ids=str)
@pytest.mark.parametrize("x", dtypes.ALL, ids=str)
def test_operands_are_promoted(x: DType, y: DType) -> None:
    if x.kind == y.kind == "b":
        with pytest.raises(DTypeError, match="add: operands must be numeric, and are"):
            hf.add(zeros(x), zeros(y))
        return
    assert (
        dtype_of(hf.add(zeros(x), zeros(y)))
        is dtypes.promote((x, False), (y, False))[0]
    )


def test_python_numbers_give_way() -> None:
    assert dtype_of(hf.add(zeros(dtypes.int8), 1)) is dtypes.int8
    assert dtype_of(hf.multiply(zeros(dtypes.float16), 2.5)) is dtypes.float16
    assert dtype_of(hf.multiply(zeros(dtypes.bfloat16), 2)) is dtypes.bfloat16
    assert dtype_of(hf.add(1, 2)) is dtypes.int64
    assert hf.add(1, 2).type.weak
    assert not hf.add(zeros(dtypes.int64), 2).type.weak


def test_functions_of_floats_take_integers_as_float32() -> None:
    assert dtype_of(math.sin(zeros(dtypes.int64))) is dtypes.float32
    assert dtype_of(hf.divide(zeros(dtypes.int32), 2)) is dtypes.float32
    assert dtype_of(hf.divide(1, 3)) is dtypes.float32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: hf.negative(zeros(dtypes.bool_)),
            "negative: operands must be numeric",
        ),
        (lambda: hf.bitwise_and(1.5, 2), "must be integers or bools, and are float32"),
        (
            lambda: hf.bitwise_left_shift(zeros(dtypes.bool_), zeros(dtypes.bool_)),
            "must be integers, and are bool and bool",
        ),
        (lambda: hf.pow(True, True), "pow: operands must be numeric"),
        (lambda: hf.positive(True), "positive: operands must be numeric"),
        (lambda: hf.add(1j, 1), "argument 0 is complex"),
    ],
)
def test_wrong_dtypes_are_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(DTypeError, match=text):
        call()


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="add: argument 1 must be a tensor"):
        hf.add(1, "x")
    with pytest.raises(ArgumentTypeError, match="where: argument 0 must be a tensor"):
        hf.where("x", 1, 2)


def test_infer_refuses_what_promotion_would_not_give() -> None:
    f32, f64 = TensorType(dtypes.float32, (2,)), TensorType(dtypes.float64, (2,))
    add: Any = hf.add
    with pytest.raises(DTypeError, match="operands must have one dtype"):
        add.infer(f32, f64)
    with pytest.raises(ArgumentTypeError, match="takes 2 operand"):
        add.infer(f32)
    with pytest.raises(DTypeError, match="must be bools"):
        logic.select.infer(f32, f32, f32)


# --- shapes ---------------------------------------------------------------------------


def test_shapes_broadcast() -> None:
    x, y = asarray(np.ones((3, 1))), asarray(np.ones(4))
    assert hf.add(x, y).shape == (3, 4)
    with pytest.raises(ShapeError, match=r"add: shapes \[3, 2\] and \[4\] do not"):
        hf.add(asarray(np.ones((3, 2))), y)


def test_symbolic_sizes_broadcast_with_themselves_and_one() -> None:
    n = symbol("n")
    add: Any = hf.add
    x, one = TensorType(dtypes.float32, (n, 4)), TensorType(dtypes.float32, (1,))
    assert str(add.infer(x, x)) == "f32[n, 4]"
    assert str(add.infer(x, one)) == "f32[n, 4]"
    array = np.ones((3, 4), np.float32)
    operand = ArrayOperand(array, x)
    [symbol_] = free_symbols(n)
    [found] = evaluate(add, [operand, operand], {symbol_: 3})
    near(found, array + array, 0)


# --- functions ------------------------------------------------------------------------


def same(got: Any, want: Any) -> None:
    near(got, want, 0)


def test_integer_division_by_zero_stops() -> None:
    x, y = np.asarray([4, 5, -7]), np.asarray([1, 0, 2])
    for function in (hf.floor_divide, hf.remainder):
        with pytest.raises(DivisionError, match="an integer is divided by 0"):
            function(asarray(x), asarray(y))
        with pytest.raises(DivisionError):
            function(asarray(x), 0)
    for record in (elementwise.checked_floor_divide, elementwise.checked_remainder):
        assert record.effects == {"trap"}
        with pytest.raises(KernelTrap, match="divide"):
            evaluate(record, [x, y])
        [empty] = evaluate(record, [x[:0], np.asarray(0)])
        assert empty.shape == (0,)


def test_division_of_nothing_by_zero_does_not_stop() -> None:
    assert hf.floor_divide(asarray(np.zeros(0, int)), 0).shape == (0,)


def test_a_divisor_known_not_to_be_zero_cannot_stop() -> None:
    assert elementwise.unchecked_floor_divide.effects == frozenset()
    x = np.asarray([7, -7, -(2**63)])
    same(hf.floor_divide(asarray(x), 2), x // 2)
    same(hf.remainder(asarray(x), -3), x % -3)
    same(hf.floor_divide(asarray(x), -1), np.asarray([-7, 7, -(2**63)]))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 10, -1, -2, 64])
def test_powers_by_python_integers_are_those_of_jax(exponent: int) -> None:
    for dtype in (dtypes.int32, dtypes.uint8, dtypes.float32, dtypes.float16):
        x = np.asarray([0, 1, 2, 3, 5]).astype(dtype.dtype)
        if dtype.is_integer and exponent < 0:
            with pytest.raises(ArgumentValueError, match="to the negative power"):
                hf.pow(asarray(x), exponent)
            continue
        near(hf.pow(asarray(x), exponent), jnp.power(x, exponent), 4)


def test_anything_to_the_power_zero_is_one() -> None:
    x = asarray(np.asarray([np.nan, np.inf, 0.0]))
    same(hf.pow(x, 0), np.ones(3))


def test_powers_of_numbers_with_tensor_exponents() -> None:
    near(
        hf.pow(2.0, asarray([1.5, -1.0])),
        jnp.power(2.0, np.asarray([1.5, -1.0], np.float32)),
        4,
    )
    same(hf.pow(2, asarray([3, 0])), np.asarray([8, 1]))
    root = np.asarray([-np.inf, -0.0, 4.0])
    same(hf.pow(asarray(root), 0.5), np.asarray([np.inf, 0.0, 2.0]))


def test_clip_is_that_of_jax() -> None:
    x = np.asarray([-3.0, np.nan, 0.5, 9.0], np.float32)
    for low, high in [(0, 1), (None, 1), (0, None), (None, None), (2, 1)]:
        same(hf.clip(asarray(x), low, high), jnp.clip(x, low, high))
    bounds = np.asarray([0.0, 0.0, 1.0, 2.0], np.float32)
    same(hf.clip(asarray(x), min=asarray(bounds)), jnp.clip(x, bounds))


def test_clip_without_bounds_is_a_copy() -> None:
    x = asarray(np.ones(2))
    assert hf.clip(x) is not x
    assert hf.positive(x) is not x


def test_where_promotes_its_choices_and_takes_numbers() -> None:
    test = np.asarray([True, False])
    same(hf.where(asarray(test), 1, 2.5), np.asarray([1.0, 2.5], np.float32))
    same(
        hf.where(asarray([0, 3]), asarray(np.asarray([1, 2], np.int8)), 9),
        np.asarray([9, 2], np.int8),
    )
    assert hf.where(True, 1, 2).type.weak


def test_logic_takes_any_dtype() -> None:
    x, y = np.asarray([0.0, 2.0, np.nan, 0.0]), np.asarray([0, 0, 1, 5])
    for name in ("logical_and", "logical_or", "logical_xor"):
        want = getattr(np, name)(x, y)
        same(getattr(logic, name)(asarray(x), asarray(y)), want)
    same(logic.logical_not(asarray(x)), np.logical_not(x))


def test_comparison_with_python_numbers() -> None:
    same(hf.less(asarray([1, 5]), 3), np.asarray([True, False]))
    same(hf.equal(2.0, asarray([2, 3])), np.asarray([True, False]))


def test_isclose_is_that_of_jax() -> None:
    x = np.asarray([1.0, 1.0, np.inf, np.inf, np.nan, 0.0])
    y = np.asarray([1.0 + 1e-6, 1.1, np.inf, -np.inf, np.nan, 1e-9])
    same(hf.isclose(asarray(x), asarray(y)), jnp.isclose(x, y))
    got = hf.isclose(asarray(x), asarray(y), equal_nan=True)
    same(got, jnp.isclose(x, y, equal_nan=True))


def test_nan_to_num_is_that_of_jax() -> None:
    for dtype in dtypes.FLOATS:
        x = np.asarray([np.nan, np.inf, -np.inf, 1.5]).astype(dtype.dtype)
        same(hf.nan_to_num(asarray(x)), jnp.nan_to_num(x))
        got = hf.nan_to_num(asarray(x), nan=1.0, posinf=2.0, neginf=3.0)
        same(got, jnp.nan_to_num(x, nan=1.0, posinf=2.0, neginf=3.0))
    same(hf.nan_to_num(asarray([1, 2])), np.asarray([1, 2]))


def test_logaddexp_is_that_of_jax() -> None:
    ends = np.asarray([-np.inf, np.inf, np.nan, 0.0, -1.5, 1e3])
    x, y = np.meshgrid(ends, ends)
    near(math.logaddexp(asarray(x), asarray(y)), jnp.logaddexp(x, y), 4)
    assert dtype_of(math.logaddexp(1, 2)) is dtypes.float32


def test_small_compositions() -> None:
    x = np.asarray([1.0, 2.0, 4.0])
    same(hf.square(asarray(x)), x * x)
    same(hf.reciprocal(asarray(x)), 1 / x)
    near(math.rsqrt(asarray(x)), 1 / np.sqrt(x), 1)
    same(hf.square(3), np.asarray(9))


# --- conversion -----------------------------------------------------------------------


@pytest.mark.parametrize("target", dtypes.INTEGERS, ids=str)
@pytest.mark.parametrize("source", dtypes.FLOATS, ids=str)
def test_floats_saturate_when_they_become_integers(
    source: DType, target: DType
) -> None:
    info = dtypes.iinfo(target)
    edges = [float(info.min), float(info.max), info.max + 1.0, info.min - 1.0]
    numbers = [
        0.0,
        -0.9,
        1.9,
        -1.9,
        300.0,
        -300.0,
        1e30,
        -1e30,
        np.inf,
        -np.inf,
        np.nan,
    ]
    x = np.asarray(edges + numbers).astype(source.dtype)
    got = np.asarray(hf.astype(asarray(x), target))
    assert got.dtype == target.dtype
    for value, found in zip(x.astype(np.float64).tolist(), got.tolist(), strict=True):
        want = 0 if np.isnan(value) else max(info.min, min(info.max, value))
        assert found == int(want), value
    [lowered] = evaluate(convert.convert, [x], dtype=target)
    same(lowered, got)


@pytest.mark.parametrize("target", dtypes.INTEGERS, ids=str)
@pytest.mark.parametrize("source", dtypes.INTEGERS, ids=str)
def test_integers_wrap_when_they_become_narrower(source: DType, target: DType) -> None:
    info = dtypes.iinfo(source)
    x = np.asarray([info.min, info.max, 0, 1, info.max // 3], source.dtype)
    same(hf.astype(asarray(x), target), jnp.asarray(x).astype(target.dtype))


def test_astype_of_numbers_does_not_pass_through_the_default_dtype() -> None:
    assert np.asarray(hf.astype(0.1, "f64")).item() == 0.1
    assert np.asarray(hf.astype(2**53 + 1, "u64")).item() == 2**53 + 1
    assert np.asarray(hf.astype(-1.5, "u8")).item() == 0
    assert np.asarray(hf.astype(float("nan"), "i32")).item() == 0
    assert np.asarray(hf.astype(3, "bool")).item() is True


def test_astype_copies_unless_told_not_to() -> None:
    x = asarray(np.ones(2))
    assert hf.astype(x, x.dtype, copy=False) is x
    copied = hf.astype(x, x.dtype)
    assert copied is not x
    same(copied, np.ones(2))


def test_astype_makes_a_dtype_strong() -> None:
    weak = hf.add(1, 2)
    assert not hf.astype(weak, "i64").type.weak
    assert not hf.astype(weak, "f32").type.weak


def test_astype_refuses_what_does_not_exist() -> None:
    with pytest.raises(DeviceError, match="astype: there is no device 'gpu'"):
        hf.astype(1, "f32", device="gpu")
    with pytest.raises(DTypeError, match="complex"):
        hf.astype(1, "complex64")
