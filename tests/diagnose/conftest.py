"""The plants of these tests lose digits of their data on purpose: the first call warns of it, as it should."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "diagnose" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*goes as it is into:UserWarning"))
