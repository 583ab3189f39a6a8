"""Pytrees: a thin wrapper of optree. `None` is structure, not a leaf."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import optree

__all__ = [
    "Exact",
    "Spec",
    "Ties",
    "broadcast_prefix",
    "exact_key",
    "flatten",
    "is_leaf",
    "leaf_paths",
    "named_classes",
    "parts_of",
    "register",
    "rest_of",
    "structure",
    "tree_map",
    "unflatten",
]

Spec: TypeAlias = optree.PyTreeSpec

flatten: Callable[..., tuple[list[Any], Spec]] = optree.tree_flatten
structure: Callable[[Any], Spec] = optree.tree_structure


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Return the tree of structure `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def is_leaf(spec: Spec) -> bool:
    """Whether a tree of this structure is a single leaf."""
    return spec.is_leaf(strict=True)


def parts_of(tree: Any) -> tuple[dict[str, Any], Any] | None:
    """Return the children of a container by their subscripts (`[0]`, `['w']`), and its
    other data: keys, static fields. None: `tree` is a leaf."""
    level = structure(tree).one_level()
    if level is None:
        return None
    texts = [accessor.codify("") for accessor in level.accessors()]
    parts = dict(zip(texts, level.flatten_up_to(tree), strict=True))
    return parts, optree.tree_flatten_one_level(tree)[1]


def rest_of(spec: Spec) -> Any:
    """Return the static data of a container of this structure: all but its parts."""
    tree = optree.tree_unflatten(spec, [object() for _ in range(spec.num_leaves)])
    return optree.tree_flatten_one_level(tree)[1]


def is_named_tuple(cls: Any) -> bool:
    """Whether a class is a tuple of named fields."""
    return optree.is_namedtuple_class(cls)


def named_classes() -> dict[str, tuple[type, Callable[[Any, Any], Any]]]:
    """Return the classes registered as pytrees, by `module:Class`, each with the
    function that makes an instance of static data and children."""
    registry: Any = optree.register_pytree_node
    return {
        f"{cls.__module__}:{cls.__qualname__}": (cls, entry.unflatten_func)
        for cls, entry in registry.get().items()
        if isinstance(cls, type)
    }


def exact_key(value: Any) -> Hashable:
    """Return a key that distinguishes equal values of different types or signs: 1, 1.0
    and True, 0.0 and -0.0; also within tuples, frozen sets and frozen dataclasses.

    It is hashable if `value` is.
    """
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # equal for equal NaNs, unlike the floats
    if kind is frozenset:
        return kind, frozenset(map(exact_key, value))
    if isinstance(value, tuple):
        return kind, *map(exact_key, value)
    if is_dataclass(value):
        parts = [getattr(value, f.name) for f in fields(value) if f.compare]
        # The value itself is part of the key, as `__eq__` may use more than the fields.
        return kind, value, *(exact_key(part) for part in parts if _is_hashable(part))
    return kind, value


class Exact(tuple[Any, ...]):
    """Static data of a pytree, compared by `exact_key`: 1, 1.0 and True are different,
    because they may lead to different programs."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Exact):
            return NotImplemented
        if len(self) == len(other) and all(map(is_, self, other)):
            return True  # the common case
        return exact_key((*self,)) == exact_key((*other,))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of `f(leaf, *leaves_of_rest)`."""
    return optree.tree_map(f, tree, *rest)


def broadcast_prefix(prefix: Any, spec: Spec) -> list[Any] | None:
    """Broadcast a prefix tree: return for each leaf of a tree of structure `spec` the
    leaf of `prefix` above it; None in `prefix` is a leaf. None: the structures differ.
    """
    if prefix is None or optree.tree_is_leaf(prefix):
        return [prefix] * spec.num_leaves
    level = spec.one_level()
    if level is None:
        return None
    try:
        parts = level.flatten_up_to(prefix)
    except ValueError:
        return None
    leaves: list[Any] = []
    for part, child in zip(parts, spec.children(), strict=True):
        child_leaves = broadcast_prefix(part, child)
        if child_leaves is None:
            return None
        leaves += child_leaves
    return leaves


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable, Sequence[str]]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
    *,
    by_name: bool,
) -> None:
    """Register a class as a pytree.

    Args:
        flatten: An instance -> its children, its static data, a key for each child.
        unflatten: (static data, children) -> an instance.
        by_name: Whether a child is written `tree.key`; otherwise `tree['key']`.
    """
    entry = _Attribute if by_name else optree.MappingEntry
    register_node: Any = optree.register_pytree_node
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    register_node(cls, flatten, unflatten, path_entry_type=entry, namespace=everywhere)


class _Attribute(optree.GetAttrEntry):
    """An attribute, or a path of attributes and indices: `layers.0.weight`."""

    def codify(self, node: str = "") -> str:
        first, *below = self.entry.split(".")
        items = (f"[{key}]" if key.isdigit() else f".{key}" for key in below)
        return f"{node}.{first}{''.join(items)}"


class Ties(NamedTuple):
    """The tied leaves of a tree, such as a parameter that two layers share.

    spec    the structure of the tree
    places  for each leaf, its position among the distinct leaves
    """

    spec: Spec
    places: tuple[int, ...]

    @staticmethod
    def of(tree: Any, kinds: Any) -> "Ties | None":
        """Return the ties of leaves that are one object of these types; None: no two
        are."""
        leaves, spec = flatten(tree)
        positions: dict[int, int] = {}
        keys = [id(x) if isinstance(x, kinds) else -i for i, x in enumerate(leaves)]
        places = tuple([positions.setdefault(key, len(positions)) for key in keys])
        return Ties(spec, places) if len(positions) < len(leaves) else None

    @staticmethod
    def kept(owner: Any, tree: Any, kinds: Any) -> "Ties | None":
        """Return the ties that the tree of `owner` had at the first call."""
        attributes = vars(owner)
        if "_ties" not in attributes:
            attributes["_ties"] = Ties.of(tree, kinds)
        ties: Ties | None = attributes["_ties"]
        return ties

    @property
    def first(self) -> list[int]:
        """For each distinct leaf, its first position among all leaves."""
        positions: dict[int, int] = {}
        for i, k in enumerate(self.places):
            positions.setdefault(k, i)
        return list(positions.values())

    def names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the path of each distinct leaf, as `layers.0.weight`.

        Args:
            names: The names of the children of the tree.
        """
        paths = self.spec.paths()
        items = [(names[k], *below) for k, *below in (paths[i] for i in self.first)]
        return tuple([".".join(map(str, path)) for path in items])

    def distinct(self, tree: Any) -> list[Any] | None:
        """Return the distinct leaves of a tree of this structure; None: its leaves are
        not tied like this."""
        try:
            parts = self.spec.flatten_up_to(tree)
        except ValueError:
            return None
        leaves = [parts[i] for i in self.first]
        pairs = zip(parts, self.places, strict=True)
        return leaves if all(part is leaves[k] for part, k in pairs) else None

    def tree(self, distinct: Iterable[Any]) -> Any:
        """Return the tree with these distinct leaves."""
        leaves = list(distinct)
        return unflatten(self.spec, [leaves[k] for k in self.places])


def leaf_paths(spec: Spec, root: str) -> list[str]:
    """Return the expression for each leaf: `carry.hidden[0]`, `carry['w']`."""
    count = spec.num_leaves
    if spec.num_nodes == count == 1:
        return [root]
    if spec.type is tuple and spec.num_nodes == count + 1:  # fast path for flat tuples
        return [f"{root}[{k}]" for k in range(count)]
    return [root + path for path in _paths(spec)]


@lru_cache(256)
def _paths(spec: Spec) -> list[str]:
    """Return the expression for each leaf, without the name of the tree."""
    level = spec.one_level()
    if level is None:
        return [""] * spec.num_leaves
    places = [accessor.codify("") for accessor in level.accessors()]
    children = zip(places, spec.children(), strict=True)
    return [place + path for place, child in children for path in _paths(child)]
