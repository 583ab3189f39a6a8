"""Sort arrays whose order has no other use than to read them in it.

    order = argsort(x)
    y = x[order]             ->    y = sort(x)

Keys alone are less to move than keys and their positions, and need no gather. Where the
order has another use, one `argsort` is enough for all of them.
"""

from collections import Counter

from hopflow.graph.core import Arg, Graph, Node, Var, vars_of
from hopflow.graph.rewriting import reader, replace_uses
from hopflow.ops.gather import gather, gather_clip
from hopflow.ops.sorting import argsort_op, is_short, sort_op


def sort_values(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    for node in graph.nodes:
        for inner in node.graphs.values():
            sort_values(inner)
    if any(node.op is argsort_op for node in graph.nodes):
        _share_orders(graph)
        _read_no_orders(graph)
    return graph


def _share_orders(graph: Graph) -> None:
    first: dict[tuple[Arg, bool], Var] = {}
    equal: dict[Var, Arg] = {}
    for node in graph.nodes:
        if node.op is argsort_op:
            [x], [order] = node.args, node.results
            shared = first.setdefault((x, node.params["descending"]), order)
            if shared is not order:
                equal[order] = shared
    replace_uses(graph, equal)


def _read_no_orders(graph: Graph) -> None:
    reads = reader(graph)
    uses = Counter([v for node in graph.nodes for v in reads(node)])
    uses.update(vars_of(graph.outputs))
    for node in graph.nodes:
        order = _order_read(node)
        if order is not None and uses[order.results[0]] == 1:
            node.op, node.args, node.params = sort_op, order.args, dict(order.params)


def _order_read(node: Node) -> Node | None:
    """Return the `argsort` of an array along its last axis whose elements a node reads
    in that order."""
    if node.op not in (gather, gather_clip) or len(node.args) != 2:
        return None
    x, order = node.args
    if not isinstance(order, Var) or order.node.op is not argsort_op:
        return None
    last = x.type.ndim - 1
    if is_short(x.type.shape[last]):  # it has no order in memory, and gathers nothing
        return None
    reads_rows = node.params == {"axes": (last,), "batch": last}
    return order.node if reads_rows and order.node.args == (x,) else None
