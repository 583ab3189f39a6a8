"""Structures of pytrees as plain data, and back.

A leaf is "*" and None is null. Containers are objects whose only member says the kind;
classes of users are named, `module:Class`. Reading imports nothing: a class that this
process does not know has a named tuple of the same fields in its place.
"""

import builtins
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from keyword import iskeyword
from typing import Any, Final

from hopflow import pytree
from hopflow.errors import ExportError
from hopflow.export.fields import Part
from hopflow.export.statics import StaticReader, StaticWriter
from hopflow.pytree import Exact, Spec, Ties

MAX_DEPTH: Final = 64
MAX_FIELDS: Final = 1000
LEAF: Final = "*"


# --- writing --------------------------------------------------------------------------


def write_tree(spec: Spec, statics: StaticWriter) -> Any:
    """A structure as plain data.

    Raises:
        ExportError: it has a container that no file can hold.
    """
    if pytree.is_leaf(spec):
        return LEAF
    cls: Any = spec.type
    if cls is type(None):
        return None
    children = [write_tree(child, statics) for child in spec.children()]
    if cls in (tuple, list):
        return {cls.__name__: children}
    if cls in (dict, OrderedDict):
        return {_DICTS[cls]: _keyed(spec, children, statics)}
    rest = pytree.rest_of(spec)
    if cls is deque:
        return {"deque": [rest, children]}
    if cls is defaultdict:
        return {"defaultdict": [_factory(rest[0]), _keyed(spec, children, statics)]}
    name = f"{cls.__module__}:{cls.__qualname__}"
    names = [str(entry) for entry in spec.entries()]
    if pytree.is_named_tuple(cls):
        return {"namedtuple": {"class": name, "names": [*cls._fields], "of": children}}
    row = {"class": name, "names": names, "of": children}
    try:
        return {"object": {**row, "rest": _write_rest(rest, statics)}}
    except ExportError:  # a function, say: it has a named tuple in its place elsewhere
        return {"object": row}


_DICTS: Final = {dict: "dict", OrderedDict: "ordered"}


def _keyed(spec: Spec, children: Sequence[Any], statics: StaticWriter) -> list[Any]:
    """Keys and parts in the user's order, which a structure keeps beside its own."""
    parts = dict(zip(spec.entries(), children, strict=True))
    tree = pytree.unflatten(spec, [LEAF] * spec.num_leaves)
    return [[statics.value(key), parts[key]] for key in tree]


def _factory(factory: Any) -> str | None:
    if factory is not None and factory not in _FACTORIES.values():
        raise ExportError(
            "a defaultdict whose default is a function cannot leave Python. Pass a "
            "dict."
        )
    return None if factory is None else str(factory.__name__)


_FACTORIES: Final[dict[str, Any]] = {
    name: getattr(builtins, name) for name in ("int", "float", "bool", "list", "dict")
}


def _write_rest(rest: Any, statics: StaticWriter) -> Any:
    """What an object holds besides its parts."""
    if isinstance(rest, Exact):
        return {"exact": [_write_rest(item, statics) for item in rest]}
    if isinstance(rest, Ties):
        return {"ties": [write_tree(rest.spec, statics), list(rest.places)]}
    if type(rest) is tuple:
        return [_write_rest(item, statics) for item in rest]
    if type(rest) is list:
        return {"list": [_write_rest(item, statics) for item in rest]}
    return statics.value(rest)


# --- reading --------------------------------------------------------------------------


def read_tree(part: Part, statics: StaticReader) -> Spec:
    """The structure that `write_tree` has written."""
    tree = _Reader(statics).tree(part, 0)
    try:
        return pytree.structure(tree)
    except Exception as error:  # of whatever a class makes of such parts
        part.fail(f"parts that its class takes ({type(error).__name__})")


class _Reader:
    """Makes trees of a structure, with leaves that are nothing else."""

    def __init__(self, statics: StaticReader) -> None:
        self.statics = statics
        self.kinds: dict[str, Callable[[Part, int], Any]] = {
            "tuple": lambda part, depth: (*self.parts(part, depth),),
            "list": self.parts,
            "dict": lambda part, depth: dict(self.pairs(part, depth)),
            "ordered": lambda part, depth: OrderedDict(self.pairs(part, depth)),
            "deque": self.deque,
            "defaultdict": self.defaultdict,
            "namedtuple": self.named_tuple,
            "object": self.object,
        }

    def tree(self, part: Part, depth: int) -> Any:
        if part.value == LEAF:
            return object()
        if part.value is None:
            return None
        if depth > MAX_DEPTH:
            part.fail("a tree that is less deep")
        members = part.named()
        if len(members) != 1 or not members.keys() <= self.kinds.keys():
            part.fail("an object with one member, which is a kind of container")
        [(kind, inner)] = members.items()
        return self.kinds[kind](inner, depth)

    def parts(self, part: Part, depth: int) -> list[Any]:
        return [self.tree(item, depth + 1) for item in part.items()]

    def pairs(self, part: Part, depth: int) -> list[tuple[Any, Any]]:
        rows = [row.items(2) for row in part.items()]
        pairs = [
            (self.statics.value(key), self.tree(child, depth + 1))
            for key, child in rows
        ]
        try:
            if len(dict(pairs)) < len(pairs):
                part.fail("keys that differ")
        except TypeError:
            part.fail("keys that can be hashed")
        return pairs

    def deque(self, part: Part, depth: int) -> Any:
        limit, items = part.items(2)
        most = None if limit.value is None else limit.integer()
        return deque(self.parts(items, depth), most)

    def defaultdict(self, part: Part, depth: int) -> Any:
        factory, items = part.items(2)
        made = None
        if factory.value is not None:
            made = factory.known(_FACTORIES, "a default")
        return defaultdict(made, self.pairs(items, depth))

    def named_tuple(self, part: Part, depth: int) -> Any:
        name, names, parts = self.members(part, depth, ())
        cls = _named_tuple(name, names) or _stand_in(name, names)
        return _made_of(part, cls, *parts)

    def object(self, part: Part, depth: int) -> Any:
        name, names, parts = self.members(part, depth, ["rest"])
        known = pytree.named_classes().get(name)
        rest = part.named().get("rest")
        if known is None or rest is None:
            return _made_of(part, _stand_in(name, names), *parts)
        return _made_of(part, known[1], self.rest(rest), parts)

    def members(
        self, part: Part, depth: int, optional: Sequence[str]
    ) -> tuple[str, tuple[str, ...], list[Any]]:
        """The class, the names of the parts, and these."""
        found = part.members(["class", "names", "of"], optional)
        names = found["names"].each(Part.text)
        if len(names) > MAX_FIELDS:
            found["names"].fail(f"at most {MAX_FIELDS} names")
        parts = self.parts(found["of"], depth)
        if len(parts) != len(names):
            found["of"].fail(f"{len(names)} parts")
        return found["class"].text(), names, parts

    def rest(self, part: Part) -> Any:
        """What an object holds besides its parts."""
        if isinstance(part.value, list):
            return (*map(self.rest, part.items()),)
        if not isinstance(part.value, dict):
            return self.statics.value(part)
        match [*part.named().items()]:
            case [("exact", inner)]:
                return Exact(map(self.rest, inner.items()))
            case [("list", inner)]:
                return [*map(self.rest, inner.items())]
            case [("ties", inner)]:
                tree, places = inner.items(2)
                spec = read_tree(tree, self.statics)
                last = max(spec.num_leaves - 1, 0)
                return Ties(spec, places.each(lambda place: place.integer(0, last)))
        return self.statics.value(part)


def _made_of(part: Part, make: Callable[..., Any], *args: Any) -> Any:
    """What a class makes of parts, for which there are leaves now."""
    try:
        return make(*args)
    except Exception as error:  # it may check them, or count them
        part.fail(f"parts that its class takes ({type(error).__name__})")


def _named_tuple(name: str, fields: Sequence[str]) -> Any:
    """The class of named tuples of this name, if this process has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):  # by what is there: nothing is computed or imported
        found = getattr(found, "__dict__", {}).get(part)
    is_it = pytree.is_named_tuple(found) and found._fields == tuple(fields)
    return found if is_it else None


@lru_cache(256)
def _made(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def _stand_in(name: str, names: Sequence[str]) -> Any:
    """A class of named tuples in the place of one that this process does not know."""
    last = name.rpartition(".")[2].rpartition(":")[2]
    title = last if last.isidentifier() and not iskeyword(last) else "Container"
    fields: list[str] = []
    for i, given in enumerate(names):
        text = given.replace(".", "_")
        usable = text.isidentifier() and not iskeyword(text) and text[0] != "_"
        fields.append(text if usable and text not in fields else f"part{i}")
    return _made(title, tuple(fields))
