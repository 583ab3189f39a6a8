"""Every planted fault is found within 2,000 programs, and none is left behind.

In `finders` is, for each fault, a small program that finds it alone: what was drawn and
made smaller. When a fault is another, draw and keep its finder anew.
"""

from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from hopflow.testing.checks import Disagreement, check
from hopflow.testing.mutants import MUTANTS
from hopflow.testing.program import Program
from hopflow.testing.program_text import from_text
from hopflow.testing.strategies import programs

pytestmark = [
    pytest.mark.soak,
    # A program that is found is as long as it was drawn.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

FINDERS: Final = Path(__file__).parent / "finders"

PLAN = settings(
    max_examples=2000,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    mutant = MUTANTS[name]

    def is_wrong(program: Program) -> bool:
        try:
            check(program, mutant.executions, mutant.transforms)
        except Disagreement:
            return True
        return False

    with mutant.planted():
        found = find(programs(mutant.kind, **mutant.options), is_wrong, settings=PLAN)
    # It is the fault that is found, and it is gone.
    check(found, mutant.executions, mutant.transforms)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_by_its_finder(name: str) -> None:
    mutant = MUTANTS[name]
    finder = from_text((FINDERS / f"{name.replace(' ', '_')}.txt").read_text())
    with mutant.planted(), pytest.raises(Disagreement):
        check(finder, mutant.executions, mutant.transforms)
    report = check(finder, mutant.executions, mutant.transforms)
    assert report.agreed
    assert not report.tie


@pytest.mark.parametrize("name", ["wrong transpose", "unsummed broadcast"])
def test_a_fault_of_all_derivatives_is_found_by_differences(name: str) -> None:
    mutant = MUTANTS[name]
    finder = from_text((FINDERS / f"{name.replace(' ', '_')}.txt").read_text())
    with (
        mutant.planted(),
        pytest.raises(Disagreement, match="differences of grad: derivative 0 is"),
    ):
        check(finder, ["debug"], ["grad"])
    assert check(finder, ["debug"], ["grad"]).agreed == [
        "differences of grad",
        "debug of grad",
    ]
