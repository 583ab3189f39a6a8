"""Steps of programs that multiply: batched matrices, sums of products, convolutions.

Most factors are views: a compiler reads matrices in place, and must address them in
reshaped batches, with strides, and in rows of a scan.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hopflow.testing.programs import MOST_AXES, Operation, Pool, view

DEAREST: Final = 128
"""The most multiplications, as a multiple of the largest number of elements."""


def _split_batch(m: Any, x: Any) -> Any:
    """Return `x` with its first axis split in two, if its size has a factor 2 or 3."""
    for factor in (3, 2):
        if x.shape[0] % factor == 0:
            shape = (x.shape[0] // factor, factor, *_sizes(x)[1:])
            return m.reshape(x, shape)
    return x


def _merged_batch(m: Any, x: Any) -> Any:
    """Return `x` with its first two axes merged."""
    sizes = _sizes(x)
    return m.reshape(x, (sizes[0] * sizes[1], *sizes[2:])) if x.ndim > 2 else x


def _sizes(x: Any) -> list[Any]:
    return [x.shape[k] for k in range(x.ndim)]


def _transposed(m: Any, x: Any) -> Any:
    return m.matrix_transpose(x) if x.ndim > 1 else x


WAYS: Final[list[Callable[[Any, Any], Any]]] = [
    lambda _, x: x,
    _transposed,
    _split_batch,
    _merged_batch,
    lambda m, x: _split_batch(m, x[::-1]),
    lambda m, x: _merged_batch(m, _transposed(m, x)),
    lambda _, x: x[..., ::-1],
    lambda _, x: x[..., ::2],
    lambda _, x: x[1:],
    lambda m, x: view(m, x, 3),
    lambda m, x: _transposed(m, _split_batch(m, x)),
    lambda _, x: x[:, None],
]
"""Views of an array that are the factor of a product."""


def _factor(p: Pool, x: Any, k: int) -> Any:
    return WAYS[k % len(WAYS)](p.m, x)


def _pair(p: Pool, a: int, b: int) -> tuple[Any, Any]:
    """Return two arrays whose products are exact if both are; or scalars."""
    x = p.number(p.array(a))
    y = p.like(b, lambda v: v.ndim > 0 and 0 not in v.shape and p.alike(v, x))
    return x, p.number(y) if y.ndim else x


def _matmul(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """A matrix product of arrays of any rank, which are sliced to fit."""
    x, y = _pair(p, a, b)
    if x.ndim == 0:
        return x
    x, y = _factor(p, x, c), _factor(p, y, d)
    inner = -min(y.ndim, 2)
    terms = min(x.shape[-1], y.shape[inner], p.terms(x, y))
    if x.shape[-1] != terms:
        x = x[..., :terms]
    if y.shape[inner] != terms:
        y = y[..., :terms, :] if y.ndim > 1 else y[:terms]
    while y.ndim > 2 and y.shape[0] and not _is_batch(p, x, y, terms):
        y = y[0]
    return p.bounded(x @ y) if _is_batch(p, x, y, terms) else x


def _is_batch(p: Pool, x: Any, y: Any, terms: int) -> bool:
    """Whether the batches broadcast, and the product is not too large."""
    try:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        return False
    shape = (*batch, *x.shape[-2:-1], *(y.shape[-1:] if y.ndim > 1 else ()))
    return _is_cheap(p, shape, terms)


def _is_cheap(p: Pool, shape: tuple[int, ...], terms: int) -> bool:
    size = math.prod(shape)
    return size <= p.largest and size * terms <= DEAREST * p.largest


def _vecdot(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x, y = _pair(p, a, b)
    if x.ndim == 0:
        return x
    x = _factor(p, x, d)
    axis = -1 - c % x.ndim
    same = axis >= -y.ndim and x.shape[axis] == y.shape[axis]
    if not (same and p.broadcasts(x.shape, y.shape)):
        y = x[..., ::-1]
    if x.shape[axis] > p.terms(x, y):
        return x
    return p.bounded(p.m.vecdot(x, y, axis=axis))


def _tensordot(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """`tensordot` over one axis, if two have equal lengths; over none; or over all axes
    of an array with itself."""
    x, y = _pair(p, a, b)
    if x.ndim == 0:
        return x
    x = _factor(p, x, d)
    k = c % x.ndim
    same = [j for j, n in enumerate(y.shape) if n == x.shape[k]]
    axes: Any = 0
    if c % 4 == 3:
        y, axes = x, x.ndim
    elif same:
        axes = ([k], [same[d % len(same)]])
    x_axes, y_axes = _summed(axes, x.ndim)
    rest = [n for k, n in enumerate(x.shape) if k not in x_axes]
    shape = (*rest, *(n for k, n in enumerate(y.shape) if k not in y_axes))
    terms = math.prod(x.shape[k] for k in x_axes)
    cheap = len(shape) <= MOST_AXES and _is_cheap(p, shape, terms)
    if not cheap or terms > p.terms(x, y):
        return x
    return p.bounded(p.m.tensordot(x, y, axes=axes))


def _summed(axes: Any, ndim: int) -> Any:
    """Return the axes of each operand over which `tensordot` sums."""
    if isinstance(axes, int):
        return range(ndim - axes, ndim), range(axes)
    return axes


def _conv(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """A convolution of an array of any rank; elements of another are the filters."""
    x, y = _pair(p, a, b)
    if x.ndim == 0 or y.ndim == 0:
        return x
    wide = x
    while wide.ndim < 3:
        wide = wide[None]
    batch, channels, *lengths = _sizes(wide)
    groups = channels if d % 3 == 2 and channels else 1
    window = [1 + (c + axis * d) % 3 for axis in range(len(lengths))]
    stride, padding, dilation = 1 + c % 2, d % 4 % 3, 1 + d % 2
    inputs = channels // groups
    terms, size = inputs * math.prod(window), math.prod(_sizes(y))
    outputs = groups * min(size // max(groups * terms, 1), 3)
    sizes = [
        max(0, (n + 2 * padding - (k - 1) * dilation - 1) // stride + 1)
        for n, k in zip(lengths, window, strict=True)
    ]
    cheap = _is_cheap(p, (batch, outputs, *sizes), terms)
    if not (outputs and terms and cheap) or terms > p.terms(x, y):
        return x
    row = p.m.reshape(y, (size,))[: outputs * terms]
    w = p.m.reshape(row, (outputs, inputs, *window))
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return p.bounded(p.lib.conv(wide, w, groups=groups, **options))


PRODUCTS: Final[dict[str, Operation]] = {
    "matmul": _matmul,
    "vecdot": _vecdot,
    "tensordot": _tensordot,
    "conv": _conv,
}
"""Operations of steps that multiply and sum."""
