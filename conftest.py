"""For every test in the repository: a mark `requires(...)` skips where it must, and
`ctrl_c` is for tests that interrupt themselves; `verified` for what is compiled."""

import os
import signal
from collections.abc import Iterator

import pytest

from hopflow.config import config
from hopflow.testing.requires import missing

# Most of what JAX compiles for us runs once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("requires"):
            if reason := missing(*mark.args):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def verified() -> Iterator[None]:
    """The verifiers of every IR run between all passes."""
    before, config.verify = config.verify, True
    yield
    config.verify = before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the suite runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
