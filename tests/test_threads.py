"""Loops over examples, and long ones, over threads: results, traps, interrupts."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.cpu import pool, runtime
from hopflow.compiler.schedule.blocked_sums import BLOCK
from hopflow.errors import IndexingError

pytestmark = pytest.mark.slow

COUNTS = [1, 2, 5]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = hf.config.num_threads
    hf.config.num_threads = 4
    yield
    hf.config.num_threads = before


def decay(n: Any) -> Any:
    """As many steps as `n` says."""

    def step(k: Any, x: Any) -> Any:
        return k + 1, x * 0.999 + 1.0

    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(0.0)))[1]


def trips(count: int = 4000) -> Any:
    """A few times many, and about a millisecond of them, if not ten."""
    found = np.random.default_rng(0).integers(0, 2000, count)
    found[[0, count // 2, count - 1]] = 200_000
    return found


def decayed(n: Any) -> Any:
    return 1000.0 * (1 - 0.999**n)


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("run", [hf.vmap(decay), lambda ns: hf.map(decay, ns)])
def test_results_do_not_depend_on_the_number_of_threads(run: Any) -> None:
    ns, jitted, found = trips(), hf.jit(run), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append(np.asarray(jitted(ns)))
    np.testing.assert_allclose(found[0], decayed(ns))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert "threads independent" in jitted.loop_ir


LONG: dict[str, tuple[Any, tuple[int, ...]]] = {
    "elements": (lambda x: hf.exp(hf.sin(x)) * 2.0 + 1.0, (1_000_003,)),
    "a plane": (lambda x: hf.sin(x)[1:, 1:] - hf.cos(x)[:-1, :-1], (1201, 1003)),
    "rows": (lambda x: x / hf.sum(hf.exp(x), axis=1, keepdims=True), (1201, 1003)),
    "in place": (
        lambda x: hf.fori_loop(0, 3, lambda _, c: hf.cos(c) * 0.5 + c, x),
        (1_000_003,),
    ),
    "rolled": (lambda x: hf.tanh(hf.roll(hf.exp(x), 3) - x), (1_000_003,)),
    "checked": (lambda x: x[(x * 0.5).astype(hf.int64)] + x, (1_000_003,)),
    "checked rows": (
        lambda x: x[(x[:, :9] * 0.2).astype(hf.int64), 1] + x[:, :9],
        (140_001, 10),
    ),
    "a count": (lambda x: hf.sum((hf.exp(x) > 1.0).astype(hf.int8)), (1_000_003,)),
    "extremes": (
        lambda x: hf.max((hf.exp(x) * 9.0).astype(hf.int32)) - _least(x),
        (1_000_003,),
    ),
    "all and any": (
        lambda x: hf.stack([hf.all(hf.exp(x) > 0.0), hf.any(hf.exp(x) > 60.0)]),
        (1_000_003,),
    ),
}


def _least(x: Any) -> Any:
    return hf.min((hf.exp(-x) * 9.0).astype(hf.int32))


@pytest.mark.parametrize("name", LONG)
def test_long_loops_of_elements_have_the_same_bits_on_several_threads(
    name: str,
) -> None:
    f, shape = LONG[name]
    x = np.random.default_rng(0).normal(size=shape)
    jitted, found = hf.jit(f), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append(np.asarray(jitted(x)).tobytes())
    assert len(set(found)) == 1
    assert "threads independent" in jitted.loop_ir
    with hf.debug():
        want = f(hf.asarray(x))
    np.testing.assert_allclose(jitted(x), np.asarray(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LONG)
def test_loops_of_unknown_sizes_have_the_bits_of_known_ones(name: str) -> None:
    f, shape = LONG[name]
    known, unknown = hf.jit(f), hf.jit(f, dynamic=True)
    for rows in (shape[0], 1, 2, 4096, 4097, 8192):
        x = np.random.default_rng(0).normal(size=(rows, *shape[1:]))
        want = np.asarray(known(x)).tobytes()
        for count in COUNTS:
            hf.config.num_threads = count
            assert np.asarray(unknown(x)).tobytes() == want
    assert "threads independent" in unknown.loop_ir


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint64"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        *((300, 200, 111), (65, 130, 1601), (1, 3000, 2001), (2001, 3000, 1)),
        *((1, 300, 1601), (401, 400, 1)),  # a matrix is read for a vector
    ],
)
def test_large_products_have_the_same_bits_on_several_threads(
    shape: tuple[int, int, int], dynamic: bool, dtype: str
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s, scale=9).astype(dtype) for s in ((m, k), (k, n)))
    a_t, b_t = (np.ascontiguousarray(x.T) for x in (a, b))
    eps = np.finfo(dtype).eps if "float" in dtype else 0
    for f, x, y in (
        (lambda x, y: x @ y, a, b),
        (lambda x, y: x.T @ y, a_t, b),
        (lambda x, y: x @ y.T, a, b_t),
        (lambda x, y: x.T @ y.T, a_t, b_t),
    ):
        run, found = hf.jit(f, dynamic=dynamic), []
        for count in COUNTS:
            hf.config.num_threads = count
            found.append(np.asarray(run(x, y)).tobytes())
        assert len(set(found)) == 1
        scale = np.abs(a) @ np.abs(b)
        assert (np.abs(np.asarray(run(x, y)) - a @ b) <= k * eps * scale).all()
        assert "@hf_shared_gemm(ptr %block" in run.llvm_ir


@pytest.mark.parametrize("shape", [(200, 40, 50, 60), (3, 300, 200, 200), (0, 2, 2, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_batches_have_the_same_bits_on_several_threads(
    shape: tuple[int, int, int, int], dynamic: bool
) -> None:
    batch, m, k, n = shape
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, m, k)), rng.normal(size=(batch, k, n))
    run, found = hf.jit(lambda x, y: x @ y, dynamic=dynamic), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append(np.asarray(run(x, y)).tobytes())
    assert len(set(found)) == 1
    np.testing.assert_allclose(run(x, y), x @ y, atol=1e-10)


def test_large_products_within_a_loop_over_threads() -> None:
    """The loop has the threads: its products run on one of them each."""
    x = np.random.default_rng(0).normal(size=(4, 200, 200)) / 15

    def power(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, y: y @ x, x)

    run, found = hf.jit(lambda x: hf.map(power, x)), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append(np.asarray(run(x)).tobytes())
    assert len(set(found)) == 1
    np.testing.assert_allclose(run(x), x @ x @ x @ x, atol=1e-12)


def test_an_error_in_a_loop_of_unknown_size_is_the_first_one() -> None:
    def f(x: Any, k: Any) -> Any:
        return hf.map(lambda k: hf.fori_loop(0, 9, lambda i, y: y + x[k + i], 0.0), k)

    x, k = np.arange(100.0), np.arange(3000) % 90
    run = hf.jit(f, dynamic=True)
    run(x, k)
    assert "threads independent" in run.loop_ir
    k[[700, 2999]] = 200, 300
    with pytest.raises(IndexingError, match="index 200 is out of range"):
        run(x, k)
    with pytest.raises(IndexingError, match="index 300 is out of range"):
        run(x, k[2999:])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wrong", [[0], [4095], [4096, 999_999], [700_000, 999_999]])
def test_the_first_index_out_of_range_of_all_threads_is_reported(
    dynamic: bool, wrong: list[int]
) -> None:
    def f(x: Any, k: Any) -> Any:
        return hf.sin(x[k]) * x[k] + x[k] * 0.5

    x, k = np.random.default_rng(0).normal(size=100), np.arange(1_000_000) % 100
    run = hf.jit(f, dynamic=dynamic)
    want = np.sin(x[k]) * x[k] + x[k] * 0.5
    np.testing.assert_allclose(np.asarray(run(x, k)), want, rtol=1e-13)
    assert "failed" in run.loop_ir
    assert "threads independent" in run.loop_ir
    k[wrong] = 200 + np.arange(len(wrong))
    for _ in range(2):
        with pytest.raises(IndexingError, match="index 200 is out of range"):
            run(x, k)
    k[wrong] = -100
    np.testing.assert_allclose(
        np.asarray(run(x, k)), np.sin(x[k]) * x[k] + x[k] * 0.5, rtol=1e-13
    )


def test_loops_that_count_have_any_size_that_only_the_run_knows() -> None:
    def f(x: Any, k: Any) -> Any:
        y = hf.exp(x[k[k >= 0]])
        return y, hf.sum((y > 1.0).astype(hf.int32)), hf.any(y > 2.0)

    x, k = np.random.default_rng(0).normal(size=100), np.arange(1_000_003) % 100
    run = hf.jit(f)
    for least in (0, 50, 99, 100):  # all, some, few, none
        chosen = np.where(k < least, -1, k)
        want = np.exp(x[chosen[chosen >= 0]])
        got = run(x, chosen)
        np.testing.assert_allclose(np.asarray(got[0]), want, rtol=1e-14)
        assert int(got[1]) == np.count_nonzero(want > 1.0)
        assert bool(got[2]) == bool((want > 2.0).any())
    k[700_000] = 200
    with pytest.raises(IndexingError, match="index 200 is out of range"):
        run(x, k)


def test_short_loops_have_one_thread() -> None:
    jitted = hf.jit(hf.sin)
    jitted(np.zeros(10_000, np.float32))
    assert "threads" not in jitted.loop_ir


REDUCTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "sum": lambda x: hf.sum(x),
    "sum of functions": lambda x: hf.sum(hf.exp(x)),
    "products": lambda x: hf.vecdot(x, x),
    "moments": lambda x: (hf.mean(x), hf.std(x)),
    "extrema": lambda x: (hf.max(x), hf.min(x)),
    "many": lambda x: (hf.sum(x), hf.max(x), hf.any(x > 2), hf.sum(x > 1), hf.sin(x)),
    "rows": lambda x: hf.sum(x[: len(x) // 5 * 5].reshape((5, -1)) * 2.0),
    "pieces of rows": lambda x: hf.sum(
        hf.pad(x[: len(x) // 5 * 5].reshape((5, -1)), ((0, 0), (3000, 4000))) * 0.3
    ),
    "in steps": lambda x: hf.fori_loop(0, 3, lambda _, c: hf.sum(x * c) * 1e-3, 1.0),
    "of each row": lambda x: hf.sum(x[: len(x) // 3 * 3].reshape((3, -1)), axis=1),
    "of examples": lambda x: hf.vmap(lambda k: hf.sum(x * k))(hf.arange(3)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("f", REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions_have_the_same_bits_on_several_threads(f: Any, dtype: Any) -> None:
    """And whether their sizes are known or not."""
    static, dynamic = hf.jit(f), hf.jit(f, dynamic=True)
    for n in (BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1_000_003):
        x = np.random.default_rng(n).normal(size=n).astype(dtype)
        found = set()
        for run, count in product((static, dynamic), COUNTS):
            hf.config.num_threads = count
            leaves, _ = pytree.flatten(run(x))
            found.add(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        assert len(found) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_of_many_floats_lose_few_digits(dynamic: bool) -> None:
    x = np.random.default_rng(0).uniform(size=20_000_000).astype(np.float32)
    wide = x.astype(np.float64)
    f = hf.jit(lambda x: (hf.sum(x), hf.mean(x**4), hf.vecdot(x, x)), dynamic=dynamic)
    wants = (wide.sum(), (wide**4).mean(), wide @ wide)
    for got, want in zip(f(x), wants, strict=True):
        assert float(got) == pytest.approx(float(want), rel=2e-6)
    assert dynamic or "threads" in f.loop_ir


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_loops_of_few_examples(length: int) -> None:
    ns = np.full(length, 300_000)
    got = hf.jit(hf.vmap(decay), dynamic=True)(ns)
    np.testing.assert_allclose(np.asarray(got), decayed(ns))


def test_scans_of_examples_and_what_they_share() -> None:
    def total(x: Any) -> Any:
        return hf.scan(lambda c, w: (hf.cos(c * w) + shift, None), x, weights)[0]

    weights, shift = hf.asarray(np.linspace(0.0, 1.0, 500)), hf.asarray(0.25)
    xs = np.linspace(-1.0, 1.0, 300)
    expected = xs
    for w in np.asarray(weights):
        expected = np.cos(expected * w) + 0.25
    run = hf.jit(lambda xs: hf.map(total, xs))
    np.testing.assert_allclose(np.asarray(run(xs)), expected)
    assert "threads independent" in run.loop_ir


def products(xs: Any) -> Any:
    """A chain of products for each example; where it is small they change places."""

    def one(x: Any) -> Any:
        def step(c: Any, w: Any) -> Any:
            new = hf.tanh(c @ w + x)
            return hf.cond(hf.sum(new) > 0, lambda: (new @ w, None), lambda: (c, None))

        return hf.scan(step, x, WEIGHTS)[0]

    return hf.map(one, xs)


WEIGHTS = hf.asarray(np.random.default_rng(1).standard_normal((30, 48, 48)) / 7)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (hf.sort(x), hf.argsort(x, descending=True)),
        lambda x: (hf.sort(x, axis=0),),
        lambda x: hf.top_k(x, 3),
    ],
    ids=["last axis", "first axis", "top_k"],
)
@pytest.mark.parametrize("shape", [(400, 700), (3, 5, 40_000), (1, 9), (0, 5)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_are_sorted_on_several_threads(
    f: Any, shape: tuple[int, ...], dynamic: bool
) -> None:
    """The memory that a sort needs is that of a thread, also between guard pages."""
    x = np.random.default_rng(0).integers(0, 100, shape).astype("f")
    jitted, found = hf.jit(f, dynamic=dynamic), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append([np.asarray(y) for y in jitted(x)])
    for other in [*found[1:], f(x)]:
        for y, z in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(np.asarray(y), z)
    if len(shape) == 3 or shape[0] > 1:
        assert "threads independent" in jitted.loop_ir


def joined(xs: Any) -> Any:
    """Products for each example, which are rows of the result."""

    def one(x: Any) -> Any:
        last = hf.fori_loop(0, 5, lambda _, c: hf.tanh(c @ x), x)
        return hf.concat([last @ x, hf.sin(last)])

    return hf.map(one, xs)


@pytest.mark.parametrize(
    "f",
    [products, hf.grad(lambda xs: hf.sum(products(xs) ** 2)), joined],
    ids=["f", "grad", "joined"],
)
def test_threads_have_memory_of_their_own(f: Any) -> None:
    xs = np.random.default_rng(0).standard_normal((40, 48, 48))
    jitted, found = hf.jit(f), []
    for count in COUNTS:
        hf.config.num_threads = count
        found.append(np.asarray(jitted(xs)))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert "threads independent" in jitted.loop_ir
    some = np.asarray(f(xs[17:18]))
    np.testing.assert_allclose(found[0][17:18], some, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [0, 3])
def test_what_threads_have_of_their_own_is_as_large_as_sizes_say(length: int) -> None:
    xs = np.random.default_rng(0).standard_normal((length, 48, 48))
    got = hf.jit(products, dynamic=True)(xs)
    np.testing.assert_allclose(np.asarray(got), np.asarray(products(xs)), rtol=1e-12)


def test_loops_in_a_step_of_a_loop() -> None:
    def step(c: Any, _: Any) -> Any:
        return hf.vmap(decay)(c) / 500.0, None

    ns = trips(300).astype(np.float64)
    got = hf.jit(lambda c: hf.scan(step, c, None, length=3)[0])(ns)
    expected = ns
    for _ in range(3):
        expected = decayed(np.ceil(expected)) / 500.0
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6)


SHORT_LOOPS = np.linspace(0.0, 1.0, 150_000)


def series(x: Any, count: Any) -> Any:
    """Many loops of some tens of microseconds, each soon after the one before; the last
    ones stop the program if `count` is too small for their steps."""

    def step(k: Any, x: Any) -> Any:
        hf.check(k < count, "too many steps")
        turned = hf.concat([x[1:], x[:1]])
        return turned * 0.5 + hf.minimum(x, 1.0) * 0.25

    return hf.fori_loop(0, 300, step, x)


def test_a_series_of_short_loops_has_the_same_bits_on_several_threads() -> None:
    jitted, found = hf.jit(series), []
    for count in (*COUNTS, *COUNTS):
        hf.config.num_threads = count
        found += [np.asarray(jitted(SHORT_LOOPS, 300)).tobytes() for _ in range(3)]
    assert len(set(found)) == 1
    assert "        for " in jitted.loop_ir
    assert "_block in 0..37 threads" in jitted.loop_ir
    with pytest.raises(hf.errors.CheckError, match="too many steps"):
        jitted(SHORT_LOOPS, 299)


def test_the_time_of_a_series_is_kept_for_its_next_beginning() -> None:
    """By the function of its first loop, on one thread: so other threads are woken at
    the beginning of a series that is known to be long."""
    hf.config.num_threads = 1
    jitted = hf.jit(series)
    for _ in range(2):
        jitted(SHORT_LOOPS, hf.asarray(300))
        time.sleep(0.001)  # longer than `SPIN`: the next call begins a series
    words = list(runtime._pool)
    entries = [words[k : k + 4] for k in range(pool.TIMES, pool.HANDLES, 4)]
    [entry] = [e for e in entries if e[0] == words[pool.FIRST]]
    assert entry[2] == words[pool.TOTAL] > entry[1] / 1000


def test_series_of_several_threads_of_the_user_do_not_disturb_each_other() -> None:
    jitted = hf.jit(series)
    expected, found = np.asarray(jitted(SHORT_LOOPS, 300)), list[Any]()

    def call() -> None:
        found.extend(np.asarray(jitted(SHORT_LOOPS, 300)) for _ in range(3))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 9
    for other in found:
        np.testing.assert_array_equal(other, expected)


def test_a_loop_in_a_step_has_threads_if_it_is_a_quarter_as_long() -> None:
    x = np.ones(150_000)
    jitted = hf.jit(lambda x: hf.fori_loop(0, 3, lambda _, x: x * 2.0 + x[::-1], x))
    jitted(x)
    assert "threads" in jitted.loop_ir
    once = hf.jit(lambda x: x * 2.0 + x[::-1])
    once(x)
    assert "threads" not in once.loop_ir


def test_blocks_of_dear_elements_are_short() -> None:
    def normal(key: Any) -> Any:
        return hf.random.normal(key, (100_000,))

    jitted = hf.jit(normal)
    jitted(hf.random.key(0))
    assert "_row in 0..min(1024, " in jitted.loop_ir
    cheap = hf.jit(lambda x: x * 2.0 + x[::-1])
    cheap(np.ones(2_000_000))
    assert "_row in 0..min(4096, " in cheap.loop_ir


def test_calls_from_several_threads_at_once() -> None:
    ns, run, found = trips(), hf.jit(hf.vmap(decay)), {}
    run(ns)

    def call(k: int) -> None:
        found[k] = np.asarray(run(ns))

    callers = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for k in range(4):
        np.testing.assert_allclose(found[k], decayed(ns))


HELPED = """
import os, time
import numpy as np
import hopflow as hf

hf.config.num_threads = 4

def decay(n):
    step = lambda k, x: (k + 1, x * 0.999 + 1.0)
    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(0.0)))[1]

def started():
    "How many threads there are more than at the beginning."
    return len(os.listdir("/proc/self/task")) - before

run = hf.jit(hf.vmap(decay))
few, many = np.full(200, 10), np.full(200, 100_000)
many[0] = FIRST  # the first thread may be busy with what it has taken
run(few)
before = len(os.listdir("/proc/self/task"))
run(few)
print(started(), end=" ")
for _ in range(2):
    run(many)
    print(started(), end=" ")
hf.config.num_threads = 2
run(many)
print(started(), end=" ")
child = os.fork()
if not child:
    before = len(os.listdir("/proc/self/task"))
    found = np.asarray(run(many))
    print(started(), np.all(found == np.asarray(run(many))), flush=True)
    os._exit(0)
os.waitpid(child, 0)
run(many)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts in /proc")
@pytest.mark.parametrize("first", [1000, 100_000_000])
def test_other_threads_are_made_once_and_stay(first: int) -> None:
    """In a process of its own, and in one that it forks."""
    program = HELPED.replace("FIRST", str(first))
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "3", "3", "3", "1", "True"]


FORKED = """
import os, signal, threading
import numpy as np
import hopflow as hf
from hopflow.errors import ForkError

def decay(n):
    def step(k, x):
        return k + 1, x * 0.5
    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(1.0)))[1]

hf.config.num_threads = 4
run, parent, children = hf.jit(hf.vmap(decay)), os.getpid(), []
signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
ns = np.full(100, 1000)
run(ns)
run(np.full(400, 1000))  # another size is compiled, for all sizes
status = OUTSIDE = 2
while status == OUTSIDE:  # until a signal comes within a loop that threads share
    children.clear()
    timer = threading.Timer(0.1, os.kill, (parent, signal.SIGUSR1))
    timer.start()
    try:
        x = run(np.full(400, 5_000_000))
    except ForkError:
        assert os.getpid() != parent
        os._exit(int((np.asarray(run(ns)) == 0.5**1000).all()))
    if os.getpid() != parent:
        os._exit(OUTSIDE)  # it was forked before the loop, or after it
    timer.join()
    while not children:
        pass  # the handler runs between two steps of Python
    status = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
    assert (np.asarray(x) == 0).all()
print(status)
"""


def test_a_fork_by_a_signal_handler_within_a_loop_is_an_error_in_the_child() -> None:
    """The child lacks the other threads, and must not wait for them."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1"]


MASKED = """
import os, signal
import numpy as np
import hopflow as hf

hf.config.num_threads = 4
hf.jit(lambda x: x @ x)(np.ones((400, 400)))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1)
"""


def test_the_threads_take_no_signals() -> None:
    command = [sys.executable, "-c", MASKED]
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # without threads of its own
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    assert ran.stdout.split() == ["True"]


APART = """
import os
import numpy as np
import hopflow as hf

def decay(n):
    step = lambda k, x: (k + 1, x * 0.5)
    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(1.0)))[1]

def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}

hf.config.num_threads = 4
run, before = hf.jit(hf.vmap(decay)), tasks()
allowed = os.sched_getaffinity(0)
for _ in range(100):  # a thread may come late where processors are busy
    run(np.full(400, 100_000))
    own = [os.sched_getaffinity(task) for task in tasks() - before]
    apart = [len(allowed - each) == 1 and each < allowed for each in own]
    is_apart = all(apart) if len(allowed) > 1 else own == [allowed] * 3
    if len(own) == 3 and is_apart:
        break
print(len(own), is_apart)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no affinity")
def test_other_threads_leave_the_processor_of_the_first_one() -> None:
    command = [sys.executable, "-W", "ignore", "-c", APART]
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # without threads of its own
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    assert ran.stdout.split() == ["3", "True"]


BUSY = """
import os, threading, time
import numpy as np
import hopflow as hf

hf.config.num_threads = 2

def decay(n):
    step = lambda k, x: (k + 1, x * 0.999 + 1.0)
    return hf.while_loop(lambda k, _: k < n, step, (0, np.float64(0.0)))[1]

def tasks():
    return set(os.listdir("/proc/self/task"))

run, before = hf.jit(hf.vmap(decay)), tasks()
run(np.full(200, 100_000))
[helper] = tasks() - before

def ticks():
    with open(f"/proc/self/task/{helper}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[11])

first = threading.Thread(target=run, args=(np.full(200, 10_000_000),))
second = threading.Thread(target=run, args=(np.full(600, 10_000_000),))
first.start()
time.sleep(0.05)
second.start()
first.join()
helped = ticks()
second.join()
print(ticks() - helped)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_a_loop_that_finds_the_pool_busy_asks_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) >= 10


# --- traps and interrupts -------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_the_trap_of_the_lowest_example_is_reported(count: int) -> None:
    def pick(n: Any, at: Any) -> Any:
        return decay(n) + table[at]

    table = hf.asarray(np.arange(10.0))
    hf.config.num_threads = count
    ns, at = trips(), np.arange(4000) % 10
    run = hf.jit(lambda ns, at: hf.map(lambda x: pick(*x), (ns, at)))
    np.testing.assert_allclose(np.asarray(run(ns, at)), decayed(ns) + at)
    assert "threads independent" in run.loop_ir
    at[[3999, 3500, 2001, 2000 + 777]] = 13, 14, 15, 16
    with pytest.raises(IndexingError, match="index 15 is out of range"):
        run(ns, at)


FOREVER = np.iinfo(np.int64).max


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("endless", [[0], [199], [3, 150], range(200)])
def test_ctrl_c_stops_all_threads(endless: Any) -> None:
    ns = np.full(200, 10_000)
    run = hf.jit(hf.vmap(decay))
    run(ns)
    ns[list(endless)] = FOREVER
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(ns)
    assert time.monotonic() - started < 20
    timer.join()
    np.testing.assert_allclose(np.asarray(run(ns * 0 + 5)), decayed(5))


def test_an_interrupt_stops_what_a_thread_of_the_user_leads() -> None:
    ns, run, caught = np.full(200, 10_000), hf.jit(hf.vmap(decay)), []
    run(ns)
    ns[[0, 199]] = FOREVER

    def call() -> None:
        try:
            run(ns)
        except KeyboardInterrupt as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.2)
    hf.interrupt(caller.ident)
    caller.join(20)
    assert caught


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_results_of_blocks_of_several_flags_are_apart(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "verify", True)
    x = np.arange(600_000, dtype=np.int32).reshape(-1, 2) % 1000

    def f(x: Any) -> Any:
        return hf.any(x > 998), hf.max(x), hf.sum(x)

    run = hf.jit(f, dynamic=dynamic)
    assert [int(v) for v in run(x)] == [1, 999, int(x.sum())]
