"""For every test in the repository: a mark `requires(...)` skips where it must, and
`ctrl_c` is for tests that interrupt themselves; `verified` for what is compiled.

How hard Hypothesis tries: `HYPOTHESIS_PROFILE=dev make test`.

ci      the default: the same examples in each run, so a red run is red again
quick   a few of those, for a second Python
dev     new examples in each run, and a database of the ones that failed
fuzz    as many as an evening allows
"""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from hopflow.config import config
from hopflow.testing.requires import missing

# Tests compile what they run, and so do the processes that they start.
os.environ["HOPFLOW_CACHE_DIR"] = config.cache_dir = ""

# Most of what JAX compiles for us runs once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# A first call compiles: what an example costs says nothing about it.
common = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

settings.register_profile(
    "ci", common, max_examples=40, derandomize=True, print_blob=True
)
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="of each test function, run the first case and every N-th one after it",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    session: pytest.Session, items: list[pytest.Item]
) -> None:
    step, places = session.config.getoption("--one-in"), Counter[str]()
    left_out: dict[pytest.Item, None] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        if places[function] % step:
            left_out[item] = None
        places[function] += 1
    if left_out:
        session.config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        for mark in item.iter_markers("requires"):
            if reason := missing(*mark.args):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave the tests, millions of objects, out of garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def guarded() -> Iterator[None]:
    """Native code that reads or writes beside its buffers ends the process."""
    before, config.guard_pages = config.guard_pages, True
    yield
    config.guard_pages = before


@pytest.fixture
def verified(guarded: None) -> Iterator[None]:  # noqa: ARG001
    """The verifiers of every IR run between all passes. For other tests of a module
    they would take up to ten times as long as what they verify."""
    before, config.verify = config.verify, True
    yield
    config.verify = before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the suite runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
