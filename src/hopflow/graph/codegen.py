"""Graphs as Python source that runs: subgraphs are nested functions, lifted inputs free
variables of theirs.

    def f(x, p):
        # (x: f32[s0], p: bool[]) -> f32[s0]
        s0 = x.shape[0]
        def then():
            t0 = op.sin(x)  # f32[s0]
            return (t0,)
        ...
        t2 = op.cond(p, then=then, else_=else_)  # f32[s0]
        return (t2,)

The source refers to `op`, whose attributes are the operators, to `const(value, dtype)`
for a scalar that is not of Python's own dtype, and to `attributes`; see `namespace`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Final

from hopflow.dtypes import DType, as_dtype
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, plain_symbol
from hopflow.graph.interpreter import Bind
from hopflow.graph.printer import BARE, INDENT, format_line, identifier
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import FUNCTIONS, Size, Symbol, SymInt, renamed

_WORDS: Final = frozenset(
    ["op", "const", "attributes", "dtype", "tensor_type", "objects", *FUNCTIONS]
)
# Inputs of a region that a nested function has as parameters. The others are variables
# of the functions around it.
_PARAMETERS: Final = ("operand", "carry", "slice", "index")


def python_source(graph: Graph) -> str:
    """A function definition that computes `graph`; it returns a tuple."""
    return _Source().root(graph)[1]


def compile_source(graph: Graph, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `python_source(graph)` defines.

    Args:
        names: What the source refers to; see `namespace`.
    """
    source = _Source()
    name, text = source.root(graph)
    scope = {**names, "attributes": graph.attributes, "objects": source.objects}
    exec(compile(text, f"<graph {graph.name}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


class _Operators:
    """`op.sin(x)` binds the operator named `sin`."""

    def __init__(self, operators: Mapping[str, Any], bind: Bind) -> None:
        self._operators = operators
        self._bind = bind

    def __getattr__(self, name: str) -> Any:
        op = self._operators[name]

        def call(*args: Any, **params: Any) -> Any:
            operands = [_operand(a) for a in args]
            if any(map(_has_function, params.values())):
                results = op.debug(*operands, **params)
            else:
                results = self._bind(op, operands, params)
            return results[0] if len(results) == 1 else tuple(results)

        return call


def namespace(operators: Mapping[str, Any], bind: Bind) -> dict[str, Any]:
    """What generated source refers to.

    Args:
        operators: By name. One with subgraphs is called by its rule `debug`, with the
            args that its regions do not have from around them.
        bind: As `interpret` takes it.
    """
    return {
        **FUNCTIONS,
        "op": _Operators(operators, bind),
        "const": lambda value, dtype: Constant(value, TensorType(as_dtype(dtype))),
        "dtype": as_dtype,
        "tensor_type": lambda dtype, shape: TensorType(as_dtype(dtype), shape),
    }


def _operand(arg: Any) -> Any:
    return Constant(arg, TensorType(BARE[type(arg)])) if type(arg) in BARE else arg


def _has_function(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_function, value))
    return callable(value) and not isinstance(value, DType)


class _Source:
    """Writes functions. Names are unique over all of them: none hides another's."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.taken = set(_WORDS)
        self.texts: dict[Var, str] = {}
        self.sizes: dict[Symbol, str] = {}
        self.objects: list[Any] = []
        self.count = 0
        # What calls may share: functions without free variables that are visible here.
        self.functions: dict[Graph, str] = {}

    def unique(self, name: str, default: str) -> str:
        base = identifier(name, default)
        base = f"{base}_" if iskeyword(base) else base
        found, number = base, 1
        while found in self.taken:
            found, number = f"{base}_{number}", number + 1
        self.taken.add(found)
        return found

    def add(self, depth: int, text: str, note: str = "") -> None:
        self.lines.append((INDENT * depth + text, note))

    # --- functions ---

    def root(self, graph: Graph) -> tuple[str, str]:
        """The name of the function for `graph`, and the source."""
        name = self.unique(graph.name, "f")
        told = _told_by_shapes(graph)
        parameters: list[str] = []
        for var in graph.inputs:
            symbol = var.node.symbol
            text = self.texts[var] = self.unique(
                var.node.name if symbol is None else symbol.name, "x"
            )
            if symbol is not None:
                self.sizes[symbol] = text
            if symbol is None or symbol not in told:
                parameters.append(text)
        self.add(0, f"def {name}({', '.join(parameters)}):")
        self.add(1, f"# {self.signature(graph)}")
        for symbol, (var, axis) in told.items():
            self.add(1, f"{self.sizes[symbol]} = {self.texts[var]}.shape[{axis}]")
        self.body(graph, 1)
        return name, "".join(f"{t}  # {n}\n" if n else f"{t}\n" for t, n in self.lines)

    def signature(self, graph: Graph) -> str:
        shown = [
            f"{self.texts[v]}: {self.type(v.type)}"
            for v in graph.inputs
            if v.node.symbol is None
        ]
        results = ", ".join(map(self.type, graph.out_types))
        return f"({', '.join(shown)}) -> ({results})"

    def nested(self, node: Node, key: str, graph: Graph, depth: int) -> str:
        """Define the function for a region of `node`, and return its name."""
        if graph in self.functions:
            return self.functions[graph]
        name = self.unique(key.replace("]", ""), "body")
        signature = node.op.signature(node)
        [region] = [r for r in signature.regions if r.name == key]
        parameters: list[str] = []
        for var, port in zip(graph.inputs, region.inputs, strict=True):
            if port.at is None or (
                port.role in _PARAMETERS and var.node.section != "capture"
            ):
                self.texts[var] = self.unique(var.node.name, "x")
                parameters.append(self.texts[var])
                continue
            arg = node.args[port.at]
            text = self.texts[var] = self.arg(arg)
            if var.node.symbol is not None:
                self.sizes[var.node.symbol] = self.as_size(arg, text)
        self.add(depth, f"def {name}({', '.join(parameters)}):")
        visible = dict(self.functions)
        self.body(graph, depth + 1)
        self.functions = visible
        if len(parameters) == len(graph.inputs):
            self.functions[graph] = name
        return name

    def as_size(self, arg: Arg, text: str) -> str:
        """A value as a Python number: symbols are numbers already."""
        is_number = isinstance(arg, Constant) or arg.node.symbol is not None
        return text if is_number else f"int({text})"

    def body(self, graph: Graph, depth: int) -> None:
        for node in graph.nodes:
            self.node(node, depth)
        results = "".join(f"{self.arg(a)}, " for a in graph.outputs)
        note = format_line(graph.output_line)
        self.add(depth, f"return ({results.rstrip(' ')})", note)

    def node(self, node: Node, depth: int) -> None:
        if node.op is None:
            call = f"attributes[{node.name!r}]"
        else:
            functions = {
                id(g): self.nested(node, key, g, depth)
                for key, g in node.graphs.items()
            }
            args = map(self.arg, _arguments(node))
            params = (
                f"{key}={self.static(value, functions)}"
                for key, value in node.params.items()
            )
            call = f"{_attribute('op', node.op.name)}({', '.join([*args, *params])})"
        for var in node.results:
            self.texts[var] = self.unique(f"t{self.count}", "t")
            self.count += 1
        if node.symbol is not None:
            [defined] = node.results
            name = self.unique(node.symbol.name, "u")
            self.texts[defined] = self.sizes[node.symbol] = name
            call = f"int({call})"
        targets = ", ".join(self.texts[v] for v in node.results)
        types = ", ".join(self.type(v.type) for v in node.results)
        line = format_line(node.line)
        note = f"{types}  {line}" if line else types
        self.add(depth, f"{targets} = {call}" if targets else call, note)
        self.new_sizes(node.results, depth)

    def new_sizes(self, results: Iterable[Var], depth: int) -> None:
        """Define the symbols that results bring forth."""
        for var in results:
            for axis, size in enumerate(var.type.shape):
                symbol = plain_symbol(size)
                if symbol is not None and symbol not in self.sizes:
                    name = self.sizes[symbol] = self.unique(symbol.name, "u")
                    self.add(depth, f"{name} = {self.texts[var]}.shape[{axis}]")

    # --- values ---

    def arg(self, arg: Arg) -> str:
        if isinstance(arg, Var):
            return self.texts[arg]
        value, dtype = arg.value, arg.type.dtype
        text = _number(value)
        return text if BARE.get(type(value)) is dtype else f"const({text}, '{dtype}')"

    def size(self, size: Size) -> str:
        if not isinstance(size, SymInt):
            return repr(size)
        # A symbol that is not defined yet is only ever shown, in a comment.
        return renamed(size, lambda s: self.sizes.get(s) or identifier(s.name, "u"))

    def type(self, type_: TensorType) -> str:
        return f"{type_.dtype}[{', '.join(map(self.size, type_.shape))}]"

    def static(self, value: Any, functions: Mapping[int, str]) -> str:
        match value:
            case bool() | int() | str() | None:
                return repr(value)
            case float():
                return _number(value)
            case SymInt():
                return self.size(value)
            case DType():
                return f"dtype('{value}')"
            case TensorType():
                shape = self.static(value.shape, functions)
                return f"tensor_type('{value.dtype}', {shape})"
            case Graph():
                return functions[id(value)]
            case tuple():
                inner = ", ".join(self.static(v, functions) for v in value)
                return f"({inner},)" if len(value) == 1 else f"({inner})"
        self.objects.append(value)
        return f"objects[{len(self.objects) - 1}]"


def _told_by_shapes(graph: Graph) -> dict[Symbol, tuple[Var, int]]:
    """For each symbol an input, and an axis, whose size it is."""
    found: dict[Symbol, tuple[Var, int]] = {}
    for var in graph.inputs:
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None:
                found.setdefault(symbol, (var, axis))
    return found


def _arguments(node: Node) -> Sequence[Arg]:
    """The args of a call: without those that nested functions have from around them."""
    graphs = node.graphs
    if not graphs:
        return node.args
    first = next(iter(graphs.values()))
    roles = node.op.signature(node).args
    end = len(node.args) - len(first.captures)
    return [a for a, r in zip(node.args[:end], roles, strict=False) if r != "symbol"]


def _attribute(owner: str, name: str) -> str:
    if name.isidentifier() and not iskeyword(name):
        return f"{owner}.{name}"
    return f"getattr({owner}, {name!r})"


def _number(value: bool | int | float) -> str:
    """A literal; Python has none for NaN and the infinities."""
    text = float.__repr__(value) if isinstance(value, float) else repr(value)
    return f"float('{text}')" if text.strip("-") in ("nan", "inf") else text
