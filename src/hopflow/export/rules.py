"""Rules of users' derivatives in programs: regions of calls, `hops/rule_regions.py`.

A program keeps them for so many orders; beyond that a derivative is an error, for what
follows from the function itself may be another one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from hopflow.errors import ExportError
from hopflow.export.fields import Part
from hopflow.export.sizes import SymbolReader
from hopflow.graph.core import Graph, Node
from hopflow.hops.base import graphs_of
from hopflow.hops.custom import CUSTOM
from hopflow.hops.rule_regions import Ruled
from hopflow.hops.rule_tracing import PARAMS, Failed

CALL: Final = ("body", "label", "results", *PARAMS)
"""The params of a call in a program."""

# --- keeping --------------------------------------------------------------------------


def keep_rules(node: Node, orders: int, portable: Callable[[Graph], Graph]) -> None:
    """Make a node, in place, a call of a custom function with its rules for so many
    orders; an operator of a user's too.

    Args:
        portable: What makes a rule's graph one that can leave Python.

    Raises:
        ExportError: a rule has no graph.
    """
    op, params = node.op, node.params
    label = params.get("label", f"{op.name}: `{op.name}`")
    call = {"body": graphs_of(params)[0], "label": label, "results": params["results"]}
    if orders and "late" in params:
        params = {**params, **_traced(op, params, label)}
    for key in PARAMS if orders else ("examples",):
        if key in params:
            call[key] = _kept(params[key], label, portable)
    node.op, node.params = CUSTOM, call


def _traced(op: Any, params: dict[str, Any], label: str) -> dict[str, Any]:
    regions, held = params["late"].regions(op, params)
    if held:
        raise _no_graph(
            label,
            f"it reads an array {held[0].type} that those of lower orders do not read.",
        )
    return regions  # type: ignore[no-any-return]


def _kept(value: Any, label: str, portable: Callable[[Graph], Graph]) -> Any:
    if isinstance(value, Graph):
        return portable(value)
    if isinstance(value, Failed):
        raise _no_graph(label, str(value.error)) from value.error
    return value


def _no_graph(label: str, why: str) -> ExportError:
    return ExportError(
        f"{label}: a derivative cannot be kept: {why} Export with fewer `derivatives`, "
        "or have the rule compute with tensors that it is given."
    )


# --- version 1 of calls ---------------------------------------------------------------


def read_rules(
    part: Part, graphs: Sequence[Graph], symbols: SymbolReader
) -> dict[str, Any]:
    """The param `use` of a call of version 1; see its upgrade."""
    names = ["name", "function", "active", "orders", "sizes"]
    found = part.members(names, Ruled.rule_graphs)
    rules: dict[str, Any] = {
        key: found[key].within(graphs, "a graph before it")
        for key in Ruled.rule_graphs
        if key in found
    }
    if ("forward" in rules) != ("backward" in rules):
        part.fail("both rules of reverse derivatives")
    known = found["sizes"].each(symbols.symbol)
    for graph in rules.values():
        if any(v.node.symbol not in known for v in graph.symbols):
            part.fail("rules whose symbols are those of `body`")
    return rules | {
        "name": found["name"].text(),
        "function": found["function"].text(),
        "active": found["active"].each(Part.flag),
        "orders": found["orders"].integer(),
        "sizes": known,
    }
