"""Pytrees: a thin face on optree. `None` is structure, not a leaf."""

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
    "parts_of",
    "register",
    "structure",
    "tree_map",
    "unflatten",
]

Spec: TypeAlias = optree.PyTreeSpec

flatten: Callable[..., tuple[list[Any], Spec]] = optree.tree_flatten
structure: Callable[[Any], Spec] = optree.tree_structure


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The tree of structure `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def is_leaf(spec: Spec) -> bool:
    """Whether a tree of this structure is one leaf and nothing else."""
    return spec.is_leaf(strict=True)


def parts_of(tree: Any) -> tuple[dict[str, Any], Any] | None:
    """The parts of a container, by what a user writes behind it (`[0]`, `['w']`), and
    what it holds besides: its keys, fields that are no parts. None: it is a leaf."""
    level = structure(tree).one_level()
    if level is None:
        return None
    texts = [accessor.codify("") for accessor in level.accessors()]
    parts = dict(zip(texts, level.flatten_up_to(tree), strict=True))
    return parts, optree.tree_flatten_one_level(tree)[1]


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


class Exact(tuple[Any, ...]):
    """What a tree holds besides its parts, equal to the same with equal `exact_key`s
    alone: another program may come of 1, 1.0 and True."""

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
    """The tree of `f(leaf, *leaves_of_rest)`."""
    return optree.tree_map(f, tree, *rest)


def broadcast_prefix(prefix: Any, spec: Spec) -> list[Any] | None:
    """For each leaf of a tree of structure `spec` the leaf of `prefix` that stands for
    the part it is in; None in `prefix` is a leaf. None: the structures do not fit.
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
    found: list[Any] = []
    for part, child in zip(parts, spec.children(), strict=True):
        dims = broadcast_prefix(part, child)
        if dims is None:
            return None
        found += dims
    return found


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
    entry = _Attribute if by_name else optree.MappingEntry
    register_node: Any = optree.register_pytree_node
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    register_node(cls, flatten, unflatten, path_entry_type=entry, namespace=everywhere)


class _Attribute(optree.GetAttrEntry):
    """An attribute; of a tree with ties, one further down: `layers.0.weight`."""

    def codify(self, node: str = "") -> str:
        first, *below = self.entry.split(".")
        items = (f"[{key}]" if key.isdigit() else f".{key}" for key in below)
        return f"{node}.{first}{''.join(items)}"


class Ties(NamedTuple):
    """Which leaves of a tree are one: a parameter that two layers share.

    spec    the structure of the tree
    places  for each leaf, which of the distinct ones it is
    """

    spec: Spec
    places: tuple[int, ...]

    @staticmethod
    def of(tree: Any, kinds: Any) -> "Ties | None":
        """The ties of leaves of these types that are one object; None: no two are."""
        leaves, spec = flatten(tree)
        known: dict[int, int] = {}
        keys = [id(x) if isinstance(x, kinds) else -i for i, x in enumerate(leaves)]
        places = tuple([known.setdefault(key, len(known)) for key in keys])
        return Ties(spec, places) if len(known) < len(leaves) else None

    @staticmethod
    def kept(owner: Any, tree: Any, kinds: Any) -> "Ties | None":
        """The ties of a tree that is `owner`'s, by how it was at first."""
        kept = vars(owner)
        if "_ties" not in kept:
            kept["_ties"] = Ties.of(tree, kinds)
        found: Ties | None = kept["_ties"]
        return found

    @property
    def first(self) -> list[int]:
        """Which leaf each distinct one is first."""
        known: dict[int, int] = {}
        for i, k in enumerate(self.places):
            known.setdefault(k, i)
        return list(known.values())

    def names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The path of each distinct leaf, as `layers.0.weight`, in a list of parts of
        these names."""
        paths = self.spec.paths()
        found = [(names[k], *below) for k, *below in (paths[i] for i in self.first)]
        return tuple([".".join(map(str, path)) for path in found])

    def distinct(self, tree: Any) -> list[Any] | None:
        """The distinct leaves of a tree, or what stands for them; None: it is not tied
        like this any more."""
        try:
            parts = self.spec.flatten_up_to(tree)
        except ValueError:
            return None
        found = [parts[i] for i in self.first]
        pairs = zip(parts, self.places, strict=True)
        return found if all(part is found[k] for part, k in pairs) else None

    def tree(self, distinct: Iterable[Any]) -> Any:
        """The tree of these distinct leaves."""
        found = list(distinct)
        return unflatten(self.spec, [found[k] for k in self.places])


def leaf_paths(spec: Spec, root: str) -> list[str]:
    """How a user would write each leaf: `carry.hidden[0]`, `carry['w']`."""
    count = spec.num_leaves
    if spec.num_nodes == count == 1:
        return [root]
    if spec.type is tuple and spec.num_nodes == count + 1:  # at once, without accessors
        return [f"{root}[{k}]" for k in range(count)]
    return [root + path for path in _paths(spec)]


@lru_cache(256)
def _paths(spec: Spec) -> list[str]:
    """How a user would write each leaf after the name of the tree."""
    level = spec.one_level()
    if level is None:
        return [""] * spec.num_leaves
    places = [accessor.codify("") for accessor in level.accessors()]
    children = zip(places, spec.children(), strict=True)
    return [place + path for place, child in children for path in _paths(child)]
