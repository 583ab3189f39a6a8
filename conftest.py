"""For every test in the repository: a mark `requires(...)` skips where it must."""

import pytest

from hopflow.testing.requires import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("requires"):
            if reason := missing(*mark.args):
                item.add_marker(pytest.mark.skip(reason=reason))
