"""The table of workarounds: each row can be switched off by name, and its test is red without it."""

from __future__ import annotations

import json
import subprocess
import sys

import mxnet as mx
import pytest
from kit.oracle import S, nodes
from kit.processes import ROOT

import mxmp
from mxmp import cpu
from mxmp.kernels.fit import SWITCH
from mxmp.kernels.table import WORKAROUNDS


def test_names_are_unique_and_effects_are_one_of_three():
    assert len({row.name for row in WORKAROUNDS}) == len(WORKAROUNDS)
    assert {row.effect for row in WORKAROUNDS} == {"fails", "wrong", "slow"}


# MXNet and the tests are loaded once, and each row has a fork of its own: what it breaks does not reach the next.
FORKS = """
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


def unseen() -> set[str]:
    """Faults of oneDNN's bfloat16 kernels, or of casts beside them, that cannot be seen where these are emulated."""
    faults = {"unused_taps", "copies_before_casts", "reshaped_volumes", "reshaped_gradients"}
    return set() if cpu.multiplies_bfloat16() else faults


@pytest.mark.slow
def test_the_test_of_each_row_is_red_without_it_and_green_with_it():
    # Those of a GPU have theirs in tests/nullgpu.
    rows = [row for row in WORKAROUNDS if "cpu" in row.devices and row.name not in unseen()]
    tests = {row.name: [row.test] for row in rows}
    # Nothing is switched off. The tests of poisoned memory have processes of their own.
    tests[""] = sorted({row.test for row in rows if "memory_that_was_never_written" not in row.test})
    command = [sys.executable, "-W", "ignore", "-c", FORKS, json.dumps(tests)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    codes = json.loads(run.stdout.splitlines()[-1])
    assert codes.pop("") == pytest.ExitCode.OK, run.stdout[-4000:]
    green = {name: code for name, code in codes.items() if code not in ("killed", pytest.ExitCode.TESTS_FAILED)}
    assert green == {}


def test_a_workaround_is_switched_off_by_its_name(monkeypatch):
    symbol = S.FullyConnected(S.tanh(S.FullyConnected(S.var("data"), num_hidden=4)), num_hidden=4)
    monkeypatch.setenv(SWITCH, "rounding_operators,untrained_weights")
    found = {node["op"] for node in nodes(mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu()))}
    assert "tanh" in found
    assert "amp_multicast" not in found


def test_an_unknown_name_is_refused_with_those_that_exist(monkeypatch):
    monkeypatch.setenv(SWITCH, "roundings")
    with pytest.raises(ValueError, match=r"no workaround 'roundings'; there are .*'rounding_operators'"):
        mxmp.cast_symbol(S.FullyConnected(S.var("data"), num_hidden=4), "bfloat16", ctx=mx.cpu())
