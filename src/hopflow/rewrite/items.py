"""Iterables of loops that operators support: tensors, ranges, and `enumerate`, `zip`,
`reversed` and `map` of them."""

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.entries import blames_user
from hopflow.ops.check import check
from hopflow.ops.elementwise import maximum, minimum, sign
from hopflow.ops.manipulation import flip
from hopflow.rewrite.rows import Rows
from hopflow.symbolic.size import SymInt
from hopflow.tensor.convert import asarray

__all__ = ["Items", "Range", "enumerated", "items_of", "mapped", "range_", "reversed_"]
__all__ += ["exhaust", "zipped"]


class Items:
    """Items over which an operator can iterate.

    length  their number: an int, a symbol, or a tensor of rank 0
    xs      a pytree of tensors T[length, …] with the slices of the items, or None
    counts  whether `pick` needs the index of the step
    """

    length: Any
    xs: Any = None
    counts = True

    def pick(self, k: Any, x: Any, /) -> Any:
        """Return item `k`; `x` is slice `k` of `xs`."""
        raise NotImplementedError

    def at(self, k: Any) -> Any:
        """Return item `k`."""
        return self.pick(k, pytree.tree_map(lambda leaf: leaf[k], self.xs))

    def __iter__(self) -> Iterator[Any]:
        return (self.at(k) for k in builtins.range(operator.index(self.length)))

    def __len__(self) -> int:
        return operator.index(self.length)


class _Iterator(Items):
    """Items with the behaviour of an iterator: Python iterates over them once."""

    iterator: Iterator[Any] | None = None

    def fresh(self) -> Iterator[Any]:
        """Return a new iterator over all items."""
        return super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        if self.iterator is None:
            self.iterator = self.fresh()
        return self.iterator

    def __next__(self) -> Any:
        return next(iter(self))


@final
class _Slices(Items):
    """The slices of tensors along axis 0."""

    counts = False

    def __init__(self, xs: Any, pick: Callable[[Any], Any]) -> None:
        self.xs = xs
        self.length = pytree.flatten(xs)[0][0].shape[0]
        self.of = pick

    def pick(self, _: Any, x: Any, /) -> Any:
        return self.of(x)


@final
class Range(Items):
    """A `range` with symbols or tensors as arguments."""

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.arguments = start, stop, step
        self.start, self.stop, self.step = (
            current().value_of(n) if isinstance(n, SymInt) else n
            for n in (start, stop, step)
        )

    @property
    def length(self) -> Any:
        if all(isinstance(n, int) for n in self.arguments):
            return builtins.len(builtins.range(*self.arguments))
        if isinstance(self.step, int):
            over = self.step - (1 if self.step > 0 else -1)
        else:
            check(self.step != 0, "range: the step must not be zero")
            over = self.step - sign(self.step)
        return maximum((self.stop - self.start + over) // self.step, 0)

    def pick(self, k: Any, _: Any, /) -> Any:
        return self.start + k * self.step

    def __iter__(self) -> Iterator[Any]:
        return iter(builtins.range(*map(operator.index, self.arguments)))


@final
class _Enumerated(_Iterator):
    """`enumerate(of, start)`."""

    def __init__(self, of: Items, start: Any) -> None:
        self.of, self.start = of, start
        self.length, self.xs = of.length, of.xs

    def pick(self, k: Any, x: Any, /) -> Any:
        return self.start + k, self.of.pick(k, x)

    def fresh(self) -> Iterator[Any]:
        return iter(builtins.enumerate(self.of, self.start))


@final
class _Zipped(_Iterator):
    """`zip(*parts)`."""

    def __init__(self, parts: list[Items]) -> None:
        self.parts = parts
        self.counts = any(part.counts for part in parts)
        self.length = _least([part.length for part in parts])
        self.xs = tuple([_first(part.xs, self.length) for part in parts])

    def pick(self, k: Any, x: Any, /) -> Any:
        pairs = builtins.zip(self.parts, x, strict=True)
        return tuple([part.pick(k, inner) for part, inner in pairs])

    def fresh(self) -> Iterator[Any]:
        return iter(builtins.zip(*self.parts, strict=False))


@final
class _Reversed(_Iterator):
    """`reversed(of)`."""

    def __init__(self, of: Items) -> None:
        self.of = of
        self.counts, self.length = of.counts, of.length
        self.xs = pytree.tree_map(lambda leaf: flip(leaf, axis=0), of.xs)

    def pick(self, k: Any, x: Any, /) -> Any:
        return self.of.pick(self.length - 1 - k if self.counts else k, x)


@final
class _Mapped(_Iterator):
    """`map(f, of)`."""

    def __init__(self, f: Callable[..., Any], of: Items) -> None:
        self.f, self.of = f, of
        self.counts, self.length, self.xs = of.counts, of.length, of.xs

    def pick(self, k: Any, x: Any, /) -> Any:
        return self.f(self.of.pick(k, x))


def items_of(value: Any) -> Items | None:
    """Return the items over which an operator can iterate; None: it cannot."""
    if isinstance(value, _Iterator):
        return value if value.iterator is None else None
    if isinstance(value, Items):
        return value
    if isinstance(value, Value) and value.type.shape:
        return _Slices(value, lambda x: x)
    if isinstance(value, Rows) and value.tree is not None:
        return _Slices(value.tree, value.row)
    return None


def exhaust(items: Any) -> None:
    """Exhaust items with the behaviour of an iterator, after an operator used them."""
    if isinstance(items, _Iterator):
        items.iterator = iter(())


def _all_items(values: tuple[Any, ...]) -> list[Items] | None:
    """Return the items of several values; None: one is unsupported, or Python can
    iterate over all of them."""
    items = [items_of(value) for value in values]
    if all(item is None for item in items) or any(
        item is None and not isinstance(value, builtins.range | np.ndarray)
        for item, value in builtins.zip(items, values, strict=True)
    ):
        return None
    return [
        _as_items(value) if item is None else item
        for item, value in builtins.zip(items, values, strict=True)
    ]


def _as_items(value: Any) -> Items:
    """Return the items of a range or an array."""
    if isinstance(value, builtins.range):
        return Range(value.start, value.stop, value.step)
    return _Slices(asarray(value), lambda x: x)


def _least(lengths: list[Any]) -> Any:
    """Return the minimum of lengths: a number, a symbol or a tensor."""
    least, *rest = lengths
    for n in rest:
        if isinstance(least, Value) or isinstance(n, Value):
            least = minimum(*map(_as_value, (least, n)))
        elif n is not least and bool(n < least):
            least = n
    return least


def _as_value(n: Any) -> Any:
    return current().value_of(n) if isinstance(n, SymInt) else n


def _first(xs: Any, length: Any) -> Any:
    """Return the first `length` slices of tensors."""
    if isinstance(length, Value):  # such a loop indexes instead of slicing
        return xs
    return pytree.tree_map(
        lambda leaf: leaf if leaf.shape[0] is length else leaf[:length], xs
    )


# --- builtin functions ----------------------------------------------------------------


@blames_user
def range_(*args: Any) -> Any:
    """`range(...)`."""
    dynamic = any(isinstance(a, Value | SymInt) for a in args)
    if not dynamic or not 1 <= len(args) <= 3:
        return builtins.range(*args)
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if step == 0 and isinstance(step, int):
        raise ValueError("range() arg 3 must not be zero")
    return Range(start, stop, step)


def enumerated(iterable: Any, start: Any = 0) -> Any:
    """`enumerate(iterable, start)`."""
    items = items_of(iterable)
    if items is None:
        return builtins.enumerate(iterable, start)
    return _Enumerated(items, start)


def zipped(*iterables: Any, strict: bool = False) -> Any:
    """`zip(*iterables)`."""
    items = _all_items(iterables)
    if items is None:
        return builtins.zip(*iterables, strict=strict)
    if strict:
        for k, part in builtins.enumerate(items[1:], 2):
            if not bool(part.length == items[0].length):
                raise ValueError(
                    f"zip() argument {k} has another length than the first"
                )
    return _Zipped(items)


def reversed_(sequence: Any) -> Any:
    """`reversed(sequence)`."""
    items = items_of(sequence)
    return builtins.reversed(sequence) if items is None else _Reversed(items)


def mapped(f: Callable[..., Any], *iterables: Any) -> Any:
    """`map(f, *iterables)`."""
    items = _all_items(iterables)
    if items is None:
        return builtins.map(f, *iterables)
    if len(items) == 1:
        return _Mapped(f, items[0])
    return _Mapped(lambda item: f(*item), _Zipped(items))
