"""Indexing: `x[key]`, `x[key] = value`, `x.at[key]`, take and take_along_axis.

Each is composed of views (slice, reshape, dynamic_index), gather and scatter,
following the plan that `index_plan` makes of the key.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from hopflow.bind import Operand, Value, current, recordable
from hopflow.errors import (
    IndexingError,
    ShapeCheckError,
    ShapeError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape
from hopflow.ops.convert import apply
from hopflow.ops.creation import fill
from hopflow.ops.deferred import aligned
from hopflow.ops.dynamic import dynamic_index
from hopflow.ops.elementwise import add, maximum, minimum, multiply
from hopflow.ops.gather import gather, gather_clip
from hopflow.ops.index_plan import (
    Along,
    At,
    Dynamic,
    Mask,
    NewAxis,
    Plan,
    Span,
    parse_index,
)
from hopflow.ops.logic import select
from hopflow.ops.masks import where_true
from hopflow.ops.rules import broadcast_shapes, is_one, normalize_axis, one_of
from hopflow.ops.scatter import Combine, scatter, scatter_drop
from hopflow.ops.views import (
    as_tensor,
    broadcasted,
    moved,
    reshaped,
    show,
    sliced,
    stored,
    transposed,
    update_slice,
)
from hopflow.symbolic.size import Size

# --- the parts of a plan --------------------------------------------------------------


def _without_masks(plan: Plan, remedy: str) -> Plan:
    """Return the plan with each mask replaced by an index array for each axis."""
    entries: list[Any] = []
    for entry in plan.entries:
        if not isinstance(entry, Mask):
            entries.append(entry)
            continue
        arrays = where_true("boolean index", entry.mask, remedy)
        for offset, index in enumerate(arrays):
            entries.append(Along(entry.axis + offset, index))
    return _aligned(replace(plan, entries=tuple(entries)))


def _aligned(plan: Plan) -> Plan:
    """Return the plan with index arrays that broadcast, as the run checks."""
    places = [i for i, e in enumerate(plan.entries) if isinstance(e, Dynamic | Along)]
    entries: list[Any] = list(plan.entries)
    indices = aligned("index", [entries[i].index for i in places]) if places else []
    for i, index in zip(places, indices, strict=True):
        entries[i] = replace(entries[i], index=index)
    return replace(plan, entries=tuple(entries))


def _kept(plan: Plan) -> list[Size]:
    """Return the sizes of the result's axes that index arrays do not make."""
    return [
        e.size if isinstance(e, Span) else 1
        for e in plan.entries
        if isinstance(e, Span | NewAxis)
    ]


def _windows(plan: Plan) -> list[tuple[Size, Size, int]]:
    """Return (start, size, step) of each axis that no tensor indexes."""
    windows: list[tuple[Size, Size, int]] = []
    for e in plan.entries:
        if isinstance(e, Span):
            windows.append((e.start, e.size, e.step))
        elif isinstance(e, At):
            windows.append((e.position, 1, 1))
    return windows


def _indices(plan: Plan) -> tuple[list[Operand], tuple[int, ...], Shape]:
    """Return the index tensors, their axes, and the shape that they broadcast to."""
    chosen = [e for e in plan.entries if isinstance(e, Dynamic | Along)]
    shape = broadcast_shapes("index", *(e.index.type.shape for e in chosen))
    return [e.index for e in chosen], tuple(e.axis for e in chosen), shape


def _result_shape(plan: Plan) -> tuple[Shape, int, int]:
    """Return the shape of what a plan without masks selects, and the position and
    number of its axes that index arrays make."""
    kept, place = _kept(plan), plan.place or 0
    shape = _indices(plan)[2]
    return (*kept[:place], *shape, *kept[place:]), place, len(shape)


def _to_front(ndim: int, place: int, count: int) -> list[int]:
    """Return the order of axes that moves `count` of them from `place` to the front."""
    block = range(place, place + count)
    return [*block, *(a for a in range(ndim) if a not in block)]


# --- reading --------------------------------------------------------------------------

_READ_REMEDY: Final = (
    "Keep the shape instead: `hf.where(mask, x, fill)`, and to reduce, for example, "
    "`hf.sum(hf.where(mask, x, 0))`."
)


def getitem(x: Any, key: Any) -> Value:
    """Return `x[key]`, as in NumPy.

    It is a view if `key` has only ints, integer scalars, slices, `None` and `...`. An
    integer for every axis, without `...`, selects an element: a copy, as NumPy's
    scalars.

    Raises:
        IndexingError: an index is of a wrong kind or out of range, or there are too
            many.
        TraceError: `key` has a traced mask where sizes cannot become symbols.
        DataDependentError: only the run knows the size of a slice.
    """
    x = as_tensor("getitem", x)
    plan = parse_index(x.shape, key)
    chosen = _without_masks(plan, _READ_REMEDY) if plan.masks else _aligned(plan)
    selection = _read(x, chosen)
    return current().detached(selection) if _is_element(key, plan) else selection


def _is_element(key: Any, plan: Plan) -> bool:
    """Return True if an index has an integer for every axis, and nothing else."""
    items = key if isinstance(key, tuple) else (key,)
    integers = all(isinstance(e, At | Dynamic) for e in plan.entries)
    return integers and not any(item is Ellipsis for item in items)


def _read(x: Any, plan: Plan) -> Value:
    """Return what a plan without masks selects from `x`."""
    x = reshaped(x, plan.expanded)
    scalars = [e for e in plan.entries if isinstance(e, Dynamic)]
    if scalars:
        axes = tuple(e.axis for e in scalars)
        x = apply(dynamic_index, x, *(e.index for e in scalars), axes=axes)
    # The entry of each remaining axis.
    remaining = [e for e in plan.entries if not isinstance(e, Dynamic | NewAxis)]
    x = _sliced(x, remaining)
    arrays = [(a, e.index) for a, e in enumerate(remaining) if isinstance(e, Along)]
    if arrays:
        axes = tuple(a for a, _ in arrays)
        x = apply(gather, x, *(i for _, i in arrays), axes=axes, batch=0)
    _, place, count = _result_shape(plan)
    x = reshaped(x, (*x.shape[:count], *_kept(plan)))
    order = _to_front(x.ndim, place, count)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return transposed(x, back)  # type: ignore[no-any-return]


def _sliced(x: Any, entries: Sequence[Any]) -> Any:
    windows = [
        (e.start, e.size, e.step)
        if isinstance(e, Span)
        else (e.position, 1, 1)
        if isinstance(e, At)
        else (0, n, 1)
        for n, e in zip(x.shape, entries, strict=True)
    ]
    starts, sizes, steps = zip(*windows, strict=True) if windows else ((), (), ())
    return sliced(x, starts, sizes, steps)


# --- writing --------------------------------------------------------------------------

_WRITE_REMEDY: Final = (
    "Only a value of one element for each place that the mask leaves open can be "
    "written then: a scalar, or `hf.where(mask, values, x)` with values for all places."
)
_COMBINES: Final[dict[str, Any]] = {
    "add": add,
    "mul": multiply,
    "min": minimum,
    "max": maximum,
}


def set_at(x: Any, key: Any, value: Any) -> Value:
    """Return `x` with `value` at `key`, as a new tensor: `x[key] = value` in NumPy.

    If an index is repeated, the last value is written.

    Args:
        x: A tensor T[*s].
        key: As for `x[key]`.
        value: A tensor or number that broadcasts to `x[key]`, of a dtype whose kind is
            not above that of `x`.

    Raises:
        IndexingError: as for `x[key]`.
        ShapeError: `value` does not broadcast to `x[key]`.
        DTypeError: `x` cannot hold `value`.
        TraceError: `key` has a traced mask, and the shape of `value` depends on it.
    """
    return update_at(x, key, value, "set")


@recordable
def update_at(x: Any, key: Any, value: Any, combine: Combine) -> Value:
    """Return a new tensor: `x` with `value` combined into it at `key`; see `set_at`."""
    x = as_tensor("setitem", x)
    value = stored("setitem", value, x.type.dtype)
    plan = parse_index(x.shape, key)
    if plan.masks:
        spread = _spread(plan, value)
        if spread is not None:
            return _write_mask(x, plan, spread, combine)
        return _write(x, _without_masks(plan, _WRITE_REMEDY), value, combine)
    return _write(x, _aligned(plan), value, combine)


def _write(x: Any, plan: Plan, value: Any, combine: Combine) -> Value:
    """Return `x` with `value` combined into what a plan without masks selects."""
    indices, axes, shape = _indices(plan)
    result, place, count = _result_shape(plan)
    windows = _windows(plan)
    starts, sizes, steps = zip(*windows, strict=True) if windows else ((), (), ())
    if isinstance(value, Constant):
        value = apply(fill, value, shape=(*shape, *sizes))
    else:
        value = _fitted(value, result)
        value = transposed(value, _to_front(len(result), place, count))
        value = reshaped(value, (*shape, *sizes))
    base = reshaped(x, plan.expanded)
    spans = any(isinstance(e, Span) for e in plan.entries)
    if indices:
        new = apply(
            scatter,
            base,
            value,
            *indices,
            axes=axes,
            batch=0,
            starts=starts,
            steps=steps,
            combine=combine,
        )
    elif combine == "set" or (spans and x.type.dtype.kind != "b"):
        if combine != "set":  # a window has no element twice
            old = sliced(base, starts, sizes, steps)
            value = apply(_COMBINES[combine], old, value)
        new = apply(update_slice, base, value, starts=starts, steps=steps)
    else:
        window = {"starts": starts, "steps": steps, "combine": combine}
        new = apply(scatter_drop, base, value, axes=(), batch=0, **window)
    return reshaped(new, x.shape)  # type: ignore[no-any-return]


def _fitted(value: Any, shape: Shape) -> Any:
    """Return `value` broadcast to `shape`, without excess leading axes of size 1."""
    while value.ndim > len(shape) and is_one(value.shape[0]):
        value = reshaped(value, value.shape[1:])
    try:
        return broadcasted(value, shape, "setitem")
    except ShapeCheckError:
        raise
    except ShapeError:
        raise ShapeError(
            f"setitem: a value of shape {show(value.shape)} does not fit the place of "
            f"shape {show(shape)} that it is written to."
        ) from None


def _spread(plan: Plan, value: Any) -> Any | None:
    """Return `value` with an axis of size 1, for each axis of the plan's only mask, in
    place of the axis of masked elements. It broadcasts over the unmasked selection.

    Return None if the shape of `value` depends on the number of masked elements.
    """
    if len(plan.masks) != 1 or any(isinstance(e, Along) for e in plan.entries):
        return None
    if isinstance(value, Constant):
        return value
    [mask] = plan.masks
    kept = _kept(plan)
    place = plan.place or 0
    missing = len(kept) + 1 - value.ndim
    if missing < 0:
        return None
    sizes = [1] * missing + list(value.shape)
    if not is_one(sizes.pop(place)):
        return None
    before = plan.entries[: plan.entries.index(mask)]
    at = sum(isinstance(e, Span | NewAxis) for e in before)
    ones = [1] * max(mask.mask.ndim, 1)
    return reshaped(value, (*sizes[:at], *ones, *sizes[at:]))


def _write_mask(x: Any, plan: Plan, value: Any, combine: Combine) -> Value:
    """Return `x` with `value`, which broadcasts over the unmasked selection, combined
    into the elements where the plan's only mask is true."""
    entries: list[Any] = []
    sizes: list[Size] = []  # the mask's shape, to broadcast over the selection
    for entry in plan.entries:
        if isinstance(entry, Mask):
            over = range(entry.axis, entry.axis + max(entry.mask.ndim, 1))
            entries += [Span(a, 0, plan.expanded[a], 1) for a in over]
            sizes += [plan.expanded[a] for a in over]
        else:
            entries.append(entry)
            sizes += [1] if isinstance(entry, Span | NewAxis) else []
    [mask] = plan.masks
    whole = Plan(plan.expanded, tuple(entries), None)
    old: Any = _read(x, whole)
    new = value if isinstance(value, Constant) else _fitted(value, old.shape)
    if combine != "set":
        new = apply(_COMBINES[combine], old, new)
    chosen = apply(select, reshaped(mask.mask, tuple(sizes)), new, old)
    if old is x:  # the plan selects all of it
        return chosen
    return _write(x, whole, chosen, "set")


class Updater:
    """The result of `x.at[key]`, whose methods return updated copies of `x`.

    With `add`, `mul`, `min` and `max` repeated indices accumulate.

    >>> hf.zeros(3).at[1].set(2.0)
    Tensor([0., 2., 0.], f32[3])
    """

    __slots__ = ("_key", "_tensor")

    def __init__(self, tensor: Any, key: Any = ...) -> None:
        self._tensor, self._key = tensor, key

    def __getitem__(self, key: Any) -> "Updater":
        return Updater(self._tensor, key)

    def get(self) -> Value:
        """Return `x[key]`."""
        return getitem(self._tensor, self._key)

    def set(self, value: Any) -> Value:
        """Return `x` with `value` at `key`; see `set_at`."""
        return update_at(self._tensor, self._key, value, "set")

    def add(self, value: Any) -> Value:
        """Return `x` with `value` added at `key`."""
        return update_at(self._tensor, self._key, value, "add")

    def mul(self, value: Any) -> Value:
        """Return `x` multiplied by `value` at `key`."""
        return update_at(self._tensor, self._key, value, "mul")

    def min(self, value: Any) -> Value:
        """Return `x` with the minimum of it and `value` at `key`."""
        return update_at(self._tensor, self._key, value, "min")

    def max(self, value: Any) -> Value:
        """Return `x` with the maximum of it and `value` at `key`."""
        return update_at(self._tensor, self._key, value, "max")


# --- take -----------------------------------------------------------------------------


def _gather_of(name: str, mode: str) -> Any:
    word = one_of(name, "mode", mode, ("check", "clip"))
    return gather if word == "check" else gather_clip


def _integers(name: str, indices: Any) -> Any:
    if isinstance(indices, list):
        try:
            indices = np.asarray(indices, np.int64 if not indices else None)
        except ValueError:
            raise ShapeError(
                f"{name}: sequences at one level of `indices` must have equal lengths."
            ) from None
        except TypeError:
            raise IndexingError(
                f"{name}: `indices` must be a tensor, or a list of integers. Join "
                "tensors with `hf.stack`."
            ) from None
    indices = as_tensor(name, indices, 1)
    if not indices.type.dtype.is_integer:
        raise IndexingError(
            f"{name}: `indices` must be integers, and is {indices.type}. Convert them "
            "with `hf.astype`."
        )
    return indices


def take(
    x: Any,
    indices: Any,
    /,
    *,
    axis: int | None = None,
    mode: Literal["check", "clip"] = "check",
) -> Value:
    """Return the elements of `x` at `indices` along an axis.

    Args:
        x: T[*s, n, *t], where n is the size of `axis`.
        indices: Integers i[*w].
        axis: The axis; None: the elements of the flattened tensor.
        mode: How to treat an index out of range: "check" stops with an error, and
            negative ones count from the end; "clip" takes the nearest element.

    Returns:
        T[*s, *w, *t].

    Raises:
        AxisError: `x` has no such axis.
        IndexingError: `indices` are no integers, or one is out of range.

    >>> hf.take(hf.asarray([10, 20, 30]), hf.asarray([2, 0]))
    Tensor([30, 10], i64[2])
    """
    x, indices = as_tensor("take", x), _integers("take", indices)
    if axis is None:
        x, axis = reshaped(x, (x.type.size,)), 0
    axis = normalize_axis("take", axis, x.ndim)
    selection = apply(_gather_of("take", mode), x, indices, axes=(axis,), batch=0)
    order = _to_front(selection.ndim, axis, indices.ndim)
    return transposed(selection, sorted(range(selection.ndim), key=order.__getitem__))  # type: ignore[no-any-return]


def take_along_axis(
    x: Any,
    indices: Any,
    /,
    *,
    axis: int = -1,
    mode: Literal["check", "clip"] = "check",
) -> Value:
    """Return `x[..., indices[..., i, ...], ...]` at each position i along `axis`.

    `indices` may be the result of `argsort` and similar functions.

    Args:
        x: T[*s], with a size n at `axis`.
        indices: Integers with as many axes as `x`; sizes other than that of `axis` are
            broadcast.
        axis: The axis.
        mode: As for `take`.

    Raises:
        AxisError: `x` has no such axis.
        IndexingError: `indices` are no integers, or one is out of range.
        ShapeError: the shapes do not fit.
    """
    name = "take_along_axis"
    x, indices = as_tensor(name, x), _integers(name, indices)
    axis = normalize_axis(name, axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ShapeError(
            f"{name}: `indices` must have the {x.ndim} axes of {x.type}, and is "
            f"{indices.type}."
        )
    last = x.ndim - 1
    x, indices = moved(x, axis, last), moved(indices, axis, last)
    x, indices = aligned(name, (x, indices), core=1)
    batch = broadcast_shapes(name, x.shape[:-1], indices.shape[:-1])
    x = broadcasted(x, (*batch, x.shape[-1]))
    indices = broadcasted(indices, (*batch, indices.shape[-1]))
    selection = apply(_gather_of(name, mode), x, indices, axes=(last,), batch=last)
    return moved(selection, last, axis)  # type: ignore[no-any-return]
