"""`hopflow.random` against `jax.random`, with the same keys."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special

from hopflow import dtypes, random
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DTypeError,
    ShapeError,
)
from hopflow.tensor import asarray

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")

SHAPES = [(), (1,), (7,), (3, 4), (0, 2), (2, 3, 5)]
SEEDS = [0, 42, -1, 2**31, 2**40 + 17, -(2**63)]
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def optimised() -> Any:
    """What JAX compiles has multiply-adds, as its users have it; see conftest.py."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _reference() -> Any:
    with (
        jax.enable_x64(True),
        jax.threefry_partitionable(True),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def numpy(x: Any) -> Array:
    return np.asarray(x)


def agree(got: Any, want: Any) -> None:
    """The same dtype, shape and bits."""
    a, b = numpy(got), numpy(want)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def ulps(got: Any, want: Any) -> float:
    """The largest distance, in units of the last place of the reference."""
    a, b = numpy(got), numpy(want)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    dtype = dtypes.as_dtype(a.dtype)
    wide, reference = a.astype(np.float64), b.astype(np.float64)
    assert np.isfinite(wide).all()
    info = dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(reference), info.smallest_normal)))
    return float(
        np.max(np.abs(wide - reference) / (info.eps * 2.0**exponent), initial=0)
    )


def pair(seed: int) -> tuple[Any, Any]:
    """Our key of a seed, and JAX's."""
    return random.key(seed), jax.random.PRNGKey(seed)


# --- keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_key_is_the_words_of_its_seed(seed: int) -> None:
    agree(*pair(seed))


@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
def test_a_tensor_may_be_the_seed(dtype: DType) -> None:
    for value in (3, dtypes.iinfo(dtype).max, dtypes.iinfo(dtype).min):
        seed = np.asarray(value, dtype.dtype)
        agree(random.key(asarray(seed)), jax.random.PRNGKey(seed))


@pytest.mark.parametrize("num", [1, 2, 5, (2, 3), ()], ids=str)
def test_split_gives_the_keys_of_jax(num: Any) -> None:
    for seed in SEEDS:
        ours, theirs = pair(seed)
        agree(random.split(ours, num), jax.random.split(theirs, num))


@pytest.mark.parametrize("data", [0, 1, 2**31, 2**32 - 1])
def test_fold_in_gives_the_key_of_jax(data: int) -> None:
    ours, theirs = pair(7)
    agree(random.fold_in(ours, data), jax.random.fold_in(theirs, data))


def test_keys_can_be_split_again() -> None:
    ours, theirs = pair(3)
    for _ in range(3):
        ours = asarray(random.split(ours))[1]
        theirs = jax.random.split(theirs)[1]
    agree(random.uniform(ours, (4,)), jax.random.uniform(theirs, (4,), np.float32))


# --- bits, floats and integers --------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes.UNSIGNED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_jax(dtype: DType, shape: tuple[int, ...]) -> None:
    ours, theirs = pair(42)
    agree(random.bits(ours, shape, dtype), jax.random.bits(theirs, shape, dtype.dtype))


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform_has_the_bits_of_jax(dtype: DType, shape: tuple[int, ...]) -> None:
    ours, theirs = pair(42)
    agree(
        random.uniform(ours, shape, dtype),
        jax.random.uniform(theirs, shape, dtype.dtype),
    )


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (0.0, 0.25), (-3.0, 5.7), (2, 1)]
)
@pytest.mark.usefixtures("optimised")
def test_uniform_between_bounds_has_the_bits_of_jax(
    dtype: DType, low: float, high: float
) -> None:
    ours, theirs = pair(1)

    def expected(key: Any, low: Any, high: Any) -> Any:
        return jax.random.uniform(key, (500,), dtype.dtype, low, high)

    want = jax.jit(expected)(theirs, low, high)  # anew: it may have been compiled
    if dtype is dtypes.float16:
        # XLA rounds once here, too, but only on processors with arithmetic of float16.
        drawn = numpy(expected(theirs, 0, 1)).astype(np.float64)
        start, width = np.float16(low), np.float16(high) - np.float16(low)
        exact = drawn * np.float64(width) + start
        want = np.maximum(start, exact.astype(np.float16))
    agree(random.uniform(ours, (500,), dtype, low, high), want)


def test_bounds_of_uniform_broadcast() -> None:
    ours, theirs = pair(1)
    low = np.asarray([[0.0], [1.0]], np.float32)
    agree(
        random.uniform(ours, (2, 3), minval=asarray(low), maxval=4.0),
        jax.random.uniform(theirs, (2, 3), np.float32, low, 4.0),
    )


@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
def test_randint_is_that_of_jax(dtype: DType) -> None:
    info = dtypes.iinfo(dtype)
    ends = [(0, 10), (info.min, info.max), (5, 5), (7, 3), (0, 1), (1, 100)]
    if dtype.bits < 64:
        ends += [(info.min, info.max + 1), (info.min - 5, info.max + 5), (0, 300)]
    for seed in (0, 9):
        ours, theirs = pair(seed)
        for low, high in ends:
            if high > np.iinfo(np.int64).max:  # JAX takes Python numbers as int64
                continue
            want = jax.random.randint(theirs, (40,), low, high, dtype.dtype)
            agree(random.randint(ours, (40,), low, high, dtype), want)


@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
@pytest.mark.parametrize("bounds", dtypes.INTEGERS, ids=str)
def test_bounds_of_randint_may_be_tensors(dtype: DType, bounds: DType) -> None:
    ours, theirs = pair(5)
    info = dtypes.iinfo(bounds)
    low = np.asarray([0, 3, info.min, 2], bounds.dtype)
    high = np.asarray([info.max, 9, info.max, 2], bounds.dtype)
    agree(
        random.randint(ours, (3, 4), asarray(low), asarray(high), dtype),
        jax.random.randint(theirs, (3, 4), low, high, dtype.dtype),
    )


def test_randint_of_all_of_uint64_has_every_bit() -> None:
    ours, _ = pair(5)
    whole = random.randint(ours, (64,), 0, 2**64, dtypes.uint64)
    assert numpy(whole).max() > np.uint64(2**63)


# --- permutations ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 10, 5000])
def test_permutation_of_a_range_is_that_of_jax(n: int) -> None:
    ours, theirs = pair(11)
    agree(random.permutation(ours, n), jax.random.permutation(theirs, n))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("independent", [False, True])
def test_permutation_along_an_axis_is_that_of_jax(axis: int, independent: bool) -> None:
    ours, theirs = pair(12)
    x = np.arange(24.0).reshape(4, 6)
    agree(
        random.permutation(ours, asarray(x), axis, independent),
        jax.random.permutation(theirs, x, axis, independent),
    )


# --- distributions --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_normal_is_the_exact_function_of_the_bits_of_jax(dtype: DType) -> None:
    # Not of JAX's own normal: in its tails that is off by dozens of units.
    for seed in range(3):
        ours, theirs = pair(seed)
        low = np.nextafter(np.asarray(-1, dtype.dtype), np.asarray(0, dtype.dtype))
        drawn = jax.random.uniform(theirs, (2000,), dtype.dtype, low, 1.0)
        exact = special.erfinv(numpy(drawn).astype(np.float64)) * np.sqrt(2)
        got = random.normal(ours, (2000,), dtype)
        assert ulps(got, exact.astype(dtype.dtype)) <= 4


Sampler = Callable[[Any, Any, Any], Any]
SAMPLERS: list[tuple[str, Sampler]] = [
    ("normal", lambda r, k, d: r.normal(k, (500,), d)),
    ("exponential", lambda r, k, d: r.exponential(k, (500,), d)),
    ("gumbel", lambda r, k, d: r.gumbel(k, (500,), d)),
    ("laplace", lambda r, k, d: r.laplace(k, (500,), d)),
    (
        "truncated_normal",
        lambda r, k, d: r.truncated_normal(k, -1.5, 2.0, (500,), d),
    ),
]


@pytest.mark.parametrize(("name", "draw"), SAMPLERS, ids=[n for n, _ in SAMPLERS])
@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_distributions_are_near_those_of_jax(
    name: str, draw: Sampler, dtype: DType
) -> None:
    ours, theirs = pair(21)
    got, want = numpy(draw(random, ours, dtype)), draw(jax.random, theirs, dtype.dtype)
    assert got.dtype == dtype.dtype
    tolerance = 100 * dtypes.finfo(dtype).eps if dtype.bits > 16 else 0.02
    np.testing.assert_allclose(
        got.astype(np.float64),
        numpy(want).astype(np.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def test_bernoulli_is_that_of_jax() -> None:
    ours, theirs = pair(2)
    p = np.asarray([0.1, 0.5, 0.9], np.float32)
    agree(random.bernoulli(ours, asarray(p)), jax.random.bernoulli(theirs, p))
    agree(
        random.bernoulli(ours, asarray(p), (50, 3)),
        jax.random.bernoulli(theirs, p, (50, 3)),
    )
    agree(
        random.bernoulli(ours, 0.3, (100,)),
        jax.random.bernoulli(theirs, np.float32(0.3), (100,)),
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_categorical_is_that_of_jax(axis: int) -> None:
    ours, theirs = pair(4)
    logits = np.linspace(-2, 2, 20, dtype=np.float32).reshape(4, 5)
    agree(
        random.categorical(ours, asarray(logits), axis),
        jax.random.categorical(theirs, logits, axis),
    )
    others = np.delete(logits.shape, axis)
    shape = (100, *map(int, others))
    agree(
        random.categorical(ours, asarray(logits), axis, shape),
        jax.random.categorical(theirs, logits, axis, shape),
    )


@pytest.mark.parametrize("replace", [True, False])
def test_choice_is_that_of_jax(replace: bool) -> None:
    ours, theirs = pair(6)
    agree(
        random.choice(ours, 20, (3, 2), replace),
        jax.random.choice(theirs, 20, (3, 2), replace),
    )
    x = np.arange(30.0).reshape(3, 10)
    agree(
        random.choice(ours, asarray(x), (4,), replace, axis=1),
        jax.random.choice(theirs, x, (4,), replace, axis=1),
    )


@pytest.mark.parametrize("replace", [True, False])
def test_weighted_choice_draws_by_weight(replace: bool) -> None:
    p = np.asarray([0.0, 0.5, 0.0, 0.25, 0.25], np.float32)
    ours, theirs = pair(6)
    count = 200 if replace else 3
    got = random.choice(ours, 5, (count,), replace, asarray(p))
    assert set(numpy(got).tolist()) == {1, 3, 4}
    agree(got, jax.random.choice(theirs, 5, (count,), replace, p))


# --- errors ---------------------------------------------------------------------------

KEY = np.asarray([0, 1], np.uint32)
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: random.key(0.5), ArgumentTypeError, "`seed` must be an integer"),
    (lambda: random.key(2**63), ArgumentRangeError, "does not fit int64"),
    (lambda: random.key(asarray([1, 2])), ShapeError, "`seed` must have no axes"),
    (lambda: random.split(3), ArgumentTypeError, "must be one key, u32\\[2\\]"),
    (lambda: random.split(KEY, 1.5), ArgumentTypeError, "`num` must be an int"),
    (lambda: random.split(KEY, -1), ArgumentValueError, "`num` must not be negative"),
    (lambda: random.fold_in(KEY, 1.0), ArgumentTypeError, "`data` must be an int"),
    (lambda: random.fold_in(KEY, asarray([1])), ShapeError, "`data` must have no axes"),
    (lambda: random.bits(KEY, 2, "i32"), DTypeError, "unsigned integer dtype"),
    (lambda: random.uniform(KEY, 2, "i32"), DTypeError, "`dtype` must be floating"),
    (
        lambda: random.uniform(KEY, (2,), minval=asarray([0.0, 1.0, 2.0])),
        ShapeError,
        "do not broadcast",
    ),
    (
        lambda: random.uniform(KEY, (), minval=asarray([0.0, 1.0])),
        ShapeError,
        "does not broadcast to `shape` \\[\\]",
    ),
    (lambda: random.randint(KEY, 2, 0, 9, "f32"), DTypeError, "an integer dtype"),
    (lambda: random.randint(KEY, 2, 0, 1.5), DTypeError, "must be integers"),
    (lambda: random.permutation(KEY, 3, 1), AxisError, "`axis` is 1"),
    (lambda: random.normal(KEY, "no"), ArgumentTypeError, "`shape` must be an int"),
    (
        lambda: random.choice(KEY, 3, (4,), replace=False),
        ArgumentValueError,
        "4 elements cannot be drawn from 3",
    ),
    (
        lambda: random.choice(KEY, 3, (4,), p=asarray([0.5, 0.5])),
        ShapeError,
        "`p` must be floats of shape \\[3\\]",
    ),
    (lambda: random.bernoulli(KEY, 1), DTypeError, "`p` must be floating"),
    (lambda: random.categorical(KEY, asarray([1])), DTypeError, "must be floating"),
    (
        lambda: random.categorical(KEY, asarray([[0.5]]), shape=(3,)),
        ShapeError,
        "must end with \\[1\\]",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), ERRORS, ids=[t for _, _, t in ERRORS]
)
def test_wrong_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
def test_a_probability_is_from_0_to_1(p: float) -> None:
    with pytest.raises(ArgumentValueError, match="`p` must be from 0 to 1"):
        random.bernoulli(random.key(0), p)
