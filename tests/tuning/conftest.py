"""Fixtures for tests that tune."""

from __future__ import annotations

import sys

import pytest
from kit.measuring import FEW, measured_here

from mxmp.tuning import process, search


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    """Measure a few times only, in this process and in the one that ``tune`` starts."""
    for name, value in FEW.items():
        monkeypatch.setattr(search, name, value)
    patch = f"from mxmp.tuning import search; vars(search).update({FEW}); "
    monkeypatch.setattr(process, "START", process.START.replace("main()", patch + "main()"))


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(sys.modules["mxmp.tuning.tune"], "measured_apart", measured_here)
