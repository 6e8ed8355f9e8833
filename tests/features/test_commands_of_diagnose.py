"""``python -m mxmp advise`` and ``profile``."""

from __future__ import annotations

import os
from dataclasses import replace

import mxnet as mx
import pytest
from kit.exports import write_database

from mxmp.__main__ import main
from mxmp.diagnose import advise, profile


@pytest.fixture
def folder(tmp_path, monkeypatch):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=33_278, name="decoder")
    symbol.save(str(tmp_path / "net-symbol.json"))
    monkeypatch.chdir(tmp_path)
    write_database("report.sqlite")
    return tmp_path


ADVISE = ["advise", "net-symbol.json", "--shape", "data=32,64"]


def test_advise_prints_what_python_finds(folder, capsys):
    assert main([*ADVISE, "--device", "a100"]) == 0
    out = capsys.readouterr().out
    found = advise(mx.sym.load("net-symbol.json"), device="a100", data=(32, 64))
    assert out == f"{replace(found, name='net')}\n"  # by the file
    assert "33,278 -> 33,280" in out


def test_advise_follows_the_policy(folder, capsys):
    assert main([*ADVISE, "--exclude", "decoder"]) == 0
    assert "\n  0.0% of them can run on Tensor Cores" in capsys.readouterr().out


def test_profile_prints_what_python_reads(folder, capsys):
    assert main(["profile", "report.sqlite"]) == 0
    out = capsys.readouterr().out
    assert out == f"{profile('report.sqlite')}\n"
    assert "80.0% on Tensor Cores" in out


BAD = {
    "unknown input": (["advise", "net-symbol.json", "--shape", "dta=2,2"], "no input 'dta'; did you mean 'data'"),
    "bfloat16": ([*ADVISE, "--policy", "bfloat16"], "use 'float16'"),
    "no profile": (["profile", "net-symbol.json"], "no SQLite export of Nsight Systems"),
    "no file": (["profile", "none.sqlite"], "none.sqlite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(folder, capsys, case):
    arguments, message = BAD[case]
    before = sorted(os.listdir(folder))
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert sorted(os.listdir(folder)) == before
