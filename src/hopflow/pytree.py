"""Pytrees: a thin face on optree. `None` is structure, not a leaf."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import optree

__all__ = [
    "Spec",
    "broadcast_prefix",
    "exact_key",
    "flatten",
    "is_leaf",
    "leaf_paths",
    "register",
    "structure",
    "tree_map",
    "unflatten",
]

Spec: TypeAlias = optree.PyTreeSpec

flatten: Callable[[Any], tuple[list[Any], Spec]] = optree.tree_flatten
structure: Callable[[Any], Spec] = optree.tree_structure


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The tree of structure `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def is_leaf(spec: Spec) -> bool:
    """Whether a tree of this structure is one leaf and nothing else."""
    return spec.is_leaf(strict=True)


def exact_key(value: Any) -> Hashable:
    """A key for a value that tells apart what is equal and not the same: 1, 1.0 and
    True, 0.0 and -0.0; in tuples, frozen sets and frozen dataclasses too.

    It can be hashed if `value` can.
    """
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # which a NaN shares with itself
    if kind is frozenset:
        return kind, frozenset(map(exact_key, value))
    if isinstance(value, tuple):
        return kind, *map(exact_key, value)
    if is_dataclass(value):
        parts = [getattr(value, f.name) for f in fields(value) if f.compare]
        # Beside the value itself, which may compare by more than its fields.
        return kind, value, *(exact_key(part) for part in parts if _is_hashable(part))
    return kind, value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree of `f(leaf, *leaves_of_rest)`."""
    return optree.tree_map(f, tree, *rest)


def broadcast_prefix(prefix: Any, spec: Spec) -> list[Any] | None:
    """For each leaf of a tree of structure `spec` the leaf of `prefix` that stands for
    the part it is in; None in `prefix` is a leaf. None: the structures do not fit.
    """
    count = spec.num_leaves
    tree = unflatten(spec, range(count))
    try:
        found = optree.broadcast_prefix(prefix, tree, none_is_leaf=True)
    except ValueError:
        return None
    places = optree.tree_leaves(tree, none_is_leaf=True)
    return [dim for dim, at in zip(found, places, strict=True) if at is not None]


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable, Sequence[str]]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
    *,
    by_name: bool,
) -> None:
    """Make instances of a class trees.

    Args:
        flatten: An instance -> its children, the rest of it, a key for each child.
        unflatten: (rest, children) -> an instance.
        by_name: Whether a user writes `tree.key`; else `tree['key']`.
    """
    entry = optree.GetAttrEntry if by_name else optree.MappingEntry
    register_node: Any = optree.register_pytree_node
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    register_node(cls, flatten, unflatten, path_entry_type=entry, namespace=everywhere)


def leaf_paths(spec: Spec, root: str) -> list[str]:
    """How a user would write each leaf: `carry.hidden[0]`, `carry['w']`."""
    count = spec.num_leaves
    if spec.num_nodes == count == 1:
        return [root]
    if spec.type is tuple and spec.num_nodes == count + 1:  # at once, without accessors
        return [f"{root}[{k}]" for k in range(count)]
    return [root + path for path in _accessors(spec)]


def _accessors(spec: Spec) -> list[str]:
    return [accessor.codify("") for accessor in spec.accessors()]
