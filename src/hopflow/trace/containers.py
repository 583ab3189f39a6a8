"""Changes that a traced function makes to containers among its arguments.

A trace passes copies of the containers to the function. Changes of these (`d["y"] =
...`, `items.pop()`, an attribute of an object that is a pytree) are found by comparison
with a snapshot, and repeated on the containers of each call.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.errors import ImpurityError
from hopflow.pytree import Spec
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt

Path: TypeAlias = tuple[tuple[str, Any], ...]
"""The path from the arguments to a container: ("item", key) or ("attribute", name)."""


class Replaced(NamedTuple):
    """The contents of a container among the arguments after a call.

    path    the path to the container
    keys    the keys of a dict, or the names of attributes; None: it is a list
    spec    the structure of its values
    leaves  for each leaf of the values ("argument", position of a leaf), ("container",
            path), ("result", position of an additional result) or ("constant", value)
    """

    path: Path
    keys: tuple[Any, ...] | None
    spec: Spec
    leaves: tuple[tuple[str, Any], ...]


class Containers:
    """The containers passed to a traced function, with a snapshot of their contents.

    Args:
        tree: The traced arguments of the function.
        leaves: Their leaves.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any]) -> None:
        self._arguments = {
            id(x): k for k, x in enumerate(leaves) if isinstance(x, _OF_TRACE)
        }
        self._snapshots = [(path, x, _contents(x)) for path, x in _containers(tree, ())]
        self._paths = {id(x): path for path, x, _ in self._snapshots}

    def replaced(self) -> tuple[list[Replaced], list[Any]]:
        """Return the changed contents, and the additional results that are in them."""
        changes: list[Replaced] = []
        results: list[Any] = []
        for path, container, (keys, values) in self._snapshots:
            new_keys, new_values = _contents(container)
            same = keys == new_keys and len(values) == len(new_values)
            if same and all(a is b for a, b in zip(values, new_values, strict=True)):
                continue
            parts, spec = pytree.flatten(
                new_values, is_leaf=lambda x: id(x) in self._paths
            )
            leaves = tuple([self._leaf(part, results) for part in parts])
            changes.append(Replaced(path, new_keys, spec, leaves))
        return changes, results

    def _leaf(self, part: Any, results: list[Any]) -> tuple[str, Any]:
        if id(part) in self._arguments:
            return "argument", self._arguments[id(part)]
        if id(part) in self._paths:
            return "container", self._paths[id(part)]
        if isinstance(part, (*_OF_TRACE, np.ndarray, np.generic)):
            results.append(part)
            return "result", len(results) - 1
        return "constant", part


_OF_TRACE: Final = (Value, SymInt, SymFloat, SymBool)


def _containers(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the mutable containers of a tree, each with its path."""
    steps: Iterator[tuple[tuple[str, Any], Any]]
    if isinstance(value, dict):
        steps = ((("item", k), x) for k, x in value.items())
    elif isinstance(value, list | tuple | deque):
        steps = ((("item", k), x) for k, x in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, _OF_TRACE):
        if pytree.is_leaf(pytree.structure(value)):
            return  # an object that is no pytree is not copied by the trace
        steps = ((("attribute", k), x) for k, x in vars(value).items())
    else:
        return
    if not isinstance(value, tuple):
        yield path, value
    for step, part in steps:
        yield from _containers(part, (*path, step))


def _contents(container: Any) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """Return the keys of a container, None if it is a list, and its values."""
    if isinstance(container, list | deque):
        return None, list(container)
    items: Mapping[Any, Any] = (
        container if isinstance(container, dict) else vars(container)
    )
    return tuple(items), list(items.values())


def replace_contents(
    changes: Sequence[Replaced],
    tree: Any,
    leaves: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """Apply changes to the containers among the arguments of a call.

    Args:
        tree: The arguments of the call.
        leaves: Their leaves.
        results: The additional results.
    """
    targets = [_resolved(tree, change.path) for change in changes]
    contents = [_values(change, tree, leaves, results) for change in changes]
    for change, target, values in zip(changes, targets, contents, strict=True):
        if change.keys is None:
            target.clear()
            target.extend(values)
            continue
        items = target if isinstance(target, dict) else vars(target)
        items.clear()
        items.update(zip(change.keys, values, strict=True))


def containers_of(tree: Any) -> list[Any]:
    """Return the mutable containers of a tree."""
    return [container for _, container in _containers(tree, ())]


def check_apart(
    changes: Sequence[Replaced], tree: Any, outside: Sequence[Any] = ()
) -> None:
    """Check that no changed container is passed twice, or also read from outside.

    A trace copies a container for each place in the arguments, so that a change of one
    copy is invisible in the others.

    Args:
        tree: The arguments of a call.
        outside: The values that the function reads from outside.

    Raises:
        ImpurityError: one is at two places of the arguments, or also read from outside.
    """
    read = {id(x) for x in outside}
    for change in changes:
        target = _resolved(tree, change.path)
        if id(target) in read:
            raise passed_and_read(target)
    places: dict[int, list[Path]] = {}
    for path, container in _containers(tree, ()):
        places.setdefault(id(container), []).append(path)
    for change in changes:
        paths = places[id(_resolved(tree, change.path))]
        if len(paths) > 1:
            kind = type(_resolved(tree, change.path)).__name__
            raise ImpurityError(
                f"the function changes a {kind} that is passed to it at "
                f"{len(paths)} places. A trace takes them for different ones: pass it "
                "once, or a copy at each place."
            )


def passed_and_read(container: Any) -> ImpurityError:
    """Return the error for a changed container that is both an argument and read from
    outside."""
    return ImpurityError(
        f"the function changes a {type(container).__name__} that is an argument, and "
        "that it reads from outside too. A trace takes them for different ones: read "
        "it from the argument alone, or pass a copy."
    )


def _values(
    change: Replaced, tree: Any, leaves: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Return the values of a container after a call."""
    values: list[Any] = []
    for kind, source in change.leaves:
        if kind == "argument":
            values.append(leaves[source])
        elif kind == "container":
            values.append(_resolved(tree, source))
        else:
            values.append(results[source] if kind == "result" else source)
    return pytree.unflatten(change.spec, values)


def _resolved(tree: Any, path: Path) -> Any:
    """Return the container at a path in the arguments."""
    for kind, key in path:
        tree = tree[key] if kind == "item" else vars(tree)[key]
    return tree
