"""Loops that update tables: whether their batch elements run one after the other."""

from collections.abc import Sequence
from typing import Final

from hopflow.graph.core import Graph, Node, Var, vars_of
from hopflow.graph.regions import Region, Signature, carries, has_regions
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import MATH
from hopflow.ops.dynamic import dynamic_index, update_window, window
from hopflow.ops.gather import gather, gather_clip
from hopflow.ops.scatter import scatter, scatter_drop

MOST_NODES: Final = 30
"""Operations of a step, at most: more are worth the vectors of all batch elements."""
FEW: Final = 4
"""Elements that an operation computes, at most, for the same reason."""

_UPDATES: Final = (scatter, scatter_drop, update_window)
"""Their arguments are a base, what is written, and the indices."""
_READS: Final = (gather, gather_clip, dynamic_index, window)


def updates_tables(signature: Signature, batched: Sequence[bool]) -> bool:
    """Return whether the steps of a loop do little else than to update tables, each
    batch element at an index of its own. The tables of all batch elements do not stay
    in the cache from one step to the next; that of one does.

    Args:
        batched: Which args of the node are batched.
    """
    places = [pair.arg for pair in carries(signature)]
    return any(_updates(r, places, batched) for r in signature.regions) and all(
        _is_light(r.graph) for r in signature.regions
    )


def _updates(region: Region, carried: Sequence[int], batched: Sequence[bool]) -> bool:
    """Return whether a step updates an array that it carries, at a batched index."""
    depends, tables = set[Var](), set[Var]()
    for var, port in region.ports:
        if port.at is not None and batched[port.at]:
            depends.add(var)
        if port.at in carried and var.type.ndim and not _is_short(var.type):
            tables.add(var)
    for node in region.graph.nodes:
        if depends.isdisjoint(vars_of(node.args)):
            continue
        depends.update(node.results)
        if node.op in _UPDATES and not tables.isdisjoint(vars_of(node.args[:1])):
            if not depends.isdisjoint(vars_of(node.args[2:])):
                return True
            tables.update(node.results)
    return False


def _is_short(type_: TensorType) -> bool:
    """Return whether each element of an array is computed for one that changes, so that
    it is no table: see `short_updates`."""
    return type_.ndim == 1 and type_.is_static and int(type_.size) <= FEW


def _is_light(graph: Graph) -> bool:
    """Return whether a step is a few operations on numbers, and reads and updates: no
    functions like `exp`, and no callback, which is called for all batch elements in
    each step."""
    return len(graph.nodes) <= MOST_NODES and all(map(_is_light_node, graph.nodes))


def _is_light_node(node: Node) -> bool:
    if node.op is None:
        return True
    if has_regions(node) or node.op.name in MATH or node.op.name == "callback":
        return False
    if node.op in _READS or getattr(node.op, "unview", None) is not None:
        return True
    is_update = node.op in _UPDATES
    values = vars_of(node.args[1:2] if is_update else node.args)
    computed = [*values] if is_update else [*values, *node.results]
    return all(v.type.is_static and int(v.type.size) <= FEW for v in computed)
