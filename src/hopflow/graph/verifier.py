"""The verifier: it checks the rules of graphs, after every pass if `config.verify` is
set.

The message of an error states the rule; `docs/notes/roles_and_regions.md` and
`docs/notes/symbols_and_owners.md` give the reasons.
"""

from collections.abc import Sequence
from typing import NoReturn

from hopflow.dtypes import iinfo
from hopflow.errors import GraphError, HopflowError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Section,
    Var,
    plain_symbol,
    symbol_range,
)
from hopflow.graph.printer import format_line
from hopflow.graph.regions import (
    Port,
    Region,
    Signature,
    bind_symbols,
    passed_to,
    result_types,
)
from hopflow.graph.rewriting import static_symbols
from hopflow.graph.types import SYMBOL_TYPE, Shape, TensorType, same_size, same_type
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute

_ORDER: dict[Section | None, int] = {"symbol": 0, "operand": 1, "capture": 2}


def verify(graph: Graph) -> None:
    """Check `graph` and its subgraphs.

    Raises:
        GraphError: a rule is broken. The message names the graph, the node and the
            rule.
    """
    _Verifier().graph(graph, (graph.name,))


class _Verifier:
    """The state of one run over all graphs: `owners` has the graph of each node."""

    def __init__(self) -> None:
        self.owners: dict[int, Graph] = {}
        self.done: set[int] = set()
        self.open: set[int] = set()

    def graph(self, graph: Graph, path: tuple[str, ...]) -> None:
        if id(graph) in self.done:  # shared by several nodes
            return
        if id(graph) in self.open:
            raise GraphError(f"graph `{'/'.join(path)}` contains itself.")
        self.open.add(id(graph))
        _Scope(self, graph, path).check()
        self.open.discard(id(graph))
        self.done.add(id(graph))


class _Scope:
    """The check of one graph: the vars and symbols that are defined so far."""

    def __init__(
        self, verifier: _Verifier, graph: Graph, path: tuple[str, ...]
    ) -> None:
        self.verifier = verifier
        self.graph = graph
        self.path = path
        self.defined: set[Var] = set()
        self.symbols: set[Symbol] = set()
        self.where = ""

    def fail(self, rule: str) -> NoReturn:
        raise GraphError(f"graph `{'/'.join(self.path)}`, {self.where}: {rule}.")

    def require(self, holds: bool, rule: str) -> None:
        if not holds:
            self.fail(rule)

    def check(self) -> None:
        self.inputs()
        for position, node in enumerate(self.graph.nodes):
            self.node(position, node)
        self.where = "output"
        for arg in self.graph.outputs:
            self.arg(arg)

    # --- inputs ---

    def inputs(self) -> None:
        last_order = 0
        names: set[str] = set()
        for i, var in enumerate(self.graph.inputs):
            node = var.node
            self.where = f"input {i} `{node.name}`"
            self.claim(node, "placeholder")
            self.require(node.results == (var,), "an input has one result, itself")
            self.require(node.section in _ORDER, "an input is in one of the sections")
            order = _ORDER[node.section]
            self.require(
                order >= last_order,
                "inputs stand in the order symbols, operands, captures",
            )
            last_order = order
            self.require(
                bool(node.name) and node.name not in names,
                "each input has a name of its own",
            )
            names.add(node.name)
            self.symbol_input(var)
            if len(self.path) > 1 and node.section == "operand":
                # A carry may have a size that each step changes.
                plain = map(plain_symbol, var.type.shape)
                self.symbols.update(s for s in plain if s is not None)
            self.bound(free_symbols(*var.type.shape))
            self.defined.add(var)

    def symbol_input(self, var: Var) -> None:
        symbol = var.node.symbol
        self.require(
            (var.node.section == "symbol") == (symbol is not None),
            "inputs in section `symbol`, and no others, bind a symbol",
        )
        if symbol is not None:
            self.require(
                same_type(var.type, SYMBOL_TYPE),
                f"an input that binds a symbol is i64[], not {var.type}",
            )
            self.bind(symbol)

    def bind(self, symbol: Symbol) -> None:
        self.require(
            symbol not in self.symbols, f"symbol `{symbol}` is bound only once"
        )
        self.symbols.add(symbol)

    def bound(self, symbols: Sequence[Symbol]) -> None:
        for symbol in symbols:
            self.require(
                symbol in self.symbols,
                f"symbol `{symbol}` is bound before the first type or parameter that "
                "mentions it",
            )

    # --- nodes ---

    def claim(self, node: Node, *kinds: str) -> None:
        self.require(node.kind in kinds, f"a node of kind `{node.kind}` is not here")
        owner = self.verifier.owners.setdefault(id(node), self.graph)
        self.require(
            owner is self.graph and not self.defined.intersection(node.results),
            f"a node stands in one graph, once; this is in `{owner.name}` too",
        )
        for i, var in enumerate(node.results):
            self.require(
                var.node is node and var.index == i,
                f"result {i} refers to its node and its place in it",
            )

    def node(self, position: int, node: Node) -> None:
        line = format_line(node.line)
        name = node.kind if node.op is None else node.op.name
        self.where = f"node {position} `{name}`{f' ({line})' if line else ''}"
        self.claim(node, "call_function", "get_attr")
        for arg in node.args:
            self.arg(arg)
        self.bound(list(static_symbols(node.params.values())))
        if node.kind == "get_attr":
            self.attribute(node)
        else:
            self.call(node)
        self.defined.update(node.results)

    def arg(self, arg: Arg) -> None:
        if isinstance(arg, Constant):
            self.constant(arg)
        elif arg not in self.defined:
            self.require(
                any(arg in n.results for n in self.graph.nodes),
                f"{arg!r} belongs to another graph; a value of another graph is passed "
                "as an input",
            )
            self.fail(f"{arg!r} is defined before it is used")

    def constant(self, constant: Constant) -> None:
        value, type_ = constant.value, constant.type
        dtype = type_.dtype
        self.require(type_.shape == (), f"a constant is a scalar, not {type_}")
        fits = True
        if dtype.kind == "b":
            fits = isinstance(value, bool)
        elif dtype.is_integer:
            info = iinfo(dtype)
            fits = isinstance(value, int) and info.min <= value <= info.max
        self.require(fits, f"the constant {value!r} is a value of {dtype}")

    def attribute(self, node: Node) -> None:
        self.require(len(self.path) == 1, "attributes are those of the outermost graph")
        self.require(
            node.name in self.graph.attributes and len(node.results) == 1,
            f"the graph has the attribute `{node.name}`",
        )
        readers = [n for n in self.graph.nodes if n.kind == node.kind]
        self.require(
            sum(n.name == node.name for n in readers) == 1,
            f"attribute `{node.name}` is read by one node",
        )
        actual = getattr(self.graph.attributes[node.name], "type", None)
        type_ = node.results[0].type
        self.require(
            actual is None or same_type(actual, type_),
            f"attribute `{node.name}` is {actual}, and not {type_}",
        )

    def call(self, node: Node) -> None:
        for name, graph in node.graphs.items():
            self.verifier.graph(graph, (*self.path, name))
        inferred = self.inferred(node)
        self.require(
            len(inferred) == len(node.results),
            f"the operator gives {len(inferred)} results, and the node has "
            f"{len(node.results)}",
        )
        renamed: dict[Symbol, Size] = {}
        for i, (var, type_) in enumerate(zip(node.results, inferred, strict=True)):
            self.introduce(var.type.shape, type_.shape, renamed)
            expected = _substituted(type_, renamed)
            # The message is formatted on failure alone: it costs more than the check.
            if not same_type(var.type, expected):
                self.fail(
                    f"result {i} is {expected}, as the operator infers, and not "
                    f"{var.type}"
                )
        if node.symbol is not None:
            self.definition(node, node.symbol)

    def inferred(self, node: Node) -> tuple[TensorType, ...]:
        """Return the types of the results that the operator infers."""
        where = f"graph `{'/'.join(self.path)}`, {self.where}"
        try:
            if node.graphs:
                self.regions(node)
            return result_types(node.op, node.args, node.params)
        except GraphError:
            raise
        except HopflowError as error:
            raise GraphError(
                f"{where}: the operands have types that the operator takes: {error}"
            ) from error
        except Exception as error:  # rules may fail in any way on params of a stranger
            raise GraphError(
                f"{where}: the params are those of the operator: "
                f"{type(error).__name__}: {error}"
            ) from error

    def definition(self, node: Node, symbol: Symbol) -> None:
        """Check a call that defines a symbol."""
        self.require(
            len(node.results) == 1 and same_type(node.results[0].type, SYMBOL_TYPE),
            f"a node that defines a symbol has one result, i64[]: {node.results}",
        )
        if symbol in free_symbols(*(n for a in node.args for n in a.type.shape)):
            return  # a result of an operator introduced it
        checked = symbol_range(node)
        self.require(
            symbol.range == checked,
            f"the range of `{symbol}` is the one that its node checks: from "
            f"{checked.low} to {checked.high}, and not from {symbol.range.low} to "
            f"{symbol.range.high}",
        )
        self.bind(symbol)

    def introduce(
        self, shape: Shape, inferred: Shape, renamed: dict[Symbol, Size]
    ) -> None:
        """Bind the symbols that a result introduces: plain sizes not bound before.

        Inference makes a new symbol each time; `renamed` maps it to the symbol of the
        node.
        """
        for size, new in zip(shape, inferred, strict=False):
            symbol, inferred_symbol = plain_symbol(size), plain_symbol(new)
            if (
                symbol is not None
                and inferred_symbol is not None
                and symbol not in self.symbols
            ):
                renamed[inferred_symbol] = size
                self.symbols.add(symbol)

    # --- regions ---

    def regions(self, node: Node) -> None:
        count = node.params.get("num_carry", 0)
        self.require(
            type(count) is int and 0 <= count <= len(node.args),
            f"`num_carry` counts args, of which there are {len(node.args)}",
        )
        signature: Signature = node.op.signature(node)
        for kind, roles, values in (
            ("args", signature.args, node.args),
            ("results", signature.results, node.results),
        ):
            self.require(
                len(roles) == len(values),
                f"the operator takes {len(roles)} {kind} of this signature, not "
                f"{len(values)}",
            )
        for region in signature.regions:
            self.region(node, region)

    def region(self, node: Node, region: Region) -> None:
        graph, name = region.graph, region.name
        for kind, ports, values in (
            ("inputs", region.inputs, graph.inputs),
            ("outputs", region.outputs, graph.outputs),
        ):
            self.require(
                len(ports) == len(values),
                f"`{name}` has {len(ports)} {kind}, not {len(values)}",
            )
        passed = [passed_to(port, node.args) for port in region.inputs]
        sizes = bind_symbols(graph, passed)
        for i, (var, port) in enumerate(zip(graph.inputs, region.inputs, strict=True)):
            self.require(
                (port.role == "symbol") == (var.node.section == "symbol"),
                f"input {i} of `{name}` is a symbol where the operator says so",
            )
            outer = passed[i]
            if outer is not None:
                type_ = outer if isinstance(outer, TensorType) else outer.type
                self.port(name, f"input {i}", port, var.type, type_, sizes)
        for i, (arg, port) in enumerate(
            zip(graph.outputs, region.outputs, strict=True)
        ):
            self.output(node, region, i, arg.type, port, sizes)

    def output(
        self,
        node: Node,
        region: Region,
        i: int,
        type_: TensorType,
        port: Port,
        sizes: dict[Symbol, Size],
    ) -> None:
        label = f"output {i}"
        if port.role == "predicate":
            self.require(
                type_.shape == () and type_.dtype.kind == "b",
                f"{label} of `{region.name}` is bool[], not {type_}",
            )
        if port.at is None:
            return
        result = node.results[port.at].type
        if port.role == "stacked":
            result = result.with_shape(result.shape[1:])
        self.port(region.name, label, port, type_, result, sizes)

    def port(
        self,
        region: str,
        label: str,
        port: Port,
        inside: TensorType,
        outside: TensorType,
        sizes: dict[Symbol, Size],
    ) -> None:
        """Check that a type inside a region equals its counterpart outside."""
        agree = inside.dtype is outside.dtype and inside.ndim == outside.ndim
        for a, b in zip(inside.shape, outside.shape, strict=False):
            # A symbol that only the run knows may be any size, as may a new symbol of a
            # result.
            is_bound = all(s in sizes for s in free_symbols(a))
            symbol = plain_symbol(b)
            is_bound = is_bound and (symbol is None or symbol in self.symbols)
            agree = agree and (not is_bound or same_size(substitute(a, sizes), b))
        self.require(
            agree,
            f"{label} of `{region}` ({port.role}) is {inside} within, and {outside} "
            "outside: they are the same type",
        )


def _substituted(type_: TensorType, sizes: dict[Symbol, Size]) -> TensorType:
    return type_.with_shape([substitute(n, sizes) for n in type_.shape])
