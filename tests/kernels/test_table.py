"""The table of workarounds: each row can be switched off by name, and its test is red without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest
from oracle import S, nodes
from pages import workarounds

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.kernels.table import WORKAROUNDS

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_unique_and_effects_are_one_of_three():
    assert len({row.name for row in WORKAROUNDS}) == len(WORKAROUNDS)
    assert {row.effect for row in WORKAROUNDS} == {"fails", "wrong", "slow"}


@pytest.mark.parametrize("row", WORKAROUNDS, ids=lambda row: row.name)
def test_the_test_of_a_row_is_red_without_it(row):
    environment = {**os.environ, SWITCH: row.name}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", row.test]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode not in (0, 2, 4, 5), run.stdout[-2000:]  # 1: a test failed; negative: the process died


def test_the_page_of_the_manual_is_made_of_the_table():
    assert (ROOT / "docs" / "workarounds.md").read_text(encoding="utf-8") == workarounds.render()


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
