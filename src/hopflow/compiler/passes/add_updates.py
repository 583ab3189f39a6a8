"""Adding what is zero but for a part: only that part is added, in place if it can be.

The derivative of reading a part of a tensor is its cotangent written into zeros. With
as many of them as there are readers, or steps of a loop, each costs what its own part
does, and not what the whole tensor does.
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
    """In place, in all subgraphs; returns the graph."""
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
    """The sum that `node` makes, if one of its operands is an update of zeros."""
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
    """Take out an update that may stop the program, to make it again at the end, if it
    is the last that may; others go by themselves if nothing reads them."""
    if not effects(update):
        return True
    last = next((n for n in reversed(nodes) if effects(n)), None)
    if last is not update:
        return False
    nodes.remove(update)
    return True


def _writes_into_zeros(node: Node) -> bool:
    """Whether the result is zero but for a part, each element of which is written once,
    or what is written to it is added up."""
    if node.kind != "call_function" or not node.results[0].type.dtype.is_float:
        return False
    if node.op in (scatter, scatter_drop):
        once = all(i.type.ndim == 0 for i in node.args[2:])
        combine = node.params["combine"]
        known = combine == "add" or (combine == "set" and once)
    else:
        known = node.op in (update_slice, update_window)
    return known and _is_zero(node.args[0])


def _is_zero(arg: Arg) -> bool:
    if not isinstance(arg, Var) or arg.node.op not in (fill, broadcast_to):
        return False
    [value] = arg.node.args
    return isinstance(value, Constant) and value.value == 0


def _added(insert: Inserter, base: Arg, update: Node) -> Var:
    """`base` with what `update` writes into zeros added to it."""
    _, part, *at = update.args
    sizes = part.type.shape
    if update.op is update_slice:
        old = insert(slice_, base, sizes=sizes, **update.params)
        return insert(update_slice, base, insert(add, old, part), **update.params)
    if update.op is update_window:
        old = insert(window, base, *at, sizes=sizes)
        return insert(update_window, base, insert(add, old, part), *at)
    return insert(update.op, base, part, *at, **{**update.params, "combine": "add"})
