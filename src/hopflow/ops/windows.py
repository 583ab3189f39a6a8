"""Products of a matrix with windows of a row: how the compiler computes convolutions.

A convolution is a product of matrices: one row of weights for each output channel, and
for each element of a window (a channel and an offset) one row with that element of all
windows. Copying the input into such rows would multiply its size by that of a window.
But each row is a part of the input as it is in memory, shifted by the element's offset:

    x = [x0 x1 x2 x3 x4 x5]          rows for a window of 3: [x0 x1 x2 x3]
                                                             [x1 x2 x3 x4]
                                                             [x2 x3 x4 x5]

So the input is laid out once (with its padding, `window_layout`), the offsets are
listed (`window_offsets`), and the product reads its rows where they lie
(`matmul_windows`). This is the indirect convolution algorithm (M. Dukhan, 2019,
arXiv:1907.02129), with offsets instead of pointers.

These operations exist only in the graphs of the compiler (see `OpDef.compose`).
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.graph.types import Shape, TensorType, is_one, is_zero
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, binary, compare, const, extent
from hopflow.loop_ir.kernels import Library, Operand, Pointwise
from hopflow.ops.opdef import OpDef
from hopflow.ops.rules import Array
from hopflow.ops.sizes import divided
from hopflow.symbolic.atoms import declared
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size, sym_max

Types = Sequence[TensorType]


def is_less(a: Size, b: Size) -> bool | None:
    """Return whether `a < b`; None if it depends. Only the declared ranges of symbols
    count: programs with equal graphs share code, whatever each trace knows besides."""
    difference = a - b
    if isinstance(difference, int):
        return difference < 0
    found = declared(terms_of(difference))
    if found.high < 0:
        return True
    return False if found.low >= 0 else None


def not_negative(size: Size) -> Size:
    """Return a size, or 0 if it is negative."""
    return size if is_less(size, 0) is False else sym_max(0, size)


def dilated(size: Size, step: int) -> Size:
    """Return the length of `size` elements at distances of `step`."""
    return size if step == 1 else not_negative((size - 1) * step + 1)


def part_of(channels: Size, groups: Size) -> Size:
    """Return the channels of a group; 0 if there are no groups, as in a batch of no
    examples."""
    if is_zero(groups):
        return 0
    part = divided(channels, groups)
    assert part is not None
    return part


# --- window_layout --------------------------------------------------------------------


def _layout_infer(
    x: TensorType,
    *,
    groups: Size,
    phases: tuple[int, ...],
    rows: Shape,
    batch_last: bool,
    **_: Any,
) -> TensorType:
    batch, channels, *_sizes = x.shape
    inner = (part_of(channels, groups), *phases, *rows)
    if batch_last:
        return x.with_shape((groups, *inner, batch))
    return x.with_shape((batch, groups, *inner))


def spread(x: Array, before: Sequence[int], dilation: Sequence[int], shape: Any) -> Any:
    """Return zeros [n, c, *shape] with the elements of x[n, c, *s] from `before` on, at
    distances of `dilation`. What is outside is left out."""
    result = np.zeros((*x.shape[:2], *shape), x.dtype)
    into, of = [slice(None)] * 2, [slice(None)] * 2
    for start, step, n, size in zip(before, dilation, x.shape[2:], shape, strict=True):
        first = max(0, -(start // step))  # the first that is not before the result
        last = max(first, min(n, -((start - size) // step)))
        of.append(slice(first, last))
        at = start + first * step
        into.append(
            slice(at, at + (last - first) * step, step) if last > first else of[0]
        )
        if last <= first:
            return result
    result[tuple(into)] = x[tuple(of)]
    return result


def _layout_run(
    x: Array,
    *,
    before: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: Size,
    strides: tuple[int, ...],
    phases: tuple[int, ...],
    rows: tuple[int, ...],
    batch_last: bool,
) -> Array:
    """The padded input of a convolution, with the elements that windows at a stride
    read together next to each other: [n, g * c, *s] -> [n, g, c, *phases, *rows], or
    [g, c, *phases, *rows, n] if `batch_last`."""
    lengths = tuple(n * s for n, s in zip(rows, strides, strict=True))
    wide = spread(x, before, dilation, lengths)
    batch, channels = x.shape[:2]
    axes = [d for n, s in zip(rows, strides, strict=True) for d in (n, s)]
    wide = wide.reshape(batch, groups, part_of(channels, groups), *axes)
    rank = len(rows)
    wide = wide.transpose(
        *(0, 1, 2), *(4 + 2 * a for a in range(rank)), *(3 + 2 * a for a in range(rank))
    )
    for axis, (count, stride) in enumerate(zip(phases, strides, strict=True)):
        step = 1 if count == 1 else stride // count
        kept = [slice(None)] * wide.ndim
        kept[3 + axis] = slice(0, count * step, step)
        wide = wide[tuple(kept)]
    return np.ascontiguousarray(np.moveaxis(wide, 0, -1) if batch_last else wide)


def _layout_lower(
    types: Types,
    x: Operand,
    *,
    before: Shape,
    dilation: tuple[int, ...],
    groups: Size,
    strides: tuple[int, ...],
    phases: tuple[int, ...],
    rows: Shape,
    batch_last: bool,
) -> Pointwise:
    _, channels, *sizes = x.type.shape
    rank, zero = len(sizes), const(0, types[0].dtype)

    def element(at: Index) -> Expr:
        *inner, batch = (*at[1:], at[0]) if not batch_last else at
        group, channel, *places = inner
        source = [
            batch,
            expr.add(expr.mul(group, extent(part_of(channels, groups))), channel),
        ]
        tests: list[Expr] = []
        for a in range(rank):
            row = expr.mul(places[rank + a], expr.index(strides[a]))
            step = 1 if phases[a] == 1 else strides[a] // phases[a]
            phase = expr.mul(places[a], expr.index(step))
            place = expr.sub(expr.add(row, phase), extent(before[a]))
            last = (rows[a] - 1) * strides[a] + (phases[a] - 1) * step - before[a]
            tests += tests_inside(place, -before[a], last, sizes[a], dilation[a])
            source.append(expr.div(place, expr.index(dilation[a])))
        return x.where(expr.all_of(tests), tuple(source), zero)

    return Pointwise(element)


def tests_inside(
    place: Expr, first: Size, last: Size, size: Size, dilation: int
) -> list[Expr]:
    """Return the tests that a spread input of `size` elements has one at a place.

    Args:
        first, last: The least and the greatest value of the place.
    """
    tests = []
    length = dilated(size, dilation)
    if is_less(first, 0) is not False:
        tests.append(compare("ge", place, expr.index(0)))
    if is_less(last, length) is not True:
        tests.append(compare("lt", place, extent(length)))
    if dilation > 1:
        rest = binary("rem", place, expr.index(dilation))
        tests.append(compare("eq", rest, expr.index(0)))
    return tests


window_layout: Final = OpDef(
    name="window_layout",
    promote=None,
    infer=_layout_infer,
    run=_layout_run,
    lower=_layout_lower,
    samples=(),
    is_internal=True,
)


# --- window_offsets -------------------------------------------------------------------


def _offsets_infer(*, sizes: Shape, **_: Any) -> TensorType:
    return TensorType(dtypes.int64, sizes)


def _offsets_run(
    *,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    strides: tuple[int, ...],
    of_phases: tuple[int, ...],
    of_rows: tuple[int, ...],
) -> Array:
    """The offsets in memory of the elements of a window. The index `i` along an axis
    adds `i * step % stride`, a phase, times `of_phase`, the distance of neighbouring
    phases, and `i * step // stride`, a row, times `of_row`."""
    total = np.zeros(sizes, np.int64)
    each = zip(sizes, steps, strides, of_phases, of_rows, strict=True)
    for axis, (size, step, stride, of_phase, of_row) in enumerate(each):
        place = np.arange(size) * step
        along = place % stride * of_phase + place // stride * of_row
        total += along.reshape([size if a == axis else 1 for a in range(len(sizes))])
    return total


def _offsets_lower(
    _types: Types,
    *,
    sizes: Shape,
    steps: tuple[int, ...],
    strides: tuple[int, ...],
    of_phases: Shape,
    of_rows: Shape,
) -> Pointwise:
    def element(at: Index) -> Expr:
        total = expr.index(0)
        each = zip(at, sizes, steps, strides, of_phases, of_rows, strict=True)
        for i, size, step, stride, of_phase, of_row in each:
            if is_one(size):
                continue
            place, period = expr.mul(i, expr.index(step)), expr.index(stride)
            row = expr.div(place, period)
            total = expr.add(total, expr.mul(row, extent(of_row)))
            if stride > 1:
                phase = binary("rem", place, period)
                total = expr.add(total, expr.mul(phase, extent(of_phase)))
        return total

    return Pointwise(element)


window_offsets: Final = OpDef(
    name="window_offsets",
    promote=None,
    infer=_offsets_infer,
    run=_offsets_run,
    lower=_offsets_lower,
    samples=(),
    is_internal=True,
)


# --- matmul_windows -------------------------------------------------------------------


def _product_infer(
    a: TensorType,
    x: TensorType,
    _offsets: TensorType,
    *,
    batch: Shape,
    batch_axes: tuple[tuple[int, ...], ...],
    shape: Shape,
) -> TensorType:
    rows = a.shape[len(batch_axes[0])]
    return TensorType(x.dtype, (*batch, rows, *shape), a.weak and x.weak)


def _product_run(
    a: Array,
    x: Array,
    offsets: Array,
    *,
    batch: tuple[int, ...],
    batch_axes: tuple[tuple[int, ...], ...],
    shape: tuple[int, ...],
) -> Array:
    """a[*b, m, *r] times the rows `x[offset:offset + n]` for the offsets[*b, *r], of
    each index of the batch; n is the number of elements of `shape`. An operand has
    those axes of the batch that `batch_axes` says."""
    rows, n = a.shape[len(batch_axes[0])], prod(shape)
    result = np.empty((*batch, rows, n), x.dtype)
    for at in np.ndindex(*batch):
        part = [
            v[tuple(at[b] for b in axes)]
            for v, axes in zip((a, x, offsets), batch_axes, strict=True)
        ]
        row, starts = part[1].reshape(-1), part[2].reshape(-1)
        windows = row[starts[:, None] + np.arange(n)]
        result[at] = part[0].reshape(rows, -1) @ windows
    return result.reshape(*batch, rows, *shape)


def _product_lower(
    _types: Types,
    a: Operand,
    x: Operand,
    offsets: Operand,
    *,
    batch: Shape,
    batch_axes: tuple[tuple[int, ...], ...],
    shape: Shape,
) -> Library:
    of_a, of_x, _ = map(len, batch_axes)
    m, *k = a.type.shape[of_a:]
    sizes = (m, prod(shape, start=1), prod(k, start=1), prod(x.type.shape[of_x:]))
    return Library(
        "gemm_windows",
        (a, x, offsets),
        tuple(map(extent, sizes)),
        len(batch),
        batch_axes=batch_axes,
        can_fail=True,
    )


matmul_windows: Final = OpDef(
    name="matmul_windows",
    promote=None,
    infer=_product_infer,
    run=_product_run,
    lower=_product_lower,
    samples=(),
    is_internal=True,
)
