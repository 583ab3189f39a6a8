"""Which loops are merged, and which stay apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.schedule.merge import merge
from hopflow.compiler.schedule.summary import Summary
from hopflow.dtypes import float32, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import For, Program, Stmt, Store

pytestmark = pytest.mark.slow

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
    merge(Program("f", [], [], [], [], [], body, []), host())
    assert len(body) == (1 if together else 2)


@pytest.mark.parametrize("more", [{"extent": e.index(7)}, {"independent": False}])
def test_loops_of_another_space_stay_apart(more: Any) -> None:
    body: list[Stmt] = [loop(B, A, "i0", "i0"), loop(C, A, "i0", "i0", **more)]
    merge(Program("f", [], [], [], [], [], body, []), host())
    assert len(body) == 2


def test_a_buffer_is_gone_through_by_the_axes_that_all_accesses_share() -> None:
    one, other = loop(B, A, "i0", "ii"), loop(B, A, "ii", "0i")
    both = For(one.var, N, [*one.body], True)
    assert Summary.of(both).axes == {A: {(0, 0, 0), (1, 1, 0)}, B: {(0, 0, 0)}}
    assert Summary.of(other).axes == {A: {(1, 1, 0)}, B: {(0, 0, 0), (1, 1, 0)}}
    [store] = other.body
    i = e.read(other.var)
    crossed = For(other.var, N, [store, Store(B, (i, ZERO), e.load(A, (i, ZERO)))])
    assert Summary.of(crossed).axes == {A: set(), B: {(0, 0, 0)}}
    later = (e.add(i, e.index(1)), ZERO)
    shifted = For(other.var, N, [Store(B, later, e.load(A, later))])
    assert Summary.of(shifted).axes == {A: {(0, 0, 1)}, B: {(0, 0, 1)}}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_else_is_computed_changes_no_bit_of_a_sum(dtype: Any) -> None:
    x = np.random.default_rng(7).normal(size=1003).astype(dtype)
    wide, narrow = x.astype(np.float64), x.astype(np.float32)
    alone = hf.jit(lambda x: hf.sum(x))(x)

    def store(x: Any, *others: Any) -> Any:
        return hf.sum(x), *[other * 2 for other in others]

    def add(x: Any, *others: Any) -> Any:
        return *[hf.sum(other) for other in others], hf.sum(x)

    for others in ([wide], [narrow], [wide, narrow], [x > 0, wide]):
        first, *_ = hf.jit(store)(x, *others)
        *_, last = hf.jit(add)(x, *others)
        assert np.asarray(first).tobytes() == np.asarray(alone).tobytes()
        assert np.asarray(last).tobytes() == np.asarray(alone).tobytes()


@pytest.mark.parametrize("n", [5, 7, 9, 15, 17, 33])
def test_a_large_body_changes_no_bit_of_a_sum(n: int) -> None:
    """One iteration that is left over was a masked vector in large bodies alone."""
    alone, beside = hf.jit(hf.sum), hf.jit(lambda x: (hf.sum(x), hf.sin(x)))
    for seed in range(20):
        x = np.random.default_rng(seed).normal(size=n)
        expected, found = alone(x), beside(x)[0]
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_a_sum_is_merged_with_what_is_stored_beside_it() -> None:
    jitted = hf.jit(lambda x: (hf.sum(x), hf.sin(x)))
    jitted(np.ones(1000, np.float32))
    assert jitted.loop_ir.count("for ") == 1


@pytest.mark.parametrize("n", [1, 2, 5, 33, 64, 65, 129, 130])
def test_a_sum_has_the_same_bits_whatever_is_known_of_its_size(n: int) -> None:
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    alone = hf.jit(lambda x: hf.sum(x))
    dynamic = hf.jit(lambda x: hf.sum(x), dynamic=True)
    beside = hf.jit(lambda x: (hf.sum(x), hf.sin(hf.exp(hf.tanh(x)))))
    want = np.asarray(alone(x)).tobytes()
    dynamic(x[:-1])
    assert np.asarray(dynamic(x)).tobytes() == want
    assert np.asarray(beside(x)[0]).tobytes() == want
