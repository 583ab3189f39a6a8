"""What stops a program and what it leaves: traps, donation, interrupts, threads."""

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu import runtime
from hopflow.errors import (
    ArgumentValueError,
    CheckError,
    DivisionError,
    HopflowError,
    IndexingError,
    InvalidTensorError,
    LoopLimitError,
    ReadOnlyError,
)

WITHIN = 0.2  # seconds, from the request to the error
TRIES = 5  # on a machine that does other things too


def line_of(f: Callable[..., Any], text: str) -> str:
    """`file.py:12` of the line of `f` that has `text` in it."""
    lines, first = inspect.getsourcelines(f)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{os.path.basename(__file__)}:{number}"


def eagerly(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` as the body of an operator that is called eagerly."""
    return lambda *args: hf.invoke_subgraph(f, *args)


WAYS = pytest.mark.parametrize("way", [hf.jit, eagerly], ids=["jit", "eager"])


# --- traps ----------------------------------------------------------------------------


def take_one(x: Any, i: Any) -> Any:
    y = x * 2
    return y[i]  # the index


def put_one(x: Any, i: Any) -> Any:
    y = x * 2
    y[i] = 1.0  # the place
    return y


def quotient(x: Any, i: Any) -> Any:
    return 7 // i + x.astype("int64")  # the division


def rest(x: Any, i: Any) -> Any:
    return 7 % i + x.astype("int64")  # the remainder


def checked(x: Any, i: Any) -> Any:
    hf.check(i < 5, "i must be small")  # the check
    return x + i


def limited(x: Any, i: Any) -> Any:
    return hf.while_loop(lambda c: c < i, lambda c: c + 1, 0, max_steps=10)  # the loop


def in_a_loop(x: Any, i: Any) -> Any:
    def body(k: Any, total: Any) -> Any:
        return k + 1, total + x[k]  # the index

    return hf.while_loop(lambda k, _: k <= i, body, (0, 0.0))


def in_a_branch(x: Any, i: Any) -> Any:
    return hf.cond(
        i > 3,
        lambda: x[i],  # the index
        lambda: x[0],
    )


def in_a_scan(x: Any, i: Any) -> Any:
    def step(total: Any, k: Any) -> Any:
        return total + x[k + i], k  # the index

    return hf.scan(step, 0.0, hf.arange(4))[0]


def in_a_map(x: Any, i: Any) -> Any:
    return hf.map(
        lambda k: x[k + i],  # the index
        hf.arange(4),
    )


# Each with an argument that is good, one that is not, the error, what it says.
TRAPS = [
    (take_one, 3, 4, IndexingError, "index 4 is out of range .* size 4", "the index"),
    (
        take_one,
        -4,
        -5,
        IndexingError,
        "out of range for an axis of size 4",
        "the index",
    ),
    (put_one, 0, 99, IndexingError, "index 99 is out of range", "the place"),
    (quotient, 2, 0, DivisionError, "division of an integer by zero", "the division"),
    (rest, 2, 0, DivisionError, "division of an integer by zero", "the remainder"),
    (checked, 4, 5, CheckError, "i must be small", "the check"),
    (limited, 10, 11, LoopLimitError, "`max_steps` = 10", "the loop"),
    (in_a_loop, 3, 4, IndexingError, "index 4 is out of range", "the index"),
    (in_a_branch, 0, 5, IndexingError, "index 5 is out of range", "the index"),
    (in_a_scan, 0, 2, IndexingError, "index 4 is out of range", "the index"),
    (in_a_map, 0, 1, IndexingError, "index 4 is out of range", "the index"),
]


@WAYS
@pytest.mark.parametrize(
    ("f", "good", "bad", "error", "message", "mark"),
    TRAPS,
    ids=[f"{t[0].__name__} {t[2]}" for t in TRAPS],
)
def test_a_trap_is_the_right_error_with_the_users_line(
    way: Any, f: Any, good: int, bad: int, error: type, message: str, mark: str
) -> None:
    run, x = way(f), hf.arange(4.0)
    for _ in range(2):
        run(x, hf.asarray(good))
        with pytest.raises(error, match=message) as caught:
            run(x, hf.asarray(bad))
        assert line_of(f, f"# {mark}") in str(caught.value)
    np.testing.assert_array_equal(x, np.arange(4.0))


@WAYS
def test_what_a_branch_not_taken_would_trap_does_not(way: Any) -> None:
    x = hf.arange(4.0)
    assert way(in_a_branch)(x, hf.asarray(3)).item() == 0.0

    def guarded(n: Any) -> Any:
        return hf.cond(n == 0, lambda: n, lambda: 7 // n)

    assert way(guarded)(hf.asarray(0)).item() == 0
    assert way(guarded)(hf.asarray(2)).item() == 3


@WAYS
def test_a_loop_of_no_steps_does_not_trap(way: Any) -> None:
    def f(x: Any, n: Any) -> Any:
        return hf.fori_loop(0, n, lambda i, c: c + x[9 + i], 0.0)

    x = hf.arange(4.0)
    assert way(f)(x, hf.asarray(0)).item() == 0.0
    with pytest.raises(IndexingError, match="index 9"):
        way(f)(x, hf.asarray(1))


def test_debug_mode_raises_the_same_classes() -> None:
    x = hf.arange(4.0)
    with hf.debug():
        for f, good, bad, error, *_ in TRAPS:
            eagerly(f)(x, hf.asarray(good))
            with pytest.raises(error):
                eagerly(f)(x, hf.asarray(bad))


# --- what a trap leaves behind --------------------------------------------------------


def write_then_trap(x: Any, i: Any) -> Any:
    x[:] = 0.0
    y = x + 1
    x += y
    hf.check(i < 5, "no")
    return x[i]


@WAYS
def test_a_trap_leaves_an_argument_as_it_was(way: Any) -> None:
    x = hf.arange(4.0)
    view = x[1:]
    run = way(write_then_trap)
    for bad in (5, 4):
        with pytest.raises((CheckError, IndexingError)):
            run(x, hf.asarray(bad))
        np.testing.assert_array_equal(x, np.arange(4.0))
        np.testing.assert_array_equal(view, np.arange(1.0, 4.0))
    assert run(x, hf.asarray(3)).item() == 1.0
    np.testing.assert_array_equal(x, np.ones(4))
    np.testing.assert_array_equal(view, np.ones(3))


@WAYS
def test_a_trap_leaves_a_captured_tensor_as_it_was(way: Any) -> None:
    table = hf.zeros(4)

    def f(n: Any) -> Any:
        def body(i: Any) -> Any:
            table[i] = 1.0
            return i + 1

        return hf.while_loop(lambda i: i < n, body, 0)

    run = way(f)
    with pytest.raises(IndexingError):
        run(hf.asarray(5))
    np.testing.assert_array_equal(table, np.zeros(4))
    run(hf.asarray(3))
    np.testing.assert_array_equal(table, [1, 1, 1, 0])


def test_a_donated_tensor_is_invalid_after_a_trap() -> None:
    run = hf.jit(take_one, donate=(0,))
    x = hf.arange(4.0)
    view = x[1:]
    with pytest.raises(IndexingError):
        run(x, hf.asarray(4))
    for gone in (x, view):
        with pytest.raises(InvalidTensorError, match="donated"):
            _ = gone + 1
        with pytest.raises(InvalidTensorError):
            gone[0] = 1.0
        with pytest.raises(InvalidTensorError):
            np.asarray(gone)
        with pytest.raises(InvalidTensorError):
            run(gone, hf.asarray(0))
    assert "donated" in repr(x)


def test_what_is_wrong_before_a_run_donates_nothing() -> None:
    def f(x: Any, y: Any) -> Any:
        y[0] = 1.0
        return x + y

    run = hf.jit(f, donate=(0,))
    x = hf.ones(3)
    frozen = hf.broadcast_to(hf.ones(1), (3,))
    with pytest.raises(ReadOnlyError):
        run(x, frozen)
    gone = hf.ones(3)
    gone.storage.invalidate("donated")
    with pytest.raises(InvalidTensorError):
        run(x, gone)
    assert (x + 1).tolist() == [2.0, 2.0, 2.0]


def test_a_write_that_is_interrupted_makes_all_targets_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def f(x: Any, y: Any) -> None:
        x += 1
        y += 1

    run = hf.jit(f)
    x, y = hf.zeros(3), hf.zeros(3)
    run(x, y)
    copyto, calls = np.copyto, []

    def interrupted(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        copyto(*args, **options)

    monkeypatch.setattr(np, "copyto", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(x, y)
    monkeypatch.undo()
    for half in (x, y):
        with pytest.raises(InvalidTensorError, match="half-written"):
            _ = half + 1


# --- donation -------------------------------------------------------------------------


def test_donated_tensors_and_their_views_cannot_be_used() -> None:
    f = hf.jit(lambda x, tree: (x + 1, tree["a"] * 2), donate=(1,))
    x = hf.ones(2)
    tree: dict[str, Any] = {"a": hf.ones(3), "b": [hf.ones(1)], "n": 3}
    view = tree["a"][1:]
    f(x, tree)
    np.testing.assert_array_equal(x + 1, [2, 2])
    uses: list[Callable[[Any], Any]] = [
        lambda t: t + 1,
        lambda t: t[0],
        lambda t: t.tolist(),
        lambda t: np.asarray(t),
        lambda t: t.copy(),
        lambda t: t.__setitem__(0, 1.0),
        lambda t: hf.jit(lambda y: y)(t),
        lambda t: hf.cond(True, lambda y: y, lambda y: y, (t,)),
        lambda t: hf.jit(lambda: t * 1)(),
    ]
    for gone in (tree["a"], tree["b"][0], view):
        for use in uses:
            with pytest.raises(InvalidTensorError, match="donated"):
                use(gone)
    with pytest.raises(InvalidTensorError):
        f(x, tree)
    assert tree["a"].shape == (3,)


def test_a_donated_argument_must_be_there() -> None:
    f, x = hf.jit(lambda *a: a[0] + 1, donate=(0, 2)), hf.ones(2)
    with pytest.raises(
        ArgumentValueError, match=r"names argument 2 .* 1 were .* Count from 0"
    ):
        f(x)
    np.testing.assert_array_equal(x + 1, [2, 2])


@pytest.mark.parametrize("donate", [(-1,), (0, 0), "0", 0, (0.5,), ("x",), None, {0}])
def test_donate_is_a_tuple_of_positions(donate: Any) -> None:
    with pytest.raises(HopflowError, match=r"jit: `donate` must"):
        hf.jit(lambda x: x, donate=donate)


def test_an_error_while_tracing_donates_nothing() -> None:
    def f(x: Any) -> Any:
        raise ValueError("mine")

    x = hf.ones(2)
    with pytest.raises(ValueError, match="mine"):
        hf.jit(f, donate=(0,))(x)
    np.testing.assert_array_equal(x + 1, [2, 2])


# --- interrupts -----------------------------------------------------------------------


def wander(i: Any) -> Any:
    """A loop that never ends, though no compiler could know."""
    return hf.while_loop(lambda i: i != -7, lambda i: (i ^ 12345) + 1, i)


def wander_wide(i: Any) -> Any:
    """The same over an array, a long step at a time."""
    return hf.while_loop(
        lambda x: hf.any(x != -7), lambda x: (x ^ 12345) + 1, hf.arange(5000) + i
    )


def wander_within(i: Any) -> Any:
    """A loop in a branch in a scan."""

    def step(c: Any, _: Any) -> Any:
        return hf.cond(c >= 0, wander, lambda c: c, (c,)), None

    return hf.scan(step, i, length=3)[0]


FOREVER = 10**15


def wander_around_nothing(i: Any) -> Any:
    """Steps that are loops of no steps."""

    def step(_: Any, c: Any) -> Any:
        return hf.fori_loop(0, hf.minimum(i, 0), lambda _, d: (d ^ c) + 1, c)

    return hf.fori_loop(0, FOREVER, step, i)


def wander_in_threads(i: Any) -> Any:
    """Steps that are short loops over threads."""

    def element(x: Any) -> Any:
        return hf.while_loop(lambda y: y > 9, lambda y: y // 2, x)

    return hf.fori_loop(
        0, FOREVER, lambda _, x: hf.vmap(element)(x) + 1, hf.arange(9) + i
    )


@hf.subgraph
def shift(x: Any) -> Any:
    return hf.flip(hf.cumulative_sum(x)) ^ 12345


def wander_in_calls(i: Any) -> Any:
    """Steps that call a function with short loops."""
    return hf.fori_loop(
        0, FOREVER, lambda _, x: shift(shift(shift(x))), hf.arange(40) + i
    )


ENDLESS = pytest.mark.parametrize(
    "endless",
    [
        *(wander, wander_wide, wander_within),
        *(wander_around_nothing, wander_in_threads, wander_in_calls),
    ],
)


@WAYS
@ENDLESS
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_an_endless_loop_on_the_main_thread(
    way: Any, endless: Any
) -> None:
    run, start, took = way(endless), hf.asarray(0), []
    for _ in range(TRIES):
        # The first call compiles; what is timed is from the signal on.
        fired: list[float] = []

        def fire(fired: list[float] = fired) -> None:
            fired.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.3, fire)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run(start)
        took.append(time.perf_counter() - fired[0])
        timer.join()
        if took[-1] < WITHIN:
            break
    assert min(took) < WITHIN, took
    assert start.item() == 0


@WAYS
@ENDLESS
def test_interrupt_stops_an_endless_loop_on_another_thread(
    way: Any, endless: Any
) -> None:
    run, took = way(endless), []
    for _ in range(TRIES):
        stopped: list[float] = []

        def work(stopped: list[float] = stopped) -> None:
            try:
                run(hf.asarray(0))
            except KeyboardInterrupt:
                stopped.append(time.perf_counter())

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(0.3)
        while thread.is_alive():  # while it compiles it does not notice
            asked = time.perf_counter()
            hf.interrupt(thread.ident)
            thread.join(1)
        took.append(stopped[0] - asked)
        if took[-1] < WITHIN:
            break
    assert min(took) < WITHIN, took


def test_an_interrupt_leaves_written_arguments_and_ends_donated_ones() -> None:
    def f(x: Any, y: Any) -> Any:
        x[:] = 7
        return wander(y)

    run = hf.jit(f, donate=(1,))
    x, y = hf.zeros(3, dtype="int64"), hf.asarray(0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run(x, y)
        except KeyboardInterrupt as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        time.sleep(0.1)
        hf.interrupt(thread.ident)
    assert len(errors) == 1
    assert x.tolist() == [0, 0, 0]
    with pytest.raises(InvalidTensorError, match="donated"):
        y.item()


# --- threads --------------------------------------------------------------------------


def churn(n: Any, seed: Any) -> Any:
    return hf.fori_loop(0, n, lambda i, s: (s * 5 + i) ^ 77, seed)


def churned(n: int, seed: int) -> int:
    for i in range(n):
        seed = (seed * 5 + i ^ 77) & (2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


@WAYS
def test_compiled_code_runs_in_several_threads_at_once(way: Any) -> None:
    run, results = way(churn), {}

    def work(seed: int) -> None:
        results[seed] = [run(hf.asarray(2000), hf.asarray(seed)).item()] * 3

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [churned(2000, k)] * 3 for k in range(6)}


def with_temporaries(x: Any) -> Any:
    return hf.sum(hf.cumulative_sum(x) * hf.cumulative_sum(x[::-1]))


def test_an_arena_is_kept_for_the_next_call() -> None:
    """Also for one of another program, if it is large enough."""
    large, small = (hf.asarray(np.ones(n)) for n in (200_000, 20_000))
    run, other = hf.jit(with_temporaries), hf.jit(lambda x: with_temporaries(x + 1.0))
    kept = []
    for f, x in ((run, large), (run, large), (other, small), (run, large)):
        f(x)
        kept.append(runtime._kept.value)
    assert kept[0] is not None
    assert kept == kept[:1] * 4


def test_programs_that_run_at_once_have_arenas_of_their_own() -> None:
    xs = [hf.asarray(np.arange(30_000.0 + 1000 * k) % (5 + k)) for k in range(4)]
    run = hf.jit(with_temporaries, dynamic=True)
    expected = [run(x).item() for x in xs]
    wrong: list[float] = []

    def work(k: int) -> None:
        wrong.extend(
            found for _ in range(50) if (found := run(xs[k]).item()) != expected[k]
        )

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_running_program_holds_no_lock_of_python() -> None:
    run = hf.jit(churn)
    run(hf.asarray(1), hf.asarray(1))
    ticks, done = 0, threading.Event()

    def work() -> None:
        run(hf.asarray(300_000_000), hf.asarray(1))
        done.set()

    thread = threading.Thread(target=work)
    begun = time.perf_counter()
    thread.start()
    while not done.is_set() and time.perf_counter() - begun < 20:
        ticks += 1
        time.sleep(0.001)
    took = time.perf_counter() - begun
    thread.join()
    assert ticks > 20 * took  # of the thousand a second that there would be


def test_threads_trap_each_for_itself() -> None:
    run, found = hf.jit(take_one), {}

    def work(i: int) -> None:
        try:
            found[i] = run(hf.arange(4.0), hf.asarray(i)).item()
        except IndexingError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert found[i] == 2.0 * i
    for i in range(4, 8):
        assert f"index {i} is out of range" in found[i]


def test_a_memory_error_is_pythons_own() -> None:
    with pytest.raises(MemoryError):
        hf.jit(lambda: hf.zeros((2**45, 2**10)))()
