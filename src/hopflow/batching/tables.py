"""Loops that update tables: whether their batch elements run one after the other."""

from collections.abc import Sequence
from typing import Final

from hopflow.graph.core import Var, vars_of
from hopflow.graph.regions import Region, Signature, carries
from hopflow.graph.types import TensorType
from hopflow.ops.dynamic import update_window
from hopflow.ops.scatter import scatter, scatter_drop

MOST_NODES: Final = 30
"""Operations of a step, at most: more are worth the vectors of all batch elements."""
LARGEST_ROW: Final = 3
"""Elements that stay in registers are no table."""

_UPDATES: Final = (scatter, scatter_drop, update_window)
"""Their arguments are a base, what is written, and the indices."""


def updates_tables(signature: Signature, batched: Sequence[bool]) -> bool:
    """Return whether the steps of a loop do little else than to update tables, each
    batch element at an index of its own. The tables of all batch elements do not stay
    in the cache from one step to the next; that of one does.

    Args:
        batched: Which args of the node are batched.
    """
    places = [pair.arg for pair in carries(signature)]
    return any(_updates(region, places, batched) for region in signature.regions)


def _updates(region: Region, carried: Sequence[int], batched: Sequence[bool]) -> bool:
    if len(region.graph.nodes) > MOST_NODES:
        return False
    depends, tables = set[Var](), set[Var]()
    for var, port in region.ports:
        if port.at is not None and batched[port.at]:
            depends.add(var)
        if port.at in carried and _is_table(var.type):
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


def _is_table(type_: TensorType) -> bool:
    return type_.ndim > 0 and not (type_.is_static and int(type_.size) <= LARGEST_ROW)
