"""Tests in a process whose fresh memory holds 3.4e38, as only malloc can do: what reads unwritten memory shows."""

from __future__ import annotations

import os

import pytest
from processes import run_tests

in_poisoned_memory = pytest.mark.skipif("MXMP_POISONED" not in os.environ, reason="run by the test of poisoned memory")


def run_poisoned(config: pytest.Config, file: str, tests: str) -> None:
    """Run the tests of a file that match."""
    run_tests(config, "-k", tests, file, MALLOC_PERTURB_="128", MXMP_POISONED="1")
