"""Which loops are merged, and which stay apart."""

from collections.abc import Sequence
from typing import Any

import pytest

from hopflow.compiler.schedule.merge import merge
from hopflow.compiler.schedule.summary import Summary
from hopflow.dtypes import float32, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.nest import For, Stmt, Store

N = e.index(8)
A, B, C = (Buffer(name, float32, (N, N), "arena") for name in "abc")
ZERO = e.index(0)


def loop(target: Buffer, source: Buffer, to: str, at: str, **more: Any) -> For:
    """`target[to] = source[at]` in each iteration, where "i" is its own index."""
    i = Var("i", int64)

    def indices(text: str) -> Sequence[e.Expr]:
        return tuple(e.read(i) if axis == "i" else ZERO for axis in text)

    value = e.load(source, indices(at))
    options: dict[str, Any] = {"extent": N, "independent": True} | more
    return For(i, body=[Store(target, tuple(indices(to)), value)], **options)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (("i0", "i0"), ("i0", "i0"), True),
        (("0i", "i0"), ("0i", "0i"), True),
        (("i0", "i0"), ("i0", "0i"), False),  # it reads what other iterations make
        (("i0", "i0"), ("i0", "ii"), True),
        (("ii", "i0"), ("i0", "00"), False),
    ],
)
def test_loops_merge_if_each_iteration_needs_of_the_other_loop_its_own(
    first: tuple[str, str], second: tuple[str, str], together: bool
) -> None:
    body: list[Stmt] = [loop(B, A, *first), loop(C, B, *second)]
    merge(body)
    assert len(body) == (1 if together else 2)


@pytest.mark.parametrize("more", [{"extent": e.index(7)}, {"independent": False}])
def test_loops_of_another_space_stay_apart(more: Any) -> None:
    body: list[Stmt] = [loop(B, A, "i0", "i0"), loop(C, A, "i0", "i0", **more)]
    merge(body)
    assert len(body) == 2


def test_a_buffer_is_gone_through_by_the_axes_that_all_accesses_share() -> None:
    one, other = loop(B, A, "i0", "ii"), loop(B, A, "ii", "0i")
    both = For(one.var, N, [*one.body], True)
    assert Summary.of(both).axes == {A: {0, 1}, B: {0}}
    assert Summary.of(other).axes == {A: {1}, B: {0, 1}}
    [store] = other.body
    i = e.read(other.var)
    crossed = For(other.var, N, [store, Store(B, (i, ZERO), e.load(A, (i, ZERO)))])
    assert Summary.of(crossed).axes == {A: set(), B: {0}}
