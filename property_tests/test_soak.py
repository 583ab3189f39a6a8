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
    "cheap": 400,
    "all": 50,
    "vmap": 50,
    "derivatives": 80,
    "derivatives elsewhere": 40,
    "sizes": 40,
    "special": 40,
    "large": 60,
    "nested": 10,
}
"""By profile: so many that none of them takes much longer than another."""


@pytest.mark.parametrize("part", ROUNDS, ids=lambda p: f"{p.profile}, {p.kind}")
def test_programs_mean_the_same_everywhere(part: Round, tmp_path: Path) -> None:
    limit = Limit(programs=PROGRAMS[part.profile])
    campaign = run(limit, 0, tmp_path, rounds=[part])
    assert not campaign.failures
