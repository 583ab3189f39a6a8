"""A value that one test chooses for all elements is computed on the side that is taken.

    v1 = reduce max from -inf of x[i0]               v2 = switch v0:
    v2 = select(v0[], exp(x[i0] - v1[]), x[i0])      case 0:
                                                         v2_false = x[i0]
                                                         yield v2_false
                                               ->    case 1:
                                                         v1 = reduce max from -inf ...
                                                         v2_true = exp(x[i0] - v1[])
                                                         yield v2_true

The whole expression goes to both sides, with one side of the `select` in each, so that
what is computed of it stays fused with it. Equations in a row that ask the same test
over the same shape become one branch. An equation that one side alone needs goes into
that side, if it cannot stop the program.

A program stays as it is where little is saved (`DEAR`, `LEAST`, `SHARE`): loops are not
merged across a branch. So it does where a loop may go through rows in blocks, all steps
for each, which it cannot with a test in a step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
"""Instructions of an element that a side saves, at least: reading and writing memory
takes as long as fewer do."""
LEAST: Final = 1500
"""Instructions that a side saves in all, at least: a test that is guessed wrongly costs
as much as some hundred, and loops may ask it often."""
SHARE: Final = 4
"""At least one part in so many of the work is saved: the rest is written twice."""
DEEPEST: Final = 4
"""So many branches within each other are made of one equation."""
TESTS: Final = 4
"""So many tests of one equation are tried."""
REACH: Final = 32
"""How many equations away others are looked for that ask the same."""
BLOCKED: Final = 1 << 14
"""Elements of an array that a loop may go through in blocks, all steps for each."""
UNKNOWN: Final = 64
"""What a size that only a run knows is taken for."""
MOVABLE: Final = (
    *(d.Pointwise, d.Cut, d.Reduction, d.Prefix, d.Effect),
    *(Library, Branch, Loop),
)
"""What does nothing but to give its results, if it cannot stop the program."""


def branches(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    entry = {s for v in program.block.parameters for s in free_symbols(*v.shape)}
    entry.update(program.symbols)
    pending = [(program.block, False, 0)]
    while pending:
        block, is_step, depth = pending.pop()
        asked = _asked(block, entry) if depth < DEEPEST else {}
        choices = _Choices(block, is_step, asked, entry) if asked else None
        made = choices.made_branches() if choices else ()
        for equation in block.equations:
            own = equation.definition
            is_step = isinstance(own, Loop) and not own.independent
            within = depth + (equation in made)
            pending += [(inner, is_step, within) for inner in blocks(own)]


# --- what a test chooses --------------------------------------------------------------


class _Test(NamedTuple):
    """The element that a select asks, which is the same for all indices."""

    value: Value
    at: tuple[int, ...]


def _test_of(node: Expr) -> tuple[_Test | None, bool]:
    """What a node selects by, if it does by one element; and if by its contrary."""
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


_Asked: TypeAlias = dict[int, list[_Test]]


def _tests(roots: Sequence[Expr]) -> list[_Test]:
    """What expressions ask, the outermost first."""
    found = [_test_of(node)[0] for node in reversed(nodes(*roots))]
    return list(dict.fromkeys([test for test in found if test is not None]))[:TESTS]


def _side(roots: Sequence[Expr], test: _Test, *, holds: bool) -> list[Expr]:
    """Expressions where it is known whether a test holds."""
    values: dict[Expr, Expr] = {}
    for node in nodes(*roots):
        args = tuple([values[a] for a in node.args])
        asked, is_contrary = _test_of(node)
        if asked == test:
            values[node] = args[1] if holds is not is_contrary else args[2]
        else:
            values[node] = e.with_args(node, args)
    return [values[root] for root in roots]


# --- what equations cost, and what they do --------------------------------------------


def _count(shape: Iterable[object]) -> int:
    return prod(n if isinstance(n, int) else UNKNOWN for n in shape)


def _cost(own: Any) -> int:
    """About how many instructions an element of a definition takes."""
    whole = 64 if isinstance(own, Library) else 0
    return whole + sum(map(weight, nodes(*all_expressions(own))))


def _work(equation: Equation) -> int:
    """About how many instructions an equation takes."""
    total = 0
    for one, times in _within(equation):
        shape = one.results[0].shape if one.results else ()
        space = getattr(one.definition, "space", ())
        total += times * _cost(one.definition) * _count([*shape, *space])
    return total


def _within(equation: Equation) -> Iterator[tuple[Equation, int]]:
    """An equation and those in its blocks, each with how often it is computed."""
    pending = [(equation, 1)]
    while pending:
        one, times = pending.pop()
        yield one, times
        own = one.definition
        times *= _count([own.length]) if isinstance(own, Loop) else 1
        pending += [(q, times) for block in blocks(own) for q in block.equations]


def _may_move(equation: Equation, entry: Collection[Symbol]) -> bool:
    """Whether nobody can tell whether an equation is computed, but by its results. What
    takes memory of a size that a call does not know may fail for want of it."""
    for one, _ in _within(equation):
        own = one.definition
        effects = [getattr(own, name, ()) for name in ("checks", "ticks", "can_fail")]
        if one.symbol is not None or any(effects) or not isinstance(own, MOVABLE):
            return False
        if any(s not in entry for v in one.results for s in free_symbols(*v.shape)):
            return False
    return True


def _has_no_loop(equation: Equation) -> bool:
    own = equation.definition
    if not isinstance(own, d.Pointwise):
        return False
    return own.is_view or is_small(equation.results[0].type)


# --- the equations of a block ---------------------------------------------------------


def _asked(block: Block, entry: Collection[Symbol]) -> _Asked:
    """By number what those equations ask that may become branches. What is read under
    conditions may be made in its part of another value, but not in a branch."""
    parts: set[Value] = set()
    found: _Asked = {}
    for number, equation in enumerate(block.equations):
        own = equation.definition
        if isinstance(own, d.Pointwise | d.Cut):
            read = elements(all_expressions(own))
            parts.update(x.attr for x in read if condition_of(x) is not None)
        if isinstance(own, d.Pointwise) and not (own.checks or own.is_view):
            sizes = free_symbols(*equation.results[0].shape)
            tests = _tests(own.elements)
            if tests and equation.symbol is None and all(s in entry for s in sizes):
                found[number] = tests
    results = {n: block.equations[n].results for n in found}
    return {n: tests for n, tests in found.items() if parts.isdisjoint(results[n])}


class _Choices:
    """Makes what tests choose in one block branches.

    is_step     whether the block is a step of a loop, in order
    asked       by number what equations ask
    entry       the sizes that a call knows
    equations   by number those of the block that have not gone into a branch
    before      what is new before an equation
    reads       the values that an equation reads
    readers     how many equations, or results of the block, read a value
    last        the last equation that reads a value, by number
    makers      the number of the equation that a value is a result of
    """

    def __init__(
        self, block: Block, is_step: bool, asked: _Asked, entry: Collection[Symbol]
    ) -> None:
        self.block, self.is_step, self.asked, self.entry = block, is_step, asked, entry
        self.equations = dict(enumerate(block.equations))
        self.before: dict[int, Equation] = {}
        self.reads = [*map(values_read, block.equations), dict.fromkeys(block.results)]
        self.readers = Counter(v for read in self.reads for v in read)
        self.last = {v: n for n, read in enumerate(self.reads) for v in read}
        self.makers = {v: n for n, q in self.equations.items() for v in q.results}

    def made_branches(self) -> set[Equation]:
        """Change the block; the equations that are new in it."""
        made: set[Equation] = set()
        tried: set[tuple[int, _Test]] = set()
        for number, tests in reversed(self.asked.items()):
            for test in tests:
                equation = self.equations.get(number)
                if equation is None or equation in made or (number, test) in tried:
                    continue
                group = self._group(number, test)
                tried.update((n, test) for n in group)
                if self._branch(group, test):
                    made.add(self.equations[number])
        pairs = ((self.before.get(n), q) for n, q in self.equations.items())
        self.block.equations = [q for two in pairs for q in two if q is not None]
        return made

    def _group(self, last: int, test: _Test) -> list[int]:
        """An equation, and those in a row before it that ask the same over the same
        shape. All will be where the last one is: nothing between may read them."""
        group = [last]
        shape = shape_key(self.equations[last].results[0].shape)
        between: set[Value] = set()
        for number in reversed(range(max(0, last - REACH), last)):
            equation = self.equations.get(number)
            if equation is None:
                continue
            results = equation.results
            asks = test in self.asked.get(number, ())
            if asks and shape_key(results[0].shape) == shape:
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
        own = [self.equations[n] for n in group]
        within = Counter(v for n in group for v in self.reads[n])
        outer = [v for q in own for v in q.results if self.readers[v] > within[v]]
        if not outer or self._is_in_blocks(outer[0].shape, test):
            return False
        no, yes = (_side_of(own, outer, test, holds=holds) for holds in (False, True))
        ours, theirs = (
            {v for q in side.equations for v in values_read(q)} | {test.value}
            for side in (no, yes)
        )
        moved = self._moved(ours, theirs, within), self._moved(theirs, ours, within)
        gone = moved[0] | moved[1]
        if not self._may_wait(gone, group[-1]):
            moved, gone = (set(), set()), set()
        works = [sum(_work(self.equations[n]) for n in each) for each in moved]
        if not (_pays(own, no, works) or _pays(own, yes, works[::-1])):
            return False
        for side, each in zip((no, yes), moved, strict=True):
            side.equations[:0] = [self.equations[n] for n in sorted(each)]
        for n in gone.union(group[:-1]):
            del self.equations[n]
        branch = Branch(self._selector(group[-1], test), (no, yes))
        self.equations[group[-1]] = Equation(tuple(outer), branch, own[-1].node)
        return True

    def _is_in_blocks(self, shape: Shape, test: _Test) -> bool:
        """Whether the loop around may go through rows in blocks, all steps for each. It
        does if there is nothing but one loop in a step, and so no test."""
        if test.value in self.makers or test.value in self.block.parameters:
            return False
        is_large = _count(shape) >= BLOCKED or bool(free_symbols(*shape))
        return self.is_step and is_large

    def _moved(
        self, own: set[Value], others: set[Value], within: Counter[Value]
    ) -> set[int]:
        """The equations that a side alone needs, where it reads its own values, and
        `within` is how many of the equations that become the branch read a value."""
        moved: set[int] = set()
        seen = within.copy()
        pending = [*(own - others)]
        while pending:
            number = self.makers.get(pending.pop(), -1)
            equation = self.equations.get(number)
            if equation is None or number in moved:
                continue
            if any(v in others or seen[v] < self.readers[v] for v in equation.results):
                continue
            if _may_move(equation, self.entry):
                moved.add(number)
                seen.update(self.reads[number].keys())
                pending += self.reads[number]
        return moved

    def _may_wait(self, moved: set[int], number: int) -> bool:
        """Whether the large values that equations read are there later too, and do not
        have to be kept for them."""
        large = [v for n in moved for v in self.reads[n] if not is_small(v.type)]
        return all(self.last[v] >= number or self.last[v] in moved for v in large)

    def _selector(self, number: int, test: _Test) -> Value:
        """The value of a test, which may be an element of another one."""
        if not test.at:
            return test.value
        own, asked = self.equations[number], test.value[tuple(map(e.index, test.at))]
        selector = Value(f"{own.results[0].name}_test", TensorType(dtypes.bool_))
        self.before[number] = Equation((selector,), d.Pointwise((asked,)), own.node)
        return selector


def _side_of(
    own: Sequence[Equation], outer: Iterable[Value], test: _Test, *, holds: bool
) -> Block:
    """Equations where it is known whether a test holds, as far as what is read of them
    elsewhere needs them. Their values are others than those of the other side."""
    block = Block([], [], [*outer])
    others: dict[Value, Value] = {}
    for equation in own:
        assert isinstance(equation.definition, d.Pointwise)
        roots = _side(equation.definition.elements, test, holds=holds)
        name = "true" if holds else "false"
        results = tuple([Value(f"{v.name}_{name}", v.type) for v in equation.results])
        others |= zip(equation.results, results, strict=True)
        chosen = Equation(results, d.Pointwise(tuple(roots)), equation.node)
        block.equations.append(chosen)
    replace_values(block, others)
    drop_unread(block)
    return block


def _pays(own: Sequence[Equation], side: Block, moved: Sequence[int]) -> bool:
    """Whether enough is saved on a side of what equations do; `moved` is the work that
    goes to this side, and to the other one."""
    whole, rest = (sum(_cost(q.definition) for q in x) for x in (own, side.equations))
    count = _count(own[0].results[0].shape)
    saved = (whole - rest) * count + moved[1]
    is_dear = whole - rest >= DEAR or moved[1] >= LEAST
    return is_dear and saved >= LEAST and saved * SHARE >= whole * count + sum(moved)
