"""The benchmarks work, at sizes that take no time. Nothing here looks at a clock."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.testing.requires import load, requires

jax = load("jax>=0.11")

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import compare as comparing  # noqa: E402
from benchmarks import dr_jit, in_numba, native  # noqa: E402
from benchmarks import flat as flat_command  # noqa: E402
from benchmarks import measure as measuring  # noqa: E402
from benchmarks.measure import (  # noqa: E402
    Disagreement,
    Row,
    Times,
    compared_sides,
    measure,
    measure_calls,
)
from benchmarks.report import (  # noqa: E402
    as_json,
    format_c,
    format_calls,
    format_dr_jit,
    format_lax_map,
    format_means,
    format_numba,
    format_row,
    format_time,
)
from benchmarks.workload import Calls, Workload  # noqa: E402
from benchmarks.workloads import all_calls, all_workloads  # noqa: E402

pytestmark = pytest.mark.slow

TINY = all_workloads(0.0001)
FEW_CALLS = all_calls(0.0001)


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(measuring, "BUDGET", 0.0)
    monkeypatch.setattr(measuring, "SAMPLE", 0.0)
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_all_sides_of_a_row_give_the_same(workload: Workload) -> None:
    pair, others = compared_sides(workload)
    assert len(pair) == 2
    assert ("symbolic" in others) == (workload.mode == "jit")


OF_EACH_KIND = {
    (w.mode, w.lax_map is None, w.in_c is None, w.in_numba): w for w in TINY
}


@pytest.mark.parametrize("workload", OF_EACH_KIND.values(), ids=lambda w: w.name)
def test_a_row_has_times_of_all_sides(workload: Workload) -> None:
    row = measure(workload, repeat=1)
    assert row.name == workload.name
    for times in (row.hopflow, row.jax):
        assert len(times.firsts) == len(times.runs) == 1
        assert times.first > 0
        assert times.run > 0

    assert (row.symbolic is not None) == (workload.mode == "jit")
    assert (row.lax_map is not None) == (workload.lax_map is not None)
    has_c = workload.in_c is not None and native.missing() is None
    assert (row.c is not None) == has_c
    has_numba = workload.in_numba and in_numba.missing() is None
    assert (row.numba is not None) == has_numba
    has_dr_jit = workload.dr_jit is not None and dr_jit.missing() is None
    assert (row.dr_jit is not None) == has_dr_jit


@pytest.mark.parametrize("calls", FEW_CALLS, ids=lambda c: c.name)
def test_many_calls_give_the_same_in_both_and_times_of_both(calls: Calls) -> None:
    row = measure_calls(calls, repeat=1)
    assert row.name == calls.name
    assert min(*row.hopflow.runs, *row.jax.runs) > 0


@pytest.mark.parametrize("calls", all_calls(), ids=lambda c: c.name)
def test_fifty_sizes_are_two_compiles_and_one_for_each_guard(calls: Calls) -> None:
    f = hf.jit(calls.hopflow())
    start, reasons = hf.stats().traces, []
    for args in calls.calls:
        reason = f.explain(*args)
        before = hf.stats().traces
        f(*args)
        if hf.stats().traces > before:
            reasons.append(reason)
    assert len(calls.calls) == 50
    assert hf.stats().traces - start == len(reasons)
    numbers_only = calls.name == "call-numbers"
    static, symbolic, guards = reasons[:1], reasons[1:2], reasons[2:]
    assert static[0].startswith("compiled, as no call had this structure")
    assert len(symbolic) == (not numbers_only)
    assert all(
        "shape" in r and r.endswith("== 2` no longer holds (3)") for r in symbolic
    )
    assert all(re.search(r"` at sizes.py:\d+ no longer holds", r) for r in guards)


def test_names_are_unique_and_can_stand_in_a_list() -> None:
    names = [w.name for w in TINY] + [c.name for c in FEW_CALLS]
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)


def _doubled(factor: float) -> Workload:
    return Workload(
        "doubled",
        lambda: lambda x: x * factor,
        lambda: lambda x: x * 2.0,
        (np.ones(4),),
    )


def test_rows_that_disagree_are_not_timed() -> None:
    with pytest.raises(Disagreement, match=r"doubled: result 0 differs by 1 at most"):
        measure(_doubled(3.0), repeat=1)


def test_a_part_of_the_elements_may_differ() -> None:
    workload = dataclasses.replace(_doubled(3.0), differing=1.0)
    assert measure(workload, repeat=1).name == "doubled"


@pytest.mark.parametrize(
    ("ours", "match"),
    [
        (lambda x: hf.astype(x, hf.float32), r"result 0 is float32\(4,\), and float64"),
        (lambda x: x[:2], r"result 0 is float64\(2,\), and float64\(4,\)"),
        (lambda x: (x, x), "2 results, and 1"),
    ],
)
def test_other_types_are_a_disagreement(ours: Any, match: str) -> None:
    workload = dataclasses.replace(_doubled(2.0), hopflow=lambda: ours)
    with pytest.raises(Disagreement, match=match):
        measure(workload, repeat=1)


# --- rows in C ---


@requires("cc")
def test_the_rows_compile_in_c() -> None:
    assert native.missing() is None


def test_each_function_in_c_is_that_of_a_row() -> None:
    text = "\n".join(file.read_text() for file in native.SOURCES.glob("*.[ch]"))
    text = re.sub(r"#define FUNCTION\(name\) row_(\w+?)_##name##(\w+)", "", text)
    names = {*re.findall(r"^void row_(\w+)\(", text, re.M)}
    for name in re.findall(r"^void FUNCTION\((\w+)\)\(", text, re.M):
        names |= {f"gang_{name}_f32", f"gang_{name}_f64"}
    assert names == {w.name.replace("-", "_") for w in TINY if w.in_c is not None}
    assert len(names) >= 25


def test_each_function_in_numba_is_that_of_a_row() -> None:
    text = (native.SOURCES / "numba_loops.py").read_text()
    names = {*re.findall(r"^(?:def )?row_(\w+)(?:\(| = )", text, re.M)}
    assert names == {w.name.replace("-", "_") for w in TINY if w.in_numba}
    assert len(names) >= 25


def test_a_row_in_c_that_disagrees_is_not_timed() -> None:
    [workload] = [w for w in TINY if w.name == "heat-roll"]
    if native.missing() is None:
        with pytest.raises(Disagreement, match="heat-roll: result 0 differs"):
            measure(dataclasses.replace(workload, in_c=[1]), repeat=1)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-cc", "no no-such-cc on PATH"), ("false", "does not compile the rows")],
)
def test_without_a_compiler_the_reason_is_printed(
    compiler: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", compiler)
    compiled = functools.cache(native._compiled.__wrapped__)
    monkeypatch.setattr(native, "_compiled", compiled)
    options = ["--rows", "while", "--repeat", "1", "--scale", "0.00001"]
    assert command.main(options) == 0
    said = capsys.readouterr().out
    assert re.search(f"There are no times of C: .*{why}", said)
    assert "no row in C" in said
    with pytest.raises(native.Unavailable, match=why):
        native.library()


# --- the report ---


def _row(name: str, ours: float, theirs: float) -> Row:
    return Row(name, Times([ours] * 3, [ours]), Times([theirs] * 3, [theirs]))


def test_a_ratio_says_how_many_times_as_long_jax_takes() -> None:
    line = format_row(_row("while", 1e-3, 4e-3))
    assert line.split() == ["while", *["4", "ms", "1", "ms", "4.00x"] * 2]


def test_a_row_says_how_many_times_as_long_a_run_for_all_sizes_takes() -> None:
    runs = Times([1.0], [1.0, 1.0, 2.0])
    row = Row("a", runs, runs, Times([], [1.5, 1.5, 2.0]))
    assert format_row(row).split()[-1] == "1.50x"
    assert format_means([row]).split()[-2:] == ["1.50x", "(median)"]
    report = json.loads(as_json([row]))
    assert report["rows"][0]["ratio"]["for_all_sizes"] == 1.5
    assert report["median_for_all_sizes"] == 1.5


def test_many_calls_have_a_table_and_a_list_of_their_own() -> None:
    row = _row("many", 1e-3, 4e-3)
    assert format_calls(row).split() == ["many", "4", "ms", "1", "ms", "4.00x"]
    report = json.loads(as_json([], [row]))
    assert report["calls"][0]["ratio"]["run"] == 4.0


def test_a_row_in_c_has_its_time_and_how_many_times_as_long_the_others_take() -> None:
    row = dataclasses.replace(_row("a", 2.0, 8.0), c=Times([], [1.0]))
    other = dataclasses.replace(_row("b", 0.5, 2.0), c=Times([], [1.0]))
    assert format_row(row).split()[-4:] == ["1", "s", "2.00x", "8.00x"]
    assert format_c([row, other]) == (
        "beside C (2 rows): hopflow takes 1.00 times as long in the geometric mean, at "
        "most 2.00 times (a); JAX takes 4.00 times as long"
    )
    report = json.loads(as_json([row, other]))
    assert report["beside_c"] == {
        "rows": 2,
        "hopflow": 1.0,
        "jax": 4.0,
        "worst": ["a", 2.0],
    }
    assert report["rows"][0]["c"] == {"run": 1.0, "fastest_run": 1.0, "rounds": 1}
    assert format_c([]) == "no row in C"


def test_a_row_by_vmap_says_how_many_times_as_long_lax_map_takes() -> None:
    row = dataclasses.replace(_row("a", 2.0, 8.0), lax_map=Times([], [3.0]))
    other = dataclasses.replace(_row("b", 2.0, 12.0), lax_map=Times([], [13.0]))
    assert format_row(row).split()[-3:] == ["3", "s", "1.50x"]
    assert format_lax_map([row, other]) == (
        "beside the faster of vmap and lax.map (2 rows): JAX takes 3.00 times as long "
        "in the geometric mean, at least 1.50 times (a)"
    )
    assert format_lax_map([]) == ("no row beside the faster of vmap and lax.map")


def test_a_row_in_dr_jit_says_how_many_times_as_long_it_takes() -> None:
    row = dataclasses.replace(_row("a", 2.0, 8.0), dr_jit=Times([], [3.0]))
    other = dataclasses.replace(_row("b", 2.0, 12.0), dr_jit=Times([], [12.0]))
    assert format_dr_jit([row, other]) == (
        "beside Dr.Jit (2 rows): Dr.Jit takes 3.00 times as long in the geometric "
        "mean, at least 1.50 times (a)"
    )
    report = json.loads(as_json([row]))
    assert report["rows"][0]["dr_jit"] == {"run": 3.0, "fastest_run": 3.0, "rounds": 1}
    assert format_dr_jit([]) == "no row beside Dr.Jit"


def test_a_row_in_numba_says_how_many_times_as_long_it_takes() -> None:
    row = dataclasses.replace(_row("a", 2.0, 8.0), numba=Times([6.0], [3.0]))
    other = dataclasses.replace(_row("b", 2.0, 12.0), numba=Times([24.0], [12.0]))
    assert format_numba([row, other]) == (
        "beside Numba (2 rows): Numba takes 3.00 times as long in the geometric mean, "
        "at least 1.50 times (a); first calls 6.00 times"
    )
    report = json.loads(as_json([row]))
    assert report["rows"][0]["numba"]["first"] == 6.0
    assert format_numba([]) == "no row beside Numba"


def test_means_are_geometric() -> None:
    means = format_means([_row("a", 1.0, 8.0), _row("b", 1.0, 2.0)])
    assert means.split() == ["geometric", "mean", "4.00x", "4.00x"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (3e-6, "3 us"), (1.5e-9, "1.5 ns")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_the_json_says_what_was_measured_and_where() -> None:
    report = json.loads(as_json([_row("a", 1.0, 8.0)]))
    assert report["machine"]["jax"] == jax.__version__
    assert report["machine"]["cores"]
    [row] = report["rows"]
    assert row["ratio"] == {"first": 8.0, "run": 8.0}
    assert row["hopflow"]["first"] == row["hopflow"]["fastest_first"] == 1.0
    assert row["hopflow"]["rounds"] == 1


# --- the command ---


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "here.json"
    options = ["--rows", "call,while", "--repeat", "1", "--scale", "0.00001"]
    assert command.main([*options, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"JAX {jax.__version__}, Python ")
    lines = [line.split()[0] for line in said.splitlines() if line]
    assert lines[-7:-4] == ["call", "while", "geometric"]
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["call", "while"]


def test_a_row_that_disagrees_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_or_disagree(workload: Workload, repeat: int) -> Row:
        if workload.name == "call":
            raise Disagreement("call: result 0 differs")
        return measure(workload, repeat)

    monkeypatch.setattr(command, "measure", measure_or_disagree)
    options = ["--repeat", "1", "--scale", "0.00001"]
    assert command.main(["--rows", "call", *options]) == 1
    assert command.main(["--rows", "call,while", *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split()[0] for line in lines if line]
    assert starts.count("call:") == 2
    assert starts[-7:-4] == ["call:", "while", "geometric"]


def test_the_command_refuses_a_row_that_there_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rows", "call,wihle"])
    assert "there is no row wihle" in capsys.readouterr().err


# --- steps that touch a few elements ---


def test_the_flat_command_prints_a_line_for_each_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--rows", "copy-write,leapfrog,scan-rows", "--sizes", "3,6"]
    assert flat_command.main([*options, "--most", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[-3:]] == options[1].split(",")
    assert [line.split()[1] == "*" for line in said[-3:]] == [False, True, False]
    assert all(line.endswith("x") for line in said[-3:])


def test_the_flat_command_refuses_what_it_cannot_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, why in (
        (["--rows", "copy-wirte"], "there is no row copy-wirte"),
        (["--sizes", "10"], "--sizes takes two numbers"),
    ):
        with pytest.raises(SystemExit):
            flat_command.main(options)
        assert why in capsys.readouterr().err


def test_a_ratio_says_how_many_times_as_long_a_step_takes_at_the_larger_size() -> None:
    found = flat_command.Flat("rows", (1e-6, 2e-6), (1e-9, 1e-6))
    line = flat_command.format_flat(found, touches_all=False)
    assert line.split() == [
        *("rows", "1", "us", "2", "us", "2.0x"),
        *("1", "ns", "1", "us", "1000.0x"),
    ]


# --- two states -----------------------------------------------------------------------


def test_two_states_are_measured_by_turns() -> None:
    with comparing.sources_of(None) as sources:
        old, new = (comparing.State(sources, 1e-5) for _ in range(2))
        pair = comparing.compare("while", old, new, rounds=3)
        unknown = comparing.compare("no such row", old, new, rounds=3)
        old.close()
        new.close()
    for times in (pair.old, pair.new):
        assert times is not None
        assert len(times.firsts) == len(times.runs) == 3
        assert min(*times.firsts, *times.runs) > 0
    assert unknown == comparing.Pair("no such row", None, None)


def test_a_ratio_is_that_of_runs_that_took_turns() -> None:
    pair = comparing.Pair("a", Times([2.0], [1.0, 4.0, 1.0]), Times([1.0], [2, 2, 3]))
    assert pair.ratios == (0.5, 2.0)
    line = comparing.format_pair(pair).split()
    assert line == ["a", *"2 s 1 s 0.500x 1 s 2 s 2.000x".split()]
    fails = comparing.Pair("b", None, pair.new)
    assert comparing.format_pair(fails).split() == ["b", *"- 1 s - - 2 s -".split()]
    means = comparing.format_means([pair, fails])
    assert means.split() == ["geometric", "mean", "0.500x", "2.000x"]
    assert comparing.format_means([fails]) == "no row that both states run"


def test_an_unknown_revision_is_an_error_of_git() -> None:
    with (
        pytest.raises(SystemExit, match=r"no-such-revision|not a git repository"),
        comparing.sources_of("no-such-revision"),
    ):
        pass
