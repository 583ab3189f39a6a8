"""Graphs as text, which is Python: it runs, and `parser.parse` reads it back.

    def f(s0: i64, /, x: f32[s0, 4], p: bool, *, w: f32[4]) -> tuple[f32[s0, 4], f32]:
        def then(s0: i64, /, *, x: f32[s0, 4]) -> f32[s0, 4]:
            v0: f32[s0, 4] = sin(x)                    # model.py:3
            return v0
        def else_(s0: i64, /, *, x: f32[s0, 4]) -> f32[s0, 4]:
            return x
        v0: f32[s0, 4] = cond(p, s0, x, then=then, else_=else_)
        v1: tuple[f32[s0, 4], i64[4]] = top(v0, axis=0)
        u0: i64 = int(item(x, max=9))
        v2: f32[u0] = full(f64(2.0), shape=(u0,))
        check(v2, message="is empty")
        return v1[0], 1.0

A graph is a function: its inputs before `/` are symbols, those after `*` captures. It
reads nothing of the functions around it but those that it calls, so that one which
several graphs call stands once, in the innermost that all are within. So does one that
is nested deeper than `NESTED`, in the outermost.

A node is one statement: an annotated assignment of its result, or of the tuple of its
results if it has several; a call if it has none. Its operands stand by position, its
params by name. `int(...)` around the call makes the result a symbol, a size by its
name. A symbol that only a shape tells is read before params have it: `n = x.shape[0]`.
`get_attr("w")` is an attribute of the graph.

`f32[s0, 4]` is a type; of no axes it is `f32` in an annotation, and `f32[()]` among
params, where `f32` is the dtype. A constant says its dtype, `f64(2.0)`, unless that is
what Python's bool, int and float give. An object that no text can hold has a name, as
`objects.record`.

It runs with what `running.namespace` gives, where annotations are not evaluated: before
Python 3.14 after the line that `GraphModule.code` has in front of it.

After a node's line stands the module that it is of, and the operators that it was in if
its graph does not tell: `# model.py:3 in layers.0 of scan/body → cond/then`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword, kwlist
from typing import Any, Final

from hopflow.config import config
from hopflow.dtypes import ALL, DEFAULT_FLOAT, DEFAULT_INT, DType, bool_
from hopflow.graph.core import Arg, Constant, Graph, Node, SourceLine, Var, plain_symbol
from hopflow.graph.rewriting import static_symbols
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import FUNCTIONS, Size, Symbol, SymInt, renamed

INDENT: Final = "    "
NESTED: Final = 16
"""How deep functions stand in functions. Python has at most 100 levels."""

# What a bare literal means; any other constant says its dtype.
BARE: Final[Mapping[type, DType]] = {
    bool: bool_,
    int: DEFAULT_INT,
    float: DEFAULT_FLOAT,
}
# Words that mean something where a name could stand.
RESERVED: Final = frozenset(
    ("__debug__", "tuple", "get_attr", "objects", "nan", "inf", "undefined")
).union(kwlist, FUNCTIONS, (d.short for d in ALL))
_GAP: Final = 2  # least columns between a line and its comment


def format_graph(graph: Graph, *, width: int | None = None) -> str:
    """The text of `graph` and its subgraphs, ending in a newline.

    Args:
        width: Columns that lines may take, comments apart; None for
            `config.print_width`. A wider line is broken within its brackets.
    """
    writer = _Writer(config.print_width if width is None else width, graph)
    writer.root()
    return _aligned(writer.lines)


Graph.text = format_graph


def named_objects(graph: Graph) -> dict[str, Any]:
    """By its name in the text of `graph`, each object that the text cannot hold."""
    writer = _Writer(0, graph)
    writer.root()
    return dict(writer.objects.values())


class _Survey:
    """What must be known of a graph and its subgraphs before the first line.

    callers   graph -> the graphs that call it, with the param that holds it
    shared    graph -> the subgraphs that stand in it because several graphs within it
              call them, or for their depth, each before those that call it
    paths     the operator path of each graph
    reserved  the names that no value and no function may have
    """

    def __init__(self, root: Graph) -> None:
        self.callers: dict[Graph, dict[Graph, str]] = {root: {}}
        self.paths = {root: ""}
        self.reserved = set(RESERVED)
        done: dict[Graph, None] = {}  # callees first
        self._visit(root, done)
        # The graphs around each, from itself outwards; callers come before callees.
        around: dict[Graph, list[Graph]] = {}
        self.shared: dict[Graph, list[Graph]] = {}
        for graph in reversed(done):
            outer = [around[c] for c in self.callers[graph] if c in around]
            within = [g for g in (outer or [[]])[0] if all(g in a for a in outer)]
            is_deep = len(within) > NESTED
            around[graph] = [graph, *([root] if is_deep else within)]
            if is_deep or len(outer) > 1:
                self.shared.setdefault(around[graph][1], []).insert(0, graph)

    def _visit(self, graph: Graph, done: dict[Graph, None]) -> None:
        for node in graph.nodes:
            if node.op is not None:
                self.reserved.add(operator_name(node.op.name))
            for key, subgraph in node.graphs.items():
                if subgraph not in self.callers:
                    self.callers[subgraph] = {}
                    self.paths[subgraph] = subgraph_path(self.paths[graph], node, key)
                    self._visit(subgraph, done)
                self.callers[subgraph].setdefault(graph, key)
        done[graph] = None


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    """Lines with their comments in one column."""
    noted = [len(text) for text, note in lines if note]
    column = max(noted, default=0) + _GAP
    return "".join(
        f"{text:<{column}}# {note}\n" if note else f"{text}\n" for text, note in lines
    )


def identifier(name: str, default: str) -> str:
    """`name` made an identifier of ASCII."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    if found[:1].isdigit():
        found = f"_{found}"
    return found if found.strip("_") else default


def operator_name(name: str) -> str:
    """What the text calls the operator of a name. Sizes and arrays have functions of
    one name, as `floor`."""
    found = identifier(name, "operator")
    is_free = found not in RESERVED or (found in FUNCTIONS and found != "int")
    return found if is_free else f"{found}_"


def _name_of(value: Any) -> str:
    """What an object is called: a function, an object with a name or a class."""
    for key in ("__name__", "name"):
        if isinstance(name := getattr(value, key, None), str):
            return name
    return type(value).__name__


def format_line(line: SourceLine | None) -> str:
    """`model.py:3`; "" for a name that a comment cannot hold."""
    text = str(line).strip() if line is not None else ""
    return text if text.isprintable() and not text.startswith(":") else ""


def subgraph_path(path: str, node: Node, key: str) -> str:
    """The operator path within the graph of `node` under `key`; `path` is its own."""
    inner = f"{node.op.name}/{key}"
    return f"{path} → {inner}" if path else inner


def format_place(node: Node, path: str) -> str:
    """Where a node came from, as far as a comment can hold it.

    Args:
        path: The operator path that nodes of its graph have.
    """
    words = [format_line(node.line)]
    module, operators = node.module_path, node.operator_path
    if module and _is_word(module):
        words.append(f"in {module}")
    if operators not in ("", path) and all(map(_is_word, operators.split(" → "))):
        words.append(f"of {operators}")
    return " ".join(filter(None, words))


def _is_word(text: str) -> bool:
    return text.isprintable() and " " not in text


@dataclass(slots=True)
class Names:
    """The names of one graph's values: each once, whatever the graph calls them.

    taken      those that are no value's
    objects    by its id, the name of each object that no text can hold, and itself
    vars       the text of each value
    symbols    the name of each symbol
    unread     symbols that no variable holds yet -> the text of a size that is one
    """

    taken: Collection[str] = RESERVED
    objects: dict[int, tuple[str, Any]] = field(default_factory=dict)
    vars: dict[Var, str] = field(default_factory=dict)
    symbols: dict[Symbol, str] = field(default_factory=dict)
    unread: dict[Symbol, str] = field(default_factory=dict)
    _own: set[str] = field(default_factory=set)
    _read: set[Symbol] = field(default_factory=set)
    _results: int = 0

    def unique(self, name: str, default: str) -> str:
        base = identifier(name, default)
        found, number = f"{base}_" if base in self.taken else base, 1
        while found in self.taken or found in self._own:
            found, number = f"{base}_{number}", number + 1
        self._own.add(found)
        return found

    def input(self, var: Var) -> str:
        """Name an input; a symbol's gives the symbol its name."""
        symbol = var.node.symbol
        name = symbol.name if symbol is not None else var.node.name
        found = self.vars[var] = self.unique(name, "x")
        if symbol is not None:
            self.symbols.setdefault(symbol, found)
            self._read.add(symbol)
        self._told_by(var)
        return found

    def results(self, node: Node) -> str:
        """Name the results of a node: `v0`, `v1`, … in order, `w` for an attribute `w`,
        `u0` for what defines the symbol `u0`."""
        if node.symbol is not None:
            found = self.symbol(node.symbol)
            self._read.add(node.symbol)
        elif node.op is None:
            found = self.unique(node.name, "attribute")
        else:
            while (found := f"v{self._results}") in self.taken or found in self._own:
                self._results += 1
            self._own.add(found)
        for var in node.results:
            several = len(node.results) > 1
            self.vars[var] = f"{found}[{var.index}]" if several else found
            self._told_by(var)
        return found

    def _told_by(self, var: Var) -> None:
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in self._read:
                self.unread.setdefault(symbol, f"{self.vars[var]}.shape[{axis}]")

    def read(self, values: Iterable[Any]) -> list[str]:
        """Statements that define the symbols of static parameters, if nothing has."""
        lines = []
        for symbol in static_symbols(values):
            if symbol not in self._read and symbol in self.unread:
                self._read.add(symbol)
                lines.append(f"{self.symbol(symbol)} = {self.unread[symbol]}")
        return lines

    def symbol(self, symbol: Symbol) -> str:
        """The name of a symbol; one that no input binds gets its name here."""
        if symbol not in self.symbols:
            self.symbols[symbol] = self.unique(symbol.name, "u")
        return self.symbols[symbol]

    def size(self, size: Size) -> str:
        """A size over named symbols, in the normal form that it has under these."""
        return renamed(size, self.symbol) if isinstance(size, SymInt) else f"{size:d}"

    def type(self, type_: TensorType, scalar: str = "") -> str:
        """A type; `scalar` stands after the dtype of one without axes."""
        shape = ", ".join(map(self.size, type_.shape))
        return f"{type_.dtype.short}{f'[{shape}]' if shape else scalar}"

    def types(self, types: Sequence[TensorType]) -> str:
        """The annotation of results."""
        inner = list(map(self.type, types))
        return inner[0] if len(inner) == 1 else f"tuple[{', '.join(inner) or '()'}]"

    def arg(self, arg: Arg, *, bare: bool = True) -> str:
        if isinstance(arg, Constant):
            return format_constant(arg, bare=bare)
        # A graph that the verifier refuses is printed too, so that one can see why.
        return self.vars.get(arg) or "undefined"

    def static(self, value: Any, graphs: Mapping[Graph, str]) -> str:
        """A static parameter."""
        match value:
            case bool() | int() | None:
                return repr(value)
            case float():
                return float.__repr__(value)
            case str():
                return quoted(value)
            case SymInt():
                return self.size(value)
            case DType():
                return value.short
            case TensorType():
                return self.type(value, "[()]")
            case Graph():
                return graphs[value]
            case tuple():
                return _tuple([self.static(v, graphs) for v in value])
        if id(value) not in self.objects:
            taken = {name for name, _ in self.objects.values()}
            name = Names(_own=taken).unique(_name_of(value), "object")
            self.objects[id(value)] = name, value
        return f"objects.{self.objects[id(value)][0]}"


def _param(key: str, value: str) -> str:
    """`key=value`, or what says the same of a key that is no word of Python."""
    is_word = key.isascii() and key.isidentifier() and not iskeyword(key)
    return f"{key}={value}" if is_word else f"**{{{quoted(key)}: {value}}}"


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def format_constant(constant: Constant, *, bare: bool = True) -> str:
    """A number: with its dtype unless a literal by itself means that, and may stand."""
    value, dtype = constant.value, constant.type.dtype
    text = float.__repr__(value) if isinstance(value, float) else repr(value)
    return text if bare and BARE.get(type(value)) is dtype else f"{dtype.short}({text})"


def quoted(text: str) -> str:
    """A string literal in double quotes, in ASCII."""
    inner = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{inner}"'


class _Writer:
    """Collects lines, each a text and a note, over a graph and its subgraphs."""

    def __init__(self, width: int, graph: Graph) -> None:
        self.width, self.survey, self.whole = width, _Survey(graph), graph
        self.lines: list[tuple[str, str]] = []
        self.objects: dict[int, tuple[str, Any]] = {}

    def root(self) -> None:
        name = Names(self.survey.reserved).unique(self.whole.name, "f")
        self.graph(self.whole, name, 0, {})

    def graph(
        self, graph: Graph, name: str, depth: int, known: Mapping[Graph, str]
    ) -> None:
        """Add a graph; `known` are those of the graphs around it that it may call."""
        names = Names(self.survey.reserved, self.objects, _own={*known.values()})
        path = self.survey.paths[graph]
        inputs = self.inputs(graph, names)
        # The results' types may name symbols that only the body brings forth.
        returned = names.types(graph.out_types)
        self.broken(f"def {name}(", [inputs], f") -> {returned}:", depth)
        graphs = dict(known)
        for subgraph in self.survey.shared.get(graph, ()):
            key = next(iter(self.survey.callers[subgraph].values()))
            inner = names.unique(subgraph_name(key), "body")
            self.graph(subgraph, inner, depth + 1, graphs)
            graphs[subgraph] = inner
        known = dict(graphs)
        for node in graph.nodes:
            for key, subgraph in node.graphs.items():
                if subgraph not in graphs:
                    inner = graphs[subgraph] = names.unique(subgraph_name(key), "body")
                    self.graph(subgraph, inner, depth + 1, known)
            self.node(node, names, graphs, depth + 1, format_place(node, path))
        outputs = [names.arg(a) for a in graph.outputs]
        note = format_line(graph.output_line)
        line = f"{INDENT * (depth + 1)}return {', '.join(outputs) or '()'}"
        if len(outputs) < 2 or len(line) <= self.width:
            self.lines.append((line, note))
        else:
            self.broken("return (", [outputs], ")", depth + 1, note)

    def inputs(self, graph: Graph, names: Names) -> list[str]:
        found: list[str] = []
        section: str | None = "symbol"
        for var in graph.inputs:
            here = var.node.section
            if here != section and section == "symbol" and found:
                found.append("/")
            if here != section and here == "capture":
                found.append("*")
            section = here
            name = names.input(var)
            found.append(f"{name}: {names.type(var.type)}")
        if section == "symbol" and found:
            found.append("/")
        return found

    def node(
        self,
        node: Node,
        names: Names,
        graphs: Mapping[Graph, str],
        depth: int,
        note: str,
    ) -> None:
        for line in names.read(node.params.values()):
            self.lines.append((INDENT * depth + line, ""))
        if node.op is None:
            start, groups = "get_attr(", [[quoted(node.name)]]
        else:
            operator = operator_name(node.op.name)
            start = f"{operator}("
            bare = operator not in FUNCTIONS
            args = [names.arg(a, bare=bare) for a in node.args]
            params = [
                _param(key, names.static(value, graphs))
                for key, value in node.params.items()
            ]
            groups = [args, params]
        end = ")"
        if node.symbol is not None:
            start, end = f"int({start}", "))"
        if node.results:
            types = names.types([v.type for v in node.results])
            start = f"{names.results(node)}: {types} = {start}"
        self.broken(start, groups, end, depth, note)

    def broken(
        self,
        start: str,
        groups: Iterable[Sequence[str]],
        end: str,
        depth: int,
        note: str = "",
    ) -> None:
        """Add one line, or several if it is wider than `width`."""
        indent = INDENT * depth
        groups = [group for group in groups if group]
        line = f"{indent}{start}{', '.join(map(', '.join, groups))}{end}"
        if len(line) <= self.width or not groups:
            self.lines.append((line, note))
            return
        self.lines.append((f"{indent}{start}", note))
        inner = indent + INDENT * 2
        room = max(self.width - len(inner), 1)
        for i, group in enumerate(groups):
            last = "" if i == len(groups) - 1 else ","
            for text in _filled(group, room, last):
                self.lines.append((inner + text, ""))
        self.lines.append((f"{indent}{end}", ""))


def _filled(items: Sequence[str], room: int, last: str) -> list[str]:
    """`items` with commas between, as many on each line as there is room for."""
    lines = [""]
    for i, item in enumerate(items):
        text = item + (last if i == len(items) - 1 else ",")
        if lines[-1] and len(lines[-1]) + 1 + len(text) > room:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def subgraph_name(key: str) -> str:
    """The name of the graph under param `key`: `branches[0]` is `branches_0`."""
    return key.replace("]", "")
