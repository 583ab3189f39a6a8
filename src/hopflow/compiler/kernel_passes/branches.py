"""Turns selects between values by one scalar test into branches.

    v1 = reduce max from -inf of x[i0]               v2 = switch v0:
    v2 = select(v0[], exp(x[i0] - v1[]), x[i0])      case 0:
                                                         v2_false = x[i0]
                                                         yield v2_false
                                               ->    case 1:
                                                         v1 = reduce max from -inf ...
                                                         v2_true = exp(x[i0] - v1[])
                                                         yield v2_true

Each case holds the whole expression with one side of the `select`, so that operations
on the select stay fused with it. Adjacent equations with the same test and shape become
one branch. An equation that only one case reads moves into that case, if it cannot stop
the program.

A select stays where a branch saves little (`DEAR`, `LEAST`, `SHARE`), for loops are not
merged across a branch. It also stays in the step of a loop that may process rows in
blocks, all steps for each block, which a test in a step would prevent.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Value,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_small, shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    drop_unread,
    elements,
    replace_values,
    values_read,
)
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, condition_of
from hopflow.loop_ir.kernels import Library
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Symbol, free_symbols

DEAR: Final = 16
"""Instructions of an element that a case must save: fewer take no longer than reading
and writing memory."""
LEAST: Final = 1500
"""Instructions that a case must save in all: a mispredicted test costs as much as some
hundred, and loops may evaluate it often."""
SHARE: Final = 4
"""A case must save at least one part in so many of the work: the rest is duplicated."""
DEEPEST: Final = 4
"""At most so many nested branches are made of one equation."""
TESTS: Final = 4
"""At most so many tests of one equation are tried."""
REACH: Final = 32
"""How many equations back the search for the same test goes."""
BLOCKED: Final = 1 << 14
"""Elements of an array that a loop may process in blocks, all steps for each."""
UNKNOWN: Final = 64
"""The assumed value of a size that is only known at runtime."""
MOVABLE: Final = (
    *(d.Pointwise, d.Cut, d.Reduction, d.Prefix, d.Effect),
    *(Library, Branch, Loop),
)
"""Definitions that only compute their results, if they cannot stop the program."""


def branches(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    entry = {s for v in program.block.parameters for s in free_symbols(*v.shape)}
    entry.update(program.symbols)
    pending = [(program.block, False, 0)]
    while pending:
        block, is_step, depth = pending.pop()
        tests = _candidates(block, entry) if depth < DEEPEST else {}
        choices = _Choices(block, is_step, tests, entry) if tests else None
        new = choices.make_branches() if choices else ()
        for equation in block.equations:
            definition = equation.definition
            is_step = isinstance(definition, Loop) and not definition.independent
            inner_depth = depth + (equation in new)
            pending += [(inner, is_step, inner_depth) for inner in blocks(definition)]


# --- selects by one test --------------------------------------------------------------


class _Test(NamedTuple):
    """The element that a select tests, which is the same for all indices."""

    value: Value
    at: tuple[int, ...]


def _test_of(node: Expr) -> tuple[_Test | None, bool]:
    """Return the element that a node selects by, or None, and whether it is negated."""
    if node.op != "select":
        return None, False
    test, is_contrary = node.args[0], False
    while test.op == "not":
        test, is_contrary = test.args[0], not is_contrary
    is_one = test.op == "element" and is_small(test.attr.type)
    if not is_one or not all(i.is_const for i in test.args):
        return None, False
    at = tuple([i.attr for i in test.args])
    shape = test.attr.shape
    is_read = len(at) == len(shape) and all(
        0 <= i < n for i, n in zip(at, shape, strict=True)
    )
    return _Test(test.attr, at) if is_read else None, is_contrary


_Tests: TypeAlias = dict[int, list[_Test]]


def _tests(roots: Sequence[Expr]) -> list[_Test]:
    """Return the tests of the selects in expressions, the outermost first."""
    tests = [_test_of(node)[0] for node in reversed(nodes(*roots))]
    return list(dict.fromkeys([test for test in tests if test is not None]))[:TESTS]


def _side(roots: Sequence[Expr], test: _Test, *, holds: bool) -> list[Expr]:
    """Return expressions as they are where a test holds, or does not."""
    values: dict[Expr, Expr] = {}
    for node in nodes(*roots):
        args = tuple([values[a] for a in node.args])
        selected_by, is_contrary = _test_of(node)
        if selected_by == test:
            values[node] = args[1] if holds is not is_contrary else args[2]
        else:
            values[node] = e.with_args(node, args)
    return [values[root] for root in roots]


# --- the cost and the effects of equations --------------------------------------------


def _count(shape: Iterable[object]) -> int:
    return prod(n if isinstance(n, int) else UNKNOWN for n in shape)


def _cost(definition: Any) -> int:
    """Return about how many instructions an element of a definition takes."""
    call = 64 if isinstance(definition, Library) else 0
    return call + sum(map(weight, nodes(*all_expressions(definition))))


def _work(equation: Equation) -> int:
    """Return about how many instructions an equation takes."""
    total = 0
    for inner, times in _executions(equation):
        shape = inner.results[0].shape if inner.results else ()
        space = getattr(inner.definition, "space", ())
        total += times * _cost(inner.definition) * _count([*shape, *space])
    return total


def _executions(equation: Equation) -> Iterator[tuple[Equation, int]]:
    """Yield an equation and those in its blocks, each with its number of executions."""
    pending = [(equation, 1)]
    while pending:
        inner, times = pending.pop()
        yield inner, times
        definition = inner.definition
        times *= _count([definition.length]) if isinstance(definition, Loop) else 1
        pending += [(q, times) for block in blocks(definition) for q in block.equations]


def _may_move(equation: Equation, entry: Collection[Symbol]) -> bool:
    """Return whether an equation has no effect but its results. An allocation whose
    size is not known on entry may fail, which is an effect."""
    for inner, _ in _executions(equation):
        definition = inner.definition
        effects = [
            getattr(definition, name, ()) for name in ("checks", "ticks", "can_fail")
        ]
        if (
            inner.symbol is not None
            or any(effects)
            or not isinstance(definition, MOVABLE)
        ):
            return False
        if any(s not in entry for v in inner.results for s in free_symbols(*v.shape)):
            return False
    return True


def _has_no_loop(equation: Equation) -> bool:
    definition = equation.definition
    if not isinstance(definition, d.Pointwise):
        return False
    return definition.is_view or is_small(equation.results[0].type)


# --- the equations of a block ---------------------------------------------------------


def _candidates(block: Block, entry: Collection[Symbol]) -> _Tests:
    """Return, by number, the tests of the equations that may become branches. A value
    that is read conditionally may be stored as a part of another value, but not in a
    branch."""
    parts: set[Value] = set()
    tests_of: _Tests = {}
    for number, equation in enumerate(block.equations):
        definition = equation.definition
        if isinstance(definition, d.Pointwise | d.Cut):
            reads = elements(all_expressions(definition))
            parts.update(x.attr for x in reads if condition_of(x) is not None)
        if isinstance(definition, d.Pointwise) and not (
            definition.checks or definition.is_view
        ):
            sizes = free_symbols(*equation.results[0].shape)
            tests = _tests(definition.elements)
            if tests and equation.symbol is None and all(s in entry for s in sizes):
                tests_of[number] = tests
    results = {n: block.equations[n].results for n in tests_of}
    return {n: tests for n, tests in tests_of.items() if parts.isdisjoint(results[n])}


class _Choices:
    """Turns the selects of one block into branches.

    is_step     whether the block is a step of a loop, in order
    tests       by number, the tests of equations
    entry       the symbols known on entry
    equations   by number, the equations of the block that are not in a branch
    before      a new equation before an equation
    reads       the values that an equation reads
    readers     how many equations, or results of the block, read a value
    last        the number of the last equation that reads a value
    makers      the number of the equation that computes a value
    """

    def __init__(
        self, block: Block, is_step: bool, tests: _Tests, entry: Collection[Symbol]
    ) -> None:
        self.block, self.is_step, self.tests, self.entry = block, is_step, tests, entry
        self.equations = dict(enumerate(block.equations))
        self.before: dict[int, Equation] = {}
        self.reads = [*map(values_read, block.equations), dict.fromkeys(block.results)]
        self.readers = Counter(v for read in self.reads for v in read)
        self.last = {v: n for n, read in enumerate(self.reads) for v in read}
        self.makers = {v: n for n, q in self.equations.items() for v in q.results}

    def make_branches(self) -> set[Equation]:
        """Make branches in the block. Return the new equations."""
        new: set[Equation] = set()
        tried: set[tuple[int, _Test]] = set()
        for number, tests in reversed(self.tests.items()):
            for test in tests:
                equation = self.equations.get(number)
                if equation is None or equation in new or (number, test) in tried:
                    continue
                group = self._group(number, test)
                tried.update((n, test) for n in group)
                if self._branch(group, test):
                    new.add(self.equations[number])
        pairs = ((self.before.get(n), q) for n, q in self.equations.items())
        self.block.equations = [q for pair in pairs for q in pair if q is not None]
        return new

    def _group(self, last: int, test: _Test) -> list[int]:
        """Return an equation and the adjacent ones before it with the same test and
        shape. All move to the position of the last one, so nothing between may read
        them."""
        group = [last]
        shape = shape_key(self.equations[last].results[0].shape)
        between: set[Value] = set()
        for number in reversed(range(max(0, last - REACH), last)):
            equation = self.equations.get(number)
            if equation is None:
                continue
            results = equation.results
            has_test = test in self.tests.get(number, ())
            if has_test and shape_key(results[0].shape) == shape:
                if not between.isdisjoint(results):
                    break
                group.append(number)
            elif _has_no_loop(equation):
                between.update(self.reads[number])
            else:
                break
        return group[::-1]

    def _branch(self, group: Sequence[int], test: _Test) -> bool:
        """Make equations one branch, if that pays."""
        members = [self.equations[n] for n in group]
        uses = Counter(v for n in group for v in self.reads[n])
        outer = [v for q in members for v in q.results if self.readers[v] > uses[v]]
        if not outer or self._is_in_blocks(outer[0].shape, test):
            return False
        no, yes = (
            _side_of(members, outer, test, holds=holds) for holds in (False, True)
        )
        reads_no, reads_yes = (
            {v for q in side.equations for v in values_read(q)} | {test.value}
            for side in (no, yes)
        )
        moved = (
            self._moved(reads_no, reads_yes, uses),
            self._moved(reads_yes, reads_no, uses),
        )
        removed = moved[0] | moved[1]
        if not self._may_wait(removed, group[-1]):
            moved, removed = (set(), set()), set()
        works = [sum(_work(self.equations[n]) for n in numbers) for numbers in moved]
        if not (_pays(members, no, works) or _pays(members, yes, works[::-1])):
            return False
        for side, numbers in zip((no, yes), moved, strict=True):
            side.equations[:0] = [self.equations[n] for n in sorted(numbers)]
        for n in removed.union(group[:-1]):
            del self.equations[n]
        branch = Branch(self._selector(group[-1], test), (no, yes))
        self.equations[group[-1]] = Equation(tuple(outer), branch, members[-1].node)
        return True

    def _is_in_blocks(self, shape: Shape, test: _Test) -> bool:
        """Return whether the enclosing loop may process rows in blocks, all steps for
        each. It does only if a step is a single loop, without a test."""
        if test.value in self.makers or test.value in self.block.parameters:
            return False
        is_large = _count(shape) >= BLOCKED or bool(free_symbols(*shape))
        return self.is_step and is_large

    def _moved(
        self, reads: set[Value], other_reads: set[Value], uses: Counter[Value]
    ) -> set[int]:
        """Return the equations that only one case needs. `reads` are the values that
        the case reads, `other_reads` those of the other case; `uses` counts the reads
        of values by the equations that become the branch."""
        moved: set[int] = set()
        counts = uses.copy()
        pending = [*(reads - other_reads)]
        while pending:
            number = self.makers.get(pending.pop(), -1)
            equation = self.equations.get(number)
            if equation is None or number in moved:
                continue
            if any(
                v in other_reads or counts[v] < self.readers[v]
                for v in equation.results
            ):
                continue
            if _may_move(equation, self.entry):
                moved.add(number)
                counts.update(self.reads[number].keys())
                pending += self.reads[number]
        return moved

    def _may_wait(self, moved: set[int], number: int) -> bool:
        """Return whether the large values that equations read are still live at a later
        position anyway."""
        large = [v for n in moved for v in self.reads[n] if not is_small(v.type)]
        return all(self.last[v] >= number or self.last[v] in moved for v in large)

    def _selector(self, number: int, test: _Test) -> Value:
        """Return the value to switch by, which may be an element of a vector."""
        if not test.at:
            return test.value
        last, element = (
            self.equations[number],
            test.value[tuple(map(e.index, test.at))],
        )
        selector = Value(f"{last.results[0].name}_test", TensorType(dtypes.bool_))
        self.before[number] = Equation((selector,), d.Pointwise((element,)), last.node)
        return selector


def _side_of(
    equations: Sequence[Equation], outer: Iterable[Value], test: _Test, *, holds: bool
) -> Block:
    """Return the block of a case: the equations as they are where a test holds, or does
    not, and only as far as `outer` needs them. Its values get new names."""
    block = Block([], [], [*outer])
    renamed: dict[Value, Value] = {}
    for equation in equations:
        assert isinstance(equation.definition, d.Pointwise)
        roots = _side(equation.definition.elements, test, holds=holds)
        name = "true" if holds else "false"
        results = tuple([Value(f"{v.name}_{name}", v.type) for v in equation.results])
        renamed |= zip(equation.results, results, strict=True)
        chosen = replace(
            equation, results=results, definition=d.Pointwise(tuple(roots))
        )
        block.equations.append(chosen)
    replace_values(block, renamed)
    drop_unread(block)
    return block


def _pays(equations: Sequence[Equation], side: Block, moved: Sequence[int]) -> bool:
    """Return whether a case saves enough of the work of equations; `moved` is the work
    that moves into this case and into the other one."""
    whole, rest = (
        sum(_cost(q.definition) for q in x) for x in (equations, side.equations)
    )
    count = _count(equations[0].results[0].shape)
    saved = (whole - rest) * count + moved[1]
    is_dear = whole - rest >= DEAR or moved[1] >= LEAST
    return is_dear and saved >= LEAST and saved * SHARE >= whole * count + sum(moved)
