"""Turns selects between an array and its update into masked updates.

    v1 = c0 with [k[]] = 0.0                           v2 = c0 with [k[]] = 0.0
    v2 = select(p[], v1[i0], c0[i0]) for i0 < 1000  ->      where p[]

The select reads and writes the whole array, and keeps two of them. A masked update
writes the elements that change, where they are; so does one of a copy that nothing else
reads. The test may depend on axes that the update goes along, as on the examples of a
batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise, Scatter, axes
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.registers import is_small, shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    as_values,
    elements,
    values_read,
)
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.walk import nodes


def masked_updates(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        if any(isinstance(q.definition, Scatter) for q in block.equations):
            _edit(block)


def _edit(block: Block) -> None:
    readers = Counter(block.results)
    for equation in block.equations:
        readers.update(values_read(equation).keys())
    makers = {v: q for q in block.equations for v in q.results}
    edited: dict[Equation, None] = {}
    for equation in block.equations:
        edited[equation] = None
        for choice in _choices(equation):
            updates = _updates(choice, makers, readers)
            masks = [_mask(choice, update) for update in updates]
            if not updates or None in masks:
                continue
            del edited[equation]
            base = choice.base
            for update, mask in zip(updates, masks, strict=True):
                del edited[update]  # it moves, for the test may be computed later
                edited[update] = None
                update.definition = replace(_scatter(update), base=base, keep=mask)
                [base] = update.results
            update.results = equation.results
            makers[equation.results[0]] = update
            break
    block.equations = [*edited]


class _Choice(NamedTuple):
    """Elements of `updated` where a test holds, and of `base` elsewhere."""

    test: Expr
    updated: Value
    base: Value


def _choices(equation: Equation) -> Iterator[_Choice]:
    """Yield the select of two whole arrays that an equation is, in both directions."""
    definition = equation.definition
    if not isinstance(definition, Pointwise) or equation.symbol is not None:
        return
    if definition.is_view or definition.checks or len(definition.elements) != 1:
        return
    [node], [result] = definition.elements, equation.results
    if node.op != "select" or is_small(result.type):
        return
    test, *sides = node.args
    for side in sides:
        is_whole = side.op == "element" and side.args == axes(len(result.shape))
        if not is_whole or shape_key(side.attr.shape) != shape_key(result.shape):
            return
    x, y = (side.attr for side in sides)
    yield _Choice(test, x, y)
    yield _Choice(e.unary("not", test), y, x)


def _scatter(update: Equation) -> Scatter:
    assert isinstance(update.definition, Scatter)
    return update.definition


def _updates(
    choice: _Choice, makers: Mapping[Value, Equation], readers: Mapping[Value, int]
) -> list[Equation]:
    """Return the updates that make one array of the other, if they are read by nothing
    else; or none."""
    updates: list[Equation] = []
    read = {node.attr for node in elements([choice.test])}
    value = choice.updated
    while value is not choice.base:
        update = makers.get(value)
        if update is None or not isinstance(update.definition, Scatter):
            return []
        if readers[value] > 1 or value in read or update.definition.checks:
            return []
        updates.append(update)
        [value] = as_values([update.definition.base])
        if _is_copy(makers.get(value), choice.base) and readers[value] == 1:
            break
    return updates[::-1]


def _is_copy(equation: Equation | None, base: Value) -> bool:
    """Return whether an equation is a copy of an array."""
    if equation is None or not isinstance(equation.definition, Pointwise):
        return False
    [element, *others] = equation.definition.elements
    at = axes(len(base.shape))
    return (
        not others
        and element.op == "element"
        and element.args == at
        and (
            element.attr is base
            and shape_key(equation.results[0].shape) == shape_key(base.shape)
        )
    )


def _mask(choice: _Choice, update: Equation) -> Expr | None:
    """Return which elements of an update are kept; None: the test depends on an axis
    along which positions are computed, and may be out of range."""
    scatter = _scatter(update)
    space = axes(len(scatter.space))
    places = dict(zip(axes(len(scatter.position)), scatter.position, strict=True))
    found: dict[Expr, Expr] = {}
    for node in nodes(choice.test):
        if node in places:
            if places[node] not in space:
                return None
            found[node] = places[node]
        else:
            found[node] = e.with_args(node, tuple([found[a] for a in node.args]))
    mask = found[choice.test]
    return mask if scatter.keep is None else e.binary("and", scatter.keep, mask)
