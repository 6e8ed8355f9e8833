"""The table of workarounds: each row can be switched off by name, and its test is red without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mxnet as mx
import pytest
from oracle import S, nodes
from processes import ROOT

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.kernels.table import WORKAROUNDS


def test_names_are_unique_and_effects_are_one_of_three():
    assert len({row.name for row in WORKAROUNDS}) == len(WORKAROUNDS)
    assert {row.effect for row in WORKAROUNDS} == {"fails", "wrong", "slow"}


# A fork for each: what a row's absence breaks, or whom it kills, does not reach the next, and MXNet is loaded once.
WITHOUT_EACH = """
import json, os, sys
import hypothesis, pytest
import mxmp

switch, *rows = sys.argv[1:]
codes = {}
for name, test in zip(rows[::2], rows[1::2]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.environ[switch] = name
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", test])
        sys.stdout.flush()
        os._exit(code)
    codes[name] = os.waitpid(child, 0)[1]
print(json.dumps(codes))
"""


def test_the_test_of_each_row_is_red_without_it():
    rows = [text for row in WORKAROUNDS for text in (row.name, row.test)]
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EACH, SWITCH, *rows]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    codes = json.loads(run.stdout.splitlines()[-1])
    assert list(codes) == [row.name for row in WORKAROUNDS]
    red = {
        name: os.WIFSIGNALED(code) or os.WEXITSTATUS(code) == pytest.ExitCode.TESTS_FAILED
        for name, code in codes.items()
    }
    assert all(red.values()), (red, run.stdout[-8000:])


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
