"""What a pass may know of an operator with subgraphs: its regions and their roles.

An operator says them in `signature(node)`, and in `with_roles` how its own params
follow from them. `docs/notes/roles_and_regions.md` states what holds of every node with
graphs; the edits below keep it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from hopflow.errors import GraphError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Var,
    map_graphs,
    map_sizes,
    match_shapes,
    plain_symbol,
    size_of,
)
from hopflow.graph.rewriting import (
    clone,
    fresh_symbol,
    needed_inputs,
    static_symbols,
)
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import (
    Size,
    Symbol,
    SymInt,
    free_symbols,
    substitute,
    symbol,
)

Role: TypeAlias = Literal[
    "predicate",  # a bool scalar that decides what runs; also the output of a test
    "index",  # an integer scalar: which branch, or the number of the step
    "symbol",  # a shape symbol of the regions
    "operand",  # a value given to a region that runs once at most
    "carry",  # a first value, each step's value, the last one
    "slice",  # a stack that each step gets one slice of
    "invariant",  # the same value in each step; a capture
    "result",  # what a region that runs once at most returns
    "stacked",  # each step's result, stacked
]

Runs: TypeAlias = Literal["once", "at most once", "at least once", "any times", "never"]
"""How often a region runs when its node does; "never": in derivatives alone."""


class Port(NamedTuple):
    """One input or output of a region.

    at    of an input: the position of the node's arg that it comes from (for a carry
          its first value); of an output: of the node's result that it goes to. None for
          what the operator itself makes or takes: a step's number, a loop's test.
    """

    role: Role
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """One graph of a node. `name` is its param: "body", "branches[0]"."""

    name: str
    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    runs: Runs

    @property
    def ports(self) -> Iterable[tuple[Var, Port]]:
        """The inputs of the graph, and what each is."""
        # A graph that is being edited may have more inputs, at the end.
        return zip(self.graph.inputs, self.inputs, strict=False)

    @property
    def repeats(self) -> bool:
        """Whether it may run more than once."""
        return self.runs in ("at least once", "any times")

    @property
    def may_not_run(self) -> bool:
        """Whether it may not run at all: what has effects must not be moved out."""
        return self.runs in ("at most once", "any times", "never")

    @property
    def input_positions(self) -> dict[int, int]:
        """By the position of an arg of the node, that of the first input it is for."""
        return _first_positions(self.inputs)

    @property
    def output_positions(self) -> dict[int, int]:
        """By the position of a result of the node, that of the first output for it."""
        return _first_positions(self.outputs)

    def input_of(self, arg: int) -> int | None:
        """The position of the input that comes from the node's arg at `arg`."""
        return self.input_positions.get(arg)

    def output_of(self, result: int) -> int | None:
        """The position of the output that goes to the node's result at `result`."""
        return self.output_positions.get(result)


def _first_positions(ports: Sequence[Port]) -> dict[int, int]:
    found: dict[int, int] = {}
    for position, port in enumerate(ports):
        if port.at is not None:
            found.setdefault(port.at, position)
    return found


@dataclass(frozen=True, slots=True)
class Signature:
    """The roles of a node's args and results, and its regions.

    The args stand in the order of the sections: lead, symbols, operands, captures.
    """

    args: tuple[Role, ...]
    results: tuple[Role, ...]
    regions: tuple[Region, ...]

    @property
    def running(self) -> "Signature":
        """Without the regions that no run of the node runs."""
        regions = tuple([r for r in self.regions if r.runs != "never"])
        return Signature(self.args, self.results, regions)


class RegionOperator(Protocol):
    """What an operator with subgraphs has, besides a name and `result_types`."""

    @property
    def name(self) -> str: ...

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        """Whether derivatives of a node do not follow from its graphs."""
        ...

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        """The results' types, over the symbols of the graphs among `params`."""
        ...

    def signature(self, node: Node) -> Signature:
        """The roles of each arg, result, and input and output of a region."""
        ...

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        """`params` (with new graphs in them) for args and results of other roles: the
        counts among them set anew, as `num_carry`."""
        ...


def roles(*counts: tuple[Role, int]) -> tuple[Role, ...]:
    """`roles(("symbol", 2), ("carry", 1))`: symbol, symbol, carry."""
    return tuple(role for role, count in counts for _ in range(count))


def has_regions(node: Node) -> bool:
    return node.op is not None and bool(node.graphs)


# --- symbols across a call ------------------------------------------------------------


def bind_symbols(
    graph: Graph, args: Sequence[Arg | TensorType | None]
) -> dict[Symbol, Size]:
    """What the symbols of `graph` are in the terms of its caller.

    A symbol is the constant or the symbol that is passed for it; else what the shapes
    of the other args say; else it stays away, being known at run time only.

    Args:
        args: What each input gets; None for what only the operator knows. Of a slice,
            the slice's type.
    """
    found: dict[Symbol, Size] = {}
    for var, arg in zip(graph.inputs, args, strict=True):
        symbol = var.node.symbol
        if symbol is not None:
            if isinstance(arg, Constant):
                found[symbol] = int(arg.value)
            elif isinstance(arg, Var) and arg.node.symbol is not None:
                found[symbol] = size_of(arg.node.symbol)
    for var, arg in zip(graph.inputs, args, strict=True):
        if arg is not None:
            type_ = arg if isinstance(arg, TensorType) else arg.type
            match_shapes(var.type.shape, type_.shape, found)
    return found


def out_types_like(graph: Graph, like: Graph) -> tuple[TensorType, ...]:
    """The types of the outputs of `graph` over the symbols of `like`.

    Both are graphs of one node, so that they take the same symbols, in the same order;
    but the objects may be others, if the graphs come from different traces.
    """
    sizes: dict[Symbol, Size] = {}
    for ours, theirs in zip(graph.symbols, like.symbols, strict=True):
        if ours.node.symbol is not None and theirs.node.symbol is not None:
            sizes[ours.node.symbol] = size_of(theirs.node.symbol)
    return tuple(
        [t.with_shape([substitute(n, sizes) for n in t.shape]) for t in graph.out_types]
    )


def result_types(
    op: Any, args: Sequence[Arg], params: dict[str, Any]
) -> tuple[TensorType, ...]:
    """The types of the results of `op` on `args`, in the terms of the caller's symbols.

    An operator with subgraphs gives types over the symbols of those, which this
    translates. What cannot be (a size that a body makes) becomes a new symbol.

    Raises:
        HopflowError: the operands' types do not fit.
    """
    node = Node("call_function", op, tuple(args), params)
    if not node.graphs:
        return op.result_types([a.type for a in args], params)  # type: ignore[no-any-return]
    # The sizes among the params are the caller's, and so not to be translated. Others
    # stand for them, which no graph has.
    sizes: dict[Symbol, Size] = {}

    def hold(size: SymInt) -> Size:
        standing = symbol("size")
        sizes[free_symbols(standing)[0]] = size
        return standing

    held = params
    if any(static_symbols(params.values())):
        held = {key: map_sizes(value, hold) for key, value in params.items()}
    types: tuple[TensorType, ...] = op.result_types([a.type for a in args], held)
    if all([t.is_static for t in types]):
        return types
    node.results = tuple([Var(node, i, t) for i, t in enumerate(types)])
    for region in op.signature(node).regions:
        # Branches have symbols of their own; results are over those of the first.
        for bound, size in sizes_passed(region, args).items():
            sizes.setdefault(bound, size)
    for unbound in free_symbols(*(n for t in types for n in t.shape)):
        if unbound not in sizes:
            sizes[unbound] = fresh_symbol(unbound)
    return tuple(t.with_shape([substitute(n, sizes) for n in t.shape]) for t in types)


def passed_to(port: Port, args: Sequence[Arg]) -> Arg | TensorType | None:
    """What an input of a region gets from the args of its node."""
    if port.at is None:
        return None
    arg = args[port.at]
    if port.role == "slice":
        return arg.type.with_shape(arg.type.shape[1:])
    return arg


def sizes_passed(region: Region, args: Sequence[Arg]) -> dict[Symbol, Size]:
    """What the symbols of a region are in a call with these args."""
    passed = [passed_to(port, args) for port in region.inputs]
    return bind_symbols(region.graph, passed)


# --- what is known of sizes -----------------------------------------------------------


def settle_sizes(graph: Graph, canonical: Callable[[Size], Size]) -> None:
    """Replace the sizes that are known to be numbers, in place, in subgraphs too; but
    not in what computes them, for a check relies on it.

    Code that broadcasts along an axis of size 1 must find that 1 in the type. Sizes
    that only a run knows stay: what was assumed of them is what the run is to check,
    and a check of `u0 == 1` must not find that `u0` is the size of a tensor f32[1].
    """

    def settled(size: SymInt) -> Size:
        if any(symbol.hint is None for symbol in free_symbols(size)):
            return size
        known = canonical(size)
        return known if isinstance(known, int) else size

    types: dict[TensorType, TensorType] = {}

    def settle(var: Var) -> None:
        type_ = var.type
        if not type_.is_static:
            if type_ not in types:
                types[type_] = type_.with_shape(map_sizes(type_.shape, settled))
            var.type = types[type_]

    others = _bodies_of_other_sizes(graph)
    pending = [graph]
    while pending:
        body = pending.pop()
        for var in body.inputs:
            settle(var)
        for node in body.nodes:
            if not getattr(node.op, "keeps_sizes", False):
                node.params = {k: map_sizes(v, settled) for k, v in node.params.items()}
            for var in node.results:
                settle(var)
            inner = [g for g in node.graphs.values() if g not in others]
            pending += inner
            others.update(inner)  # once, though nodes share them


def _bodies_of_other_sizes(graph: Graph) -> set[Graph]:
    """The subgraphs that a call runs with other sizes than those of its trace, and
    those within: what is known of their symbols does not hold there."""
    pending: list[Graph] = []
    for node in graph.distinct_nodes():
        for region in node.op.signature(node).regions if node.graphs else ():
            sizes = sizes_passed(region, node.args)
            if any(plain_symbol(n) is not s for s, n in sizes.items()):
                pending.append(region.graph)
    found: set[Graph] = set()
    while pending:
        body = pending.pop()
        if body not in found:
            found.add(body)
            pending += [g for node in body.nodes for g in node.graphs.values()]
    return found


# --- edits ----------------------------------------------------------------------------


class CarryPair(NamedTuple):
    """A carry: the positions of its first value and of its last among args, results."""

    arg: int
    result: int


def carries(signature: Signature) -> list[CarryPair]:
    """The carries, each from its arg to its result; both stand in the same order."""
    args = [i for i, role in enumerate(signature.args) if role == "carry"]
    results = [i for i, role in enumerate(signature.results) if role == "carry"]
    return list(map(CarryPair, args, results))


def own_regions(node: Node, owned: set[Graph] | None = None) -> Signature:
    """The node's signature, once its graphs are its own and safe to edit.

    The edits below change the graphs of a node in place. Call this before the first of
    them, if other nodes or callers may hold the same graphs.

    Args:
        owned: The graphs that nodes own already: this node gets copies of those, and
            its graphs are added. (To copy each graph of a deep nest at each level takes
            time quadratic in its depth.) None: any may be held elsewhere.
    """

    def own(graph: Graph) -> Graph:
        if owned is None:
            return clone(graph)
        mine = clone(graph) if graph in owned else graph
        owned.add(mine)
        return mine

    node.params = map_graphs(node.params, own)
    return signature_of(node)


def signature_of(node: Node) -> Signature:
    signature: Signature = node.op.signature(node)
    return signature


def drop_args(node: Node, positions: Collection[int]) -> None:
    """Take out args that no region reads: symbols, operands, slices, invariants.

    Raises:
        GraphError: a region reads one, or it is a carry (see `drop_results`).
    """
    signature = signature_of(node)
    if any(signature.args[i] == "carry" for i in positions):
        raise GraphError(
            f"{node.op.name}: a carry is dropped with its result; see `drop_results`."
        )
    _drop(node, signature, frozenset(positions), frozenset())


def drop_results(node: Node, positions: Collection[int]) -> None:
    """Take out results that nothing reads, and the carries that make them.

    Raises:
        GraphError: a region reads such a carry other than to return it.
    """
    signature = signature_of(node)
    args = [pair.arg for pair in carries(signature) if pair.result in positions]
    _drop(node, signature, frozenset(args), frozenset(positions))


def prune_node(node: Node) -> list[int]:
    """Drop the symbols, operands, slices and invariants that no region needs.

    Returns:
        The positions that the dropped args had.
    """
    signature = signature_of(node)
    loose = [i for i, role in enumerate(signature.args) if role in _LOOSE]
    needed: set[int] = set()
    for region in signature.regions:
        inputs = {
            var: port.at
            for var, port in zip(region.graph.inputs, region.inputs, strict=True)
            if port.at in loose
        }
        used = needed_inputs(region.graph, inputs.keys())
        needed.update(at for v, at in inputs.items() if v in used and at is not None)
    dropped = [i for i in loose if i not in needed]
    _drop(node, signature, frozenset(dropped), frozenset())
    return dropped


# What goes when no region reads it. The last slice of a scan must stay if nothing else
# tells the length; operators have that as a param.
_LOOSE: Final = ("symbol", "operand", "slice", "invariant")


def _drop(
    node: Node, signature: Signature, args: frozenset[int], results: frozenset[int]
) -> None:
    if not args and not results:
        return
    dropped: list[tuple[Region, list[Var]]] = []
    for region in signature.regions:
        graph = region.graph
        pairs = zip(graph.outputs, region.outputs, strict=True)
        outputs = tuple([a for a, port in pairs if port.at not in results])
        inputs = zip(graph.inputs, region.inputs, strict=True)
        gone = [v for v, port in inputs if port.at in args]
        read = {a for n in graph.nodes for a in n.args} | set(outputs)
        if clash := [v for v in gone if v in read]:
            raise GraphError(
                f"{node.op.name}: input `{clash[0].node.name}` of `{region.name}` is "
                "read, and cannot be dropped."
            )
        dropped.append((region, gone))
        graph.outputs = outputs
    for region, gone in dropped:
        region.graph.inputs = [v for v in region.graph.inputs if v not in gone]
    kept_args = [i for i in range(len(node.args)) if i not in args]
    kept_results = [i for i in range(len(node.results)) if i not in results]
    node.args = tuple([node.args[i] for i in kept_args])
    node.results = tuple([node.results[i] for i in kept_results])
    for i, var in enumerate(node.results):
        var.index = i
    node.params = node.op.with_roles(
        node.params,
        [signature.args[i] for i in kept_args],
        [signature.results[i] for i in kept_results],
    )


def add_invariants(
    node: Node,
    args: Sequence[Arg],
    *,
    region: str | None = None,
    types: Sequence[TensorType] | None = None,
    names: Sequence[str] = (),
) -> dict[str, list[Var]]:
    """Pass more values to all regions of a node, as captures at the end.

    Args:
        args: Values that are defined where the node stands.
        region, types: Their types over the symbols of this region, as when they were
            computed there; None to derive them from the args.
        names: Of the new inputs; `c0`, `c1`, … if there are too few.

    Returns:
        By the name of each region its new inputs, one for each of `args`.

    Raises:
        GraphError: a size of an arg is not over symbols that the regions have.
    """
    signature = signature_of(node)
    repeats = any(r.repeats for r in signature.regions)
    role: Role = "invariant" if repeats else "operand"
    source = next((r for r in signature.regions if r.name == region), None)
    added: dict[str, list[Var]] = {}
    for target in signature.regions:
        if source is not None and types is not None:
            inside = same_symbols(source, target)
            shapes = [t.shape for t in types]
        else:
            inside = _symbols_inside(target, node.args)
            shapes = [a.type.shape for a in args]
        added[target.name] = inputs = []
        for i, (arg, shape) in enumerate(zip(args, shapes, strict=True)):
            missing = [s for s in free_symbols(*shape) if s not in inside]
            if missing:
                raise GraphError(
                    f"{node.op.name}: {arg.type} cannot be passed to `{target.name}`, "
                    f"which does not have its size `{missing[0]}`. Pass that before."
                )
            name = names[i] if i < len(names) else f"c{len(target.graph.captures)}"
            type_ = arg.type.with_shape([substitute(n, inside) for n in shape])
            inputs.append(target.graph.add_input(type_, name, "capture"))
        target.graph.name_inputs()
    node.args = (*node.args, *args)
    args_roles = (*signature.args, *roles((role, len(args))))
    node.params = node.op.with_roles(node.params, args_roles, signature.results)
    return added


def same_symbols(source: Region, target: Region) -> dict[Symbol, Size]:
    """The symbols of one region in the terms of another: what gets the same arg."""
    ours = {port.at: v.node.symbol for v, port in target.ports if v.node.symbol}
    return {
        v.node.symbol: size_of(ours[port.at])
        for v, port in source.ports
        if v.node.symbol is not None and port.at in ours
    }


def _symbols_inside(region: Region, args: Sequence[Arg]) -> dict[Symbol, Size]:
    """The caller's symbols that are passed to a region, in the region's terms."""
    bound = sizes_passed(region, args)
    return {
        symbol: size_of(own)
        for own, size in bound.items()
        if (symbol := plain_symbol(size)) is not None
    }
