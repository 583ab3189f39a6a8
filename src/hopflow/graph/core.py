"""Graph, Node and Var: the data structure of graphs, and basic edits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from hopflow.graph.types import Shape, TensorType
from hopflow.recursion import deep_recursion
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.size import Size, Symbol, SymInt
from hopflow.tracebacks import OPERATOR_FILE

Kind: TypeAlias = Literal["placeholder", "get_attr", "call_function", "output"]
Section: TypeAlias = Literal["symbol", "operand", "capture"]


class Operator(Protocol):
    """What a node's `op` is: the record of an operation, or a higher-order operator."""

    @property
    def name(self) -> str: ...

    def infer(self, *types: TensorType, **params: Any) -> tuple[TensorType, ...]:
        """Return the types of the results.

        Raises:
            HopflowError: the operands' types do not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code.

    caller  the line that called `function`. An operator that called it stands as line 1
            of a file `<hopflow>`, in the function `while_loop/body`
    """

    file: str
    line: int
    function: str = ""
    caller: "SourceLine | None" = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def trail(self) -> str:
        """The line and its callers as one text.

        For example `helper.py:3, in while_loop/body, called at model.py:9`.
        """
        parts = [str(self)]
        for caller in reversed(self.stack[:-1]):
            is_operator = caller.file == OPERATOR_FILE
            parts.append(
                f"in {caller.function}" if is_operator else f"called at {caller}"
            )
        return ", ".join(parts)

    @property
    def stack(self) -> "tuple[SourceLine, ...]":
        """The callers, from the outermost, and then this line."""
        lines = [self]
        while (caller := lines[-1].caller) is not None:
            lines.append(caller)
        return tuple(reversed(lines))


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar constant operand. Its type is never weak: promotion has taken place."""

    value: bool | int | float
    type: TensorType

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(eq=False, slots=True)
class Var:
    """A result of a node, or an input of a graph."""

    node: "Node"
    index: int
    type: TensorType

    def __repr__(self) -> str:
        return f"<Var {self.node.name or self.node.kind}.{self.index}: {self.type}>"


Arg: TypeAlias = Var | Constant


@dataclass(eq=False, slots=True)
class Node:
    """A step of a graph.

    kind      placeholder | get_attr | call_function | output
    op        the operator of a call_function, else None
    args      operands, flat
    params    static parameters: axes, shapes, dtypes, and subgraphs
    results   one Var for each result
    name      of a placeholder or an attribute; else a suggestion, or ""
    section   of a placeholder: its input list
    symbol    the symbol that a placeholder in section "symbol" binds, or that a call
              (an `item`) defines for later types and params
    line      the line of the user's code that it comes from
    module_path, operator_path   "layers.0:Linear", "while_loop/body → cond/then"
    meta      notes of passes
    """

    kind: Kind
    op: Any
    args: tuple[Arg, ...]
    params: dict[str, Any]
    results: tuple[Var, ...] = ()
    name: str = ""
    section: Section | None = None
    symbol: Symbol | None = None
    line: SourceLine | None = None
    module_path: str = ""
    operator_path: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Any:
        """The operator of a call; the name of a placeholder or an attribute."""
        if self.kind == "output":
            return "output"
        return self.name if self.op is None else self.op

    @property
    def graphs(self) -> "dict[str, Graph]":
        """The subgraphs among the params by name, as `branches[0]` in a tuple."""
        graphs: dict[str, Graph] = {}
        for key, value in self.params.items():
            if isinstance(value, Graph):
                graphs[key] = value
            elif isinstance(value, tuple) and Graph in map(type, value):
                for i, item in enumerate(value):
                    if isinstance(item, Graph):
                        graphs[f"{key}[{i}]"] = item
        return graphs


class Graph:
    """A sequence of nodes with typed inputs and outputs.

    `inputs` are placeholders: symbols, operands, captures, in this order. `attributes`
    (of a root graph only) maps the names of `get_attr` nodes to the tensors they read.
    `nodes` are the calls and attributes in order of execution; `outputs` may be any
    args. A graph prints as Python code; see `graph.printer`, which sets `text`.
    """

    text: ClassVar[Callable[["Graph"], str]]

    __slots__ = (
        "__weakref__",
        "attributes",
        "inputs",
        "name",
        "nodes",
        "output_line",
        "outputs",
    )

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Var] = []
        self.nodes: list[Node] = []
        self.outputs: tuple[Arg, ...] = ()
        self.attributes: dict[str, Any] = {}
        self.output_line: SourceLine | None = None

    def __str__(self) -> str:
        return Graph.text(self)

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes>"

    @deep_recursion()
    def __deepcopy__(self, memo: dict[int, Any]) -> "Graph":
        memo[id(self)] = copied = Graph(self.name)
        for name in self.__slots__[1:]:
            setattr(copied, name, deepcopy(getattr(self, name), memo))
        return copied

    # --- building ---

    def add_input(
        self,
        type_: TensorType,
        name: str,
        section: Section = "operand",
        symbol: Symbol | None = None,
    ) -> Var:
        """Append a placeholder; the caller keeps `inputs` in order of the sections."""
        node = Node("placeholder", None, (), {}, name=name, section=section)
        node.symbol = symbol
        var = Var(node, 0, type_)
        node.results = (var,)
        self.inputs.append(var)
        return var

    def name_inputs(self) -> None:
        """Make the names of the inputs unique."""
        taken: set[str] = set()
        last: dict[str, int] = {}
        for var in self.inputs:
            name = var.node.name
            while var.node.name in taken:
                last[name] = last.get(name, 0) + 1
                var.node.name = f"{name}_{last[name]}"
            taken.add(var.node.name)

    def add_attribute(self, type_: TensorType, name: str, value: Any) -> Var:
        """Append a `get_attr` node that reads the tensor `value`."""
        node = Node("get_attr", None, (), {}, name=name)
        var = Var(node, 0, type_)
        node.results = (var,)
        self.nodes.append(node)
        self.attributes[name] = value
        return var

    def call(
        self,
        op: Any,
        args: Sequence[Arg],
        params: Mapping[str, Any],
        types: Sequence[TensorType],
        line: SourceLine | None = None,
    ) -> Node:
        """Append a call with results of the given types."""
        node = Node("call_function", op, tuple(args), dict(params), line=line)
        node.results = tuple([Var(node, i, t) for i, t in enumerate(types)])
        self.nodes.append(node)
        return node

    # --- reading ---

    @property
    def in_types(self) -> tuple[TensorType, ...]:
        return tuple(v.type for v in self.inputs)

    @property
    def out_types(self) -> tuple[TensorType, ...]:
        return tuple(a.type for a in self.outputs)

    @property
    def symbols(self) -> list[Var]:
        return [v for v in self.inputs if v.node.section == "symbol"]

    @property
    def operands(self) -> list[Var]:
        return [v for v in self.inputs if v.node.section == "operand"]

    @property
    def captures(self) -> list[Var]:
        return [v for v in self.inputs if v.node.section == "capture"]

    def nodes_of(self, name: str) -> list[Node]:
        """Return the calls of the operator with this name."""
        return [n for n in self.nodes if n.op is not None and n.op.name == name]

    def users(self) -> dict[Var, list[Node]]:
        """Return the nodes that read each var, without the outputs of the graph."""
        users: dict[Var, list[Node]] = {}
        for node in self.nodes:
            for arg in dict.fromkeys(a for a in node.args if isinstance(a, Var)):
                users.setdefault(arg, []).append(node)
        return users

    def walk(self) -> Iterator[Node]:
        """Yield all nodes; those of subgraphs follow the node that holds them."""
        pending = [*reversed(self.nodes)]
        while pending:  # a recursive generator takes quadratic time in deep nests
            node = pending.pop()
            yield node
            for graph in reversed(node.graphs.values()):
                pending += reversed(graph.nodes)

    def distinct_nodes(self) -> Iterator[Node]:
        """Yield all nodes in the order of `walk`, but those of a shared subgraph
        only once: `walk` takes exponential time if shared subgraphs share others."""
        pending, seen = [*reversed(self.nodes)], {self}
        while pending:
            node = pending.pop()
            yield node
            for graph in reversed(node.graphs.values()):
                if graph not in seen:
                    seen.add(graph)
                    pending += reversed(graph.nodes)


def map_graphs(params: Mapping[str, Any], f: Any) -> dict[str, Any]:
    """Return `params` with `f` applied to each graph in them."""

    def visit(value: Any) -> Any:
        if isinstance(value, Graph):
            return f(value)
        if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
            return tuple(map(visit, value))
        return value

    return {k: visit(v) for k, v in params.items()}


def map_sizes(value: Any, f: Callable[[SymInt], Size]) -> Any:
    """Return a static parameter with `f` applied to each symbolic size in it.

    Sizes in tuples and types are included; subgraphs have symbols of their own, and are
    left unchanged.
    """
    kind = type(value)
    if kind is SymInt:
        return f(value)
    if kind is tuple:
        return tuple([map_sizes(v, f) for v in value])
    if kind is TensorType:
        return value.with_shape(map_sizes(value.shape, f))
    return value


def size_of(symbol: Symbol) -> SymInt:
    """Return a symbol as a size."""
    return SymInt((((symbol,), 1),))


def plain_symbol(size: Size) -> Symbol | None:
    """Return the symbol if `size` is a plain symbol, else None."""
    if type(size) is SymInt and len(size.expression) == 1:
        [(monomial, factor)] = size.expression
        if len(monomial) == 1 and factor == 1 and isinstance(monomial[0], Symbol):
            return monomial[0]
    return None


def symbol_range(node: Node) -> ValueRange:
    """Return the range of the symbol that a call defines; the call checks it."""
    return ValueRange(node.params.get("min", -inf), node.params.get("max", inf))


def match_shapes(declared: Shape, shape: Shape, sizes: dict[Symbol, Size]) -> None:
    """Bind the symbols that are plain sizes of `declared` to the actual sizes in
    `shape`.

    Symbols that `sizes` already binds keep their sizes.
    """
    for size, actual in zip(declared, shape, strict=False):
        symbol = plain_symbol(size)
        if symbol is not None:
            sizes.setdefault(symbol, actual)


def vars_of(args: Iterable[Arg]) -> list[Var]:
    return [a for a in args if isinstance(a, Var)]
