"""Graph, Node and Var: the data structure, and the edits that keep it whole."""

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
    """What a node may refer to: an operation's record or a higher-order operator."""

    @property
    def name(self) -> str: ...

    def infer(self, *types: TensorType, **params: Any) -> tuple[TensorType, ...]:
        """The types of the results.

        Raises:
            HopflowError: the operands' types do not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code.

    caller   the line that has called `function`, or the operator that has: line 1 of a
             file `<hopflow>`, whose function is `while_loop/body`
    """

    file: str
    line: int
    function: str = ""
    caller: "SourceLine | None" = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def trail(self) -> str:
        """The line and what has called it, as one text: `helper.py:3, called at
        step.py:4, in while_loop/body, called at model.py:9`."""
        parts = [str(self)]
        for caller in reversed(self.stack[:-1]):
            is_operator = caller.file == OPERATOR_FILE
            parts.append(
                f"in {caller.function}" if is_operator else f"called at {caller}"
            )
        return ", ".join(parts)

    @property
    def stack(self) -> "tuple[SourceLine, ...]":
        """The callers, the outermost first, and this line."""
        found = [self]
        while (caller := found[-1].caller) is not None:
            found.append(caller)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar constant operand; its type is never weak (promotion is over)."""

    value: bool | int | float
    type: TensorType

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(eq=False, slots=True)
class Var:
    """One result of a node, or one input of a graph."""

    node: "Node"
    index: int
    type: TensorType

    def __repr__(self) -> str:
        return f"<Var {self.node.name or self.node.kind}.{self.index}: {self.type}>"


Arg: TypeAlias = Var | Constant


@dataclass(eq=False, slots=True)
class Node:
    """One line of a graph.

    kind      placeholder | get_attr | call_function | output
    op        the operator object of a call_function, else None
    args      operands, flat
    params    static parameters: axes, shapes, dtypes, and subgraphs
    results   one Var for each result
    name      of a placeholder or an attribute; else a suggestion, or ""
    section   of a placeholder: which of the three input lists it is in
    symbol    of a placeholder in section "symbol": the symbol that it binds; of a call
              (an `item`): the one that it defines, known from there on
    line      where in the user's code it came from
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
        """What is called; of a placeholder or an attribute its name."""
        if self.kind == "output":
            return "output"
        return self.name if self.op is None else self.op

    @property
    def graphs(self) -> "dict[str, Graph]":
        """The subgraphs among the parameters, by name (`branches[0]` in a tuple)."""
        found: dict[str, Graph] = {}
        for key, value in self.params.items():
            if isinstance(value, Graph):
                found[key] = value
            elif isinstance(value, tuple) and Graph in map(type, value):
                for i, item in enumerate(value):
                    if isinstance(item, Graph):
                        found[f"{key}[{i}]"] = item
        return found


class Graph:
    """A straight line of nodes with typed inputs and outputs.

    `inputs` are placeholders: symbols, operands, captures, in this order. `attributes`
    (on a root graph only) are `get_attr` nodes: name -> the tensor they hold. `nodes`
    are the calls and attributes in order of execution; `outputs` may be any args.
    Printed, a graph is Python; see `graph.printer`, which brings `text`.
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
        """Append a placeholder at the end of `inputs`; see `join` for their order."""
        node = Node("placeholder", None, (), {}, name=name, section=section)
        node.symbol = symbol
        var = Var(node, 0, type_)
        node.results = (var,)
        self.inputs.append(var)
        return var

    def name_inputs(self) -> None:
        """Give each input a name of its own."""
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
        """Append a call whose results have the given types."""
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
        """The calls of the operator of this name."""
        return [n for n in self.nodes if n.op is not None and n.op.name == name]

    def users(self) -> dict[Var, list[Node]]:
        """The nodes that read each var; an output of the graph is not a node."""
        found: dict[Var, list[Node]] = {}
        for node in self.nodes:
            for arg in dict.fromkeys(a for a in node.args if isinstance(a, Var)):
                found.setdefault(arg, []).append(node)
        return found

    def walk(self) -> Iterator[Node]:
        """All nodes, those of subgraphs right after the node that holds them."""
        pending = [*reversed(self.nodes)]
        while pending:  # recursive generators would pass each node up level by level
            node = pending.pop()
            yield node
            for graph in reversed(node.graphs.values()):
                pending += reversed(graph.nodes)

    def distinct_nodes(self) -> Iterator[Node]:
        """All nodes in the order of `walk`, but those of a subgraph that several nodes
        share only once: `walk` takes exponential time where such subgraphs share
        others."""
        pending, seen = [*reversed(self.nodes)], {self}
        while pending:
            node = pending.pop()
            yield node
            for graph in reversed(node.graphs.values()):
                if graph not in seen:
                    seen.add(graph)
                    pending += reversed(graph.nodes)


def map_graphs(params: Mapping[str, Any], f: Any) -> dict[str, Any]:
    """`params` with `f` applied to each graph in it."""

    def visit(value: Any) -> Any:
        if isinstance(value, Graph):
            return f(value)
        if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
            return tuple(map(visit, value))
        return value

    return {k: visit(v) for k, v in params.items()}


def map_sizes(value: Any, f: Callable[[SymInt], Size]) -> Any:
    """A static parameter with `f` applied to each symbolic size in it.

    Those in tuples and types are found; those of subgraphs are the subgraphs' own.
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
    """A symbol as a size."""
    return SymInt((((symbol,), 1),))


def plain_symbol(size: Size) -> Symbol | None:
    """The symbol that `size` is, if it is one and nothing else."""
    if type(size) is SymInt and len(size.expression) == 1:
        [(monomial, factor)] = size.expression
        if len(monomial) == 1 and factor == 1 and isinstance(monomial[0], Symbol):
            return monomial[0]
    return None


def symbol_range(node: Node) -> ValueRange:
    """The range of the symbol that a call defines, which the call checks."""
    return ValueRange(node.params.get("min", -inf), node.params.get("max", inf))


def match_shapes(declared: Shape, found: Shape, known: dict[Symbol, Size]) -> None:
    """Add to `known` what `found` says of the symbols that are sizes of `declared`."""
    for size, actual in zip(declared, found, strict=False):
        symbol = plain_symbol(size)
        if symbol is not None:
            known.setdefault(symbol, actual)


def vars_of(args: Iterable[Arg]) -> list[Var]:
    return [a for a in args if isinstance(a, Var)]
