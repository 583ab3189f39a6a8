"""Operations that read and write at integer tensors: gather, scatter, windows."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any, Final

from hopflow import dtypes
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.pointwise import positions
from hopflow.export.onnx.scopes import Value
from hopflow.export.onnx.sizes import Number, vector
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType, is_zero, same_size
from hopflow.ops.gather import Layout
from hopflow.symbolic.size import Size

_OUT_OF_RANGE: Final = "an index is out of range"

# --- positions ------------------------------------------------------------------------


def _as_position(site: Site, index: Value) -> Value:
    """An index as i64; one of uint64 beyond that is the largest."""
    if index.dtype is dtypes.uint64:
        most = site.constant(2**63 - 1, dtypes.uint64)
        index = site("Min", index, most)
    return site.scope.cast(index, dtypes.int64)


def _wrapped(site: Site, index: Value, size: Value) -> Value:
    """A position; a negative index counts from the end."""
    at = _as_position(site, index)
    if index.dtype.kind == "u":
        return at
    is_negative = site("Less", at, site.constant(0))
    return site("Where", is_negative, site("Add", at, size), at)


def _clamped(site: Site, at: Value, size: Value) -> Value:
    """A position moved into range."""
    last = site("Sub", size, site.constant(1))
    return site("Max", site("Min", at, last), site.constant(0))


def _in_range(site: Site, at: Value, size: Value) -> Value:
    is_above = site("Less", at, site.constant(0))
    return site("And", site("Less", at, size), site("Not", is_above))


def _normal(
    site: Site, indices: Sequence[Value], layout: Layout, *, checked: bool, first: int
) -> list[Value]:
    """Indices as positions in range: those of gather and scatter that are `checked`
    tell whether they were, and negative ones count from the end.

    Args:
        first: The position of the first index among the node's operands.
    """
    found: list[Value] = []
    for k, (index, n) in enumerate(zip(indices, layout.sizes, strict=True)):
        arg, size = site.node.args[first + k], site.size(n)
        if isinstance(arg, Constant) and isinstance(size.value, int):
            at = int(arg.value) + (size.value if arg.value < 0 and checked else 0)
            if 0 <= at < size.value:
                found.append(site.constant(at))
                continue
        extent = size.tensor()
        if checked:
            at_ = _wrapped(site, index, extent)
            type_ = _selecting(site.types[first + k], layout)
            _check_range(site, at_, extent, type_)
        else:
            at_ = _as_position(site, index)
        found.append(_clamped(site, at_, extent))
    return found


def _selecting(index: TensorType, layout: Layout) -> TensorType:
    """The type of the test of an index, which holds if nothing is selected at all."""
    if all(isinstance(n, int) and n > 0 for n in layout.space):
        return index
    return TensorType(index.dtype, layout.space)


def _check_range(site: Site, at: Value, size: Value, type_: TensorType) -> None:
    if site.writer.asserts == "outputs":
        holds = site.expanded(_in_range(site, at, size), type_.shape)
        site.check(holds, _OUT_OF_RANGE, type_)
    else:
        site.check(at, _OUT_OF_RANGE)


# --- reading --------------------------------------------------------------------------


def _gather(checked: bool) -> Callable[..., Value]:
    def rule(
        site: Site, x: Value, *indices: Value, axes: tuple[int, ...], batch: int
    ) -> Value:
        name, types = site.node.op.name, site.types
        layout = Layout(name, types[0], types[1:], axes, batch)
        at = _normal(site, indices, layout, checked=checked, first=1)
        if any(map(is_zero, layout.selected)):
            empty = site.constant(0, x.dtype)
            return site.expanded(empty, layout.selected)
        if len(axes) == 1 and not batch:
            found = site("Gather", x, at[0], axis=axes[0])
            return _selection_first(site, found, axes[0], types[1].ndim)
        moved = site("Transpose", x, perm=list(layout.rest_last))
        shape = site.shape(layout.space)
        columns = [
            site.scope.unsqueezed(site("Expand", i, shape), len(layout.space))
            for i in at
        ]
        if not columns:
            return site("Identity", moved)
        index = site("Concat", *columns, axis=len(layout.space))
        return site("GatherND", moved, index, batch_dims=batch)

    return rule


def _selection_first(site: Site, x: Value, place: int, count: int) -> Value:
    """The axes of the index, which ONNX leaves in the place of the axis, in front."""
    if not place:
        return x
    ndim = site.results[0].ndim
    window = range(place, place + count)
    order = [*window, *(a for a in range(ndim) if a not in window)]
    return site("Transpose", x, perm=order) if order != sorted(order) else x


def _dynamic_index(
    site: Site, x: Value, *indices: Value, axes: tuple[int, ...]
) -> Value:
    layout = Layout(site.node.op.name, site.types[0], site.types[1:], axes, 0)
    at = _normal(site, indices, layout, checked=True, first=1)
    if any(map(is_zero, layout.selected)):
        return site.expanded(site.constant(0, x.dtype), layout.selected)
    for axis, index in sorted(zip(axes, at, strict=True), reverse=True):
        x = site("Gather", x, index, axis=axis)
    return x


def _window_starts(
    site: Site, starts: Sequence[Value], sizes: Shape, shape: Shape
) -> list[Number]:
    """Where a window begins that is moved so that it lies within the tensor."""
    found = []
    for start, size, n in zip(starts, sizes, shape, strict=True):
        if same_size(size, n):
            found.append(Number(site.scope, 0))
            continue
        last = site.size(n - size).tensor()
        low = site(
            "Max", _wrapped(site, start, site.size(n).tensor()), site.constant(0)
        )
        found.append(Number(site.scope, site("Min", low, last)))
    return found


def _dynamic_slice(site: Site, x: Value, *starts: Value, sizes: Shape) -> Value:
    if not sizes:
        return x
    first = _window_starts(site, starts, sizes, site.types[0].shape)
    ends = [a + site.size(n) for a, n in zip(first, sizes, strict=True)]
    return site("Slice", x, vector(site.scope, first), vector(site.scope, ends))


# --- writing --------------------------------------------------------------------------


def windows(
    site: Site, sizes: Shape, starts: Sequence[Size | Number], steps: Sequence[int]
) -> list[Value]:
    """The position along each axis of the elements of a window, each a tensor that
    broadcasts to `sizes`."""
    found = []
    for axis, (n, start, step) in enumerate(zip(sizes, starts, steps, strict=True)):
        at = Number(site.scope, positions(site, site.size(n)))
        first = start if isinstance(start, Number) else site.size(start)
        along = (at * Number(site.scope, step) + first).tensor()
        found.append(site.scope.unsqueezed(along, *range(1, len(sizes) - axis)))
    return found


def _flat_positions(site: Site, at: Sequence[Value]) -> Number:
    """Positions in the first operand as a flat tensor."""
    shape = site.types[0].shape
    parts = [
        Number(site.scope, v) * site.size(prod(shape[axis + 1 :], start=1))
        for axis, v in enumerate(at)
    ]
    return reduce(lambda x, y: x + y, parts, Number(site.scope, 0))


def written(
    site: Site,
    x: Value,
    new: Value,
    at: Sequence[Value],
    combine: str,
    *,
    keep: Value | None = None,
    repeats: bool = False,
) -> Value:
    """`x`, the first operand, with `new`, the second one, combined into it.

    Args:
        at: For each axis of `x` the positions, which broadcast to the shape of `new`.
        keep: Whether an element is written at all; it broadcasts, too.
        repeats: Whether positions may be equal.
    """
    base, update = site.types[:2]
    if any(map(is_zero, (*base.shape, *update.shape))):
        return x
    place = _flat_positions(site, at)
    flat, total = site.scope.flat(x), site.size(base.size)
    if keep is not None:  # what is not kept is written behind the last element
        flat = site("Concat", flat, site.constant([0], x.dtype), axis=0)
        place = Number(site.scope, site("Where", keep, place.tensor(), total.tensor()))
    spread = site("Expand", place.tensor(), site.shape(update.shape))
    where, values = site.scope.flat(spread), site.scope.flat(new)
    if combine == "set":
        write = _last_written if repeats else _set
        found = write(site, flat, where, values)
    else:
        found = _combined(site, flat, where, values, combine)
    if keep is not None:
        end = site("Reshape", total.tensor(), site.scope.integers((1,)))
        found = site("Slice", found, site.scope.integers((0,)), end)
    return site.reshaped(found, base.shape)


def _set(site: Site, flat: Value, where: Value, values: Value) -> Value:
    return site("ScatterElements", flat, where, values, axis=0)


def _last_written(site: Site, flat: Value, where: Value, values: Value) -> Value:
    """Elements set to the last value written to each; ONNX leaves open which wins."""
    [name] = site.scope.node("Shape", [values.name], {})
    count = site.scope.scalar(Value(name, dtypes.int64))
    order = positions(site, Number(site.scope, count))
    [name] = site.scope.node("Shape", [flat.name], {})
    never = site("Expand", site.constant(-1), Value(name, dtypes.int64))
    winner = site("ScatterElements", never, where, order, axis=0, reduction="max")
    is_written = site("Less", never, winner)
    chosen = site("Max", winner, site.constant(0))
    return site("Where", is_written, site("Gather", values, chosen, axis=0), flat)


_OF_BOOL: Final = {"add": "max", "mul": "min", "min": "min", "max": "max"}


def _combined(
    site: Site, flat: Value, where: Value, values: Value, combine: str
) -> Value:
    dtype, scope = flat.dtype, site.scope
    if dtype is dtypes.bool_:
        wide, combine = dtypes.uint8, _OF_BOOL[combine]
    else:
        wide = dtypes.float32 if dtype.is_float and dtype.bits == 16 else dtype

    def scattered(base: Value, new: Value, how: str) -> Value:
        return site("ScatterElements", base, where, new, axis=0, reduction=how)

    found = scattered(scope.cast(flat, wide), scope.cast(values, wide), combine)
    if wide.is_float and combine in ("min", "max"):
        old, new = (scope.cast(site("IsNaN", v), dtypes.uint8) for v in (flat, values))
        nans = scope.cast(scattered(old, new, "max"), dtypes.bool_)
        found = site("Where", nans, site.constant(float("nan"), wide), found)
    return scope.cast(found, dtype)


def _scatter(checked: bool) -> Callable[..., Value]:
    def rule(
        site: Site,
        x: Value,
        new: Value,
        *indices: Value,
        axes: tuple[int, ...],
        batch: int,
        starts: Shape,
        steps: tuple[int, ...],
        combine: str,
    ) -> Value:
        types = site.types
        layout = Layout(site.node.op.name, types[0], types[2:], axes, batch)
        count, ndim = len(layout.space), types[1].ndim
        keep = None if checked else _kept(site, indices, layout)
        found = _normal(site, indices, layout, checked=checked, first=2)
        at: dict[int, Value] = {}
        after = range(count, ndim)
        for axis, index, type_ in zip(layout.axes, found, types[2:], strict=True):
            at[axis] = _with_axes(site, index, type_, len(after))
        grid = windows(
            site, types[1].shape, (0,) * count + starts, (1,) * count + steps
        )
        at |= {axis: grid[axis] for axis in range(batch)}
        at |= dict(zip(layout.rest, grid[count:], strict=True))
        if keep is not None:
            keep = site.scope.unsqueezed(keep, *range(-len(after), 0))
        places = [at[axis] for axis in range(types[0].ndim)]
        repeats = bool(indices) and bool(count)
        return written(site, x, new, places, combine, keep=keep, repeats=repeats)

    return rule


def _with_axes(site: Site, x: Value, type_: TensorType, after: int) -> Value:
    """An index with so many more axes behind those over which it broadcasts."""
    return site.scope.unsqueezed(x, *range(-after, 0)) if type_.shape else x


def _kept(site: Site, indices: Sequence[Value], layout: Layout) -> Value | None:
    """Which updates are in range: those of negative indices are not, either."""
    tests = [
        _in_range(site, _as_position(site, i), site.size(n).tensor())
        for i, n in zip(indices, layout.sizes, strict=True)
    ]
    if not tests:
        return None
    holds = reduce(lambda x, y: site("And", x, y), tests)
    return site.expanded(holds, layout.space)


def _dynamic_update_slice(site: Site, x: Value, new: Value, *starts: Value) -> Value:
    sizes = site.types[1].shape
    first = _window_starts(site, starts, sizes, site.types[0].shape)
    at = windows(site, sizes, first, (1,) * len(sizes))
    return written(site, x, new, at, "set")


RULES: Final[dict[str, Callable[..., Any]]] = {
    "dynamic_index": _dynamic_index,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather(checked=True),
    "gather_clip": _gather(checked=False),
    "scatter": _scatter(checked=True),
    "scatter_drop": _scatter(checked=False),
}
