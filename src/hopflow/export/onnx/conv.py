"""Convolutions: ONNX's own of 32-bit floats, and products of matrices of the rest."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from hopflow import dtypes
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.linalg import traced
from hopflow.export.onnx.pointwise import lowered
from hopflow.export.onnx.scopes import Value
from hopflow.graph.types import Shape, is_zero
from hopflow.ops.convert import astype
from hopflow.ops.creation import arange
from hopflow.ops.indexing import take
from hopflow.ops.joining import pad
from hopflow.ops.manipulation import expand_dims
from hopflow.ops.matmul import matmul
from hopflow.ops.sizes import larger, may_be_zero
from hopflow.ops.views import part, reshaped, transposed
from hopflow.symbolic.size import Size


def _conv(
    site: Site,
    x: Value,
    w: Value,
    *,
    strides: tuple[int, ...],
    before: Shape,
    sizes: Shape,
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: Size,
) -> Value | Sequence[Value]:
    """`Conv`, with the padding at both ends instead of the sizes of the result."""
    (of_x, of_w), result = site.types, site.results[0]
    if any(map(is_zero, (*of_x.shape, *of_w.shape, *result.shape))):
        return site.expanded(site.constant(0, x.dtype), result.shape)
    if x.dtype is not dtypes.float32 or not sizes or not isinstance(groups, int):
        return _written_out(site, x, w)
    spans = [n * b for n, b in zip(of_x.shape[2:], input_dilation, strict=True)]
    if any(b > 1 for b in input_dilation):
        x = _spread(site, x, input_dilation, spans)
    # onnxruntime has no empty results: they are made larger, and cut.
    made = [larger(1, m) if may_be_zero(m) else m for m in sizes]
    after = [
        (m - 1) * s + (k - 1) * d + 1 - span - low
        for m, k, s, d, span, low in zip(
            *(made, of_w.shape[2:], strides, dilation, spans, before), strict=True
        )
    ]
    pads = [*before, *after]
    if not all(isinstance(n, int) and n >= 0 for n in pads):
        widths = site.shape((0, 0, *before, 0, 0, *after))
        x = site("Pad", x, widths, site.constant(0, x.dtype), mode="constant")
        pads = [0] * len(pads)
    options = {"strides": list(strides), "dilations": list(dilation), "pads": pads}
    found = site("Conv", x, w, group=groups, **options)
    if not any(map(may_be_zero, sizes)):
        return found
    starts, axes = [0] * len(sizes), range(2, 2 + len(sizes))
    integers = site.scope.integers
    return site("Slice", found, integers(starts), site.shape(sizes), integers(axes))


def _spread(
    site: Site, x: Value, dilation: tuple[int, ...], spans: Sequence[Size]
) -> Value:
    """The input with zeros after each element along the axes of space."""
    batch, channels, *inputs = site.types[0].shape
    shape: list[Size] = [batch, channels]
    after = [0, 0]
    for n, step in zip(inputs, dilation, strict=True):
        shape += [n, 1]
        after += [0, step - 1]
    x = site.reshaped(x, tuple(shape))
    widths = site.scope.integers([0] * len(after) + after)
    x = site("Pad", x, widths, site.constant(0, x.dtype), mode="constant")
    return site.reshaped(x, (batch, channels, *spans))


def _written_out(site: Site, x: Value, w: Value) -> Sequence[Value]:
    """The convolution for which onnxruntime has no kernel on a CPU, as a product of
    matrices; one with symbolic sizes as sums."""
    if not all(type_.is_static for type_ in (*site.types, *site.results)):
        return lowered(site)
    return traced(site, partial(_product, **site.params), site.types, (x, w))


def _product(
    x: Any,
    w: Any,
    *,
    strides: tuple[int, ...],
    before: tuple[int, ...],
    sizes: tuple[int, ...],
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: int,
) -> Any:
    """The product of the weights with a matrix of all windows."""
    dtype = x.dtype
    if dtype.is_float and dtype.bits == 16:
        x, w = astype(x, dtypes.float32), astype(w, dtypes.float32)
    for a, (m, k, s, d, b, low) in enumerate(
        zip(
            *(sizes, w.shape[2:], strides, dilation, input_dilation, before),
            strict=True,
        )
    ):
        axis = 2 + 2 * a
        length = (m - 1) * s + (k - 1) * d + 1
        x = _padded(x, axis, b, low, length)
        taps = expand_dims(arange(k) * d, axis=1)
        x = take(x, taps + arange(m) * s, axis=axis)
    batch, channels, *windows = x.shape
    outputs, inputs = w.shape[:2]
    x = reshaped(x, (batch, groups, channels // groups, *windows))
    rank = len(sizes)
    order = [3 + 2 * a for a in range(rank)] + [4 + 2 * a for a in range(rank)]
    x = transposed(x, (0, 1, 2, *order))
    columns, rows = 1, inputs
    for m, k in zip(sizes, w.shape[2:], strict=True):
        columns, rows = columns * m, rows * k
    x = reshaped(x, (batch, groups, rows, columns))
    w = reshaped(w, (groups, outputs // groups, rows))
    return astype(reshaped(matmul(w, x), (batch, outputs, *sizes)), dtype)


def _padded(x: Any, axis: int, step: int, low: int, length: int) -> Any:
    """`length` elements along an axis, the first of them `low` before those of `x`,
    which are at distances of `step`."""
    n = x.shape[axis]
    if step > 1:
        shape = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
        widths = [(0, 0)] * len(shape)
        widths[axis + 1] = (0, step - 1)
        spread = pad(reshaped(x, shape), widths)
        n = n * step
        x = reshaped(spread, (*x.shape[:axis], n, *x.shape[axis + 1 :]))
    widths = [(0, 0)] * x.ndim
    widths[axis] = (max(0, low), max(0, length - low - n))
    return part(pad(x, widths), axis, max(0, -low), length)


RULES: Final[dict[str, Callable[..., Any]]] = {"conv": _conv}
