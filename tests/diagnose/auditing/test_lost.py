"""What an operator's rounding has lost, by name."""

from __future__ import annotations

import pytest
from support.plants.kinds import PLANTS, audited


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("sigmoid", "saturated"),
        ("clip", "constant rounded"),
        ("kelvin", "cancelled"),
        ("position", "integer rounded"),
        ("large", "overflowed"),
        ("9e-8", "underflowed"),
    ],
)
def test_the_report_says_what_was_lost(name, lost):
    plant = next(each for each in PLANTS if each.name == name)
    assert audited(plant, plant.dtypes[0]).findings[0].lost == lost
