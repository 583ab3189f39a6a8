"""Edits of graphs that passes and transforms share. None knows an operator by name."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hopflow.errors import GraphError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Var,
    map_graphs,
    map_sizes,
    plain_symbol,
    size_of,
    vars_of,
)
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute

# --- reading --------------------------------------------------------------------------


def read_vars(graph: Graph) -> set[Var]:
    """The vars that some node or the output reads."""
    reads = reader(graph)
    found = {var for node in graph.nodes for var in reads(node)}
    return found.union(vars_of(graph.outputs))


def reader(graph: Graph) -> Callable[[Node], list[Var]]:
    """A function that gives what a node of `graph` reads: the vars among its args, and
    those that define the symbols of its params and of its results' types, but for the
    sizes that its results have of their own."""
    defined = {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    if not defined:
        return lambda node: vars_of(node.args)

    def read(node: Node) -> list[Var]:
        sizes = [defined[s] for s in symbols_of(node) if s in defined]
        others = [v for v in sizes if not any(a in node.results for a in v.node.args)]
        return [*vars_of(node.args), *others]

    return read


def symbols_of(node: Node) -> Iterable[Symbol]:
    """The symbols that a node mentions, in its params and its results' types."""
    for size in sizes_of(node):
        yield from free_symbols(size)


def sizes_of(node: Node) -> Iterable[SymInt]:
    """The symbolic sizes that a node mentions, in its params and its results' types."""
    yield from static_sizes(node.params.values())
    for var in node.results:
        yield from static_sizes(var.type.shape)


def effects(item: Node | Graph) -> frozenset[str]:
    """What a node, or all of a graph, may do besides computing its results.

    See `docs/notes/effects_and_order.md`.
    """
    kinds: set[str] = set()
    pending: list[Node | Graph] = [item]
    seen: set[Graph] = set()  # to walk shared subgraphs once
    while pending:
        part = pending.pop()
        if isinstance(part, Node):
            kinds |= _node_effects(part)
            pending += graphs_run(part)
        elif part not in seen:
            seen.add(part)
            pending += part.nodes
    return frozenset(kinds)


def _node_effects(node: Node) -> frozenset[str]:
    """What a node may do, apart from its subgraphs."""
    always: frozenset[str] = getattr(node.op, "effects", frozenset())
    by_params = getattr(node.op, "node_effects", None)
    return always if by_params is None else always | by_params(node.params)


def graphs_run(node: Node) -> list[Graph]:
    """The subgraphs of a node but for those of rules, which derivatives alone run."""
    rules = getattr(node.op, "rule_graphs", ())
    return [graph for name, graph in node.graphs.items() if name not in rules]


def symbols_read(graph: Graph) -> dict[Symbol, None]:
    """The symbols in the graph's types and params, and those read as values.

    In order of appearance, but for those that its nodes define. Subgraphs have symbols
    of their own, and are not searched.
    """
    read = read_vars(graph)
    found: dict[Symbol, None] = {}
    for var in graph.inputs:
        if var in read and var.node.symbol is not None:
            found[var.node.symbol] = None
        found.update(dict.fromkeys(free_symbols(*var.type.shape)))
    for node in graph.nodes:
        found.update(dict.fromkeys(symbols_of(node)))
    for node in graph.nodes:
        if node.symbol is not None:
            found.pop(node.symbol, None)
    return found


def static_symbols(values: Iterable[Any]) -> Iterable[Symbol]:
    """The symbols of sizes among static parameters, in tuples and types too."""
    for size in static_sizes(values):
        yield from free_symbols(size)


def static_sizes(values: Iterable[Any]) -> Iterable[SymInt]:
    """The symbolic sizes among static parameters, in tuples and types too."""
    for value in values:
        if isinstance(value, SymInt):
            yield value
        elif isinstance(value, tuple):
            yield from static_sizes(value)
        elif isinstance(value, TensorType):
            yield from static_sizes(value.shape)


# --- copying --------------------------------------------------------------------------


def clone(graph: Graph, vars_: dict[Var, Var] | None = None) -> Graph:
    """A copy of `graph` that shares no node with it, nor do its subgraphs.

    Subgraphs that nodes share are shared by the copies. Symbols stay the same objects.

    Args:
        vars_: Filled with the copy of each var of `graph` (not of its subgraphs).
    """
    return _cloned(graph, {} if vars_ is None else vars_, {})


def _cloned(graph: Graph, env: dict[Var, Var], done: dict[int, Graph]) -> Graph:
    copy = Graph(graph.name)
    copy.attributes = dict(graph.attributes)
    copy.output_line = graph.output_line
    for var in graph.inputs:
        # Inputs of a part of a graph may be several results of one node.
        if var not in env:
            _copied(var.node, (), env, done)
        copy.inputs.append(env[var])
    for node in graph.nodes:
        args = tuple([env[a] if isinstance(a, Var) else a for a in node.args])
        copy.nodes.append(_copied(node, args, env, done))
    copy.outputs = tuple([env[a] if isinstance(a, Var) else a for a in graph.outputs])
    return copy


def _copied(
    node: Node, args: tuple[Arg, ...], env: dict[Var, Var], done: dict[int, Graph]
) -> Node:
    """A copy of one node on `args`; its results join `env`."""

    def copied(graph: Graph) -> Graph:
        if id(graph) not in done:
            done[id(graph)] = _cloned(graph, {}, done)
        return done[id(graph)]

    params = map_graphs(node.params, copied) if node.params else {}
    copy = copy_fields(node, Node(node.kind, node.op, args, params))
    copy.results = tuple([Var(copy, v.index, v.type) for v in node.results])
    env.update(zip(node.results, copy.results, strict=True))
    return copy


def own_graphs(
    op: Any, params: Mapping[str, Any], copied: Callable[[Graph], Graph] = clone
) -> dict[str, Any]:
    """`params` for another node, with copies of the graphs but for bodies of calls.

    See `docs/notes/roles_and_regions.md`.
    """
    return dict(params) if op.is_call else map_graphs(params, copied)


def copy_fields(source: Node, target: Node) -> Node:
    """Give `target` all that says where `source` came from, and return it."""
    target.name, target.section, target.symbol = (
        source.name,
        source.section,
        source.symbol,
    )
    target.line, target.module_path = source.line, source.module_path
    target.operator_path = source.operator_path
    target.meta = dict(source.meta)
    return target


# --- replacing and removing -----------------------------------------------------------


def replace_uses(graph: Graph, new: Mapping[Var, Arg]) -> None:
    """Let every node and output that reads a key of `new` read its value instead.

    Values are not looked up again: `{a: b, b: a}` swaps.
    """

    def renewed(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple([new.get(a, a) if isinstance(a, Var) else a for a in args])

    for node in graph.nodes:
        if not new.keys().isdisjoint(node.args):
            node.args = renewed(node.args)
    graph.outputs = renewed(graph.outputs)


def erase_node(graph: Graph, node: Node) -> None:
    """Take out a node that nothing reads.

    Raises:
        GraphError: something reads a result of it, or it is not in the graph.
    """
    if read := read_vars(graph).intersection(node.results):
        raise GraphError(
            f"cannot erase the node of {min(read, key=lambda v: v.index)!r}: its value "
            "is still read. Replace its uses before."
        )
    try:
        graph.nodes.remove(node)
    except ValueError:
        raise GraphError(f"graph `{graph.name}` does not have {node!r}.") from None
    if node.kind == "get_attr":
        del graph.attributes[node.name]


def eliminate_dead_code(graph: Graph, *, with_effects: bool = False) -> int:
    """Take out nodes without effects whose results nothing reads, in subgraphs too.

    Args:
        with_effects: Take out those with effects as well.

    Returns:
        How many nodes were taken out.
    """
    live = set(vars_of(graph.outputs))
    reads = reader(graph)
    kept: list[Node] = []
    removed = 0
    for node in reversed(graph.nodes):
        for subgraph in node.graphs.values():
            removed += eliminate_dead_code(subgraph, with_effects=with_effects)
        read = not live.isdisjoint(node.results)
        if read or (effects(node) and not with_effects):
            kept.append(node)
            live.update(reads(node))
        elif node.kind == "get_attr":
            graph.attributes.pop(node.name, None)
    removed += len(graph.nodes) - len(kept)
    graph.nodes = kept[::-1]
    return removed


def prune_inputs(
    graphs: Sequence[Graph], sections: Collection[str] = ("symbol", "capture")
) -> list[int]:
    """Take out the inputs of these sections that none of `graphs` reads.

    The graphs are those of one node: their inputs in these sections agree one by one
    (the same positions after the inputs of other sections, of which they may have
    different numbers).

    Returns:
        Which inputs were kept: positions among the inputs of these sections of one
        graph, in order. The caller drops the other args of the node.
    """
    found = [[v for v in g.inputs if v.node.section in sections] for g in graphs]
    used = [needed_inputs(g, mine) for g, mine in zip(graphs, found, strict=True)]
    kept = [
        i
        for i, same in enumerate(zip(*found, strict=True))
        if any(var in u for var, u in zip(same, used, strict=True))
    ]
    for graph, mine in zip(graphs, found, strict=True):
        dropped = set(mine).difference(mine[i] for i in kept)
        graph.inputs = [v for v in graph.inputs if v not in dropped]
    return kept


def needed_inputs(graph: Graph, loose: Collection[Var]) -> set[Var]:
    """The inputs that are read, and the symbols that any type or param mentions.

    The type of an unread input among `loose` mentions nothing: both may go at once.
    """
    read = read_vars(graph)
    kept = [v for v in graph.inputs if v in read or v not in loose]
    named = {s for node in graph.nodes for s in symbols_of(node)}
    for var in kept:
        named.update(free_symbols(*var.type.shape))
    return {v for v in graph.inputs if v in read or v.node.symbol in named}


# --- putting one graph into another ---------------------------------------------------


def inline(
    graph: Graph,
    at: int,
    body: Graph,
    args: Sequence[Arg],
    sizes: Mapping[Symbol, Size],
) -> tuple[Arg, ...]:
    """Insert the nodes of `body`, applied to `args`, before node `at` of `graph`.

    Args:
        args: One for each input of `body`: values of `graph` defined before `at`.
        sizes: What the body's symbols are in `graph`; see `regions.bind_symbols`.

    Returns:
        What stands for each output of `body`.
    """
    env: dict[Var, Arg] = dict(zip(body.inputs, args, strict=True))
    # A symbol that a node introduces is another one in each copy.
    new = {s: fresh_symbol(s) for node in body.nodes for s in symbols_of(node)}
    new |= {n.symbol: fresh_symbol(n.symbol) for n in body.nodes if n.symbol}
    known = new | dict(sizes)
    inserted: list[Node] = []
    for node in body.nodes:
        # The subgraphs are copied; they read nothing but their own inputs.
        params = map_graphs(_bound_params(node.params, known), clone)
        found = tuple([env[a] if isinstance(a, Var) else a for a in node.args])
        copy = copy_fields(node, Node(node.kind, node.op, found, params))
        if node.symbol is not None:
            copy.symbol = plain_symbol(known[node.symbol])
        copy.results = tuple(
            Var(copy, v.index, _bound_type(v.type, known)) for v in node.results
        )
        env.update(zip(node.results, copy.results, strict=True))
        inserted.append(copy)
        if node.kind == "get_attr":
            copy.name = _fresh_attribute(graph, node.name)
            graph.attributes[copy.name] = body.attributes[node.name]
    graph.nodes[at:at] = inserted
    return tuple([env[a] if isinstance(a, Var) else a for a in body.outputs])


def _fresh_attribute(graph: Graph, name: str) -> str:
    number, fresh = 1, name
    while fresh in graph.attributes:
        fresh, number = f"{name}_{number}", number + 1
    return fresh


def _bound_type(type_: TensorType, sizes: Mapping[Symbol, Size]) -> TensorType:
    if type_.is_static:
        return type_
    return type_.with_shape([substitute(n, sizes) for n in type_.shape])


def _bound_params(
    params: Mapping[str, Any], sizes: Mapping[Symbol, Size]
) -> dict[str, Any]:
    return {k: map_sizes(v, lambda n: substitute(n, sizes)) for k, v in params.items()}


def fresh_symbol(like: Symbol) -> SymInt:
    """A new symbol, as a size, like another: but nobody knows more of it than that."""
    return size_of(replace(like, env=None))


def substitute_symbols(graph: Graph, sizes: Mapping[Symbol, Size]) -> None:
    """Replace symbols in all types and params of `graph`, in place.

    The inputs that bind the replaced symbols go on binding them: they are values that
    nothing has for a size any more, and `prune_inputs` takes them out if nothing reads
    them. Subgraphs have symbols of their own, and stay.
    """
    if not sizes:
        return
    for var in graph.inputs:
        var.type = _bound_type(var.type, sizes)
    for node in graph.nodes:
        node.params = _bound_params(node.params, sizes)
        for var in node.results:
            var.type = _bound_type(var.type, sizes)


def unify_symbols(graph: Graph, canonical: Callable[[Size], Size]) -> None:
    """Replace each input symbol by what it equals, in place: another one, or a number.

    Inputs for symbols that nothing reads then are taken out.
    """
    inputs = {v.node.symbol: v for v in graph.symbols if v.node.symbol is not None}
    if not inputs:
        return
    sizes: dict[Symbol, Size] = {}
    values: dict[Var, Arg] = {}
    for known, var in inputs.items():
        size = canonical(size_of(known))
        other = plain_symbol(size)
        if isinstance(size, int):
            sizes[known], values[var] = size, Constant(size, SYMBOL_TYPE)
        elif other is not None and other is not known and other in inputs:
            sizes[known], values[var] = size, inputs[other]
    if sizes:
        substitute_symbols(graph, sizes)
        replace_uses(graph, values)
    read = symbols_read(graph)
    graph.inputs = [
        v for v in graph.inputs if v.node.symbol is None or v.node.symbol in read
    ]
