"""Random numbers from explicit keys: the same key always gives the same numbers.

A key is a tensor u32[2]. Use each key once; get new ones by `split`, or by `fold_in`
from a counter. Bits are the Threefry-2x32 hash (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011) of the position of each element, so that they depend
neither on the machine nor on other computations.

Keys, bits, `uniform`, `randint`, `split`, `fold_in` and `permutation` equal those of
`jax.random` with raw keys (in its partitionable form, the default since 0.5).
"""

import math
from itertools import count
from typing import Any

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.dtypes import DType, DTypeLike
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import Shape, TensorType, same_shape
from hopflow.ops.convert import apply, as_value, astype, stop_gradient
from hopflow.ops.creation import arange
from hopflow.ops.deferred import aligned, fitted, matched
from hopflow.ops.elementwise import (
    abs,
    add,
    clip,
    divide,
    less,
    maximum,
    multiply,
    negative,
    nextafter,
    sign,
    subtract,
)
from hopflow.ops.fused import fma
from hopflow.ops.indexing import take, take_along_axis
from hopflow.ops.math import erf, erfinv, log, log1p
from hopflow.ops.opdef import as_operand
from hopflow.ops.random_words import (
    UNSIGNED,
    bits_of,
    hashed,
    integers,
    key_of,
    pair,
    unit,
    word_of,
)
from hopflow.ops.reduce import argmax, cumulative_sum
from hopflow.ops.rules import (
    as_flag,
    as_shape,
    broadcast_shapes,
    normalize_axis,
    optional_dtype,
)
from hopflow.ops.searching import searchsorted
from hopflow.ops.sizes import equals
from hopflow.ops.sorting import argsort
from hopflow.ops.threefry import threefry
from hopflow.ops.views import reshaped, sliced
from hopflow.symbolic.size import Size, SymInt

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "laplace",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

# --- keys -----------------------------------------------------------------------------


def key(seed: Any) -> Value:
    """Return the key u32[2] for an integer seed.

        >>> hf.random.key(7).tolist()
        [0, 7]

    Args:
        seed: An int that fits int64, or an integer tensor of rank 0.

    Raises:
        ArgumentTypeError: `seed` is no integer.
        ArgumentRangeError: it does not fit int64.
        ShapeError: it is a tensor with axes.
    """
    value = as_value(as_operand("random.key", 0, seed))
    if not value.type.dtype.is_integer:
        raise ArgumentTypeError(
            f"random.key: `seed` must be an integer, and is {value.type}."
        )
    if value.ndim:
        raise ShapeError(
            f"random.key: `seed` must have no axes, and is {value.type}. For several "
            "keys, `split` one, or use `hf.vmap`."
        )
    # A seed of less than 64 bits, even a negative one, fills the lower word only.
    narrow = value.type.dtype.bits < 32
    wide = astype(value, dtypes.int32) if narrow else value
    unsigned = astype(wide, UNSIGNED[wide.type.dtype.bits], copy=False)
    return key_of(astype(unsigned, dtypes.uint64, copy=False))


def split(key: Any, num: Any = 2) -> Value:
    """Return new keys from one, u32[num, 2].

        >>> step_key, key = hf.random.split(hf.random.key(0))

    Args:
        key: u32[2].
        num: The number of keys; or a shape s, for keys u32[*s, 2].

    Raises:
        ArgumentTypeError: `key` is no key, or `num` no shape.
    """
    word = word_of("split", key)
    return key_of(hashed(word, as_shape("random.split", num, "num")))


def fold_in(key: Any, data: Any) -> Value:
    """Return a new key u32[2] from a key and an integer, such as a step number.

        >>> hf.random.fold_in(hf.random.key(0), 3).shape
        (2,)

    Args:
        key: u32[2].
        data: An int, or an integer tensor of rank 0; its lower 32 bits are used.

    Raises:
        ArgumentTypeError: `key` is no key, or `data` no integer.
        ShapeError: `data` has axes.
    """
    word = word_of("fold_in", key)
    value = as_value(as_operand("random.fold_in", 1, data))
    if not value.type.dtype.is_integer:
        raise ArgumentTypeError(
            f"random.fold_in: `data` must be an integer, and is {value.type}."
        )
    if value.ndim:
        raise ShapeError(
            f"random.fold_in: `data` must have no axes, and is {value.type}. For "
            "several keys, use `hf.vmap`."
        )
    counter = astype(astype(value, dtypes.uint32), dtypes.uint64)
    return key_of(apply(threefry, word, counter))


# --- bits and uniform numbers ---------------------------------------------------------


def bits(key: Any, shape: Any = (), dtype: DTypeLike | None = None) -> Value:
    """Return uniformly distributed unsigned integers.

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: An unsigned integer dtype; None: uint32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not an unsigned integer dtype.
    """
    target = optional_dtype("random.bits", dtype, dtypes.uint32)
    if target.kind != "u":
        raise DTypeError(
            "random.bits: `dtype` must be an unsigned integer dtype, and is "
            f"{target.name}."
        )
    word = word_of("bits", key)
    return bits_of(word, as_shape("random.bits", shape), target)


def _float_dtype(name: str, dtype: DTypeLike | None) -> DType:
    target = optional_dtype(f"random.{name}", dtype, dtypes.DEFAULT_FLOAT)
    if not target.is_float:
        raise DTypeError(
            f"random.{name}: `dtype` must be floating, and is {target.name}."
        )
    return target


def uniform(
    key: Any,
    shape: Any = (),
    dtype: DTypeLike | None = None,
    minval: Any = 0.0,
    maxval: Any = 1.0,
) -> Value:
    """Return floats distributed uniformly in [minval, maxval).

        >>> hf.random.uniform(hf.random.key(0), (2, 3)).shape
        (2, 3)

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: A floating dtype; None: float32.
        minval, maxval: Numbers, or tensors that broadcast to `shape`.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
        ShapeError: a bound does not broadcast to `shape`.
    """
    target = _float_dtype("uniform", dtype)
    word = word_of("uniform", key)
    sizes = as_shape("random.uniform", shape)
    return _uniform("uniform", word, sizes, target, minval, maxval)


def _uniform(
    name: str, word: Value, shape: Shape, dtype: DType, minval: Any, maxval: Any
) -> Value:
    drawn = unit(word, shape, dtype)
    if _is_number(minval, 0) and _is_number(maxval, 1):
        return drawn
    low, high = (_bound(name, b, dtype, shape) for b in (minval, maxval))
    # XLA rounds once here, by an FMA, except for bfloat16 (and for float16 on
    # processors without arithmetic for it).
    width = subtract(high, low)
    spread = (
        add(multiply(drawn, width), low)
        if dtype is dtypes.bfloat16
        else fma(drawn, width, low)
    )
    result: Value = maximum(low, spread)
    return result


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _bound(name: str, value: Any, dtype: DType, shape: Shape) -> Any:
    return _fitting(name, astype(value, dtype, copy=False), shape)


def _fitting(name: str, parameter: Any, shape: Shape) -> Any:
    """Return a parameter that broadcasts to `shape`; unbacked sizes are checked at run
    time.

    Raises:
        ShapeError: it does not broadcast to `shape`.
    """
    name = f"random.{name}"
    if isinstance(parameter, Value):
        parameter = fitted(name, parameter, shape)
    type_ = parameter.type
    if not same_shape(broadcast_shapes(name, type_.shape, shape), shape):
        raise ShapeError(
            f"{name}: a parameter of type {type_} does not broadcast to `shape` "
            f"[{', '.join(map(str, shape))}]."
        )
    return parameter


# --- integers -------------------------------------------------------------------------


def randint(
    key: Any, shape: Any, minval: Any, maxval: Any, dtype: DTypeLike | None = None
) -> Value:
    """Return integers distributed uniformly in [minval, maxval); `minval` where that
    interval is empty.

        >>> hf.random.randint(hf.random.key(0), (3,), 0, 10).dtype
        hopflow.int64

    Args:
        key: u32[2].
        shape: The shape of the result.
        minval, maxval: Integers, or integer tensors that broadcast to `shape`. They
            are clipped to the range of `dtype`.
        dtype: An integer dtype; None: int64.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not an integer dtype.
        ShapeError: a bound does not broadcast to `shape`.

    Notes:
        Twice the bits of the dtype (of 32 at least) are reduced modulo the span, so
        the bias is at most `span / 2**64`.
    """
    target = optional_dtype("random.randint", dtype, dtypes.DEFAULT_INT)
    if not target.is_integer:
        raise DTypeError(
            f"random.randint: `dtype` must be an integer dtype, and is {target.name}."
        )
    sizes = as_shape("random.randint", shape)
    bounds = [as_operand("random.randint", 2, bound) for bound in (minval, maxval)]
    for bound in bounds:
        type_ = bound.type
        if not type_.dtype.is_integer:
            raise DTypeError(
                f"random.randint: `minval` and `maxval` must be integers, and one is "
                f"{type_}."
            )
    low, high = (
        _fitting("randint", bound, sizes) if isinstance(bound, Value) else number
        for bound, number in zip(bounds, (minval, maxval), strict=True)
    )
    return integers(word_of("randint", key), sizes, low, high, target)


# --- permutations and choice ----------------------------------------------------------


def permutation(key: Any, x: Any, axis: int = 0, independent: bool = False) -> Value:
    """Return the elements of `x` in random order along `axis`, T[*s].

        >>> sorted(hf.random.permutation(hf.random.key(0), 4).tolist())
        [0, 1, 2, 3]

    Args:
        key: u32[2].
        x: T[*s], or an int n for the numbers below n.
        axis: The axis to permute.
        independent: Whether each line along `axis` is permuted independently.

    Raises:
        ArgumentTypeError: `key` is no key.
        AxisError: `x` has no such axis.
        DataDependentError: the number of elements is only known at run time.
    """
    independent = as_flag("random.permutation", "independent", independent)
    word = word_of("permutation", key)
    values = _population("permutation", x)
    axis = normalize_axis("random.permutation", axis, values.ndim)
    if independent or values.ndim == 1:
        return _shuffled(word, values, axis)
    order = _shuffled(word, arange(values.shape[axis]), 0)
    return take(values, order, axis=axis)


def _population(name: str, x: Any) -> Value:
    """Return `x`, or the numbers below it if it is an int."""
    if isinstance(x, int | SymInt):
        return arange(x)
    return as_value(as_operand(name, 1, x))


def _shuffled(word: Value, x: Value, axis: int) -> Value:
    """Return `x` sorted by random bits, in enough rounds to make a tie in all of them
    improbable."""
    size = x.type.size
    # The r for which `size ** 3 <= (2**32 - 1) ** r`.
    rounds = next(r for r in count(1) if size <= int((2**32 - 1) ** (r / 3)))
    for _ in range(rounds):
        word, drawn = pair(word)
        order = argsort(bits_of(drawn, x.shape, dtypes.uint32), axis=axis)
        x = take_along_axis(x, order, axis=axis)
    return x


def choice(
    key: Any,
    a: Any,
    shape: Any = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
) -> Value:
    """Return elements of `a` along `axis`, drawn at random.

        >>> hf.random.choice(hf.random.key(0), 10, (3,), replace=False).shape
        (3,)

    Args:
        key: u32[2].
        a: T[*s], or an int n for the numbers below n.
        shape: The shape that replaces `axis` in the result.
        replace: Whether an element may be drawn more than once.
        p: f[n], the probability of each element; None: all are equal.
        axis: The axis of the elements.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        ArgumentValueError: without replacement, there are fewer elements than draws.
        AxisError: `a` has no such axis.
        ShapeError: `p` has another size than `a` along `axis`.
    """
    replace = as_flag("random.choice", "replace", replace)
    values = _population("choice", a)
    sizes = as_shape("random.choice", shape)
    axis = normalize_axis("random.choice", axis, values.ndim)
    size = values.shape[axis]
    count = TensorType(values.type.dtype, sizes).size
    if not replace and count > size:
        raise ArgumentValueError(
            f"random.choice: {count} elements cannot be drawn from {size} without "
            "replacement."
        )
    if p is None:
        if replace:
            order = randint(key, (count,), 0, size)
        else:
            order = sliced(permutation(key, size), (0,), (count,), (1,))
    else:
        order = _weighted(key, p, size, count, replace)
    taken = take(values, order, axis=axis)
    result: Value = reshaped(
        taken, (*values.shape[:axis], *sizes, *values.shape[axis + 1 :])
    )
    return result


def _weighted(key: Any, p: Any, size: Size, count: Size, replace: bool) -> Value:
    weights = as_value(as_operand("random.choice", "p", p))
    if weights.ndim == 1:
        [weights] = matched("random.choice", [weights], [0], size)
    if (
        not (weights.ndim == 1 and equals(weights.shape[0], size))
        or not weights.type.dtype.is_float
    ):
        raise ShapeError(
            f"random.choice: `p` must be floats of shape [{size}], and is "
            f"{weights.type}."
        )
    dtype = weights.type.dtype
    if replace:
        totals = cumulative_sum(weights)
        last = sliced(totals, (size - 1,), (1,), (1,))
        drawn = multiply(last, subtract(1, uniform(key, (count,), dtype)))
        return searchsorted(totals, drawn)
    # Gumbel top-k: the largest log-probabilities with Gumbel noise are a sample without
    # replacement (https://arxiv.org/abs/1903.06059).
    scores = add(gumbel(key, (size,), dtype), log(weights))
    order: Value = sliced(argsort(negative(scores)), (0,), (count,), (1,))
    return order


# --- distributions --------------------------------------------------------------------


def _drawn(
    name: str,
    key: Any,
    shape: Any,
    dtype: DTypeLike | None,
    minval: float | None = None,
    maxval: float = 1.0,
) -> Value:
    """Return uniform floats for the distribution `name`. The default lower bound is the
    smallest positive normal float."""
    target = _float_dtype(name, dtype)
    word = word_of(name, key)
    low = dtypes.finfo(target).smallest_normal if minval is None else minval
    return _uniform(name, word, as_shape(f"random.{name}", shape), target, low, maxval)


def normal(key: Any, shape: Any = (), dtype: DTypeLike | None = None) -> Value:
    """Return floats of the standard normal distribution, by inversion.

        >>> hf.random.normal(hf.random.key(0), (2,), "float64").dtype
        hopflow.float64

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: A floating dtype; None: float32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
    """
    target = _float_dtype("normal", dtype)
    above = -1.0 + dtypes.finfo(target).eps / 2  # the next float after -1
    drawn = _drawn("normal", key, shape, target, above)
    result: Value = multiply(erfinv(drawn), math.sqrt(2))
    return result


def truncated_normal(
    key: Any,
    lower: Any,
    upper: Any,
    shape: Any = None,
    dtype: DTypeLike | None = None,
) -> Value:
    """Return floats of the normal distribution truncated to (lower, upper), by
    inversion.

    Args:
        key: u32[2].
        lower, upper: Numbers, or tensors that broadcast to `shape`.
        shape: The shape of the result; None: the broadcast shape of the bounds.
        dtype: A floating dtype; None: float32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
        ShapeError: a bound does not broadcast to `shape`.
    """
    target = _float_dtype("truncated_normal", dtype)
    word = word_of("truncated_normal", key)
    low, high = (astype(v, target, copy=False) for v in (lower, upper))
    name = "random.truncated_normal"
    if shape is None:
        low, high = aligned(name, (low, high))
    sizes = (
        broadcast_shapes(name, low.shape, high.shape)
        if shape is None
        else as_shape(name, shape)
    )
    root = math.sqrt(2)
    ends = [erf(divide(v, root)) for v in (low, high)]
    drawn = _uniform("truncated_normal", word, sizes, target, *ends)
    result = multiply(erfinv(drawn), root)
    low, high = stop_gradient((low, high))
    return clip(result, nextafter(low, math.inf), nextafter(high, -math.inf))


def exponential(key: Any, shape: Any = (), dtype: DTypeLike | None = None) -> Value:
    """Return floats of the exponential distribution of rate 1, by inversion.

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: A floating dtype; None: float32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
    """
    drawn = _drawn("exponential", key, shape, dtype, 0.0)
    result: Value = negative(log1p(negative(drawn)))
    return result


def gumbel(key: Any, shape: Any = (), dtype: DTypeLike | None = None) -> Value:
    """Return floats of the standard Gumbel distribution, by inversion.

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: A floating dtype; None: float32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
    """
    drawn = _drawn("gumbel", key, shape, dtype)
    result: Value = negative(log(negative(log(drawn))))
    return result


def laplace(key: Any, shape: Any = (), dtype: DTypeLike | None = None) -> Value:
    """Return floats of the Laplace distribution of scale 1, by inversion.

    Args:
        key: u32[2].
        shape: The shape of the result.
        dtype: A floating dtype; None: float32.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        DTypeError: `dtype` is not floating.
    """
    target = _float_dtype("laplace", dtype)
    drawn = _drawn("laplace", key, shape, target, -1.0 + dtypes.finfo(target).eps / 2)
    result: Value = multiply(sign(drawn), log1p(negative(abs(drawn))))
    return result


def bernoulli(key: Any, p: Any = 0.5, shape: Any = None) -> Value:
    """Return bools that are true with probability `p`.

        >>> hf.random.bernoulli(hf.random.key(0), 0.3, (2,)).shape
        (2,)

    Args:
        key: u32[2].
        p: A number, or a floating tensor that broadcasts to `shape`.
        shape: The shape of the result; None: that of `p`.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        ArgumentValueError: `p` is a number outside [0, 1].
        DTypeError: `p` is not floating.
        ShapeError: `p` does not broadcast to `shape`.
    """
    if isinstance(p, float) and not 0 <= p <= 1:
        raise ArgumentValueError(
            f"random.bernoulli: `p` must be from 0 to 1, and is {p}."
        )
    chance = as_value(as_operand("random.bernoulli", 1, p))
    if not chance.type.dtype.is_float:
        raise DTypeError(
            f"random.bernoulli: `p` must be floating, and is {chance.type}."
        )
    word = word_of("bernoulli", key)
    sizes = chance.shape if shape is None else as_shape("random.bernoulli", shape)
    chance = _fitting("bernoulli", chance, sizes)
    result: Value = less(unit(word, sizes, chance.type.dtype), chance)
    return result


def categorical(key: Any, logits: Any, axis: int = -1, shape: Any = None) -> Value:
    """Return positions i64 along `axis`, with probabilities proportional to
    `exp(logits)`, by the Gumbel-max trick.

        >>> logits = hf.asarray([-float("inf"), 0.0])
        >>> int(hf.random.categorical(hf.random.key(0), logits))
        1

    Args:
        key: u32[2].
        logits: f[*s].
        axis: The axis of the categories.
        shape: The shape of the result. It must end with the shape of `logits` without
            `axis`, which is the default.

    Raises:
        ArgumentTypeError: `key` is no key, or `shape` no shape.
        AxisError: `logits` has no such axis.
        DTypeError: `logits` is not floating.
        ShapeError: `shape` does not end with the shape of the other axes.
    """
    scores = as_value(as_operand("random.categorical", 1, logits))
    if not scores.type.dtype.is_float:
        raise DTypeError(
            f"random.categorical: `logits` must be floating, and is {scores.type}."
        )
    axis = normalize_axis("random.categorical", axis, scores.ndim)
    others = (*scores.shape[:axis], *scores.shape[axis + 1 :])
    sizes = others if shape is None else as_shape("random.categorical", shape)
    extra = len(sizes) - len(others)
    if extra >= 0:
        axes = [a for a in range(scores.ndim) if a != axis]
        for a, n in zip(axes, sizes[extra:], strict=True):
            [scores] = matched("random.categorical", [scores], [a], n)
        others = tuple([scores.shape[a] for a in axes])
    if extra < 0 or not all(map(equals, sizes[extra:], others)):
        raise ShapeError(
            f"random.categorical: `shape` [{', '.join(map(str, sizes))}] must end with "
            f"[{', '.join(map(str, others))}], the shape of `logits` without `axis`."
        )
    noise = gumbel(key, (*sizes[:extra], *scores.shape), scores.type.dtype)
    return argmax(add(noise, scores), axis=axis + extra)
