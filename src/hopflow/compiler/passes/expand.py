"""Inline nodes that lower to a graph, and branches that a constant selects.

Examples are `associative_scan` and `invoke_subgraph`; later passes then see the nodes
of the graph. Other nodes get subgraphs that they do not share. Integers and bools that
are computed from constants alone are constants, as the selectors of branches often are.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from hopflow.errors import OperatorError, RuleReadError
from hopflow.graph.core import (
    Arg,
    Constant,
    Graph,
    Node,
    Var,
    match_shapes,
    plain_symbol,
)
from hopflow.graph.regions import Region, bind_symbols, has_regions, own_regions
from hopflow.graph.rewriting import (
    effects,
    inline,
    replace_uses,
    substitute_symbols,
    symbols_of,
)
from hopflow.graph.types import SYMBOL_TYPE, TensorType, differing
from hopflow.loop_ir.kernels import Branch, Inline
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Size, Symbol, free_symbols


def expand_inlines(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    _expand(graph, set())
    return graph


def _expand(graph: Graph, owned: set[Graph]) -> None:
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if not has_regions(node):
            constant = _folded(node)
            if constant is None:
                at += 1
            else:
                del graph.nodes[at]
                replace_uses(graph, {node.results[0]: constant})
            continue
        types = tuple(v.type for v in node.results)
        region = node.op.lower(types, *node.args, **node.params)
        if isinstance(region, Branch):
            region = _selected(region, types, graph, at)
        if isinstance(region, Inline):
            _check(node, region)
            region = _with_values(region, graph)
        if not isinstance(region, Inline) or _reads_sizes(region):
            for inner in own_regions(node, owned).regions:
                replace_uses(inner.graph, _constant_inputs(inner, node))
                _expand(inner.graph, owned)
            at += 1
            continue
        del graph.nodes[at]
        values = [a if isinstance(a, Var | Constant) else None for a in region.operands]
        sizes = bind_symbols(region.graph, values)
        rest = len(graph.nodes) - at
        outputs = inline(graph, at, region.graph, region.operands, sizes)
        _number(graph.nodes[at : len(graph.nodes) - rest], node)
        replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
        _rename_sizes(graph, node, outputs)


def _folded(node: Node) -> Constant | None:
    """Return the integer or the bool that a node computes from constants, or None."""
    if type(node.op) is not OpDef or len(node.results) != 1 or effects(node):
        return None
    type_, constants = node.results[0].type, node.args
    if node.symbol is not None or not _is_whole(type_) or any(symbols_of(node)):
        return None
    if not all(isinstance(a, Constant) and _is_whole(a.type) for a in constants):
        return None
    values = [np.asarray(a.value, a.type.dtype.dtype) for a in constants]  # type: ignore[union-attr]
    with np.errstate(all="ignore"):
        result = np.asarray(node.op.run(*values, **node.params))
    return Constant(result.item(), type_.strong())


def _is_whole(type_: TensorType) -> bool:
    return type_.ndim == 0 and type_.dtype.kind in "biu"


def _constant_inputs(region: Region, node: Node) -> dict[Var, Arg]:
    """Return the inputs of a region that are the same constant in each of its runs."""
    inputs: dict[Var, Arg] = {}
    for var, port in region.ports:
        if port.role in ("invariant", "operand") and port.at is not None:
            arg = node.args[port.at]
            if isinstance(arg, Constant) and _is_whole(arg.type):
                inputs[var] = arg
    return inputs


def _selected(
    region: Branch, types: Sequence[TensorType], graph: Graph, at: int
) -> Branch | Inline:
    """Return the branch that runs if a constant selects it, else all of them.

    Results whose sizes only the run of node `at` tells keep these sizes, which results
    of the graph may have.
    """
    if not isinstance(region.selector, Constant):
        return region
    known = {v.node.symbol for v in graph.symbols}
    known.update(n.symbol for n in graph.nodes[:at])
    if not known.issuperset(free_symbols(*(n for t in types for n in t.shape))):
        return region
    return Inline(region.branches[int(region.selector.value)], region.operands)


def _check(node: Node, region: Inline) -> None:
    """Check the graph that a node lowers to.

    Raises:
        RuleReadError: The graph reads a tensor from outside, which is an attribute.
        OperatorError: It does not accept the operands, or its results are not those of
            the node.
    """
    graph, operands = region.graph, region.operands
    for value in graph.attributes.values():
        raise RuleReadError("lower", value.type)
    accepted = [v.type for v in graph.inputs]
    operand_types = [getattr(a, "type", SYMBOL_TYPE) for a in operands]
    result_types = [v.type for v in node.results]
    for rule, expected, actual in (
        ("take the operands that come with it", operand_types, accepted),
        ("return the results of the node", result_types, graph.out_types),
    ):
        if texts := differing(expected, actual):
            expected_text, actual_text = texts
            raise OperatorError(
                f"{node.op.name}: the graph that `{type(node.op).__name__}.lower` puts "
                f"in its place must {rule}: {expected_text}, and not {actual_text}. "
                "Trace what `debug` does."
            )


def _number(inserted: Sequence[Node], source: Node) -> None:
    """Give inserted nodes without a number the number of their source node.

    The nodes of a call's body get the numbers that follow on the call's, also where
    several calls share the body, and its numbers are those of another call.
    """
    number = source.meta.get("number", 0)
    first = inserted[0].meta.get("number", number) if inserted else number
    shift = number + 1 - first if source.op.is_call and first != number else 0
    for node in _walk(inserted):
        own_number = node.meta.get("number")
        node.meta["number"] = number if own_number is None else own_number + shift


def _walk(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for graph in node.graphs.values():
            yield from graph.walk()


def _with_values(region: Inline, graph: Graph) -> Inline:
    """Replace sizes among the operands by values of the graph, where it has them."""
    defined = {v.node.symbol: v for v in graph.symbols}
    defined |= {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    operands = [
        a if isinstance(a, Var | Constant) else defined.get(plain_symbol(a), a)
        for a in region.operands
    ]
    return Inline(region.graph, tuple(operands))


def _reads_sizes(region: Inline) -> bool:
    """Return whether the graph computes with a size that is not a value here."""
    pairs = zip(region.graph.inputs, region.operands, strict=True)
    sizes = {var for var, a in pairs if not isinstance(a, Var | Constant)}
    used = chain.from_iterable([node.args for node in region.graph.nodes])
    return not sizes.isdisjoint((*used, *region.graph.outputs))


def _rename_sizes(graph: Graph, node: Node, outputs: Sequence[Arg]) -> None:
    """Replace the sizes that a node defined by those of the inserted nodes."""
    renamed: dict[Symbol, Size] = {}
    for var, output in zip(node.results, outputs, strict=True):
        match_shapes(var.type.shape, output.type.shape, renamed)
    if not renamed:
        return
    defined = {n.symbol: n.results[0] for n in graph.nodes if n.symbol is not None}
    sizes = {
        s: n for s, n in renamed.items() if s in defined and plain_symbol(n) is not s
    }
    if not sizes:
        return
    for symbol, size in sizes.items():
        defined[symbol].node.symbol = None
        plain = plain_symbol(size)
        if plain is not None and plain in defined:
            replace_uses(graph, {defined[symbol]: defined[plain]})
    substitute_symbols(graph, sizes)
