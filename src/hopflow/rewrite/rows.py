"""Lists made by loops, stored as stacked tensors until a list is needed."""

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
    """The list of the rows of stacked tensors.

    The items of the list are created lazily, by operations other than to stack it, to
    take a row, or to loop over it.

    tree       a pytree of T[n, …]; None once the list differs from it
    weak       for each leaf of the tree, whether a row is a weak number
    is_filled  whether the list has its items
    line       the user's line with the loop
    """

    def __init__(self, tree: Any, weak: Iterable[bool]) -> None:
        super().__init__()
        self.tree = tree
        self.weak = tuple(weak)
        self.is_filled = False
        self.line = user_line()

    @property
    def length(self) -> Any:
        """The number of rows, which may be a symbol."""
        if self.tree is None:
            return super().__len__()
        return pytree.flatten(self.tree)[0][0].shape[0]

    def row(self, tree: Any, k: Any = None) -> Any:
        """Return row `k` of a tree, with the types of appended values; for None the
        tree is a row already."""
        leaves, spec = pytree.flatten(tree)
        row_leaves = [leaf if k is None else leaf[k] for leaf in leaves]
        typed = [
            convert_to(leaf, leaf.type.dtype, weak=True) if weak else leaf
            for leaf, weak in zip(row_leaves, self.weak, strict=True)
        ]
        return pytree.unflatten(spec, typed)

    def filled(self) -> "Rows":
        """Create the items, and return the list itself.

        Raises:
            ControlFlowError: their number is known only at run time.
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
        """Return the list of other items followed by these."""
        if isinstance(before, Rows) and before.tree is not None:
            return before.joined(self)
        if not before:
            return self
        rows = [pytree.flatten(item) for item in before]
        leaves, spec = pytree.flatten(self.tree)
        stacks = all(
            other == spec and all(map(_fits, items, leaves)) for items, other in rows
        )
        if not stacks:
            return [*before, *self]
        columns = list(zip(*(items for items, _ in rows), strict=True))
        joined_leaves = [
            concat([stack([_typed(item, leaf) for item in column]), leaf])
            for column, leaf in zip(columns, leaves, strict=True)
        ]
        weak = [
            is_weak_leaf and all(map(is_weak, column))
            for is_weak_leaf, column in zip(self.weak, columns, strict=True)
        ]
        return Rows(pytree.unflatten(spec, joined_leaves), weak)

    def joined(self, other: "Rows") -> list[Any]:
        """Return the list of its items followed by those of another one."""
        (leaves, spec), (other_leaves, other_spec) = map(
            pytree.flatten, (self.tree, other.tree)
        )
        if spec != other_spec or not all(map(_stack_together, leaves, other_leaves)):
            return [*self, *other]
        joined_leaves = [
            concat(pair) for pair in zip(leaves, other_leaves, strict=True)
        ]
        weak = [a and b for a, b in zip(self.weak, other.weak, strict=True)]
        return Rows(pytree.unflatten(spec, joined_leaves), weak)

    def append(self, item: Any) -> None:
        if self.tree is None or isinstance(self.length, int):
            self.filled()
            self.tree = None
            super().append(item)
            return
        leaves, spec = pytree.flatten(item)
        rows = [reshape(asarray(leaf), (1, *np.shape(leaf))) for leaf in leaves]
        row = Rows(pytree.unflatten(spec, rows), map(is_weak, leaves))
        joined = self.joined(row)
        if isinstance(joined, Rows):
            self.tree, self.weak = joined.tree, joined.weak

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
    """Whether a value is weak: it adopts the dtype of other operands."""
    return value.type.weak if isinstance(value, Value) else not np.ndim(value)


def _fits(item: Any, leaf: Value) -> bool:
    """Whether an item stacks with the rows of `leaf` without changing their dtype."""
    shape, dtype = leaf.type.shape[1:], leaf.type.dtype
    if isinstance(item, bool | int | float):
        return not shape and dtype.kind in {bool: "b", int: "iuf"}.get(type(item), "f")
    if not isinstance(item, Value) or item.type.shape != shape:
        return False
    type_ = item.type
    return type_.dtype is dtype or (type_.weak and type_.dtype.kind == dtype.kind)


def _stack_together(x: Value, y: Value) -> bool:
    return x.type.dtype is y.type.dtype and x.type.shape[1:] == y.type.shape[1:]


def _typed(item: Any, leaf: Value) -> Any:
    return asarray(item, dtype=leaf.type.dtype)


def _filling(name: str, changes: bool) -> Any:
    """Return a method of `list` that creates the items first."""
    method = getattr(list, name)

    def run(self: Rows, *args: Any, **kwargs: Any) -> Any:
        result = method(self.filled(), *args, **kwargs)
        if changes:
            self.tree = None
        return result

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
