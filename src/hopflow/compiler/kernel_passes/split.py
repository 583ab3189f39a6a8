"""Cuts definitions at tests that hold for the first indices of an axis only.

    v0 = select(i0 < n, x[i0] if i0 < n, y[i0 - n] if not i0 < n) for i0 < n + m

    v0 = (x[i0] where i0 < n, y[i0 - n] elsewhere) for i0 < n + m

A piece has no such tests, so that it reads adjacent elements of memory and computes
only what its indices need. A cut is made only at a test that decides which elements are
read, or that selects between expensive expressions: a cheap `select` costs less than a
loop of its own.

A number that only the run knows may shift the index:

    v0 = x[max(i0 - w[step], 0)] for i0 < n

    v0 = (x[max(i0 - w[step], 0)] where i0 < select(is_near(w[step]), 0, n),
          x[0] where i0 < w[step], x[i0 - w[step]] elsewhere) for i0 < n

The first piece is empty unless `i0 - w[step]` could wrap around.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.kernel_program.definitions import Cut, Pointwise, axes
from hopflow.compiler.kernel_program.program import KernelProgram, Loop, equations
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.kernel_program.sizes import at_least, size_of_expr
from hopflow.graph.types import Shape, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.walk import nodes, same
from hopflow.symbolic.size import Size

MOST: Final = 12
"""At most so many pieces of one definition, each a loop: nine are a plane with its
edges."""
LARGEST: Final = 600
"""At most so many nodes of all pieces, unless there were more before."""
VECTOR: Final = 32
"""About the number of bytes of a vector."""
REST: Final = 8
"""Remaining elements, which fill no vector, cost at most as much as so many vectors."""
SHORT: Final = 64
"""Elements of a row that may all be pieces: then vectors go along another axis."""
BRIEF: Final = 256
"""Elements that take less time than the loops over pieces whose lengths only the run
knows: some 40 ns each."""
DEAR: Final = 20
"""Instructions of the sides of a `select` that are worth a cut."""
_FAR: Final = 1 << 60
"""Positions beyond it are equivalent: sums of an index and a constant below it do not
wrap around."""


def split(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    steps = {
        q.definition.counter: q.definition.length
        for q in equations(program.block)
        if isinstance(q.definition, Loop)
    }
    for block in all_blocks(program.block):
        for equation in block.equations:
            definition = equation.definition
            if (
                not isinstance(definition, Pointwise)
                or definition.is_view
                or definition.checks
            ):
                continue
            if not is_small(equation.results[0].type):
                shape = equation.results[0].shape
                equation.definition = _split(definition, _Space(shape, steps))


class _Space(NamedTuple):
    """The indices of a definition, and the counters of loops with the numbers of their
    steps."""

    shape: Shape
    steps: Mapping[Var, Size]


class _Test(NamedTuple):
    """A test that equals `holds` for the indices less than `at` along one axis, and its
    opposite for the others, provided that the number `near` is at most `_FAR` in
    magnitude."""

    axis: int
    at: Expr
    holds: bool
    near: Expr | None = None


@dataclass(eq=False, slots=True)
class _Piece:
    """Elements, or two pieces of them.

    order   the nodes of the elements
    tests   the nodes that are such tests
    facts   the enclosing cuts, each with whether the piece is below it
    relies  whether a test has been decided, or cut at, that needs a number to be near
    """

    elements: tuple[Expr, ...]
    order: Sequence[Expr]
    tests: Mapping[Expr, _Test]
    facts: tuple[tuple[_Test, bool], ...] = ()
    relies: bool = False
    parts: "tuple[_Test, _Piece, _Piece] | None" = None

    def definition(self) -> Pointwise | Cut:
        if self.parts is None:
            return Pointwise(self.elements)
        test, below, above = self.parts
        return Cut(test.axis, test.at, below.definition(), above.definition())


def _split(definition: Pointwise, space: _Space) -> Pointwise | Cut:
    """Return the definition in pieces, cut breadth-first, if it has such tests."""
    elements = definition.elements
    order = nodes(*elements)
    if any([node.op in _CLAMPED for node in order]):
        elements = _with_tests(elements, order, space)
        order = nodes(*elements)
    compares = any([node.op in _COMPARED for node in order])
    tests = _tests(order, space) if compares else {}
    if not tests:
        return definition
    whole = _Piece(elements, order, tests)
    guard = _guard(whole)
    near = whole if guard is None else guard[2]
    waiting, pieces, size = deque([near]), 1 if guard is None else 2, len(order)
    most, relies = max(size, LARGEST), False
    while waiting:
        piece = waiting.popleft()
        test = _best_test(piece)
        if test is None:
            continue
        is_alone = _is_each_alone(piece, test.axis, space.shape)
        if not is_alone and (pieces >= MOST or _tears_rows(piece, test, space.shape)):
            continue
        below, above = (
            _assumed(piece, test, is_below, space) for is_below in (True, False)
        )
        grown = size + len(below.order) + len(above.order) - len(piece.order)
        if grown > most:
            continue
        piece.parts, size, pieces = (test, below, above), grown, pieces + 1
        relies = relies or below.relies or above.relies
        waiting += (below, above)
    if near.parts is None:
        return definition
    whole.parts = guard if relies else near.parts
    return whole.definition()


def _guard(whole: _Piece) -> "tuple[_Test, _Piece, _Piece] | None":
    """Return the cut that keeps what relies on a number being near from the numbers
    that are not; None: no test needs it.

    The piece below has all indices if the number is far, and none if it is near. The
    tests of the piece above are those that need this number, or none, to be near.
    """
    numbers = [t.near for t in whole.tests.values() if t.near is not None]
    if not numbers:
        return None
    near, far = numbers[0], e.index(_FAR)
    is_near = e.binary(
        "and", e.compare("ge", near, e.index(-_FAR)), e.compare("le", near, far)
    )
    tests = {x: t for x, t in whole.tests.items() if t.near in (None, near)}
    axis = next(t.axis for t in tests.values() if t.near is near)
    guard = _Test(axis, e.select(is_near, e.index(0), far), holds=True)
    order = whole.order
    return (
        guard,
        _Piece(whole.elements, order, {}),
        _Piece(whole.elements, order, tests),
    )


def _with_tests(
    elements: Sequence[Expr], order: Sequence[Expr], space: _Space
) -> tuple[Expr, ...]:
    """Return the elements with `select(i + 1 <= n, i + 1, n)` for `min(i + 1, n)` in
    the indices of reads."""
    forms, uniform = _forms(order, space)
    reads = nodes(*[a for node in order if node.op == "element" for a in node.args])
    clamps = {node: _CLAMPED[node.op] for node in reads if node.op in _CLAMPED}
    values: dict[Expr, Expr] = {}
    for node in order:
        args = [values[a] for a in node.args]
        values[node] = e.with_args(node, tuple(args))
        if node in clamps and _varies_and_stays(node.args, forms, uniform):
            test = e.compare(clamps[node], *args)
            values[node] = e.select(test, *args)
    return tuple([values[x] for x in elements])


def _varies_and_stays(
    args: Sequence[Expr], forms: Mapping[Expr, "_Form"], uniform: Collection[Expr]
) -> bool:
    """Return whether one operand has a form, and the other is the same everywhere."""
    x, y = args
    return (x in forms and y in uniform) or (y in forms and x in uniform)


_CLAMPED: Final = {"min": "le", "max": "ge"}


def _tears_rows(piece: _Piece, test: _Test, shape: Shape) -> bool:
    """Return whether a cut of short rows leaves so many elements which fill no vector
    that each row takes far more steps."""
    ends = _ends(piece, test.axis, shape)
    if ends is None or not test.at.is_const or not ends[0] <= test.at.attr <= ends[1]:
        return False
    low, high = ends
    lanes = VECTOR // max(x.dtype.itemsize for x in piece.elements)

    def steps(n: int) -> int:
        return n // lanes + min(n % lanes, REST)

    at: int = test.at.attr
    return 2 * (steps(at - low) + steps(high - at)) > 3 * steps(high - low)


def _is_each_alone(piece: _Piece, axis: int, shape: Shape) -> bool:
    """Return whether all elements of a row of a piece are to be pieces: there is a test
    between each two of them."""
    ends = _ends(piece, axis, shape)
    if ends is None or ends[1] - ends[0] > SHORT:
        return False
    tested = {
        t.at.attr for t in piece.tests.values() if t.axis == axis and t.at.is_const
    }
    return tested.issuperset(range(ends[0] + 1, ends[1]))


def _ends(piece: _Piece, axis: int, shape: Shape) -> tuple[int, int] | None:
    """Return the first index of a piece along the last of several axes, and the one
    after its last; None: it is another axis, or they are not known."""
    long = [axis for axis, n in enumerate(shape) if not is_one(n)]
    low, high = 0, shape[axis]
    if axis != long[-1] or len(long) == 1 or not isinstance(high, int):
        return None
    for cut, is_below in piece.facts:
        if cut.axis == axis and cut.at.is_const:
            low, high = (low, cut.at.attr) if is_below else (cut.at.attr, high)
    return low, high


def _assumed(piece: _Piece, test: _Test, is_below: bool, space: _Space) -> _Piece:
    """Return the piece on one side of a cut, without the tests that the cut decides."""
    facts = (*piece.facts, (test, is_below))
    relies = piece.relies or test.near is not None
    values: dict[Expr, Expr] = {}
    for node in piece.order:
        other = piece.tests.get(node)
        decided = None if other is None else _decided(other, facts)
        if other is None or decided is None:
            args = tuple([values[a] for a in node.args])
            values[node] = e.with_args(node, args)
        else:
            values[node] = e.const(decided, dtypes.bool_)
            relies = relies or other.near is not None
    elements = tuple([values[x] for x in piece.elements])
    if test.near is not None:  # what was clamped has become linear in the index
        elements = _with_tests(elements, nodes(*elements), space)
        order = nodes(*elements)
        found = _tests(order, space)
        tests = {x: t for x, t in found.items() if t.near in (None, test.near)}
    else:
        order = nodes(*elements)
        tests = {values[x]: t for x, t in piece.tests.items() if x in values}
        tests = {x: t for x, t in tests.items() if not x.is_const}
    return _Piece(elements, order, tests, facts, relies)


def _decided(test: _Test, facts: Sequence[tuple[_Test, bool]]) -> bool | None:
    """Return the value of a test between cuts if it is the same everywhere."""
    for cut, is_below in facts:
        if cut.axis != test.axis:
            continue
        numbers = cut.at.is_const and test.at.is_const
        if numbers and (cut.at.attr < test.at.attr) is is_below:
            return test.holds is is_below
        if same(cut.at, test.at):
            return test.holds is is_below
    return None


# --- the tests to cut at --------------------------------------------------------------


def _best_test(piece: _Piece) -> _Test | None:
    """Return the test to cut at: of the first axis, and of these the one that is
    nearest to the elements."""
    if not piece.tests:
        return None
    candidates = {x for x in piece.order if x in piece.tests}
    worth = _worth(piece.order, candidates) if candidates else candidates
    if not worth:
        return None
    reached: dict[Expr, None] = dict.fromkeys(piece.elements)
    pending = deque(reached)
    while pending:
        node = pending.popleft()
        fresh = dict.fromkeys([a for a in node.args if a not in reached])
        reached |= fresh
        pending += fresh
    tests = [piece.tests[x] for x in reached if x in worth]
    return min(tests, key=lambda test: test.axis)


def _worth(order: Sequence[Expr], tests: set[Expr]) -> set[Expr]:
    """Return the `tests` that decide which elements are read, or select between
    expensive sides."""
    deciding = [a for node in order if node.op == "element" for a in node.args]
    costs: dict[Expr, int] = {}
    for node in order:
        costs[node] = min(DEAR, weight(node) + sum([costs[a] for a in node.args]))
        if node.op == "select":
            test, *sides = node.args
            if sum([costs[a] for a in sides]) >= DEAR:
                deciding.append(test)
    return tests.intersection(nodes(*deciding))


def _tests(order: Sequence[Expr], space: _Space) -> dict[Expr, _Test]:
    """Return the nodes that are such tests."""
    forms, uniform = _forms(order, space)
    tests: dict[Expr, _Test] = {}
    for node in order:
        if node in uniform:
            continue
        if node.op in _COMPARED and node.args[0].dtype is dtypes.int64:
            test = _test(node, forms, uniform, space.shape)
            if test is not None and not _is_brief(test, space.shape):
                tests[node] = test
    return tests


def _is_brief(test: _Test, shape: Shape) -> bool:
    """Return whether only the run knows where a test changes, and there are so few
    elements that loops over the pieces take longer than to gather them."""
    if test.at.is_const:
        return False
    row = shape[test.axis :]
    return all(isinstance(n, int) for n in row) and prod(map(int, row)) <= BRIEF


def _forms(
    order: Sequence[Expr], space: _Space
) -> tuple[dict[Expr, "_Form"], set[Expr]]:
    """Return the forms of nodes, and the nodes that are the same for all indices."""
    forms: dict[Expr, _Form] = {
        axis: _Form(k, 1, 0) for k, axis in enumerate(axes(len(space.shape)))
    }
    uniform: set[Expr] = set()
    for node in order:
        if node in forms:
            continue
        if _is_uniform(node, uniform, space.steps):
            uniform.add(node)
        elif node.dtype is dtypes.int64:
            form = _form(node, forms, uniform)
            if form is not None and _is_near(form, space.shape):
                forms[node] = form
    return forms, uniform


class _Form(NamedTuple):
    """`sign * i + number`, for the index `i` along an axis; plus or minus the `shift`,
    which only the run knows, if there is one."""

    axis: int
    sign: int
    number: Size
    shift: Expr | None = None
    adds: bool = True

    def plus(self, number: Size) -> "_Form":
        return self._replace(number=self.number + number)

    def shifted(self, shift: Expr, *, adds: bool) -> "_Form | None":
        return None if self.shift else self._replace(shift=shift, adds=adds)

    def negated(self) -> "_Form":
        return self._replace(sign=-self.sign, number=-self.number, adds=not self.adds)


def _form(node: Expr, forms: Mapping[Expr, _Form], uniform: set[Expr]) -> _Form | None:
    """Return the form of an integer whose operands have forms, or None."""
    if node.op not in ("add", "sub", "mul"):
        return None
    x, y = node.args
    if node.op == "mul":
        return (
            forms[x].negated() if x in forms and y.is_const and y.attr == -1 else None
        )
    if x in forms and (size := size_of_expr(y)) is not None:
        return forms[x].plus(size if node.op == "add" else -size)
    if y in forms and (size := size_of_expr(x)) is not None:
        form = forms[y]
        return (form if node.op == "add" else form.negated()).plus(size)
    if x in forms and y in uniform:
        return forms[x].shifted(y, adds=node.op == "add")
    if y in forms and x in uniform:
        form = forms[y]
        form = form if node.op == "add" else form.negated()
        return form.shifted(x, adds=True)
    return None


def _is_near(form: _Form, shape: Shape) -> bool:
    """Return whether no index makes a form wrap around: its number is at most `_FAR`,
    or at most the extent, in magnitude."""
    if isinstance(form.number, int):
        return abs(form.number) <= _FAR
    size = shape[form.axis]
    return at_least(size, form.number) and at_least(size, -form.number)


def _is_uniform(node: Expr, uniform: set[Expr], steps: Mapping[Var, Size]) -> bool:
    """Return whether a node is the same for all indices, and can also be computed for
    an empty shape, where no check has run."""
    if not all([a in uniform for a in node.args]):
        return False
    if node.op in ("div", "rem") and node.dtype.is_integer:
        y = node.args[1]
        bound = y.args[1] if y.op == "max" else y
        return bound.is_const and bound.attr > 0
    if node.op == "element":  # of a scalar, or of the step's row
        if len(node.args) > len(node.attr.shape):
            return False
        pairs = zip(node.args, node.attr.shape, strict=True)
        return all(
            at.op == "var" and at.attr in steps and at_least(n, steps[at.attr])
            for at, n in pairs
        )
    if node.op == "var":
        return True  # a loop counter: axes have forms
    return node.op != "load"


_COMPARED: Final = {"lt": (0, 1), "le": (0, 1), "gt": (1, 0), "ge": (1, 0)}


def _test(
    node: Expr, forms: Mapping[Expr, _Form], uniform: set[Expr], shape: Shape
) -> _Test | None:
    """Return the test that a comparison `x < y` or `x <= y` is, or None."""
    x, y = (node.args[k] for k in _COMPARED[node.op])
    equal = node.op in ("le", "ge")
    is_left = x in forms and y in uniform
    if not is_left and not (y in forms and x in uniform):
        return None
    form, other = (forms[x], y) if is_left else (forms[y], x)
    holds = is_left is (form.sign > 0)
    more = equal if holds else not equal
    at = _moved(other, form, int(more), shape)
    if at is None or form.shift is None:
        return None if at is None else _Test(form.axis, at, holds)
    if not (other.is_const or size_of_expr(other) is not None):
        return None
    adds = form.adds is not (form.sign > 0)
    at = (e.add if adds else e.sub)(at, form.shift)
    return _Test(form.axis, at, holds, form.shift)


def _moved(x: Expr, form: _Form, more: int, shape: Shape) -> Expr | None:
    """Return the index at which a form is `x`, plus `more`; or an equivalent position,
    without wrapping around."""
    sign, number = form.sign, more - form.sign * form.number
    if isinstance(number, int):
        if x.is_const:
            return e.index(max(-_FAR, min(sign * x.attr + number, _FAR)))
        if sign > 0 and not number:
            return x
        low, high = (e.index(k * 4 * _FAR) for k in (-1, 1))
        near = e.binary("min", e.binary("max", x, low), high)
        return (
            e.add(near, e.index(number)) if sign > 0 else e.sub(e.index(number), near)
        )
    size = size_of_expr(x)
    at = None if size is None else sign * size + number
    if at is None or not (at_least(at, 0) and at_least(shape[form.axis], at)):
        return None
    return e.extent(at)
