"""Tests and programs in a process of their own, for what must be in the environment before a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
in_poisoned_memory = pytest.mark.skipif("MXMP_POISONED" not in os.environ, reason="run by the test of poisoned memory")


def run_tests(config: pytest.Config, *arguments: str, **environment: str) -> None:
    """Run pytest with these arguments and variables, and the profile of this run; raise an error if a test fails."""
    profile = config.getoption("--hypothesis-profile")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(
        [*command, f"--hypothesis-profile={profile}"] if profile else command,
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]


def run_poisoned(config: pytest.Config, file: str, tests: str) -> None:
    """Run the tests of a file that match, with 3.4e38 in fresh memory: what reads unwritten memory shows."""
    run_tests(config, "-k", tests, file, MALLOC_PERTURB_="128", MXMP_POISONED="1")


def run_program(*arguments: str, **environment: str) -> str:
    """Run Python with these arguments, such as ``"-c", code``, and variables; return what it printed.

    It imports this mxmp, shows no warnings, and has five minutes. Raises an error if it fails.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
