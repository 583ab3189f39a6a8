"""Compiled programs with sizes that only a run knows."""

import gc
import resource
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.bind import current, using
from hopflow.compiler.owned import owned_array
from hopflow.compiler.pipeline import Executable, lower
from hopflow.compiler.reuse import reuse
from hopflow.errors import CheckError, ShapeError
from hopflow.graph.core import Graph
from hopflow.graph.verifier import verify
from hopflow.loop_ir.interpreter import run
from hopflow.symbolic.env import ShapeEnv
from hopflow.tensor import EagerTensor, asarray
from hopflow.testing.graphs import read
from hopflow.trace.tracer import Tracer

pytestmark = pytest.mark.slow


def traced(f: Callable[..., Any], *args: Any) -> Graph:
    """The graph of `f`, whose values may become sizes."""
    tracer = Tracer(None, "f", env=ShapeEnv())
    operands = [tracer.operand(a.type, f"x{k}") for k, a in enumerate(args)]
    with using(tracer):
        results = f(*operands)
    graph = tracer.close(pytree.flatten(results)[0])
    verify(graph)
    return graph


def tensors(*values: Any) -> list[EagerTensor]:
    return [EagerTensor(np.asarray(v)) for v in values]


def size_of(tensor: Any, most: int = 100) -> Any:
    """An integer tensor as a size."""
    return current().symbol_of(tensor, min=0, max=most)


def same(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def check_program(f: Callable[..., Any], *args: Any) -> None:
    """Compiled code and the Loop IR agree with eager execution."""
    graph = traced(f, *args)
    compiled = Executable(graph)
    expected = [np.asarray(x) for x in pytree.flatten(f(*args))[0]]
    for tensor, theirs in zip(compiled(args), expected, strict=True):
        same(tensor.array, theirs)
    program = lower(graph)[1]
    arrays = [np.array(a, order="C") for a in args]
    results = run(program, [], arrays, offsets=reuse(program).offsets)
    for ours, theirs in zip(results, expected, strict=True):
        same(ours, theirs)


RNG = np.random.default_rng(0)
MASKS = {
    "random": RNG.random(70) < 0.3,
    "none": np.zeros(70, bool),
    "all": np.ones(70, bool),
    "empty": np.zeros(0, bool),
    "one": np.arange(70) == 69,
}


@pytest.mark.parametrize("name", MASKS)
def test_nonzero(name: str) -> None:
    mask = MASKS[name]
    check_program(lambda m: hf.nonzero(m), asarray(mask))
    cube = asarray(mask.reshape(-1, 5, 2) * RNG.normal(size=(len(mask) // 10, 5, 2)))
    check_program(lambda x: hf.nonzero(x), cube)


@pytest.mark.parametrize("name", MASKS)
def test_boolean_indices(name: str) -> None:
    mask = asarray(MASKS[name])
    x = asarray(RNG.normal(size=(len(MASKS[name]), 3)).astype("f"))
    index = asarray(2)
    check_program(
        lambda x, m, i: (
            x[m],
            x[m] * 2 + 1,
            x[m, 1],
            x[m, 1:],
            x[m, None, ::-1],
            x[m, i],
            x.T[1:, m],
            hf.sum(x[m]),
            x[x > 0],
            hf.exp(x[m]) - hf.sum(x[m], axis=0),
        ),
        x,
        mask,
        index,
    )


VALUES = {
    "few": RNG.integers(0, 9, (4, 7)),
    "floats": np.array([3.5, -0.0, 0.0, np.nan, 3.5, np.nan, -np.inf], "f"),
    "same": np.ones(20, np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "bools": RNG.random(9) < 0.5,
}


@pytest.mark.parametrize("name", VALUES)
def test_distinct_values(name: str) -> None:
    x = asarray(VALUES[name])
    check_program(lambda x: tuple(hf.unique_all(x)), x)
    check_program(lambda x: tuple(hf.unique_counts(x)), x)
    check_program(lambda x: tuple(hf.unique_inverse(x)), x)
    check_program(hf.unique_values, x)


COUNTS: list[Any] = [[2, 0, 3, 1], [0, 0, 0, 0], [4], 3]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_repeats(counts: Any, axis: int | None) -> None:
    x = asarray(np.arange(16.0).reshape(4, 4))
    if axis is None:
        x = x[0]
    check_program(lambda x, c: hf.repeat(x, c, axis=axis), x, asarray(counts))


def test_no_repeat_is_negative() -> None:
    x, counts = tensors(np.arange(3), [1, -1, 2])
    compiled = Executable(traced(lambda x, c: hf.repeat(x, c), x, counts))
    with pytest.raises(CheckError, match="must not be negative"):
        compiled([x, counts])


def loops(x: Any, m: Any) -> Any:
    n = size_of(hf.count_nonzero(m))
    _, total = hf.while_loop(
        lambda i, _: i < n, lambda i, a: (i + 1, a + x[i]), (0, 0.0)
    )
    carry, steps = hf.scan(lambda c, _: (c + 1.5, c), 0.0, length=n)
    return total, carry, steps, hf.fori_loop(0, n, lambda i, a: a + i, 0)


def bodies(x: Any, m: Any) -> Any:
    """Sizes made in bodies, none of which reaches a result."""

    def step(total: Any, row: Any) -> Any:
        return total + hf.sum(row[row > 0]), hf.sum(hf.sort(row[row < 0]))

    some = hf.cond(m[0], lambda: hf.sum(x[m]), lambda: hf.sum(x[x > 1]))
    rows = hf.reshape(x, (2, -1))
    _, count = hf.while_loop(
        lambda i, _: i < 5,
        lambda i, a: (i + 1, a + hf.sum(hf.exp(x[x > 0.2 * hf.astype(i, "float64")]))),
        (0, 0.0),
    )
    return some, hf.scan(step, 0.0, rows), hf.map(lambda r: r[r > 0].sum(), rows), count


PROGRAMS: dict[str, Callable[..., Any]] = {
    "filled": lambda x, m: hf.full((size_of(hf.count_nonzero(m)), 3), 2.0),
    "counted": lambda x, m: hf.arange(size_of(hf.count_nonzero(m))),
    "multiplied": lambda x, m: hf.ones((hf.nonzero(x)[0].shape[0], x[m].shape[0])),
    "outer": lambda x, m: x[m][:, None] * x[x > 0][None, :],
    "flattened": lambda x, m: hf.ravel(x[m][:, None] * x[x > 0][None, :]),
    "twice": lambda x, m: (x[m], x[m], hf.sin(x[m]), -hf.sin(x[m])),
    "product": lambda x, m: hf.map(lambda r: r[None, :] @ r[:, None], x[m][:, None]),
    "one size": lambda x, m: x[m] * (2 * x)[m] + hf.ones((hf.nonzero(m)[0].shape[0],)),
    "sorted": lambda x, m: (hf.sort(x[m]), hf.cumulative_sum(x[m]), hf.flip(x[m])),
    "again": lambda x, m: hf.nonzero(x[m] > 0),
    "loops": loops,
    "bodies": bodies,
    "carried": lambda x, m: hf.fori_loop(0, 3, lambda _, a: hf.roll(a, 1) + 1, x[m]),
    "exchanged": lambda x, m: hf.fori_loop(
        0, 3, lambda _, a, b: (2 * a - b, a), (x[m], hf.sin(x[m]))
    ),
    "rotated": lambda x, m: hf.fori_loop(
        0, 4, lambda _, *c: (c[1], c[2], hf.roll(c[0], 1)), (x[m], x[m] * 2, x[m] + 1)
    ),
    "exchanged and read": lambda x, m: (
        found := hf.fori_loop(0, 3, lambda _, a, b: (2 * a - b, a), (x[m], x[m] * 2)),
        hf.sum(found[0]),
        found[0],
    ),
    "scanned": lambda x, m: hf.scan(lambda c, v: (c + v, c * v), 0.0, x[m]),
    "mapped": lambda x, m: hf.map(
        lambda v: hf.fori_loop(0, 3, lambda _, a: a * v, v), x[m]
    ),
    "chosen": lambda x, m: hf.cond(m[1], lambda a: hf.sin(a), lambda a: a + 1, (x[m],)),
    "written": lambda x, m: hf.zeros(x[m].shape).at[0:0].set(1.0),
    "unused": lambda x, m: (hf.nonzero(m), x)[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_programs(name: str, share: float) -> None:
    x = asarray(RNG.normal(size=40))
    check_program(PROGRAMS[name], x, asarray(RNG.random(40) < share))


@pytest.mark.parametrize(
    ("name", "copies"), [("exchanged", 0), ("rotated", 0), ("exchanged and read", 1)]
)
def test_carries_that_change_places_are_handed_over(name: str, copies: int) -> None:
    """The memory of a result of a size that the run finds is that of the carry."""
    x, m = RNG.normal(size=40), RNG.random(40) < 0.5
    compiled = hf.jit(PROGRAMS[name])
    compiled(x, m)
    lines = [line.strip() for line in compiled.loop_ir.splitlines()]
    assert sum(line.startswith("copy out") for line in lines) == copies


BOTH = """\
def f(
        n: i64, /, x: f64[n], m: bool[n], k: i64
) -> tuple[f64[2*u0, n], f64[u1], i64[u1]]:
    v0: i64[n] = convert(m, dtype=i64)
    v1: i64 = reduce_sum(v0, axes=(0,))
    u0: i64 = int(item(v1, min=0))
    u1: i64 = int(item(k, min=0, max=1000000000000000000))
    v2: f64[2*u0, n] = full(f64(1.0), shape=(2*u0, n))
    v3: f64[2*u0, n] = add(v2, x)
    v4: i64[u1] = iota(shape=(u1,), axis=0, dtype=i64)
    v5: f64[u1] = convert(v4, dtype=f64)
    return v3, v5, v4
"""


def arguments(n: int, k: int) -> list[EagerTensor]:
    x = EagerTensor(np.arange(float(n)))
    return [x, EagerTensor(np.arange(n) % 2 == 0), EagerTensor(np.asarray(k))]


def test_sizes_of_inputs_and_of_values_together() -> None:
    compiled = Executable(read(BOTH))
    for n, k in [(3, 4), (0, 0), (17, 1), (1, 100)]:
        first, second, third = compiled(arguments(n, k))
        same(first.array, np.ones((2 * (-(-n // 2)), n)) + np.arange(float(n)))
        same(second.array, np.arange(float(k)))
        same(third.array, np.arange(k))


@pytest.mark.parametrize("k", [1 << 52, 10**18])
def test_no_room_is_a_memory_error(k: int) -> None:
    with pytest.raises(MemoryError):
        Executable(read(BOTH))(arguments(3, k))


def test_a_trap_names_the_symbol_its_range_and_the_line() -> None:
    line = "model.py:12"
    text = BOTH.replace(
        "item(k, min=0, max=1000000000000000000)", "item(k, min=1, max=9)"
    )
    graph = read(text.replace("max=9))", f"max=9))  # {line}"))
    for k in (0, 10, -5):
        message = rf"`u1` \({line}\) is {k}, and must be at least 1 and at most 9"
        with pytest.raises(CheckError, match=message):
            Executable(graph)(arguments(3, k))


def test_a_size_below_zero_is_no_memory_either() -> None:
    """Of a symbol that is known to be none, wrongly."""
    graph = read(BOTH.replace("item(k, min=0,", "item(k, min=0, known=True,"))
    with pytest.raises(MemoryError):
        Executable(graph)(arguments(3, -5))


def test_results_own_their_memory() -> None:
    compiled = Executable(read(BOTH))
    first, second, _ = compiled(arguments(4, 1000))
    part = second.array[10:20]
    del second, first, compiled
    gc.collect()
    same(part, np.arange(10.0, 20.0))
    part[:] = 0


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes


@pytest.mark.parametrize("k", [5000, -1, 1 << 52], ids=["done", "trap", "memory"])
def test_nothing_is_lost_in_many_calls(k: int) -> None:
    """Results, what a trap leaves behind, and what a body allocates in each step."""
    compiled = Executable(read(BOTH))
    args = arguments(20, k)

    def calls(count: int) -> None:
        for _ in range(count):
            with suppress(CheckError, MemoryError):
                compiled(args)

    calls(100)
    before = resident()
    calls(10_000)
    assert resident() - before < 4000  # one leak a call would be 400,000


def test_an_interrupt_frees_what_was_allocated() -> None:
    def f(k: Any) -> Any:
        a = hf.full((size_of(k, 10**9),), 1.0, dtype="float64")
        return hf.while_loop(lambda b: b[0] > 0, lambda b: b + 1, a)

    [k] = tensors(5_000_000)
    compiled = Executable(traced(f, k))
    peaks = []
    for _ in range(4):
        done = Event()

        def interrupt(done: Event = done) -> None:
            while not done.wait(0.05):  # again, if the program had not begun
                hf.interrupt()

        thread = Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            compiled([k])
        done.set()
        thread.join()
        peaks.append(resident())
    assert peaks[-1] - peaks[0] < 40_000  # of one array


def test_a_loop_reuses_what_it_allocates() -> None:
    x, m = tensors(RNG.normal(size=4000), np.ones(4000, bool))

    def f(x: Any, m: Any) -> Any:
        def step(_: Any, a: Any) -> Any:
            return a + hf.sum(hf.sort(x[m])) + hf.sum(hf.cumulative_sum(x[x > a]))

        return hf.fori_loop(0, 1000, step, hf.sum(x) * 0)

    compiled = Executable(traced(f, x, m))
    before = resident()
    compiled([x, m])
    assert resident() - before < 8000


def test_what_is_beside_allocated_memory_stays() -> None:
    """Outputs of known sizes are within guards; the others are as large as they say."""
    graph = traced(
        lambda x: (x * 2, x[x > 0], hf.nonzero(x)[0]), EagerTensor(X := np.ones(9))
    )
    compiled = Executable(graph)
    for length in range(9):
        x = X * (np.arange(9) < length)
        block = np.full(9 + 8, -7.0)
        words = [np.full(2 + 4, -7, np.int64) for _ in range(2)]
        assert compiled.kernel(x, block[4:13], *(w[2:4] for w in words)) is None
        assert (block[:4] == -7).all()
        assert (block[13:] == -7).all()
        for w in words:
            assert (w[[0, 1, 4, 5]] == -7).all()
            assert w[3] == length
            owned_array(w[2:4], np.dtype(np.float64), compiled.kernel.free)


def twice(v: Any) -> Any:
    """One body, whose symbol is another size in each call."""
    positive = hf.subgraph(lambda a: hf.map(lambda r: hf.sum(r[r > 0]), a))
    rows = v[v > 0][:, None] * v
    return positive(rows), positive(rows.T)


JITTED: dict[str, Callable[..., Any]] = {
    "prefixes": lambda v: hf.associative_scan(lambda a, b: a + b, v[v > 0]),
    "products": lambda v: hf.associative_scan(
        lambda a, b: a @ b, v[:, None, None] * hf.ones((v.shape[0], v.shape[0]))
    ),
    "chosen": lambda v: hf.cond(
        v[0] > 0, lambda a: a * 2, lambda a: a + 1, (v[v > 0],)
    ),
    "captured": lambda v: (lambda a: hf.cond(v[0] > 0, lambda: a * 2, lambda: a))(
        v[v < 1]
    ),
    "nested": lambda v: hf.map(lambda e: hf.sum(v[v > e]), v[v > 0]),
    "twice": twice,
    "stacked": lambda v: hf.scan(lambda c, _: (c * 2, c), v[v > 0], length=3)[1],
    "length": lambda v: hf.scan(lambda c, _: (c * 2, c), v, length=v[v > 0].shape[0])[
        1
    ],
    "above": lambda v: (lambda a: a[a > hf.sum(a) / 3])(v[v > 0]),
    "joined": lambda v: hf.concat([v[v > 0], v[v < 0]]),
    "number": lambda v: v[v > 0].shape[0],
    "divided": lambda v: (
        lambda n: hf.concat([hf.nonzero(v < -9)[0] // hf.nonzero(v < -9)[0], n])
    )(hf.nonzero(v)[0]),
    "padded": lambda v: hf.pad(hf.roll(v[v > 9], 1), 2),
    "looked up": lambda v: hf.searchsorted(hf.flip(v[v > 9]), v),
}


@pytest.mark.parametrize("name", JITTED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_jitted(name: str, dynamic: bool) -> None:
    f = JITTED[name]
    jitted = hf.jit(f, dynamic=dynamic)
    drawn = RNG.normal(size=(3, 5))
    for values in (drawn[0, :3], np.abs(drawn[1]), -np.abs(drawn[2])):
        v = asarray(values)
        with hf.debug():
            expected = pytree.flatten(f(v))[0]
        for ours, theirs in zip(pytree.flatten(jitted(v))[0], expected, strict=True):
            same(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(
    "f",
    [
        lambda m: hf.map(lambda r: r[r > 0], m),
        lambda m: hf.scan(lambda c, r: (c, r[r > 0]), 0.0, m),
    ],
)
def test_results_of_differing_sizes_are_not_stacked(f: Any) -> None:
    with pytest.raises(ShapeError, match=r"f64\[u0\]: each step makes the size"):
        hf.jit(f)(asarray(np.arange(6.0).reshape(2, 3)))
