"""Pytrees: a thin face on optree. `None` is structure, not a leaf."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import optree

__all__ = [
    "Spec",
    "flatten",
    "is_leaf",
    "leaf_paths",
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


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree of `f(leaf, *leaves_of_rest)`."""
    return optree.tree_map(f, tree, *rest)


def leaf_paths(spec: Spec, root: str) -> list[str]:
    """How a user would write each leaf: `carry.hidden[0]`, `carry['w']`."""
    return [root + path for path in _accessors(spec)]


def _accessors(spec: Spec) -> list[str]:
    return [accessor.codify("") for accessor in spec.accessors()]
