"""What is cheap, or read once, is computed where it is read; the rest is stored.

    v0 = x[i0] * 2.0                    v2 = reduce add from 0.0 of x[i0] * 2.0 + 1.0
    v1 = v0[i0] + 1.0             ->
    v2 = reduce add from 0.0 of v1[i0]

After it every value of a program has memory, or is in registers, but for views that a
library may take as they are. What a loop gives for its next step is computed at the end
of the step, all values of one shape at once, so that they can replace what they read.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import Cost, counted_reads
from hopflow.compiler.kernel_passes.reads import cost as own_cost
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
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import Expr, condition_of, index_of
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.walk import nodes

CHEAP: Final = 6
"""An element of at most this cost may be computed again for each reader."""
LARGE: Final = 1 << 20
"""Bytes that are more than fit into the caches of a core."""
TRAFFIC: Final = 48
"""What it costs to write and to read again an element of a value that is so large."""
LONGEST: Final = 1000
"""Instructions of an element: longer ones are stored. What a loop computes at once must
fit into the registers, and LLVM takes more than linear time for it."""


_Deferred: TypeAlias = dict[Value, list[Value]]
"""By a value with memory, the values computed in their readers that read it."""


def inline(program: KernelProgram, context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Results that are to take the memory of parameters are computed last, as those of a
    step are.
    """
    readers = _Readers()
    readers.walk(program.block)
    _Inliner(readers).program(program.block, context.reused)


# --- who reads what -------------------------------------------------------------------


class _Read(NamedTuple):
    """An equation that reads a value at several `indices`; None: a result of a block.

    whole   it reads all of the value, and not by element
    outer   it is in a block within that of the value
    """

    equation: Equation | None
    indices: int
    whole: bool
    outer: bool


class _Readers:
    """What reads each value that may be computed in its readers.

    views   the definitions that only move elements; those that something reads whole
            have memory, and read by themselves
    reads   what is left if views are computed in their readers
    last    the last equation of the value's block that reads it, or holds what does,
            by number
    orders     the nodes of equations that may be computed in their readers
    inlining   the equations whose expressions read such values
    counts     for equations that do, how many indices they read each value at
    """

    def __init__(self) -> None:
        self.views: dict[Value, Pointwise] = {}
        self._whole: dict[Value, Equation] = {}
        self.reads: dict[Value, list[_Read]] = {}
        self.last: dict[Value, int] = {}
        self.orders: dict[Equation, list[Expr]] = {}
        self.inlining: set[Equation] = set()
        self.counts: dict[Equation, dict[Value, int]] = {}
        self._block: dict[Value, Block] = {}
        self._at: dict[Block, int] = {}
        self._within: list[Block] = []

    def walk(self, block: Block) -> None:
        """Note the reads of a block and of the blocks in it."""
        self._within.append(block)
        for number, equation in enumerate(block.equations):
            self._at[block] = number
            self._note(equation)
            for inner in blocks(equation.definition):
                self.walk(inner)
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
        self._within.pop()

    def _note(self, equation: Equation) -> None:
        for value in operands(equation.definition):
            self._read(value, equation, 1, whole=True)
        if isinstance(equation.definition, Region):
            return
        order = nodes(*all_expressions(equation.definition))
        if _may_inline(equation):
            self.orders[equation] = order
        known = [
            node.attr
            for node in order
            if node.op == "element" and node.attr in self._block
        ]
        if not known:
            return
        self.inlining.add(equation)
        for value in known:
            self.last[value] = self._at[self._block[value]]
        if _is_inlined_view(equation):
            return
        counts, through = counted_reads(order, self.views)
        self.counts[equation] = counts
        for value, count in counts.items():
            self._read(value, equation, count, whole=False)
        for value in through:
            self._read(value, equation, 1, whole=False)

    def _read(
        self, value: Value, equation: Equation | None, count: int, *, whole: bool
    ) -> None:
        block = self._block.get(value)
        if block is None:
            return
        outer = block is not self._within[-1]
        self.reads[value].append(_Read(equation, count, whole, outer))
        self.last[value] = self._at[block]
        if whole and value in self._whole:
            self._read_through(value, self._whole.pop(value))

    def _read_through(self, view: Value, equation: Equation) -> None:
        """Note what a view reads that has memory, where it stands."""
        counts, _ = counted_reads(self.orders[equation], self.views)
        for value, count in counts.items():
            if value in self._block:
                outer = self._block[value] is not self._block[view]
                self.reads[value].append(_Read(equation, count, False, outer))


def _may_inline(equation: Equation) -> bool:
    own = equation.definition
    if not isinstance(own, Pointwise) or len(own.elements) > 1:
        return False
    return not is_small(equation.results[0].type) or (
        equation.symbol is None and _is_row(own)
    )


def _is_row(own: Pointwise) -> bool:
    """Whether a view is a part of a value that a loop steps through: to read it again
    costs next to nothing."""
    [element] = own.elements
    return (
        own.is_view
        and element.op == "element"
        and all(i.op == "var" for i in element.args)
    )


def _is_inlined_view(equation: Equation) -> bool:
    own = equation.definition
    return isinstance(own, Pointwise) and own.is_view and _may_inline(equation)


# --- what is stored -------------------------------------------------------------------


def _is_stored(value: Value, cost: Cost, reads: Sequence[_Read], is_view: bool) -> bool:
    """Whether an element of this cost is computed once, and read from memory."""
    again = cost.again
    if again > LONGEST or any(map(_takes_memory, reads)):
        return True
    if any(_takes_matrix(r) and (r.outer or not is_view) for r in reads):
        return True  # otherwise each step copies it
    if any(_repeats(r.equation, value.type, again) for r in reads):
        return True
    if again <= CHEAP or _is_stencil(value.type, again, reads, is_view):
        return False
    readers = {id(r.equation) for r in reads if r.equation is not None}
    results = sum(r.equation is None for r in reads)
    if not is_view and len(readers) + results > 1:
        return True
    return any(r.outer or _asks_again(r, value, cost, is_view) for r in reads)


def _is_stencil(
    type_: TensorType, cost: int, reads: Sequence[_Read], is_view: bool
) -> bool:
    """Whether neighbours of an element of a large value are read, and are computed for
    less than the traffic of memory costs; half of that, if the size is not known."""
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
    """Whether a reader is elementwise, of no more elements, and in the same block."""
    own = read.equation
    return (
        own is not None
        and isinstance(own.definition, Pointwise)
        and not read.outer
        and not _is_larger(own.results[0].type, type_)
    )


def _writes_over(read: _Read, sources: Collection[Value]) -> bool:
    """Whether a reader replaces elements of what it would read, so that all of it had
    to be copied before."""
    own = None if read.equation is None else read.equation.definition
    return isinstance(own, Scatter) and own.base in sources


def _asks_again(read: _Read, value: Value, cost: Cost, is_view: bool) -> bool:
    """Whether a reader computes elements several times, or dear ones one by one."""
    if read.equation is None:
        return False
    match read.equation.definition:
        case Pointwise():
            result = read.equation.results[0].type
            more = read.indices > 1 and not is_view
            return more or _is_larger(result, value.type)
        case Scatter(base=base, space=space):
            once = read.indices == 1 and len(space) == value.type.ndim
            return not once or cost.work > CHEAP or base is value
        case Prefix() | Compact():
            return True
    return read.indices > 1 and not is_view


def _repeats(equation: Equation | None, type_: TensorType, cost: int) -> bool:
    """Whether a reduction computes elements so often that it costs more than memory."""
    if equation is None or not isinstance(equation.definition, Reduction):
        return False
    space = (*equation.results[0].shape, *equation.definition.space)
    size = static_size(type_)
    steps = prod(n if isinstance(n, int) else 64 for n in space)
    again = 1 if size is None else steps // max(size, 1) - 1
    return cost * again > CHEAP


def _takes_memory(read: _Read) -> bool:
    """Whether a reader needs the value as a dense array."""
    own = None if read.equation is None else read.equation.definition
    if isinstance(own, Library):
        return not own.takes_transposed
    return isinstance(own, Callback | Call)


def _takes_matrix(read: _Read) -> bool:
    own = None if read.equation is None else read.equation.definition
    return isinstance(own, Library) and own.takes_transposed


def _is_larger(result: TensorType, operand: TensorType) -> bool:
    a, b = static_size(result), static_size(operand)
    return result.ndim > operand.ndim if a is None or b is None else a > b


# --- rewriting ------------------------------------------------------------------------


class _Inliner:
    """Rewrites blocks in the order of the text.

    Values that are computed in their readers are deferred. Before the memory that they
    read may be written over, those that are read later are stored.
    """

    def __init__(self, readers: _Readers) -> None:
        self._readers = readers
        self._elements = Substitution()
        self._costs: dict[Value, Cost] = {}
        self._made: dict[Value, int] = {}  # how often a deferred value got memory
        self._makers: dict[Value, Equation] = {}  # of deferred values
        self._sources: dict[Value, dict[Value, None]] = {}  # what they read of memory
        self._views: set[Value] = set()  # those that stay, for libraries

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
        given, block.equations = block.equations, []
        for number, equation in enumerate(given):
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
        [value], own = equation.results, equation.definition
        assert isinstance(own, Pointwise)
        reads, is_view = self._readers.reads[value], own.is_view
        cost = self._cost(equation)
        [element] = own.elements
        takes_view = any(map(_takes_matrix, reads))
        sources = self._read_by(self._readers.orders[equation])
        is_stored = value in keeps or _is_stored(value, cost, reads, is_view)
        if cost.again > CHEAP and any(_writes_over(read, sources) for read in reads):
            is_stored = True
        if equation in self._readers.inlining and (is_stored or takes_view):
            [element] = self._elements.of(own.elements)
        if takes_view and (element.op != "element" or condition_of(element)):
            is_stored = True
        if is_stored:
            equation.definition = Pointwise((element,))
            block.equations.append(equation)
            return
        self._makers[value] = equation
        self._costs[value] = cost
        order = self._readers.orders[equation]
        self._elements.add(value, order, is_shared=len(reads) != 1)
        self._sources[value] = sources
        for source in sources:
            deferred.setdefault(source, []).append(value)
        if takes_view:
            equation.definition = Pointwise((element,), (), is_view)
            block.equations.append(equation)
            self._made[value] = 1
            self._views.add(value)
        elif not any(_is_as_large(source, value.type) for source in sources):
            sized = Effect(types=(value.type,))
            block.equations.append(Equation((), sized, equation.node))

    def _read_by(self, order: Sequence[Expr]) -> dict[Value, None]:
        """The values with memory that nodes read, by way of deferred ones."""
        found: dict[Value, None] = {}
        for node in order:
            if node.op == "element":
                found |= self._sources.get(node.attr, {node.attr: None})
        return found

    def _cost(self, equation: Equation) -> Cost:
        order = self._readers.orders[equation]
        cost = own_cost(order)
        if equation not in self._readers.inlining:
            return cost
        counts = self._readers.counts.get(equation)
        if counts is None:  # of a view, whose reads are those of its readers
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
        own = equation.definition
        for value in _overwritten(own):
            self._before_update(value, number, block, deferred)
        if isinstance(own, Branch | Loop | While | Scatter):
            own = map_operands(own, lambda value: self._whole(value, block))
        if isinstance(own, Region):
            for inner in blocks(own):
                self.block(inner, own)
        elif equation in self._readers.inlining:
            own = self._rewritten(own)
        elif isinstance(own, Pointwise):
            own = Pointwise(own.elements)
        equation.definition = own
        block.equations.append(equation)

    def _rewritten(self, own: Definition) -> Definition:
        found = iter(self._elements.of(all_expressions(own)))
        own = map_expressions(own, lambda _: next(found))
        return Pointwise(own.elements) if isinstance(own, Pointwise) else own

    def _before_update(
        self,
        value: Value,
        number: int,
        block: Block,
        deferred: _Deferred,
    ) -> None:
        """Store what reads a value that may be written over, and is read later on."""
        last = self._readers.last
        readers = [
            reader
            for reader in deferred.pop(value, ())
            if reader in self._elements and last.get(reader, -1) >= number
        ]
        found = [self._elements.at_axes(reader) for reader in readers]
        for reader, element in zip(readers, found, strict=True):
            self._elements.remove(reader)
            self._costs.pop(reader)
            self._sources.pop(reader)
            equation = self._makers[reader]
            equation.definition = Pointwise((element,))
            if reader not in self._views:
                block.equations.append(equation)

    def _whole(self, value: Value, block: Block) -> Value:
        """A value that has memory from here on."""
        if value not in self._elements:
            return value
        return self._memory([value], [self._elements.at_axes(value)], block)[0]

    def _memory(
        self, values: Sequence[Value], given: Sequence[Expr], block: Block
    ) -> list[Value]:
        """Memory for deferred values of one shape, computed at once."""
        made = []
        for value in values:
            count = self._made[value] = self._made.get(value, 0) + 1
            name = value.name if count == 1 else f"{value.name}_{count}"
            made.append(Value(name, value.type))
        node = self._makers[values[0]].node
        block.equations.append(Equation(tuple(made), Pointwise(tuple(given)), node))
        return made

    def _compute_last(
        self, block: Block, last: Sequence[Value], replaced: Sequence[Value]
    ) -> None:
        """Compute the results of a block that are still deferred: first what reads the
        values that are replaced at other indices than its own, then the rest of what
        comes `last`, by shape."""
        parameters = {v for v in replaced if not is_small(v.type)}
        groups: dict[Hashable, list[Value]] = {}
        computed: dict[Value, Expr] = {}
        for number, value in enumerate(dict.fromkeys(block.results)):
            if value not in self._elements:
                continue
            element = computed[value] = self._elements.at_axes(value)
            own = value in last
            if own and _reads_own_index(element, parameters, value.type.ndim):
                key: Hashable = shape_key(value.shape)
            else:
                key = number
            groups.setdefault(key, []).append(value)
        found: dict[Value, Value] = {}
        single = [key for key in groups if isinstance(key, int)]
        for key in (*single, *(k for k in groups if k not in single)):
            group = groups[key]
            given = [computed[v] for v in group]
            found |= zip(group, self._memory(group, given, block), strict=True)
        block.results = [found.get(v, v) for v in block.results]


def _overwritten(own: object) -> tuple[Value, ...]:
    """The operands whose memory a definition may change in place."""
    if isinstance(own, Scatter):
        return operands(own)
    if isinstance(own, Call):
        return tuple([own.operands[k] for k in own.function.updated.values()])
    return ()


def _is_as_large(source: Value, type_: TensorType) -> bool:
    """Whether memory for a value says that there could be some for one of `type_`."""
    same = shape_key(source.shape) == shape_key(type_.shape)
    return type_.is_static or (same and source.dtype.itemsize >= type_.dtype.itemsize)


def _reads_own_index(element: Expr, values: set[Value], rank: int) -> bool:
    """Whether an element reads these values at its own index alone."""
    return all(
        index_of(node) == axes(rank)
        for node in elements([element])
        if node.attr in values
    )
