"""Any program runs the same in its planned arena as with memory for each buffer."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopflow.compiler.reuse import live_intervals, reuse
from hopflow.dtypes import int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.program import (
    Assign,
    Copy,
    Declare,
    For,
    If,
    Program,
    Stmt,
    Store,
    Swap,
    While,
)

pytestmark = pytest.mark.slow

FOUR = (e.index(4),)
X, Y = Buffer("x", int64, FOUR, "input"), Buffer("y", int64, FOUR, "output")
BUFFERS = [Buffer(name, int64, FOUR, "arena") for name in "abcdef"]


class Bodies:
    """Draws statements that read only what is written before them, in any iteration."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.count = 0
        self.loops: list[Var] = []

    def fresh(self) -> Var:
        self.count += 1
        return Var(f"i{self.count}", int64)

    def add(self, target: Buffer, source: Buffer) -> Stmt:
        """`target[i] = source[i] + 1` for all four i."""
        i = self.fresh()
        at = (e.read(i),)
        return For(i, *FOUR, [Store(target, at, e.add(e.load(source, at), e.index(1)))])

    def body(self, written: set[Buffer], depth: int = 0) -> list[Stmt]:
        """A body; what it surely writes joins `written`."""
        count = self.draw(st.integers(1, 4))
        return [s for _ in range(count) for s in self.statements(written, depth)]

    def statements(self, written: set[Buffer], depth: int) -> list[Stmt]:
        kinds = ["add", "add", "copy", "swap", "if", "first", "for", "while"]
        kind = self.draw(st.sampled_from(kinds))
        sources = [X, *(b for b in BUFFERS if b in written)]
        source = self.draw(st.sampled_from(sources))
        if kind == "swap" and len(sources) > 2:
            a, b = self.draw(st.permutations(sources[1:]))[:2]
            return [Swap(a, b)]
        if kind == "if" and depth < 3:
            even = e.binary("and", e.load(source, (e.index(0),)), e.index(1))
            sides = set(written), set(written)
            then, else_ = (self.body(side, depth + 1) for side in sides)
            written |= sides[0] & sides[1]
            return [If(e.compare("eq", even, e.index(0)), then, else_)]
        if kind == "first" and self.loops and depth < 4:
            # What the first iteration writes, the others may read.
            first = e.compare("eq", e.read(self.loops[-1]), e.index(0))
            return [If(first, self.body(written, depth + 1))]
        if kind == "for" and depth < 3:
            self.loops.append(self.fresh())
            body = self.body(written, depth + 1)
            return [For(self.loops.pop(), e.index(3), body)]
        if kind == "while" and depth < 3:
            var = self.fresh()
            test = e.compare("lt", e.read(var), e.index(3))
            body = self.body(written, depth + 1)
            step = Assign(var, e.add(e.read(var), e.index(1)))
            return [Declare(var, e.index(0)), While([], test, [*body, step])]
        target = self.draw(st.sampled_from([b for b in BUFFERS if b is not source]))
        written.add(target)
        return [Copy(target, source) if kind == "copy" else self.add(target, source)]


def agree(f: Program) -> None:
    x = np.arange(4)
    planned, live = reuse(f), live_intervals(f)
    apart = run(f, [], [x])
    together = run(f, [], [x], offsets=planned.offsets)
    np.testing.assert_array_equal(together, apart)
    offsets = {b: planned.offsets[b].attr for b in live}
    for a, b in combinations(live, 2):
        if live[a].overlaps(live[b]):
            assert abs(offsets[a] - offsets[b]) >= 4 * 8, (a.name, b.name)


@given(data=st.data())
def test_any_program_runs_the_same_in_its_planned_arena(data: st.DataObject) -> None:
    draw, written = Bodies(data), set[Buffer]()
    body = [s for _ in range(3) for s in draw.body(written)]
    last = [b for b in BUFFERS if b in written]
    body.append(Copy(Y, last[0] if last else X))
    agree(Program("f", [], [X], [Y], BUFFERS, [], body, []))


lives = st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(lives, max_size=16))
def test_buffers_of_all_sizes_that_live_together_lie_apart(
    given: list[tuple[int, int, int]],
) -> None:
    found = {
        Buffer(f"b{k}", int64, (e.index(8 * n),), "arena"): ends
        for k, (n, *ends) in enumerate(given)
    }
    start = (e.index(0),)
    body: list[Stmt] = [
        Store(b, start, e.index(0)) for t in range(10) for b in found if t in found[b]
    ]
    f = Program("f", [], [], [], [*found], [], body, [])
    planned, live = reuse(f), live_intervals(f)
    first = {b: planned.offsets[b].attr for b in found}
    last = {b: first[b] + 8 * b.shape[0].attr for b in found}
    assert all(last[b] <= planned.total.attr for b in found)
    for a, b in combinations(found, 2):
        if live[a].overlaps(live[b]):
            assert last[a] <= first[b] or last[b] <= first[a]
