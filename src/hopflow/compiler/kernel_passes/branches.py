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
what is computed of it stays fused with it. An equation that one side alone needs goes
into that side, if it cannot stop the program.

Loops are not merged across a branch, and what would change is more than the time: how
many partial sums a vector loop has, and so the last bits of a sum of floats, depends on
the loops that it is merged with. So equations whose loops may be merged with each other
become one branch together, or stay; and no loop gets a neighbour that it may be merged
with and was apart from.

A program stays as it is where little is saved (`DEAR`, `LEAST`), and where a loop may
go through rows in blocks, all steps for each.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import mul
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.kernel_program.definitions import (
    Cut,
    Effect,
    Pointwise,
    Prefix,
    Reduction,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
    equations,
)
from hopflow.compiler.kernel_program.registers import is_short, is_small, shape_key
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    elements,
    operands,
    replace_values,
    values_read,
)
from hopflow.graph.types import Shape, TensorType, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, condition_of
from hopflow.loop_ir.kernels import Library
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Symbol, free_symbols

__all__ = ["branches"]

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
MEMBERS: Final = 32
"""So many equations on either side of one may become a branch with it."""
REACH: Final = 32
"""How many equations away a neighbour is looked for."""
BLOCKED: Final = 1 << 14
"""Elements of an array that a loop may go through in blocks, all steps for each."""
UNKNOWN: Final = 64
"""What a size that only a run knows is taken for."""


def branches(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    entry = {s for v in program.block.parameters for s in free_symbols(*v.shape)}
    scope = _Scope(
        entry.union(program.symbols),
        frozenset(_views(program.block)),
    )
    pending = [_Place(program.block)]
    while pending:
        place = pending.pop()
        pending += _BlockOfEquations(place, scope).changed()


def _views(block: Block) -> Iterator[Value]:
    for equation in equations(block):
        own = equation.definition
        if isinstance(own, Pointwise) and own.is_view:
            yield from equation.results


@dataclass(frozen=True, slots=True)
class _Scope:
    """What holds in all of a program.

    entry   the sizes that a call knows
    views   the values that have no memory of their own
    """

    entry: Collection[Symbol]
    views: Collection[Value]


class _Place(NamedTuple):
    """A block to be changed.

    loop    whose body it is, if it is that of a loop with a count
    depth   how many branches of this pass it is in
    """

    block: Block
    loop: Loop | None = None
    depth: int = 0


# --- what a test chooses --------------------------------------------------------------


class _Test(NamedTuple):
    """The element that a select asks, which is the same for all indices."""

    value: Value
    at: tuple[int, ...]


class _Choice(NamedTuple):
    """The roots of expressions where a test is false, and where it is true."""

    test: Expr
    sides: tuple[list[Expr], list[Expr]]


def _test_of(node: Expr) -> tuple[_Test, Expr, bool] | None:
    """What a node selects by, if it does by one element; and if by its contrary."""
    if node.op != "select":
        return None
    test, is_contrary = node.args[0], False
    while test.op == "not":
        test, is_contrary = test.args[0], not is_contrary
    if test.op != "element" or condition_of(test) is not None:
        return None
    if not is_small(test.attr.type) or not all(i.is_const for i in test.args):
        return None
    at = tuple([i.attr for i in test.args])
    sizes = test.attr.shape
    if not all(0 <= i < n for i, n in zip(at, sizes, strict=True)):
        return None  # it is read for no element
    return _Test(test.attr, at), test, is_contrary


def _choices(roots: Sequence[Expr]) -> Iterator[_Choice]:
    """What each of the tests in expressions chooses, the outermost first."""
    order = nodes(*roots)
    tests: dict[_Test, Expr] = {}
    asked: dict[Expr, tuple[_Test, bool]] = {}
    for node in reversed(order):
        found = _test_of(node)
        if found is not None:
            test, element, is_contrary = found
            tests.setdefault(test, element)
            asked[node] = test, is_contrary
    for test in list(tests)[:TESTS]:
        own = {n: is_contrary for n, (t, is_contrary) in asked.items() if t == test}
        no = _side(roots, order, own, holds=False)
        yield _Choice(tests[test], (no, _side(roots, order, own, holds=True)))


def _side(
    roots: Sequence[Expr],
    order: Sequence[Expr],
    selects: dict[Expr, bool],
    *,
    holds: bool,
) -> list[Expr]:
    """Expressions where the test of some selects is known; `selects` tells for each
    whether it asks for the contrary."""
    values: dict[Expr, Expr] = {}
    for node in order:
        args = tuple([values[a] for a in node.args])
        if node in selects:
            values[node] = args[1] if holds is not selects[node] else args[2]
        else:
            values[node] = e.with_args(node, args)
    return [values[root] for root in roots]


# --- what equations cost, and what they do --------------------------------------------


def _count(shape: Iterable[object]) -> int:
    return prod(n if isinstance(n, int) else UNKNOWN for n in shape)


def _work(equation: Equation) -> int:
    """About how many instructions an equation takes."""
    total = 0
    pending = [(equation, 1)]
    while pending:
        one, times = pending.pop()
        own = one.definition
        if isinstance(own, Region):
            steps = _count([own.length]) if isinstance(own, Loop) else 1
            inner = [q for block in blocks(own) for q in block.equations]
            pending += [(q, times * steps) for q in inner]
            continue
        shape = one.results[0].shape if one.results else ()
        space = own.space if isinstance(own, Reduction) else ()
        each = 64 if isinstance(own, Library) else 0
        each += sum(map(weight, nodes(*all_expressions(own))))
        total += times * each * _count([*shape, *space])
    return total


def _may_move(equation: Equation, entry: Collection[Symbol]) -> bool:
    """Whether nobody can tell whether an equation is computed, but by its results. What
    takes memory of a size that a call does not know may fail for want of it."""
    pending = [equation]
    while pending:
        one = pending.pop()
        own = one.definition
        if one.symbol is not None or bool(getattr(own, "checks", ())):
            return False
        if any(s not in entry for v in one.results for s in free_symbols(*v.shape)):
            return False
        match own:
            case Loop(ticks=False, body=body):
                pending += body.equations
            case Branch(blocks=inner):
                pending += [q for block in inner for q in block.equations]
            case Library(can_fail=False):
                pass
            case Pointwise() | Cut() | Reduction() | Prefix():
                pass
            case Effect() if one is not equation:
                pass
            case _:
                return False
    return True


def _is_transparent(equation: Equation) -> bool:
    """Whether an equation writes nothing that loops are not merged across."""
    match equation.definition:
        case Pointwise(is_view=is_view):
            return is_view or is_small(equation.results[0].type)
        case Effect(checks=checks):
            return not checks
    return False


def _extents(equation: Equation, *, first: bool) -> set[object] | None:
    """The extents that the first or the last outermost loop of an equation may have;
    None: any."""
    shapes: list[Shape]
    match equation.definition:
        case Pointwise():
            shapes = [equation.results[0].shape]
        case Reduction(space=space):
            shapes = [equation.results[0].shape, space]
        case Effect(checks=checks):
            if not first:
                return set()  # a test follows
            shapes = [c.shape for c in checks if not is_short(c.shape)]
        case Library():
            return None if first else set()
        case Branch():
            return set()
        case While(carry=carry) | Loop(carry=carry, independent=False):
            # Before it the carry may be copied by loops.
            shapes = [v.shape for v in carry] if first else []
        case _:
            return None
    extents: set[object] = set()
    for shape in shapes:
        outermost = tuple([n for n in shape if not is_one(n)])[:1]
        if outermost:
            extents.add(shape_key(outermost))
    return extents


# --- the equations of a block ---------------------------------------------------------


class _Member(NamedTuple):
    """An equation of a branch on one side of it: what it computes there, if anything
    there needs it, and what that costs for an element less than the whole does."""

    equation: Equation
    elements: tuple[Expr, ...]
    read: dict[Value, None]
    is_needed: bool
    saved: int


class _Side(NamedTuple):
    """What is computed on a side of a branch.

    members   the equations that become the branch
    moved     by number those before them that only this side needs
    work      that of the moved ones
    """

    members: list[_Member]
    moved: set[int]
    work: int


class _BlockOfEquations:
    """Finds what may be branches in one block.

    Equations whose loops may be merged become one branch, or none of them does.

    equations   those of the block; None: it has gone into a branch
    before      what is new before an equation, by its number
    reads       by number the values that an equation reads
    readers     how many equations, or results of the block, read a value
    last        the last equation that reads a value, by number
    makers      the number of the equation that a value is a result of
    pieces      the values that are read under conditions: they may be parts of others,
                and are made in their memory then, but not in a branch
    """

    def __init__(self, place: _Place, scope: _Scope) -> None:
        self.place, self.scope = place, scope
        self.equations: list[Equation | None] = [*place.block.equations]
        self.before: dict[int, Equation] = {}
        self.reads: list[dict[Value, None]] = []
        self.readers: dict[Value, int] = {}
        self.last: dict[Value, int] = {}
        self.makers: dict[Value, int] = {}
        self.pieces: set[Value] = set()

    def changed(self) -> Iterator[_Place]:
        """Change the block, and give those in it."""
        block, depth = self.place.block, self.place.depth
        made: set[Equation] = set()
        if depth < DEEPEST and any(map(_asks, block.equations)):
            self._note_reads()
            made.update(self._branches())
            block.equations = [
                q
                for n, one in enumerate(self.equations)
                for q in (self.before.get(n), one)
                if q is not None
            ]
        for equation in block.equations:
            own = equation.definition
            within = depth + 1 if equation in made else depth
            loop = own if isinstance(own, Loop) and not own.independent else None
            for inner in blocks(own):
                yield _Place(inner, loop, within)

    def _note_reads(self) -> None:
        block = self.place.block
        for number, equation in enumerate(block.equations):
            self.makers.update(dict.fromkeys(equation.results, number))
            self.reads.append(values_read(equation))
            for value in self.reads[-1]:
                self.readers[value] = self.readers.get(value, 0) + 1
                self.last[value] = number
            own = equation.definition
            if isinstance(own, Pointwise | Cut):
                read = elements(all_expressions(own))
                self.pieces.update(x.attr for x in read if condition_of(x) is not None)
        for value in block.results:
            self.readers[value] = self.readers.get(value, 0) + 1
            self.last[value] = len(block.equations)

    def _branches(self) -> Iterator[Equation]:
        tried: set[int] = set()
        for number in reversed(range(len(self.equations))):
            equation = self.equations[number]
            if equation is None or number in tried or not _asks(equation):
                continue
            members = self._run(number)
            tried.update(members or ())
            made = self._branch(members) if members else None
            if made is not None:
                yield made

    def _may_branch(self, equation: Equation) -> bool:
        own = equation.definition
        if not isinstance(own, Pointwise) or own.checks or own.is_view:
            return False
        if equation.symbol is not None or not self.pieces.isdisjoint(equation.results):
            return False
        used = free_symbols(*equation.results[0].shape)
        return all(s in self.scope.entry for s in used)

    def _run(self, number: int) -> list[int] | None:
        """The equations that become a branch together, if one of them does."""
        if self._is_transparent(number):
            if self._may_merge(self._neighbour(number, -1), self._neighbour(number, 1)):
                return None  # loops are merged across it, but not across a branch
            members = [number]
        else:
            before, after = (self._merged(number, step) for step in (-1, 1))
            if before is None or after is None:
                return None
            members = [*reversed(before), number, *after]
        own = [self.equations[n] for n in members]
        if not all(q is not None and self._may_branch(q) for q in own):
            return None
        results = {v for q in own if q is not None for v in q.results}
        for n in range(members[0], members[-1]):
            is_between = n not in members and self.equations[n] is not None
            if is_between and not results.isdisjoint(self.reads[n]):
                return None
        return members

    def _merged(self, number: int, step: int) -> list[int] | None:
        """The equations on one side that an equation may be merged with, the nearest
        first; None: there are many."""
        found: list[int] = []
        while len(found) < MEMBERS:
            near = self._neighbour(number, step)
            pair = (near, number) if step < 0 else (number, near)
            if not self._may_merge(*pair):
                return found
            if near is None:
                return None
            found.append(near)
            number = near
        return None

    def _branch(self, members: Sequence[int]) -> Equation | None:
        """Make equations one branch, if that pays."""
        own = [q for n in members if (q := self.equations[n]) is not None]
        outer = self._read_outside(members, own)
        if not outer:
            return None
        roots = [q.definition.elements for q in own]  # type: ignore[union-attr]
        costs = [sum(map(weight, nodes(*each))) for each in roots]
        for choice in _choices([root for each in roots for root in each]):
            if self._is_in_blocks(own, choice):
                continue
            no, yes = (_members(own, costs, side, outer) for side in choice.sides)
            asked = choice.test.attr
            read = [{v for m in side for v in m.read} | {asked} for side in (no, yes)]
            sides = (
                self._with_moved(members, no, read[1]),
                self._with_moved(members, yes, read[0]),
            )
            if not self._keeps_neighbours(members, sides):
                sides = _Side(no, set(), 0), _Side(yes, set(), 0)
            if _pays(own, costs, sides):
                return self._written(members, choice.test, outer, sides)
        return None

    def _read_outside(
        self, members: Sequence[int], own: Sequence[Equation]
    ) -> list[Value]:
        """The results of equations that others read."""
        within = Counter(v for n in members for v in self.reads[n])
        return [v for q in own for v in q.results if self.readers.get(v, 0) > within[v]]

    def _is_in_blocks(self, own: Sequence[Equation], choice: _Choice) -> bool:
        """Whether the loop around may go through rows in blocks, all steps for each. It
        does if there is nothing but one loop in a step, and so no test."""
        if self.place.loop is None:
            return False
        test = choice.test.attr
        if test in self.makers or test in self.place.block.parameters:
            return False
        types = [v.type for q in own for v in q.results]
        return any(not t.is_static or _count(t.shape) >= BLOCKED for t in types)

    # --- what goes into a side ---

    def _with_moved(
        self,
        members: Sequence[int],
        side: list[_Member],
        others: Collection[Value],
    ) -> _Side:
        """A side with the equations that it alone needs; `others` are the values that
        the other one reads."""
        moved: set[int] = set()
        within = Counter(v for n in members for v in self.reads[n])
        left = {v: self.readers[v] - within[v] for m in side for v in m.read}
        pending = [v for v in left if v not in others]
        work = 0
        while pending:
            maker = self.makers.get(pending.pop())
            if maker is None or maker in moved or maker >= members[-1]:
                continue
            equation = self.equations[maker]
            if equation is None or maker in members:
                continue
            if any(left.get(v, self.readers.get(v, 0)) for v in equation.results):
                continue
            if not _may_move(equation, self.scope.entry):
                continue
            moved.add(maker)
            work += _work(equation)
            for value in self.reads[maker]:
                left[value] = left.get(value, self.readers[value]) - 1
                if value not in others:
                    pending.append(value)
        if all(self._may_wait(n, members[0], moved) for n in moved):
            return _Side(side, moved, work)
        return _Side(side, set(), 0)

    def _may_wait(self, maker: int, number: int, moved: Collection[int]) -> bool:
        """Whether the large values that an equation reads are there later too, and do
        not have to be kept for it."""
        return all(
            is_small(v.type) or self.last[v] >= number or self.last[v] in moved
            for v in self.reads[maker]
        )

    # --- which loops are next to each other ---

    def _is_transparent(self, number: int) -> bool:
        one = self.equations[number]
        return one is not None and _is_transparent(one)

    def _neighbour(self, number: int, step: int) -> int | None:
        """The next equation with a loop; -1: there is none; None: it is too far."""
        for _ in range(REACH):
            number += step
            if not 0 <= number < len(self.equations):
                return -1
            one = self.equations[number]
            if one is not None and not _is_transparent(one):
                return number
        return None

    def _may_merge(
        self,
        first: int | None,
        second: int | None,
        read: Collection[Value] | None = None,
    ) -> bool:
        """Whether the loops of two equations may be merged if they are neighbours;
        `read` is what the second reads, if it is less than in the block."""
        if first is None or second is None:
            return True
        if first == -1 or second == -1:
            return False
        a, b = self.equations[first], self.equations[second]
        assert a is not None
        assert b is not None
        if isinstance(b.definition, Library):
            views = self.scope.views
            if not any(v in views for v in operands(b.definition)):
                return False
        ours, theirs = _extents(a, first=False), _extents(b, first=True)
        if ours == set() or theirs == set():
            return False
        if ours is not None and theirs is not None and ours.isdisjoint(theirs):
            return False
        if not all(is_small(v.type) for v in a.results):
            return True
        # Not if the second needs what the first has only at its end.
        known = set(a.results)
        for n in range(first + 1, min(second, first + REACH)):
            one = self.equations[n]
            if one is not None and not known.isdisjoint(self.reads[n]):
                known.update(one.results)
        return known.isdisjoint(self.reads[second] if read is None else read)

    def _keeps_neighbours(
        self, members: Sequence[int], sides: tuple[_Side, _Side]
    ) -> bool:
        """Whether each loop keeps the neighbours that it might be merged with, and gets
        no others of the kind, if equations go into the sides of a branch."""
        both = sides[0].moved | sides[1].moved
        for n in sorted(both):
            if self._is_transparent(n):
                continue
            before, after = self._neighbour(n, -1), self._neighbour(n, 1)
            for pair in ((before, n), (n, after)):
                together = any(side.moved.issuperset(pair) for side in sides)
                if not together and self._may_merge(*pair):
                    return False
            if before in both:
                continue
            while after in both:  # these are next to each other if those between go
                after = self._neighbour(after, 1)
            is_new = after is None or after < members[0]
            if is_new and self._may_merge(before, after):
                return False
        return all(self._gets_no_neighbours(members, side) for side in sides)

    def _gets_no_neighbours(self, members: Sequence[int], side: _Side) -> bool:
        loops = [n for n in sorted(side.moved) if not self._is_transparent(n)]
        for a, b in pairwise(loops):
            if self._neighbour(a, 1) != b and self._may_merge(a, b):
                return False
        if not loops or self._is_transparent(members[0]):
            return True
        # What comes first here may need less than what comes first in the block did.
        first = next(m for m in side.members if m.is_needed)
        return not self._may_merge(loops[-1], members[0], first.read)

    # --- writing ---

    def _written(
        self,
        members: Sequence[int],
        test: Expr,
        outer: Sequence[Value],
        sides: tuple[_Side, _Side],
    ) -> Equation:
        """The branch, in the place of the last of the equations that it is made of."""
        [*others, number] = members
        last = self.equations[number]
        assert last is not None
        no, yes = (
            self._block(name, outer, side)
            for name, side in zip(("false", "true"), sides, strict=True)
        )
        selector = test.attr
        if selector.type.ndim:
            selector = Value(f"{outer[0].name}_test", TensorType(dtypes.bool_))
            asked = Pointwise((test,))
            self.before[number] = Equation((selector,), asked, last.node)
        made = Equation(tuple(outer), Branch(selector, (no, yes)), last.node)
        gone = [*others, *sides[0].moved, *sides[1].moved]
        read = {v: None for n in (*gone, number) for v in self.reads[n]}
        for value in read:
            self.last[value] = max(self.last[value], number)
        for n in gone:
            self.equations[n] = None
        self.equations[number], self.reads[number] = made, read
        self.makers.update(dict.fromkeys(outer, number))
        return made

    def _block(self, name: str, outer: Sequence[Value], side: _Side) -> Block:
        """The block of a side, whose values are others than those of the other side."""
        block = Block([])
        for n in sorted(side.moved):
            one = self.equations[n]
            assert one is not None
            block.equations.append(one)
        values: dict[Value, Value] = {}
        for member in side.members:
            if member.is_needed:
                results, node = member.equation.results, member.equation.node
                own = [Value(f"{v.name}_{name}", v.type) for v in results]
                values |= zip(results, own, strict=True)
                definition = Pointwise(member.elements)
                block.equations.append(Equation(tuple(own), definition, node))
        block.results = list(outer)
        replace_values(block, values)
        return block


def _asks(equation: Equation) -> bool:
    own = equation.definition
    return isinstance(own, Pointwise) and any(
        _test_of(node) is not None for node in nodes(*own.elements)
    )


def _members(
    own: Sequence[Equation],
    costs: Sequence[int],
    roots: Sequence[Expr],
    outer: Iterable[Value],
) -> list[_Member]:
    """What equations compute on a side, whose expressions are these."""
    found: list[_Member] = []
    needed = set(outer)
    end = len(roots)
    for equation, cost in zip(reversed(own), reversed(costs), strict=True):
        start = end - len(equation.results)
        mine, end = tuple(roots[start:end]), start
        is_needed = not needed.isdisjoint(equation.results)
        order = nodes(*mine) if is_needed else []
        read = dict.fromkeys([n.attr for n in order if n.op == "element"])
        needed.update(read)
        saved = cost - sum(map(weight, order))
        found.append(_Member(equation, mine, read, is_needed, saved))
    return found[::-1]


def _pays(
    own: Sequence[Equation], costs: Sequence[int], sides: tuple[_Side, _Side]
) -> bool:
    """Whether enough is saved where a test is true, or where it is false."""
    counts = [_count(q.results[0].shape) for q in own]
    total = sum(map(mul, costs, counts)) + sides[0].work + sides[1].work
    for side, other in (sides, sides[::-1]):
        each = [m.saved for m in side.members]
        saved = sum(map(mul, each, counts)) + other.work
        is_dear = max(each) >= DEAR or other.work >= LEAST
        if is_dear and saved >= LEAST and saved * SHARE >= total:
            return True
    return False
