"""Numbers that differ between batch elements: data-dependent sizes and trip counts.

A symbol of a trace is one number, and cannot be batched. Where the value that defines
it is batched, everything that depends on the symbol is run for each batch element
separately.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from hopflow.errors import TraceError
from hopflow.graph.core import Graph, Node, Var, vars_of
from hopflow.graph.regions import carries, signature_of
from hopflow.graph.rewriting import effects, reader
from hopflow.ops.item import dim_size, item
from hopflow.symbolic.size import Symbol, free_symbols


def per_element_numbers(graph: Graph, batched: Sequence[bool]) -> list[Node]:
    """Return the nodes that may define a number by batched values, and depend on no
    other such node: those that read a number (`item`), and operators with
    data-dependent result sizes."""
    pairs = zip(graph.inputs, batched, strict=True)
    depends = {var for var, is_batched in pairs if is_batched}
    shared = {var.node.symbol for var in graph.symbols}
    asking: list[Node] = []
    for node in graph.nodes:
        if node.op is not dim_size and not depends.isdisjoint(vars_of(node.args)):
            sizes = free_symbols(*(n for v in node.results for n in v.type.shape))
            alike = shared | _rows_alike(node, depends)
            if node.op is item or not alike.issuperset(sizes):
                asking.append(node)
            else:
                depends.update(node.results)
        shared.add(node.symbol)
    return asking


def _rows_alike(node: Node, depends: Collection[Var]) -> set[Symbol | None]:
    """Return the sizes that a loop defines by its trip count, if its condition reads
    nothing batched, so that the trip count is the same for all batch elements."""
    if not getattr(node.op, "counts_by_rows", False):
        return set()
    signature = signature_of(node)
    pairs = {pair.result: pair.arg for pair in carries(signature)}
    args = [isinstance(a, Var) and a in depends for a in node.args]
    while True:
        before = list(args)
        for region in signature.regions:
            inputs = zip(region.graph.inputs, region.inputs, strict=True)
            batched = {v for v, p in inputs if p.at is not None and args[p.at]}
            for inner in region.graph.nodes:
                if not batched.isdisjoint(vars_of(inner.args)):
                    batched.update(inner.results)
            for output, port in zip(region.graph.outputs, region.outputs, strict=True):
                if output not in batched:
                    continue
                if port.at is None:
                    return set()
                if port.at in pairs:
                    args[pairs[port.at]] = True
        if args == before:
            rows = zip(node.results, signature.results, strict=True)
            first = [v.type.shape[0] for v, role in rows if role == "stacked"]
            return {*free_symbols(*first)}


class Split(NamedTuple):
    """A graph split in two, of the same nodes, to be evaluated one after the other.

    first   the nodes that do not depend on the numbers; its outputs are the inputs of
            `rest`, followed by the outputs of the graph that it computes
    rest    the nodes that depend on them
    """

    first: Graph
    rest: Graph


def split(graph: Graph, asking: Collection[Node]) -> Split:
    """Split a graph into what depends on the nodes `asking` and what does not.

    Raises:
        TraceError: the type of an output has a size that `rest` defines.
    """
    reads = reader(graph)
    first, rest = Graph(graph.name), Graph(graph.name)
    depends: set[Var] = set()
    needed: dict[Var, None] = dict.fromkeys(graph.symbols)
    for node in graph.nodes:
        is_ordered = bool(rest.nodes) and "callback" in effects(node)
        if node in asking or is_ordered or not depends.isdisjoint(reads(node)):
            rest.nodes.append(node)
            depends.update(node.results)
        else:
            first.nodes.append(node)
    for node in rest.nodes:
        needed |= dict.fromkeys(v for v in reads(node) if v not in depends)
    outputs = dict.fromkeys(vars_of(graph.outputs))
    rest.inputs = list(needed)
    rest.outputs = tuple([v for v in outputs if v in depends])
    first.inputs, first.attributes = graph.inputs, graph.attributes
    first.outputs = (*needed, *(v for v in outputs if v not in depends))
    _check_types(rest)
    return Split(first, rest)


def _check_types(rest: Graph) -> None:
    defined = {node.symbol for node in rest.nodes if node.symbol is not None}
    for output in vars_of(rest.outputs):
        if not defined.isdisjoint(free_symbols(*output.type.shape)):
            raise TraceError(
                f"vmap: {output.type} has a size that differs from example to example, "
                "as a mask, branches or a `dynamic_carry` give, and cannot be batched. "
                "Return what has one size for all: pad to the largest (`max`), keep "
                "the shape with `hf.where`, or reduce."
            )
