"""Turn the sum with an update of zeros into an update, in place where possible.

The derivative of a read of a part of a tensor is the cotangent written into zeros. With
one such update for each reader, or for each step of a loop, each costs as much as its
part, instead of as much as the whole tensor.
"""

from collections import Counter
from typing import Any, Final

from hopflow.compiler.passes.stack_products import Inserter
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, vars_of
from hopflow.graph.rewriting import effects, replace_uses
from hopflow.graph.types import same_shape, same_type
from hopflow.ops.creation import fill
from hopflow.ops.dynamic import update_window, window
from hopflow.ops.elementwise import add
from hopflow.ops.scatter import scatter, scatter_drop
from hopflow.ops.views import broadcast_to, slice_, update_slice

LONGEST: Final = 64
"""The updates, at most, among which one of the same part is searched for."""


def add_updates(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    reads = Counter([v for node in graph.nodes for v in vars_of(node.args)])
    reads.update(vars_of(graph.outputs))
    nodes: list[Node] = []
    new: dict[Var, Arg] = {}
    read_once = {v for v, count in reads.items() if count == 1}
    for node in graph.nodes:
        for inner in node.graphs.values():
            add_updates(inner)
        total = _total(Inserter(nodes, len(nodes), node), node, read_once, new)
        if total is None:
            nodes.append(node)
        else:
            new[node.results[0]] = total
    graph.nodes = nodes
    replace_uses(graph, new)
    return graph


def _total(
    insert: Inserter, node: Node, read_once: set[Var], new: dict[Var, Arg]
) -> Var | None:
    """Return the sum that `node` computes, if one of its operands updates zeros.

    Args:
        read_once: What one node reads; the result is added if that is read once.
        new: By variable, the sum that has replaced it.
    """
    if node.op is not add:
        return None
    x, y = node.args
    for base, other in ((x, y), (y, x)):
        if (
            isinstance(base, Var)
            and isinstance(other, Var)
            and other in read_once
            and same_type(base.type, other.type)
            and _writes_into_zeros(other.node)
            and _takes_out(insert.nodes, other.node)
        ):
            insert.at = len(insert.nodes)
            before = new.get(base, base)
            if other.node.op is update_slice and before in read_once:
                total = _in_chain(insert, before, other.node, read_once)
            else:
                total = _added(insert, before, other.node)
            if node.results[0] in read_once:
                read_once.add(total)
            return total
    return None


def _in_chain(insert: Inserter, base: Arg, update: Node, read_once: set[Var]) -> Var:
    """Return `base` plus the part of `update`, where `base` is a chain of updates that
    only this sum reads. If one of them writes the same part, that one is left out: the
    derivative of a function that reads elements of its argument again and again writes
    each element once.
    """
    _, part = update.args
    above, at = None, base
    for _ in range(LONGEST):
        if not isinstance(at, Var) or at.node.op is not update_slice:
            break
        if at not in read_once:
            break
        below, written = at.node.args
        if _is_same_part(at.node, update):
            if above is None:
                base = below
            else:
                above.args = (below, *above.args[1:])
            total = insert(add, written, part)
            return insert(update_slice, base, total, **update.params)
        if not _are_apart(at.node, update):
            break
        above, at = at.node, below
    if _is_zero(at):
        return insert(update_slice, base, part, **update.params)
    return _added(insert, base, update)


def _is_same_part(x: Node, y: Node) -> bool:
    """Return whether two slices are provably the same. A comparison by `==` would be
    one of the program."""
    return same_type(x.args[1].type, y.args[1].type) and all(
        same_shape(x.params[name], y.params[name]) for name in ("starts", "steps")
    )


def _are_apart(x: Node, y: Node) -> bool:
    """Return whether two slices are known to have no common element."""
    for (a, m), (b, n) in zip(_ranges(x), _ranges(y), strict=True):
        ends = (a, m, b, n)
        if all(isinstance(k, int) for k in ends) and (a + m <= b or b + n <= a):
            return True
    return False


def _ranges(update: Node) -> list[tuple[Any, Any]]:
    """Return for each axis the least index of a slice, and how far its last one is
    from it, plus one."""
    ranges = []
    for start, n, step in zip(
        update.params["starts"],
        update.args[1].type.shape,
        update.params["steps"],
        strict=True,
    ):
        reach = (n - 1) * step
        ranges.append((start, reach + 1) if step > 0 else (start + reach, 1 - reach))
    return ranges


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
    while isinstance(arg, Var) and arg.node.op in (fill, broadcast_to):
        [arg] = arg.node.args  # zeros of one batch element, for all of them
    return isinstance(arg, Constant) and arg.value == 0


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
