"""`hopflow fuzz --speed`: what is slower than JAX is found, made small and filed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hopflow.testing import speed
from hopflow.testing.fuzz import Campaign, Limit, Round, drawn
from hopflow.testing.program import Program
from hopflow.testing.program_text import from_text
from hopflow.testing.requires import load
from hopflow.testing.transforms import Transform

pytestmark = pytest.mark.slow

FAST = speed.Times([1e-3] * 5, [2e-3] * 5, (0.1, 0.2))
SLOW = speed.Times([3e-3] * 5, [1e-3] * 5, (0.1, 0.2))


SMALL = Round("speed", "exact", speed.SIZED, [], ["value"])


def slow_with(operation: str) -> Any:
    """Times as if programs with an operation were slower."""

    def timed(program: Program, _: Transform) -> speed.Times:
        return SLOW if operation in program.operations else FAST

    return timed


@pytest.mark.parametrize("operation", ["argmin", "scan"])
def test_a_cliff_is_found_and_filed_by_its_cause(
    tmp_path: Path, operation: str
) -> None:
    search = speed.Search(Campaign(tmp_path), timed=slow_with(operation))
    search.run(Limit(programs=300), 0, rounds=[SMALL])
    assert search.slower
    [cause] = search.cliffs
    parts = cause.removeprefix("value: ").split(", ")
    assert operation in parts
    assert len(parts) <= 6  # what a scan is made of, and no more
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found["cliffs"] == search.cliffs
    assert found["measured"] == len(search.ratios)
    [kept] = (tmp_path / "cliffs").glob("*.py")
    assert operation in from_text(kept.read_text()).operations
    assert cause in search.summary()


def test_a_cliff_that_is_fast_at_last_is_filed_as_it_was(tmp_path: Path) -> None:
    """Times differ from run to run: what Hypothesis runs once more may be fast."""
    slow = slow_with("argmin")
    counts: list[Program] = []

    def timed(program: Program, transform: Transform) -> speed.Times:
        times = slow(program, transform)
        if times is SLOW:
            counts.append(program)
        return times if len(counts) < 24 else FAST

    search = speed.Search(Campaign(tmp_path), timed=timed)
    search.run(Limit(programs=300), 0, rounds=[SMALL])
    assert not search.campaign.failures
    [cause] = search.cliffs
    assert "argmin" in cause
    assert len(list((tmp_path / "cliffs").glob("*.py"))) == 1


def test_what_is_as_fast_is_no_cliff(tmp_path: Path) -> None:
    search = speed.Search(Campaign(tmp_path), timed=lambda *_: FAST)
    search.run(Limit(programs=40), 0, rounds=[SMALL])
    assert (search.slower, search.cliffs) == ([], {})
    assert "0 (0.0%)" in search.summary()


@pytest.mark.parametrize(
    ("ours", "theirs", "is_slower"),
    [
        ([3.0, 3.1], [1.0, 1.1], True),
        ([1.0, 3.1], [1.0, 1.1], False),  # one of ours is fast: it may be noise
        ([1.1, 1.1], [1.0, 1.3], False),
        ([3e-6, 3e-6], [1e-6, 1e-6], False),  # a call
    ],
)
def test_only_what_is_beyond_noise_is_slower(
    ours: list[float], theirs: list[float], is_slower: bool
) -> None:
    assert speed.Times(ours, theirs, (1.0, 1.0)).is_slower(1.2) is is_slower


@pytest.mark.parametrize("transform", ["value", "vmap", "grad"])
def test_programs_are_timed_beside_jax(transform: str) -> None:
    found: list[speed.Times] = []
    part = dataclasses.replace(SMALL, kind="smooth")

    def measure(program: Program) -> None:
        times = speed.timed(program, Transform(transform), seconds=0.001)
        found.extend([] if times is None else [times])

    drawn(part, 0, measure, 4)
    assert found
    assert all(min(t.ours) > 0 < min(t.theirs) and min(t.first) > 0 for t in found)


@pytest.mark.parametrize("is_memory", [False, True])
def test_what_jax_has_no_memory_for_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, is_memory: bool
) -> None:
    jax = load("jax")
    text = "RESOURCE_EXHAUSTED: Out of memory" if is_memory else "INTERNAL: a defect"

    def wait(_: Any) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax, "block_until_ready", wait)
    finder = Path(__file__).parent / "finders" / "mask_slip.txt"
    program = from_text(finder.read_text())
    if is_memory:
        assert speed.timed(program, Transform("value")) is None
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        speed.timed(program, Transform("value"))
