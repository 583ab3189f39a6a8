"""The same programs in each run, for each kind of comparison."""

from pathlib import Path
from typing import Final

import pytest

from hopflow.testing.fuzz import ROUNDS, Limit, Round, run

pytestmark = [
    *(pytest.mark.soak, pytest.mark.slow),
    pytest.mark.usefixtures("guarded"),
]

PROGRAMS: Final = {
    "cheap": 250,
    "all": 35,
    "aliasing": 40,
    "vmap": 35,
    "derivatives": 50,
    "derivatives elsewhere": 25,
    "sizes": 25,
    "special": 30,
    "large": 40,
    "nested": 6,
}
"""By profile: so many that none of them takes much longer than another."""


@pytest.mark.parametrize("part", ROUNDS, ids=lambda p: f"{p.profile}, {p.kind}")
def test_programs_mean_the_same_everywhere(part: Round, tmp_path: Path) -> None:
    limit = Limit(programs=PROGRAMS[part.profile])
    campaign = run(limit, 0, tmp_path, rounds=[part])
    assert not campaign.failures
