"""Finds the extrema of columns and their positions in one pass over the elements.

    v1 = reduce max from -inf of x[i1, i0]
    v2 = reduce min from n of select(x[i1, i0] == v1[i0] or isnan(x[i1, i0]), i1, n)
  ->
    v2 = reduce (best, at, x, i -> select(beyond, x, best), select(beyond, i, at))
         from -inf, 0 of x[i1, i0], i1 then at

`beyond` is `not x <= best and not isnan(best)`: a larger element replaces the best one,
and so does the first NaN, but no equal element. Vectors hold the best elements of
several columns, and their positions. The extrema are results, too, if something else
reads them.

Along a row two passes take less time: the elements of both may be combined in any
order, so that a vector holds several elements of the row.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import SHORT_ROW, run_along
from hopflow.compiler.kernel_program.definitions import (
    Function,
    Reduction,
    axes,
    parameters,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.registers import is_small, shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    elements,
    values_read,
)
from hopflow.graph.types import TensorType, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.walk import same
from hopflow.ops.reducers import place_of
from hopflow.ops.scalar import both, is_nan, like, negate

_NOT_BEYOND: Final = {"max": "le", "min": "ge"}
"""How an ordered element compares with the best one if it does not replace it."""
_BITS: Final = {"max": dtypes.UNSIGNED, "min": dtypes.SIGNED}
"""The integers whose least one has the bits of the extremum, if that is a zero."""


def positions(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    for block in all_blocks(program.block):
        _edit(block)


def _edit(block: Block) -> None:
    searches = dict(_searches(block))
    if not searches:
        return
    readers = Counter(block.results)
    for equation in block.equations:
        readers.update(values_read(equation).keys())
    for search, extremum in searches.items():
        is_read = readers[extremum.results[0]] > 1
        _find_both(extremum, search, keeps_extremum=is_read)
    block.equations = [q for q in block.equations if q not in searches]


# --- the equations that one pass replaces ---------------------------------------------


def _searches(block: Block) -> Iterator[tuple[Equation, Equation]]:
    """Yield the equations that find the positions of extrema of columns, each with the
    equation of the extrema."""
    extrema: dict[Value, Equation] = {}
    for equation in block.equations:
        kernel = equation.definition
        if not isinstance(kernel, Reduction) or kernel.combine not in _NOT_BEYOND:
            continue
        read = dict.fromkeys(node.attr for node in elements(kernel.element))
        for value in read:
            if value in extrema and _finds(equation, extrema[value]):
                yield equation, extrema.pop(value)
                break
        [result] = equation.results
        if _is_over_columns(kernel, result.type):
            extrema[result] = equation


def _is_over_columns(kernel: Reduction, type_: TensorType) -> bool:
    """Return whether memory runs along the last axis of the result, of which vectors
    hold several elements, and not along the space. The extremum of bools is left alone:
    it takes one instruction for the bits of many elements."""
    if is_small(type_) or type_.dtype is dtypes.bool_ or len(kernel.space) != 1:
        return False
    axis, n = [(axis, n) for axis, n in enumerate(type_.shape) if not is_one(n)][-1]
    if isinstance(n, int) and n < SHORT_ROW:
        return False
    at = axes(type_.ndim + 1)
    reads = [(e.index_of(x), _last_index(x)) for x in elements(kernel.element)]
    return run_along(reads, at[axis], at[-1])


def _last_index(element: Expr) -> Expr:
    """Return the index of an element along the last axis of its value."""
    at, shape = e.index_of(element), element.attr.shape
    long = [i for i, n in zip(at, shape, strict=True) if not is_one(n)]
    return long[-1] if long else e.index(0)


def _finds(search: Equation, extremum: Equation) -> bool:
    """Return whether an equation finds the first positions of extrema."""
    kernel, best = search.definition, extremum.definition
    assert isinstance(kernel, Reduction)
    assert isinstance(best, Reduction)
    if kernel.combine != "min" or shape_key(kernel.space) != shape_key(best.space):
        return False
    [value], [element], [size] = extremum.results, best.element, kernel.init
    if element.dtype is not value.dtype:  # the accumulator is wider
        [element] = element.args
    *at, place = axes(value.type.ndim + 1)
    return same(kernel.element[0], place_of(value[tuple(at)], element, place, size))


# --- the equation that replaces them --------------------------------------------------


def _find_both(extremum: Equation, search: Equation, *, keeps_extremum: bool) -> None:
    """Make the equation of extrema find their positions, with the extrema or alone."""
    best, kernel = extremum.definition, search.definition
    assert isinstance(best, Reduction)
    assert isinstance(best.combine, str)
    assert isinstance(kernel, Reduction)
    [x], [size] = best.element, kernel.init
    init: Index = (*best.init, like(0, size))
    element: Index = (x, e.cast(axes(search.results[0].type.ndim + 1)[-1], size.dtype))
    if keeps_extremum and x.dtype.is_float:
        [dtype] = (d for d in _BITS[best.combine] if d.bits == x.dtype.bits)
        init = (*init, e.const(dtypes.iinfo(dtype).max, dtype))
        element = (*element, e.bitcast(x, dtype))
    totals = parameters(init, "total")
    results = *extremum.results, *search.results
    finish = (
        _finish(best.finish[0], totals, _exact(*totals)),
        _finish(kernel.finish[0], totals, totals[1]),
    )
    first = 0 if keeps_extremum else 1
    extremum.results = results[first:]
    extremum.definition = Reduction(
        best.space,
        init,
        _first_extremum(best.combine, totals),
        element,
        finish[first:],
        is_associative=True,
    )
    extremum.inlined = (*extremum.inlined, *search.inlined, search.node)


def _first_extremum(name: str, totals: Index) -> Function:
    """Return the function that combines the best element and its position with those of
    elements that come after it."""
    new = parameters(totals, "new")
    (best, at, *bits), (x, place, *new_bits) = totals, new
    is_behind = e.compare(_NOT_BEYOND[name], x, best)
    beyond = both(negate(is_behind), negate(is_nan(best)))
    # A minimum of integers is an instruction, which need not wait for the comparison.
    is_float = x.dtype.is_float
    value = e.select(beyond, x, best) if is_float else e.binary(name, best, x)
    least = [e.binary("min", a, b) for a, b in zip(bits, new_bits, strict=True)]
    return Function((*totals, *new), (value, e.select(beyond, place, at), *least))


def _exact(best: Expr, _at: Expr, *bits: Expr) -> Expr:
    """Return an extremum, which is exact but for the sign of a zero: -0 is less than 0.

    If the largest number is a zero, the bits of others are greater, as unsigned
    integers, than those of -0; these are greater than those of 0. If the smallest one
    is a zero, none of them is negative but -0, whose bits are the least signed integer.
    """
    for least in bits:
        is_zero = e.compare("eq", best, like(0, best))
        best = e.select(is_zero, e.bitcast(least, best.dtype), best)
    return best


def _finish(finish: Function, totals: Index, value: Expr) -> Function:
    """Return the function of all accumulators that gives a result for a value."""
    [total], [result] = finish.parameters, finish.results
    return Function(totals, (e.rewrite(result, {total: value}.get),))
