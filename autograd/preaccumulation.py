"""Reverse mode of loops with few inputs, by their Jacobian.

The derivative of a loop with respect to a few numbers costs less in forward mode: the
loop computes its Jacobian along with its results, a column for each number, and keeps
nothing of its steps. Reverse mode then multiplies by the Jacobian. This is
"preaccumulation" in Griewank and Walther, "Evaluating Derivatives" (2nd edition, 2008),
section 10.2.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.autograd.region_jvp import jvp_in_directions
from hopflow.autograd.rules import is_differentiable
from hopflow.bind import Operand, Value
from hopflow.dtypes import float16
from hopflow.graph.core import Graph
from hopflow.graph.regions import has_regions
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.ops.convert import astype
from hopflow.ops.creation import arange, ones
from hopflow.ops.elementwise import equal, multiply
from hopflow.ops.manipulation import reshape
from hopflow.zeros import LinearMap, Tangent, Zero, added, is_zero

MOST_COLUMNS: Final = 4
"""Columns of a Jacobian, at most. Each costs a tangent of all steps, as much as a step
of reverse mode or less, without its memory."""


class _Column(NamedTuple):
    """A column of the Jacobian: of one element of the operands at `places`, which have
    the same tangent, of this type."""

    places: list[int]
    type: TensorType
    element: tuple[int, ...]


def preaccumulate(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[Sequence[Value], LinearMap] | None:
    """Return the results of an operator, and a linear function from `tangents` to those
    of the results, which multiplies by the Jacobian; None if reverse mode suits better,
    or alone gives the derivative that is wanted.

    All numbers that are differentiated must have one dtype: otherwise the Jacobian has
    fewer bits than what it is multiplied by. Entries of a Jacobian may overflow where
    its products do not, in float16 soon.

    Args:
        tangents: Those of the operands, in a linear trace.
    """
    inputs = _inputs(tangents)
    results = op.result_types([o.type for o in operands], params)
    types = [type_ for _, type_ in inputs]
    dtypes = {t.dtype for t in (*types, *filter(is_differentiable, results))}
    if len(dtypes) > 1 or float16 in dtypes:
        return None
    if not all(type_.is_static for type_ in types):
        return None
    if not 0 < sum(int(type_.size) for type_ in types) <= MOST_COLUMNS:
        return None
    if not _allows_forward(params):
        return None
    columns = [
        _Column(places, type_, element)
        for places, type_ in inputs
        for element in np.ndindex(*map(int, type_.shape))
    ]
    directions = [_unit(tangents, column) for column in columns]
    values, jacobian = jvp_in_directions(op, operands, directions, params)

    def derivative(input_dots: Sequence[Tangent]) -> Sequence[Tangent]:
        result_dots: list[Tangent] = [Zero(v.type) for v in values]
        for column, entries in zip(columns, jacobian, strict=True):
            dot = input_dots[column.places[0]]
            if isinstance(dot, Zero):
                continue
            number = dot[column.element] if column.element else dot
            for i, entry in enumerate(entries):
                if not is_zero(entry):
                    result_dots[i] = added(result_dots[i], multiply(entry, number))
        return result_dots

    return values, derivative


def _inputs(tangents: Sequence[Tangent]) -> list[tuple[list[int], TensorType]]:
    """Return the places of operands that are differentiated, and their type: those with
    one tangent together."""
    places: dict[int, list[int]] = {}
    for place, tangent in enumerate(tangents):
        if not is_zero(tangent):
            places.setdefault(id(tangent), []).append(place)
    return [(of_one, tangents[of_one[0]].type) for of_one in places.values()]


def _allows_forward(params: dict[str, Any]) -> bool:
    """Return True if forward mode computes the derivative that reverse mode would, and
    a step may be traced again for each column: writes are values there, but callbacks
    would be called again."""
    graphs = [g for g in params.values() if isinstance(g, Graph)]
    return not any("callback" in effects(g) or has_custom_rules(g) for g in graphs)


def _unit(tangents: Sequence[Tangent], column: _Column) -> list[Tangent]:
    """Return tangents that are one at the element of a column, and zero elsewhere."""
    units: list[Tangent] = [Zero(t.type) for t in tangents]
    type_ = column.type
    unit = ones((), dtype=type_.dtype)
    if type_.shape:
        number = int(np.ravel_multi_index(column.element, tuple(map(int, type_.shape))))
        is_one = equal(arange(int(type_.size)), number)
        unit = reshape(astype(is_one, type_.dtype), type_.shape)
    for place in column.places:
        units[place] = unit
    return units


def has_custom_rules(graph: Graph) -> bool:
    """Return True if a call in the graph has a custom derivative rule."""
    return any(
        has_regions(node) and node.op.has_custom_derivative(node.params)
        for node in graph.walk()
    )
