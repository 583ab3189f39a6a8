"""The parser of graphs: the inverse of `printer.format_graph`.

The text may be untrusted: text that is no graph is refused with the line, the column
and what was expected there, and nothing is evaluated. Text that is accepted also runs
as Python: no name has another meaning there.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

from hopflow.dtypes import ALL
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
    plain_symbol,
    size_of,
    symbol_range,
    vars_of,
)
from hopflow.graph.origin import Place
from hopflow.graph.printer import BARE, RESERVED, operator_name, subgraph_path
from hopflow.graph.types import SYMBOL_TYPE, TensorType, same_type
from hopflow.recursion import deep_recursion
from hopflow.symbolic.ranges import INT64, NON_NEGATIVE
from hopflow.symbolic.size import (
    FUNCTIONS,
    Number,
    Symbol,
    SymFloat,
    SymInt,
    free_symbols,
)

HEADER: Final = "from __future__ import annotations"
"""An optional first line. Without it Python before 3.14 evaluates annotations, which
name symbols before their definition."""

MAX_DEPTH: Final = 64  # of tuples in tuples, and of operations in a size
MAX_LENGTH: Final = 1 << 24  # characters
MAX_DIGITS: Final = 400
MAX_TERMS: Final = 64  # of one size
MAX_SIZE: Final = 4096  # characters of one size in normal form
MAX_RANK: Final = 64  # as in NumPy
EXTENTS: Final = NON_NEGATIVE & INT64

# The comment of a line. Possessive quantifiers do not backtrack: it takes linear time.
_COMMENT: Final = re.compile(
    r"""(?:[^#"']|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')*+(#.*)"""
)
_PLACE: Final = re.compile(  # see `printer.format_place`
    # Each part begins with exactly one space: if parts could begin anywhere in a run of
    # spaces, matching would take quadratic time.
    r"#(?: (.+?):([0-9]{1,9}))?(?: in (\S+))?(?: of (\S+(?: → \S+)*))?\s*$"
)
_OPERATORS: Final[dict[type[ast.operator], Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_DTYPES: Final = {d.short: d for d in ALL}
_WORDS: Final = {"inf": float("inf"), "nan": float("nan")}

Naming: TypeAlias = Literal["new", "declared", "variable"]
"""The symbols that a size may name: new ones too, those that types have named before,
or only those that are variables."""


class Parsed(NamedTuple):
    """A graph, and the graphs of its functions by name: `f.<locals>.then`."""

    graph: Graph
    functions: dict[str, Graph]


@entry
def parse(
    text: str,
    operators: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Graph:
    """Return the graph that `text` describes; the inverse of `printer.format_graph`.

    Types are taken from the text. Whether operators infer the same types is checked by
    the verifier.

    Args:
        operators: The operators that the text can refer to, by name.
        attributes: The tensors of `get_attr` nodes by name; None for those left out.
        objects: Other objects that the text names; see `printer.named_objects`.

    Raises:
        ArgumentTypeError: `text` is no string.
        ProgramFormatError: `text` is no graph. The message names the line, the column,
            and what was expected there.
    """
    return parsed(text, operators, attributes or {}, objects or {}).graph


def parsed(
    text: str,
    operators: Mapping[str, Any],
    attributes: Mapping[str, Any],
    objects: Mapping[str, Any],
) -> Parsed:
    """Return the graph that `parse` does, with its functions.

    Raises:
        HopflowError: as `parse` does.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"parse: `text` must be a string, and is `{type(text).__name__}`."
        )
    if len(text) > MAX_LENGTH:
        raise ProgramFormatError(
            f"the text has {len(text)} characters; at most {MAX_LENGTH} are read."
        )
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        where = f"line {error.lineno or 1}, column {error.offset or 1}"
        raise ProgramFormatError(f"{where}: {error.msg}.") from None
    except (MemoryError, RecursionError, ValueError) as error:
        why = str(error) or "it is nested too deeply"
        raise ProgramFormatError(f"the text is no Python: {why}.") from None
    with deep_recursion():
        return _Reader(text, operators, attributes, objects).program(module)


@dataclass(slots=True)
class _Scope:
    """The names within one graph; `outer` is the scope of the enclosing graph.

    path      the qualified name of the function
    names     the variables: inputs and results of nodes (a tuple for several), symbols
              assigned from shapes, and graphs
    symbols   the symbols that types may name
    foreign   names that were looked up in enclosing scopes
    """

    graph: Graph
    path: str
    outer: "_Scope | None"
    names: dict[str, Any] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)

    def find(self, name: str) -> Any:
        """Return the value of a name in this scope or an enclosing one."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.names:
            scope.foreign.add(name)
            scope = scope.outer
        return None if scope is None else scope.names[name]


class _Reader:
    def __init__(
        self,
        text: str,
        operators: Mapping[str, Any],
        attributes: Mapping[str, Any],
        objects: Mapping[str, Any],
    ) -> None:
        self.text = text
        # Python's line numbers count these line ends.
        self.lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self.operators = {operator_name(name): op for name, op in operators.items()}
        self.attributes, self.objects = attributes, objects
        self.functions: dict[str, Graph] = {}
        # Equal names are one symbol in all graphs, as in a trace: each graph binds its
        # symbols, and types are compared by substitution.
        self.symbols: dict[str, Symbol] = {}
        # The names of operators and of variables in the whole text.
        self.called: set[str] = set()
        self.defined: set[str] = set()

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        line = getattr(node, "lineno", len(self.lines))
        before = self.lines[line - 1].encode()[: getattr(node, "col_offset", 0)]
        column = len(before.decode()) + 1
        raise ProgramFormatError(f"line {line}, column {column}: {why}.")

    def expected(self, description: str, node: ast.AST) -> NoReturn:
        source = ast.get_source_segment(self.text, node)
        shown = f"`{source.splitlines()[0][:40]}`" if source else "the end of the text"
        self.fail(node, f"expected {description}, found {shown}")

    def place(self, node: ast.stmt) -> Place:
        """Return the place that the comment on a statement's first line states."""
        comment = _COMMENT.fullmatch(self.lines[node.lineno - 1])
        place = _PLACE.match(comment[1]) if comment is not None else None
        if place is None:
            return Place()
        file, number, module, path = place.groups("")
        return Place(SourceLine(file, int(number)) if file else None, module, path)

    # --- names ---

    def define(self, scope: _Scope, name: str, value: Any, node: ast.AST) -> None:
        """Define a new variable."""
        if name in RESERVED or name in self.called:
            self.fail(node, f"`{name}` is reserved, or the name of an operator")
        if name in scope.names or name in scope.foreign:
            self.fail(node, f"`{name}` is defined twice")
        self.defined.add(name)
        scope.names[name] = value

    # --- graphs ---

    def program(self, module: ast.Module) -> Parsed:
        body: Sequence[ast.AST] = [*module.body, module]
        if isinstance(body[0], ast.ImportFrom):
            if ast.unparse(body[0]) != HEADER:
                self.expected(f"`{HEADER}`, or no import", body[0])
            body = body[1:]
        first, last, *_ = [*body, module]
        if not isinstance(first, ast.FunctionDef):
            self.expected("`def`", first)
        root = _Scope(Graph(), "", None)
        self.function(root, first)
        if last is not module:
            self.expected("the end of the text, for the graph has returned", last)
        graph: Graph = root.names[first.name]
        _name_paths(graph)
        return Parsed(graph, self.functions)

    def function(self, outer: _Scope, node: ast.FunctionDef) -> None:
        """Define the graph of a function."""
        path = f"{outer.path}.<locals>.{node.name}" if outer.path else node.name
        scope = _Scope(Graph(node.name), path, outer)
        if not outer.path:
            self.defined.add(node.name)  # the one global name of the text
        self.inputs(scope, node)
        *statements, last = node.body
        for statement in statements:
            match statement:
                case ast.FunctionDef():
                    self.function(scope, statement)
                case ast.AnnAssign(ast.Name(name), annotation, ast.Call() as call, 1):
                    self.assign(scope, name, annotation, call, statement)
                case ast.Assign([ast.Name(name)], value):
                    self.shape_symbol(scope, name, value, statement)
                case ast.Expr(ast.Call() as call):
                    self.node(scope, call, [], statement)
                case _:
                    self.expected("a node, a graph or `return` at the end", statement)
        self.outputs(scope, node, last)
        self.define(outer, node.name, scope.graph, node)
        self.functions[path] = scope.graph

    def inputs(self, scope: _Scope, node: ast.FunctionDef) -> None:
        args = node.args
        unsupported = [
            *args.defaults,
            *filter(None, args.kw_defaults),
            args.vararg,
            args.kwarg,
        ]
        unsupported += [*node.decorator_list, *getattr(node, "type_params", [])]
        if any(unsupported):
            self.expected("a function with names and types of its inputs alone", node)
        rows: list[tuple[ast.arg, Section]] = [
            *((arg, "symbol") for arg in args.posonlyargs),
            *((arg, "operand") for arg in args.args),
            *((arg, "capture") for arg in args.kwonlyargs),
        ]
        for arg, section in rows:
            if arg.annotation is None:
                self.expected("an input and its type, as `x: f32[3]`", arg)
            # A carry of a subgraph may have a new size, which each step changes.
            is_step = section == "operand" and "." in scope.path
            type_ = self.type(scope, arg.annotation, "new" if is_step else "declared")
            symbol = None
            if section == "symbol":
                if not same_type(type_, SYMBOL_TYPE):
                    self.fail(arg, f"the symbol `{arg.arg}` must be i64, not {type_}")
                symbol = self.symbols.setdefault(arg.arg, Symbol(arg.arg))
                scope.symbols[arg.arg] = symbol
            var = scope.graph.add_input(type_, arg.arg, section, symbol)
            self.define(scope, arg.arg, var, arg)

    def outputs(self, scope: _Scope, node: ast.FunctionDef, last: ast.stmt) -> None:
        if not isinstance(last, ast.Return) or last.value is None:
            self.expected("`return` and the results, `()` for none", last)
        results = [self.arg(scope, x) for x in _items(last.value)]
        if node.returns is None:
            self.expected("`->` and the types of the results", node)
        # These are read after the body, which may define their symbols.
        declared = self.types(scope, node.returns)
        types = [a.type for a in results]
        if len(types) != len(declared) or not all(map(same_type, types, declared)):
            self.fail(
                last,
                f"the graph returns ({', '.join(map(str, types))}), but is declared to "
                f"return ({', '.join(map(str, declared))})",
            )
        scope.graph.outputs = tuple(results)
        scope.graph.output_line = self.place(last).line

    # --- nodes ---

    def assign(
        self,
        scope: _Scope,
        name: str,
        annotation: ast.expr,
        call: ast.Call,
        at: ast.stmt,
    ) -> None:
        """Read `v0: f32[3] = sin(x)`, or `u0: i64 = int(item(x))` for a symbol."""
        types = self.types(scope, annotation)
        is_symbol = isinstance(call.func, ast.Name) and call.func.id == "int"
        match call:
            case ast.Call(_, [ast.Call() as inner], []) if is_symbol:
                call = inner
            case _ if is_symbol:
                self.expected("`int` of one node", call)
        node = self.node(scope, call, types, at)
        if not types:
            self.expected("a call alone, for there are no results", at)
        results = node.results
        if is_symbol and isinstance(scope.names.get(name), Symbol):
            del scope.names[name]  # a shape has named it before
        self.define(scope, name, results if len(results) > 1 else results[0], at)
        if is_symbol:
            self.define_symbol(scope, name, node, at)

    def node(
        self, scope: _Scope, call: ast.Call, types: Sequence[TensorType], at: ast.stmt
    ) -> Node:
        """Read `name(*args, **params)`."""
        match call:
            case ast.Call(ast.Name("get_attr"), [ast.Constant(str(key))], []):
                if len(types) != 1 or key in scope.graph.attributes:
                    self.fail(call, f"`{key}` must be read once, as one result")
                value = self.attributes.get(key)
                node = scope.graph.add_attribute(types[0], key, value).node
            case ast.Call(ast.Name(name)) if name in self.operators:
                if name in self.defined:
                    self.fail(call, f"`{name}` is a variable's name, too")
                self.called.add(name)
                # `floor` of a bare number is the function of sizes.
                bare = name not in FUNCTIONS
                args = [self.arg(scope, x, bare=bare) for x in call.args]
                params = self.params(scope, call)
                node = scope.graph.call(self.operators[name], args, params, types)
            case ast.Call(ast.Name("get_attr")):
                self.expected("an attribute's name in quotes alone", call)
            case ast.Call(ast.Name(name)):
                self.fail(call, f"there is no operator `{name}`")
            case _:
                self.expected("an operator's name", call.func)
        node.line, node.module_path, node.operator_path = self.place(at)
        return node

    def params(self, scope: _Scope, call: ast.Call) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for keyword in call.keywords:
            match keyword:
                case ast.keyword(str(key), value):
                    pass
                case ast.keyword(None, ast.Dict([ast.Constant(str(key))], [value])):
                    pass  # a key that is no Python identifier
                case _:
                    self.expected("a param by its name, in quotes", keyword.value)
            if key in params:
                self.fail(value, f"the parameter `{key}` is given twice")
            params[key] = self.static(scope, value, 0)
        return params

    def define_symbol(self, scope: _Scope, name: str, node: Node, at: ast.stmt) -> None:
        """Define the symbol of a call, with the range that the call checks."""
        of_operands = {
            s for a in vars_of(node.args) for s in free_symbols(*a.type.shape)
        }
        if name in scope.symbols and scope.symbols[name] not in of_operands:
            self.fail(at, f"`{name}` is used before")
        if len(node.results) != 1 or not same_type(node.results[0].type, SYMBOL_TYPE):
            self.fail(at, f"`{name}` must be i64, the one result of its node")
        bounds = [node.params.get(key, 0) for key in ("min", "max")]
        if node.op is None or not all(type(bound) in (int, float) for bound in bounds):
            self.fail(at, f"the range of `{name}` must be numbers")
        symbol = scope.symbols.get(name) or self.symbols.get(name)
        checked_range = symbol_range(node)
        if symbol is None or not (
            symbol in of_operands or symbol.range == checked_range
        ):
            symbol = self.symbols[name] = Symbol(name, range=checked_range)
        scope.symbols[name] = node.symbol = symbol

    def shape_symbol(
        self, scope: _Scope, name: str, value: ast.expr, at: ast.stmt
    ) -> None:
        """Read `n = x.shape[0]`."""
        match value:
            case ast.Subscript(ast.Attribute(owner, "shape"), ast.Constant(int(axis))):
                shape = self.arg(scope, owner).type.shape
            case _:
                self.expected("a symbol from a shape, as `n = x.shape[0]`", at)
        symbol = plain_symbol(shape[axis]) if axis < len(shape) else None
        if symbol is None or symbol is not scope.symbols.get(name):
            self.fail(at, f"`{name}` is not the size there")
        self.define(scope, name, symbol, at)

    def arg(self, scope: _Scope, node: ast.expr, *, bare: bool = True) -> Arg:
        """Read the name of a value, or a constant with or without its dtype."""
        match node:
            case ast.Name(name) if name not in _WORDS:
                var = scope.names.get(name)
                if isinstance(var, tuple):
                    self.fail(node, f"`{name}` has several results: say which")
            case ast.Subscript(ast.Name(name), ast.Constant(int(index))):
                results = scope.names.get(name)
                var = results if isinstance(results, tuple) else ()
                var = var[index] if index < len(var) else None
            case ast.Call(ast.Name(name), [inner], []) if name in _DTYPES:
                return Constant(self.number(inner), TensorType(_DTYPES[name]))
            case _:
                value = self.number(node, "a value's name or a number")
                if not bare:
                    self.expected("a number with its dtype, as `f32(2.5)`", node)
                return Constant(value, TensorType(BARE[type(value)]))
        if not isinstance(var, Var):
            name = ast.unparse(node)
            self.fail(node, f"`{name}` is not defined before it is used")
        return var

    # --- types, sizes and other static values ---

    def number(
        self, node: ast.expr, description: str = "a number"
    ) -> bool | int | float:
        """Read a literal, `inf` or `nan`, with or without a minus."""
        value: Any = None
        match node:
            case ast.UnaryOp(ast.USub(), inner):
                value = self.number(inner, "a number after `-`")
                if isinstance(value, bool):
                    self.expected("a number after `-`", inner)
                value = -value
            case ast.Constant(bool() | int() | float() as value):
                self.check_length(value, node)
            case ast.Name(name):
                value = _WORDS.get(name)
        if not isinstance(value, bool | int | float):
            self.expected(description, node)
        return value

    def check_length(self, value: Number, node: ast.AST) -> None:
        if isinstance(value, int) and value.bit_length() > MAX_DIGITS * 10 // 3:
            self.fail(node, f"a number has more than {MAX_DIGITS} digits")

    def types(self, scope: _Scope, node: ast.expr) -> list[TensorType]:
        """Read the types of results: one, or those in `tuple[...]`."""
        rows = [node]
        match node:
            case ast.Subscript(ast.Name("tuple"), inner):
                rows = _items(inner)
                if len(rows) == 1:
                    self.expected("a type alone, for there is one result", node)
        return [self.type(scope, row, "new") for row in rows]

    def type(self, scope: _Scope, node: ast.expr, naming: Naming) -> TensorType:
        """Read `f32[s0, 4]`; a dtype alone is a scalar type."""
        match node:
            case ast.Name(name) if name in _DTYPES:
                return TensorType(_DTYPES[name])
            case ast.Subscript(ast.Name(name), inner) if name in _DTYPES:
                rows = _items(inner)
            case _:
                self.expected("a type such as `f32[3]`", node)
        if len(rows) > MAX_RANK:
            self.fail(node, f"a shape has more than {MAX_RANK} dimensions")
        shape = [self.size(scope, row, naming) for row in rows]
        for row, size in zip(rows, shape, strict=True):
            if isinstance(size, int) and size not in EXTENTS:
                self.fail(
                    row, f"an extent must be from 0 to {EXTENTS.high}, and is {size}"
                )
        return TensorType(_DTYPES[name], tuple(shape))

    def size(self, scope: _Scope, node: ast.expr, naming: Naming) -> int | SymInt:
        """Read a Python expression over symbols: `2*s0*s1 - s0 // 2 + max(1, s0)`."""
        value = self.term(scope, node, naming, 0)
        if not isinstance(value, int | SymInt):
            self.expected("a size, which is an integer", node)
        return value

    def term(self, scope: _Scope, node: ast.expr, naming: Naming, depth: int) -> Number:
        """Evaluate a part of a size; its length is limited."""
        if depth > MAX_DEPTH:
            self.fail(node, f"a size is nested deeper than {MAX_DEPTH}")
        f: Callable[..., Number]
        match node:
            case ast.Constant(int() | float() as number) if type(number) is not bool:
                self.check_length(number, node)
                return number
            case ast.Name(name):
                return self.symbol(scope, node, name, naming)
            case ast.UnaryOp(ast.USub(), inner):
                parts, f = [inner], operator.neg
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                parts, f = [left, right], _OPERATORS[type(kind)]
            case ast.Call(ast.Name(name), parts, []) if name in FUNCTIONS:
                f = FUNCTIONS[name]
            case _:
                self.expected("a size", node)
        if len(parts) > MAX_TERMS:
            self.fail(node, f"a call has more than {MAX_TERMS} arguments")
        operands = [self.term(scope, p, naming, depth + 1) for p in parts]
        if f is operator.pow and not {float, SymFloat} & set(map(type, operands)):
            self.fail(node, "a power of integers is written as a product")
        try:
            value = f(*operands)
        except (ArithmeticError, TypeError, ValueError, HopflowError) as error:
            self.fail(node, f"this has no meaning in a size: {error}")
        self.check_length(value, node)
        if isinstance(value, SymInt | SymFloat) and (
            len(str(value)) > MAX_SIZE
            or (isinstance(value, SymInt) and len(value.expression) > MAX_TERMS)
        ):
            self.fail(node, f"a size has more than {MAX_TERMS} terms")
        return value

    def symbol(
        self, scope: _Scope, node: ast.expr, name: str, naming: Naming
    ) -> SymInt:
        symbol, variable = scope.symbols.get(name), scope.names.get(name)
        if not (symbol or variable or name in RESERVED) and naming == "new":
            symbol = scope.symbols[name] = self.symbols.setdefault(name, Symbol(name))
        if isinstance(variable, Var):
            variable = variable.node.symbol
        if symbol is None or (naming == "variable" and variable is not symbol):
            self.fail(node, f"`{name}` is not a symbol defined before")
        return size_of(symbol)

    def static(self, scope: _Scope, node: ast.expr, depth: int) -> Any:
        """Read the value of a parameter."""
        if depth > MAX_DEPTH:
            self.fail(node, f"tuples are nested deeper than {MAX_DEPTH}")
        match node:
            case ast.Tuple(items):
                return tuple([self.static(scope, x, depth + 1) for x in items])
            case ast.Constant(None | str() as value):
                return value
            case ast.Subscript():
                return self.type(scope, node, "variable")
            case ast.Name(name) if name in _DTYPES:
                return _DTYPES[name]
            case ast.Name(name) if name not in _WORDS and name not in scope.symbols:
                if not isinstance(graph := scope.find(name), Graph):
                    self.fail(node, f"`{name}` is no graph and no symbol here")
                return graph
            case ast.Attribute(ast.Name("objects"), name) if name in self.objects:
                return self.objects[name]
            case ast.Attribute():
                self.expected("a name of the objects that are given", node)
            case ast.UnaryOp(ast.USub(), ast.Constant() | ast.Name("nan" | "inf")):
                return self.number(node)
            case ast.UnaryOp() | ast.BinOp() | ast.Call():
                return self.size(scope, node, "variable")
            case ast.Name(name) if name in scope.symbols:
                return self.size(scope, node, "variable")
        return self.number(node, "a number, a text, a type or a size")


def _items(node: ast.expr) -> list[ast.expr]:
    """Return the items of a tuple; any other expression is a single item."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _name_paths(root: Graph) -> None:
    """Set the operator paths of nodes whose comments do not state one."""
    seen = {root}

    def visit(graph: Graph, path: str) -> None:
        for node in graph.nodes:
            node.operator_path = node.operator_path or path
            for key, inner in node.graphs.items():
                if inner not in seen:
                    seen.add(inner)
                    visit(inner, subgraph_path(path, node, key))

    visit(root, "")
