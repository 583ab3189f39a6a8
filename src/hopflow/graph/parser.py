"""From text to graphs: the inverse of `printer.format_graph`.

What is read may come from a stranger: text that is no graph is refused, whatever it is,
with the line and what was expected there. Nothing is evaluated.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Final, NamedTuple, NoReturn

from hopflow.dtypes import ALL, DType
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, HopflowError, ProgramFormatError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Section,
    SourceLine,
    Var,
    size_of,
    symbol_range,
    vars_of,
)
from hopflow.graph.origin import Place
from hopflow.graph.printer import BARE, RESERVED, subgraph_path
from hopflow.graph.types import SYMBOL_TYPE, TensorType, same_type
from hopflow.recursion import deep_recursion
from hopflow.symbolic.ranges import INT64, NON_NEGATIVE
from hopflow.symbolic.size import (
    FUNCTIONS,
    Number,
    Size,
    Symbol,
    SymFloat,
    SymInt,
    free_symbols,
)

MAX_DEPTH: Final = 64  # of tuples in tuples, and of brackets
MAX_GRAPHS: Final = 512  # of graphs in graphs
MAX_LENGTH: Final = 1 << 24  # characters
MAX_DIGITS: Final = 400
MAX_TERMS: Final = 64  # of one size, and factors of one term
MAX_SIZE: Final = 4096  # characters of one size in normal form
MAX_RANK: Final = 64  # as in NumPy
EXTENTS: Final = NON_NEGATIVE & INT64

_TOKEN: Final = re.compile(
    r"""
      (?P<space>[ \t\r]+)
    | (?P<comment>\#[^\n]*)
    | (?P<newline>\n)
    | (?P<string>"(?:[ !#-\[\]-~]|\\(?:["\\nrt]|x[\da-f]{2}|u[\da-f]{4}|U[\da-f]{8}))*")
    | (?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    | (?P<name>%?[A-Za-z_0-9]+)
    | (?P<sign>->|//|\*\*|[()\[\]:;,=*/+%-])
    """,
    re.VERBOSE,
)
_PLACE: Final = re.compile(  # see `printer.format_place`
    # Each part begins with exactly one space: parts that could begin anywhere in a run
    # of spaces would make matching quadratic in its length.
    r"#(?: (.+?):([0-9]{1,9}))?(?: in (\S+))?(?: of (\S+(?: → \S+)*))?\s*$"
)
_OPERATORS: Final[dict[str, Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_DTYPES: Final = {d.short: d for d in ALL}
_LITERALS: Final[dict[str, Any]] = {
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
}


class Token(NamedTuple):
    """`kind` is a group of `_TOKEN`, or "end"; `column` counts from 0."""

    kind: str
    text: str
    line: int
    column: int

    def __str__(self) -> str:
        if self.kind == "newline":
            return "the end of the line"
        return f"`{self.text[:40]}`" if self.text else "the end of the text"


@entry
def parse(
    text: str, operators: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
) -> Graph:
    """The graph that `text` describes, as `printer.format_graph` writes it.

    The types are those of the text, and not checked against what operators infer: that
    is the verifier's part.

    Args:
        operators: The operators by name; all that the text can refer to.
        attributes: The tensors that `get_attr` nodes hold, by name; None for those that
            are not given.

    Raises:
        ArgumentTypeError: `text` is no string.
        ProgramFormatError: `text` is not a graph; the message names the line, and
            what was expected there.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"parse: `text` must be a string, and is `{type(text).__name__}`."
        )
    if len(text) > MAX_LENGTH:
        raise ProgramFormatError(
            f"the text has {len(text)} characters; at most {MAX_LENGTH} are read."
        )
    with deep_recursion():
        return _Parser(text, operators, attributes or {}).program()


@dataclass(slots=True)
class _Scope:
    """What names mean within one graph; `outer` is the scope of the graph around it."""

    graph: Graph
    depth: int
    outer: "_Scope | None"
    values: dict[str, Var] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)

    def graph_at(self, name: str) -> Graph | None:
        """The graph that may be called by a name here."""
        if name in self.graphs or name in self.symbols:
            return self.graphs.get(name)
        scope = self.outer
        while scope is not None and name not in scope.graphs:
            scope = scope.outer
        return None if scope is None else scope.graphs[name]

    def taken(self, name: str) -> bool:
        return name in self.values or name in self.graphs


class _Parser:
    def __init__(
        self, text: str, operators: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> None:
        self.operators = operators
        self.attributes = attributes
        self.notes: dict[int, Place] = {}
        # Symbols of one name are one object, in whatever graph, as in a trace: a graph
        # binds its own, and types are compared by substitution.
        self.known: dict[str, Symbol] = {}
        self.tokens = self.tokenized(text)
        self.at = 0

    # --- tokens ---

    def tokenized(self, text: str) -> list[Token]:
        """The tokens; ends of lines only where they end something."""
        found: list[Token] = []
        position, line, start, brackets = 0, 1, 0, 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                shown = text[position : position + 1]
                self.fail(line, f"`{shown}` has no meaning here")
            kind, piece = str(match.lastgroup), match.group()
            token = Token(kind, piece, line, position - start)
            position = match.end()
            if kind == "newline":
                line, start = line + 1, position
                if not brackets and found and found[-1].kind != "newline":
                    found.append(token)
            elif kind == "comment":
                if noted := _PLACE.match(piece):
                    file, number, module, path = noted.groups("")
                    at = SourceLine(file, int(number)) if file else None
                    self.notes[line] = Place(at, module, path)
            elif kind != "space":
                brackets = max(brackets + (piece in "([") - (piece in ")]"), 0)
                found.append(token)
        if found and found[-1].kind != "newline":
            found.append(Token("newline", "\n", line, 0))
        found.append(Token("end", "", line, 0))
        return found

    def fail(self, line: int, why: str) -> NoReturn:
        raise ProgramFormatError(f"line {line}: {why}.")

    def expected(self, what: str, token: Token | None = None) -> NoReturn:
        token = token or self.next
        self.fail(token.line, f"expected {what}, found {token}")

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.tokens[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is the sign or the word `text`."""
        token = self.tokens[self.at]
        if token.kind in ("sign", "name", "newline") and token.text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str, what: str = "") -> None:
        if not self.accept(text):
            self.expected(what or f"`{text}`")

    def word(self, what: str) -> Token:
        """The next token, which must be a name without `%`."""
        token = self.next
        if token.kind != "name" or token.text.startswith("%"):
            self.expected(what)
        return self.take()

    # --- graphs ---

    def program(self) -> Graph:
        if not (self.next.kind == "name" and self.next.text == "graph"):
            self.expected("`graph`")
        graph = self.graph(0, None)[1]
        if self.next.kind != "end":
            self.expected("the end of the text, for the graph has returned")
        _name_paths(graph, "")
        return graph

    def graph(self, depth: int, outer: _Scope | None) -> tuple[str, Graph]:
        """A graph from `graph` to the end of its `return`, and its name."""
        start = self.take()
        if depth > MAX_GRAPHS:
            self.fail(start.line, f"graphs are nested deeper than {MAX_GRAPHS}")
        name = self.word("the graph's name").text
        scope = _Scope(Graph(name), depth, outer)
        self.inputs(scope)
        self.expect("->", "`->` and the types of the results")
        types = self.at  # read at the end, for the body may define their symbols
        while self.next.text not in (":", "\n", ""):
            self.take()
        self.expect(":", "`:` and the body")
        self.expect("\n", "the end of the line")
        column = self.next.column
        if column <= start.column:
            self.fail(self.next.line, "the body must be indented deeper than `graph`")
        while True:
            token = self.next
            if token.kind == "end":
                self.expected("`return`")
            if token.column != column:
                self.fail(token.line, f"expected the line at column {column + 1}")
            if self.accept("return"):
                self.outputs(scope, types, token)
                return name, scope.graph
            if token.kind == "name" and token.text == "graph":
                inner, subgraph = self.graph(depth + 1, scope)
                if scope.taken(inner):
                    self.fail(token.line, f"`{inner}` is defined twice")
                scope.graphs[inner] = subgraph
            else:
                self.node(scope)

    def inputs(self, scope: _Scope) -> None:
        self.expect("(")
        section: Section = "symbol" if self.slash_ahead() else "operand"
        while not self.accept(")"):
            if section == "symbol" and self.accept("/"):
                section = "operand"
            elif section == "operand" and self.accept("*"):
                section = "capture"
            else:
                self.input(scope, section)
            if not self.accept(","):
                self.expect(")", "`,` or `)`")
                break

    def slash_ahead(self) -> bool:
        """Whether there is a `/` before the bracket that is open is closed."""
        depth = 0
        for i in range(self.at, len(self.tokens)):
            text = self.tokens[i].text
            if text in ("(", "["):
                depth += 1
            elif text in (")", "]"):
                depth -= 1
                if depth < 0:
                    return False
            elif text == "/" and not depth:
                return True
        return False

    def input(self, scope: _Scope, section: Section) -> None:
        token = self.word("an input's name")
        name = token.text
        if scope.taken(name) or name in RESERVED or name[0].isdigit():
            self.fail(token.line, f"`{name}` is reserved, or defined twice")
        self.expect(":", "`:` and the input's type")
        # A carry of a subgraph may have a size that each step changes.
        type_ = self.type(scope, declares=section == "operand" and scope.depth > 0)
        symbol = None
        if section == "symbol":
            if not same_type(type_, SYMBOL_TYPE):
                self.fail(token.line, f"the symbol `{name}` must be i64[], not {type_}")
            symbol = scope.symbols[name] = self.known.setdefault(name, Symbol(name))
        scope.values[name] = scope.graph.add_input(type_, name, section, symbol)

    def result_types(self, scope: _Scope) -> list[TensorType]:
        if not self.accept("("):
            return [self.type(scope)]
        found: list[TensorType] = []
        while not self.accept(")"):
            found.append(self.type(scope))
            if not self.accept(","):
                self.expect(")", "`,` or `)`")
                break
        return found

    def outputs(self, scope: _Scope, types_at: int, start: Token) -> None:
        found: list[Arg] = []
        while self.next.kind != "newline":
            found.append(self.arg(scope))
            if not self.accept(","):
                break
        self.expect("\n", "`,` or the end of the line")
        end, self.at = self.at, types_at
        declared = self.result_types(scope)
        self.expect(":", "`:` and the body")
        self.at = end
        types = [a.type for a in found]
        if len(types) != len(declared) or not all(map(same_type, types, declared)):
            self.fail(
                start.line,
                f"the graph returns ({', '.join(map(str, types))}), but is declared to "
                f"return ({', '.join(map(str, declared))})",
            )
        scope.graph.outputs = tuple(found)
        scope.graph.output_line = self.notes.get(start.line, Place()).line

    # --- nodes ---

    def node(self, scope: _Scope) -> None:
        """`%0: f32[], %1: i64[] = name(args; params)`"""
        start = self.next
        results: list[tuple[Token, TensorType]] = []
        while self.next.kind == "name" and (
            self.next.text.startswith("%") or self.tokens[self.at + 1].text == ":"
        ):
            token = self.take()
            self.expect(":", "`:` and the result's type")
            results.append((token, self.type(scope)))
            if not self.accept(","):
                break
        if results:
            self.expect("=", "`,` or `=`")
        operator = self.word("an operator's name" if results else "`return` or a node")
        self.expect("(")
        types = [t for _, t in results]
        if operator.text == "get_attr":
            node = self.attribute(scope, operator, types)
        elif operator.text in self.operators:
            args, params = self.arguments(scope)
            op = self.operators[operator.text]
            node = scope.graph.call(op, args, params, types)
        else:
            self.fail(operator.line, f"there is no operator `{operator.text}`")
        place = self.notes.get(start.line, Place())
        node.line, node.module_path, node.operator_path = place
        self.expect("\n", "the end of the line")
        for (token, _), var in zip(results, node.results, strict=True):
            if scope.taken(token.text):
                self.fail(token.line, f"`{token.text}` is defined twice")
            scope.values[token.text] = var
            if not token.text.startswith("%"):
                self.define(scope, token, node)

    def define(self, scope: _Scope, token: Token, node: Node) -> None:
        """Let a call define a symbol, of the range that it checks."""
        name = token.text
        brought = {s for a in vars_of(node.args) for s in free_symbols(*a.type.shape)}
        used = name in scope.symbols and scope.symbols[name] not in brought
        if used or name in RESERVED or name[0].isdigit():
            self.fail(token.line, f"`{name}` is reserved, or used before")
        if len(node.results) != 1 or not same_type(node.results[0].type, SYMBOL_TYPE):
            self.fail(token.line, f"`{name}` must be i64[], the one result of its node")
        ends = [node.params.get(key, 0) for key in ("min", "max")]
        if not all(type(end) in (int, float) for end in ends):
            self.fail(token.line, f"the range of `{name}` must be numbers")
        symbol = scope.symbols.get(name) or self.known.get(name)
        checked = symbol_range(node)
        if symbol is None or not (symbol in brought or symbol.range == checked):
            symbol = self.known[name] = Symbol(name, range=checked)
        scope.symbols[name] = node.symbol = symbol

    def attribute(
        self, scope: _Scope, operator: Token, types: list[TensorType]
    ) -> Node:
        token = self.next
        name = self.static(scope, 0)
        if not isinstance(name, str):
            self.expected("an attribute's name in quotes", token)
        self.expect(")")
        if len(types) != 1 or name in scope.graph.attributes:
            self.fail(
                operator.line, f"attribute {token} must be read once, as one result"
            )
        return scope.graph.add_attribute(types[0], name, self.attributes.get(name)).node

    def arguments(self, scope: _Scope) -> tuple[list[Arg], dict[str, Any]]:
        """Operands, then parameters, to the closing bracket."""
        args: list[Arg] = []
        params: dict[str, Any] = {}
        while not self.accept(")"):
            token = self.next
            if self.tokens[min(self.at + 1, len(self.tokens) - 1)].text == "=":
                name = self.word("a parameter's name").text
                if iskeyword(name):
                    name += "_"
                if name in params:
                    self.fail(token.line, f"the parameter `{name}` is given twice")
                self.take()
                params[name] = self.static(scope, 0)
            elif params:
                self.expected("a parameter, for those come last")
            else:
                args.append(self.arg(scope))
            if not self.accept(",") and not self.accept(";"):
                self.expect(")", "`,`, `;` or `)`")
                break
        return args, params

    def arg(self, scope: _Scope) -> Arg:
        """A value's name, or a constant with or without its dtype."""
        token = self.next
        if token.kind == "name" and token.text not in _LITERALS:
            self.take()
            var = scope.values.get(token.text)
            if var is None:
                self.fail(
                    token.line, f"`{token.text}` is not defined before it is used"
                )
            return var
        value = self.literal("a value's name or a number")
        dtype = BARE[type(value)]
        if self.accept(":"):
            dtype = self.dtype()
        return Constant(value, TensorType(dtype))

    # --- types, sizes and other static values ---

    def literal(self, what: str) -> bool | int | float:
        """A number or one of the words for numbers, with or without a minus."""
        negative = self.accept("-")
        token = self.next
        value: bool | int | float
        if token.kind == "number":
            if len(token.text) > MAX_DIGITS:
                self.fail(token.line, f"a number has more than {MAX_DIGITS} digits")
            value = int(token.text) if token.text.isdigit() else float(token.text)
        elif token.kind == "name" and token.text in _LITERALS:
            value = _LITERALS[token.text]
        else:
            self.expected(what)
        if negative and isinstance(value, bool):
            self.expected("a number after `-`")
        self.take()
        return -value if negative else value

    def dtype(self) -> DType:
        token = self.next
        if token.kind != "name" or token.text not in _DTYPES:
            self.expected("a dtype such as `f32`")
        return _DTYPES[self.take().text]

    def type(self, scope: _Scope, *, declares: bool = True) -> TensorType:
        """`f32[s0, 4]`. With `declares` a size may be a symbol that is new."""
        dtype = self.dtype()
        start = self.next
        self.expect("[", "`[` and the shape")
        shape: list[Size] = []
        while not self.accept("]"):
            if len(shape) == MAX_RANK:
                self.fail(start.line, f"a shape has more than {MAX_RANK} dimensions")
            at = self.next
            shape.append(self.size(scope, declares=declares))
            if isinstance(shape[-1], int) and shape[-1] not in EXTENTS:
                self.fail(
                    at.line,
                    f"an extent must be from 0 to {EXTENTS.high}, and is {shape[-1]}",
                )
            if not self.accept(","):
                self.expect("]", "`,` or `]`")
                break
        return TensorType(dtype, tuple(shape))

    def size(self, scope: _Scope, *, declares: bool) -> Size:
        """`2*s0*s1 - s0 // 2 + max(1, s0)`: Python, over symbols."""
        start = self.next
        value = self.sum(scope, declares, 0)
        if not isinstance(value, int | SymInt):
            self.expected("a size, which is an integer", start)
        return value

    def sum(self, scope: _Scope, declares: bool, depth: int) -> Number:
        if depth > MAX_DEPTH:
            self.fail(self.next.line, f"brackets are nested deeper than {MAX_DEPTH}")
        total = self.term(scope, declares, depth)
        terms = 1
        while self.next.text in ("+", "-"):
            op = self.take()
            total = self.computed(op, total, self.term(scope, declares, depth))
            terms += 1
            if terms > MAX_TERMS:
                self.fail(self.next.line, f"a size has more than {MAX_TERMS} terms")
        return total

    def term(self, scope: _Scope, declares: bool, depth: int) -> Number:
        product = self.factor(scope, declares, depth)
        factors = 1
        while self.next.text in ("*", "//", "%", "/"):
            op = self.take()
            product = self.computed(op, product, self.factor(scope, declares, depth))
            factors += 1
            if factors > MAX_TERMS:
                self.fail(self.next.line, f"a term has more than {MAX_TERMS} factors")
        return product

    def factor(self, scope: _Scope, declares: bool, depth: int) -> Number:
        """A number, a symbol, a call or a bracket, with a minus or a float's power."""
        negative = self.accept("-")
        value = self.primary(scope, declares, depth)
        if self.next.text == "**":
            op = self.take()
            exponent = self.primary(scope, declares, depth)
            if not {float, SymFloat} & {type(value), type(exponent)}:
                self.fail(op.line, "a power of integers is written as a product")
            value = self.computed(op, value, exponent)
        return -value if negative else value

    def primary(self, scope: _Scope, declares: bool, depth: int) -> Number:
        token = self.next
        if self.accept("("):
            value = self.sum(scope, declares, depth + 1)
            self.expect(")")
            return value
        if token.kind == "number":
            return self.literal("a size")
        name = self.word("a size").text
        if name in FUNCTIONS and self.accept("("):
            return self.computed(token, *self.operands(scope, declares, depth))
        symbol = scope.symbols.get(name)
        if symbol is None:
            if not declares or name in scope.values or name in RESERVED:
                self.fail(token.line, f"`{name}` is not a symbol defined before")
            symbol = scope.symbols[name] = self.known.setdefault(name, Symbol(name))
        return size_of(symbol)

    def operands(self, scope: _Scope, declares: bool, depth: int) -> list[Number]:
        """The arguments of a call, to its closing bracket."""
        found = [self.sum(scope, declares, depth + 1)]
        while self.accept(","):
            found.append(self.sum(scope, declares, depth + 1))
            if len(found) > MAX_TERMS:
                self.fail(self.next.line, f"a call has more than {MAX_TERMS} arguments")
        self.expect(")", "`,` or `)`")
        return found

    def computed(self, op: Token, *operands: Number) -> Number:
        """An operation of a size's text; its result is kept small."""
        try:
            value: Number = (_OPERATORS.get(op.text) or FUNCTIONS[op.text])(*operands)
        except (ArithmeticError, TypeError, ValueError, HopflowError) as error:
            self.fail(op.line, f"{op} has no meaning in this size: {error}")
        if isinstance(value, SymInt | SymFloat) and (
            len(str(value)) > MAX_SIZE
            or (isinstance(value, SymInt) and len(value.expression) > MAX_TERMS)
        ):
            self.fail(op.line, f"a size has more than {MAX_TERMS} terms")
        return value

    def static(self, scope: _Scope, depth: int) -> Any:
        """The value of a parameter."""
        token = self.next
        if depth > MAX_DEPTH:
            self.fail(token.line, f"tuples are nested deeper than {MAX_DEPTH}")
        if token.text == "(" and not self.size_in_brackets():
            self.take()
            return self.tuple(scope, depth)
        if self.accept("None"):
            return None
        if token.kind == "string":
            return self.string()
        after = self.tokens[self.at + 1].text if token.kind != "end" else ""
        if token.text in _DTYPES and token.kind == "name":
            return self.type(scope, declares=False) if after == "[" else self.dtype()
        graph = scope.graph_at(token.text) if token.kind == "name" else None
        if graph is not None and after != "(":
            self.take()
            return graph
        begin = self.at
        first = after if token.text == "-" else token.text
        if first[:1].isdigit() or first in _LITERALS:
            value = self.literal("a number or a size")
            if not (type(value) is int and self.next.text in _OPERATORS):
                return value
            self.at = begin  # the first term of a size
        return self.size(scope, declares=False)

    def size_in_brackets(self) -> bool:
        """Whether the bracket here is part of a size, as in `(n + 1) // 2`."""
        depth = 0
        for i in range(self.at, len(self.tokens) - 1):
            text = self.tokens[i].text
            depth += (text == "(") - (text == ")")
            if not depth:
                return self.tokens[i + 1].text in _OPERATORS
        return False

    def tuple(self, scope: _Scope, depth: int) -> tuple[Any, ...]:
        found: list[Any] = []
        while not self.accept(")"):
            found.append(self.static(scope, depth + 1))
            if not self.accept(","):
                self.expect(")", "`,` or `)`")
                break
        return tuple(found)

    def string(self) -> str:
        token = self.take()
        try:
            return token.text[1:-1].encode("ascii").decode("unicode_escape")
        except UnicodeError:
            self.fail(token.line, "a string has a code that is no character's")


def _name_paths(graph: Graph, path: str) -> None:
    """Give nodes whose text does not say it the operator path of their graph."""
    for node in graph.nodes:
        node.operator_path = node.operator_path or path
        for key, inner in node.graphs.items():
            _name_paths(inner, subgraph_path(path, node, key))
