"""Threefry-2x32, the counter-based hash that generates all random bits.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. Twenty rounds; a key and a counter are two 32-bit words each, stored as the
upper and lower halves of a uint64.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from hopflow import dtypes
from hopflow.loop_ir.expr import Expr, add, binary, cast, const
from hopflow.ops import batching
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array, broadcast, pointwise

_Word = TypeVar("_Word")

_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA
_GROUPS: Final = 5


def _rounds(
    key: tuple[_Word, _Word],
    count: tuple[_Word, _Word],
    constant: Callable[[int], _Word],
    add: Callable[[_Word, _Word], _Word],
    xor: Callable[[_Word, _Word], _Word],
    rotate: Callable[[_Word, int], _Word],
) -> tuple[_Word, _Word]:
    """Return the hash, given the arithmetic of 32-bit words."""
    schedule = (*key, xor(xor(*key), constant(_PARITY)))
    x, y = add(count[0], key[0]), add(count[1], key[1])
    for group in range(1, _GROUPS + 1):
        for amount in _ROTATIONS[(group - 1) % 2]:
            x = add(x, y)
            y = xor(rotate(y, amount), x)
        x = add(x, schedule[group % 3])
        y = add(add(y, schedule[(group + 1) % 3]), constant(group))
    return x, y


def _run(key: Array, count: Array) -> Array:
    """The Threefry-2x32 hash of counters under keys, each two words in a uint64."""

    def halves(word: Array) -> tuple[Any, Any]:
        word = np.atleast_1d(word)  # NumPy warns of overflow in scalars
        return (word >> np.uint64(32)).astype(np.uint32), word.astype(np.uint32)

    high, low = _rounds(
        halves(key),
        halves(count),
        np.uint32,
        np.add,
        np.bitwise_xor,
        lambda x, n: (x << np.uint32(n)) | (x >> np.uint32(32 - n)),
    )
    word = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return np.asarray(word.reshape(np.broadcast_shapes(key.shape, count.shape)))


def _halves(word: Expr) -> tuple[Expr, Expr]:
    high = binary("lshr", word, const(32, dtypes.uint64))
    return cast(high, dtypes.uint32), cast(word, dtypes.uint32)


def _rotated(x: Expr, amount: int) -> Expr:
    left = binary("shl", x, const(amount, dtypes.uint32))
    return binary("or", left, binary("lshr", x, const(32 - amount, dtypes.uint32)))


def _hash(key: Expr, count: Expr) -> Expr:
    high, low = _rounds(
        _halves(key),
        _halves(count),
        lambda value: const(value, dtypes.uint32),
        add,
        lambda x, y: binary("xor", x, y),
        _rotated,
    )
    shifted = binary("shl", cast(high, dtypes.uint64), const(32, dtypes.uint64))
    return binary("or", shifted, cast(low, dtypes.uint64))


threefry: Final = OpDef(
    name="threefry2x32",
    promote=None,
    infer=broadcast("threefry2x32", (dtypes.uint64,), arity=2),
    run=_run,
    lower=pointwise(_hash),
    batch=batching.pointwise,
    samples=(
        Sample(("T[]", "T[2, 3]"), {}, (dtypes.uint64,), 0.0, 1e18),
        Sample(("T[3, 1]", "T[4]"), {}, (dtypes.uint64,), 0.0, 1e18),
    ),
)
