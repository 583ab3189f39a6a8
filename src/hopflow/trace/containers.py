"""What a traced function changes in the containers among its arguments.

A trace gives a function containers of its own. What it does to them (`d["y"] = ...`,
`items.pop()`, an attribute of an object that is a pytree) is found by comparison, and
done to the containers of each call.
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
"""The way from the arguments to a container: ("item", key) or ("attribute", name)."""


class Replaced(NamedTuple):
    """What a container of the arguments contains after a call.

    path    where it is
    keys    of a dict, or the names of attributes; None: it is a list
    spec    the structure of its values
    leaves  what each leaf of them is: ("argument", position of a leaf), ("container",
            path), ("result", position of an additional result) or ("constant", value)
    """

    path: Path
    keys: tuple[Any, ...] | None
    spec: Spec
    leaves: tuple[tuple[str, Any], ...]


class Containers:
    """The containers that a traced function is given, and what is in them before.

    Args:
        tree: The arguments, as the function gets them.
        leaves: Their leaves.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any]) -> None:
        self._arguments = {
            id(x): k for k, x in enumerate(leaves) if isinstance(x, _OF_TRACE)
        }
        self._found = [(path, x, _contents(x)) for path, x in _containers(tree, ())]
        self._paths = {id(x): path for path, x, _ in self._found}

    def replaced(self) -> tuple[list[Replaced], list[Any]]:
        """What is another content now, and the additional results that it takes."""
        changes: list[Replaced] = []
        results: list[Any] = []
        for path, container, (keys, values) in self._found:
            now_keys, now = _contents(container)
            same = keys == now_keys and len(values) == len(now)
            if same and all(a is b for a, b in zip(values, now, strict=True)):
                continue
            parts, spec = pytree.flatten(now, is_leaf=lambda x: id(x) in self._paths)
            leaves = tuple([self._leaf(part, results) for part in parts])
            changes.append(Replaced(path, now_keys, spec, leaves))
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
    """The containers of a tree that can be changed, each with the way to it."""
    steps: Iterator[tuple[tuple[str, Any], Any]]
    if isinstance(value, dict):
        steps = ((("item", k), x) for k, x in value.items())
    elif isinstance(value, list | tuple | deque):
        steps = ((("item", k), x) for k, x in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, _OF_TRACE):
        if pytree.is_leaf(pytree.structure(value)):
            return  # an object that is no tree is the user's own in the trace, too
        steps = ((("attribute", k), x) for k, x in vars(value).items())
    else:
        return
    if not isinstance(value, tuple):
        yield path, value
    for step, part in steps:
        yield from _containers(part, (*path, step))


def _contents(container: Any) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """The keys of a container, None if it is a list, and its values."""
    if isinstance(container, list | deque):
        return None, list(container)
    held: Mapping[Any, Any] = (
        container if isinstance(container, dict) else vars(container)
    )
    return tuple(held), list(held.values())


def replace_contents(
    changes: Sequence[Replaced],
    tree: Any,
    leaves: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """Do to the containers of a call what the traced function did to its own.

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
        held = target if isinstance(target, dict) else vars(target)
        held.clear()
        held.update(zip(change.keys, values, strict=True))


def containers_of(tree: Any) -> list[Any]:
    """The containers of a tree that can be changed."""
    return [container for _, container in _containers(tree, ())]


def check_apart(
    changes: Sequence[Replaced], tree: Any, outside: Sequence[Any] = ()
) -> None:
    """Check that no container which a traced function changes is passed twice, or read
    from outside too.

    A trace gives a function a container of its own for each place in the arguments, so
    what it does to one of them does not show in the other.

    Args:
        tree: The arguments of a call.
        outside: What the function reads from outside.

    Raises:
        ImpurityError: one is at two places of the arguments, or outside as well.
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
    """The error for a container that is an argument, is read from outside, and is
    changed."""
    return ImpurityError(
        f"the function changes a {type(container).__name__} that is an argument, and "
        "that it reads from outside too. A trace takes them for different ones: read "
        "it from the argument alone, or pass a copy."
    )


def _values(
    change: Replaced, tree: Any, leaves: Sequence[Any], results: Sequence[Any]
) -> Any:
    """The values of a container after a call."""
    found: list[Any] = []
    for kind, what in change.leaves:
        if kind == "argument":
            found.append(leaves[what])
        elif kind == "container":
            found.append(_resolved(tree, what))
        else:
            found.append(results[what] if kind == "result" else what)
    return pytree.unflatten(change.spec, found)


def _resolved(tree: Any, path: Path) -> Any:
    for kind, key in path:
        tree = tree[key] if kind == "item" else vars(tree)[key]
    return tree
