"""Loop nests for definitions: each definition becomes one nest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Final, TypeAlias, TypeGuard

from hopflow import dtypes
from hopflow.compiler.kernel_passes.reads import SHORT_ROW, run_along, weight
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Compact,
    Cut,
    Definition,
    Effect,
    Pointwise,
    Prefix,
    Reduction,
    Scatter,
    axes,
)
from hopflow.compiler.kernel_program.program import Equation, Value
from hopflow.compiler.kernel_program.registers import (
    REGISTER_LIMIT,
    indices,
    indices_of,
    is_short,
    is_small,
    shape_key,
)
from hopflow.compiler.kernel_program.rewriting import as_values
from hopflow.compiler.memory.place import in_registers
from hopflow.compiler.schedule.builder import Builder, is_unrolled, number_of
from hopflow.compiler.schedule.copies import substituted
from hopflow.compiler.schedule.values import Registers, Stored
from hopflow.graph.types import Shape, TensorType, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.program import (
    Accumulate,
    Call,
    HostCall,
    If,
    Invoke,
    Program,
    Ref,
    Trap,
)
from hopflow.loop_ir.walk import merged_axes, nodes
from hopflow.symbolic.size import Size

VECTOR_ROW: Final = 8
"""Rows of at least so many elements are computed as vectors."""
ROWS_AT_ONCE: Final = 4
"""The rows that are added to a row of sums in one pass over it."""
FEW_ROWS: Final = 4
"""At most so many rows are added in one expression; more, in a loop."""
REGISTERS: Final = 4
"""The registers of a row of sums, at most, that stay there until all is added."""
FEW_TERMS: Final = 16
"""At most so many terms of a sum are written one after the other."""
PIECES: Final = 64
"""Terms of a sum, at most, that are written out because each is of another array."""
LARGEST_ROW: Final = 192
"""Instructions of all terms, at most."""
SHORT_ELEMENT: Final = 16
"""The instructions of the longest element of which so many are computed at once."""

_Range: TypeAlias = tuple[Expr, Expr]
"""The first index along an axis, and the end, which is one past the last."""
_Box: TypeAlias = tuple[Pointwise, tuple[_Range, ...]]
"""A kernel and the ranges of its indices, one for each axis."""


class Kernels:
    """Writes the loops of one equation: `node` is the number of its node, for traps."""

    def __init__(self, builder: Builder, equation: Equation) -> None:
        self.b, self.equation = builder, equation
        self.node = number_of(equation.node)
        self.types = [value.type for value in equation.results]

    def definition(self, definition: Definition) -> None:
        """Write the loops of a definition."""
        match definition:
            case Effect():
                for check in definition.checks:
                    self.check(check)
                for type_ in definition.types:
                    self.b.check_size(type_)
            case Pointwise():
                self.pointwise(definition)
            case Cut():
                self.cut(definition)
            case Reduction():
                self.reduction(definition)
            case Prefix():
                self.prefix(definition)
            case Compact():
                self.compact(definition)
            case Scatter():
                self.scatter(definition)
            case Library():
                self.library(definition)
            case Callback():
                self.callback(definition)

    def targets(self) -> list[Stored]:
        """Return the memory of the results."""
        places = [self.b.place(value) for value in self.equation.results]
        return [place for place in places if isinstance(place, Stored)]

    def registers(self, columns: Sequence[Sequence[Expr]]) -> None:
        """Set the elements of results in registers."""
        for value, column in zip(self.equation.results, columns, strict=True):
            self.b.places[value] = Registers(value.type, tuple(column))

    # --- checks ---

    def check(self, check: Check) -> None:
        """Stop the program unless the check holds everywhere."""
        site = self.b.site(check.kind, self.node)

        def trap(at: Index) -> None:
            holds, *values = self.b.at([check.holds, *check.values], at)
            fails = e.unary("not", holds)
            if not (fails.is_const and not fails.attr):
                self.b.add(Trap(fails, site, tuple(values)))

        is_searched = check.passed is not None and check.passed.is_const
        if is_searched or is_short(check.shape):
            self.b.nest(check.shape, trap, independent=False)
            return
        if check.passed is not None:
            [passed] = self.b.at([check.passed], ())
            with self.b.into([]) as search:
                self.b.nest(check.shape, trap, independent=False)
            self.b.add(If(e.unary("not", passed), search))
            return
        # A fast pass reduces a flag. Only if it is set, the first failure is sought.
        failed = self.b.declare(e.const(False, dtypes.bool_), "failed")

        def accumulate(at: Index) -> None:
            [holds] = self.b.at([check.holds], at)
            self.b.add(Accumulate(failed, "or", e.unary("not", holds)))

        self.b.nest(check.shape, accumulate)
        with self.b.into([]) as search:
            self.b.nest(check.shape, trap, independent=False)
        test = If(e.read(failed), search)
        if check.is_free:
            self.b.pending_tests.append(test)
        else:
            self.b.add(test)

    # --- pointwise ---

    def pointwise(self, kernel: Pointwise) -> None:
        """Write a nest that computes all values at an index before storing any."""
        if kernel.is_view and not is_small(self.types[0]):
            self.b.views[self.equation.results[0]] = kernel
            return
        if is_small(self.types[0]):
            rows = [
                list(map(self.b.let, self.b.at(kernel.elements, at)))
                for at in indices_of(self.types[0])
            ]
            self.registers([[row[k] for row in rows] for k in range(len(self.types))])
            return
        places = self.places()
        [first, *others] = kernel.elements
        if not others and self._is_copy(first):
            for target in places[0]:
                self.b.fill(first.attr, target)
            return
        shape, axis = self.types[0].shape, _last_axis(self.types[0])
        size = self._row_size(kernel, shape, axis)
        if size is not None:
            self._rows(kernel, places, axis, size)
            return
        self.b.nest(shape, lambda at: self.elements(kernel, places, at))

    def _row_size(self, kernel: Pointwise, shape: Shape, axis: int) -> int | None:
        """Return the size of repeated rows: the divisor of the last index in the
        elements that are read. A loop over rows, and one inside a row, need no
        division. None: nothing is divided, or rows would be of different sizes."""
        n = shape[axis] if axis >= 0 else 1
        if axis < 0 or not isinstance(n, int):
            return None
        last, at = axes(axis + 1)[axis], axes(len(shape))
        if not any(_is_divided(x, x.op, last) for x in nodes(*kernel.elements)):
            return None
        sizes = _divisors(self.b.at(kernel.elements, at), last)
        return min((s for s in sizes if s > 1 and n % s == 0), default=None)

    def _rows(
        self,
        kernel: Pointwise,
        places: Sequence[Sequence[Stored]],
        axis: int,
        size: int,
    ) -> None:
        """Write the elements, in rows of this size along an axis."""
        shape, last = self.types[0].shape, axes(axis + 1)[axis]
        length = shape[axis]
        assert isinstance(length, int)
        divided = {
            op: [x for x in nodes(*kernel.elements) if _is_divided(x, op, last, size)]
            for op in ("div", "rem")
        }

        def element(at: Index) -> None:
            row, column = at[axis : axis + 2]
            position = e.add(e.mul(row, e.index(size)), column)
            index = (*at[:axis], position, *at[axis + 2 :])
            replacements = dict.fromkeys(divided["div"], row)
            replacements |= dict.fromkeys(divided["rem"], column)
            self.elements(kernel, places, index, replacements)

        rows = length // size, size
        self.b.nest((*shape[:axis], *rows, *shape[axis + 1 :]), element)

    def places(self) -> list[tuple[Stored, ...]]:
        """Return for each result its memory, and further places that hold a copy."""
        results = self.equation.results
        copies = [self.b.copies.pop(value, ()) for value in results]
        return [(t, *more) for t, more in zip(self.targets(), copies, strict=True)]

    def elements(
        self,
        kernel: Pointwise,
        places: Sequence[Sequence[Stored]],
        at: Index,
        replacements: Mapping[Expr, Expr] = MappingProxyType({}),
    ) -> None:
        """Compute the elements at an index, and store them.

        Args:
            replacements: Nodes of the elements, with their values at this index.
        """
        written = [number for number, targets in enumerate(places) if targets]
        values = self.b.at(
            [kernel.elements[number] for number in written], at, replacements
        )
        places = [places[number] for number in written]
        if len(values) > 1 or any(len(targets) > 1 for targets in places):
            values = [self.b.let(v) for v in values]
        for targets, value in zip(places, values, strict=True):
            for place in targets:
                self.b.store(place, at, value)

    def cut(self, kernel: Cut) -> None:
        """Write a nest for each piece, inside loops over the axes before the cut."""
        places = self.places()
        shape = self.b.shape(self.types[0])
        boxes = list(self._boxes(kernel, tuple([(e.index(0), n) for n in shape])))

        def write(piece: Pointwise, at: Index) -> None:
            self.elements(piece, self._unwritten(piece, places), at)

        remaining = [box for box in boxes if any(self._unwritten(box[0], places))]
        self._pieces(remaining, (), write)

    def _unwritten(
        self, piece: Pointwise, places: Sequence[Sequence[Stored]]
    ) -> list[Sequence[Stored]]:
        """Return the places to which a piece must be written: those in which the memory
        plan has not already computed it."""
        plan, equation = self.b.plan, self.equation
        return [
            targets[1:] if plan.is_made_there(equation, piece, number) else targets
            for number, targets in enumerate(places)
        ]

    def _boxes(
        self, kernel: Pointwise | Cut, ranges: tuple[_Range, ...]
    ) -> Iterator[_Box]:
        """Yield the pieces inside these ranges, in order."""
        if isinstance(kernel, Pointwise):
            yield kernel, ranges
            return
        low, high = ranges[kernel.axis]
        [at] = self.b.at([kernel.at])
        at = self.b.let(e.binary("min", e.binary("max", at, low), high))
        for piece, part in ((kernel.below, (low, at)), (kernel.above, (at, high))):
            inner = (*ranges[: kernel.axis], part, *ranges[kernel.axis + 1 :])
            yield from self._boxes(piece, inner)

    def _pieces(
        self,
        boxes: Sequence[_Box],
        outer: Index,
        write: Callable[[Pointwise, Index], None],
    ) -> None:
        """Write loops over the remaining axes, shared by boxes of one range."""
        for _, group in groupby(boxes, lambda box: id(box[1][len(outer)])):
            self._common_loops(list(group), outer, write)

    def _common_loops(
        self,
        boxes: Sequence[_Box],
        outer: Index,
        write: Callable[[Pointwise, Index], None],
    ) -> None:
        kernel, ranges = boxes[0]
        remaining = ranges[len(outer) :]
        remaining = remaining if len(boxes) == 1 else remaining[:1]

        def body(at: Index) -> None:
            position = [
                e.add(i, low) for i, (low, _) in zip(at, remaining, strict=True)
            ]
            inner = (*outer, *position)
            if len(inner) == len(ranges):
                write(kernel, inner)
            else:
                self._pieces(boxes, inner, write)

        self.b.nest([_extent(pair) for pair in remaining], body)

    def _is_copy(self, element: Expr) -> bool:
        """Return whether an element is that of another value of the same shape."""
        [type_] = self.types
        at = axes(type_.ndim)
        return (
            element.op == "element"
            and element.args == at
            and shape_key(element.attr.shape) == shape_key(type_.shape)
        )

    # --- reductions ---

    def reduction(self, kernel: Reduction) -> None:
        kernel = self._with_long_axis(kernel)
        if all(in_registers(self.equation)):
            group = indices_of(self.types[0])
            rows = [list(map(self.b.let, x)) for x in self._reduce(kernel, group)]
            self.registers([[row[k] for row in rows] for k in range(len(self.types))])
            return
        targets, axis = self.targets(), _last_axis(self.types[0])
        shape = self.types[0].shape
        is_of_pieces = self._is_of_pieces(kernel)
        if not is_of_pieces and self._reduces_rows(kernel, self.types[0], axis):
            if self._fits_registers(kernel, self.types[0], axis):
                element = partial(self._reduce_in_registers, kernel, targets)
                self.b.nest(shape, element)
            else:
                self._reduce_rows(kernel, self.types[0], axis, targets)
            return

        few = shape[-1] if shape and self._sums_few(kernel, shape[-1]) else 0

        def row(at: Index) -> None:
            group = [(*at, e.index(k)) for k in range(few)] if few else [at]
            results = self._reduce(kernel, group)
            for here, values in zip(group, results, strict=True):
                for target, value in zip(targets, values, strict=True):
                    self.b.store(target, here, value)

        self.b.nest(shape[:-1] if few else shape, row)

    def _with_long_axis(self, kernel: Reduction) -> Reduction:
        """Return the kernel with the last axes of its space as one where memory runs
        along it, if the last one alone is too short for vectors."""
        space, rank = kernel.space, self.types[0].ndim
        last = space[-1] if space else 0
        if is_unrolled(space) or not isinstance(last, int) or last > FEW_TERMS:
            return kernel
        if self._split(kernel)[0] in ((), space):  # all terms are written out, or none
            return kernel
        for first in range(len(space) - 1):
            merged = space[first:]
            if not all(isinstance(n, int) for n in merged):
                continue
            at = axes(rank + first + 1)
            index = (*at[:-1], *_unraveled(at[-1], merged))
            values = dict(zip(axes(rank + len(space)), index, strict=True))
            elements = tuple([e.rewrite(x, values.get) for x in kernel.element])
            if not _divisors(self.b.at(elements, at), at[-1]):
                space = (*space[:first], prod(merged))
                return replace(kernel, space=space, element=elements)
        return kernel

    def _sums_few(self, kernel: Reduction, size: Size) -> TypeGuard[int]:
        """Return whether one loop over the space computes all sums along an axis: then
        it reads rows of a few elements (`x[n, 3]`) once, and whole."""
        is_few = isinstance(size, int) and 1 < size <= REGISTER_LIMIT
        return (
            is_few and isinstance(kernel.combine, str) and bool(self._split(kernel)[0])
        )

    def _reduce(self, kernel: Reduction, group: Sequence[Index]) -> list[list[Expr]]:
        """Write a loop over the kernel's space. Return for each index of a group the
        results."""
        space, last = self._split(kernel)
        if not space:
            return [self._reduce_at_once(kernel, at, indices(last)) for at in group]
        all_accumulators = [
            [self.b.declare(x, "acc") for x in self.b.at(kernel.init, at)]
            for at in group
        ]

        def step(r: Index) -> None:
            for row in indices(last):
                add((*r, *row))

        def add(r: Index) -> None:
            for at, accumulators in zip(group, all_accumulators, strict=True):
                values = self.b.at(kernel.element, (*at, *r))
                if isinstance(kernel.combine, str):
                    self.b.add(Accumulate(accumulators[0], kernel.combine, values[0]))
                    continue
                old = list(map(e.read, accumulators))
                for var, value in zip(
                    accumulators, self._combined(kernel, old, values), strict=True
                ):
                    self.b.assign(var, value)

        self.b.nest(space, step, independent=isinstance(kernel.combine, str))
        return [
            self._finished(kernel, at, list(map(e.read, accumulators)))
            for at, accumulators in zip(group, all_accumulators, strict=True)
        ]

    def _split(self, kernel: Reduction) -> tuple[Shape, tuple[int, ...]]:
        """Return the axes of a space that get loops, and the last ones, of so few
        elements that these are written one after the other: vectors then compute
        several rows. A single sum has a loop, whether its length is known or not, for
        that decides in which order floats are added; but an extremum of gathered
        elements, which a step may have written just before, has none."""
        space = kernel.space
        if is_unrolled(space) or self._is_of_pieces(kernel):
            return (), tuple([n for n in space if isinstance(n, int)])
        size = sum(map(weight, nodes(*kernel.element)))
        count, first = 1, len(space)
        while first and isinstance(kernel.combine, str):
            extent = space[first - 1]
            if not isinstance(extent, int) or not 0 < count * extent <= FEW_TERMS:
                break
            if size * count * extent > LARGEST_ROW:
                break
            count, first = count * extent, first - 1
        if (
            not first
            and not self.types[0].shape
            and not (
                kernel.combine in ("min", "max") and any(map(_gathers, kernel.element))
            )
        ):
            return space, ()
        return space[:first], tuple([n for n in space[first:] if isinstance(n, int)])

    def _is_of_pieces(self, kernel: Reduction) -> bool:
        """Return whether the terms of each sum are those of a `stack` of a few arrays:
        written out, none is chosen by a test of its index."""
        rank, space = self.types[0].ndim, kernel.space
        sizes = [n for n in space if isinstance(n, int)]
        if not rank or len(sizes) < len(space) or not 1 < prod(sizes) <= PIECES:
            return False
        terms = set(axes(rank + len(space))[rank:])
        order = nodes(*kernel.element)
        if not any(n.op == "select" and terms & {*nodes(n.args[0])} for n in order):
            return False
        computed = set[Expr]()  # what all terms share is computed once
        for r in indices(tuple(sizes)):
            places = axes(rank + len(space))[rank:]
            values = {axis.attr: k for axis, k in zip(places, r, strict=True)}
            term = [substituted(x, values) for x in kernel.element]
            computed.update(nodes(*term))
        return sum(map(weight, computed)) <= LARGEST_ROW

    def _reduce_at_once(
        self, kernel: Reduction, at: Index, steps: Sequence[Index]
    ) -> list[Expr]:
        """Return the results at one index for a space of a few elements: straight-line
        code, of which vectors compute many."""
        totals = self.b.at(kernel.init, at)
        for r in steps:
            values = self.b.at(kernel.element, (*at, *r))
            if isinstance(kernel.combine, str):
                totals = [e.binary(kernel.combine, totals[0], values[0])]
            else:
                totals = self._combined(kernel, totals, values)
        return self._finished(kernel, at, list(map(self.b.let, totals)))

    def _combined(
        self, kernel: Reduction, old: list[Expr], values: list[Expr]
    ) -> list[Expr]:
        assert not isinstance(kernel.combine, str)
        arguments = [*old, *self._computed(values)]
        return list(map(self.b.let, self.b.call(kernel.combine, arguments)))

    def _computed(self, values: Sequence[Expr]) -> list[Expr]:
        """Return values, computed here and now. What is one of them is not computed
        again for those behind it."""
        computed: dict[Expr, Expr] = {}
        for value in values:
            computed[value] = self.b.let(e.rewrite(value, computed.get))
        return [computed[value] for value in values]

    def _finished(self, kernel: Reduction, at: Index, totals: list[Expr]) -> list[Expr]:
        return [self.b.call(finish, totals, at)[0] for finish in kernel.finish]

    def _reduces_rows(self, kernel: Reduction, type_: TensorType, axis: int) -> bool:
        """Return whether memory runs along `axis` of the result, not the space."""
        if axis < 0 or not kernel.space:
            return False
        n = type_.shape[axis]
        if isinstance(n, int) and n < SHORT_ROW:
            return False
        at = axes(type_.ndim + len(kernel.space))
        loads = [
            (index, _last_position(node.attr, index))
            for node in nodes(*self.b.at(kernel.element, at))
            if node.op == "load" and (index := e.index_of(node))
        ]
        return run_along(loads, at[axis], at[-1])

    def _reduce_rows(
        self, kernel: Reduction, type_: TensorType, axis: int, out: Sequence[Stored]
    ) -> None:
        """Accumulate whole rows of the results, so that vectors run along memory."""
        totals = self._rows_of_totals(kernel, type_.shape, out)
        outer_shape, row = type_.shape[:axis], type_.shape[axis:]

        def store(places: Sequence[Stored], at: Index, values: Sequence[Expr]) -> None:
            for place, value in zip(places, values, strict=True):
                self.b.store(place, at, value)

        def outer(at: Index) -> None:
            def clear(j: Index) -> None:
                i = (*at, *j)
                store(totals, i, self.b.at(kernel.init, i))

            def accumulate(rows: Sequence[Index]) -> None:
                def add(j: Index) -> None:
                    i = (*at, *j)
                    old = [place.read(i) for place in totals]
                    store(totals, i, self._plus(kernel, old, i, rows))

                self.b.nest(row, add)

            def finish(j: Index) -> None:
                i = (*at, *j)
                results = self._finished(kernel, i, [p.read(i) for p in totals])
                store(out, i, list(map(self.b.let, results)))

            self.b.nest(row, clear)
            self._groups_of_rows(kernel, accumulate)
            if not _are_results(kernel, totals, out):
                self.b.nest(row, finish)

        self.b.nest(outer_shape, outer)

    def _rows_of_totals(
        self, kernel: Reduction, shape: Shape, out: Sequence[Stored]
    ) -> list[Stored]:
        """Return memory for the accumulators of all results: that of a result of the
        same dtype, if there is one."""
        free, totals = list(out), []
        for init in kernel.init:
            place = next((t for t in free if t.type.dtype is init.dtype), None)
            if place is None:
                type_ = TensorType(init.dtype, shape)
                place = Stored(type_, self.b.temporary(type_, "sums"))
            else:
                free.remove(place)
            totals.append(place)
        return totals

    def _reduce_in_registers(
        self, kernel: Reduction, out: Sequence[Stored], at: Index
    ) -> None:
        """Write one element of each short row of results."""
        if _is_few(kernel.space):
            results = self._reduce_at_once(kernel, at, indices(kernel.space))
        else:
            totals = [self.b.declare(x, "acc") for x in self.b.at(kernel.init, at)]

            def accumulate(rows: Sequence[Index]) -> None:
                new = self._plus(kernel, list(map(e.read, totals)), at, rows)
                for total, value in zip(totals, new, strict=True):
                    self.b.assign(total, value)

            self._groups_of_rows(kernel, accumulate, fewest=REGISTER_LIMIT + 1)
            results = self._finished(kernel, at, list(map(e.read, totals)))
        for place, result in zip(out, results, strict=True):
            self.b.store(place, at, result)

    def _fits_registers(self, kernel: Reduction, type_: TensorType, axis: int) -> bool:
        """Return whether a row of results is so short that its sums stay in registers
        until all rows are added to it."""
        size = type_.shape[axis]
        most = REGISTERS * self.b.target.vector_width(kernel.init[0].dtype)
        if not (isinstance(size, int) and size <= most):
            return False
        if _is_few(kernel.space):
            work = sum(map(weight, nodes(*kernel.element)))
            return prod(kernel.space) * work <= LARGEST_ROW
        return not is_unrolled(kernel.space)

    def _plus(
        self,
        kernel: Reduction,
        totals: list[Expr],
        at: Index,
        rows: Sequence[Index],
    ) -> list[Expr]:
        """Return accumulators after the elements of some more rows, in this order:
        extrema of these first, which does not change the result, and takes less
        time."""
        new = [self.b.at(kernel.element, (*at, *r)) for r in rows]
        if not isinstance(kernel.combine, str):
            new = list(map(self._computed, new))
            combine = partial(self._combined, kernel)
            while kernel.is_associative and len(new) > 1:  # pairs wait for no other
                new = [reduce(combine, new[k : k + 2]) for k in range(0, len(new), 2)]
            return reduce(combine, new, totals)
        plus = partial(e.binary, kernel.combine)
        elements = [x for [x] in new]
        if kernel.combine in ("min", "max"):
            elements = [reduce(plus, elements)]
        return [reduce(plus, elements, totals[0])]

    def _groups_of_rows(
        self,
        kernel: Reduction,
        accumulate: Callable[[Sequence[Index]], None],
        *,
        fewest: int = 2,
    ) -> None:
        """Write loops over the kernel's space, which accumulate a few rows at a time,
        in order, if there are at least `fewest` groups of them: sums in memory are then
        loaded and stored once for each group."""
        *outer, count = kernel.space
        is_short = sum(map(weight, nodes(*kernel.element))) <= SHORT_ELEMENT
        if not (is_short and isinstance(count, int) and count >= fewest * ROWS_AT_ONCE):
            self.b.nest(kernel.space, lambda r: accumulate([r]), independent=False)
            return
        groups, rest = divmod(count, ROWS_AT_ONCE)

        def several(at: Index, first: Expr, number: int) -> None:
            places = [e.add(first, e.index(k)) for k in range(number)]
            accumulate([(*at, place) for place in places])

        def line(at: Index) -> None:
            def group(g: Index) -> None:
                first = e.mul(g[0], e.index(ROWS_AT_ONCE))
                several(at, first, ROWS_AT_ONCE)

            self.b.nest((groups,), group, independent=False)
            if rest:
                several(at, e.index(count - rest), rest)

        self.b.nest(outer, line, independent=False)

    # --- prefixes, scatters, libraries ---

    def prefix(self, kernel: Prefix) -> None:
        """Write a scan along the axis: by element, or by row, as vectors, with the
        totals of a row in memory."""
        [type_] = self.types
        axis = kernel.axis
        before, after = type_.shape[:axis], type_.shape[axis + 1 :]
        if all(isinstance(n, int) for n in after) and prod(after) < VECTOR_ROW:
            self.b.nest((*before, *after), partial(self._line, kernel))
            return
        row_type = TensorType(type_.dtype, after)
        row = Stored(row_type, self.b.temporary(row_type))
        self.b.nest(before, partial(self._all_lines, kernel, row))

    def _line(self, kernel: Prefix, at: Index) -> None:
        """Write the scan of one line; `at` has no index along the axis."""
        axis, [target] = kernel.axis, self.targets()
        total = self.b.declare(self.b.at([kernel.init])[0], "acc")

        def step(position: Index) -> None:
            i = (*at[:axis], self._step_of(kernel, position[0]), *at[axis:])
            total_of = [e.read(total), *self.b.at([kernel.element], i)]
            value = self.b.let(self.b.call(kernel.combine, total_of)[0])
            self.b.assign(total, value)
            self.b.store(target, i, value)

        self.b.nest((self.types[0].shape[axis],), step, independent=False)

    def _all_lines(self, kernel: Prefix, row: Stored, before: Index) -> None:
        """Write the scans of all lines that differ in the axes after the axis."""
        b, after, [target] = self.b, row.type.shape, self.targets()
        b.nest(after, lambda j: b.store(row, j, b.at([kernel.init])[0]))

        def step(position: Index) -> None:
            k = self._step_of(kernel, position[0])

            def element(j: Index) -> None:
                i = (*before, k, *j)
                total_of = [row.read(j), *b.at([kernel.element], i)]
                value = b.let(b.call(kernel.combine, total_of)[0])
                b.store(row, j, value)
                b.store(target, i, value)

            b.nest(after, element)

        b.nest((self.types[0].shape[kernel.axis],), step, independent=False)

    def _step_of(self, kernel: Prefix, step: Expr) -> Expr:
        """Return the index along the axis in a step."""
        if not kernel.reverse:
            return step
        n = self.b.extent(self.types[0].shape[kernel.axis])
        return e.sub(e.sub(n, e.index(1)), step)

    def compact(self, kernel: Compact) -> None:
        """Store each index at the next free position, which advances only if the index
        is kept. The only branch, whether there is room, is almost always taken, and so
        predicted well."""
        b, [target] = self.b, self.targets()
        [size] = self.types[0].shape
        count = b.declare(e.index(0), "count")
        room = b.extent(size)

        def step(at: Index) -> None:
            keep = b.let(e.cast(b.at([kernel.keep], at)[0], dtypes.int64))
            with b.into([]) as body:
                b.store(target, (e.read(count),), at[0])
            b.add(If(e.compare("lt", e.read(count), room), body))
            b.assign(count, e.add(e.read(count), keep))

        def fill(at: Index) -> None:
            b.store(target, (e.add(filled, at[0]),), e.index(0))

        b.nest((kernel.length,), step, independent=False)
        filled = b.let(e.binary("min", e.read(count), room))
        rest = b.var(dtypes.int64, "i")
        with b.into([]) as body:
            fill((e.read(rest),))
        b.for_(rest, e.sub(room, filled), body, True)

    def scatter(self, kernel: Scatter) -> None:
        """Write the updates into the base's memory, or into a copy of the base."""
        [base], [type_] = as_values([kernel.base]), self.types
        if not is_small(type_):
            [target] = self.targets()
            self.b.fill(base, target)
            self._write_updates(kernel, target, self._window(kernel))
            return
        # LLVM turns this memory into registers if the positions are constant.
        target = Stored(type_, self.b.temporary(type_))
        self.b.fill(base, target)
        self._write_updates(kernel, target, len(kernel.space))
        elements = [self.b.let(target.read(at)) for at in indices_of(type_)]
        self.registers([elements])

    def _write_updates(self, kernel: Scatter, target: Stored, window: int) -> None:
        """Write the updates in order, except along the axes from `window` on."""
        b, space, keep = self.b, kernel.space, kernel.keep

        def write(u: Index) -> None:
            *position, value = b.at([*kernel.position, kernel.value], u)
            at = tuple(position)
            if kernel.combine is not None:
                [value] = b.call(kernel.combine, [target.read(at), value])
            b.store(target, at, value)

        def update(outer: Index) -> None:
            def kept() -> None:
                b.nest(space[window:], lambda inner: write((*outer, *inner)))

            if keep is None or (keep.is_const and keep.attr):
                kept()
                return
            with b.into([]) as body:
                kept()
            b.add(If(b.at([keep], (*outer, *axes(len(space))[window:]))[0], body))

        if window:
            b.nest(space[:window], update, independent=False)
        else:
            update(())

    def _window(self, kernel: Scatter) -> int:
        """Return the first of the last axes of the space whose updates go to different
        positions: each axis moves one coordinate by steps of one."""
        u = axes(len(kernel.space))
        position = self.b.at(kernel.position, u)
        if kernel.keep is None:
            kept: list[Expr] = []
        else:
            kept = nodes(*self.b.at([kernel.keep], u))
        window = len(u)
        while window:
            var, size = u[window - 1], kernel.space[window - 1]
            if any(n is var for n in kept):
                break
            if not is_one(size):
                moved = [p for p in position if any(n is var for n in nodes(p))]
                if len(moved) != 1 or not _is_shift(moved[0], var):
                    break
                position.remove(moved[0])  # no other axis may move it
            window -= 1
        return window

    # --- calls ---

    def library(self, kernel: Library) -> None:
        operands, routine = as_values(kernel.operands), kernel.routine
        results = self.targets()
        overwritten = [k for k in kernel.overwrites if k is not None]
        for k in overwritten:
            self.copy(operands[k], results[kernel.overwrites.index(k)])
        passed = [k for k in range(len(operands)) if k not in overwritten]
        takes_both, probe = kernel.takes_transposed, axes(kernel.batch)
        located = {
            k: self.array_at(operands[k], kernel.index_of(k, probe), takes_both)
            for k in passed
        }
        if takes_both:
            modes = ["t" if m and m[1] else "n" for m in located.values()]
            routine += f"_{''.join(modes)}" if "t" in modes else ""
        copied = dict.fromkeys(operands[k] for k, m in located.items() if m is None)
        copies = {value: self.dense(value) for value in copied}
        scratch = [self.b.temporary(t, "work") for t in kernel.workspace]
        site = self.b.site("library", self.node) if kernel.can_fail else None
        scalars = self.b.at(kernel.scalars)

        def source(k: int, at: Index) -> Ref:
            array = located[k]
            if array is None:
                return self.ref(copies[operands[k]], kernel.index_of(k, at))
            values = dict(zip(probe, at, strict=True))
            indices = [e.rewrite(x, values.get) for x in array[0].at]
            return replace(array[0], at=tuple(indices))

        def call(at: Index) -> None:
            refs = [source(k, at) for k in passed]
            refs += [self.ref(result, at) for result in results]
            refs += [Ref(buffer) for buffer in scratch]
            self.b.add(Call(routine, (*refs, *scalars), site))

        sizes = self.types[0].shape[: kernel.batch]
        # A loop even of few calls, which threads may share.
        batch = [n if self.b.is_one(n) else self.b.extent(n) for n in sizes]
        self.b.nest(batch, call)

    def callback(self, kernel: Callback) -> None:
        operands = [self.ref(self.dense(v)) for v in as_values(kernel.operands)]
        results = tuple(map(self.ref, self.targets()))
        self.b.add(
            HostCall(self.b.site("callback", self.node), tuple(operands), results)
        )

    def invoke(self, function: Program, operands: Sequence[Value]) -> None:
        """Write the call of a function. Its nodes are numbered from 0; in the whole
        graph they come after the node that calls it."""
        count = len(function.symbols)
        symbol_values = [self.b.scalar(value) for value in operands[:count]]
        with self.b.symbols_as(dict(zip(function.symbols, symbol_values, strict=True))):
            for sized in function.types:
                self.b.check_size(sized.type)
            sizes = (*symbol_values, *(self.b.extent(n.size) for n in function.derived))
        places, results = list(map(self.dense, operands[count:])), self.targets()
        for result, buffer in zip(results, function.outputs, strict=True):
            if buffer in function.inputs:  # updated in place, or in a copy
                k = function.inputs.index(buffer)
                self.b.fill(places[k], result)
                places[k] = result
        first = len(self.b.program.sites)
        for site in function.sites:
            self.b.site(site.kind, self.node + 1 + site.node, site.detail)
        refs = tuple(map(self.ref, places)), tuple(map(self.ref, results))
        self.b.add(Invoke(function, sizes, *refs, first))

    def array_at(
        self, value: Value, at: Index, may_be_transposed: bool
    ) -> tuple[Ref, bool] | None:
        """Return the dense sub-array of a buffer that `value[at]` is, and whether its
        two axes are transposed there; None if it is no such sub-array."""
        core = value.type.shape[len(at) :]
        variables = [e.read(Var(f"i{k}", dtypes.int64)) for k in range(len(core))]
        index = (
            *at,
            *(
                e.index(0) if self.b.is_one(n) else p
                for p, n in zip(variables, core, strict=True)
            ),
        )
        rows = [
            (p, self.b.extent(n))
            for p, n in zip(variables, core, strict=True)
            if not self.b.is_one(n)
        ]
        [element] = self.b.at([value[axes(len(index))]], index)
        if element.op != "load" or element.attr.strides is not None:
            return None
        if e.condition_of(element) is not None:
            return None
        merged = merged_axes(element.args, element.attr.shape)
        rest = merged[len(merged) - len(rows) :]
        before = [x.position for x in merged[: len(merged) - len(rows)]]
        if len(rest) < len(rows) or any(n in variables for n in nodes(*before)):
            return None
        if not rest:
            return Ref(element.attr, element.args), False
        orders = [rows, rows[::-1]] if may_be_transposed else [rows]
        for order in orders:
            (p, n), x, axis = order[0], rest[0].position, rest[0].first
            whole = [
                y.position is q and self.b.same_extent(y.extent, m)
                for y, (q, m) in zip(rest, order, strict=True)
            ]
            if not all(whole[1:]):
                continue
            prefix, first = element.args[:axis], _first(x, p)
            if whole[0]:
                return Ref(element.attr, prefix), order is not rows
            if first is None or any(m in variables for m in nodes(first)):
                continue
            if element.args[axis] is x:
                return Ref(element.attr, (*prefix, first), n), order is not rows
        return None

    def ref(self, place: Stored, at: Index = ()) -> Ref:
        """Return the sub-array at an index of leading axes of a dense value."""
        return place.sub_array(self.b.extent((*place.type.shape, 1)[0]), at)

    def dense(self, value: Value) -> Stored:
        """Return the value as a dense sub-array of a buffer, copied if necessary."""
        if value not in self.b.views and self.b.is_dense(value):
            place = self.b.place(value)
            assert isinstance(place, Stored)
            return place
        copy = Stored(value.type, self.b.temporary(value.type))
        self.copy(value, copy)
        return copy

    def copy(self, value: Value, target: Stored) -> None:
        """Write a value, which may be a view, to memory."""
        if value not in self.b.views:
            self.b.fill(value, target)
            return
        element = value[axes(value.type.ndim)]
        self.b.nest(
            value.type.shape,
            lambda at: self.b.store(target, at, self.b.at([element], at)[0]),
        )


def _gathers(element: Expr) -> bool:
    """Return whether an element has an index that is read, too."""
    return any(
        n.op == "element" and any(i.op == "element" for i in nodes(*e.index_of(n)))
        for n in nodes(element)
    )


def _is_few(space: Shape) -> TypeGuard[tuple[int, ...]]:
    """Return whether one expression combines all elements of a space."""
    sizes = [n for n in space if isinstance(n, int)]
    return len(sizes) == len(space) and prod(sizes) <= FEW_ROWS


def _are_results(
    kernel: Reduction, totals: Sequence[Stored], out: Sequence[Stored]
) -> bool:
    """Return whether results in `out` are accumulators that are there already."""
    return all(
        any(
            finish.results[0] is total and place is target
            for total, place in zip(finish.parameters, totals, strict=True)
        )
        for finish, target in zip(kernel.finish, out, strict=True)
    )


def _extent(bounds: _Range) -> Size | Expr:
    """Return how many indices a range has."""
    low, high = bounds
    extent = e.sub(high, low)
    return int(extent.attr) if extent.is_const else extent


def _unraveled(position: Expr, shape: Shape) -> list[Expr]:
    """Return the index at a position of an array in row-major order."""
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        n = e.index(size)
        index.append(e.index(0) if size == 1 else e.binary("rem", position, n))
        position = position if size == 1 else e.div(position, n)
    return [position, *reversed(index)]


def _divisors(roots: Sequence[Expr], axis: Expr) -> set[int]:
    """Return the divisors of an axis in expressions. Axes of a dense array that have
    one position together count as not divided."""
    divisors: set[int] = set()
    seen: set[Expr] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_divided(node, node.op, axis):
            divisors.add(node.args[1].attr)
        if node.op == "load" and node.attr.strides is None:
            at = merged_axes(e.index_of(node), node.attr.shape)
            pending += [x.position for x in at]
            condition = e.condition_of(node)
            pending += [] if condition is None else [condition]
        else:
            pending += node.args
    return divisors


def _is_divided(node: Expr, op: str, axis: Expr, size: int | None = None) -> bool:
    """Return whether a node is the quotient or remainder of an axis by a constant."""
    if node.op != op or op not in ("div", "rem") or node.args[0] is not axis:
        return False
    if not node.args[1].is_const:
        return False
    return size is None or node.args[1].attr == size


def _last_position(buffer: Buffer, at: Index) -> Expr:
    """Return the position along the last axis of memory."""
    extent = buffer.shape[len(at) - 1]
    is_plain = at[-1].op == "var" and not (extent.is_const and extent.attr == 1)
    if is_plain or buffer.strides is not None:
        return at[-1]
    merged = merged_axes(at, buffer.shape)
    return merged[-1].position if merged else at[-1]


def _is_shift(position: Expr, var: Expr) -> bool:
    """Return whether `position` is `var` plus a term that does not depend on it."""
    return _first(position, var) is not None


def _first(position: Expr, var: Expr) -> Expr | None:
    """Return `position` where `var` is 0 if it is `var` plus an independent term."""
    if position is var:
        return e.index(0)
    if position.op != "add":
        return None
    x, y = position.args
    inner, other = (x, y) if any(n is var for n in nodes(x)) else (y, x)
    if any(n is var for n in nodes(other)):
        return None
    first = _first(inner, var)
    return None if first is None else e.add(first, other)


def _last_axis(type_: TensorType) -> int:
    """Return the last axis of more than one element, or -1."""
    axes = [a for a, n in enumerate(type_.shape) if not is_one(n)]
    return axes[-1] if axes else -1
