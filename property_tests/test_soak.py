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
    "cheap": 200,
    "all": 20,
    "aliasing": 25,
    "vmap": 20,
    "derivatives": 30,
    "derivatives elsewhere": 15,
    "sizes": 15,
    "products": 15,
    "special": 20,
    "large": 25,
    "nested": 3,
}
"""By profile: so many that none of them takes much longer than another."""


@pytest.mark.parametrize("part", ROUNDS, ids=lambda p: f"{p.profile}, {p.kind}")
def test_programs_mean_the_same_everywhere(part: Round, tmp_path: Path) -> None:
    limit = Limit(programs=PROGRAMS[part.profile])
    campaign = run(limit, 0, tmp_path, rounds=[part])
    assert not campaign.failures
