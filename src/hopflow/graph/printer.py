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

A graph is a function: its inputs before `/` are symbols, those after `*` captures. Of
the enclosing functions it uses only the graphs that it calls. A graph that several
others call is defined once, in the innermost function that encloses them all. A graph
nested deeper than `NESTED` is defined in the outermost function.

A node is one statement: an annotated assignment of its result, or of the tuple of its
results if it has several; a call if it has none. Operands are positional arguments,
params keyword arguments. `int(...)` around the call makes the result a symbol, which is
a size by its name. A symbol that only a shape binds is assigned before params use it:
`n = x.shape[0]`. `get_attr("w")` reads an attribute of the graph.

`f32[s0, 4]` is a type; a scalar type is `f32` in an annotation, and `f32[()]` among
params, where `f32` is the dtype. A constant states its dtype, `f64(2.0)`, unless it is
the default dtype of a Python bool, int or float. An object that text cannot represent
has a name, such as `objects.record`.

The text runs in the namespace that `running.namespace` returns. Annotations must not be
evaluated: before Python 3.14 the text needs the first line of `GraphModule.code`.

The comment of a node has its source line, its module, and the operators that enclosed
it if these are not those of its graph:
`# model.py:3 in layers.0 of scan/body → cond/then`.
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
"""The maximum depth of nested functions. Python allows 100 levels of indentation."""

# The dtype of a bare literal; any other constant states its dtype.
BARE: Final[Mapping[type, DType]] = {
    bool: bool_,
    int: DEFAULT_INT,
    float: DEFAULT_FLOAT,
}
# Words that cannot be the name of a value.
RESERVED: Final = frozenset(
    ("__debug__", "tuple", "get_attr", "objects", "nan", "inf", "undefined")
).union(kwlist, FUNCTIONS, (d.short for d in ALL))
_GAP: Final = 2  # least columns between a line and its comment


def format_graph(graph: Graph, *, width: int | None = None) -> str:
    """Return the text of `graph` and its subgraphs, ending in a newline.

    Args:
        width: The maximum length of lines without comments; None for
            `config.print_width`. A longer statement is broken within its brackets.
    """
    writer = _Writer(config.print_width if width is None else width, graph)
    writer.root()
    return _aligned(writer.lines)


Graph.text = format_graph


def named_objects(graph: Graph) -> dict[str, Any]:
    """Return the objects that the text cannot represent, by their names in it."""
    writer = _Writer(0, graph)
    writer.root()
    return dict(writer.objects.values())


class _Survey:
    """Facts about a graph and its subgraphs that the first line depends on.

    callers   graph -> the graphs that call it, with the param that holds it
    shared    graph -> the subgraphs that are defined in it since several graphs call
              them, or for their depth, each before its callers
    paths     the operator path of each graph
    reserved  the names that no value and no function may have
    """

    def __init__(self, root: Graph) -> None:
        self.callers: dict[Graph, dict[Graph, str]] = {root: {}}
        self.paths = {root: ""}
        self.reserved = set(RESERVED)
        visited: dict[Graph, None] = {}  # callees first
        self._visit(root, visited)
        # For each graph itself and its enclosing graphs, outwards; callers come first.
        enclosing: dict[Graph, list[Graph]] = {}
        self.shared: dict[Graph, list[Graph]] = {}
        for graph in reversed(visited):
            of_callers = [enclosing[c] for c in self.callers[graph] if c in enclosing]
            common = [
                g for g in (of_callers or [[]])[0] if all(g in a for a in of_callers)
            ]
            is_deep = len(common) > NESTED
            enclosing[graph] = [graph, *([root] if is_deep else common)]
            if is_deep or len(of_callers) > 1:
                self.shared.setdefault(enclosing[graph][1], []).insert(0, graph)

    def _visit(self, graph: Graph, visited: dict[Graph, None]) -> None:
        for node in graph.nodes:
            if node.op is not None:
                self.reserved.add(operator_name(node.op.name))
            for key, subgraph in node.graphs.items():
                if subgraph not in self.callers:
                    self.callers[subgraph] = {}
                    self.paths[subgraph] = subgraph_path(self.paths[graph], node, key)
                    self._visit(subgraph, visited)
                self.callers[subgraph].setdefault(graph, key)
        visited[graph] = None


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    """Return the lines with their comments aligned in one column."""
    noted = [len(text) for text, note in lines if note]
    column = max(noted, default=0) + _GAP
    return "".join(
        f"{text:<{column}}# {note}\n" if note else f"{text}\n" for text, note in lines
    )


def identifier(name: str, default: str) -> str:
    """Return `name` as an ASCII identifier, or `default` if nothing is left of it."""
    text = re.sub(r"\W", "_", name, flags=re.ASCII)
    if text[:1].isdigit():
        text = f"_{text}"
    return text if text.strip("_") else default


def operator_name(name: str) -> str:
    """Return the name of an operator in the text; sizes have functions as `floor`."""
    text = identifier(name, "operator")
    is_free = text not in RESERVED or (text in FUNCTIONS and text != "int")
    return text if is_free else f"{text}_"


def _name_of(value: Any) -> str:
    """Return the name of a function or object, or that of its class."""
    for key in ("__name__", "name"):
        if isinstance(name := getattr(value, key, None), str):
            return name
    return type(value).__name__


def format_line(line: SourceLine | None) -> str:
    """Return a line as `model.py:3`; "" if a comment cannot represent it."""
    text = str(line).strip() if line is not None else ""
    return text if text.isprintable() and not text.startswith(":") else ""


def subgraph_path(path: str, node: Node, key: str) -> str:
    """Return the operator path within a graph of `node`; `path` is the node's."""
    inner = f"{node.op.name}/{key}"
    return f"{path} → {inner}" if path else inner


def format_place(node: Node, path: str) -> str:
    """Return the origin of a node as a comment.

    Args:
        path: The operator path of the nodes of its graph.
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
    """The names of the values of one graph, each unique.

    reserved   the names that values cannot have
    objects    id -> the name of an object that text cannot represent, and the object
    vars       var -> its text
    symbols    symbol -> its name
    unbound    symbol that no variable is bound to yet -> the text of a size that equals
               it
    """

    reserved: Collection[str] = RESERVED
    objects: dict[int, tuple[str, Any]] = field(default_factory=dict)
    vars: dict[Var, str] = field(default_factory=dict)
    symbols: dict[Symbol, str] = field(default_factory=dict)
    unbound: dict[Symbol, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _bound: set[Symbol] = field(default_factory=set)
    _results: int = 0

    def unique(self, name: str, default: str) -> str:
        base = identifier(name, default)
        candidate, number = f"{base}_" if base in self.reserved else base, 1
        while candidate in self.reserved or candidate in self._taken:
            candidate, number = f"{base}_{number}", number + 1
        self._taken.add(candidate)
        return candidate

    def input(self, var: Var) -> str:
        """Return a new name for an input. A symbol input also names its symbol."""
        symbol = var.node.symbol
        name = symbol.name if symbol is not None else var.node.name
        text = self.vars[var] = self.unique(name, "x")
        if symbol is not None:
            self.symbols.setdefault(symbol, text)
            self._bound.add(symbol)
        self._note_sizes(var)
        return text

    def results(self, node: Node) -> str:
        """Return a new name for the results of a node: `v0`, `v1`, … in order, `w`
        for an attribute `w`, `u0` for a node that defines the symbol `u0`."""
        if node.symbol is not None:
            text = self.symbol(node.symbol)
            self._bound.add(node.symbol)
        elif node.op is None:
            text = self.unique(node.name, "attribute")
        else:
            while (text := f"v{self._results}") in self.reserved or text in self._taken:
                self._results += 1
            self._taken.add(text)
        for var in node.results:
            several = len(node.results) > 1
            self.vars[var] = f"{text}[{var.index}]" if several else text
            self._note_sizes(var)
        return text

    def _note_sizes(self, var: Var) -> None:
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None and symbol not in self._bound:
                self.unbound.setdefault(symbol, f"{self.vars[var]}.shape[{axis}]")

    def bind_symbols(self, values: Iterable[Any]) -> list[str]:
        """Return statements that assign the static parameters' unbound symbols."""
        lines = []
        for symbol in static_symbols(values):
            if symbol not in self._bound and symbol in self.unbound:
                self._bound.add(symbol)
                lines.append(f"{self.symbol(symbol)} = {self.unbound[symbol]}")
        return lines

    def symbol(self, symbol: Symbol) -> str:
        """Return the name of a symbol; one that no input binds gets its name here."""
        if symbol not in self.symbols:
            self.symbols[symbol] = self.unique(symbol.name, "u")
        return self.symbols[symbol]

    def size(self, size: Size) -> str:
        """Return the text of a size in normal form, over named symbols."""
        return renamed(size, self.symbol) if isinstance(size, SymInt) else f"{size:d}"

    def type(self, type_: TensorType, scalar: str = "") -> str:
        """Return the text of a type; `scalar` follows the dtype if it has no axes."""
        shape = ", ".join(map(self.size, type_.shape))
        return f"{type_.dtype.short}{f'[{shape}]' if shape else scalar}"

    def types(self, types: Sequence[TensorType]) -> str:
        """Return the annotation of results."""
        inner = list(map(self.type, types))
        return inner[0] if len(inner) == 1 else f"tuple[{', '.join(inner) or '()'}]"

    def arg(self, arg: Arg, *, bare: bool = True) -> str:
        if isinstance(arg, Constant):
            return format_constant(arg, bare=bare)
        # Invalid graphs are printed too, for the messages of the verifier.
        return self.vars.get(arg) or "undefined"

    def static(self, value: Any, graphs: Mapping[Graph, str]) -> str:
        """Return the text of a static parameter."""
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
            name = Names(_taken=taken).unique(_name_of(value), "object")
            self.objects[id(value)] = name, value
        return f"objects.{self.objects[id(value)][0]}"


def _param(key: str, value: str) -> str:
    """Return `key=value`, or `**{"key": value}` if the key is no Python identifier."""
    is_word = key.isascii() and key.isidentifier() and not iskeyword(key)
    return f"{key}={value}" if is_word else f"**{{{quoted(key)}: {value}}}"


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def format_constant(constant: Constant, *, bare: bool = True) -> str:
    """Return a number, with its dtype unless a bare literal is allowed and enough."""
    value, dtype = constant.value, constant.type.dtype
    text = float.__repr__(value) if isinstance(value, float) else repr(value)
    return text if bare and BARE.get(type(value)) is dtype else f"{dtype.short}({text})"


def quoted(text: str) -> str:
    """Return a string literal in double quotes, in ASCII."""
    inner = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{inner}"'


class _Writer:
    """Collect the lines of a graph and its subgraphs, each a text and a comment."""

    def __init__(self, width: int, graph: Graph) -> None:
        self.width, self.survey, self.whole = width, _Survey(graph), graph
        self.lines: list[tuple[str, str]] = []
        self.objects: dict[int, tuple[str, Any]] = {}

    def root(self) -> None:
        name = Names(self.survey.reserved).unique(self.whole.name, "f")
        self.graph(self.whole, name, 0, {})

    def graph(
        self, graph: Graph, name: str, depth: int, visible: Mapping[Graph, str]
    ) -> None:
        """Add a graph; it may call the `visible` subgraphs of enclosing graphs."""
        names = Names(self.survey.reserved, self.objects, _taken={*visible.values()})
        path = self.survey.paths[graph]
        inputs = self.inputs(graph, names)
        # The types of the results may name symbols that the body defines.
        returned = names.types(graph.out_types)
        self.statement(f"def {name}(", [inputs], f") -> {returned}:", depth)
        graphs = dict(visible)
        for subgraph in self.survey.shared.get(graph, ()):
            key = next(iter(self.survey.callers[subgraph].values()))
            inner = names.unique(subgraph_name(key), "body")
            self.graph(subgraph, inner, depth + 1, graphs)
            graphs[subgraph] = inner
        visible = dict(graphs)
        for node in graph.nodes:
            for key, subgraph in node.graphs.items():
                if subgraph not in graphs:
                    inner = graphs[subgraph] = names.unique(subgraph_name(key), "body")
                    self.graph(subgraph, inner, depth + 1, visible)
            self.node(node, names, graphs, depth + 1, format_place(node, path))
        outputs = [names.arg(a) for a in graph.outputs]
        note = format_line(graph.output_line)
        line = f"{INDENT * (depth + 1)}return {', '.join(outputs) or '()'}"
        if len(outputs) < 2 or len(line) <= self.width:
            self.lines.append((line, note))
        else:
            self.statement("return (", [outputs], ")", depth + 1, note)

    def inputs(self, graph: Graph, names: Names) -> list[str]:
        parameters: list[str] = []
        previous: str | None = "symbol"
        for var in graph.inputs:
            section = var.node.section
            if section != previous and previous == "symbol" and parameters:
                parameters.append("/")
            if section != previous and section == "capture":
                parameters.append("*")
            previous = section
            name = names.input(var)
            parameters.append(f"{name}: {names.type(var.type)}")
        if previous == "symbol" and parameters:
            parameters.append("/")
        return parameters

    def node(
        self,
        node: Node,
        names: Names,
        graphs: Mapping[Graph, str],
        depth: int,
        note: str,
    ) -> None:
        for line in names.bind_symbols(node.params.values()):
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
        self.statement(start, groups, end, depth, note)

    def statement(
        self,
        start: str,
        groups: Iterable[Sequence[str]],
        end: str,
        depth: int,
        note: str = "",
    ) -> None:
        """Add a statement on one line, or on several if it is longer than `width`."""
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
    """Return lines of `items`, separated by commas, each as long as `room` allows."""
    lines = [""]
    for i, item in enumerate(items):
        text = item + (last if i == len(items) - 1 else ",")
        if lines[-1] and len(lines[-1]) + 1 + len(text) > room:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def subgraph_name(key: str) -> str:
    """Return the name of a graph in the text: `branches_0` for `branches[0]`."""
    return key.replace("]", "")
