"""``python -m mxmp advise``, ``profile`` and ``plot``."""

from __future__ import annotations

import json
import os
import sys

import mxnet as mx
import pytest

from mxmp.__main__ import main
from mxmp.diagnose import Advice, Profile, advise, load, profile

EVENTS = [
    {"name": name, "cat": "operator", "ph": phase, "ts": ts, "pid": 0, "tid": 1}
    for name, begin, end in (("Convolution", 0, 30), ("Cast", 30, 40))
    for phase, ts in (("B", begin), ("E", end))
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=33_278, name="decoder")
    symbol.save(str(tmp_path / "net-symbol.json"))
    (tmp_path / "profile.json").write_text(json.dumps({"traceEvents": EVENTS}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


ADVISE = ["advise", "net-symbol.json", "--shape", "data=32,64"]


def test_advise_prints_and_saves_what_python_finds(folder, capsys):
    assert main([*ADVISE, "--device", "a100", "--save", "advice.json"]) == 0
    out = capsys.readouterr().out
    found = load("advice.json")
    assert isinstance(found, Advice)
    assert found == advise(mx.sym.load("net-symbol.json"), device="a100", data=(32, 64))
    assert out == f"{found}\n\nWrote advice.json\n"
    assert "33,278 -> 33,280" in out


def test_advise_follows_the_policy(folder, capsys):
    assert main([*ADVISE, "--exclude", "decoder"]) == 0
    assert "\n  0.0% of them can run on Tensor Cores" in capsys.readouterr().out


def test_profile_prints_and_saves_what_python_reads(folder, capsys):
    assert main(["profile", "profile.json", "--save", "saved.json"]) == 0
    found = load("saved.json")
    assert isinstance(found, Profile)
    assert found == profile("profile.json")
    out = capsys.readouterr().out
    assert "75.0% matrix operators" in out
    assert "25.0% casts" in out


@pytest.mark.parametrize("picture", ["picture.png", "picture.svg"])
@pytest.mark.parametrize("command", [ADVISE, ["profile", "profile.json"]])
def test_plot_draws_a_saved_report(folder, capsys, command, picture):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'mxmp[plots]'")
    assert main([*command, "--save", "report.json"]) == 0
    assert main(["plot", "report.json", picture]) == 0
    start = (folder / picture).read_bytes()[:100]
    assert start.startswith(b"\x89PNG" if picture.endswith("png") else b"<?xml")


BAD = {
    "unknown input": (["advise", "net-symbol.json", "--shape", "dta=2,2"], "no input 'dta'; did you mean 'data'"),
    "bfloat16": ([*ADVISE, "--policy", "bfloat16"], "use 'float16'"),
    "no profile": (["profile", "net-symbol.json"], "no Chrome trace"),
    "no file": (["profile", "none.sqlite"], "none.sqlite"),
    "no folder": ([*ADVISE, "--save", "none/advice.json"], "none/advice.json"),
    "no report": (["plot", "net-symbol.json", "out.png"], "no report that was saved by mxmp"),
    "no picture": (["plot", "advice.json", "out.txt"], "ends with .png, .svg or .pdf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(folder, capsys, case):
    arguments, message = BAD[case]
    advise(mx.sym.load("net-symbol.json"), data=(2, 2)).save("advice.json")
    before = sorted(os.listdir(folder))
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert sorted(os.listdir(folder)) == before


def test_without_matplotlib_the_extra_is_named(folder, capsys, monkeypatch):
    assert main([*ADVISE, "--save", "advice.json"]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "advice.json", "out.png"]) == 2
    assert "pip install 'mxmp[plots]'" in capsys.readouterr().err
    assert not (folder / "out.png").exists()
