"""The table of workarounds: each row can be switched off by name, and its test is red without it."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.oracle import S, nodes
from support.left_out import TESTS, exit_codes, seen_here

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.kernels.table import WORKAROUNDS
from mxmp.versions import NUMBERS

# What a version of MXNet computes without a workaround, on a CPU without AVX-512 at least.
NOT_NEEDED = {(1, 7, 0): {"volume_norms", "deconvolution_in_float64"}, (1, 8, 0): {"deconvolution_in_float64"}}


def test_names_are_unique_effects_are_one_of_three_and_each_row_has_a_test():
    assert len({row.name for row in WORKAROUNDS}) == len(WORKAROUNDS)
    assert {row.name for row in WORKAROUNDS} == TESTS.keys()
    assert {row.effect for row in WORKAROUNDS} == {"fails", "wrong", "slow"}


@pytest.mark.slow
def test_the_test_of_each_row_is_red_without_it_and_green_with_it():
    codes, printed = exit_codes(seen_here())
    assert codes.pop("") == pytest.ExitCode.OK, printed[-4000:]
    green = {name for name, code in codes.items() if code not in ("killed", pytest.ExitCode.TESTS_FAILED)}
    assert green - NOT_NEEDED.get(NUMBERS, set()) == set()


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
