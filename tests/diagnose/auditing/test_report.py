"""The report of audit: patterns that cure, and what it says of a healthy network."""

from __future__ import annotations

import pytest

from mxmp.diagnose.auditing.audit import pattern_for


@pytest.mark.parametrize(
    ("name", "pattern"), [("fc", "fc"), ("fc:1", "fc"), ("loop/body/fc", "fc"), ("a[0]", "a[[]0]")]
)
def test_a_pattern_names_the_node(name, pattern):
    assert pattern_for(name) == pattern
