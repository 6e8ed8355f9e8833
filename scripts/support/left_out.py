"""The tests of workarounds, each run without its workaround."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Sequence

from mxmp import cpu
from mxmp.kernels.table import WORKAROUNDS, Workaround
from support.results import ROOT

# MXNet and the tests are loaded once, and each row has a fork of its own: what it breaks does not reach the next.
_FORKS = """
import json, os, sys
import pytest

def run(*arguments):
    # Loaded before the fork, and rewritten there.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", ignored, *arguments])

tests_of = json.loads(sys.argv[1])
run("--collect-only", *tests_of[""])
codes = {}
for name, tests in tests_of.items():
    child = os.fork()
    if not child:
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.environ["MXMP_WITHOUT"] = name
            code = run(*tests)
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    codes[name] = "killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
print(json.dumps(codes))
"""
# Faults of oneDNN's bfloat16 kernels, or of casts beside them, that cannot be seen where these are emulated.
_NEED_AVX512 = {"unused_taps", "copies_before_casts", "reshaped_volumes", "reshaped_gradients"}


def seen_here() -> list[Workaround]:
    """Return the rows whose faults this machine's CPU can show; those of a GPU have their tests in tests/nullgpu."""
    unseen = set() if cpu.multiplies_bfloat16() else _NEED_AVX512
    return [row for row in WORKAROUNDS if "cpu" in row.devices and row.name not in unseen]


def exit_codes(rows: Sequence[Workaround]) -> tuple[dict[str, int | str], str]:
    """Return pytest's exit code, or "killed", of each row's test without the row, of all with all rows as ``""``;
    and what was printed."""
    tests = {row.name: [row.test] for row in rows}
    # The tests of poisoned memory have processes of their own.
    tests[""] = sorted({row.test for row in rows if "memory_that_was_never_written" not in row.test})
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, json.dumps(tests)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1]), run.stdout
