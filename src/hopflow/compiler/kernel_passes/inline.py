"""Fusion: values that are cheap, or read once, are recomputed in their readers.

    v0 = x[i0] * 2.0                    v2 = reduce add from 0.0 of x[i0] * 2.0 + 1.0
    v1 = v0[i0] + 1.0             ->
    v2 = reduce add from 0.0 of v1[i0]

All other values are stored. After this pass every value of a program has memory or is
in registers, except for views that a library takes as they are. The values that a loop
carries to its next step are computed at the end of the step, all values of one shape in
one kernel, so that they can replace the carries that they read.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from operator import add
from typing import Final, NamedTuple, TypeAlias

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import Cost, counted_reads, weight
from hopflow.compiler.kernel_passes.reads import cost as cost_of
from hopflow.compiler.kernel_passes.substitution import Substitution
from hopflow.compiler.kernel_program.definitions import (
    Compact,
    Definition,
    Effect,
    Pointwise,
    Prefix,
    Reduction,
    Scatter,
    axes,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import (
    is_small,
    shape_key,
    static_size,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    map_expressions,
    map_operands,
    operands,
    space_of,
)
from hopflow.dtypes import int64
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import Expr, condition_of, index_of
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Size

CHEAP: Final = 6
"""An element of at most this cost is computed again for each reader."""
CHEAP_INDEX: Final = 12
"""The same for integers that are computed of indices and scalars alone: what they index
is a run of memory for `simplify` and `split`, and a gather if they are read from it."""
OF_AN_UPDATE: Final = 12
"""The cost of an element that a scatter computes itself, for one index after the other:
as much as it costs to store and load one that is computed in vectors."""
LARGE: Final = 1 << 20
"""Bytes of a value that does not fit into the caches of a core."""
TRAFFIC: Final = 48
"""The cost of writing and reading back an element of such a large value."""
UNKNOWN: Final = 64
"""About how long an axis or a loop is whose length only the run knows."""
MOST_TESTS: Final = 10
"""Tests of which part an element belongs to, at most: more pieces than `split` cuts."""
LONGEST: Final = 1000
"""Instructions of an element: a longer one is stored. What a loop computes at once must
fit into the registers, and LLVM takes more than linear time for it."""


_Deferred: TypeAlias = dict[Value, list[Value]]
"""Maps a value with memory to the deferred values that read it. A deferred value has no
memory: its readers compute it."""


def inline(program: KernelProgram, context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Results that take the memory of parameters are computed last, like those of a step.
    """
    readers = _Readers()
    readers.walk(program.block)
    _Inliner(readers).program(program.block, context.reused)


# --- the readers of values ------------------------------------------------------------


class _Read(NamedTuple):
    """An equation that reads a value at several `indices`; None: a result of a block.

    whole   it reads the whole value, not single elements
    outer   it is in a block inside that of the value
    steps   it reads the same elements in each step of a loop inside that block
    elements   how many elements all steps of the loops inside that block read, 0
               outside of loops
    """

    equation: Equation | None
    indices: int
    whole: bool
    outer: bool
    steps: bool
    elements: int = 0


class _Readers:
    """The reads of each value that may be deferred.

    views   the definitions that only move elements; a view that an operation reads as
            a whole has memory, and its own reads count
    reads   the reads that remain if views are computed in their readers
    last    the number of the last equation of the value's block that reads the value,
            or contains an equation that does
    orders     the nodes of equations that may be deferred
    inlining   the equations whose expressions read such values, with these
    counts     for these equations, at how many indices they read each value
    parted     the axes of values that a view, such as a flattened stack of rows, reads
               at remainders of its indices
    """

    def __init__(self) -> None:
        self.views: dict[Value, Pointwise] = {}
        self._whole: dict[Value, Equation] = {}
        self.reads: dict[Value, list[_Read]] = {}
        self.last: dict[Value, int] = {}
        self.orders: dict[Equation, list[Expr]] = {}
        self.inlining: dict[Equation, list[Value]] = {}
        self.counts: dict[Equation, dict[Value, int]] = {}
        self.parted: dict[Value, set[int]] = {}
        self._block: dict[Value, Block] = {}
        self._at: dict[Block, int] = {}
        # How often each block runs in one around it; None: it is not that of a loop.
        self._within: dict[Block, int | None] = {}

    def walk(self, block: Block, trips: int | None = None) -> None:
        """Record the reads of a block and of the blocks in it."""
        self._within[block] = trips
        for number, equation in enumerate(block.equations):
            self._at[block] = number
            self._record(equation)
            for inner in blocks(equation.definition):
                self.walk(inner, _trips(equation.definition))
            if _may_inline(equation):
                [value] = equation.results
                self._block[value] = block
                self.reads[value] = []
                if equation.definition.is_view:  # type: ignore[union-attr]
                    self.views[value] = equation.definition  # type: ignore[assignment]
                    self._whole[value] = equation
        self._at[block] = len(block.equations)
        for value in block.results:
            self._read(value, None, 1, whole=True)
        del self._within[block]

    def _record(self, equation: Equation) -> None:
        for value in operands(equation.definition):
            self._read(value, equation, 1, whole=True)
        if isinstance(equation.definition, Region):
            return
        order = nodes(*all_expressions(equation.definition))
        if _may_inline(equation):
            self.orders[equation] = order
        values = [
            node.attr
            for node in order
            if node.op == "element" and node.attr in self._block
        ]
        if not values:
            return
        self.inlining[equation] = values
        for value in values:
            self.last[value] = self._at[self._block[value]]
        if _is_inlined_view(equation):
            for node in order:
                if node.op == "element":
                    self._record_parts(node)
            return
        counts, through = counted_reads(order, self.views)
        self.counts[equation] = counts
        for value, count in counts.items():
            self._read(value, equation, count, whole=False, order=order)
        for value in through:
            self._read(value, equation, 1, whole=False)

    def _record_parts(self, read: Expr) -> None:
        for axis, i in enumerate(index_of(read)):
            if any(_is_remainder(node) for node in nodes(i)):
                self.parted.setdefault(read.attr, set()).add(axis)

    def _read(
        self,
        value: Value,
        equation: Equation | None,
        count: int,
        *,
        whole: bool,
        order: Sequence[Expr] = (),
    ) -> None:
        block = self._block.get(value)
        if block is None:
            return
        around = [*self._within]
        inside = around[around.index(block) + 1 :]
        outer = bool(inside)
        trips = [n for n in map(self._within.get, inside) if n is not None]
        steps = bool(trips) and any(x.attr is value and _is_steady(x) for x in order)
        elements = 0
        if trips and equation is not None and not whole:
            elements = prod(trips) * count * _size(space_of(equation))
        self.reads[value].append(_Read(equation, count, whole, outer, steps, elements))
        self.last[value] = self._at[block]
        if whole and value in self._whole:
            self._read_through(value, self._whole.pop(value))

    def _read_through(self, view: Value, equation: Equation) -> None:
        """Record the reads of a view that has memory, at the view's position."""
        counts, _ = counted_reads(self.orders[equation], self.views)
        for value, count in counts.items():
            if value in self._block:
                outer = self._block[value] is not self._block[view]
                self.reads[value].append(_Read(equation, count, False, outer, False))


def _trips(definition: object) -> int | None:
    """Return about how many steps a loop has; None if it is no loop."""
    match definition:
        case Loop(length=length):
            return _size([length])
        case While():
            return UNKNOWN
    return None


def _size(extents: Iterable[Size]) -> int:
    """Return about how many elements or steps there are."""
    return prod(n if isinstance(n, int) else UNKNOWN for n in extents)


def _is_steady(node: Expr) -> bool:
    """Return whether a read is of the same elements in each step of a loop around it:
    its indices depend on no other value, such as the counter of the loop."""
    return node.op == "element" and not any(
        x.op == "element" for x in nodes(*index_of(node))
    )


def _may_inline(equation: Equation) -> bool:
    definition = equation.definition
    if not isinstance(definition, Pointwise) or len(definition.elements) > 1:
        return False
    return not is_small(equation.results[0].type) or (
        equation.symbol is None and (_is_row(definition) or _is_near_number(definition))
    )


def _is_row(definition: Pointwise) -> bool:
    """Return whether a view is a row of a value that a loop steps through: reading it
    again costs next to nothing."""
    [element] = definition.elements
    return (
        definition.is_view
        and element.op == "element"
        and all(i.op == "var" for i in element.args)
    )


def _is_near_number(definition: Pointwise) -> bool:
    """Return whether an index is a constant plus or minus the number of a step, or
    another such index: it is part of the address of what it indexes."""
    [element] = definition.elements
    if element.dtype is not int64 or element.op not in ("add", "sub"):
        return False
    terms = [x for x in element.args if not x.is_const]
    return len(terms) == 1 and (
        terms[0].op == "var" or (terms[0].op == "element" and not terms[0].args)
    )


def _is_free(equation: Equation) -> bool:
    """Return whether an element costs nothing: it is another one, or part of an address
    (see `_may_inline`)."""
    return _keeps_order(equation) or is_small(equation.results[0].type)


def _keeps_order(equation: Equation) -> bool:
    """Return whether a view has the elements of another value in their order: to read
    that value takes as long as to read a copy."""
    definition = equation.definition
    if not isinstance(definition, Pointwise) or not definition.is_view:
        return False
    [element] = definition.elements
    if element.op != "element" or condition_of(element) is not None:
        return False
    order, at = axes(equation.results[0].type.ndim), index_of(element)
    moved = [order.index(i) for i in at if i in order]
    rest = [i for i in at if i not in order]
    return all(i.is_const for i in rest) and moved == sorted(set(moved))


def _is_inlined_view(equation: Equation) -> bool:
    definition = equation.definition
    return (
        isinstance(definition, Pointwise)
        and definition.is_view
        and _may_inline(equation)
    )


# --- which values are stored ----------------------------------------------------------


def _is_stored(
    value: Value,
    cost: Cost,
    reads: Sequence[_Read],
    is_view: bool,
    cheap: int,
    is_dear: bool,
) -> bool:
    """Return whether an element of this cost is computed once and read from memory.

    Args:
        cheap: The largest cost of what is computed again for each reader.
        is_dear: Whether each step of a loop would read several arrays as large as the
            value to compute it again, or test indices for it.
    """
    again = cost.again
    if again > LONGEST or any(map(_takes_memory, reads)):
        return True
    libraries = [r for r in reads if _takes_array(r)]
    if any(r.outer or not is_view for r in libraries):
        return True  # else each step would copy it
    if len(libraries) > 1 and not all(map(_takes_transposed, libraries)):
        return True  # else each would copy what is no part of an array
    if any(_repeats(r.equation, value.type, again) for r in reads):
        return True
    if is_dear:
        return True
    if again <= cheap or _is_stencil(value.type, again, reads, is_view):
        return False
    readers = {id(r.equation) for r in reads if r.equation is not None}
    results = sum(r.equation is None for r in reads)
    if not is_view and len(readers) + results > 1:
        return True
    return any(r.outer or _recomputes(r, value, cost, is_view) for r in reads)


def _is_piecewise(order: Sequence[Expr]) -> bool:
    """Return whether what an element is depends on tests of its index, as for `pad` and
    `concat`, or on remainders, as for `roll`."""
    return any(map(_is_remainder, order)) or bool(_tests_of_index(order))


def _is_remainder(node: Expr) -> bool:
    return node.op == "rem" and node.dtype is int64


def _tests_of_index(order: Sequence[Expr]) -> list[list[Expr]]:
    """Return the tests of an element's index alone, each as its nodes."""
    conditions = [
        node.args[0] if node.op == "select" else condition_of(node)
        for node in order
        if node.op in ("select", "element")
    ]
    tests = [nodes(c) for c in conditions if c is not None]
    return [test for test in tests if all(node.op != "element" for node in test)]


def _reads_elements(expression: Expr) -> bool:
    return any(node.op == "element" for node in nodes(expression))


def _tests_axes(order: Sequence[Expr], tested: Collection[int], rank: int) -> bool:
    """Return whether what an element is depends on tests of its index along an axis."""
    along = [axes(rank)[axis] for axis in tested]
    return any(node in along for test in _tests_of_index(order) for node in test)


def _is_index(value: Value, sources: Iterable[Value]) -> bool:
    """Return whether integers are computed of indices and scalars alone."""
    return value.type.dtype is int64 and not any(x.type.ndim for x in sources)


def _is_stencil(
    type_: TensorType, cost: int, reads: Sequence[_Read], is_view: bool
) -> bool:
    """Return whether the value is large, its readers read neighbouring elements, and
    computing these again costs less than the memory traffic. If the size is symbolic,
    half of the traffic is the limit."""
    size, limit = static_size(type_), TRAFFIC
    if size is None:
        limit //= 2
    elif size * type_.dtype.itemsize < LARGE:
        return False
    counts = [read.indices for read in reads]
    return (
        not is_view
        and max(counts, default=0) > 1
        and cost * (sum(counts) - 1) <= limit
        and all(_is_as_wide(read, type_) for read in reads)
    )


def _is_as_wide(read: _Read, type_: TensorType) -> bool:
    """Return whether a reader is elementwise, in the same block and no larger."""
    equation = read.equation
    return (
        equation is not None
        and isinstance(equation.definition, Pointwise)
        and not read.outer
        and not _is_larger(equation.results[0].type, type_)
    )


def _writes_over(read: _Read, sources: Collection[Value]) -> bool:
    """Return whether a reader is a scatter into one of its sources. If its updates were
    computed from that source, the source would have to be copied first."""
    definition = None if read.equation is None else read.equation.definition
    return isinstance(definition, Scatter) and definition.base in sources


def _recomputes(read: _Read, value: Value, cost: Cost, is_view: bool) -> bool:
    """Return whether a reader computes elements several times, or expensive ones one at
    a time instead of as vectors."""
    if read.equation is None:
        return False
    match read.equation.definition:
        case Pointwise():
            result = read.equation.results[0].type
            more = read.indices > 1 and not is_view
            return more or _is_larger(result, value.type)
        case Scatter(base=base, space=space):
            once = read.indices == 1 and len(space) == value.type.ndim
            return not once or cost.work > OF_AN_UPDATE or base is value
        case Prefix() | Compact():
            return True
    return read.indices > 1 and not is_view


def _stacks(read: _Read, type_: TensorType) -> bool:
    """Return whether a reader makes a larger array of several parts of the value."""
    if read.equation is None or not isinstance(read.equation.definition, Pointwise):
        return False
    return read.indices > 1 and _is_larger(read.equation.results[0].type, type_)


def _repeats(equation: Equation | None, type_: TensorType, cost: int) -> bool:
    """Return whether a reduction would compute elements more often than pays."""
    if equation is None or not isinstance(equation.definition, Reduction):
        return False
    size = static_size(type_)
    steps = _size(space_of(equation))
    again = 1 if size is None else steps // max(size, 1) - 1
    return cost * again > CHEAP


def _takes_memory(read: _Read) -> bool:
    """Return whether a reader needs the value as a dense array of its own."""
    definition = None if read.equation is None else read.equation.definition
    return isinstance(definition, Callback | Call)


def _takes_array(read: _Read) -> bool:
    """Return whether a reader takes the value as a dense part of an array."""
    return read.equation is not None and isinstance(read.equation.definition, Library)


def _takes_transposed(read: _Read) -> bool:
    definition = None if read.equation is None else read.equation.definition
    return isinstance(definition, Library) and definition.takes_transposed


def _is_larger(result: TensorType, operand: TensorType) -> bool:
    a, b = static_size(result), static_size(operand)
    return result.ndim > operand.ndim if a is None or b is None else a > b


# --- rewriting ------------------------------------------------------------------------


class _Joined(NamedTuple):
    """What is joined of parts.

    tests   how many tests of indices say which part an element belongs to
    axes    how many axes they are along
    cost    of an element of one part
    """

    tests: int
    axes: int
    cost: int


class _Inliner:
    """Rewrites blocks in program order.

    Before the memory that deferred values read is overwritten, those of them that are
    read later are stored.
    """

    def __init__(self, readers: _Readers) -> None:
        self._readers = readers
        self._elements = Substitution()
        self._costs: dict[Value, Cost] = {}
        self._stores: dict[Value, int] = {}  # how often a deferred value was stored
        self._makers: dict[Value, Equation] = {}  # of deferred values
        # The nodes that each deferred value computes.
        self._nodes: dict[Value, dict[Node, None]] = {}
        # The values with memory that a deferred value reads.
        self._sources: dict[Value, dict[Value, None]] = {}
        self._views: set[Value] = set()  # those that remain, for libraries

    def program(self, block: Block, reused: Mapping[int, int]) -> None:
        """Rewrite the block of a program in place."""
        last = [block.results[number] for number in reused]
        self._equations(block, set(block.results).difference(last))
        self._compute_last(block, last, [block.parameters[k] for k in reused.values()])
        block.results = [self._whole(v, block) for v in block.results]

    def block(self, block: Block, region: Region) -> None:
        """Rewrite a block of `region` in place."""
        if isinstance(region, Loop | While):
            self._equations(block, set())
            last = block.results[: len(region.carry)]
            self._compute_last(block, last, block.parameters)
        else:
            self._equations(block, set(block.results))
            block.results = [self._whole(v, block) for v in block.results]

    def _equations(self, block: Block, keeps: set[Value]) -> None:
        deferred: _Deferred = {}
        before, block.equations = block.equations, []
        for number, equation in enumerate(before):
            if _may_inline(equation):
                self._pointwise(equation, block, deferred, keeps)
            else:
                self._other(equation, number, block, deferred)

    def _pointwise(
        self,
        equation: Equation,
        block: Block,
        deferred: _Deferred,
        keeps: set[Value],
    ) -> None:
        [value], definition = equation.results, equation.definition
        assert isinstance(definition, Pointwise)
        reads, is_view = self._readers.reads[value], definition.is_view
        cost = self._cost(equation)
        [element] = definition.elements
        takes_view = any(map(_takes_array, reads))
        sources = self._read_by(self._readers.orders[equation])
        equation.inlined = self._inlined(self._readers.inlining.get(equation, ()))
        cheap = CHEAP_INDEX if _is_index(value, sources) else CHEAP
        repeats = not is_view and any(r.steps for r in reads)
        is_dear = repeats and self._count_loads(equation) > 1
        in_loops = sum(r.elements for r in reads) >= 2 * _size(value.shape)
        if in_loops or any(_stacks(r, value.type) for r in reads):
            is_dear |= _is_piecewise(self._readers.orders[equation])
        is_dear |= self._is_hidden(equation, reads)
        is_stored = value in keeps or (
            _is_stored(value, cost, reads, is_view, cheap, is_dear)
            and not self._is_cut(equation, reads)
        )
        if cost.again > cheap and any(_writes_over(read, sources) for read in reads):
            is_stored = True
        if equation in self._readers.inlining and (is_stored or takes_view):
            [element] = self._elements.of(definition.elements)
        if takes_view and (element.op != "element" or condition_of(element)):
            is_stored = True
        if is_stored:
            equation.definition = Pointwise((element,))
            block.equations.append(equation)
            return
        self._makers[value] = equation
        self._nodes[value] = dict.fromkeys((*equation.inlined, equation.node))
        self._costs[value] = cost
        order = self._readers.orders[equation]
        self._elements.add(value, order, is_shared=len(reads) != 1)
        self._sources[value] = sources
        for source in sources:
            deferred.setdefault(source, []).append(value)
        if takes_view:
            equation.definition = Pointwise((element,), (), is_view)
            block.equations.append(equation)
            self._stores[value] = 1
            self._views.add(value)
        elif not any(_is_as_large(source, value.type) for source in sources):
            sized = Effect(types=(value.type,))
            block.equations.append(Equation((), sized, equation.node))

    def _is_cut(self, equation: Equation, reads: Sequence[_Read]) -> bool:
        """Return whether readers read neighbouring elements of a large array that is
        joined of a few parts along one axis. `split` cuts what they compute where these
        meet: most elements are then read from one part."""
        [value] = equation.results
        size = static_size(value.type)
        if size is None or size * value.type.dtype.itemsize < LARGE:
            return False
        if not _tests_of_index(self._readers.orders[equation]):
            return False
        joined = self._joined(equation)
        return (
            joined.tests <= MOST_TESTS
            and joined.axes <= 1
            and joined.cost * (sum(r.indices for r in reads) - 1) <= TRAFFIC
            and all(_is_as_wide(read, value.type) for read in reads)
        )

    def _joined(self, equation: Equation) -> _Joined:
        """Return what an element of one part costs, with the deferred values that it
        reads."""
        assert isinstance(equation.definition, Pointwise)
        cost, deferred = 0, dict[Value, None]()
        tests, seen = set[Expr](), set[Expr]()
        pending = [*equation.definition.elements]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "element":
                pending += [i for i in index_of(node) if i.op != "var"]
                if node.attr in self._elements:
                    deferred[node.attr] = None
            elif node.op == "select" and not _reads_elements(node.args[0]):
                tests.add(node.args[0])
                pending += node.args[1:]
            else:
                cost += weight(node)
                pending += node.args
        along = axes(equation.results[0].type.ndim)
        tested = {i for test in tests for i in nodes(test) if i in along}
        found = _Joined(len(tests), len(tested), cost)
        for source in deferred:
            found = _Joined(*map(add, found, self._joined(self._makers[source])))
        return found

    def _is_hidden(self, equation: Equation, reads: Sequence[_Read]) -> bool:
        """Return whether what an element is depends on tests of an index that is a
        remainder in what computes with it: that would make the test for each element,
        since `split` knows tests of sums alone."""
        [value] = equation.results
        parted = self._readers.parted.get(value)
        return (
            parted is not None
            and value not in self._readers.views
            and any(
                r.equation is not None and not _is_inlined_view(r.equation)
                for r in reads
            )
            and _tests_axes(self._readers.orders[equation], parted, value.type.ndim)
        )

    def _read_by(self, order: Sequence[Expr]) -> dict[Value, None]:
        """Return the values with memory that nodes read, also by deferred values."""
        sources: dict[Value, None] = {}
        for node in order:
            if node.op == "element":
                sources |= self._sources.get(node.attr, {node.attr: None})
        return sources

    def _count_loads(self, equation: Equation) -> int:
        """Count the elements of arrays as large as the value of an equation that one of
        its elements is computed of."""
        [value] = equation.results
        counts, _ = counted_reads(self._readers.orders[equation], self._readers.views)
        loads = 0
        for source, n in counts.items():
            if source in self._elements and source not in self._views:
                loads += n * self._count_loads(self._makers[source])
            elif not _is_larger(value.type, source.type):
                loads += n
        return loads

    def _inlined(self, values: Iterable[Value]) -> tuple[Node, ...]:
        """Return the nodes that the deferred ones among these values compute."""
        inlined: dict[Node, None] = {}
        for value in values:
            inlined |= self._nodes.get(value, {})
        return tuple(inlined)

    def _cost(self, equation: Equation) -> Cost:
        order = self._readers.orders[equation]
        cost = Cost() if _is_free(equation) else cost_of(order)
        if equation not in self._readers.inlining:
            return cost
        counts = self._readers.counts.get(equation)
        if counts is None:  # a view, whose reads count as those of its readers
            counts, _ = counted_reads(order, self._readers.views)
        for value, n in counts.items():
            if value in self._costs:
                cost = cost.plus(self._costs[value], n)
        return cost

    def _other(
        self,
        equation: Equation,
        number: int,
        block: Block,
        deferred: _Deferred,
    ) -> None:
        definition = equation.definition
        for value in _overwritten(definition):
            self._before_update(value, number, block, deferred)
        if isinstance(definition, Branch | Loop | While | Scatter):
            definition = map_operands(
                definition, lambda value: self._whole(value, block)
            )
        if isinstance(definition, Region):
            for inner in blocks(definition):
                self.block(inner, definition)
        elif equation in self._readers.inlining:
            equation.inlined = self._inlined(self._readers.inlining[equation])
            definition = self._rewritten(definition)
        elif isinstance(definition, Pointwise):
            definition = Pointwise(definition.elements)
        equation.definition = definition
        block.equations.append(equation)

    def _rewritten(self, definition: Definition) -> Definition:
        replaced = iter(self._elements.of(all_expressions(definition)))
        definition = map_expressions(definition, lambda _: next(replaced))
        return (
            Pointwise(definition.elements)
            if isinstance(definition, Pointwise)
            else definition
        )

    def _before_update(
        self,
        value: Value,
        number: int,
        block: Block,
        deferred: _Deferred,
    ) -> None:
        """Store the deferred values that read a value which may be overwritten, and
        that are themselves read later."""
        last = self._readers.last
        readers = [
            reader
            for reader in deferred.pop(value, ())
            if reader in self._elements and last.get(reader, -1) >= number
        ]
        computed = [self._elements.at_axes(reader) for reader in readers]
        for reader, element in zip(readers, computed, strict=True):
            self._elements.remove(reader)
            self._costs.pop(reader)
            self._sources.pop(reader)
            equation = self._makers[reader]
            equation.definition = Pointwise((element,))
            if reader not in self._views:
                block.equations.append(equation)

    def _whole(self, value: Value, block: Block) -> Value:
        """Return a value that has memory from here on."""
        if value not in self._elements:
            return value
        return self._memory([value], [self._elements.at_axes(value)], block)[0]

    def _memory(
        self, values: Sequence[Value], expressions: Sequence[Expr], block: Block
    ) -> list[Value]:
        """Store deferred values of one shape, computed in one equation."""
        stored = []
        for value in values:
            count = self._stores[value] = self._stores.get(value, 0) + 1
            name = value.name if count == 1 else f"{value.name}_{count}"
            stored.append(Value(name, value.type))
        equation = Equation(
            tuple(stored),
            Pointwise(tuple(expressions)),
            self._makers[values[0]].node,
            inlined=self._inlined(values),
        )
        block.equations.append(equation)
        return stored

    def _compute_last(
        self, block: Block, last: Sequence[Value], replaced: Sequence[Value]
    ) -> None:
        """Compute the results of a block that are still deferred. The first ones read
        the replaced values at indices other than their own; the rest of the `last` ones
        follow, one equation for each shape."""
        parameters = {v for v in replaced if not is_small(v.type)}
        groups: dict[Hashable, list[Value]] = {}
        computed: dict[Value, Expr] = {}
        for number, value in enumerate(dict.fromkeys(block.results)):
            if value not in self._elements:
                continue
            element = computed[value] = self._elements.at_axes(value)
            is_last = value in last
            if is_last and _reads_own_index(element, parameters, value.type.ndim):
                key: Hashable = shape_key(value.shape)
            else:
                key = number
            groups.setdefault(key, []).append(value)
        stored: dict[Value, Value] = {}
        single = [key for key in groups if isinstance(key, int)]
        for key in (*single, *(k for k in groups if k not in single)):
            group = groups[key]
            expressions = [computed[v] for v in group]
            stored |= zip(group, self._memory(group, expressions, block), strict=True)
        block.results = [stored.get(v, v) for v in block.results]


def _overwritten(definition: object) -> tuple[Value, ...]:
    """Return the operands whose memory a definition may change in place."""
    if isinstance(definition, Scatter):
        return operands(definition)
    if isinstance(definition, Call):
        return tuple(
            [definition.operands[k] for k in definition.function.updated.values()]
        )
    return ()


def _is_as_large(source: Value, type_: TensorType) -> bool:
    """Return whether a value's allocation proves that one of `type_` fits."""
    same = shape_key(source.shape) == shape_key(type_.shape)
    return type_.is_static or (same and source.dtype.itemsize >= type_.dtype.itemsize)


def _reads_own_index(element: Expr, values: set[Value], rank: int) -> bool:
    """Return whether an element reads these values only at its own index."""
    return all(
        index_of(node) == axes(rank)
        for node in elements([element])
        if node.attr in values
    )
