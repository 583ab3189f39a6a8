"""Random keys as words, and random bits, floats in [0, 1) and bounded integers.

A key u32[2] is represented as one word u64[], whose upper half is its first element.
"""

from typing import Any, Final

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError
from hopflow.graph.types import Shape, TensorType
from hopflow.ops.convert import apply, as_value, astype
from hopflow.ops.creation import full_like, positions
from hopflow.ops.elementwise import (
    add,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    clip,
    equal,
    greater,
    less,
    multiply,
    subtract,
    unchecked_remainder,
    where,
)
from hopflow.ops.opdef import as_operand
from hopflow.ops.threefry import threefry
from hopflow.ops.views import reshaped, sliced

UNSIGNED: Final = {d.bits: d for d in dtypes.UNSIGNED}


def key_of(word: Value) -> Value:
    """Return words as keys: u64[*s] -> u32[*s, 2]."""
    shift = subtract(32, multiply(positions((2,), 0, dtypes.uint64), 32))
    column = reshaped(word, (*word.shape, 1))
    return astype(bitwise_right_shift(column, shift), dtypes.uint32)


def word_of(name: str, key: Any) -> Value:
    """Return a key as a word: u32[2] -> u64[].

    Raises:
        ArgumentTypeError: `key` is no key.
    """
    value = as_value(as_operand(f"random.{name}", 0, key))
    if value.type.dtype is not dtypes.uint32 or value.shape != (2,):
        raise ArgumentTypeError(
            f"random.{name}: `key` must be one key, u32[2], and is {value.type}. Make "
            "one with `hf.random.key(seed)`; for many, use `hf.vmap`."
        )
    halves = [
        astype(reshaped(sliced(value, (i,), (1,), (1,)), ()), dtypes.uint64)
        for i in (0, 1)
    ]
    word: Value = bitwise_or(bitwise_left_shift(halves[0], 32), halves[1])
    return word


def hashed(word: Value, shape: Shape) -> Value:
    """Return the hash of each position in `shape`: u64[*shape]."""
    size = TensorType(dtypes.uint64, shape).size
    counts = reshaped(positions((size,), 0, dtypes.uint64), shape)
    return apply(threefry, word, counts)


def bits_of(word: Value, shape: Shape, dtype: DType) -> Value:
    """Return uniform random bits of an unsigned dtype."""
    both = hashed(word, shape)
    if dtype is dtypes.uint64:
        return both
    return astype(bitwise_xor(bitwise_right_shift(both, 32), both), dtype)


_MANTISSA: Final = {
    dtypes.float16: 10,
    dtypes.bfloat16: 7,
    dtypes.float32: 23,
    dtypes.float64: 52,
}


def unit(word: Value, shape: Shape, dtype: DType) -> Value:
    """Return floats uniform in [0, 1), with as many random bits as the mantissa has."""
    mantissa = _MANTISSA[dtype]
    width = 8 if mantissa < 8 else dtype.bits
    drawn = bits_of(word, shape, UNSIGNED[width])
    kept = bitwise_right_shift(drawn, width - mantissa)
    # The conversion and the product are exact.
    result: Value = multiply(astype(kept, dtype), 2.0**-mantissa)
    return result


def pair(word: Value) -> list[Value]:
    """Return the words of two new keys."""
    both = hashed(word, (2,))
    return [reshaped(sliced(both, (i,), (1,), (1,)), ()) for i in (0, 1)]


# --- integers in a range --------------------------------------------------------------


def integers(
    word: Value, shape: Shape, minval: Any, maxval: Any, target: DType
) -> Value:
    """Return integers uniform in [minval, maxval), whose bounds broadcast to `shape`.

    Twice the bits of the dtype (32 or more) are reduced modulo the span, in two parts
    `a * 2**bits + b` that are reduced first, so that nothing overflows.
    """
    wide = dtypes.int32 if target.bits < 32 else target
    higher, lower = (bits_of(w, shape, UNSIGNED[wide.bits]) for w in pair(word))
    low: Any
    if isinstance(minval, int) and isinstance(maxval, int):
        low, fixed = _fixed_range(minval, maxval, target, wide)
        offset = _fixed_offset(higher, lower, fixed, wide.bits)
    else:
        low, span = _range(minval, maxval, target, wide)
        offset = _offset(higher, lower, span, wide.bits)
    return astype(add(astype(offset, wide, copy=False), low), target, copy=False)


def _clipped(value: int, low: int, high: int) -> int:
    return low if value < low else high if value > high else value


def _fixed_range(low: int, high: int, target: DType, wide: DType) -> tuple[int, int]:
    """Return the lower bound in `wide`, and the span modulo 2**bits."""
    info, limits = dtypes.iinfo(target), dtypes.iinfo(wide)
    if target.bits < 32:
        low, high = (
            _clipped(low, info.min, info.max),
            _clipped(high, info.min, info.max + 1),
        )
    low = _clipped(low, limits.min, limits.max)
    high = _clipped(high, limits.min, limits.max + 1)
    return low, (high - low if high > low else 1) % (1 << wide.bits)


def _fixed_offset(higher: Value, lower: Value, span: int, width: int) -> Value:
    """Return `higher * 2**width + lower` modulo a span; 0 stands for 2**width."""
    if span == 0:
        return lower
    half = (1 << (width // 2)) % span
    factor = (half * half) % (1 << width) % span
    high = multiply(unchecked_remainder(higher, span), factor)
    total = add(high, unchecked_remainder(lower, span))
    result: Value = unchecked_remainder(total, span)
    return result


def _offset(higher: Value, lower: Value, span: Value, width: int) -> Value:
    """Return the same as `_fixed_offset`, for spans that only the run knows."""
    half = _modulo(full_like(span, 1 << (width // 2)), span)
    factor = _modulo(multiply(half, half), span)
    total = add(multiply(_modulo(higher, span), factor), _modulo(lower, span))
    return _modulo(total, span)


def _modulo(x: Value, span: Value) -> Value:
    return where(equal(span, 0), x, unchecked_remainder(x, span))


def _range(minval: Any, maxval: Any, target: DType, wide: DType) -> tuple[Value, Value]:
    """Return the lower bound in `wide`, and the unsigned span modulo 2**bits."""
    low, high = (_integer_bound(v) for v in (minval, maxval))
    if target.bits < 32:
        info = dtypes.iinfo(target)
        low = clip(astype(low, dtypes.int32), info.min, info.max)
        high = clip(astype(high, dtypes.int32), info.min, info.max + 1)
    largest = dtypes.iinfo(wide).max
    fits = largest >= dtypes.iinfo(high.type.dtype).max
    beyond = False if fits else greater(high, largest)
    low, high = _saturated(low, wide), _saturated(high, wide)
    span = astype(subtract(high, low), UNSIGNED[wide.bits], copy=False)
    span = add(span, astype(beyond, span.type.dtype))
    return low, where(less(low, high), span, 1)


def _integer_bound(value: Any) -> Value:
    return as_value(as_operand("random.randint", 2, value))


def _saturated(x: Value, dtype: DType) -> Value:
    source, info = dtypes.iinfo(x.type.dtype), dtypes.iinfo(dtype)
    if source.min < info.min or source.max > info.max:
        low = info.min if info.min > source.min else source.min
        high = info.max if info.max < source.max else source.max
        x = clip(x, low, high)
    return astype(x, dtype, copy=False)
