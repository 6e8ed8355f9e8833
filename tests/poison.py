"""Tests in a process whose fresh memory holds 3.4e38, as only malloc can do: what reads unwritten memory shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["in_poisoned_memory", "run_poisoned"]

in_poisoned_memory = pytest.mark.skipif("MXMP_POISONED" not in os.environ, reason="run by the test of poisoned memory")


def run_poisoned(file: str, tests: str) -> None:
    """Run the tests of a file that match."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", tests, file],
        env={**os.environ, "MALLOC_PERTURB_": "128", "MXMP_POISONED": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
