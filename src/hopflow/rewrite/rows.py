"""Lists that loops have made: one tensor, and a list of its rows where one is asked."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.errors import ControlFlowError
from hopflow.ops.joining import concat, stack
from hopflow.ops.manipulation import reshape
from hopflow.ops.opdef import convert_to
from hopflow.tensor.convert import asarray
from hopflow.trace.source import user_line


class Rows(list[Any]):
    """The list of the rows of tensors.

    It is a list, which is filled when anything else is done with it than to stack it,
    to take a row, or to loop over it.

    tree   a pytree of T[n, …], None once it differs from the list
    weak   for each leaf of it whether a row is a number of no fixed type
    line   of the user's loop
    """

    def __init__(self, tree: Any, weak: Iterable[bool]) -> None:
        super().__init__()
        self.tree = tree
        self.weak = tuple(weak)
        self.is_filled = False
        self.line = user_line()

    @property
    def length(self) -> Any:
        """How many there are, which may be a symbol."""
        if self.tree is None:
            return super().__len__()
        return pytree.flatten(self.tree)[0][0].shape[0]

    def row(self, tree: Any, k: Any = None) -> Any:
        """Row `k` of a tree, or a row itself, with the types that were appended."""
        leaves, spec = pytree.flatten(tree)
        found = [leaf if k is None else leaf[k] for leaf in leaves]
        typed = [
            convert_to(leaf, leaf.type.dtype, weak=True) if weak else leaf
            for leaf, weak in zip(found, self.weak, strict=True)
        ]
        return pytree.unflatten(spec, typed)

    def filled(self) -> "Rows":
        """Itself, with its rows in it.

        Raises:
            ControlFlowError: only a run knows how many there are.
        """
        if not self.is_filled and self.tree is not None:
            n = self.length
            if not isinstance(n, int):
                raise ControlFlowError(
                    f"control_flow: a list that operators append to ({self.line}) has "
                    f"{n} items, which only a run knows, and is returned or used. "
                    "Stack it with `hf.stack`, take items by index, or loop over it."
                )
            super().extend(self.row(self.tree, k) for k in range(n))
        self.is_filled = True
        return self

    def after(self, before: list[Any]) -> list[Any]:
        """The list of other items and these."""
        if isinstance(before, Rows) and before.tree is not None:
            return before.joined(self)
        if not before:
            return self
        rows = [pytree.flatten(item) for item in before]
        leaves, spec = pytree.flatten(self.tree)
        same = all(
            other == spec and all(map(_fits, items, leaves)) for items, other in rows
        )
        if not same:
            return [*before, *self]
        columns = list(zip(*(items for items, _ in rows), strict=True))
        both = [
            concat([stack([_typed(item, leaf) for item in column]), leaf])
            for column, leaf in zip(columns, leaves, strict=True)
        ]
        weak = [
            own and all(map(is_weak, column))
            for own, column in zip(self.weak, columns, strict=True)
        ]
        return Rows(pytree.unflatten(spec, both), weak)

    def joined(self, other: "Rows") -> list[Any]:
        """The list of its items and those of another one."""
        (leaves, spec), (more, other_spec) = map(
            pytree.flatten, (self.tree, other.tree)
        )
        if spec != other_spec or not all(map(_stack_together, leaves, more)):
            return [*self, *other]
        both = [concat(pair) for pair in zip(leaves, more, strict=True)]
        weak = [a and b for a, b in zip(self.weak, other.weak, strict=True)]
        return Rows(pytree.unflatten(spec, both), weak)

    def append(self, item: Any) -> None:
        if self.tree is None or isinstance(self.length, int):
            self.filled()
            self.tree = None
            super().append(item)
            return
        leaves, spec = pytree.flatten(item)
        rows = [reshape(asarray(leaf), (1, *np.shape(leaf))) for leaf in leaves]
        row = Rows(pytree.unflatten(spec, rows), map(is_weak, leaves))
        found = self.joined(row)
        if isinstance(found, Rows):
            self.tree, self.weak = found.tree, found.weak

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.append(item)

    # --- as a list --------------------------------------------------------------------

    def __len__(self) -> int:
        n = self.length
        return n if isinstance(n, int) else len(self.filled())

    def __bool__(self) -> bool:
        return bool(self.length > 0)

    def __iter__(self) -> Iterator[Any]:
        return list.__iter__(self.filled())

    def __getitem__(self, key: Any) -> Any:
        if self.tree is None or self.is_filled:
            return super().__getitem__(key)
        if isinstance(key, slice):
            leaves, spec = pytree.flatten(self.tree)
            return Rows(pytree.unflatten(spec, [x[key] for x in leaves]), self.weak)
        n = self.length
        if isinstance(n, int) and isinstance(key, int) and not -n <= key < n:
            raise IndexError("list index out of range")
        return self.row(self.tree, key)

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list.__getitem__(self.filled(), slice(None)),)


def is_weak(value: Any) -> bool:
    """Whether it is a number that takes the dtype of what it meets."""
    return value.type.weak if isinstance(value, Value) else not np.ndim(value)


def _fits(item: Any, leaf: Value) -> bool:
    """Whether an item stacks with rows of `leaf`, and they stay of their dtype."""
    shape, dtype = leaf.type.shape[1:], leaf.type.dtype
    if isinstance(item, bool | int | float):
        return not shape and dtype.kind in {bool: "b", int: "iuf"}.get(type(item), "f")
    if not isinstance(item, Value) or item.type.shape != shape:
        return False
    own = item.type
    return own.dtype is dtype or (own.weak and own.dtype.kind == dtype.kind)


def _stack_together(x: Value, y: Value) -> bool:
    return x.type.dtype is y.type.dtype and x.type.shape[1:] == y.type.shape[1:]


def _typed(item: Any, leaf: Value) -> Any:
    return asarray(item, dtype=leaf.type.dtype)


def _filling(name: str, changes: bool) -> Any:
    method = getattr(list, name)

    def run(self: Rows, *args: Any, **kwargs: Any) -> Any:
        found = method(self.filled(), *args, **kwargs)
        if changes:
            self.tree = None
        return found

    run.__name__ = name
    return run


_READING: Final = (
    "__add__ __contains__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __repr__ "
    "__reversed__ __rmul__ copy count index"
).split()
_CHANGING: Final = (
    "__delitem__ __iadd__ __imul__ __setitem__ clear insert pop remove reverse sort"
).split()
for _name in (*_READING, *_CHANGING):
    setattr(Rows, _name, _filling(_name, _name in _CHANGING))


def _children(rows: Rows) -> tuple[list[Any], None, tuple[str, ...]]:
    items = list(rows)
    return items, None, tuple(map(str, range(len(items))))


pytree.register(Rows, _children, lambda _, items: list(items), by_name=False)
