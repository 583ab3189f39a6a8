"""`hopflow fuzz`: what it keeps, counts and finds."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from property_tests.trees import steps_of

from hopflow.agreement import Expected
from hopflow.testing import fuzz
from hopflow.testing.checks import Disagreement, Report
from hopflow.testing.fuzz import ROUNDS, Campaign, Limit, Round, run
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Body, Name, Program
from hopflow.testing.program_text import from_text
from hopflow.testing.recorder import record
from hopflow.testing.strategies import KINDS

pytestmark = pytest.mark.slow

QUICK = [Round("quick", "exact", {"dtypes": ["int64"]}, ["debug"])]


def test_a_campaign_keeps_the_first_program_of_each_rule(tmp_path: Path) -> None:
    campaign = run(Limit(programs=32), 5, tmp_path, rounds=QUICK)
    assert campaign.programs["quick"] == campaign.counts["debug"] == 32
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["programs"] == {"quick": 32}
    assert summary["seeds"] == [5, 7]
    assert not campaign.failures
    for operator, rule in campaign.coverage:
        text = (tmp_path / "corpus" / f"{operator}-{rule}.py").read_text()
        assert operator in from_text(text).operations


def test_what_was_done_is_known_of_a_campaign_that_is_killed(tmp_path: Path) -> None:
    told: list[Any] = []

    def look(*_: Any) -> None:
        told.append(json.loads((tmp_path / "summary.json").read_text()))

    run(Limit(programs=32), 5, tmp_path, look, rounds=QUICK)
    assert told[0]["programs"] == {}
    assert told[-1]["programs"] == {"quick": 30}
    assert told[-1]["seeds"] == [5, 6]


def test_what_failed_is_kept_as_a_script_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "invoke_subgraph", lambda _, f, *xs: xs)
    options = {"operators": ["subgraph"], "operations": ["add"], "depth": 1}
    rounds = [Round("quick", "exact", options, ["debug"])]
    campaign = run(Limit(programs=20), 0, tmp_path, rounds=rounds)
    assert campaign.failures
    script = next(iter(campaign.failures.values()))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr  # there is no fault in this process
    with pytest.raises(Disagreement):
        runpy.run_path(str(script))
    kept = script.with_name(script.name.removeprefix("check_"))
    assert "invoke_subgraph" in from_text(kept.read_text()).operations


def test_another_campaign_leaves_what_is_kept_as_it_is(tmp_path: Path) -> None:
    kept: list[Path] = []
    for name in ("x0", "x1", "x1"):
        given = Argument(name, np.zeros(3))
        program = Program((given,), Body("program", (Name(name),), (), (Name(name),)))
        campaign = Campaign(tmp_path)
        campaign.failed(Disagreement(program, "a/b", "it is wrong"))
        kept += campaign.failures.values()
    first, second, again = kept
    assert again == second != first
    assert first.parent == second.parent == tmp_path / "failures"
    assert "def program(x0)" in first.read_text()
    assert "def program(x1)" in second.read_text()


@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        ("debug", "['debug'], ['value']"),
        ("jit, 2 threads of jvp of grad", "['jit, 2 threads'], ['jvp of grad']"),
        ("differences of grad", "[], ['grad']"),
        ("reference", "[], ['vmap', 'grad']"),
    ],
)
def test_the_script_of_a_failure_compares_again_what_failed(
    label: str, wanted: str, tmp_path: Path
) -> None:
    kind, given = KINDS["smooth"], [Argument("x0", np.ones(3))]
    program = record(kind, steps_of([("map", (0, 0, 0, 0), [])]), given)
    campaign = Campaign(tmp_path)
    campaign.failed(Disagreement(program, label, "it is wrong"), ("vmap", "grad"))
    [script] = campaign.failures.values()
    source = script.read_text()
    assert source.endswith(f"check(from_text(text), {wanted})\n")
    exec(source, {})


def test_a_failure_that_is_being_made_small_outlives_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Program] = []

    def wrong(program: Program, *_: Any) -> Any:
        shown.append(program)
        if len(shown) > 4:
            raise KeyboardInterrupt
        raise Disagreement(program, "debug", "a fault")

    monkeypatch.setattr(fuzz, "check", wrong)
    with pytest.raises(KeyboardInterrupt):
        run(Limit(programs=20), 0, tmp_path, rounds=QUICK)
    [kept] = (tmp_path / "failures").glob("debug*.py")
    assert from_text(kept.read_text()).script() == shown[3].script()
    assert (
        "debug: a fault"
        in json.loads((tmp_path / "summary.json").read_text())["failures"]
    )


@pytest.mark.parametrize(
    ("part", "where"), [(Expected, "reference"), (Program, "drawing")]
)
def test_what_fails_before_anything_is_compared_is_kept_and_does_not_end_it(
    part: type, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr(part, "__init__", broken)
    campaign = run(Limit(programs=2), 3, tmp_path, rounds=QUICK)
    assert campaign.programs == {"quick": 2}
    assert campaign.seeds == (3, 5)
    [(what, path)] = campaign.failures.items()
    assert what == f"{where}: KeyError: 'a fault'"
    assert (path.suffix == ".py") == (where == "reference")
    name = path.stem.removeprefix("check_")
    told = path.with_name(f"{name}.txt").read_text()
    assert "in broken" in told
    assert "seed 3" in told


@pytest.mark.parametrize(("dtype", "count"), [("float64", 1), ("int64", 0)])
def test_a_derivative_exercises_operators_of_floats_alone(
    dtype: str, count: int, tmp_path: Path
) -> None:
    kind, given = KINDS["smooth"], [Argument("x0", np.ones(3, dtype))]
    program = record(kind, steps_of([("map", (0, 0, 0, 0), [])]), given)
    campaign = Campaign(tmp_path)
    campaign.note("quick", program, Report(agreed=["debug", "jit of grad"]))
    assert campaign.coverage["map", "debug"] == 1
    assert campaign.coverage["map", "vjp"] == count


def test_rules_that_nobody_exercised_are_told(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    assert ("while_loop", "vjp") in campaign.empty_cells()
    assert ("custom_vjp", "jvp") not in campaign.empty_cells()


@pytest.mark.parametrize(
    ("profile", "rules"),
    [
        ("cheap", {"debug", "infer", "functionalize"}),
        ("vmap", {"batch"}),
        ("derivatives", {"jvp", "vjp", "jvp of vjp"}),
        ("derivatives elsewhere", {"jvp", "vjp", "jvp of vjp"}),
    ],
)
def test_a_profile_leaves_out_rules_that_it_cannot_exercise(
    profile: str, rules: set[str]
) -> None:
    assert set().union(*(p.rules() for p in ROUNDS if p.profile == profile)) == rules


@pytest.mark.parametrize(
    "part", ROUNDS, ids=lambda part: f"{part.profile}, {part.kind}"
)
def test_every_round_can_be_drawn(part: Round, tmp_path: Path) -> None:
    campaign = run(Limit(programs=2), 0, tmp_path, rounds=[part])
    assert campaign.programs == {part.profile: 2}
