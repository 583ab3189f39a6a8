"""Values that are whole parts of a result, and so can be computed in its memory.

    v0 = sin(x[i0]) for i0 < 64
    v1 = (v0[i0] where i0 < 64, 0.0 elsewhere) for i0 < 80

The piece of `v1` below 64 is all of `v0`, each element at a shifted index. A window
says which part of `v1` that is: for each axis of `v1` the axis of `v0` along it, or
None, and the first position.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from hopflow.compiler.kernel_program.definitions import Cut, Pointwise, axes
from hopflow.compiler.kernel_program.program import Equation, Value
from hopflow.compiler.kernel_program.sizes import at_least, same_size, size_of_expr
from hopflow.graph.types import is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.symbolic.size import Size

Window: TypeAlias = tuple[tuple[int | None, Size], ...]
_Range: TypeAlias = tuple[Size, Size] | None
"""The first position along an axis and the one after the last, or None if unknown."""


class Part(NamedTuple):
    """A value that is a piece of a result.

    piece    the piece of the equation's definition
    number   the number of the result
    """

    value: Value
    equation: Equation
    piece: Pointwise
    number: int
    window: Window

    @property
    def result(self) -> Value:
        return self.equation.results[self.number]


def is_at_own_index(element: Expr, result: Value) -> bool:
    """Return whether an element of a result is that of a value at the same index."""
    return element.op == "element" and element.args == axes(result.type.ndim)


def parts(equation: Equation) -> Iterator[Part]:
    """Yield the parts of an equation's results that are values, in program order."""
    if not isinstance(equation.definition, Cut):
        return
    shape = equation.results[0].shape
    whole: list[_Range] = [(0, n) for n in shape]
    for piece, ranges in _boxes(equation.definition, whole):
        for number, element in enumerate(piece.elements):
            window = _window(element, ranges)
            if window is not None:
                yield Part(element.attr, equation, piece, number, window)


def _boxes(
    kernel: Pointwise | Cut, ranges: list[_Range]
) -> Iterator[tuple[Pointwise, list[_Range]]]:
    """Yield the pieces of a kernel, with the ranges of their indices."""
    if isinstance(kernel, Pointwise):
        yield kernel, ranges
        return
    k, span, at = kernel.axis, ranges[kernel.axis], size_of_expr(kernel.at)
    below: _Range = None
    above: _Range = None
    if span is not None and at is not None:
        low, high = span
        if isinstance(low, int) and isinstance(high, int) and isinstance(at, int):
            at = min(max(at, low), high)
        if at_least(at, low) and at_least(high, at):
            below, above = (low, at), (at, high)
    yield from _boxes(kernel.below, [*ranges[:k], below, *ranges[k + 1 :]])
    yield from _boxes(kernel.above, [*ranges[:k], above, *ranges[k + 1 :]])


def _window(element: Expr, ranges: list[_Range]) -> Window | None:
    """Return where a piece with this element holds all of a value, or None."""
    if element.op != "element" or e.condition_of(element) is not None:
        return None
    value: Value = element.attr
    along: dict[int, int] = {}
    for value_axis, (index, n) in enumerate(
        zip(element.args, value.shape, strict=True)
    ):
        if is_one(n) and index.is_const:
            continue
        moved = _moved(index, len(ranges))
        if moved is None or moved[0] in along:
            return None
        axis, first = moved
        if not _covers(ranges[axis], first, n):
            return None
        along[axis] = value_axis
    window: list[tuple[int | None, Size]] = []
    for axis, span in enumerate(ranges):
        if span is None or not (axis in along or _covers(span, span[0], 1)):
            return None
        window.append((along.get(axis), span[0]))
    return tuple(window)


def _moved(index: Expr, rank: int) -> tuple[int, Size] | None:
    """Return the axis and the size `first` of an index `axis - first`, or None."""
    first: Size = 0
    while index.op in ("add", "sub"):
        is_added, (index, other) = index.op == "add", index.args
        size = size_of_expr(other)
        if size is None:
            return None
        first = first - size if is_added else first + size
    position = {axis: k for k, axis in enumerate(axes(rank))}.get(index)
    return None if position is None else (position, first)


def _covers(span: _Range, first: Size, n: Size) -> bool:
    """Return whether a range is the `n` positions from `first` on."""
    return (
        span is not None and same_size(span[0], first) and same_size(span[1], first + n)
    )


def is_dense(part: Part) -> bool:
    """Return whether a part is contiguous in its result.

    It is if it has positions of one axis and all of the axes after it.
    """
    shape, result_shape = part.value.shape, part.result.shape
    outer = len(result_shape) - len(shape)
    if outer < 0 or any(axis is not None for axis, _ in part.window[:outer]):
        return False
    along = [axis for axis, _ in part.window[outer:]]
    return all(
        (axis == k or (axis is None and is_one(n)))
        and (k == 0 or same_size(n, result_shape[outer + k]))
        for k, (axis, n) in enumerate(zip(along, shape, strict=True))
    )


def same_window(a: Window, b: Window) -> bool:
    """Return whether two windows are equal as expressions."""
    return all(
        axis == other and same_size(first, position)
        for (axis, first), (other, position) in zip(a, b, strict=True)
    )
