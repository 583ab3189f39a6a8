"""Loops that update tables: whether their batch elements run one after the other."""

from collections.abc import Sequence
from typing import Final

from hopflow.graph.core import Graph, Node, Var, vars_of
from hopflow.graph.regions import Region, Signature, carries, has_regions
from hopflow.graph.types import TensorType, same_type
from hopflow.loop_ir.expr import MATH
from hopflow.ops.dynamic import dynamic_index, update_window, window
from hopflow.ops.gather import gather, gather_clip
from hopflow.ops.scatter import scatter, scatter_drop

MOST_NODES: Final = 30
"""Operations of a step, at most, and of a loop or a branch in it: more are worth the
vectors of all batch elements."""
FEW: Final = 4
"""Elements that an operation computes, at most, for the same reason."""

_UPDATES: Final = (scatter, scatter_drop, update_window)
"""Their arguments are a base, what is written, and the indices."""
_REGIONS: Final = ("while_loop", "scan", "cond", "switch", "invoke_subgraph")
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


def copies_tables(signature: Signature, bodies: Sequence[Graph]) -> bool:
    """Return whether the steps of a loop do little else than to update tables, within a
    loop or a branch that each batch element runs by itself. If all of them took a step
    together, each step would copy all of their tables.

    Args:
        bodies: The regions as they are for all batch elements.
    """
    places = [pair.arg for pair in carries(signature)]
    pairs = zip(signature.regions, bodies, strict=True)
    return any(_maps_tables(r, places, graph) for r, graph in pairs) and all(
        _is_light(r.graph, with_regions=True) for r in signature.regions
    )


def _maps_tables(region: Region, carried: Sequence[int], graph: Graph) -> bool:
    """Return whether a graph for all batch elements has a `map` that takes tables which
    are carried and gives new ones."""
    inputs = graph.inputs[len(graph.inputs) - len(region.inputs) :]  # no batch size
    tables = set[Var]()
    for var, (own, port) in zip(inputs, region.ports, strict=True):
        if port.at in carried and own.type.ndim and not _is_short(own.type):
            tables.add(var)
    for node in graph.nodes:
        taken = [var for var in vars_of(node.args) if var in tables]
        if not taken or node.op is None:
            continue
        given = [
            v for v in node.results if any(same_type(v.type, t.type) for t in taken)
        ]
        if node.op.name == "map" and given:
            return True
        tables.update(given)
    return False


def _is_short(type_: TensorType) -> bool:
    """Return whether each element of an array is computed for one that changes, so that
    it is no table: see `short_updates`."""
    return type_.ndim == 1 and type_.is_static and int(type_.size) <= FEW


def _is_light(graph: Graph, *, with_regions: bool = False) -> bool:
    """Return whether a step is a few operations on numbers, and reads and updates: no
    functions like `exp`, and no callback, which is called for all batch elements in
    each step.

    Args:
        with_regions: Whether it may have loops and branches, which are light, too.
    """
    return len(graph.nodes) <= MOST_NODES and all(
        _has_light_regions(node)
        if with_regions and has_regions(node)
        else _is_light_node(node)
        for node in graph.nodes
    )


def _has_light_regions(node: Node) -> bool:
    return (
        node.op is not None
        and node.op.name in _REGIONS
        and all(_is_light(graph, with_regions=True) for graph in node.graphs.values())
    )


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
