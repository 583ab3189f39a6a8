"""Loops over examples as gangs: which, what they become, and that no bit changes."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.pipeline import Executable, lower
from hopflow.errors import HopflowError
from hopflow.loop_ir.printer import format_program
from hopflow.tensor import EagerTensor
from hopflow.testing.bindings import one_by_one

pytestmark = pytest.mark.slow

AVX2: Final = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.2"


def target(name: str) -> CpuTarget:
    """The CPU we run on, or as if it had neither masks nor gathers."""
    if name == "host":
        return host()
    if not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    return dataclasses.replace(host(), cpu="haswell", features=AVX2)


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def compare(
    f: Callable[..., Any], *args: Any, cpu: CpuTarget, gangs: bool = True
) -> str:
    """Run `f` as gangs and one by one, and compare all bits; the loops, as text."""
    tensors = [EagerTensor(np.asarray(x)) for x in args]
    graph = hf.trace(f, *tensors).graph
    scalar = Executable(graph, target=one_by_one(cpu))
    assert " gang " not in scalar.loop_ir
    executable = Executable(graph, target=cpu)
    assert (" gang " in executable.loop_ir) is gangs, executable.loop_ir
    results: list[list[Any]] = []
    for one in (scalar, executable):
        try:
            results.append([t.array.tobytes() for t in one(tensors)])
        except HopflowError as error:
            results.append([type(error).__name__, str(error)])
    assert results[0] == results[1]
    return executable.loop_ir


FLOATS: Final = (np.float64, np.float32)
DTYPES: Final = (*FLOATS, np.float16, np.int64, np.int32, np.uint8)
COUNTS: Final = (1, 2, 7, 8, 31, 32, 33, 200)


def examples(n: int, dtype: Any, low: float = 0.0, high: float = 5.0) -> Any:
    return np.random.default_rng(n).uniform(low, high, n).astype(dtype)


# --- programs of one example ----------------------------------------------------------


def escape(c: Any) -> Any:
    def goes_on(k: Any, x: Any, y: Any) -> Any:
        return (k < 50) & (x * x + y * y < 4)

    def step(k: Any, x: Any, y: Any) -> Any:
        return k + 1, x * x - y * y + c - 2, 2 * x * y + c / 7

    first = (0, hf.zeros_like(c), hf.zeros_like(c))
    return hf.while_loop(goes_on, step, first, reverse_mode="recompute")


def halve(x: Any) -> Any:
    """How often, and what is left; the counter has another dtype than the value."""
    return hf.while_loop(
        lambda x, _: x > 1,
        lambda x, k: ((x * 0.5).astype(x.dtype), k + 1),
        (x, (x * 0).astype("int8")),
    )


def branches(x: Any) -> Any:
    """Sides that are dear, and sides that are not; a carry that one side sets."""

    def step(x: Any, y: Any, k: Any) -> Any:
        y = hf.cond(y > x, lambda: y - x / 3, lambda: hf.sin(y) + x)
        z = hf.where(k % 2 == 0, y, x)
        return (*hf.cond(x < 1, lambda: (x + z / 8, y), lambda: (x / 2, z + 1)), k + 1)

    first = (x, x * 2, 0)
    goes_on = lambda x, _, k: (k < 9) & (x < 4)  # noqa: E731
    return hf.while_loop(goes_on, step, first, reverse_mode="recompute")


def counted(x: Any) -> Any:
    """A loop of as many steps as the example says, with one of few in it."""

    def step(i: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda j, z: z * 0.5 + j, y + i)

    return hf.fori_loop(0, x.astype("int64"), step, x)


def nested(x: Any) -> Any:
    """A loop whose steps are loops, which begin anew for each example."""

    def inner(y: Any) -> Any:
        return hf.while_loop(lambda y, _: y < 10, lambda y, k: (y * 1.5 + 1, k + 1), y)

    def step(y: Any, k: Any, total: Any) -> Any:
        z, more = inner((y, 0))
        return z / 16, k + more, total + z

    return hf.while_loop(lambda y, k, _: (k < 40) & (y < 0.9), step, (x, 0, x * 0))


PROGRAMS: Final = (escape, branches, counted, nested)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("n", COUNTS)
def test_gangs_give_the_bits_of_one_by_one(
    f: Any, dtype: Any, n: int, cpu: CpuTarget
) -> None:
    compare(hf.vmap(f), examples(n, dtype), cpu=cpu, gangs=n > 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_carries_of_all_dtypes(dtype: Any, cpu: CpuTarget) -> None:
    compare(hf.vmap(halve), examples(77, dtype, 0, 120), cpu=cpu)


# --- lanes that stop the program ------------------------------------------------------


@pytest.mark.parametrize("bad", [(5,), (5, 3), (31, 40), (70,), (9, 8, 0)])
def test_the_first_example_that_fails_stops_the_program(
    bad: tuple[int, ...], cpu: CpuTarget
) -> None:
    """Whichever lane fails first."""
    table = np.arange(1.0, 11.0)

    def one(x: Any, xs: Any) -> Any:
        def step(k: Any, total: Any) -> Any:
            return k + xs[k].astype("int64"), total * xs[k]

        return hf.while_loop(lambda k, _: k < x, step, (0, 1.0))[1]

    limits = examples(77, np.float64, 0, 7).astype(np.int64)
    for k, example in enumerate(bad):
        limits[example] = 40 + 20 * k
    text = compare(lambda x, t: hf.vmap(lambda x: one(x, t))(x), limits, table, cpu=cpu)
    assert "trap" in text


def test_integers_are_divided_in_lanes_that_are_on(cpu: CpuTarget) -> None:
    def one(x: Any, y: Any) -> Any:
        def step(x: Any, y: Any, k: Any) -> Any:
            return hf.cond(k % 3 == 2, lambda: x % y, lambda: x // y), y - 1, k + 1

        return hf.while_loop(lambda x, y, _: (x > 1) & (y > 0), step, (x, y, 0))

    xs, ys = np.arange(90) * 7, np.arange(90) % 5
    compare(hf.vmap(one), xs, ys, cpu=cpu)
    compare(hf.vmap(lambda x, y: one(x, y + 1)[0] // y), xs, ys, cpu=cpu)


def test_a_limit_of_steps_holds_for_each_example(cpu: CpuTarget) -> None:
    def one(n: Any) -> Any:
        step = lambda k, x: (k + 1, x * 0.5)  # noqa: E731
        return hf.while_loop(lambda k, _: k < n, step, (0, 1.0), max_steps=6)[1]

    compare(hf.vmap(one), np.arange(50) % 6, cpu=cpu)
    compare(hf.vmap(one), np.arange(50) % 9, cpu=cpu)


# --- derivatives ----------------------------------------------------------------------


def reverse(f: Any) -> Any:
    """The gradient for each example, through stacks that lanes have side by side."""
    return hf.grad(lambda x: hf.sum(hf.vmap(lambda x: f(x)[1])(x)))


def forward(f: Any) -> Any:
    return lambda x: hf.jvp(hf.vmap(lambda x: f(x)[1]), (x,), (x * 0 + 1,))


@pytest.mark.parametrize(
    ("way", "f"),
    [
        *((forward, f) for f in (escape, branches, nested)),
        *((reverse, f) for f in (escape, branches)),  # of the other, stacks have stacks
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_derivatives_have_the_bits_of_one_by_one(
    f: Any, dtype: Any, way: Any, cpu: CpuTarget
) -> None:
    text = compare(way(f), examples(45, dtype), cpu=cpu)
    if way is reverse:
        assert "again, which keeps its rows" in text
        assert "_left" in text


# --- memory ---------------------------------------------------------------------------


def test_an_array_of_each_example_is_one_of_each_lane(cpu: CpuTarget) -> None:
    def one(x: Any) -> Any:
        def step(k: Any, ys: Any) -> Any:
            return k + 1, ys.at[k % 6].set(ys[(k + 1) % 6] + x)

        start = hf.zeros((6,), dtype=x.dtype) + x
        return hf.while_loop(lambda k, ys: (k < 20) & (ys[k % 6] < 5), step, (0, start))

    for dtype in FLOATS:
        text = compare(hf.vmap(one), examples(75, dtype), cpu=cpu)
        assert re.search(r"carry2\[i\d+, step1_lane\] = ", text)


@pytest.mark.parametrize("n", [2, 5, 7])
def test_lanes_exchange_what_is_theirs(n: int, cpu: CpuTarget) -> None:
    def one(x: Any) -> Any:
        def step(y: Any, k: Any) -> Any:
            return y * 0.9 + hf.roll(y, 1) * 0.2 + hf.sin(y) / 8, k + 1

        return hf.while_loop(lambda y, k: (y[0] < 3) & (k < 9), step, (x, 0))

    for dtype in FLOATS:
        xs = examples(61 * n, dtype).reshape(61, n)
        compare(hf.vmap(one), xs, cpu=cpu)


# --- which loops, and how wide --------------------------------------------------------


def loops(f: Any, *args: Any, features: str = "avx2") -> str:
    """The loops of `f`, for vectors of 256 bits."""
    tensors = [EagerTensor(np.asarray(x)) for x in args]
    graph = hf.trace(f, *tensors).graph
    program = lower(graph, target=target(features))[1]
    return re.sub(r"^ {4}(buffer|site).*\n", "", format_program(program), flags=re.M)


def lanes_of(text: str) -> list[int]:
    return [int(n) for n in re.findall(r" gang (\d+) ", text)]


@pytest.mark.parametrize(
    ("dtype", "lanes"),
    [(np.float64, 16), (np.float32, 32), (np.float16, 32), (np.int64, 16)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_gang_has_four_registers_of_what_it_computes_with(
    dtype: Any, lanes: int
) -> None:
    text = loops(hf.vmap(halve), examples(100, dtype, 0, 100))
    assert lanes_of(text) == [lanes]


@pytest.mark.parametrize(("n", "lanes"), [(1, []), (2, [2]), (5, [8]), (9, [16])])
def test_few_examples_are_a_narrow_gang(n: int, lanes: list[int]) -> None:
    assert lanes_of(loops(hf.vmap(halve), examples(n, np.int64))) == lanes


def test_a_long_step_has_fewer_registers() -> None:
    def step(x: Any, k: Any) -> Any:
        for _ in range(5):
            x = hf.sin(x) + hf.exp(x * 0.1) / 2
        return x, k + 1

    def one(x: Any) -> Any:
        return hf.while_loop(lambda x, k: (x < 9) & (k < 20), step, (x, 0))

    assert lanes_of(loops(hf.vmap(one), examples(100, np.float64))) == [8]


def test_a_step_of_many_functions_is_one_of_gangs() -> None:
    """As that of a gradient, which computes a tangent for each number."""

    def one(x: Any) -> Any:
        def step(k: Any, y: Any) -> Any:
            for shift in range(20):
                y = hf.sin(y + shift) * 0.5 + hf.exp(-y * y) * x
            return k + 1, y

        return hf.while_loop(lambda k, y: (k < 9) & (y < x + 1), step, (0, x))[1]

    assert lanes_of(loops(hf.vmap(one), np.linspace(0.1, 1.0, 500))) == [4]


def test_what_a_library_computes_for_each_lane_stays_scalar() -> None:
    def one(x: Any, y: Any) -> Any:
        return hf.while_loop(lambda x, y: y > 0.1, lambda x, y: (y, x % y), (x, y))

    assert lanes_of(loops(hf.vmap(one), *examples(60, np.float64).reshape(2, 30))) == []


def test_long_loops_of_vectors_stay_as_they_are() -> None:
    def one(n: Any, xs: Any) -> Any:
        step = lambda k, s: (k + 1, s + hf.sum(xs * s))  # noqa: E731
        return hf.while_loop(lambda k, _: k < n, step, (0, 1.0))[1]

    counts, xs = np.arange(30), examples(3000, np.float64).reshape(30, 100)
    assert lanes_of(loops(hf.vmap(one), counts, xs)) == []


def test_vectors_that_a_branch_guards_stay_as_they_are() -> None:
    """Lanes would gather and scatter their elements."""

    def one(x: Any) -> Any:
        return hf.cond(x[0] > 0, lambda x: hf.exp(x) * x, lambda x: x[::-1] + 1, x)

    text = loops(hf.vmap(one), examples(400, np.float32).reshape(50, 8))
    assert lanes_of(text) == []
    assert "vector 8" in text


# --- what they become -----------------------------------------------------------------


def test_a_loop_becomes_a_loop_over_gangs() -> None:
    def one(x: Any, y: Any) -> Any:
        step = lambda x, k: (x * y, k + 1)  # noqa: E731
        return hf.while_loop(lambda x, k: (x < 1.0) & (k < 9), step, (x, 0))

    found = loops(hf.vmap(one), *examples(200, np.float64).reshape(2, 100))
    assert (
        found
        == """\
program one():
    for step1_gang in 0..7 threads independent:
        for step1_lane in 0..min(16, 100 - step1_gang * 16) gang 16 independent:
            let step1: i64 = step1_gang * 16 + step1_lane
            let step1_row0: f64 = in1[step1]
            let t2: f64 = in0[step1]
            var c3: f64 = t2
            var c4: i64 = 0
            var c4_all: i64 = 0
            do:
                let t5: bool = c3 < 1.0
                let t6: bool = c4_all < 9
                let t7: bool = t5 and t6
            while t7:
                let t8: f64 = c3 * step1_row0
                let t9: i64 = c4_all + 1
                c3 = t8
                c4 = t9
                c4_all = t9
            out0[step1] = c3
            out1[step1] = c4
"""
    )


# --- sizes, threads, and loops around -------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_one_program_runs_gangs_of_any_number_of_examples(threads: int) -> None:
    before, hf.config.num_threads = hf.config.num_threads, threads
    try:
        run = hf.jit(hf.vmap(branches), dynamic=True)
        whole = [np.asarray(x) for x in hf.jit(hf.vmap(branches))(examples(90, float))]
        for n in (0, 1, 7, 33, 90):
            for x, y in zip(run(examples(90, float)[:n]), whole, strict=True):
                np.testing.assert_array_equal(np.asarray(x), y[:n])
        assert " gang " in run.loop_ir
    finally:
        hf.config.num_threads = before


@pytest.mark.parametrize(
    ("shape", "own"), [((3, 40), 40), ((40, 40), 40), ((40, 3), 40)]
)
def test_of_two_loops_over_examples_one_is_over_gangs(
    shape: tuple[int, int], own: int, cpu: CpuTarget
) -> None:
    """The one that fills the lanes."""
    xs = examples(shape[0] * shape[1], np.float64).reshape(shape)
    text = compare(hf.vmap(hf.vmap(nested)), xs, cpu=cpu)
    assert re.findall(r"in 0\.\.min\(\d+, (\d+) .* gang ", text) == ["40"]


def test_lanes_read_elements_of_their_own_choice(cpu: CpuTarget) -> None:
    def one(k: Any, table: Any) -> Any:
        def step(k: Any, total: Any) -> Any:
            total = hf.cond(k % 2 == 0, lambda: total + table[k], lambda: total * 0.5)
            return k - table[k // 2].astype("int64") - 1, total

        return hf.while_loop(lambda k, _: k > 0, step, (k, 0.0))

    table = np.arange(40.0) % 3
    for dtype in (np.float64, np.float32, np.int16):
        values = table.astype(dtype)
        run = lambda k, t: hf.vmap(lambda k: one(k, t))(k)  # noqa: E731
        compare(run, np.arange(90) % 37, values, cpu=cpu)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_of_each_row_keeps_no_loop_from_gangs(dynamic: bool) -> None:
    """Vectors go along the rows of a sum, and across those of a loop beside it."""

    def f(x: Any) -> Any:
        def one(row: Any) -> Any:
            return hf.while_loop(lambda a: a < 300.0, lambda a: a * 1.5, hf.sum(row))

        return hf.vmap(one)(x)

    x = np.random.default_rng(0).uniform(0.5, 9.0, (70, 40))
    jitted = hf.jit(f, dynamic=dynamic)
    with hf.debug():
        want = f(hf.asarray(x))
    np.testing.assert_allclose(np.asarray(jitted(x)), np.asarray(want), rtol=1e-13)
    assert " gang " in jitted.loop_ir
    assert re.search(r"vector \d+ independent:\n +acc", jitted.loop_ir)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16, np.uint8])
@pytest.mark.parametrize("width", [2, 3, 4, 8, 9, 16])
@pytest.mark.parametrize("count", [24, 31, 32, 64])
def test_rows_of_examples_are_read_and_written(
    count: int, width: int, dtype: Any, cpu: CpuTarget
) -> None:
    x = (np.arange(count * width) % 97).astype(dtype).reshape(count, width)

    def f(x: Any) -> Any:
        step = lambda _, x: hf.concat([x[1:], (x[0] + x[-1])[None]])  # noqa: E731
        return hf.fori_loop(0, 5, step, x)

    graph = hf.trace(hf.vmap(f), EagerTensor(x)).graph
    executable = Executable(graph, target=cpu)
    assert " gang " in executable.loop_ir
    [got] = executable([EagerTensor(x)])
    for _ in range(5):
        x = np.concatenate([x[:, 1:], (x[:, 0] + x[:, -1])[:, None]], axis=1)
    np.testing.assert_array_equal(got.array, x)


def test_rows_of_full_gangs_are_transposed_in_registers(cpu: CpuTarget) -> None:
    x = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)

    def f(x: Any) -> Any:
        step = lambda _, s: hf.concat([s[1:], (s[0] * 0.5 + s[7])[None]])  # noqa: E731
        return hf.fori_loop(0, 20, step, x)

    graph = hf.trace(hf.vmap(f), EagerTensor(x)).graph
    code = Executable(graph, target=cpu).llvm_ir
    assert re.search(r"shufflevector <(8|16) x float>", code)
    assert "masked.gather" not in code
    assert "extractelement <8 x ptr>" not in code


def test_a_row_is_read_anew_where_a_counter_has_moved_on(cpu: CpuTarget) -> None:
    x = np.arange(32 * 12, dtype=np.float32).reshape(32, 12)

    def f(x: Any) -> Any:
        def step(_: Any, p: Any, s: Any) -> Any:
            first = hf.dynamic_slice(x, [p], [2])
            second = hf.dynamic_slice(x, [p + 2], [2])
            s = hf.while_loop(
                lambda s: s < hf.sum(first), lambda s: s + second[0] - second[1] + 9, s
            )
            return p + 3, s

        return hf.fori_loop(0, 3, step, (0, x[0]))[1]

    compare(hf.vmap(f), x, cpu=cpu)
