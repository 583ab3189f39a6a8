"""Which loops are merged, and which stay apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.test_gangs import target

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.pipeline import Executable
from hopflow.compiler.schedule.merge import merge
from hopflow.compiler.schedule.summary import NO_SHIFT, Summary
from hopflow.dtypes import float32, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import For, Let, Program, Stmt, Store
from hopflow.tensor import EagerTensor

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
    assert Summary.of(both).axes == {
        A: {(0, 0, 0, NO_SHIFT), (1, 1, 0, NO_SHIFT)},
        B: {(0, 0, 0, NO_SHIFT)},
    }
    assert Summary.of(other).axes == {
        A: {(1, 1, 0, NO_SHIFT)},
        B: {(0, 0, 0, NO_SHIFT), (1, 1, 0, NO_SHIFT)},
    }
    [store] = other.body
    i = e.read(other.var)
    crossed = For(other.var, N, [store, Store(B, (i, ZERO), e.load(A, (i, ZERO)))])
    assert Summary.of(crossed).axes == {A: set(), B: {(0, 0, 0, NO_SHIFT)}}
    later = (e.add(i, e.index(1)), ZERO)
    shifted = For(other.var, N, [Store(B, later, e.load(A, later))])
    assert Summary.of(shifted).axes == {
        A: {(0, 0, 1, NO_SHIFT)},
        B: {(0, 0, 1, NO_SHIFT)},
    }


# --- shifts that only the run knows ---------------------------------------------------


def shifted(
    target: Buffer, source: Buffer, *shifts: e.Expr, inside: bool = False
) -> For:
    """`target[0, i + s] = source[0, i + t]`; or also plus what an iteration sets."""
    i, own = Var("i", int64), Var("own", int64)
    to, at = (e.add(e.read(i), e.add(x, e.read(own)) if inside else x) for x in shifts)
    body: list[Stmt] = [Store(target, (ZERO, to), e.load(source, (ZERO, at)))]
    if inside:
        body = [Let(own, e.read(i)), *body]
    return For(i, N, body, independent=True)


def test_loops_at_one_shift_merge() -> None:
    s, t = (e.read(Var(name, int64)) for name in "st")
    start = e.select(e.compare("lt", s, ZERO), e.add(s, N), s)
    for x in (s, start, e.add(s, e.index(3))):
        body: list[Stmt] = [shifted(B, A, ZERO, x), shifted(A, B, x, ZERO)]
        merge(Program("f", [], [], [], [], [], body, []), host())
        assert len(body) == 1
    for x, y in ((s, t), (s, e.add(s, e.index(1))), (s, ZERO), (start, s)):
        body = [shifted(B, A, ZERO, x), shifted(A, B, y, ZERO)]
        merge(Program("f", [], [], [], [], [], body, []), host())
        assert len(body) == 2, (x, y)


def test_a_shift_that_differs_between_iterations_is_none() -> None:
    s = e.read(Var("s", int64))
    axes = Summary.of(shifted(B, A, s, s)).axes
    assert len(axes[A]) == len(axes[B]) == 1
    axes = Summary.of(shifted(B, A, s, s, inside=True)).axes
    assert axes == {A: set(), B: set()}
    i = Var("i", int64)
    twice = e.add(e.read(i), e.mul(e.read(i), e.index(2)))
    loop_ = For(i, N, [Store(B, (ZERO, twice), e.load(A, (ZERO, twice)))], True)
    assert Summary.of(loop_).axes == {A: set(), B: set()}


def test_a_shift_in_memory_that_the_loop_writes_is_none() -> None:
    s = e.cast(e.load(C, (ZERO, ZERO)), int64)
    axes = Summary.of(shifted(B, A, s, s)).axes
    assert len(axes[A]) == len(axes[B]) == 1
    axes = Summary.of(shifted(C, A, s, s)).axes
    assert axes == {A: set(), C: set()}


WINDOWS: dict[str, Any] = {
    "one start": lambda acc, a, i, k: hf.dynamic_update_slice(
        acc, hf.dynamic_slice(acc, (i,), a.shape) * 0.5 + a, (i,)
    ),
    "a start of the run": lambda acc, a, i, k: hf.dynamic_update_slice(
        acc, hf.dynamic_slice(acc, (k,), a.shape) * 0.5 + a, (k,)
    ),
    "two starts": lambda acc, a, i, k: hf.dynamic_update_slice(
        acc, hf.dynamic_slice(acc, (k,), a.shape) * 0.5 + a, (i,)
    ),
    "the one before": lambda acc, a, i, k: hf.dynamic_update_slice(
        acc, hf.dynamic_slice(acc, (i,), a.shape) * 0.5 + a, (i + 1,)
    ),
    "a start in the array": lambda acc, a, i, k: hf.dynamic_update_slice(
        acc,
        hf.dynamic_slice(acc, (hf.astype(acc[k % 60], "int64"),), a.shape) * 0.5 + a,
        (hf.astype(acc[k % 60], "int64"),),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_that_steps_update(name: str, *, dynamic: bool) -> None:
    window = WINDOWS[name]

    def f(a: Any, starts: Any) -> Any:
        def step(i: Any, acc: Any) -> Any:
            return window(acc, a, i, starts[i])

        return hf.fori_loop(0, starts.shape[0], step, hf.arange(60.0) + a[0])

    rng = np.random.default_rng(0)
    a, starts = rng.integers(0, 9, 23).astype("f"), rng.integers(-70, 70, 30)
    with hf.debug():
        expected = np.asarray(f(hf.asarray(a), hf.asarray(starts)))
    jitted = hf.jit(f, dynamic=dynamic)
    np.testing.assert_array_equal(np.asarray(jitted(a, starts)), expected)
    batch = np.stack([starts, starts[::-1]])
    found = hf.jit(hf.vmap(f, (None, 0)), dynamic=dynamic)(a, batch)
    np.testing.assert_array_equal(np.asarray(found)[0], expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["counter", "element", "slice"])
def test_a_window_at_one_start_is_updated_in_place(kind: str, *, dynamic: bool) -> None:
    def f(a: Any, starts: Any) -> Any:
        window, zeros = WINDOWS["a start of the run"], hf.zeros(60, dtype="float32")
        if kind == "slice":
            step = lambda acc, k: (window(acc, a, k, k), None)  # noqa: E731
            return hf.scan(step, zeros, starts)[0]
        start: Any = (lambda i: starts[i]) if kind == "element" else (lambda i: i)
        return hf.fori_loop(0, 9, lambda i, acc: window(acc, a, i, start(i)), zeros)

    a, starts = np.arange(23, dtype="f"), np.arange(9) * 7 - 20
    jitted = hf.jit(f, dynamic=dynamic)
    found = np.asarray(jitted(a, starts))
    assert " in arena" not in jitted.loop_ir
    with hf.debug():
        expected = np.asarray(f(hf.asarray(a), hf.asarray(starts)))
    np.testing.assert_array_equal(found, expected)


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


@pytest.mark.parametrize("cpu", ["host", "avx2"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_sum_of_any_size_has_the_same_bits(dtype: str, cpu: str) -> None:
    """CPUs without masks run the rest of a vector loop one by one, in the lanes.

    Sums of three and four elements are written out, one after the other.
    """

    def sums(x: Any) -> Any:
        return hf.sum(x), hf.max(x * x), hf.sum(x * 2)

    random = np.random.default_rng(0)
    known = np.dtype(dtype)
    dynamic = hf.trace(sums, np.ones(7, known), mode="symbolic")
    any_size = Executable(dynamic.graph, target=target(cpu))
    for n in (1, 2, 5, 6, 7, 8, 9, 12, 17, 31, 32, 33, 47, 64, 67, 100, 130):
        x = EagerTensor(random.normal(size=n).astype(known))
        one_size = Executable(hf.trace(sums, x).graph, target=target(cpu))
        for found, wanted in zip(any_size([x]), one_size([x]), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
