"""Graphs as text that `parser.parse` reads back; they read as follows.

    graph f(s0: i64[], /, x: f32[s0, 4], *, w: f32[4]) -> f32[s0, 4]:
        %0: f32[s0, 4] = multiply(x, w)     # model.py:3
        return %0

A subgraph that several graphs call stands once, in the innermost that all are within.

Inputs before `/` are symbols, those after `*` captures. A result without `%` defines a
symbol: `u0: i64[] = item(%0)`. A constant is written as Python would, with its dtype
(`2.0:f64`) unless it is what Python's bool, int and float give.

After a node's line stands the module that it is of, and the operators that it was in if
its graph does not tell: `# model.py:3 in layers.0 of scan/body → cond/then`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Final, TypeAlias

from hopflow.config import config
from hopflow.dtypes import ALL, DEFAULT_FLOAT, DEFAULT_INT, DType, bool_
from hopflow.graph.core import Arg, Constant, Graph, Node, SourceLine, Var
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Size, Symbol, SymInt, renamed

INDENT: Final = "    "
# What a bare literal means; any other constant says its dtype.
BARE: Final[Mapping[type, DType]] = {
    bool: bool_,
    int: DEFAULT_INT,
    float: DEFAULT_FLOAT,
}
# Words that mean something where a name could stand.
RESERVED: Final = frozenset(
    ["graph", "return", "True", "False", "None", "nan", "inf", *(d.short for d in ALL)]
)
_GAP: Final = 2  # least columns between a line and its comment


def format_graph(graph: Graph, *, width: int | None = None) -> str:
    """The text of `graph` and its subgraphs, ending in a newline.

    Args:
        width: Columns that lines may take, comments apart; None for
            `config.print_width`. A wider line is broken within its brackets.
    """
    writer = _Writer(config.print_width if width is None else width, _shared(graph))
    writer.graph(graph, identifier(graph.name, "f"), 0, {})
    return _aligned(writer.lines)


Shared: TypeAlias = Mapping[Graph, list[tuple[str, Graph]]]
"""graph -> the subgraphs that stand in it because several graphs within it call them,
each before those that call it, with the param that holds it."""


def _shared(root: Graph) -> Shared:
    callers: dict[Graph, dict[Graph, str]] = {root: {}}
    done: dict[Graph, None] = {}  # callees first

    def visit(graph: Graph) -> None:
        for node in graph.nodes:
            for key, subgraph in node.graphs.items():
                if subgraph not in callers:
                    callers[subgraph] = {}
                    visit(subgraph)
                callers[subgraph].setdefault(graph, key)
        done[graph] = None

    visit(root)
    # The graphs around each, from itself outwards; callers come before what they call.
    around: dict[Graph, list[Graph]] = {}
    for graph in reversed(done):
        outer = [around[caller] for caller in callers[graph]]
        within = outer[0] if outer else []
        around[graph] = [graph, *(g for g in within if all(g in a for a in outer))]
    found: dict[Graph, list[tuple[str, Graph]]] = {}
    for graph in done:
        if len(callers[graph]) > 1:
            key = next(iter(callers[graph].values()))
            found.setdefault(around[graph][1], []).append((key, graph))
    return found


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    """Lines with their comments in one column."""
    noted = [len(text) for text, note in lines if note]
    column = max(noted, default=0) + _GAP
    return "".join(
        f"{text:<{column}}# {note}\n" if note else f"{text}\n" for text, note in lines
    )


def identifier(name: str, default: str) -> str:
    """`name` made an identifier that means nothing else here."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    if found[:1].isdigit() or found in RESERVED:
        found = f"_{found}"
    return found if found.strip("_") else default


def keyword_name(param: str) -> str:
    """A parameter's name as the text has it: `else_` is written `else`."""
    return param[:-1] if param.endswith("_") and iskeyword(param[:-1]) else param


def sections(node: Node) -> list[tuple[Arg, ...]]:
    """The operands of a call in the groups that the text divides by `;`.

    An operator may have a rule `format_sections(node)` that says; else there is one.
    """
    rule = getattr(node.op, "format_sections", None)
    groups = [node.args] if rule is None else rule(node)
    return [tuple(group) for group in groups if group]


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


class Names:
    """The names of one graph's values: each once, whatever the graph calls them."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.vars: dict[Var, str] = {}
        self.symbols: dict[Symbol, str] = {}
        self._taken = set(taken)
        self._results = 0

    def unique(self, name: str) -> str:
        found, number = name, 1
        while found in self._taken:
            found, number = f"{name}_{number}", number + 1
        self._taken.add(found)
        return found

    def input(self, var: Var) -> str:
        """Name an input; a symbol's gives the symbol its name."""
        symbol = var.node.symbol
        name = symbol.name if symbol is not None else var.node.name
        found = self.vars[var] = self.unique(identifier(name, "x"))
        if symbol is not None:
            self.symbols.setdefault(symbol, found)
        return found

    def result(self, var: Var) -> str:
        """Name a result: `%0`, `%1`, … in order, `%w` for an attribute `w`, `u0` for
        what defines the symbol `u0`."""
        if var.node.symbol is not None:
            found = self.symbol(var.node.symbol)
        elif var.node.kind == "get_attr":
            name = identifier(var.node.name, "attribute")
            found = self.unique(f"%{name}")
        else:
            found = f"%{self._results}"
            self._results += 1
        self.vars[var] = found
        return found

    def symbol(self, symbol: Symbol) -> str:
        """The name of a symbol; one that no input binds gets its name here."""
        if symbol not in self.symbols:
            self.symbols[symbol] = self.unique(identifier(symbol.name, "u"))
        return self.symbols[symbol]

    def size(self, size: Size) -> str:
        return format_size(size, self)

    def type(self, type_: TensorType) -> str:
        return f"{type_.dtype.short}[{', '.join(map(self.size, type_.shape))}]"

    def arg(self, arg: Arg) -> str:
        if isinstance(arg, Constant):
            return format_constant(arg)
        # A graph that the verifier refuses is printed too, so that one can see why.
        return self.vars.get(arg) or "%undefined"


def format_size(size: Size, names: Names) -> str:
    """A size over named symbols, in the normal form that it has under these names."""
    return renamed(size, names.symbol) if isinstance(size, SymInt) else str(int(size))


def format_constant(constant: Constant) -> str:
    value, dtype = constant.value, constant.type.dtype
    text = float.__repr__(value) if isinstance(value, float) else repr(value)
    return text if BARE.get(type(value)) is dtype else f"{text}:{dtype.short}"


class _Writer:
    """Collects lines, each a text and a note, over a graph and its subgraphs."""

    def __init__(self, width: int, shared: Shared) -> None:
        self.width, self.shared = width, shared
        self.lines: list[tuple[str, str]] = []

    def graph(
        self,
        graph: Graph,
        name: str,
        depth: int,
        known: Mapping[Graph, str],
        path: str = "",
    ) -> None:
        """Add a graph; `known` are those of the graphs around it that it may call."""
        names = Names(known.values())
        self.broken(
            f"graph {name}(",
            [self.inputs(graph, names)],
            # The results' types may name symbols that only the body brings forth.
            f") -> {self.result_types(graph, names)}:",
            depth,
        )
        for key, subgraph in self.shared.get(graph, ()):
            inner = names.unique(subgraph_name(key))
            self.graph(subgraph, inner, depth + 1, known)
            known = {**known, subgraph: inner}
        graphs = dict(known)
        for node in graph.nodes:
            for key, subgraph in node.graphs.items():
                if subgraph not in graphs:
                    inner = graphs[subgraph] = names.unique(subgraph_name(key))
                    within = subgraph_path(path, node, key)
                    self.graph(subgraph, inner, depth + 1, known, within)
            self.node(node, names, graphs, depth + 1, format_place(node, path))
        outputs = [[names.arg(a) for a in graph.outputs]]
        note = format_line(graph.output_line)
        self.broken("return ", outputs, "", depth + 1, note)

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

    def result_types(self, graph: Graph, names: Names) -> str:
        types = [names.type(t) for t in graph.out_types]
        return types[0] if len(types) == 1 else f"({', '.join(types)})"

    def node(
        self,
        node: Node,
        names: Names,
        graphs: Mapping[Graph, str],
        depth: int,
        note: str,
    ) -> None:
        groups = [[names.arg(a) for a in group] for group in sections(node)]
        params = [
            f"{keyword_name(key)}={static_text(value, names, graphs)}"
            for key, value in node.params.items()
        ]
        results = [f"{names.result(v)}: {names.type(v.type)}" for v in node.results]
        if node.op is None:
            head, groups = node.kind, [[quoted(node.name)]]
        else:
            head = node.op.name
        # Where there are graphs, params are a section of their own.
        if params and (node.graphs or not groups):
            groups.append(params)
        elif params:
            groups[-1] = groups[-1] + params
        start = f"{', '.join(results)} = {head}(" if results else f"{head}("
        self.broken(start, groups, ")", depth, note)

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
        joined = [", ".join(group) for group in groups]
        line = f"{indent}{start}{'; '.join(joined)}{end}".rstrip()
        if len(line) <= self.width or not any(joined) or not end:
            self.lines.append((line, note))
            return
        self.lines.append((f"{indent}{start}".rstrip(), note))
        inner = indent + INDENT * 2
        room = max(self.width - len(inner), 1)
        for i, group in enumerate(groups):
            last = "" if i == len(joined) - 1 else ";"
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
    """The name of the graph under param `key`: `else_` is `else`, `branches[0]` is
    `branches_0`."""
    return identifier(keyword_name(key).replace("]", ""), "body")


def quoted(text: str) -> str:
    """A string literal in double quotes, in ASCII."""
    inner = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{inner}"'


def static_text(value: Any, names: Names, graphs: Mapping[Graph, str]) -> str:
    """A static parameter. An object of no static kind is shown, but does not parse; of
    one that is no part of the structure there is its text, which parses as a string."""
    match value:
        case bool() | int() | None:
            return repr(value)
        case float():
            return float.__repr__(value)
        case str():
            return quoted(value)
        case SymInt():
            return names.size(value)
        case DType():
            return value.short
        case TensorType():
            return names.type(value)
        case Graph():
            return graphs[value]
        case tuple():
            inner = [static_text(v, names, graphs) for v in value]
            return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    key = getattr(type(value), "structural_key", None)
    if key is not None and not key(value):
        return quoted(str(value))
    shown = getattr(value, "__qualname__", type(value).__qualname__)
    return f"<{shown}>"
