"""Turn the sum with an update of zeros into an update, in place where possible.

The derivative of a read of a part of a tensor is the cotangent written into zeros. With
one such update for each reader, or for each step of a loop, each costs as much as its
part, instead of as much as the whole tensor.
"""

from collections import Counter

from hopflow.compiler.passes.stack_products import Inserter
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, vars_of
from hopflow.graph.rewriting import effects, replace_uses
from hopflow.graph.types import same_type
from hopflow.ops.creation import fill
from hopflow.ops.dynamic import update_window, window
from hopflow.ops.elementwise import add
from hopflow.ops.scatter import scatter, scatter_drop
from hopflow.ops.views import broadcast_to, slice_, update_slice


def add_updates(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    reads = Counter([v for node in graph.nodes for v in vars_of(node.args)])
    reads.update(vars_of(graph.outputs))
    nodes: list[Node] = []
    new: dict[Var, Arg] = {}
    for node in graph.nodes:
        for inner in node.graphs.values():
            add_updates(inner)
        total = _total(Inserter(nodes, len(nodes), node), node, reads, new)
        if total is None:
            nodes.append(node)
        else:
            new[node.results[0]] = total
    graph.nodes = nodes
    replace_uses(graph, new)
    return graph


def _total(
    insert: Inserter, node: Node, reads: Counter[Var], new: dict[Var, Arg]
) -> Var | None:
    """Return the sum that `node` computes, if one of its operands updates zeros."""
    if node.op is not add:
        return None
    x, y = node.args
    for base, other in ((x, y), (y, x)):
        if (
            isinstance(base, Var)
            and isinstance(other, Var)
            and reads[other] == 1
            and same_type(base.type, other.type)
            and _writes_into_zeros(other.node)
            and _takes_out(insert.nodes, other.node)
        ):
            insert.at = len(insert.nodes)
            return _added(insert, new.get(base, base), other.node)
    return None


def _takes_out(nodes: list[Node], update: Node) -> bool:
    """Remove an update that may trap, which the sum repeats; return whether it can.

    It must be the last node with effects so far. An update without effects needs no
    removal: it is dead if nothing reads it.
    """
    if not effects(update):
        return True
    last = next((n for n in reversed(nodes) if effects(n)), None)
    if last is not update:
        return False
    nodes.remove(update)
    return True


def _writes_into_zeros(node: Node) -> bool:
    """Return whether a result is zero except for a part.

    Each element of the part is written once, or updates are added.
    """
    if node.kind != "call_function" or not node.results[0].type.dtype.is_float:
        return False
    if node.op in (scatter, scatter_drop):
        once = all(i.type.ndim == 0 for i in node.args[2:])
        combine = node.params["combine"]
        is_update = combine == "add" or (combine == "set" and once)
    else:
        is_update = node.op in (update_slice, update_window)
    return is_update and _is_zero(node.args[0])


def _is_zero(arg: Arg) -> bool:
    if not isinstance(arg, Var) or arg.node.op not in (fill, broadcast_to):
        return False
    [value] = arg.node.args
    return isinstance(value, Constant) and value.value == 0


def _added(insert: Inserter, base: Arg, update: Node) -> Var:
    """Return `base` plus the part that `update` writes into zeros."""
    _, part, *at = update.args
    sizes = part.type.shape
    if update.op is update_slice:
        old = insert(slice_, base, sizes=sizes, **update.params)
        return insert(update_slice, base, insert(add, old, part), **update.params)
    if update.op is update_window:
        old = insert(window, base, *at, sizes=sizes)
        return insert(update_window, base, insert(add, old, part), *at)
    return insert(update.op, base, part, *at, **{**update.params, "combine": "add"})
