"""`make test-leaks`: any process is killed at any time, and nothing is left behind."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "leaks" in item.path.parts:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.temporal)
