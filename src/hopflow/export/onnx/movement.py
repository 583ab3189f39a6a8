"""Operations that move elements, or make them: views, slices, joins, fills."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.indexing import windows, written
from hopflow.export.onnx.pointwise import positions
from hopflow.export.onnx.scopes import Value
from hopflow.export.onnx.sizes import Number, vector
from hopflow.graph.types import Shape, is_zero


def _reshape(site: Site, x: Value, *, shape: Shape) -> Value:
    return site.reshaped(x, shape)


def _transpose(site: Site, x: Value, *, axes: tuple[int, ...]) -> Value:
    return site("Transpose", x, perm=list(axes)) if axes else x


def _broadcast(site: Site, x: Value, *, shape: Shape) -> Value:
    return site.expanded(x, shape)


_LEAST: Final = -(2**63) + 1


def _slice(
    site: Site, x: Value, *, starts: Shape, sizes: Shape, steps: tuple[int, ...]
) -> Value:
    if not starts:
        return x
    ends: list[Number] = []
    for start, size, step in zip(starts, sizes, steps, strict=True):
        end = site.size(start) + site.size(size) * Number(site.scope, step)
        ends.append(_before_first(site, end) if step < 0 else end)
    rows = [site.shape(starts), vector(site.scope, ends)]
    rows += [site.scope.integers(range(len(starts))), site.scope.integers(steps)]
    return site("Slice", x, *rows)


def _before_first(site: Site, end: Number) -> Number:
    """An end of a slice that runs backwards. If it is negative it is before the first
    element, and ONNX would count it from the last one."""
    if isinstance(end.value, Value):
        is_before = site("Less", end.value, site.constant(0))
        least = site.constant(_LEAST)
        return Number(site.scope, site("Where", is_before, least, end.value))
    return Number(site.scope, _LEAST) if end.value < 0 else end


def _update_slice(
    site: Site, x: Value, new: Value, *, starts: Shape, steps: tuple[int, ...]
) -> Value:
    at = windows(site, site.types[1].shape, starts, steps)
    return written(site, x, new, at, "set")


def _concat(site: Site, *parts: Value, axis: int) -> Value:
    shapes = [t.shape for t in site.types]
    some = [p for p, s in zip(parts, shapes, strict=True) if not is_zero(s[axis])]
    return site("Concat", *(some or parts), axis=axis)


def _pad(site: Site, x: Value, value: Value, *, before: Shape, after: Shape) -> Value:
    if not before:
        return x
    return site("Pad", x, site.shape((*before, *after)), value, mode="constant")


def _full(site: Site, value: Value, *, shape: Shape) -> Value:
    return site.expanded(value, shape)


def _iota(site: Site, *, shape: Shape, axis: int, dtype: DType) -> Value:
    along = positions(site, site.size(shape[axis]))
    found = site.scope.cast(along, dtype)
    if len(shape) == 1:
        return found
    column = site.scope.unsqueezed(found, *range(1, len(shape) - axis))
    return site.expanded(column, shape)


def _match_size(site: Site, x: Value, *, repeats: bool = False, **_: Any) -> Value:
    shape = site.results[0].shape
    if repeats:
        return site.expanded(x, shape)
    # A reshape tells readers of the model the size.
    return site.reshaped(x, shape) if site.results[0].is_static else x


def _roll(site: Site, x: Value, shift: Value, *, axis: int) -> Value:
    n = site.size(site.types[0].shape[axis])
    if is_zero(site.types[0].shape[axis]):
        return x
    size = n.tensor()
    period = site("Max", size, site.constant(1))
    entered = site("Mod", site.scope.cast(shift, dtypes.int64), period)
    middle = site("Sub", size, entered)
    parts = [
        _part(site, x, axis, middle, size),
        _part(site, x, axis, site.constant(0), middle),
    ]
    return site("Concat", *parts, axis=axis)


def _part(site: Site, x: Value, axis: int, start: Value, end: Value) -> Value:
    one = site.scope.integers((1,))
    ends = [site("Reshape", v, one) for v in (start, end)]
    return site("Slice", x, *ends, site.scope.integers((axis,)))


def _operand(place: int) -> Callable[..., Value]:
    """One of the operands, as it is."""
    return lambda _site, *operands, **_: operands[place]


RULES: Final[dict[str, Callable[..., Value | Sequence[Value]]]] = {
    "broadcast_to": _broadcast,
    "concat": _concat,
    "copy": _operand(0),
    "full": _full,
    "iota": _iota,
    "match_size": _match_size,
    "pad": _pad,
    "reshape": _reshape,
    "roll": _roll,
    "slice": _slice,
    "determinant": _operand(1),
    "solution": _operand(2),
    "stop_gradient": _operand(0),
    "transpose": _transpose,
    "update_slice": _update_slice,
}
