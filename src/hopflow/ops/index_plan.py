"""The parser of index expressions `x[key]`, for reading and writing.

`parse_index` converts a key into an entry for each axis and each `None`. It depends on
shapes and types, never on the values of tensors.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand, Value, current
from hopflow.errors import (
    IndexingError,
    TraceError,
)
from hopflow.graph.types import Shape
from hopflow.ops.deferred import resized
from hopflow.ops.elementwise import maximum, minimum
from hopflow.ops.logic import where
from hopflow.ops.opdef import as_operand, strong_constant
from hopflow.ops.rules import is_zero
from hopflow.ops.sizes import is_unbacked, larger, less, smaller, steps
from hopflow.ops.views import show
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymInt


@dataclass(frozen=True, slots=True)
class NewAxis:
    """A new axis of size 1 (`None`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """`size` elements of an axis from `start` in steps of `step` (a slice)."""

    axis: int
    start: Size
    size: Size
    step: int


@dataclass(frozen=True, slots=True)
class At:
    """An element of an axis, which is then dropped; known to be in range."""

    axis: int
    position: Size


@dataclass(frozen=True, slots=True)
class Dynamic:
    """An element of an axis, then dropped, at an integer scalar that the run checks."""

    axis: int
    index: Operand


@dataclass(frozen=True, slots=True)
class Along:
    """The elements of an axis at an array of integers."""

    axis: int
    index: Value


@dataclass(frozen=True, slots=True)
class Mask:
    """The elements of the axes from `axis` at which a bool array is true."""

    axis: int
    mask: Value


Entry: TypeAlias = NewAxis | Span | At | Dynamic | Along | Mask


@dataclass(frozen=True, slots=True)
class Plan:
    """A parsed index expression.

    expanded  the indexed shape: that of the tensor, with an axis of size 1 for each
              bool scalar in the key, which masks that axis
    entries   an entry for each axis of `expanded` (a `Mask` has several), in order, and
              the new axes between them
    place     the position of the index arrays' axes among the other axes of the result:
              that of the arrays if these are adjacent, else 0; None without arrays
    """

    expanded: Shape
    entries: tuple[Entry, ...]
    place: int | None

    @property
    def masks(self) -> list[Mask]:
        return [e for e in self.entries if isinstance(e, Mask)]

    @property
    def arrays(self) -> list[Along]:
        return [e for e in self.entries if isinstance(e, Along)]

    @property
    def dynamic(self) -> list[Dynamic]:
        return [e for e in self.entries if isinstance(e, Dynamic)]


def parse_index(shape: Shape, key: Any) -> Plan:
    """Return the plan of `x[key]` for an `x` of this shape, as in NumPy.

    Args:
        shape: The sizes of `x`.
        key: An int, a slice, None, `...`, an integer or bool tensor, array or list, or
            a tuple of these.

    Raises:
        IndexingError: an index is of another kind, or known to be out of range; there
            are more than axes; or a mask does not have the shape of its axes.
        DataDependentError: only the run knows the size of a slice.
    """
    items = [_item(i) for i in (key if isinstance(key, tuple) else (key,))]
    whole = slice(None)
    used = sum(_consumed(i) for i in items)
    if used > len(shape):
        raise IndexingError(
            f"index: a tensor of shape {show(shape)} has {len(shape)} axes, and the "
            f"index names {used}."
        )
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise IndexingError("index: an index can have one `...`, and has more.")
    missing = [whole] * (len(shape) - used)
    begin = dots[0] if dots else len(items)
    arrays, apart = _arrays(items)
    items[begin : begin + 1] = missing
    expanded: list[Size] = []
    entries: list[Entry] = []
    axis = 0
    for item in items:
        if isinstance(item, Value) and _is_bool(item) and not item.ndim:
            entries.append(Mask(len(expanded), item))
            expanded.append(1)
            continue
        count = _consumed(item)
        sizes = shape[axis : axis + count]
        entries.append(_entry(item, len(expanded), axis, sizes))
        expanded += sizes
        axis += count
    chosen = [not isinstance(e, Span | NewAxis) for e in entries]
    place = (0 if apart else chosen.index(True)) if arrays else None
    return Plan(tuple(expanded), tuple(entries), place)


def _is_bool(x: Operand) -> bool:
    return x.type.dtype is dtypes.bool_


def _item(item: Any) -> Any:
    """Return an item of a key as None, Ellipsis, slice, int, SymInt, or a tensor."""
    if item is None or item is Ellipsis or isinstance(item, slice | SymInt):
        return item
    if isinstance(item, bool | np.bool_ | SymBool):
        return as_operand("index", 0, np.asarray(bool(item)))
    if isinstance(item, list):
        item = _from_list(item)
    if isinstance(item, np.ndarray) and item.ndim == 0 and item.dtype.kind in "iu":
        return int(item)
    if isinstance(item, Value | np.ndarray):
        operand = as_operand("index", 0, item)
        if not (operand.type.dtype.is_integer or _is_bool(operand)):
            raise IndexingError(
                f"index: an array used as an index must be of integers or bools, and "
                f"is {operand.type}. Convert it with `hf.astype`."
            )
        return operand
    try:
        return operator.index(item)
    except TypeError:
        raise IndexingError(
            "index: an index must be an int, a slice, None, `...`, or a tensor of "
            f"integers or bools, and is `{type(item).__name__}`."
        ) from None


def _from_list(item: list[Any]) -> np.ndarray[Any, Any]:
    if any(isinstance(i, Value) for i in item):
        raise IndexingError(
            "index: a list of tensors is no index. Join them with `hf.stack`."
        )
    try:
        array = np.asarray(item)
    except ValueError:
        raise IndexingError("index: a list used as an index is ragged.") from None
    return array.astype(np.int64) if array.size == 0 else array


def _consumed(item: Any) -> int:
    """Return the number of the tensor's axes that an item of a key indexes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Value) and _is_bool(item) else 1


def _arrays(items: Sequence[Any]) -> tuple[bool, bool]:
    """Return whether a key has index arrays, and whether a slice, None or `...`
    separates two of them, where ints count as arrays."""
    kept = [i is None or i is Ellipsis or isinstance(i, slice) for i in items]
    arrays = any(isinstance(i, Value) and (i.ndim > 0 or _is_bool(i)) for i in items)
    if not arrays:
        return False, False
    first, last = kept.index(False), len(kept) - kept[::-1].index(False)
    return True, any(kept[first:last])


def _entry(item: Any, place: int, axis: int, sizes: Shape) -> Entry:
    """Return the entry of an item of a key. `axis` is the tensor's, for messages."""
    if item is None:
        return NewAxis()
    if isinstance(item, slice):
        return _span(item, place, sizes[0])
    if isinstance(item, Value):
        if _is_bool(item):
            return _mask(item, place, axis, sizes)
        return Along(place, item) if item.ndim else Dynamic(place, item)
    return _element(item, place, axis, sizes[0])


def _mask(item: Value, place: int, axis: int, sizes: Shape) -> Mask:
    for offset, n in enumerate(sizes):
        if is_unbacked(n) or is_unbacked(item.shape[offset]):
            item = resized("index", item, offset, n)
        m = item.shape[offset]
        if not n == m:
            raise IndexingError(
                f"index: a mask of shape {show(item.shape)} does not fit axis "
                f"{axis + offset}, which has size {n} and not {m}."
            )
    return Mask(place, item)


def _element(item: Size, place: int, axis: int, n: Size) -> At | Dynamic:
    negative = less(item, 0)
    position = item + n if negative else item
    if negative is not None:
        inside = (less(position, n), less(position, 0))
        if inside == (True, False):
            return At(place, position)
        if inside[0] is False or inside[1] is True:
            raise IndexingError(
                f"index: {item} is out of range for axis {axis} of size {n}."
            )
    return Dynamic(place, strong_constant(as_operand("index", 0, item)))


# --- slices ---------------------------------------------------------------------------


def _bound(value: Any, default: Size, lowest: int, highest: Size, n: Size) -> Size:
    """Return a bound of a slice, counted from the front, in `lowest` .. `highest`."""
    if value is None:
        return default
    bound = _as_bound(value)
    if isinstance(bound, SymInt) and bound.hint is None and less(bound, 0) is None:
        counted = where(bound < 0, bound + n, bound)  # only the run knows the sign
        clamped = minimum(maximum(counted, lowest), highest)
        return current().symbol_of(clamped, lowest, highest)
    return larger(lowest, bound + n) if bound < 0 else smaller(highest, bound)


def _as_bound(value: Any) -> Size:
    if isinstance(value, SymInt):
        return value
    try:
        if isinstance(value, Value) and not value.shape and value.type.dtype.is_integer:
            return current().symbol_of(value)
        return operator.index(value)
    except TraceError as error:
        raise TraceError(
            "index: a bound of a slice decides a size, so it must not be a traced "
            "tensor. For a window of fixed size use `hf.dynamic_slice`."
        ) from error
    except TypeError:
        raise IndexingError(
            "index: the bounds of a slice must be integers or None, and one is "
            f"`{type(value).__name__}`."
        ) from None


def _span(item: slice, place: int, n: Size) -> Span:
    step = 1 if item.step is None else operator.index(_as_bound(item.step))
    if step == 0:
        raise IndexingError("index: the step of a slice must not be 0.")
    lowest, highest = (0, n) if step > 0 else (-1, n - 1)
    first, last = (lowest, highest) if step > 0 else (highest, lowest)
    start = _bound(item.start, first, lowest, highest, n)
    stop = _bound(item.stop, last, lowest, highest, n)
    size = steps(stop - start, step)
    return Span(place, start if not is_zero(size) else 0, size, step)
