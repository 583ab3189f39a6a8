"""Structural hashes of graphs: the keys of caches of traces and programs.

Graphs with the same digest compute the same, node by node. Names (of inputs, symbols
and graphs), source lines, paths, notes and the weak flag of types are ignored.
"""

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, Final
from weakref import ref

from hopflow.dtypes import DType
from hopflow.errors import GraphError
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, map_sizes
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType, is_one
from hopflow.symbolic.size import Size, Symbol, SymInt, renamed, substitute

# The separator of the pieces of a text; no name and no number contains it.
_SEPARATOR: Final = "\x1f"


def structural_hash(graph: Graph) -> str:
    """Return a digest of what `graph` computes: 32 hexadecimal digits.

    It is the same in every process, unless a param is an object of no static kind (such
    as the function of a callback). Such an object is hashed by its identity, or by its
    method `structural_key()` if it has one. (A class with `has_portable_key` promises
    that the key is the same in every process.)

    Raises:
        GraphError: a node reads a value before its definition.
    """
    return _Encoder({}).digest(graph)


def is_portable(graph: Graph) -> bool:
    """Whether the digest of `graph` is the same in every process: all operators
    belong to the package, and no param is an object of this process."""
    return all(
        (node.op is None or _is_builtin(node.op))
        and all(map(_is_plain, node.params.values()))
        for node in graph.distinct_nodes()
    )


def _is_builtin(op: Any) -> bool:
    """Whether an operator and its lowering are defined in the package."""
    lower = op.lower.func if isinstance(op.lower, partial) else op.lower
    modules = type(op).__module__, lower.__module__
    return all(module.startswith("hopflow.") for module in modules)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_is_plain, value))
    plain = kind in _WRITERS or kind in (SymInt, TensorType, Graph)
    return plain or getattr(kind, "has_portable_key", False)


def equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs have the same structure."""
    return a is b or _Encoder({}).text(a) == _Encoder({}).text(b)


def equal_nodes(a: Node, b: Node, sizes: Mapping[Symbol, Size]) -> bool:
    """Whether two nodes have the same operator, params and graphs. Their args may
    differ.

    Args:
        sizes: The symbols of `b`'s graph in terms of those of `a`'s graph.
    """
    if a.op is not b.op or a.params.keys() != b.params.keys():
        return False
    encoder = _Encoder({})
    symbols: dict[Symbol, int] = {}
    return all(
        encoder.static(value, symbols)
        == encoder.static(
            map_sizes(b.params[key], lambda n: substitute(n, sizes)), symbols
        )
        for key, value in a.params.items()
    )


def equal_constants(a: Constant, b: Constant) -> bool:
    """Whether two constants have the same value and type."""
    return _argument(a, {}) == _argument(b, {})


def equal_values(a: Arg, b: Arg) -> bool:
    """Whether two args of one graph surely hold the same value: the same operations
    compute them from the same vars, and none has an effect or a graph."""
    symbols: dict[Symbol, int] = {}
    encoder = _Encoder({})
    pending = [(a, b)]
    seen: set[tuple[Arg, Arg]] = set()
    while pending:
        pair = x, y = pending.pop()
        if x is y or pair in seen:
            continue
        seen.add(pair)
        if not (isinstance(x, Var) and isinstance(y, Var)):
            if isinstance(x, Var) or isinstance(y, Var):
                return False
            if _argument(x, symbols) != _argument(y, symbols):
                return False
            continue
        m, n = x.node, y.node
        if m.op is None or m.op is not n.op or x.index != y.index:
            return False
        if m.graphs or m.symbol is not None or effects(m):
            return False
        if len(m.args) != len(n.args) or m.params.keys() != n.params.keys():
            return False
        for key, value in m.params.items():
            if encoder.static(value, symbols) != encoder.static(n.params[key], symbols):
                return False
        pending += zip(m.args, n.args, strict=True)
    return True


class _Encoder:
    """Write graphs as canonical texts: vars and symbols are numbered in order of
    definition.

    A subgraph is closed (all that it reads are its inputs), and is written as its
    digest. `digests` is the memo table of shared subgraphs.
    """

    __slots__ = ("digests",)

    def __init__(self, digests: dict[int, str]) -> None:
        self.digests = digests

    def digest(self, graph: Graph) -> str:
        digest = self.digests.get(id(graph))
        if digest is None:
            text = self.text(graph).encode("utf-8", "surrogatepass")
            digest = self.digests[id(graph)] = blake2b(text, digest_size=16).hexdigest()
        return digest

    def text(self, graph: Graph) -> str:
        """Return the canonical text of `graph`; equal graphs have equal texts."""
        symbols: dict[Symbol, int] = {}
        numbers: dict[Any, str] = {}
        pieces: list[str] = []
        add = pieces.append
        for var in graph.inputs:
            node = var.node
            if node.symbol is not None:
                symbols.setdefault(node.symbol, len(symbols))
            numbers[var] = f"%{len(numbers)}"
            add(f"{node.section}{_type(var.type, symbols)}")
        for node in graph.nodes:
            op = node.op
            add("\n")
            add(node.kind + _quoted(node.name) if op is None else op.name)
            for arg in node.args:
                add(numbers.get(arg) or _argument(arg, symbols))
            params = node.params
            if params:
                keys = sorted(params) if len(params) > 1 else params
                for key in keys:
                    add(f"{key}={self.static(params[key], symbols)}")
            if node.symbol is not None:
                add(f"symbol{symbols.setdefault(node.symbol, len(symbols))}")
            for var in node.results:
                numbers[var] = f"%{len(numbers)}"
                add(_type(var.type, symbols))
        add("\nreturn")
        for arg in graph.outputs:
            add(numbers.get(arg) or _argument(arg, symbols))
        return _SEPARATOR.join(pieces)

    def static(self, value: Any, symbols: dict[Symbol, int]) -> str:
        """Return the text of a static parameter: 1, 1.0, True and "1" differ."""
        kind = type(value)
        write = _WRITERS.get(kind)
        if write is not None:
            return write(value)
        if kind is tuple:
            for item in value:
                if type(item) is not int:
                    inner = ",".join([self.static(v, symbols) for v in value])
                    return f"({inner},)"
            return repr(value)
        if kind is SymInt:
            return _size(value, symbols)
        if kind is TensorType:
            return _type(value, symbols)
        if kind is Graph:
            return f"graph {self.digest(value)}"
        return _opaque(value)


def _quoted(text: str) -> str:
    """Return text with its length in front: it may contain separators."""
    return f"{len(text)}'{text}'"


_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    int: repr,
    bool: repr,
    float: repr,  # exact; -0.0 and 0.0 differ, and NaNs are equal
    str: _quoted,
    type(None): repr,
    DType: lambda dtype: f"dtype {dtype.short}",
}


def _argument(arg: Any, symbols: dict[Symbol, int]) -> str:
    if type(arg) is Var:
        raise GraphError(f"{arg!r} is used in a graph that does not define it before.")
    return f"{arg.value!r}:{_type(arg.type, symbols)}"


def _type(type_: TensorType, symbols: dict[Symbol, int]) -> str:
    shape = type_.shape
    for n in shape:
        if type(n) is SymInt:
            sizes = ",".join([_size(n, symbols) for n in shape])
            return f"{type_.dtype.short}[{sizes}]"
    return f"{type_.dtype.short}{shape}"


def _size(size: int | SymInt, symbols: dict[Symbol, int]) -> str:
    """Return a size over numbered symbols; a new symbol gets the next number."""
    if not isinstance(size, SymInt):
        return str(size)
    # An axis of size 1 is broadcast, whatever expression its size is.
    if is_one(size):
        return "1"
    return renamed(size, lambda s: f"s{symbols.setdefault(s, len(symbols))}")


# --- objects of no static kind --------------------------------------------------------

# id -> (a weak reference to the object, or the object itself; its number). An object
# that cannot be weakly referenced is kept alive, so that no other object gets its id.
_tokens: dict[int, tuple[Any, int]] = {}
_numbers: Final = count()


def _opaque(value: Any) -> str:
    """Return the text of an object of no static kind; see `structural_hash`."""
    key = getattr(type(value), "structural_key", None)
    if key is not None:
        return f"{type(value).__qualname__} {_quoted(key(value))}"
    token = _tokens.get(id(value))
    if token is None:
        id_ = id(value)
        try:
            holder: Any = ref(value, lambda _: _tokens.pop(id_, None))
        except TypeError:
            holder = value
        token = _tokens[id_] = (holder, next(_numbers))
    return f"object {token[1]}"
