"""Bodies that write to memory which they, or their callers, know by other names too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import MutationError, ReadOnlyError
from hopflow.graph.verifier import verify
from hopflow.testing.executions import NAMES, RUNNERS, agree, in_turn, run_debug

hf: Any = hopflow
X = np.arange(12, dtype=np.float32).reshape(3, 4)
each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)


def add_one(a: Any) -> None:
    a += 1


def set_first(a: Any) -> None:
    a[0] = a[-1] * 2


# From one tensor, those that a body writes to (the first) and reads.
ALIASES: dict[str, Any] = {
    "base written, view read": lambda x: (x, x[1:]),
    "view written, base read": lambda x: (x[1:], x),
    "two views": lambda x: (x[:2], x[1:]),
    "columns": lambda x: (x[:, 1:3], x[:, 2:]),
    "view of a view": lambda x: (x[1:][:1], x[:2]),
    "transposed": lambda x: (x.T, x),
    "transposed part": lambda x: (x[1:], x.T),
    "reshaped": lambda x: (x.reshape(-1), x[1]),
    "reshaped, a copy": lambda x: (x.T.reshape(-1)[1::2], x[1:]),
    "two copies": lambda x: (x.T.reshape(-1), x[::-1].reshape((2, -1))),
    "in steps": lambda x: (x.reshape(-1)[1::2], x),
    "backwards": lambda x: (x[::-1], x[0]),
    "broadcast": lambda x: (x, hf.broadcast_to(x[:1], x.shape)),
    "apart": lambda x: (x[:1], x[1:]),
    "two names": lambda x: (x[:2], x[:2]),
}

# How a body that writes to `a` and reads `b` is run: (p, a, b, body) -> results.
OPERATORS: dict[str, Any] = {
    "cond": lambda p, a, b, f: hf.cond(p, lambda: f(a, b), lambda: hf.sum(b)),
    "cond on operands": lambda p, a, b, f: hf.cond(
        p, f, lambda a, b: hf.sum(b), (a, b)
    ),
    "one an operand": lambda p, a, b, f: hf.cond(
        p, lambda a: f(a, b), lambda a: hf.sum(a), (a,)
    ),
    "switch": lambda p, a, b, f: hf.switch(
        hf.astype(p, hf.int32), [lambda: hf.sum(b), lambda: f(a, b), lambda: hf.sum(a)]
    ),
    "while": lambda p, a, b, f: hf.while_loop(
        lambda i, _: i < 3, lambda i, s: (i + 1, s + f(a, b)), (0, 0.0)
    )[1],
    "while, read in the test": lambda p, a, b, f: hf.while_loop(
        lambda i: (i < 3) & (hf.sum(b) < 1e6), lambda i: i + f(a, a), 0.0
    ),
    "scan": lambda p, a, b, f: hf.scan(
        lambda s, _: (s + f(a, b), hf.sum(b)), 0.0, length=3
    ),
    "invoke": lambda p, a, b, f: hf.invoke_subgraph(f, a, b),
    "nested": lambda p, a, b, f: hf.fori_loop(
        0, 2, lambda i, s: hf.cond(p, lambda: s + f(a, b), lambda: hf.sum(b) * s), 0.0
    ),
}


def before_and_after(a: Any, b: Any) -> Any:
    """Reads, writes, and reads again."""
    before = hf.sum(b * b)
    set_first(a)
    return before + hf.sum(b) * 3 + hf.sum(a[:1])


def after(a: Any, b: Any) -> Any:
    add_one(a)
    return hf.sum(b * b)


@pytest.mark.parametrize("body", [before_and_after, after])
@pytest.mark.parametrize(
    ("alias", "operator", "run"),
    in_turn([*ALIASES], [*OPERATORS], of=[r for r in RUNNERS if r is not run_debug]),
)
def test_what_is_written_by_one_name_is_read_by_another(
    alias: str, operator: str, body: Any, run: Any
) -> None:
    def outcome(execution: Any) -> Any:
        outside = hf.asarray(X.copy())
        views = ALIASES[alias](outside)

        def f(p: Any, x: Any) -> Any:
            inside = x * 1
            found = OPERATORS[operator](p, *ALIASES[alias](inside), body)
            return found, inside, OPERATORS[operator](p, *views, body)

        return execution(f, hf.asarray(True), hf.asarray(X)), outside

    agree(outcome(run), outcome(run_debug))


@pytest.mark.parametrize("operator", ["cond", "while, read in the test"])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_program_for_all_sizes_writes_and_reads_so_too(
    alias: str, operator: str
) -> None:
    def f(p: Any, x: Any) -> Any:
        inside = x * 1
        return OPERATORS[operator](p, *ALIASES[alias](inside), after), inside

    compiled = hf.jit(f)
    for n in (3, 4, 5):
        args = hf.asarray(True), hf.reshape(hf.arange(4.0 * n), (n, 4))
        agree(compiled(*args), run_debug(f, *args))


@each_execution
def test_several_bases_in_one_body(run: Any) -> None:
    def outcome(execution: Any) -> Any:
        x, y = hf.asarray(X.copy()), hf.asarray(X.copy() + 1)
        views = x[1:], y[:, 2:], x.T, y[0]

        def step(s: Any, _: Any) -> Any:
            before = hf.sum(views[2] * views[2])
            views[0][0] = views[3]
            views[1][0] = before
            return s + hf.sum(views[2] * 2) + hf.sum(y), before

        return execution(lambda: hf.scan(step, 0.0, length=4)), x, y

    agree(outcome(run), outcome(run_debug))


def test_an_error_in_a_body_leaves_no_base_behind() -> None:
    def f(x: Any) -> Any:
        x = x * 1
        view = x[1:]

        def write_and_fail() -> Any:
            set_first(view)
            assert hf.sum(x) is None

        for _ in range(2):
            with pytest.raises(AssertionError):
                hf.fori_loop(
                    0, 3, lambda i, c: hf.cond(c > 0, write_and_fail, lambda: c), 0.0
                )
        return hf.fori_loop(0, 3, lambda i, c: c + after(x, view), 0.0)

    module = hf.trace(f, hf.spec("f32[3, 4]"), mode="fake")
    verify(module.graph)
    agree(module(hf.asarray(X)), run_debug(lambda: after3(hf.asarray(X.copy()))))


def after3(x: Any) -> Any:
    return hf.fori_loop(0, 3, lambda i, c: c + after(x, x[1:]), 0.0)


def test_a_view_that_is_only_read_is_all_that_a_body_gets() -> None:
    def f(x: Any) -> Any:
        x, view = x * 1, x[1:]
        return hf.fori_loop(0, 3, lambda i, c: c + view, view), x

    [loop] = hf.trace(f, hf.spec("f32[3, 4]"), mode="fake").graph.nodes_of("while_loop")
    assert [str(v.type) for v in loop.params["body"].captures] == ["f32[2, 4]"]


@pytest.mark.parametrize("kind", ["read-only", "broadcast"])
def test_what_cannot_be_written_cannot_be_through_a_base(kind: str) -> None:
    array = X.copy()
    array.flags.writeable = False
    x = hf.from_numpy(array) if kind == "read-only" else hf.asarray(X.copy())
    view = x[1:] if kind == "read-only" else hf.broadcast_to(x[0], (2, 4))
    with pytest.raises(ReadOnlyError):
        hf.cond(hf.asarray(True), lambda: after(view, x), lambda: hf.sum(x))
    agree(x, X)


@pytest.mark.parametrize("early", [False, True])
def test_what_is_read_only_by_another_name_can_be_written(early: bool) -> None:
    array = X.copy()
    fixed = array.view()
    fixed.flags.writeable = False
    x, view = hf.asarray(array), hf.asarray(fixed)

    def body() -> Any:
        before = hf.sum(view) if early else 0.0  # which of the two it meets first
        add_one(x)
        return hf.sum(view) - before

    got = hf.cond(hf.asarray(True), body, lambda: hf.sum(view))
    assert got.item() == (12 if early else (X + 1).sum())
    agree(x, X + 1)


# --- arguments of `jit` ---------------------------------------------------------------


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def write_first(a: Any, b: Any) -> Any:
    a[0] = 10.0
    return b + a


def outcome(f: Callable[..., Any], make: Callable[[], Any]) -> Any:
    """What a call returns, and what it leaves of the memory."""
    base, args = make()
    return np.asarray(f(*args)).tolist(), np.asarray(base).tolist()


def a_view(cut: Callable[[Any], tuple[Any, Any]]) -> Callable[[], Any]:
    def make() -> Any:
        base = hf.asarray([1.0, 2.0, 3.0, 4.0])
        return base, cut(base)

    return make


ARGUMENTS = {
    "same": lambda x: (x, x),
    "base and view": lambda x: (x, x[:]),
    "overlapping": lambda x: (x[:3], x[1:]),
    "apart": lambda x: (x[:2], x[2:]),
    "interleaved": lambda x: (x[::2], x[1::2]),
    "reversed": lambda x: (x, x[::-1]),
    "reshaped": lambda x: (x.reshape((2, 2)).T.reshape(-1), x),
    "read only": lambda x: (x[1:2], x),
}


@pytest.mark.parametrize("cut", ARGUMENTS.values(), ids=ARGUMENTS)
def test_aliases_mean_what_they_mean_eagerly(cut: Any) -> None:
    f = hf.jit(write_first)
    f(hf.zeros(4), hf.zeros(4))
    f(hf.zeros(2), hf.zeros(2))
    assert outcome(f, a_view(cut)) == outcome(write_first, a_view(cut))
    traces = hf.stats().traces  # other memory, shared in the same way
    assert outcome(f, a_view(cut)) == outcome(write_first, a_view(cut))
    assert hf.stats().traces == traces


def test_tensors_that_share_memory_in_another_way_are_another_kind_of_call() -> None:
    f = hf.jit(write_first)
    for n in range(3):
        cut = lambda x, n=n: (x[n:][:2], x[1:3])  # noqa: E731
        assert outcome(f, a_view(cut)) == outcome(write_first, a_view(cut))


def test_memory_of_numpy_given_twice_is_an_alias_too() -> None:
    array = np.zeros(3, np.float32)
    f = hf.jit(write_first)
    same(f(array, array), [20, 0, 0])
    same(f(hf.from_numpy(array), hf.from_numpy(array[::-1])), [10, 0, 10])
    same(array, [10, 0, 0])


def test_memory_shared_by_two_dtypes_is_refused_and_not_written() -> None:
    array = np.zeros(3, np.float32)
    with pytest.raises(MutationError, match="shares its memory"):
        hf.jit(lambda a, b: write_first(a, hf.astype(b, hf.float32)))(
            array, array.view(np.int32)
        )
    same(array, [0, 0, 0])


def test_memory_shared_by_a_weak_and_a_strong_dtype_is_refused() -> None:
    weak = hf.add(1.0, 2.0)
    strong = hf.from_dlpack(weak)
    assert [t.type.weak for t in (weak, strong)] == [True, False]
    for x, y in ((weak, strong), (strong, weak)):
        with pytest.raises(MutationError, match="shares its memory"):
            hf.cond(hf.asarray(True), after, lambda x, y: hf.sum(y), (x, y))
    assert strong.item() == 3.0
