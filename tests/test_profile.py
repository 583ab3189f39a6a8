"""`jitted.profile`: what each loop of a call does, by the user's lines."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.pipeline import lower
from hopflow.compiler.profiling import with_counters
from hopflow.errors import BackendError, IndexingError, TraceError
from hopflow.loop_ir import interpreter
from hopflow.loop_ir.verifier import verify
from hopflow.profile import Profile, ProfiledLoop

X = np.random.default_rng(0).normal(size=(7, 5))


pytestmark = pytest.mark.usefixtures("verified")


def row(profile: Profile, what: str) -> ProfiledLoop:
    """The only row that is this."""
    [found] = [loop for loop in profile.loops if loop.what.startswith(what)]
    return found


def nested(x: Any, n: int, m: int) -> Any:
    def outer(_: Any, c: Any) -> Any:
        return hf.fori_loop(0, m, inner, hf.sin(c))

    def inner(_: Any, c: Any) -> Any:
        return hf.sin(c) + hf.sum(c)

    return hf.fori_loop(0, n, outer, x)


def newton(x: Any, steps: Any) -> Any:
    def body(c: Any, k: Any) -> tuple[Any, Any]:
        return c - (c * c - x) / (2.0 * c), k + 1.0

    return hf.while_loop(lambda _, k: k < steps, body, (x, 0.0))


@hf.subgraph
def block(x: Any) -> Any:
    """Too large to be inlined."""
    for k in range(30):
        x = hf.tanh(x) * 0.5 + hf.sin(x * k)[::-1]
    return x


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: hf.exp(x) * 2 + x[::-1],
    "rank 0": lambda x: hf.sum(x) * 2,
    "nested": lambda x: nested(x, 3, 4),
    "mask": lambda x: x[x > 0] * 2,
    "sort": lambda x: hf.sort(x, axis=1),
    "stack": lambda x: hf.scan(lambda c, r: (c + r, hf.sum(c * r)), x[0], x),
    "while": lambda x: hf.while_loop(
        lambda n, c: (n < 40) & (hf.sum(c) < 90),
        lambda n, c: (n + 1, hf.roll(c, 1, axis=0) * 1.1 + 0.1),
        (0, x),
    ),
    "gemm": lambda x: hf.scan(
        lambda c, _: (hf.tanh(c @ x.T @ x), None), x, None, length=3
    )[0],
    "calls": lambda x: hf.scan(
        lambda c, _: (block(c), None), block(block(x)), None, length=3
    )[0],
    "map": lambda x: hf.map(lambda r: hf.fori_loop(0, 9, lambda _, c: c * r, r), x),
    "gang": lambda x: hf.vmap(hf.vmap(newton))(hf.abs(x) + 1, hf.floor(9 * hf.abs(x))),
    "grad of while": hf.grad(
        lambda x: hf.sum(
            hf.while_loop(
                lambda n, c: n < 20, lambda n, c: (n + 1, hf.sin(c) * x), (0, x)
            )[1]
        )
    ),
    "grad of gang": hf.grad(
        lambda x: hf.sum(hf.vmap(hf.vmap(newton))(hf.abs(x) + 1, 3.0 + hf.abs(x))[0])
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_a_call_and_times_are_nested(
    name: str, dynamic: bool
) -> None:
    f, x = hf.jit(PROGRAMS[name], dynamic=dynamic), hf.asarray(X)
    profile = f.profile(x)
    results, wanted = (pytree.flatten(r)[0] for r in (profile.results, f(x)))
    assert all(map(np.array_equal, results, wanted))
    assert profile.seconds > 0
    outer = [profile.seconds]
    for loop in profile.loops:
        assert loop.line
        assert loop.text
        if loop.what.startswith("function"):  # its calls are rows of their own
            outer = [0.0, loop.seconds or 0.0]
        elif loop.seconds is not None:
            assert loop.seconds >= 0
            assert loop.share == loop.seconds / profile.seconds
            # What is left of the row around it, and of those before.
            outer[loop.depth :] = [outer[loop.depth] - loop.seconds, loop.seconds]
            assert outer[loop.depth] >= -1e-9


def test_a_slow_clock_leaves_some_of_the_time() -> None:
    """It seems slow if something else ran while its reads were timed."""
    f, x = hf.jit(lambda x: hf.sum(x) * 2), hf.asarray(X)
    f(x)
    program, table = with_counters(lower(f.graph)[1])
    counters = np.array(interpreter.run(program, [], [np.asarray(x)])[-1])
    counters[0] = 10**15
    counters[table.rows[0].slots["time"]] = 1000
    assert table.measured(counters)[0].seconds == pytest.approx(1e-8)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_interpreter_counts_as_native_code_does(name: str) -> None:
    f, x = hf.jit(PROGRAMS[name]), hf.asarray(X)
    profile = f.profile(x)
    program, table = with_counters(lower(f.graph)[1])
    verify(program)
    counters = interpreter.run(program, [], [np.asarray(x)])[-1]
    rows = table.measured(counters)[1:]
    assert [tuple(row[3:]) for row in rows] == [
        (loop.entries, loop.trips, loop.bytes, loop.active) for loop in profile.loops
    ]


def test_loops_in_loops_are_counted_by_line() -> None:
    profile = hf.jit(nested).profile(hf.ones(100), 7, 5)
    assert profile.name == "nested"
    loops = [x for x in profile.loops if x.what != "copy"]
    assert [
        (x.depth, x.what, x.entries, x.trips) for x in loops if x.what == "for"
    ] == [
        (0, "for", 1, 7),
        (1, "for", 7, 35),
    ]
    sines = [x for x in loops if x.text == "return hf.sin(c) + hf.sum(c)"]
    assert [(x.depth, x.entries, x.trips) for x in sines] == [(2, 35, 3500)] * 2
    # A sum reads 4 bytes, and the sine of an element reads and writes it.
    assert sorted(x.bytes for x in sines) == [3500 * 4, 3500 * 8]
    assert {x.file for x in loops} == {__file__}


def test_a_loop_that_depends_on_data_is_counted() -> None:
    def halved(x: Any) -> Any:
        return hf.while_loop(lambda c: hf.sum(c) > 1, lambda c: c * 0.5, x)

    profile = hf.jit(halved).profile(hf.ones(64))
    loop = row(profile, "while")
    assert (loop.entries, loop.trips, loop.active) == (1, 6, None)
    assert loop.text.startswith("return hf.while_loop(")
    # The test is computed once more than the step.
    inner = [(x.entries, x.trips) for x in profile.loops if x.depth == 1]
    assert inner == [(7, 7 * 64), (6, 6 * 64)]


def test_a_loop_of_no_steps_has_none() -> None:
    f = hf.jit(nested)
    for n, m in ((0, 5), (3, 0)):
        profile = f.profile(hf.ones(100), n, m)
        assert [x.trips for x in profile.loops if x.what == "for"] == [n, n * m]
        results = profile.results
        assert np.array_equal(results, f(hf.ones(100), n, m))


def test_small_arrays_have_no_loop_and_empty_ones_no_steps() -> None:
    f = hf.jit(lambda x: hf.sin(x) + 1, dynamic=False)
    assert f.profile(hf.ones(3)).loops == ()
    assert "lambda" in str(f.profile(hf.ones(3)))
    profile = hf.jit(lambda x: hf.sin(x) + 1, dynamic=True).profile(hf.ones(0))
    assert {(x.trips, x.bytes) for x in profile.loops} == {(0, 0)}


def test_each_side_of_a_branch_is_counted_when_it_is_taken() -> None:
    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            return hf.cond(
                i % 3 == 0,
                lambda c: hf.sin(c) * hf.sum(c),
                lambda c: hf.exp(-c) * hf.max(c),
                c,
            )

        return hf.fori_loop(0, 10, step, x)

    profile = hf.jit(f).profile(hf.ones(100))
    entries = {x.text[:20]: x.entries for x in profile.loops if x.depth == 1}
    assert entries["lambda c: hf.sin(c) "] == 4
    assert entries["lambda c: hf.exp(-c)"] == 6


@pytest.mark.parametrize("count", [1, 100, 257])
def test_the_active_lanes_of_a_gang_are_those_of_its_longest_lane(count: int) -> None:
    steps = np.random.default_rng(1).integers(0, 30, count).astype(np.float64)
    f = hf.jit(hf.vmap(newton))
    profile = f.profile(hf.ones(count, dtype=hf.float64), hf.asarray(steps))
    loop = row(profile, "while")
    assert (loop.entries, loop.trips) == (count, steps.sum())
    assert loop.text.startswith("return hf.while_loop(")
    if count == 1:
        assert loop.active is None
        return
    assert loop.seconds is None
    gang = row(profile, "gang")
    width = int(gang.what.split()[1])
    gangs = -(-count // width)
    assert (gang.entries, gang.trips) == (gangs, count)
    assert gang.active == count / (gangs * width)
    longest = sum(max(steps[k : k + width]) for k in range(0, count, width))
    assert loop.active == steps.sum() / (width * longest)


def test_lanes_that_count_up_to_different_numbers_are_counted() -> None:
    def power(x: Any, n: Any) -> Any:
        return hf.fori_loop(0, n, lambda _, c: hf.sin(c) * x, x)

    n = np.arange(-3, 61)
    profile = hf.jit(hf.vmap(power)).profile(hf.ones(64), hf.asarray(n))
    loop = profile.loops[-1]
    assert loop.trips == np.maximum(n, 0).sum()
    assert loop.active is not None
    assert 0.4 < loop.active < 1


@pytest.mark.parametrize("rows", [20, 600])
@pytest.mark.parametrize("dynamic", [False, True])
def test_iterations_of_threads_are_added(rows: int, dynamic: bool) -> None:
    def sums(x: Any) -> Any:
        return hf.map(
            lambda r: hf.fori_loop(0, 9, lambda _, c: hf.cumulative_sum(c * r), r), x
        )

    f = hf.jit(sums, dynamic=dynamic)
    x = hf.asarray(np.random.default_rng(2).normal(size=(rows, 40)))
    profile = f.profile(x)
    assert np.array_equal(profile.results, f(x))
    threads = row(profile, "threads")
    assert (threads.entries, threads.trips) == (1, rows)
    inner = {x.trips for x in profile.loops if x.depth == 1}
    assert inner == {rows * 9, rows * 40}
    [cumulative] = [x.trips for x in profile.loops if x.depth == 2]
    assert cumulative == rows * 9 * 40


def test_many_entries_are_timed_now_and_then_and_all_counted() -> None:
    profile = hf.jit(nested).profile(hf.ones(100), 40, 50)
    assert {x.entries for x in profile.loops if x.depth == 2} == {2000}
    assert all(x.seconds and x.seconds > 0 for x in profile.loops if x.depth == 2)


def test_routines_are_rows_with_the_bytes_of_their_arrays() -> None:
    def f(x: Any, w: Any) -> Any:
        return hf.fori_loop(0, 6, lambda _, c: hf.tanh(c @ w), x)

    x, w = hf.ones((30, 64)), hf.ones((64, 64))
    product = row(hf.jit(f).profile(x, w), "call gemm")
    assert (product.depth, product.entries, product.trips) == (1, 6, None)
    assert product.bytes == 6 * 4 * (30 * 64 + 64 * 64 + 30 * 64)
    assert "c @ w" in product.text
    assert product.seconds is not None
    assert product.seconds > 0


def test_a_function_of_the_program_is_a_table_of_its_own() -> None:
    profile = hf.jit(PROGRAMS["calls"]).profile(hf.asarray(X))
    calls = [x for x in profile.loops if x.what.startswith("call f")]
    assert [(x.depth, x.entries) for x in calls] == [(0, 1), (0, 1), (1, 3)]
    function = row(profile, "function f")
    assert (function.depth, function.entries) == (0, 5)
    inside = profile.loops[profile.loops.index(function) + 1 :]
    assert inside
    assert {x.text for x in inside} <= {
        "x = hf.tanh(x) * 0.5 + hf.sin(x * k)[::-1]",
        "return x",
    }
    assert all(x.depth >= 1 and x.entries % 5 == 0 for x in inside)


def test_callbacks_are_rows_and_are_called_twice() -> None:
    told: list[float] = []

    def f(x: Any) -> Any:
        def step(_: Any, c: Any) -> Any:
            hf.callback(lambda v: told.append(float(v)), None, hf.sum(c))
            return c + 1

        return hf.fori_loop(0, 3, step, x)

    python = row(hf.jit(f).profile(hf.zeros(10)), "python")
    assert (python.entries, python.bytes) == (3, 12)
    assert told == [0.0, 10.0, 20.0] * 2


def test_a_program_serves_all_sizes() -> None:
    f = hf.jit(lambda x: hf.sum(hf.sin(x)), dynamic=True)
    f(hf.ones(5))
    before = hf.stats().compiles
    for n, blocks in ((0, 0), (17, 1), (1000, 1), (100_000, 4)):
        trips = [x.trips for x in f.profile(hf.ones(n)).loops]
        assert trips == [blocks, n, blocks]  # the last one adds the sums of blocks
    assert hf.stats().compiles == before + 1


def test_arguments_are_as_in_a_call_and_stay_as_they_are() -> None:
    base = hf.ones(100)

    def f(tree: dict[str, Any], *, scale: float) -> tuple[Any, list[int]]:
        tree["x"][:] = tree["x"] * scale + base
        base[0] = 5.0
        tree["new"] = tree["x"]
        return {"sum": hf.sum(tree["x"]), "y": tree["y"]}, [3]

    tree = {"x": hf.ones(100), "y": np.ones((20, 5))}
    profile = hf.jit(f).profile(tree, scale=2.0)
    assert tree.keys() == {"x", "y"}
    assert np.array_equal(np.asarray(tree["x"]), np.ones(100))
    assert np.array_equal(base, np.ones(100))
    results, [number] = profile.results
    assert (float(results["sum"]), number) == (300.0, 3)
    assert np.array_equal(results["y"], np.ones((20, 5)))


def test_donated_arguments_live_on() -> None:
    f = hf.jit(lambda x: hf.fori_loop(0, 3, lambda _, c: hf.sin(c) + 1, x), donate=(0,))
    x = hf.ones(100)
    profile = f.profile(x)
    assert np.array_equal(x, np.ones(100))
    assert np.array_equal(profile.results, f(x))


def test_views_are_read_where_they_are() -> None:
    f = hf.jit(lambda x: hf.sum(hf.sin(x), axis=1))
    x = np.arange(200.0 * 300).reshape(200, 300)
    for view in (x, x.T, x[:, ::2]):
        tensor = hf.from_numpy(view) if view is x else hf.asarray(x)[:, ::2]
        assert np.array_equal(f.profile(tensor).results, f(tensor))


def test_errors_are_those_of_a_call() -> None:
    def f(x: Any, k: Any) -> Any:
        return hf.fori_loop(0, 5, lambda i, c: c + x[k + i], 0.0)

    jitted = hf.jit(f)
    assert jitted.profile(hf.ones(100), hf.asarray(3)).results == 5
    for call in (jitted, jitted.profile):
        with pytest.raises(IndexingError, match="index 100 is out of range") as info:
            call(hf.ones(100), hf.asarray(97))
        assert "x[k + i]" in str(info.getrepr())
    with pytest.raises(IndexingError, match="index 100"):
        jitted.profile(hf.ones(100), hf.asarray(96))


def test_it_leaves_the_ordinary_program_alone() -> None:
    f, x = hf.jit(nested), hf.ones(100)
    f(x, 3, 4)
    texts = f.loop_ir, f.llvm_ir
    hits = hf.stats().cache_hits
    f.profile(x, 3, 4)
    assert hf.stats().cache_hits == hits
    assert (f.loop_ir, f.llvm_ir) == texts
    assert "clock" not in f.llvm_ir


def test_derivatives_have_the_lines_of_what_they_are_of() -> None:
    def loss(x: Any) -> Any:
        def step(_: Any, c: Any) -> Any:
            return hf.sin(c) * x

        return hf.sum(hf.fori_loop(0, 8, step, x))

    profile = hf.jit(hf.grad(loss)).profile(hf.ones((100, 20)))
    there_and_back = [x for x in profile.loops if x.trips == 8]
    assert [x.text for x in there_and_back] == [
        "return hf.sum(hf.fori_loop(0, 8, step, x))"
    ] * 2
    steps = [x for x in profile.loops if x.depth == 1]
    assert {x.text for x in steps} == {"return hf.sin(c) * x"}


def test_it_says_where_it_cannot_be_used() -> None:
    f = hf.jit(lambda x: x + 1)
    with pytest.raises(TraceError, match="Profile the outermost function"):
        hf.jit(lambda x: f.profile(x).results)(hf.ones(3))
    g = hf.jit(lambda x: x + 1, backend="interpreter")
    with pytest.raises(BackendError, match="Leave `backend` out"):
        g.profile(hf.ones(3))


def test_the_table_shows_what_the_rows_have() -> None:
    profile = hf.jit(hf.vmap(newton)).profile(hf.ones(64), 3.0 + hf.arange(64) % 2)
    first, header, *lines = str(profile).splitlines()
    assert first.startswith("newton: ")
    assert header.split() == ["time", "share", "entries", "trips", "bytes", "lanes"]
    assert len(lines) == len(profile.loops)
    for line, loop in zip(lines, profile.loops, strict=True):
        assert f"{'  ' * loop.depth}{loop.what}" in line
        assert line.endswith(loop.text)
        assert f"test_profile.py:{loop.line}" in line
        assert f"{loop.entries:,}" in line


def test_the_table_of_the_documents_has_the_rows_of_its_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "verify", False)  # interpreters take a minute for it
    page = (Path(__file__).parent.parent / "docs" / "compiler.md").read_text()
    section = page.split("## Where the time goes")[1].split("## Passes")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.S)
    [table] = re.findall(r"(?:^ {4}.*\n)+", section.split("shows a table")[1], re.M)
    file = tmp_path / "orbit.py"
    file.write_text(code)
    names: dict[str, Any] = {"hf": hf}
    exec(compile(code, str(file), "exec"), names)
    first, header, *lines = str(names["profile"]).splitlines()
    said = dedent(table).splitlines()
    assert said[0].split(":")[0] == first.split(":")[0]
    assert said[1].split() == header.split()
    # The kind, the line and its source: times and widths are those of a machine.
    row = re.compile(r"([a-z]+)[ \d]*(orbit.py:.*)")
    assert [row.findall(x) for x in said[2:]] == [row.findall(x) for x in lines]


@pytest.mark.parametrize("setting", ["check_bounds", "require_in_place"])
def test_it_works_for_programs_of_other_settings(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, setting, True)
    f = hf.jit(nested)
    profile = f.profile(hf.ones(100), 7, 5)
    assert {7, 35} <= {x.trips for x in profile.loops if x.what == "for"}
    assert np.array_equal(profile.results, f(hf.ones(100), 7, 5))
