"""Reverse mode of loops with few inputs, by their Jacobian.

The derivative of a loop with respect to a few scalars costs less in forward mode:
the loop computes its Jacobian along with its results, a column for each scalar, and
keeps nothing of its steps. Reverse mode then multiplies by the Jacobian. This is
"preaccumulation" in Griewank and Walther, "Evaluating Derivatives" (2nd edition, 2008),
section 10.2.
"""

from collections.abc import Sequence
from typing import Any, Final

from hopflow.autograd.region_jvp import jvp_in_directions
from hopflow.bind import Operand, Value
from hopflow.graph.core import Graph
from hopflow.graph.regions import has_regions
from hopflow.graph.rewriting import effects
from hopflow.ops.creation import ones
from hopflow.ops.elementwise import multiply
from hopflow.zeros import LinearMap, Tangent, Zero, added, is_zero

MOST_COLUMNS: Final = 4
"""Columns of a Jacobian, at most. Each costs a tangent of all steps, as much as a step
of reverse mode or less, without its memory."""


def preaccumulate(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[Sequence[Value], LinearMap] | None:
    """Return the results of an operator, and a linear function from `tangents` to those
    of the results, which multiplies by the Jacobian; None if reverse mode suits better.

    Operands with one tangent share a column.

    Args:
        tangents: Those of the operands, in a linear trace.
    """
    columns: dict[int, list[int]] = {}
    for place, tangent in enumerate(tangents):
        if not is_zero(tangent):
            if tangent.type.shape:
                return None
            columns.setdefault(id(tangent), []).append(place)
    if len(columns) > MOST_COLUMNS or not _allows_forward(params):
        return None
    directions = [_unit(tangents, places) for places in columns.values()]
    values, jacobian = jvp_in_directions(op, operands, directions, params)
    first_places = [places[0] for places in columns.values()]

    def derivative(input_dots: Sequence[Tangent]) -> Sequence[Tangent]:
        result_dots: list[Tangent] = [Zero(v.type) for v in values]
        for place, column in zip(first_places, jacobian, strict=True):
            dot = input_dots[place]
            for i, entries in enumerate(column):
                if not (is_zero(entries) or is_zero(dot)):
                    result_dots[i] = added(result_dots[i], multiply(entries, dot))
        return result_dots

    return values, derivative


def _allows_forward(params: dict[str, Any]) -> bool:
    """Return True if forward mode computes the derivative that reverse mode would, and
    may run the parts of a step more than once."""
    graphs = [g for g in params.values() if isinstance(g, Graph)]
    return not any("callback" in effects(g) or has_custom_rules(g) for g in graphs)


def _unit(tangents: Sequence[Tangent], places: Sequence[int]) -> list[Tangent]:
    """Return tangents that are one at these places, and zero elsewhere."""
    units: list[Tangent] = [Zero(t.type) for t in tangents]
    for place in places:
        units[place] = ones((), dtype=tangents[place].type.dtype)
    return units


def has_custom_rules(graph: Graph) -> bool:
    """Return True if a call in the graph has a custom derivative rule."""
    return any(
        has_regions(node) and node.op.has_custom_derivative(node.params)
        for node in graph.walk()
    )
