"""How hard Hypothesis tries: `HYPOTHESIS_PROFILE=dev make test`.

ci      the default: the same examples in each run, so a red run is red again
quick   a few of those, for a second Python
dev     new examples in each run, and a database of the ones that failed
fuzz    as many as an evening allows
"""

import os

from hypothesis import HealthCheck, Phase, settings

# A first call compiles: what an example costs says nothing about it.
common = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

settings.register_profile("ci", common, derandomize=True, print_blob=True)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=10)
settings.register_profile("dev", common)
settings.register_profile(
    "fuzz",
    common,
    max_examples=20_000,
    stateful_step_count=100,
    phases=[Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
